"""Operators that choose among equal numbers: what PyTorch leaves open is refused if a step's results follow from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfuse
from gradfuse import ExportError, export_training_step

ITEMS, WIDTH = 5, 6


class Choosing(nn.Module):
    """A layer, and what a function makes of its result, of which many numbers are 0."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.relu(self.layer(x) - 0.5))


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ITEMS, 4), torch.randn(ITEMS, WIDTH)


def _kept(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden + torch.zeros_like(hidden).scatter(-1, places, 1.0)


def _masked(hidden: Tensor) -> Tensor:
    """Choose four of three that a mask leaves, as sparse attention does at the beginning of a text."""
    mask = torch.arange(WIDTH) > 2
    places = hidden.masked_fill(mask, -torch.inf).topk(4)[1]
    left_out = torch.ones_like(hidden, dtype=torch.bool).scatter(-1, places, False)
    return hidden.masked_fill(left_out | mask, -torch.inf).softmax(-1)


OPEN: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda hidden: _kept(hidden, hidden.topk(4)[1]),
    "kthvalue": lambda hidden: _kept(hidden, hidden.kthvalue(2, -1, keepdim=True)[1]),
    "median": lambda hidden: _kept(hidden, hidden.median(-1, keepdim=True)[1]),
    "mode": lambda hidden: _kept(hidden, hidden.mode(-1, keepdim=True)[1]),
}
DEFINED: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda hidden: hidden + hidden.topk(4)[0].sum(-1, keepdim=True) + hidden.median(-1, keepdim=True)[0],
    "argmax": lambda hidden: hidden + (hidden * 0).argmax(-1, keepdim=True) + hidden.min(-1, keepdim=True)[1],
    "sort": lambda hidden: hidden.gather(-1, hidden.sort(-1)[1]) * torch.arange(WIDTH),
    "masked": _masked,
}


@pytest.mark.parametrize("case", OPEN)
def test_a_step_that_follows_from_an_open_choice_is_refused_with_its_line(case: str) -> None:
    match = (
        rf"{case} chooses between equal numbers, in <lambda> \(test_ties\.py:\d+\), for which PyTorch defines no order"
    )
    with pytest.raises(ExportError, match=match):
        export_training_step(Choosing(OPEN[case]), F.mse_loss, _batch())


@pytest.mark.parametrize("case", DEFINED)
def test_a_step_whose_choice_is_defined_or_does_not_matter_exports(case: str) -> None:
    module, (x, y) = Choosing(DEFINED[case]), _batch()
    session = gradfuse.TrainingSession(export_training_step(module, F.mse_loss, (x, y), fuse=False))
    loss = F.mse_loss(module(x), y)
    assert session.step(x.numpy(), y.numpy()) == pytest.approx(loss.item(), rel=1e-5)
