"""Numbers as users have them: Python's, numpy's, and tensors of shape ()."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable
from typing import Any

from gradfuse.errors import ArgumentError

_KINDS = {"float": "a number", "int": "a whole number", "tuple[float, float]": "two numbers"}
"""The types of a dataclass's fields that hold numbers, as they are written -> what is expected of them."""


def real(value: Any) -> float | None:
    """Return a real number as Python's; None: it is none, such as a truth value."""
    value = _of_python(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def whole(value: Any) -> int | None:
    """Return a whole number as Python's; None: it is none, such as a truth value or 2.0."""
    value = _of_python(value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def take_numbers(options: Any) -> None:
    """Let the fields of a frozen dataclass that are numbers be Python's.

    Raises:
        ArgumentError: a field is no number.
    """
    for field in dataclasses.fields(options):
        if field.type not in _KINDS:
            continue
        value: Any = getattr(options, field.name)
        found: Any
        if field.type == "tuple[float, float]":
            pair = [real(one) for one in value] if isinstance(value, Iterable) and not isinstance(value, str) else []
            found = None if len(pair) != 2 or None in pair else tuple(pair)
        else:
            found = real(value) if field.type == "float" else whole(value)
        if found is None:
            wanted = _KINDS[str(field.type)]
            raise ArgumentError(f"{type(options).__name__}: {field.name} is {value!r}; expected {wanted}")
        object.__setattr__(options, field.name, found)


def _of_python(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
