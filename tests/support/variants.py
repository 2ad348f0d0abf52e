"""Graphs of gradients as further producers would write them, and look-alikes that are something else.

Tables of ways to write one part (a row's dot product, a mask, a one-hot, a sum over groups), each put into a graph that
is the same otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from graphs import GraphBuilder
from onnx import TensorProto, numpy_helper

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
Build = Callable[[GraphBuilder], str]

F32, F16, I64, I32, BOOL = (getattr(TensorProto, n) for n in ("FLOAT", "FLOAT16", "INT64", "INT32", "BOOL"))
N, C = 6, 5
ROWS, WIDTH, GROUPS = 7, 3, 3
RNG = np.random.default_rng(0)
FEEDS: Feeds = {
    "s": RNG.normal(size=(2, 3, 4, 4)).astype(np.float32),
    "u": RNG.normal(size=(2, 3, 4, 4)).astype(np.float32),
    "padding": np.asarray([1, 1, 0, 1, 1, 1, 1, 0], bool).reshape(2, 1, 1, 4),
    "number": np.asarray([1, 1, 0, 1, 1, 1, 1, 0]).reshape(2, 1, 1, 4),
    "length": np.asarray([2, 4]),
    "k": np.asarray(3.0, np.float32),
    "q": np.zeros((2, 3, 4, 16), np.float32),
    "z": RNG.normal(size=(N, C)).astype(np.float32),
    "square": np.random.default_rng(1).normal(size=(C, C)).astype(np.float32),
    "zt": RNG.normal(size=(C, N)).astype(np.float32),
    "t": np.asarray([0, 4, 2, 1, 3, 3]),
    "t_32": np.asarray([0, 4, 2, 1, 3, 3], np.int32),
    "t_float": np.asarray([0, 4, 2, 1, 3, 3], np.float32),
    "t_some": np.asarray([0, 4, -1, 1, 3, -1]),
    "w": RNG.uniform(0.5, 2, C).astype(np.float32),
    "row": RNG.uniform(0.5, 2, N).astype(np.float32),
    "kept": np.asarray([1, 1, 0, 1, 1, 0], bool),
    "image": RNG.normal(size=(2, C, 3, 4)).astype(np.float32),
    "pixels": RNG.integers(0, C, (2, 3, 4)),
    "tokens": RNG.normal(size=(2, 3, C)).astype(np.float32),
    "labels": RNG.integers(0, C, (2, 3)),
    "per_item": RNG.normal(size=2).astype(np.float32),
    "x": RNG.normal(size=(N, C)).astype(np.float32),
    "y": RNG.normal(size=(N, C)).astype(np.float32),
    "dy": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "dy3": RNG.normal(size=(3, 4, WIDTH)).astype(np.float32),
    "ends": np.asarray([2, 2, 7]),
    "offsets": np.asarray([1, 3, 3, 6]),
    "bounds": np.asarray([2, 5]),
    "marks": np.asarray([0, 0, 1, 0, 1, 0, 0], bool),
    "steps": np.asarray([0, 0, 1, 0, 1, -1, 1]),
    "counts": np.asarray([2, 0, 5]),
    "index": np.asarray([0, 2, 1, 1, 0, 2, 0]),
    "v": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32),
    "values_2": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32),
    "du": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32),
}
_TYPES = {"float32": F32, "int64": I64, "int32": I32, "bool": BOOL}


def given(g: GraphBuilder, name: str, shape: Sequence[int | str | None] | None = None) -> str:
    array = FEEDS[name]
    return g.input(name, _TYPES[str(array.dtype)], array.shape if shape is None else shape)  # type: ignore[arg-type]


def last(g: GraphBuilder, x: str) -> str:
    return g.op("Unsqueeze", x, g.ints(-1))


def first(g: GraphBuilder, x: str) -> str:
    return g.op("Unsqueeze", x, g.ints(0))


def number(g: GraphBuilder, x: str) -> str:
    return g.op("Cast", x, to=F32)


def arange(g: GraphBuilder, n: int) -> str:
    zero, one = g.constant(0, np.int64), g.constant(1, np.int64)
    return g.op("Range", zero, g.constant(n, np.int64), one)


# The backward pass of a softmax


def softmax_gradient(g: GraphBuilder, dot: Callable[[GraphBuilder, str, str], str] | None = None) -> str:
    y, u = g.op("Softmax", given(g, "s"), axis=-1), given(g, "u")
    total = g.sum(g.op("Mul", u, y), -1) if dot is None else dot(g, u, y)
    return g.op("Mul", y, g.op("Sub", u, total))


DOTS: dict[str, Callable[[GraphBuilder, str, str], str]] = {
    "Einsum": lambda g, u, y: last(g, g.op("Einsum", u, y, equation="bhij,bhij->bhi")),
    "Einsum with an ellipsis": lambda g, u, y: last(g, g.op("Einsum", u, y, equation="...i,...i->...")),
    "Einsum of the product": lambda g, u, y: last(g, g.op("Einsum", g.op("Mul", u, y), equation="bhij->bhi")),
    "MatMul of rows": lambda g, u, y: g.op(
        "Squeeze", g.op("MatMul", g.op("Unsqueeze", u, g.ints(3)), last(g, y)), g.ints(4)
    ),
    "MatMul with ones": lambda g, u, y: g.op("MatMul", g.op("Mul", u, y), g.constant(np.ones((4, 1)))),
    "Tile of the sum": lambda g, u, y: g.op("Tile", g.sum(g.op("Mul", u, y), -1), g.ints(1, 1, 1, 4)),
    "mean times size": lambda g, u, y: g.op("Mul", g.op("ReduceMean", g.op("Mul", u, y), g.ints(-1)), g.constant(4.0)),
    "end of the running sum": lambda g, u, y: g.op(
        "Slice", g.op("CumSum", g.op("Mul", u, y), g.constant(3, np.int64)), g.ints(3), g.ints(4), g.ints(3)
    ),
}

MASKS: dict[str, Callable[[GraphBuilder, str], str]] = {
    "Trilu of the gradient": lambda g, d: g.op("Trilu", d, upper=0),
    "product with Trilu": lambda g, d: g.op("Mul", d, g.op("Trilu", g.constant(np.ones((4, 4))), upper=0)),
    "causal from positions": lambda g, d: g.op(
        "Where", g.op("GreaterOrEqual", last(g, arange(g, 4)), first(g, arange(g, 4))), d, g.constant(0.0)
    ),
    "causal buffer, sliced by a shape": lambda g, d: g.op(
        "Where",
        g.op(
            "Slice",
            g.constant(np.tril(np.ones((9, 9), bool)), bool),
            g.ints(0, 0),
            g.op("Slice", g.op("Shape", d), g.ints(2), g.ints(4)),
        ),
        *(d, g.constant(0.0)),
    ),
    "padding, Where": lambda g, d: g.op("Where", given(g, "padding"), d, g.constant(0.0)),
    "padding, Where the other way": lambda g, d: g.op("Where", given(g, "padding"), g.constant(0.0), d),
    "padding, 1 - mask": lambda g, d: g.op("Mul", d, g.op("Sub", g.constant(1.0), number(g, given(g, "padding")))),
    "padding by an integer mask": lambda g, d: g.op(
        "Where", g.op("Equal", given(g, "number"), g.constant(0, np.int64)), g.constant(0.0), d
    ),
    "padding by lengths": lambda g, d: g.op(
        "Mul", number(g, g.op("Less", arange(g, 4), g.op("Reshape", given(g, "length"), g.ints(2, 1, 1, 1)))), d
    ),
    "padding and causal": lambda g, d: g.op(
        "Where", g.op("And", given(g, "padding"), g.constant(np.tril(np.ones((4, 4), bool)), bool)), d, g.constant(0.0)
    ),
    "zeros from a shape": lambda g, d: g.op("Where", given(g, "padding"), d, g.op("ConstantOfShape", g.op("Shape", d))),
}

SCALES: dict[str, Callable[[GraphBuilder, str], str]] = {
    "Reciprocal of Sqrt": lambda g, d: g.op("Mul", d, g.op("Reciprocal", g.op("Sqrt", g.constant(16.0)))),
    "a power": lambda g, d: g.op("Mul", d, g.op("Pow", g.constant(16.0), g.constant(-0.5))),
    "Sqrt of a dimension": lambda g, d: g.op(
        "Div", d, g.op("Sqrt", number(g, g.op("Gather", g.op("Shape", given(g, "q")), g.constant(-1, np.int64))))
    ),
    "a loss scale": lambda g, d: g.op("Mul", d, given(g, "k")),
}


def _of_two_axes(g: GraphBuilder, first: int, flat: bool) -> str:
    """Of a softmax over two axes together: by its sums, or flattened, as converting from default opset 12 gives it."""
    s, u = given(g, "s"), given(g, "u")
    if flat:
        rows = g.op("Softmax", g.op("Flatten", s, axis=first), axis=-1)
        y = g.op("Reshape", rows, g.op("Shape", s))
    else:
        e = g.op("Exp", s)
        y = g.op("Div", e, g.op("ReduceSum", e, g.ints(first, first + 1)))
    total = g.op("ReduceSum", g.op("Mul", u, y), g.ints(first, first + 1))
    return g.op("Mul", g.op("Mul", y, g.constant(-0.5)), g.op("Sub", u, total))


def _jacobian(g: GraphBuilder) -> str:
    """diag(y) - y y^T, times the gradient."""
    y, u = g.op("Softmax", given(g, "z")), given(g, "x")
    eye = g.op("EyeLike", g.constant(np.zeros((C, C))))
    rows = g.op("Einsum", y, eye, equation="bi,ij->bij")
    return g.op("Einsum", g.op("Sub", rows, g.op("Einsum", y, y, equation="bi,bj->bij")), u, equation="bij,bj->bi")


def _jacobian_of_columns(g: GraphBuilder) -> str:
    y, u = g.op("Softmax", given(g, "z")), given(g, "x")
    column, row = last(g, y), g.op("Unsqueeze", y, g.ints(1))
    jacobian = g.op("Sub", g.op("Mul", g.constant(np.eye(C)[None]), row), g.op("MatMul", column, row))
    return g.op("Squeeze", g.op("MatMul", jacobian, last(g, u)), g.ints(2))


def _nameless_sizes(g: GraphBuilder) -> str:
    shape = (None, None, None, 4)
    y, u = g.op("Softmax", given(g, "s", shape)), given(g, "u", shape)
    return g.op("Mul", y, g.op("Sub", u, g.sum(g.op("Mul", u, y), -1)))


def _through_values(g: GraphBuilder, y: str, values: str = "v") -> str:
    """The sums of rows as FlashAttention has them: of the gradient and the result of attention."""
    v, du = given(g, "v"), given(g, "du")
    of = v if values == "v" else given(g, values)
    u = g.op("MatMul", du, g.op("Transpose", v, perm=[0, 1, 3, 2]))
    return g.op("Mul", y, g.op("Sub", u, g.sum(g.op("Mul", du, g.op("MatMul", y, of)), -1)))


def _beside_a_sink(g: GraphBuilder) -> str:
    """The scores have a further one beside them, whose probability nothing takes."""
    sink = g.constant(np.full((2, 3, 4, 1), 0.5))
    y = g.op("Softmax", g.op("Concat", given(g, "s"), sink, axis=3), axis=-1)
    u = g.op("Pad", given(g, "u"), g.ints(0, 0, 0, 0, 0, 0, 0, 1))
    d = g.op("Mul", y, g.op("Sub", u, g.sum(g.op("Mul", u, y), -1)))
    return g.op("Slice", d, g.ints(0), g.ints(4), g.ints(3))


def _another_axis(g: GraphBuilder) -> str:
    y, u = g.op("Softmax", given(g, "s"), axis=1), given(g, "u")
    return g.op("Mul", y, g.op("Sub", u, g.sum(g.op("Mul", u, y), 1)))


def _decomposed(g: GraphBuilder) -> str:
    s, u = given(g, "s"), given(g, "u")
    e = g.op("Exp", g.op("Sub", s, g.op("ReduceMax", s, g.ints(-1))))
    y = g.op("Mul", e, g.op("Reciprocal", last(g, g.op("Einsum", e, equation="bhij->bhi"))))
    return g.op("Mul", y, g.op("Sub", u, last(g, g.op("Einsum", u, y, equation="bhij,bhij->bhi"))))


def _at_the_target(g: GraphBuilder) -> str:
    """A gradient that is there at one element of each row."""
    zeros = g.constant(np.zeros((N, C)))
    return g.op("ScatterElements", zeros, last(g, given(g, "t")), last(g, given(g, "row")), axis=1)


def _of_chances(g: GraphBuilder, u: str, in_sum: str) -> str:
    """The backward pass of a router's softmax; the gradients of a product with y and of the sum are apart."""
    y = g.op("Softmax", given(g, "z"))
    return g.op("Sub", g.op("Mul", u, y), g.op("Mul", y, g.sum(g.op("Mul", in_sum, y), -1)))


