"""Attention in ONNX models as one operator of a training step: where, and with the gradients of the plain step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse import TrainingSession, TrainingStep, build_training_step
from gradfuse.export.dropout import mask as dropout_mask
from gradfuse.optimizers import SGD
from gradfuse.passes.matching import attention
from gradfuse.testing import assert_gradients_close

B, L, HEADS, SIZE = 2, 5, 4, 4
WIDTH = HEADS * SIZE
OPERATORS = ["ScaledDotProductAttention", "ScaledDotProductAttentionBackward"]

Array = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of tests are short."""
    monkeypatch.setattr(attention, "FEWEST_SCORES", 0)


BY_HEAD = """
    hs = Constant<value_ints=[0, 0, -1, 4]>()
    qh = Reshape(q0, hs)
    kh = Reshape(k0, hs)
    vh = Reshape(v0, hs)
    q = Transpose<perm=[0, 2, 1, 3]>(qh)
    kt = Transpose<perm=[0, 2, 3, 1]>(kh)
    v = Transpose<perm=[0, 2, 1, 3]>(vh)
    s = MatMul(q, kt)
    c = Constant<value_float=0.5>()
    scaled = Mul(s, c)
"""
JOINED = """
    rows = MatMul(p, v)
    turned = Transpose<perm=[0, 2, 1, 3]>(rows)
    js = Constant<value_ints=[0, 0, -1]>()
    y = Reshape(turned, js)
"""
HEAD_COUNTS = f"q_num_heads={HEADS}, kv_num_heads"

# Body, further inputs, the groups of keys, and what is expected of the operator.
WRITTEN: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "written out": (f"{BY_HEAD} p = Softmax<axis=-1>(scaled) {JOINED}", "", HEADS, {}),
    "dropout": (
        f"""{BY_HEAD} whole = Softmax<axis=-1>(scaled)
        ratio = Constant<value_float=0.25>()
        yes = Constant<value=bool {{1}}>()
        p = Dropout(whole, ratio, yes) {JOINED}""",
        "",
        HEADS,
        {"dropout": 0.25},
    ),
    "Keras's products": (
        """hs = Constant<value_ints=[0, 0, -1, 4]>()
        qh = Reshape(q0, hs)
        kh = Reshape(k0, hs)
        vh = Reshape(v0, hs)
        c = Constant<value_float=0.5>()
        small = Mul(qh, c)
        scaled = Einsum<equation="aecd,abcd->acbe">(kh, small)
        p = Softmax<axis=3>(scaled)
        turned = Einsum<equation="acbe,aecd->abcd">(p, vh)
        js = Constant<value_ints=[0, 0, -1]>()
        y = Reshape(turned, js)""",
        "",
        HEADS,
        {},
    ),
    "JAX's products and softmax": (
        f"""{BY_HEAD} last = Constant<value_ints=[-1]>()
        largest = ReduceMax<keepdims=1>(scaled, last)
        less = Sub(scaled, largest)
        e = Exp(less)
        total = ReduceSum<keepdims=1>(e, last)
        p = Div(e, total)
        vt = Einsum<equation="bkhd,bhqk->bhdq">(vh, p)
        turned = Transpose<perm=[0, 3, 1, 2]>(vt)
        js = Constant<value_ints=[0, 0, -1]>()
        y = Reshape(turned, js)""",
        "",
        HEADS,
        {},
    ),
    "PyTorch's export": (
        f"""{BY_HEAD} zero = Constant<value_float=0.0>()
        least = Constant<value_float=-inf>()
        shown = Where(m, zero, least)
        masked = Add(scaled, shown)
        whole = Softmax<axis=-1>(masked)
        nan = IsNaN(whole)
        p = Where(nan, zero, whole) {JOINED}""",
        "bool[L, L] m",
        HEADS,
        {"mask": True},
    ),
    "groups by broadcasting": (
        """five = Constant<value_ints=[0, 0, 2, -1, 4]>()
        qh = Reshape(q0, five)
        kh = Reshape(k0, five)
        vh = Reshape(v0, five)
        q = Transpose<perm=[0, 2, 3, 1, 4]>(qh)
        kt = Transpose<perm=[0, 2, 3, 4, 1]>(kh)
        v = Transpose<perm=[0, 2, 3, 1, 4]>(vh)
        s = MatMul(q, kt)
        c = Constant<value_float=0.5>()
        scaled = Mul(s, c)
        logarithm = LogSoftmax<axis=-1>(scaled)
        p = Exp(logarithm)
        rows = MatMul(p, v)
        turned = Transpose<perm=[0, 3, 1, 2, 4]>(rows)
        js = Constant<value_ints=[0, 0, -1]>()
        y = Reshape(turned, js)""",
        "",
        2,
        {},
    ),
    "ONNX's": (f"y = Attention<{HEAD_COUNTS}={HEADS}, is_causal=1>(q0, k0, v0)", "", HEADS, {"causal": 1}),
    "ONNX's, groups": (f"y = Attention<{HEAD_COUNTS}=2, is_causal=1>(q0, k0, v0)", "", 2, {"causal": 1}),
    "ONNX's, mask": (f"y = Attention<{HEAD_COUNTS}={HEADS}>(q0, k0, v0, m)", "bool[L, L] m", HEADS, {"mask": True}),
    "onnxruntime's, heads": (
        f"y = com.microsoft.MultiHeadAttention<num_heads={HEADS}>(q0, k0, v0, , m)",
        "int32[B, L] m",
        HEADS,
        {"mask": True},
    ),
    "onnxruntime's, groups": (
        f"""total = Constant<value=int32 {{{L}}}>()
        y = com.microsoft.GroupQueryAttention<num_heads={HEADS}, kv_num_heads=2>(q0, k0, v0, , , m, total)""",
        "int32[B] m",
        2,
        {"causal": 1, "mask": True},
    ),
}

