"""Backward subgraphs written in every way that hypothesis thinks of: found, right, whole, and the second time nothing.

Each graph is drawn: operand orders, factorings, how a one-hot or a mask is made, static or symbolic sizes, who else
reads the intermediate values. The oracle is the graph itself, before the rewrite, in onnxruntime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import GraphBuilder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from producers import run

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.long

Draw = st.DrawFn
Size = int | str
Feeds = dict[str, np.ndarray[Any, Any]]
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def _size(draw: Draw, size: int, symbol: str) -> Size:
    return symbol if draw(st.booleans()) else size


def _commuted(draw: Draw, g: GraphBuilder, op: str, a: str, b: str) -> str:
    return g.op(op, b, a) if draw(st.booleans()) else g.op(op, a, b)


def _minus(draw: Draw, g: GraphBuilder, a: str, b: str) -> str:
    match draw(st.integers(0, 2)):
        case 0:
            return g.op("Sub", a, b)
        case 1:
            return _commuted(draw, g, "Add", a, g.op("Neg", b))
        case _:
            return g.op("Neg", g.op("Sub", b, a))


def _scaled(draw: Draw, g: GraphBuilder, x: str, factor: float) -> str:
    match draw(st.integers(0, 2)):
        case 0:
            return _commuted(draw, g, "Mul", x, g.constant(factor))
        case 1:
            return g.op("Div", x, g.constant(1 / factor))
        case _:
            return _commuted(draw, g, "Mul", g.op("Mul", x, g.constant(factor * 4)), g.constant(0.25))


def _row_sum(draw: Draw, g: GraphBuilder, x: str, axis: int) -> str:
    if draw(st.booleans()):
        return g.sum(x, axis)
    return g.op("Unsqueeze", g.sum(x, axis, keepdims=0), g.ints(axis))


def _noise(draw: Draw, g: GraphBuilder, x: str) -> str:
    """The value behind a view that changes nothing."""
    if draw(st.integers(0, 3)):
        return x
    return g.op("Squeeze", g.op("Unsqueeze", x, g.ints(0)), g.ints(0))


def _log_softmax(draw: Draw, g: GraphBuilder, z: str, axis: int) -> tuple[str, str]:
    """The log-probabilities, and the softmax."""
    match draw(st.integers(0, 3)):
        case 0:
            logp = g.op("LogSoftmax", z, axis=axis)
            return logp, g.op("Exp", logp)
        case 1:
            return g.op("LogSoftmax", z, axis=axis), g.op("Softmax", z, axis=axis)
        case 2:
            logp = g.op("Sub", z, g.op("ReduceLogSumExp", z, g.ints(axis)))
            return logp, g.op("Exp", logp)
        case _:
            shifted = g.op("Sub", z, g.op("ReduceMax", z, g.ints(axis)))
            e = g.op("Exp", shifted)
            total = _row_sum(draw, g, e, axis)
            return g.op("Sub", shifted, g.op("Log", total)), g.op("Div", e, total)


@st.composite
def cross_entropy_graphs(draw: Draw) -> tuple[onnx.ModelProto, Feeds]:
    n, c = draw(st.integers(2, 6)), draw(st.integers(2, 7))
    g = GraphBuilder(draw(st.sampled_from([18, 20])))
    rows = _size(draw, n, "N")
    z, t = g.input("z", F32, [rows, c]), g.input("t", I64, [rows])
    ignore = draw(st.sampled_from([None, -100, 1]))
    weighted, reduction = draw(st.booleans()), draw(st.sampled_from(["mean", "sum", "none"]))
    logp, p = _log_softmax(draw, g, z, 1)

    column = g.op("Unsqueeze", t, g.ints(1))
    keep = None
    index = column
    if ignore is not None:
        hit = g.op("Equal", column, g.constant(ignore, np.int64))
        keep = g.op("Not", hit) if draw(st.booleans()) else None
        zero = g.constant(0, np.int64)
        index = g.op("Where", hit, zero, column) if keep is None else g.op("Where", keep, column, zero)
        keep = keep or g.op("Not", hit)
    if draw(st.booleans()):
        below = g.op("Less", index, g.constant(0, np.int64))
        index = g.op("Where", below, _commuted(draw, g, "Add", index, g.constant(c, np.int64)), index)
    if draw(st.booleans()):
        blank = g.op("Expand", g.constant(0.0), g.op("Shape", z))
        ones = g.op("ConstantOfShape", g.op("Shape", index), value=_float(1.0))
        onehot = g.op("ScatterElements", blank, index, ones, axis=1)
    else:
        onehot = g.op("Cast", _commuted(draw, g, "Equal", index, g.constant(np.arange(c)[None], np.int64)), to=F32)
    factor = g.input("g", F32, [rows, 1]) if reduction == "none" else g.constant(0.75)
    if weighted:
        w = g.input("w", F32, [c])
        factor = _commuted(draw, g, "Mul", factor, g.op("Reshape", w, g.ints(1, c)))
    if reduction == "mean":
        count = (
            g.op("Cast", keep, to=F32) if keep is not None else g.op("Mul", g.op("Cast", column, to=F32), g.constant(0))
        )
        count = count if keep is not None else g.op("Add", count, g.constant(1.0))
        if weighted:
            count = _commuted(draw, g, "Mul", count, g.op("Gather", w, index))
        factor = g.op("Div", factor, g.op("ReduceSum", count, keepdims=0))
    m = _commuted(draw, g, "Mul", onehot, factor)
    if keep is not None:
        kept = g.op("Cast", keep, to=F32)
        m = _commuted(draw, g, "Mul", m, kept) if draw(st.booleans()) else g.op("Where", keep, m, g.constant(0.0))
    m = _noise(draw, g, m)
    root = _minus(draw, g, _commuted(draw, g, "Mul", p, _row_sum(draw, g, m, 1)), m)
    g.output(g.op("MatMul", g.op("Transpose", root, perm=[1, 0]), z))
    if draw(st.booleans()):
        g.output(g.op("Exp", logp))
    rng = np.random.default_rng(0)
    target = rng.integers(0, c, n)
    if ignore is not None:
        # A mean over no rows at all is 0 / 0 in the graph, and 0 by the op's definition: one row counts.
        target[0], target[1] = ignore, 0
    feeds = {"z": rng.normal(size=(n, c)), "g": rng.normal(size=(n, 1)), "w": rng.uniform(0.5, 2, c)}
    return g.model(), {k: a.astype(np.float32) for k, a in feeds.items()} | {"t": target}


def _float(value: float) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray([value], np.float32))


@st.composite
def softmax_graphs(draw: Draw) -> tuple[onnx.ModelProto, Feeds]:
    b, h, s1, s2 = *(draw(st.integers(1, 4)) for _ in range(3)), draw(st.integers(2, 5))
    rank = draw(st.integers(2, 4))
    sizes = [b, h, s1, s2][4 - rank :]
    shape: list[Size] = list(sizes)
    g = GraphBuilder(draw(st.sampled_from([18, 20])))
    if draw(st.booleans()) and b > 1 and rank == 4:
        shape[0] = "B"
    z, up = g.input("z", F32, shape), g.input("g", F32, shape)
    axis = draw(st.sampled_from([-1, rank - 1]))
    _, y = _log_softmax(draw, g, z, axis)
    match draw(st.integers(0, 2)):
        case 0:
            t = _commuted(draw, g, "Mul", up, y)
            ds = _minus(draw, g, t, _commuted(draw, g, "Mul", y, _row_sum(draw, g, t, axis)))
        case 1:
            t = _commuted(draw, g, "Mul", up, y)
            ds = _commuted(draw, g, "Mul", y, _minus(draw, g, up, _row_sum(draw, g, t, axis)))
        case _:
            t = g.op("Mul", up, y)
            total = g.op("Expand", _row_sum(draw, g, t, axis), g.op("Shape", y))
            ds = _minus(draw, g, t, g.op("Mul", total, y))
    mask_shape = [draw(st.sampled_from([d, 1])) if k < rank - 1 else d for k, d in enumerate(shape)]
    match draw(st.integers(0, 3)):
        case 0:
            ds = g.op("Where", g.input("mask", BOOL, mask_shape), g.constant(0.0), ds)
        case 1:
            ds = g.op("Where", g.input("mask", BOOL, mask_shape), ds, g.constant(0.0))
        case 2:
            keep = g.op("Cast", g.input("mask", BOOL, mask_shape), to=F32)
            ds = _commuted(draw, g, "Mul", ds, keep)
        case _:
            pass
    ds = _noise(draw, g, ds)
    if draw(st.booleans()):
        ds = _scaled(draw, g, ds, 0.5)
    g.output(g.op("Tanh", ds))
    if draw(st.booleans()):
        g.output(t)
    rng = np.random.default_rng(1)
    feeds = {"z": rng.normal(size=sizes).astype(np.float32), "g": rng.normal(size=sizes).astype(np.float32)}
    mask = rng.random([1 if d == 1 else n for d, n in zip(mask_shape, sizes, strict=True)]) < 0.5
    return g.model(), feeds | {"mask": mask}


@st.composite
def mse_graphs(draw: Draw) -> tuple[onnx.ModelProto, Feeds]:
    n, c = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    rows = _size(draw, n, "N")
    g = GraphBuilder(20)
    x, t = g.input("x", F32, [rows, c]), g.input("t", F32, [rows, c])
    d = g.op("Sub", x, t) if draw(st.booleans()) else g.op("Sub", t, x)
    square = g.op("Mul", d, d) if draw(st.booleans()) else g.op("Pow", d, g.constant(2.0))
    weighted = draw(st.booleans())
    factor = 2.0 / (n * c)
    if weighted:
        w = g.input("w", F32, [rows, 1])
        loss = g.op("ReduceSum", g.op("Mul", square, w), keepdims=0)
    else:
        loss = g.op("ReduceMean", square, keepdims=0)
    g.output(loss)
    match draw(st.integers(0, 2)):
        case 0:
            root = _scaled(draw, g, d, factor)
        case 1:
            half = _scaled(draw, g, d, factor / 2)
            root = g.op("Add", half, half)
        case _:
            root = _scaled(draw, g, g.op("Mul", g.op("Pow", d, g.constant(1.0)), g.constant(2.0)), factor / 2)
    if weighted:
        root = _commuted(draw, g, "Mul", root, w)
    if draw(st.booleans()):
        root = g.op("Neg", root)
    g.output(g.op("Tanh", _noise(draw, g, root)))
    rng = np.random.default_rng(2)
    feeds = {"x": rng.normal(size=(n, c)), "t": rng.normal(size=(n, c)), "w": rng.uniform(0.5, 2, (n, 1))}
    return g.model(), {k: a.astype(np.float32) for k, a in feeds.items()}


@st.composite
def grouped_bias_graphs(draw: Draw) -> tuple[onnx.ModelProto, Feeds]:
    groups, h = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    counts = draw(st.lists(st.integers(1, 3), min_size=groups, max_size=groups))
    rows = sum(counts)
    ends = np.cumsum(counts)
    g = GraphBuilder(20)
    match draw(st.integers(0, 2)):
        case 0:
            dy = g.input("dy", F32, [groups, counts[0] + 1, h])
            shape: tuple[int, ...] = (groups, counts[0] + 1, h)
            root = g.sum(dy, 1, keepdims=draw(st.integers(0, 1)))
        case 1:
            dy = g.input("dy", F32, [_size(draw, rows, "R"), h])
            shape = (rows, h)
            e = g.input("ends", I64, [groups])
            size = g.op("Squeeze", g.op("Shape", dy, start=0, end=1), g.ints(0))
            r = g.op("Range", g.constant(0, np.int64), size, g.constant(1, np.int64))
            a, b = g.op("Unsqueeze", r, g.ints(1)), g.op("Unsqueeze", e, g.ints(0))
            match draw(st.integers(0, 2)):
                case 0:
                    past = g.op("GreaterOrEqual", a, b)
                case 1:
                    past = g.op("LessOrEqual", b, a)
                case _:
                    past = g.op("Not", g.op("Less", a, b))
            index = g.op("ReduceSum", g.op("Cast", past, to=I64), g.ints(1), keepdims=1)
            root = g.op("ScatterND", g.constant(np.zeros((groups, h))), index, dy, reduction="add")
        case _:
            dy = g.input("dy", F32, [rows, h])
            shape = (rows, h)
            starts = ends - counts
            parts = [
                g.op("Slice", dy, g.ints(int(s)), g.ints(int(e)), g.ints(0)) for s, e in zip(starts, ends, strict=True)
            ]
            sums = [g.sum(p, 0) for p in parts]
            if draw(st.booleans()):
                root = g.op("Concat", *sums, axis=0)
            else:
                root = ""
                for k, s in enumerate(sums):
                    wide = g.op("Expand", s, g.ints(groups, h))
                    only = g.constant((np.arange(groups) == k)[:, None], np.bool_)
                    term = g.op("Where", only, wide, g.constant(np.zeros((groups, h))))
                    root = g.op("Add", root, term) if root else term
    g.output(g.op("Tanh", root))
    dy_value = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    return g.model(), {"dy": dy_value, "ends": np.asarray(ends, np.int64)}


def _check(operator: str, model: onnx.ModelProto, feeds: Feeds) -> None:
    before = model.SerializeToString()
    result = fuse(model, policy="all")
    assert model.SerializeToString() == before
    assert operator in {f.op for f in result.report.fusions}, result.report
    onnx.checker.check_model(result.model, full_check=True)
    again = fuse(result.model, policy="all")
    assert not again.report.fusions
    assert again.model.SerializeToString() == result.model.SerializeToString()
    wanted, got = run(model, feeds), run(result.model, feeds)
    for name, value in wanted.items():
        assert_gradients_close(
            got[name], value, value.astype(np.float64), np.float32, terms=4 * max(1.0, np.abs(value).max())
        )


@SETTINGS
@given(cross_entropy_graphs())
def test_cross_entropy_loss_grad(drawn: tuple[onnx.ModelProto, Feeds]) -> None:
    _check("CrossEntropyLossGrad", *drawn)


@SETTINGS
@given(softmax_graphs())
def test_scaled_masked_softmax_backward(drawn: tuple[onnx.ModelProto, Feeds]) -> None:
    _check("ScaledMaskedSoftmaxBackward", *drawn)


@SETTINGS
@given(mse_graphs())
def test_mse_loss_backward(drawn: tuple[onnx.ModelProto, Feeds]) -> None:
    _check("MseLossBackward", *drawn)


@SETTINGS
@given(grouped_bias_graphs())
def test_grouped_bias_add_grad(drawn: tuple[onnx.ModelProto, Feeds]) -> None:
    _check("GroupedBiasAddGrad", *drawn)
