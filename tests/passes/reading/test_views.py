"""The readers of views, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reader_samples import Sample, compare, ints, s, shape, x


def _read() -> Iterator[Sample]:
    yield s("Transpose", x("N", 3, 1))
    yield s("Transpose", x("N", 3, 2), perm=[1, 2, 0])
    yield s("Transpose", x("N", 3, 2), perm=[0, 2, 1])
    yield s("Squeeze", x("N", 1, 3), ints(1))
    yield s("Squeeze", x(1, "N", 1, 3), ints(-2, 0))
    yield s("Squeeze", x(1, 2, 1))
    yield s("Unsqueeze", x("N", 3), ints(0))
    yield s("Unsqueeze", x("N", 3), ints(-1, 1))
    yield s("Unsqueeze", x(), ints(0))
    yield s("Reshape", x("N", 6), ints(-1, 2, 3))
    yield s("Reshape", x("N", 2, 3), ints(0, -1))
    yield s("Reshape", x("N", 2, 3), ints(-1, 3))
    yield s("Reshape", x("N", 2, 3), ints(-1))
    yield s("Reshape", x(4, 3), ints(2, 6))
    yield s("Reshape", x(2, 3), ints(1, 2, 1, 3))
    yield s("Reshape", x("N", 3), "Shape", opset=20)
    yield s("Reshape", x(6), ints(2, 3), allowzero=1)
    yield s("Reshape", x(4, 3), shape(2, 6), shapes=[(2, 6)])
    yield s("Flatten", x("N", 2, 3))
    yield s("Flatten", x("N", 2, 3), axis=2)
    yield s("Flatten", x("N", 2, 3), axis=0)
    yield s("Flatten", x(4, 2, 3), axis=-1)
    yield s("Expand", x(3, 1), ints(3, 4))
    yield s("Expand", x(3), ints(2, 1))
    yield s("Expand", x(), "Shape")
    yield s("Expand", x(1, 3), shape(4, 3), shapes=[(4, 3)])
    yield s("Tile", x(1, 3), ints(4, 1))
    yield s("Tile", x("N", 1), ints(1, 3))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Tile", x("N", 3), ints(2, 1))
    yield s("Tile", x("N", 3), ints(1, 2))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
