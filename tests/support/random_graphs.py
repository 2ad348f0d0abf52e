"""Writes small ONNX models of opsets 7 to 23 as six exporters would.

:func:`drawn` writes a model from a seed: a chain of pieces, each of which takes and gives a value of shape (N, T,
WIDTH), and habits of exporters, which change how the model is written and not what it computes. Pieces and habits can
be left out, to reduce failures (fuzzing_graphs.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
WIDTH = 4
WORDS = 5
F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
_MOST = np.iinfo(np.int64).max
OPSETS = (7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
_OF_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Drawn:
    """A model, and what it was made of.

    Attributes:
        pieces: the names of its pieces.
        habits: the names of the habits of exporters.
        model: the model.
        weights: the names of the initializers that are weights, as first written.
        standard: what operators of onnxruntime stand for: the first output of a node -> nodes of ONNX.
        loss: a name of a loss, or "" where the output of the model is one.
    """

    seed: int
    pieces: tuple[str, ...]
    habits: tuple[str, ...]
    model: onnx.ModelProto
    weights: tuple[str, ...]
    standard: dict[str, list[onnx.NodeProto]]
    loss: str
    drawn_pieces: int
    drawn_habits: tuple[str, ...]


@dataclass
class Writer:
    """Nodes in order for one opset; every exporter has its way to name weights and to write numbers."""

    rng: random.Random
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, tuple[int, tuple[int | str, ...]]] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    standard: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    style: str = "torch"
    own: Any = None
    """What draws the numbers of a piece."""
    stem: str = ""
    made: int = 0

    def name(self) -> str:
        self.made += 1
        match self.style:
            case "paddle":
                return f"{self.stem}p2o.{self.made}.tmp_0"
            case "tf":
                return f"{self.stem}model/op_{self.made}:0"
            case "numbers":
                return f"{self.stem}{1000 + self.made}"
            case _:
                return f"{self.stem}/op_{self.made}_output_0"

    def op(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        """Add a node; return its first output."""
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, inputs, names, name=f"node {names[0]}", domain=domain, **attributes)
        )
        return names[0]

    def ops(self, op_type: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        self.op(op_type, *inputs, outputs=outputs, **attributes)
        return list(self.nodes[-1].output)

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        name = self.name()
        if self.own.random() < 0.5:
            self.initializers[name] = np.asarray(array, dtype)
        else:
            self.nodes.append(
                helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array, dtype)))
            )
        return name

    def number(self, x: float) -> str:
        """A float of Python: of no dimension, or of one or more of one element."""
        name = self.name()
        rank = self.own.choice([0, 0, 1, 1, 3] if self.style in ("tf", "paddle") else [0, 0, 0, 0, 1])
        array = np.full([1] * rank, x, np.float32)
        if self.own.random() < 0.5:
            self.initializers[name] = array
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name

    def weight(self, *shape: int, low: float | None = None, high: float = 1.0) -> str:
        """A weight; some are all zeros or ones, as fresh ones are."""
        k = len(self.weights)
        name = {
            "torch": f"{self.stem}layers.{k}.weight",
            "paddle": f"{self.stem}linear_{k}.w_0",
            "tf": f"{self.stem}model/dense_{k}/MatMul/ReadVariableOp:0",
            "numbers": f"{self.stem}onnx::MatMul_{k}",
        }[self.style]
        numbers = np.random.default_rng(self.own.randrange(1 << 30))
        if low is None:
            array = numbers.standard_normal(shape) * 0.6
        else:
            array = numbers.uniform(low, high, shape)
        fresh = self.own.random()
        if len(shape) == 1 and fresh < 0.3:
            array = np.ones(shape) if low is not None or fresh < 0.15 else np.zeros(shape)
        self.initializers[name] = array.astype(np.float32)
        self.weights.append(name)
        return name

    def statistic(self, array: Array) -> str:
        name = self.name()
        self.initializers[name] = array.astype(np.float32)
        return name

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        self.inputs.setdefault(name, (kind, tuple(shape)))
        return name

    # Operators whose form depends on the opset

    def axes(self, op_type: str, x: str, axes: Sequence[int], since: int, **attributes: Any) -> str:
        """An operator whose axes became an input with an opset."""
        axes = [a + 3 if a < 0 and self.opset < 11 else a for a in axes]
        if self.opset >= since:
            return self.op(op_type, x, self.constant(list(axes)), **attributes)
        return self.op(op_type, x, axes=list(axes), **attributes)

    def reduce(self, kind: str, x: str, axes: Sequence[int], keep: bool = True) -> str:
        return self.axes(f"Reduce{kind}", x, axes, 13 if kind == "Sum" else 18, keepdims=int(keep))

    def unsqueeze(self, x: str, axis: int) -> str:
        return self.axes("Unsqueeze", x, [axis], 13)

    def squeeze(self, x: str, axis: int) -> str:
        return self.axes("Squeeze", x, [axis], 13)

    def slice(self, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
        if self.opset < 10:
            return self.op("Slice", x, axes=[axis], starts=[start], ends=[end])
        parts = [self.constant([start]), self.constant([end]), self.constant([axis])]
        return self.op("Slice", x, *parts, *([self.constant([step])] if step != 1 else []))

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.op("Clip", x, min=low, max=high)
        bounds = []
        for number in (low, high):
            name = self.name()
            self.initializers[name] = np.asarray(number, np.float32)
            bounds.append(name)
        return self.op("Clip", x, *bounds)

    def softmax(self, x: str, axis: int) -> str:
        """By the last axis in any opset; by others since 13."""
        return self.op("Softmax", x, axis=axis if self.opset >= 13 else 2)

    def shape_of(self, x: str) -> str:
        return self.op("Shape", x)

    def size(self, x: str, axis: int) -> str:
        return self.op("Gather", self.shape_of(x), self.constant([axis]), axis=0)

    def first(self, x: str) -> str:
        return self.op("Transpose", x, perm=[0, 2, 1])


Piece = Callable[[Writer, str], str]
PIECES: dict[str, tuple[int, Piece]] = {}


def piece(name: str, since: int = 7) -> Callable[[Piece], Piece]:
    def add(function: Piece) -> Piece:
        PIECES[name] = (since, function)
        return function

    return add


# Layers


@piece("dense")
def _dense(g: Writer, h: str) -> str:
    h = g.op("MatMul", h, g.weight(WIDTH, WIDTH))
    if g.own.random() < 0.8:
        bias = g.weight(WIDTH)
        h = g.op("Add", h, bias) if g.own.random() < 0.5 else g.op("Add", bias, h)
    return h


@piece("gemm")
def _gemm(g: Writer, h: str) -> str:
    flat = g.op("Reshape", h, g.constant([-1, WIDTH]))
    trans = int(g.own.random() < 0.7)
    given = [g.weight(WIDTH, WIDTH)]
    if g.own.random() < 0.8 or g.opset < 11:
        given.append(g.weight(*g.own.choice([(WIDTH,), (1, WIDTH), (1,)])))
    scale: dict[str, Any] = {"alpha": 0.5, "beta": 2.0} if g.own.random() < 0.3 else {}
    y = g.op("Gemm", flat, *given, transB=trans, **scale)
    if g.own.random() < 0.5:
        return g.op("Reshape", y, g.op("Concat", g.size(h, 0), g.size(h, 1), g.constant([WIDTH]), axis=0))
    return g.op("Reshape", y, g.shape_of(h))


@piece("activation")
def _activation(g: Writer, h: str) -> str:
    known = ["Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign", "HardSigmoid", "Abs", "Neg"]
    if g.opset >= 9:
        known += ["Erf", "Sinh", "Asinh", "Sign"]
    if g.opset >= 12:
        known += ["Celu"]
    if g.opset >= 14:
        known += ["HardSwish"]
    if g.opset >= 18:
        known += ["Mish"]
    if g.opset >= 20:
        known += ["Gelu"]
    known += ["Sin", "Cos", "Atan", "Exp"]
    op_type = g.own.choice(known)
    if op_type == "Exp":
        return g.op("Exp", g.op("Neg", g.op("Mul", h, h)))
    if op_type == "Sign":
        return g.op("Mul", h, g.op("Sign", h))
    given: dict[str, Any] = {"alpha": 0.3} if op_type in ("LeakyRelu", "Elu") and g.own.random() < 0.7 else {}
    if op_type == "Gelu" and g.own.random() < 0.5:
        return g.op("Gelu", h, approximate="tanh")
    return g.op(op_type, h, **given)


@piece("gelu by hand", 9)
def _gelu(g: Writer, h: str) -> str:
    inner = g.op("Erf", g.op("Div", h, g.number(2**0.5)))
    return g.op("Mul", g.op("Mul", h, g.op("Add", inner, g.number(1.0))), g.number(0.5))


@piece("slopes")
def _slopes(g: Writer, h: str) -> str:
    return g.op("PRelu", h, g.weight(*g.own.choice([(WIDTH,), (1,), (1, 1, WIDTH), (1, 1)]), low=0.1))


@piece("layer norm by hand")
def _layer_norm_by_hand(g: Writer, h: str) -> str:
    centred = g.op("Sub", h, g.reduce("Mean", h, [-1]))
    if g.own.random() < 0.5:
        square = g.op("Mul", centred, centred)
    else:
        square = g.op("Pow", centred, g.number(2.0))
    deviation = g.op("Sqrt", g.op("Add", g.reduce("Mean", square, [-1]), g.number(1e-3)))
    return g.op("Add", g.op("Mul", g.op("Div", centred, deviation), g.weight(WIDTH, low=0.5)), g.weight(WIDTH))


@piece("layer norm", 17)
def _layer_norm(g: Writer, h: str) -> str:
    given = [g.weight(WIDTH, low=0.5)] + ([g.weight(WIDTH)] if g.own.random() < 0.7 else [])
    return g.op("LayerNormalization", h, *given, axis=g.own.choice([-1, 2]), epsilon=1e-3)


@piece("rms norm")
def _rms_norm(g: Writer, h: str) -> str:
    if g.opset >= 23 and g.own.random() < 0.5:
        return g.op("RMSNormalization", h, g.weight(WIDTH, low=0.5), axis=-1, epsilon=1e-3)
    mean = g.reduce("Mean", g.op("Mul", h, h), [-1])
    root = g.op("Reciprocal", g.op("Sqrt", g.op("Add", mean, g.number(1e-3))))
    return g.op("Mul", g.op("Mul", h, root), g.weight(WIDTH, low=0.5))


@piece("batch norm")
def _batch_norm(g: Writer, h: str) -> str:
    numbers = np.random.default_rng(g.own.randrange(1 << 30))
    fresh = g.own.random() < 0.6
    mean = np.zeros(WIDTH) if fresh else numbers.standard_normal(WIDTH)
    variance = np.ones(WIDTH) if fresh else numbers.uniform(0.5, 2, WIDTH)
    given = [g.weight(WIDTH, low=0.5), g.weight(WIDTH), g.statistic(mean), g.statistic(variance)]
    return g.first(g.op("BatchNormalization", g.first(h), *given, epsilon=1e-3))


@piece("instance norm")
def _instance_norm(g: Writer, h: str) -> str:
    given = [g.weight(WIDTH, low=0.5), g.weight(WIDTH)]
    return g.first(g.op("InstanceNormalization", g.first(h), *given, epsilon=0.1))


@piece("group norm", 18)
def _group_norm(g: Writer, h: str) -> str:
    size = WIDTH if g.opset >= 21 else 2
    given = [g.weight(size, low=0.5), g.weight(size)]
    return g.first(g.op("GroupNormalization", g.first(h), *given, num_groups=2, epsilon=0.1))


@piece("convolution")
def _convolution(g: Writer, h: str) -> str:
    group = g.own.choice([1, 1, 2, WIDTH])
    given = [g.weight(WIDTH, WIDTH // group, 3)] + ([g.weight(WIDTH)] if g.own.random() < 0.7 else [])
    way: dict[str, Any] = g.own.choice(
        [{"pads": [1, 1]}, {"auto_pad": "SAME_UPPER"}, {"pads": [2, 2], "dilations": [2]}, {"pads": [2, 0]}]
    )
    if g.own.random() < 0.5:
        way["kernel_shape"] = [3]
    return g.first(g.op("Conv", g.first(h), *given, group=group, **way))


@piece("transposed convolution")
def _transposed_convolution(g: Writer, h: str) -> str:
    given = [g.weight(WIDTH, WIDTH, 3), g.weight(WIDTH)]
    return g.first(g.op("ConvTranspose", g.first(h), *given, pads=[1, 1], kernel_shape=[3]))


@piece("pooling")
def _pooling(g: Writer, h: str) -> str:
    op_type = g.own.choice(["MaxPool", "AveragePool", "LpPool"])
    more: dict[str, Any] = {"count_include_pad": g.own.choice([0, 1])} if op_type == "AveragePool" else {}
    return g.first(g.op(op_type, g.first(h), kernel_shape=[3], pads=[1, 1], strides=[1], **more))


@piece("pooling over everything")
def _global_pooling(g: Writer, h: str) -> str:
    return g.op("Add", h, g.first(g.op(g.own.choice(["GlobalAveragePool", "GlobalMaxPool"]), g.first(h))))


@piece("recurrence")
def _recurrence(g: Writer, h: str) -> str:
    kind, gates = g.own.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    directions = g.own.choice([1, 1, 2])
    size = WIDTH // directions
    given = [
        g.weight(directions, gates * size, WIDTH),
        g.weight(directions, gates * size, size),
        *([g.weight(directions, 2 * gates * size)] if g.own.random() < 0.8 else []),
    ]
    way: dict[str, Any] = {"hidden_size": size}
    if directions == 2:
        way["direction"] = "bidirectional"
    elif g.own.random() < 0.3:
        way["direction"] = "reverse"
    if kind == "GRU" and g.own.random() < 0.6:
        way["linear_before_reset"] = 1
    y = g.op(kind, g.op("Transpose", h, perm=[1, 0, 2]), *given, **way)
    if directions == 1:
        return g.op("Transpose", g.axes("Squeeze", y, [1], 13), perm=[1, 0, 2])
    parts = g.op("Transpose", y, perm=[2, 0, 1, 3])
    return g.op("Reshape", parts, g.constant([0, 0, WIDTH]))


@piece("attention by hand")
def _attention(g: Writer, h: str) -> str:
    q, k, v = (g.op("MatMul", h, g.weight(WIDTH, WIDTH)) for _ in range(3))
    scores = g.op("MatMul", q, g.first(k))
    scores = g.op("Div", scores, g.number(2.0)) if g.own.random() < 0.5 else g.op("Mul", scores, g.number(0.5))
    if g.own.random() < 0.4 and g.opset >= 14:
        ones = g.op("ConstantOfShape", g.op("Concat", g.size(h, 1), g.size(h, 1), axis=0), value=_tensor([1.0]))
        lower = g.op("Cast", g.op("Trilu", ones, upper=0), to=BOOL)
        bias = g.op("Where", lower, g.number(0.0), g.number(float("-inf") if g.own.random() < 0.5 else -1e9))
        scores = g.op("Add", scores, bias)
    return g.op("MatMul", g.softmax(scores, -1), v)


@piece("attention of ONNX", 23)
def _attention_of_onnx(g: Writer, h: str) -> str:
    q, k, v = (g.op("MatMul", h, g.weight(WIDTH, WIDTH)) for _ in range(3))
    return g.op("Attention", q, k, v, q_num_heads=2, kv_num_heads=2, is_causal=g.own.choice([0, 1]))


@piece("dropout")
def _dropout(g: Writer, h: str) -> str:
    return g.op("Dropout", h)


@piece("embedding")
def _embedding(g: Writer, h: str) -> str:
    i = g.input("words", I64, ("N", "T"))
    rows = g.op("Gather", g.weight(WORDS, WIDTH), i, axis=0) if g.own.random() < 0.8 else ""
    if not rows:
        rows = g.op("Gather", g.weight(WORDS, WIDTH), i)
    return g.op("Add", h, rows)


@piece("one-hot", 9)
def _one_hot(g: Writer, h: str) -> str:
    i = g.input("words", I64, ("N", "T"))
    values = g.name()
    g.initializers[values] = np.asarray([0, 1], np.float32)
    return g.op("Add", h, g.op("MatMul", g.op("OneHot", i, g.constant(WORDS), values, axis=-1), g.weight(WORDS, WIDTH)))


# Arithmetic and broadcasting


@piece("arithmetic")
def _arithmetic(g: Writer, h: str) -> str:
    op_type = g.own.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum"])
    shape = g.own.choice([(WIDTH,), (1, WIDTH), (1, 1, WIDTH), (1,), (1, 1, 1)])
    w = g.weight(*shape, low=0.5)
    if op_type in ("Max", "Min", "Mean", "Sum") and g.opset < 8:
        w = g.op("Add", g.op("Mul", h, g.number(0.0)), w)
    return g.op(op_type, h, w) if op_type == "Div" or g.own.random() < 0.5 else g.op(op_type, w, h)


@piece("second input")
def _second_input(g: Writer, h: str) -> str:
    z = g.input("z", F32, ("A", "B", WIDTH))
    op_type = g.own.choice(["Add", "Mul", "Sub", "Where", "MatMul", "Expand", "Concat"])
    if op_type == "Where" and g.opset >= 9:
        return g.op("Where", g.op("Greater", z, g.number(0.0)), h, z)
    if op_type == "MatMul":
        return g.op("Add", h, g.op("Mul", g.op("MatMul", g.op("MatMul", h, g.first(z)), z), g.number(0.1)))
    if op_type == "Expand" and g.opset >= 8:
        return g.op("Mul", h, g.op("Expand", z, g.shape_of(h)))
    return g.op(op_type if op_type in ("Add", "Mul", "Sub") else "Add", h, z)


@piece("row of the batch")
def _row(g: Writer, h: str) -> str:
    r = g.input("row", F32, ("A", 1, g.own.choice([1, WIDTH])))
    return g.op(g.own.choice(["Add", "Mul"]), h, r)


@piece("power")
def _power(g: Writer, h: str) -> str:
    base = g.op("Add", g.op("Mul", h, h), g.number(0.5))
    exponent = g.own.choice(["number", "weight"])
    return g.op("Pow", base, g.number(g.own.choice([2.0, 0.5, -1.0, 3.0])) if exponent == "number" else g.weight(WIDTH))


@piece("logarithm")
def _logarithm(g: Writer, h: str) -> str:
    x = g.op("Add", g.op("Abs", h), g.number(0.5))
    return g.op(g.own.choice(["Log", "Sqrt", "Reciprocal"]), x)


@piece("clip")
def _clip(g: Writer, h: str) -> str:
    return g.clip(h, -0.5, 1.0)


@piece("cast")
def _cast(g: Writer, h: str) -> str:
    return g.op("Cast", g.op("Tanh", g.op("Cast", h, to=TensorProto.DOUBLE)) if g.opset >= 13 else h, to=F32)


@piece("identity")
def _identity(g: Writer, h: str) -> str:
    return g.op("Identity", h)


@piece("einsum", 12)
def _einsum(g: Writer, h: str) -> str:
    match g.own.randrange(4):
        case 0:
            return g.op("Einsum", h, g.weight(WIDTH, WIDTH), equation="btd,de->bte")
        case 1:
            return g.op("Einsum", h, g.weight(WIDTH, WIDTH), equation="...i,ij")
        case 2:
            z = g.input("z", F32, ("A", "B", WIDTH))
            return g.op("Einsum", h, z, equation="...d,...d->...d")
        case _:
            return g.op("Einsum", h, g.weight(WIDTH), equation="...d,d->...d")


# Reductions


@piece("reduction")
def _reduction(g: Writer, h: str) -> str:
    kind = g.own.choice(["Mean", "Sum", "Max", "Min", "L1", "L2", "LogSumExp", "SumSquare", "Prod", "LogSum"])
    axes = g.own.choice([[1], [2], [-1], [1, 2], [0], [0, 1, 2]])
    x = g.op("Add", g.op("Abs", h), g.number(0.3)) if kind in ("LogSum", "L2", "Prod") else h
    y = g.reduce(kind, x, axes)
    if kind in ("Sum", "SumSquare", "L1", "Prod"):
        y = g.op("Mul", y, g.number(0.1))
    return g.op(g.own.choice(["Add", "Sub"]), h, y)


@piece("reduction without the axis")
def _reduction_without(g: Writer, h: str) -> str:
    return g.op("Mul", h, g.unsqueeze(g.reduce(g.own.choice(["Mean", "Max", "Sum"]), h, [1], keep=False), 1))


@piece("sum of all")
def _sum_of_all(g: Writer, h: str) -> str:
    keep = g.own.choice([0, 1])
    return g.op("Add", h, g.op(g.own.choice(["ReduceMean", "ReduceMax", "ReduceL2"]), h, keepdims=keep))


@piece("softmax")
def _softmax(g: Writer, h: str) -> str:
    return g.op("Add", h, g.softmax(h, g.own.choice([-1, 2, 1, 0])))


@piece("log of softmax")
def _log_softmax(g: Writer, h: str) -> str:
    return g.op("LogSoftmax", h, axis=-1 if g.opset >= 13 else 2)


@piece("softmax by hand")
def _softmax_by_hand(g: Writer, h: str) -> str:
    e = g.op("Exp", g.op("Sub", h, g.reduce("Max", h, [-1])))
    return g.op("Mul", h, g.op("Div", e, g.reduce("Sum", e, [-1])))


@piece("cumulative sum", 11)
def _cumulative(g: Writer, h: str) -> str:
    way = {"exclusive": g.own.choice([0, 1]), "reverse": g.own.choice([0, 1])}
    return g.op("Add", h, g.op("Mul", g.op("CumSum", h, g.constant(1), **way), g.number(0.2)))


@piece("extremes", 11)
def _extremes(g: Writer, h: str) -> str:
    values, _ = g.ops("TopK", h, g.constant([2]), outputs=2, axis=-1)
    return g.op("Concat", values, values, axis=2)


@piece("normalised")
def _normalised(g: Writer, h: str) -> str:
    return g.op("Add", h, g.op("LpNormalization", h, axis=g.own.choice([2, -1] if g.opset >= 11 else [2]), p=2))


# Views


@piece("view")
def _view(g: Writer, h: str) -> str:
    match g.own.randrange(8):
        case 0:
            return g.op("Transpose", g.op("Transpose", h, perm=[2, 0, 1]), perm=[1, 2, 0])
        case 1:
            flat = g.op("Flatten", h, axis=2)
            return g.op("Reshape", g.op("Tanh", flat), g.shape_of(h))
        case 2:
            parts = g.op("Reshape", h, g.constant([0, 0, 2, 2]))
            return g.op("Reshape", g.op("Transpose", parts, perm=[0, 1, 3, 2]), g.constant([0, 0, -1]))
        case 3:
            return g.op("Concat", g.slice(h, 2, 1, WIDTH), g.slice(h, 2, 0, 1), axis=2)
        case 4:
            return g.op("Add", h, g.slice(h, 1, 0, 1))
        case 5:
            return g.op("Add", h, g.slice(h, 1, -1, _MOST))
        case 6:
            if g.opset >= 10:
                return g.op("Add", h, g.slice(h, 1, -1, -_MOST, -1))
            return g.op("Add", h, g.slice(h, 2, 0, 1))
        case _:
            wide = g.op("Reshape", h, g.op("Concat", g.size(h, 0), g.constant([-1]), axis=0))
            return g.op("Reshape", wide, g.shape_of(h))


@piece("parts")
def _parts(g: Writer, h: str) -> str:
    if g.opset < 13:
        a, b = g.ops("Split", h, outputs=2, axis=2, split=[1, 3])
    elif g.opset < 18 or g.own.random() < 0.5:
        a, b = g.ops("Split", h, g.constant([1, 3]), outputs=2, axis=2)
    else:
        a, b = g.ops("Split", h, outputs=2, axis=-1, num_outputs=2)
    return g.op("Concat", b, a, axis=2)


@piece("padding")
def _padding(g: Writer, h: str) -> str:
    pads = [0, g.own.choice([0, 1, 2]), 0, 0, 1, 0]
    mode = g.own.choice(["constant", "edge"])
    if g.opset < 11:
        y = g.op("Pad", h, pads=pads, mode=mode)
    else:
        y = g.op("Pad", h, g.constant(pads), mode=mode)
    return g.op("Add", h, g.reduce("Mean", y, [1]))


@piece("gather")
def _gather(g: Writer, h: str) -> str:
    match g.own.randrange(4):
        case 0:
            return g.op("Gather", h, g.constant([2, 0, 0, 3]), axis=2)
        case 1:
            return g.op("Add", h, g.unsqueeze(g.op("Gather", h, g.constant(0), axis=1), 1))
        case 2 if g.opset >= 11:
            return g.op("GatherElements", h, g.op("Cast", g.op("Mul", h, g.number(0.0)), to=I64), axis=2)
        case _:
            return g.op("Mul", h, g.unsqueeze(g.op("Gather", h, g.constant(1), axis=2), 2))


@piece("scatter", 16)
def _scatter(g: Writer, h: str) -> str:
    where = g.op("Cast", g.op("Mul", h, g.number(0.0)), to=I64)
    reduction = g.own.choice(["none", "add"])
    given = h if reduction == "add" else g.op("Tanh", g.slice(h, 2, 0, 1))
    at = where if reduction == "add" else g.slice(where, 2, 0, 1)
    return g.op("ScatterElements", h, at, given, axis=2, reduction=reduction)


@piece("upsampling")
def _upsampling(g: Writer, h: str) -> str:
    x, mode = g.first(h), g.own.choice(["nearest", "linear"])
    scales = g.name()
    g.initializers[scales] = np.asarray([1, 1, 2], np.float32)
    if g.opset < 9:
        del g.initializers[scales]
        y = g.op("Upsample", x, scales=[1.0, 1.0, 2.0], mode=mode)
    elif g.opset < 10:
        y = g.op("Upsample", x, scales, mode=mode)
    elif g.opset < 11:
        y = g.op("Resize", x, scales, mode=mode)
    else:
        way = g.own.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
        more: dict[str, Any] = {"nearest_mode": "floor"} if mode == "nearest" else {}
        roi = g.constant([], np.float32) if g.opset < 13 else ""
        y = g.op("Resize", x, roi, scales, mode=mode, coordinate_transformation_mode=way, **more)
    return g.op("Add", h, g.first(g.reduce("Mean", y, [2])))


@piece("mask", 9)
def _mask(g: Writer, h: str) -> str:
    keep = g.op("Greater", h, g.number(0.2))
    if g.own.random() < 0.5:
        return g.op("Where", keep, h, g.op("Mul", h, g.number(0.1)))
    return g.op("Mul", h, g.op("Cast", keep, to=F32))


@piece("positions", 11)
def _positions(g: Writer, h: str) -> str:
    count = g.op("Gather", g.shape_of(h), g.constant(1), axis=0)
    places = g.op("Range", g.constant(0), count, g.constant(1))
    if g.own.random() < 0.5:
        return g.op("Add", h, g.op("Gather", g.weight(8, WIDTH), places))
    numbers = g.op("Mul", g.op("Cast", places, to=F32), g.number(0.1))
    return g.op("Mul", h, g.unsqueeze(numbers, 1))


@piece("table cut to the length", 10)
def _table(g: Writer, h: str) -> str:
    table = g.statistic(np.linspace(-1, 1, 8 * WIDTH).reshape(1, 8, WIDTH))
    return g.op("Add", h, g.op("Slice", table, g.constant([0]), g.size(h, 1), g.constant([1])))


@piece("constant filled by a shape", 9)
def _filled(g: Writer, h: str) -> str:
    filled = g.op("ConstantOfShape", g.shape_of(h), value=_tensor([0.5]))
    return g.op("Mul", h, g.op("Add", filled, g.weight(WIDTH)))


@piece("folded mask")
def _folded_mask(g: Writer, h: str) -> str:
    mask = np.zeros((1, 1, WIDTH))
    mask[..., -1] = -np.inf if g.own.random() < 0.5 else -1e9
    scores = g.op("Mul", h, h)
    return g.op("Add", h, g.softmax(g.op("Add", scores, g.statistic(mask)), -1))


# Control flow


@piece("if of squeeze", 11)
def _if_of_squeeze(g: Writer, h: str) -> str:
    y = g.unsqueeze(h, 1)
    count = g.op("Gather", g.shape_of(y), g.constant([1]), axis=0)
    is_one = g.op("Equal", count, g.constant([1]))
    squeezed, kept = g.name(), g.name()
    yes = _branch(g, "then", lambda: g.squeeze(y, 1), squeezed, None)
    no = _branch(g, "else", lambda: g.op("Identity", y), kept, None)
    return g.op("Add", g.op("If", is_one, then_branch=yes, else_branch=no), g.weight(WIDTH))


@piece("if", 9)
def _if(g: Writer, h: str) -> str:
    if g.own.random() < 0.5:
        condition = g.op("Greater", g.op("ReduceMax", h, keepdims=0), g.number(0.5))
    else:
        condition = g.constant(g.own.random() < 0.5, np.bool_)
    inside = g.own.random() < 0.5
    weight = "" if inside else g.weight(WIDTH, WIDTH)

    def yes() -> str:
        if not inside:
            return g.op("MatMul", h, weight)
        numbers = np.random.default_rng(g.own.randrange(1 << 30)).standard_normal((WIDTH, WIDTH)) * 0.5
        name = g.name()
        g.nodes.append(
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(numbers.astype(np.float32)))
        )
        g.weights.append(name)
        return g.op("MatMul", h, name)

    shape = ("N", "T", WIDTH)
    then = _branch(g, "then", yes, g.name(), shape)
    other = _branch(g, "else", lambda: g.op("Tanh", h), g.name(), shape)
    return g.op("If", condition, then_branch=then, else_branch=other)


@piece("loop", 11)
def _loop(g: Writer, h: str) -> str:
    weight = g.weight(WIDTH, WIDTH)
    turn, going, state, result = (g.name() for _ in range(4))
    body = _graph(g, "body", lambda: [g.op("Identity", going), g.op("Tanh", g.op("MatMul", state, weight))])
    body.input.extend(
        [
            helper.make_tensor_value_info(turn, I64, []),
            helper.make_tensor_value_info(going, BOOL, []),
            helper.make_tensor_value_info(state, F32, ["N", "T", WIDTH]),
        ]
    )
    body.output[0].type.tensor_type.elem_type = BOOL
    node = helper.make_node("Loop", [g.constant(2), g.constant(True, np.bool_), h], [result], body=body)
    g.nodes.append(node)
    return result


@piece("scan", 9)
def _scan(g: Writer, h: str) -> str:
    weight = g.weight(WIDTH, WIDTH)
    state, row, last, rows = (g.name() for _ in range(4))

    def turn() -> list[str]:
        new = g.op("Tanh", g.op("Add", g.op("MatMul", state, weight), row))
        return [new, g.op("Identity", new)]

    body = _graph(g, "turn", turn)
    for name in (state, row):
        body.input.append(helper.make_tensor_value_info(name, F32, ["N", WIDTH]))
    begin = g.op("Mul", g.reduce("Mean", h, [1], keep=False), g.number(0.5))
    by_axis = g.own.random() < 0.3
    way: dict[str, Any] = {"scan_input_axes": [1], "scan_output_axes": [1]} if by_axis else {}
    given = h if by_axis else g.op("Transpose", h, perm=[1, 0, 2])
    g.nodes.append(helper.make_node("Scan", [begin, given], [last, rows], body=body, num_scan_inputs=1, **way))
    return rows if by_axis else g.op("Transpose", rows, perm=[1, 0, 2])


def _graph(g: Writer, name: str, write: Callable[[], list[str]]) -> onnx.GraphProto:
    outside, g.nodes = g.nodes, []
    before = dict(g.initializers)
    outputs = write()
    inner, g.nodes = g.nodes, outside
    values = [helper.make_tensor_value_info(output, F32, None) for output in outputs]
    own = {n: g.initializers.pop(n) for n in list(g.initializers) if n not in before}
    return helper.make_graph(inner, name, [], values, [numpy_helper.from_array(a, n) for n, a in own.items()])


def _branch(
    g: Writer, name: str, write: Callable[[], str], result: str, shape: Sequence[int | str] | None
) -> onnx.GraphProto:
    graph = _graph(g, f"{name} {result}", lambda: [g.op("Identity", write())])
    if shape is not None:
        graph.output[0].CopyFrom(helper.make_tensor_value_info(graph.output[0].name, F32, shape))
    return graph


# Operators of onnxruntime


def _of_microsoft(
    g: Writer, op_type: str, inputs: Sequence[str], expansion: Callable[[], str], **attributes: Any
) -> str:
    outside, g.nodes = g.nodes, []
    result = expansion()
    nodes, g.nodes = g.nodes, outside
    y = g.op(op_type, *inputs, domain=_OF_MICROSOFT, **attributes)
    g.standard[y] = [*nodes, helper.make_node("Identity", [result], [y])]
    return y


@piece("gelu of onnxruntime", 11)
def _gelu_of_onnxruntime(g: Writer, h: str) -> str:
    op_type = g.own.choice(["Gelu", "QuickGelu", "BiasGelu"])
    if op_type == "QuickGelu":
        return _of_microsoft(
            g, op_type, [h], lambda: g.op("Mul", h, g.op("Sigmoid", g.op("Mul", h, _scalar(g, 1.702)))), alpha=1.702
        )
    bias = g.weight(WIDTH) if op_type == "BiasGelu" else ""

    def expansion() -> str:
        x = g.op("Add", h, bias) if bias else h
        inner = g.op("Erf", g.op("Mul", x, _scalar(g, 0.5**0.5)))
        return g.op("Mul", g.op("Mul", x, g.op("Add", inner, _scalar(g, 1.0))), _scalar(g, 0.5))

    return _of_microsoft(g, op_type, [h, bias] if bias else [h], expansion)


@piece("product of onnxruntime", 11)
def _product_of_onnxruntime(g: Writer, h: str) -> str:
    weight = g.weight(WIDTH, WIDTH)
    return _of_microsoft(
        g,
        "FusedMatMul",
        [h, weight],
        lambda: g.op("Mul", g.op("MatMul", h, g.op("Transpose", weight, perm=[1, 0])), _scalar(g, 0.5)),
        alpha=0.5,
        transB=1,
    )


@piece("skip layer norm of onnxruntime", 17)
def _skip_layer_norm(g: Writer, h: str) -> str:
    other, scale, shift = g.op("Tanh", h), g.weight(WIDTH, low=0.5), g.weight(WIDTH)
    return _of_microsoft(
        g,
        "SkipLayerNormalization",
        [h, other, scale, shift],
        lambda: g.op("LayerNormalization", g.op("Add", h, other), scale, shift, epsilon=0.01),
        epsilon=0.01,
    )


def _scalar(g: Writer, x: float) -> str:
    name = g.name()
    g.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(x, np.float32))))
    return name


def _tensor(numbers: Sequence[float]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(numbers, np.float32))


# Habits of exporters

Habit = Callable[[onnx.ModelProto, random.Random], None]


def _merged(model: onnx.ModelProto, rng: random.Random) -> None:
    """Initializers that are equal become one, as torch.onnx and onnxruntime do."""
    kept: dict[tuple[Any, ...], str] = {}
    renamed: dict[str, str] = {}
    for tensor in list(model.graph.initializer):
        key = (tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes())
        if key in kept:
            renamed[tensor.name] = kept[key]
            model.graph.initializer.remove(tensor)
        else:
            kept[key] = tensor.name
    _renamed(model.graph, renamed)


def _renamed(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for inner in _graphs(node):
            _renamed(inner, names)


def _weights_in_nodes(model: onnx.ModelProto, rng: random.Random) -> None:
    """Weights are Constant nodes, as of Paddle2ONNX and older torch."""
    share = rng.choice([0.3, 1.0])
    nodes: list[onnx.NodeProto] = []
    for tensor in list(model.graph.initializer):
        if rng.random() < share:
            model.graph.initializer.remove(tensor)
            nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
    _put_first(model, nodes)


def _through_identity(model: onnx.ModelProto, rng: random.Random) -> None:
    """A weight reaches its node through Identity, as of torch.onnx with shared weights and of tf2onnx."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if any(t.name == name for t in model.graph.initializer) and rng.random() < 0.4 and node.op_type != "Resize":
                nodes.append(helper.make_node("Identity", [name], [f"{name}/read{len(nodes)}"]))
                node.input[k] = nodes[-1].output[0]
    _put_first(model, nodes)


