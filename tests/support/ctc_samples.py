"""Inputs for the tests of the two CTC operators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


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
        rows = [row[:length] for row, length in zip(self.targets, self.target_lengths.tolist(), strict=True)]
        return replace(self, targets=torch.cat(rows) if rows else self.targets.reshape(-1))

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
