"""Calls of MatmulNBitsBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Array, Values

OP = "MatmulNBitsBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [((2, 7), 30, 70, 4, 16), ((5,), 20, 130, 8, 128), ((3,), 20, 50, 2, 16), ((0,), 4, 20, 4, 16)]
    if large:
        sizes += [((64,), 2048, 2048, 4, 32)]
    for leading, rows, columns, bits, size in sizes:
        for has_zeros in (False, True):
            blocks = -(-columns // size)
            grad = Values.of(random.standard_normal((*leading, rows)), dtype)
            scales = Values.of(random.random((rows, blocks)) * 0.1, dtype)
            weight = random.integers(0, 256, (rows, blocks, size * bits // 8), np.uint8)
            zeros = random.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
            points = _numbers(zeros, bits)[:, :blocks] if has_zeros else np.full((rows, blocks), 2.0 ** (bits - 1))
            floats = (_numbers(weight, bits) - points[..., None]) * scales.wide()[..., None]
            matrix = floats.reshape(rows, -1)[:, :columns]
            yield Case(
                f"{leading} x {rows} x {columns}, {bits} bits, zero points {has_zeros}",
                OP,
                dtype,
                (grad, Values("uint8", weight), scales, Values("uint8", zeros) if has_zeros else None),
                [grad.wide() @ matrix],
                [arithmetic(dtype) * (np.abs(grad.wide()) @ np.abs(matrix))],
                {"in_features": columns, "bits": bits},
            )


def _numbers(packed: Array, bits: int) -> Float64s:
    """The numbers of the last dimension of bytes, the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = packed[..., None] >> shifts & (2**bits - 1)
    return np.asarray(numbers.reshape(*packed.shape[:-1], -1), np.float64)
