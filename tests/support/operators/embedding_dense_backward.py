"""EmbeddingDenseBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def embedding_dense_backward(
    grad_output: Tensor,
    indices: Tensor,
    *,
    num_weights: int = 0,
    padding_idx: int = -1,
    scale_grad_by_freq: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """aten::embedding_dense_backward. 16-bit types are added in float32 and rounded once."""
    wide = grad_output.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if num_weights == 0 or indices.numel() == 0:
        return wide.new_zeros(num_weights, grad_output.shape[-1]).to(dtype)
    summed: Tensor = torch.ops.aten.embedding_dense_backward(
        wide.contiguous(), indices.long().contiguous(), num_weights, padding_idx, bool(scale_grad_by_freq)
    )
    return summed.to(dtype)


def _with_terms(grad_output: Tensor, indices: Tensor, **attributes: Any) -> Sample:
    """Where a sum cancels, what is added up bounds what can be asked for."""
    terms = embedding_dense_backward(grad_output.abs(), indices, **attributes)
    return Sample([grad_output, indices], attributes, terms)


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    weights = rng.randint(1, 6)
    grad = repeated(torch.randn([*shape, rng.randint(1, 5)]).to(dtype), rng)
    indices = torch.randint(0, weights, shape).to(rng.choice((torch.int32, torch.int64)))
    attributes = {"padding_idx": rng.randint(-1, weights - 1), "scale_grad_by_freq": rng.randint(0, 1)}
    return _with_terms(grad, scattered(indices, rng), num_weights=weights, **attributes)


def _sized(size: int, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(size)
    grad = torch.randn(size, 9, generator=generator).to(dtype)
    return _with_terms(grad, torch.randint(0, 7, (size,), generator=generator), num_weights=7, padding_idx=2)


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(5, 60, 19, generator=generator).to(dtype)
    indices = torch.randint(0, 40, (5, 60), generator=generator)
    return [
        _with_terms(grad, indices, num_weights=41),
        _with_terms(grad, indices.int(), num_weights=40, padding_idx=3),
        _with_terms(grad, indices, num_weights=50, scale_grad_by_freq=1),
        _with_terms(grad[0, 0], torch.tensor(1), num_weights=3),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    grad = torch.randn(6, length, generator=generator).to(dtype)
    return [_with_terms(grad, torch.tensor([0, 2, 2, 0, 4, 2]), num_weights=5)]


def _valid() -> Sample:
    grad = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    return Sample([grad, torch.tensor([[0, 4, 1], [1, 1, 3]])], {"num_weights": 5})


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    yield from near.retyped(0, torch.float64, torch.int64, torch.bool)
    yield from near.retyped(1, torch.float32, torch.bool, torch.int16, torch.uint8)
    yield from near.reshaped(0, (6, 4), (3, 2, 4), (2, 3), (2, 3, 4, 1), (), (1,) * 9)
    yield from near.reshaped(1, (6,), (3, 2), (), (2, 3, 1), (0,))
    yield from near.with_attributes("num_weights", -1, 2**31)
    yield from near.changed(1, torch.tensor([[0, 5, 1], [1, 1, 3]]), torch.tensor([[0, -1, 1], [1, 1, -2]]))


_NO_ROWS = torch.zeros(0, 3)

SAMPLES = Samples(
    oracle=embedding_dense_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[
        (Sample([_NO_ROWS, torch.zeros(0, dtype=torch.int64)], {"num_weights": 2}), [(2, 3)]),
        (Sample([_NO_ROWS, torch.zeros(0, dtype=torch.int64)], {"num_weights": 0}), [(0, 3)]),
        (Sample([torch.zeros(2, 0), torch.tensor([1, 1])], {"num_weights": 2}), [(2, 0)]),
    ],
)
