"""Cross entropy in float64 by rows, against PyTorch's own at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradfuse.export import large_losses
from gradfuse.export.large_losses import LargeLosses

EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_losses, "FEWEST", 1)
    monkeypatch.setattr(large_losses, "_AT_ONCE", 3 * 7)


def results(options: dict[str, Any], by_rows: bool, **given: Any) -> list[Tensor]:
    """The loss, and the gradients of a function of it by logits and by a factor of them, once more differentiated."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 7, generator=generator, dtype=torch.float64).requires_grad_()
    target = torch.randint(0, 7, (10,), generator=generator)
    target[[1, 9]] = -100
    with LargeLosses() if by_rows else torch.enable_grad():
        loss = functional.cross_entropy(logits * 1.5, target, **given, **options)
        value = (loss * torch.arange(1.0, 1 + loss.numel(), dtype=torch.float64).reshape(loss.shape)).sum()
        (first,) = torch.autograd.grad(value, logits, retain_graph=True)
        (kept,) = torch.autograd.grad(value, logits, create_graph=True)
        (second,) = torch.autograd.grad((kept**2).sum(), logits)
    return [loss.detach(), first, second]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_derivatives(reduction: str, smoothing: float, weighted: bool) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    given = {"weight": torch.linspace(0.0, 2.0, 7, dtype=torch.float64)} if weighted else {}
    for found, wanted in zip(results(options, True, **given), results(options, False, **given), strict=True):
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= 32 * EPS * float(wanted.abs().max())


def test_rows_that_are_all_ignored_have_no_mean() -> None:
    with LargeLosses():
        loss = functional.cross_entropy(torch.ones(4, 7, dtype=torch.float64), torch.full((4,), -100))
    assert loss.isnan()


def test_what_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits alone, and nothing of their size besides."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    logits = torch.randn(64, 70, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), LargeLosses():
        functional.cross_entropy(logits, torch.zeros(64, dtype=torch.int64))
    assert {one.data_ptr() for one in kept if one.numel() >= logits.numel()} == {logits.data_ptr()}


@pytest.mark.parametrize("shape", [(4, 7, 2), (7,)])
def test_other_shapes_are_left_to_pytorch(shape: tuple[int, ...]) -> None:
    logits = torch.ones(shape, dtype=torch.float64)
    target = torch.zeros((*shape[:1], *shape[2:]) if len(shape) > 1 else (), dtype=torch.int64)
    wanted = functional.cross_entropy(logits, target)
    with LargeLosses():
        assert functional.cross_entropy(logits, target) == wanted
