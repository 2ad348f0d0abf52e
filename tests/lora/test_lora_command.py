"""`--lora` of `gradfuse training-step`, `gradfuse add-lora-inputs` and `gradfuse save-adapter`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from command_runs import Run
from onnx import numpy_helper
from quantised import model_of, quantised

from gradfuse import TrainingSession
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An int4 layer and a float one: x (N, 16) to y (N, 3)."""
    first = quantised(24, 16, name="layers.0.q.weight")
    head = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
    nodes = [first.node("x", "h"), onnx.helper.make_node("MatMul", ["h", "head.weight"], ["y"])]
    tensors = [*first.initializers(), numpy_helper.from_array(head, "head.weight")]
    model = model_of(nodes, {"x": (np.float32, ["N", 16])}, {"y": (np.float32, ["N", 3])}, tensors)
    onnx.save(model, tmp_path / "base.onnx")
    return tmp_path / "base.onnx"


def test_from_a_base_to_a_served_adapter(run: Run, base: Path, tmp_path: Path) -> None:
    step, served, adapter = (tmp_path / name for name in ("step.onnx", "served.onnx", "a.onnx_adapter"))
    chosen = ["--lora", "q", "--lora-rank", 2, "--lora-alpha", 4]
    training = ["--loss", "cross_entropy", "--optimizer", "sgd", "--lr", "0.1"]
    code, output, errors = run("training-step", base, step, *training, *chosen)
    assert (code, errors) == (0, "")
    assert "parameters layers.0.q.lora_A.weight, layers.0.q.lora_B.weight\n" in output
    session = TrainingSession(step)
    x, target = np.eye(5, 16, dtype=np.float32), np.array([0, 1, 2, 0, 1])
    for _ in range(3):
        session.step(x, target)
    session.save(tmp_path / "trained.safetensors")
    assert run("save-adapter", step, adapter, "--checkpoint", tmp_path / "trained.safetensors") == (0, "", "")
    assert run("save-adapter", step, tmp_path / "first") == (0, "", "")
    assert run("save-adapter", step, tmp_path / "within", "--within", "layers") == (0, "", "")
    config = json.loads((tmp_path / "within" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["0.q"]
    code, output, errors = run("add-lora-inputs", base, served, "--lora", "layers.*")
    assert (code, errors) == (0, "") and output == "inputs layers.0.q.lora_A.weight, layers.0.q.lora_B.weight\n"

    options, loaded, active = onnxruntime.SessionOptions(), onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    options.log_severity_level = 4
    loaded.Load(str(adapter))
    active.add_active_adapter(loaded)
    by_onnxruntime = onnxruntime.InferenceSession(served, options, providers=["CPUExecutionProvider"])
    (y,), trained = by_onnxruntime.run(None, {"x": x}, active), session.evaluate(x)
    exact = trained.astype(float)
    assert_gradients_close(y, trained, exact, np.float32, terms=24 * np.abs(exact).max())
    assert np.abs(y - by_onnxruntime.run(None, {"x": x})[0]).max() > 0.01
    config = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4, ["layers.0.q"])
    tensors = safetensors.numpy.load_file(tmp_path / "first" / "adapter_model.safetensors")
    assert not tensors["base_model.model.layers.0.q.lora_B.weight"].any()


def test_other_parameters_train_beside_adapters_where_they_are_named(run: Run, base: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    code, output, _ = run("training-step", base, step, "--loss", "mse", "--lora", "q", "--trainable", "head.*")
    assert code == 0 and "parameters layers.0.q.lora_A.weight, layers.0.q.lora_B.weight, head.weight\n" in output
    code, _, errors = run("save-adapter", step, tmp_path / "peft")
    assert code == 0 and errors.startswith("warning: save_adapter: 'head.weight' trains and is no adapter")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["training-step", "base.onnx", "out.onnx", "--lora-rank", "2"], "--lora-rank is given without --lora"),
        (["training-step", "base.onnx", "out.onnx", "--lora-alpha", "2"], "--lora-alpha is given without --lora"),
        (["training-step", "base.onnx", "out.onnx", "--lora", "k"], "targets has 'k', which matches nothing"),
        (["training-step", "base.onnx", "out.onnx", "--lora", "q", "--lora-rank", "0"], "rank is 0; expected"),
        (["add-lora-inputs", "base.onnx", "base.onnx", "--lora", "q"], "the same file as IN.onnx"),
        (["add-lora-inputs", "base.onnx", "out.onnx", "--lora", "k"], "targets has 'k', which matches nothing"),
        (["add-lora-inputs", "base.onnx", "out.onnx"], "Missing option '--lora'"),
        (["save-adapter", "base.onnx", "out"], "is not a training step saved by gradfuse"),
        (["save-adapter", "base.onnx", "base.onnx"], "is base.onnx, which the input is read from"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    run: Run, base: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    code, output, errors = run(*arguments)
    assert code == 2 and output == "" and message in errors and errors.count("\n") == 1, errors
    assert os.listdir() == ["base.onnx"]
