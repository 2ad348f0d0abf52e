"""Operators of ATen's backward programs that torch.onnx cannot translate, written in operators that it can.

`table()` is a decomposition table for `torch.export.ExportedProgram.run_decompositions`. Each entry computes what the
ATen operator of its name computes, for static and symbolic shapes. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import _torch_private as private
from gradfuse.export.decompositions import attention, index, pooling, special
from gradfuse.export.decompositions.pooling import per_axis
from gradfuse.torch.ops import register_ops

aten = torch.ops.aten

register_ops()


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
        **attention.table(),
        **index.table(),
        **pooling.table(),
        **special.table(),
        aten.convolution_backward.default: convolution_backward,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        aten.empty_permuted.default: empty_permuted,
        aten.copy.default: copy,
    }


KEPT = (aten.embedding_dense_backward.default,)
"""The operators of `fused_table()` that a program must still have, though they are not in ATen's core."""


def fused_table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions into operators of gradfuse, which take the place of those in `table()`."""
    return {
        aten.convolution_backward.default: fused_convolution_backward,
        aten.embedding_dense_backward.default: fused_embedding_dense_backward,
    }


def fused_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`convolution_backward` with the gradients of input and weight by `aclnn::convolution_backward`.

    As a convolution, the gradient of the weight has the batch as channels, and is several times slower than other
    convolutions. The input's gradient of a transposed convolution is an ordinary one, and stays.
    """
    *attributes, mask = rest
    of_input, of_weight, of_bias = mask
    transposed = attributes[3]
    if not (of_weight or (of_input and not transposed)) or not 3 <= weight.dim() <= 5:
        return convolution_backward(grad_output, input, weight, bias_sizes, *rest)
    others = [*attributes, [of_input and transposed, False, of_bias]]
    grad_input, _, grad_bias = convolution_backward(grad_output, input, weight, bias_sizes, *others)
    wanted = [of_input and not transposed, of_weight, False]
    own_input, grad_weight, _ = torch.ops.aclnn.convolution_backward(grad_output, input, weight, *attributes, wanted)
    return own_input if wanted[0] else grad_input, grad_weight if of_weight else None, grad_bias


def fused_embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """`aclnn::embedding_dense_backward`: as a ScatterElements, each row's elements have indices of their own."""
    arguments = grad_output, indices, num_weights, padding_idx, scale_grad_by_freq
    if grad_output.dtype not in (torch.float32, torch.float16, torch.bfloat16) or grad_output.dim() > 8:
        overload = aten.embedding_dense_backward.default
        plain: Tensor = private.known_decompositions([overload])[overload](*arguments)
        return plain
    fused: Tensor = torch.ops.aclnn.embedding_dense_backward(*arguments)
    return fused


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
