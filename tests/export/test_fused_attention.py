"""Attention in modules, however it is written, as one operator of an exported step, and with PyTorch's numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from long_tests import mostly_long
from torch import Tensor, nn

from gradfuse import TrainingSession, TrainingStep, export_training_step
from gradfuse.export.dropout import SeededDropout
from gradfuse.passes.matching import attention
from gradfuse.testing import assert_gradients_close

B, H, L, S, E = 2, 4, 6, 9, 4
D = H * E
UPDATES = 2
LEAST = torch.finfo(torch.float32).min
OPERATORS = ["ScaledDotProductAttention", "ScaledDotProductAttentionBackward"]

Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of tests are short."""
    monkeypatch.setattr(attention, "FEWEST_SCORES", 0)


class Attention(nn.Module):
    """Queries, keys and values of heads, for a function of (module, query, key, value, further inputs)."""

    def __init__(self, attend: Attend, heads: int = H, groups: int = H, drop: float = 0.0) -> None:
        super().__init__()
        self.attend, self.heads, self.drop = attend, heads, drop
        size = D // heads
        self.query, self.key, self.value = nn.Linear(D, D), nn.Linear(D, groups * size), nn.Linear(D, groups * size)
        self.out = nn.Linear(D, D)
        self.bias = nn.Parameter(torch.zeros(L, L))
        self.register_buffer("triangle", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16), persistent=False)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        keys = more[0] if more and more[0].dim() == 3 and more[0].is_floating_point() else x
        q, k, v = (
            layer(given).unflatten(-1, (-1, D // self.heads)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, keys), (self.value, keys))
        )
        y = self.attend(self, q, k, v, *more)
        # So that a bias that nothing reads has a gradient.
        return self.out(y.transpose(1, 2).flatten(2)) + self.bias.sum()  # type: ignore[no-any-return]


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def dropped(module: Any, p: Tensor) -> Tensor:
    return F.dropout(p, module.drop, module.training)


def repeated(x: Tensor) -> Tensor:
    b, groups, length, size = x.shape
    return x[:, :, None].expand(b, groups, H // groups, length, size).reshape(b, H, length, size)


def nano(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return dropped(m, softmax(scores.masked_fill(m.triangle[:, :, :L, :L] == 0, -math.inf))) @ v


def merged(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b = q.shape[0]
    q, k, v = ((x * 0.5 if x is q else x).reshape(b * H, -1, E) for x in (q, k, v))
    scores = (torch.bmm(q, k.transpose(1, 2)).view(b, H, L, L) + mask).view(b * H, L, L)
    return torch.bmm(dropped(m, softmax(scores)), v).view(b, H, L, E)


def einsum(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = softmax(torch.einsum("blhe,bshe->bhls", q, k) * 0.3)
    return torch.einsum("bhls,bshe->blhe", p, v).transpose(1, 2)


def filled(low: float) -> Attend:
    return lambda m, q, k, v, seen: dropped(m, softmax((q @ k.mT * 0.5).masked_fill(~seen[:, None, None, :], low))) @ v


def added(m: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return softmax(q @ k.mT * 0.5 + (1 - seen[:, None, None, :].to(q.dtype)) * LEAST) @ v


def upper(low: float) -> Attend:
    """As of eager attention in transformers: a mask that is made in float32 and added."""
    return lambda m, q, k, v: softmax(q @ repeated(k).mT * 0.5 + torch.full((L, L), low).triu(1)) @ repeated(v)


SEEN = torch.ones(B, L, dtype=torch.bool)
SEEN[0, :2] = SEEN[0, 5] = False
SOME_SEE_NOTHING = SEEN.clone()
SOME_SEE_NOTHING[1] = False

WRITTEN: dict[str, tuple[Attend, tuple[Tensor, ...], dict[str, Any], dict[str, Any]]] = {
    "sdpa": (lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v), (), {}, {}),
    "sdpa, causal": (lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (), {}, {"causal": 1}),
    "sdpa, mask": (
        lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :]),
        (SOME_SEE_NOTHING,),
        {},
        {"mask": onnx.TensorProto.BOOL},
    ),
    "sdpa, groups and dropout": (
        lambda m, q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, dropout_p=m.drop if m.training else 0.0
        ),
        (),
        {"groups": 2, "drop": 0.2},
        {"causal": 1, "groups": 2, "dropout": 0.2},
    ),
    "sdpa, more keys": (
        lambda m, q, k, v, _: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7),
        (torch.randn(B, S, D),),
        {},
        {"causal": 1, "scale": 0.7},
    ),
    "nano": (nano, (), {"drop": 0.1}, {"causal": 1, "dropout": 0.1}),
    "scaled ahead": (lambda m, q, k, v: softmax((q * E**-0.5) @ k.transpose(-2, -1)) @ v, (), {}, {}),
    "scaled twice": (lambda m, q, k, v: softmax((q * 0.3) @ (k.mT / 2) / 1.5) @ v, (), {}, {"scale": 0.1}),
    "one head": (lambda m, q, k, v: (softmax(q[:, 0] @ k[:, 0].mT / 4) @ v[:, 0])[:, None], (), {"heads": 1}, {}),
    "heads and batch are one": (
        merged,
        (torch.full((B, 1, L, L), LEAST).triu(1),),
        {"drop": 0.3},
        {"mask": onnx.TensorProto.FLOAT, "dropout": 0.3, "seen": 1},
    ),
    "einsum": (einsum, (), {}, {"scale": 0.3}),
    "one head of keys": (lambda m, q, k, v: softmax(q @ k.mT * 0.5) @ v, (), {"groups": 1}, {"groups": 1}),
    "repeated by index": (
        lambda m, q, k, v: softmax(q @ k.repeat_interleave(2, 1).mT * 0.5) @ v.repeat_interleave(2, 1),
        (),
        {"groups": 2},
        {"groups": 2},
    ),
    "added, least": (upper(LEAST), (), {"groups": 2}, {"causal": 1, "groups": 2}),
    "added, infinite": (upper(-math.inf), (), {"groups": 2}, {"causal": 1, "groups": 2}),
    "more keys, to the last": (
        lambda m, q, k, v, _: softmax((q @ k.mT).masked_fill(torch.ones(L, S).triu(S - L + 1) > 0, -math.inf)) @ v,
        (torch.randn(B, S, D),),
        {},
        {"causal": 2, "scale": 1.0},
    ),
    "a window": (
        lambda m, q, k, v: (
            softmax((q @ k.mT * 0.5).masked_fill((torch.arange(L)[:, None] - torch.arange(L)).abs() > 1, -math.inf)) @ v
        ),
        (),
        {},
        {"mask": onnx.TensorProto.BOOL},
    ),
    "rows that see nothing, filled": (
        filled(-1e9),
        (SOME_SEE_NOTHING,),
        {"drop": 0.4},
        {"mask": onnx.TensorProto.BOOL, "dropout": 0.4},
    ),
    "rows that see nothing, added": (added, (SOME_SEE_NOTHING,), {}, {"mask": onnx.TensorProto.FLOAT}),
    "causal, and rows that see nothing": (
        lambda m, q, k, v, seen: (
            softmax(torch.where(m.triangle[:, :, :L, :L].bool() & seen[:, None, None, :], q @ k.mT * 0.5, LEAST)) @ v
        ),
        (SEEN,),
        {},
        {"mask": onnx.TensorProto.BOOL},
    ),
    "filled, infinite": (filled(-math.inf), (SEEN,), {}, {"mask": onnx.TensorProto.BOOL, "seen": 1}),
    "queries are keys": (lambda m, q, k, v: softmax(q @ q.mT * 0.5) @ q, (), {}, {}),
    "five dimensions": (
        lambda m, q, k, v: (
            softmax(q.view(B, 2, 2, L, E) @ k.view(B, 2, 2, L, E).mT * 0.5) @ v.view(B, 2, 2, L, E)
        ).flatten(1, 2),
        (),
        {},
        {},
    ),
}

QUICK = (
    *("sdpa, groups and dropout", "nano", "einsum", "heads and batch are one", "one head of keys", "added, infinite"),
    *("a window", "rows that see nothing, filled"),
)
"""Those that are in the suite; the others are long tests."""

ALMOST: dict[str, tuple[Attend, tuple[Tensor, ...], str]] = {
    "another axis": (lambda m, q, k, v: (q @ k.mT * 0.5).softmax(-2) @ v, (), ""),
    "masked afterwards": (
        lambda m, q, k, v, seen: (softmax(q @ k.mT * 0.5) * seen[:, None, None, :]) @ v,
        (SEEN,),
        "a mask that is no dropout's",
    ),
    "zeroed afterwards": (
        lambda m, q, k, v, seen: softmax(q @ k.mT * 0.5).masked_fill(~seen[:, None, None, :], 0.0) @ v,
        (SEEN,),
        "its probabilities are masked",
    ),
    "a mask that is not low": (filled(-1e4), (SOME_SEE_NOTHING,), "-10000 takes the place of its scores"),
    "scores read twice": (
        lambda m, q, k, v: (lambda scores: softmax(scores) @ v + scores.mean())(q @ k.mT),
        (),
        "are read by something else",
    ),
    "probabilities read twice": (
        lambda m, q, k, v: (lambda p: p @ v + p.square().mean())(softmax(q @ k.mT)),
        (),
        "are read by something else",
    ),
    "a learned bias": (
        lambda m, q, k, v: softmax(q @ k.mT * 0.5 + m.bias) @ v,
        (),
        "what is added to its scores learns",
    ),
    "a learned scale": (lambda m, q, k, v: softmax(q @ k.mT * m.bias[0, 0]) @ v, (), "its scale is a tensor"),
    "a cap": (lambda m, q, k, v: softmax(5 * (q @ k.mT / 5).tanh()) @ v, (), "its scores are capped"),
    "several numbers fill": (
        lambda m, q, k, v, seen: (
            softmax(
                (q @ k.mT)
                .masked_fill(~seen[:, None, None, :], -1e9)
                .masked_fill(torch.ones(L, L).triu(2) > 0, -math.inf)
            )
            @ v
        ),
        (SEEN,),
        "several numbers take the place",
    ),
}


def exported(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> tuple[TrainingStep, Tensor]:
    target = torch.randn(B, L, D)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return export_training_step(module, nn.MSELoss(), (inputs, (target,)), optimizer, **options), target


def batch_of(more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.randn(B, L, D), *more


def trained(module: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Losses of some updates, and the parameters after them, of PyTorch in a type, with a step's masks of dropout."""
    module = copy.deepcopy(module).to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found = {}
    for seed in range(UPDATES):
        optimizer.zero_grad()
        with SeededDropout(torch.tensor(seed)):
            loss = F.mse_loss(module(*inputs), target.to(dtype))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found[f"loss {seed}"] = loss.detach()
    return found | {name: one.detach() for name, one in module.named_parameters()}


def assert_trains_like_torch(step: TrainingStep, module: nn.Module, inputs: tuple[Tensor, ...], target: Tensor) -> None:
    session = TrainingSession(step)
    arrays = tuple(x.numpy() for x in inputs)
    got: dict[str, Any] = {f"loss {seed}": session.step(arrays, target.numpy()) for seed in range(UPDATES)}
    got |= {name: one for name, one in session.state_dict().items() if name in dict(module.named_parameters())}
    native, exact = (trained(module, inputs, target, dtype) for dtype in (torch.float32, torch.float64))
    assert got.keys() == native.keys()
    for name, one in got.items():
        # As the loss is a mean of squares, and what it depends on has the size of 1.
        assert_gradients_close(np.float32(one), native[name], exact[name], np.float32, terms=1.0)


def placed(step: TrainingStep, name: str = OPERATORS[0]) -> list[onnx.NodeProto]:
    return [node for node in step.model.graph.node if node.op_type == name]


@pytest.mark.parametrize("name", mostly_long(WRITTEN, QUICK))
@pytest.mark.sampled(every=2)
def test_written_attention_is_one_operator(name: str) -> None:
    attend, more, options, expected = WRITTEN[name]
    torch.manual_seed(0)
    module, inputs = Attention(attend, **options), batch_of(more)
    step, target = exported(module, inputs)

    assert len(placed(step)) == 1 + expected.get("seen", 0)
    assert len(placed(step, OPERATORS[1])) == 1
    assert not any(node.op_type == "Softmax" for node in step.model.graph.node)
    backward = placed(step, OPERATORS[1])[0]
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in backward.attribute}
    assert attributes.get("causal", 0) == expected.get("causal", 0)
    assert attributes.get("scale", 0.0) == pytest.approx(expected.get("scale", 0.0))
    assert attributes.get("dropout_threshold", 0) / 2**31 == pytest.approx(expected.get("dropout", 0.0))
    values = {value.name: value.type.tensor_type for value in step.model.graph.value_info}
    mask = backward.input[6] if len(backward.input) > 6 else ""
    assert bool(mask) == ("mask" in expected)
    if mask in values:
        assert values[mask].elem_type == expected["mask"]
    if "groups" in expected:
        assert [values[one].shape.dim[1].dim_value for one in backward.input[2:4]] == [expected["groups"]] * 2
    assert_trains_like_torch(step, module, inputs, target)


@pytest.mark.parametrize("name", mostly_long(ALMOST, list(ALMOST)[:4]))
@pytest.mark.sampled(every=2)
def test_what_is_almost_attention_stays(name: str) -> None:
    attend, more, reason = ALMOST[name]
    torch.manual_seed(0)
    module, inputs = Attention(attend), batch_of(more)
    step, target = exported(module, inputs)

    assert not placed(step)
    reasons = [miss.reason for miss in step.report.near_misses if miss.rule == OPERATORS[0]] if step.report else []
    assert any(reason in one for one in reasons) or not reason
    assert_trains_like_torch(step, module, inputs, target)


@pytest.mark.parametrize(
    "name", mostly_long(("nano", "sdpa, groups and dropout", "heads and batch are one", "added, least"), ("nano",))
)
def test_sizes_may_vary(name: str) -> None:
    attend, more, options, expected = WRITTEN[name]
    torch.manual_seed(0)
    module, inputs = Attention(attend, **options), batch_of(more)
    axes = tuple({0: "batch"} for _ in inputs)
    step, target = exported(module, inputs, dynamic_shapes=(axes, ({0: "batch"},)))

    (node,) = placed(step, OPERATORS[1])
    causal = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}.get("causal", 0)
    assert causal == expected.get("causal", 0)
    assert_trains_like_torch(step, module, inputs, target)


@pytest.mark.long
def test_lengths_may_vary() -> None:
    """A mask of the length is none of the operator's: nothing is left of rows times keys."""
    torch.manual_seed(0)
    attend: Attend = lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    module, inputs = Attention(attend), batch_of(())
    axes = ({0: "batch", 1: "length"},)
    step, target = exported(module, inputs, dynamic_shapes=(axes, axes))

    (node,) = placed(step)
    assert not any(node.input[3:])
    assert not any(one.op_type in ("Range", "Where", "LessOrEqual") for one in step.model.graph.node)
    assert_trains_like_torch(step, module, inputs, target)


def test_short_sequences_stay_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FEWEST_SCORES", L * L + 1)
    attend, more, options, _ = WRITTEN["nano"]
    step, _ = exported(Attention(attend, **options), batch_of(more))
    assert not placed(step)
    assert step.report is not None
    assert f"not profitable: {L} queries and {L} keys are few" in {miss.reason for miss in step.report.near_misses}


def test_unfused_steps_have_standard_operators() -> None:
    attend, more, options, _ = WRITTEN["nano"]
    step, _ = exported(Attention(attend, **options), batch_of(more), fuse=False)
    assert not any(node.domain for node in step.model.graph.node)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.sampled(every=2)
def test_evaluation_models_have_the_operator(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, more, options, _ = WRITTEN["nano"]
    torch.manual_seed(0)
    module, inputs = Attention(attend, **options), batch_of(more)
    step, _ = exported(module, inputs)
    assert step.evaluation_model is not None
    assert OPERATORS[0] in [node.op_type for node in step.evaluation_model.graph.node]
    if not kernels:
        monkeypatch.setattr("gradfuse.library.find_library", lambda: None)
    got = TrainingSession(step).evaluate(tuple(x.numpy() for x in inputs))
    native, exact = (
        copy.deepcopy(module).eval().to(dtype)(*(x.to(dtype) for x in inputs)).detach()
        for dtype in (torch.float32, torch.float64)
    )
    assert_gradients_close(got, native, exact, np.float32, terms=1.0)


def test_rows_that_see_nothing_stay_nan() -> None:
    """PyTorch's softmax of nothing is NaN: the user learns of a mask that hides everything."""
    attend, _, _, _ = WRITTEN["filled, infinite"]
    torch.manual_seed(0)
    inputs = batch_of((SEEN,))
    step, target = exported(Attention(attend), inputs)
    loss = TrainingSession(step).step((inputs[0].numpy(), SOME_SEE_NOTHING.numpy()), target.numpy())
    assert math.isnan(loss)


def test_returned_weights_are_left_as_they_are() -> None:
    class Weights(nn.Module):
        def __init__(self, need: bool) -> None:
            super().__init__()
            self.attention, self.need = nn.MultiheadAttention(D, H, batch_first=True), need

        def forward(self, x: Tensor) -> Tensor:
            y, weights = self.attention(x, x, x, need_weights=self.need)
            return y + weights.sum() if self.need else y  # type: ignore[no-any-return]

    for need in (False, True):
        torch.manual_seed(0)
        module, inputs = Weights(need), batch_of(())
        step, target = exported(module, inputs)
        assert len(placed(step)) == (not need)
        assert_trains_like_torch(step, module, inputs, target)


def test_masks_of_float32_are_added_in_float32() -> None:
    """Under autocast queries and keys are narrower than a mask, whose least number they do not have."""
    attend, more, options, _ = WRITTEN["heads and batch are one"]
    torch.manual_seed(0)
    step, _ = exported(Attention(attend, **options), batch_of(more), autocast=torch.bfloat16)
    (node,) = placed(step, OPERATORS[1])
    types = {value.name: value.type.tensor_type.elem_type for value in step.model.graph.value_info}
    assert {types[name] for name in node.input[:6]} == {onnx.TensorProto.FLOAT}
