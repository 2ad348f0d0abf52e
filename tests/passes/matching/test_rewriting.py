"""What the rules must refuse, with the reason that they give, and what a rewrite must leave alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import parsed
from producers import run

from gradfuse import fuse, passes
from gradfuse.custom_ops import OPS
from gradfuse.errors import ArgumentError
from gradfuse.passes import FuseScaledMaskedSoftmaxBackwardPass, default_pipeline
from gradfuse.passes.report import Report

HEADER = '<ir_version: 10, opset_import: ["": 20]>\n'

SOFTMAX = """
  y = Softmax<axis=1>(z)
  t = Mul(g, y)
  axis = Constant<value_ints=[1]>()
  s = ReduceSum(t, axis)
  u = Mul(y, s)
  r = Sub(t, u)
"""


def fused(report: Report) -> list[str]:
    return [f.op for f in report.fusions]


def reasons(report: Report, operator: str) -> str:
    return "\n".join(m.reason for m in report.near_misses if m.rule == operator)


REFUSED = {
    "probability targets": (
        "CrossEntropyLossGrad",
        "",
        """m (float[4,5] z, float[4,5] q) => (float[4,5] r) {
          l = LogSoftmax<axis=1>(z)  p = Exp(l)  d = Sub(p, q)
          r = Mul(d, d)
        }""",
    ),
    "a one-hot beside another term": (
        "CrossEntropyLossGrad",
        "more than a one-hot target",
        """m (float[4,5] z, int64[4,1] t, float[4,5] q) => (float[4,5] r) {
          l = LogSoftmax<axis=1>(z)  p = Exp(l)
          classes = Constant<value_ints=[0,1,2,3,4]>()
          e = Equal(t, classes)  h = Cast<to=1>(e)  m = Add(h, q)
          axis = Constant<value_ints=[1]>()
          s = ReduceSum(m, axis)  ps = Mul(p, s)  d = Sub(ps, m)
          r = Tanh(d)
        }""",
    ),
    "a target that is computed": (
        "CrossEntropyLossGrad",
        "",
        """m (float[4,5] z, float[4,1] t) => (float[4,5] r) {
          p = Softmax<axis=1>(z)
          classes = Constant<value_floats=[0.,1.,2.,3.,4.]>()
          e = Equal(t, classes)  h = Cast<to=1>(e)
          d = Sub(p, h)
          r = Tanh(d)
        }""",
    ),
    "a softmax along another axis": (
        "ScaledMaskedSoftmaxBackward",
        "",
        """m (float[4,5] z, float[4,5] g) => (float[4,5] r) {
          y = Softmax<axis=0>(z)  t = Mul(g, y)
          axis = Constant<value_ints=[1]>()
          s = ReduceSum(t, axis)  u = Mul(y, s)  d = Sub(t, u)
          r = Tanh(d)
        }""",
    ),
    "a factor that is no mask": (
        "ScaledMaskedSoftmaxBackward",
        "",
        """m (float[4,5] z, float[4,5] g, float[4,5] w) => (float[4,5] r) {
          y = Softmax<axis=1>(z)  t = Mul(g, y)
          axis = Constant<value_ints=[1]>()
          s = ReduceSum(t, axis)  u = Mul(y, s)  uw = Mul(u, w)  d = Sub(t, uw)
          r = Tanh(d)
        }""",
    ),
    "a layer norm's product with a difference": (
        "MseLossBackward",
        "",
        """m (float[4,5] x, float[4,1] w) => (float[4,5] r) {
          axis = Constant<value_ints=[1]>()
          mean = ReduceMean(x, axis)  d = Sub(x, mean)  dd = Mul(d, d)
          v = ReduceMean(dd, axis)  root = Sqrt(v)  inverse = Reciprocal(root)
          p = Mul(d, inverse)
          r = Tanh(p)
        }""",
    ),
    "the making of an additive mask": (
        "MseLossBackward",
        "",
        """m (float[4,5] keep, float[4,5] scores) => (float[4,5] r) {
          one = Constant<value_float=1.0>()  low = Constant<value_float=-1e30>()
          d = Sub(one, keep)  mask = Mul(d, low)  s = Add(scores, mask)
          r = Softmax<axis=1>(s)
        }""",
    ),
    "rows by an arbitrary index": (
        "GroupedBiasAddGrad",
        "nothing proves sorted",
        """m (float[6,4] dy, int64[6,1] index) => (float[3,4] r) {
          zero = Constant<value_float=0.0>()  shape = Constant<value_ints=[3,4]>()
          zeros = Expand(zero, shape)
          s = ScatterND<reduction="add">(zeros, index, dy)
          r = Tanh(s)
        }""",
    ),
    "ends that count the rows strictly": (
        "GroupedBiasAddGrad",
        "",
        """m (float[6,4] dy, int64[1,3] ends) => (float[3,4] r) {
          zero = Constant<value_float=0.0>()  shape = Constant<value_ints=[3,4]>()
          zeros = Expand(zero, shape)
          axis = Constant<value_ints=[1]>()
          rows = Constant<value_ints=[0,1,2,3,4,5]>()
          column = Unsqueeze(rows, axis)
          past = Greater(column, ends)  number = Cast<to=7>(past)
          index = ReduceSum<keepdims=1>(number, axis)
          s = ScatterND<reduction="add">(zeros, index, dy)
          r = Tanh(s)
        }""",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    operator, reason, text = REFUSED[case]
    report = fuse(parsed(text), policy="all").report
    assert operator not in fused(report)
    assert reason in reasons(report, operator)


def test_profitable_leaves_alone_what_moves_more_bytes() -> None:
    model = parsed("""m (float[64,32] x, float[64,32] t) => (float loss, float[64,32] grad) {
      d = Sub(x, t)  q = Mul(d, d)  loss = ReduceSum<keepdims=0>(q)
      two = Constant<value_float=2.0>()  grad = Mul(d, two)
    }""")
    report = fuse(model).report
    assert not report.fusions
    assert "not profitable: would move 8192 bytes more" in reasons(report, "MseLossBackward")
    assert fused(fuse(model, policy="all").report) == ["MseLossBackward"]


def test_intermediate_values_with_other_readers_stay() -> None:
    model = parsed(f"m (float[4,5] z, float[4,5] g) => (float[4,1] s, float[4,5] r) {{ {SOFTMAX} }}")
    result = fuse(model, policy="all")
    assert fused(result.report) == ["ScaledMaskedSoftmaxBackward"]
    assert {"ReduceSum", "Softmax"} <= {n.op_type for n in result.model.graph.node}
    assert [o.name for o in result.model.graph.output] == ["s", "r"]


def test_names_of_the_rule_and_of_the_replaced_nodes_are_in_the_metadata() -> None:
    model = parsed(f"m (float[4,5] z, float[4,5] g) => (float[4,5] r) {{ {SOFTMAX} }}")
    for k, node in enumerate(model.graph.node):
        node.name = f"node{k}"
    result = fuse(model, policy="all")
    (node,) = (n for n in result.model.graph.node if n.domain == "aclnn")
    metadata = {p.key: p.value for p in node.metadata_props}
    assert metadata["gradfuse.rule"] == "softmax-backward"
    assert set(metadata["gradfuse.replaced"].split(", ")) == {"node1", "node3", "node4", "node5"}
    assert "gradfuse.version" in {p.key for p in result.model.metadata_props}


def test_branches_of_if_are_fused_too() -> None:
    model = parsed(f"""m (float[4,5] z, float[4,5] g, bool c) => (float[4,5] o) {{
      y = Softmax<axis=1>(z)
      o = If(c) <then_branch = yes () => (float[4,5] r) {{ {SOFTMAX.partition(")")[2]} }},
                 else_branch = no () => (float[4,5] n) {{ n = Neg(g) }}>
    }}""")
    result = fuse(model, policy="all")
    assert fused(result.report) == ["ScaledMaskedSoftmaxBackward"]
    onnx.checker.check_model(result.model, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(4, 5)).astype(np.float32) for name in ("z", "g")}
    for c in (True, False):
        wanted, got = (run(m, feeds | {"c": np.asarray(c)})["o"] for m in (model, result.model))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=4 * np.finfo(np.float32).eps * np.abs(wanted).max())


def test_functions_whose_values_have_types_are_fused_too() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "local": 1]>
    m (float[4,5] z, int64[4,1] t) => (float[4,5] o) { o = local.Gradient(z, t) }
    <domain: "local", opset_import: ["": 20]>
    Gradient (z, t) => (r) {
      x = Relu(z)  k = Abs(t)  l = LogSoftmax<axis=1>(x)  p = Exp(l)
      classes = Constant<value_ints=[0,1,2,3,4]>()
      e = Equal(k, classes)  h = Cast<to=1>(e)  d = Sub(p, h)
      r = Tanh(d)
    }""")
    types = {"x": 1, "l": 1, "p": 1, "h": 1, "d": 1, "r": 1, "e": 9}
    shapes = {name: onnx.helper.make_tensor_value_info(name, type_, [4, 5]) for name, type_ in types.items()}
    shapes["k"] = onnx.helper.make_tensor_value_info("k", onnx.TensorProto.INT64, [4, 1])
    model.functions[0].value_info.extend(shapes.values())
    result = fuse(model, policy="all")
    assert fused(result.report) == ["CrossEntropyLossGrad"]
    onnx.checker.check_model(result.model, full_check=True)
    rng = np.random.default_rng(0)
    z, t = rng.normal(size=(4, 5)).astype(np.float32), np.asarray(rng.integers(0, 5, (4, 1)))
    wanted, got = (run(m, {"z": z, "t": t})["o"] for m in (model, result.model))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4 * float(np.finfo(np.float32).eps))


