"""Writes graphs that are almost backward passes of the fused operators.

:func:`drawn` writes a graph from a seed: a correct backward pass in a random spelling, with detours that change nothing
and, in most graphs, a few changes that make it another computation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Dim = int | str

_TYPES = {
    "f": TensorProto.FLOAT,
    "h": TensorProto.FLOAT16,
    "d": TensorProto.DOUBLE,
    "i": TensorProto.INT64,
    "j": TensorProto.INT32,
    "b": TensorProto.BOOL,
}
NUMPY_TYPES: dict[str, Any] = {
    "f": np.float32,
    "h": np.float16,
    "d": np.float64,
    "i": np.int64,
    "j": np.int32,
    "b": np.bool_,
}
_MOST = np.iinfo(np.int64).max
_OTHER_DIMS: list[Dim] = [1, 1, "K", "N", "M"]


class Invalid(Exception):
    """The drawn graph is not a valid model, or runs at no sizes."""


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name, the sizes of its dimensions as far as they are known, and a key of _TYPES."""

    name: str
    shape: tuple[Dim, ...]
    kind: str

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Input:
    """`role` says how an input is filled: x, target, ends, counts, index, mask, positive, probabilities."""

    value: Value
    role: str
    limit: Dim = 3


@dataclass
class Graph:
    """What was drawn: a model, its inputs, and what its values mean."""

    seed: int
    model: onnx.ModelProto
    inputs: list[Input]
    symbols: list[str]
    ignore: list[int]
    constants: list[float]
    changes: list[str]


# Writing graphs


