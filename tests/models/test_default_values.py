"""Default values of inputs are read apart from the message, and nothing else changes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gradfuse.models import default_values

LARGE = 2**14
"""Elements of float32 from which on a tensor is left out."""


def model_of(tensors: list[onnx.TensorProto], inputs: list[str]) -> onnx.ModelProto:
    graph = onnx.helper.make_graph([], "graph", [], [], initializer=tensors, doc_string="x" * 3)
    for name in inputs:
        graph.input.add(name=name)
    return onnx.helper.make_model(graph, producer_name="test")


def restored(content: bytes, folder: Path) -> tuple[onnx.ModelProto, set[str]]:
    """The message of a file with the values that were read apart put back at the end, and the names of those."""
    path = folder / "model.onnx"
    path.write_bytes(content)
    message, values = default_values.read(str(path))
    model = onnx.ModelProto.FromString(message)
    for name, array in values.items():
        model.graph.initializer.append(ir.to_proto(ir.tensor(array, name=name)))
    return model, set(values)


def sorted_by_name(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        tensor.ClearField("doc_string")
    tensors = sorted(model.graph.initializer, key=onnx.TensorProto.SerializeToString)
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    return model


@st.composite
def tensors(draw: st.DrawFn) -> onnx.TensorProto:
    dtype = draw(st.sampled_from([np.float32, np.float16, np.int64, np.bool_]))
    size = draw(st.sampled_from([0, 3, LARGE - 8, LARGE + 1, 4 * LARGE]))
    array: npt.NDArray[Any] = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, size).astype(dtype)
    shape = draw(st.sampled_from([(size,), (1, size), (size, 1, 1)]))
    tensor = onnx.numpy_helper.from_array(array.reshape(shape), draw(st.sampled_from("abcdef")))
    match draw(st.integers(0, 6)):
        case 0:
            tensor = onnx.helper.make_tensor(tensor.name, tensor.data_type, shape, array.tolist())
        case 1:
            tensor.doc_string = "y" * draw(st.sampled_from([1, 70_000]))
        case 2:
            tensor.raw_data = tensor.raw_data[:-1]
    return tensor


@given(st.lists(tensors(), max_size=4), st.lists(st.sampled_from("abcdef"), max_size=5))
def test_message_and_values_are_those_of_the_model(found: list[onnx.TensorProto], inputs: list[str]) -> None:
    model = model_of(found, inputs)
    with tempfile.TemporaryDirectory() as folder:
        got, _ = restored(model.SerializeToString(), Path(folder))
    assert sorted_by_name(got) == sorted_by_name(model)


def test_large_defaults_of_inputs_are_left_out(tmp_path: Path) -> None:
    arrays = {name: np.arange(size, dtype=np.float32) for name, size in (("a", LARGE), ("b", LARGE), ("c", 5))}
    model = model_of([onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()], ["a", "c"])
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    message, values = default_values.read(str(path))
    assert list(values) == ["a"]
    np.testing.assert_array_equal(values["a"], arrays["a"])
    assert [tensor.name for tensor in onnx.ModelProto.FromString(message).graph.initializer] == ["b", "c"]


@given(st.data())
def test_damaged_files_parse_as_they_did(data: st.DataObject) -> None:
    model = model_of(
        [onnx.numpy_helper.from_array(np.ones(LARGE, np.float32), "a"), onnx.numpy_helper.from_array(np.ones(2), "b")],
        ["a", "b"],
    )
    content = bytearray(model.SerializeToString())
    # All that is not elements.
    places = [*range(80), *range(len(content) - 120, len(content))]
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    whole = bytes(content[: data.draw(st.sampled_from([None, None, -1, -40, 60, 90]))])
    try:
        expected = onnx.ModelProto.FromString(whole)
    except DecodeError:
        expected = None
    with tempfile.TemporaryDirectory() as folder:
        if expected is None:
            with pytest.raises(DecodeError):
                restored(whole, Path(folder))
        else:
            got, _ = restored(whole, Path(folder))
            assert sorted_by_name(got) == sorted_by_name(expected)
