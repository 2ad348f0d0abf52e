"""Graphs as exporters write them with a fixed batch: with a free one, each row is what the graph gives of it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from rows import assert_rows_agree, session

import gradfuse
from gradfuse import ArgumentError, ModelError, make_batch_dynamic

pytestmark = pytest.mark.usefixtures("inference_in_process")

_RNG = np.random.default_rng(0)


def _weights(*shape: int) -> npt.NDArray[np.float32]:
    return _RNG.standard_normal(shape).astype(np.float32)


def model_of(text: str, weights: Mapping[str, Any] | None = None, opset: int = 17) -> onnx.ModelProto:
    """A model of a graph's inputs, outputs, initializers and nodes."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    return model


FLAT = _weights(6, 4)
GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "flatten by [1, -1]": (
        "(float[1,2,3] x) => (float[1,4] y) <int64[2] s={1,-1}> {f = Reshape(x, s) y = MatMul(f, w)}",
        {"w": FLAT},
    ),
    "flatten by [-1, 6]": (
        "(float[1,2,3] x) => (float[1,4] y) <int64[2] s={-1,6}> {f = Reshape(x, s) y = MatMul(f, w)}",
        {"w": FLAT},
    ),
    "flatten by [32, 6]": (
        "(float[32,2,3] x) => (float[32,4] y) <int64[2] s={32,6}> {f = Reshape(x, s) y = MatMul(f, w)}",
        {"w": FLAT},
    ),
    "a shape that is joined": (
        """(float[1,2,3] x) => (float[1,6] y) <int64[1] a={1}, int64[1] b={-1}>
        {s = Concat <axis=0> (a, b) y = Reshape(x, s)}""",
        {},
    ),
    "a shape of the input": (
        """(float[1,2,3] x) => (float[1,6] y) <int64[1] b={-1}, int64 z={0}, int64[1] a={0}>
        {t = Shape(x) k = Gather(t, z) u = Unsqueeze(k, a) s = Concat <axis=0> (u, b) y = Reshape(x, s)}""",
        {},
    ),
    "one shape for two": (
        """(float[1,6] x, float[1,6] z) => (float[1,6] y) <int64[3] s={1,1,6}, int64[2] t={1,6}>
        {f = Reshape(x, s) h = Reshape(z, s) k = Add(f, h) y = Reshape(k, t)}""",
        {},
    ),
    "as many channels as rows": (
        "(float[2,2,4] x) => (float[2,4,2] y) <int64[3] s={2,4,2}> {y = Reshape(x, s)}",
        {},
    ),
    "as many heads as rows": (
        """(float[2,3,4] x) => (float[2,2,3,2] y) <int64[4] s={2,3,2,2}>
        {r = Reshape(x, s) y = Transpose <perm=[0,2,1,3]> (r)}""",
        {},
    ),
    "one head": (
        """(float[1,3,4] x) => (float[1,1,3,4] y) <int64[4] s={1,3,1,4}>
        {r = Reshape(x, s) y = Transpose <perm=[0,2,1,3]> (r)}""",
        {},
    ),
    "one channel": (
        """(float[1,1,4,4] x) => (float[1,4] y) <int64[2] s={1,4}>
        {c = Conv <kernel_shape=[3,3]> (x, w) y = Reshape(c, s)}""",
        {"w": _weights(1, 1, 3, 3)},
    ),
    "an axis of 1 that is no batch": (
        "(float[1,4] x) => (float[1,1,4] y) <int64[3] s={1,1,4}> {r = Reshape(x, s) y = Softmax <axis=0> (r)}",
        {},
    ),
    "a sequence of one step": (
        """(float[1,4] x) => (float[1,1,1,3] y) <int64[3] s={1,1,4}>
        {r = Reshape(x, s) y = LSTM <hidden_size=3> (r, w, u, b, , h, c)}""",
        {
            "w": _weights(1, 12, 4),
            "u": _weights(1, 12, 3),
            "b": _weights(1, 24),
            "h": _weights(1, 1, 3),
            "c": _weights(1, 1, 3),
        },
    ),
    "rows of a sequence of any length": (
        """(float[1,T,6] x) => (float[1,T,6] y) <int64[2] s={-1,6}, int64[3] t={1,-1,6}>
        {f = Reshape(x, s) g = MatMul(f, w) y = Reshape(g, t)}""",
        {"w": _weights(6, 6)},
    ),
    "heads of a sequence of any length": (
        """(float[1,T,6] x) => (float[1,2,T,3] y) <int64[4] s={1,-1,2,3}>
        {f = Reshape(x, s) y = Transpose <perm=[0,2,1,3]> (f)}""",
        {},
    ),
    "channels last": (
        """(float[1,4,4,2] x) => (float[1,8] y) <int64[2] s={1,8}>
        {t = Transpose <perm=[0,3,1,2]> (x) c = Conv <kernel_shape=[3,3]> (t, w) u = Transpose <perm=[0,2,3,1]> (c)
        y = Reshape(u, s)}""",
        {"w": _weights(2, 2, 3, 3)},
    ),
    "positions": ("(float[1,3,5] x) => (float[1,3,5] y) {y = Add(x, p)}", {"p": _weights(1, 3, 5)}),
    "positions at other rank": ("(float[1,3,5] x) => (float[1,3,5] y) {y = Add(x, p)}", {"p": _weights(3, 5)}),
    "a token that is expanded": (
        """(float[4,3] x) => (float[4,2,3] y) <int64[3] s={4,1,3}, int64[1] a={1}>
        {e = Expand(t, s) u = Unsqueeze(x, a) y = Concat <axis=1> (e, u)}""",
        {"t": _weights(1, 1, 3)},
    ),
    "a token of a batch of one": (
        """(float[1,3] x) => (float[1,2,3] y) <int64[1] a={1}>
        {u = Unsqueeze(x, a) y = Concat <axis=1> (t, u)}""",
        {"t": _weights(1, 1, 3)},
    ),
    "the batch expanded": (
        """(float[4,3] x) => (float[4,2,3] y) <int64[3] s={4,2,3}, int64[1] a={1}>
        {u = Unsqueeze(x, a) y = Expand(u, s)}""",
        {},
    ),
    "a constant for each row": ("(float[4,3] x) => (float[4,3] y) {y = Add(x, c)}", {"c": np.ones((4, 3), np.float32)}),
    "filled": (
        """(float[4,3] x) => (float[4,3] y) <int64[2] s={4,3}>
        {c = ConstantOfShape <value=float[1]{2}> (s) d = Mul(c, w) y = Add(x, d)}""",
        {"w": _weights(3)},
    ),
    "tiled": (
        """(float[4,3] x) => (float[4,6] y) <int64[2] r={4,1}> {t = Tile(c, r) y = Concat <axis=1> (x, t)}""",
        {"c": _weights(1, 3)},
    ),
    "ends of a slice": (
        "(float[4,3] x) => (float[4,2] y) <int64[2] s={0,0}, int64[2] e={4,2}> {y = Slice(x, s, e)}",
        {},
    ),
    "resized": (
        "(float[4,1,2,2] x) => (float[4,1,4,4] y) <int64[4] s={4,1,4,4}> {y = Resize(x, , , s)}",
        {},
    ),
    "squeezed": ("(float[1,3,1] x) => (float[3] y) {y = Squeeze(x)}", {}),
    "squeezed, of several rows": ("(float[4,3,1] x) => (float[4,3] y) {z = Squeeze(x) y = Relu(z)}", {}),
    "a loop": (
        """(float[1,4] x) => (float[1,4] y, float[3,1,4] k) <int64 n={3}, bool t={1}, float[1,4] z={0,1,2,3},
        int64[2] s={1,4}> {y, k = Loop (n, t, z) <body = b (int64 i, bool c, float[1,4] a) => (bool d, a2, o)
        {d = Identity(c) q = Add(a, x) a2 = Tanh(q) o = Reshape(a2, s)}>}""",
        {},
    ),
    "a scan": (
        """(float[1,4,3] x) => (float[1,3] y, float[4,1,3] k) <float[1,3] z={0,0,0}>
        {t = Transpose <perm=[1,0,2]> (x) y, k = Scan <num_scan_inputs=1, body = b (float[1,3] a, float[1,3] v) =>
        (float[1,3] a2, float[1,3] o) {q = Add(a, v) a2 = Tanh(q) o = Identity(a2)}> (z, t)}""",
        {},
    ),
    "a mask of the batch": (
        """(float[1,2,3] q, int64[1,3] m) => (float[1,2,3] y) <int64[3] s={1,2,3}, int64[1] a={1}>
        {e = Unsqueeze(m, a) f = Expand(e, s) g = Cast <to=1> (f) y = Mul(q, g)}""",
        {},
    ),
    "one-hot words": (
        """(int64[1,3] i) => (float[1,3,4] y) <int64 d={2}, float[2] v={0,1}>
        {o = OneHot <axis=-1> (i, d, v) y = MatMul(o, w)}""",
        {"w": _weights(2, 4)},
    ),
    "words": (
        "(int64[1,3] i) => (float[1,3,4] y) {e = Gather(w, i) y = Add(e, p)}",
        {"w": _weights(2, 4), "p": _weights(1, 3, 4)},
    ),
    "an equation": (
        '(float[1,3,4] x) => (float[1,3,5] y) {y = Einsum <equation="bij,jk->bik"> (x, w)}',
        {"w": _weights(4, 5)},
    ),
    "a product with a vector": ("(float[1,3,4] x) => (float[1,3] y) {y = MatMul(x, w)}", {"w": _weights(4)}),
    "a transposed Gemm": (
        "(float[1,4] x) => (float[1,5] y) {t = Transpose(x) y = Gemm <transA=1> (t, w, c)}",
        {"w": _weights(4, 5), "c": _weights(1, 5)},
    ),
    "a batch that is free already": ("(float[N,3] x) => (float[N,3] y) {y = Relu(x)}", {}),
    "a batch that is free in the input": (
        "(float[N,2,3] x) => (float[1,6] y) <int64[2] s={1,6}> {y = Reshape(x, s)}",
        {},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_each_row_is_what_the_fixed_model_gives_of_it(name: str) -> None:
    fixed = model_of(*GRAPHS[name])
    before = fixed.SerializeToString()
    free = make_batch_dynamic(fixed)
    onnx.checker.check_model(free, full_check=True)
    assert fixed.SerializeToString() == before
    compared = assert_rows_agree(fixed, free)
    assert compared == {value.name for value in fixed.graph.output}
    assert_rows_agree(fixed, make_batch_dynamic(free))


MERGED: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "heads in the batch": (
        "(float[1,2,3,4] q) => (float[2,3,4] y) <int64[3] s={2,3,4}> {f = Reshape(q, s) y = Add(f, m)}",
        {"m": _weights(2, 3, 4)},
        (0, 1),
    ),
    "heads in a batch of 4 with a mask for each": (
        "(float[4,2,3,4] q) => (float[8,3,4] y) <int64[3] s={8,3,4}> {f = Reshape(q, s) y = Add(f, m)}",
        {"m": np.tile(_weights(2, 3, 4), (4, 1, 1))},
        (0, 1),
    ),
    "steps ahead of the batch": (
        """(float[1,2,4] x) => (float[2,4] y) <int64[2] s={2,4}>
        {t = Transpose <perm=[1,0,2]> (x) y = Reshape(t, s)}""",
        {},
        (0, 2),
    ),
    "a batch that is repeated": ("(float[2,3] x) => (float[4,3] y) <int64[2] r={2,1}> {y = Tile(x, r)}", {}, (0, 2)),
}


