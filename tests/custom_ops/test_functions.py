"""Function bodies that a model carries."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from backends import with_bodies
from onnx.reference import ReferenceEvaluator

import gradfuse
from gradfuse.custom_ops import DOMAIN, OPS
from gradfuse.custom_ops.functions import attach, strip
from gradfuse.errors import ArgumentError, ModelError

HEAD = '<ir_version: 8, opset_import: ["": 17, "aclnn": 1, "local": 1]>'
SUM = 'aclnn.CrossEntropyLossGrad<reduction="sum">(g, x, t)'
MEAN = 'aclnn.CrossEntropyLossGrad<reduction="mean">(g, x, t)'
INPUTS = "(float g, float[N, C] x, int64[N] t, bool c)"
LOG_PROB = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], dtype=np.float32))
FEEDS: dict[str, Any] = {
    "g": np.array(1.5, dtype=np.float32),
    "x": LOG_PROB,
    "t": np.array([0, 1]),
    "c": np.array(True),
}
EXACT = 1.5 * (np.exp(LOG_PROB) - np.eye(3, dtype=np.float32)[:2])


def parsed(nodes: str, functions: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} main {INPUTS} => (float[N, C] y) {{ {nodes} }} {functions}")


def outputs(model: onnx.ModelProto) -> list[Any]:
    """What onnxruntime and onnx.reference give for a model."""
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    evaluator: Any = ReferenceEvaluator(model)
    return [session.run(None, FEEDS)[0], evaluator.run(None, FEEDS)[0]]


def identifiers(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(f.name, f.overload) for f in model.functions if f.domain == DOMAIN]


def test_one_body_serves_every_node_of_a_variant_and_needs_no_overload() -> None:
    model = with_bodies(parsed(f"a = {SUM} b = {SUM} y = Add(a, b)"))
    assert identifiers(model) == [("CrossEntropyLossGrad", "")]
    assert model.ir_version == 8
    for out in outputs(model):
        np.testing.assert_allclose(out, 2 * EXACT, rtol=1e-6)


def test_the_rarer_variant_gets_an_overload() -> None:
    model = with_bodies(parsed(f"a = {SUM} b = {MEAN} c1 = {MEAN} d = Add(b, c1) y = Add(a, d)"))
    assert identifiers(model) == [
        ("CrossEntropyLossGrad", ""),
        ("CrossEntropyLossGrad", "sum_of_grad_loss_log_prob_target"),
        ("CrossEntropyLossGrad", "none"),
    ]
    assert [n.overload for n in model.graph.node] == ["sum_of_grad_loss_log_prob_target", "", "", "", ""]
    assert model.ir_version == 10
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, FEEDS)[0], 2 * EXACT, rtol=1e-6)


def test_a_runtime_that_ignores_overloads_refuses_two_variants() -> None:
    """onnx.reference is one; it gave the last body to the nodes of all."""
    model = with_bodies(parsed(f"a = {SUM} b = {MEAN} y = Add(a, b)"))
    with pytest.raises(Exception, match="FunctionOverloadsNeedOnnxruntime127OrGradfusesLibrary"):
        ReferenceEvaluator(model).run(None, FEEDS)
    expanded = gradfuse.expand(model)
    assert not expanded.functions
    for out in outputs(expanded):
        np.testing.assert_allclose(out, 1.5 * EXACT, rtol=1e-6)


def test_nodes_in_subgraphs_and_functions() -> None:
    branches = f"then_branch = yes () => (p) {{ p = {SUM} }}, else_branch = no () => (q) {{ q = Neg(x) }}"
    function = f'<domain: "local", opset_import: ["": 17]> Twice (g, x, t) => (z) {{ s = {SUM} z = Add(s, s) }}'
    model = with_bodies(parsed(f"a = If(c) <{branches}> b = local.Twice(g, x, t) y = Add(a, b)", function))
    (local,) = (f for f in model.functions if f.domain == "local")
    assert {o.domain: o.version for o in local.opset_import}[DOMAIN] == 1
    for out in outputs(model):
        np.testing.assert_allclose(out, 3 * EXACT, rtol=1e-6)


def test_the_body_has_the_opset_of_the_model() -> None:
    model = parsed(f"y = {SUM}")
    model.opset_import[0].version = 21
    (function,) = with_bodies(model).functions
    assert {o.domain: o.version for o in function.opset_import} == {"": 21}


def test_attaching_again_changes_nothing_and_stripping_takes_the_bodies_away() -> None:
    plain = ir.from_proto(parsed(f"a = {SUM} b = {MEAN} y = Add(a, b)"))
    attach(plain)
    once = ir.to_proto(plain).SerializeToString(deterministic=True)
    attach(plain)
    assert ir.to_proto(plain).SerializeToString(deterministic=True) == once
    strip(plain)
    assert not plain.functions and not any(node.overload for node in plain.graph)


def test_defaults_are_written_out_and_absent_inputs_at_the_end_dropped() -> None:
    model = with_bodies(parsed('y = aclnn.CrossEntropyLossGrad<reduction="sum">(g, x, t, "", "")'))
    (node,) = model.graph.node
    assert list(node.input) == ["g", "x", "t"]
    assert {a.name for a in node.attribute} == {a.name for a in OPS["CrossEntropyLossGrad"].attributes}
    for out in outputs(model):
        np.testing.assert_allclose(out, EXACT, rtol=1e-6)


def test_a_model_without_our_operators_is_left_alone() -> None:
    text = '<ir_version: 8, opset_import: ["": 9]> main (float[2] a) => (float[2] b) { b = Exp(a) }'
    model = ir.to_proto(ir.from_proto(onnx.parser.parse_model(text)))
    assert with_bodies(model).SerializeToString() == model.SerializeToString()


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="reduction is 'avg'; expected 'mean'"):
        with_bodies(parsed('y = aclnn.CrossEntropyLossGrad<reduction="avg">(g, x, t)'))
    with pytest.raises(ArgumentError, match="lse_for_zloss is given; expected absent"):
        with_bodies(parsed('y = aclnn.CrossEntropyLossGrad(g, x, t, "", "", x)'))
    with pytest.raises(ArgumentError, match="target is absent; expected a tensor"):
        with_bodies(parsed("y = aclnn.CrossEntropyLossGrad(g, x)"))
    with pytest.raises(ArgumentError, match="axis is an unknown attribute; expected one of reduction"):
        with_bodies(parsed("y = aclnn.CrossEntropyLossGrad<axis=1>(g, x, t)"))
    with pytest.raises(ArgumentError, match="reduction is of type int; expected type str"):
        with_bodies(parsed("y = aclnn.CrossEntropyLossGrad<reduction=1>(g, x, t)"))
    function = (
        '<domain: "local", opset_import: ["": 17, "aclnn": 1]> F <r> (g, x, t) => (z) '
        "{ z = aclnn.CrossEntropyLossGrad<reduction: string = @r>(g, x, t) }"
    )
    with pytest.raises(ArgumentError, match="reduction is a reference to attribute 'r' of a function"):
        with_bodies(parsed('y = local.F<r="sum">(g, x, t)', function))


def test_opsets_that_are_not_supported() -> None:
    old = parsed(f"y = {SUM}")
    old.opset_import[0].version = 14
    with pytest.raises(ModelError, match="default opset is 14; expected 15 or newer"):
        with_bodies(old)
    new = parsed(f"y = {SUM}")
    new.opset_import[1].version = 2
    with pytest.raises(ModelError, match="opset of domain aclnn is 2; expected 1"):
        with_bodies(new)


def test_opset_that_onnxruntime_writes_for_registered_operators() -> None:
    model = parsed(f"y = {SUM}")
    model.opset_import[1].version = 1000
    assert with_bodies(model).opset_import[1].version == 1
