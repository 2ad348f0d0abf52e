"""What `torch.utils.checkpoint` wraps is recomputed by an exported step, and no bit of it is another one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gradfuse import TrainingSession, TrainingStep, export_training_step

WIDTH, ROWS, LAYERS = 32, 512, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        inner: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + scale * inner


Run = Callable[[nn.ModuleList, Tensor], Tensor]


def one_by_one(**options: Any) -> Run:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, **options)
        return x

    return run


def reentrant(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    # Its argument has to need a gradient, or there is none of what is wrapped.
    return one_by_one(use_reentrant=True)(blocks[1:], blocks[0](x))


def nested(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    def half(x: Tensor) -> Tensor:
        for block in blocks[:3]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = checkpoint(half, x, use_reentrant=False)
    for block in blocks[3:]:
        x = block(x)
    return x


def as_transformers_does(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    wrap = functools.partial(checkpoint, use_reentrant=False)
    for block in blocks:
        x = wrap(functools.partial(block.__call__, scale=1.0), x)
    return x


def in_segments(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 3, x, use_reentrant=False)  # type: ignore[no-any-return,no-untyped-call]


WAYS: dict[str, tuple[Run, int, float]] = {
    "one by one": (one_by_one(use_reentrant=False), LAYERS, 0.7),
    "reentrant": (reentrant, LAYERS - 1, 0.8),
    "sequential": (in_segments, 2, 0.75),
    "nested": (nested, 3, 0.85),
    "as transformers does": (as_transformers_does, LAYERS, 0.7),
}
"""Ways to wrap blocks, how many they wrap, and the share of the memory that is left at most."""


class Net(nn.Module):
    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 7)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        if self.run is not None:
            return self.head(self.run(self.blocks, x))  # type: ignore[no-any-return]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def exported(run: Run | None, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    module = Net(run)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return export_training_step(module, F.cross_entropy, batch(ROWS), optimizer, evaluation=False, **options)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)), torch.arange(rows) % 7


def losses(step: TrainingStep, rows: int = ROWS) -> list[float]:
    session = TrainingSession(step)
    return [session.step(*batch(rows)) for _ in range(3)]


@pytest.fixture(scope="module")
def kept() -> TrainingStep:
    return exported(None)


@pytest.mark.parametrize("way", ["one by one", *(pytest.param(way, marks=pytest.mark.long) for way in list(WAYS)[1:])])
def test_the_same_bits_in_less_memory(way: str, kept: TrainingStep) -> None:
    run, wrapped, share = WAYS[way]
    step = exported(run)
    assert kept.recomputation is None and step.recomputation is not None
    assert step.recomputation.after <= share * step.recomputation.before
    assert step.recomputation.nodes >= 3 * wrapped
    assert losses(step) == losses(kept)


def test_a_reentrant_one_whose_arguments_need_no_gradient_trains_nothing() -> None:
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        step = exported(one_by_one(use_reentrant=True))
    module = Net(one_by_one(use_reentrant=True))
    x, y = batch(ROWS)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    session = TrainingSession(step)
    session.step(x, y)
    changed = {name for name, array in session.state_dict().items() if (array != step.parameters[name]).any()}
    assert changed == trained == {"head.weight", "head.bias"}


@pytest.mark.long
def test_any_batch() -> None:
    step = exported(WAYS["one by one"][0], dynamic_shapes=({0: "rows"}, {0: "rows"}))
    assert step.recomputation is not None and step.recomputation.nodes > 0
    kept = exported(None, dynamic_shapes=({0: "rows"}, {0: "rows"}))
    assert losses(step, 9) == losses(kept, 9)


@pytest.mark.long
def test_a_budget_decides_alone() -> None:
    step = exported(WAYS["one by one"][0], memory_budget=1.0)
    assert step.recomputation is not None and step.recomputation.nodes == 0
