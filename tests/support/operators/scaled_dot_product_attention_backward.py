"""ScaledDotProductAttentionBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from operators import attention
from operators.base import FLOATS, Changes, Sample, Samples
from operators.strides import repeated


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    sample = attention.of_backward(attention.strided(rng, dtype), dtype)
    grad, *others = sample.inputs
    assert grad is not None
    inputs = [repeated(grad, rng), *others]
    return Sample(inputs, sample.attributes, attention.terms(inputs, sample.attributes, grads=True))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return attention.backward_arguments((1, 2, 1, size, size + 1, 5, 6), dtype, causal=2)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [attention.of_backward(sample, dtype) for sample in attention.typical(dtype)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        attention.backward_arguments((1, 1, 1, 3, width, 5, 4), dtype),
        attention.backward_arguments((1, 1, 1, 3, 4, width, 5), dtype),
        attention.backward_arguments((1, 1, 1, 3, 4, 5, width), dtype, mask="added"),
    ]


def _valid() -> Sample:
    return attention.of_backward(attention.valid(), torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from attention.invalid(near, 1)
    yield from near.without(0, 4, 5)
    for index in (0, 4):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64)
        yield from near.reshaped(index, (2, 4, 3), (2, 4, 3, 6), (2, 2, 3, 7), (1, 4, 3, 7), (2, 4, 5, 7), ())
    yield from near.retyped(5, torch.float16, torch.float64, torch.int64)
    yield from near.reshaped(5, (2, 4), (2, 4, 3, 1), (2, 2, 3), (1, 4, 3), (2, 4, 5), ())


SAMPLES = Samples(
    oracle=attention.backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    rows=_rows,
    empty=[
        (
            attention.backward_arguments((0, 2, 1, 3, 4, 5, 6), torch.float32),
            [(0, 2, 3, 5), (0, 1, 4, 5), (0, 1, 4, 6)],
        ),
        (
            attention.backward_arguments((2, 2, 1, 0, 4, 5, 6), torch.float32),
            [(2, 2, 0, 5), (2, 1, 4, 5), (2, 1, 4, 6)],
        ),
        (
            attention.backward_arguments((2, 2, 1, 3, 0, 5, 6), torch.float32),
            [(2, 2, 3, 5), (2, 1, 0, 5), (2, 1, 0, 6)],
        ),
    ],
)