ALMOST = {
    "a cap": (f"y = Attention<{HEAD_COUNTS}={HEADS}, softcap=2.0>(q0, k0, v0)", ""),
    "a bias that learns": (f"{BY_HEAD} biased = Add(scaled, bias) p = Softmax<axis=-1>(biased) {JOINED}", ""),
    "a scale that learns": (f"{BY_HEAD} again = Mul(scaled, one) p = Softmax<axis=-1>(again) {JOINED}", ""),
}


def numbers(*shape: int, seed: int) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.4).astype(np.float32)


def model_of(body: str, more: str, groups: int) -> onnx.ModelProto:
    inputs = f"float[B, L, {WIDTH}] x" + (f", {more}" if more else "")
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>
        g ({inputs}) => (float[B, L, {WIDTH}] y) {{
            q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv) {body}
        }}"""
    )
    weights = {
        "wq": (WIDTH, WIDTH),
        "wk": (WIDTH, groups * SIZE),
        "wv": (WIDTH, groups * SIZE),
        "bias": (L, L),
        "one": (),
    }
    for seed, (name, shape) in enumerate(weights.items()):
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(numbers(*shape, seed=seed)), name))
    return model


def feeds_of(more: str) -> dict[str, Array]:
    feeds: dict[str, Array] = {"x": numbers(B, L, WIDTH, seed=9)}
    if more:
        feeds["m"] = {
            "bool[L, L] m": np.tri(L, dtype=np.bool_) | (np.arange(L) == 2),
            "int32[B, L] m": np.array([[1] * L, [1, 1, 1, 0, 0]], np.int32),
            "int32[B] m": np.array([L - 1, 2], np.int32),
        }[more]
    return feeds


def by_torch(name: str, weights: dict[str, Tensor], feeds: dict[str, Array], target: Array, seed: int) -> Tensor:
    dtype = weights["wq"].dtype
    x = torch.from_numpy(feeds["x"]).to(dtype)
    q, k, v = ((x @ weights[one]).reshape(B, L, -1, SIZE).transpose(1, 2) for one in ("wq", "wk", "wv"))
    k, v = (one.repeat_interleave(HEADS // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT * 0.5
    expected = WRITTEN[name][3]
    if expected.get("causal"):
        scores = scores.masked_fill(~torch.ones(L, L).tril().bool(), -torch.inf)
    mask = torch.from_numpy(feeds["m"]) if "m" in feeds else None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None and mask.dim() == 2:
        scores = scores + (1 - mask[:, None, None].to(dtype)) * -10000.0
    elif mask is not None:
        scores = scores.masked_fill(torch.arange(L) > mask[:, None, None, None], -torch.inf)
    p = scores.softmax(-1)
    share = expected.get("dropout", 0.0)
    if share:
        p = p * dropout_mask(seed, 0, p, share) / (1 - share)
    return F.mse_loss((p @ v).transpose(1, 2).flatten(2), torch.from_numpy(target).to(dtype))


def trained(
    name: str, step: TrainingStep, feeds: dict[str, Array], target: Array, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Losses of two updates, and the parameters after them."""
    weights = {key: torch.from_numpy(one.copy()).to(dtype).requires_grad_() for key, one in step.parameters.items()}
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    found = {}
    for seed in range(2):
        optimizer.zero_grad()
        loss = by_torch(name, weights, feeds, target, seed)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found[f"loss {seed}"] = loss.detach()
    return found | {key: one.detach() for key, one in weights.items()}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.sampled(every=2)
