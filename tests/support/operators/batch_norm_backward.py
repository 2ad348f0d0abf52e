"""BatchNormBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples, activation_type
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered

EPS = 1e-5


def batch_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    relu_output: Tensor | None = None,
    *,
    output_mask: Sequence[bool] = (True, True, True),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten.native_batch_norm_backward``, of ``aten.threshold_backward`` with a ReLU's output.

    What is not wanted is of shape (0).
    """
    work = working_type(dtype)
    grad, wide, mean, invstd = (tensor.to(work).contiguous() for tensor in (grad_output, input, save_mean, save_invstd))
    scale = None if weight is None else weight.to(work).contiguous()
    if relu_output is not None:
        # PyTorch's batch norm is wrong for some strides, which this takes from its second argument.
        grad = torch.ops.aten.threshold_backward(grad, relu_output.to(work), 0).contiguous()
    if 0 in input.shape:
        # PyTorch divides by the number of elements.
        grads: Sequence[Tensor | None] = (torch.zeros_like(wide), *(torch.zeros(input.shape[1]) for _ in range(2)))
    else:
        grads = torch.ops.aten.native_batch_norm_backward(
            grad, wide, scale, None, None, mean, invstd, True, EPS, [True, True, True]
        )
    types = (activation_type(input, dtype), dtype, dtype)
    first, second, third = (
        torch.zeros(0, dtype=type_) if one is None or not wanted else one.to(type_)
        for one, wanted, type_ in zip(grads, output_mask, types, strict=True)
    )
    return first, second, third


def arguments(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    relu: bool = False,
    weighted: bool = True,
    centre: float = 0.0,
    seed: int = 0,
    activations: torch.dtype | None = None,
    **attributes: Any,
) -> Sample:
    """Tensors of a step: normalized by the statistics of the batch, which lies around `centre`."""
    generator = torch.Generator().manual_seed(seed)
    channels = shape[1]
    kept = activations or dtype
    grad = torch.randn(shape, generator=generator).to(kept)
    x = (torch.randn(shape, generator=generator) + centre).to(kept)
    weight = (torch.rand(channels, generator=generator) + 0.5).to(dtype)
    planes = _by_channel(x) if x.numel() else torch.zeros(channels, 1).double()
    mean = planes.mean(1)
    invstd = 1 / ((planes - mean[:, None]).square().mean(1) + EPS).sqrt()
    output = torch.randn(shape, generator=generator).to(kept).relu() if relu else None
    inputs = [grad, x, weight if weighted else None, mean.to(dtype), invstd.to(dtype), output]
    return Sample(inputs, attributes, _terms(inputs))


def _by_channel(x: Tensor) -> Tensor:
    return x.double().transpose(0, 1).flatten(1)


def _terms(inputs: Sequence[Tensor | None]) -> float:
    """The largest sum of magnitudes that any result adds up."""
    grad, x, weight, mean, invstd = (None if tensor is None else tensor.double() for tensor in inputs[:5])
    assert grad is not None and x is not None and mean is not None and invstd is not None
    if x.numel() == 0:
        return 0.0
    distance = (_by_channel(x) - mean[:, None]).abs()
    # The distance is a difference, and rounds as what it is the difference of.
    rounding = distance + _by_channel(x).abs()
    products = (_by_channel(grad).abs() * rounding).sum(1) * invstd
    sums = _by_channel(grad).abs().sum(1)
    scale = invstd if weight is None else invstd * weight.abs()
    terms = scale * (grad.abs().max() + sums / x[:, 0].numel())
    terms += scale * rounding.amax(1) * invstd * products / x[:, 0].numel()
    return float(torch.cat([products, sums, terms]).max())


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(2, 5))]
    mixed = torch.bfloat16 if dtype != torch.float64 and rng.random() < 0.5 else dtype
    sample = arguments(
        shape, dtype, relu=rng.random() < 0.5, weighted=rng.random() < 0.5, seed=rng.randint(0, 2**30),
        activations=mixed,
        output_mask=tuple(rng.randint(0, 1) for _ in range(3)),
    )  # fmt: skip
    whole = (0, 1, 5)
    views = [
        None if tensor is None else repeated(tensor, rng) if index in whole else scattered(tensor, rng)
        for index, tensor in enumerate(sample.inputs)
    ]
    return Sample(views, sample.attributes, _terms(views))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((size, 3, 4, size + 1), dtype, relu=True)


def _typical(dtype: torch.dtype) -> list[Sample]:
    several: list[tuple[Sequence[int], Mapping[str, Any]]] = [
        ((4, 5, 6, 7), {}),
        ((3, 4, 33, 35), {"relu": True}),
        ((5, 20, 9), {"relu": True, "weighted": False}),
        ((2, 17, 3, 4, 5), {"weighted": False, "output_mask": (1, 0, 1)}),
        ((70, 9), {"relu": True}),
        ((30, 270), {"output_mask": (0, 1, 0)}),
        ((3, 2, 8, 8), {"output_mask": (0, 0, 1), "relu": True}),
        ((3, 2, 5), {"output_mask": (1, 0, 0)}),
        ((2, 3, 80, 80), {}),
    ]
    mixed = dtype if dtype == torch.float64 else torch.bfloat16
    return [
        *(arguments(shape, dtype, **options) for shape, options in several),
        arguments((3, 4, 33, 5), dtype, relu=True, activations=mixed),
        arguments((30, 27), dtype, weighted=False, activations=mixed),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments((2, 3, width), dtype),
        arguments((2, 17, width), dtype, relu=True),
        arguments((3, width), dtype, relu=True),
    ]


def _valid() -> Sample:
    return arguments((3, 4, 5, 2), torch.float32, relu=True)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 3, 4)
    for index in range(6):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    for index in (0, 1, 5):
        yield from near.reshaped(index, (3, 4, 5), (3, 4, 5, 3), (3, 3, 5, 2), (1, 4, 5, 2), (), (120,), (1,) * 9)
    for index in (2, 3, 4):
        yield from near.reshaped(index, (), (1,), (3,), (5,), (4, 1), (1, 4, 1, 1))
    yield from near.all_retyped(range(6), torch.int32, torch.bool)
    yield from near.with_attributes("output_mask", (1, 1), (1, 1, 2), (1, 1, 1, 1), (-1, 1, 1))


SAMPLES = Samples(
    oracle=batch_norm_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    rows=_rows,
    empty=[
        (arguments((0, 3, 4), torch.float32), [(0, 3, 4), (3,), (3,)]),
        (arguments((2, 3, 0), torch.float32), [(2, 3, 0), (3,), (3,)]),
        (arguments((2, 0, 4), torch.float32), [(2, 0, 4), (0,), (0,)]),
        (arguments((0, 3), torch.float32, relu=True), [(0, 3), (3,), (3,)]),
    ],
)
