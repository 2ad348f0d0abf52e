"""What passes share while they work on a model, and that nothing of it outlives the work."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from graphs import parsed

from gradfuse.passes import FuseMseLossBackwardPass, FuseScaledMaskedSoftmaxBackwardPass, default_pipeline
from gradfuse.passes.matching import Context, ContextPass

# The values between inputs and outputs have neither types nor shapes.
BACKWARD = """m (float[4,5] z, float[4,5] g) => (float[4,5] r) {
  y = Softmax<axis=1>(z)
  t = Mul(g, y)
  axis = Constant<value_ints=[1]>()
  s = ReduceSum(t, axis)
  u = Mul(y, s)
  r = Sub(t, u)
}"""


def backward() -> ir.Model:
    return ir.from_proto(parsed(BACKWARD))


def fused_nodes(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain == "aclnn"]


def types(model: ir.Model) -> list[object]:
    return [(value.name, value.dtype, value.shape) for node in model.graph for value in node.outputs]


def test_a_pipeline_reports_its_last_call() -> None:
    pipeline = default_pipeline("all")
    model = backward()
    assert pipeline(model).modified
    assert [f.op for f in pipeline.report.fusions] == fused_nodes(model) == ["ScaledMaskedSoftmaxBackward"]
    assert pipeline.report.before["Mul"] == 2 and "Mul" not in pipeline.report.after
    assert not pipeline(model).modified
    assert not pipeline.report.fusions and pipeline.report.before == pipeline.report.after


def test_a_pass_sees_what_has_changed_since_its_last_call() -> None:
    model = backward()
    (last,) = (node for node in model.graph if node.op_type == "Sub")
    operands = list(last.inputs)
    last.replace_input_with(1, operands[0])
    for step in (FuseScaledMaskedSoftmaxBackwardPass("all"), default_pipeline("all")):
        assert not step(model).modified
    last.replace_input_with(1, operands[1])
    assert step(model).modified
    assert fused_nodes(model) == ["ScaledMaskedSoftmaxBackward"]


def test_single_passes_work_in_any_pipeline() -> None:
    model = backward()
    steps = [FuseMseLossBackwardPass("all"), FuseScaledMaskedSoftmaxBackwardPass("all")]
    assert ir.passes.PassManager(steps)(model).modified
    assert [f.op for step in steps for f in step.fusions] == fused_nodes(model) == ["ScaledMaskedSoftmaxBackward"]


class Failing(ContextPass):
    def run(self, context: Context) -> bool:
        values = [value for site in context.sites() for node in site.graph for value in node.outputs]
        assert values and all(value.dtype is not None for value in values)
        raise ArithmeticError


def test_inferred_types_are_dropped_when_a_pass_fails() -> None:
    model = backward()
    before = types(model)
    with pytest.raises(ir.passes.PassError):
        ir.passes.PassManager([Failing()])(model)
    assert types(model) == before
