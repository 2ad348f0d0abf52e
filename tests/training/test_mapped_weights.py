"""Steps of models whose weights stay in their files: the same numbers, and the weights once on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from gradfuse import ModelError, TrainingSession, TrainingStep, add_lora, build_training_step, optimizers
from gradfuse.checking import execution
from gradfuse.models import tensors

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with external data, which is taken for large."""
    monkeypatch.setattr(tensors, "_MAPPED", 2**10)
    monkeypatch.setattr(tensors, "_MUCH", 2**10)
    monkeypatch.setattr(execution, "_LARGE", 2**10)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in ("a.weight", "b.weight")}
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        net (float[N, 64] x) => (float[N, 64] y) {
            hidden = MatMul(x, "a.weight")
            active = Tanh(hidden)
            y = MatMul(active, "b.weight")
        }
    """)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    path = tmp_path / "base.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="base.onnx.data", size_threshold=0)
    return path


def built(model: ir.Model | onnx.ModelProto) -> TrainingStep:
    adapted = add_lora(model, ["a", "b"], rank=2, alpha=4)
    return build_training_step(adapted, "mse", trainable=["*.lora_*"], optimizer=optimizers.AdamW(lr=0.01))


def losses(step: TrainingStep | Path) -> list[float]:
    session = TrainingSession(step)
    rng = np.random.default_rng(1)
    x, target = (rng.standard_normal((5, 64)).astype(np.float32) for _ in range(2))
    found = [session.step(x, target) for _ in range(3)]
    return [*found, float(session.evaluate(x).sum())]


def test_a_step_of_mapped_weights_trains_as_one_that_has_them(model: Path, tmp_path: Path) -> None:
    mapped, whole = built(ir.load(model)), built(onnx.load(model))
    assert mapped.model.ByteSize() < 64 * 64 * 4 < whole.model.ByteSize()
    expected = losses(whole)
    assert losses(mapped) == expected
    path = tmp_path / "step.onnx"
    mapped.save(path)
    os.remove(model)
    os.remove(f"{model}.data")
    assert losses(path) == expected
    assert sorted(os.listdir(tmp_path)) == ["step.eval.onnx", "step.onnx", "step.onnx.data"]
    for file in (path, tmp_path / "step.eval.onnx"):
        onnx.checker.check_model(file)
        stored = onnx.load(file, load_external_data=False)
        places = {entry.value for t in stored.graph.initializer for entry in t.external_data if entry.key == "location"}
        assert places == {"step.onnx.data"}


def test_a_step_can_replace_the_file_it_was_read_from(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    built(ir.load(model)).save(path)
    expected = losses(path)
    step = TrainingStep.load(path)
    assert step.model.ByteSize() < 64 * 64 * 4
    step.save(path)
    assert losses(path) == expected
    assert losses(step) == expected


def test_a_session_replaces_no_file_that_its_weights_are_in(model: Path, tmp_path: Path) -> None:
    step = build_training_step(ir.load(model), "mse", trainable=["a.weight"], optimizer=optimizers.AdamW(lr=0.01))
    expected = losses(step)
    session, data = TrainingSession(step), Path(f"{model}.data")
    before = data.read_bytes()
    with pytest.raises(ModelError, match=r"base\.onnx\.data: is .*, which the input is read from"):
        session.save_evaluation_model(model)
    for wait in (True, False):
        with pytest.raises(ModelError, match=r"base\.onnx\.data: is .*, which the input is read from"):
            session.save(data, wait=wait)
    assert data.read_bytes() == before
    assert losses(step) == expected


def test_evaluation_takes_no_weights_of_another_step(model: Path, tmp_path: Path) -> None:
    path, step = tmp_path / "step.onnx", built(ir.load(model))
    step.save(path)
    session = TrainingSession(path)
    build_training_step(ir.load(model), "mse", trainable=["b.weight"]).save(path)
    for use in (
        lambda: session.evaluate(np.zeros((2, 64), np.float32)),
        lambda: session.save_evaluation_model(tmp_path / "m.onnx"),
    ):
        with pytest.raises(ModelError, match=r"step\.onnx.* has changed since"):
            use()


_GROWTH = """
import sys
import numpy as np
import gradfuse

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

if sys.argv[2] == "freed":
    arrays = [np.ones(2**21) for _ in range(40)]
    del arrays
before = resident()
session = gradfuse.TrainingSession(sys.argv[1])
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_takes_no_more_memory_after_a_model_was_freed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        net (float[N, 1024] x) => (float[N, 1024] y) {
            h = MatMul(x, a)
            i = MatMul(h, b)
            j = MatMul(i, c)
            y = MatMul(j, d)
        }
    """)
    weights = {name: rng.standard_normal((1024, 1024)).astype(np.float32) for name in "abcd"}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    path = tmp_path / "step.onnx"
    build_training_step(proto, "mse", optimizer=optimizers.AdamW(lr=0.01)).save(path)

    def growth(kind: str) -> int:
        run = [sys.executable, "-c", _GROWTH, str(path), kind]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    # In KiB: a weight takes 4,096.
    assert growth("freed") < growth("fresh") + 4096
