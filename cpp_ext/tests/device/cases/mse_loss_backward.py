"""Calls of MseLossBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "MseLossBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    shapes: list[tuple[tuple[int, ...], ...]] = [
        ((), (0, 3), (0, 3)), ((), (), ()), ((), (5, 3), (5, 3)), ((300, 17),) * 3, ((17,), (300, 1), (300, 17)),
        ((4, 1, 33), (1, 5, 33), (4, 5, 1)), ((500, 3), (3,), (500, 1)), ((64, 64), (64, 64), (1, 64)),
        ((200, 200), (200, 1), (200,)),
        ((2, 1, 2, 1, 2, 1, 2, 3), (1, 3, 2, 1, 1, 2, 1, 3), (2, 3, 1, 2, 2, 1, 1, 1)),
    ]  # fmt: skip
    if large:
        shapes += [((4099, 4097),) * 3, ((), (4096, 4096), (4096, 4096)), ((4096, 1), (4097,), (4096, 4097))]
    for shape in shapes:
        for reduction in range(3):
            grad, self, target = (Values.of(random.standard_normal(own), dtype) for own in shape)
            exact = 2 * (self.wide() - target.wide()) * grad.wide() / (self.bits.size if reduction == 1 else 1)
            terms = arithmetic(dtype) * np.abs(exact).max(initial=0.0)
            name = f"{'none mean sum'.split()[reduction]} {shape}"
            inputs = (grad, self, target)
            yield Case(name, OP, dtype, inputs, [exact], [terms], {"reduction": reduction})
