"""Pointwise: PyTorch's answer, arguments, random expressions, and what roundings leave of an expression's value."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from operators.attention import kept
from operators.base import Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered

THRESHOLD = round(0.3 * 2**31)
GAIN = str(np.float32(1 / 0.7))

SWIGLU = "y0 = Mul(Mul(x0, Sigmoid(x0)), x1)"
SWIGLU_BACKWARD = (
    "s = Sigmoid(x1); g = Mul(x0, x2); y0 = Mul(x0, Mul(x1, s)); y1 = Mul(g, Add(s, Mul(Mul(x1, s), Sub(1.0, s))))"
)
RELU = "y0 = Relu(Add(x0, x1))"
RELU_BACKWARD = "y0 = Where(Greater(x1, 0.0), x0, 0.0)"
DROPOUT = f"y0 = Add(Where(Kept(), Mul(Add(x0, x1), {GAIN}), 0.0), x2)"
DROPOUT_BACKWARD = f"y0 = Where(Kept(), Mul(x0, {GAIN}), 0.0)"
ROTARY = "y0 = Add(Mul(x0, x2), Mul(x1, x3))"
GELU = (
    "t = Tanh(Mul(0.7978846, Add(x0, Mul(0.044715, Mul(x0, Mul(x0, x0)))))); y0 = Mul(Mul(0.5, x0), Add(1.0, t)); "
    "y1 = Erf(Mul(x0, 0.70710677))"
)
UNARY = (
    "p = Add(Abs(x0), 0.5); y0 = Add(Add(Sqrt(p), Reciprocal(p)), Add(Exp(Neg(x0)), Log(p))); "
    "y1 = Add(Erf(x0), Add(Tanh(x0), Sigmoid(x0))); y2 = Relu(x0)"
)
BINARY = (
    "a = Max(x0, x1); b = Min(x0, x1); c = Div(Sub(x0, x1), Add(Abs(x1), 1.0)); "
    "y0 = Where(Or(Less(x0, x1), Equal(x0, x1)), a, c); "
    "y1 = Where(And(GreaterOrEqual(x0, 0.25), Not(Kept())), b, c); "
    "y2 = Where(And(LessOrEqual(x1, 0.0), Greater(x0, -0.5)), a, b)"
)
SPECIAL = (
    "a = Max(x0, x1); b = Min(x0, x1); y0 = Add(Relu(a), Abs(b)); "
    "y1 = Where(Or(Less(x0, x1), Not(GreaterOrEqual(x0, x1))), b, Div(x0, x1)); "
    "y2 = Where(Equal(x0, x1), Sub(x0, x1), Mul(x0, x1))"
)
WITHOUT_X0 = "y0 = Exp(x1); y1 = 2.5; y2 = x0"
EVERY = (
    "a = Add(Mul(x0, x1), Mul(x2, x3)); b = Add(Sub(x4, x5), Max(x6, x7)); "
    "y0 = Where(Kept(), Add(a, b), 0.0); y1 = a; y2 = Mul(b, -0.5)"
)


def pointwise(
    *inputs: Tensor | None,
    expression: str = "y0 = x0",
    dropout_threshold: int = 0,
    draw: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """The expression as Python reads it, by PyTorch's operators."""
    work = working_type(dtype)
    tensors = [*inputs, *[None] * 10][:10]
    first, seed, drawn = tensors[0], tensors[8], tensors[9]
    assert first is not None
    values: dict[str, Any] = {f"x{index}": one.to(work) for index, one in enumerate(tensors[:8]) if one is not None}

    def typed(value: Any) -> Tensor:
        # A number is that of float32, whatever the type of the computation.
        return value if isinstance(value, Tensor) else torch.tensor(float(np.float32(value)), dtype=work)

    def on_tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments: function(*map(typed, arguments))

    def keeps() -> Tensor:
        assert seed is not None
        number = draw + (0 if drawn is None else int(drawn))
        return kept(first.shape, dropout_threshold, int(seed), number)

    exec(expression, {name: on_tensors(function) for name, function in _TORCH.items()} | {"Kept": keeps}, values)
    nothing = torch.zeros(0, dtype=dtype)
    y0, y1, y2 = (
        typed(values[name]).to(dtype).expand(first.shape).contiguous() if name in values else nothing
        for name in ("y0", "y1", "y2")
    )
    return y0, y1, y2


