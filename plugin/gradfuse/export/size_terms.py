"""Conditions on sizes of a traced program as terms of ONNX's operators on integers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

from gradfuse.training.batch_checks import SizeOf, Term

_OP_TYPES = {
    **dict.fromkeys(("Mod", "PythonMod"), "Mod"),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), "FloorDiv"),
    **{name: name for name in ("Add", "Mul", "Max", "Min", "And", "Or", "Not")},
    "Equality": "Equal",
    "StrictLessThan": "Less",
    "LessThan": "LessOrEqual",
    "StrictGreaterThan": "Greater",
    "GreaterThan": "GreaterOrEqual",
}
"""Names of sympy's and torch's functions -> operators of terms."""
_LARGEST = 1 << 31


def term_of(condition: Any, sizes: Mapping[str, SizeOf]) -> Term | None:
    """Return a condition as a term, which does not hold where it divides by 0; None where it is not one of integers.

    Args:
        condition: an expression of sympy.
        sizes: its symbols -> what they are the sizes of.
    """
    divisors: dict[Term | SizeOf, None] = {}
    found = _operand(condition, sizes, divisors)
    if not isinstance(found, Term):
        return None
    return functools.reduce(
        lambda left, right: Term("And", (left, right)), (Term("Greater", (one, 0)) for one in divisors), found
    )


def _operand(
    expression: Any, sizes: Mapping[str, SizeOf], divisors: dict[Term | SizeOf, None]
) -> Term | SizeOf | int | None:
    if expression.is_Integer:
        return int(expression) if abs(int(expression)) < _LARGEST else None
    if expression.is_Symbol:
        return sizes[str(expression)]
    operands = []
    for one in expression.args:
        operand = _operand(one, sizes, divisors)
        if operand is None:
            return None
        operands.append(operand)
    if isinstance(expression, sympy.Ne):
        return Term("Not", (Term("Equal", tuple(operands)),))
    op_type = _OP_TYPES.get(type(expression).__name__)
    if expression.is_Pow and isinstance(operands[1], int) and operands[1] > 0:
        op_type, operands = "Mul", [operands[0]] * operands[1]
    if op_type is None:
        return None
    if op_type == "Not":
        return Term(op_type, tuple(operands))
    if op_type in ("Mod", "FloorDiv") and not isinstance(operands[1], int):
        # Where it is 0, a node must not fail before the one that says what is wrong.
        divisors[operands[1]] = None
        operands[1] = Term("Max", (operands[1], 1))
    return functools.reduce(lambda left, right: Term(op_type, (left, right)), operands)
