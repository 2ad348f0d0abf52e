"""Canonical forms of random expressions, in numbers of 700 digits: they are worth what the graph says.

The oracle is mpmath, whose numbers neither overflow nor underflow. Inputs reach from 1e-300 to 1e300, so that
terms which are next to nothing at ordinary points are most of the value at others: no coefficient may have become
zero, an infinity or a limit. A running error bound says how far a value may be off, as forms take constants for equal
that agree to six digits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import onnx_ir as ir
import pytest
from evaluation import constants
from graphs import GraphBuilder
from hypothesis import given, note, settings
from hypothesis import strategies as st
from onnx import TensorProto

from gradfuse.passes.algebra import Algebra, Monomial, Poly
from gradfuse.passes.reading import Forms

Array = np.ndarray[Any, Any]
SHAPE = (2, 3)
mp = mpmath.MPContext()
mp.dps = 700
NAN = mp.mpf("nan")
ROUNDING = mp.mpf("2e-6")
"""Relative: what forms may make of a constant."""
LAST_DIGITS = mp.mpf(10) ** -680
LARGEST = mp.mpf(10) ** 400  # of the arguments of an exponential, which takes as many digits as its argument has


@dataclass(frozen=True)
class Number:
    """An array of exact values, and bounds on how far off a form may be."""

    value: Array
    error: Array

    def each(self, change: Callable[[Array], Array]) -> Number:
        """The same elements elsewhere."""
        return Number(change(self.value), change(self.error))


def exact(array: Any) -> Number:
    values = np.asarray(np.vectorize(mp.mpf, otypes=[object])(np.asarray(array, np.float64)), object)
    return Number(values, np.asarray(values * 0, object))


def _pointwise(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Number]:
    """An operation on numbers with their error bounds, given as value, error, value, error, ..."""
    wide = np.vectorize(function, otypes=[object, object])

    def operation(*operands: Number) -> Number:
        results = wide(*(part for operand in operands for part in (operand.value, operand.error)))
        return Number(*(np.asarray(a, object) for a in results))

    return operation


def _rounded(value: Any, error: Any) -> tuple[Any, Any]:
    return value, error + ROUNDING * abs(value)


def _sum(a: Any, ea: Any, b: Any, eb: Any) -> tuple[Any, Any]:
    # Where two constants cancel, what they leave is rounding.
    return a + b, ea + eb + ROUNDING * (abs(a) + abs(b))


def _product(a: Any, ea: Any, b: Any, eb: Any) -> tuple[Any, Any]:
    return _rounded(a * b, abs(a) * eb + abs(b) * ea + ea * eb)


def _inverse(a: Any, ea: Any) -> tuple[Any, Any]:
    if not abs(a) > 2 * ea:
        return NAN, NAN
    return _rounded(1 / a, 2 * ea / a**2)


def _exp(a: Any, ea: Any) -> tuple[Any, Any]:
    if not abs(a) < LARGEST or not ea < 50:
        return NAN, NAN
    value = mp.exp(a)
    return _rounded(value, value * mp.expm1(ea))


def _log(a: Any, ea: Any) -> tuple[Any, Any]:
    if not a > 2 * ea:
        return NAN, NAN
    return mp.log(a), 2 * ea / a + ROUNDING * (1 + abs(mp.log(a)))


def _power(exponent: float) -> Callable[[Number], Number]:
    def function(a: Any, ea: Any) -> tuple[Any, Any]:
        if exponent == 0:
            return mp.mpf(1), mp.mpf(0)
        if not abs(a) > 2 * ea and not (a == ea == 0 and exponent > 0):
            return NAN, NAN
        if a < 0 and exponent != int(exponent):
            return NAN, NAN
        value = mp.power(a, exponent)
        relative = ea / abs(a) if a else mp.mpf(0)
        return _rounded(value, abs(value) * mp.expm1(abs(exponent) * 2 * relative))

    return _pointwise(function)


def _less(a: Any, ea: Any, b: Any, eb: Any) -> tuple[Any, Any]:
    if mp.isnan(a) or mp.isnan(b) or not abs(a - b) > ea + eb + ROUNDING * (abs(a) + abs(b)):
        return NAN, NAN
    return mp.mpf(int(a < b)), mp.mpf(0)


def _select(c: Any, ec: Any, a: Any, ea: Any, b: Any, eb: Any) -> tuple[Any, Any]:
    # By the algebra 0 times NaN is 0.
    return (NAN, NAN) if mp.isnan(c) else _rounded(a, ea) if c else _rounded(b, eb)


add, mul, inverse, exp, log = (_pointwise(f) for f in (_sum, _product, _inverse, _exp, _log))
less, select = _pointwise(_less), _pointwise(_select)


def negative(a: Number) -> Number:
    return Number(np.asarray(-a.value, object), a.error)


def minus(a: Number, b: Number) -> Number:
    return add(a, negative(b))


def along(x: Number, axis: int, step: Callable[[Number, Number], Number] = add) -> Number:
    """The sum along an axis, which stays."""
    parts = [x.each(lambda a, k=k: np.take(a, [k], axis)) for k in range(x.value.shape[axis])]  # type: ignore[misc]
    total = parts[0]
    for part in parts[1:]:
        total = step(total, part)
    return total


def running(x: Number, axis: int) -> Number:
    parts = [x.each(lambda a, k=k: np.take(a, [k], axis)) for k in range(x.value.shape[axis])]  # type: ignore[misc]
    sums = list(itertools.accumulate(parts, add))
    return Number(*(np.concatenate([getattr(s, name) for s in sums], axis) for name in ("value", "error")))


# Expressions

CONSTANTS = (
    *(0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 0.1, -7.0, 100.0, -500.0, 500.0, 700.0, 710.0, -750.0, 1000.0, -1000.0, 1e5, 1e6),
    *(1e-7, 1e-20, 1e20, 1e-30, 1e30, 1e-38, 1e38, -1e-38, 1e7, 12345678.0),
)
POINTS = (
    *(
        0.0,
        1.0,
        -1.0,
        2.0,
        0.5,
        -0.25,
        3.5,
        100.0,
        -100.0,
        500.0,
        -500.0,
        499.0,
        710.0,
        1000.0,
        -1000.0,
        1001.5,
        -2000.0,
    ),
    *(1e-300, -1e-300, 1e300, -1e300, 1e150, 1e-150, 1e38, -1e38, 1e-38, 3e37, 1e20, 1e-20, 1e30, -1e-30),
)
EXPONENTS = (2.0, 3.0, 9.0, 0.5, -1.0, -2.0, -0.5, 1.5, 20.0)


class Expression:
    """A graph, and the exact numbers of each of its values."""

    def __init__(self, feeds: Mapping[str, Array]) -> None:
        self.builder = GraphBuilder(20)
        self.numbers: dict[str, Number] = {}
        self.kinds: dict[str, str] = {}
        self.text: list[str] = []
        for name, array in feeds.items():
            kind = TensorProto.BOOL if array.dtype == np.bool_ else TensorProto.DOUBLE
            self._noted(self.builder.input(name, kind, array.shape), exact(array), "b" if kind == 9 else "f")

    def _noted(self, name: str, number: Number, kind: str = "f") -> str:
        self.numbers[name], self.kinds[name] = number, kind
        return name

    def constant(self, value: float) -> str:
        return self._noted(self.builder.constant(value, np.float64), exact(value))

    def node(
        self, op: str, *operands: str, number: Number, kind: str = "f", axes: int | None = None, **named: Any
    ) -> str:
        inputs = [*operands] + ([] if axes is None else [self.builder.ints(axes)])
        name = self.builder.op(op, *inputs, **named)
        self.text.append(f"{name} = {op}({', '.join(inputs)}) {named or ''}")
        return self._noted(name, number, kind)

    def of_kind(self, kind: str) -> list[str]:
        return [name for name, own in self.kinds.items() if own == kind]


def _arithmetic(draw: st.DrawFn, e: Expression, x: str, y: str) -> str:
    n = e.numbers
    op = draw(st.sampled_from(["Add", "Sub", "Mul", "Div", "Sum", "Mean", "Where"]))
    match op:
        case "Add" | "Sum":
            return e.node(op, x, y, number=add(n[x], n[y]))
        case "Sub":
            return e.node(op, x, y, number=minus(n[x], n[y]))
        case "Mul":
            return e.node(op, x, y, number=mul(n[x], n[y]))
        case "Div":
            return e.node(op, x, y, number=mul(n[x], inverse(n[y])))
        case "Mean":
            return e.node(op, x, y, number=mul(add(n[x], n[y]), exact(0.5)))
        case _:
            c = draw(st.sampled_from(e.of_kind("b")))
            return e.node(op, c, x, y, number=select(n[c], n[x], n[y]))


def _function(draw: st.DrawFn, e: Expression, x: str, other: str) -> str:
    n = e.numbers[x]
    op = draw(st.sampled_from(["Neg", "Reciprocal", "Sqrt", "Exp", "Exp", "Exp", "Log", "Pow", "Pow", "Identity"]))
    match op:
        case "Neg":
            return e.node(op, x, number=negative(n))
        case "Reciprocal":
            return e.node(op, x, number=inverse(n))
        case "Sqrt":
            return e.node(op, x, number=_power(0.5)(n))
        case "Exp":
            return e.node(op, x, number=exp(n))
        case "Log":
            return e.node(op, x, number=log(n))
        case "Pow":
            exponent = draw(st.sampled_from(EXPONENTS))
            return e.node(op, x, e.constant(exponent), number=_power(exponent)(n))
        case _:
            return e.node(op, x, number=n)


def _row(draw: st.DrawFn, e: Expression, x: str, other: str) -> str:
    n = e.numbers[x]
    if n.value.ndim != 2:
        return _function(draw, e, x, other)
    axis = draw(st.integers(0, 1))
    size = n.value.shape[axis]
    softmaxes = ["Softmax", "LogSoftmax", "ReduceLogSumExp", "ReduceLogSum"]
    op = draw(st.sampled_from(["ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "CumSum", *softmaxes]))
    match op:
        case "ReduceSum":
            return e.node(op, x, axes=axis, number=along(n, axis))
        case "ReduceMean":
            return e.node(op, x, axes=axis, number=mul(along(n, axis), exact(1 / size)))
        case "ReduceSumSquare":
            return e.node(op, x, axes=axis, number=along(mul(n, n), axis))
        case "ReduceL2":
            return e.node(op, x, axes=axis, number=_power(0.5)(along(mul(n, n), axis)))
        case "ReduceLogSum":
            return e.node(op, x, axes=axis, number=log(along(n, axis)))
        case "ReduceLogSumExp":
            return e.node(op, x, axes=axis, number=log(along(exp(n), axis)))
        case "CumSum":
            at = e.builder.constant(axis, np.int64)
            return e.node(op, x, at, number=running(n, axis))
        case "Softmax":
            return e.node(op, x, axis=axis, number=mul(exp(n), inverse(along(exp(n), axis))))
        case _:
            return e.node(op, x, axis=axis, number=minus(n, log(along(exp(n), axis))))


def _view(draw: st.DrawFn, e: Expression, x: str, other: str) -> str:
    n, b = e.numbers[x], e.builder
    if n.value.ndim != 2:
        return _function(draw, e, x, other)
    size = n.value.shape[1]
    match draw(st.integers(0, 6)):
        case 0:
            back = e.node("Transpose", x, number=n.each(np.transpose), perm=[1, 0])
            e.kinds.pop(back)
            return e.node("Transpose", back, number=n, perm=[1, 0])
        case 1 if size > 1:
            last = b.ints(-(1 << 63))
            flipped = n.each(lambda a: a[:, ::-1])
            return e.node("Slice", x, b.ints(-1), last, b.ints(1), b.ints(-1), number=flipped)
        case 2:
            index = draw(st.lists(st.integers(0, size - 1), min_size=3, max_size=3))
            return e.node("Gather", x, b.ints(*index), axis=1, number=n.each(lambda a: a[:, index]))
        case 3 if n.value.shape == SHAPE:
            flat = e.node("Reshape", x, b.ints(-1), number=n.each(np.ravel))
            e.kinds.pop(flat)
            return e.node("Reshape", flat, b.ints(2, 3), number=n)
        case 4 if size > 1:
            halves = [x, e.node("Neg", x, number=negative(n))]
            pieces = [
                b.op("Slice", h, b.ints(s), b.ints(t), b.ints(1))
                for h, s, t in zip(halves, (0, 1), (1, 3), strict=True)
            ]
            joined = [np.concatenate([a[:, :1], c[:, 1:]], 1) for a, c in ((n.value, -n.value), (n.error, n.error))]
            return e.node("Concat", *pieces, axis=1, number=Number(*joined))
        case 5 if n.value.shape == SHAPE:
            upper = np.triu(np.ones(SHAPE, bool))
            kept = n.each(lambda a: np.where(upper, a, np.vectorize(mp.mpf, otypes=[object])(np.zeros(SHAPE))))
            return e.node("Trilu", x, number=kept)
        case _:
            return e.node("Expand", x, b.ints(*SHAPE), number=n.each(lambda a: np.broadcast_to(a, SHAPE)))


def _condition(draw: st.DrawFn, e: Expression, x: str, y: str) -> str:
    n = e.numbers
    c, d = (draw(st.sampled_from(e.of_kind("b"))) for _ in range(2))
    match draw(st.integers(0, 3)):
        case 0:
            return e.node("Less", x, y, number=less(n[x], n[y]), kind="b")
        case 1:
            return e.node("Not", c, number=Number(np.asarray(1 - n[c].value, object), n[c].error), kind="b")
        case 2:
            return e.node("And", c, d, number=mul(n[c], n[d]).each(lambda a: a), kind="b")
        case _:
            return e.node("Cast", c, number=n[c], to=TensorProto.DOUBLE)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Expression, str]:
    points = st.lists(st.sampled_from(POINTS), min_size=6, max_size=6)
    feeds = {name: np.asarray(draw(points)).reshape(SHAPE) for name in ("x", "y")}
    feeds["c"] = np.asarray(draw(st.lists(st.booleans(), min_size=6, max_size=6))).reshape(SHAPE)
    e = Expression(feeds)
    recent = ["x"]
    for _ in range(draw(st.integers(1, 9))):
        x = draw(st.sampled_from(recent[-3:]))
        y = (
            e.constant(draw(st.sampled_from(CONSTANTS)))
            if draw(st.booleans())
            else draw(st.sampled_from(["y", *recent[-6:]]))
        )
        if draw(st.booleans()):
            x, y = y, x
        new = draw(st.sampled_from([_arithmetic, _arithmetic, _function, _function, _row, _view, _condition]))
        name = new(draw, e, x, y)
        if e.kinds[name] == "f":
            recent.append(name)
    return e, recent[-1]


class Exact:
    """The worth of polynomials at one place each, in mpmath's numbers."""

    def __init__(self, algebra: Algebra, tensors: Mapping[object, Array]) -> None:
        self.algebra = algebra
        self.tensors = tensors
        self.largest = mp.mpf(0)
        """Of all that was added up, which says what the digits are good for."""

    def sum(self, terms: Iterable[Any]) -> Any:
        known = [*terms]
        self.largest = max([self.largest, *(abs(t) for t in known if mp.isfinite(t))])
        return mp.fsum(known)

    def poly(self, poly: Poly, env: Mapping[int, int]) -> Any:
        return self.sum(mp.mpf(c) * self.monomial(m, env) for m, c in poly.terms.items())

    def monomial(self, monomial: Monomial, env: Mapping[int, int]) -> Any:
        factors = [(self.atom(a, env), e) for a, e in monomial]
        # An indicator that is 0 takes what is no number with it.
        if any(
            f == 0 and e > 0 and self.algebra.atoms[a].indicator
            for (f, e), (a, _) in zip(factors, monomial, strict=True)
        ):
            return mp.mpf(0)
        result = mp.mpf(1)
        for factor, e in factors:
            if mp.isnan(factor) or (factor == 0 and e < 0) or (factor < 0 and e != int(e)):
                return NAN
            result *= mp.power(factor, mp.mpf(float(e)))
        return result

    def atom(self, a: int, env: Mapping[int, int]) -> Any:
        atom = self.algebra.atoms[a]
        match atom.kind:
            case "var":
                return mp.mpf(env[atom.args[0]])
            case "tensor":
                data = self.tensors[atom.args[0]]
                at = [int(mp.nint(self.poly(p, env))) for p in atom.args[1:]]
                inside = all(0 <= k < n for k, n in zip(at, data.shape, strict=True))
                return data[tuple(at)] if inside else NAN
            case "exp":
                return _exp(self.monomial(atom.args[0], env), mp.mpf(0))[0]
            case "log":
                return _log(self.poly(atom.args[0], env), mp.mpf(0))[0]
            case "pow":
                return self.poly(atom.args[0], env)
            case "eq":
                return mp.mpf(int(self.poly(atom.args[0], env) == 0))
            case "lt":
                below = self.poly(atom.args[0], env)
                return NAN if mp.isnan(below) else mp.mpf(int(below < 0))
            case "inside":
                return mp.mpf(int(0 <= self.poly(atom.args[0], env) < self.poly(atom.args[1], env)))
            case "sum":
                ranges = [range(int(self.poly(s, {}))) for s in atom.args[0]]
                bound = self.algebra.bound_of(atom)
                places = (dict(zip(bound, at, strict=True)) for at in itertools.product(*ranges))
                return self.sum(self.monomial(atom.args[1], {**env, **place}) for place in places)
            case kind:
                raise AssertionError(kind)


