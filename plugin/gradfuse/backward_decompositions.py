"""Operators of ATen's backward programs that torch.onnx cannot translate, written in operators that it can.

`table()` is a decomposition table for `torch.export.ExportedProgram.run_decompositions`. Each entry computes what the
ATen operator of its name computes, for static and symbolic shapes. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    # torch.onnx translates batch normalisation in training mode as if it were in evaluation mode.
    known = get_decompositions([aten._native_batch_norm_legit_functional.default])
    return {
        **known,
        aten.convolution_backward.default: convolution_backward,
        aten.avg_pool2d_backward.default: avg_pool2d_backward,
        aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
        aten.empty_permuted.default: empty_permuted,
    }


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a convolution with d spatial axes, plain or transposed, as convolutions: aten::convolution_backward.

    With y[n,o,i] = sum over c, k of x[n,c,i s - p + k d] w[o,c,k], the gradient of x is the transposed convolution of
    grad_output with w, and the gradient of w[o,c,k] = sum over n, i of x[n,c,i s - p + k d] grad_output[n,o,i] is the
    convolution of x by grad_output in which batch and channels have changed places, as have stride and dilation. In a
    transposed convolution x and grad_output change places in both.

    Args:
        grad_output: (N, O, *out), the gradient of the result.
        input: (N, C, *in).
        weight: (O, C / groups, *kernel), or (C, O / groups, *kernel) if `transposed`; all of one floating type.
        bias_sizes: (O,), or None without a bias.
        stride, padding, dilation, output_padding: one for all spatial axes or one each.
        transposed: whether the forward was a transposed convolution.
        groups: groups of channels.
        output_mask: which of the three gradients are wanted; the others are None.

    Returns:
        The gradients of input, weight and bias.
    """
    spatial = weight.dim() - 2
    stride, padding, dilation = (_per_axis(value, spatial) for value in (stride, padding, dilation))
    small, large = (input, grad_output) if transposed else (grad_output, input)

    grad_input: Tensor | None = None
    if output_mask[0] and transposed:
        zeros = [0] * spatial
        grad_input = aten.convolution(grad_output, weight, None, stride, padding, dilation, False, zeros, groups)
    elif output_mask[0]:
        grad_input = _full_transposed_convolution(input, grad_output, weight, stride, padding, dilation, groups)

    grad_weight: Tensor | None = None
    if output_mask[1]:
        batch, kernel = large.shape[0], weight.shape[2:]
        image = large.transpose(0, 1)
        if groups > 1:
            # Each group becomes a group again: (N, G C', *) -> (C', G N, *), and (N, G O', *) -> (G O', N, *) below.
            image = large.reshape(batch, groups, -1, *large.shape[2:]).transpose(0, 2)
            image = image.reshape(image.shape[0], groups * batch, *large.shape[2:])
        zeros = [0] * spatial
        by_channel = aten.convolution(
            image, small.transpose(0, 1), None, dilation, padding, stride, False, zeros, groups
        ).transpose(0, 1)
        # Rows of the image that the forward's last window did not reach would make further taps.
        for axis, size in enumerate(kernel):
            by_channel = by_channel.narrow(axis + 2, 0, size)
        grad_weight = by_channel

    grad_bias: Tensor | None = None
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, spatial + 2)])
    return grad_input, grad_weight, grad_bias


def _full_transposed_convolution(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the transposed convolution of grad_output with exactly input's spatial sizes."""
    missing: list[Any] = []
    for axis, step in enumerate(stride):
        size, out, taps = input.shape[axis + 2], grad_output.shape[axis + 2], weight.shape[axis + 2]
        if isinstance(size, int) and isinstance(out, int):
            missing.append(size - ((out - 1) * step - 2 * padding[axis] + dilation[axis] * (taps - 1) + 1))
        else:
            # What is missing is at most stride - 1; too much of it is zeros, cut off below.
            missing.append(step - 1)
    grad: Tensor = aten.convolution(grad_output, weight, None, stride, padding, dilation, True, missing, groups)
    for axis, size in enumerate(input.shape[2:]):
        if not isinstance(size, int):
            grad = grad.narrow(axis + 2, 0, size)
    return grad


def avg_pool2d_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Gradient of 2-D average pooling: aten::avg_pool2d_backward.

    Pooling is separable: with A the (out, in) matrix of one axis that holds 1 / count where the window covers, the
    result is A_h X A_w^T, and the gradient A_h^T G A_w.

    Args:
        grad_output: (N, C, outH, outW) or (C, outH, outW), floating.
        self: the forward's input, (N, C, H, W) or (C, H, W), of the same type.
        kernel_size, stride, padding: one for both axes or one each; an empty stride means the kernel size.
        ceil_mode: whether windows may start inside and end outside the padded input; the sizes of grad_output say it.
        count_include_pad: whether padding counts in the divisor.
        divisor_override: the divisor of every window, or None.
    """
    kernel = _per_axis(kernel_size, 2)
    step, pad = _per_axis(stride or kernel, 2), _per_axis(padding, 2)
    matrices = []
    for axis in (0, 1):
        size, out = self.shape[axis - 2], grad_output.shape[axis - 2]
        start = torch.arange(out, device=self.device).unsqueeze(1) * step[axis] - pad[axis]
        end = (start + kernel[axis]).clamp(max=size + pad[axis])
        if divisor_override:
            count = torch.ones_like(start)
        elif count_include_pad:
            count = end - start
        else:
            count = end.clamp(max=size) - start.clamp(min=0)
        matrices.append(_averages(start, end, count, size, grad_output))
    grad = torch.matmul(torch.matmul(matrices[0].transpose(0, 1), grad_output), matrices[1])
    return grad / divisor_override if divisor_override else grad


def adaptive_avg_pool2d_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    """Gradient of 2-D adaptive average pooling: aten::_adaptive_avg_pool2d_backward.

    Window i of an axis covers floor(i in / out) up to ceil((i + 1) in / out); the rest is as in `avg_pool2d_backward`.

    Args:
        grad_output: (N, C, outH, outW) or (C, outH, outW), floating.
        self: the forward's input, (N, C, H, W) or (C, H, W), of the same type.
    """
    matrices = []
    for axis in (-2, -1):
        size, out = self.shape[axis], grad_output.shape[axis]
        index = torch.arange(out, device=self.device).unsqueeze(1)
        start = torch.div(index * size, out, rounding_mode="floor")
        end = torch.div((index + 1) * size + out - 1, out, rounding_mode="floor")
        matrices.append(_averages(start, end, end - start, size, grad_output))
    return torch.matmul(torch.matmul(matrices[0].transpose(0, 1), grad_output), matrices[1])


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    """A tensor of the given size whose values do not matter: aten::empty_permuted. Here they are zeros.

    Decompositions make one to take its shape and type only; an ONNX tensor has no memory layout.
    """
    return torch.zeros(size, **options)


def _averages(start: Tensor, end: Tensor, count: Tensor, size: Any, like: Tensor) -> Tensor:
    """Return the (out, size) matrix of an axis that averages start <= j < end, in the type of `like`."""
    position = torch.arange(size, device=like.device).unsqueeze(0)
    covered = (position >= start) & (position < end)
    return covered.to(like.dtype) / count.to(like.dtype)


def _per_axis(value: Sequence[int], axes: int) -> list[int]:
    return list(value) * axes if len(value) == 1 else list(value)
