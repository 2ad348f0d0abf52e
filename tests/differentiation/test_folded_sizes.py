"""Ranks and sizes that follow from constants and other sizes alone, whatever a file declares."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
from autograd import model_of, numbers, require_torchs
from node_tests import run
from torch import Tensor

from gradfuse import build_training_step, differentiate, fuse
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("inference_in_process")


class Masked(torch.nn.Module):
    """A layer of an encoder with a mask, of which TorchScript writes sizes as remainders and sums of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.layer(x, src_key_padding_mask=mask)
        return result


@pytest.mark.parametrize("folding", [False, True])
def test_an_encoder_of_torch_script_has_gradients(folding: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Masked().eval()
    x, mask = torch.randn(2, 7, 8), torch.zeros(2, 7, dtype=torch.bool)
    path = tmp_path / "encoder.onnx"
    axes = {0: "batch", 1: "time"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (x, mask),
            str(path),
            dynamo=False,
            opset_version=17,
            do_constant_folding=folding,
            input_names=["x", "mask"],
            output_names=["y"],
            dynamic_axes={"x": axes, "mask": axes, "y": axes},
        )
    model = onnx.load(path)
    step = build_training_step(model, "mse", trainable=["*weight", "*bias"])
    # Of another batch size: the length is a constant in what TorchScript writes.
    other, hidden = torch.randn(3, 7, 8), torch.arange(21).reshape(3, 7) % 4 == 3
    target = torch.randn(3, 7, 8)
    feeds = {"x": other.numpy(), "mask": hidden.numpy(), "target": target.numpy(), **step.parameters}
    found = run(step.model, feeds, by_onnx=False)
    for precision in (torch.float32, torch.float64):
        module.to(precision).zero_grad()
        expected = torch.nn.functional.mse_loss(module(other.to(precision), hidden), target.to(precision))
        expected.backward()  # type: ignore[no-untyped-call]
        if precision == torch.float32:
            native = {name: np.asarray(one.grad) for name, one in module.named_parameters()}
    exact = {name: np.asarray(one.grad) for name, one in module.named_parameters()}
    compared = 0
    for name in step.parameters:
        if name in exact:
            terms = np.abs(exact[name]).max() * 16
            assert_gradients_close(found[f"{name}.grad"], native[name], exact[name], np.float32, terms=terms)
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("size", [1, 2])
def test_a_branch_that_is_always_taken_is_differentiated(size: int) -> None:
    """The rank of what comes behind follows from it; the other branch need not even be possible."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[N, {size}, 4] x, float[4] w) => (float[A] y)
    <int64[1] axis = {{1}}, int64 one = {{1}}> {{
        h = Mul(x, w)
        s = Shape(h)
        d = Gather(s, one)
        c = Equal(d, one)
        v = If (c) <then_branch = t () => (float[A, B] p) {{ p = Squeeze(h, axis) }},
                    else_branch = e () => (float[A, B, C] q) {{ q = Identity(h) }}>
        r = Mul(v, v)
        y = ReduceSum <keepdims = 0, noop_with_empty_axes = 0> (r)
    }}""".replace("float[A] y", "float y")
    feeds = {"x": numbers(3, size, 4), "w": numbers(4, seed=1)}
    require_torchs(
        onnx.parser.parse_model(text), feeds, lambda x, w: (x * w).square().sum(), ["x", "w"], has_kernel=size == 1
    )


def test_a_declared_shape_that_is_wrong_changes_no_gradient() -> None:
    """The mean is over as many elements as there are; onnxruntime does not look at what is declared."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[N,3] x, float[3] w) => (float y) <float[5,3] h>
        { h = Mul(x, w)  y = ReduceMean <keepdims = 0> (h) }"""
    )
    feeds = {"x": numbers(2, 3), "w": numbers(3, seed=1)}
    require_torchs(model, feeds, lambda x, w: (x * w).mean(), ["x", "w"])


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20])
def test_padding_of_all_opsets(opset: int) -> None:
    pads = "0, 2, 2, 0"
    body = f"y = Pad <pads = [{pads}]> (x)" if opset < 11 else "y = Pad (x, p)"
    constants = "" if opset < 11 else f"int64[4] p = {{{pads}}}"
    model = model_of("float[N,4] x", body, opset=opset, output="float[A,6] y", constants=constants)
    require_torchs(model, {"x": numbers(2, 4)}, lambda x: torch.nn.functional.pad(x, (2, 0, 0, 2)), ["x"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_determinants(size: int) -> None:
    model = model_of(f"float[N,{size},{size}] x", "d = Det(x)  a = Abs(d)  y = Log(a)", output="float[N] y")
    feeds = {"x": numbers(2, size, size) + 3 * np.eye(size, dtype=np.float32)}
    require_torchs(model, feeds, lambda x: torch.linalg.slogdet(x)[1], ["x"])


def test_a_step_without_the_shapes_of_its_values_is_fused_and_runs() -> None:
    """With a body for each fused operator, which is chosen by types and ranks."""
    weights = ", ".join(f"{np.sin(k):.3f}" for k in range(24))
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> g (float[N,2,12] x) => (float[N,4] y)
        <float[4,2,3] w = {{{weights}}}, int64[2] s = {{0, -1}}, float[16,4] v> {{
            c = Conv <strides = [2]> (x, w)  p = MaxPool <kernel_shape = [2], strides = [1]> (c)
            f = Reshape(p, s)  y = MatMul(f, v)
        }}"""
    )
    del model.graph.value_info[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers(16, 4), "v"))
    plain = build_training_step(model, "cross_entropy", fuse=False).model
    del plain.graph.value_info[:]
    result = fuse(plain)
    assert "MaxPoolBackward" in {fusion.op for fusion in result.report.fusions}
    onnx.checker.check_model(result.model, full_check=True)
    feeds = {"x": numbers(3, 2, 12), "target": np.array([0, 3, 1])}
    feeds |= {"w": onnx.numpy_helper.to_array(model.graph.initializer[0]), "v": numbers(16, 4)}
    wanted, got = (run(one, feeds, by_onnx=False) for one in (plain, result.model))
    for name, array in wanted.items():
        assert_gradients_close(got[name], array, array.astype(np.float64), np.float32, terms=np.abs(array).max())


def test_gradients_of_a_model_without_sizes_are_differentiated_again() -> None:
    """The names of unknown sizes that come with a result are free ones, and are understood when it is read again."""
    model = model_of("float[?,3] x, float[?,3] w", "h = Mul(x, w)  y = ReduceSum <keepdims = 0> (h)", output="float y")
    once = differentiate(model, ["x", "w"], of="y")
    assert [len(v.type.tensor_type.shape.dim) for v in once.graph.output] == [0, 2, 2]
    twice = differentiate(once, ["w"], seeds={"x.grad": "seed"})
    seed, feeds = numbers(2, 3, seed=3), {"x": numbers(2, 3), "w": numbers(1, 3, seed=1)}
    found = run(twice, {**feeds, "seed": seed}, by_onnx=False)["w.grad_2"]
    assert_gradients_close(found, seed.sum(0, keepdims=True), seed.astype(np.float64).sum(0, keepdims=True), np.float32)


def test_what_a_taken_branch_computes_keeps_its_name() -> None:
    model = model_of(
        "float[N,1,4] x",
        """s = Shape(x)  d = Gather(s, one)  c = Equal(d, one)
        v = If (c) <then_branch = t () => (float[A, B] p) { q = Exp(x)  p = Squeeze(q, axis) },
                    else_branch = e () => (float[A, B, C] r) { q = Identity(x)  r = Exp(q) }>
        y = ReduceSum <keepdims = 0> (v)""",
        output="float y",
        constants="int64[1] axis = {1}, int64 one = {1}",
    )
    result = differentiate(model, ["x"])
    assert {"q", "v"} <= {name for node in result.graph.node for name in node.output}
    # onnxruntime refuses names that two nodes have; the nodes of the branch have none of their own.
    names = [node.name for node in result.graph.node if node.name]
    assert len(set(names)) == len(names)
    assert "If" not in {node.op_type for node in result.graph.node}