def _at_the_target_alone(g: GraphBuilder) -> str:
    u = _at_the_target(g)
    return _of_chances(g, u, u)


def _at_the_target_above_all(g: GraphBuilder, twice: float = 1.0) -> str:
    u, x = _at_the_target(g), given(g, "x")
    return _of_chances(g, g.op("Add", u, x), g.op("Add", g.op("Mul", u, g.constant(twice)), x))


SOFTMAX: dict[str, Build] = {
    **{f"dot: {k}": lambda g, way=way: softmax_gradient(g, way) for k, way in DOTS.items()},  # type: ignore[misc]
    **{f"mask: {k}": lambda g, way=way: way(g, softmax_gradient(g)) for k, way in MASKS.items()},  # type: ignore[misc]
    **{f"scale: {k}": lambda g, way=way: way(g, softmax_gradient(g)) for k, way in SCALES.items()},  # type: ignore[misc]
    "the whole Jacobian, Einsum": _jacobian,
    "the whole Jacobian, MatMul": _jacobian_of_columns,
    "two axes, flattened": lambda g: _of_two_axes(g, 2, flat=True),
    "two axes, summed": lambda g: _of_two_axes(g, 2, flat=False),
    "two axes in the middle": lambda g: _of_two_axes(g, 1, flat=False),
    "sizes without names, but that of the rows": _nameless_sizes,
    "along another axis": _another_axis,
    "beside a sink": _beside_a_sink,
    "through values": lambda g: _through_values(g, g.op("Softmax", given(g, "s"), axis=-1)),
    "through values, of given probabilities": lambda g: g.op("Mul", _through_values(g, given(g, "s")), g.constant(0.5)),
    "decomposed softmax": _decomposed,
    "one element of each row": _at_the_target_alone,
    "one element of each row and the others": _at_the_target_above_all,
}

# Cross entropy


def cross_entropy(g: GraphBuilder, p_less_onehot: str) -> str:
    return g.op("Div", p_less_onehot, g.constant(float(N)))


def _onehot(g: GraphBuilder, t: str) -> str:
    return g.op("OneHot", t, g.constant(C, np.int64), g.constant([0.0, 1.0]))


def _from_classes(g: GraphBuilder, t: str) -> str:
    """The number of each class less that of the target."""
    return g.op("Sub", g.constant(np.arange(C)[None], np.int64), last(g, t))


def _matrix(g: GraphBuilder, t: str) -> str:
    """[N, 2]: row and class."""
    return g.op("Concat", g.constant(np.arange(N)[:, None], np.int64), last(g, t), axis=1)


ONE_HOTS: dict[str, Callable[[GraphBuilder, str], str]] = {
    "OneHot": _onehot,
    "rows of an identity": lambda g, t: g.op("Gather", g.constant(np.eye(C)), t),
    "rows of EyeLike": lambda g, t: g.op("Gather", g.op("EyeLike", g.constant(np.zeros((C, C)))), t),
    "Equal with Range": lambda g, t: number(g, g.op("Equal", last(g, t), arange(g, C))),
    "Equal of floats": lambda g, t: number(g, g.op("Equal", number(g, last(g, t)), g.constant(np.arange(C)[None]))),
    "ScatterElements": lambda g, t: g.op(
        "ScatterElements", g.constant(np.zeros((N, C))), last(g, t), g.constant(np.ones((N, 1))), axis=1
    ),
    "ScatterND": lambda g, t: g.op("ScatterND", g.constant(np.zeros((N, C))), _matrix(g, t), g.constant(np.ones(N))),
    "difference of triangles": lambda g, t: g.op(
        "Gather",
        g.op("Sub", *(g.op("Trilu", g.constant(np.ones((C, C))), g.constant(k, np.int64), upper=0) for k in (0, -1))),
        t,
    ),
    "two comparisons": lambda g, t: number(
        g, g.op("And", *(g.op(f"{way}OrEqual", last(g, t), arange(g, C)) for way in ("Less", "Greater")))
    ),
    "1 - min(distance, 1)": lambda g, t: g.op(
        "Sub", g.constant(1.0), g.op("Min", number(g, g.op("Abs", _from_classes(g, t))), g.constant(1.0))
    ),
    "1 - min(distance, 1) of integers": lambda g, t: number(
        g,
        g.op(
            "Sub",
            g.constant(1, np.int64),
            g.op("Min", g.op("Abs", _from_classes(g, t)), g.constant(1, np.int64)),
        ),
    ),
    "Relu of 1 - distance": lambda g, t: g.op(
        "Relu", g.op("Sub", g.constant(1.0), g.op("Abs", number(g, _from_classes(g, t))))
    ),
    "clipped distance": lambda g, t: g.op(
        "Sub",
        g.constant(1.0),
        g.op("Clip", g.op("Abs", number(g, _from_classes(g, t))), g.constant(0.0), g.constant(1.0)),
    ),
    "magnitude of a sign": lambda g, t: g.op(
        "Sub", g.constant(1.0), g.op("Abs", g.op("Sign", number(g, _from_classes(g, t))))
    ),
    "smoothed": lambda g, t: g.op("OneHot", t, g.constant(C, np.int64), g.constant([0.02, 0.92])),
    "smoothed in steps": lambda g, t: g.op("Add", g.op("Mul", _onehot(g, t), g.constant(0.9)), g.constant(0.1 / C)),
}


