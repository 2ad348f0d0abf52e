"""Calls of SquareGrad."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "SquareGrad"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes."""
    for shape in [(), (0, 3), (7,), (5, 33), (300, 200), *([(4099, 4097)] if large else [])]:
        grad, x = (Values.of(np.asarray(random.standard_normal(shape)), dtype) for _ in range(2))
        exact = np.asarray(3 * x.wide() * grad.wide())
        terms = [arithmetic(dtype) * np.abs(exact).max(initial=0.0)]
        yield Case(f"{shape}", OP, dtype, (grad, x), [exact], terms, {"factor": 3.0})
