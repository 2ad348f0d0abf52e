"""MseLossBackward is found where a loss is, not in every product with a difference; reports name what can be used."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

from gradfuse import check, fuse


def gradient(target: str, difference: str = "Sub(y, target)") -> onnx.ModelProto:
    """A gradient without its loss: a number times a difference from what a network gives."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        m (float[64,32] x, float[32,16] w, float[64,16] t, float16[64,16] half, float[64,16,1] long, float[16] row,
           float[64,3,16] three, float[1] n) => (float[64,16] r) {{
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
