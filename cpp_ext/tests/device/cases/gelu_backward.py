"""Calls of GeluBackward."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "GeluBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes."""
    error_function = np.vectorize(math.erf, otypes=[float])
    for shape in [(), (0, 3), (7,), (5, 33), (300, 200), *([(4099, 1025)] if large else [])]:
        grad, values = (Values.of(np.asarray(3 * random.standard_normal(shape)), dtype) for _ in range(2))
        x = values.wide()
        normal = 0.5 * (1 + error_function(x / math.sqrt(2)))
        tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        slopes = {
            "none": normal + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
            "tanh": (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2),
        }
        for approximate, slope in slopes.items():
            exact = np.asarray(grad.wide() * slope)
            terms = [arithmetic(dtype) * np.abs(grad.wide()).max(initial=0.0)]
            yield Case(
                f"{approximate} {shape}", OP, dtype, (grad, values), [exact], terms, {"approximate": approximate}
            )
