"""The readers of comparisons, logic and choices, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from reader_samples import Sample, below, compare, condition, ints, s, scalar, with_gaps, x


def _read() -> Iterator[Sample]:
    yield s("Equal", below(3, "N", 3), below(3, 3))
    yield s("Equal", below(3, "N", 3), ints(1))
    yield s("Equal", condition("N", 3), condition(3))
    for op in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        yield s(op, below(3, "N", 3), below(3, 3))
        yield s(op, ints(1), below(3, "N", 3))
        if op in ("Less", "Greater"):
            yield s(op, x("N", 3), x(3))
            yield s(op, x("N", 3), scalar(0.5))
    yield s("GreaterOrEqual", "Powers", scalar(0.0))
    yield s("LessOrEqual", scalar(0.0), "Powers")
    yield s("Less", "Powers", scalar(0.0))
    yield s("Not", condition("N", 3))
    for op in ("And", "Or", "Xor"):
        yield s(op, condition("N", 3), condition(3))
        yield s(op, condition("N", 1), condition("N", 3))
    yield s("Where", condition("N", 3), x(3), x("N", 1))
    yield s("Where", condition("N", 1), scalar(0.0), x("N", 3))
    yield s("Where", np.asarray(True), x("N", 3), x(3))
    yield s("Where", np.asarray([False]), x(3), x("N", 3))
    yield s("Where", np.asarray([True, False, True]), x("N", 3), x(3))
    yield s("Where", condition("N", 3), below(4, 3), below(9, "N", 3))
    for k in (0, 1, -1):
        for upper in (0, 1):
            yield s("Trilu", x("N", 3, 4), scalar(k), upper=upper)
    yield s("Trilu", x("N", "M"))
    yield s("Trilu", x("N", "M"), upper=0)
    yield s("Trilu", x(1, 3), scalar(1))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("LessOrEqual", x("N", 3), x(3))
    yield s("LessOrEqual", with_gaps("N", 3), x(3))
    yield s("GreaterOrEqual", with_gaps("N", 3), x(3))
    yield s("Less", with_gaps("N", 3), x(3))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