def _by_place(g: GraphBuilder, p: str, t: str) -> str:
    """The probability of the class, picked from the elements in one dimension, lessened, and put back."""
    place, flat = g.op("Add", g.constant(np.arange(N) * C, np.int64), t), g.op("Reshape", p, g.ints(-1))
    less = g.op("Sub", g.op("Gather", flat, place), g.constant(1.0))
    return g.op("Reshape", g.op("ScatterElements", flat, place, less), g.ints(N, C))


def _one_hot_by_place(g: GraphBuilder, p: str, t: str) -> str:
    place = last(g, g.op("Add", g.op("Mul", arange(g, N), g.constant(C, np.int64)), t))
    hot = g.op("ScatterND", g.constant(np.zeros(N * C)), place, g.constant(np.ones(N)))
    return g.op("Sub", p, g.op("Reshape", hot, g.ints(N, C)))


LESS_ONE: dict[str, Callable[[GraphBuilder, str, str], str]] = {
    "by the place among all elements": _by_place,
    "one-hot by the place among all elements": _one_hot_by_place,
    "-1 scattered into the softmax": lambda g, p, t: g.op(
        "ScatterElements", p, last(g, t), g.constant(-np.ones((N, 1))), axis=1, reduction="add"
    ),
    "-1 scattered by row and class": lambda g, p, t: g.op(
        "ScatterND", p, _matrix(g, t), g.constant(-np.ones(N)), reduction="add"
    ),
    "gathered, lessened, scattered back": lambda g, p, t: g.op(
        "ScatterND", p, _matrix(g, t), g.op("Sub", g.op("GatherND", p, _matrix(g, t)), g.constant(1.0))
    ),
    "the same along an axis": lambda g, p, t: g.op(
        "ScatterElements",
        *(p, last(g, t), g.op("Sub", g.op("GatherElements", p, last(g, t), axis=1), g.constant(1.0))),
        axis=1,
    ),
    "Where": lambda g, p, t: g.op("Where", g.op("Equal", last(g, t), arange(g, C)), g.op("Sub", p, g.constant(1.0)), p),
    "times the sum of the one-hot": lambda g, p, t: g.op("Sub", g.op("Mul", p, g.sum(_onehot(g, t), 1)), _onehot(g, t)),
}

SOFTMAXES: dict[str, Callable[[GraphBuilder, str], str]] = {
    "Exp of LogSoftmax": lambda g, z: g.op("Exp", g.op("LogSoftmax", z)),
    "ReduceLogSumExp": lambda g, z: g.op("Exp", g.op("Sub", z, g.op("ReduceLogSumExp", z, g.ints(1)))),
    "ReduceLogSum": lambda g, z: g.op("Exp", g.op("Sub", z, g.op("ReduceLogSum", g.op("Exp", z), g.ints(1)))),
}


def _log_of_probability(g: GraphBuilder) -> str:
    p = g.op("Softmax", given(g, "z"))
    m = g.op("Mul", g.op("Div", g.op("Mul", _onehot(g, given(g, "t")), g.constant(-1 / N)), p), p)
    return g.op("Sub", m, g.op("Mul", p, last(g, g.op("Einsum", m, equation="ij->i"))))


def _weighted(g: GraphBuilder, weights: Callable[[GraphBuilder, str, str], str]) -> str:
    p, t, w = g.op("Softmax", given(g, "z")), given(g, "t"), given(g, "w")
    own = weights(g, t, w)
    return g.op("Div", g.op("Mul", g.op("Sub", p, _onehot(g, t)), own), g.op("ReduceSum", own, keepdims=0))


WEIGHTS: dict[str, Callable[[GraphBuilder, str, str], str]] = {
    "Gather": lambda g, t, w: last(g, g.op("Gather", w, t)),
    "sum by the one-hot": lambda g, t, w: g.sum(g.op("Mul", _onehot(g, t), w), 1),
    "one-hot times vector": lambda g, t, w: g.op("MatMul", _onehot(g, t), last(g, w)),
}


def _ignored(g: GraphBuilder, way: str) -> str:
    p, t = g.op("Softmax", given(g, "z")), given(g, "t_some")
    hit = g.op("Equal", t, g.constant(-1, np.int64))
    keep = number(g, g.op("Not", hit))
    if way == "one-hot that is zero there":
        rows = g.op("Sub", g.op("Mul", p, last(g, keep)), number(g, g.op("Equal", last(g, t), arange(g, C))))
    else:
        safe = g.op("Where", hit, g.constant(0, np.int64), t)
        safe = g.op("Max", t, g.constant(0, np.int64)) if way == "Max and Mul" else safe
        rows = g.op("Sub", p, _onehot(g, safe))
        if way == "Where":
            rows = g.op("Where", last(g, hit), g.constant(0.0), rows)
        else:
            rows = g.op("Mul", rows, last(g, keep))
    count = g.op("ReduceSum", keep, keepdims=0)
    return g.op("Div", rows, g.op("Max", count, g.constant(1.0)) if way == "at least one" else count)


def _rows_selected(g: GraphBuilder) -> str:
    """The rows that count, picked by NonZero and put back."""
    z, t = given(g, "z"), given(g, "t_some")
    where = g.op("NonZero", g.op("Not", g.op("Equal", t, g.constant(-1, np.int64))))
    rows = g.op("Squeeze", where, g.ints(0))
    t = g.op("Gather", t, rows)
    d = g.op("Sub", g.op("Softmax", g.op("Gather", z, rows)), _onehot(g, t))
    d = g.op("Div", d, number(g, g.op("Size", t)))
    return g.op("ScatterND", g.constant(np.zeros((N, C))), g.op("Transpose", where, perm=[1, 0]), d)


def _image(g: GraphBuilder) -> str:
    p = g.op("Softmax", given(g, "image"), axis=1)
    hot = g.op("OneHot", given(g, "pixels"), g.constant(C, np.int64), g.constant([0.0, 1.0]), axis=1)
    return g.op("Mul", g.op("Sub", p, hot), g.constant(1 / 24))


def _image_as_rows(g: GraphBuilder) -> str:
    rows = g.op("Reshape", g.op("Transpose", given(g, "image"), perm=[0, 2, 3, 1]), g.ints(-1, C))
    d = g.op("Sub", g.op("Softmax", rows), _onehot(g, g.op("Reshape", given(g, "pixels"), g.ints(-1))))
    d = g.op("Reshape", g.op("Div", d, g.constant(24.0)), g.ints(2, 3, 4, C))
    return g.op("Transpose", d, perm=[0, 3, 1, 2])


def _tokens(g: GraphBuilder) -> str:
    t = given(g, "labels", ("B", "T"))
    d = g.op("Sub", g.op("Softmax", given(g, "tokens", ("B", "T", C))), _onehot(g, t))
    return g.op("Div", d, number(g, g.op("Size", t)))


def _mean_of_means(g: GraphBuilder) -> str:
    d = g.op("Sub", g.op("Softmax", given(g, "tokens", ("B", 3, C))), _onehot(g, given(g, "labels", ("B", 3))))
    scale = g.op("Div", given(g, "per_item", ("B",)), g.constant(3.0))
    return g.op("Mul", d, g.op("Unsqueeze", scale, g.ints(1, 2)))


def _next_tokens(g: GraphBuilder) -> str:
    """Each token's class is the next one, and the last one is ignored."""
    z, t = given(g, "tokens", ("B", "T", C)), given(g, "labels", ("B", "T"))
    end = g.op("Concat", g.op("Shape", t, start=0, end=1), g.ints(1), axis=0)
    blank = g.op("Expand", g.constant([[-100]], np.int64), end)
    after = g.op("Concat", g.op("Slice", t, g.ints(1), g.ints(2**31), g.ints(1)), blank, axis=1)
    after, z = g.op("Reshape", after, g.ints(-1)), g.op("Reshape", z, g.ints(-1, C))
    hit = g.op("Equal", after, g.constant(-100, np.int64))
    rows = g.op("Sub", g.op("Softmax", z), _onehot(g, g.op("Where", hit, g.constant(0, np.int64), after)))
    keep = number(g, g.op("Not", hit))
    d = g.op("Mul", rows, last(g, g.op("Div", keep, g.op("ReduceSum", keep, keepdims=0))))
    return g.op("Reshape", d, g.op("Shape", "tokens"))


def _columns(g: GraphBuilder) -> str:
    hot = g.op("OneHot", given(g, "t"), g.constant(C, np.int64), g.constant([0.0, 1.0]), axis=0)
    return cross_entropy(g, g.op("Sub", g.op("Softmax", given(g, "zt"), axis=0), hot))


def _nameless_rows(g: GraphBuilder) -> str:
    z = given(g, "z", (None, None))
    n, c = (g.op("Gather", g.op("Shape", z), g.constant(k, np.int64)) for k in range(2))
    hot = g.op("OneHot", given(g, "t", (None,)), c, g.constant([0.0, 1.0]))
    return g.op("Div", g.op("Sub", g.op("Softmax", z), hot), number(g, n))


def _p(g: GraphBuilder) -> str:
    return g.op("Softmax", given(g, "z"))


def _against_each_other(g: GraphBuilder, hot: Callable[[GraphBuilder, str], str], size: int | str = C) -> str:
    """Each row's class is its number, as where each of a batch is to find its own among all."""
    z = given(g, "square", (size, size))
    return g.op("Mul", g.op("Sub", g.op("Softmax", z), hot(g, z)), g.constant(0.25))


