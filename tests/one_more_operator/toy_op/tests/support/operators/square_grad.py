"""SquareGrad: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered
from torch import Tensor


def square_grad(grad: Tensor, x: Tensor, *, factor: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Autograd of ``factor / 2 * torch.square(x)``."""
    with torch.enable_grad():
        leaf = x.detach().to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(factor / 2 * leaf.square(), leaf, grad.to(dtype))
    return gradient


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    grad, x = (torch.randn(shape).to(dtype) for _ in range(2))
    return Sample([repeated(grad, rng), scattered(x, rng)], {"factor": 3.0})


def _sized(size: int, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(size)
    grad, x = torch.randn(2, 2, size, generator=generator).to(dtype)
    return Sample([grad, x], {"factor": 0.5})


def _valid() -> Sample:
    grad, x = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    return Sample([grad, x])


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    for index in range(2):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
        yield from near.reshaped(index, (3, 2), (2, 4), (6,), (), (2, 3, 1), (0, 3), (1,) * 9)
    yield from near.all_retyped(range(2), torch.float64, torch.int32)


SAMPLES = Samples(
    oracle=square_grad,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    empty=[(Sample([torch.zeros(0, 3), torch.zeros(0, 3)]), [(0, 3)])],
)
