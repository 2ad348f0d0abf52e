"""Calls of every op with results in float64: a module an op, found in this folder."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from case import Case


def cases(*, large: bool, only: str | None = None, seed: int = 0) -> Iterator[Case]:
    """Every op, or only one, in every type; `large` adds sizes that fill a GPU."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = importlib.import_module(f"{__name__}.{path.stem}")
        if only not in (None, module.OP):
            continue
        random = np.random.default_rng(seed)
        for dtype in module.DTYPES:
            yield from module.cases(random, dtype, large)