def test_attention_is_one_operator(name: str, static: bool) -> None:
    body, more, groups, expected = WRITTEN[name]
    model = model_of(body, more, groups)
    for value in model.graph.input if static else ():
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = {"B": B, "L": L}.get(dim.dim_param, dim.dim_value)
    step = build_training_step(model, "mse", optimizer=SGD(lr=0.1))

    (node,) = (one for one in step.model.graph.node if one.op_type == OPERATORS[1])
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    assert attributes.get("causal", 0) == expected.get("causal", 0)
    assert attributes.get("dropout_threshold", 0) / 2**31 == pytest.approx(expected.get("dropout", 0.0))
    assert (len(node.input) > 6 and bool(node.input[6])) == expected.get("mask", False)
    assert not any(one.op_type == "Softmax" for one in step.model.graph.node)

    feeds, target = feeds_of(more), numbers(B, L, WIDTH, seed=10)
    session = TrainingSession(step)
    got: dict[str, Any] = {
        f"loss {seed}": session.step(tuple(feeds[key] for key in step.input_names), target) for seed in range(2)
    }
    got |= {key: one for key, one in session.state_dict().items() if key in step.parameters}
    native, exact = (trained(name, step, feeds, target, dtype) for dtype in (torch.float32, torch.float64))
    for key, one in got.items():
        assert_gradients_close(np.float32(one), native[key], exact[key], np.float32, terms=1.0)


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_attention_stays(name: str) -> None:
    body, more = ALMOST[name]
    model = model_of(body, more, HEADS)
    weights = [one.name for one in model.graph.initializer]
    step = build_training_step(model, "mse", optimizer=SGD(lr=0.1), trainable=weights, check=True)
    assert list(step.parameters) == weights
    assert not any(one.op_type in OPERATORS for one in step.model.graph.node)


def test_short_sequences_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named dimension counts as 64."""
    model = model_of(*WRITTEN["written out"][:3])
    for fewest, count in ((64 * 64 + 1, 0), (64 * 64, 1)):
        monkeypatch.setattr(attention, "FEWEST_SCORES", fewest)
        step = build_training_step(model, "mse", optimizer=SGD(lr=0.1))
        assert sum(one.op_type == OPERATORS[0] for one in step.model.graph.node) == count
        assert step.report is not None
        assert any(miss.rule == OPERATORS[0] for miss in step.report.near_misses) == (not count)
