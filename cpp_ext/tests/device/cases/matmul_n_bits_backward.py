"""Calls of MatmulNBitsBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Array, Values

OP = "MatmulNBitsBackward"
DTYPES = SHORT

Packed = tuple[tuple[Values, Values, Values | None], Float64s]


def packed(
    random: np.random.Generator, dtype: str, rows: int, columns: int, bits: int, size: int, zeros: bool
) -> Packed:
    """A weight, its scales, its zero points if there are any, and what they stand for, (rows, columns)."""
    blocks = -(-columns // size)
    scales = Values.of(random.random((rows, blocks)) * 0.1, dtype)
    weight = random.integers(0, 256, (rows, blocks, size * bits // 8), np.uint8)
    points = random.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
    middle = _numbers(points, bits)[:, :blocks] if zeros else np.full((rows, blocks), 2.0 ** (bits - 1))
    floats = (_numbers(weight, bits) - middle[..., None]) * scales.wide()[..., None]
    tensors = (Values("uint8", weight), scales, Values("uint8", points) if zeros else None)
    return tensors, floats.reshape(rows, -1)[:, :columns]


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [((2, 7), 30, 70, 4, 16), ((5,), 20, 130, 8, 128), ((3,), 20, 50, 2, 16), ((0,), 4, 20, 4, 16)]
    if large:
        sizes += [((64,), 2048, 2048, 4, 32)]
    for leading, rows, columns, bits, size in sizes:
        for has_zeros in (False, True):
            grad = Values.of(random.standard_normal((*leading, rows)), dtype)
            tensors, matrix = packed(random, dtype, rows, columns, bits, size, has_zeros)
            yield Case(
                f"{leading} x {rows} x {columns}, {bits} bits, zero points {has_zeros}",
                OP,
                dtype,
                (grad, *tensors),
                [grad.wide() @ matrix],
                [arithmetic(dtype) * (np.abs(grad.wide()) @ np.abs(matrix))],
                {"in_features": columns, "bits": bits},
            )


def _numbers(packed: Array, bits: int) -> Float64s:
    """The numbers of the last dimension of bytes, the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = packed[..., None] >> shifts & (2**bits - 1)
    return np.asarray(numbers.reshape(*packed.shape[:-1], -1), np.float64)
