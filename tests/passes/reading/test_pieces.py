"""The readers of operators that cut tensors to pieces, or put them together, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from reader_samples import Sample, compare, ints, s, scalar, x

MOST = (1 << 63) - 1


def _read() -> Iterator[Sample]:
    yield s("Slice", x("N", 4), ints(1), ints(3), ints(1))
    yield s("Slice", x("N", 4), ints(-2), ints(MOST), ints(-1))
    yield s("Slice", x("N", 4), ints(3), ints(-MOST), ints(1), ints(-2))
    yield s("Slice", x("N", 4), ints(0), ints(4), ints(1), ints(3))
    yield s("Slice", x(3, 4), ints(1, 0), ints(2, -1))
    yield s("Slice", x(3, 4, 2), ints(0, 1), ints(MOST, MOST), ints(0, 2))
    yield s("Slice", x("N", 4), ints(0), ints(MOST), ints(0))
    yield s("Slice", x("N", 4), ints(1), ints(MOST), ints(0))
    yield s("Slice", x("N", 4), ints(0), ints(-1), ints(0))
    yield s("Slice", x(1, 4), ints(0), ints(1), ints(0))
    yield s("Split", x("N", 5), ints(2, 3), outputs=(True, True), axis=1)
    yield s("Split", x(5, "N"), outputs=(True, True), num_outputs=2)
    yield s("Split", x("N", 4), ints(1, 3), outputs=(True, True), axis=-1)
    yield s("Split", x("N", 4), outputs=(True, True), opset=17, axis=1)
    yield s("Split", x(4, 2), ints(4), axis=0)
    yield s("Concat", x("N", 3), x("N", 2), axis=1)
    yield s("Concat", x("N", 3), x("N", 1), x("N", 2), axis=-1)
    yield s("Concat", x(3), axis=0)
    yield s("Concat", x(2, 3), np.zeros((0, 3)), axis=0)
    yield s("Concat", x("N", 3), x("M", 3), axis=0)
    yield s("Concat", x(1, 3), x(1, 3), axis=0)
    yield s("Pad", x("N", 3), ints(0, 1, 0, 2))
    yield s("Pad", x("N", 3), ints(0, 0, 0, 1), scalar(0.0))
    yield s("Pad", x("N", 3), ints(1, 0, 2, 0))
    yield s("Pad", x(1, 3), ints(1, 0, 0, 0))
    yield s("Pad", x("N", 3), ints(1, 2), None, ints(1))
    yield s("Pad", x("N", 3), ints(1, 0, 0, 2), None, ints(1, 0))
    yield s("Pad", x("N", 3), ints(0, 2), None, ints(-2))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Slice", x("N", 4), ints(0), ints(2), ints(0))
    yield s("Slice", x("N", 4), ints(-1), ints(MOST), ints(0))
    yield s("Slice", x("N", 4), ints(-1), ints(-(1 << 63)), ints(0), ints(-1))
    yield s("Slice", x("N", 4), ints(-3), ints(-1), ints(0))
    yield s("Pad", x("N", 3), ints(0, 1, 0, 2), scalar(1.5))
    yield s("Pad", x("N", 3), ints(0, 1, 0, 2), mode="edge")
    yield s("Pad", x("N", 3), ints(0, -1, 0, 2))
    for operand, axis in (("Flat", 0), ("FlatRows", 0)):
        yield s("Slice", operand, ints(1), ints(MOST), ints(axis))
        yield s("Slice", operand, ints(0), ints(3), ints(axis))
        yield s("Concat", operand, operand, axis=axis)
    yield s("Split", "Flat", outputs=(True,), num_outputs=1)
    yield s("Pad", "Flat", ints(1, 0))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
