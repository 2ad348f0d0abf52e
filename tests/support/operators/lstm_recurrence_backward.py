"""LstmRecurrenceBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.lstm_recurrence import arguments as forward_arguments
from operators.lstm_recurrence import lstm_recurrence
from operators.strides import repeated, scattered


def lstm_recurrence_backward(
    grad_hidden: Tensor,
    grad_cell: Tensor | None,
    initial_c: Tensor,
    cell: Tensor,
    gates: Tensor,
    weight: Tensor,
    *,
    reverse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """By autograd, through functions that have the values of `cell` and `gates`, and the slopes of an LSTM there."""
    work = working_type(dtype)
    grads = [None if one is None else one.to(work) for one in (grad_hidden, grad_cell)]
    first, cells, activated, of_state = (one.detach().to(work) for one in (initial_c, cell, gates, weight))
    x = torch.zeros_like(activated, requires_grad=True)
    h0, c0 = torch.zeros_like(first, requires_grad=True), first.clone().requires_grad_()
    h, c = h0, c0
    results: list[list[Tensor]] = [[], []]
    order = range(len(x))
    for t in reversed(order) if reverse else order:
        sums = x[t] + h @ of_state.T
        change = (sums - sums.detach()).chunk(4, -1)
        i, f, g, o = activated[t].chunk(4, -1)
        i, f, o = (gate + gate * (1 - gate) * by for gate, by in ((i, change[0]), (f, change[1]), (o, change[3])))
        g = g + (1 - g * g) * change[2]
        new = f * c + i * g
        c = cells[t] + new - new.detach()
        h = o * c.tanh()
        for found, state in zip(results, (h, c), strict=True):
            found.append(state)
    loss = torch.zeros((), dtype=work) + 0 * (x.sum() + h0.sum() + c0.sum())
    for states, grad in zip(results, grads, strict=True):
        if grad is not None and states:
            loss = loss + (torch.stack(states[::-1] if reverse else states) * grad).sum()
    return tuple(one.to(dtype) for one in torch.autograd.grad(loss, (x, h0, c0)))


def arguments(
    steps: int, items: int, units: int, dtype: torch.dtype, *, grad_cell: bool = True, seed: int = 0, **attributes: Any
) -> Sample:
    """Any gradients, and the results of a forward pass."""
    sample = forward_arguments(steps, items, units, torch.float32, seed=seed, **attributes)
    _, cell, gates = lstm_recurrence(*sample.inputs, **sample.attributes, dtype=torch.float32)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randn(cell.shape, generator=generator) for _ in range(2)]
    _, _, initial_c, weight, _ = sample.inputs
    inputs = [grads[0], grads[1] if grad_cell else None, initial_c, cell, gates, weight]
    typed = [None if one is None else one.to(dtype) for one in inputs]
    return Sample(typed, attributes, terms(typed, **attributes))


def terms(inputs: Sequence[Tensor | None], **attributes: Any) -> float:
    """The largest magnitude that a gradient of a state adds up."""
    grad_hidden, _, initial_c, cell, _, weight = inputs
    assert grad_hidden is not None and initial_c is not None and cell is not None and weight is not None
    if grad_hidden.numel() == 0:
        return 0.0
    grads = lstm_recurrence_backward(*inputs, **attributes)  # type: ignore[arg-type]
    sums = float(grads[0].abs().max() * weight.abs().double().sum(0).max() + grad_hidden.abs().max())
    return sums * max(1.0, float(cell.abs().max()), float(initial_c.abs().max()))


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    sizes = [rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 5)]
    options: dict[str, Any] = {
        "grad_cell": rng.random() < 0.7,
        "reverse": rng.randint(0, 1),
        "seed": rng.randint(0, 2**30),
    }
    sample = arguments(sizes[0], sizes[1], sizes[2], dtype, **options)
    grad, *others = sample.inputs
    assert grad is not None
    views = [repeated(grad, rng), *(None if one is None else scattered(one, rng) for one in others)]
    return Sample(views, sample.attributes, terms(views, **sample.attributes))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments(size // 3 + 2, 3, size // 4 + 3, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments(5, 7, 20, dtype),
        arguments(6, 17, 33, dtype, reverse=1),
        arguments(3, 1, 70, dtype, grad_cell=False),
        arguments(4, 9, 5, dtype),
        arguments(1, 40, 16, dtype, reverse=1, grad_cell=False),
    ]


def _rows(length: int, dtype: torch.dtype) -> Sequence[Sample]:
    # The weight grows with the square of it.
    units = min(max(1, length), 67)
    return [arguments(2, 3, units, dtype), arguments(2, 9, units, dtype, grad_cell=False, reverse=1)]


def _valid() -> Sample:
    return arguments(3, 4, 5, torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 2, 3, 4, 5)
    for index in range(6):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    for index in (0, 1, 3):
        yield from near.reshaped(index, (3, 4), (3, 4, 4), (3, 5, 5), (2, 4, 5), (), (1,) * 9)
    yield from near.reshaped(2, (), (5,), (4, 4), (5, 5), (1, 4, 5))
    yield from near.reshaped(4, (3, 4, 5), (3, 4, 16), (2, 4, 20), (4, 20), ())
    yield from near.reshaped(5, (5, 20), (20, 4), (16, 5), (20,), ())
    yield from near.all_retyped(range(6), torch.int32, torch.bool, torch.float64)


def _nothing(steps: int, items: int, units: int, **attributes: Any) -> tuple[Sample, list[tuple[int, ...]]]:
    sample = arguments(steps, items, units, torch.float32, **attributes)
    return Sample(sample.inputs, sample.attributes), [(steps, items, 4 * units), (items, units), (items, units)]


SAMPLES = Samples(
    oracle=lstm_recurrence_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[_nothing(0, 2, 3), _nothing(0, 2, 3, reverse=1), _nothing(2, 0, 3), _nothing(2, 3, 0)],
)