class Writer:
    """Nodes in order, every value with its symbolic shape; each float value may get a detour or a change."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.opset = rng.choice([18, 18, 20, 21])
        self.float = rng.choices("fhd", [10, 1, 1])[0]
        self.change_rate = rng.choice([0.0, 0.03, 0.06, 0.12])
        self.detour_rate = rng.choice([0.0, 0.05, 0.15])
        self.output_rate = rng.choice([0.0, 0.0, 0.05])
        self.changes: list[str] = []
        self.inputs: list[Input] = []
        self.ignore: list[int] = []
        self.constants: list[float] = []
        self.floats: list[Value] = []
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._outputs: list[Value] = []
        self._quiet = 0

    # Parts

    def flip(self, p: float = 0.5) -> bool:
        return self.rng.random() < p

    def wrong(self, what: str) -> bool:
        """Whether to go wrong here."""
        if self._quiet or self.rng.random() >= self.change_rate:
            return False
        self.changes.append(what)
        return True

    def fresh(
        self, op: str, inputs: Sequence[Value | None], shape: Sequence[Dim], kind: str, **attributes: Any
    ) -> Value:
        name = f"v{len(self._nodes)}"
        names = ["" if v is None else v.name for v in inputs]
        self._nodes.append(helper.make_node(op, names, [name], name=f"n{len(self._nodes)}", **attributes))
        return Value(name, tuple(shape), kind)

    def constant(self, array: Any, kind: str = "") -> Value:
        with np.errstate(over="ignore"):
            array = np.asarray(array, NUMPY_TYPES[kind or self.float])
        name = f"c{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(array, name))
        return Value(name, array.shape, kind or self.float)

    def number(self, x: float) -> Value:
        """A float constant near which inputs are worth drawing."""
        self.constants.append(x)
        return self.constant(np.asarray(x).reshape([1] * self.rng.choice([0, 0, 0, 1])))

    def ints(self, *numbers: int) -> Value:
        return self.constant(numbers, "i")

    def input(self, name: str, kind: str, shape: Sequence[Dim], role: str = "x", limit: Dim = 3) -> Value:
        shape = list(shape)
        if shape and self.wrong("dimension of an input"):
            k = self.rng.randrange(len(shape))
            shape[k] = self.rng.choice(_OTHER_DIMS)
        if len(shape) > 1 and self.wrong("rank of an input"):
            del shape[0]
        name = f"{name}_{len(self.inputs)}" if any(i.value.name == name for i in self.inputs) else name
        value = Value(name, tuple(shape), kind)
        self.inputs.append(Input(value, role, limit))
        if kind == self.float:
            self.floats.append(value)
            return self.at(value)
        return self.at_condition(value) if kind == "b" else self.at_integer(value) if kind in "ij" else value

    def output(self, value: Value) -> None:
        if all(o.name != value.name for o in self._outputs):
            if any(i.value.name == value.name for i in self.inputs) or value.name.startswith("c"):
                value = self.fresh("Identity", [value], value.shape, value.kind)
            self._outputs.append(value)

    def pick(self, *ways: Callable[[], Value]) -> Value:
        return self.rng.choice(ways)()

    # Operations

    def raw(self, op: str, *operands: Value, kind: str = "", **attributes: Any) -> Value:
        """An elementwise operation as it is."""
        shape = _broadcast([v.shape for v in operands])
        return self.fresh(op, [*operands], shape, kind or operands[-1].kind, **attributes)

    def op(self, op: str, *operands: Value, **attributes: Any) -> Value:
        return self.at(self.raw(op, *operands, **attributes))

    def add(self, a: Value, b: Value) -> Value:
        a, b = (b, a) if self.flip() else (a, b)
        return self.op("Sum", a, b) if self.flip(0.1) else self.op("Add", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        a, b = (b, a) if self.flip() else (a, b)
        return self.op("Mul", a, b)

    def minus(self, a: Value, b: Value) -> Value:
        if self.wrong("operands of a difference"):
            a, b = b, a
        return self.pick(
            lambda: self.op("Sub", a, b),
            lambda: self.op("Sub", a, b),
            lambda: self.add(a, self.op("Neg", b)),
            lambda: self.op("Neg", self.op("Sub", b, a)),
        )

    def divided(self, a: Value, b: Value) -> Value:
        if self.wrong("operands of a quotient"):
            a, b = b, a
        return self.pick(
            lambda: self.op("Div", a, b),
            lambda: self.mul(a, self.op("Reciprocal", b)),
            lambda: self.mul(a, self.op("Pow", b, self.number(-1.0))),
        )

    def scaled(self, x: Value, factor: float) -> Value:
        if self.wrong("factor"):
            factor *= self.rng.choice([-1.0, 0.5, 2.0, 1.001, 0.0, 1e-30, 1e30])
        ways = [lambda: self.mul(x, self.number(factor)), lambda: self.mul(x, self.number(factor))]
        if factor:
            ways.append(lambda: self.op("Div", x, self.number(1 / factor)))
            ways.append(lambda: self.mul(self.mul(x, self.number(factor * 4)), self.number(0.25)))
        return self.pick(*ways)

    def sum(self, x: Value, axis: int, keep: bool = True) -> Value:
        axis %= x.rank
        if x.rank > 1 and self.wrong("axis of a sum"):
            axis = (axis + self.rng.randrange(1, x.rank)) % x.rank
        kept = tuple(1 if a == axis else d for a, d in enumerate(x.shape))
        left = tuple(d for a, d in enumerate(x.shape) if a != axis)
        at = self.ints(self.rng.choice([axis, axis - x.rank]))
        op = "ReduceSum"
        if self.wrong("a sum"):
            op = self.rng.choice(["ReduceMean", "ReduceMax", "ReduceSumSquare", "ReduceL2", "ReduceProd"])
        way = self.rng.randrange(6)
        if way == 0 and op == "ReduceSum" and self.float != "h":
            letters = "abcd"[: x.rank]
            equation = f"{letters}->{letters.replace(letters[axis], '')}"
            value = self.at(self.fresh("Einsum", [x], left, x.kind, equation=equation))
            return self.unsqueezed(value, axis) if keep else value
        if way == 1 and op == "ReduceSum" and isinstance(x.shape[axis], int):
            mean = self.at(self.fresh("ReduceMean", [x, at], kept, x.kind))
            value = self.mul(mean, self.number(float(x.shape[axis])))
            return value if keep else self.squeezed(value, axis)
        if way < 4:
            value = self.at(self.fresh(op, [x, at], kept, x.kind, keepdims=1))
            return value if keep else self.squeezed(value, axis)
        value = self.at(self.fresh(op, [x, at], left, x.kind, keepdims=0))
        return self.unsqueezed(value, axis) if keep else value

    def total(self, x: Value) -> Value:
        return self.at(self.fresh("ReduceSum", [x], (), x.kind, keepdims=0))

    def unsqueezed(self, x: Value, axis: int) -> Value:
        axis %= x.rank + 1
        if self.wrong("axis of an Unsqueeze"):
            axis = self.rng.randrange(x.rank + 1)
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        if self.flip(0.3) and sum(isinstance(d, str) for d in shape) <= 1:
            target = self.ints(*(d if isinstance(d, int) else -1 for d in shape))
            return self.fresh("Reshape", [x, target], shape, x.kind)
        return self.fresh("Unsqueeze", [x, self.ints(axis)], shape, x.kind)

    def squeezed(self, x: Value, axis: int) -> Value:
        axis %= x.rank
        shape = tuple(d for a, d in enumerate(x.shape) if a != axis)
        return self.fresh("Squeeze", [x, self.ints(axis)], shape, x.kind)

    def transposed(self, x: Value, perm: Sequence[int]) -> Value:
        return self.fresh("Transpose", [x], [x.shape[a] for a in perm], x.kind, perm=list(perm))

    def cast(self, x: Value, kind: str) -> Value:
        return self.fresh("Cast", [x], x.shape, kind, to=_TYPES[kind])

    def flattened(self, x: Value, kept: int) -> Value:
        """[rows, ...]: the dimensions ahead of the last `kept` ones as one."""
        sizes = self.shape_of(x) if any(isinstance(d, str) for d in x.shape[x.rank - kept :]) else None
        last = x.shape[x.rank - kept :]
        if sizes is None:
            target = self.ints(-1, *(int(d) for d in last))
        else:
            end = self.fresh("Slice", [sizes, self.ints(x.rank - kept), self.ints(_MOST)], (kept,), "i")
            target = self.fresh("Concat", [self.ints(-1), end], (kept + 1,), "i", axis=0)
        return self.fresh("Reshape", [x, target], ("?", *last), x.kind)

    def shape_of(self, x: Value) -> Value:
        if all(isinstance(d, int) for d in x.shape) and self.flip():
            return self.ints(*(int(d) for d in x.shape))
        return self.fresh("Shape", [x], (x.rank,), "i")

    def size_along(self, x: Value, axis: int) -> Value:
        """[1]: the number of elements along an axis."""
        axis %= x.rank
        size = x.shape[axis]
        if isinstance(size, int) and self.flip():
            return self.ints(size)
        if self.flip():
            return self.fresh("Shape", [x], (1,), "i", start=axis, end=axis + 1)
        return self.fresh("Gather", [self.fresh("Shape", [x], (x.rank,), "i"), self.ints(axis)], (1,), "i")

    def arange(self, size: Value, kind: str = "i") -> Value:
        """[n] for a size of shape [1]."""
        end = self.fresh("Squeeze", [size], (), "i")
        start, step = (0, 1) if not self.wrong("a range") else (1, 1)
        limits = [self.constant(start, "i"), end, self.constant(step, "i")]
        return self.fresh("Range", [*limits], ("?",), kind)

    def counted(self, x: Value, dims: Iterable[int] | None = None) -> Value:
        """The number of elements (along some dimensions) as a float."""
        axes = list(range(x.rank)) if dims is None else list(dims)
        if all(isinstance(x.shape[a], int) for a in axes) and self.flip():
            return self.number(float(np.prod([int(x.shape[a]) for a in axes])))
        if dims is None and self.flip():
            return self.cast(self.fresh("Size", [x], (), "i"), self.float)
        parts = [self.size_along(x, a) for a in axes]
        count = parts[0]
        for part in parts[1:]:
            count = self.fresh("Mul", [count, part], (1,), "i")
        return self.cast(count, self.float)

    def sliced(self, x: Value, axis: int, start: int, stop: int, step: int = 1, size: Dim = "?") -> Value:
        axis %= x.rank
        parts = [self.ints(start), self.ints(stop), self.ints(axis), self.ints(step)]
        shape = tuple(size if a == axis else d for a, d in enumerate(x.shape))
        return self.fresh("Slice", [x, *parts], shape, x.kind)

    def split(self, x: Value, axis: int) -> tuple[Value, Value]:
        """The first position along an axis, and the others."""
        one = self.ints(1)
        size = self.size_along(x, axis)
        rest = self.fresh("Sub", [size, one], (1,), "i")
        sizes = self.fresh("Concat", [one, rest], (2,), "i", axis=0)
        name = f"v{len(self._nodes)}"
        names = [name, f"{name}_1"]
        node = helper.make_node("Split", [x.name, sizes.name], names, name=f"n{len(self._nodes)}", axis=axis)
        self._nodes.append(node)
        shapes = [tuple(d if a == axis else own for a, own in enumerate(x.shape)) for d in (1, "?")]
        return Value(names[0], shapes[0], x.kind), Value(names[1], shapes[1], x.kind)

    # Detours, which change nothing

    def at(self, x: Value) -> Value:
        """A float value, or what a detour or a change makes of it."""
        if self._quiet:
            return x
        self._quiet += 1
        try:
            if self.rng.random() < self.detour_rate:
                x = self._detour(x)
            if self.rng.random() < self.change_rate:
                x = self._changed(x)
        finally:
            self._quiet -= 1
        if self.rng.random() < self.output_rate:
            self.output(x)
        if x.kind == self.float:
            self.floats.append(x)
        return x

    def _detour(self, x: Value) -> Value:
        ways: list[Callable[[Value], Value]] = [
            lambda x: self.raw("Identity", x),
            lambda x: self.raw("Mul", x, self.constant(1.0)),
            lambda x: self.raw("Add", x, self.constant(0.0)),
            lambda x: self.raw("Neg", self.raw("Neg", x)),
            lambda x: self.raw("Sum", x),
            lambda x: self.raw("Sub", self.raw("Add", x, x), x),
            lambda x: self.raw("Mean", x, x),
            lambda x: self.raw("Where", self.constant(True, "b"), x, self.constant(0.0)),
            lambda x: self.squeezed(self.unsqueezed(x, 0), 0),
            lambda x: self.squeezed(self.unsqueezed(x, -1), -1),
        ]
        if x.kind == "f":
            ways.append(lambda x: self.cast(self.cast(x, "d"), "f"))
        if x.rank:
            ways += [self._back_from_a_view, self._put_together, self._indexed, self._back_in_shape]
        return self.rng.choice(ways)(x)

    def _back_from_a_view(self, x: Value) -> Value:
        perm = list(range(x.rank))
        self.rng.shuffle(perm)
        there = self.transposed(x, perm)
        return self.transposed(there, [perm.index(a) for a in range(x.rank)])

    def _back_in_shape(self, x: Value) -> Value:
        shape = self.shape_of(x)
        flat = self.fresh("Reshape", [x, self.ints(-1)], ("?",), x.kind)
        if self.flip(0.3):
            flat = self.unsqueezed(flat, 0)
        value = self.fresh("Reshape", [flat, shape], x.shape, x.kind)
        return value if self.flip() else self.fresh("Expand", [value, shape], x.shape, x.kind)

    def _put_together(self, x: Value) -> Value:
        axis = self.rng.randrange(x.rank)
        if self.flip():
            parts = self.split(x, axis)
        else:
            cut = self.rng.choice([1, -1, 2])
            parts = (self.sliced(x, axis, 0, cut), self.sliced(x, axis, cut, _MOST))
        return self.fresh("Concat", [*parts], x.shape, x.kind, axis=axis)

    def _indexed(self, x: Value) -> Value:
        axis = self.rng.randrange(x.rank)
        index = self.arange(self.size_along(x, axis))
        match self.rng.randrange(5):
            case 0:
                return self.fresh("Gather", [x, index], x.shape, x.kind, axis=axis)
            case 1:
                column = self.fresh(
                    "Reshape", [index, self.ints(*(-1 if a == axis else 1 for a in range(x.rank)))], (), "i"
                )
                wide = self.fresh("Expand", [column, self.shape_of(x)], x.shape, "i")
                return self.fresh("GatherElements", [x, wide], x.shape, x.kind, axis=axis)
            case 2:
                return self.sliced(x, axis, 0, _MOST, size=x.shape[axis])
            case 3:
                back = self.sliced(x, axis, -1, -_MOST, -1)
                return Value(self.sliced(back, axis, -1, -_MOST, -1).name, x.shape, x.kind)
            case _:
                pads = [0] * (2 * x.rank)
                pads[axis] = 1
                padded = self.fresh("Pad", [x, self.ints(*pads)], x.shape, x.kind)
                return self.sliced(padded, axis, 1, _MOST, size=x.shape[axis])

    # Changes, which make it another computation

    def _changed(self, x: Value) -> Value:
        kinds = [self._other_factor, self._another_term, self._other_function]
        if x.rank:
            kinds += [self._piece, self._piece, self._rearranged, self._stretched]
        way = self.rng.choice(kinds)
        self.changes.append(way.__name__.strip("_").replace("_", " "))
        return way(x)

    def _other_factor(self, x: Value) -> Value:
        factor = self.rng.choice([-1.0, 0.5, 2.0, 1.001, 1e-30, 1e30, 0.0])
        other = self._fitting(x)
        ways = [
            lambda: self.raw("Mul", x, self.constant(factor)),
            lambda: self.raw("Neg", x),
            lambda: self.raw("Mul", x, other),
            lambda: self.raw("Div", x, other),
            lambda: self.raw("Mul", self.raw("Mul", x, self.constant(1e-25)), self.constant(1e25)),
            lambda: self.raw("Div", self.raw("Mul", x, other), other),
        ]
        return self.pick(*ways)

    def _other_function(self, x: Value) -> Value:
        one = self.number(1.0)
        return self.pick(
            *(
                lambda: self.raw("Abs", x),
                lambda: self.raw("Relu", x),
                lambda: self.raw("Mul", x, x),
                lambda: self.raw("Sqrt", self.raw("Mul", x, x)),
                lambda: self.raw("Pow", x, self.constant(2.0)),
                lambda: self.raw("Log", self.raw("Exp", x)),
                lambda: self.raw("Exp", self.raw("Log", x)),
                lambda: self.raw("Reciprocal", self.raw("Reciprocal", x)),
                lambda: self.raw("Max", x, one),
                lambda: self.raw("Min", x, one),
                lambda: self.raw("Where", self.raw("Less", x, one, kind="b"), x, self.constant(0.0)),
                lambda: self.cast(
                    self.cast(self.raw("Min", self.raw("Max", x, self.constant(-99.0)), self.constant(99.0)), "i"),
                    x.kind,
                ),
                lambda: self.cast(self.cast(x, "h"), x.kind),
                lambda: self.cast(self.cast(x, "b"), x.kind),
                lambda: self.raw("Sub", self.raw("Add", x, self.number(1e6)), self.constant(1e6)),
            )
        )

    def _another_term(self, x: Value) -> Value:
        other = self._fitting(x)
        return self.raw(self.rng.choice(["Add", "Sub"]), x, self._small(other))

    def _small(self, x: Value) -> Value:
        """A term that is negligible for ordinary values of x, and large for others."""

        def shifted(op: str, by: float) -> Value:
            return self.raw(op, x, self.number(by))

        def exp(op: str, by: float) -> Value:
            return self.raw("Exp", shifted(op, by))

        def power() -> Value:
            value = small = self.raw("Mul", x, self.number(1e-37))
            for _ in range(8):
                value = self.raw("Mul", value, small)
            return value

        return self.pick(
            lambda: exp("Sub", 1000.0),
            lambda: self.raw("Reciprocal", exp("Add", 1000.0)),
            lambda: self.raw(
                "Sub", self.raw("Reciprocal", exp("Add", 1000.0)), self.raw("Reciprocal", exp("Add", 2000.0))
            ),
            lambda: self.raw("Mul", exp("Sub", 500.0), exp("Sub", 500.0)),
            lambda: self.raw("Exp", self.raw("Sub", self.raw("Mul", x, self.constant(2.0)), self.number(1500.0))),
            lambda: self.raw("Exp", self.raw("Mul", shifted("Sub", 400.0), self.constant(3.0))),
            lambda: self.raw("Exp", self.raw("Sub", self.raw("Exp", x), self.number(1e4))),
            lambda: self.raw("Log", self.raw("Add", self.constant(1.0), exp("Sub", 900.0))),
            lambda: self.raw("Pow", self.raw("Mul", x, self.number(1e-37)), self.constant(9.0)),
            power,
            lambda: self.raw("Mul", self.raw("Mul", x, self.constant(1e-30)), self.constant(1e-30)),
            lambda: self.raw("Relu", shifted("Sub", 900.0)),
            lambda: self.raw("Mul", x, self.constant(1e-7)),
            lambda: self.raw("Where", self.raw("Greater", x, self.number(700.0), kind="b"), x, self.constant(0.0)),
            lambda: self.number(self.rng.choice([1e-3, 1e-8, 1.0, -1.0])),
            lambda: x,
        )

    def _piece(self, x: Value) -> Value:
        """One position along an axis, to be broadcast."""
        axis = self.rng.randrange(x.rank)
        shape = tuple(1 if a == axis else d for a, d in enumerate(x.shape))
        zeros = [[1] * x.rank, [d if isinstance(d, int) else 1 for d in shape]]
        at = self.rng.choice([0, 0, -1])
        return self.pick(
            *(
                lambda: self.sliced(x, axis, 0, 1, size=1),
                lambda: self.sliced(x, axis, -1, _MOST, size=1),
                lambda: self.sliced(x, axis, 0, 4, size="?"),
                lambda: self.sliced(x, axis, 1, _MOST, size="?"),
                lambda: self.split(x, axis)[self.rng.randrange(2)],
                lambda: self.fresh("Gather", [x, self.ints(at)], shape, x.kind, axis=axis),
                lambda: self.unsqueezed(
                    self.fresh(
                        "Gather",
                        [x, self.constant(at, "i")],
                        [d for a, d in enumerate(shape) if a != axis],
                        x.kind,
                        axis=axis,
                    ),
                    axis,
                ),
                lambda: self.fresh(
                    "GatherElements",
                    [x, self.constant(np.full(self.rng.choice(zeros), at), "i")],
                    shape,
                    x.kind,
                    axis=axis,
                ),
                lambda: self.fresh("ReduceSum", [x, self.ints(axis)], shape, x.kind),
                lambda: self.fresh("Expand", [self.sliced(x, axis, 0, 1, size=1), self.shape_of(x)], x.shape, x.kind),
            )
        )

    def _rearranged(self, x: Value) -> Value:
        axis = self.rng.randrange(x.rank)
        perm = list(range(x.rank))
        self.rng.shuffle(perm)
        ways = [
            lambda: self.sliced(x, axis, -1, -_MOST, -1, size=x.shape[axis]),
            lambda: self.fresh(
                "Concat", [self.sliced(x, axis, 1, _MOST), self.sliced(x, axis, 0, 1)], x.shape, x.kind, axis=axis
            ),
            lambda: self.transposed(x, perm),
            lambda: self.fresh("Reshape", [self.transposed(x, perm), self.shape_of(x)], x.shape, x.kind),
        ]
        if self.float != "h":
            reverse, exclusive = self.rng.randrange(2), self.rng.randrange(2)
            ways.append(
                lambda: self.fresh(
                    "CumSum", [x, self.constant(axis, "i")], x.shape, x.kind, reverse=reverse, exclusive=exclusive
                )
            )
        if x.rank >= 2:
            upper, k = self.rng.randrange(2), self.rng.choice([0, 1, -1])
            ways.append(lambda: self.fresh("Trilu", [x, self.constant(k, "i")], x.shape, x.kind, upper=upper))
        return self.pick(*ways)

    def _stretched(self, x: Value) -> Value:
        axis = self.rng.randrange(x.rank)
        other = self._fitting(x)
        pads = [0] * (2 * x.rank)
        pads[self.rng.choice([axis, axis + x.rank])] = 1
        longer = tuple("?" if a == axis else d for a, d in enumerate(x.shape))
        return self.pick(
            lambda: self.fresh("Tile", [x, self.ints(*(2 if a == axis else 1 for a in range(x.rank)))], longer, x.kind),
            lambda: self.fresh("Concat", [x, x], longer, x.kind, axis=axis),
            lambda: self.fresh("Pad", [x, self.ints(*pads)], longer, x.kind),
            lambda: self.fresh("Pad", [x, self.ints(1, 0), None, self.ints(axis)], longer, x.kind),
            lambda: self.fresh("Expand", [x, self.shape_of(other)], x.shape, x.kind),
            lambda: self.fresh("Reshape", [x, self.shape_of(other)], other.shape, x.kind),
            lambda: self.raw("Add", x, self.raw("Mul", other, self.constant(0.0))),
        )

    def _fitting(self, x: Value) -> Value:
        """A value that can be broadcast with x, often of its shape; x itself where there is none."""
        found = [v for v in self.floats if v.kind == x.kind and v.rank <= x.rank and _may_broadcast(v.shape, x.shape)]
        return self.rng.choice(found) if found else x

    # Integers and conditions

    def at_integer(self, t: Value) -> Value:
        if self._quiet:
            return t
        if self.flip(self.detour_rate):
            t = self.pick(
                lambda: self.fresh("Identity", [t], t.shape, t.kind),
                lambda: self.cast(self.cast(t, "d" if self.flip() else "f"), t.kind),
                lambda: self.cast(self.cast(t, "j"), t.kind),
                lambda: self.raw("Sub", self.raw("Add", t, self.constant(7, t.kind)), self.constant(7, t.kind)),
            )
        if self.wrong("integers"):
            k = self.constant(self.rng.choice([1, -1, 2]), t.kind)
            ways = [
                lambda: self.raw("Add", t, k),
                lambda: self.raw("Mul", t, k),
                lambda: self.raw("Max", t, self.constant(0, t.kind)),
                lambda: self.raw("Min", t, self.constant(1, t.kind)),
                lambda: self.raw("Abs", t),
                lambda: self.raw("Mod", t, self.constant(2, t.kind)),
                lambda: self.raw("Div", t, self.constant(2, t.kind)),
                lambda: self.raw("Where", self.raw("Equal", t, k, kind="b"), self.constant(0, t.kind), t),
            ]
            if t.rank:
                axis = self.rng.randrange(t.rank)
                ways += [
                    lambda: self.sliced(t, axis, 0, 1, size=1),
                    lambda: self.sliced(t, axis, -1, _MOST, size=1),
                    lambda: self.sliced(t, axis, -1, -_MOST, -1, size=t.shape[axis]),
                    lambda: self.split(t, axis)[0],
                    lambda: self.fresh("CumSum", [t, self.constant(axis, "i")], t.shape, t.kind),
                ]
            t = self.pick(*ways)
        return t

    def at_condition(self, c: Value) -> Value:
        if self._quiet:
            return c
        if self.flip(self.detour_rate):
            c = self.pick(
                lambda: self.raw("Not", self.raw("Not", c)),
                lambda: self.raw("And", c, c),
                lambda: self.cast(self.cast(c, self.float), "b"),
                lambda: self.raw("Equal", self.cast(c, "i"), self.constant(1, "i"), kind="b"),
                lambda: self.raw("Xor", c, self.constant(False, "b")),
            )
        if self.wrong("a condition"):
            ways = [lambda: self.raw("Not", c), lambda: self.raw("And", c, self.constant(False, "b"))]
            if c.rank:
                axis = self.rng.randrange(c.rank)
                ways += [
                    lambda: self.sliced(c, axis, 0, 1, size=1),
                    lambda: self.sliced(c, axis, -1, _MOST, size=1),
                    lambda: self.sliced(c, axis, -1, -_MOST, -1, size=c.shape[axis]),
                ]
            c = self.pick(*ways)
        return c

    # The model

    def finish(self, seed: int) -> Graph:
        outputs = [helper.make_tensor_value_info(v.name, _TYPES[v.kind], None) for v in self._outputs]
        inputs = [
            helper.make_tensor_value_info(i.value.name, _TYPES[i.value.kind], list(i.value.shape)) for i in self.inputs
        ]
        graph = helper.make_graph(self._nodes, f"seed_{seed}", inputs, outputs, self._initializers)
        imports = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        try:
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
            for output, found in zip(model.graph.output, inferred.graph.output, strict=True):
                output.CopyFrom(found)
            onnx.checker.check_model(model)
        except Exception as error:
            raise Invalid(str(error)) from error
        names = {d for i in self.inputs for d in i.value.shape if isinstance(d, str)}
        return Graph(seed, model, self.inputs, sorted(names), self.ignore, self.constants, self.changes)


def _broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    rank = max((len(s) for s in shapes), default=0)
    wide = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((d for d in column if d != 1), 1) for column in zip(*wide, strict=True))


def _may_broadcast(own: tuple[Dim, ...], other: tuple[Dim, ...]) -> bool:
    pairs = zip(own[::-1], other[::-1], strict=False)
    return all(a == b or 1 in (a, b) or isinstance(a, str) or isinstance(b, str) for a, b in pairs)


# Backward passes


def _dims(w: Writer, count: int, smallest: int = 1) -> list[Dim]:
    """Sizes of dimensions: numbers, symbols of their own, or one symbol more than once."""
    names = w.rng.sample(["N", "M", "K", "L"], count)
    if w.flip(0.15):
        names = [names[0]] * count
    rate = w.rng.choice([0.0, 0.5, 0.5, 1.0])
    return [name if w.flip(rate) else w.rng.choice([smallest, 2, 3, 3, 4]) for name in names]


def _softmax(w: Writer, z: Value, axis: int) -> tuple[Value, Value]:
    """The softmax and its logarithm."""
    if w.wrong("axis of a softmax"):
        axis = w.rng.randrange(z.rank)
    axis = w.rng.choice([axis % z.rank, axis % z.rank - z.rank])
    match w.rng.randrange(5):
        case 0:
            logp = w.op("LogSoftmax", z, axis=axis)
            return w.op("Exp", logp), logp
        case 1 | 2:
            p = w.op("Softmax", z, axis=axis)
            return p, p
        case 3:
            kept = tuple(1 if a == axis % z.rank else d for a, d in enumerate(z.shape))
            total = w.at(w.fresh("ReduceLogSumExp", [z, w.ints(axis)], kept, z.kind))
            logp = w.minus(z, total)
            return w.op("Exp", logp), logp
        case _:
            kept = tuple(1 if a == axis % z.rank else d for a, d in enumerate(z.shape))
            if w.flip(0.7):
                most = w.at(w.fresh("ReduceMax", [z, w.ints(axis)], kept, z.kind))
                z = w.minus(z, most)
            e = w.op("Exp", z)
            total = w.sum(e, axis)
            return w.divided(e, total), e


def _masked(w: Writer, d: Value) -> Value:
    """The gradient with some elements set to zero."""
    if w.flip(0.25):
        shape = [x if a >= d.rank - 2 or w.flip() else 1 for a, x in enumerate(d.shape)]
        mask = w.input("mask", "b", shape, "mask")
    elif w.flip(0.5):
        rows, columns = (w.arange(w.size_along(d, a)) for a in (-2, -1))
        mask = w.at_condition(w.raw("Less", w.unsqueezed(rows, 1), w.unsqueezed(columns, 0), kind="b"))
        mask = Value(mask.name, d.shape[-2:], "b")
    else:
        length = w.input("length", "i", [d.shape[0], *[1] * (d.rank - 1)], "length", d.shape[-1])
        mask = w.raw("GreaterOrEqual", w.arange(w.size_along(d, -1)), length, kind="b")
        mask = w.at_condition(Value(mask.name, (*length.shape[:-1], d.shape[-1]), "b"))
    zero = w.constant(0.0)
    if w.wrong("polarity of a mask"):
        mask = w.raw("Not", mask)
    value = w.rng.choice([0.0, 0.0, 0.0, 1e-30]) if w.change_rate else 0.0
    if value:
        w.changes.append("fill of a mask")
        zero = w.constant(value)
    return w.pick(
        lambda: w.op("Where", mask, zero, d),
        lambda: w.op("Where", w.raw("Not", mask), d, zero),
        lambda: w.mul(w.cast(w.raw("Not", mask), w.float), d),
        lambda: w.mul(d, w.raw("Sub", w.constant(1.0), w.cast(mask, w.float))),
    )


def softmax_backward(w: Writer) -> None:
    """y (g - sum(g y)), scaled and masked."""
    rank = w.rng.choice([2, 2, 3, 4])
    shape = _dims(w, rank, smallest=w.rng.choice([1, 2]))
    axis = -1 if w.flip(0.8) else w.rng.randrange(rank)
    s, g = w.input("s", w.float, shape, "logits"), w.input("g", w.float, shape)
    whole = s
    if w.flip(0.15):
        scores = w.input("bias", "b", [1 if w.flip() else d for d in shape], "mask")
        fill = w.rng.choice([-np.inf, -1e9, -1e4])
        s = Value(w.raw("Where", scores, w.constant(fill), s).name, s.shape, s.kind)
    flat = rank > 2 and axis % rank == rank - 1 and w.flip(0.15)
    if flat:
        s, g = w.flattened(s, 1), w.flattened(g, 1)
        rank, shape, axis = 2, [*s.shape], -1
    given = not flat and w.flip(0.15)
    y = w.input("y", w.float, shape, "probabilities") if given else _softmax(w, s, axis)[0]
    mask_first, scale_first = w.flip(0.15), w.flip(0.2)
    scale = w.rng.choice([1.0, 0.5, 0.125, 0.3])
    if mask_first and rank > 1:
        g = _masked(w, g)
    if scale_first:
        g = w.scaled(g, scale)
    gy = w.mul(g, y)
    if w.flip(0.6):
        d = w.mul(w.minus(g, w.sum(gy, axis)), y)
    else:
        d = w.minus(gy, w.mul(y, w.sum(w.mul(g, y) if w.flip(0.2) else gy, axis)))
    if w.flip(0.4):
        d = _masked(w, d)
    if not scale_first:
        d = w.scaled(d, scale)
    if flat:
        d = w.fresh("Reshape", [d, w.fresh("Shape", [whole], (whole.rank,), "i")], whole.shape, whole.kind)
    if "?" not in d.shape and w.flip(0.1):
        d = w.add(d, w.input("more", w.float, d.shape))
    _end(w, d, [s, g, y])


def _end(w: Writer, d: Value, others: Sequence[Value]) -> None:
    """The readers of the gradient."""
    if w.wrong("a term behind"):
        d = w.add(d, w._small(w.rng.choice([v for v in others if v.kind == w.float] or [d])))
    match w.rng.randrange(4):
        case 0:
            w.output(d)
        case 1:
            w.output(w.raw("Sub", d, w.constant(0.0)))
        case 2:
            w.output(w.raw("Mul", d, w.constant(0.5)))
        case _:
            w.output(d)
            w.output(w.raw("Neg", d))


def _one_hot(w: Writer, t: Value, like: Value, axis: int) -> Value:
    """The one-hot rows of targets, along an axis of what is like it."""
    axis %= like.rank
    shape = like.shape
    if w.wrong("axis of a one-hot"):
        axis = w.rng.randrange(like.rank)
    classes = shape[axis]
    column = w.unsqueezed(t, axis) if t.rank < like.rank else t
    match w.rng.randrange(4):
        case 0 if w.float == "f":
            depth = w.size_along(like, axis)
            if w.wrong("depth of a one-hot"):
                depth = w.raw("Add", depth, w.ints(1))
            off, on = (0.0, 1.0) if not w.wrong("values of a one-hot") else (0.1, 1.0)
            names = [t, depth, w.constant([off, on])]
            return w.at(w.fresh("OneHot", names, shape, w.float, axis=axis))
        case 1:
            zeros = w.fresh("Expand", [w.constant(0.0), w.fresh("Shape", [like], (like.rank,), "i")], shape, w.float)
            index = w.cast(column, "i") if column.kind == "j" else column
            ones = w.fresh(
                "Expand", [w.constant(1.0), w.fresh("Shape", [index], (like.rank,), "i")], index.shape, w.float
            )
            if w.wrong("values of a scatter"):
                ones = w.raw("Mul", ones, w.constant(0.5))
            return w.at(w.fresh("ScatterElements", [zeros, index, ones], shape, w.float, axis=axis))
        case 2 if isinstance(classes, int) and axis == like.rank - 1 and t.rank < like.rank:
            eye = np.eye(classes)
            if w.wrong("values of an identity"):
                eye[w.rng.randrange(classes), w.rng.randrange(classes)] += 1
            return w.at(w.fresh("Gather", [w.constant(eye), t], shape, w.float, axis=0))
        case _:
            classes_ = w.arange(w.size_along(like, axis))
            if column.kind == "j":
                classes_ = w.cast(classes_, "j")
            view = [1] * like.rank
            view[axis] = -1
            row = w.fresh(
                "Reshape",
                [classes_, w.ints(*view)],
                [classes if a == axis else 1 for a in range(like.rank)],
                classes_.kind,
            )
            hit = w.at_condition(w.raw("Equal", *((row, column) if w.flip() else (column, row)), kind="b"))
            return w.at(Value(w.cast(hit, w.float).name, shape, w.float))


def cross_entropy_backward(w: Writer) -> None:
    """p q - onehot q with the factor q of each row."""
    layout = w.rng.choice(["rows", "rows", "rows", "tokens", "classes first", "image"])
    c: Dim = "C" if w.flip(0.25) else w.rng.choice([2, 3, 4])
    lead = _dims(w, 1 if layout in ("rows", "classes first") else 2 if layout == "tokens" else 3)
    axis = {"rows": 1, "tokens": 2, "classes first": 0, "image": 1}[layout]
    shape = [*lead]
    shape.insert(axis, c)
    kind = w.rng.choices("ij", [6, 1])[0]
    t = w.input("t", kind, lead, "target", c)
    z = w.input("z", w.float, shape, "logits")
    whole = z
    if layout == "tokens" and w.flip(0.4):
        z, t = w.flattened(z, 1), w.flattened(t, 0)
        shape, lead, axis = [*z.shape], [*t.shape], 1
    p, _ = (
        _softmax(w, z, axis)
        if w.flip(0.85) or z is not whole
        else (w.op("Exp", w.input("logp", w.float, shape, "log")), z)
    )
    ignore = w.rng.choice([None, None, -100, -1, 0, 1])
    keep: Value | None = None
    index = t
    if ignore is not None:
        w.ignore.append(ignore)
        value = ignore if not w.wrong("ignore index") else ignore + 1
        hit = w.at_condition(w.raw("Equal", t, w.constant(value, kind), kind="b"))
        keep = w.raw("Not", hit)
        match w.rng.randrange(4):
            case 0 | 1:
                index = w.raw("Where", hit, w.constant(0, kind), t)
            case 2:
                index = w.raw("Max", t, w.constant(0, kind))
            case _:
                pass
    hot = _one_hot(w, index, z, axis)
    column = (1,)
    factor: Value | None = None
    reduction = w.rng.choice(["mean", "sum", "none", "batch"])
    weight = w.input("w", w.float, [c], "positive") if w.flip(0.25) else None
    own: Value | None = None
    if weight is not None:
        own = w.at(w.fresh("Gather", [weight, index], t.shape, w.float, axis=0))
    if keep is not None:
        kept = w.cast(keep, w.float)
        own = kept if own is None else w.mul(own, kept)
    factor = own
    if reduction == "mean":
        if own is None:
            count = w.counted(t)
        else:
            count = w.total(own)
            if w.flip(0.2):
                count = w.raw("Max", count, w.constant(1.0))
        factor = w.divided(own, count) if own is not None and w.flip() else factor
        if factor is own:
            inverse = w.op("Reciprocal", count)
            factor = inverse if own is None else w.mul(own, inverse)
    elif reduction == "none":
        g = w.input("g", w.float, lead if "?" not in lead else [])
        factor = g if own is None else w.mul(g, own)
    elif reduction == "batch":
        factor = w.number(0.25) if own is None else w.scaled(own, 0.25)
    if w.flip(0.2):
        k = w.input("k", w.float, [])
        factor = k if factor is None else w.mul(factor, k)
    smoothing = w.rng.choice([0.0, 0.0, 0.0, 0.1, 0.3])
    if smoothing:
        classes = w.counted(z, [axis]) if not isinstance(c, int) else w.number(float(c))
        spread = w.divided(w.number(smoothing), classes)
        hot = w.add(w.scaled(hot, 1 - smoothing), spread)
    if factor is not None and factor.rank and factor.rank == len(lead):
        factor = w.unsqueezed(factor, axis)
    del column
    if factor is None:
        d = w.minus(p, hot)
    elif w.flip(0.4):
        d = w.mul(w.minus(p, hot), factor)
    else:
        m = w.mul(hot, factor)
        if w.flip() or smoothing:
            d = w.minus(w.mul(p, factor), m)
        else:
            d = w.minus(w.mul(p, w.sum(m, axis)), m)
    if keep is not None and w.flip(0.3):
        d = w.op("Where", w.unsqueezed(keep, axis), d, w.constant(0.0))
    if z.rank < whole.rank:
        d = w.fresh("Reshape", [d, w.shape_of(whole)], whole.shape, whole.kind)
    if "?" not in d.shape and w.flip(0.1):
        d = w.add(d, w.input("more", w.float, d.shape))
    _end(w, d, [z, p])


def mse_backward(w: Writer) -> None:
    """2 (x - t) g, over the number of elements of x."""
    rank = w.rng.choice([1, 2, 2, 3])
    shape = _dims(w, rank)
    other = [1 if w.flip(0.1) else d for d in shape]
    if w.flip(0.1):
        other = other[1:]
    x, t = w.input("x", w.float, shape), w.input("t", w.float, other)
    d = w.minus(x, t)
    factor: Value | None = None
    if w.flip(0.6):
        count = w.counted(w.rng.choice([x, x, x, d, t])) if t.rank else w.counted(x)
        factor = w.divided(w.number(2.0), count)
    if w.flip(0.3):
        g = w.input("g", w.float, w.rng.choice([[], shape, other, shape[1:]]))
        factor = g if factor is None else w.mul(factor, g)
    loss = w.flip(0.5)
    if loss:
        square = w.mul(d, d)
        if factor is not None:
            square = w.mul(square, factor)
        w.output(w.total(square))
    if factor is None:
        d = w.add(d, d) if w.flip() else w.scaled(d, 2.0)
    elif w.flip(0.3):
        d = w.minus(w.mul(x, factor), w.mul(t, factor))
    else:
        d = w.mul(d, factor)
    _end(w, d, [x, t])


def grouped_bias_backward(w: Writer) -> None:
    """Sums of the rows of a gradient by groups."""
    h = _dims(w, 1, smallest=1)[0]
    way = w.rng.randrange(6)
    if way == 0:
        shape = _dims(w, 3)
        dy = w.input("dy", w.float, shape)
        _end(w, w.sum(dy, 1, keep=w.flip()), [dy])
        return
    groups: Dim = "G" if w.flip(0.3) else w.rng.choice([2, 3])
    if way == 1:
        rows = w.rng.choice([3, 4, 5])
        dy = w.input("dy", w.float, [rows, h])
        cuts = sorted(w.rng.sample(range(1, rows), w.rng.choice([1, 2])))
        if w.wrong("a cut"):
            cuts[0] = w.rng.randrange(rows)
        bounds = list(zip([0, *cuts], [*cuts, rows], strict=True))
        if w.wrong("order of groups"):
            w.rng.shuffle(bounds)
        parts = [w.sum(w.sliced(dy, 0, a, b, size=b - a), 0) for a, b in bounds]
        _end(w, w.at(w.fresh("Concat", [*parts], [len(parts), h], w.float, axis=0)), [dy])
        return
    rows_: Dim = "R" if w.flip() else w.rng.choice([3, 5])
    dy = w.input("dy", w.float, [rows_, h])
    ends = w.input("ends", "i", [groups], "ends", rows_)
    r = w.arange(w.size_along(dy, 0))
    a, b = w.unsqueezed(r, 1), w.unsqueezed(ends, 0)
    if w.wrong("a comparison"):
        past = w.raw(w.rng.choice(["Greater", "Less"]), a, b, kind="b")
    else:
        past = w.pick(
            lambda: w.raw("GreaterOrEqual", a, b, kind="b"),
            lambda: w.raw("LessOrEqual", b, a, kind="b"),
            lambda: w.raw("Not", w.raw("Less", a, b, kind="b")),
        )
    past = Value(past.name, (rows_, groups), "b")
    count = w.cast(w.at_condition(past), "i")
    index = w.fresh("ReduceSum", [count, w.ints(1)], (rows_,), "i", keepdims=0)
    index = w.at_integer(index)
    number_of_groups = w.size_along(ends, 0)
    if w.wrong("number of groups"):
        number_of_groups = w.raw("Add", number_of_groups, w.ints(w.rng.choice([1, -1])))
    if way in (2, 3):
        of_blank = w.fresh("Concat", [number_of_groups, w.size_along(dy, 1)], (2,), "i", axis=0)
        blank = w.fresh("Expand", [w.constant(0.0), of_blank], (groups, h), w.float)
        names = [blank, w.unsqueezed(index, 1), dy]
        root = w.at(w.fresh("ScatterND", names, (groups, h), w.float, reduction="add"))
    elif way == 4:
        hot = w.raw("Equal", w.unsqueezed(w.arange(number_of_groups), 1), w.unsqueezed(index, 0), kind="b")
        hot = Value(w.cast(hot, w.float).name, (groups, rows_), w.float)
        root = w.at(w.fresh("MatMul", [w.at(hot), dy], (groups, h), w.float))
    else:
        before = w.fresh("Concat", [w.ints(0), w.sliced(ends, 0, 0, -1)], (groups,), "i", axis=0)
        row = w.unsqueezed(r, 0)
        below = w.raw("Less", row, w.unsqueezed(ends, 1), kind="b")
        above = w.raw("GreaterOrEqual", row, w.unsqueezed(before, 1), kind="b")
        inside = w.at_condition(w.raw("And", below, above))
        hot = Value(w.cast(inside, w.float).name, (groups, rows_), w.float)
        root = w.at(w.fresh("MatMul", [w.at(hot), dy], (groups, h), w.float))
    _end(w, root, [dy])


PASSES: dict[str, Callable[[Writer], None]] = {
    "softmax": softmax_backward,
    "cross entropy": cross_entropy_backward,
    "squared error": mse_backward,
    "grouped bias": grouped_bias_backward,
}


def drawn(seed: int) -> Graph:
    """The graph of a seed.

    Raises:
        Invalid: it is no valid model.
    """
    rng = random.Random(seed)
    name = rng.choice([*PASSES])
    w = Writer(rng)
    try:
        PASSES[name](w)
    except (IndexError, ValueError) as error:
        # A change left an operation without the dimension that it wants.
        raise Invalid(str(error)) from error
    return w.finish(seed)