def _squeezed(array: Array) -> Array:
    return array.reshape([n for n in array.shape if n != 1])


def _compared(e: Expression, result: str) -> int | None:
    """How many elements of the result were compared; None where it is opaque."""
    e.builder.output(e.builder.op("Identity", result), TensorProto.DOUBLE)
    model = ir.from_proto(e.builder.model())
    read = Forms(model.graph)
    (output,) = model.graph.outputs
    form = read.get(output)
    if form is None or any(str(v.name) == result for v in read.opaque):
        return None
    tensors: dict[object, Array] = {k: exact(a).value for k, a in constants(read, model.graph).items()}
    tensors |= {name: _squeezed(n.value) for name, n in e.numbers.items()}
    algebra = Exact(read.algebra, tensors)
    sizes = [int(s.integer or 0) for s in form.sizes]
    number = e.numbers[result].each(_squeezed)
    assert list(number.value.shape) == sizes
    count = 0
    for at in np.ndindex(*sizes):
        wanted, error = number.value[at], number.error[at]
        if mp.isnan(wanted) or mp.isnan(error):
            continue
        worth = algebra.poly(form.poly, dict(enumerate(at)))
        if mp.isnan(worth):
            continue
        assert abs(worth - wanted) <= 4 * error + algebra.largest * LAST_DIGITS, (
            f"{list(at)}: {mp.nstr(worth, 12)} for {mp.nstr(wanted, 12)} by {read.algebra.text(form.poly)}"
        )
        count += 1
    return count


@pytest.mark.long
def test_forms_are_worth_what_the_expressions_are() -> None:
    found: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(expressions())
    def compare(drawn: tuple[Expression, str]) -> None:
        e, result = drawn
        note("\n".join(e.text))
        count = _compared(e, result)
        found["opaque" if count is None else "compared" if count else "no number"] += 1

    compare()
    assert found["compared"] > 0.7 * found.total(), found
