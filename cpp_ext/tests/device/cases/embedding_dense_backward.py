"""Calls of EmbeddingDenseBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "EmbeddingDenseBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [((4, 30), 50, 19), ((300,), 7, 130), ((), 3, 8), ((0,), 4, 5)] + (
        [((32, 512), 32000, 768)] if large else []
    )
    for shape, weights, columns in sizes:
        grad = Values.of(random.standard_normal((*shape, columns)), dtype)
        flat = random.integers(0, weights, shape)
        for padding, scales, index_type, fault in ((-1, 0, "int64", 0), (2, 1, "int32", 0), (-1, 0, "int64", 2)):
            if fault and not flat.size:
                continue
            indices = np.asarray(flat)
            if fault:
                indices = np.full(shape, weights)
            rows, places = grad.wide().reshape(-1, columns), indices.reshape(-1)
            exact, size = np.zeros((weights, columns)), np.zeros((weights, columns))
            used = places != padding
            if not fault:
                np.add.at(exact, places[used], rows[used])
                np.add.at(size, places[used], np.abs(rows[used]))
            if scales:
                counts = np.maximum(np.bincount(places[used], minlength=weights), 1)[:, None]
                exact, size = exact / counts, size / counts
            yield Case(
                f"{shape} of {weights}, padding {padding}, {index_type}",
                OP,
                dtype,
                (grad, Values(index_type, indices.astype(index_type))),
                [exact],
                [arithmetic(dtype) * size],
                {"num_weights": weights, "padding_idx": padding, "scale_grad_by_freq": scales},
                fault=fault,
            )
