"""ThresholdBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def threshold_backward(
    grad_output: Tensor, self: Tensor, *, threshold: float = 0.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``aten.threshold_backward``."""
    out: Tensor = torch.ops.aten.threshold_backward(grad_output.to(dtype), self.to(dtype), threshold)
    return out


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    grad, x = (torch.randn(shape).to(dtype) for _ in range(2))
    return Sample([repeated(grad, rng), scattered(x, rng)], {"threshold": rng.choice([0.0, 0.5])})


def _sized(size: int, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(size)
    grad, x = torch.randn(2, 2, size, generator=generator).to(dtype)
    return Sample([grad, 3 * x], {"threshold": 0.25})


def _typical(dtype: torch.dtype) -> list[Sample]:
    grad, x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [Sample([grad, 2 * x], {"threshold": threshold}) for threshold in (0.0, -0.5)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    grad, x = torch.randn(2, 2, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    return [Sample([grad, x], {"threshold": threshold}) for threshold in (0.0, -0.5)]


def _valid() -> Sample:
    grad, x = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    return Sample([grad, x])


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    for index in range(2):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
        yield from near.reshaped(index, (3, 2), (2, 4), (6,), (), (2, 3, 1), (0, 3), (1,) * 9)
    yield from near.all_retyped(range(2), torch.int32)


SAMPLES = Samples(
    oracle=threshold_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(Sample([torch.zeros(0, 3), torch.zeros(0, 3)]), [(0, 3)])],
)
