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
from onnx import TensorProto
from producers import run
from torch import Tensor

import gradfuse
from gradfuse import fuse
from gradfuse.passes.matching import Policy, attention
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


def graph(text: str, batch: str = str(BATCH), dtype: str = "float") -> onnx.ModelProto:
    rows, keys = f"{dtype}[{batch}, {HEADS}, {ROWS}, {WIDTH}]", f"{dtype}[{batch}, {HEADS}, {KEYS}, {WIDTH}]"
    masks = f"float[1, 1, {ROWS}, {KEYS}] mask, bool[{batch}, 1, 1, {KEYS}] shown"
    to = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    scale = f"root = Constant <value_float = {1 / math.sqrt(WIDTH)}> ()  scale = Cast <to = {to}> (root)"
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
    arrays: dict[str, Array],
    masked: Callable[[Tensor, dict[str, Tensor]], Tensor],
    dtype: torch.dtype,
    softmax: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
) -> list[Array]:
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given = {name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items()}
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    o = softmax(masked(scores, given)) @ v
    return [one.detach().numpy() for one in (o, *torch.autograd.grad(o, (q, k, v), given["g"]))]


def operators(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node if node.domain == "aclnn")


def terms_of(arrays: dict[str, Array]) -> float:
    """Of the scores and probabilities, as gradients of queries and keys are differences of them."""
    largest = {name: float(np.abs(arrays[name]).max()) for name in "qkvg"}
    return largest["g"] * largest["v"] * max(largest["q"], largest["k"]) * KEYS


