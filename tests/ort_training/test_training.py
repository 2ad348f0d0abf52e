"""Artifacts of onnxruntime-training 1.19.2, trained there, fused there, and trained in stock onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ort_training import environment
from ort_training.cases import COMPARED
from ort_training.runs import Run

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.ort_training

FUSED = {
    "classifier": {"CrossEntropyLossGrad"},
    "regressor": {"MseLossBackward"},
    "convolution": {"CrossEntropyLossGrad"},
    "attention": {"CrossEntropyLossGrad", "ScaledMaskedSoftmaxBackward"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    environment.run("produce.py", folder)
    return folder


@pytest.mark.parametrize("name", COMPARED)
def test_fused_model_trains_there_as_the_original_does(name: str, folder: Path) -> None:
    run = Run.load(folder / name)
    assert set(run.arrays["fused.operators"]) == FUSED.get(name, set())
    assert_gradients_close(run.losses("fused"), run.losses("native"), run.losses("exact"), np.float32)
    for parameter in run.parameters():
        fused, exact = run.parameter("fused", parameter), run.parameter("exact", parameter)
        assert_gradients_close(fused, run.worst_native(parameter), exact, np.float32)


@pytest.mark.parametrize("name", COMPARED)
def test_stock_onnxruntime_trains_as_it_did(name: str, folder: Path) -> None:
    Run.load(folder / name).require_equal_training()


@pytest.mark.parametrize("name", COMPARED)
def test_training_goes_on_from_a_checkpoint(name: str, folder: Path) -> None:
    Run.load(folder / name).require_equal_continuation()


@pytest.mark.parametrize("name", COMPARED)
def test_evaluation_gives_what_the_module_gives(name: str, folder: Path) -> None:
    Run.load(folder / name).require_equal_evaluation()
