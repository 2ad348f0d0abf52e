"""Models that onnxruntime loads though onnx's checker or their declarations do not fit: they compute the same here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import gradfuse
from gradfuse import ModelError, TrainingSession, TrainingStep, build_training_step, optimizers

X = np.array([[1, 2, 3], [-1, 0.5, 2]], np.float32)
TARGET = np.zeros((2, 2), np.float32)

PLAIN = """<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[N, 3] x, bool c) => (float[N, 2] y)
<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}> {
    a = MatMul(x, w)
    d = own.Twice(a)
    y = If(c)<
        then_branch = t () => (float[N, 2] p) { q = Add(d, b) p = Tanh(q) },
        else_branch = e () => (float[N, 2] r) { r = Identity(d) }>
}
<domain: "own", opset_import: ["": 17]> Twice (v) => (u) { s = Add(v, v) u = Sigmoid(s) }"""


def reversed_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes of all its graphs and functions from the last to the first."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graphs: list[Any] = [copy.graph, *copy.functions]
    while graphs:
        graph = graphs.pop()
        nodes = list(graph.node)[::-1]
        del graph.node[:]
        graph.node.extend(nodes)
        graphs += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return copy


def by_onnxruntime(model: onnx.ModelProto, **more: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X, **more})[0]


def given(model: onnx.ModelProto, kind: str, folder: Path) -> Any:
    if kind == "proto":
        return model
    if kind == "ir":
        return ir.from_proto(model)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("kind", ["proto", "path", "ir"])
def test_nodes_may_be_in_any_order(kind: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(PLAIN)
    turned = reversed_nodes(model)
    before = turned.SerializeToString()
    fed = {"x": X, "c": np.array(True)}
    steps = [build_training_step(one, "mse") for one in (model, given(turned, kind, tmp_path))]
    sessions = [TrainingSession(step) for step in steps]
    assert sessions[0].step(fed, TARGET) == sessions[1].step(fed, TARGET)
    for name, gradient in sessions[0].gradients.items():
        assert (sessions[1].gradients[name] == gradient).all()
    wanted = by_onnxruntime(model, c=np.array(True))
    assert np.abs(np.asarray(sessions[1].evaluate(fed)) - wanted).max() <= 1e-6
    assert turned.SerializeToString() == before
    onnx.checker.check_model(gradfuse.differentiate(turned, ["x"], seeds={"y": "v"}))
    onnx.checker.check_model(gradfuse.fuse(turned).model)


def test_a_cycle_is_no_order() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) '
        "{ a = Add(b, x) b = Add(a, x) y = Add(a, b) }"
    )
    with pytest.raises(ModelError, match="topologically sorted"):
        build_training_step(model, "mse")
    with pytest.raises(ModelError, match="no node ahead of it"):
        build_training_step(ir.from_proto(model), "mse")


LINEAR = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 3] x) => (float[N, 2] y)
<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}> { a = MatMul(x, w) y = Add(a, b) }"""


def declared(change: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(LINEAR)
    output = model.graph.output[0].type.tensor_type
    match change:
        case "sizes of -1":
            for value in (model.graph.input[0].type.tensor_type, output):
                value.shape.dim[0].dim_value = -1
        case "a size of the output":
            output.shape.dim[1].dim_value = 5
        case "one batch of the output":
            output.shape.dim[0].dim_value = 1
        case "one batch inside":
            model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [1, 2]))
        case "a rank":
            model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [1, 1, 2]))
        case _:
            output.ClearField("shape")
    return model


@pytest.mark.parametrize(
    "change",
    ["sizes of -1", "a size of the output", "one batch of the output", "one batch inside", "a rank", "no shape at all"],
)
@pytest.mark.parametrize("kind", ["proto", "path", "ir"])
def test_declarations_that_do_not_fit_are_left(change: str, kind: str, tmp_path: Path) -> None:
    model = declared(change)
    wanted = by_onnxruntime(model)
    session = TrainingSession(build_training_step(given(model, kind, tmp_path), "mse"))
    assert abs(session.step(X, TARGET) - np.square(wanted).mean()) <= 1e-4
    assert np.abs(np.asarray(session.evaluate(X)) - wanted).max() <= 1e-5


def test_initializers_that_are_inputs_too_are_parameters(tmp_path: Path) -> None:
    """As IR version 3 asks for; the sizes of a Reshape among them are known."""
    model = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["": 9]> g (float[N, 3] x, float[3, 2] w, int64[2] s) => (float[N, 2] y) '
        "<float[3, 2] w = {1, 2, 3, 4, 5, 6}, int64[2] s = {-1, 2}> { h = MatMul(x, w) y = Reshape(h, s) }"
    )
    step = build_training_step(model, "mse", optimizer=optimizers.SGD(lr=0.01))
    assert step.evaluation_model is not None
    for one in (step.model, step.evaluation_model):
        onnx.checker.check_model(one)
    assert step.input_names == ("x",) and step.parameters.keys() == {"w"}
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(TrainingStep.load(tmp_path / "step.onnx"))
    assert abs(session.step(X, TARGET) - np.square(X @ np.arange(1, 7, dtype=np.float32).reshape(3, 2)).mean()) <= 1e-4
    session.evaluate(X)
    onnx.checker.check_model(gradfuse.differentiate(model, ["w"], seeds={"y": "v"}))


@pytest.mark.parametrize("op_type", ["SimplifiedLayerNormalization", "LayerNormalization"])
def test_normalisations_of_later_opsets_are_taken_in_older_models(op_type: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]> g (float[N, 3] x) => (float[N, 2] y) '
        "<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] s = {1, 2}> "
        f"{{ a = MatMul(x, w) y = {op_type}<axis = -1, epsilon = 0.00001>(a, s) }}"
    )
    wanted = by_onnxruntime(model)
    step = build_training_step(model, "mse")
    assert step.parameters.keys() == {"w", "s"}
    session = TrainingSession(step)
    assert abs(session.step(X, TARGET) - np.square(wanted).mean()) <= 1e-5
