"""Conditions on sizes of a traced program as terms of ONNX's operators on integers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

from gradfuse.training.batch_checks import SizeOf, Term

_OP_TYPES = {
    **{name: name for name in ("Add", "Mul", "Max", "Min", "And", "Or", "Not")},
    **dict.fromkeys(("Mod", "PythonMod"), "Mod"),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), "FloorDiv"),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), "TrueDiv"),
    "Equality": "Equal",
    "StrictLessThan": "Less",
    "LessThan": "LessOrEqual",
    "StrictGreaterThan": "Greater",
    "GreaterThan": "GreaterOrEqual",
    "ToFloat": "Real",
    "TruncToInt": "Int",
    "FloatPow": "Pow",
    "OpaqueUnaryFn_sqrt": "Sqrt",
    "BitwiseFn_bitwise_and": "BitwiseAnd",
    "BitwiseFn_bitwise_or": "BitwiseOr",
    "BitwiseFn_bitwise_xor": "BitwiseXor",
}
"""Names of sympy's and torch's functions -> operators of terms."""
_ROUNDED = {"FloorToInt": "Floor", "CeilToInt": "Ceil", "RoundToInt": "Round"}
_LARGEST = 1 << 31
_MOST_FACTORS = 8


def term_of(condition: Any, sizes: Mapping[str, SizeOf]) -> Term | None:
    """Return a condition as a term, which does not hold where it divides by 0; None where it is more than arithmetic.

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
) -> Term | SizeOf | float | None:
    if expression.is_Integer:
        return int(expression) if abs(int(expression)) < _LARGEST else None
    if expression.is_Float:
        return float(expression)
    if expression.is_Symbol:
        return sizes[str(expression)]
    operands: list[Term | SizeOf | float] = []
    for one in expression.args:
        operand = _operand(one, sizes, divisors)
        if operand is None:
            return None
        operands.append(operand)
    name = type(expression).__name__
    if isinstance(expression, sympy.Abs):
        return Term("Max", (operands[0], Term("Mul", (operands[0], -1))))
    if isinstance(expression, sympy.Ne):
        return Term("Not", (Term("Equal", tuple(operands)),))
    if name in _ROUNDED:
        return Term("Int", (Term(_ROUNDED[name], tuple(operands)),))
    op_type = _OP_TYPES.get(name)
    if name in ("Pow", "PowByNatural"):
        base, exponent = operands
        if isinstance(exponent, int) and 0 < exponent <= _MOST_FACTORS:
            op_type, operands = "Mul", [base] * exponent
    if op_type is None:
        return None
    if len(operands) == 1:
        return Term(op_type, tuple(operands))
    if op_type in ("Mod", "FloorDiv", "TrueDiv") and not isinstance(operands[1], (int, float)):
        divisors[operands[1]] = None
        if op_type != "TrueDiv" and expression.args[1].is_integer:
            # Where it is 0, a node must not fail before the one that says what is wrong.
            operands[1] = Term("Max", (operands[1], 1))
    return functools.reduce(lambda left, right: Term(op_type, (left, right)), operands)
