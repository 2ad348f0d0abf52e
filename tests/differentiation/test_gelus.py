"""Gradients of Gaussian error linear units in training steps from ONNX models."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F

from gradfuse import TrainingSession, build_training_step
from gradfuse.testing import assert_gradients_close

MODEL = """<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
g (float[N, 4] x, {kind}[4] b) => (float l) <{kind}[4] w> {{
    {unit}
    s = Mul(y, y)  r = ReduceSum<keepdims=0>(s)  l = Cast<to=1>(r)
}}"""
PLAIN = "a = Mul(x, w)"


def step_of(unit: str, kind: str = "float", *, fuse: bool = True) -> Any:
    text = MODEL.format(unit=unit, kind=kind).replace("float[N, 4] x", f"{kind}[N, 4] x").replace(f", {kind}[4] b", "")
    model = onnx.parser.parse_model(text)
    del model.graph.initializer[:]
    dtype = {"float": np.float32, "double": np.float64}[kind]
    numbers = {"w": np.array([0.5, -1, 2, -0.3], dtype), "b": np.array([0.1, 0.2, -0.3, 0.4], dtype)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in numbers.items())
    return build_training_step(model, None, trainable=["w"], fuse=fuse)


def operators(step: Any) -> list[str]:
    return [node.op_type for node in step.model.graph.node if node.domain == "aclnn"]


@pytest.mark.parametrize(
    "unit, approximate, bias",
    [
        ("a = Mul(x, w) y = Gelu(a)", "none", False),
        ('a = Mul(x, w) y = Gelu<approximate="tanh">(a)', "tanh", False),
        ("a = Mul(x, w) y = com.microsoft.Gelu(a)", "none", False),
        ("a = Mul(x, w) y = com.microsoft.FastGelu(a)", "tanh", False),
        ("a = Mul(x, w) y = com.microsoft.FastGelu(a, b)", "tanh", True),
        ("a = Mul(x, w) y = com.microsoft.BiasGelu(a, b)", "none", True),
    ],
)
def test_units_get_the_operator(unit: str, approximate: str, bias: bool) -> None:
    step = step_of(unit)
    assert operators(step) == ["GeluBackward"]
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    session = TrainingSession(step)
    session.step(x.numpy(), ())

    def gradient(dtype: torch.dtype) -> Any:
        w = torch.tensor([0.5, -1, 2, -0.3], dtype=dtype, requires_grad=True)
        b = torch.tensor([0.1, 0.2, -0.3, 0.4], dtype=dtype)
        loss = F.gelu(x.to(dtype) * w + (b if bias else 0), approximate=approximate).square().sum()
        return torch.autograd.grad(loss, w)[0]

    exact = gradient(torch.float64)
    terms = float(exact.abs().max())
    assert_gradients_close(session.gradients["w"], gradient(torch.float32), exact, torch.float32, terms=terms)


def test_other_steps_have_standard_operators() -> None:
    assert not operators(step_of("a = Mul(x, w) y = Gelu(a)", fuse=False))
    assert not operators(step_of("a = Mul(x, w) y = Gelu(a)", "double"))
