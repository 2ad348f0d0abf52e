"""Large weights that do not train are in a session's memory once, and what it computes is as with small ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import TrainingSession, TrainingStep, add_lora, build_training_step, export_training_step, optimizers
from gradfuse.training import frozen

WIDTH = 160


class Adapted(nn.Module):
    """Products with frozen weights, read turned and as they are, a frozen embedding, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.convolution = nn.Conv1d(WIDTH, 8, 3)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 4) / 9), nn.Parameter(torch.randn(4, WIDTH) / 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = (layer(x) + x @ self.a @ self.b).tanh()
        return self.convolution(x.transpose(1, 2)).mean(2)  # type: ignore[no-any-return]


def words_and_targets(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WIDTH, (3, 20), generator=generator), torch.randint(0, 8, (3,), generator=generator)


def step_of(module: nn.Module) -> TrainingStep:
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1)
    return export_training_step(module, F.cross_entropy, words_and_targets(0), optimizer)


@pytest.mark.parametrize("from_file", (False, True))
def test_training_and_evaluation_are_those_of_torch(
    from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_LEAST_TOGETHER", 0)
    module = Adapted()
    step: TrainingStep | Path = step_of(module)
    if from_file:
        step.save(path := tmp_path / "step.onnx")  # type: ignore[union-attr]
        step = path
    session = TrainingSession(step)
    optimizer = torch.optim.SGD([module.a, module.b], lr=0.1)
    for number in range(3):
        words, target = words_and_targets(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(words), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert abs(session.step(words, target) - loss.item()) <= 1e-5 * loss.item()
    words, _ = words_and_targets(5)
    expected = module(words).detach().numpy()
    np.testing.assert_allclose(session.evaluate(words), expected, rtol=0, atol=1e-5)
    assert {name: tuple(one.shape) for name, one in session.state_dict().items()} == {
        name: tuple(one.shape) for name, one in module.state_dict().items()
    }
    session.save_evaluation_model(tmp_path / "served.onnx")
    served = onnxruntime.InferenceSession(str(tmp_path / "served.onnx"))
    assert [value.name for value in served.get_inputs()] == list(session.training_step.input_names)
    np.testing.assert_allclose(served.run(None, {served.get_inputs()[0].name: words.numpy()})[0], expected, atol=1e-5)


def test_a_step_in_memory_keeps_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_LEAST_TOGETHER", 0)
    step = step_of(Adapted())
    assert step.evaluation_model is not None
    before = step.model.SerializeToString(), step.evaluation_model.SerializeToString()
    session = TrainingSession(step)
    session.step(*words_and_targets(0))
    session.evaluate(words_and_targets(0)[0])
    assert (step.model.SerializeToString(), step.evaluation_model.SerializeToString()) == before


def test_a_weight_that_the_evaluation_model_has_otherwise_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_LEAST_TOGETHER", 0)
    step = step_of(Adapted())
    assert step.evaluation_model is not None
    for tensor in step.evaluation_model.graph.initializer:
        if list(tensor.dims) == [WIDTH, WIDTH]:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros((WIDTH, WIDTH), np.float32), tensor.name))
    session = TrainingSession(step)
    words, target = words_and_targets(0)
    before = session.step(words, target)
    assert np.ptp(session.evaluate(words), axis=0).max() == 0.0 and before > 0.0


GROWTH = """
import sys
import numpy as np
from gradfuse import TrainingSession

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

def train_and_evaluate(path, width):
    session, x = TrainingSession(path), np.ones((2, width), np.float32)
    session.step(x, x)
    session.evaluate(x)
    return session

small = train_and_evaluate(sys.argv[1], 8)
before = resident()
large = train_and_evaluate(sys.argv[2], 2048)
print(resident() - before)
"""


def adapters_beside(width: int, layers: int) -> TrainingStep:
    """A step that trains adapters beside a chain of products."""
    nodes = " ".join(f"x{k + 1} = MatMul(x{k}, w{k})" for k in range(layers))
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> chain (float[n, {width}] x0) => (float[n, {width}] x{layers}) '
        f"{{ {nodes} }}"
    )
    for k in range(layers):
        weight = np.eye(width, dtype=np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{k}"))
    adapted = add_lora(model, ["w*"], 2, 4)
    return build_training_step(adapted, "mse", trainable=["*.lora_*"], optimizer=optimizers.SGD(lr=0.1))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_they_are_in_memory_once(tmp_path: Path) -> None:
    """onnxruntime alone had packed weights and their transposes too, and another copy for evaluation."""
    small, large = (str(tmp_path / name) for name in ("small.onnx", "large.onnx"))
    width, layers = 2048, 4
    adapters_beside(8, 1).save(small)
    adapters_beside(width, layers).save(large)
    size = layers * width * width * 4 / 2**20
    command = [sys.executable, "-W", "ignore", "-c", GROWTH, small, large]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert float(done.stdout) < 1.6 * size
