"""LayerNormBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered

EPS = 1e-5


def layer_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    axis: int = -1,
    output_mask: Sequence[bool] = (True, True, True),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten.native_layer_norm_backward``, without a mean the gradients of ``torch.nn.functional.rms_norm``.

    What is not wanted is of shape (0).
    """
    work = working_type(dtype)
    inner = input.shape[axis:]
    grad, wide, inverse = (tensor.to(work).contiguous() for tensor in (grad_output, input, rstd))
    scale = torch.ones(inner, dtype=work) if weight is None else weight.to(work).contiguous()
    if 0 in input.shape:
        grads: Sequence[Tensor] = (torch.zeros_like(wide), *(torch.zeros(inner, dtype=work) for _ in range(2)))
    elif mean is None:
        grads = _of_rms_norm(grad, wide, scale, inverse, axis % input.dim())
    else:
        middle = mean.to(work).contiguous()
        grads = torch.ops.aten.native_layer_norm_backward(
            grad, wide, inner, middle, inverse, scale, scale, [True, True, True]
        )
    first, second, third = (
        one.to(dtype) if wanted else torch.zeros(0, dtype=dtype) for one, wanted in zip(grads, output_mask, strict=True)
    )
    return first, second, third


def _of_rms_norm(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, first: int) -> list[Tensor]:
    """By autograd, with rstd as it is given: its derivative is -rstd^3 x / n."""
    leaf, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
    bias = torch.zeros_like(weight, requires_grad=True)
    axes = list(range(first, x.dim()))
    half = -0.5 * rstd**3 * (leaf.square().mean(axes, keepdim=True) if axes else leaf.square())
    inverse = rstd + half - half.detach()
    loss = ((leaf * inverse * scale + bias) * grad).sum()
    return list(torch.autograd.grad(loss, (leaf, scale, bias)))


def arguments(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    axis: int = -1,
    weighted: bool = True,
    centred: bool = True,
    centre: float = 0.0,
    seed: int = 0,
    **attributes: Any,
) -> Sample:
    """Tensors of a step, whose input lies around `centre`."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(shape, generator=generator).to(dtype)
    x = (torch.randn(shape, generator=generator) + centre).to(dtype)
    weight = (torch.rand(shape[axis:], generator=generator) + 0.5).to(dtype)
    axes = list(range(axis % len(shape), len(shape)))
    wide, kept = x.double(), [*shape[: axis % len(shape)], *(1 for _ in axes)]
    mean = wide.mean(axes, keepdim=True) if x.numel() else torch.zeros(kept).double()
    distance = wide - mean if centred else wide
    rstd = 1 / (distance.square().mean(axes, keepdim=True) + EPS).sqrt() if x.numel() else torch.ones(kept).double()
    statistics = dtype if dtype == torch.float64 else torch.float32
    inputs = [
        grad, x, weight if weighted else None, mean.to(statistics) if centred else None, rstd.to(statistics)
    ]  # fmt: skip
    if axis != -1:
        attributes["axis"] = axis
    return Sample(inputs, attributes, _terms(inputs, axis))


def _terms(inputs: Sequence[Tensor | None], axis: int) -> float:
    """The largest sum of magnitudes that any result adds up."""
    grad, x, weight, mean, rstd = (None if tensor is None else tensor.double() for tensor in inputs)
    assert grad is not None and x is not None and rstd is not None
    if x.numel() == 0:
        return 0.0
    first = axis % x.dim()
    grad, x, rstd = (one.flatten(0, first - 1) if first else one[None] for one in (grad, x, rstd))
    grad, x, rstd = (one.flatten(1) for one in (grad, x, rstd))
    distance = x if mean is None else x - mean.reshape(-1, 1)
    # The distance is a difference, and rounds as what it is the difference of.
    rounding = (distance.abs() + x.abs()) * rstd
    through = grad.abs() if weight is None else grad.abs() * weight.abs().reshape(1, -1)
    whole = rstd * (through + through.mean(1, keepdim=True) + rounding * (through * rounding).mean(1, keepdim=True))
    return float(torch.stack([whole.max(), (grad.abs() * rounding).sum(0).max(), grad.abs().sum(0).max()]).max())


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
    sample = arguments(
        shape, dtype, axis=rng.randint(-len(shape), len(shape) - 1), weighted=rng.random() < 0.5,
        centred=rng.random() < 0.5, seed=rng.randint(0, 2**30), output_mask=tuple(rng.randint(0, 1) for _ in range(3)),
    )  # fmt: skip
    views = [
        None if tensor is None else repeated(tensor, rng) if index < 2 else scattered(tensor, rng)
        for index, tensor in enumerate(sample.inputs)
    ]
    return Sample(views, sample.attributes, _terms(views, sample.attributes.get("axis", -1)))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((size, 3, size + 1), dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    several: list[tuple[Sequence[int], Mapping[str, Any]]] = [
        ((4, 5, 6), {}),
        ((3, 70, 33), {"axis": 1}),
        ((150, 65), {"weighted": False}),
        ((2, 17, 3, 4), {"axis": -2, "centred": False, "output_mask": (1, 1, 0)}),
        ((3, 2, 8), {"axis": 0, "output_mask": (0, 1, 1)}),
        ((130, 40), {"centred": False, "weighted": False, "output_mask": (1, 0, 0)}),
        ((7,), {"output_mask": (1, 0, 1)}),
        ((5, 2, 9), {"output_mask": (0, 0, 1)}),
        ((3, 4100), {}),
    ]
    return [arguments(shape, dtype, **options) for shape, options in several]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments((6, width), dtype),
        arguments((1, width), dtype, weighted=False),
        arguments((5, width), dtype, centred=False, output_mask=(1, 0, 0)),
    ]


def _valid() -> Sample:
    return arguments((3, 4, 5), torch.float32, axis=1)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 4)
    for index in range(5):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    for index in (0, 1):
        yield from near.reshaped(index, (3, 4), (3, 4, 6), (3, 3, 5), (1, 4, 5), (), (60,), (1,) * 9)
    yield from near.reshaped(2, (), (1,), (5,), (4,), (20,), (5, 4), (1, 5), (3, 4, 5))
    for index in (3, 4):
        yield from near.reshaped(index, (), (1,), (3,), (3, 1), (3, 4, 1), (1, 1, 1), (4, 1, 1), (3, 4, 5))
    yield from near.all_retyped(range(3), torch.int32, torch.bool)
    yield from near.with_attributes("axis", 0, 2, 3, -4, 100)
    yield from near.with_attributes("output_mask", (1, 1), (1, 1, 2), (1, 1, 1, 1), (-1, 1, 1))


SAMPLES = Samples(
    oracle=layer_norm_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    rows=_rows,
    empty=[
        (arguments((0, 3, 4), torch.float32), [(0, 3, 4), (4,), (4,)]),
        (arguments((2, 3, 0), torch.float32), [(2, 3, 0), (0,), (0,)]),
        (arguments((2, 0, 4), torch.float32, axis=1), [(2, 0, 4), (0, 4), (0, 4)]),
        (arguments((0, 3), torch.float32, centred=False, weighted=False), [(0, 3), (3,), (3,)]),
    ],
)
