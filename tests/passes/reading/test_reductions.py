"""The readers of sums along dimensions and of softmaxes, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from evaluation import Array
from reader_samples import INT32, Sample, below, compare, ints, positive, s, scalar, x


def halves(*sizes: int) -> Array:
    return np.full(sizes, 0.5)


def _read() -> Iterator[Sample]:
    for op in ("Softmax", "LogSoftmax"):
        yield s(op, x("N", 3))
        yield s(op, x("N", 3), axis=0)
        yield s(op, x("N", 3, "M"), axis=1)
        yield s(op, x(2, 3, 4), axis=-2)
        yield s(op, x(2, 1))
        yield s(op, x(2, 3, 4))
    yield s("SoftmaxCrossEntropyLoss", x("N", 3), below(3, "N"), outputs=(False, True))
    yield s("SoftmaxCrossEntropyLoss", x(2, 3, "N"), below(3, 2, "N"), outputs=(False, True), reduction="none")
    for op in ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"):
        own = positive if op == "ReduceLogSum" else x
        yield s(op, own("N", 3), ints(1))
        yield s(op, own("N", 3), ints(-1), keepdims=0)
        yield s(op, own("N", 3), ints(0), keepdims=0)
        yield s(op, own("N", 3, "M"), ints(0, -1))
        yield s(op, own("N", 3, 2), ints(2, 0), keepdims=0)
        yield s(op, own("N", 3))
        yield s(op, own("N", 3), None, keepdims=0)
        yield s(op, own(2, 1, 3), ints(1), keepdims=0)
        if op in ("ReduceSum", "ReduceMean"):
            yield s(op, own("N", 3), noop_with_empty_axes=1)
            yield s(op, own("N", 3), ints(1), noop_with_empty_axes=1)
        if op != "ReduceSum":
            yield s(op, own("N", 3, 2), opset=17, axes=[1])
            yield s(op, own("N", 3, 2), opset=17, axes=[-1, 0], keepdims=0)
            yield s(op, own("N", 3), opset=17, keepdims=0)
    yield s("ReduceSum", below(9, "N", 3), ints(1))
    yield s("ReduceSum", x(4, 3), "AxesOfSizeOne", shapes=[(1, 3)], noop_with_empty_axes=1)
    yield s("ReduceSumSquare", below(9, "N", 3), ints(1), keepdims=0)
    yield s("GlobalAveragePool", x("N", 3, 4))
    yield s("GlobalAveragePool", x(2, "N", "M", 3))
    yield s("GlobalAveragePool", x(1, 3, 1, 2))
    yield s("AveragePool", x("N", 3, 4), kernel_shape=[4])
    yield s("AveragePool", x(2, 3, 4, 5), kernel_shape=[1, 5], strides=[1, 5])
    yield s("AveragePool", x(2, "N", 1, 3), kernel_shape=[1, 3], auto_pad="VALID", count_include_pad=1)
    yield s("AveragePool", x(2, 3, 12), kernel_shape=[4], strides=[4])
    yield s("Conv", x("N", 1, 4), halves(1, 1, 4))
    yield s("Conv", x("N", 6, 4, 5), halves(2, 3, 1, 5), group=2)
    yield s("Conv", x(2, 3, 12, 5), halves(3, 1, 4, 1), group=3, strides=[4, 1])
    yield s("Conv", x(2, 3, 4), halves(1, 3, 1))
    for reverse in (0, 1):
        for exclusive in (0, 1):
            yield s("CumSum", x("N", 3), scalar(1), reverse=reverse, exclusive=exclusive)
            yield s("CumSum", x("N", 3), ints(-2)[0], reverse=reverse, exclusive=exclusive)
    yield s("CumSum", x(3, 1), scalar(1))
    yield s("CumSum", below(4, "N"), scalar(0))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("ReduceMean", below(9, "N", 3), ints(1))
    yield s("ReduceL2", below(9, "N", 3, dtype=INT32), ints(1))
    yield s("ReduceLogSum", below(9, "N", 3, least=1, dtype=INT32), ints(1))
    yield s("AveragePool", x(2, 3, 4), kernel_shape=[2])
    yield s("AveragePool", x(2, 3, 4), kernel_shape=[4], pads=[1, 0])
    yield s("AveragePool", x(2, 3, 4), kernel_shape=[1], strides=[2])
    yield s("AveragePool", x(2, 3, 13), kernel_shape=[4], strides=[4])
    yield s("Conv", x(2, 1, 12), halves(1, 1, 4), strides=[3])
    yield s("Conv", x(2, 3, 4), halves(2, 3, 4))
    yield s("Conv", x(2, 1, 4), halves(1, 1, 4), halves(1))
    yield s("Conv", x(2, 1, 4), halves(1, 1, 4), pads=[1, 0])
    for operand, axis in (("Flat", 0), ("FlatRows", 0)):
        yield s("CumSum", operand, scalar(axis))
        yield s("CumSum", operand, scalar(axis), exclusive=1)


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
