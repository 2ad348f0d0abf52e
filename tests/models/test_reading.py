"""`reading`: every kind of argument, and every kind of bad file."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_models
import torch
from onnx import helper

from gradfuse import ArgumentError, ModelError, fuse
from gradfuse.models import reading, validation
from gradfuse.models.tensors import every_tensor


def edited(change: Callable[[onnx.ModelProto], Any]) -> onnx.ModelProto:
    model = small_models.forward()
    change(model)
    return model


def set_opset(model: onnx.ModelProto, version: int) -> None:
    model.opset_import[0].version = version


def rename_input(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


def make_cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def rename_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "MatMull"


def break_two_nodes(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.helper.make_node("Relu", ["elsewhere"], ["u"]))
    model.graph.node.append(onnx.helper.make_node("Relu", ["u", "u"], ["v"]))
    rename_input(model)


BAD_MODELS = {
    "three faults": (
        break_two_nodes,
        r"'nowhere'.*\. Nor are valid: .*'elsewhere' is given by no node, .*input size 2",
    ),
    "opset too new": (lambda m: set_opset(m, 99), r"the default opset is 99; expected 15 to \d+$"),
    "opset too old": (
        lambda m: set_opset(m, 6),
        r"the default opset is 6; expected 15 to \d+, or 7 and up to be converted$",
    ),
    "no opset": (lambda m: m.opset_import.pop(), r"the default opset is not imported; expected 15 to"),
    "IR version too new": (lambda m: setattr(m, "ir_version", 999), r"the IR version is 999; expected at most \d+"),
    "input from nowhere": (rename_input, "not a valid ONNX model: .*nowhere"),
    "cycle": (make_cycle, "not a valid ONNX model"),
    "unknown operator": (rename_operator, "not a valid ONNX model: .*MatMull"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
@pytest.mark.parametrize("kind", ["path", "proto"])
def test_bad_model_is_refused_in_one_line(case: str, kind: str, tmp_path: Path) -> None:
    change, reason = BAD_MODELS[case]
    model = edited(change)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    with pytest.raises(ModelError, match=reason) as failure:
        reading.load(path if kind == "path" else model)
    assert "\n" not in str(failure.value)
    if kind == "path":
        assert str(failure.value).startswith(f"{path}: ")


BAD_BYTES = {
    "text": (b"hello world, this is no model\n", "is not an ONNX model"),
    "empty": (b"", "is not an ONNX model"),
    "zeros": (bytes(1000), "is not an ONNX model"),
    "half": (small_models.forward().SerializeToString()[:100], "is truncated or damaged"),
    "tail missing": (small_models.forward().SerializeToString()[:-1], "is truncated or damaged"),
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_file_that_is_no_model_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    content, reason = BAD_BYTES[case]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason) as failure:
        reading.load(path)
    assert "\n" not in str(failure.value)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.onnx: does not exist; expected an ONNX file"):
        reading.load(tmp_path / "nothing.onnx")
    with pytest.raises(ModelError, match="is a folder; expected an ONNX file"):
        reading.load(tmp_path)


def test_missing_and_short_external_data_are_refused(tmp_path: Path) -> None:
    path = small_models.save_with_external_data(small_models.forward(), tmp_path / "model.onnx")
    data = tmp_path / "weights.bin"
    os.truncate(data, 60)
    with pytest.raises(ModelError, match=r"weights\.bin has 60 bytes; expected \d+ for 'w'|for 'b'"):
        reading.load(path)
    data.unlink()
    with pytest.raises(ModelError, match=r"weights\.bin") as failure:
        reading.load(path)
    assert "\n" not in str(failure.value)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="model is int; expected a path"):
        reading.load(3)  # type: ignore[arg-type]


def test_every_kind_of_model_comes_back_as_it_is(tmp_path: Path) -> None:
    proto = small_models.forward()
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    program = torch.onnx.export(torch.nn.Linear(3, 4).eval(), (torch.zeros(2, 3),), dynamo=True, verbose=False)
    assert program is not None
    kinds = [
        (path, onnx.ModelProto),
        (str(path), onnx.ModelProto),
        (proto, onnx.ModelProto),
        (ir.from_proto(proto), ir.Model),
        (program, torch.onnx.ONNXProgram),
    ]
    for model, kind in kinds:
        loaded = reading.load(model)  # type: ignore[arg-type]
        restored = loaded.restore(loaded.ir)
        assert isinstance(restored, kind)
    assert small_models.same_graph(reading.load(path).restore(reading.load(path).ir), proto)


@pytest.mark.parametrize("kind", ["proto", "ir"])
def test_the_argument_is_never_changed(kind: str) -> None:
    proto = small_models.forward()
    model: Any = proto if kind == "proto" else ir.from_proto(proto)
    loaded = reading.load(model)
    for value in loaded.ir.graph.inputs:
        value.dtype = ir.DataType.DOUBLE
        value.name = "other"
    loaded.ir.graph.remove(loaded.ir.graph[-1], safe=False)
    loaded.ir.opset_imports[""] = 23
    after = model if kind == "proto" else ir.to_proto(model)
    assert after.SerializeToString(deterministic=True) == (
        proto if kind == "proto" else ir.to_proto(ir.from_proto(proto))
    ).SerializeToString(deterministic=True)
    assert proto.SerializeToString() == small_models.forward().SerializeToString()


def test_an_input_that_is_an_output_without_a_shape_has_its_own() -> None:
    model = small_models.forward()
    model.graph.output.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None))
    value = reading.load(model).ir.graph.inputs[0]
    assert value.shape == reading.load(small_models.forward()).ir.graph.inputs[0].shape and value.shape is not None


def test_the_long_name_of_the_default_domain_is_understood() -> None:
    model = edited(lambda m: setattr(m.opset_import[0], "domain", "ai.onnx"))
    assert reading.load(model).ir.opset_imports == {"": 20}


def test_operators_of_a_later_opset_are_let_through(tmp_path: Path) -> None:
    """onnxruntime's offline optimization leaves LayerNormalization, of opset 17, in models of opset 15."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15]>
        m (float[4,6] x, float[6] s, float[6] b) => (float[4,6] y) { y = LayerNormalization<axis=1>(x, s, b) }""")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert [n.op_type for n in fuse(path).model.graph.node] == ["LayerNormalization"]


def test_text_formats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.textproto"
    onnx.save(small_models.forward(), path)
    assert len(reading.load(path).ir.graph) == 3


def test_external_data_is_not_read_by_loading_and_embedded_by_restoring(tmp_path: Path) -> None:
    path = small_models.save_with_external_data(small_models.forward(), tmp_path / "model.onnx")
    loaded = reading.load(path)
    tensor = loaded.ir.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.raw is None
    assert small_models.same_graph(loaded.restore(loaded.ir), small_models.forward())


def test_tensors_of_files_are_embedded_one_at_a_time(tmp_path: Path) -> None:
    count, size = 16, 2**19
    weights = [np.random.default_rng(k).random(size, np.float32) for k in range(count)]
    nodes = [helper.make_node("Add", [f"x{k}", f"w{k}"], [f"x{k + 1}"]) for k in range(count)]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size]) for name in ("x0", f"x{count}")]
    tensors = [onnx.numpy_helper.from_array(array, f"w{k}") for k, array in enumerate(weights)]
    graph = helper.make_graph(nodes, "sums", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = small_models.save_with_external_data(model, tmp_path / "model.onnx")
    fuse(small_models.forward())  # imports modules, which are memory too
    tracemalloc.start()
    try:
        fused = fuse(path).model
        # The message itself is memory of protobuf, which is not counted.
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < count * weights[0].nbytes / 2
    for tensor, array in zip(fused.graph.initializer, weights, strict=True):
        assert np.array_equal(onnx.numpy_helper.to_array(tensor), array)


def external_tensor(entries: dict[str, str], dims: tuple[int, ...] = (4, 5)) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=dims)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def with_tensor(tensor: onnx.TensorProto, place: str) -> onnx.ModelProto:
    """A model that adds a tensor to its input: an initializer or constant, of the graph, a branch or a function."""
    constant, add = helper.make_node("Constant", [], ["w"], value=tensor), helper.make_node("Add", ["x", "w"], ["y"])
    x, y = (helper.make_tensor_value_info(name, 1, [4, 5]) for name in "xy")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    nodes, inputs, initializers, functions = [constant, add], [x], [], []
    if "initializer" in place:
        nodes, initializers = [add], [tensor]
    if "branch" in place:
        branch = helper.make_graph(nodes, "branch", [], [y], initializers)
        inputs.append(helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, []))
        nodes, initializers = [helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)], []
    elif "function" in place:
        functions = [helper.make_function("f", "F", ["x"], ["y"], nodes, imports[:1])]
        nodes = [helper.make_node("F", ["x"], ["y"], domain="f")]
    graph = helper.make_graph(nodes, "g", inputs, [y], initializers)
    return helper.make_model(graph, opset_imports=imports, ir_version=9, functions=functions)


PLACES = ["initializer", "constant", "initializer of a branch", "constant in a branch", "constant in a function"]
BAD_EXTERNAL: dict[str, tuple[dict[str, str], tuple[int, ...], str]] = {
    "outside": ({"location": "../secret.bin"}, (4, 5), "expected a file in the model's folder"),
    "outside and in again": ({"location": "../m/ok.bin"}, (4, 5), "expected a file in the model's folder"),
    "absolute": ({"location": "/etc/hostname"}, (4, 5), "expected a file in the model's folder"),
    "linked folder": ({"location": "up/secret.bin"}, (4, 5), "is outside the model's folder"),
    "symbolic link out": ({"location": "out"}, (4, 5), "is a symbolic link; expected a regular file"),
    "symbolic link within": ({"location": "in"}, (4, 5), "is a symbolic link; expected a regular file"),
    "link to nothing": ({"location": "dangling"}, (4, 5), "is a symbolic link; expected a regular file"),
    "hard link": ({"location": "hard.bin"}, (4, 5), "has several hard links; expected one"),
    "pipe": ({"location": "pipe"}, (4, 5), "is no regular file; expected one"),
    "folder": ({"location": "sub"}, (4, 5), "is no regular file; expected one"),
    "nothing": ({"location": "gone.bin"}, (4, 5), "which does not exist"),
    "no location": ({"offset": "0"}, (4, 5), "has location ''; expected the path of a file"),
    "two locations": ({}, (4, 5), "has two entries 'location'; expected one"),
    "too short": ({"location": "ok.bin"}, (4, 6), "has 80 bytes; expected 96 for 'w'"),
    "offset beyond": ({"location": "ok.bin", "offset": "4"}, (4, 5), "has 80 bytes; expected 84 for 'w'"),
    "offset below 0": ({"location": "ok.bin", "offset": "-4"}, (4, 5), "has offset '-4'; expected a number of bytes"),
    "offset is no number": ({"location": "ok.bin", "offset": "1_0"}, (4, 5), "has offset '1_0'; expected a number"),
    "offset overflows": ({"location": "ok.bin", "offset": "9" * 30}, (4, 5), "expected a number of bytes"),
    "length is no number": (
        {"location": "ok.bin", "length": "a\nb"},
        (4, 5),
        "has length 'a\\\\nb'; expected a number",
    ),
    "length below 0": ({"location": "ok.bin", "length": "-80"}, (4, 5), "has length '-80'; expected a number"),
    "length of another size": ({"location": "ok.bin", "length": "40"}, (4, 5), "has length 40; expected 80"),
    "dims below 0": ({"location": "ok.bin"}, (-4, -5), r"has the dimensions \[-4, -5\]; expected none below 0"),
    "dims overflow": ({"location": "ok.bin"}, (2**62, 2**62), "has 80 bytes; expected 8507059173"),
    "too many dims": ({"location": "ok.bin"}, (1,) * 33, "has 33 dimensions; expected at most 32"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a model, with data of 80 bytes, and a secret beside it."""
    within = tmp_path / "m"
    (within / "sub").mkdir(parents=True)
    for path in (tmp_path / "secret.bin", within / "ok.bin", within / "sub" / "ok.bin"):
        path.write_bytes(np.arange(20, dtype=np.float32).tobytes())
    for name, target in {"out": "../secret.bin", "in": "ok.bin", "dangling": "gone.bin", "up": ".."}.items():
        (within / name).symlink_to(target)
    os.link(tmp_path / "secret.bin", within / "hard.bin")
    os.mkfifo(within / "pipe")
    return within


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", BAD_EXTERNAL)
def test_bad_external_data_is_refused_in_one_line(case: str, place: str, folder: Path) -> None:
    entries, dims, reason = BAD_EXTERNAL[case]
    tensor = external_tensor(entries, dims)
    if case == "two locations":
        for _ in range(2):
            tensor.external_data.add(key="location", value="ok.bin")
    path = folder / "in.onnx"
    path.write_bytes(with_tensor(tensor, place).SerializeToString())
    with pytest.raises(ModelError, match=reason) as failure:
        reading.load(path)
    assert "\n" not in str(failure.value) and str(failure.value).startswith(f"{path}: ")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["ok.bin", "./ok.bin", "sub/ok.bin", "sub/../ok.bin"])