def _range_of_rows(g: GraphBuilder, z: str) -> str:
    rows = g.op("Gather", g.op("Shape", z), g.constant(0, np.int64))
    return g.op("Range", g.constant(0, np.int64), rows, g.constant(1, np.int64))


EYES: dict[str, Callable[[GraphBuilder, str], str]] = {
    "constant": lambda g, z: g.constant(np.eye(C)),
    "EyeLike": lambda g, z: g.op("EyeLike", z),
    "Equal of ranges": lambda g, z: number(g, g.op("Equal", last(g, arange(g, C)), arange(g, C))),
    "OneHot of a range": lambda g, z: _onehot(g, arange(g, C)),
    "ScatterND": lambda g, z: g.op(
        "ScatterND", g.constant(np.zeros((C, C))), g.constant(np.arange(C)[:, None].repeat(2, 1), np.int64), _ones_of(g)
    ),
}


def _ones_of(g: GraphBuilder) -> str:
    return g.constant(np.ones(C))


def _one_hot_in_steps(g: GraphBuilder, z: str) -> str:
    """OneHot of the numbers of the rows, of which nobody knows how many there are."""
    rows = _range_of_rows(g, z)
    return g.op("OneHot", rows, g.op("Size", rows), g.constant([0.0, 1.0]))


def _one_class(g: GraphBuilder, which: int) -> str:
    t = g.op("Expand", g.constant(which, np.int64), g.op("Shape", given(g, "t")))
    return cross_entropy(g, g.op("Sub", _p(g), _onehot(g, t)))


def _two_one_hots(g: GraphBuilder) -> str:
    """One of the target, another one of it to pick the weights."""
    p, t = _p(g), given(g, "t")
    hot = number(g, g.op("Equal", last(g, t), arange(g, C)))
    own = g.sum(g.op("Mul", _onehot(g, t), given(g, "w")), 1)
    return g.op("Div", g.op("Mul", g.op("Sub", p, hot), own), g.op("ReduceSum", own, keepdims=0))


def _smoothed_weights(g: GraphBuilder, spread: Array, ignored: bool = False) -> str:
    """Label smoothing of a tenth, with weights of classes that were multiplied ahead of time."""
    p, t = _p(g), given(g, "t_some" if ignored else "t")
    hit = g.op("Equal", t, g.constant(-1, np.int64))
    safe = g.op("Where", hit, g.constant(0, np.int64), t)
    r = g.op("Add", g.op("Mul", _onehot(g, safe), g.constant(0.9 * FEEDS["w"])), g.constant(spread))
    rows = g.op("Sub", g.op("Mul", p, g.sum(r, 1)), r)
    return g.op("Where", last(g, hit), g.constant(0.0), rows)


def _masked_and_ignored(g: GraphBuilder) -> str:
    """Rows of a class are masked by a factor, those without a class by a choice."""
    t = given(g, "t_some")
    keep = number(g, g.op("Not", g.op("Equal", t, g.constant(3, np.int64))))
    rows = g.op("Sub", _p(g), _onehot(g, g.op("Max", t, g.constant(0, np.int64))))
    rows = g.op("Where", last(g, g.op("Equal", t, g.constant(-1, np.int64))), g.constant(0.0), rows)
    return g.op("Mul", rows, last(g, g.op("Div", keep, g.op("ReduceSum", keep, keepdims=0))))


def _lessened_by_number(g: GraphBuilder) -> str:
    """The probabilities at the targets, picked and put back with the row's number left out."""
    p, t = _p(g), given(g, "t")
    less = g.op("Sub", g.op("GatherND", p, last(g, t), batch_dims=1), g.constant(1.0))
    return cross_entropy(g, g.op("ScatterND", p, _matrix(g, t), less))


def _through_one_element(g: GraphBuilder) -> str:
    """-1 scattered into the one element of a row, and that to the target."""
    p, t = _p(g), given(g, "t")
    column = g.op(
        "ScatterElements",
        *(g.constant(np.zeros((N, 1))), g.constant(np.zeros((N, 1)), np.int64)),
        _less_ones(g),
        axis=1,
    )
    return cross_entropy(g, g.op("ScatterElements", p, last(g, t), column, axis=1, reduction="add"))


def _less_ones(g: GraphBuilder) -> str:
    return g.constant(-np.ones((N, 1)))


def _by_flat_index(g: GraphBuilder, step: int = C) -> str:
    """The log-probabilities picked by one index, C i + t[i], and the gradient scattered by it."""
    p, t = _p(g), given(g, "t")
    index = g.op("Add", t, g.op("Mul", arange(g, N), g.constant(step, np.int64)))
    ones = g.op("ScatterElements", g.constant(np.zeros(N * C)), index, g.constant(np.ones(N)), axis=0, reduction="add")
    hot = g.op("Reshape", ones, g.ints(N, C))
    return cross_entropy(g, g.op("Sub", g.op("Mul", p, g.sum(hot, 1)), hot))


def _classes(g: GraphBuilder, z: str) -> str:
    """The number of classes, from the shape of the logits."""
    return g.op("Gather", g.op("Shape", z), g.constant(1, np.int64))


def _below(g: GraphBuilder, t: str) -> str:
    return g.op("Less", t, g.constant(0, np.int64))


def _matrix_from_the_end(g: GraphBuilder, t: str, end: str | None = None) -> str:
    """[N, 2]: row and class, each with the size of its axis added where it is below 0."""
    index = _matrix(g, t)
    shape = g.op("Shape", "z") if end is None else end
    return g.op("Where", _below(g, index), g.op("Add", index, shape), index)


def _scattered_hot(g: GraphBuilder, index: str, how: str = "none") -> str:
    return g.op("ScatterND", g.constant(np.zeros((N, C))), index, g.constant(np.ones(N)), reduction=how)


FROM_THE_END: dict[str, Callable[[GraphBuilder, str], str]] = {
    "the size added to t": lambda g, t: g.op("Where", _below(g, t), g.op("Add", t, g.constant(C, np.int64)), t),
    "the size of the shape": lambda g, t: g.op("Where", _below(g, t), g.op("Add", t, _classes(g, "z")), t),
    "t where it is not below 0": lambda g, t: g.op(
        "Where", g.op("GreaterOrEqual", t, g.constant(0, np.int64)), t, g.op("Add", g.constant(C, np.int64), t)
    ),
    "the size times a truth value": lambda g, t: g.op(
        "Add", t, g.op("Mul", g.op("Cast", _below(g, t), to=I64), g.constant(C, np.int64))
    ),
    "the size or 0": lambda g, t: g.op(
        "Add", t, g.op("Where", _below(g, t), g.constant(C, np.int64), g.constant(0, np.int64))
    ),
    "0 above t": lambda g, t: g.op(
        "Where", g.op("Greater", g.constant(0, np.int64), t), g.op("Sub", t, g.constant(-C, np.int64)), t
    ),
}


def _hot_twice(g: GraphBuilder, index: Callable[[GraphBuilder, str], str]) -> str:
    """The one-hot of an index that is made once for the class and once more for the sum over all."""
    p, t = _p(g), given(g, "t")
    first_hot, second_hot = (
        g.op("ScatterElements", g.constant(np.zeros((N, C))), last(g, index(g, t)), g.constant(np.ones((N, 1))), axis=1)
        for _ in range(2)
    )
    return cross_entropy(g, g.op("Sub", g.op("Mul", p, g.sum(first_hot, 1)), second_hot))


BY_INDEX: dict[str, Build] = {
    **{f"from the end: {k}": lambda g, w=w: _hot_twice(g, w) for k, w in FROM_THE_END.items()},  # type: ignore[misc]
    "from the end: row and class": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), _scattered_hot(g, _matrix_from_the_end(g, given(g, "t"))))
    ),
    "from the end: row and class, added": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), _scattered_hot(g, _matrix_from_the_end(g, given(g, "t")), "add"))
    ),
    "from the end: row and class by a constant": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), _scattered_hot(g, _matrix_from_the_end(g, given(g, "t"), g.ints(N, C))))
    ),
    "from the end: -1 put to row and class": lambda g: cross_entropy(
        g,
        g.op(
            "ScatterND", _p(g), _matrix_from_the_end(g, given(g, "t")), g.constant(-np.ones(N)), reduction="add"
        ),
    ),
    "from the end: Equal": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), ONE_HOTS["Equal with Range"](g, FROM_THE_END["the size or 0"](g, given(g, "t"))))
    ),
    "from the end: OneHot": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), _onehot(g, FROM_THE_END["the size added to t"](g, given(g, "t"))))
    ),
}  # fmt: skip


def _counted(g: GraphBuilder, key: str) -> str:
    """The number of each key among those that are the same, where these are next to each other."""
    _, _, kind, count = g.ops("Unique", key, outputs=4, axis=0)
    return g.op("Mod", arange(g, N), g.op("Gather", count, kind))


def after_the_first(g: GraphBuilder, key: str) -> str:
    """The number of each key less that of the first one that is the same."""
    _, first_one, kind, _ = g.ops("Unique", key, outputs=4, axis=0)
    return g.op("Sub", arange(g, N), g.op("Gather", first_one, kind))


