"""The readers of operators that make tensors of sizes and constants, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from reader_samples import INT64, Sample, compare, floats, ints, s, scalar, shape, tensor, x


def _read() -> Iterator[Sample]:
    for k in (0, 1, -1):
        yield s("EyeLike", x(3, 4), k=k)
    yield s("EyeLike", x("N", "M"))
    yield s("EyeLike", x(3, 3), dtype=INT64)
    yield s("EyeLike", x(1, 3))
    yield s("ConstantOfShape", ints(2, 3))
    yield s("ConstantOfShape", ints(2, 1), value=tensor(floats(2.5)))
    yield s("ConstantOfShape", "Shape", value=tensor(ints(7)))
    yield s("ConstantOfShape", shape(2, 3), shapes=[(2, 3)], value=tensor(floats(2.5)))
    yield s("Constant", value=tensor(floats(1.0, 2.5, -3.0)))
    yield s("Constant", value=tensor(np.asarray([[1.0, 1.0], [2.0, 2.0]])))
    yield s("Constant", value=tensor(np.eye(3)))
    yield s("Constant", value=tensor(np.arange(5)))
    yield s("Constant", value=tensor(np.asarray([0, 0, 1, 1, 1, 2])))
    yield s("Constant", value=tensor(np.asarray([False, True, False])))
    yield s("Constant", value=tensor(np.asarray([[1.0, 1, 0, 0], [0, 0, 1, 1]])))
    yield s("Constant", value=tensor(np.full((2, 3), 2.0)))
    yield s("Constant", value_float=2.5)
    yield s("Constant", value_ints=[3, 5])
    yield s("Range", scalar(0), scalar(5), scalar(1))
    yield s("Range", scalar(2), scalar(8), scalar(2))
    yield s("Range", scalar(5), scalar(1), scalar(-1))
    yield s("Range", scalar(1), scalar(8), scalar(3))
    yield s("Range", scalar(0), "Size", scalar(1))
    yield s("Range", scalar(0.5), scalar(3.5), scalar(1.0))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Range", scalar(4), scalar(1), scalar(1))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
