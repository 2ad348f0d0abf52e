"""Functions that tracing writes in others within `vmap`, whose own rules for them make sizes that may vary constants.

This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse import _torch_private as private


def normalised(x: Tensor, axes: list[int], eps: float) -> Tensor:
    """Return numbers less their mean over axes, divided by their deviation."""
    centred = x - x.mean(axes, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Multiply by a weight and add a bias, if they are there, as vectors of a shape."""
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _wraps(*tensors: Tensor | None) -> bool:
    return any(one is not None and private.is_wrapped(one) for one in tensors)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if not _wraps(input, weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    axes = list(range(-len(normalized_shape), 0))
    result = normalised(input, axes, eps)
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if not _wraps(input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    groups = input.reshape([input.shape[0], num_groups, -1])
    result = normalised(groups, [-1], eps).reshape(input.shape)
    return scaled(result, weight, bias, [-1 if axis == 1 else 1 for axis in range(input.dim())])


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if not _wraps(input):
        return F.gelu(input, approximate=approximate)
    if approximate == "none":
        return 0.5 * input * (1.0 + torch.erf(input * math.sqrt(0.5)))
    return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * input**3)))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None or not _wraps(input, weight, bias):
        return F.linear(input, weight, bias)
    product = F.linear(input, weight)
    # Under autocast the bias is rounded as the product is.
    return product + bias.to(product.dtype)


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    F.gelu: _gelu,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.linear: _linear,
}
"""Function -> what does the same."""
