"""Attributes with a number for each spatial dimension, or one for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from gradfuse.custom_ops.operator import Value


def numbers_of(value: Value) -> tuple[int, ...]:
    """The value of an attribute that is a list of integers."""
    assert isinstance(value, tuple)
    return value


def per_axis(numbers: Sequence[int], spatial: int) -> list[int]:
    """A number for each of some spatial dimensions."""
    return list(numbers) * spatial if len(numbers) == 1 else list(numbers)


def paddings(numbers: Sequence[int], spatial: int) -> tuple[list[int], list[int]]:
    """What is added at the beginning and at the end of each spatial dimension."""
    if len(numbers) == 2 * spatial:
        return list(numbers[:spatial]), list(numbers[spatial:])
    return per_axis(numbers, spatial), per_axis(numbers, spatial)
