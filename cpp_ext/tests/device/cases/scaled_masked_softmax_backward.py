"""Calls of ScaledMaskedSoftmaxBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic, log_softmax
from device import Values

OP = "ScaledMaskedSoftmaxBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [0, 1, 5, 32, 63, 64, 127, 200, 256, 509, 512, 1000, 1024, 2047, 2048, 4095, 4096, 8192, 20001]
    for size in sizes:
        batch, heads, queries = (2, 3, 128) if large else (2, 2, 3)
        for masked in (None, (batch, heads), (batch, 1), (1, 1)):
            shape = (batch, heads, queries, size)
            y = Values.of(np.exp(log_softmax(3 * random.standard_normal(shape))) if size else np.zeros(shape), dtype)
            grad = Values.of(random.standard_normal(shape), dtype)
            mask = None if masked is None else random.random((*masked, queries, size)) < 0.4
            products = grad.wide() * y.wide()
            exact = 0.5 * y.wide() * (grad.wide() - products.sum(-1, keepdims=True))
            exact = exact if mask is None else np.where(mask, 0.0, exact)
            terms = arithmetic(dtype) * (0.5 * np.abs(products).sum(-1, keepdims=True) * y.wide() + np.abs(exact))
            inputs = (grad, y, None if mask is None else Values("bool", mask))
            name = f"{shape} mask {masked}"
            yield Case(name, OP, dtype, inputs, [exact], [terms], {"scale": 0.5})
