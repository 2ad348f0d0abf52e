"""GroupedBiasAddGrad: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def grouped_bias_add_grad(
    grad_y: Tensor, group_idx: Tensor | None = None, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Sums of row segments: (R, H) with ends (G,), or (G, C, H) over its middle dimension; output (G, H)."""
    wide = grad_y.to(dtype)
    if group_idx is None:
        return wide.sum(1)
    ends = [int(end) for end in group_idx]
    starts = [0, *ends][:-1]
    rows = [wide[start:end].sum(0) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(rows) if rows else wide.new_zeros((0, wide.shape[1]))


def _with_terms(grad_y: Tensor, group_idx: Tensor | None = None) -> Sample:
    """Where a sum cancels, what is added up bounds what can be asked for."""
    return Sample([grad_y, group_idx], {}, grouped_bias_add_grad(grad_y.abs(), group_idx))


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    if rng.random() < 0.5:
        return _with_terms(repeated(torch.randn([rng.randint(1, 6) for _ in range(3)]).to(dtype), rng))
    rows = rng.randint(1, 9)
    grad = repeated(torch.randn(rows, rng.randint(1, 5)).to(dtype), rng)
    ends = torch.tensor([*sorted(rng.randint(0, rows) for _ in range(3)), rows])
    return _with_terms(grad, scattered(ends.to(rng.choice((torch.int32, torch.int64))), rng))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    ends = torch.tensor([size // 3, size // 3, size], dtype=torch.int64 if dtype == torch.float32 else torch.int32)
    return Sample([torch.randn(size, 9, generator=torch.Generator().manual_seed(size)).to(dtype), ends])


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    by_ends = torch.randn(300, 5, generator=generator).to(dtype)
    by_axis = torch.randn(3, 300, 5, generator=generator).to(dtype)
    return [_with_terms(by_ends, torch.tensor([3, 3, 40, 300])), _with_terms(by_axis)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    return [Sample([torch.randn(3, 1 + length % 7, length, generator=generator).to(dtype)])]


def _valid() -> Sample:
    return Sample([torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 2, 6])])


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0)
    yield from near.retyped(0, torch.float64, torch.int64, torch.bool)
    yield from near.retyped(1, torch.float32, torch.bool, torch.int16, torch.uint8)
    yield from near.reshaped(0, (6,), (6, 4, 1), (), (1,) * 9)
    yield from near.reshaped(1, (3, 1), (), (0,), (2049,))
    for shape in ((6, 4), (6,), (), (2, 3, 4, 5)):
        yield Sample([torch.zeros(shape)])
    for dtype in (torch.int32, torch.int64):
        ends = [[2, 1, 6], [-1, 2, 6], [2, 2, 5], [2, 2, 7], [2, 7, 6], [6, 6, 0], [-(2**31), 0, 6]]
        yield from near.changed(1, *(torch.tensor(values, dtype=dtype) for values in ends))


SAMPLES = Samples(
    oracle=grouped_bias_add_grad,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[
        (Sample([torch.ones(0, 3), torch.tensor([0, 0])]), [(2, 3)]),
        (Sample([torch.ones(2, 0, 3)]), [(2, 3)]),
    ],
)
