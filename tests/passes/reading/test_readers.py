"""Every operation that canonical forms read, one node at a time: its form is worth what the operation computes.

Each reader has samples. The form of a sample's output must not be opaque, and must have the operation's value at every
index, for several sizes of the symbolic dimensions. What a reader need not read may be opaque, but nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from evaluation import Array, Evaluation, constants, squeezed
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass

from gradfuse.passes.reading import Forms, ort_training
from gradfuse.passes.reading.registry import READERS

MICROSOFT = ort_training.DOMAIN
Dim = int | str
SIZES = ({"N": 3, "M": 4, "K": 2}, {"N": 2, "M": 5, "K": 3}, {"N": 4, "M": 4, "K": 4})

DOUBLE, FLOAT, HALF, INT64, INT32, BOOL = (
    getattr(TensorProto, name) for name in ("DOUBLE", "FLOAT", "FLOAT16", "INT64", "INT32", "BOOL")
)


@dataclass(frozen=True)
class Given:
    """An input: its element type, its shape, and how numbers become its elements."""

    dtype: int
    shape: tuple[Dim, ...]
    fill: Callable[[np.random.Generator, tuple[int, ...]], Array]


def x(*shape: Dim) -> Given:
    return Given(DOUBLE, shape, lambda rng, s: rng.standard_normal(s))


def positive(*shape: Dim) -> Given:
    return Given(DOUBLE, shape, lambda rng, s: rng.uniform(0.5, 2.0, s))


def eighths(*shape: Dim) -> Given:
    """Numbers that all float types have."""
    return Given(DOUBLE, shape, lambda rng, s: rng.integers(-20, 20, s) / 8)


def below(limit: int, *shape: Dim, dtype: int = INT64, least: int = 0) -> Given:
    """Integers from the least up to a limit."""
    kind = np.int32 if dtype == INT32 else np.int64
    return Given(dtype, shape, lambda rng, s: rng.integers(least, limit, s).astype(kind))


def distinct(limit: int, *shape: Dim) -> Given:
    """Integers below a limit, none of them twice along the last axis."""

    def fill(rng: np.random.Generator, s: tuple[int, ...]) -> Array:
        return rng.permuted(np.broadcast_to(np.arange(limit), (*s[:-1], limit)), axis=-1)[..., : s[-1]].copy()

    return Given(INT64, shape, fill)


def condition(*shape: Dim) -> Given:
    return Given(BOOL, shape, lambda rng, s: rng.random(s) < 0.5)


def with_gaps(*shape: Dim) -> Given:
    """Numbers, some of them NaN."""
    return Given(DOUBLE, shape, lambda rng, s: np.where(rng.random(s) < 0.5, np.nan, rng.standard_normal(s)))


def floats(*numbers: Any) -> Array:
    return np.asarray(numbers, np.float64)


def singles(*numbers: Any) -> Array:
    return np.asarray(numbers, np.float32)


def ints(*numbers: Any) -> Array:
    return np.asarray(numbers, np.int64)


def scalar(number: int | float) -> Array:
    return np.asarray(number, np.int64 if isinstance(number, int) else np.float64)


Operand = Given | Array | None


AHEAD: dict[str, tuple[Any, ...]] = {
    "SixTimes": (below(5, "N", 3), ("Mul", ints(6))),
    "Shape": (x("N", 3), ("Shape",)),
    "Size": (x("N", 3), ("Size",)),
    "Flat": (x("N", 3), ("Reshape", ints(-1))),
    "FlatRows": (x("N", 3, 2), ("Reshape", ints(-1, 2))),
    "AxesOfSizeOne": (x(1, 3), ("Shape",), ("Equal", ints(1)), ("NonZero",), ("Reshape", ints(-1))),
}
"""An input, and the nodes between it and the node that is read, with their constants."""


@dataclass(frozen=True)
class Sample:
    """One node. `outputs` says which are read. A text as an operand is a key of AHEAD."""

    op: str
    operands: tuple[Operand | str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[bool, ...] = (True,)
    opset: int = 20
    domain: str = ""

    def __str__(self) -> str:
        shapes = [
            "-"
            if o is None
            else o
            if isinstance(o, str)
            else f"{o.dtype}{list(o.shape)}"
            if isinstance(o, Given)
            else str(o.tolist()).replace(" ", "")
            for o in self.operands
        ]
        attributes = [f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.TensorProto)]
        return f"{self.op}({', '.join([*shapes, *attributes])}) opset {self.opset}"


def s(
    op: str, *operands: Operand | str, opset: int = 20, outputs: tuple[bool, ...] = (True,), **attributes: Any
) -> Sample:
    return Sample(op, operands, attributes, outputs, opset)


def _tensor(array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array))


def _elementwise() -> Iterator[Sample]:
    for op in ("Add", "Sub", "Mul", "Div"):
        yield s(op, x("N", 3), positive("N", 3))
        yield s(op, x("N", 3), positive(3))
        yield s(op, x(3, 1), positive(1, 4))
        yield s(op, floats(2.0), positive("N", "M"))
        yield s(op, x("N", "M"), scalar(4.0))
        yield s(op, x(2, "N", 3), positive("N", 3))
    for op in ("Add", "Sub", "Mul"):
        yield s(op, below(5, "N", 3), below(7, 3))
        yield s(op, below(5, 4, dtype=INT32), below(7, 4, dtype=INT32))
    yield s("Div", "SixTimes", ints(3), opset=20)
    yield s("Sum", x("N", 3))
    yield s("Sum", x("N", 3), x(3), x(1, 1))
    yield s("Mean", x("N", 3), x(3), x("N", 1))
    yield s("Mean", x(2, 3))
    for op in ("Neg", "Exp", "Identity"):
        yield s(op, x("N", 3))
        yield s(op, x())
        yield s(op, x(1, "N", 1))
    yield s("Neg", below(9, "N", 2))
    for op in ("Reciprocal", "Sqrt", "Log"):
        yield s(op, positive("N", 3))
        yield s(op, positive(2, 1))
    for exponent in (2.0, 1.0, 0.5, -1.0, 3.0, 0.0, -0.5):
        yield s("Pow", positive("N", 3), scalar(exponent))
    yield s("Pow", x("N", 3), floats(2.0))
    yield s("Pow", x("N", 3), scalar(3))
    yield s("Pow", floats(2.0, 3.0, 4.0), scalar(2.0))
    yield s("Pow", below(9, "N", 3), scalar(2))
    yield s("Pow", below(9, "N", 3), scalar(0))


def _softmaxes() -> Iterator[Sample]:
    for op in ("Softmax", "LogSoftmax"):
        yield s(op, x("N", 3))
        yield s(op, x("N", 3), axis=0)
        yield s(op, x("N", 3, "M"), axis=1)
        yield s(op, x(2, 3, 4), axis=-2)
        yield s(op, x(2, 1))
        yield s(op, x(2, 3, 4))
    yield s("SoftmaxCrossEntropyLoss", x("N", 3), below(3, "N"), outputs=(False, True))
    yield s("SoftmaxCrossEntropyLoss", x(2, 3, "N"), below(3, 2, "N"), outputs=(False, True), reduction="none")


def _reductions() -> Iterator[Sample]:
    for op in ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"):
        own = positive if op == "ReduceLogSum" else x
        yield s(op, own("N", 3), ints(1))
        yield s(op, own("N", 3), ints(-1), keepdims=0)
        yield s(op, own("N", 3), ints(0), keepdims=0)
        yield s(op, own("N", 3, "M"), ints(0, -1))
        yield s(op, own("N", 3, 2), ints(2, 0), keepdims=0)
        yield s(op, own("N", 3))
        yield s(op, own("N", 3), None, keepdims=0)
        yield s(op, own(2, 1, 3), ints(1), keepdims=0)
        if op in ("ReduceSum", "ReduceMean"):
            yield s(op, own("N", 3), noop_with_empty_axes=1)
            yield s(op, own("N", 3), ints(1), noop_with_empty_axes=1)
        if op != "ReduceSum":
            yield s(op, own("N", 3, 2), opset=17, axes=[1])
            yield s(op, own("N", 3, 2), opset=17, axes=[-1, 0], keepdims=0)
            yield s(op, own("N", 3), opset=17, keepdims=0)
    yield s("ReduceSum", below(9, "N", 3), ints(1))
    yield s("ReduceSum", x(4, 3), "AxesOfSizeOne", noop_with_empty_axes=1)
    yield s("ReduceSumSquare", below(9, "N", 3), ints(1), keepdims=0)
    for reverse in (0, 1):
        for exclusive in (0, 1):
            yield s("CumSum", x("N", 3), scalar(1), reverse=reverse, exclusive=exclusive)
            yield s("CumSum", x("N", 3), ints(-2)[0], reverse=reverse, exclusive=exclusive)
    yield s("CumSum", x(3, 1), scalar(1))
    yield s("CumSum", below(4, "N"), scalar(0))


def _products() -> Iterator[Sample]:
    ones, eye = np.ones((3, 1)), np.eye(3)
    yield s("MatMul", x("N", 1, 3), x("N", 3, 1))
    yield s("MatMul", x(2, "N", 3), ones)
    yield s("MatMul", x(3), x(3))
    yield s("MatMul", x("N", 3), eye)
    yield s("MatMul", eye[:, [0, 0, 1, 2]], x(4, "N"))
    yield s("MatMul", x("N", 1), x(1, "M"))
    yield s("Gemm", x("N", 3), ones)
    yield s("Gemm", x("N", 3), eye, x(3), alpha=0.5, beta=3.0)
    yield s("Gemm", x(3, "N"), eye, x(1, 3), transA=1, beta=2.0)
    yield s("Gemm", x("N", 3), np.ones((1, 3)), transB=1, alpha=-1.0)
    yield s("Gemm", x(1, "N"), x(1, "M"), transA=1)
    for equation, *operands in (
        ("ij->i", x("N", 3)),
        ("ij->ji", x("N", 3)),
        ("ij", x("N", 3)),
        ("ba", x("N", 3)),
        ("ij,ij->i", x("N", 3), x("N", 3)),
        ("ij,ij", x("N", 3), x("N", 3)),
        ("...i,...i->...", x(2, "N", 3), x(2, "N", 3)),
        ("i...->...i", x("N", 3, 2)),
        ("i,j->ij", x("N"), x(3)),
        ("i, j -> j i", x("N"), x(3)),
        ("bhij,bhij,bhi->bhi", x(2, 1, "N", 3), x(2, 1, "N", 3), x(2, 1, "N")),
        ("ij,j->ij", x("N", 3), x(3)),
    ):
        yield s("Einsum", *operands, equation=equation)


def _diagonals() -> Iterator[Sample]:
    for k in (0, 1, -1):
        yield s("EyeLike", x(3, 4), k=k)
        for upper in (0, 1):
            yield s("Trilu", x("N", 3, 4), scalar(k), upper=upper)
    yield s("EyeLike", x("N", "M"))
    yield s("EyeLike", x(3, 3), dtype=INT64)
    yield s("EyeLike", x(1, 3))
    yield s("Trilu", x("N", "M"))
    yield s("Trilu", x("N", "M"), upper=0)
    yield s("Trilu", x(1, 3), scalar(1))


def _views() -> Iterator[Sample]:
    yield s("Transpose", x("N", 3, 1))
    yield s("Transpose", x("N", 3, 2), perm=[1, 2, 0])
    yield s("Transpose", x("N", 3, 2), perm=[0, 2, 1])
    yield s("Squeeze", x("N", 1, 3), ints(1))
    yield s("Squeeze", x(1, "N", 1, 3), ints(-2, 0))
    yield s("Squeeze", x(1, 2, 1))
    yield s("Unsqueeze", x("N", 3), ints(0))
    yield s("Unsqueeze", x("N", 3), ints(-1, 1))
    yield s("Unsqueeze", x(), ints(0))
    yield s("Reshape", x("N", 6), ints(-1, 2, 3))
    yield s("Reshape", x("N", 2, 3), ints(0, -1))
    yield s("Reshape", x("N", 2, 3), ints(-1, 3))
    yield s("Reshape", x("N", 2, 3), ints(-1))
    yield s("Reshape", x(4, 3), ints(2, 6))
    yield s("Reshape", x(2, 3), ints(1, 2, 1, 3))
    yield s("Reshape", x("N", 3), "Shape", opset=20)
    yield s("Reshape", x(6), ints(2, 3), allowzero=1)
    yield s("Flatten", x("N", 2, 3))
    yield s("Flatten", x("N", 2, 3), axis=2)
    yield s("Flatten", x("N", 2, 3), axis=0)
    yield s("Flatten", x(4, 2, 3), axis=-1)
    yield s("Expand", x(3, 1), ints(3, 4))
    yield s("Expand", x(3), ints(2, 1))
    yield s("Expand", x(), "Shape")
    yield s("Tile", x(1, 3), ints(4, 1))
    yield s("Tile", x("N", 1), ints(1, 3))
    yield s("Cast", eighths("N", 3), to=FLOAT)
    yield s("Cast", below(9, "N", 3), to=DOUBLE)
    yield s("Cast", condition("N", 3), to=DOUBLE)
    yield s("Cast", condition("N", 3), to=INT64)
    yield s("Cast", below(3, "N", 3), to=BOOL)
    yield s("Cast", below(3, "N", 3), to=INT32)
    yield s("Cast", x("N", 3), to=BOOL)
    yield s("Cast", condition("N", 3), to=TensorProto.INT8)
    yield s("Cast", np.full((2, 2), 3.0), to=INT64)
    yield s("CastLike", below(9, "N", 3), x(1))
    yield s("CastLike", x("N", 3), condition(1))
    yield s("CastLike", condition("N", 3), below(3, 2))


def _constants() -> Iterator[Sample]:
    yield s("ConstantOfShape", ints(2, 3))
    yield s("ConstantOfShape", ints(2, 1), value=_tensor(floats(2.5)))
    yield s("ConstantOfShape", "Shape", value=_tensor(ints(7)))
    yield s("Constant", value=_tensor(floats(1.0, 2.5, -3.0)))
    yield s("Constant", value=_tensor(np.asarray([[1.0, 1.0], [2.0, 2.0]])))
    yield s("Constant", value=_tensor(np.eye(3)))
    yield s("Constant", value=_tensor(np.arange(5)))
    yield s("Constant", value=_tensor(np.asarray([0, 0, 1, 1, 1, 2])))
    yield s("Constant", value=_tensor(np.asarray([False, True, False])))
    yield s("Constant", value=_tensor(np.asarray([[1.0, 1, 0, 0], [0, 0, 1, 1]])))
    yield s("Constant", value=_tensor(np.full((2, 3), 2.0)))
    yield s("Constant", value_float=2.5)
    yield s("Constant", value_ints=[3, 5])
    yield s("Range", scalar(0), scalar(5), scalar(1))
    yield s("Range", scalar(2), scalar(8), scalar(2))
    yield s("Range", scalar(5), scalar(1), scalar(-1))
    yield s("Range", scalar(1), scalar(8), scalar(3))
    yield s("Range", scalar(0), "Size", scalar(1))
    yield s("Range", scalar(0.5), scalar(3.5), scalar(1.0))


def _pieces() -> Iterator[Sample]:
    most = (1 << 63) - 1
    yield s("Slice", x("N", 4), ints(1), ints(3), ints(1))
    yield s("Slice", x("N", 4), ints(-2), ints(most), ints(-1))
    yield s("Slice", x("N", 4), ints(3), ints(-most), ints(1), ints(-2))
    yield s("Slice", x("N", 4), ints(0), ints(4), ints(1), ints(3))
    yield s("Slice", x(3, 4), ints(1, 0), ints(2, -1))
    yield s("Slice", x(3, 4, 2), ints(0, 1), ints(most, most), ints(0, 2))
    yield s("Slice", x("N", 4), ints(0), ints(most), ints(0))
    yield s("Slice", x("N", 4), ints(1), ints(most), ints(0))
    yield s("Slice", x("N", 4), ints(0), ints(-1), ints(0))
    yield s("Slice", x(1, 4), ints(0), ints(1), ints(0))
    yield s("Split", x("N", 5), ints(2, 3), outputs=(True, True), axis=1)
    yield s("Split", x(5, "N"), outputs=(True, True), num_outputs=2)
    yield s("Split", x("N", 4), ints(1, 3), outputs=(True, True), axis=-1)
    yield s("Split", x("N", 4), outputs=(True, True), opset=17, axis=1)
    yield s("Split", x(4, 2), ints(4), axis=0)
    yield s("Concat", x("N", 3), x("N", 2), axis=1)
    yield s("Concat", x("N", 3), x("N", 1), x("N", 2), axis=-1)
    yield s("Concat", x(3), axis=0)
    yield s("Concat", x(2, 3), np.zeros((0, 3)), axis=0)
    yield s("Concat", x("N", 3), x("M", 3), axis=0)
    yield s("Concat", x(1, 3), x(1, 3), axis=0)
    yield s("Pad", x("N", 3), ints(0, 1, 0, 2))
    yield s("Pad", x("N", 3), ints(0, 0, 0, 1), scalar(0.0))
    yield s("Pad", x("N", 3), ints(1, 0, 2, 0))
    yield s("Pad", x(1, 3), ints(1, 0, 0, 0))
    yield s("Pad", x("N", 3), ints(1, 2), None, ints(1))
    yield s("Pad", x("N", 3), ints(1, 0, 0, 2), None, ints(1, 0))
    yield s("Pad", x("N", 3), ints(0, 2), None, ints(-2))


def _indexed() -> Iterator[Sample]:
    yield s("Gather", x(4, "N"), below(4, "M"))
    yield s("Gather", x(2, 1, 4, 3), below(1, 2), axis=1)
    yield s("Gather", x(2, 4, "N", 3), below(4, "M"), axis=1)
    yield s("GatherElements", x(4, 4), below(4, 4, 4))
    yield s("GatherElements", x(1, "N"), below(1, 3, "N"), axis=0)
    yield s("GatherND", x(4, "N", 2), below(4, "M", 1))
    yield s("GatherND", x(3, 4, "N", 2), below(3, "M", 2))
    yield s("NonZero", below(3, 8))
    yield s("ScatterElements", x(4, 4), distinct(4, 1, 4), x(1, 4), reduction="add")
    yield s("ScatterND", x(4, "N", 3), below(4, 5, 1), x(5, "N", 3), reduction="add")
    yield s("OneHot", below(4, "N", 3), scalar(4), singles(0.25, 2.0))
    yield s("Gather", x("N", 4), below(4, 2, 3), axis=1)
    yield s("Gather", x("N", 4), below(4), axis=-1)
    yield s("Gather", x("N", 4), scalar(-1), axis=1)
    yield s("Gather", x("N", 4), ints(2), axis=1)
    yield s("Gather", x("N", 4), ints(1, 3), axis=1)
    yield s("Gather", x("N", 4, "M"), ints(2, 0, 3), axis=1)
    yield s("Gather", x("N", 4), ints(-3, -1), axis=1)
    yield s("Gather", x(1, 4), below(1, 2))
    yield s("GatherElements", x("N", 4), below(4, "N", 2), axis=1)
    yield s("GatherElements", x(4, "N"), below(4, 1, "N"), axis=0)
    yield s("GatherElements", x("N", 4), below(4, "N", 1), axis=-1)
    yield s("GatherElements", x(2, 4), ints([-1, -3], [-1, -3]), axis=1)
    yield s("GatherElements", x(2, 3), ints([-1], [-1]), axis=1)
    yield s("GatherND", x(4, "N"), below(4, "M", 1))
    yield s("GatherND", x(4, 3, "N"), below(3, "M", 2))
    yield s("GatherND", x(3, 4), below(3, "M", 2))
    yield s("GatherND", x(3, 4), ints([-1, -1], [-1, -1]))
    yield s("GatherND", x(3, "N"), ints([-1], [-2]))
    yield s("NonZero", condition("N"))
    yield s("NonZero", below(2, "N"))
    zeros = np.zeros((3, 4))
    for reduction in ("none", "add"):
        own: dict[str, Any] = {"reduction": reduction}
        index = distinct if reduction == "none" else below
        yield s("ScatterElements", zeros, index(4, 3, 1), x(3, 1), axis=1, **own)
        yield s("ScatterElements", x(3, 4), index(4, 3, 1), x(3, 1), axis=-1, **own)
        yield s("ScatterElements", x("N", 4), index(4, "N", 1), x("N", 1), axis=1, **own)
        yield s("ScatterElements", x(3, 4), ints([-1], [-1], [-1]), x(3, 1), axis=1, **own)
        yield s("ScatterND", x(4, "N"), index(4, 1, 1), x(1, "N"), **own)
        yield s("ScatterND", x(3, 4), ints([-1]), x(1, 4), **own)
    yield s("ScatterElements", zeros, below(4, 3, 2), x(3, 2), axis=1, reduction="add")
    yield s("ScatterElements", x(4, "N"), below(4, "M", "N"), x("M", "N"), axis=0, reduction="add")
    yield s("ScatterND", zeros, below(3, "N", 1), x("N", 4), reduction="add")
    yield s("ScatterND", x(3, 4), below(3, "N", 2), x("N"), reduction="add")
    yield s("ScatterND", zeros, ints([0], [2]), x(2, 4), reduction="add")
    yield s("ScatterND", x(3, 4), ints([-1], [-3]), x(2, 4), reduction="add")
    for axis in (-1, 0, 1):
        yield s("OneHot", below(4, "N"), ints(4), singles(0.0, 1.0), axis=axis)
        yield s("OneHot", below(4, "N", 3), scalar(4), singles(0.25, 2.0), axis=axis)
    yield s("OneHot", below(3, 2), "Size", ints(0, 1))
    yield s("OneHot", below(3, 2), ints(3), singles(0.0, 1.0), opset=17)


def _conditions() -> Iterator[Sample]:
    yield s("Equal", below(3, "N", 3), below(3, 3))
    yield s("Equal", below(3, "N", 3), ints(1))
    yield s("Equal", condition("N", 3), condition(3))
    for op in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        yield s(op, below(3, "N", 3), below(3, 3))
        yield s(op, ints(1), below(3, "N", 3))
        if op in ("Less", "Greater"):
            yield s(op, x("N", 3), x(3))
            yield s(op, x("N", 3), scalar(0.5))
    yield s("Not", condition("N", 3))
    for op in ("And", "Or", "Xor"):
        yield s(op, condition("N", 3), condition(3))
        yield s(op, condition("N", 1), condition("N", 3))
    yield s("Where", condition("N", 3), x(3), x("N", 1))
    yield s("Where", condition("N", 1), scalar(0.0), x("N", 3))
    yield s("Where", np.asarray(True), x("N", 3), x(3))
    yield s("Where", np.asarray([False]), x(3), x("N", 3))
    yield s("Where", np.asarray([True, False, True]), x("N", 3), x(3))
    yield s("Where", condition("N", 3), below(4, 3), below(9, "N", 3))


# The operators of com.microsoft have no implementation in stock onnxruntime; these are their definitions in numpy.


def _softmax_grad(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(y * (grad - np.sum(y * grad, axis, keepdims=True)))


def _log_softmax_grad(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(grad - np.exp(y) * np.sum(grad, axis, keepdims=True))


def _loss_grad(
    grad: Array, logp: Array, t: Array, w: Array | None = None, reduction: str = "mean", ignore_index: int = -1
) -> Array:
    result = np.zeros_like(logp)
    own = np.ones(logp.shape[1]) if w is None else w
    total = sum(own[c] for c in t.ravel() if c != ignore_index)
    for at in np.ndindex(*t.shape):
        n, *rest = at
        if t[at] == ignore_index:
            continue
        g = grad[at] if reduction == "none" else grad / total if reduction == "mean" else grad
        for c in range(logp.shape[1]):
            result[(n, c, *rest)] = g * own[t[at]] * (np.exp(logp[(n, c, *rest)]) - (c == t[at]))
    return result


def _gather_grad(shape: Array, index: Array, grad: Array, axis: int = 0) -> Array:
    result = np.zeros(shape)
    for at in np.ndindex(*grad.shape):
        k = index[at[axis : axis + index.ndim]]
        result[(*at[:axis], k, *at[axis + index.ndim :])] += grad[at]
    return result


def _gather_elements_grad(grad: Array, shape: Array, index: Array, axis: int = 0) -> Array:
    result = np.zeros(shape)
    for at in np.ndindex(*grad.shape):
        place = list(at)
        place[axis] = index[at]
        result[tuple(place)] += grad[at]
    return result


def _flat(function: Callable[..., Array]) -> Callable[..., Array]:
    """Up to opset 12 a softmax took all dimensions from its axis on for one."""

    def flat(grad: Array, y: Array, axis: int = 1) -> Array:
        rows = int(np.prod(y.shape[:axis]))
        return function(grad.reshape(rows, -1), y.reshape(rows, -1)).reshape(y.shape)

    return flat


def _internal_loss_grad(
    grad: Array,
    logp: Array,
    t: Array,
    w: Array | None = None,
    ignored: Array | None = None,
    more: Any = 0.0,
    **named: Any,
) -> Array:
    index = named.pop("ignore_index", -1 if ignored is None else int(ignored))
    return np.asarray(_loss_grad(grad, logp, t, w, ignore_index=index, **named) + more)


def _log_softmax(z: Array, *_: Array, **__: Any) -> list[Any]:
    return [None, z - np.log(np.sum(np.exp(z), 1, keepdims=True))]


def _gather_nd_grad(shape: Array, index: Array, grad: Array, batch_dims: int = 0) -> Array:
    result = np.zeros(shape)
    for at in np.ndindex(*index.shape[:-1]):
        result[(*at[:batch_dims], *index[at])] += grad[at]
    return result


def _slice_grad(grad: Array, shape: Array, starts: Array, ends: Array, axes: Any = None, steps: Any = None) -> Array:
    result = np.zeros(shape)
    places = [slice(None)] * len(shape)
    for k, axis in enumerate(range(len(starts)) if axes is None else axes):
        places[axis] = slice(int(starts[k]), int(ends[k]), None if steps is None else int(steps[k]))
    result[tuple(places)] = grad
    return result


def _fused_product(a: Array, b: Array, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Array:
    return np.asarray(alpha * np.matmul(a.swapaxes(-1, -2) if transA else a, b.swapaxes(-1, -2) if transB else b))


_MICROSOFT: dict[str, Callable[..., Any]] = {
    "FusedMatMul": _fused_product,
    "SoftmaxGrad": _flat(_softmax_grad),
    "LogSoftmaxGrad": _flat(_log_softmax_grad),
    "SoftmaxCrossEntropyLossInternal": _log_softmax,
    "SoftmaxCrossEntropyLossInternalGrad": _internal_loss_grad,
    "GatherNDGrad": _gather_nd_grad,
    "SliceGrad": _slice_grad,
    "Scale": lambda a, k, scale_down=0: a / k if scale_down else a * k,
    "SoftmaxGrad_13": _softmax_grad,
    "LogSoftmaxGrad_13": _log_softmax_grad,
    "SoftmaxCrossEntropyLossGrad": _loss_grad,
    "GatherElementsGrad": _gather_elements_grad,
    "GatherGrad": _gather_grad,
    "ConcatTraining": lambda *parts, axis=0: [np.concatenate(parts, axis), None],
    "SplitTraining": lambda a, sizes, axis=0: np.split(a, np.cumsum(sizes)[:-1], axis),
}


def _training() -> Iterator[Sample]:
    def own(
        op: str,
        *operands: Operand,
        shapes: Sequence[Sequence[Dim]],
        outputs: tuple[bool, ...] = (True,),
        **attributes: Any,
    ) -> Sample:
        return Sample(op, operands, attributes | {"shapes": shapes}, outputs, 20, MICROSOFT)

    yield own("Scale", x("N", 3), scalar(4.0), shapes=[("N", 3)])
    yield own("Scale", x("N", 3), positive(), shapes=[("N", 3)], scale_down=1)
    for op in ("SoftmaxGrad_13", "LogSoftmaxGrad_13"):
        yield own(op, x("N", 3), x("N", 3), shapes=[("N", 3)])
        yield own(op, x("N", 3, 2), x("N", 3, 2), shapes=[("N", 3, 2)], axis=1)
    for reduction, grad in (("mean", x()), ("sum", x()), ("none", x("N"))):
        loss: dict[str, Any] = {"reduction": reduction}
        op = "SoftmaxCrossEntropyLossGrad"
        yield own(op, grad, x("N", 3), below(3, "N"), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N", least=-1), shapes=[("N", 3)], ignore_index=-1, **loss)
        yield own(op, grad, x("N", 3), below(3, "N"), positive(3), shapes=[("N", 3)], **loss)
    yield own("SoftmaxCrossEntropyLossGrad", x(), x(2, 3, "N"), below(3, 2, "N"), shapes=[(2, 3, "N")], reduction="sum")
    op = "SoftmaxCrossEntropyLossInternalGrad"
    for reduction, grad in (("mean", x()), ("sum", x()), ("none", x("N"))):
        loss = {"reduction": reduction}
        yield own(op, grad, x("N", 3), below(3, "N"), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N", least=-1), None, scalar(-1), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N"), positive(3), scalar(7), x("N", 3), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N"), None, None, x("N", 3), shapes=[("N", 3)], **loss)
    yield own(op, x(), x("N", 3), below(3, "N"), shapes=[("N", 3)], ignore_index=0)
    op = "SoftmaxCrossEntropyLossInternal"
    yield own(op, x("N", 3), below(3, "N"), shapes=[(), ("N", 3)], outputs=(False, True))
    yield own(op, x(2, 3, "N"), below(3, 2, "N"), shapes=[(), (2, 3, "N")], outputs=(False, True))
    for op in ("SoftmaxGrad", "LogSoftmaxGrad"):
        yield own(op, x("N", 3), x("N", 3), shapes=[("N", 3)])
        yield own(op, x("N", 3, 2), x("N", 3, 2), shapes=[("N", 3, 2)])
        yield own(op, x("N", 3, 2), x("N", 3, 2), shapes=[("N", 3, 2)], axis=2)
    yield own("FusedMatMul", x("N", 3), np.ones((3, 1)), shapes=[("N", 1)], alpha=0.5)
    yield own("FusedMatMul", x(3, "N"), np.eye(3), shapes=[("N", 3)], transA=1)
    yield own("FusedMatMul", x(2, "N", 3), np.ones((2, 1, 3)), shapes=[(2, "N", 1)], transB=1, alpha=-2.0)
    yield own("GatherNDGrad", ints(4, 3), below(4, "N", 1), x("N", 3), shapes=[(4, 3)])
    yield own("GatherNDGrad", ints(4, 3, 2), below(3, "N", 2), x("N", 2), shapes=[(4, 3, 2)])
    yield own("GatherNDGrad", ints(2, 4, 3), below(4, 2, 1), x(2, 3), shapes=[(2, 4, 3)], batch_dims=1)
    yield own("SliceGrad", x(2, 4), ints(5, 4), ints(1), ints(3), shapes=[(5, 4)])
    yield own("SliceGrad", x(3, 2), ints(3, 4), ints(-3), ints(-1), ints(1), ints(1), shapes=[(3, 4)])
    yield own("SliceGrad", x(3, 1), ints(3, 4), ints(2), ints(3), ints(-1), shapes=[(3, 4)])
    yield own("GatherElementsGrad", x(3, 2), ints(3, 4), below(4, 3, 2), shapes=[(3, 4)], axis=1)
    yield own("GatherElementsGrad", x(2, 3), ints(4, 3), below(4, 2, 3), shapes=[(4, 3)])
    yield own("GatherGrad", ints(4, 3), below(4, "N"), x("N", 3), shapes=[(4, 3)])
    yield own("GatherGrad", ints(2, 4), below(4, "N"), x(2, "N"), shapes=[(2, 4)], axis=1)
    yield own("GatherGrad", ints(4, 3), below(4, 2, "N"), x(2, "N", 3), shapes=[(4, 3)])
    yield own("ConcatTraining", x("N", 3), x("N", 2), shapes=[("N", 5), (2,)], outputs=(True, False), axis=1)
    yield own("ConcatTraining", x(2, 3), x(4, 3), shapes=[(6, 3), (2,)], outputs=(True, False))
    yield own("SplitTraining", x(5, 3), ints(2, 3), shapes=[(2, 3), (3, 3)], outputs=(True, True))
    yield own("SplitTraining", x("N", 5), ints(2, 3), shapes=[("N", 2), ("N", 3)], outputs=(True, True), axis=1)


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Gather", x("N", 4), ints(-1, 0), axis=1)
    yield s("Gather", x("N", 4), ints(-1, 2, 0), axis=1)
    yield s("GatherElements", x(2, 4), ints([-1, 0], [-1, 0]), axis=1)
    yield s("GatherND", x(3, "N"), ints([-1], [0]))
    yield s("GatherND", x(2, 3, 4), below(3, 2, 1), batch_dims=1)
    yield s("ScatterND", x(3, 4), ints([-1], [0]), x(2, 4))
    yield s("ScatterND", np.zeros((3, 4)), ints([0], [2]), x(2, 4))
    yield s("ScatterElements", x(3, 4), ints([-1, 1], [-1, 1], [0, 0]), x(3, 2), axis=1, reduction="add")
    yield s("ScatterElements", x(3, 4), below(4, 2, 1), x(2, 1), axis=1)
    yield s("ScatterElements", x(3, 4), below(4, 3, 2), x(3, 2), axis=1)
    yield s("ScatterElements", x(3, 4), below(4, 3, 1), x(3, 1), axis=1, reduction="mul")
    yield s("ScatterElements", x(3, 4), below(4, 3, 1), x(3, 1), axis=1, reduction="max")
    yield s("ScatterND", x(3, 4), below(3, 2, 1), x(2, 4), reduction="mul")
    yield s("Cast", x("N", 3), to=INT64)
    yield s("Cast", np.full((2, 2), 2.5), to=INT64)
    yield s("Cast", np.full((2, 2), 1 << 40), to=INT32)
    yield s("Cast", below(9000, "N", 3, least=4000), to=HALF)
    yield s("Cast", np.full((2, 2), 1 << 31), to=INT32)
    yield s("Cast", below(1000, "N", 3), to=TensorProto.INT8)
    yield s("Cast", below(1000, "N", 3), to=TensorProto.UINT8)
    yield s("Cast", below(9, "N", 3, least=-9), to=TensorProto.UINT8)
    yield s("Div", below(9, "N", 3, least=-9), ints(2))
    yield s("Pow", below(9, "N", 3), scalar(0.5))
    yield s("Pow", below(9, "N", 3), scalar(-1.0))
    yield s("Pow", x("N", 3), x(3))
    yield s("ReduceMean", below(9, "N", 3), ints(1))
    yield s("ReduceL2", below(9, "N", 3, dtype=INT32), ints(1))
    yield s("ReduceLogSum", below(9, "N", 3, least=1, dtype=INT32), ints(1))
    yield s("Gemm", below(9, 2, 3, dtype=INT32), np.eye(3, dtype=np.int32), alpha=0.5)
    yield s("MatMul", x("N", 3), x(3, "M"))
    yield s("Einsum", x(3, 3), equation="ii->i")
    yield s("Einsum", x("N", 3), x(3, "M"), equation="ij,jk->ik")
    yield s("Slice", x("N", 4), ints(0), ints(2), ints(0))
    yield s("Slice", x("N", 4), ints(-1), ints((1 << 63) - 1), ints(0))
    yield s("Slice", x("N", 4), ints(-1), ints(-(1 << 63)), ints(0), ints(-1))
    yield s("Slice", x("N", 4), ints(-3), ints(-1), ints(0))
    yield s("Pad", x("N", 3), ints(0, 1, 0, 2), scalar(1.5))
    yield s("Pad", x("N", 3), ints(0, 1, 0, 2), mode="edge")
    yield s("Pad", x("N", 3), ints(0, -1, 0, 2))
    yield s("Tile", x("N", 3), ints(2, 1))
    yield s("Tile", x("N", 3), ints(1, 2))
    yield s("NonZero", condition("N", 3))
    yield s("Sqrt", x("N", 3))
    yield s("Log", x("N", 3))
    yield s("LessOrEqual", x("N", 3), x(3))
    yield s("LessOrEqual", with_gaps("N", 3), x(3))
    yield s("GreaterOrEqual", with_gaps("N", 3), x(3))
    yield s("Less", with_gaps("N", 3), x(3))
    most = (1 << 63) - 1
    for operand, axis in (("Flat", 0), ("FlatRows", 0)):
        yield s("Slice", operand, ints(1), ints(most), ints(axis))
        yield s("Slice", operand, ints(0), ints(3), ints(axis))
        yield s("Gather", operand, ints(0, 2, 1), axis=axis)
        yield s("CumSum", operand, scalar(axis))
        yield s("CumSum", operand, scalar(axis), exclusive=1)
        yield s("Concat", operand, operand, axis=axis)
    yield s("Split", "Flat", outputs=(True,), num_outputs=1)
    yield s("Pad", "Flat", ints(1, 0))
    yield s("GatherElements", "Flat", ints(2, 0))
    yield s("GatherElements", "FlatRows", ints([1, 0]), axis=1)
    yield s("GatherElements", "FlatRows", ints([1, 0], [2, 2]), axis=0)
    yield s("GatherND", "FlatRows", ints([2], [0]))
    yield s("ScatterElements", "FlatRows", ints([1, 0]), x(1, 2), axis=0, reduction="add")
    yield s("ScatterElements", "FlatRows", ints([1], [0]), x(2, 1), axis=1, reduction="add")
    yield s("ScatterND", "FlatRows", ints([2], [0]), x(2, 2), reduction="add")
    yield s("NonZero", "Flat")
    yield s("MatMul", "FlatRows", x(2, 4))
    yield s("Range", scalar(4), scalar(1), scalar(1))
    yield s("OneHot", below(4, "N"), ints(1), singles(0.0, 1.0))


SAMPLES = [
    sample
    for part in (
        *(_elementwise, _softmaxes, _reductions, _products, _diagonals, _views, _constants, _pieces, _indexed),
        *(_conditions, _training),
    )
    for sample in part()
]


def test_every_reader_has_samples() -> None:
    # Whose outputs are axes, which are read where they are used.
    never = {(MICROSOFT, "BroadcastGradientArgs")}
    assert {(sample.domain, sample.op) for sample in SAMPLES} == set(READERS) - never


def _model(sample: Sample) -> tuple[onnx.ModelProto, dict[str, Given]]:
    inputs: dict[str, Given] = {}
    initializers, names, nodes = [], [], []
    for position, operand in enumerate(sample.operands):
        if operand is None:
            names.append("")
        elif isinstance(operand, str):
            own, *steps = AHEAD[operand]
            inputs |= {"first": own}
            names.append("first")
            for op, *constants_ in steps:
                read = [names.pop(), *(f"{operand}_{op}_{position}_{k}" for k in range(len(constants_)))]
                initializers += [numpy_helper.from_array(a, n) for a, n in zip(constants_, read[1:], strict=True)]
                names.append(f"{operand}_{op}_{position}")
                nodes.append(helper.make_node(op, read, names[-1:]))
        elif isinstance(operand, Given):
            inputs[f"x{position}"] = operand
            names.append(f"x{position}")
        else:
            initializers.append(numpy_helper.from_array(np.asarray(operand), f"x{position}"))
            names.append(f"x{position}")
    attributes = dict(sample.attributes)
    shapes = attributes.pop("shapes", None)
    outputs = [f"y{k}" for k in range(len(sample.outputs))]
    nodes.append(helper.make_node(sample.op, names, outputs, domain=sample.domain, **attributes))
    infos = [helper.make_tensor_value_info(name, g.dtype, g.shape) for name, g in inputs.items()]
    if any(isinstance(o, str) and o == "AxesOfSizeOne" for o in sample.operands):
        # Nothing is inferred of a shape that depends on where sizes are 1.
        shapes = [(1, 3)]
    results = [
        helper.make_tensor_value_info(name, DOUBLE if shapes else TensorProto.UNDEFINED, shapes[k] if shapes else None)
        for k, name in enumerate(outputs)
        if sample.outputs[k]
    ]
    graph = helper.make_graph(nodes, "sample", infos, results, initializers)
    imports = [helper.make_opsetid("", sample.opset), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    if shapes:
        return model, inputs
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    del model.graph.output[:]
    model.graph.output.extend(inferred.graph.output)
    onnx.checker.check_model(model, full_check=True)
    return model, inputs


def _computed(sample: Sample, model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """What the operation computes, by onnxruntime; by onnx's evaluator for types that it has no kernel for."""
    if sample.domain:
        given = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer} | feeds
        attributes = {k: v for k, v in sample.attributes.items() if k != "shapes"}
        operands = [None if o is None else given[f"x{k}"] for k, o in enumerate(sample.operands)]
        result = _MICROSOFT[sample.op](*operands, **attributes)
        results = result if isinstance(result, list) else [result]
        return [np.asarray(a) for a, read in zip(results, sample.outputs, strict=True) if read]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return list(ReferenceEvaluator(model).run(None, feeds))
    return list(session.run(None, feeds))


