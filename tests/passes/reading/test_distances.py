"""The readers of bounds and signs of integers, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reader_samples import Sample, below, compare, floats, ints, s, scalar, x


def _read() -> Iterator[Sample]:
    yield s("Abs", "Powers")
    yield s("Abs", "Signs")
    yield s("Sign", "Distance")
    yield s("Min", "Distance", scalar(1))
    yield s("Min", ints([[1]], [[1]]), "Distance")
    yield s("Max", "Nearness", scalar(0))
    yield s("Max", scalar(0), "Nearness")
    yield s("Relu", "Nearness")
    yield s("Clip", "Distance", scalar(0), scalar(1))
    yield s("Clip", "Distance", None, scalar(1))
    yield s("Clip", "Nearness", scalar(0), scalar(1))
    yield s("Clip", "Nearness", scalar(0))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Abs", x("N", 3))
    yield s("Abs", below(4, "N", 3, least=-3))
    yield s("Sign", x("N", 3))
    yield s("Sign", below(4, "N", 3, least=-3))
    yield s("Sign", "Nearness")
    yield s("Sign", "RealDistance")
    yield s("Min", "RealDistance", floats(1.0))
    yield s("Min", "Distance", scalar(2))
    yield s("Min", "Distance", ints(1, 2, 1))
    yield s("Min", "Nearness", scalar(1))
    yield s("Min", "Distance", scalar(1), scalar(0))
    yield s("Max", "Distance", scalar(1))
    yield s("Max", "Nearness", scalar(1))
    yield s("Max", "RealNearness", floats(0.0))
    yield s("Relu", x("N", 3))
    yield s("Relu", "Distance")
    yield s("Relu", "RealNearness")
    yield s("Clip", x("N", 3), floats(0.0).reshape(()), floats(1.0).reshape(()))
    yield s("Clip", "Distance", scalar(0), scalar(2))
    yield s("Clip", "Distance", scalar(1), scalar(1))
    yield s("Clip", "Nearness", scalar(-1), scalar(1))
    yield s("Clip", "Nearness", scalar(0), scalar(0))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
