"""The demonstration works at a small size, and says by its exit status whether the models learned."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest
from cpp_ext.single_node import CUDA_SIMT, library_of
from sample_runs import SAMPLES, sample

from gradfuse import TrainingStep


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What is printed, and the folder of the models; the demonstration runs once for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "digits"
    folder.mkdir(exist_ok=True)
    printed = folder / "printed.txt"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.is_file():
            models = folder / "models"
            output = sample("digits", "--rounds", 3, "--epochs", 4, "--accuracy", 0.85, "--save", models)
            printed.write_text(output, encoding="utf-8")
    return printed.read_text(encoding="utf-8"), folder / "models"


@pytest.mark.long
def test_both_models_learn(saved: tuple[str, Path]) -> None:
    output, _ = saved
    accuracies = [float(value) for value in re.findall(r"test accuracy (\d+\.\d+)%", output)]
    assert len(accuracies) == 2
    assert min(accuracies) >= 85
    assert output.count("random batches: the same outputs") == 2


@pytest.mark.long
def test_the_operators_of_both_models_are_fused(saved: tuple[str, Path]) -> None:
    output, folder = saved
    attention = {"CrossEntropyLossGrad", "GeluBackward", "LayerNormBackward", "ScaledMaskedSoftmaxBackward"}
    both = attention | {"ConvolutionBackward", "MaxPoolBackward", "ThresholdBackward"}
    assert set(re.findall(r"^  (\w+) replaces \d+ nodes$", output, re.MULTILINE)) == both
    model = onnx.load(folder / "digits_rowattention_fused.onnx")
    assert {node.op_type for node in model.graph.node if node.domain == "aclnn"} == attention


@pytest.mark.long
def test_a_missed_accuracy_is_a_failure_in_plain_text() -> None:
    command = [sys.executable, str(SAMPLES / "digits.py"), "--model", "cnn", "--rounds", "3", "--epochs", "1"]
    result = subprocess.run([*command, "--accuracy", "1.0"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "expected at least 100%" in result.stdout
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert "\r" not in result.stdout
    assert result.stderr == ""


@pytest.mark.long
def test_the_saved_models_are_training_steps(saved: tuple[str, Path]) -> None:
    _, folder = saved
    for model in ("cnn", "rowattention"):
        for kind in ("plain", "fused", "adam"):
            step = TrainingStep.load(folder / f"digits_{model}_{kind}.onnx")
            assert (step.input_names, step.target_names) == (("image",), ("target",))
            assert "head.weight" in step.parameters
            assert ("head.weight.exp_avg" in step.optimizer_state) == (kind == "adam")


@pytest.mark.long
def test_a_saved_model_trains_on_a_gpu(saved: tuple[str, Path]) -> None:
    _, folder = saved
    model = folder / "digits_rowattention_fused.onnx"
    command = [sys.executable, str(SAMPLES / "gpu.py"), str(model), "--library", library_of(CUDA_SIMT)]
    result = subprocess.run(
        [*command, "--steps", "4", "--batch-size", "8"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    ours = re.search(r"^GradfuseCudaExecutionProvider: \d+ nodes: (.+)$", result.stdout, re.MULTILINE)
    assert ours is not None
    fused = Counter(node.op_type for node in onnx.load(model).graph.node if node.domain == "aclnn")
    assert set(ours[1].split(", ")) == {f"{count} {op_type}" for op_type, count in fused.items()}
    assert re.search(r"^CPUExecutionProvider: \d+ nodes: ", result.stdout, re.MULTILINE)
    assert re.search(r"^4 steps: loss \d\.\d+ at first, \d\.\d+ at last$", result.stdout, re.MULTILINE)
    environment = {**os.environ, "GRADFUSE_VIRTUAL_GPUS": "0"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2
    assert "offers no device: there is no virtual GPU" in result.stderr
    assert "There is no GPU to run on" in result.stderr