def blank(g: GraphBuilder, key: str, fill: int = -1) -> str:
    """As many columns as the largest segment has rows."""
    count = g.ops("Unique", key, outputs=4, axis=0)[3]
    shape = g.op("Concat", g.ints(N * C), g.op("ReduceMax", count, g.ints(0)), axis=0)
    return g.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.asarray([fill])))


def sorted_ids(g: GraphBuilder, ids: str, **how: int) -> Sequence[str]:
    return g.ops("TopK", ids, g.ints(N), outputs=2, axis=0, **how)


def of_all_places(g: GraphBuilder, key: str) -> str:
    return g.constant(np.full((N * C, N), -1), np.int64)


def summed_by_table(
    g: GraphBuilder,
    ids: str,
    rows: str,
    place: Callable[[GraphBuilder, str], str] = _counted,
    blank: Callable[[GraphBuilder, str], str] = blank,
    order: Callable[[GraphBuilder, str], Sequence[str]] | None = None,
    column: Callable[[GraphBuilder, str], str] = last,
    below: float = 0.0,
    keepdims: int = 0,
) -> str:
    """The sums of [N, 1] by segments below N C, as tf2onnx writes them: by a table of the numbers of rows."""
    key, number_of_row = sorted_ids(g, ids, largest=0) if order is None else order(g, ids)
    places = g.op("Concat", column(g, key), column(g, place(g, key)), axis=1)
    table = g.op("ScatterND", blank(g, key), places, number_of_row)
    all_rows = g.op("Concat", rows, g.constant([[below]]), axis=0)
    return g.op("ReduceSum", g.op("Gather", all_rows, table), g.ints(1), keepdims=keepdims)


def _by_table(g: GraphBuilder, index: Callable[[GraphBuilder, str], str] | None = None, **how: Any) -> str:
    """The gradient of log-probabilities that one index picks."""
    p, t = _p(g), given(g, "t")
    row = g.op("Mul", arange(g, N), g.constant(C, np.int64))
    ids = g.op("Add", t if index is None else index(g, t), row)
    hot = g.op("Reshape", summed_by_table(g, ids, g.constant(np.ones((N, 1))), **how), g.ints(N, C))
    return cross_entropy(g, g.op("Sub", g.op("Mul", p, g.sum(hot, 1)), hot))


BY_TABLE: dict[str, Build] = {
    "by a table": _by_table,
    "by a table: the largest first": lambda g: _by_table(g, order=lambda g, ids: sorted_ids(g, ids, largest=1)),
    "by a table: places after the first": lambda g: _by_table(g, place=after_the_first),
    "by a table: in any order": lambda g: _by_table(
        g, place=after_the_first, order=lambda g, ids: (ids, arange(g, N))
    ),
    "by a table: a column for each row": lambda g: _by_table(
        g, place=lambda g, key: arange(g, N), blank=of_all_places
    ),
    "by a table: a constant, in any order": lambda g: _by_table(
        g,
        place=lambda g, key: g.constant(np.arange(N), np.int64),
        blank=of_all_places,
        order=lambda g, ids: (ids, g.constant(np.arange(N), np.int64)),
    ),
    "by a table: filled by Expand": lambda g: _by_table(
        g, blank=lambda g, key: g.op("Expand", g.constant(-1, np.int64), g.ints(N * C, N))
    ),
    "by a table: filled with the row of zeros": lambda g: _by_table(g, blank=lambda g, key: blank(g, key, N)),
    "by a table: columns by Reshape": lambda g: _by_table(
        g, column=lambda g, x: g.op("Reshape", x, g.ints(-1, 1))
    ),
    "by a table: sums keep their dimension": lambda g: _by_table(g, keepdims=1),
    "by a table: int32": lambda g: _by_table(
        g, index=lambda g, t: g.op("Cast", g.op("Cast", t, to=I32), to=I64)
    ),
    "by a table: views in between": lambda g: _by_table(
        g,
        place=lambda g, key: g.op("Squeeze", g.op("Unsqueeze", _counted(g, key), g.ints(0)), g.ints(0)),
        column=lambda g, x: g.op("Unsqueeze", g.op("Identity", x), g.ints(1)),
    ),
}  # fmt: skip


def _focal(g: GraphBuilder) -> str:
    """The loss of a row times its gradient; both are zero where the row is ignored."""
    t = given(g, "t_some")
    logp = g.op("LogSoftmax", given(g, "z"))
    hit = g.op("Equal", t, g.constant(-1, np.int64))
    safe = g.op("Where", hit, g.constant(0, np.int64), t)
    loss = g.op("Neg", g.op("GatherElements", logp, last(g, safe), axis=1))
    loss = g.op("Where", last(g, hit), g.constant(0.0), loss)
    g.output(g.op("ReduceSum", g.op("Mul", loss, loss), keepdims=0))
    rows = g.op("Sub", g.op("Exp", logp), _onehot(g, safe))
    return g.op("Mul", rows, g.op("Mul", loss, g.constant(2.0)))


CROSS_ENTROPY: dict[str, Build] = {
    **{
        f"one-hot: {k}": lambda g, w=w: cross_entropy(g, g.op("Sub", _p(g), w(g, given(g, "t"))))  # type: ignore[misc]
        for k, w in ONE_HOTS.items()
    },
    **{f"p - 1: {k}": lambda g, w=w: cross_entropy(g, w(g, _p(g), given(g, "t"))) for k, w in LESS_ONE.items()},  # type: ignore[misc]
    **{
        f"softmax: {k}": lambda g, w=w: cross_entropy(g, g.op("Sub", w(g, given(g, "z")), _onehot(g, given(g, "t"))))  # type: ignore[misc]
        for k, w in SOFTMAXES.items()
    },
    **{f"weights: {k}": lambda g, w=w: _weighted(g, w) for k, w in WEIGHTS.items()},  # type: ignore[misc]
    **{
        f"ignored: {w}": lambda g, w=w: _ignored(g, w)  # type: ignore[misc]
        for w in ("Where", "Mul", "Max and Mul", "at least one", "one-hot that is zero there")
    },
    "ignored: rows selected": _rows_selected,
    "log of the probability": _log_of_probability,
    "int32 targets": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), number(g, g.op("Equal", last(g, given(g, "t_32")), g.constant(np.arange(C), np.int32))))
    ),
    "targets cast from floats": lambda g: cross_entropy(
        g, g.op("Sub", _p(g), _onehot(g, g.op("Cast", given(g, "t_float"), to=I64)))
    ),
    "a weight for each row": lambda g: g.op(
        "Mul", cross_entropy(g, g.op("Sub", _p(g), _onehot(g, given(g, "t")))), last(g, given(g, "row"))
    ),
    "a mask for each row": lambda g: cross_entropy(
        g, g.op("Mul", g.op("Sub", _p(g), _onehot(g, given(g, "t"))), last(g, number(g, given(g, "kept"))))
    ),
    "a loss scale": lambda g: g.op(
        "Mul", cross_entropy(g, g.op("Sub", _p(g), _onehot(g, given(g, "t")))), given(g, "k")
    ),
    "NCHW": _image,
    "NCHW as rows": _image_as_rows,
    "tokens of sequences": _tokens,
    "the next token": _next_tokens,
    "mean over tokens, gradient by sequence": _mean_of_means,
    "classes first": _columns,
    "sizes without names": _nameless_rows,
    **{f"row numbers: {k}": lambda g, w=w: _against_each_other(g, w) for k, w in EYES.items()},  # type: ignore[misc]
    "row numbers: symbolic": lambda g: _against_each_other(g, _one_hot_in_steps, "M"),
    "row numbers: multiple of a constant": lambda g: g.op(
        "Add", g.op("Div", g.op("Softmax", given(g, "square")), g.constant(7.0)), g.constant(-np.eye(C) / 7)
    ),
    "one class": lambda g: _one_class(g, C - 1),
    "two one-hots of one target": _two_one_hots,
    **BY_INDEX,
    "smoothed weights": lambda g: _smoothed_weights(g, 0.02 * FEEDS["w"]),
    "smoothed weights, ignored": lambda g: _smoothed_weights(g, 0.02 * FEEDS["w"], ignored=True),
    "masked and ignored": _masked_and_ignored,
    "lessened by the row's number": _lessened_by_number,
    "through one element": _through_one_element,
    "by one index": _by_flat_index,
    **BY_TABLE,
    "focal": _focal,
}

# Squared error


def _difference(g: GraphBuilder) -> str:
    return g.op("Sub", given(g, "x"), given(g, "y"))


def _weighted_square(g: GraphBuilder, square: Callable[[GraphBuilder, str, str], str]) -> str:
    """The gradient of a loss that weighs rows, beside that loss."""
    d, w = _difference(g), last(g, given(g, "row"))
    g.output(square(g, d, w))
    return g.op("Mul", g.op("Mul", d, w), g.constant(2.0))


def _total(g: GraphBuilder, x: str) -> str:
    return g.op("ReduceSum", x, keepdims=0)


