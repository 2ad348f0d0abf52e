"""Calls of ThresholdBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "ThresholdBackward"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes."""
    for shape in [(), (0, 3), (7,), (5, 33), (300, 200), *([(4099, 4097)] if large else [])]:
        grad, values = (Values.of(np.asarray(random.standard_normal(shape)), dtype) for _ in range(2))
        exact = np.where(values.wide() <= 0.25, 0.0, grad.wide())
        terms = [arithmetic(dtype) * np.abs(exact).max(initial=0.0)]
        yield Case(f"{shape}", OP, dtype, (grad, values), [exact], terms, {"threshold": 0.25})
