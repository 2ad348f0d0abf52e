"""Calls of ApplyAdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic, int64s
from device import Values

OP = "ApplyAdamW"
DTYPES = SHORT

OPTIONS: list[tuple[int, float | None, dict[str, Any]]] = [
    (0, None, {}),
    (7, 0.25, {"weight_decay": 0.1, "decoupled_weight_decay": 0}),
    (1000, -2.0, {"beta1": 0.3, "beta2": 0.95, "epsilon": 1e-3, "weight_decay": 0.5}),
    (3, None, {"weight_decay": 0.0, "beta1": 0.0}),
]
"""Steps done before, the scale of the gradient, and attributes."""


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes."""
    shapes: list[tuple[int, ...]] = [(), (0, 3), (7,), (5, 33), (2049,), (300, 200)]
    for shape in [*shapes, *([(4099, 4097)] if large else [])]:
        for step, scale, attributes in OPTIONS:
            parameter, gradient, mean = (np.asarray(random.standard_normal(shape)) for _ in range(3))
            square = random.random(shape)
            tensors = [Values.of(np.asarray(values), dtype) for values in (parameter, gradient, mean, square)]
            rate = Values.of(np.asarray(0.01), "float32")
            inputs: list[Values | None] = [*tensors, rate, int64s(step)]
            inputs.append(None if scale is None else Values.of(np.asarray(scale), "float32"))
            wide = [values.wide() for values in tensors]
            exact, terms = _updated(wide, float(rate.wide()), step, scale or 1.0, **attributes)
            terms = [arithmetic(dtype) * term for term in terms]
            yield Case(f"{shape} step {step}", OP, dtype, inputs, exact, terms, attributes)


def _updated(
    tensors: Sequence[Float64s],
    rate: float,
    step: int,
    scale: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    decoupled_weight_decay: int = 1,
) -> tuple[list[Float64s], list[Float64s]]:
    """The outputs, and the magnitude of what each is a sum of."""
    parameter, gradient, mean, square = tensors
    gradient = gradient * scale
    size = np.abs(gradient)
    start = parameter
    if decoupled_weight_decay:
        start = parameter * (1 - rate * weight_decay)
    else:
        gradient = gradient + weight_decay * parameter
        size = size + weight_decay * np.abs(parameter)
    size = size + np.abs(mean)
    new_mean = beta1 * mean + (1 - beta1) * gradient
    new_square = beta2 * square + (1 - beta2) * gradient**2
    step_size = rate / (1 - beta1 ** (step + 1))
    denominator = np.sqrt(new_square / (1 - beta2 ** (step + 1))) + epsilon
    new_parameter = start - step_size * new_mean / denominator
    # The step of a gradient that weight decay nearly cancels is only as exact as both.
    terms = [np.abs(start) + step_size * size / denominator * (1 + size**2 / new_square), size, new_square + size**2]
    return [np.asarray(out) for out in (new_parameter, new_mean, new_square)], terms
