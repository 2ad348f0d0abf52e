"""Calls of FusedMatmul."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "FusedMatmul"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [((), (), 9, 40, 33), ((2, 1), (3,), 70, 20, 65), ((3,), (), 5, 1, 7), ((0,), (), 4, 5, 3)]
    if large:
        sizes += [((), (), 4096, 1024, 4096)]
    for a_batch, b_batch, rows, depth, columns in sizes:
        for trans_a, trans_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            if trans_a and 0 in a_batch:
                continue  # What onnxruntime makes of Transpose and MatMul in a function body takes no empty batch.
            a = Values.of(random.standard_normal((*a_batch, *((depth, rows) if trans_a else (rows, depth)))), dtype)
            b = Values.of(
                random.standard_normal((*b_batch, *((columns, depth) if trans_b else (depth, columns)))), dtype
            )
            bias = Values.of(random.standard_normal(columns), dtype) if trans_b else None
            narrow = trans_a
            left, right = (Values.of(one.wide(), "bfloat16").wide() if narrow else one.wide() for one in (a, b))
            left, right = left.swapaxes(-1, -2) if trans_a else left, right.swapaxes(-1, -2) if trans_b else right
            added = 0.0 if bias is None else bias.wide()
            yield Case(
                f"{a.bits.shape} by {b.bits.shape}, transposed {trans_a} {trans_b}",
                OP,
                dtype,
                (a, b, bias),
                [left @ right + added],
                [arithmetic(dtype) * (np.abs(left) @ np.abs(right) + np.abs(added))],
                {"trans_a": trans_a, "trans_b": trans_b, "factors_in_bfloat16": narrow},
            )
