"""Calls of BatchNormBackward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Values

OP = "BatchNormBackward"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Shapes, whether a ReLU follows, whether there is a weight, and what is wanted."""
    calls: list[tuple[tuple[int, ...], bool, bool, tuple[int, int, int]]] = [
        ((4, 3, 6, 5), False, True, (1, 1, 1)),
        ((3, 5, 40, 41), True, True, (1, 1, 1)),
        ((7, 300), True, False, (1, 1, 0)),
        ((2, 3, 2, 3, 4), False, False, (1, 0, 1)),
        ((5, 2, 9), True, True, (0, 1, 1)),
        ((0, 3, 4), False, True, (1, 1, 1)),
        ((2, 0, 4), True, True, (1, 1, 1)),
    ]
    if large:
        calls += [((64, 64, 56, 56), True, True, (1, 1, 1)), ((256, 512, 7, 7), False, True, (1, 1, 1))]
    for shape, gated, weighted, mask in calls:
        channels = shape[1]
        grad = Values.of(random.standard_normal(shape), dtype)
        x = Values.of(random.standard_normal(shape), dtype)
        wide = x.wide()
        others = (0, *range(2, len(shape)))
        moments = (wide.mean(others), wide.var(others)) if wide.size else (np.zeros(channels), np.ones(channels))
        mean = Values.of(moments[0], dtype)
        invstd = Values.of(1 / np.sqrt(moments[1] + 1e-5), dtype)
        weight = Values.of(random.random(channels) + 0.5, dtype) if weighted else None
        output = Values.of(np.maximum(random.standard_normal(shape), 0), dtype) if gated else None
        used = grad.wide() * (output.wide() > 0) if output is not None else grad.wide()
        factors = weight.wide() if weight is not None else np.ones(channels)
        expected, sizes = _gradients(used, wide, factors, mean.wide(), invstd.wide())
        terms: list[Any] = [arithmetic(dtype) * size for size in sizes]
        nothing = np.zeros(0)
        yield Case(
            f"{shape}, ReLU: {gated}, weight: {weighted}, {mask}", OP, dtype,
            (grad, x, weight, mean, invstd, output),
            [one if wanted else nothing for one, wanted in zip(expected, mask, strict=True)],
            [one if wanted else nothing for one, wanted in zip(terms, mask, strict=True)],
            {"output_mask": mask},
        )  # fmt: skip


def _gradients(
    grad: Float64s, x: Float64s, weight: Float64s, mean: Float64s, invstd: Float64s
) -> tuple[list[Float64s], list[Float64s]]:
    """The gradients, and the magnitudes that they add up."""
    others = (0, *range(2, x.ndim))
    count = max(1, x.size // max(1, x.shape[1]))

    def column(vector: Float64s) -> Float64s:
        return vector.reshape(-1, *[1] * (x.ndim - 2))

    distance = x - column(mean)
    sums, products = grad.sum(others), (grad * distance).sum(others)
    scale, slope = column(weight * invstd), column(invstd**2 * products / count)
    of_input = scale * (grad - column(sums / count) - distance * slope)
    rounding = np.abs(distance) + np.abs(x)
    total, of_products = np.abs(grad).sum(others), (np.abs(grad) * rounding).sum(others)
    steepest = column(invstd**2 * of_products / count)
    size = np.abs(scale) * (np.abs(grad) + column(total / count) + rounding * steepest)
    return [of_input, products * invstd, sums], [size, of_products * invstd, total]
