"""MseLossBackward is found where a loss is, not in every product with a difference; reports name what can be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from gradient_graphs import in_standard_operators
from producers import run

from gradfuse import check, explain, fuse
from gradfuse.testing import assert_gradients_close


def gradient(target: str, difference: str = "Sub(y, target)") -> onnx.ModelProto:
    """A gradient without its loss: a number times a difference from what a network gives."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        m (float[64,32] x, float[32,16] w, float[64,16] t, float16[64,16] half, float[64,16,1] long, float[16] row,
           float[64,3,16] three, float[1] n, float[32,16] part) => (float[64,16] r) {{
          y = MatMul(x, w)  second = Constant<value_int=1>()  last = Constant<value_ints=[-1]>()  {target}
          two = Constant<value_float=0.5>()  d = {difference}  r = Mul(d, two)
        }}"""
    )


@pytest.mark.parametrize(
    "target",
    [
        "target = Identity(t)",
        "target = Cast<to=1>(half)",
        "target = Squeeze(long, last)",
        "target = Gather<axis=1>(three, second)",
        "target = Div(t, n)",
        "target = Neg(t)",
        "shape = Shape(y)  target = Expand(t, shape)",
        "target = Concat<axis=0>(part, part)",
        "shifted = Sub(t, n)  target = Div(shifted, n)",
        "turned = Transpose(t)  target = Transpose(turned)",
    ],
)
def test_a_difference_from_what_the_caller_gives_is_a_loss(target: str) -> None:
    for difference in ("Sub(y, target)", "Sub(target, y)"):
        model = gradient(target, difference)
        result = fuse(model, policy="all")
        assert [fusion.op for fusion in result.report.fusions] == ["MseLossBackward"], (target, difference)
        assert check(model, result.model).ok


@pytest.mark.parametrize(
    "target",
    [
        "target = Tanh(t)",
        "target = ReduceMean<keepdims=1>(y, last)",
        "shape = Shape(y)  target = Expand(row, shape)",
        "target = Identity(row)",
        "target = Mul(t, y)",
        "target = Div(y, n)",
    ],
)
def test_other_differences_are_left_alone(target: str) -> None:
    report = fuse(gradient(target), policy="all").report
    assert not report.fusions and not report.near_misses


def test_a_difference_whose_square_is_given_out_is_a_loss_whatever_it_is_of() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        m (float[64,32] x, float[32,16] w) => (float[64,16] r, float loss) {
          y = MatMul(x, w)  target = Tanh(y)  two = Constant<value_float=2.0>()  d = Sub(y, target)
          r = Mul(d, two)  squares = Mul(d, d)  loss = ReduceSum<keepdims=0>(squares)
        }"""
    )
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["MseLossBackward"]
    assert check(model, result.model).ok


@pytest.mark.parametrize("target", ["target = Identity(row)", "shape = Shape(y)  target = Expand(row, shape)"])
def test_a_mean_of_squares_may_have_a_target_that_is_repeated(target: str) -> None:
    model = gradient(target)
    (factor,) = (node for node in model.graph.node if node.output[0] == "two")
    factor.attribute[0].f = 2 / (64 * 16)
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["MseLossBackward"]
    numbers = np.random.default_rng(0)
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input}
    feeds = {name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["half"] = feeds["half"].astype(np.float16)
    y = torch.from_numpy(feeds["x"]) @ torch.from_numpy(feeds["w"])
    native, exact = (_of_torch(y.to(dtype), torch.from_numpy(feeds["row"])) for dtype in (torch.float32, torch.float64))
    got = run(in_standard_operators(ir.from_proto(result.model)), feeds)
    assert_gradients_close(got["r"], native, exact, np.float32, terms=64)


def _of_torch(y: torch.Tensor, row: torch.Tensor) -> np.ndarray[Any, Any]:
    y = y.detach().requires_grad_()
    loss = torch.nn.functional.mse_loss(y, row.to(y.dtype).expand_as(y))
    (gradient,) = torch.autograd.grad(loss, y)
    return gradient.numpy()


def test_explain_says_why_a_difference_from_a_repeated_input_is_left_alone() -> None:
    regions = explain(gradient("target = Identity(row)")).regions
    assert any(region.op == "MseLossBackward" and "that is repeated" in region.reason for region in regions), regions


def test_squares_may_be_weighted() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        m (float[8,4] x, float[4,3] w, float[8,1] weight, float[8,3] t) => (float[8,3] r, float loss) {
          y = MatMul(x, w)  target = Tanh(t)  two = Constant<value_float=2.0>()  d = Sub(y, target)
          of_row = Mul(weight, d)  square = Mul(of_row, d)  loss = ReduceSum<keepdims=0>(square)  r = Mul(of_row, two)
        }"""
    )
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["MseLossBackward"]
    assert check(model, result.model).ok


def sums(count: int) -> onnx.ModelProto:
    """Sums over rows that no operator would do faster."""
    inputs = ", ".join(f"float[6,100,50] x{k}" for k in range(count))
    outputs = ", ".join(f"float[6,1,50] r{k}" for k in range(count))
    nodes = " ".join(f"[sum{k}] r{k} = ReduceSum(y{k}, axis)" for k in range(count))
    before = " ".join(f"y{k} = Neg(x{k})" for k in range(count))
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        m ({inputs}) => ({outputs}) {{ axis = Constant<value_ints=[1]>() {before} {nodes} }}"""
    )


