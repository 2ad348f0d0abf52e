"""Steps of bfloat16: parameters, state and batch are of it, and stock onnxruntime trains them on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfuse
from gradfuse import TrainingSession, TrainingStep
from gradfuse.models.arrays import to_numpy

BATCHES = [(torch.randn(n, 3, 8, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 5) for n in (4, 7)]
DYNAMIC = {0: torch.export.Dim("batch")}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm, self.running = nn.Linear(8, 24), nn.LayerNorm(8), nn.BatchNorm1d(3)
        self.convolution, self.last = nn.Conv1d(3, 4, 3), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.norm(x))[:, None].chunk(3, -1)
        h = x + F.scaled_dot_product_attention(query, key, value)[:, 0]
        return self.last(F.gelu(self.convolution(self.running(h))).flatten(1))  # type: ignore[no-any-return]


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().bfloat16()


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=2.0**-6, weight_decay=0.125)


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    module = layers()
    x, y = BATCHES[0]
    shapes = ((DYNAMIC,), (DYNAMIC,))
    return gradfuse.export_training_step(
        module, F.cross_entropy, (x.bfloat16(), y), optimizer(module), dynamic_shapes=shapes
    )


def trained(dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor], Tensor]:
    module = layers().to(dtype)
    updates, losses = optimizer(module), []
    for x, y in BATCHES * 2:
        updates.zero_grad()
        loss = F.cross_entropy(module(x.bfloat16().to(dtype)), y)
        loss.backward()  # type: ignore[no-untyped-call]
        updates.step()
        losses.append(loss.item())
    module.eval()
    with torch.no_grad():
        return losses, module.state_dict(), module(BATCHES[0][0].bfloat16().to(dtype))


def rooted(values: Mapping[str, Any], exact: Mapping[str, Tensor]) -> float:
    """The root of the sum of squared errors of all floating tensors: each is the sum of many roundings."""
    floats = [name for name, tensor in exact.items() if tensor.is_floating_point()]
    errors = [np.asarray(values[name], np.float64) - exact[name].double().numpy() for name in floats]
    return float(np.sqrt(sum(np.square(error).sum() for error in errors)))


def require_exact_updates(session: TrainingSession) -> None:
    """Train, and expect errors of a few times PyTorch's own in bfloat16."""
    losses = [session.step(x.bfloat16(), y) for x, y in BATCHES * 2]
    native_losses, native, native_output = trained(torch.bfloat16)
    exact_losses, exact, exact_output = trained(torch.float64)
    state = session.state_dict()
    # The count of batches, which no number follows from, is not in ONNX models.
    assert native.keys() - state.keys() <= {"running.num_batches_tracked"}
    assert {name: f"torch.{array.dtype}" for name, array in state.items()} == {
        name: str(tensor.dtype) for name, tensor in native.items() if name in state
    }
    assert rooted(state, exact) <= 1.5 * rooted({name: tensor.double() for name, tensor in native.items()}, exact)
    spacing = 2.0**-8 * max(exact_losses)
    for ours, theirs, wanted in zip(losses, native_losses, exact_losses, strict=True):
        assert abs(ours - wanted) <= abs(theirs - wanted) + spacing
    output = session.evaluate(BATCHES[0][0].bfloat16())
    assert output.dtype == ml_dtypes.bfloat16
    assert rooted({"": output}, {"": exact_output}) <= 1.5 * rooted({"": native_output.double()}, {"": exact_output})


@pytest.mark.parametrize("kernels", [True, False])
def test_updates_are_as_exact_as_those_of_pytorch(
    step: TrainingStep, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(gradfuse.library, "find_library", lambda: None)
    step.save(tmp_path / "step.onnx")
    require_exact_updates(TrainingSession(tmp_path / "step.onnx"))


@pytest.mark.parametrize("fuse", [True, False])
def test_models_in_onnx(fuse: bool, tmp_path: Path) -> None:
    torch.onnx.export(
        layers().eval(),
        (BATCHES[0][0].bfloat16(),),
        tmp_path / "forward.onnx",
        dynamo=True,
        dynamic_shapes=({0: "batch"},),
        verbose=False,
        optimize=False,  # Folding a transposition would take the name of the weight.
    )
    step = gradfuse.build_training_step(
        tmp_path / "forward.onnx",
        "cross_entropy",
        optimizer=gradfuse.optimizers.AdamW(lr=2.0**-6, weight_decay=0.125),
        train_batch_norm=True,
        fuse=fuse,
    )
    require_exact_updates(TrainingSession(step))


def test_checkpoints_and_state_dicts(step: TrainingStep, tmp_path: Path) -> None:
    session = TrainingSession(step)
    (x, y), narrow = BATCHES[0], BATCHES[0][0].bfloat16()
    session.step(narrow, y)
    session.save(tmp_path / "begun.safetensors", extra={"epoch": 1})
    after = [session.step(narrow, y) for _ in range(2)]
    resumed = TrainingSession(step)
    assert resumed.load(tmp_path / "begun.safetensors") == {"epoch": 1}
    # Arrays do as well as tensors.
    assert [resumed.step(to_numpy(narrow), y) for _ in range(2)] == after
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(resumed.state_dict()[name], array)

    session.save(tmp_path / "weights.safetensors", optimizer=False)
    module = layers()
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "weights.safetensors"))
    other = TrainingSession(step)
    other.load_state_dict(copy.deepcopy(module).state_dict())
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], array)
    np.testing.assert_array_equal(other.evaluate(narrow), session.evaluate(narrow))

    with pytest.raises(gradfuse.GradfuseError, match=r"'x' is float32 .*; expected bfloat16 of shape \(batch, 3, 8\)"):
        session.step(x, y)