def _put_first(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])


def _transposed_copies(model: onnx.ModelProto, rng: random.Random) -> None:
    """A weight of MatMul is the transposed copy of one of Gemm, as folding leaves tied weights."""
    square = [t for t in model.graph.initializer if list(t.dims) == [WIDTH, WIDTH]]
    for source, target in zip(square[::2], square[1::2], strict=False):
        array = numpy_helper.to_array(source)
        target.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array.T), target.name))


def _unsorted(model: onnx.ModelProto, rng: random.Random) -> None:
    nodes = list(model.graph.node)
    rng.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _initializers_are_inputs(model: onnx.ModelProto, rng: random.Random) -> None:
    """As in IR version 3."""
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _no_shape_of_outputs(model: onnx.ModelProto, rng: random.Random) -> None:
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def _minus_one(model: onnx.ModelProto, rng: random.Random) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param") or not dim.HasField("dim_value"):
                dim.dim_value = -1


def _odd_sizes(model: onnx.ModelProto, rng: random.Random) -> None:
    """Names of sizes that are no identifiers, that differ for what is one, or none."""
    for k, value in enumerate((*model.graph.input, *model.graph.output)):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                name = rng.choice(["unk__1", "batch size", "DynamicDimension.0", "", f"{dim.dim_param}_{k}", "?"])
                if name in ("unk__1", "batch size", "DynamicDimension.0", "?"):
                    name = f"{name}{dim.dim_param}"
                dim.ClearField("dim_param")
                if name:
                    dim.dim_param = name


