"""FusedMatmul: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def fused_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    trans_a: int = 0,
    trans_b: int = 0,
    factors_in_bfloat16: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A product of matrices. 16-bit types are added in float32 and rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    left, right = ((one.to(torch.bfloat16) if factors_in_bfloat16 else one).to(wide) for one in (a, b))
    product = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    return (product if bias is None else product + bias.to(wide)).to(dtype)


def arguments(
    a_batch: Sequence[int],
    b_batch: Sequence[int],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: bool = False,
    narrow: bool = False,
    b_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Sample:
    """Tensors of some rows, terms of a sum, and columns."""
    generator = torch.Generator().manual_seed(seed)
    rows, depth, columns = sizes
    shapes = [
        (*a_batch, *((depth, rows) if trans_a else (rows, depth))),
        (*b_batch, *((columns, depth) if trans_b else (depth, columns))),
        (columns,),
    ]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if b_dtype is not None:
        inputs[1] = inputs[1].to(b_dtype)
    attributes = {"trans_a": int(trans_a), "trans_b": int(trans_b), "factors_in_bfloat16": int(narrow)}
    return sample_of(inputs if bias else inputs[:2], attributes)


def sample_of(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Sample:
    """Where a sum cancels, what is added up bounds what can be asked for."""
    a, b, *bias = [None if one is None else one.double().abs() for one in inputs]
    assert a is not None and b is not None
    return Sample(list(inputs), dict(attributes), fused_matmul(a, b, *bias, **attributes))


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    batch = [rng.randint(1, 3) for _ in range(rng.randint(0, 2))]
    flags = [rng.random() < 0.5 for _ in range(4)]
    sample = arguments(
        batch,
        batch[rng.randint(0, len(batch)) :],
        (rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 20)),
        dtype,
        trans_a=flags[0],
        trans_b=flags[1],
        bias=flags[2],
        narrow=flags[3],
        b_dtype=rng.choice((dtype, torch.float32, torch.bfloat16)),
        seed=rng.randint(0, 999),
    )
    a, *others = sample.inputs
    assert a is not None
    changed = [repeated(a, rng), *(None if one is None else scattered(one, rng) for one in others)]
    return sample_of(changed, sample.attributes)


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((2,), (), (size, 7, 5), dtype, trans_b=True)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments((), (), (9, 40, 33), dtype, bias=True),
        arguments((3,), (), (5, 31, 70), dtype, trans_b=True, bias=True),
        arguments((), (), (30, 9, 50), dtype, trans_a=True),
        arguments((2, 1), (3,), (13, 16, 8), dtype, trans_a=True, trans_b=True),
        arguments((), (2,), (4, 1, 20), dtype),
        arguments((), (), (30, 41, 50), dtype, trans_a=True, narrow=True, b_dtype=torch.bfloat16),
        arguments((2,), (), (7, 40, 33), dtype, trans_b=True, narrow=True, b_dtype=torch.float32, bias=True),
        arguments((), (), (7, 9, 33), dtype, b_dtype=torch.float32),
        # Tasks of several blocks, and of one sum in several parts.
        arguments((), (), (500, 17, 530), dtype),
        arguments((), (), (20, 1100, 36), dtype, trans_b=True, bias=True),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    size = max(1, length)
    return [
        arguments((), (), (3, 5, size), dtype, bias=True),
        arguments((), (), (size, 4, 3), dtype, trans_a=True),
        arguments((), (), (3, size, 4), dtype, trans_b=True),
        arguments((), (), (3, 4, size), dtype, narrow=True),
    ]


def _valid() -> Sample:
    return arguments((2,), (), (3, 5, 4), torch.float32, bias=True)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    yield from near.retyped(0, torch.float16, torch.float64, torch.int64)
    yield from near.all_retyped((0, 1, 2), torch.float64, torch.int32)
    yield from near.retyped(1, torch.float64, torch.bool)
    yield from near.retyped(2, torch.float16, torch.int64)
    yield from near.reshaped(0, (2, 3, 4), (5,), (), (1,) * 9)
    yield from near.reshaped(1, (4, 5), (3, 5, 4), (5,), (1,) * 9)
    yield from near.reshaped(2, (5,), (1, 4), ())
    yield from near.with_attributes("trans_a", 1)
    yield from near.with_attributes("trans_b", 1)


SAMPLES = Samples(
    oracle=fused_matmul,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[
        (arguments((0,), (), (4, 5, 3), torch.float32), [(0, 4, 3)]),
        (arguments((2,), (), (0, 5, 3), torch.float32), [(2, 0, 3)]),
    ],
)
"""Calls of FusedMatmul."""
