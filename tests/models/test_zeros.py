"""Default values of zeros are not stored: what other tools and gradfuse read of the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime as ort
import pytest
import torch

import gradfuse
from gradfuse import cli

_WEIGHTS = 4 * (512 * 512 + 512)


@pytest.fixture(scope="module")
def step() -> gradfuse.TrainingStep:
    torch.manual_seed(0)
    module = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batch = torch.randn(2, 512), torch.randn(2, 512)
    return gradfuse.export_training_step(module, torch.nn.MSELoss(), batch, optimizer)


def _batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 2, 512)).astype(np.float32)
    return x, y


@pytest.mark.parametrize("data", ["inside", "beside"])
def test_the_file_of_a_step_holds_weights_once(
    step: gradfuse.TrainingStep, tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if data == "beside":
        monkeypatch.setattr("gradfuse.models.writing.fits_one_message_without_files", lambda _: False)
    path = tmp_path / "step.onnx"
    step.save(path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir() if ".eval" not in file.name) < 1.2 * _WEIGHTS
    onnx.checker.check_model(str(path))

    # In onnxruntime alone the first step is the one from zeros.
    plain = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = dict(zip((*step.input_names, *step.target_names), _batch(), strict=True))
    for got, wanted in zip(plain.run(None, feeds), plain.run(None, feeds | dict(step.optimizer_state)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    loaded = gradfuse.TrainingStep.load(path)
    assert all(not np.any(state) for state in loaded.optimizer_state.values())
    assert {n: (s.dtype, s.shape) for n, s in loaded.optimizer_state.items()} == {
        n: (s.dtype, s.shape) for n, s in step.optimizer_state.items()
    }


def test_a_rewritten_step_keeps_its_zeros(step: gradfuse.TrainingStep, tmp_path: Path) -> None:
    step.save(tmp_path / "step.onnx")
    assert cli.run(["expand", str(tmp_path / "step.onnx"), str(tmp_path / "plain.onnx")]) == 0
    assert (tmp_path / "plain.onnx").stat().st_size < 1.2 * _WEIGHTS
    model = gradfuse.fuse(tmp_path / "step.onnx").model
    assert model.ByteSize() < 1.2 * _WEIGHTS
    onnx.save(model, tmp_path / "fused.onnx")
    x, y = _batch()
    losses = []
    for name in ("step.onnx", "plain.onnx", "fused.onnx"):
        session = gradfuse.TrainingSession(tmp_path / name)
        losses.append([session.step(x, y) for _ in range(3)])
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-5)


def test_state_that_is_not_zero_is_stored(step: gradfuse.TrainingStep, tmp_path: Path) -> None:
    state = {**step.optimizer_state, "weight.exp_avg": np.full((512, 512), 0.5, np.float32)}
    dataclasses.replace(step, optimizer_state=state).save(tmp_path / "step.onnx")
    loaded = gradfuse.TrainingStep.load(tmp_path / "step.onnx").optimizer_state
    np.testing.assert_array_equal(loaded["weight.exp_avg"], state["weight.exp_avg"])
    assert not np.any(loaded["weight.exp_avg_sq"])


def test_other_sparse_initializers_are_dense() -> None:
    model = oh.make_model(
        oh.make_graph(
            [oh.make_node("Add", ["x", "w"], ["y"])],
            "g",
            [oh.make_tensor_value_info("x", 1, [2, 3])],
            [oh.make_tensor_value_info("y", 1, [2, 3])],
            sparse_initializer=[
                oh.make_sparse_tensor(
                    oh.make_tensor("w", 1, [0], b"", raw=True), oh.make_tensor("", 7, [0], b"", raw=True), [2, 3]
                )
            ],
        ),
        opset_imports=[oh.make_opsetid("", 18)],
        ir_version=9,
    )
    (dense,) = gradfuse.fuse(model).model.graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(dense), np.zeros((2, 3), np.float32), strict=True)
