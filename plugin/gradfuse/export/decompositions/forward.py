"""The decompositions of what forward programs hold. This module imports torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import dropout
from gradfuse.export.decompositions import (
    backward,
    elementwise,
    fourier,
    index,
    linear_algebra,
    logarithms,
    pooling,
    products,
    special,
    spectral,
)

aten = torch.ops.aten

_ALONG_AXES = (
    aten.prod.dim_int, aten.amax.default, aten.amin.default, aten.aminmax.default, aten.logsumexp.default,
    aten.any.dim, aten.all.dim, aten.topk.default, aten.flip.default, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.linalg_vector_norm.default, aten.var.correction, aten.std.correction,
    aten.var_mean.correction, aten.std_mean.correction,
)  # fmt: skip


_NARROW = (torch.float16, torch.bfloat16)
"""Types in which onnxruntime compares no numbers along an axis."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    # torch.onnx translates batch normalisation in training mode as if it were in evaluation mode.
    known = private.known_decompositions(
        [aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats]
    )
    return {
        **known,
        **index.table(),
        **pooling.forward_table(),
        **products.table(),
        **linear_algebra.table(),
        **elementwise.table(),
        **fourier.table(),
        **logarithms.table(),
        **special.table(),
        **spectral.table(),
        **dropout.table(),
        aten.linear.default: linear,
        aten.max.dim: functools.partial(of_first, aten.argmax.default),
        aten.min.dim: functools.partial(of_first, aten.argmin.default),
        aten.amax.default: functools.partial(of_all_axes, aten.amax.default),
        aten.amin.default: functools.partial(of_all_axes, aten.amin.default),
        aten.mean.default: mean,
        aten.mean.dim: mean,
        aten.empty_permuted.default: backward.empty_permuted,
        aten.copy.default: backward.copy,
        # In the decompositions of lerp and index_fill: another layout in memory, which ONNX does not have.
        torch.ops.prims.copy_strided.default: lambda a, stride: a.clone(),
        aten.split_with_sizes.default: split_with_sizes,
        # Checks of values, whose results nothing reads.
        aten._is_all_true.default: lambda self: self.all(),
        aten._is_any_true.default: lambda self: self.any(),
    }


def of_numbers(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return decompositions of operators along an axis, where it is axis 0 of a number: onnxruntime has none.

    Args:
        others: those of the same operators of tensors that have axes.
    """
    return {overload: _of_a_number(overload, others.get(overload)) for overload in _ALONG_AXES}


def _of_a_number(overload: Any, other: Callable[..., Any] | None) -> Callable[..., Any]:
    def decompose(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Tensor) or self.dim():
            return NotImplemented if other is None else other(self, *args, **kwargs)
        given, named = private.map_tensors(lambda one: one.reshape(1), (args, kwargs))
        return private.map_tensors(lambda one: one.reshape(()), overload(self.reshape(1), *given, **named))

    return decompose


def of_all_axes(overload: Any, self: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """aten::amax or aten::amin of all elements, over axes that are given: torch.onnx translates no other."""
    if dim:
        return NotImplemented
    return overload(self, range(self.dim()), keepdim) if self.dim() else self.clone()


def mean(
    self: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """aten::mean of what values select, by its sum: onnxruntime's mean of nothing is 0."""
    axes = [axis % self.dim() for axis in dim or range(self.dim())] if self.dim() else []
    count = math.prod(self.shape[axis] for axis in axes)
    if not private.follows_from_values(count):
        return NotImplemented
    return self.sum(axes, keepdim, dtype=dtype) / count


def of_first(find: Any, self: Tensor, dim: int, keepdim: bool = False) -> Any:
    """aten::max.dim or aten::min.dim: the gradient is that of the first of equal numbers, as PyTorch's is."""
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    index = find(self.float() if self.dtype in _NARROW else self, dim, True)
    values = self.gather(dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def split_with_sizes(self: Tensor, split_sizes: Sequence[int], dim: int = 0) -> Any:
    """aten::split_with_sizes as slices, where sizes vary: torch.onnx would make a sequence of them."""
    if all(isinstance(size, int) for size in split_sizes):
        return NotImplemented
    parts, begin = [], 0
    for size in split_sizes:
        parts.append(self.narrow(dim, begin, size))
        begin = begin + size
    return parts


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten::linear of any rank, as one product of matrices.

    Without gradients, PyTorch multiplies a transposed input with a copy of the weight for each item.
    """
    rows = input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    columns = weight.t() if weight.dim() == 2 else weight.unsqueeze(-1)
    product = rows @ columns if bias is None else torch.addmm(bias, rows, columns)
    return product.reshape([*input.shape[:-1], *weight.shape[:-1]])
