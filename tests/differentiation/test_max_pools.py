"""Gradients of MaxPool in training steps: by the operator, or by indices where the operator does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from gradfuse import TrainingSession, build_training_step
from gradfuse.testing import assert_gradients_close

MODEL = """<ir_version: 10, opset_import: ["": 18]>
g (float[{dims}] x) => (float l) <float[1] w> {{
    a = Mul(x, w)
    {pooling}
    s = Mul(y, y)
    l = ReduceSum<keepdims=0>({loss})
}}"""
PLAIN = "y = MaxPool<{}>(a)"


def step_of(dims: str, pooling: str, loss: str = "s", *, fuse: bool = True) -> Any:
    model = onnx.parser.parse_model(MODEL.format(dims=dims, pooling=pooling, loss=loss))
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1.5], np.float32), "w"))
    return build_training_step(model, None, trainable=["w"], fuse=fuse)


def operators(step: Any) -> list[str]:
    return [node.op_type for node in step.model.graph.node if node.op_type in ("MaxPoolBackward", "ScatterElements")]


def poolings(step: Any) -> list[int]:
    """How many outputs each pooling has."""
    return [len(node.output) for node in step.model.graph.node if node.op_type == "MaxPool"]


def require_torchs(step: Any, x: torch.Tensor, *options: Any) -> None:
    session = TrainingSession(step)
    session.step(x.numpy(), ())
    found: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.float64):
        w = torch.tensor([-1.5], dtype=dtype, requires_grad=True)
        pool = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.dim()]
        pool(x.to(dtype) * w, *options).square().sum().backward()
        assert w.grad is not None
        found.append(w.grad)
    native, exact = found
    assert_gradients_close(session.gradients["w"], native, exact, torch.float32, terms=float(exact.abs()))


@pytest.mark.parametrize(
    "dims, attributes, options",
    [
        ("N, 3, 8, 6", "kernel_shape=[2, 2], strides=[2, 2]", (2,)),
        ("N, C, H, W", "kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]", (3, 2, 1)),
        ("N, C, H, W", "kernel_shape=[2, 2], dilations=[2, 1]", (2, 1, 0, (2, 1))),
        ("N, 3, 8", 'kernel_shape=[3], strides=[2], auto_pad="VALID"', (3, 2)),
        ("N, 3, 4, 5, 6", "kernel_shape=[2, 3, 2]", ((2, 3, 2), 1)),
        ("N, 3, 9, 7", "kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1", (2, 2, 0, 1, True)),
        ("N, 3, 9, 7", "kernel_shape=[1, 1], strides=[3, 3], ceil_mode=1", (1, 3, 0, 1, True)),
        ("N, 3, 9, 7", "kernel_shape=[1, 2], strides=[3, 2], ceil_mode=1", ((1, 2), (3, 2), 0, 1, True)),
    ],
)
def test_pooling_has_no_indices(dims: str, attributes: str, options: tuple[Any, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {"N": 2, "C": 3, "H": 9, "W": 7}
    shape = [sizes[dim] if dim in sizes else int(dim) for dim in dims.split(", ")]
    # Equal maxima too.
    x = torch.randint(-3, 4, shape, generator=generator).float()
    fused, plain = (step_of(dims, PLAIN.format(attributes), fuse=fuse) for fuse in (True, False))
    assert operators(fused) == ["MaxPoolBackward"] and poolings(fused) == [1]
    assert operators(plain) == ["ScatterElements"] and poolings(plain) == [2]
    for step in (fused, plain):
        require_torchs(step, x, *options)


@pytest.mark.parametrize(
    "dims, attributes",
    [
        ("N, 3, H, 7", "kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1"),
        ("N, 3, 9, 7", 'kernel_shape=[3, 3], auto_pad="SAME_UPPER"'),
    ],
    ids=["unknown size", "auto_pad"],
)
def test_what_the_operator_does_not_fit_has_indices(dims: str, attributes: str) -> None:
    step = step_of(dims, PLAIN.format(attributes))
    assert operators(step) == ["ScatterElements"] and poolings(step) == [2]


def test_a_model_that_reads_indices_keeps_them() -> None:
    pooling = """y, i = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(a)
    j = Cast<to=1>(i)
    t = Mul(j, y)"""
    step = step_of("N, 3, 8, 6", pooling, "t")
    assert operators(step) == ["ScatterElements"] and poolings(step) == [2]


def test_indices_that_nothing_reads_go() -> None:
    step = step_of("N, 3, 8, 6", "y, i = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(a)")
    assert operators(step) == ["MaxPoolBackward"] and poolings(step) == [1]
    require_torchs(step, torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0)), 2)
