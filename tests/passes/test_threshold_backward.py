"""Gradients of ReLUs become one operator."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from producers import run

import gradfuse
from gradfuse import fuse

pytestmark = pytest.mark.usefixtures("inference_in_process")

GRAPH = """<ir_version: 10, opset_import: ["": 20]>
relu (float[N, 6] g, float[N, 6] x, float[6] row) => (float[N, 6] y, float[N, 6] dx) {
    zero = Constant<value_float = 0.0>()
    y = Relu(x)  cut = LessOrEqual(y, zero)
    dx = Where(cut, zero, g)
}"""


def fused(*changes: tuple[str, str]) -> onnx.ModelProto:
    text = GRAPH
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    model: onnx.ModelProto = fuse(onnx.parser.parse_model(text)).model
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == "aclnn"]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("LessOrEqual(y, zero)", "GreaterOrEqual(zero, y)")],
        [("LessOrEqual(y, zero)", "Equal(y, zero)")],
        [("cut = LessOrEqual(y, zero)", "kept = Cast<to = 9>(y)  cut = Not(kept)")],
        # A backward pass on its own.
        [("float[N, 6] y, ", ""), ("y = Relu(x)  cut = LessOrEqual(y", "cut = LessOrEqual(x")],
    ],
)
def test_gradients_are_found(changes: list[tuple[str, str]]) -> None:
    model = fused(*changes)
    assert operators(model) == ["ThresholdBackward"]
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 0.0, -0.0, inf, -inf, 1.0]] * 2)
    g = torch.tensor([[inf, nan, inf, -1.0, 2.0, nan], [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])
    dx = run(model, {"g": g.numpy(), "x": x.numpy(), "row": np.zeros(6, np.float32)})["dx"]
    wanted = torch.ops.aten.threshold_backward(g, x.relu(), 0.0)
    np.testing.assert_array_equal(dx, wanted.numpy())


KEPT = "kept = Not(cut)  factor = Cast<to = 1>(kept)"
LEFT = "one = Constant<value_float = 1.0>()  gone = Cast<to = 1>(cut)  factor = Sub(one, gone)"


@pytest.mark.parametrize(
    "changes",
    [
        [("dx = Where(cut, zero, g)", f"{KEPT}  dx = Mul(g, factor)")],
        [("dx = Where(cut, zero, g)", f"{LEFT}  dx = Mul(factor, g)")],
        [("LessOrEqual(y, zero)", "LessOrEqual(x, zero)")],
        [("y = Relu(x)", "y = Max(x, zero)"), ("LessOrEqual(y, zero)", "GreaterOrEqual(zero, x)")],
        [("y = Relu(x)", "y = Clip(x, zero)")],
        [("dx = Where(cut, zero, g)", "kept = Not(cut)  dx = Where(kept, g, zero)")],
    ],
)
def test_gradients_are_found_however_the_mask_is_written(changes: list[tuple[str, str]]) -> None:
    model = fused(*changes)
    assert operators(model) == ["ThresholdBackward"]
    x = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), 1.0, -1.0]] * 2)
    g = torch.arange(12.0).reshape(2, 6) - 5
    dx = run(model, {"g": g.numpy(), "x": x.numpy(), "row": np.zeros(6, np.float32)})["dx"]
    np.testing.assert_array_equal(dx, torch.ops.aten.threshold_backward(g, x.relu(), 0.0).numpy())


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        ("kept = Greater(y, zero)  cut = Not(kept)", "0 where the result is NaN"),
        ("kept = Less(zero, x)  cut = Not(kept)", "0 where the result is NaN"),
        ("sign = Sign(y)  dx = Mul(sign, g)", "NaN where the result is"),
        ("cut = Less(x, zero)", "whole where the result is 0"),
        ("kept = GreaterOrEqual(x, zero)  cut = Not(kept)", "whole where the result is 0"),
    ],
)
def test_explain_says_where_another_comparison_gives_another_gradient(cut: str, reason: str) -> None:
    old = "cut = LessOrEqual(y, zero)"
    if "dx" in cut:
        old += "\n    dx = Where(cut, zero, g)"
    assert old in GRAPH
    text = GRAPH.replace(old, cut)
    (region,) = gradfuse.explain(onnx.parser.parse_model(text)).regions
    assert region.op == "ThresholdBackward" and reason in region.reason


@pytest.mark.parametrize(
    "changes",
    [
        [("LessOrEqual(y, zero)", "Less(y, zero)")],
        [("LessOrEqual(y, zero)", "LessOrEqual(zero, y)")],
        [("LessOrEqual(y, zero)", "Equal(x, zero)")],
        [("LessOrEqual(y, zero)", "Cast<to = 9>(y)")],
        [("LessOrEqual(y, zero)", "LessOrEqual(y, row)")],
        [("cut = LessOrEqual(y, zero)", "kept = Greater(y, zero)  cut = Not(kept)")],
        [("Where(cut, zero, g)", "Where(cut, g, zero)")],
        [("Where(cut, zero, g)", "Where(cut, zero, row)")],
        [("Where(cut, zero, g)", "Where(cut, x, g)")],
        [("y = Relu(x)", "one = Constant<value_float = 1.0>()  y = Add(x, one)")],
        [
            ("LessOrEqual(y, zero)", "LessOrEqual(y, one)"),
            ("zero = C", "one = Constant<value_float = 1.0>()  zero = C"),
        ],
    ],
)
def test_what_is_almost_a_gradient_stays(changes: list[tuple[str, str]]) -> None:
    assert operators(fused(*changes)) == []


def test_gradients_of_batch_normalization_keep_the_relu() -> None:
    """The gradient of a ReLU that they read is part of them, in fused steps and in those that are fused later."""
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten())
    batch = ((torch.randn(2, 2, 4, 4),), (torch.zeros(2, dtype=torch.int64),))
    for fuses in (True, False):
        step = gradfuse.export_training_step(module, torch.nn.functional.cross_entropy, batch, fuse=fuses)
        model = step.model if fuses else fuse(step.model).model
        assert "BatchNormBackward" in operators(model)
        assert "ThresholdBackward" not in operators(model)
