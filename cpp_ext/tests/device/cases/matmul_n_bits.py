"""Calls of MatmulNBits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

from cases.matmul_n_bits_backward import packed

OP = "MatmulNBits"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [((2, 7), 30, 70, 4, 16), ((5,), 20, 130, 8, 128), ((3,), 20, 50, 2, 16), ((0,), 4, 20, 4, 16)]
    if large:
        sizes += [((64,), 2048, 2048, 4, 32)]
    for leading, rows, columns, bits, size in sizes:
        for has_both in (False, True):
            input = Values.of(random.standard_normal((*leading, columns)), dtype)
            tensors, matrix = packed(random, dtype, rows, columns, bits, size, has_both)
            bias = Values.of(random.standard_normal(rows), dtype) if has_both else None
            added = 0.0 if bias is None else bias.wide()
            yield Case(
                f"{leading} x {columns} x {rows}, {bits} bits, zero points and bias {has_both}",
                OP,
                dtype,
                (input, *tensors, bias),
                [input.wide() @ matrix.T + added],
                [arithmetic(dtype) * (np.abs(input.wide()) @ np.abs(matrix.T) + np.abs(added))],
                {"bits": bits},
            )
