"""Backward passes of pooling and of replicated borders, and adaptive pooling, in operators that torch.onnx knows.

Average pooling and replication are linear and act on each spatial axis by itself: with A the (out, in) matrix of an
axis that holds the share of each input in each output, the gradient of the input is A^T times that of the output, axis
after axis. Maximum pooling adds to the positions that the forward pass has found. This module imports torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        **forward_table(),
        aten.avg_pool2d_backward.default: functools.partial(avg_pool_backward, 2),
        aten.avg_pool3d_backward.default: functools.partial(avg_pool_backward, 3),
        aten._adaptive_avg_pool2d_backward.default: functools.partial(adaptive_avg_pool_backward, 2),
        aten._adaptive_avg_pool3d_backward.default: functools.partial(adaptive_avg_pool_backward, 3),
        aten.max_pool3d_with_indices_backward.default: functools.partial(max_pool_backward, 3),
        aten.adaptive_max_pool2d_backward.default: functools.partial(max_pool_backward, 2),
        aten.adaptive_max_pool3d_backward.default: functools.partial(max_pool_backward, 3),
        aten.replication_pad1d_backward.default: replication_pad_backward,
        aten.replication_pad2d_backward.default: replication_pad_backward,
        aten.replication_pad3d_backward.default: replication_pad_backward,
    }


def forward_table() -> dict[Any, Callable[..., Any]]:
    """Return those that forward programs hold."""
    return {
        aten._adaptive_avg_pool3d.default: adaptive_avg_pool3d,
        aten.adaptive_max_pool2d.default: adaptive_max_pool,
        aten.adaptive_max_pool3d.default: adaptive_max_pool,
        aten.avg_pool2d.default: functools.partial(avg_pool, 2),
        aten.avg_pool3d.default: functools.partial(avg_pool, 3),
        aten.fractional_max_pool2d.default: fractional_max_pool,
        aten.fractional_max_pool3d.default: fractional_max_pool,
    }


def avg_pool(
    axes: int,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """aten::avg_pool2d and 3d with a divisor of their own: torch.onnx forgets it."""
    if divisor_override is None:
        return NotImplemented  # type: ignore[no-any-return]
    kernel, pad = per_axis(kernel_size, axes), per_axis(padding, axes)
    step = per_axis(stride, axes) if stride else kernel
    matrices = []
    for axis in range(axes):
        size: Any = self.shape[axis - axes]
        out = (size + 2 * pad[axis] - kernel[axis] + (step[axis] - 1 if ceil_mode else 0)) // step[axis] + 1
        if ceil_mode:
            if not isinstance(out, int):
                return NotImplemented  # type: ignore[no-any-return]
            # The last window begins within the input or the padding before it.
            out -= (out - 1) * step[axis] >= size + pad[axis]
        start = torch.arange(out, device=self.device).unsqueeze(1) * step[axis] - pad[axis]
        matrices.append(_averages(start, start + kernel[axis], torch.ones_like(start), size, self).transpose(0, 1))
    return _along_axes(self, matrices) / divisor_override


def fractional_max_pool(
    self: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Tensor
) -> tuple[Tensor, Tensor]:
    """aten::fractional_max_pool2d and 3d: maxima of windows at random distances, and their positions.

    Args:
        self: (N, C, sizes) or (C, sizes).
        kernel_size: the windows.
        output_size: how many there are along each axis.
        random_samples: (N, C, axes), numbers from 0 to 1 that shift the windows, the last axis first.
    """
    axes = len(output_size)
    x = self if self.dim() == axes + 2 else self.unsqueeze(0)
    sizes = x.shape[2:]
    places = torch.zeros([1] * (2 + 2 * axes), dtype=torch.int64, device=self.device)
    for axis in range(axes):
        size, out, width = sizes[axis], output_size[axis], kernel_size[axis]
        # In the reverse order in two dimensions, in theirs in three.
        shift = random_samples[..., axes - 1 - axis if axes == 2 else axis].unsqueeze(-1)
        index = torch.arange(out, device=self.device)
        last = index == out - 1
        step = (size - width) / (out - 1) if out > 1 else 0.0
        begin = ((index + shift) * step).to(torch.int64) - (shift * step).to(torch.int64)
        begin = torch.where(last, size - width, begin)
        within = begin.unsqueeze(-1) + torch.arange(width, device=self.device)
        shape = [*within.shape[:2], *([1] * (2 * axes))]
        shape[2 + axis], shape[2 + axes + axis] = out, width
        places = places * size + within.view(shape)
    windows = places.expand([*x.shape[:2], *places.shape[2:]])
    taken = x.flatten(2).gather(2, windows.flatten(2)).view(windows.shape).flatten(2 + axes)
    values, first = taken.max(-1, keepdim=True)
    indices = windows.flatten(2 + axes).gather(-1, first).squeeze(-1)
    values = values.squeeze(-1)
    return (values, indices) if self.dim() == axes + 2 else (values.squeeze(0), indices.squeeze(0))


def avg_pool_backward(
    axes: int,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Gradient of average pooling: aten::avg_pool2d_backward and 3d.

    Args:
        axes: how many are pooled over, the last ones.
        grad_output: (N, C, out sizes) or (C, out sizes), floating.
        self: the forward's input, (N, C, sizes) or (C, sizes), of the same type.
        kernel_size, stride, padding: one for all axes or one each; an empty stride means the kernel size.
        ceil_mode: what the sizes of grad_output tell.
        count_include_pad: whether padding counts in the divisor.
        divisor_override: the divisor of every window, or None.
    """
    kernel, pad = per_axis(kernel_size, axes), per_axis(padding, axes)
    step = per_axis(stride, axes) if stride else kernel
    matrices = []
    for axis in range(axes):
        size, out = self.shape[axis - axes], grad_output.shape[axis - axes]
        start = torch.arange(out, device=self.device).unsqueeze(1) * step[axis] - pad[axis]
        end = (start + kernel[axis]).clamp(max=size + pad[axis])
        if divisor_override:
            count = torch.ones_like(start)
        elif count_include_pad:
            count = end - start
        else:
            count = end.clamp(max=size) - start.clamp(min=0)
        matrices.append(_averages(start, end, count, size, grad_output))
    grad = _along_axes(grad_output, matrices)
    return grad / divisor_override if divisor_override else grad


