"""MatmulNBitsBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """The numbers of the last dimension of bytes, the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int64)
    numbers: Tensor = (packed.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def dequantized(weight: Tensor, scales: Tensor, zero_points: Tensor | None, in_features: int, bits: int) -> Tensor:
    """The weight (out, in_features) in the type of the scales."""
    rows, blocks, _ = weight.shape
    zeros = torch.full((rows, blocks), 2 ** (bits - 1))
    if zero_points is not None:
        zeros = _numbers(zero_points.reshape(rows, -1), bits)[:, :blocks]
    numbers = _numbers(weight, bits) - zeros.unsqueeze(-1)
    return (numbers.to(scales.dtype) * scales.reshape(rows, blocks, 1)).flatten(1)[:, :in_features]


def matmul_n_bits_backward(
    grad_output: Tensor,
    weight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    in_features: int = 0,
    bits: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A product with the dequantised weight. 16-bit types are added in float32 and rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    matrix = dequantized(weight, scales.to(wide), zero_points, in_features, bits)
    result: Tensor = (grad_output.to(wide) @ matrix).to(dtype)
    return result


def packed(
    generator: torch.Generator, out_features: int, in_features: int, dtype: torch.dtype, *, bits: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its scales and its zero points."""
    blocks = -(-in_features // block_size)
    weight = torch.randint(0, 256, (out_features, blocks, block_size * bits // 8), generator=generator).byte()
    scales = (torch.rand((out_features, blocks), generator=generator) * 0.1).to(dtype)
    zeros = torch.randint(0, 256, (out_features, -(-blocks * bits // 8)), generator=generator).byte()
    return weight, scales, zeros


def arguments(
    leading: Sequence[int],
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    *,
    bits: int = 4,
    block_size: int = 16,
    zero_points: bool = False,
    seed: int = 0,
) -> Sample:
    """Tensors of some sizes."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn((*leading, out_features), generator=generator).to(dtype)
    weight = packed(generator, out_features, in_features, dtype, bits=bits, block_size=block_size)
    return sample_of([grad, *weight[:2], weight[2] if zero_points else None], in_features, bits)


def sample_of(inputs: Sequence[Tensor | None], in_features: int, bits: int) -> Sample:
    """Where a sum cancels, what is added up bounds what can be asked for."""
    grad, weight, scales, zeros = inputs
    assert grad is not None and weight is not None and scales is not None
    matrix = dequantized(weight, scales.double(), zeros, in_features, bits)
    given = list(inputs) if zeros is not None else list(inputs[:3])
    return Sample(given, {"in_features": in_features, "bits": bits}, grad.double().abs() @ matrix.abs())


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    leading = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
    bits, columns = rng.choice((2, 4, 8)), rng.randint(1, 40)
    sample = arguments(
        leading, rng.randint(1, 5), columns, dtype, bits=bits, zero_points=rng.random() < 0.5, seed=rng.randint(0, 999)
    )
    grad, *others = [*sample.inputs, None][:4]
    assert grad is not None
    moved = [None if tensor is None else scattered(tensor, rng) for tensor in others]
    return sample_of([repeated(grad, rng), *moved], columns, bits)


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((size,), 9, 20, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments((2, 7), 150, 70, dtype),
        arguments((13,), 30, 96, dtype, block_size=32, zero_points=True),
        arguments((5,), 20, 130, dtype, bits=8, block_size=128, zero_points=True),
        arguments((3,), 20, 50, dtype, bits=2, zero_points=True),
        arguments((), 20, 50, dtype, bits=2, block_size=64),
        arguments((4,), 6, 17, dtype, bits=8),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    columns = max(1, length)
    return [arguments((3,), 5, columns, dtype), arguments((3,), columns, 16, dtype, zero_points=True)]


def _valid() -> Sample:
    return arguments((2, 3), 4, 20, torch.float32, zero_points=True)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2)
    yield from near.retyped(0, torch.float16, torch.float64, torch.int64)
    yield from near.all_retyped((0, 2), torch.float64, torch.int32)
    yield from near.retyped(1, torch.int8, torch.int32, torch.float32, torch.bool)
    yield from near.retyped(2, torch.float16, torch.int64)
    yield from near.retyped(3, torch.int8, torch.float32)
    yield from near.reshaped(0, (2, 3, 5), (), (1,) * 9)
    yield from near.reshaped(1, (4, 16), (4, 2, 4), (4, 2, 12), (4, 1, 8), (4, 3, 8), (5, 2, 8), (4, 2, 0))
    yield from near.reshaped(2, (4, 3), (7,), ())
    yield from near.reshaped(3, (4, 2), (3,), ())
    yield from near.with_attributes("in_features", 0, -1, 16, 33)
    yield from near.with_attributes("bits", 0, 3, 8, 16)


SAMPLES = Samples(
    oracle=matmul_n_bits_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(arguments((0,), 4, 20, torch.float32), [(0, 20)])],
)
