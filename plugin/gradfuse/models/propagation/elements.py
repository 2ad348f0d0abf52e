"""Small values that are known whole or in part, and arithmetic on them.

An element is a number, a truth value, the name of a size, or None where nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.models.propagation.sizes import Sizes, Unknown

Elements: TypeAlias = "npt.NDArray[np.object_]"

MOST_ELEMENTS = 64
"""Sizes have no more elements; what has more is data."""
INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL


def objects(array: npt.ArrayLike) -> Elements:
    given = np.asarray(array)
    found = np.empty(given.shape, object)
    for index in np.ndindex(given.shape):
        element = given[index]
        found[index] = element.item() if given.dtype.kind in "biu" else element
    return found


def elementwise(function: Callable[..., Any], *operands: Elements | None) -> Elements | None:
    if any(operand is None for operand in operands):
        return None
    try:
        return np.asarray(np.frompyfunc(function, len(operands), 1)(*operands), object)
    except (ValueError, TypeError, ArithmeticError):
        return None


def numeric(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of two numbers that is unknown of others."""
    return lambda a, b: None if a is None or b is None or isinstance(a, str) or isinstance(b, str) else function(a, b)


def added(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return a if b == 0 else b if a == 0 else None
    return None if a is None or b is None else a + b


def _subtracted(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return 0 if a == b else a if b == 0 else None
    return None if a is None or b is None else a - b


def multiplied(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return 0 if a == 0 or b == 0 else a if b == 1 else b if a == 1 else None
    return None if a is None or b is None else a * b


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, str):
        return a if b == 1 else None
    if a is None or b is None or isinstance(b, str) or b == 0:
        return None
    if isinstance(a, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return a / b


def _remainder(a: Any, b: Any) -> Any:
    return a % b if isinstance(a, int) and isinstance(b, int) and b != 0 else None


def _equal(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        other = b if isinstance(a, str) else a
        # A size is never negative.
        return True if a == b else False if isinstance(other, int) and other < 0 else None
    return None if a is None or b is None else bool(a == b)


def _less(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        if a == b or (isinstance(b, int) and b <= 0):
            return False
        return True if isinstance(a, int) and a < 0 else None
    return None if a is None or b is None else bool(a < b)


def _extreme(a: Any, b: Any, *, largest: bool) -> Any:
    if a == b:
        return a
    smaller = _less(a, b)
    return None if smaller is None else b if smaller == largest else a


def chosen(condition: Any, a: Any, b: Any) -> Any:
    if condition is None:
        return a if a == b and a is not None else None
    return a if condition else b


def _negated(a: Any) -> Any:
    return None if a is None else not a


def _both(a: Any, b: Any) -> Any:
    return False if a is False or b is False else None if a is None or b is None else bool(a and b)


def _either(a: Any, b: Any) -> Any:
    return True if a is True or b is True else None if a is None or b is None else bool(a or b)


COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Equal": _equal,
    "Less": _less,
    "Greater": lambda a, b: _less(b, a),
    "GreaterOrEqual": lambda a, b: _negated(_less(a, b)),
    "LessOrEqual": lambda a, b: _negated(_less(b, a)),
    "And": _both,
    "Or": _either,
    "Xor": numeric(lambda a, b: bool(a) != bool(b)),
}
COMPUTED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": added,
    "Sub": _subtracted,
    "Mul": multiplied,
    "Div": _divided,
    "Mod": _remainder,
    "Max": lambda a, b: _extreme(a, b, largest=True),
    "Min": lambda a, b: _extreme(a, b, largest=False),
    "Sum": added,
}
OF_ONE: Mapping[str, Callable[[Any], Any]] = {
    "Identity": lambda a: a,
    "Neg": lambda a: None if a is None or isinstance(a, str) else -a,
    "Abs": lambda a: a if a is None or isinstance(a, str) else abs(a),
    "Not": _negated,
    "Floor": lambda a: None if a is None else type(a)(np.floor(a)),
    "Ceil": lambda a: None if a is None else type(a)(np.ceil(a)),
    "Sqrt": lambda a: None if a is None else np.sqrt(a),
}


def caster(dtype: ir.DataType) -> Callable[[Any], Any]:
    def cast(element: Any) -> Any:
        if element is None or isinstance(element, str):
            return element if dtype in (INT64, ir.DataType.INT32) else None
        if dtype == BOOL:
            return bool(element)
        if dtype in (INT64, ir.DataType.INT32):
            return int(element)
        return dtype.numpy().type(element) if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else None

    return cast


def as_sizes(elements: Elements | None) -> Sizes:
    """The sizes that a vector holds."""
    if elements is None or elements.ndim != 1:
        raise Unknown
    return [None if isinstance(e, (int, np.integer)) and e < 0 else e for e in elements]