def adaptive_avg_pool3d(self: Tensor, output_size: Sequence[Any]) -> Tensor:
    """aten::_adaptive_avg_pool3d: means of (N, C, D, H, W) or (C, D, H, W) over output_size windows an axis."""
    matrices = _adaptive_averages(self.shape[-3:], output_size, self)
    return _along_axes(self, [matrix.transpose(0, 1) for matrix in matrices])


def adaptive_avg_pool_backward(axes: int, grad_output: Tensor, self: Tensor) -> Tensor:
    """Gradient of adaptive average pooling: aten::_adaptive_avg_pool2d_backward and 3d.

    Args:
        axes: how many are pooled over, the last ones.
        grad_output: (N, C, out sizes) or (C, out sizes), floating.
        self: the forward's input, (N, C, sizes) or (C, sizes), of the same type.
    """
    sizes, outputs = self.shape[-axes:], grad_output.shape[-axes:]
    return _along_axes(grad_output, _adaptive_averages(sizes, outputs, grad_output))


def _adaptive_averages(sizes: Sequence[Any], outputs: Sequence[Any], like: Tensor) -> list[Tensor]:
    matrices = []
    for size, out in zip(sizes, outputs, strict=True):
        start, end = _adaptive_windows(size, out, like)
        matrices.append(_averages(start, end, end - start, size, like))
    return matrices