SQUARES: dict[str, Callable[[GraphBuilder, str, str], str]] = {
    "Mul": lambda g, d, w: _total(g, g.op("Mul", g.op("Mul", d, d), w)),
    "ReduceSumSquare": lambda g, d, w: _total(g, g.op("Mul", g.op("ReduceSumSquare", d, g.ints(1)), w)),
    "ReduceSumSquare of a multiple": lambda g, d, w: g.op(
        "ReduceSumSquare", g.op("Mul", d, g.op("Sqrt", w)), keepdims=0
    ),
    "Einsum": lambda g, d, w: g.op("Einsum", d, d, g.op("Squeeze", w, g.ints(1)), equation="ij,ij,i->"),
    "square of ReduceL2": lambda g, d, w: _total(
        g, g.op("Mul", w, g.op("Pow", g.op("ReduceL2", d, g.ints(1)), g.constant(2.0)))
    ),
}


def _root_mean_square(g: GraphBuilder) -> str:
    d = g.op("Sub", "x", "y")
    loss = g.op("Sqrt", g.op("ReduceMean", g.op("Mul", d, d), keepdims=0))
    g.output(loss)
    return loss


SQUARED_ERROR: dict[str, Build] = {
    **{f"loss: {k}": lambda g, w=w: _weighted_square(g, w) for k, w in SQUARES.items()},  # type: ignore[misc]
    "x + (-y)": lambda g: g.op("Mul", g.op("Add", given(g, "x"), g.op("Neg", given(g, "y"))), g.constant(2 / (N * C))),
    "2x / n - 2y / n": lambda g: g.op(
        "Sub", g.op("Mul", given(g, "x"), g.constant(2 / (N * C))), g.op("Mul", given(g, "y"), g.constant(2 / (N * C)))
    ),
    "(x + x - 2y) / n": lambda g: g.op(
        "Div",
        g.op("Sub", g.op("Add", given(g, "x"), "x"), g.op("Mul", g.constant(2.0), given(g, "y"))),
        g.constant(float(N * C)),
    ),
    "root of the mean": lambda g: g.op("Div", _difference(g), g.op("Mul", _root_mean_square(g), g.constant(30.0))),
    "two equal paths": lambda g: g.op("Add", *[g.op("Div", _difference(g), g.constant(float(N * C)))] * 2),
    "a factor expanded first": lambda g: g.op(
        "Mul", g.op("Mul", g.constant(2.0), g.op("Expand", g.constant(1 / (N * C)), g.ints(N, C))), _difference(g)
    ),
    "number of elements from the shape": lambda g: g.op(
        "Div",
        g.op("Mul", g.op("Sub", given(g, "x", ("N", C)), given(g, "y", ("N", C))), g.constant(2.0)),
        number(g, g.op("ReduceProd", g.op("Shape", "x"), keepdims=0)),
    ),
}

# Sums over groups


def _group_of_row(g: GraphBuilder, ends: str) -> str:
    past = g.op("GreaterOrEqual", g.constant(np.arange(ROWS)[:, None], np.int64), ends)
    return g.sum(g.op("Cast", past, to=I64), 1, 0)


def _hot_groups(g: GraphBuilder) -> str:
    index = _group_of_row(g, given(g, "ends"))
    return g.op("OneHot", index, g.constant(GROUPS, np.int64), g.constant([0.0, 1.0]))


def _scattered(g: GraphBuilder, index: str) -> str:
    blank = g.constant(np.zeros((GROUPS, WIDTH)))
    return g.op("ScatterND", blank, last(g, index), given(g, "dy"), reduction="add")


def _starts(g: GraphBuilder, ends: str) -> str:
    return g.op("Concat", g.ints(0), g.op("Slice", ends, g.ints(0), g.ints(GROUPS - 1), g.ints(0)), axis=0)


def _in_group(g: GraphBuilder) -> str:
    """[G, R]: whether a row is below the end of the group and not below its start."""
    rows, ends = g.constant(np.arange(ROWS)[None], np.int64), given(g, "ends")
    below = g.op("Less", rows, last(g, ends))
    return number(g, g.op("And", below, g.op("GreaterOrEqual", rows, last(g, _starts(g, ends)))))


def _masks_differ(g: GraphBuilder) -> str:
    rows, ends = g.constant(np.arange(ROWS)[None], np.int64), given(g, "ends")
    below, before = (g.op("Less", rows, last(g, e)) for e in (ends, _starts(g, ends)))
    return g.op("Sub", number(g, below), number(g, before))


def _between_offsets(g: GraphBuilder) -> str:
    """The offsets of ragged rows: 0 and the running sum of the sizes."""
    sums = g.op("CumSum", given(g, "counts"), g.constant(0, np.int64))
    offsets = g.op("Concat", g.ints(0), sums, axis=0)
    start, end = (g.op("Slice", offsets, g.ints(k), g.ints(k + GROUPS), g.ints(0)) for k in range(2))
    rows = g.constant(np.arange(ROWS)[None], np.int64)
    inside = g.op("And", g.op("GreaterOrEqual", rows, last(g, start)), g.op("Less", rows, last(g, end)))
    return g.op("MatMul", number(g, inside), given(g, "dy"))


def _offsets(g: GraphBuilder) -> Sequence[str]:
    """Where each group starts and ends, of the offsets of ragged rows, the first of which need not be 0."""
    offsets = given(g, "offsets")
    return [g.op("Slice", offsets, g.ints(k), g.ints(k + GROUPS), g.ints(0)) for k in range(2)]


def _between_given_offsets(g: GraphBuilder) -> str:
    start, end = _offsets(g)
    rows = g.constant(np.arange(ROWS)[:, None], np.int64)
    inside = g.op("And", g.op("Not", g.op("Less", rows, start)), g.op("Less", rows, end))
    masked = g.op("Where", last(g, inside), g.op("Unsqueeze", given(g, "dy"), g.ints(1)), g.constant(0.0))
    return g.sum(masked, 0, 0)


def _of_running_sums_at_offsets(g: GraphBuilder) -> str:
    sums = g.op("Pad", _running(g, given(g, "dy")), g.ints(1, 0, 0, 0))
    start, end = (g.op("Gather", sums, index) for index in _offsets(g))
    return g.op("Sub", end, start)


def _of_running_sums_ahead(g: GraphBuilder) -> str:
    """Running sums of the rows ahead of each, with a row of zeros at the end so that the last sum is there."""
    sums = _running(g, g.op("Pad", given(g, "dy"), g.ints(0, 0, 1, 0)), exclusive=1)
    ends = given(g, "ends")
    return g.op("Sub", g.op("Gather", sums, ends), g.op("Gather", sums, _starts(g, ends)))


def _masks_exclude(g: GraphBuilder) -> str:
    rows, ends = g.constant(np.arange(ROWS)[None], np.int64), given(g, "ends")
    below, before = (g.op("Less", rows, last(g, e)) for e in (ends, _starts(g, ends)))
    return g.op("MatMul", number(g, g.op("Xor", below, before)), given(g, "dy"))


def _rows_of_twos(g: GraphBuilder) -> str:
    """The first six rows, two a group, by row numbers that nodes repeat."""
    index = g.op("Reshape", g.op("Tile", last(g, arange(g, GROUPS)), g.ints(1, 2)), g.ints(-1))
    rows = g.op("Slice", given(g, "dy"), g.ints(0), g.ints(2 * GROUPS), g.ints(0))
    blank = g.constant(np.zeros((GROUPS, WIDTH)))
    return g.op("ScatterND", blank, last(g, index), g.op("Neg", rows), reduction="add")


def _pooled(g: GraphBuilder, op: str, **attributes: Any) -> str:
    pooled = g.op(op, g.op("Transpose", given(g, "dy3"), perm=[0, 2, 1]), **attributes)
    return g.op("Mul", g.op("Squeeze", pooled, g.ints(2)), g.constant(4.0))


def _marked(g: GraphBuilder, starts: str, marks: str) -> str:
    """[R]: how many groups start before the row ends."""
    blank = g.constant(np.zeros(ROWS), np.int64)
    return _running(g, g.op("ScatterElements", blank, starts, marks, axis=0, reduction="add"))


def _running(g: GraphBuilder, x: str, **attributes: int) -> str:
    return g.op("CumSum", x, g.constant(0, np.int64), **attributes)


def _ones(g: GraphBuilder, count: int) -> str:
    return g.constant(np.ones(count), np.int64)


def _less_one(g: GraphBuilder, x: str) -> str:
    return g.op("Sub", x, g.constant(1, np.int64))


def _repeated(g: GraphBuilder) -> str:
    """Groups repeated by their counts: marks where they start, added up."""
    return _less_one(g, _marked(g, _running(g, given(g, "counts"), exclusive=1), _ones(g, GROUPS)))


def _repeated_in_range(g: GraphBuilder) -> str:
    """The same as JAX does it: starts below 0 count from the end, and those that are out of range are left out."""
    starts = _running(g, given(g, "counts"), exclusive=1)
    zero, end = g.constant(0, np.int64), g.constant(ROWS, np.int64)
    starts = g.op("Where", g.op("Less", starts, zero), g.op("Add", starts, end), starts)
    inside = g.op("And", g.op("GreaterOrEqual", starts, zero), g.op("Less", starts, end))
    kept = g.op("Squeeze", g.op("NonZero", inside), g.ints(0))
    index = _less_one(g, _marked(g, g.op("Gather", starts, kept), g.op("Gather", _ones(g, GROUPS), kept)))
    return g.op("Where", g.op("Less", index, zero), g.op("Add", index, g.constant(GROUPS, np.int64)), index)


