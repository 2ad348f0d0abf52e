"""Calls of GruRecurrence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "GruRecurrence"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Steps, items and units, whether steps are reversed, and whether there is a bias."""
    calls = [(5, 4, 7, 0, True), (3, 2, 33, 1, True), (4, 3, 130, 0, False), (0, 2, 3, 0, True), (2, 0, 3, 1, False)]
    if large:
        calls += [(64, 64, 256, 0, True)]
    for steps, items, units, reverse, biased in calls:
        shapes = [(steps, items, 3 * units), (items, units), (3 * units, units), (3 * units,)]
        values = [random.standard_normal(shape) for shape in shapes]
        values[1], values[2] = np.tanh(values[1]), values[2] / units**0.5
        inputs = [Values.of(one, dtype) for one in values[: 4 if biased else 3]] + [None] * (not biased)
        expected = states_and_gates(*(None if one is None else one.wide() for one in inputs), reverse=reverse)
        # A gate's sum has this many terms below 1, and its error propagates through all later steps.
        terms = [arithmetic(dtype) * (8 + units**0.5) * max(1, steps)] * 2
        yield Case(
            f"{steps} steps of {items} x {units}, reverse: {reverse}, bias: {biased}", OP, dtype, inputs, expected,
            terms, {"reverse": reverse},
        )  # fmt: skip


def states_and_gates(x: Any, h: Any, weight: Any, bias: Any, *, reverse: int) -> list[Any]:
    """What the operator gives."""
    steps, items, width = x.shape
    units = width // 3
    hidden, gates = np.zeros((steps, items, units)), np.zeros((steps, items, 4 * units))
    for t in range(steps)[:: -1 if reverse else 1]:
        x_r, x_z, x_n = np.split(x[t], 3, axis=1)
        h_r, h_z, h_n = np.split(h @ weight.T + (0 if bias is None else bias), 3, axis=1)
        r, z = 1 / (1 + np.exp(-(x_r + h_r))), 1 / (1 + np.exp(-(x_z + h_z)))
        n = np.tanh(x_n + r * h_n)
        h = n + z * (h - n)
        hidden[t], gates[t] = h, np.concatenate([r, z, n, h_n], axis=1)
    return [hidden, gates]
