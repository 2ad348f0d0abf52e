"""Calls of LayerNormBackward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Values

OP = "LayerNormBackward"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Shapes, the first normalized axis, whether there is a weight and a mean, and what is wanted."""
    calls: list[tuple[tuple[int, ...], int, bool, bool, tuple[int, int, int]]] = [
        ((4, 3, 30), -1, True, True, (1, 1, 0)),
        ((130, 70), -1, False, True, (1, 1, 1)),
        ((3, 300, 5), 1, True, False, (1, 1, 1)),
        ((2, 7, 600), 0, True, True, (1, 1, 1)),
        ((5, 2, 9), -2, False, False, (0, 1, 1)),
        ((70, 3), -1, True, True, (1, 0, 1)),
        ((0, 3, 4), -1, True, True, (1, 1, 1)),
        ((2, 3, 0), -1, True, True, (1, 1, 1)),
    ]
    if large:
        calls += [((8192, 1024), -1, True, True, (1, 1, 1)), ((16384, 192), -1, True, False, (1, 1, 0))]
    for shape, axis, weighted, centred, mask in calls:
        first = axis % len(shape)
        inner, kept = shape[first:], (*shape[:first], *(1 for _ in shape[first:]))
        rows, size = math.prod(shape[:first]), math.prod(inner)
        statistics = "float64" if dtype == "float64" else "float32"
        grad = Values.of(random.standard_normal(shape), dtype)
        x = Values.of(random.standard_normal(shape), dtype)
        weight = Values.of(random.random(inner) + 0.5, dtype) if weighted else None
        wide = x.wide().reshape(rows, size)
        middle = wide.mean(1) if centred and size else np.zeros(rows)
        mean = Values.of(middle.reshape(kept), statistics)
        spread = ((wide - middle[:, None]) ** 2).mean(1) if size else np.ones(rows)
        rstd = Values.of((1 / np.sqrt(spread + 1e-5)).reshape(kept), statistics)
        expected, sizes = _gradients(
            grad.wide().reshape(rows, size), wide, np.ones(size) if weight is None else weight.wide().reshape(size),
            mean.wide().reshape(rows, 1), rstd.wide().reshape(rows, 1), centred,
        )  # fmt: skip
        shapes, nothing = (shape, inner, inner), np.zeros(0)
        terms: list[Any] = [arithmetic(dtype) * one for one in sizes]
        yield Case(
            f"{shape}, axis {axis}, weight: {weighted}, mean: {centred}, {mask}", OP, dtype,
            (grad, x, weight, mean if centred else None, rstd),
            [one.reshape(to) if wanted else nothing for one, to, wanted in zip(expected, shapes, mask, strict=True)],
            [one.reshape(to) if wanted else nothing for one, to, wanted in zip(terms, shapes, mask, strict=True)],
            {"axis": axis, "output_mask": mask},
        )  # fmt: skip


def _gradients(
    grad: Float64s, x: Float64s, weight: Float64s, mean: Float64s, rstd: Float64s, centred: bool
) -> tuple[list[Float64s], list[Float64s]]:
    """The gradients, and the magnitudes that they add up."""
    count = max(1, x.shape[1])

    def mean_of(values: Float64s) -> Float64s:
        return np.asarray(values.sum(1, keepdims=True) / count)

    y, through = (x - mean) * rstd, grad * weight
    of_input = through - y * mean_of(through * y) - (mean_of(through) if centred else 0.0)
    rounding, size = np.abs(y) + np.abs(x) * rstd, np.abs(through)
    largest = rstd * (size + rounding * mean_of(size * rounding) + mean_of(size))
    sums, sizes = [(grad * y).sum(0), grad.sum(0)], [(np.abs(grad) * rounding).sum(0), np.abs(grad).sum(0)]
    return [rstd * of_input, *sums], [largest, *sizes]