def assert_fused(
    model: onnx.ModelProto,
    masked: Callable[[Tensor, dict[str, Tensor]], Tensor],
    arrays: dict[str, Array] | None = None,
    policy: Policy = "profitable",
    **options_of_torch: Any,
) -> onnx.ModelProto:
    fused: onnx.ModelProto = fuse(model, policy=policy).model
    assert set(operators(fused)) == set(BOTH)
    assert "Softmax" not in {node.op_type for node in fused.graph.node}
    arrays = batch() if arrays is None else arrays
    exact, theirs = (by_torch(arrays, masked, dtype, **options_of_torch) for dtype in (torch.float64, torch.float32))
    options = ort.SessionOptions()
    gradfuse.register(options)
    session = ort.InferenceSession(fused.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {one.name: arrays[one.name] for one in session.get_inputs()}
    for outputs in (list(run(fused, arrays).values()), session.run(None, feeds)):
        for ours, wanted, native in zip(outputs, exact, theirs, strict=True):
            assert_gradients_close(ours, native, wanted, np.float32, terms=terms_of(arrays))
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


def test_scores_by_way_of_what_changes_nothing() -> None:
    text = changed(
        PLAIN,
        (
            "masked = Identity(scores)",
            f"""flat = Constant <value_ints = [-1]> ()  row = Reshape(scores, flat)
            whole = Constant <value_ints = [{BATCH}, {HEADS}, {ROWS}, {KEYS}]> ()  back = Reshape(row, whole)
            sizes = Shape(back)  spread = Expand(back, sizes)  n = Neg(spread)  plain = Neg(n)
            half = Constant <value_float = 0.5> ()  twice = Add(plain, plain)  masked = Mul(twice, half)""",
        ),
    )
    assert_fused(graph(text), itself)


def test_scores_of_opposite_sign_stay_right() -> None:
    """The softmax of -q k^T has a scale below 0."""
    text = changed(PLAIN, ("masked = Identity(scores)", "masked = Neg(scores)"))
    text = changed(text, ("dscores = Identity(dmasked)", "dscores = Neg(dmasked)"))
    assert_fused(graph(text), lambda scores, _: -scores)


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


WRITTEN_OUT = {
    "keepdims": """largest = ReduceMax <keepdims = 1> (masked, axis0)  less = Sub(masked, largest)  e = Exp(less)
        total = ReduceSum <keepdims = 1> (e, axis0)  p = Div(e, total)""",
    "views": f"""largest0 = ReduceMax <keepdims = 0> (masked, axis0)  largest = Unsqueeze(largest0, axis0)
        less = Sub(masked, largest)  e = Exp(less)  total0 = ReduceSum <keepdims = 0> (e, axis0)
        rows = Constant <value_ints = [{BATCH}, {HEADS}, {ROWS}, 1]> ()  total1 = Reshape(total0, rows)
        whole = Constant <value_ints = [{BATCH}, {HEADS}, {ROWS}, {KEYS}]> ()  total = Expand(total1, whole)
        inverse = Reciprocal(total)  p = Mul(inverse, e)""",
    "logarithm": "logp = LogSoftmax <axis = 3> (masked)  p = Exp(logp)",
}
SOFTMAX = "p = Softmax <axis = -1> (masked)"


def spelled(softmax: str, text: str = PLAIN) -> str:
    return changed(text, (SOFTMAX, f"axis0 = Constant <value_ints = [-1]> ()  {softmax}"))


@pytest.mark.parametrize("softmax", WRITTEN_OUT.values(), ids=WRITTEN_OUT.keys())
def test_a_softmax_that_is_written_out(softmax: str) -> None:
    fused = assert_fused(graph(spelled(softmax)), itself)
    assert not {"Exp", "Div", "LogSoftmax"}.intersection(node.op_type for node in fused.graph.node)


OTHER_SUMS = {
    "along the rows": "e = Exp(masked)  other = Constant <value_ints = [2]> ()  total = ReduceSum(e, other)",
    "of other numbers": "e = Exp(masked)  more = Add(masked, masked)  f = Exp(more)  total = ReduceSum(f, axis0)",
    "of heads": "e = Exp(masked)  other = Constant <value_ints = [1]> ()  total = ReduceSum(e, other)",
    "of more than a row": "e = Exp(masked)  other = Constant <value_ints = [2, 3]> ()  total = ReduceSum(e, other)",
}


@pytest.mark.parametrize("total", OTHER_SUMS.values(), ids=OTHER_SUMS.keys())
def test_exponentials_divided_by_another_sum_are_no_softmax(total: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROWS", KEYS)
    assert not set(BOTH).intersection(
        operators(fuse(graph(spelled(f"{total}  p = Div(e, total)")), policy="all").model)
    )


EINSUMS = (
    ("products = MatMul(q, kt)", 'products = Einsum <equation = "bhqd,bhkd->bhqk"> (q, k)'),
    ("o = MatMul(p, v)", 'o = Einsum <equation = "...qk,...kd->...qd"> (p, v)'),
    ("dv = MatMul(pt, g)", 'dv = Einsum <equation = "bhqk,bhqd->bhkd"> (p, g)'),
    ("dp = MatMul(g, vt)", 'dp = Einsum <equation = "bhqd,bhkd->bhqk"> (g, v)'),
    ("dq = MatMul(ds, k)", 'dq = Einsum <equation = "bhqk,bhkd->bhqd"> (ds, k)'),
    ("dk = MatMul(dst, q)", 'dk = Einsum <equation = "bhqd,bhqk->bhkd"> (q, ds)'),
)


def test_products_as_einsum() -> None:
    fused = assert_fused(graph(changed(PLAIN, *EINSUMS)), itself)
    assert "Einsum" not in {node.op_type for node in fused.graph.node}


def test_einsums_that_stay_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graph(changed(PLAIN, *EINSUMS))
    monkeypatch.setattr(attention, "FEWEST_SCORES", ROWS * KEYS + 1)
    for fused in (fuse(model, skip=["ScaledMaskedSoftmaxBackward"]).model, fuse(model, policy="all").model):
        onnx.checker.check_model(fused, full_check=True)
        given, left = (
            [(one.name, one.attribute, one.input, one.output) for one in each.graph.node if one.op_type == "Einsum"]
            for each in (model, fused)
        )
        assert given == left
        views = [sum(one.op_type in ("MatMul", "Transpose") for one in each.graph.node) for each in (model, fused)]
        assert views[1] <= views[0]


def test_keys_last_in_the_product_of_transposes() -> None:
    """(p v)^T as v^T p^T, which jnp.einsum makes of probabilities and values."""
    turned = (
        "o = MatMul(p, v)",
        "tp = Transpose <perm = [0, 1, 3, 2]> (p)  tv = Transpose <perm = [0, 1, 3, 2]> (v)  ot = MatMul(tv, tp)"
        "  o = Transpose <perm = [0, 1, 3, 2]> (ot)",
    )
    assert_fused(graph(changed(PLAIN, turned)), itself)


def low(scores: Tensor, given: dict[str, Tensor]) -> Tensor:
    return scores.masked_fill(~given["shown"], -1e38)


@pytest.mark.parametrize("rows", ["some", "all"])
def test_a_finite_number_in_the_place_of_scores(rows: str) -> None:
    """Rows that see nothing see all alike, and their queries have no gradient."""
    model = graph(changed(FILLED, ("value_float = -inf", "value_float = -1e38")))
    arrays = batch()
    if rows == "some":
        arrays["shown"][1] = False
    assert_fused(model, low, arrays)


def test_a_number_that_scores_may_fall_below_takes_their_place() -> None:
    """A row whose scores are all below -1e9 attends to what -1e9 masks."""
    report = fuse(graph(changed(FILLED, ("value_float = -inf", "value_float = -1e9"))), policy="all").report
    assert any(
        "-1e+09 takes the place of its scores; expected at most -1e+30" in one.reason for one in report.near_misses
    )


def test_a_finite_number_beside_a_triangle() -> None:
    both = changed(
        FILLED,
        ("value_float = -inf", "value_float = -1e38"),
        (
            "masked = Where(shown, scores, least)",
            f"""first = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()
            end = Constant <value_int = {KEYS}> ()  rows = Constant <value_int = {ROWS}> ()
            axes = Constant <value_ints = [1]> ()  column = Range(first, end, one)  places = Range(first, rows, one)
            row = Unsqueeze(places, axes)  earlier = LessOrEqual(column, row)  both = And(earlier, shown)
            masked = Where(both, scores, least)""",
        ),
        ("Where(shown, dmasked, zero)", "Where(both, dmasked, zero)"),
    )
    arrays = batch()
    arrays["shown"][1, ..., :3] = False

    def masked(scores: Tensor, given: dict[str, Tensor]) -> Tensor:
        return scores.masked_fill(~(given["shown"] & torch.ones(ROWS, KEYS, dtype=torch.bool).tril()), -1e38)

    assert_fused(graph(both), masked, arrays, policy="all")


def test_the_least_number_of_a_narrow_type() -> None:
    """It masks in float16, and beside scores of float32 it may be one of them."""
    text = changed(FILLED, ("value_float = -inf", "value_float = -65504.0"))
    wide = fuse(graph(text), policy="all")
    assert not set(BOTH).intersection(operators(wide.model))
    assert any("-65504 takes the place of its scores" in miss.reason for miss in wide.report.near_misses)
    narrow = changed(
        text,
        (
            "least = Constant <value_float = -65504.0> ()",
            "l = Constant <value_float = -65504.0> ()  least = CastLike(l, q)",
        ),
        ("zero = Constant <value_float = 0.0> ()", "z = Constant <value_float = 0.0> ()  zero = CastLike(z, q)"),
    )
    model = graph(narrow, dtype="float16")
    assert set(operators(fuse(model).model)) == set(BOTH)


def test_probabilities_of_rows_that_see_nothing_as_zeros() -> None:
    """As torch.onnx exports scaled_dot_product_attention."""
    text = changed(
        FILLED,
        (SOFTMAX, "whole = Softmax <axis = -1> (masked)  nan = IsNaN(whole)  p = Where(nan, zero, whole)"),
        ("weighted = Mul(dp, p)", "dp1 = Where(nan, zero, dp)  weighted = Mul(dp1, p)"),
        ("centred = Sub(dp, sum)", "centred = Sub(dp1, sum)"),
    )
    arrays = batch()
    arrays["shown"][1] = False
    assert_fused(graph(text), filled, arrays, softmax=lambda scores: scores.softmax(-1).nan_to_num(0.0))


SEVERAL = changed(
    PLAIN,
    ("dv = MatMul(pt, g)", "gs = Transpose <perm = [4, 0, 1, 2, 3]> (g)  dvs = MatMul(pt, gs)"),
    ("dp = MatMul(g, vt)", "dp = MatMul(gs, vt)"),
    ("dq = MatMul(ds, k)", "dqs = MatMul(ds, k)"),
    ("dst = Transpose <perm = [0, 1, 3, 2]> (ds)", "dst = Transpose <perm = [0, 1, 2, 4, 3]> (ds)"),
    (
        "dk = MatMul(dst, q)",
        "dks = MatMul(dst, q)" + "".join(f"  d{one} = Transpose <perm = [1, 2, 3, 4, 0]> (d{one}s)" for one in "qkv"),
    ),
)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (SEVERAL, itself),
        (
            changed(
                SEVERAL,
                (
                    "masked = Identity(scores)",
                    "least = Constant <value_float = -inf> ()  zero = Constant <value_float = 0.0> ()"
                    "  masked = Where(shown, scores, least)",
                ),
                ("dscores = Identity(dmasked)", "dscores = Where(shown, dmasked, zero)"),
            ),
            filled,
        ),
    ],
    ids=["plain", "filled"],
)
def test_several_gradients_as_onnx_ad_has_them(
    text: str, masked: Callable[[Tensor, dict[str, Tensor]], Tensor]
) -> None:
    model = graph(text)
    for value in (*model.graph.input, *model.graph.output):
        if value.name in ("g", "dq", "dk", "dv"):
            value.type.tensor_type.shape.dim.add().dim_param = "nadj"
    fused = fuse(model).model
    assert set(operators(fused)) == set(BOTH)
    arrays, others = batch(), batch(1)
    found = run(fused, {**arrays, "g": np.stack([arrays["g"], others["g"]], -1)})
    for place, g in enumerate((arrays["g"], others["g"])):
        exact, native = (by_torch({**arrays, "g": g}, masked, dtype) for dtype in (torch.float64, torch.float32))
        for name, wanted, theirs in zip(("dq", "dk", "dv"), exact[1:], native[1:], strict=True):
            assert_gradients_close(found[name][..., place], theirs, wanted, np.float32, terms=terms_of(arrays))


def test_keys_that_heads_share() -> None:
    """A product repeats the keys of one head."""
    text = changed(
        PLAIN,
        (
            "dk = MatMul(dst, q)",
            "dks = MatMul(dst, q)  head = Constant <value_ints = [1]> ()  dk = ReduceSum(dks, head)",
        ),
        (
            "dv = MatMul(pt, g)",
            "dvs = MatMul(pt, g)  heads = Constant <value_ints = [1]> ()  dv = ReduceSum(dvs, heads)",
        ),
    )
    model = graph(text)
    for value in (*model.graph.input, *model.graph.output):
        if value.name in ("k", "v", "dk", "dv"):
            value.type.tensor_type.shape.dim[1].dim_value = 1
    arrays = batch()
    assert_fused(model, itself, {**arrays, "k": arrays["k"][:, :1], "v": arrays["v"][:, :1]})
