"""Models are written tensor after tensor: what is read again is the model, and writing takes little memory."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from gradfuse.models import reading, streaming, writing

ROWS = 600  # of 1,000 float32: 2.3 MiB


def model(arrays: dict[str, npt.NDArray[np.generic]]) -> ir.Model:
    tensors = [ir.tensor(array, name=name, doc_string=f"of {name}") for name, array in arrays.items()]
    values = [
        ir.Value(name=t.name, type=ir.TensorType(t.dtype), shape=ir.Shape(t.shape.numpy()), const_value=t)
        for t in tensors
    ]
    copies = [ir.node("Identity", [value], name=f"copy of {value.name}") for value in values]
    for node, value in zip(copies, values, strict=True):
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = f"{value.name}/out", value.type, value.shape
    graph = ir.Graph([], [node.outputs[0] for node in copies], nodes=copies, initializers=values, name="g")
    graph.opset_imports[""] = 21
    return ir.Model(graph, ir_version=10, producer_name="test")


ARRAYS: dict[str, npt.NDArray[np.generic]] = {
    "small": np.arange(7, dtype=np.int64),
    "weights": np.random.default_rng(0).standard_normal((ROWS, 1000)).astype(np.float32),
    "half": np.random.default_rng(1).standard_normal((ROWS, 1000)).astype(np.float16),
    "brain": np.random.default_rng(2).standard_normal((ROWS, 1000)).astype(ml_dtypes.bfloat16),
    "bits": np.random.default_rng(3).integers(0, 2, (3 * ROWS, 1000)).astype(np.bool_),
    "nibbles": np.random.default_rng(4).integers(-8, 8, (4 * ROWS + 1, 1001)).astype(ml_dtypes.int4),
    "no rows": np.zeros((0, 3), np.float32),
}


def test_what_is_written_is_what_onnx_reads(tmp_path: Path) -> None:
    given = model(ARRAYS)
    streaming.save(given, str(tmp_path / "m.onnx"))
    read = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(read, full_check=True)
    tensors = {tensor.name: tensor for tensor in read.graph.initializer}
    assert set(tensors) == set(ARRAYS) and read.producer_name == "test" and len(read.graph.node) == len(ARRAYS)
    for name, array in ARRAYS.items():
        got = numpy_helper.to_array(tensors[name])
        assert got.dtype == array.dtype and got.tobytes() == array.tobytes(), name
        assert tensors[name].doc_string == f"of {name}"
    # The model itself is as it was.
    assert given.graph.initializers["weights"].const_value is not None
    assert given.graph.initializers["weights"].const_value.shape.numpy() == (ROWS, 1000)


def test_onnxruntime_and_gradfuse_read_it(tmp_path: Path) -> None:
    arrays = {name: ARRAYS[name] for name in ("small", "weights", "half", "bits")}
    writing.save(model(arrays), tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for output, array in zip(session.run(None, {}), arrays.values(), strict=True):
        np.testing.assert_array_equal(output, array)
    loaded = reading.load(str(tmp_path / "m.onnx")).ir
    for name, array in arrays.items():
        tensor = loaded.graph.initializers[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_other_formats_are_those_of_onnx(tmp_path: Path) -> None:
    arrays = {"weights": ARRAYS["weights"]}
    writing.save(model(arrays), tmp_path / "m.textproto")
    (tensor,) = onnx.load(tmp_path / "m.textproto").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), arrays["weights"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_writing_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    def most() -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

    arrays: dict[str, npt.NDArray[np.generic]] = {f"w{k}": np.full((4096, 1024), k, np.float32) for k in range(16)}
    given = model(arrays)
    Path("/proc/self/clear_refs").write_text("5")
    before = most()
    writing.save(given, tmp_path / "m.onnx")
    assert (most() - before) * 1024 < sum(array.nbytes for array in arrays.values()) / 4
    assert helper.tensor_dtype_to_np_dtype(onnx.load(tmp_path / "m.onnx").graph.initializer[0].data_type) == np.float32
