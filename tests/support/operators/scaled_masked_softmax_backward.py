"""ScaledMaskedSoftmaxBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def scaled_masked_softmax_backward(
    grad_output: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``masked_fill(scale * aten._softmax_backward_data(grad_output, y, -1), mask, 0)``; all (B, H, S1, S2)."""
    out: Tensor = scale * torch.ops.aten._softmax_backward_data(grad_output.to(dtype), y.to(dtype), -1, dtype)
    return out if mask is None else out.masked_fill(mask, 0.0)


def _products(grad: Tensor, y: Tensor) -> Tensor:
    """The sum of a row cancels: what is added up there bounds what can be asked for."""
    return (grad.double() * y.double()).abs().sum(-1, keepdim=True)


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 4) for _ in range(4)]
    grad = repeated(torch.randn(shape).to(dtype), rng)
    y = scattered(torch.randn(shape).softmax(3).to(dtype), rng)
    mask = repeated(torch.rand(shape) < 0.4, rng)
    return Sample([grad, y, mask], {"scale": 0.5}, _products(grad, y))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(size)
    y = torch.randn(2, 3, size, 40, generator=generator).softmax(-1).to(dtype)
    mask = torch.rand(2, 1, size, 40, generator=generator) < 0.3
    return Sample([torch.randn(2, 3, size, 40, generator=generator).to(dtype), y, mask], {"scale": 0.5})


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2, 3, 5, 6, generator=generator).softmax(-1).to(dtype)
    grad = torch.randn(2, 3, 5, 6, generator=generator).to(dtype)
    mask = torch.rand(2, 1, 5, 6, generator=generator) > 0.5
    products = _products(grad, y)
    return [
        Sample([grad, y, mask], {"scale": 0.125}, 0.125 * products),
        Sample([grad, y], {"scale": 2.5}, 2.5 * products),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    grad = torch.randn(1, 1, 2, length, generator=generator).to(dtype)
    y = torch.randn(1, 1, 2, length, generator=generator).to(dtype).float().softmax(-1).to(dtype)
    mask = torch.rand(1, 1, 2, length, generator=generator) < 0.3
    return [Sample([grad, y, mask]), Sample([grad, y], {"scale": 0.5})]


def _valid() -> Sample:
    generator = torch.Generator().manual_seed(0)
    grad, y = torch.randn(2, 2, 3, 4, 5, generator=generator)
    return Sample([grad, y.softmax(3), torch.rand(2, 3, 4, 5, generator=generator) < 0.3])


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    for index in range(2):
        yield from near.retyped(index, torch.float16, torch.bfloat16, torch.float64, torch.int64)
        yield from near.reshaped(index, (4, 5), (2, 3, 4), (2, 3, 4, 6), (3, 2, 4, 5), (1, 3, 4, 5), (), (1,) * 9)
    yield from near.all_retyped(range(2), torch.float64, torch.int32, torch.bool)
    yield from near.retyped(2, torch.float32, torch.int64, torch.uint8, torch.int8)
    yield from near.reshaped(2, (4, 5), (2, 3, 4, 1), (2, 3, 1, 5), (1, 2, 4, 5), (3, 1, 4, 5), (2, 1, 1, 4, 5), ())
    yield from near.with_attributes("fix_triu_mask", 1)


SAMPLES = Samples(
    oracle=scaled_masked_softmax_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(Sample([torch.zeros(2, 0, 1, 3), torch.zeros(2, 0, 1, 3)]), [(2, 0, 1, 3)])],
)
