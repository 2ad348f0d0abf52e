"""Calls of Pointwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic, int64s, kept
from device import Values

OP = "Pointwise"
DTYPES = SHORT

_ERF = np.vectorize(math.erf, otypes=[float])
_THRESHOLD = round(0.4 * 2**31)
Shape = tuple[int, ...]
Formula = Callable[..., Sequence[Float64s]]


def _sigmoid(x: Float64s) -> Float64s:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: Float64s, bias: Float64s) -> Sequence[Float64s]:
    biased = x + bias
    return [0.5 * biased * (1 + _ERF(biased / math.sqrt(2)))]


def _swiglu(grad: Float64s, x: Float64s, y: Float64s) -> Sequence[Float64s]:
    share = _sigmoid(x)
    return [grad * y * share * (1 + x * (1 - share)), grad * x * share]


def _truths(a: Float64s, b: Float64s) -> Sequence[Float64s]:
    chosen = np.where((a < b) & ~(b <= 0) | (a == b), np.maximum(a, 0.5), np.minimum(b, np.abs(a)))
    return [chosen, -np.where((a > 1) | (b >= 1), np.maximum(b, 0), a)]


def _functions(a: Float64s, b: Float64s) -> Sequence[Float64s]:
    positive = np.abs(a) + 0.125
    return [np.log(positive) - np.sqrt(positive), np.tanh(b) / np.exp(-positive), 1 / positive]


def _sum(*inputs: Float64s) -> Sequence[Float64s]:
    total = np.zeros(())
    for one in inputs:
        total = total + one
    return [total]


_ADDED = f"{'Add(' * 7}x0, {', '.join(f'x{index})' for index in range(1, 8))}"
_ADDED_SHAPES: list[Shape] = [(3, 4, 5, 6), (4, 1, 6), (3, 1, 1, 1), (6,), (), (1, 4, 5, 1), (5, 1), (1, 1, 1, 6)]
_CALLS: list[tuple[str, Formula, list[Shape]]] = [
    ("y0 = x0", lambda x: [x], [()]),
    ("y0 = Mul(Mul(x0, Sigmoid(x0)), x1)", lambda x, y: [x * _sigmoid(x) * y], [(5, 33), (5, 33)]),
    ("b = Add(x0, x1); y0 = Mul(Mul(0.5, b), Add(1, Erf(Mul(b, 0.70710677))))", _gelu, [(300, 200), (200,)]),
    (
        "s = Sigmoid(x1); g = Mul(x0, s); y0 = Mul(Mul(g, x2), Add(1, Mul(x1, Sub(1, s)))); y1 = Mul(g, x1);",
        _swiglu,
        [(2, 7, 3, 5), (2, 7, 3, 5), (7, 1, 5)],
    ),
    (
        "y0 = Where(Or(And(Less(x0, x1), Not(LessOrEqual(x1, 0))), Equal(x0, x1)), Max(x0, 0.5), Min(x1, Abs(x0)));"
        " y1 = Neg(Where(Or(Greater(x0, 1), GreaterOrEqual(x1, 1)), Relu(x1), x0))",
        _truths,
        [(1000, 3), (1000, 1)],
    ),
    (
        "p = Add(Abs(x0), 0.125); y2 = Reciprocal(p); y1 = Div(Tanh(x1), Exp(Neg(p))); y0 = Sub(Log(p), Sqrt(p))",
        _functions,
        [(4, 129), (1, 1)],
    ),
    ("y0 = Add(x1, x1)", lambda x, y: [x * 0 + 2 * y], [(0, 3), (3,)]),
    (f"y0 = {_ADDED}", _sum, _ADDED_SHAPES),
]
_LARGE: list[tuple[str, Formula, list[Shape]]] = [
    ("y0 = Mul(Mul(x0, Sigmoid(x0)), x1)", lambda x, y: [x * _sigmoid(x) * y], [(4099, 4097), (4099, 4097)])
]


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Every operator, broadcasts of all kinds, up to three outputs, and dropout."""
    for expression, formula, shapes in [*_CALLS, *(_LARGE if large else [])]:
        inputs = [Values.of(np.asarray(random.standard_normal(shape)), dtype) for shape in shapes]
        yield _case(expression, formula, inputs, dtype)
    inputs = [Values.of(np.asarray(random.standard_normal(shape)), dtype) for shape in _ADDED_SHAPES]
    stays = kept(_ADDED_SHAPES[0], _THRESHOLD, 2**35 + 7, 5)
    yield _case(
        f"k = Kept(); y0 = Where(k, {_ADDED}, 0); y2 = Where(k, 1.5, -1.5e0)",
        lambda *given: [np.where(stays, _sum(*given)[0], 0.0), np.zeros(0), np.where(stays, 1.5, -1.5)],
        [*inputs, int64s(2**35 + 7), int64s([3])],
        dtype,
        {"dropout_threshold": _THRESHOLD, "draw": 2},
    )


def _case(
    expression: str,
    formula: Formula,
    inputs: Sequence[Values],
    dtype: str,
    attributes: dict[str, Any] | None = None,
) -> Case:
    numbers = [one for one in inputs if one.dtype == dtype]
    given: list[Values | None] = [*numbers, *[None] * (8 - len(numbers)), *inputs[len(numbers) :]]
    exact = [np.asarray(one) for one in formula(*(one.wide() for one in numbers))]
    exact += [np.zeros(0)] * (3 - len(exact))
    # Where a sum is small beside what is added, its error is that of the latter.
    most = sum(np.abs(one.wide()).max(initial=1.0) for one in numbers)
    terms = [arithmetic(dtype) * most * (1 + np.abs(one)) for one in exact]
    shape = numbers[0].bits.shape
    return Case(
        f"{shape}: {expression}", OP, dtype, given, exact, terms, {"expression": expression, **(attributes or {})}
    )
