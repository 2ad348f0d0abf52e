"""Calls of GruRecurrenceBackward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "GruRecurrenceBackward"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Steps, items and units, and whether steps are reversed."""
    calls = [(5, 4, 7, 0), (3, 2, 33, 1), (4, 3, 130, 0), (0, 2, 3, 0), (2, 0, 3, 1)]
    if large:
        calls += [(64, 64, 256, 0)]
    for steps, items, units, reverse in calls:
        states = (steps, items, units)
        gates = 1 / (1 + np.exp(-random.standard_normal((steps, items, 4 * units))))
        values = [
            random.standard_normal(states), np.tanh(random.standard_normal((items, units))),
            np.tanh(random.standard_normal(states)), gates, random.standard_normal((3 * units, units)) / units**0.5,
        ]  # fmt: skip
        inputs = [Values.of(one, dtype) for one in values]
        expected = gradients(*(one.wide() for one in inputs), reverse=reverse)
        largest = max(float(np.abs(one).max(initial=1)) for one in expected)
        terms = [arithmetic(dtype) * (8 + units**0.5) * max(1, steps) * largest] * 3
        yield Case(
            f"{steps} steps of {items} x {units}, reverse: {reverse}", OP, dtype, inputs, expected, terms,
            {"reverse": reverse},
        )  # fmt: skip


def gradients(grad_hidden: Any, initial_h: Any, hidden: Any, gates: Any, weight: Any, *, reverse: int) -> list[Any]:
    """What the operator gives."""
    steps, items, units = hidden.shape
    order = list(range(steps))[:: -1 if reverse else 1]
    grad_input, grad_recurrent = np.zeros((steps, items, 3 * units)), np.zeros((steps, items, 3 * units))
    grad_h = np.zeros(initial_h.shape)
    for k in reversed(range(steps)):
        t = order[k]
        before = hidden[order[k - 1]] if k else initial_h
        r, z, n, h_n = np.split(gates[t], 4, axis=1)
        grad_h = grad_h + grad_hidden[t]
        grad_n = grad_h * (1 - z) * (1 - n**2)
        both = [grad_n * h_n * r * (1 - r), grad_h * (before - n) * z * (1 - z)]
        grad_input[t] = np.concatenate([*both, grad_n], axis=1)
        grad_recurrent[t] = np.concatenate([*both, grad_n * r], axis=1)
        grad_h = grad_h * z + grad_recurrent[t] @ weight
    return [grad_input, grad_h, grad_recurrent]
