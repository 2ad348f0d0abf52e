"""Training on a device: an environment with onnxruntime and numpy, and neither onnx, onnx_ir, ml_dtypes nor torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import gradfuse
from gradfuse import TrainingSession, TrainingStep, add_lora, build_training_step
from gradfuse.optimizers import AdamW

IN, HIDDEN, OUT = 20, 2000, 5
HAS = ("onnxruntime", "numpy", "numpy.libs")

USE = """
import sys, numpy as np, onnxruntime
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024
before = resident()
from gradfuse import TrainingSession
assert resident() - before < 40
batch = np.load("batch.npz")
session = TrainingSession("step.onnx")
losses = [session.step(batch["x"], batch["y"]) for _ in range(3)]
np.savez("found.npz", losses=losses, result=session.evaluate(batch["x"]), **session.state_dict())
session.save_evaluation_model("served.onnx")
loaded = {"onnx", "onnx_ir", "ml_dtypes", "torch", "safetensors"} & set(sys.modules)
assert not loaded, loaded
"""


def _model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "a.weight"], ["p"]),
        helper.make_node("Add", ["p", "a.bias"], ["q"]),
        helper.make_node("Relu", ["q"], ["r"]),
        helper.make_node("MatMul", ["r", "b.weight"], ["y"]),
    ]
    tensors = [
        numpy_helper.from_array((0.1 * rng.standard_normal((IN, HIDDEN))).astype(np.float32), "a.weight"),
        numpy_helper.from_array((0.1 * rng.standard_normal((HIDDEN, OUT))).astype(np.float32), "b.weight"),
        # Elements that are listed, and frozen.
        helper.make_tensor("a.bias", onnx.TensorProto.FLOAT, [HIDDEN], rng.standard_normal(HIDDEN)),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", IN])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", OUT])
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _step() -> TrainingStep:
    return build_training_step(_model(), "cross_entropy", trainable=["*.weight"], optimizer=AdamW(lr=1e-3))


def _lora() -> TrainingStep:
    model = add_lora(_model(), ["a.weight"], rank=2, alpha=4)
    return build_training_step(model, "cross_entropy", trainable=["*.lora_*"], optimizer=AdamW(lr=1e-2))


def environment(folder: Path, *others: str) -> Path:
    """Make a folder of packages that has gradfuse, and of what is installed here only some."""
    installed = Path(onnxruntime.__file__).parents[1]
    package = folder / "gradfuse"
    package.mkdir(parents=True)
    for root in gradfuse.__path__:
        for entry in Path(root).iterdir():
            if not (package / entry.name).exists():
                (package / entry.name).symlink_to(entry)
    for name in (*HAS, *others):
        if (installed / name).exists():
            (folder / name).symlink_to(installed / name)
    return folder


def run(code: str, packages: Path, folder: Path) -> str:
    """Run a program that finds nothing but some packages and the standard library; return its standard error."""
    code = f"import sys; sys.path.insert(0, {str(packages)!r})\n{code}"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return result.stderr


def _batch() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((8, IN)).astype(np.float32), "y": rng.integers(0, OUT, 8)}


@pytest.mark.parametrize("make", [_step, _lora], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", ["one file", "external data", "values in safetensors"])
def test_a_step_trains_with_onnxruntime_and_numpy_alone(
    make: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, batch = make(), _batch()
    if kind == "external data":
        from gradfuse.models import writing

        monkeypatch.setattr(writing, "fits_one_message_without_files", lambda model: False)
    step.save(tmp_path / "step.onnx", defaults=kind != "values in safetensors")
    assert (tmp_path / "step.onnx.data").exists() == (kind == "external data")
    np.savez(tmp_path / "batch.npz", **batch)
    safetensors = kind == "values in safetensors"
    code = USE.replace(', "safetensors"}', "}") if safetensors else USE
    assert run(code, environment(tmp_path / "site", *(["safetensors"] if safetensors else [])), tmp_path) == ""

    # The same kernels of onnxruntime in the same number of threads, with updates that are not in place.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    gradfuse.register(options)
    session = TrainingSession(step, session_options=options)
    losses = [session.step(batch["x"], batch["y"]) for _ in range(3)]
    found = np.load(tmp_path / "found.npz")
    assert np.array_equal(found["losses"], losses)
    assert np.array_equal(found["result"], session.evaluate(batch["x"]))
    for name, array in session.state_dict().items():
        assert np.array_equal(found[name], array), name
    onnx.checker.check_model(str(tmp_path / "served.onnx"), full_check=True)
    served = onnx.load(tmp_path / "served.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor, str(tmp_path)) for tensor in served.graph.initializer}
    assert [value.name for value in served.graph.input] == ["x"]
    for name in step.parameters:
        assert np.array_equal(stored[name], found[name]), name


def test_what_is_no_step_or_damaged_is_one_line(tmp_path: Path) -> None:
    _step().save(tmp_path / "step.onnx")
    content = (tmp_path / "step.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.onnx").write_text("no model")
    onnx.save(_model(), tmp_path / "model.onnx")
    code = """
from gradfuse import GradfuseError, ModelError, TrainingSession, TrainingStep
for name in ("cut.onnx", "text.onnx", "model.onnx", "none.onnx", "."):
    try:
        TrainingSession(name)
    except ModelError as error:
        assert str(error).startswith(name) and "\\n" not in str(error), error
    else:
        raise AssertionError(name)
try:
    TrainingStep.load("step.onnx")
except GradfuseError as error:
    assert "onnx" in str(error) and "installed" in str(error), error
else:
    raise AssertionError
"""
    assert run(code, environment(tmp_path / "site"), tmp_path) == ""


def test_a_tensor_outside_the_folder_of_the_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(4 * IN * HIDDEN))
    _step().save(tmp_path / "steps" / "step.onnx")
    model = onnx.load(tmp_path / "steps" / "step.onnx")
    tensor = next(one for one in model.graph.initializer if one.name == "a.weight")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../outside.bin")
    (tmp_path / "steps" / "step.onnx").write_bytes(model.SerializeToString())
    code = """
from gradfuse import ModelError, TrainingSession
try:
    TrainingSession("steps/step.onnx")
except ModelError as error:
    assert "outside" in str(error), error
else:
    raise AssertionError
"""
    assert run(code, environment(tmp_path / "site"), tmp_path) == ""
