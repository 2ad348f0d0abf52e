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
from gradfuse import ArgumentError, ModelError, TrainingSession, TrainingStep, build_training_step, optimizers

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


@pytest.mark.parametrize("name", ["None", "?", "-1"])
@pytest.mark.parametrize("kind", ["proto", "path", "ir"])
def test_sizes_that_converters_call_unknown_may_differ(name: str, kind: str, tmp_path: Path) -> None:
    """Several dimensions have one such name, which onnxruntime does not take for one size."""
    model = onnx.parser.parse_model(LINEAR.replace("[N, 3]", "[N, M, 3]").replace("[N, 2]", "[N, M, 2]"))
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim[:2]:
            dim.dim_param = name
    session = TrainingSession(build_training_step(given(model, kind, tmp_path), "mse"))
    x = np.stack([X, X + 1, X - 1])
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert abs(session.step(x, np.zeros_like(wanted)) - np.square(wanted).mean()) <= 1e-4


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


def sparse(values: list[float], places: Any, shape: list[int], name: str = "w") -> onnx.SparseTensorProto:
    return onnx.helper.make_sparse_tensor(
        onnx.numpy_helper.from_array(np.array(values, np.float32), name),
        onnx.numpy_helper.from_array(np.array(places, np.int64)),
        shape,
    )


def spelled(change: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(LINEAR)
    graph = model.graph
    match change:
        case "no name of the graph":
            graph.name = ""
        case "the default domain's other name":
            for node in graph.node:
                node.domain = "ai.onnx"
        case "keys twice":
            model.metadata_props.add(key="a", value="1")
            model.metadata_props.add(key="a", value="2")
        case "initializers that are no inputs, of IR version 3":
            model.ir_version, model.opset_import[0].version = 3, 8
        case "an output without a type":
            graph.output.add(name="a")
        case "the output without a type":
            graph.output[0].ClearField("type")
        case "a sparse initializer":
            del graph.initializer[0]
            graph.sparse_initializer.append(sparse([1, -2, 3], [0, 3, 5], [3, 2]))
        case "a sparse initializer by coordinates":
            del graph.initializer[0]
            graph.sparse_initializer.append(sparse([1, -2, 3], [[0, 0], [1, 1], [2, 1]], [3, 2]))
        case "a sparse initializer without elements":
            del graph.initializer[0]
            graph.sparse_initializer.append(sparse([], np.zeros(0), [3, 2]))
        case "a sparse constant":
            del graph.initializer[0]
            value = onnx.helper.make_node("Constant", [], ["w"], sparse_value=sparse([1, -2, 3], [0, 3, 5], [3, 2], ""))
            graph.node.insert(0, value)
    return model


SPELLINGS = [
    *("no name of the graph", "the default domain's other name", "keys twice", "an output without a type"),
    *("initializers that are no inputs, of IR version 3", "the output without a type", "a sparse initializer"),
    *("a sparse initializer by coordinates", "a sparse initializer without elements", "a sparse constant"),
]


@pytest.mark.parametrize("change", SPELLINGS)
@pytest.mark.parametrize("kind", ["proto", "path"])
def test_what_onnxruntime_loads_is_taken(change: str, kind: str, tmp_path: Path) -> None:
    model = spelled(change)
    before, wanted = model.SerializeToString(), by_onnxruntime(model)
    onnx.checker.check_model(gradfuse.fuse(given(model, kind, tmp_path)).model)
    # A weight of zeros that is filled with one number looks like no parameter, but in its place it is one.
    session = TrainingSession(build_training_step(given(model, kind, tmp_path), "mse"))
    assert abs(session.step(X, TARGET) - np.square(wanted).mean()) <= 1e-5
    np.testing.assert_allclose(session.gradients["w"], X.T @ (wanted / 2), rtol=0, atol=1e-5)
    assert model.SerializeToString() == before


@pytest.mark.parametrize("places", [[0, 3, 6], [-1, 0, 1], [[0, 0], [1, 1], [3, 0]], [0, 1]])
def test_sparse_tensors_with_elements_elsewhere_are_refused(places: Any) -> None:
    model = onnx.parser.parse_model(LINEAR)
    del model.graph.initializer[0]
    model.graph.sparse_initializer.append(sparse([1, 2, 3], places, [3, 2]))
    with pytest.raises(ModelError, match=r"^ModelProto: initializer 'w' is sparse, with elements elsewhere than in"):
        gradfuse.fuse(model)


def test_sparse_tensors_too_large_to_be_dense_are_refused() -> None:
    model = onnx.parser.parse_model(LINEAR)
    model.graph.sparse_initializer.append(sparse([1], [0], [2**20, 2**20], "huge"))
    with pytest.raises(ModelError, match=r"'huge' is sparse, of shape .*; expected one that a dense tensor may have"):
        gradfuse.fuse(model)


def test_inputs_that_are_no_tensors_or_have_no_shape_are_named() -> None:
    model = onnx.parser.parse_model(LINEAR)
    model.graph.input.append(onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, None))
    with pytest.raises(ArgumentError, match=r"^build_training_step: input 's' is a sequence; expected tensors"):
        build_training_step(model, "mse")
    model = onnx.parser.parse_model(LINEAR)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match=r"^ModelProto: input 'x' has no shape; expected one"):
        build_training_step(model, "mse")
