"""Inputs for the tests of the two CTC operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TARGET_TYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float16)


class Item(NamedTuple):
    """The lengths of one item of a batch."""

    input_length: int
    target_length: int


@dataclass(frozen=True)
class Sample:
    """Inputs of CtcLoss: log_probs (T, N, C), targets (N, S) or joined, and the lengths (N,)."""

    log_probs: Tensor
    targets: Tensor
    input_lengths: Tensor
    target_lengths: Tensor
    blank: int = 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.log_probs, self.targets, self.input_lengths, self.target_lengths

    def joined(self) -> Sample:
        """The same with the targets of all items joined into one vector."""
        return replace(self, targets=joined(self.targets, self.target_lengths))

    def cast(self, dtype: torch.dtype) -> Sample:
        """The same with log-probabilities of another type."""
        return replace(self, log_probs=self.log_probs.to(dtype))

    def label_type(self, dtype: torch.dtype) -> Sample:
        """The same with targets of another type."""
        return replace(self, targets=self.targets.to(dtype))


def sample(
    steps: int,
    classes: int,
    input_lengths: list[int],
    target_lengths: list[int],
    *,
    width: int | None = None,
    blank: int = 0,
    seed: int = 0,
) -> Sample:
    """Random log-probabilities and labels other than the blank; ``width`` is the S of the padded targets."""
    generator = torch.Generator().manual_seed(seed)
    items = len(input_lengths)
    columns = max([*target_lengths, 0]) if width is None else width
    logits = 2 * torch.randn(steps, items, classes, generator=generator)
    labels = torch.randint(0, max(classes - 1, 1), (items, columns), generator=generator)
    labels = labels + (labels >= blank).to(torch.int64)
    steps_of, labels_of = (torch.tensor(lengths, dtype=torch.int64) for lengths in (input_lengths, target_lengths))
    return Sample(logits.log_softmax(2), labels, steps_of, labels_of, blank)


def joined(targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Padded targets as one line."""
    rows = [row[:length] for row, length in zip(targets, target_lengths.tolist(), strict=True)]
    return torch.cat(rows) if rows else targets.reshape(-1)


def batch(
    items: Sequence[Item], *, steps: int, classes: int, dtype: torch.dtype, blank: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors of a sample, in a type; the padding of the targets is no class."""
    input_lengths, target_lengths = [i.input_length for i in items], [i.target_length for i in items]
    found = sample(steps, classes, input_lengths, target_lengths, blank=blank, seed=seed)
    for row, item in zip(found.targets, items, strict=True):
        row[item.target_length :] = -7
    return found.cast(dtype).tensors


@st.composite
def batches(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """The four inputs of CtcLoss and the blank class, of any small size."""
    steps = draw(st.integers(1, 12))
    classes = draw(st.integers(2, 6))
    blank = draw(st.integers(0, classes - 1))
    items = draw(st.lists(st.builds(Item, st.integers(0, steps), st.integers(0, 5)), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**31))
    log_probs, targets, *lengths = batch(items, steps=steps, classes=classes, dtype=dtype, blank=blank, seed=seed)
    layout = joined(targets, lengths[1]) if draw(st.booleans()) else targets
    return log_probs, layout, *lengths, torch.tensor(blank)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Samples of every size from the smallest, with items that have no alignment among them."""
    steps, classes, width = draw(st.integers(1, 6)), draw(st.integers(2, 5)), draw(st.integers(0, 3))
    lengths = draw(st.lists(st.tuples(st.integers(0, steps), st.integers(0, width)), max_size=3))
    found = sample(
        steps,
        classes,
        [length for length, _ in lengths],
        [length for _, length in lengths],
        width=width,
        blank=draw(st.sampled_from((0, classes - 1))),
        seed=draw(st.integers(0, 9)),
    )
    found = found.joined() if draw(st.booleans()) else found
    return found.cast(draw(st.sampled_from(DTYPES)))
