"""MatmulNBits: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.matmul_n_bits_backward import dequantized, packed
from operators.strides import repeated, scattered


def matmul_n_bits(
    input: Tensor,
    weight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A product with the dequantised weight. 16-bit types are added in float32 and rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    matrix = dequantized(weight, scales.to(wide), zero_points, input.shape[-1], bits)
    result = input.to(wide) @ matrix.T
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(dtype)


def arguments(
    leading: Sequence[int],
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    *,
    bits: int = 4,
    block_size: int = 16,
    zero_points: bool = False,
    bias: bool = False,
    seed: int = 0,
) -> Sample:
    """Tensors of some sizes."""
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn((*leading, in_features), generator=generator).to(dtype)
    weight = packed(generator, out_features, in_features, dtype, bits=bits, block_size=block_size)
    added = torch.randn(out_features, generator=generator).to(dtype)
    return sample_of([input, *weight[:2], weight[2] if zero_points else None, added if bias else None], bits)


def sample_of(inputs: Sequence[Tensor | None], bits: int) -> Sample:
    """Where a sum cancels, what is added up bounds what can be asked for."""
    input, weight, scales, zeros, bias = inputs
    assert input is not None and weight is not None and scales is not None
    terms = input.double().abs() @ dequantized(weight, scales.double(), zeros, input.shape[-1], bits).abs().T
    if bias is not None:
        terms = terms + bias.double().abs()
    count = max(index for index, tensor in enumerate(inputs) if tensor is not None) + 1
    return Sample(list(inputs[:count]), {"bits": bits}, terms)


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    leading = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
    bits, flags = rng.choice((2, 4, 8)), [rng.random() < 0.5 for _ in range(2)]
    sample = arguments(
        leading,
        rng.randint(1, 5),
        rng.randint(1, 40),
        dtype,
        bits=bits,
        zero_points=flags[0],
        bias=flags[1],
        seed=rng.randint(0, 999),
    )
    input, *others = [*sample.inputs, None, None][:5]
    assert input is not None
    return sample_of([repeated(input, rng), *(None if one is None else scattered(one, rng) for one in others)], bits)


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((size,), 9, 20, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments((2, 7), 70, 150, dtype, bias=True),
        arguments((13,), 96, 30, dtype, block_size=32, zero_points=True),
        arguments((5,), 20, 130, dtype, bits=8, block_size=128, zero_points=True, bias=True),
        arguments((3,), 20, 50, dtype, bits=2, zero_points=True),
        arguments((), 20, 50, dtype, bits=2, block_size=64),
        arguments((4,), 6, 17, dtype, bits=8),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    size = max(1, length)
    return [arguments((3,), size, 16, dtype, bias=True), arguments((3,), 5, size, dtype, zero_points=True)]


def _valid() -> Sample:
    return arguments((2, 3), 4, 20, torch.float32, zero_points=True, bias=True)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2)
    yield from near.retyped(0, torch.float16, torch.float64, torch.int64)
    yield from near.all_retyped((0, 2, 4), torch.float64, torch.int32)
    yield from near.retyped(1, torch.int8, torch.int32, torch.float32, torch.bool)
    yield from near.retyped(2, torch.float16, torch.int64)
    yield from near.retyped(3, torch.int8, torch.float32)
    yield from near.retyped(4, torch.float16, torch.int64)
    yield from near.reshaped(0, (2, 3, 16), (2, 3, 33), (), (1,) * 9)
    yield from near.reshaped(1, (4, 16), (4, 2, 4), (4, 2, 12), (4, 1, 8), (4, 3, 8), (5, 2, 8), (4, 2, 0))
    yield from near.reshaped(2, (4, 3), (7,), ())
    yield from near.reshaped(3, (4, 2), (3,), ())
    yield from near.reshaped(4, (5,), (1, 4), ())
    yield from near.with_attributes("bits", 0, 3, 8, 16)


SAMPLES = Samples(
    oracle=matmul_n_bits,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(arguments((0,), 4, 20, torch.float32), [(0, 4)])],
)
