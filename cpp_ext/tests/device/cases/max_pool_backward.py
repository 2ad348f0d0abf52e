"""Calls of MaxPoolBackward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Values

OP = "MaxPoolBackward"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Batch and channels, sizes, windows, attributes."""
    calls: list[tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((2, 3), (8, 6), (4, 3), {"kernel_size": (2,), "stride": (2,)}),
        ((2, 3), (9, 8), (5, 4), {"kernel_size": (3,), "stride": (2,), "padding": (1,)}),
        ((1, 2), (7, 9), (7, 8), {"kernel_size": (3, 2), "padding": (2, 0, 2, 0), "dilation": (2, 1)}),
        ((3, 2), (9,), (5,), {"kernel_size": (2,), "stride": (2,), "ceil_mode": 1}),
        ((2, 1), (3, 4, 5), (3, 1, 4), {"kernel_size": (2, 3, 2), "stride": (1, 2, 1), "padding": (1, 0, 0, 0, 0, 0)}),
        ((0, 3), (4, 4), (2, 2), {"kernel_size": (2,), "stride": (2,)}),
    ]  # fmt: skip
    if large:
        calls += [((16, 64), (112, 112), (56, 56), {"kernel_size": (3,), "stride": (2,), "padding": (1,)})]
    for leading, sizes, windows, attributes in calls:
        # Half of the numbers are one of five.
        image = random.standard_normal((*leading, *sizes))
        image = np.where(random.random(image.shape) < 0.5, random.integers(-2, 3, image.shape) / 2, image)
        values = [Values.of(random.standard_normal((*leading, *windows)), dtype), Values.of(image, dtype)]
        grad, wide = (value.wide() for value in values)
        expected, terms = _gradient(grad, wide, attributes), _gradient(np.abs(grad), wide, attributes)
        name = f"{leading} x {sizes} to {windows}, {attributes}"
        bound = arithmetic(dtype) * terms.max(initial=0.0)
        yield Case(name, OP, dtype, values, [expected], [bound], attributes)


def _gradient(grad: Float64s, image: Float64s, attributes: Mapping[str, Any]) -> Float64s:
    """All windows at a time, one element of theirs after the other."""
    spatial = image.ndim - 2

    def per_axis(name: str, default: int) -> Sequence[int]:
        numbers = attributes.get(name, (default,))
        return [*numbers] * spatial if len(numbers) == 1 else [*numbers]

    kernel, stride, dilation = per_axis("kernel_size", 1), per_axis("stride", 1), per_axis("dilation", 1)
    begin = per_axis("padding", 0)[:spatial]
    flat = image.reshape(*image.shape[:2], int(np.prod(image.shape[2:])))
    best = np.full(grad.shape, -np.inf)
    found = np.full(grad.shape, -1)
    for tap in product(*map(range, kernel)):
        places = [
            np.arange(count) * stride[axis] - begin[axis] + tap[axis] * dilation[axis]
            for axis, count in enumerate(grad.shape[2:])
        ]
        at = np.zeros(grad.shape[2:], dtype=np.int64)
        inside = np.ones(grad.shape[2:], dtype=bool)
        for axis, place in enumerate(places):
            size, shape = image.shape[axis + 2], [-1 if other == axis else 1 for other in range(spatial)]
            at = at * size + np.clip(place, 0, size - 1).reshape(shape)
            inside &= ((place >= 0) & (place < size)).reshape(shape)
        values = flat[:, :, at]
        takes = inside & ((found < 0) | (values > best))
        best, found = np.where(takes, values, best), np.where(takes, at, found)
    result = np.zeros_like(flat)
    is_met = found >= 0
    where = np.nonzero(is_met)
    np.add.at(result, (where[0], where[1], found[is_met]), grad[is_met])
    return result.reshape(image.shape)
