"""Attention that other producers have differentiated becomes one operator forward and one backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
from producers import run
from torch import Tensor

import gradfuse
from gradfuse import fuse
from gradfuse.passes.matching import attention
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 3, 5, 7, 4
BOTH = ["ScaledDotProductAttention", "ScaledDotProductAttentionBackward"]

SCORES = "products = MatMul(q, kt)  scores = Mul(products, scale)"
MIDDLE = """
    p = Softmax <axis = -1> (masked)
    o = MatMul(p, v)
    pt = Transpose <perm = [0, 1, 3, 2]> (p)
    dv = MatMul(pt, g)
    vt = Transpose <perm = [0, 1, 3, 2]> (v)
    dp = MatMul(g, vt)
    weighted = Mul(dp, p)
    axis = Constant <value_ints = [-1]> ()
    sum = ReduceSum <keepdims = 1> (weighted, axis)
    centred = Sub(dp, sum)
    dmasked = Mul(p, centred)
"""
PRODUCTS = """
    ds = Mul(dscores, scale)
    dq = MatMul(ds, k)
    dst = Transpose <perm = [0, 1, 3, 2]> (ds)
    dk = MatMul(dst, q)
"""
PLAIN = SCORES + "masked = Identity(scores)" + MIDDLE + "dscores = Identity(dmasked)" + PRODUCTS
ADDED = SCORES + "masked = Add(scores, mask)" + MIDDLE + "dscores = Identity(dmasked)" + PRODUCTS
FILLED = (
    SCORES
    + "least = Constant <value_float = -inf> ()  zero = Constant <value_float = 0.0> ()"
    + "masked = Where(shown, scores, least)"
    + MIDDLE
    + "dscores = Where(shown, dmasked, zero)"
    + PRODUCTS
)


@pytest.fixture(autouse=True)
def few_scores_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FEWEST_SCORES", 0)


def graph(text: str, batch: str = str(BATCH)) -> onnx.ModelProto:
    rows, keys = f"float[{batch}, {HEADS}, {ROWS}, {WIDTH}]", f"float[{batch}, {HEADS}, {KEYS}, {WIDTH}]"
    masks = f"float[1, 1, {ROWS}, {KEYS}] mask, bool[{batch}, 1, 1, {KEYS}] shown"
    scale = f"scale = Constant <value_float = {1 / math.sqrt(WIDTH)}> ()"
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
        unit ({rows} q, {keys} k, {keys} v, {rows} g, {masks}) => ({rows} o, {rows} dq, {keys} dk, {keys} dv)
        {{ {scale} kt = Transpose <perm = [0, 1, 3, 2]> (k) {text} }}
    """)


def batch(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    rows, keys = (BATCH, HEADS, ROWS, WIDTH), (BATCH, HEADS, KEYS, WIDTH)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in zip("qkvg", (rows, keys, keys, rows), strict=True)
    }
    shown = rng.random((BATCH, 1, 1, KEYS)) < 0.5
    shown[..., 0] = True
    return {**arrays, "mask": rng.standard_normal((1, 1, ROWS, KEYS)).astype(np.float32), "shown": shown}


def by_torch(
    arrays: dict[str, Array], masked: Callable[[Tensor, dict[str, Tensor]], Tensor], dtype: torch.dtype
) -> list[Array]:
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given = {name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items()}
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    o = masked(scores, given).softmax(-1) @ v
    return [one.detach().numpy() for one in (o, *torch.autograd.grad(o, (q, k, v), given["g"]))]


def operators(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node if node.domain == "aclnn")


