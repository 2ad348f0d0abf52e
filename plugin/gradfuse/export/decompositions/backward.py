"""ATen's backward operators in others that torch.onnx can translate, for steps that take derivatives themselves.

Each computes what the ATen operator of its name computes, for static and symbolic shapes. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.decompositions import index, pooling, special
from gradfuse.export.decompositions.pooling import per_axis

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    # torch.onnx translates batch normalisation in training mode as if it were in evaluation mode.
    known = private.known_decompositions(
        [
            aten._native_batch_norm_legit_functional.default,
            aten.embedding_dense_backward.default,
            aten.native_batch_norm_backward.default,
            aten.threshold_backward.default,
        ]
    )
    return {
        **known,
        **index.table(),
        **pooling.table(),
        **special.table(),
        aten.convolution_backward.default: convolution_backward,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        aten.empty_permuted.default: empty_permuted,
        aten.copy.default: copy,
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
    stride, padding, dilation = (per_axis(value, spatial) for value in (stride, padding, dilation))
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


def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of v and g in w = v g / |v|, with norms over all axes but `dim`: aten::_weight_norm_interface_backward.

    `grad_w` and `saved_v` have the shape of w, `saved_g` and `saved_norms` that with 1 for all axes but `dim`.
    """
    others = [axis for axis in range(saved_v.dim()) if axis != dim % saved_v.dim()]
    along = (grad_w * saved_v).sum(others, keepdim=True) / saved_norms
    return (grad_w - saved_v * (along / saved_norms)) * (saved_g / saved_norms), along


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    """A tensor of the given size whose values do not matter: aten::empty_permuted. Here they are zeros.

    Decompositions make one to take its shape and type only; an ONNX tensor has no memory layout.
    """
    return torch.zeros(size, **options)


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """What `self.copy_(src)` leaves in `self`: aten::copy. torch.onnx forgets that `src` takes the shape of `self`."""
    return src.to(self.dtype).expand(self.shape)
