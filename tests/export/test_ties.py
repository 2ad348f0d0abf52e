"""Operators that choose among equal numbers: what PyTorch leaves open is refused if a step's results follow from it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfuse
from gradfuse import ExportError, export_training_step
from gradfuse.testing import assert_gradients_close

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
@pytest.mark.sampled(every=2)
def test_a_step_that_follows_from_an_open_choice_is_refused_with_its_line(case: str) -> None:
    match = (
        rf"{case} chooses between equal numbers, in <lambda> \(test_ties\.py:\d+\), for which PyTorch defines no order"
    )
    with pytest.raises(ExportError, match=match):
        export_training_step(Choosing(OPEN[case]), F.mse_loss, _batch())


@pytest.mark.parametrize("case", DEFINED)
@pytest.mark.sampled(every=2)
def test_a_step_whose_choice_is_defined_or_does_not_matter_exports(case: str) -> None:
    module, (x, y) = Choosing(DEFINED[case]), _batch()
    session = gradfuse.TrainingSession(export_training_step(module, F.mse_loss, (x, y), fuse=False))
    loss = F.mse_loss(module(x), y)
    assert session.step(x.numpy(), y.numpy()) == pytest.approx(loss.item(), rel=1e-5)


AT_KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1)[0],
    "min, in 16 bits": lambda x: x.half().min(1, keepdim=True)[0].float(),
    "amax": lambda x: x.amax(1),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 4),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.view(-1, 1, 3, 5), (2, 3)),
    "relu6": lambda x: F.relu6(x * 3),
    "hardtanh": lambda x: F.hardtanh(x, -1.0, 2.0),
    "clamp": lambda x: x.clamp(-1.0, 2.0),
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("case", AT_KINKS)
@pytest.mark.sampled(every=2)
def test_gradients_at_equal_numbers_bounds_and_infinities_are_those_of_torch(case: str, fuse: bool) -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moves = nn.Parameter(torch.zeros(15))

        def forward(self, x: Tensor) -> Tensor:
            return AT_KINKS[case](x + self.moves)

    torch.manual_seed(0)
    module, x = Moved(), torch.randn(6, 15)
    factors = torch.rand(module(x).shape[1:])
    step = export_training_step(
        module, lambda y: (y * factors).exp().sum(), (x, ()), dynamic_shapes=({0: "items"}, ()), fuse=fuse
    )
    session = gradfuse.TrainingSession(step)
    for batch in (x.round(), torch.zeros(2, 15), torch.where(x > 0, -torch.inf, x.round())):
        module.zero_grad()
        (module(batch) * factors).exp().sum().backward()
        session.step(batch.numpy(), ())
        native = module.moves.grad
        assert native is not None
        moves = torch.zeros(15, dtype=torch.float64, requires_grad=True)
        (AT_KINKS[case](batch.double() + moves) * factors).exp().sum().backward()  # type: ignore[no-untyped-call]
        exact = moves.grad
        assert exact is not None
        assert_gradients_close(session.gradients["moves"], native.numpy(), exact.numpy(), np.float32)