def _of_running_sums(g: GraphBuilder, *, padded: bool) -> str:
    """The running sums of rows at the ends less those at the starts, with a row of zeros ahead or without it."""
    sums, ends = _running(g, given(g, "dy")), given(g, "ends")
    zeros = g.constant(np.zeros((1, WIDTH)))
    if padded:
        sums = g.op("Concat", zeros, sums, axis=0)
        return g.op("Sub", g.op("Gather", sums, ends), g.op("Gather", sums, _starts(g, ends)))
    above = g.op("Gather", sums, _less_one(g, ends))
    below = g.op("Concat", zeros, g.op("Slice", above, g.ints(0), g.ints(-1), g.ints(0)), axis=0)
    return g.op("Sub", above, below)


def _known_rows(g: GraphBuilder, index: str) -> str:
    """The sums of the rows whose group is one, picked by NonZero."""
    inside = g.op("Less", index, g.constant(GROUPS, np.int64))
    kept = g.op("Squeeze", g.op("NonZero", inside), g.ints(0))
    index, rows = last(g, g.op("Gather", index, kept)), g.op("Gather", given(g, "dy"), kept)
    return g.op("ScatterND", g.constant(np.zeros((GROUPS, WIDTH))), index, rows, reduction="add")


REPEATED: dict[str, Build] = {
    "groups repeated": lambda g: _scattered(g, _repeated(g)),
    "groups repeated, in range": lambda g: _scattered(g, _repeated_in_range(g)),
    "groups repeated, rows of no group left out": lambda g: _known_rows(g, _repeated_in_range(g)),
    "rows of no group left out": lambda g: _known_rows(g, _running(g, g.op("Abs", given(g, "steps")))),
    "sizes one after the other, one-hot": lambda g: g.op(
        "MatMul",
        g.op(
            "Transpose",
            g.op("OneHot", _repeated_in_range(g), g.constant(GROUPS, np.int64), g.constant([0.0, 1.0])),
            perm=[1, 0],
        ),
        given(g, "dy"),
    ),
}

GROUPED_BIAS: dict[str, Build] = {
    **REPEATED,
    "between offsets that are given": _between_given_offsets,
    "differences of running sums at offsets": _of_running_sums_at_offsets,
    "differences of running sums of the rows ahead": _of_running_sums_ahead,
    "masks that exclude each other": _masks_exclude,
    "rows by repeated numbers": _rows_of_twos,
    "transposed, the last axis": lambda g: g.sum(g.op("Transpose", given(g, "dy3"), perm=[0, 2, 1]), -1, 0),
    "means of pooling, times their rows": lambda g: _pooled(g, "AveragePool", kernel_shape=[4]),
    "means of global pooling, times their rows": lambda g: _pooled(g, "GlobalAveragePool"),
    "windows of a Conv by ones": lambda g: g.op(
        "Squeeze", g.op("Conv", given(g, "dy3"), g.constant(np.ones((1, 4, 1)))), g.ints(1)
    ),
    "differences of running sums": lambda g: _of_running_sums(g, padded=True),
    "blocks of rows": lambda g: _scattered(g, g.op("Div", arange(g, ROWS), g.constant(3, np.int64))),
    "means of blocks, times their rows": lambda g: g.op(
        "Mul", g.op("ReduceMean", given(g, "dy3"), g.ints(1), keepdims=0), g.constant(4.0)
    ),
    "one-hot, MatMul": lambda g: g.op("MatMul", g.op("Transpose", _hot_groups(g), perm=[1, 0]), given(g, "dy")),
    "one-hot, Gemm": lambda g: g.op("Gemm", _hot_groups(g), given(g, "dy"), transA=1),
    "one-hot, Einsum": lambda g: g.op("Einsum", _hot_groups(g), given(g, "dy"), equation="rg,rh->gh"),
    "mask of the group, MatMul": lambda g: g.op("MatMul", _in_group(g), given(g, "dy")),
    "difference of masks, MatMul": lambda g: g.op("MatMul", _masks_differ(g), given(g, "dy")),
    "difference of masks, sum": lambda g: g.sum(g.op("Mul", last(g, _masks_differ(g)), given(g, "dy")), 1, 0),
    "ScatterElements": lambda g: g.op(
        "ScatterElements",
        g.constant(np.zeros((GROUPS, WIDTH))),
        g.op("Expand", last(g, _group_of_row(g, given(g, "ends"))), g.ints(ROWS, WIDTH)),
        given(g, "dy"),
        axis=0,
        reduction="add",
    ),
    "ends that sizes add up to": lambda g: _scattered(
        g, _group_of_row(g, g.op("CumSum", given(g, "counts"), g.constant(0, np.int64)))
    ),
    "without the last end": lambda g: _scattered(g, _group_of_row(g, given(g, "bounds"))),
    "offsets from 0 on": lambda g: _scattered(
        g,
        g.op(
            "Sub",
            _group_of_row(g, g.op("Concat", g.ints(0), given(g, "ends"), axis=0)),
            g.constant(1, np.int64),
        ),
    ),
    "index constant and sorted": lambda g: _scattered(g, g.constant([0, 0, 1, 1, 1, 2, 2], np.int64)),
    "mask of the group, Where": lambda g: g.sum(
        g.op("Where", last(g, g.op("Cast", _in_group(g), to=BOOL)), first(g, given(g, "dy")), g.constant(0.0)), 1, 0
    ),
    "mask between offsets": _between_offsets,
    "constant mask": lambda g: g.op("MatMul", g.constant(np.eye(3)[:, [0, 0, 1, 1, 1, 2, 2]]), given(g, "dy")),
    "constant mask, Gemm": lambda g: g.op(
        "Gemm", g.constant(np.eye(3)[[0, 0, 0, 1, 1, 2, 2]]), given(g, "dy"), transA=1
    ),
    "4-D": lambda g: g.op("ReduceSum", given(g, "u"), g.ints(1, 2), keepdims=0),
    "3-D, Einsum": lambda g: g.op("Einsum", given(g, "dy3"), equation="gch->gh"),
    "3-D, ones": lambda g: g.op("MatMul", g.constant(np.ones((1, 4))), given(g, "dy3")),
}


def _softmax_of_columns(g: GraphBuilder) -> str:
    """The gradient by exponentials and their sum, as JAX has it where nothing else needs the softmax."""
    s, u = given(g, "z"), given(g, "x")
    e = g.op("Exp", g.op("Sub", s, g.op("ReduceMax", s, g.ints(0))))
    total = g.sum(e, 0)
    through = g.sum(g.op("Mul", g.op("Mul", u, g.op("Pow", total, g.constant(-2.0))), e), 0)
    return g.op("Mul", g.op("Sub", g.op("Div", u, total), through), e)


SOFTMAX["of columns, of which there is no softmax"] = _softmax_of_columns


def _sum_of_logarithm(g: GraphBuilder) -> str:
    """As JAX differentiates its logsumexp: by the sign of a sum of exponentials, which is above 0."""
    z, t = given(g, "z"), given(g, "t")
    e = g.op("Exp", g.op("Sub", z, g.op("ReduceMax", z, g.ints(1))))
    total, zero = g.sum(e, 1), g.constant(0.0)
    is_above, share = g.op("GreaterOrEqual", total, zero), g.op("Div", g.constant(1 / N), g.op("Abs", total))
    above, below = g.op("Where", is_above, share, zero), g.op("Where", is_above, zero, share)
    whole = g.op("Mul", g.op("Sub", above, below), e)
    return g.op("Sub", whole, g.op("Mul", _onehot(g, t), g.constant(1 / N)))


def _turned_logarithms(g: GraphBuilder) -> str:
    """Classes in the middle, and logarithms with classes last, as onnxruntime's optimizer moves transpositions."""
    logarithms = g.op("LogSoftmax", given(g, "tokens"), axis=-1)
    p = g.op("Transpose", g.op("Exp", logarithms), perm=[0, 2, 1])
    hot = g.op("OneHot", given(g, "labels"), g.constant(C, np.int64), g.constant([0.0, 1.0]), axis=1)
    return g.op("Mul", g.op("Sub", p, hot), g.constant(1 / 6))


CROSS_ENTROPY["logsumexp by its sign"] = _sum_of_logarithm
CROSS_ENTROPY["logarithms in another order"] = _turned_logarithms


def _halves_of_twice(g: GraphBuilder) -> str:
    dy = given(g, "dy")
    parts = [g.op("Slice", dy, g.ints(a), g.ints(b), g.ints(0)) for a, b in ((0, 2), (2, 5), (5, 7))]
    sums = [g.sum(part, 0) for part in parts]
    sums[1] = g.op("Mul", g.op("Add", sums[1], sums[1]), g.constant(0.5))
    sums[2] = g.op("Neg", g.op("Neg", sums[2]))
    return g.op("Concat", *sums, axis=0)


GROUPED_BIAS["blocks by arithmetic that changes nothing"] = _halves_of_twice
SQUARED_ERROR["difference as a long sum"] = lambda g: g.op(
    "Mul", g.op("Sum", given(g, "x"), g.op("Neg", given(g, "y"))), g.constant(2 / (N * C))
)

