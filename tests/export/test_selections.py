"""Layers that a module skips by chance: the exported step decides anew in each call, as PyTorch does at its seed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.export import dropout
from gradfuse.testing import assert_gradients_close
from gradfuse.training.step import DROPOUT_SEED, TrainingStep

DYNAMIC = ({0: "batch"},), ({0: "batch"},)
SEEDS = 6


class Chance(nn.Module):
    """Two layers and a classifier."""

    share = 0.4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        # A draw after the decisions: its number depends on them.
        return self.out(F.dropout(self.skipping(x), 0.3, self.training))  # type: ignore[no-any-return]

    def skipping(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Continued(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.share > 0.0:
                drawn = torch.rand([])
                if drawn < self.share:
                    continue
            x = x + layer(x)
        return x


class Flagged(Chance):
    """A flag that later conditions ask for, and results of layers that skipped ones do not have."""

    def skipping(self, x: Tensor) -> Tensor:
        outputs: tuple[Tensor | None, ...] = (None, None)
        for layer in self.layers:
            skips = False
            if self.training and torch.rand([]) < self.share:
                skips = True
            if not skips or x.shape[1] == 1:
                outputs = (x + layer(x), x)
                x = outputs[0]  # type: ignore[assignment]
            if skips:
                outputs = (None, None)
        return x


class Returned(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        return self._step(self._step(x, 0), 1)

    def _step(self, x: Tensor, index: int) -> Tensor:
        if not self.training:
            return x
        if torch.rand(1).item() < self.share:
            return x
        x = x + self.layers[index](x)
        return x * 2.0


class Mixed(Chance):
    """Draws of Python and numpy, a condition on the batch, numbers that depend on what was skipped, and `super()`."""

    def skipping(self, x: Tensor) -> Tensor:
        run, scale = 0, 1.0
        for layer in self.layers:
            if random.random() < self.share or np.random.uniform(0, 1) < 0.2:
                run += 1
                scale = scale / 2
            elif torch.rand([]) < torch.sigmoid(x.mean()):
                x = x + layer(x) * random.uniform(0.5, 1.5)
            else:
                x = self.otherwise(x, -1.0)
        return x * scale + run if torch.rand(()) < 0.5 else x.flip(-1)

    def otherwise(self, x: Tensor, sign: float) -> Tensor:
        return x * sign


class Derived(Mixed):
    def otherwise(self, x: Tensor, sign: float) -> Tensor:
        if torch.rand([]) < 0.5:
            x = super().otherwise(x, sign)
        return x


class Overwritten(Chance):
    """A tensor that is changed in place, and read by another name."""

    def skipping(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        before = x
        if torch.rand([]) < self.share:
            x[:, 0] = 0.0
            x += self.layers[1](x + 1.0)
        return before * 2.0


def _batch(items: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(items, 6),), (torch.arange(items) % 5,)


def _exported(module: nn.Module, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    return export_training_step(module, F.cross_entropy, _batch(4), dynamic_shapes=DYNAMIC, **options)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Continued, marks=pytest.mark.long),
        Flagged,
        Returned,
        Overwritten,
        pytest.param(Derived, marks=pytest.mark.long),
    ],
)
@pytest.mark.sampled(every=3)
def test_a_step_takes_the_layers_that_pytorch_takes(kind: type[Chance]) -> None:
    torch.manual_seed(0)
    module = kind()
    step = _exported(module)
    batch = _batch(7)
    skipped = set()
    for seed in range(SEEDS):
        step.buffers[DROPOUT_SEED] = np.array(seed)
        results = run(step, batch, kernels=False)
        native, exact = (
            autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        skipped |= {name for name in results if name not in exact}
        largest = max(np.abs(array).max() for name, array in exact.items() if not name.startswith(DROPOUT_SEED))
        for name, result in results.items():
            if name not in exact:
                assert not result.any()
            elif result.dtype.kind == "i":
                np.testing.assert_array_equal(result, exact[name])
            else:
                assert_gradients_close(result, native[name], exact[name], result.dtype, terms=8 * largest)
    assert skipped


@pytest.mark.long
def test_layers_are_skipped_as_often_as_they_should_be() -> None:
    """The share of the steps that skip a layer, and both, is within five standard deviations of independent draws."""
    torch.manual_seed(0)
    step = _exported(Continued())
    session = onnxruntime.InferenceSession(step.model.SerializeToString())
    inputs, targets = _batch(4)
    feeds = step.parameters | step.buffers
    feeds |= dict(zip(step.input_names + step.target_names, map(Tensor.numpy, inputs + targets), strict=True))
    names = [f"layers.{layer}.0.weight.grad" for layer in range(2)]
    calls = 2000
    skipped = []
    for seed in range(calls):
        gradients = session.run(names, feeds | {DROPOUT_SEED: np.array(seed)})
        skipped.append([not gradient.any() for gradient in gradients])
    shares = np.mean([[*both, all(both)] for both in skipped], axis=0)
    for share, wanted in zip(shares, (0.4, 0.4, 0.16), strict=True):
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / calls) ** 0.5


def test_the_evaluation_model_skips_nothing() -> None:
    torch.manual_seed(0)
    module = Continued()
    step = _exported(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    model = step.evaluation_model
    assert model is not None
    assert not {"Where", "BitShift"} & {node.op_type for node in model.graph.node}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"fuse": False, "accumulate": 2}, {"max_grad_norm": 1.0}])
@pytest.mark.sampled(every=3)
def test_steps_that_skip_layers_train(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Continued()
    session = TrainingSession(_exported(module, optimizer=torch.optim.AdamW(module.parameters(), lr=0.05), **options))
    inputs, targets = (part[0].numpy() for part in _batch(4))
    losses = [session.step(inputs, targets) for _ in range(60)]
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])


class Noisy(Continued):
    """A draw that eval mode reads, or that nothing reads there."""

    reads = True

    def skipping(self, x: Tensor) -> Tensor:
        noise = torch.rand([])
        return super().skipping(x) + (noise if self.training or self.reads else 0.0)


@pytest.mark.long
@pytest.mark.parametrize("reads", [True, False])
def test_draws_in_eval_mode_are_part_of_the_evaluation_model(reads: bool) -> None:
    module = Noisy()
    module.reads = reads
    step = _exported(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), evaluation=True)
    assert step.evaluation_model is not None
    assert ("dropout_seed" in [value.name for value in step.evaluation_model.graph.input]) is reads


class Shaped(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        if torch.rand([]) < 0.5:
            x = x[:, :3]
        return x.sum(1, keepdim=True).expand(-1, 6)


class Collected(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        states = []
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                x = layer(x)
                states.append(x)
        return x + sum(states)


class Broken(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                break
            x = layer(x)
        return x


class Repeated(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        while torch.rand([]) < 0.5:
            x = x * 2.0
        return x


class Caught(Chance):
    """Code that catches what goes wrong with tracing."""

    def skipping(self, x: Tensor) -> Tensor:
        try:
            states = (x,) if torch.rand([]) < 0.5 else (x, x)
            x = x * len(states)
        except Exception:
            pass
        return x


class Asked(Chance):
    """A variable that is something in one case and nothing in the other."""

    def skipping(self, x: Tensor) -> Tensor:
        state = None
        if torch.rand([]) < 0.5:
            state = self.layers[0](x)
        if state is None:
            state = x * 5.0
        return state


@pytest.mark.parametrize("kind", [Shaped, Collected, Broken, Repeated, Caught])
def test_what_has_no_form_that_chooses_is_refused_with_its_place(kind: type[Chance]) -> None:
    with pytest.raises(ExportError, match=r"by a random number.*skipping \(test_selections.py:\d+\)"):
        _exported(kind())


class Noted(Chance):
    """One side writes into an object that the exporter does not know."""

    def skipping(self, x: Tensor) -> Tensor:
        notes = Notes()
        notes.state = x
        if torch.rand([]) < 0.5:
            notes.state = x * 2.0
        return notes.state


class Notes:
    state: Tensor


@pytest.mark.parametrize("kind", [Noted, Asked])
def test_both_ways_are_compared_with_pytorch(kind: type[Chance]) -> None:
    with pytest.raises(ExportError, match=r"differs from PyTorch|by a random number"):
        _exported(kind())


class Rare(Chance):
    def skipping(self, x: Tensor) -> Tensor:
        return x * 2.0 if torch.rand([]) < self.share else x


@pytest.mark.long
def test_rare_decisions_are_compared_and_others_refused() -> None:
    module = Rare()
    module.share = 1e-4
    _exported(module)
    module.share = 0.0
    with pytest.raises(ExportError, match=r"skipping \(test_selections.py:\d+\) went the same way with all seeds"):
        _exported(module)


class Imported(Chance):
    """Python's own random numbers, by a name that cannot be replaced."""

    def skipping(self, x: Tensor) -> Tensor:
        return x * uniform(0.5, 1.5)


uniform = random.uniform


def test_draws_that_are_not_seeded_are_refused() -> None:
    with pytest.raises(ExportError, match="random numbers by numpy or by Python"):
        _exported(Imported())


def test_modules_are_left_as_they_were() -> None:
    before = Continued.skipping.__code__, random.random, np.random.rand
    _exported(Continued())
    assert (Continued.skipping.__code__, random.random, np.random.rand) == before
    with dropout.SeededDropout(torch.tensor(1)), dropout.SeededDropout(torch.tensor(2)) as inner:
        random.random()
    assert inner.count == 1
    assert (random.random, np.random.rand) == before[1:]
