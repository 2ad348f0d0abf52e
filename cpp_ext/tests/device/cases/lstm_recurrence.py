"""Calls of LstmRecurrence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "LstmRecurrence"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Steps, items and units, whether steps are reversed, and whether there is a bias."""
    calls = [(5, 4, 7, 0, True), (3, 2, 33, 1, True), (4, 3, 130, 0, False), (0, 2, 3, 0, True), (2, 0, 3, 1, False)]
    if large:
        calls += [(64, 64, 256, 0, True)]
    for steps, items, units, reverse, biased in calls:
        inputs = arguments(random, dtype, (steps, items, units), biased)
        expected = states_and_gates(*(None if one is None else one.wide() for one in inputs), reverse=reverse)
        # A gate's sum has this many terms below 1, and its error propagates through all later steps.
        terms = [arithmetic(dtype) * (8 + units**0.5) * max(1, steps)] * 3
        yield Case(
            f"{steps} steps of {items} x {units}, reverse: {reverse}, bias: {biased}", OP, dtype, inputs, expected,
            terms, {"reverse": reverse},
        )  # fmt: skip


def arguments(
    random: np.random.Generator, dtype: str, sizes: tuple[int, int, int], biased: bool
) -> tuple[Values | None, ...]:
    """Inputs of any values, with weights of the usual size."""
    steps, items, units = sizes
    shapes = [(steps, items, 4 * units), (items, units), (items, units), (4 * units, units), (4 * units,)]
    values = [random.standard_normal(shape) for shape in shapes]
    values[1], values[3] = np.tanh(values[1]), values[3] / units**0.5
    inputs = [Values.of(one, dtype) for one in values]
    return (*inputs[:4], inputs[4] if biased else None)


def states_and_gates(x: Any, h: Any, c: Any, weight: Any, bias: Any, *, reverse: int) -> list[Any]:
    """What the operator gives."""
    steps, items, width = x.shape
    units = width // 4
    hidden, cell, gates = np.zeros((steps, items, units)), np.zeros((steps, items, units)), np.zeros(x.shape)
    for t in range(steps)[:: -1 if reverse else 1]:
        sums = x[t] + h @ weight.T + (0 if bias is None else bias)
        gates[t] = 1 / (1 + np.exp(-sums))
        gates[t, :, 2 * units : 3 * units] = np.tanh(sums[:, 2 * units : 3 * units])
        i, f, g, o = np.split(gates[t], 4, axis=1)
        c = f * c + i * g
        h = o * np.tanh(c)
        hidden[t], cell[t] = h, c
    return [hidden, cell, gates]