def _compare(sample: Sample, must_be_read: bool) -> None:
    proto, inputs = _model(sample)
    model = ShapeInferencePass(strict_mode=False)(ir.from_proto(proto)).model
    read = Forms(model.graph)
    expressed = [o for o in model.graph.outputs if read.get(o) is not None and o not in read.opaque]
    if must_be_read:
        assert expressed == [*model.graph.outputs], "an output is opaque"
    rng = np.random.default_rng(0)
    for sizes in SIZES if any(isinstance(d, str) for g in inputs.values() for d in g.shape) else SIZES[:1]:
        shapes = {n: tuple(d if isinstance(d, int) else sizes[d] for d in g.shape) for n, g in inputs.items()}
        feeds = {n: np.asarray(g.fill(rng, shapes[n])) for n, g in inputs.items()}
        values = {v.name: squeezed(feeds[str(v.name)], v) for v in model.graph.inputs} | constants(read, model.graph)
        evaluation = Evaluation(read.algebra, values, {**sizes})
        for output, wanted in zip(model.graph.outputs, _computed(sample, proto, feeds), strict=True):
            form = read.get(output)
            if output not in expressed or form is None:
                continue
            if sample.op == "NonZero":
                evaluation.dims = {**evaluation.dims} | {
                    str(d): int(n) for d, n in zip(output.shape or (), wanted.shape, strict=True)
                }
            with np.errstate(invalid="ignore"):
                worth = evaluation.form(form)
            assert worth.shape == wanted.shape
            np.testing.assert_allclose(worth, wanted.astype(np.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    _compare(sample, must_be_read=True)


@pytest.mark.parametrize("sample", [*_unread()], ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    _compare(sample, must_be_read=False)