GRAPHS: list[tuple[str, str, Build]] = [
    *(("ScaledMaskedSoftmaxBackward", name, build) for name, build in SOFTMAX.items()),
    *(("CrossEntropyLossGrad", name, build) for name, build in CROSS_ENTROPY.items()),
    *(("MseLossBackward", name, build) for name, build in SQUARED_ERROR.items()),
    *(("GroupedBiasAddGrad", name, build) for name, build in GROUPED_BIAS.items()),
]


def _sum_of_targets(g: GraphBuilder) -> str:
    """Two scatters that overwrite each other: the last one wins, and nothing adds up."""
    index = g.constant(np.asarray([[1, 1]] * N), np.int64)
    hot = g.op("ScatterElements", g.constant(np.zeros((N, C))), index, g.constant(np.ones((N, 2))), axis=1)
    return cross_entropy(g, g.op("Sub", _p(g), hot))


def _centred(g: GraphBuilder) -> str:
    x = given(g, "x")
    d = g.op("Sub", x, g.op("ReduceMean", x, g.ints(1)))
    variance = g.op("ReduceMean", g.op("Mul", d, d), g.ints(1))
    return g.op("Div", d, g.op("Sqrt", g.op("Add", variance, g.constant(1e-5))))


def _of_fewer_classes(g: GraphBuilder) -> str:
    """p times 1, but times 0 where the target is the last class; less the one-hot of all classes."""
    p, t = g.op("Softmax", given(g, "z")), given(g, "t")
    fewer = g.op("OneHot", t, g.constant(C - 1, np.int64), g.constant([0.0, 1.0]))
    return g.op("Sub", g.op("Mul", p, g.sum(fewer, 1)), _onehot(g, t))


def _mixed(g: GraphBuilder) -> str:
    """Two targets for each row."""
    p, t = _p(g), given(g, "t")
    other = g.op("Mod", g.op("Add", t, g.constant(1, np.int64)), g.constant(C, np.int64))
    hot = g.op("Add", g.op("Mul", _onehot(g, t), g.constant(0.75)), g.op("Mul", _onehot(g, other), g.constant(0.25)))
    return cross_entropy(g, g.op("Sub", p, hot))


OTHERS: dict[str, tuple[str, Build]] = {
    "two targets of a row": ("CrossEntropyLossGrad", _mixed),
    "an index below 0 that counts from another class than the last": (
        "CrossEntropyLossGrad",
        lambda g: _hot_twice(
            g, lambda g, t: g.op("Where", _below(g, t), g.op("Add", t, g.constant(C - 1, np.int64)), t)
        ),
    ),
    "an index above 2 that counts from the end": (
        "CrossEntropyLossGrad",
        lambda g: _hot_twice(
            g,
            lambda g, t: g.op(
                "Where", g.op("Less", g.constant(2, np.int64), t), g.op("Sub", t, g.constant(C, np.int64)), t
            ),
        ),
    ),
    "more rows than classes": (
        "CrossEntropyLossGrad",
        lambda g: cross_entropy(
            g,
            g.op(
                "Sub",
                _p(g),
                number(g, g.op("Equal", last(g, arange(g, N)), g.op("Unsqueeze", arange(g, C), g.ints(0)))),
            ),
        ),
    ),
    "row numbers from one on": (
        "CrossEntropyLossGrad",
        lambda g: _against_each_other(g, lambda g, z: _onehot(g, g.op("Add", arange(g, C), g.constant(1, np.int64)))),
    ),
    "by one index of fewer classes": ("CrossEntropyLossGrad", lambda g: _by_flat_index(g, C - 1)),
    "by a table: rows of a segment on one place": (
        "CrossEntropyLossGrad",
        lambda g: _by_table(g, order=lambda g, ids: (ids, arange(g, N))),
    ),
    "by a table: filled with the first row": (
        "CrossEntropyLossGrad",
        lambda g: _by_table(g, blank=lambda g, key: blank(g, key, 0)),
    ),
    "by a table: a row of ones": ("CrossEntropyLossGrad", lambda g: _by_table(g, below=1.0)),
    "by a table: some of the rows": (
        "CrossEntropyLossGrad",
        lambda g: _by_table(
            g,
            place=lambda g, key: g.constant(np.arange(N - 1), np.int64),
            order=lambda g, ids: g.ops("TopK", ids, g.ints(N - 1), outputs=2, axis=0, largest=0),
            blank=of_all_places,
        ),
    ),
    "by a table: numbers of rows sorted by others": (
        "CrossEntropyLossGrad",
        lambda g: _by_table(
            g, order=lambda g, ids: (sorted_ids(g, ids, largest=0)[0], sorted_ids(g, ids, largest=1)[1])
        ),
    ),
    "no class": ("CrossEntropyLossGrad", lambda g: _one_class(g, C)),
    "almost a unit matrix": (
        "CrossEntropyLossGrad",
        lambda g: _against_each_other(g, lambda g, z: g.constant(np.eye(C) * [1, 1, 1, 1, 0.9])),
    ),
    "weights that differ": (
        "CrossEntropyLossGrad",
        lambda g: _smoothed_weights(g, 0.02 * FEEDS["w"] * [1, 1, 1, 1, 1.001]),
    ),
    "sum along another axis": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: softmax_gradient(g, lambda g, u, y: g.sum(g.op("Mul", u, y), 2)),
    ),
    "one element of each row, of another weight in the sum": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: _at_the_target_above_all(g, 2.0),
    ),
    "sums through other values": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: _through_values(g, g.op("Softmax", given(g, "s"), axis=-1), "values_2"),
    ),
    "mean for sum": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: softmax_gradient(g, lambda g, u, y: g.op("ReduceMean", g.op("Mul", u, y), g.ints(-1))),
    ),
    "transposed operand": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: softmax_gradient(g, lambda g, u, y: last(g, g.op("Einsum", u, y, equation="bhij,bhji->bhi"))),
    ),
    "running sum, not its end": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: softmax_gradient(g, lambda g, u, y: g.op("CumSum", g.op("Mul", u, y), g.constant(3, np.int64))),
    ),
    "all but the last element": (
        "ScaledMaskedSoftmaxBackward",
        lambda g: softmax_gradient(
            g,
            lambda g, u, y: g.op(
                "Slice", g.op("CumSum", g.op("Mul", u, y), g.constant(3, np.int64)), g.ints(2), g.ints(3), g.ints(3)
            ),
        ),
    ),
    "scatter that overwrites itself": ("CrossEntropyLossGrad", _sum_of_targets),
    "rows without a class in a one-hot": ("CrossEntropyLossGrad", _of_fewer_classes),
    "normalisation": ("MseLossBackward", _centred),
    "sum for difference": (
        "MseLossBackward",
        lambda g: g.op("Mul", g.op("Add", given(g, "x"), given(g, "y")), g.constant(0.1)),
    ),
    "different factors": (
        "MseLossBackward",
        lambda g: g.op(
            "Sub", g.op("Mul", given(g, "x"), g.constant(0.5)), g.op("Mul", given(g, "y"), g.constant(0.25))
        ),
    ),
    "running sums ahead of ends": ("GroupedBiasAddGrad", lambda g: _of_running_sums(g, padded=False)),
    "any index": ("GroupedBiasAddGrad", lambda g: _scattered(g, given(g, "index"))),
    "an index that may fall": ("GroupedBiasAddGrad", lambda g: _scattered(g, _running(g, given(g, "steps")))),
    "an index that falls": (
        "GroupedBiasAddGrad",
        lambda g: _scattered(g, _running(g, g.op("Cast", given(g, "marks"), to=I64), reverse=1)),
    ),
    "rows ahead of the first group go to the last": (
        "GroupedBiasAddGrad",
        lambda g: _scattered(g, _less_one(g, _marked(g, given(g, "bounds"), _ones(g, GROUPS - 1)))),
    ),
    "any index, one-hot": (
        "GroupedBiasAddGrad",
        lambda g: g.op(
            "MatMul",
            g.op(
                "Transpose",
                g.op("OneHot", given(g, "index"), g.constant(GROUPS, np.int64), g.constant([0.0, 1.0])),
                perm=[1, 0],
            ),
            given(g, "dy"),
        ),
    ),
    "constant index, not sorted": (
        "GroupedBiasAddGrad",
        lambda g: _scattered(g, g.constant([0, 1, 0, 1, 1, 2, 2], np.int64)),
    ),
    "constant mask, groups out of order": (
        "GroupedBiasAddGrad",
        lambda g: g.op("MatMul", g.constant(np.eye(3)[:, [1, 1, 0, 0, 0, 2, 2]]), given(g, "dy")),
    ),
    "constant mask, rows left out": (
        "GroupedBiasAddGrad",
        lambda g: g.op("MatMul", g.constant(np.eye(4)[:3, [0, 0, 1, 3, 1, 2, 2]]), given(g, "dy")),
    ),
    "masks that overlap": (
        "GroupedBiasAddGrad",
        lambda g: g.op(
            "MatMul",
            number(g, g.op("Less", g.constant(np.arange(ROWS)[None], np.int64), last(g, given(g, "ends")))),
            given(g, "dy"),
        ),
    ),
}


def built(build: Build) -> onnx.ModelProto:
    """The graph with an output behind the gradient; an infinity stays one."""
    g = GraphBuilder()
    g.output(g.op("Identity", build(g)))
    return g.model()