@pytest.mark.parametrize("name", MERGED)
def test_a_batch_that_shares_an_axis(name: str) -> None:
    text, weights, place = MERGED[name]
    fixed = model_of(text, weights)
    assert assert_rows_agree(fixed, make_batch_dynamic(fixed), merged={"y": place}) == {"y"}


def test_inputs_with_another_axis_or_none() -> None:
    text = """(float[3,1,4] x, float[1,1,5] h, float[1,4] z) => (float[3,1,1,5] y, float[1,1,5] last)
        {k = Add(x, z) y, last = GRU <hidden_size=5> (k, w, u, b, , h)}"""
    fixed = model_of(text, {"w": _weights(1, 15, 4), "u": _weights(1, 15, 5), "b": _weights(1, 30)})
    axes = {"x": 1, "h": -2, "z": None}
    free = make_batch_dynamic(fixed, axes)
    assert assert_rows_agree(fixed, free, axes) == {"y", "last"}
    assert [d.dim_value or d.dim_param for d in free.graph.input[1].type.tensor_type.shape.dim] == [1, "batch", 5]
    with pytest.raises(ArgumentError, match=r"the batch is 3 in 'x' and 1 at axis 0 of 'h'.*\{'h': 1\}"):
        make_batch_dynamic(fixed)
    with pytest.raises(ArgumentError, match="axis 3 of 'x', which has shape"):
        make_batch_dynamic(fixed, {"x": 3})
    with pytest.raises(ArgumentError, match="'q'; expected inputs among 'x', 'h', 'z'"):
        make_batch_dynamic(fixed, {"q": 0})
    with pytest.raises(ArgumentError, match="no input has the batch"):
        make_batch_dynamic(fixed, {"x": None, "h": None, "z": None})


