"""Parameters of tests, most of which are left to `make test-long`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return values, or tuples of them, to parametrize a test with; those that are not quick are long tests."""
    return [value if value in quick else _long(value) for value in values]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of values, of which so few are not long tests that each value is in one of them."""
    quick = {tuple(row % len(axis) for axis in axes) for row in range(max(map(len, axes)))}
    places = itertools.product(*(range(len(axis)) for axis in axes))
    combined = [(place, [axis[index] for axis, index in zip(axes, place, strict=True)]) for place in places]
    return [pytest.param(*values, marks=() if place in quick else pytest.mark.long) for place, values in combined]


def _long(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
