"""CtcLoss: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples
from operators.strides import scattered


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in where PyTorch lacks 16-bit CPU kernels."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def longest(target_lengths: Tensor) -> int:
    """The largest of some lengths, 0 where there is none."""
    return int(target_lengths.max()) if target_lengths.numel() else 0


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """``aten._ctc_loss``: (neg_log_likelihood (N,), log_alpha (N, T, 2 max + 1)).

    Entries of log_alpha outside t < input_length, s <= 2 target_length are set to -inf: PyTorch leaves them unset. It
    refuses log_probs without an element: no items, or items without a step, of which only one without labels has a
    finite loss, 0.
    """
    work = working_type(dtype)
    if log_probs.numel() == 0:
        impossible = torch.where(target_lengths > 0, torch.inf, 0.0).to(dtype)
        states = 2 * longest(target_lengths) + 1
        return impossible, torch.zeros(len(impossible), log_probs.shape[0], states, dtype=dtype)
    nll, alpha = torch.ops.aten._ctc_loss(
        log_probs.to(work),
        targets.to(torch.int64),
        input_lengths.tolist(),
        target_lengths.tolist(),
        blank,
        zero_infinity,
    )
    in_steps = torch.arange(alpha.shape[1])[None, :, None] < input_lengths[:, None, None]
    in_states = torch.arange(alpha.shape[2])[None, None, :] <= 2 * target_lengths[:, None, None]
    return nll.to(dtype), alpha.masked_fill(~(in_steps & in_states), -torch.inf).to(dtype)


def strided_inputs(rng: random.Random, dtype: torch.dtype) -> list[Tensor]:
    """The four inputs, of any strides."""
    steps, items, classes = rng.randint(4, 7), rng.randint(1, 3), rng.randint(2, 5)
    target_lengths = torch.tensor([rng.randint(0, 2) for _ in range(items)])
    input_lengths = torch.tensor([rng.randint(4, steps) for _ in range(items)])
    log_probs = scattered(torch.randn(steps, items, classes).log_softmax(2).to(dtype), rng)
    targets = scattered(torch.randint(1, classes, (items, 2)), rng)
    return [log_probs, targets, input_lengths, target_lengths]


def padded_inputs(
    steps: int, classes: int, input_lengths: list[int], target_lengths: list[int], dtype: torch.dtype
) -> list[Tensor]:
    """The four inputs with targets (N, S), padded with what must not be read."""
    generator = torch.Generator().manual_seed(steps)
    items = len(input_lengths)
    log_probs = (2 * torch.randn(steps, items, classes, generator=generator)).log_softmax(2).to(dtype)
    targets = torch.randint(1, classes, (items, max(target_lengths) + 1), generator=generator)
    for row, length in zip(targets, target_lengths, strict=True):
        row[length:] = -7
    return [log_probs, targets, torch.tensor(input_lengths), torch.tensor(target_lengths)]


def sized_inputs(size: int, dtype: torch.dtype) -> list[Tensor]:
    """The four inputs, of some steps."""
    return padded_inputs(size, 4, [size, size, size - 1], [2, 0, 3], dtype)


def typical_inputs(dtype: torch.dtype) -> list[list[Tensor]]:
    """The four inputs with targets in both layouts."""
    log_probs, targets, input_lengths, target_lengths = padded_inputs(20, 7, [20, 18, 11], [5, 0, 4], dtype)
    line = torch.cat([row[:length] for row, length in zip(targets, target_lengths.tolist(), strict=True)])
    return [[log_probs, layout, input_lengths, target_lengths] for layout in (targets, line)]


def row_inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """The four inputs with as many classes as a length, but two at least."""
    return padded_inputs(7, max(2, length), [7, 6], [3, 2], dtype)


def valid_inputs() -> list[Tensor]:
    """The four inputs, small and in float32."""
    log_probs = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    return [log_probs, torch.tensor([[1, 2], [3, 0]]), torch.tensor([5, 4]), torch.tensor([2, 1])]


def invalid_inputs(valid: Callable[[], Sample], first: int) -> Iterator[Sample]:
    """What both operators of CTC refuse of what both take: from input `first` on."""
    near = Changes(valid)
    log_probs, targets, input_lengths, target_lengths = range(first, first + 4)
    yield from near.without(*range(len(valid().inputs)))
    yield from near.retyped(log_probs, torch.int64, torch.bool)
    yield from near.retyped(targets, torch.uint8, torch.int8, torch.int16, torch.float64, torch.bfloat16)
    yield from near.reshaped(log_probs, (5, 2), (5, 2, 4, 1), (5, 3, 4), (5, 2, 0), (), (1,) * 9)
    yield from near.reshaped(targets, (3, 2), (2, 2, 1), (4,), (2,), (2, 1), (), (1,) * 9)
    yield from near.reshaped(input_lengths, (3,), (1,), (0,))
    yield from near.reshaped(target_lengths, (3,), (1,), (0,))
    yield from near.changed(input_lengths, *(torch.tensor([5, n]) for n in (6, -1, 2**40, -(2**63))))
    yield from near.changed(target_lengths, *(torch.tensor([n, 1]) for n in (3, -1, 2**40, -(2**63))))
    yield from near.changed(targets, *(torch.tensor([[1, n], [3, 0]]) for n in (4, -1, 2**40, -(2**63))))
    yield from near.changed(targets, torch.tensor([[1.5, 2], [3, 0]]), torch.tensor([[1, 2], [float("nan"), 0]]))
    yield from near.with_attributes("blank", -1, 4, 2**40)


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    return Sample(strided_inputs(rng, dtype))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return Sample(sized_inputs(size, dtype))


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [Sample(inputs) for inputs in typical_inputs(dtype)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    return [Sample(row_inputs(length, dtype))]


def _valid() -> Sample:
    return Sample(valid_inputs())


_NO_LENGTHS = torch.zeros(0, dtype=torch.int64)

SAMPLES = Samples(
    oracle=ctc_loss,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=lambda: invalid_inputs(_valid, 0),
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    rows=_rows,
    empty=[
        (Sample([torch.zeros(4, 0, 3), torch.zeros(0, 2).long(), _NO_LENGTHS, _NO_LENGTHS]), [(0,), (0, 4, 1)]),
    ],
)
