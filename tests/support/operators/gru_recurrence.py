"""GruRecurrence: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered


def gru_recurrence(
    input: Tensor,
    initial_h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    reverse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """``torch.gru_cell`` with a projection that gives its input back, and the gates that its states belong to."""
    work = working_type(dtype)
    x, h, of_state = (one.to(work).contiguous() for one in (input, initial_h, weight))
    added = torch.zeros(weight.shape[0], dtype=work) if bias is None else bias.to(work).contiguous()
    steps = []
    for now in x.flip(0) if reverse else x:
        h_r, h_z, h_n = torch.nn.functional.linear(h, of_state, added).chunk(3, -1)
        x_r, x_z, x_n = now.chunk(3, -1)
        r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        gates = torch.cat([r, z, (x_n + r * h_n).tanh(), h_n], -1)
        if h.numel():
            identity = torch.eye(x.shape[-1], dtype=work)
            h = torch.gru_cell(now, h, identity, of_state, torch.zeros_like(added), added)
        steps.append((h, gates))
    shapes = ((*x.shape[:1], *h.shape), (*x.shape[:1], h.shape[0], 4 * h.shape[1]))
    columns = zip(*steps, strict=True) if steps else [()] * 2
    results = (torch.stack(one) if one else torch.zeros(shape) for one, shape in zip(columns, shapes, strict=True))
    return tuple((one.flip(0) if reverse else one).to(dtype) for one in results)


def arguments(
    steps: int,
    items: int,
    units: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    seed: int = 0,
    scale: float = 1.0,
    **attributes: Any,
) -> Sample:
    """Tensors of any values; weights are of the size that torch.nn.GRU begins with."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(steps, items, 3 * units), (items, units), (3 * units, units), (3 * units,)]
    x, h, weight, added = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [scale * x, h.tanh(), weight / max(1, units) ** 0.5, added if bias else None]
    typed = [None if one is None else one.to(dtype) for one in inputs]
    return Sample(typed, attributes, terms(*typed))


def terms(x: Tensor | None, h: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> float:
    """The largest magnitude that a sum of a gate adds up."""
    assert x is not None and h is not None and weight is not None
    if x.numel() == 0:
        return 0.0
    parts = [x.abs().max(), h.abs().max(), weight.abs().float().sum(1).max()]
    return float(sum(parts)) + (0.0 if bias is None else float(bias.abs().max()))


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    sizes = [rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 5)]
    options: dict[str, Any] = {"bias": rng.random() < 0.7, "reverse": rng.randint(0, 1), "seed": rng.randint(0, 2**30)}
    sample = arguments(sizes[0], sizes[1], sizes[2], dtype, **options)
    x, *others = sample.inputs
    assert x is not None
    views = [repeated(x, rng), *(None if one is None else scattered(one, rng) for one in others)]
    return Sample(views, sample.attributes, terms(*views))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments(size // 3 + 2, 3, size // 4 + 3, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments(5, 7, 20, dtype),
        arguments(6, 17, 33, dtype, reverse=1),
        arguments(3, 1, 70, dtype, bias=False),
        arguments(4, 9, 5, dtype, scale=8.0),
        arguments(1, 40, 16, dtype, reverse=1, bias=False),
    ]


def _rows(length: int, dtype: torch.dtype) -> Sequence[Sample]:
    # The weight grows with the square of it.
    units = min(max(1, length), 67)
    return [arguments(2, 3, units, dtype), arguments(2, 9, units, dtype, bias=False, reverse=1)]


def _valid() -> Sample:
    return arguments(3, 4, 5, torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2)
    for index in range(4):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.reshaped(0, (3, 4), (3, 4, 12), (3, 5, 15), (3, 4, 16), (), (1,) * 9)
    yield from near.reshaped(1, (), (5,), (4, 4), (5, 5), (1, 4, 5))
    yield from near.reshaped(2, (5, 15), (15, 4), (12, 5), (15,), ())
    yield from near.reshaped(3, (5,), (1, 15), (1,), ())
    yield from near.all_retyped(range(4), torch.int32, torch.bool, torch.float64)


def _nothing(steps: int, items: int, units: int, **attributes: Any) -> tuple[Sample, list[tuple[int, ...]]]:
    sample = arguments(steps, items, units, torch.float32, **attributes)
    return Sample(sample.inputs, sample.attributes), [(steps, items, units), (steps, items, 4 * units)]


SAMPLES = Samples(
    oracle=gru_recurrence,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[_nothing(0, 2, 3), _nothing(0, 2, 3, reverse=1), _nothing(2, 0, 3), _nothing(2, 3, 0)],
)
