"""Calls of GroupedBiasAddGrad."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "GroupedBiasAddGrad"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    for shape in [(0, 4, 3), (3, 0, 5), (5, 7, 1), (3, 300, 30), (2, 129, 64)] + ([(128, 512, 2048)] if large else []):
        grad = Values.of(random.standard_normal(shape), dtype)
        terms = arithmetic(dtype) * np.abs(grad.wide()).sum(1)
        yield Case(f"{shape}", OP, dtype, (grad, None), [grad.wide().sum(1)], [terms])
    skewed = [*[3] * 50, 700, *[700] * 60, 999, 1000]
    tables = [([400, 600, 1000], 30), (skewed, 64), ([1000], 8), ([], 4), ([5, 3, 1000, 999], 6)]
    if large:
        tables += [([65536], 2048), ([*np.sort(random.integers(0, 65537, 127)).tolist(), 65536], 2048)]
    for ends, columns in tables:
        rows = max(ends, default=0)
        grad = Values.of(random.standard_normal((rows, columns)), dtype)
        last = np.maximum.accumulate(np.asarray(ends, np.int64))
        sums = np.concatenate((np.zeros((1, columns)), grad.wide().cumsum(0)))
        sizes = np.concatenate((np.zeros((1, columns)), np.abs(grad.wide()).cumsum(0)))
        first = np.concatenate(([0], last))[: len(ends)].astype(np.int64)
        exact = sums[last] - sums[first]
        terms = arithmetic(dtype) * (sizes[last] - sizes[first]) + 2.0**-50 * sizes[-1]
        fault = 2 if ends != sorted(ends) else 0
        for index_type in ("int64", "int32"):
            inputs = (grad, Values(index_type, np.asarray(ends, index_type)))
            name = f"{index_type} {len(ends)} groups of {rows}x{columns}"
            yield Case(name, OP, dtype, inputs, [exact], [terms], fault=fault)
