"""Calls of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "BatchNorm"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Shapes, whether a ReLU follows, and which of weight, bias and both running statistics there are."""
    calls: list[tuple[tuple[int, ...], int, tuple[bool, bool, bool, bool]]] = [
        ((4, 3, 6, 5), 0, (True, True, True, True)),
        ((3, 5, 40, 41), 1, (True, True, True, True)),
        ((7, 300), 1, (False, True, False, True)),
        ((2, 3, 2, 3, 4), 0, (False, False, False, False)),
        ((5, 2, 9), 1, (True, False, True, False)),
        ((2, 0, 4), 1, (True, True, True, True)),
    ]
    if large:
        calls += [((64, 64, 56, 56), 1, (True,) * 4), ((256, 512, 7, 7), 0, (True,) * 4)]
    for shape, relu, given in calls:
        channels, others = shape[1], (0, *range(2, len(shape)))
        x = Values.of(random.standard_normal(shape) + 1, dtype)
        vectors = [Values.of(random.random(channels) + 0.5, dtype) if there else None for there in given]
        weight, bias, old_mean, old_var = (None if one is None else one.wide() for one in vectors)
        wide = x.wide()
        mean, var = wide.mean(others), wide.var(others)
        count = max(2, wide.size // max(1, channels))
        momentum, eps = float(np.float32(0.1)), float(np.float32(1e-5))
        invstd = 1 / np.sqrt(var + eps)

        def column(vector: Any, rank: int = len(shape)) -> Any:
            return vector.reshape(-1, *[1] * (rank - 2))

        scale = invstd if weight is None else invstd * weight
        added = np.zeros(channels) if bias is None else bias
        output = (wide - column(mean)) * column(scale) + column(added)
        unbiased = var * count / (count - 1)
        nothing = np.zeros(0)
        new_mean = nothing if old_mean is None else (1 - momentum) * old_mean + momentum * mean
        new_var = nothing if old_var is None else (1 - momentum) * old_var + momentum * unbiased
        largest = np.abs(wide).max(others, initial=0)
        terms: list[Any] = [
            column(largest * np.abs(scale) + np.abs(added)), largest, largest**2 * invstd**3,
            largest if new_mean.size else nothing, largest**2 if new_var.size else nothing,
        ]  # fmt: skip
        yield Case(
            f"{shape}, ReLU: {relu}, {given}", OP, dtype, (x, *vectors),
            [np.maximum(output, 0) if relu else output, mean, invstd, new_mean, new_var],
            [arithmetic(dtype) * one for one in terms], {"relu": relu},
        )  # fmt: skip