def test_misses_that_only_cost_decides_take_one_line_an_operator() -> None:
    (one,) = [line for line in str(fuse(sums(1)).report).splitlines() if "left alone:" in line]
    assert one.startswith("  left alone: sum0 (GroupedBiasAddGrad): not profitable: ")
    report = fuse(sums(3)).report
    (line,) = [line for line in str(report).splitlines() if "left alone:" in line]
    assert line == "  left alone: 3 GroupedBiasAddGrad: not profitable, as predicted"
    assert [miss.node for miss in report.near_misses] == ["sum2", "sum1", "sum0"]


def test_operators_that_a_model_came_with_are_in_the_report() -> None:
    fused = fuse(gradient("target = Identity(t)"), policy="all")
    again = fuse(fused.model).report
    assert again.to_dict()["given"] == {"MseLossBackward": 1} and fused.report.to_dict()["given"] == {}
    assert "  operators that the model came with: MseLossBackward" in str(again).splitlines()


def test_a_loss_that_leaves_by_yield_op_is_a_loss_whatever_the_target_is() -> None:
    """As in the training graphs of ORTModule: the loss goes to PyTorch, and its gradient comes back."""
    text = """
        <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[6,4] x, float[4,4] w, float[6,4] t) => (float[4,4] dw) <float loss_grad> {
          y = MatMul(x, w)  smooth = Tanh(t)  shape = Shape(y)  target = Expand(smooth, shape)
          d = Sub(y, target)  square = Mul(d, d)  loss = ReduceMean<keepdims=0>(square)
          loss_grad = com.microsoft.YieldOp<full_shape_outputs = [0]>(loss)
          size = Size(square)  one = Size(loss_grad)  scale = Div(size, one)
          mean_grad = com.microsoft.Scale<scale_down = 1>(loss_grad, scale)
          each = Expand(mean_grad, shape)  first = Mul(each, d)  second = Mul(each, d)  dy = Sum(first, second)
          dw = Gemm<transA = 1>(x, dy)
        }
    """
    model = onnx.parser.parse_model(text)
    result = fuse(ir.from_proto(model), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["MseLossBackward"], result.report
    numbers = np.random.default_rng(0)
    shapes = {"x": (6, 4), "w": (4, 4), "t": (6, 4)}
    feeds = {name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    got = run(in_standard_operators(result.model), feeds)
    x, w, t = (feeds[name].astype(np.float64) for name in ("x", "w", "t"))
    wide = x.T @ (x @ w - np.tanh(t)) * (2 / 24)
    narrow = (feeds["x"].T @ (feeds["x"] @ feeds["w"] - np.tanh(feeds["t"])) * np.float32(2 / 24)).astype(np.float32)
    assert_gradients_close(got["dw"], narrow, wide, np.float32, terms=np.abs(wide).max() * 4)
