"""Quantisation-aware training: pairs of QuantizeLinear and DequantizeLinear against torch's fake_quantize."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import gradfuse
from gradfuse import ArgumentError, ModelError, TrainingSession, build_training_step
from gradfuse.optimizers import SGD
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

IN, OUT, SCALE, ZERO = 6, 4, 0.05, 120
SCALES = np.array([0.01, 0.02, 0.005, 0.03], np.float32)


def _model(*, other_scale: bool = False) -> onnx.ModelProto:
    """x (N, IN), quantised per tensor, times a weight (OUT, IN) that is quantised per row."""
    weight = np.random.default_rng(0).standard_normal((OUT, IN)).astype(np.float32)
    tensors: dict[str, Any] = {
        "weight": weight,
        "bias": np.ones(IN, np.float32),
        "scale": np.array(SCALE, np.float32),
        "second": np.array(SCALE * (2 if other_scale else 1), np.float32),
        "zero": np.array(ZERO, np.uint8),
        "scales": SCALES,
        "zeros": np.zeros(OUT, np.int8),
    }
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "second", "zero"], ["xd"]),
        helper.make_node("QuantizeLinear", ["weight", "scales", "zeros"], ["wq"], axis=0),
        helper.make_node("DequantizeLinear", ["wq", "scales", "zeros"], ["wd"], axis=0),
        helper.make_node("Gemm", ["xd", "wd"], ["y"], transB=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", IN])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", OUT])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(a, n) for n, a in tensors.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def _torch(x: Any, y: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The gradients in a type; which of the numbers are cut off, torch says in float32."""
    weight = torch.from_numpy(numpy_helper.to_array(_model().graph.initializer[0]).copy()).requires_grad_()
    total = (torch.from_numpy(x) + 1).requires_grad_()
    quantised = torch.fake_quantize_per_tensor_affine(total, SCALE, ZERO, 0, 255)
    zeros = torch.zeros(OUT, dtype=torch.int32)
    rows = torch.fake_quantize_per_channel_affine(weight, torch.from_numpy(SCALES), zeros, 0, -128, 127)
    passes = torch.autograd.grad((quantised, rows), (total, weight), (torch.ones_like(total), torch.ones_like(weight)))
    wide = [tensor.detach().to(dtype).requires_grad_() for tensor in (quantised, rows)]
    loss = torch.nn.functional.mse_loss(wide[0] @ wide[1].T, torch.from_numpy(y).to(dtype))
    by_input, by_rows = torch.autograd.grad(loss, wide)
    return {"bias": (by_input * passes[0]).sum(0), "weight": by_rows * passes[1], "loss": loss.detach()}


def _batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    # Some are cut off.
    return (4 * rng.standard_normal((5, IN))).astype(np.float32), rng.standard_normal((5, OUT)).astype(np.float32)


@pytest.mark.parametrize("fuse", [True, False])
def test_gradients_are_those_of_torchs_fake_quantize(fuse: bool) -> None:
    x, y = _batch()
    step = build_training_step(_model(), "mse", straight_through=True, fuse=fuse)
    assert set(step.parameters) == {"weight", "bias"}
    onnx.checker.check_model(step.model, full_check=True)
    assert [node.op_type for node in step.model.graph.node].count("QuantizeLinear") == 2
    session = TrainingSession(step)
    loss = session.step(x, y)
    native, exact = _torch(x, y, torch.float32), _torch(x, y, torch.float64)
    assert_gradients_close(np.float32(loss), native["loss"], exact["loss"], np.float32)
    for name, array in session.gradients.items():
        assert (array == 0).any() or name == "bias"
        terms = np.abs(array).max() * 10
        assert_gradients_close(array, native[name], exact[name], np.float32, terms=terms)


def test_it_trains_and_serves_the_quantised_model() -> None:
    x, y = _batch()
    session = TrainingSession(build_training_step(_model(), "mse", straight_through=True, optimizer=SGD(lr=0.01)))
    losses = [session.step(x, y) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    result = session.evaluate(x)
    assert np.float32(np.mean((result - y) ** 2)) < losses[0]


def test_scales_stay_and_are_refused_where_they_are_named() -> None:
    step = build_training_step(_model(), "mse", straight_through=True, trainable=["*"])
    assert set(step.parameters) == {"weight", "bias"}
    for named in (["weight", "scale"], ["scale*"], ["scales"]):
        with pytest.raises(ArgumentError, match=r"trainable has 'scales?', the scale of a pair that quantises"):
            build_training_step(_model(), "mse", straight_through=True, trainable=named)


def test_without_it_and_where_no_pair_is_they_are_refused() -> None:
    with pytest.raises(ModelError, match=r"QuantizeLinear .*straight_through"):
        build_training_step(_model(), "mse")
    with pytest.raises(ModelError, match=r"QuantizeLinear .*rounding"):
        build_training_step(_model(other_scale=True), "mse", straight_through=True)
    with pytest.raises(ArgumentError, match="check=False"):
        build_training_step(_model(), "mse", straight_through=True, check=True)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", IN])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", OUT])
    weight = numpy_helper.from_array(np.ones((IN, OUT), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    with pytest.raises(ArgumentError, match="expected pairs"):
        gradfuse.build_training_step(plain, "mse", straight_through=True)
