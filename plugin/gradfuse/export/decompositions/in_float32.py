"""Operators of 16 bits that are several in ONNX, or take numbers: each is computed in float32 and rounded once.

That is how PyTorch's kernels compute. Their decompositions would round after every step, and round the numbers too: a
`pow` of 1.7 would be one of 1.703. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.rounding import NARROW

aten = torch.ops.aten

_NAMES = """
    addcdiv addcmul binary_cross_entropy_with_logits celu elu exp2 hardshrink hardsigmoid hardswish huber_loss lerp
    linalg_vector_norm log10 log2 log_sigmoid_forward logit logsumexp mish mse_loss native_group_norm norm pow prod
    rsqrt selu sinc smooth_l1_loss softplus softshrink std std_mean tan threshold upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_trilinear3d var var_mean
""".split()


def table(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them.

    Args:
        others: those of the same operators in other types.
    """
    packets = [getattr(aten, name) for name in _NAMES]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads() if "out" not in name]
    return {
        overload: _rounded_once(overload, others.get(overload))
        for overload in overloads
        if not private.is_mutable(overload)
    }


def _rounded_once(overload: Any, other: Callable[..., Any] | None) -> Callable[..., Any]:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        leaves = private.tensors_in((args, kwargs))
        types = {one.dtype for one in leaves if isinstance(one, Tensor) and one.is_floating_point()}
        if len(types) != 1 or not types.intersection(NARROW) or kwargs.get("dtype") is not None:
            return NotImplemented if other is None else other(*args, **kwargs)
        (narrow,) = types
        given, named = private.map_tensors(_widened, (args, kwargs))
        return private.map_tensors(lambda one: _rounded(one, narrow), overload(*given, **named))

    return decompose


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