def test_external_data_in_the_folder_is_taken(location: str, place: str, folder: Path) -> None:
    path = folder / "in.onnx"
    tensor = external_tensor({"location": location, "offset": "0", "length": "80"})
    path.write_bytes(with_tensor(tensor, place).SerializeToString())
    loaded = reading.load(path)
    (found,) = {id(t): t for t in every_tensor(loaded.ir)}.values() if "branch" not in place else [None]
    if found is not None:
        np.testing.assert_array_equal(found.numpy().ravel(), np.arange(20, dtype=np.float32))


def test_functions_of_the_default_domain_are_refused() -> None:
    model = with_tensor(helper.make_tensor("w", 1, [4, 5], [0.0] * 20), "constant in a function")
    model.functions[0].domain = model.graph.node[0].domain = ""
    model.graph.node[0].op_type = model.functions[0].name = "Twice"
    with pytest.raises(ModelError, match="Twice"):
        reading.load(model)


WRONG_SIZES: dict[str, onnx.TensorProto] = {
    "raw data too long": onnx.TensorProto(name="w", data_type=1, dims=[4, 5], raw_data=bytes(84)),
    "raw data too short": onnx.TensorProto(name="w", data_type=1, dims=[4, 5], raw_data=bytes(76)),
    "no data": onnx.TensorProto(name="w", data_type=1, dims=[4, 5]),
    "floats too many": onnx.TensorProto(name="w", data_type=1, dims=[4, 5], float_data=[0.0] * 21),
    "another field": onnx.TensorProto(name="w", data_type=1, dims=[4, 5], int32_data=[0] * 20),
    "dims below 0": onnx.TensorProto(name="w", data_type=1, dims=[-4, -5], float_data=[0.0] * 20),
    "no type": onnx.TensorProto(name="w", data_type=0, dims=[4, 5], float_data=[0.0] * 20),
    "packed": onnx.TensorProto(name="w", data_type=onnx.TensorProto.INT4, dims=[3], int32_data=[0] * 3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", WRONG_SIZES)
def test_tensors_of_the_wrong_size_are_refused_in_one_line(case: str, place: str) -> None:
    with pytest.raises(ModelError, match=r"^ModelProto: .*expected") as failure:
        reading.load(with_tensor(WRONG_SIZES[case], place))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("dtype", [t for t in ir.DataType if t.name not in ("UNDEFINED", "FLOAT6E2M3", "FLOAT6E3M2")])
def test_tensors_of_every_type_are_taken(dtype: ir.DataType) -> None:
    """As onnx writes them: as bytes, and as numbers."""
    if dtype == ir.DataType.STRING:
        tensors = [onnx.numpy_helper.from_array(np.array(["a", "b", "c"], object), "w")]
    else:
        array = np.array([0, 1, 1]).astype(dtype.numpy())
        tensors = [ir.to_proto(ir.tensor(array, dtype=dtype, name="w")), helper.make_tensor("w", dtype, [3], array)]
    for tensor in tensors:
        validation.check_tensors(with_tensor(tensor, "initializer"), "model", None)
