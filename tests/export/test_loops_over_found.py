"""Loops over what `nonzero` finds, such as the experts that got tokens: the step runs a round where PyTorch would."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from long_tests import mostly_long
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close
from gradfuse.training.step import DROPOUT_SEED, TrainingStep

DYNAMIC = ({0: "batch"},), ({0: "batch"},)
WIDTH, EXPERTS = 6, 4
SOME, ALL = 2, 40
"""So many rows find some of the experts, and all of them."""


class Experts(nn.Module):
    """A router, which sends each row to two experts, and a loop over those that got rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict(
            {f"expert_{i}": nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WIDTH)) for i in range(EXPERTS)}
        )
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.out(x + self.mixed(x, weights, chosen))  # type: ignore[no-any-return]

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError

    def of(self, expert: object, x: Tensor) -> Tensor:
        return self.experts[f"expert_{expert}"](x)  # type: ignore[no-any-return]


class Added(Experts):
    """As in Switch Transformers."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            place, row = torch.where(mask[expert].squeeze(0))
            part = self.of(expert[0], x[None, row].reshape(-1, x.shape[-1])) * weights[row, place, None]
            total.index_add_(0, row, part)
        return total


class Dropping(Added):
    """Draws within the rounds, and one afterwards, whose number depends on them."""

    def of(self, expert: object, x: Tensor) -> Tensor:
        return F.dropout(super().of(expert, x), 0.3, self.training)

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return F.dropout(super().mixed(x, weights, chosen), 0.4, self.training)


class Stacked(Experts):
    """As in DBRX: weights in one tensor, and one class too many, which is never found."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            with torch.no_grad():
                place, row = torch.where(mask[expert])
            total.index_add_(0, row, (x[row] @ self.stacked[expert]) * weights[row, place, None])
        return total


class Rebound(Experts):
    """Rounds that do something where nothing is selected as well: a number, a tensor that is bound anew, `continue`."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rounds, total = 0, x
        for expert in F.one_hot(chosen, EXPERTS).sum((0, 1)).flatten().nonzero().squeeze(-1):
            rounds += 1
            if expert == 2:
                total = total * 0.5
                continue
            share = torch.where(chosen == expert, weights, 0.0).sum(-1, keepdim=True)
            total = total.tanh() + share * self.of(int(expert), x)
        else:
            total = total + 1.0
        return total * rounds


class Ended(Experts):
    """The last one that is found, of a variable that has a value before, and loops in loops."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        last = torch.tensor(-1)
        for last in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero().flatten():
            for row in (chosen[0] > last).nonzero():
                x = x + self.of(int(last), x) * (1.0 + row)
        return x * (1.0 + last)


class Views(Experts):
    """Tensors that are changed in place, through views and by more than one name."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = self.of(0, x)
        alias, left = total, total[:, :3]
        for expert in torch.where(F.one_hot(chosen, EXPERTS).sum((0, 1)) > 0)[0]:
            alias += torch.where(chosen == expert, weights, 0.0).sum(-1, keepdim=True)
            left.mul_(0.5)
            total[:, 1] -= 1.0
        return total * x


def _batch(items: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(items, WIDTH),), (torch.arange(items) % 4,)


def _exported(module: nn.Module, items: int = 3, fuse: bool = True) -> TrainingStep:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return export_training_step(module, F.cross_entropy, _batch(items), dynamic_shapes=DYNAMIC, fuse=fuse)


@pytest.mark.parametrize("items", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some found", "all found"])
@pytest.mark.parametrize("kind", mostly_long((Added, Dropping, Stacked, Rebound, Ended, Views), (Added, Views)))
@pytest.mark.sampled(every=4)
def test_rounds_are_those_of_pytorch(kind: type[Experts], items: int) -> None:
    torch.manual_seed(0)
    module = kind()
    step = _exported(module, items)
    found = set()
    for seed, other in enumerate((1, 2, 5, 40, 1)):
        batch = _batch(other)
        if DROPOUT_SEED in step.buffers:
            step.buffers[DROPOUT_SEED] = np.array(seed)
        native, exact = (
            autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        largest = max(np.abs(array).max() for name, array in exact.items() if not name.startswith(DROPOUT_SEED))
        for kernels in (False, True):
            results = run(step, batch, kernels=kernels)
            for name, result in results.items():
                if name not in exact:
                    assert not result.any()
                    found.add(name)
                elif result.dtype.kind == "i":
                    np.testing.assert_array_equal(result, exact[name])
                else:
                    assert_gradients_close(result, native[name], exact[name], result.dtype, terms=8 * largest)
    assert found or kind in (Stacked, Views)


def test_steps_with_loops_train_and_evaluate() -> None:
    torch.manual_seed(0)
    module = Added()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    # Experts that get no row here are trained as soon as they get some.
    step = export_training_step(module, F.cross_entropy, _batch(SOME), optimizer, dynamic_shapes=DYNAMIC)
    session = TrainingSession(step)
    for items in (1, 40, 3):
        inputs, targets = _batch(items)
        with torch.no_grad():
            np.testing.assert_allclose(session.evaluate(inputs[0].numpy()), module(*inputs), rtol=0, atol=1e-5)
        loss = F.cross_entropy(module(*inputs), targets[0])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert abs(session.step(inputs[0].numpy(), targets[0].numpy()) - loss.item()) <= 1e-5
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], tensor, rtol=0, atol=1e-5)


class Kept:
    value: Tensor


class Noted(Experts):
    """Each round writes into an object that the exporter does not know."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        kept = Kept()
        kept.value = x
        for expert in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            kept.value = kept.value * 0.5 + expert
        return kept.value


class Counted(Experts):
    """Each round counts in the module."""

    count = 0

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        self.count = 0
        for _ in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            self.count += 1
        return x * self.count


class First(Experts):
    """A round that fails where nothing is selected, which is no reason to leave it out."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = x
        for expert in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            rows = (chosen == expert).any(-1).nonzero().squeeze(-1)
            total = total + x[rows][0]
        return total


class Broken(Experts):
    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = x
        for expert in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            total = total + self.of(int(expert), x)
            if expert == 3:
                break
        return total


class Cleared(Experts):
    """What was searched is another when the loop begins."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        counts = F.one_hot(chosen, EXPERTS).sum((0, 1))
        hit = counts.nonzero()
        counts.zero_()
        total = x
        for expert in hit:
            total = total + self.of(int(expert), x)
        return total


class Last(Experts):
    """The last one that is found is used after the loop."""

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = x
        for expert in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            total = total + expert
        return total * expert  # type: ignore[no-any-return]


class Listed(Experts):
    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        hit = F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero()
        return torch.stack([self.of(int(expert), x) for expert in hit]).sum(0)


@pytest.mark.parametrize("items", [pytest.param(SOME, marks=pytest.mark.long), ALL], ids=["some found", "all found"])
@pytest.mark.parametrize("kind", [Noted, Counted, First, Broken, Cleared, Last, Listed])
@pytest.mark.sampled(every=2)
def test_what_no_selection_can_leave_out_is_refused(kind: type[Experts], items: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"numbers that it takes out of tensors what it computes, in \w+\.mixed"):
        _exported(kind(), items)
