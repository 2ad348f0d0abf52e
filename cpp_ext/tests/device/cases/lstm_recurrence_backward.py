"""Calls of LstmRecurrenceBackward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "LstmRecurrenceBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Steps, items and units, whether steps are reversed, and whether there is a gradient of the cells."""
    calls = [(5, 4, 7, 0, True), (3, 2, 33, 1, True), (4, 3, 130, 0, False), (0, 2, 3, 0, True), (2, 0, 3, 1, False)]
    if large:
        calls += [(64, 64, 256, 0, True)]
    for steps, items, units, reverse, given in calls:
        states = (steps, items, units)
        gates = 1 / (1 + np.exp(-random.standard_normal((steps, items, 4 * units))))
        values = [
            random.standard_normal(states), random.standard_normal(states) if given else None,
            random.standard_normal((items, units)), random.standard_normal(states), gates,
            random.standard_normal((4 * units, units)) / units**0.5,
        ]  # fmt: skip
        inputs = [None if one is None else Values.of(one, dtype) for one in values]
        expected = gradients(*(None if one is None else one.wide() for one in inputs), reverse=reverse)
        largest = max(float(np.abs(one).max(initial=1)) for one in expected)
        terms = [arithmetic(dtype) * (8 + units**0.5) * max(1, steps) * largest] * 3
        yield Case(
            f"{steps} steps of {items} x {units}, reverse: {reverse}, cells: {given}", OP, dtype, inputs, expected,
            terms, {"reverse": reverse},
        )  # fmt: skip


def gradients(
    grad_hidden: Any, grad_cell: Any, initial_c: Any, cell: Any, gates: Any, weight: Any, *, reverse: int
) -> list[Any]:
    """What the operator gives."""
    order = list(range(len(cell)))[:: -1 if reverse else 1]
    grad_input, grad_h, grad_c = np.zeros(gates.shape), np.zeros(initial_c.shape), np.zeros(initial_c.shape)
    for k in reversed(range(len(order))):
        t = order[k]
        before = cell[order[k - 1]] if k else initial_c
        i, f, g, o = np.split(gates[t], 4, axis=1)
        shown = np.tanh(cell[t])
        grad_h = grad_h + grad_hidden[t]
        grad_c = grad_c + grad_h * o * (1 - shown**2) + (0 if grad_cell is None else grad_cell[t])
        parts = [grad_c * g * i * (1 - i), grad_c * before * f * (1 - f), grad_c * i * (1 - g**2)]
        grad_input[t] = np.concatenate([*parts, grad_h * shown * o * (1 - o)], axis=1)
        grad_h, grad_c = grad_input[t] @ weight, grad_c * f
    return [grad_input, grad_h, grad_c]
