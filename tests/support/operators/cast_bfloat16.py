"""CastBfloat16: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from onnx import TensorProto
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import scattered


def cast_bfloat16(self: Tensor, *, to: int = TensorProto.BFLOAT16, dtype: torch.dtype = torch.float64) -> Tensor:
    """``aten._to_copy`` to the other type."""
    return self.to(dtype if dtype == torch.float64 else torch.float32 if to == TensorProto.FLOAT else torch.bfloat16)


def _sample(numbers: Tensor) -> Sample:
    return Sample([numbers], {"to": TensorProto.FLOAT} if numbers.dtype == torch.bfloat16 else {})


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    return _sample(scattered(torch.randn(shape).to(dtype), rng))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return _sample(torch.randn(3, size, generator=torch.Generator().manual_seed(size)).to(dtype))


def _valid() -> Sample:
    return Sample([torch.randn(2, 3, generator=torch.Generator().manual_seed(0))])


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0)
    others = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    yield from near.retyped(0, torch.float16, torch.float64, *others)
    yield from near.reshaped(0, *((size, *(1,) * (rank - 1)) for rank in range(9, 13) for size in (0, 1, 3)))


SAMPLES = Samples(
    oracle=cast_bfloat16,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(torch.float32, torch.bfloat16),
    empty=[(Sample([torch.zeros(0, 3)]), [(0, 3)])],
)
