"""GruRecurrenceBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.gru_recurrence import arguments as forward_arguments
from operators.gru_recurrence import gru_recurrence
from operators.strides import repeated, scattered


def gru_recurrence_backward(
    grad_hidden: Tensor,
    initial_h: Tensor,
    hidden: Tensor,
    gates: Tensor,
    weight: Tensor,
    *,
    reverse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """By autograd, through functions that have the values of `hidden` and `gates`, and the slopes of a GRU there."""
    work = working_type(dtype)
    grad, first, states, activated, of_state = (
        one.detach().to(work) for one in (grad_hidden, initial_h, hidden, gates, weight)
    )
    sequence = (*grad.shape[:2], 3 * grad.shape[2])
    x, by_state = (torch.zeros(sequence, dtype=work, requires_grad=True) for _ in range(2))
    h0 = first.clone().requires_grad_()
    h, found = h0, []
    order = range(len(x))
    for t in reversed(order) if reverse else order:
        recurrent = (by_state[t] + h @ of_state.T).chunk(3, -1)
        h_r, h_z, h_n = (part - part.detach() for part in recurrent)
        x_r, x_z, x_n = x[t].chunk(3, -1)
        r, z, n, of_new = activated[t].chunk(4, -1)
        r = r + r * (1 - r) * (x_r + h_r)
        z = z + z * (1 - z) * (x_z + h_z)
        gated = r * (of_new + h_n)
        n = n + (1 - n * n) * (x_n + gated - gated.detach())
        new = n + z * (h - n)
        h = states[t] + new - new.detach()
        found.append(h)
    loss = 0 * (x.sum() + by_state.sum() + h0.sum())
    if found:
        loss = loss + (torch.stack(found[::-1] if reverse else found) * grad).sum()
    of_x, of_h, of_recurrent = torch.autograd.grad(loss, (x, h0, by_state))
    return of_x.to(dtype), of_h.to(dtype), of_recurrent.to(dtype)


def arguments(steps: int, items: int, units: int, dtype: torch.dtype, *, seed: int = 0, **attributes: Any) -> Sample:
    """Any gradient, and the results of a forward pass."""
    sample = forward_arguments(steps, items, units, torch.float32, seed=seed, **attributes)
    hidden, gates = gru_recurrence(*sample.inputs, **sample.attributes, dtype=torch.float32)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    _, initial_h, weight, _ = sample.inputs
    assert initial_h is not None and weight is not None
    inputs = (torch.randn(hidden.shape, generator=generator), initial_h, hidden, gates, weight)
    typed = [one.to(dtype) for one in inputs]
    return Sample(typed, attributes, terms(typed, **attributes))


def terms(inputs: Sequence[Tensor], **attributes: Any) -> float:
    """The largest magnitude that a gradient of the state adds up."""
    grad_hidden, initial_h, hidden, gates, weight = inputs
    if grad_hidden.numel() == 0:
        return 0.0
    grads = gru_recurrence_backward(*inputs, **attributes)
    sums = float(grads[2].abs().max() * weight.abs().double().sum(0).max() + grad_hidden.abs().max())
    return sums * max(1.0, *(float(one.abs().max()) for one in (initial_h, hidden, gates)))


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    sizes = [rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 5)]
    sample = arguments(sizes[0], sizes[1], sizes[2], dtype, reverse=rng.randint(0, 1), seed=rng.randint(0, 2**30))
    grad, *others = (one for one in sample.inputs if one is not None)
    views = [repeated(grad, rng), *(scattered(one, rng) for one in others)]
    return Sample(views, sample.attributes, terms(views, **sample.attributes))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments(size // 3 + 2, 3, size // 4 + 3, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments(5, 7, 20, dtype),
        arguments(6, 17, 33, dtype, reverse=1),
        arguments(3, 1, 70, dtype),
        arguments(4, 9, 5, dtype),
        arguments(1, 40, 16, dtype, reverse=1),
    ]


def _rows(length: int, dtype: torch.dtype) -> Sequence[Sample]:
    # The weight grows with the square of it.
    units = min(max(1, length), 67)
    return [arguments(2, 3, units, dtype), arguments(2, 9, units, dtype, reverse=1)]


def _valid() -> Sample:
    return arguments(3, 4, 5, torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2, 3, 4)
    for index in range(5):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    for index in (0, 2):
        yield from near.reshaped(index, (3, 4), (3, 4, 4), (3, 5, 5), (2, 4, 5), (), (1,) * 9)
    yield from near.reshaped(1, (), (5,), (4, 4), (5, 5), (1, 4, 5))
    yield from near.reshaped(3, (3, 4, 5), (3, 4, 15), (2, 4, 20), (4, 20), ())
    yield from near.reshaped(4, (5, 15), (15, 4), (12, 5), (15,), ())
    yield from near.all_retyped(range(5), torch.int32, torch.bool, torch.float64)


def _nothing(steps: int, items: int, units: int, **attributes: Any) -> tuple[Sample, list[tuple[int, ...]]]:
    sample = arguments(steps, items, units, torch.float32, **attributes)
    of_gates = (steps, items, 3 * units)
    return Sample(sample.inputs, sample.attributes), [of_gates, (items, units), of_gates]


SAMPLES = Samples(
    oracle=gru_recurrence_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[_nothing(0, 2, 3), _nothing(0, 2, 3, reverse=1), _nothing(2, 0, 3), _nothing(2, 3, 0)],
)
