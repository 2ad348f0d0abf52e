"""Weights that do not train take other values, where they are inputs of the step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training.models import Batch, Whole, assert_trained, batches

import gradfuse
from gradfuse import GradfuseError, TrainingSession, TrainingStep, export_training_step, optimizers


class Backbone(nn.Module):
    """Frozen layers with statistics, a tied weight and settings, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()).requires_grad_(False).eval()
        self.again = nn.Linear(4, 6, bias=False).requires_grad_(False)
        self.again.weight = self.body[0].weight  # type: ignore[assignment]
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("order", torch.arange(6).flip(0))
        self.register_buffer("local", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.body(x) + self.again(x)) * self.get_buffer("scale")[self.get_buffer("order")]
        return self.head(hidden * self.get_buffer("local"))  # type: ignore[no-any-return]


def backbone(seed: int) -> Backbone:
    torch.manual_seed(seed)
    module = Backbone()
    norm = module.body[1]
    norm.get_buffer("running_mean").normal_()
    norm.get_buffer("num_batches_tracked").add_(seed)
    module.get_buffer("scale").uniform_(0.5, 2)
    return module


def adamw(module: Backbone) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.head.parameters(), lr=0.05)


def trained(module: Backbone, data: list[Batch], dtype: torch.dtype) -> Backbone:
    module = copy.deepcopy(module).to(dtype)
    optimizer = adamw(module)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(module(x.to(dtype)), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module


@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.long)])
def test_other_values_train_and_evaluate_as_in_torch(fuse: bool, tmp_path: Path) -> None:
    first, other, data = backbone(0), backbone(1), batches(5, 3)
    step = export_training_step(first, F.cross_entropy, data[0], adamw(first), frozen_inputs=True, fuse=fuse)
    assert list(step.constants) == ["order", "local"]
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    session.load_state_dict(other.state_dict())
    for name, tensor in other.state_dict().items():
        np.testing.assert_array_equal(session.state_dict()[name], tensor.numpy(), strict=True)
    for batch in data:
        session.step(*batch)
    native, exact = (trained(other, data, dtype) for dtype in (torch.float32, torch.float64))
    assert_trained(session.state_dict(), native, exact, len(data))
    wanted = native.eval()(data[0][0]).detach().numpy()
    np.testing.assert_allclose(session.evaluate(data[0][0]), wanted, rtol=1e-5, atol=1e-6)
    session.save(tmp_path / "state.safetensors")
    resumed = TrainingSession(step)
    resumed.load(tmp_path / "state.safetensors")
    np.testing.assert_array_equal(resumed.evaluate(data[0][0]), session.evaluate(data[0][0]))
    with pytest.raises(GradfuseError, match=r"'order' is a constant of the model; expected its value, or a step made"):
        session.load_state_dict(other.state_dict() | {"order": torch.arange(6)})


def test_sessions_may_train_what_others_have_frozen() -> None:
    module, (batch,) = Whole(), batches(1, 4)
    frozen = export_training_step(module, F.cross_entropy, batch, frozen_inputs=True, verify="quick")
    assert list(frozen.frozen) == ["frozen.weight", "frozen.bias"]
    module.frozen.requires_grad_()
    optimizer = torch.optim.SGD(module.frozen.parameters(), lr=0.1)
    trains = export_training_step(module, F.cross_entropy, batch, optimizer, evaluation=False, verify="quick")
    first = TrainingSession(trains)
    second = TrainingSession(frozen, share_with=first)
    before = second.state_dict()["frozen.weight"]
    first.step(*batch)
    after = second.state_dict()["frozen.weight"]
    assert (before != after).any()
    np.testing.assert_array_equal(after, first.state_dict()["frozen.weight"])


class Scaled(nn.Module):
    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.decides = decides
        self.head = nn.Linear(4, 3)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.get_buffer("factor")
        if self.decides and factor > 1:
            return self.head(x).relu()  # type: ignore[no-any-return]
        return self.head(x) * factor.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("decides", [False, True])
def test_numbers_that_python_takes_out_of_them_are_those_of_now(decides: bool) -> None:
    """They may decide what is computed, too."""
    module, (batch,) = Scaled(decides=decides), batches(1, 3)
    step = export_training_step(module, F.cross_entropy, batch, frozen_inputs=True, verify="quick")
    session = TrainingSession(step)
    for factor in (3.0, 0.5):
        session.load_state_dict({"factor": np.array(factor, np.float32)}, strict=False)
        module.get_buffer("factor").fill_(factor)
        assert session.step(*batch) == pytest.approx(F.cross_entropy(module(batch[0]), batch[1]).item(), rel=1e-6)


def forward_model() -> onnx.ModelProto:
    """A convolution, normalisation by running statistics, and a head; of a shape that no table of numbers has."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]> net (float[N, 4, 1] x) => (float[N, 3] y) {
            wide = Conv(x, filter, shift)
            normal = BatchNormalization(wide, gain, offset, mean, variance)
            active = Relu(normal)
            axes = Constant<value = int64[1] {2}>()
            flat = Squeeze(active, axes)
            y = Gemm<transB = 1>(flat, head, bias)
        }
    """)
    shapes: dict[str, tuple[int, ...]] = {"filter": (6, 4, 1), "head": (3, 6), "bias": (3,)}
    shapes |= dict.fromkeys(("shift", "gain", "offset", "mean", "variance"), (6,))
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = numbers.uniform(0.5, 2, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("batch_norm", [False, True])
def test_weights_of_onnx_models_take_other_values(batch_norm: bool) -> None:
    model = forward_model()
    options: dict[str, Any] = {
        "trainable": ["head", "bias"],
        "optimizer": optimizers.AdamW(lr=0.05),
        "train_batch_norm": batch_norm,
    }
    step = gradfuse.build_training_step(model, "cross_entropy", frozen_inputs=True, check=True, **options)
    statistics = ["mean", "variance"]
    assert sorted(step.frozen) == sorted(["filter", "shift", "gain", "offset", *([] if batch_norm else statistics)])
    assert list(step.buffers) == (statistics if batch_norm else [])
    numbers = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        changed = numbers.uniform(0.5, 2, array.shape).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
    fixed = gradfuse.build_training_step(model, "cross_entropy", **options)
    session, other = TrainingSession(step), TrainingSession(fixed)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    session.load_state_dict({name: values[name] for name in session.state_dict()})
    for x, y in batches(4, 3):
        x = x[:, :, None]
        assert session.step(x, y) == pytest.approx(other.step(x, y), rel=1e-5)
    np.testing.assert_allclose(session.evaluate(x), other.evaluate(x), rtol=1e-5)


def test_steps_without_such_inputs_are_as_before(tmp_path: Path) -> None:
    step = gradfuse.build_training_step(forward_model(), "cross_entropy", trainable=["head"])
    assert step.frozen == {} and [value.name for value in step.model.graph.input] == ["head", "x", "target"]
    step.save(tmp_path / "step.onnx")
    assert TrainingStep.load(tmp_path / "step.onnx").frozen == {}
