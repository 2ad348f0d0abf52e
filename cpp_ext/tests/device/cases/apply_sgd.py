"""Calls of ApplySgd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, arithmetic
from device import Values

OP = "ApplySgd"
DTYPES = SHORT

OPTIONS: list[tuple[float | None, bool, dict[str, Any]]] = [
    (None, False, {}),
    (0.25, False, {"weight_decay": 0.5}),
    (None, True, {"momentum": 0.5, "weight_decay": 0.25}),
    (-2.0, True, {"momentum": 0.75, "nesterov": 1}),
]
"""The scale of the gradient, whether there is momentum, and attributes."""


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes."""
    shapes: list[tuple[int, ...]] = [(), (0, 3), (7,), (5, 33), (2049,), (300, 200)]
    for shape in [*shapes, *([(4099, 4097)] if large else [])]:
        for scale, buffered, attributes in OPTIONS:
            tensors = [Values.of(np.asarray(random.standard_normal(shape)), dtype) for _ in range(3)]
            rate = Values.of(np.asarray(0.125), "float32")
            factor = None if scale is None else Values.of(np.asarray(scale), "float32")
            parameter, gradient, buffer = (values.wide() for values in tensors)
            decay, momentum = attributes.get("weight_decay", 0.0), attributes.get("momentum", 0.0)
            gradient = gradient * (1.0 if scale is None else scale)
            whole, size = gradient + decay * parameter, np.abs(gradient) + decay * np.abs(parameter)
            direction, new_buffer, buffer_size = whole, np.zeros(0), np.zeros(0)
            if buffered:
                direction = new_buffer = momentum * buffer + whole
                size = buffer_size = momentum * np.abs(buffer) + size
                if attributes.get("nesterov"):
                    direction, size = whole + momentum * new_buffer, 2 * size
            exact = [parameter - 0.125 * direction, new_buffer]
            terms = [arithmetic(dtype) * (np.abs(parameter) + size), arithmetic(dtype) * buffer_size]
            inputs = [*tensors[:2], rate, tensors[2] if buffered else None, factor]
            yield Case(f"{shape} {attributes}", OP, dtype, inputs, exact, terms, attributes)
