"""Tensors that share memory in a module: right, or refused by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close


class Plus(nn.Module):
    """A layer, and what a function makes of the module and its input."""

    def __init__(self, rest: Callable[[Any, Tensor], Tensor | float] = lambda module, x: 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.rest(self, x)  # type: ignore[no-any-return]


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 5), torch.randn(6, 4)


def _view_of_buffer() -> nn.Module:
    def rest(module: Any, x: Tensor) -> Tensor:
        module.count.add_(1.0)
        return module.second * x[:, :4]  # type: ignore[no-any-return]

    module, count = Plus(rest), torch.zeros(3)
    module.register_buffer("count", count)
    module.register_buffer("second", count[1:2])
    return module


def _over_parameter() -> nn.Module:
    module = Plus(lambda module, x: F.linear(x, module.shadow))
    module.register_buffer("shadow", module.layer.weight.data)
    return module


def _part_of_parameter() -> nn.Module:
    module = Plus(lambda module, x: F.linear(x, module.part).sum())
    module.part = nn.Parameter(module.layer.weight.data[:2])
    return module


def _of_numpy() -> nn.Module:
    module, array = Plus(lambda module, x: (x @ module.shadow.T).sum()), np.zeros((4, 5), np.float32)
    module.layer.weight = nn.Parameter(torch.from_numpy(array))
    module.register_buffer("shadow", torch.from_numpy(array[::2]))
    return module


def _tied_by_data() -> nn.Module:
    module = Plus(lambda module, x: module.other(x))
    module.other = nn.Linear(5, 4)
    module.other.weight.data = module.layer.weight.data
    return module


def _expanded() -> nn.Module:
    def rest(module: Any, x: Tensor) -> Tensor:
        module.level = module.level + 1
        return module.level  # type: ignore[no-any-return]

    module = Plus(rest)
    module.register_buffer("level", torch.zeros(1).expand(4))
    return module


def _attribute() -> nn.Module:
    module = Plus(lambda module, x: F.linear(x, module.plain))
    module.plain = module.layer.weight.data
    return module


def _list() -> nn.Module:
    module = Plus(lambda module, x: F.linear(x, module.held[0].detach()))
    module.held = [module.layer.weight]  # type: ignore[assignment]
    return module


SHARED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a view of a buffer": (_view_of_buffer, "'second' shares memory with 'count', which the step changes"),
    "a buffer over a parameter": (_over_parameter, "'shadow' shares memory with 'layer.weight', which is trained"),
    "a part of a parameter": (_part_of_parameter, "'layer.weight' shares memory with 'part', which is trained"),
    "an array of numpy": (_of_numpy, "'shadow' shares memory with 'layer.weight'"),
    "a tie by data": (_tied_by_data, "'other.weight' shares memory with 'layer.weight'.* one and the same Parameter"),
    "an expanded buffer": (_expanded, "several elements of 'level' have one place in memory, which the step changes"),
    "an attribute": (_attribute, r"memory of 'layer.weight', which is trained, .* in .*test_shared_memory.py:\d+"),
    "a list": (_list, r"memory of 'layer.weight', which is trained, .* in .*test_shared_memory.py:\d+"),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.sampled(every=2)
def test_a_step_that_changes_memory_which_tensors_share_is_refused_by_their_names(case: str) -> None:
    make, match = SHARED[case]
    with pytest.raises(ExportError, match=match):
        export_training_step(make(), F.mse_loss, _batch(), fuse=False)


def _copied() -> nn.Module:
    module = _over_parameter()
    module.register_buffer("shadow", module.get_parameter("layer.weight").detach().clone())
    return module


def _read_itself() -> nn.Module:
    return Plus(lambda module, x: F.linear(x, module.layer.weight.detach()))


def _one_parameter() -> nn.Module:
    module = Plus(lambda module, x: module.other(x))
    module.other = nn.Linear(5, 4)
    module.other.weight = module.layer.weight
    return module


def _constant_views() -> nn.Module:
    module, table = Plus(lambda module, x: module.first * module.every.sum(0)), torch.randn(2, 4)
    module.register_buffer("first", table[0])
    module.register_buffer("every", table)
    return module


def _interleaved() -> nn.Module:
    module, table = Plus(lambda module, x: module.even * x[:, :4] + module.odd), torch.randn(4, 2)
    module.even, module.odd = nn.Parameter(table[:, 0]), nn.Parameter(table[:, 1])
    return module


APART: dict[str, Callable[[], nn.Module]] = {
    "a copy, as advised": _copied,
    "the parameter itself, as advised": _read_itself,
    "one parameter under two names": _one_parameter,
    "views of what nothing changes": _constant_views,
    "columns of one matrix": _interleaved,
}


@pytest.mark.parametrize("case", APART)
@pytest.mark.sampled(every=2)
def test_what_shares_no_memory_that_changes_trains_as_in_pytorch(case: str) -> None:
    module = APART[case]()
    x, y = _batch()
    session = TrainingSession(export_training_step(module, F.mse_loss, (x, y), fuse=False))
    session.step(x.numpy(), y.numpy())
    results = {}
    for dtype in (torch.float32, torch.float64):
        module.to(dtype)
        names, parameters = zip(*module.named_parameters(), strict=True)
        value = F.mse_loss(module(x.to(dtype)), y.to(dtype))
        gradients = torch.autograd.grad(value, parameters)
        results[dtype] = {name: one.numpy() for name, one in zip(names, gradients, strict=True)}
    for name, native in results[torch.float32].items():
        assert_gradients_close(session.gradients[name], native, results[torch.float64][name], np.float32)