def _with_value_info(model: onnx.ModelProto, rng: random.Random) -> None:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    model.graph.value_info.extend(inferred.graph.value_info)


def _fixed_sizes(model: onnx.ModelProto, rng: random.Random) -> None:
    sizes = {"N": 2, "T": 3, "A": 2, "B": 3}
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def _functions(model: onnx.ModelProto, rng: random.Random) -> None:
    """Nodes in a row become a function of the model, and perhaps some of its own another one."""
    for depth in range(rng.choice([1, 1, 2])):
        nodes = list(model.graph.node)
        start = rng.randrange(len(nodes))
        part = nodes[start : start + rng.randint(1, 5)]
        if any(n.domain == _OF_MICROSOFT or _graphs(n) for n in part):
            continue
        inner = {name for node in part for name in node.output}
        read = list(dict.fromkeys(name for node in part for name in node.input if name and name not in inner))
        others = [*nodes[:start], *nodes[start + len(part) :]]
        outside = _read_in(others) | {value.name for value in model.graph.output}
        written = [name for node in part for name in node.output if name in outside]
        if not written:
            continue
        short = {name: f"a{k}" for k, name in enumerate((*read, *sorted(inner)))}
        body, given = [], {}
        for node in part:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = [short.get(name, name) for name in node.input]
            copy.output[:] = [short[name] for name in node.output]
            for attribute in copy.attribute:
                if attribute.name in ("alpha", "epsilon", "perm") and attribute.name not in given:
                    given[attribute.name] = helper.get_attribute_value(attribute)
                    kind = attribute.type
                    attribute.Clear()
                    attribute.name, attribute.type = next(reversed(given)), kind
                    attribute.ref_attr_name = attribute.name
            body.append(copy)
        domain, name = "pkg.module", f"Part{depth}"
        model.functions.append(
            helper.make_function(
                domain,
                name,
                [short[n] for n in read],
                [short[n] for n in written],
                body,
                list(model.opset_import),
                list(given),
            )
        )
        call = helper.make_node(name, read, written, name=f"call {depth}", domain=domain, **given)
        del model.graph.node[:]
        model.graph.node.extend([*others[:start], call, *others[start:]])
        if all(o.domain != domain for o in model.opset_import):
            model.opset_import.append(helper.make_opsetid(domain, 1))