def test_functions_and_initializers_that_are_inputs() -> None:
    fixed = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[1,2,3] x) => (float[1,6] y) {y = own.flat (x)}
        <domain: "own", opset_import: ["": 17]> flat (a) => (b)
        {s = Constant <value_ints=[1, 6]> () b = Reshape(a, s)}""")
    assert assert_rows_agree(fixed, make_batch_dynamic(fixed)) == {"y"}
    old = model_of("(float[1,2,3] x, int64[2] s) => (float[1,6] y) <int64[2] s={1,6}> {y = Reshape(x, s)}")
    old.ir_version = 3
    free = make_batch_dynamic(old)
    assert [value.name for value in free.graph.input] == ["x"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mean over the batch": (
        "(float[4,3] x) => (float[4,3] y) {m = ReduceMean <axes=[0]> (x) y = Sub(x, m)}",
        {},
        r"ReduceMean \(output 'm'\) mixes the rows",
    ),
    "a sum that is divided by the batch": (
        "(float[4,3] x) => (float y) <float n={4}> {m = ReduceSum <keepdims=0> (x) y = Div(m, n)}",
        {},
        "ReduceSum .* mixes the rows",
    ),
    "a number that is the batch": (
        """(float[2,6] x) => (float[2,6] y) <int64 z={0}>
        {t = Shape(x) k = Gather(t, z) f = Cast <to=1> (k) y = Div(x, f)}""",
        {},
        "Div .* computes with the size of the batch",
    ),
    "numbers of the rows": (
        """(float[2,3] x) => (float[2,3] y) <int64 z={0}, int64 o={1}, int64[1] a={1}>
        {t = Shape(x) k = Gather(t, z) r = Range(z, k, o) f = Cast <to=1> (r) u = Unsqueeze(f, a) y = Add(x, u)}""",
        {},
        "Range .* numbers the rows",
    ),
    "other numbers for each row": (
        "(float[4,3] x) => (float[4,3] y) {y = Add(x, c)}",
        {"c": _weights(4, 3)},
        "Add .* takes 4 rows of 'c' that are not equal",
    ),
    "a weight of several rows": (
        "(float[1,3] x) => (float[5,3] y) {y = Add(x, c)}",
        {"c": _weights(5, 3)},
        "Add .* broadcasts the batch to 5 of 'c'",
    ),
    "the only row": (
        "(float[1,3] x) => (float[3] y) <int64 i={0}> {y = Gather(x, i)}",
        {},
        "Gather .* takes rows of the batch",
    ),
    "the axis squeezed": (
        "(float[1,3] x) => (float[3] y) <int64[1] a={0}> {z = Squeeze(x, a) y = Relu(z)}",
        {},
        "Squeeze .* takes the axis of the batch away",
    ),
    "the axis squeezed with all others": (
        "(float[1,3,1] x) => (float[3] y) {z = Squeeze(x) y = Relu(z)}",
        {},
        "Squeeze .* takes the axis of the batch away",
    ),
    "some rows": (
        "(float[4,3] x) => (float[3,3] y) <int64[1] s={0}, int64[1] e={3}> {y = Slice(x, s, e)}",
        {},
        "Slice .* cuts the batch",
    ),
    "the batch by itself": (
        "(float[3,3] x) => (float[3,3] y) {t = Transpose(x) y = MatMul(x, t)}",
        {},
        "MatMul .* multiplies the batch by itself",
    ),
    "softmax over rows": (
        "(float[3,3] x) => (float[3,3] y) {y = Softmax <axis=0> (x)}",
        {},
        "Softmax .* along the batch",
    ),
    "a scan over rows": (
        """(float[4,3] x) => (float[3] y, float[4,3] k) <float[3] z={0,0,0}>
        {y, k = Scan <num_scan_inputs=1, body = b (float[3] a, float[3] v) => (float[3] a2, float[3] o)
        {q = Add(a, v) a2 = Tanh(q) o = Identity(a2)}> (z, x)}""",
        {},
        "Scan .* runs over the batch",
    ),
    "drawn numbers": (
        "(float[1,3] x) => (float[1,3] y) {z = RandomNormal <shape=[1,3]> () y = Add(x, z)}",
        {},
        r"RandomNormal .* draws numbers of shape \[1, 3\]",
    ),
    "places over the batch": (
        """(float[1,1,4,4] x) => (float[1,1,2,2] y, int64[1,1,2,2] i)
        {y, i = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)}""",
        {},
        "MaxPool .* counts places over the whole batch",
    ),
    "an operator without a rule": (
        "(float[1,3] x) => (int64[2,K] y) {y = NonZero(x)}",
        {},
        "NonZero .* there is no rule for the operator",
    ),
    "scales of the whole batch": (
        "(float[2,3] x) => (uint8[2,3] y, float s, uint8 z) {y, s, z = DynamicQuantizeLinear(x)}",
        {},
        "DynamicQuantizeLinear .* there is no rule",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_fixes_the_batch_is_named(name: str) -> None:
    text, weights, message = REFUSED[name]
    with pytest.raises(ModelError, match=f"make_batch_dynamic: the batch of [0-9]+ stays fixed: {message}"):
        make_batch_dynamic(model_of(text, weights))


def test_outputs_of_the_whole_batch_stay_that() -> None:
    text = """(float[4,3] x, int64[4] t) => (float l, float m)
        {l = SoftmaxCrossEntropyLoss(x, t) r = ReduceMean <keepdims=0> (x) m = Identity(r)}"""
    free = make_batch_dynamic(model_of(text))
    x, t = _weights(7, 3), np.arange(7) % 3
    loss, mean = session(free).run(None, {"x": x, "t": t})
    wide = x.astype(np.float64)
    exact = np.mean(np.log(np.exp(wide).sum(1)) - wide[np.arange(7), t])
    for got, wanted in ((loss, exact), (mean, wide.mean())):
        assert abs(float(got) - float(wanted)) <= 8 * np.finfo(np.float32).eps


def test_a_model_of_every_kind_comes_back_as_that_kind(tmp_path: Any) -> None:
    fixed = model_of(*GRAPHS["flatten by [1, -1]"])
    onnx.save(fixed, tmp_path / "fixed.onnx")
    assert isinstance(make_batch_dynamic(tmp_path / "fixed.onnx"), onnx.ModelProto)
    assert isinstance(make_batch_dynamic(ir.from_proto(fixed)), ir.Model)
    with pytest.raises(gradfuse.ArgumentError, match="model is int"):
        make_batch_dynamic(3)  # type: ignore[arg-type]
