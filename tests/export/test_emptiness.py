"""Conditions whether anything is selected: a step leaves them out where the code does nothing for empty selections."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from long_tests import mostly_long
from torch import Tensor, nn

from gradfuse import TrainingSession, export_training_step

WIDTH, EXPERTS = 6, 7
DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Experts(nn.Module):
    def __init__(self, of: Callable[[Experts, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU()) for _ in range(EXPERTS))
        self.out = nn.Linear(7, 3)
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return self.out(self.of(self, x, shares, shares.topk(2).indices))  # type: ignore[no-any-return]

    def mixed(self, total: Tensor, x: Tensor, shares: Tensor, expert: int, rows: Tensor) -> None:
        total[rows] += self.experts[expert](x[rows]) * shares[rows][:, expert, None]


def by_any(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if mask.any():
            module.mixed(total, x, shares, expert, mask)
    return total


def by_not_any(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if not torch.any(mask):
            continue
        module.mixed(total, x, shares, expert, mask)
    return total


def by_sum(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if mask.sum() > 0:
            module.mixed(total, x, shares, expert, mask)
    return total


def by_item(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if mask.sum().item() < 1:
            continue
        module.mixed(total, x, shares, expert, mask)
    return total


def by_numel(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        rows, place = torch.where(chosen == expert)
        if rows.numel() == 0:
            continue
        part = module.experts[expert](x[rows]) * shares.gather(1, chosen)[rows, place, None]
        total.index_add_(0, rows, part)
    return total


def by_length(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        rows = (chosen == expert).any(-1).nonzero().squeeze(-1)
        if not len(rows):
            continue
        module.mixed(total, x, shares, expert, rows)
    return total


def by_size(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        rows, _ = torch.where(chosen == expert)
        if rows.shape[0]:
            module.mixed(total, x, shares, expert, rows)
    return total


WAYS = (by_any, by_not_any, by_sum, by_item, by_numel, by_length, by_size)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.arange(rows) % 3


@pytest.mark.parametrize("way", mostly_long(WAYS, (by_any, by_numel)))
def test_experts_without_rows_train_later(way: Callable[..., Tensor]) -> None:
    train_alike(way)


def train_alike(way: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    module = Experts(way)
    # Two rows have at most four experts, so that others have none here; all have some later.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = export_training_step(
            module, F.cross_entropy, batch(2), torch.optim.SGD(module.parameters(), lr=0.5), dynamic_shapes=DYNAMIC
        )
    session = TrainingSession(step)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for rows in (1, 40, 2):
        x, y = batch(rows)
        with torch.no_grad():
            assert_near(session.evaluate(x.numpy()), module(x).numpy())
        loss = F.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert_near(np.array(session.step(x.numpy(), y.numpy())), np.array(loss.item()))
    for name, tensor in module.state_dict().items():
        assert_near(session.state_dict()[name], tensor.numpy())


def assert_near(value: Any, wanted: np.ndarray[Any, Any]) -> None:
    """Assert that nothing but rounding differs."""
    assert np.abs(value - wanted).max() <= 8 * np.finfo(np.float32).eps * max(1.0, np.abs(wanted).max())


def with_dropout(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if not mask.any():
            continue
        total[mask] += F.dropout(module.experts[expert](x[mask]), 0.5, module.training)
    return F.dropout(total, 0.5, module.training)


def test_dropout_behind_such_a_condition() -> None:
    torch.manual_seed(0)
    module = Experts(with_dropout)
    step = export_training_step(module, F.cross_entropy, batch(2), dynamic_shapes=DYNAMIC, evaluation=True)
    session = TrainingSession(step)
    x, y = (tensor.numpy() for tensor in batch(40))
    # Each step draws anew, and the evaluation does not.
    assert len({session.step(x, y) for _ in range(3)}) == 3
    module.eval()
    with torch.no_grad():
        np.testing.assert_allclose(session.evaluate(x), module(batch(40)[0]), rtol=0, atol=1e-6)


def at_least_two(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if mask.sum() > 1:
            module.mixed(total, x, shares, expert, mask)
    return total


def rows_at_least_two(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        rows, _ = torch.where(chosen == expert)
        if rows.shape[0] > 1:
            module.mixed(total, x, shares, expert, rows)
    return total


def something_else_too(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if mask.any():
            module.mixed(total, x, shares, expert, mask)
            total = total + 1.0
    return total


def something_else_by_size(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        rows, _ = torch.where(chosen == expert)
        if rows.numel():
            module.mixed(total, x, shares, expert, rows)
            total = total * 0.5
    return total


def rows_of_another_mask(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    rows, _ = torch.where(chosen == chosen[0, 0])
    others, _ = torch.where(chosen == chosen[0, 1])
    if rows.numel() > 0:
        module.mixed(total, x, shares, 0, others)
    return total


def mean_of_rows(module: Experts, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 7)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        if mask.any():
            total = total + module.experts[expert](x[mask]).mean(0)
    return total


CHOOSING = (
    at_least_two,
    rows_at_least_two,
    something_else_too,
    something_else_by_size,
    rows_of_another_mask,
    mean_of_rows,
)


@pytest.mark.long
@pytest.mark.parametrize("way", CHOOSING)
def test_what_such_a_condition_decides_is_computed_both_ways(way: Callable[..., Tensor]) -> None:
    train_alike(way)