def test_gradients_are_of_bfloat16_and_outputs_of_float32() -> None:
    module, (x, y) = layers(), BATCHES[0]

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(output, target), {"output": output}

    step = gradfuse.export_training_step(module, loss, (x.bfloat16(), y), evaluation=False)
    session = TrainingSession(step)
    session.step(x.bfloat16(), y)
    (output,) = session.outputs.values()
    native = module(x.bfloat16())
    F.cross_entropy(native, y).backward()  # type: ignore[no-untyped-call]
    exact_module = layers().double()
    exact = exact_module(x.bfloat16().double())
    F.cross_entropy(exact, y).backward()  # type: ignore[no-untyped-call]
    assert output.dtype == np.float32
    native, exact = native.detach().double(), exact.detach()
    assert rooted({"": output}, {"": exact}) <= 1.5 * rooted({"": native}, {"": exact})
    wanted = {name: parameter.grad for name, parameter in exact_module.named_parameters()}
    theirs = {name: parameter.grad.double() for name, parameter in module.named_parameters()}  # type: ignore[union-attr]
    assert {array.dtype.name for array in session.gradients.values()} == {"bfloat16"}
    assert rooted(session.gradients, wanted) <= 1.5 * rooted(theirs, wanted)  # type: ignore[arg-type]


def test_a_memory_budget_changes_no_bit() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 3)
    ).bfloat16()
    batch = torch.randn(512, 64).bfloat16(), torch.arange(512) % 3
    results = []
    for budget in (None, 0.8):
        step = gradfuse.export_training_step(module, F.cross_entropy, batch, memory_budget=budget, evaluation=False)
        session = TrainingSession(step)
        results.append((session.step(*batch), session.gradients))
    (loss, gradients), (other_loss, others) = results
    assert loss == other_loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, others[name])


class Experts(nn.Module):
    """Groups of rows, each with a matrix of its own; float64 has no kernel of `grouped_mm`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 8) / 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return F.grouped_mm(x, self.weight, offs=ends).square()
        rows = x.tensor_split(ends.long())
        products = [part @ weight for part, weight in zip(rows[:-1], self.weight, strict=True)]
        # What is behind the last group is 0.
        return torch.cat([*products, rows[-1].new_zeros(len(rows[-1]), 8)]).square()


@pytest.mark.parametrize("fuse", [True, False])
def test_products_of_groups_of_rows(fuse: bool) -> None:
    torch.manual_seed(0)
    module = Experts().bfloat16()
    batch = (torch.randn(9, 16).bfloat16(), torch.tensor([4, 4, 9], dtype=torch.int32)), torch.randn(9, 8).bfloat16()
    step = gradfuse.export_training_step(module, F.mse_loss, batch, evaluation=False, fuse=fuse)
    session = TrainingSession(step)
    results: list[dict[str, Any]] = [{}, {}, {}]
    for ends in ([4, 4, 9], [0, 7, 9], [2, 2, 2]):
        rows = torch.tensor(ends, dtype=torch.int32)
        session.step((batch[0][0], rows), batch[1])
        results[0][str(ends)] = session.gradients["weight"]
        for result, dtype in zip(results[1:], (torch.bfloat16, torch.float64), strict=True):
            other = copy.deepcopy(module).to(dtype)
            F.mse_loss(other(batch[0][0].to(dtype), rows), batch[1].to(dtype)).backward()  # type: ignore[no-untyped-call]
            result[str(ends)] = other.weight.grad.double()  # type: ignore[union-attr]
    ours, native, exact = results
    assert rooted(ours, exact) <= 1.5 * rooted(native, exact)