def test_a_pass_alone_is_an_onnx_ir_pass() -> None:
    model = ir.from_proto(parsed(f"m (float[4,5] z, float[4,5] g) => (float[4,5] r) {{ {SOFTMAX} }}"))
    step = FuseScaledMaskedSoftmaxBackwardPass(policy="all")
    assert step(model).modified
    assert [n.op_type for n in model.graph if n.domain == "aclnn"] == ["ScaledMaskedSoftmaxBackward"]
    assert not step(model).modified


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": ["Softmax"]}, "only is 'Softmax'; expected one of .*CrossEntropyLossGrad"),
        ({"skip": ["CtcLossBackward"]}, "skip is 'CtcLossBackward'; expected one of"),
        ({"policy": "some"}, "policy is 'some'; expected 'profitable' or 'all'"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        default_pipeline(**arguments)  # type: ignore[arg-type]


def test_a_model_on_which_the_inference_of_onnx_aborts_is_left_alone(tmp_path: Path) -> None:
    # A convolution's kernel is larger than its input: onnx infers a negative size, and a Slice of it ends the process.
    model = onnx.parser.parse_model(
        HEADER
        + """m (float[1,1,2,2] x, float[1,1,5,5] w) => (float[a,b,c,d] r) {
          y = Conv(x, w)
          start = Constant<value_ints=[0]>()  end = Constant<value_ints=[1]>()  axis = Constant<value_ints=[2]>()
          z = Slice(y, start, end, axis)
          r = Relu(z)
        }"""
    )
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    done = subprocess.run([sys.executable, "-m", "gradfuse", "fuse", source, target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nothing to fuse" in done.stdout
    assert source.read_bytes() == target.read_bytes()


def test_every_pass_of_the_pipeline_is_exported() -> None:
    steps = default_pipeline(pointwise=True).passes
    exported = {name for name in passes.__all__ if name.startswith("Fuse")} - {"FusePass"}
    assert {name for step in steps if (name := type(step).__name__).startswith("Fuse")} == exported
    assert {step.operator for step in steps if isinstance(step, passes.FusePass)} <= OPS.keys()


def test_only_and_skip() -> None:
    model = parsed(f"m (float[4,5] z, float[4,5] g) => (float[4,5] r) {{ {SOFTMAX} }}")
    assert not fuse(model, policy="all", only=["MseLossBackward"]).report.fusions
    assert not fuse(model, policy="all", skip=["ScaledMaskedSoftmaxBackward"]).report.fusions
    assert fuse(model, policy="all", only=["ScaledMaskedSoftmaxBackward"], check=2).report.fusions