def _sqrt(x: Tensor) -> Tensor:
    """Numpy's: some builds of PyTorch round it twice."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


_TORCH: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs, "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Sqrt": _sqrt, "Exp": torch.exp,
    "Log": torch.log, "Erf": torch.erf, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu,
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Max": torch.maximum,
    "Min": torch.minimum, "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Not": torch.logical_not, "And": torch.logical_and, "Or": torch.logical_or,
    "Where": torch.where,
}  # fmt: skip


def arguments(
    expression: str, dtype: torch.dtype, *shapes: Sequence[int], seed: int = 0, drawn: int | None = None, **given: Any
) -> Sample:
    """Random numbers of some shapes for x0, x1 and so on, with a seed where the expression has Kept()."""
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor | None] = [torch.randn(tuple(shape), generator=generator).to(dtype) for shape in shapes]
    if "Kept" in expression:
        given = {"dropout_threshold": THRESHOLD, **given}
        inputs += [*[None] * (8 - len(inputs)), torch.tensor([seed + 5])]
        inputs += [] if drawn is None else [torch.tensor(drawn)]
    return Sample(inputs, {"expression": expression, **given})


def special(dtype: torch.dtype) -> Sample:
    """Every pair of some numbers that are NaN, infinite or 0."""
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -2.5], dtype=dtype)
    return Sample([numbers[:, None].expand(7, 7).contiguous(), numbers], {"expression": SPECIAL})


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments(SWIGLU, dtype, (3, 17), (3, 17)),
        arguments(SWIGLU_BACKWARD, dtype, (2, 5, 8), (2, 5, 8), (2, 5, 8)),
        arguments(RELU, dtype, (4, 9), (9,)),
        arguments(RELU_BACKWARD, dtype, (33,), (33,)),
        arguments(DROPOUT, dtype, (2, 3, 19), (19,), (2, 3, 19), draw=2),
        arguments(DROPOUT_BACKWARD, dtype, (70,), seed=3, drawn=4, draw=1),
        arguments(ROTARY, dtype, (2, 3, 5, 8), (2, 3, 5, 8), (5, 8), (1, 1, 5, 8)),
        arguments(GELU, dtype, (41,)),
        arguments(UNARY, dtype, (5, 13)),
        arguments(BINARY, dtype, (3, 4, 6), (4, 1), seed=1),
        arguments(EVERY, dtype, (2, 3, 4), (), (1,), (4,), (3, 1), (2, 1, 1), (1, 3, 4), (2, 3, 4), drawn=1),
        arguments(WITHOUT_X0, dtype, (3, 5), (3, 1)),
        arguments("y0 = Add(x0, x1)", dtype, (), ()),
        special(dtype),
    ]


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    """An expression of each kind, with inputs that broadcast in any way."""
    expression = rng.choice([SWIGLU, SWIGLU_BACKWARD, RELU_BACKWARD, DROPOUT, ROTARY, UNARY, BINARY])
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    shapes = [shape, *(broadcast(rng, shape) for _ in range(3))][: len(set(re.findall(r"x\d", expression)))]
    sample = arguments(expression, dtype, *shapes, seed=rng.randint(0, 99))
    inputs = [
        value if value is None or value.dtype != dtype else rng.choice((repeated, scattered))(value, rng)
        for value in sample.inputs
    ]
    return sample.with_inputs(inputs)


def broadcast(rng: random.Random, shape: Sequence[int]) -> list[int]:
    """A shape that broadcasts to another."""
    ones = [1 if rng.random() < 0.4 else size for size in shape]
    return ones[rng.randint(0, len(ones)) if rng.random() < 0.4 else 0 :]


def _sized(size: int, dtype: torch.dtype) -> Sample:
    expression = "s = Sigmoid(x1); y0 = Add(Where(Kept(), Mul(x0, s), 0.0), x2); y2 = Mul(s, x3)"
    return arguments(expression, dtype, (2, size), (2, size), (size,), (2, 1))


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    return [
        arguments(SWIGLU_BACKWARD, dtype, (2, length), (2, length), (2, length)),
        arguments(DROPOUT, dtype, (3, length), (length,), (3, 1)),
        arguments(UNARY, dtype, (length,)),
        arguments(WITHOUT_X0, dtype, (2, length), (2, 1)),
    ]


def _valid() -> Sample:
    return arguments(EVERY, torch.float32, (2, 3), (3,), (2, 1), (), (1,), (1, 3), (2, 3), (1, 1), drawn=1)


BAD = {
    "": "at its end",
    "y0": "expected '=' at its end",
    "y0 = Add(x0": "expected ',' or ')' at its end",
    "y0 = Add(x0 x1)": "is 'x1'; expected ',' or ')' there",
    "y0 = Add(x0, x1,)": "is ')'; expected a number, a name or an operator there",
    "y0 = x0 y1 = x1": "is 'y1'; expected ';' there",
    "y0 = x0;; y1 = x1": "is ';'; expected a name and '=' there",
    "y0 = x0 + x1": "is '+'; expected ';' there",
    "y0 = .5": "is '.'; expected a number, a name or an operator there",
    "Y0 = x0": "is 'Y'; expected a name and '=' there",
    "y0 = Pow(x0, x1)": "is 'Pow'; expected an operator of Pointwise",
    "y0 = Add(x0)": "is 'Add(x0)'; expected 2 arguments",
    "y0 = Neg(x0, x1)": "is 'Neg(x0, x1)'; expected 1 argument",
    "y0 = Where(x0, x1, x2)": "is 'x0'; expected a truth value as argument of Where",
    "y0 = Neg(Less(x0, x1))": "is 'Less(x0, x1)'; expected a number as argument of Neg",
    "y0 = Less(x0, x1)": "is 'y0 = Less(x0, x1)'; expected a number for the output y0",
    "x1 = x0; y0 = x1": "is 'x1 = x0'; expected an assignment to another name, as x1 is an input",
    "y0 = x0; y0 = x1": "is 'y0 = x1'; expected one assignment to y0",
    "y0 = t; t = x0": "is 't'; expected a name that is assigned before it is read",
    "y0 = x8": "is 'x8'; expected a name that is assigned before it is read",
    "t = Neg(x0); y0 = x0": "is 't = Neg(x0)'; expected a reader of t",
    "y1 = x0": "is 'y1 = x0'; expected an assignment to y0",
    "y0 = 4e38": "is '4e38'; expected a number of float32",
    f"y0 = {'Neg(' * 65}x0{')' * 65}": "is of more than 64 operators; expected at most 64",
    "; ".join(
        [f"t{k} = Neg(x0)" for k in range(18)] + [f"y0 = {'Add(' * 17}t17" + "".join(f", t{k})" for k in range(17))]
    ): ("is of 18 values at once; expected at most 16"),
}
"""Texts that are no expression, and what the message of each says."""


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0)
    for index in range(8):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.all_retyped(range(8), torch.float64, torch.int32)
    yield from near.reshaped(0, (3, 3), (2, 4), (3,), (), (2, 1), (0, 3), (1,) * 9)
    for index in range(1, 8):
        yield from near.reshaped(index, (2,), (2, 4), (3, 3), (1, 2, 3), (0, 3), (0,))
    for index in (8, 9):
        yield from near.retyped(index, torch.int32, torch.float32)
        yield from near.reshaped(index, (2,), (1, 1), (0,))
    yield from near.with_attributes("dropout_threshold", -1, 2**31)
    yield from near.with_attributes("expression", *BAD)
    # These read less than is given.
    yield from near.with_attributes("expression", EVERY.replace("x7", "x6"), EVERY.replace("Kept()", "Less(x0, x1)"))


SAMPLES = Samples(
    oracle=pointwise,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[
        (arguments("y0 = Add(x0, x1)", torch.float32, (0, 3), (3,)), [(0, 3), (0,), (0,)]),
        (arguments(DROPOUT, torch.float32, (2, 0), (0,), (2, 1)), [(2, 0), (0,), (0,)]),
        (arguments(WITHOUT_X0, torch.float32, (0, 3), (1, 3)), [(0, 3)] * 3),
    ],
)


ARITHMETIC = ("Abs", "Neg", "Add", "Sub", "Mul", "Where", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")
QUOTIENTS = (*ARITHMETIC, "Div", "Reciprocal", "Sqrt")
ORDERS = (*ARITHMETIC, "Max", "Min", "Relu")
"""Operators of one rounding each. Max and Min of 0 and -0 are either, so that nothing may divide by them."""
ANY = (*QUOTIENTS, "Max", "Min", "Relu", "Exp", "Log", "Erf", "Tanh", "Sigmoid")

_ARGUMENTS = {
    **dict.fromkeys(("Abs", "Neg", "Reciprocal", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Relu"), "n"),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min"), "nn"),
    "Where": "bnn",
}
_COMPARES = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


def random_expression(rng: random.Random, operators: Sequence[str], inputs: int = 4) -> str:
    """An expression of these operators, and of Not, And, Or and Kept, with shared values and several outputs."""
    numeric = [name for name in operators if name in _ARGUMENTS]
    compares = [name for name in operators if name in _COMPARES]
    numbers = [f"x{index}" for index in range(inputs)]
    truths: list[str] = []
    unread: set[str] = set()

    def leaf(pool: Sequence[str]) -> str:
        name = rng.choice(pool)
        unread.discard(name)
        return name

    def number(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return leaf(numbers) if rng.random() < 0.85 else str(np.float32(rng.uniform(-2, 2)))
        name = rng.choice(numeric)
        return f"{name}({', '.join(number(depth - 1) if one == 'n' else truth(1) for one in _ARGUMENTS[name])})"

    def truth(depth: int) -> str:
        if truths and rng.random() < 0.3:
            return leaf(truths)
        if depth and rng.random() < 0.4:
            name = rng.choice(["Not", "And", "Or"])
            return f"{name}({', '.join(truth(depth - 1) for _ in range(1 if name == 'Not' else 2))})"
        return "Kept()" if rng.random() < 0.2 else f"{rng.choice(compares)}({number(1)}, {number(0)})"

    statements = []
    for index in range(rng.randint(0, 4)):
        is_truth = rng.random() < 0.3
        statements.append(f"v{index} = {truth(2) if is_truth else number(2)}")
        (truths if is_truth else numbers).append(f"v{index}")
        unread.add(f"v{index}")
    for output in rng.sample(["y1", "y2"], rng.randint(0, 2)):
        statements.append(f"{output} = {number(2)}")
    last = number(3)
    for name in sorted(unread):
        last = f"Add({last}, {name})" if name in numbers else f"Where({name}, {last}, x0)"
    return rng.choice(["; ", ";", " ;\n"]).join([*statements, f"y0 = {last}"])


def random_arguments(
    rng: random.Random, expression: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Sample:
    """Numbers for what an expression reads, of shapes that broadcast to that of x0; it gets no name that it lacks."""
    read = {int(index) for index in re.findall(r"\bx(\d)", expression)} | {0}
    shapes = [list(shape), *(broadcast(rng, shape) for _ in range(max(read)))]
    sample = arguments(expression, dtype, *shapes, seed=rng.randint(0, 10**6))
    return sample.with_inputs([None if k < 8 and k not in read else one for k, one in enumerate(sample.inputs)])


Array = npt.NDArray[Any]


class Between(NamedTuple):
    """Numbers that are known up to roundings: infinite bounds say nothing, and leave NaN possible."""

    low: Array
    high: Array


class Maybe(NamedTuple):
    """Truth values: whether each may be true, and whether it may be false."""

    true: Array
    false: Array


_UNIT = 2.0**-24
_LARGEST = float(np.finfo(np.float32).max)


def _rounded(low: Array, high: Array, units: float = 1.0, absolute: float = 2.0**-149) -> Between:
    """Bounds after an operator whose error is so many roundings of the result, and an absolute one."""
    low, high = low - units * _UNIT * np.abs(low) - absolute, high + units * _UNIT * np.abs(high) + absolute
    known = (low >= -_LARGEST) & (high <= _LARGEST)
    return Between(np.where(known, low, -np.inf), np.where(known, high, np.inf))


def _of_corners(function: Callable[[Array, Array], Array], a: Between, b: Between) -> Between:
    corners = [function(p, q) for p in a for q in b]
    return _rounded(np.min(corners, 0), np.max(corners, 0))


def _growing(function: Callable[[Array], Array], units: float, absolute: float) -> Callable[[Between], Between]:
    return lambda x: _rounded(function(x.low), function(x.high), units, absolute)


def _quotient(a: Between, b: Between) -> Between:
    around_zero = (b.low <= 0) & (b.high >= 0)
    nothing = np.where(around_zero, np.nan, 0.0)
    return _of_corners(lambda p, q: p / q + nothing, a, b)


def _chosen(condition: Maybe, a: Between, b: Between) -> Between:
    low = np.minimum(np.where(condition.true, a.low, np.inf), np.where(condition.false, b.low, np.inf))
    high = np.maximum(np.where(condition.true, a.high, -np.inf), np.where(condition.false, b.high, -np.inf))
    return Between(low, high)


def _exact(x: Between) -> Between:
    return _rounded(x.low, x.high, 0.0, 0.0)


_ONE = Between(np.array(1.0), np.array(1.0))


def _erf(x: Array) -> Array:
    found: Array = torch.erf(torch.from_numpy(np.asarray(x))).numpy()
    return found


# Functions of some roundings. Those that are bounded by 1 may have an absolute error of so many, too.
_BOUNDS: dict[str, Callable[..., Any]] = {
    "Abs": lambda x: _exact(Between(np.maximum(0, np.maximum(x.low, -x.high)), np.maximum(-x.low, x.high))),
    "Neg": lambda x: Between(-x.high, -x.low),
    "Reciprocal": lambda x: _quotient(_ONE, x),
    "Sqrt": _growing(np.sqrt, 1, 0.0),
    "Exp": _growing(np.exp, 8, 2.0**-126),
    "Log": _growing(np.log, 8, 2.0**-126),
    "Erf": _growing(_erf, 8, 8 * _UNIT),
    "Tanh": _growing(np.tanh, 8, 8 * _UNIT),
    "Sigmoid": _growing(lambda x: 1 / (1 + np.exp(-x)), 8, 8 * _UNIT),
    "Relu": lambda x: Between(np.maximum(x.low, 0), np.maximum(x.high, 0)),
    "Add": lambda a, b: _rounded(a.low + b.low, a.high + b.high),
    "Sub": lambda a, b: _rounded(a.low - b.high, a.high - b.low),
    "Mul": lambda a, b: _of_corners(np.multiply, a, b),
    "Div": _quotient,
    "Max": lambda a, b: Between(np.maximum(a.low, b.low), np.maximum(a.high, b.high)),
    "Min": lambda a, b: Between(np.minimum(a.low, b.low), np.minimum(a.high, b.high)),
    "Less": lambda a, b: Maybe(a.low < b.high, a.high >= b.low),
    "LessOrEqual": lambda a, b: Maybe(a.low <= b.high, a.high > b.low),
    "Greater": lambda a, b: Maybe(a.high > b.low, a.low <= b.high),
    "GreaterOrEqual": lambda a, b: Maybe(a.high >= b.low, a.low < b.high),
    "Equal": lambda a, b: Maybe(
        (a.low <= b.high) & (a.high >= b.low), (a.low < a.high) | (b.low < b.high) | (a.low != b.low)
    ),
    "Not": lambda a: Maybe(a.false, a.true),
    "And": lambda a, b: Maybe(a.true & b.true, a.false | b.false),
    "Or": lambda a, b: Maybe(a.true | b.true, a.false & b.false),
    "Where": _chosen,
}


def bounds(sample: Sample) -> dict[str, Between]:
    """Between which numbers the outputs of float32 inputs are, by interval arithmetic in float64.

    Each operator widens what it is given by its own roundings, so that the bounds hold for every way to round.
    """
    tensors = [*sample.inputs, *[None] * 10][:10]
    first, seed = tensors[0], tensors[8]
    assert first is not None

    def typed(value: Any) -> Any:
        if isinstance(value, (Between, Maybe)):
            return value
        number = np.asarray(np.float32(value), np.float64)
        return Between(number, number)

    def keeps() -> Maybe:
        assert seed is not None
        mask = kept(first.shape, sample.attributes["dropout_threshold"], int(seed), sample.attributes.get("draw", 0))
        return Maybe(mask.numpy(), ~mask.numpy())

    def on_intervals(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            with np.errstate(all="ignore"):
                made = function(*map(typed, given))
            if isinstance(made, Maybe):
                return made
            unknown = ~np.isfinite(made.low) | ~np.isfinite(made.high)
            # What may be NaN stays so, unless it is not chosen.
            for operand in given if function is not _chosen else ():
                unknown = unknown | ~np.isfinite(typed(operand).low)
            return Between(np.where(unknown, -np.inf, made.low), np.where(unknown, np.inf, made.high))

        return called

    values: dict[str, Any] = {
        f"x{index}": Between(one.double().numpy(), one.double().numpy())
        for index, one in enumerate(tensors[:8])
        if one is not None
    }
    functions = {name: on_intervals(function) for name, function in _BOUNDS.items()}
    exec(sample.attributes["expression"], {**functions, "Kept": keeps}, values)
    return {name: typed(values[name]) for name in ("y0", "y1", "y2") if name in values}


def assert_within(outputs: Sequence[Tensor], sample: Sample) -> None:
    """Assert that outputs in float32 are what roundings can make of an expression's values."""
    for name, (low, high) in bounds(sample).items():
        output = outputs[int(name[1])].double().numpy()
        outside = ~((output >= low) & (output <= high)) & np.isfinite(low) & np.isfinite(high)
        assert not outside.any(), (
            f"{name} of {sample.attributes['expression']} is {output[outside][:3]}; expected from "
            f"{np.broadcast_to(low, output.shape)[outside][:3]} to {np.broadcast_to(high, output.shape)[outside][:3]}"
        )
