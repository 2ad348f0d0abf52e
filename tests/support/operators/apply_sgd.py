"""ApplySgd: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def apply_sgd(
    parameter: Tensor,
    gradient: Tensor,
    learning_rate: Tensor,
    momentum_buffer: Tensor | None = None,
    gradient_scale: Tensor | None = None,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """``torch.optim.SGD`` after a step: new parameter, new momentum buffer.

    16-bit types are computed in float32 and rounded once, as gradfuse does; torch.optim rounds every operation.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    leaf = parameter.detach().to(work, copy=True).contiguous().requires_grad_()
    leaf.grad = gradient.to(work, copy=True).contiguous()
    if gradient_scale is not None:
        leaf.grad *= gradient_scale.to(work)
    optimizer = torch.optim.SGD(
        [leaf],
        lr=learning_rate.item(),
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        foreach=False,
        fused=False,
    )
    buffer = torch.zeros(0, dtype=work)
    if momentum_buffer is not None:
        buffer = momentum_buffer.to(work, copy=True).contiguous()
        optimizer.state[leaf] = {"momentum_buffer": buffer}
    optimizer.step()
    if momentum_buffer is not None and not momentum:
        # torch.optim leaves a buffer alone that it does not need.
        buffer = leaf.grad + weight_decay * parameter.to(work)
    return leaf.detach().to(dtype), buffer.to(dtype)


OPTIONS: Sequence[tuple[float | None, dict[str, Any]]] = (
    (None, {}),
    (0.25, {"weight_decay": 0.125}),
    (None, {"momentum": 0.9}),
    (-2.0, {"momentum": 0.5, "weight_decay": 0.25}),
    (None, {"momentum": 0.75, "nesterov": 1}),
    (0.5, {"momentum": 0.9, "nesterov": 1, "weight_decay": 0.5}),
)
"""The scale of the gradient, and attributes: between them every branch."""


def sample_of(
    tensors: Sequence[Tensor], scale: float | None = None, attributes: dict[str, Any] | None = None
) -> Sample:
    """A sample for a parameter, its gradient and its momentum; the magnitude of what the outputs are sums of."""
    attributes = {} if attributes is None else attributes
    parameter, gradient, buffer = (tensor.double().abs() for tensor in tensors)
    size = gradient * abs(1 if scale is None else scale) + attributes.get("weight_decay", 0.0) * parameter
    buffered = "momentum" in attributes
    if buffered:
        size = size * 2 + buffer
    inputs: list[Tensor | None] = [*tensors[:2], torch.tensor(0.0078125), tensors[2] if buffered else None]
    inputs.append(None if scale is None else torch.tensor(scale))
    while inputs[-1] is None:
        inputs.pop()
    return Sample(inputs, attributes, size + parameter if buffered else 0.0)


def _tensors(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator | None = None) -> list[Tensor]:
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 5))]
    parameter, gradient, buffer = _tensors(shape, dtype)
    tensors = [scattered(parameter, rng), repeated(gradient, rng), scattered(buffer, rng)]
    return sample_of(tensors, *rng.choice(OPTIONS))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    tensors = _tensors((size, 7), dtype, torch.Generator().manual_seed(size))
    return sample_of(tensors, 0.5, {"momentum": 0.5, "weight_decay": 0.5})


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [sample_of(_tensors((5, 7), dtype, generator), *options) for options in OPTIONS]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    return [sample_of(_tensors((length,), dtype, generator), *options) for options in OPTIONS[1:5]]


def _valid() -> Sample:
    tensors = _tensors((2, 3), torch.float32, torch.Generator().manual_seed(0))
    return sample_of(tensors, 2.0, {"momentum": 0.5})


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2)
    for index in (0, 1, 3):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64)
        yield from near.reshaped(index, (3, 2), (2, 1), (6,), (), (0, 3), (1,) * 9)
    yield from near.all_retyped((0, 1, 3), torch.float64, torch.int32)
    for index in (2, 4):
        yield from near.retyped(index, torch.float64, torch.float16, torch.int64)
        yield from near.reshaped(index, (1,), (2, 3), (0,))
    for name in ("momentum", "weight_decay"):
        yield from near.with_attributes(name, -0.5, float("nan"))


_EMPTY = torch.zeros(0, 3)

SAMPLES = Samples(
    oracle=apply_sgd,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(sample_of([_EMPTY] * 3, None, {"momentum": 0.5}), [(0, 3)] * 2), (sample_of([_EMPTY] * 3), [(0, 3), (0,)])],
)