def _graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]


def _read_in(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    found = {name for node in nodes for name in node.input}
    for node in nodes:
        for graph in _graphs(node):
            found |= _read_in(graph.node) | {value.name for value in graph.output}
    return found


def _untold_domain(model: onnx.ModelProto, rng: random.Random) -> None:
    """The standard domain by its other name."""
    for opset in model.opset_import:
        if not opset.domain:
            opset.domain = "ai.onnx"


def _no_names(model: onnx.ModelProto, rng: random.Random) -> None:
    for node in model.graph.node:
        node.ClearField("name")


HABITS: dict[str, tuple[float, Habit]] = {
    "transposed copies": (0.1, _transposed_copies),
    "merged": (0.25, _merged),
    "through identity": (0.15, _through_identity),
    "weights in nodes": (0.15, _weights_in_nodes),
    "functions": (0.2, _functions),
    "value info": (0.2, _with_value_info),
    "fixed sizes": (0.15, _fixed_sizes),
    "no shape of outputs": (0.15, _no_shape_of_outputs),
    "minus one": (0.1, _minus_one),
    "odd sizes": (0.2, _odd_sizes),
    "initializers are inputs": (0.1, _initializers_are_inputs),
    "unsorted": (0.1, _unsorted),
    "no names": (0.1, _no_names),
    "untold domain": (0.05, _untold_domain),
}

LOSSES = ("mse", "l1", "huber", "bce_with_logits", "cross_entropy", "")


def drawn(seed: int, without: Collection[int] = (), plain: Collection[str] = ()) -> Drawn:
    """Write a model.

    Args:
        seed: what determines it.
        without: which pieces to leave out.
        plain: which habits to leave out.
    """
    rng = random.Random(seed)
    opset = rng.choice(OPSETS)
    names = rng.choices([n for n, (since, _) in PIECES.items() if since <= opset], k=rng.randint(1, 5))
    g = Writer(rng, opset, style=rng.choice(["torch", "paddle", "tf", "numbers"]))
    h = g.input("x", F32, ("N", "T", WIDTH))
    kept = []
    for k, name in enumerate(["dense", *names]):
        if k - 1 in without:
            continue
        g.own, g.stem = random.Random(f"{seed}/{k}"), f"b{k}" if g.style == "torch" else f"b{k}_"
        h = PIECES[name][1](g, h)
        if g.own.random() < 0.3:
            h = g.op("Tanh", h)
        kept.append(name)
    g.own, g.stem = random.Random(f"{seed}/end"), "end"
    loss = rng.choice(LOSSES)
    shape: tuple[int | str, ...] = ("N", "T", WIDTH)
    if loss == "cross_entropy":
        if rng.random() < 0.5:
            h, shape = g.first(h), ("N", WIDTH, "T")
        else:
            h, shape = g.reduce("Mean", h, [1], False), ("N", WIDTH)
    elif not loss:
        h, shape = g.op("ReduceMean", g.op("Mul", h, h), keepdims=0), ()
    output = g.name()
    g.nodes.append(helper.make_node("Identity", [h], [output]))
    inputs = [helper.make_tensor_value_info(n, kind, dims) for n, (kind, dims) in g.inputs.items()]
    graph = helper.make_graph(
        g.nodes,
        "model",
        inputs,
        [helper.make_tensor_value_info(output, F32, shape)],
        [numpy_helper.from_array(array, name) for name, array in g.initializers.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    if g.standard:
        opsets.append(helper.make_opsetid(_OF_MICROSOFT, 1))
    ir_version = rng.choice([4, 7, 8, 9, 10]) if opset < 15 else 10
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    habits = [name for name, (rate, _) in HABITS.items() if rng.random() < rate]
    for name in habits:
        if name not in plain:
            HABITS[name][1](model, random.Random(f"{seed}/{name}"))
    if model.functions:
        model.ir_version = max(model.ir_version, 8)
    return Drawn(
        seed,
        tuple(kept),
        tuple(name for name in habits if name not in plain),
        model,
        tuple(g.weights),
        g.standard,
        loss,
        len(names),
        tuple(habits),
    )
