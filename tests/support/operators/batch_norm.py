"""BatchNorm: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples, activation_type
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered

EPS, MOMENTUM = 1e-5, 0.1


def batch_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    momentum: float = MOMENTUM,
    eps: float = EPS,
    relu: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """``aten._native_batch_norm_legit_functional``, and ``aten.relu``; what was not given is updated to shape (0)."""
    work = working_type(dtype)
    wide = [None if one is None else one.to(work).contiguous() for one in (input, weight, bias)]
    channels = input.shape[1]
    old = [
        torch.full((channels,), otherwise, dtype=work) if one is None else one.to(work).contiguous()
        for one, otherwise in ((running_mean, 0.0), (running_var, 1.0))
    ]
    if channels == 0:
        # PyTorch refuses it.
        nothing = torch.zeros(0, dtype=dtype)
        return torch.zeros(input.shape, dtype=dtype), nothing, nothing, nothing, nothing
    # The attributes are float32.
    factor, least = (float(torch.tensor(number)) for number in (momentum, eps))
    output, *statistics = torch.ops.aten._native_batch_norm_legit_functional(*wide, *old, True, factor, least)
    results = [output.relu() if relu else output, *statistics]
    absent = (False, False, False, running_mean is None, running_var is None)
    types = (activation_type(input, dtype), *[dtype] * 4)
    each = zip(absent, results, types, strict=True)
    return tuple(torch.zeros(0, dtype=type_) if is_absent else one.to(type_) for is_absent, one, type_ in each)


def arguments(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    given: Sequence[bool] = (True, True, True, True),
    centre: float = 0.0,
    seed: int = 0,
    activations: torch.dtype | None = None,
    **attributes: Any,
) -> Sample:
    """Tensors of any values around `centre`; `given` are weight, bias and both running statistics."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + centre
    vectors = [torch.randn(shape[1], generator=generator) for _ in range(4)]
    vectors[3] = vectors[3].abs()
    inputs = [
        x.to(activations or dtype),
        *(one.to(dtype) if there else None for one, there in zip(vectors, given, strict=True)),
    ]
    return Sample(inputs, attributes, _terms(inputs))


def _terms(inputs: Sequence[Tensor | None]) -> float:
    """The largest magnitude that any result is a sum or difference of."""
    x, weight, bias = (None if one is None else one.double() for one in inputs[:3])
    assert x is not None
    if x.numel() == 0:
        return 0.0
    by_channel = x.transpose(0, 1).flatten(1)
    invstd = 1 / (by_channel.var(1, correction=0) + EPS).sqrt()
    largest = by_channel.abs().amax(1)
    scaled = largest * invstd * (1.0 if weight is None else weight.abs())
    # The variance is a mean of squares of differences, each of which rounds as the numbers do.
    spread = (by_channel - by_channel.mean(1, keepdim=True)).abs().amax(1) * largest
    deviations = spread * invstd**2 * torch.stack([invstd, scaled]).amax(0)
    others = [scaled, spread, deviations, *([] if bias is None else [bias.abs()])]
    return float(torch.cat(others).max())


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(2, 5) for _ in range(rng.randint(2, 5))]
    given = [rng.random() < 0.7 for _ in range(4)]
    # Without any vector the activations tell T.
    mixed = torch.bfloat16 if any(given) and rng.random() < 0.5 else dtype
    sample = arguments(shape, dtype, given=given, seed=rng.randint(0, 2**30), activations=mixed, relu=rng.randint(0, 1))
    x, *vectors = sample.inputs
    assert x is not None
    views = [repeated(x, rng), *(None if one is None else scattered(one, rng) for one in vectors)]
    return Sample(views, sample.attributes, _terms(views))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((size, 3, 4, size + 1), dtype, relu=1)


def _typical(dtype: torch.dtype) -> list[Sample]:
    several: list[tuple[Sequence[int], Mapping[str, Any]]] = [
        ((4, 5, 6, 7), {}),
        ((3, 4, 33, 35), {"relu": 1}),
        ((5, 20, 9), {"relu": 1, "given": (False, True, True, False), "momentum": 0.5}),
        ((2, 17, 3, 4, 5), {"given": (False, False, False, True), "eps": 1e-3}),
        ((70, 9), {"relu": 1, "given": (True, False, False, False)}),
        ((30, 270), {"momentum": 0.0}),
        ((2, 3, 80, 80), {"momentum": 1.0}),
        ((4, 5, 6, 7), {"relu": 1, "activations": torch.bfloat16}),
        ((30, 27), {"given": (False, False, True, False), "activations": torch.bfloat16}),
    ]
    return [arguments(shape, dtype, **options) for shape, options in several]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments((2, 3, width), dtype),
        arguments((2, 17, width), dtype, relu=1),
        arguments((3, width), dtype, relu=1),
    ]


def _valid() -> Sample:
    return arguments((3, 4, 5, 2), torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0)
    for index in range(5):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.reshaped(0, (3,), (3, 3, 5), (3, 5, 5, 2), (), (1,) * 9)
    for index in range(1, 5):
        yield from near.reshaped(index, (), (1,), (3,), (5,), (4, 1), (1, 4, 1, 1))
    yield from near.all_retyped(range(5), torch.int32, torch.bool, torch.float64)
    yield from near.with_attributes("momentum", -0.1, 1.5, float("nan"))
    yield from near.with_attributes("eps", -1e-5, float("nan"))


SAMPLES = Samples(
    oracle=batch_norm,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[
        (
            Sample([torch.zeros(2, 0, 4), *(torch.zeros(0) for _ in range(4))]),
            [(2, 0, 4), (0,), (0,), (0,), (0,)],
        ),
    ],
)
