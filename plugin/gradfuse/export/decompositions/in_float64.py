"""Operators of float64 that onnxruntime has no kernels for, or that ONNX gives their numbers in float32.

This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.decompositions import special

aten = torch.ops.aten

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def table(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them.

    Args:
        others: those of the same operators in other types.
    """
    functions: dict[Any, Callable[..., Any]] = {
        aten.leaky_relu.default: leaky_relu,
        aten.elu.default: elu,
        aten.selu.default: selu,
        aten.sinh.default: sinh,
        aten.cosh.default: cosh,
        aten.tan.default: tan,
        aten.gelu.default: gelu,
        aten.erf.default: erf,
        aten.layer_norm.default: layer_norm,
        aten.native_layer_norm.default: native_layer_norm,
        aten.group_norm.default: group_norm,
        aten.native_group_norm.default: native_group_norm,
        aten.var_mean.correction: var_mean,
    }
    return {overload: _of_float64(function, others.get(overload)) for overload, function in functions.items()}


def _of_float64(function: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    def decompose(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Nor does ONNX take numbers that follow from sizes.
        if self.dtype == torch.float64 or any(map(private.is_symbolic, (*args, *kwargs.values()))):
            return function(self, *args, **kwargs)
        return NotImplemented if other is None else other(self, *args, **kwargs)

    return decompose


def leaky_relu(self: Tensor, negative_slope: float = 0.01) -> Tensor:
    """aten::leaky_relu."""
    return torch.where(self > 0.0, self, self * negative_slope)


def elu(self: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """aten::elu."""
    below = (self.clamp(max=0.0) * input_scale).expm1() * alpha
    return torch.where(self > 0.0, self, below) * scale


def selu(self: Tensor) -> Tensor:
    """aten::selu."""
    return elu(self, _SELU_ALPHA, _SELU_SCALE)


def sinh(self: Tensor) -> Tensor:
    """aten::sinh."""
    return (self.expm1() - (-self).expm1()) * 0.5


def cosh(self: Tensor) -> Tensor:
    """aten::cosh."""
    return (self.exp() + (-self).exp()) * 0.5


def tan(self: Tensor) -> Tensor:
    """aten::tan."""
    return self.sin() / self.cos()


def gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu."""
    if approximate != "none":
        inner = math.sqrt(2.0 / math.pi) * (self + 0.044715 * self * self * self)
        return self * ((inner.tanh() + 1.0) * 0.5)
    return self * (special.erfc(self * -math.sqrt(0.5)) * 0.5)


def erf(self: Tensor) -> Tensor:
    """aten::erf."""
    return 1.0 - special.erfc(self)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """aten::layer_norm."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::native_layer_norm: the result, the mean and the inverse deviation."""
    axes = list(range(input.dim() - len(normalized_shape), input.dim()))
    result, mean, deviation = _normalised(input, axes, eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, deviation


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """aten::group_norm."""
    return _in_groups(input, num_groups, weight, bias, eps)[0]


def native_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::native_group_norm: the result, the mean and the inverse deviation."""
    result, mean, deviation = _in_groups(input, group, weight, bias, eps)
    return result, mean.reshape(N, group), deviation.reshape(N, group)


def _in_groups(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    channels = (1, input.shape[1], *[1] * (input.dim() - 2))
    result, mean, deviation = _normalised(input.reshape(input.shape[0], groups, -1), [2], eps)
    result = result.reshape(input.shape)
    result = result if weight is None else result * weight.reshape(channels)
    return result if bias is None else result + bias.reshape(channels), mean, deviation


def _normalised(rows: Tensor, axes: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = rows.mean(axes, keepdim=True)
    centred = rows - mean
    deviation = (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    return centred * deviation, mean, deviation


def var_mean(
    self: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """aten::var_mean.correction."""
    axes = [axis % self.dim() for axis in dim or range(self.dim())] if self.dim() else []
    mean = self.mean(axes, keepdim=True) if axes else self
    variance = (self - mean).square().mean(axes, keepdim=True) if axes else self * 0.0
    less = 1 if correction is None else correction
    if less:
        count = math.prod(self.shape[axis] for axis in axes)
        variance = variance * (count / (count - less))
    if keepdim or not axes:
        return variance, mean
    return variance.squeeze(axes), mean.squeeze(axes)
