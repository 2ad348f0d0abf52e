"""Losses of confident batches keep the digits of what is nearly 0, in PyTorch's operators and in exported steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export.decompositions.test_products import assert_same
from like_torch import assert_like_torch
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.export import standins
from gradfuse.export.decompositions import logarithms
from gradfuse.testing import assert_gradients_close

POINTS = torch.tensor([-300.0, -50.0, -20.0, -3.0, -1e-3, 0.0, 1e-9, 0.7, 5.0, 19.9, 20.1, 80.0, 300.0])


class Survival(nn.Linear):
    """The partial likelihood of Cox's model, of items in the order of their times."""

    def forward(self, x: Tensor) -> Tensor:
        risks = super().forward(x)
        return (torch.logcumsumexp(risks, 0) - risks) * torch.arange(1.0, len(x) + 1).unsqueeze(1)


@pytest.mark.parametrize("items", [5, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_running_sums_of_exponentials_keep_what_is_small(items: int, dynamic: bool) -> None:
    """From one item to the next, the largest so far is by hundreds more than all before it."""
    torch.manual_seed(0)
    module = Survival(4, 3)
    batches = [
        ((torch.randn(n, 4) + 300.0 * torch.arange(float(n)).unsqueeze(1),), (torch.zeros(n, 3),)) for n in (4, items)
    ]
    axes: dict[int, str] | None = {0: "items"} if dynamic else None
    given = batches[0] if dynamic else batches[1]
    step = export_training_step(module, F.l1_loss, given, dynamic_shapes=((axes,), (axes,)), fuse=False)
    assert_like_torch(step, module, F.l1_loss, batches[1])


@pytest.mark.parametrize("dim", [0, -1])
def test_running_sums_of_exponentials(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)
    x = torch.stack([POINTS, POINTS.flip(0), torch.randn(len(POINTS))])
    assert_same(lambda x: logarithms.logcumsumexp(x, dim), lambda x: x.logcumsumexp(dim), x)
    assert torch.equal(logarithms.logcumsumexp(torch.tensor(2.0), 0), torch.tensor(2.0))


def test_of_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)
    assert_same(logarithms.softplus, F.softplus, POINTS)
    assert_same(lambda x: logarithms.softplus(x, 0.5, 3.0), lambda x: F.softplus(x, 0.5, 3.0), POINTS)
    assert_same(lambda x: logarithms.log_sigmoid(x)[0], F.logsigmoid, POINTS)
    assert_same(logarithms.sigmoid, torch.sigmoid, POINTS)


@pytest.mark.parametrize("name", ["logaddexp", "logaddexp2"])
def test_of_two_numbers(name: str) -> None:
    a, b = POINTS.unsqueeze(0), POINTS.unsqueeze(1)
    assert_same(getattr(logarithms, name), getattr(torch, name), a, b)
    infinite = torch.tensor([torch.inf, -torch.inf, 1.0])
    ours, native = (f(infinite, infinite.unsqueeze(1)) for f in (getattr(logarithms, name), getattr(torch, name)))
    assert torch.equal(ours, native)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_of_logits_and_targets(reduction: int, weighted: bool) -> None:
    targets = torch.tensor([[0.0], [1.0], [0.3]])
    weights = (torch.rand(len(POINTS)), torch.rand(3, len(POINTS))) if weighted else (None, None)
    logits = POINTS.expand(3, -1)
    word = ("none", "mean", "sum")[reduction]

    def native(x: Tensor, y: Tensor) -> Tensor:
        weight, positive = (one if one is None else one.to(x) for one in weights)
        return F.binary_cross_entropy_with_logits(x, y, weight, pos_weight=positive, reduction=word)

    def ours(x: Tensor, y: Tensor) -> Tensor:
        weight, positive = (one if one is None else one.to(x) for one in weights)
        return logarithms.binary_cross_entropy_with_logits(x, y, weight, positive, reduction)

    assert_same(ours, native, logits, targets.expand(3, len(POINTS)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_of_probabilities(reduction: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)
    probabilities = torch.tensor([0.0, 1e-30, 1e-9, 0.3, 0.5, 1.0 - 1e-9, 1.0]).double()
    targets = torch.tensor([[0.0], [1.0], [0.3]]).expand(3, 7)
    weight = torch.rand(3, 7).double()
    word = ("none", "mean", "sum")[reduction]

    def ours(p: Tensor, y: Tensor) -> Tensor:
        return logarithms.binary_cross_entropy(p, y, weight, reduction)

    def native(p: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(p, y, weight, reduction=word)

    assert_same(lambda p: ours(p, targets.double()), lambda p: native(p, targets.double()), probabilities.expand(3, 7))
    # PyTorch's gradient of the target is infinite at 0 and 1.
    weight = weight[:, 2:5]
    assert_same(ours, native, probabilities[2:5].expand(3, 3), targets[:, 2:5])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * self.layer(x)  # type: ignore[no-any-return]


def test_gates_stay_what_they_are() -> None:
    step = export_training_step(Gated(), F.mse_loss, (torch.randn(3, 4), torch.randn(3, 4)))
    assert [node.op_type for node in step.model.graph.node].count("Sigmoid") == 1


@pytest.mark.parametrize(
    "loss",
    (
        lambda x, y: F.binary_cross_entropy_with_logits(x, (y > 0).to(x)),
        F.soft_margin_loss,
        lambda x, y: F.softplus(-x * y).mean(),
        lambda x, y: -F.logsigmoid(x * y).mean(),
        lambda x, y: (-x * y).exp().log1p().mean(),
        lambda x, y: torch.logaddexp(-x * y, torch.zeros_like(x)).mean(),
        lambda x, y: -(-(-x * y).exp()).expm1().mean(),
        lambda x, y: F.binary_cross_entropy(x.sigmoid().squeeze(1), (y > 0).to(x).squeeze(1)),
        lambda x, y: F.mse_loss(x.sigmoid(), (y > 0).to(x)),
        lambda x, y: -(1.0 - (-x * y).sigmoid()).log().mean(),
    ),
    ids="bce_with_logits soft_margin softplus logsigmoid log1p logaddexp expm1 bce mse log".split(),
)
@pytest.mark.parametrize("labels", ("of both signs", "all negative"))
@pytest.mark.sampled(every=3)
def test_confident_batches_export(loss: Callable[[Tensor, Tensor], Tensor], labels: str) -> None:
    torch.manual_seed(0)
    y = torch.sign(torch.randn(16, 1)) if labels == "of both signs" else -torch.ones(16, 1)
    module = nn.Linear(4, 1, bias=False)
    module.weight.data = torch.tensor([[18.0, 0.0, 0.0, 0.0]])
    batch = (torch.cat([y * (1.0 + 0.1 * torch.rand(16, 1)), 0.1 * torch.randn(16, 3)], 1),), (y,)
    step = export_training_step(module, loss, batch)
    results = run(step, batch, kernels=True)
    native, exact = (autograd(module, loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    # The exponent of a small number is known to the rounding of the logit, which is 20.
    for name, result in results.items():
        terms = 64 * np.abs(exact[name]).max()
        assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)


def test_what_is_confident_and_wrong_does_not_explode() -> None:
    """Where 1 - p is rounded away, the loss divides by 1e-12, and a slope of p that is not 0 would explode."""

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(o), y)

    module = nn.Linear(1, 1)
    nn.init.ones_(module.weight), nn.init.zeros_(module.bias)
    targets = torch.zeros(6, 1)
    step = export_training_step(module, loss, (torch.linspace(-2, 2, 6)[:, None], targets), fuse=False)
    batch = (torch.tensor([10.5, 14.0, 16.0, 17.0, 20.0, 40.0])[:, None],), (targets,)
    native, exact = (autograd(module, loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in run(step, batch, kernels=False).items():
        assert_gradients_close(result, native[name], exact[name], result.dtype, terms=64)
