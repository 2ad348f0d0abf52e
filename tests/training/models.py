"""The modules that the tests of training use, and the same training in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse.testing import assert_gradients_close

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
SHAPES = ({0: "batch"}, {0: "batch"})


class Mlp(nn.Module):
    """No two of its parameters have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """Has everything: batch normalisation, tied, frozen and unused parameters, a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 4, bias=False)
        self.again = nn.Linear(4, 6, bias=False)
        self.again.weight = self.embed.weight
        self.spare = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0, 2.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.norm(self.embed(x))))
        return self.out(hidden + torch.tanh(self.again(x * self.get_buffer("scale"))))  # type: ignore[no-any-return]


def batches(count: int, classes: int, size: int = 8, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for _ in range(count)
    ]


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, all else without and at another learning rate."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def train(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    data: Iterable[Batch],
    dtype: torch.dtype,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    rates: Sequence[float] = (),
) -> tuple[list[float], nn.Module]:
    """Train a copy of a module in PyTorch; return all losses and the copy."""
    module = copy.deepcopy(module).to(dtype)
    optimizer = make_optimizer(module)
    losses = []
    for index, (x, y) in enumerate(data):
        if rates:
            for group in optimizer.param_groups:
                group["lr"] = rates[index]
        loss = F.cross_entropy(module(x.to(dtype)), y)
        (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if (index + 1) % accumulate == 0:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses, module


def assert_trained(actual: dict[str, npt.NDArray[Any]], native: nn.Module, exact: nn.Module, updates: int) -> None:
    """Assert that a state_dict is as close to the float64 one as PyTorch's, except for the roundings of the updates."""
    wanted = exact.state_dict()
    assert list(actual) == list(wanted)
    for name, tensor in native.state_dict().items():
        if tensor.is_floating_point():
            # Each update rounds by at most eps / 2 of the value; the assertion grants 4 eps of these terms.
            terms = updates / 8 * float(wanted[name].abs().max())
            assert_gradients_close(actual[name], tensor, wanted[name], np.float32, terms=terms)
        else:
            np.testing.assert_array_equal(actual[name], tensor.numpy())
