"""ApplyAdamW: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered


def apply_adam_w(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    learning_rate: Tensor,
    step: Tensor,
    gradient_scale: Tensor | None = None,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    decoupled_weight_decay: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.optim.AdamW`` or ``Adam`` after a step: new parameter, exp_avg, exp_avg_sq.

    16-bit types are computed in float32 and rounded once, as gradfuse does; torch.optim rounds every operation.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    leaf = parameter.detach().to(work, copy=True).contiguous().requires_grad_()
    leaf.grad = gradient.to(work, copy=True).contiguous()
    if gradient_scale is not None:
        leaf.grad *= gradient_scale.to(work)
    algorithm = torch.optim.AdamW if decoupled_weight_decay else torch.optim.Adam
    optimizer = algorithm(
        [leaf],
        lr=learning_rate.item(),
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        foreach=False,
        fused=False,
    )
    state = {
        # torch counts in float32, which is exact for what tests count to.
        "step": torch.tensor(float(step)),
        "exp_avg": exp_avg.to(work, copy=True).contiguous(),
        "exp_avg_sq": exp_avg_sq.to(work, copy=True).contiguous(),
    }
    optimizer.state[leaf] = state
    optimizer.step()
    return tuple(value.detach().to(dtype) for value in (leaf, state["exp_avg"], state["exp_avg_sq"]))  # type: ignore[return-value]


OPTIONS: Sequence[tuple[int, float | None, dict[str, Any]]] = (
    (0, None, {}),
    (9, 0.25, {"weight_decay": 0.125}),
    (3, -2.0, {"decoupled_weight_decay": 0, "weight_decay": 0.25}),
    (2, None, {"decoupled_weight_decay": 0, "weight_decay": 0.0, "beta1": 0.25, "beta2": 0.5}),
    (100_000, 1.0, {"beta1": 0.5, "beta2": 0.95, "epsilon": 0.0009765625}),
    (5, None, {"beta1": 0.0, "beta2": 0.9999999, "decoupled_weight_decay": 0, "weight_decay": 0.5}),
)
"""Steps done before, the scale of the gradient, and attributes: between them every branch."""


def sample_of(
    tensors: Sequence[Tensor], step: int = 3, scale: float | None = None, attributes: dict[str, Any] | None = None
) -> Sample:
    """A sample for a parameter, its gradient and its state; the magnitude of what the outputs are sums of."""
    attributes = {} if attributes is None else attributes
    parameter, gradient, mean, _ = (tensor.double() for tensor in tensors)
    size = (gradient * (1 if scale is None else scale)).abs() + mean.abs()
    if not attributes.get("decoupled_weight_decay", 1):
        size = size + parameter.abs() * attributes["weight_decay"]
    scalars = [torch.tensor(0.0078125), torch.tensor(step)]
    inputs = [*tensors, *scalars, *([] if scale is None else [torch.tensor(scale)])]
    return Sample(inputs, attributes, size)


def _tensors(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator | None = None) -> list[Tensor]:
    parameter, gradient, mean = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    # Of some size, as a root of what is near zero has no correct digits.
    return [parameter, gradient, mean, (torch.rand(shape, generator=generator) + 0.5).to(dtype)]


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 5))]
    parameter, gradient, mean, square = _tensors(shape, dtype)
    tensors = [scattered(parameter, rng), repeated(gradient, rng), scattered(mean, rng), repeated(square, rng)]
    return sample_of(tensors, *rng.choice(OPTIONS))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return sample_of(_tensors((size, 7), dtype, torch.Generator().manual_seed(size)), 4, 0.5, {"weight_decay": 0.5})


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [sample_of(_tensors((5, 7), dtype, generator), *options) for options in OPTIONS]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    return [sample_of(_tensors((length,), dtype, generator), *options) for options in OPTIONS[:3]]


def _valid() -> Sample:
    return sample_of(_tensors((2, 3), torch.float32, torch.Generator().manual_seed(0)), 1, 2.0)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2, 3, 4, 5)
    for index in range(4):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64)
        yield from near.reshaped(index, (3, 2), (2, 1), (6,), (), (0, 3), (1,) * 9)
    yield from near.all_retyped(range(4), torch.float64, torch.int32)
    for index in (4, 6):
        yield from near.retyped(index, torch.float64, torch.float16, torch.int64)
        yield from near.reshaped(index, (1,), (2, 3), (0,))
    yield from near.retyped(5, torch.int32, torch.float32)
    yield from near.reshaped(5, (1,), (2,))
    for beta in ("beta1", "beta2"):
        yield from near.with_attributes(beta, 1.0, -0.5, float("nan"))
    for name in ("epsilon", "weight_decay"):
        yield from near.with_attributes(name, -0.5, float("nan"))


_EMPTY = torch.zeros(0, 3)

SAMPLES = Samples(
    oracle=apply_adam_w,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(sample_of([_EMPTY] * 4), [(0, 3)] * 3)],
)
