"""Batches for the tests of the two CTC operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

TARGET_TYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float16)


class Item(NamedTuple):
    """The lengths of one item of a batch."""

    input_length: int
    target_length: int


def sample(
    items: Sequence[Item], *, steps: int, classes: int, dtype: torch.dtype, blank: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs (T, N, C), padded targets (N, S), input_lengths and target_lengths; labels repeat, but are no blank."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(steps, len(items), classes, generator=generator)).log_softmax(2).to(dtype)
    longest = max((item.target_length for item in items), default=0)
    targets = torch.randint(0, max(classes - 1, 1), (len(items), longest), generator=generator)
    targets += (targets >= blank).to(torch.int64)
    for row, item in zip(targets, items, strict=True):
        row[item.target_length :] = -7  # padding is not read
    return (
        log_probs,
        targets,
        torch.tensor([item.input_length for item in items], dtype=torch.int64),
        torch.tensor([item.target_length for item in items], dtype=torch.int64),
    )


def joined(targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Padded targets as one line."""
    return torch.cat([row[:length] for row, length in zip(targets, target_lengths.tolist(), strict=True)])


@st.composite
def batches(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """The four inputs of CtcLoss and the blank class, of any small size."""
    steps = draw(st.integers(1, 12))
    classes = draw(st.integers(2, 6))
    blank = draw(st.integers(0, classes - 1))
    items = draw(st.lists(st.builds(Item, st.integers(0, steps), st.integers(0, 5)), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**31))
    log_probs, targets, *lengths = sample(items, steps=steps, classes=classes, dtype=dtype, blank=blank, seed=seed)
    layout = joined(targets, lengths[1]) if draw(st.booleans()) else targets
    return log_probs, layout, *lengths, torch.tensor(blank)