def assert_fused(model: onnx.ModelProto, masked: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> onnx.ModelProto:
    fused: onnx.ModelProto = fuse(model).model
    assert set(operators(fused)) == set(BOTH)
    assert "Softmax" not in {node.op_type for node in fused.graph.node}
    arrays = batch()
    exact, theirs = (by_torch(arrays, masked, dtype) for dtype in (torch.float64, torch.float32))
    options = ort.SessionOptions()
    gradfuse.register(options)
    session = ort.InferenceSession(fused.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {one.name: arrays[one.name] for one in session.get_inputs()}
    # Of the scores and probabilities, as gradients of queries and keys are differences of them.
    terms = (
        float(np.abs(arrays["g"]).max() * np.abs(arrays["v"]).max() * max(np.abs(arrays[n]).max() for n in "qk")) * KEYS
    )
    for outputs in (list(run(fused, arrays).values()), session.run(None, feeds)):
        for ours, wanted, native in zip(outputs, exact, theirs, strict=True):
            assert_gradients_close(ours, native, wanted, np.float32, terms=terms)
    return fused


def itself(scores: Tensor, _: dict[str, Tensor]) -> Tensor:
    return scores


def with_mask(scores: Tensor, given: dict[str, Tensor]) -> Tensor:
    return scores + given["mask"]


def filled(scores: Tensor, given: dict[str, Tensor]) -> Tensor:
    return scores.masked_fill(~given["shown"], -math.inf)


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


TRANSPOSED = changed(
    PLAIN,
    ("pt = Transpose <perm = [0, 1, 3, 2]> (p)", ""),
    (
        "dv = MatMul(pt, g)",
        "gt = Transpose <perm = [0, 1, 3, 2]> (g) dvt = MatMul(gt, p) dv = Transpose <perm = [0, 1, 3, 2]> (dvt)",
    ),
    ("dst = Transpose <perm = [0, 1, 3, 2]> (ds)", "qt = Transpose <perm = [0, 1, 3, 2]> (q)"),
    ("dk = MatMul(dst, q)", "dkt = MatMul(qt, ds) dk = Transpose <perm = [0, 1, 3, 2]> (dkt)"),
)
MICROSOFTS = changed(
    PLAIN,
    ("pt = Transpose <perm = [0, 1, 3, 2]> (p)", ""),
    ("dv = MatMul(pt, g)", "dv = com.microsoft.FusedMatMul <transA = 1> (p, g)"),
    ("dst = Transpose <perm = [0, 1, 3, 2]> (ds)", ""),
    ("dk = MatMul(dst, q)", "dk = com.microsoft.FusedMatMul <transA = 1> (ds, q)"),
)
MERGED = f"""
    rows = Constant <value_ints = [{BATCH * HEADS}, {ROWS}, {WIDTH}]> ()
    keys = Constant <value_ints = [{BATCH * HEADS}, {KEYS}, {WIDTH}]> ()
    of_rows = Shape(q)  of_keys = Shape(k)
    q3 = Reshape(q, rows)  k3 = Reshape(k, keys)  v3 = Reshape(v, keys)  g3 = Reshape(g, rows)
    kt3 = Transpose <perm = [0, 2, 1]> (k3)
    products = MatMul(q3, kt3)  masked = Mul(products, scale)
    p = Softmax <axis = -1> (masked)  o3 = MatMul(p, v3)  o = Reshape(o3, of_rows)
    pt = Transpose <perm = [0, 2, 1]> (p)  dv3 = MatMul(pt, g3)  dv = Reshape(dv3, of_keys)
    vt = Transpose <perm = [0, 2, 1]> (v3)  dp = MatMul(g3, vt)
    weighted = Mul(dp, p)  axis = Constant <value_ints = [-1]> ()
    sum = ReduceSum <keepdims = 1> (weighted, axis)  centred = Sub(dp, sum)  dmasked = Mul(p, centred)
    ds = Mul(dmasked, scale)  dq3 = MatMul(ds, k3)  dq = Reshape(dq3, of_rows)
    dst = Transpose <perm = [0, 2, 1]> (ds)  dk3 = MatMul(dst, q3)  dk = Reshape(dk3, of_keys)
"""
SCALED_QUERIES = changed(
    PLAIN,
    ("products = MatMul(q, kt)  scores = Mul(products, scale)", "qs = Mul(q, scale)  scores = MatMul(qs, kt)"),
    ("ds = Mul(dscores, scale)", "ds = Identity(dscores)"),
    ("dq = MatMul(ds, k)", "dqs = MatMul(ds, k)  dq = Mul(dqs, scale)"),
    ("dk = MatMul(dst, q)", "dk = MatMul(dst, qs)"),
)
TRIANGLE = changed(
    ADDED,
    (
        "masked = Add(scores, mask)",
        f"""
        first = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()  end = Constant <value_int = {KEYS}> ()
        rows = Constant <value_int = {ROWS}> ()  axes = Constant <value_ints = [1]> ()
        column = Range(first, end, one)  places = Range(first, rows, one)  row = Unsqueeze(places, axes)
        later = Greater(column, row)
        zero = Constant <value_float = 0.0> ()  least = Constant <value_float = -inf> ()
        triangle = Where(later, least, zero)  masked = Add(scores, triangle)
        """,
    ),
)


def causal(scores: Tensor, _: dict[str, Tensor]) -> Tensor:
    return scores.masked_fill(torch.ones(ROWS, KEYS, dtype=torch.bool).triu(1), -math.inf)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (PLAIN, itself),
        (TRANSPOSED, itself),
        (MICROSOFTS, itself),
        (MERGED, itself),
        (SCALED_QUERIES, itself),
        (ADDED, with_mask),
        (FILLED, filled),
        (TRIANGLE, causal),
    ],
    ids=["plain", "transposed", "microsoft", "merged", "scaled", "added", "filled", "causal"],
)
def test_attention_is_fused(text: str, masked: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> None:
    fused = assert_fused(graph(text), masked)
    kinds = {attribute.i for node in fused.graph.node for attribute in node.attribute if attribute.name == "causal"}
    assert kinds == {int(masked is causal)}


def test_a_mask_that_a_node_holds() -> None:
    table = [0.0, -0.5, 0.0, 1.0, 0.0, -2.0, 0.25]
    numbers = ", ".join(map(str, table))
    held = (
        "masked = Add(scores, mask)",
        f"table = Constant<value = float[1,{KEYS}] {{{numbers}}}>() masked = Add(scores, table)",
    )
    assert_fused(graph(changed(ADDED, held)), lambda scores, _: scores + torch.tensor(table, dtype=scores.dtype))


def test_views_and_nodes_that_nothing_reads() -> None:
    text = changed(
        PLAIN,
        ("p = Softmax <axis = -1> (masked)", "p0 = Softmax <axis = -1> (masked)  p = Identity(p0)  unread = Mul(p, p)"),
        ("o = MatMul(p, v)", "n = Neg(p)  p1 = Neg(n)  o0 = MatMul(p1, v)  o = Cast<to = 1>(o0)"),
        (
            "dq = MatMul(ds, k)",
            "t = Transpose<perm = [2, 3, 0, 1]>(k)  k1 = Transpose<perm = [2, 3, 0, 1]>(t)  dq = MatMul(ds, k1)",
        ),
    )
    assert_fused(graph(text), itself)


def test_a_symbolic_batch() -> None:
    assert_fused(graph(PLAIN, batch="N"), itself)


def test_rows_that_see_nothing_stay_nan() -> None:
    model, arrays = graph(FILLED), batch()
    arrays["shown"][1] = False
    fused = fuse(model).model
    assert set(BOTH) <= set(operators(fused))
    for ours, theirs in zip(run(fused, arrays).values(), run(model, arrays).values(), strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.isnan(run(fused, arrays)["dv"][1]).all() and not np.isnan(run(fused, arrays)["dk"]).any()


ALMOST = {
    "other probabilities": ("dmasked = Mul(p, centred)", "q2 = Mul(p, p)  dmasked = Mul(q2, centred)"),
    "half the sum": (
        "centred = Sub(dp, sum)",
        "h = Constant <value_float = 0.5> ()  sh = Mul(sum, h)  centred = Sub(dp, sh)",
    ),
    "other values": ("dp = MatMul(g, vt)", "kt2 = Transpose <perm = [0, 1, 3, 2]> (k)  dp = MatMul(g, kt2)"),
    "another scale": ("ds = Mul(dscores, scale)", "two = Constant <value_float = 2.0> ()  ds = Mul(dscores, two)"),
    "a gradient for queries alone": (
        "dst = Transpose <perm = [0, 1, 3, 2]> (ds)",
        "dst = Transpose <perm = [0, 1, 3, 2]> (p)",
    ),
    "another axis": ("p = Softmax <axis = -1> (masked)", "p = Softmax <axis = 2> (masked)"),
}


@pytest.mark.parametrize("change", ALMOST.values(), ids=ALMOST.keys())
def test_what_is_almost_attention_is_left_alone(change: tuple[str, str]) -> None:
    model = graph(changed(PLAIN, change))
    result = fuse(model, policy="all")
    assert not {BOTH[0], BOTH[1]}.intersection(operators(result.model))
    assert not any(miss.bug for miss in result.report.near_misses)


def test_few_scores_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FEWEST_SCORES", ROWS * KEYS + 1)
    assert not set(BOTH).intersection(operators(fuse(graph(PLAIN), policy="all").model))


def test_a_report_says_why_attention_was_left() -> None:
    tensor = changed(
        PLAIN,
        (
            "scores = Mul(products, scale)",
            "factor = ReduceMax <keepdims = 1> (products)  scores = Mul(products, factor)",
        ),
    )
    report = fuse(graph(tensor)).report
    assert any("its scale is a tensor" in miss.reason for miss in report.near_misses)


def test_probabilities_that_something_else_reads_stay() -> None:
    read = changed(
        PLAIN,
        ("o = MatMul(p, v)", "more = ReduceSum <keepdims = 1> (p)  attended = MatMul(p, v)  o = Add(attended, more)"),
    )
    result = fuse(graph(read), policy="all")
    assert not set(BOTH).intersection(operators(result.model))
    assert any("probabilities are read by something else" in miss.reason for miss in result.report.near_misses)
