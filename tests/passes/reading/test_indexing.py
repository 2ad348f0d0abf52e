"""The readers of operators that pick elements by indices, or put them at indices, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from reader_samples import Sample, below, compare, condition, distinct, ints, s, scalar, singles, x


def _read() -> Iterator[Sample]:
    yield s("Gather", x(4, "N"), below(4, "M"))
    yield s("Gather", x(2, 1, 4, 3), below(1, 2), axis=1)
    yield s("Gather", x(2, 4, "N", 3), below(4, "M"), axis=1)
    yield s("GatherElements", x(4, 4), below(4, 4, 4))
    yield s("GatherElements", x(1, "N"), below(1, 3, "N"), axis=0)
    yield s("GatherND", x(4, "N", 2), below(4, "M", 1))
    yield s("GatherND", x(3, 4, "N", 2), below(3, "M", 2))
    yield s("NonZero", below(3, 8))
    yield s("ScatterElements", x(4, 4), distinct(4, 1, 4), x(1, 4), reduction="add")
    yield s("ScatterND", x(4, "N", 3), below(4, 5, 1), x(5, "N", 3), reduction="add")
    yield s("ScatterND", below(9, 4), ints([1], [3]), below(9, 2), reduction="add")
    yield s("OneHot", below(4, "N", 3), scalar(4), singles(0.25, 2.0))
    yield s("Gather", x("N", 4), below(4, 2, 3), axis=1)
    yield s("Gather", x("N", 4), below(4), axis=-1)
    yield s("Gather", x("N", 4), scalar(-1), axis=1)
    yield s("Gather", x("N", 4), ints(2), axis=1)
    yield s("Gather", x("N", 4), ints(1, 3), axis=1)
    yield s("Gather", x("N", 4, "M"), ints(2, 0, 3), axis=1)
    yield s("Gather", x("N", 4), ints(-3, -1), axis=1)
    yield s("Gather", x(1, 4), below(1, 2))
    yield s("GatherElements", x("N", 4), below(4, "N", 2), axis=1)
    yield s("GatherElements", x(4, "N"), below(4, 1, "N"), axis=0)
    yield s("GatherElements", x("N", 4), below(4, "N", 1), axis=-1)
    yield s("GatherElements", x(2, 4), ints([-1, -3], [-1, -3]), axis=1)
    yield s("GatherElements", x(2, 3), ints([-1], [-1]), axis=1)
    yield s("GatherND", x(4, "N"), below(4, "M", 1))
    yield s("GatherND", x(4, 3, "N"), below(3, "M", 2))
    yield s("GatherND", x(3, 4), below(3, "M", 2))
    yield s("GatherND", x(3, 4), ints([-1, -1], [-1, -1]))
    yield s("GatherND", x(3, "N"), ints([-1], [-2]))
    yield s("NonZero", condition("N"))
    yield s("NonZero", below(2, "N"))
    zeros = np.zeros((3, 4))
    for reduction in ("none", "add"):
        own: dict[str, Any] = {"reduction": reduction}
        index = distinct if reduction == "none" else below
        yield s("ScatterElements", zeros, index(4, 3, 1), x(3, 1), axis=1, **own)
        yield s("ScatterElements", x(3, 4), index(4, 3, 1), x(3, 1), axis=-1, **own)
        yield s("ScatterElements", x("N", 4), index(4, "N", 1), x("N", 1), axis=1, **own)
        yield s("ScatterElements", x(3, 4), ints([-1], [-1], [-1]), x(3, 1), axis=1, **own)
        yield s("ScatterND", x(4, "N"), index(4, 1, 1), x(1, "N"), **own)
        yield s("ScatterND", x(3, 4), ints([-1]), x(1, 4), **own)
    yield s("ScatterElements", zeros, below(4, 3, 2), x(3, 2), axis=1, reduction="add")
    yield s("ScatterElements", x(4, "N"), below(4, "M", "N"), x("M", "N"), axis=0, reduction="add")
    yield s("ScatterND", zeros, below(3, "N", 1), x("N", 4), reduction="add")
    yield s("ScatterND", x(3, 4), below(3, "N", 2), x("N"), reduction="add")
    yield s("ScatterND", zeros, ints([0], [2]), x(2, 4), reduction="add")
    yield s("ScatterND", x(3, 4), ints([-1], [-3]), x(2, 4), reduction="add")
    for axis in (-1, 0, 1):
        yield s("OneHot", below(4, "N"), ints(4), singles(0.0, 1.0), axis=axis)
        yield s("OneHot", below(4, "N", 3), scalar(4), singles(0.25, 2.0), axis=axis)
    yield s("OneHot", below(3, 2), "Size", ints(0, 1))
    yield s("OneHot", below(3, 2), ints(3), singles(0.0, 1.0), opset=17)
    # An index of elements of a matrix: 3 times the row plus the column.
    yield s("Gather", "Rows", "ByRow")
    yield s("Gather", "Rows", "ByRowOfOne")
    yield s("GatherElements", "Rows", "ByRow")
    yield s("GatherND", "Rows", "ByRowOfOne")
    for reduction in ("none", "add"):
        for data in ("Rows", np.zeros(12), x(12)):
            yield s("ScatterElements", data, "ByRow", x(4), reduction=reduction)
            yield s("ScatterND", data, "ByRowOfOne", x(4), reduction=reduction)


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Gather", x("N", 4), ints(-1, 0), axis=1)
    yield s("Gather", x("N", 4), ints(-1, 2, 0), axis=1)
    yield s("GatherElements", x(2, 4), ints([-1, 0], [-1, 0]), axis=1)
    yield s("GatherND", x(3, "N"), ints([-1], [0]))
    yield s("GatherND", x(2, 3, 4), below(3, 2, 1), batch_dims=1)
    yield s("ScatterND", x(3, 4), ints([-1], [0]), x(2, 4))
    yield s("ScatterND", np.zeros((3, 4)), ints([0], [2]), x(2, 4))
    yield s("ScatterElements", x(3, 4), ints([-1, 1], [-1, 1], [0, 0]), x(3, 2), axis=1, reduction="add")
    yield s("ScatterElements", x(3, 4), below(4, 2, 1), x(2, 1), axis=1)
    yield s("ScatterElements", x(3, 4), below(4, 3, 2), x(3, 2), axis=1)
    yield s("ScatterElements", x(3, 4), below(4, 3, 1), x(3, 1), axis=1, reduction="mul")
    yield s("ScatterElements", x(3, 4), below(4, 3, 1), x(3, 1), axis=1, reduction="max")
    yield s("ScatterND", x(3, 4), below(3, 2, 1), x(2, 4), reduction="mul")
    yield s("NonZero", condition("N", 3))
    yield s("Gather", "Rows", ints(4, 0, 11))
    yield s("Gather", "Rows", below(12, 5))
    yield s("ScatterElements", "Rows", below(12, 5), x(5))
    yield s("ScatterElements", np.zeros((12, 2)), "ByRowOfOne", x(4, 1))
    yield s("ScatterND", np.zeros((12, 12)), ints([0, 3], [1, 4]), x(2))
    for operand, axis in (("Flat", 0), ("FlatRows", 0)):
        yield s("Gather", operand, ints(0, 2, 1), axis=axis)
    yield s("GatherElements", "Flat", ints(2, 0))
    yield s("GatherElements", "FlatRows", ints([1, 0]), axis=1)
    yield s("GatherElements", "FlatRows", ints([1, 0], [2, 2]), axis=0)
    yield s("GatherND", "FlatRows", ints([2], [0]))
    yield s("ScatterElements", "FlatRows", ints([1, 0]), x(1, 2), axis=0, reduction="add")
    yield s("ScatterElements", "FlatRows", ints([1], [0]), x(2, 1), axis=1, reduction="add")
    yield s("ScatterND", "FlatRows", ints([2], [0]), x(2, 2), reduction="add")
    yield s("NonZero", "Flat")
    yield s("OneHot", below(4, "N"), ints(1), singles(0.0, 1.0))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
