"""Calls of CastBfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import Case
from device import Values

OP = "CastBfloat16"
DTYPES = ("float32", "bfloat16")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes."""
    other, to = ("bfloat16", 16) if dtype == "float32" else ("float32", 1)
    for shape in [(), (0, 3), (7,), (5, 33), (300, 200), *([(4099, 4097)] if large else [])]:
        numbers = Values.of(np.asarray(random.standard_normal(shape)), dtype)
        yield Case(
            f"{shape}",
            OP,
            dtype,
            (numbers,),
            [numbers.wide()],
            [0.0],
            {"to": to},
            output_dtypes=(other,),
        )
