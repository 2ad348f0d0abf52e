"""MseLossBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def mse_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, *, reduction: int = 1, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``aten.mse_loss_backward`` on the broadcast of all three tensors; mean divides by ``self``'s own count."""
    shape = torch.Size(np.broadcast_shapes(grad_output.shape, self.shape, target.shape))
    wide = [tensor.to(dtype).expand(shape) for tensor in (grad_output, self, target)]
    out: Tensor = torch.ops.aten.mse_loss_backward(*wide, reduction if shape == self.shape else 0)
    return out / self.numel() if reduction == 1 and shape != self.shape else out


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(0 if rng.random() < 0.1 else 1, 5) for _ in range(rng.randint(0, 5))]
    inputs = [repeated(torch.randn(shape).to(dtype), rng) for _ in range(3)]
    for index in range(3):  # those of fewer dimensions broadcast
        inputs[index] = inputs[index][(0,) * rng.randint(0, len(shape))] if 0 not in shape else inputs[index]
    whole = rng.randrange(3)
    inputs[whole] = scattered(torch.randn(shape).to(dtype), rng)
    return Sample(inputs, {"reduction": rng.randrange(3)})


def _sized(size: int, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(size)
    shapes: list[tuple[int, ...]] = [(), (size, 7), (size, 7)]
    return Sample([torch.randn(shape, generator=generator).to(dtype) for shape in shapes], {"reduction": 2})


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (5, 7), (5, 7)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [Sample(inputs, {"reduction": reduction}) for reduction in range(3)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    grad, self, target = torch.randn(3, 2, length, generator=generator).to(dtype)
    return [Sample([grad, self, target]), Sample([grad[:1, :1], self, target[:, :1]], {"reduction": 2})]


def _valid() -> Sample:
    return Sample(list(torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0))))


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2)
    for index in range(3):
        yield from near.retyped(
            index, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool
        )
        yield from near.reshaped(index, (4,), (3, 2), (3, 3), (2, 2, 2), (0, 3), (1,) * 9)
    yield from near.all_retyped(range(3), torch.float64, torch.int32, torch.int64, torch.bool)
    yield from near.with_attributes("reduction", -1, 3, 2**40, -(2**63))
    yield Sample([torch.zeros(shape) for shape in ((2048, 1, 1) * 2, (1, 2048, 1) * 2, (1, 1, 2048) * 2)])


SAMPLES = Samples(
    oracle=mse_loss_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(Sample([torch.zeros(()), torch.zeros(0, 3), torch.zeros(1, 3)]), [(0, 3)])],
)
