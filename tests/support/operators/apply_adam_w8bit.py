"""ApplyAdamW8bit: its definition in numpy, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from operators.apply_adam_w import OPTIONS
from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered

BLOCK = 256


def _in_blocks(values: Tensor, real: Any, fill: float) -> npt.NDArray[Any]:
    flat = values.detach().contiguous().flatten()
    wide = (flat.double() if flat.is_floating_point() else flat).numpy().astype(real)
    return np.concatenate([wide, np.full(-len(wide) % BLOCK, fill, real)]).reshape(-1, BLOCK)


def updated(
    real: Any,
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_scale: Tensor,
    learning_rate: Tensor,
    step: Tensor,
    gradient_scale: Tensor | None = None,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    decoupled_weight_decay: int = 1,
) -> tuple[npt.NDArray[Any], ...]:
    """The outputs by the definition, each operation rounded to `real`; all of a parameter's elements in one row."""
    count, rate = step.item() + 1, learning_rate.item()
    weight_decay = float(np.float32(weight_decay))
    p, g = _in_blocks(parameter, real, 0), _in_blocks(gradient, real, 0)
    signed, roots = _in_blocks(exp_avg, real, 128) - real(128), _in_blocks(exp_avg_sq, real, -1) + real(1)
    mean = signed * abs(signed) * (exp_avg_scale.numpy().astype(real)[:, None] / real(127**2))
    root = roots * roots * (exp_avg_sq_scale.numpy().astype(real)[:, None] / real(256**2))
    with np.errstate(all="ignore"):
        if gradient_scale is not None:
            g = g * real(gradient_scale.item())
        if weight_decay and not decoupled_weight_decay:
            g = g + p * real(weight_decay)
        elif weight_decay:
            p = p * real(1 - rate * weight_decay)
        mean = mean * real(beta1) + g * real(1 - beta1)
        root = np.sqrt(root * root * real(beta2) + g * real(1 - beta2) * g)
        denominator = root * real(1 / (1 - beta2**count) ** 0.5) + real(np.float32(epsilon))
        p = p - mean * real(rate / (1 - beta1**count)) / denominator
        mean_scale, root_scale = abs(mean).max(1, initial=0), root.max(1, initial=0)
        unknown = ~np.isfinite(mean).all(1) | ~np.isfinite(root).all(1)
        mean_scale[unknown] = root_scale[unknown] = np.nan
        shares = []
        for values, scale, units in ((mean, mean_scale, 127**2), (root, root_scale, 256**2)):
            counts = scale >= real(2.0**-100)
            factor = np.divide(real(units), scale, where=counts, out=np.zeros_like(scale))
            shares.append(np.where(counts[:, None], np.sqrt(abs(values) * factor[:, None]), real(0)))
        mean_codes = 128 + np.sign(np.nan_to_num(mean)) * np.rint(shares[0])
        root_codes = np.maximum(np.rint(shares[1]), 1) - 1
    whole = [values.reshape(-1)[: parameter.numel()] for values in (p, mean_codes, root_codes)]
    return *whole, mean_scale, root_scale


def apply_adam_w8bit(*inputs: Tensor | None, dtype: torch.dtype = torch.float64, **attributes: Any) -> Any:
    """The outputs; codes are exact, and so computed as the operator does, in float32."""
    real = np.float64 if dtype == torch.float64 else np.float32
    present = [tensor for tensor in inputs if tensor is not None]
    shape = present[0].shape
    parameter, _, _, *scales = updated(real, *present, **attributes)
    _, *codes, _, _ = updated(np.float32, *present, **attributes)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        torch.from_numpy(parameter).to(dtype).reshape(shape),
        *(torch.from_numpy(array.astype(np.uint8)).reshape(shape) for array in codes),
        *(torch.from_numpy(array).to(kind) for array in scales),
    )


def state_of(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator | None = None) -> list[Tensor]:
    """A parameter, its gradient and a state of random codes."""
    parameter, gradient = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    codes = [torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator) for _ in range(2)]
    blocks = -(-parameter.numel() // BLOCK)
    return [parameter, gradient, *codes, *(torch.rand(blocks, generator=generator) + 0.5 for _ in range(2))]


def sample_of(
    tensors: Sequence[Tensor], step: int = 3, scale: float | None = None, attributes: dict[str, Any] | None = None
) -> Sample:
    """A sample for a parameter, its gradient and its state; the magnitude of what the outputs are sums of."""
    attributes = {} if attributes is None else attributes
    parameter, gradient = (tensor.double().abs() for tensor in tensors[:2])
    size = gradient * abs(1 if scale is None else scale) + parameter * attributes.get("weight_decay", 0)
    scalars = [torch.tensor(0.0078125), torch.tensor(step)]
    inputs = [*tensors, *scalars, *([] if scale is None else [torch.tensor(scale)])]
    return Sample(inputs, attributes, float(size.max()) + 1.5 if size.numel() else 0.0)


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 5))]
    parameter, gradient, mean, square, *scales = state_of(shape, dtype)
    tensors = [scattered(parameter, rng), repeated(gradient, rng), scattered(mean, rng), repeated(square, rng)]
    return sample_of([*tensors, *(scattered(scale, rng) for scale in scales)], *rng.choice(OPTIONS))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return sample_of(state_of((size, 7), dtype, torch.Generator().manual_seed(size)), 4, 0.5, {"weight_decay": 0.5})


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [sample_of(state_of((19, 33), dtype, generator), *options) for options in OPTIONS]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    return [sample_of(state_of((length,), dtype, generator), *options) for options in OPTIONS[:3]]


def _valid() -> Sample:
    return sample_of(state_of((2, 3), torch.float32, torch.Generator().manual_seed(0)), 1, 2.0)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(*range(8))
    for index in range(2):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64)
    for index in (2, 3):
        yield from near.retyped(index, torch.int8, torch.float32, torch.int64, torch.bool)
    for index in range(4):
        yield from near.reshaped(index, (3, 2), (2, 1), (6,), (), (0, 3), (1,) * 9)
    yield from near.all_retyped(range(2), torch.float64, torch.int32)
    for index in (4, 5):
        yield from near.retyped(index, torch.float16, torch.float64, torch.uint8)
        yield from near.reshaped(index, (), (2,), (0,), (1, 1))
    for index in (6, 8):
        yield from near.retyped(index, torch.float64, torch.float16, torch.int64)
        yield from near.reshaped(index, (1,), (2, 3), (0,))
    yield from near.retyped(7, torch.int32, torch.float32)
    yield from near.reshaped(7, (1,), (2,))
    for beta in ("beta1", "beta2"):
        yield from near.with_attributes(beta, 1.0, -0.5, float("nan"))
    for name in ("epsilon", "weight_decay"):
        yield from near.with_attributes(name, -0.5, float("nan"))


SAMPLES = Samples(
    oracle=apply_adam_w8bit,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(sample_of(state_of((0, 3), torch.float32)), [(0, 3)] * 3 + [(0,)] * 2)],
)
