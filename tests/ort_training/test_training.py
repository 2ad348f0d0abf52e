"""Artifacts of onnxruntime-training 1.19.2, trained there, fused there, and trained in stock onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ort_training import environment
from ort_training.cases import CASES, COMPARED, LEARNING_RATE
from ort_training.runs import Run

from gradfuse import build_training_step, optimizers
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.ort_training

ATTENTION = {
    "CrossEntropyLossGrad",
    "ScaledMaskedSoftmaxBackward",
    "LayerNormBackward",
    "GeluBackward",
    "EmbeddingDenseBackward",
}
FUSED = {
    "classifier": {"CrossEntropyLossGrad"},
    "regressor": {"MseLossBackward", "LayerNormBackward", "GeluBackward"},
    "convolution": {"CrossEntropyLossGrad", "ConvolutionBackward", "BatchNormBackward", "MaxPoolBackward"},
    "attention": ATTENTION,
    "attention by SGD": ATTENTION,
    "operators": {"LayerNormBackward"},
}
LOSSES = {
    "CrossEntropyLoss": "cross_entropy",
    "MSELoss": "mse",
    "BCEWithLogitsLoss": "bce_with_logits",
    "L1Loss": "l1",
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


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in COMPARED if CASES[name].optimizer == "SGD" or not CASES[name].adam_mode]
)
def test_steps_of_the_same_forward_model_train_as_it_did(name: str, fuse: bool, folder: Path) -> None:
    """Those of `build_training_step`, which derives the gradients anew. Its AdamW is the one of `adam_mode` 0."""
    case, run = CASES[name], Run.load(folder / name)
    sgd = optimizers.SGD(lr=LEARNING_RATE)
    step = build_training_step(
        folder / name / "forward.onnx",
        LOSSES[case.loss],
        trainable=run.parameters(),
        optimizer=sgd if case.optimizer == "SGD" else optimizers.AdamW(lr=LEARNING_RATE, eps=1e-6, **case.options),
        max_grad_norm=case.max_norm,
        fuse=fuse,
    )
    session, losses = run.train(step)
    assert_gradients_close(losses, run.losses("native"), run.losses("exact"), np.float32)
    state = session.state_dict()
    for parameter in run.parameters():
        exact = run.parameter("exact", parameter)
        assert_gradients_close(state[parameter], run.worst_native(parameter), exact, np.float32)


def test_dropout_of_a_forward_model_trains(folder: Path) -> None:
    step = build_training_step(folder / "dropout" / "forward.onnx", "mse", optimizer=optimizers.SGD(lr=LEARNING_RATE))
    assert list(step.buffers) == ["dropout_seed"]
    assert "Dropout" not in {node.op_type for node in step.model.graph.node}