def _adaptive_windows(size: Any, out: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return, each (out, 1), where the windows of an axis begin and end: floor(i in / out), ceil((i + 1) in / out)."""
    index = torch.arange(out, device=like.device).unsqueeze(1)
    start = torch.div(index * size, out, rounding_mode="floor")
    return start, torch.div((index + 1) * size + out - 1, out, rounding_mode="floor")


def adaptive_max_pool(self: Tensor, output_size: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """aten::adaptive_max_pool2d and 3d: maxima of (*, sizes) over output_size windows an axis, and their positions.

    Positions are those in the product of all sizes, in int64; of equal maxima the first.
    """
    sizes = self.shape[-len(output_size) :]
    values, positions = self, torch.arange(math.prod(sizes), device=self.device).view(sizes).expand_as(self)
    for axis in range(-1, -len(sizes) - 1, -1):
        size, out = sizes[axis], output_size[axis]
        start, end = _adaptive_windows(size, out, self)
        # No window is wider; narrower ones have their last element several times.
        widest = (size + out - 1) // out + 1
        taken = (start + torch.arange(widest, device=self.device)).minimum(end - 1).flatten()
        windows = (out, widest)
        values, first = torch.unflatten(values.index_select(axis, taken), axis, windows).max(axis, keepdim=True)
        positions = torch.unflatten(positions.index_select(axis, taken), axis, windows).gather(axis, first)
        values, positions = values.squeeze(axis), positions.squeeze(axis)
    return values, positions


def max_pool_backward(axes: int, grad_output: Tensor, self: Tensor, *settings: Any) -> Tensor:
    """Gradient of maximum pooling: aten::max_pool3d_with_indices_backward, aten::adaptive_max_pool2d_backward and 3d.

    Args:
        axes: how many are pooled over, the last ones.
        grad_output: (N, C, out sizes) or (C, out sizes), floating.
        self: the forward's input, (N, C, sizes) or (C, sizes), of the same type.
        settings: those of the windows, which are not needed; then indices, the positions in the product of the sizes of
            the maxima, in the shape of grad_output.
    """
    zeros = torch.zeros_like(self).flatten(-axes)
    return zeros.scatter_add(-1, settings[-1].flatten(-axes), grad_output.flatten(-axes)).view(self.shape)


def replication_pad_backward(grad_output: Tensor, self: Tensor, padding: Sequence[Any]) -> Tensor:
    """Gradient of replicated borders: aten::replication_pad1d_backward and its 2-D and 3-D forms.

    Args:
        grad_output: (*, out sizes), floating.
        self: the forward's input, (*, sizes), of the same type.
        padding: before and after each spatial axis, the last axis first.
    """
    axes = len(padding) // 2
    matrices = []
    for axis in range(axes):
        size, out = self.shape[axis - axes], grad_output.shape[axis - axes]
        source = torch.arange(out, device=self.device) - padding[2 * (axes - 1 - axis)]
        # One input for each output.
        start = source.clamp(min=0).minimum(source.new_full((), size - 1)).unsqueeze(1)
        matrices.append(_averages(start, start + 1, torch.ones_like(start), size, grad_output))
    return _along_axes(grad_output, matrices)


def _averages(start: Tensor, end: Tensor, count: Tensor, size: Any, like: Tensor) -> Tensor:
    """Return the (out, size) matrix of an axis that averages start <= j < end, in the type of `like`."""
    position = torch.arange(size, device=like.device).unsqueeze(0)
    covered = (position >= start) & (position < end)
    return covered.to(like.dtype) / count.to(like.dtype)


def _along_axes(tensor: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return a tensor times one matrix along each of its last axes."""
    for axis, matrix in enumerate(matrices):
        place = axis - len(matrices)
        tensor = torch.matmul(tensor.transpose(place, -1), matrix).transpose(place, -1)
    return tensor


def per_axis(value: Sequence[int], axes: int) -> list[int]:
    """Return a setting for each axis, of which one is given for all of them or one for each."""
    return list(value) * axes if len(value) == 1 else list(value)
