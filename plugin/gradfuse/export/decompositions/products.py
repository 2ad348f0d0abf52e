"""Products along an axis, distances and bilinear forms, written in operators that torch.onnx knows.

This module imports torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse.export import standins

aten = torch.ops.aten

_BY_PRODUCTS = 25
"""From more rows on, PyTorch computes Euclidean distances by a product of matrices."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    chunked: Any = torch.ops.torch_nn
    of_chunks = {
        getattr(chunked, name).default: function
        for name, function in (
            ("_linear_cross_entropy_batch_chunked", linear_cross_entropy),
            ("_linear_cross_entropy_batch_chunked_no_reduction", linear_cross_entropy_of_each),
        )
        if hasattr(chunked, name)
    }
    return {
        **of_chunks,
        aten.cumprod.default: cumprod,
        aten._cdist_forward.default: cdist,
        aten._pdist_forward.default: pdist,
        aten.linalg_vector_norm.default: vector_norm,
        aten.bilinear.default: bilinear,
        aten.mm.default: functools.partial(of_nothing, aten.mm.default),
        aten.bmm.default: functools.partial(of_nothing, aten.bmm.default),
        aten.addmm.default: added_product,
        aten.hypot.default: hypot,
        aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    }


def cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """aten::cumprod: each element times those before it, in pieces of twice the length each time."""
    if dtype is None:
        dtype = self.dtype if self.is_floating_point() else torch.int64
    x = self.to(dtype)
    if x.dim() == 0:
        return x.clone()
    size = x.shape[dim]
    if isinstance(size, int):
        step = 1
        while step < size:
            before = torch.ones_like(x.narrow(dim, 0, step))
            x = x * torch.cat([before, x.narrow(dim, 0, size - step)], dim)
            step *= 2
        return x
    # The number of pieces is not known: one product of all elements up to each.
    x = x.movedim(dim, -1)
    places = torch.arange(size, device=x.device)
    counted = places.unsqueeze(0) <= places.unsqueeze(1)
    return torch.where(counted, x.unsqueeze(-2), torch.ones_like(x).unsqueeze(-2)).prod(-1).movedim(-1, dim)


def cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """aten::_cdist_forward: the distances of all rows of (*, P, M) from all rows of (*, R, M), in the norm p.

    Where a distance is 0, so is its gradient. As in PyTorch, many rows have their Euclidean distances computed from a
    product of matrices, which loses the digits of those that are much smaller than the rows.
    """
    many = any(isinstance(rows, int) and rows > _BY_PRODUCTS for rows in (x1.shape[-2], x2.shape[-2]))
    if p == 2.0 and (compute_mode == 1 or (compute_mode in (None, 0) and many)):
        squares = x1.square().sum(-1, keepdim=True) + x2.square().sum(-1).unsqueeze(-2)
        return _root(squares - 2.0 * (x1 @ x2.transpose(-1, -2)))
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(self: Tensor, p: float = 2.0) -> Tensor:
    """aten::_pdist_forward: the distances of all pairs of rows of (N, M), in the norm p."""
    rows: Any = self.shape[0]
    if not isinstance(rows, int):
        return NotImplemented  # type: ignore[no-any-return]
    if rows < 2:
        return self.new_zeros((0,))
    return _length(torch.cat([self[k] - self[k + 1 :] for k in range(rows - 1)]), p)


def _length(difference: Tensor, p: float) -> Tensor:
    """Return norms along the last axis, whose gradients are 0 where they are 0, as PyTorch's distances have them."""
    size = difference.abs()
    if isinstance(size.shape[-1], int) and size.shape[-1] == 0:
        return size.sum(-1)
    if p == 0.0:
        return (difference != 0.0).to(difference.dtype).sum(-1)
    if p == 1.0:
        return size.sum(-1)
    if p == 2.0:
        return _root(difference.square().sum(-1))
    largest = size.amax(-1, keepdim=True)
    if math.isinf(p):
        # Elements that are equal do not share the gradient: each has all of it.
        held, most = standins.STOP_GRADIENT(size), standins.STOP_GRADIENT(largest)
        total: Tensor = most + ((size - held) * (held == most).to(size.dtype)).sum(-1, keepdim=True)
        return total.squeeze(-1)
    return _power_norm(size, p, (-1,))


def vector_norm(
    self: Tensor, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """aten::linalg_vector_norm by other numbers than 0, 1, 2 and infinities, whose slopes are 0 at 0."""
    if ord in (0.0, 1.0, 2.0) or math.isinf(ord) or not self.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    size = (self if dtype is None else self.to(dtype)).abs()
    return _power_norm(size, float(ord), range(self.dim()) if dim is None else dim, keepdim)


def _power_norm(size: Tensor, p: float, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return the roots of sums of powers, whose slopes at 0 are 0, and not infinite as those of powers may be."""
    some = size > 0.0
    of_none = torch.where(size.isnan(), size, 0.0 if p > 0.0 else torch.inf)
    powers = torch.where(some, torch.where(some, size, 1.0) ** p, of_none)
    sums = powers.sum(list(dim), keepdim=keepdim)
    at_end = (sums == 0.0) | sums.isinf()
    ends = torch.where((sums == 0.0) == (p > 0.0), 0.0, torch.inf)
    return torch.where(at_end, ends, torch.where(at_end, 1.0, sums) ** (1.0 / p))


def _root(squares: Tensor) -> Tensor:
    apart = squares > 0.0
    # The root of 0 has no gradient, also where it is not taken. A NaN stays one.
    return torch.where(squares <= 0.0, 0.0, torch.where(apart | squares.isnan(), squares, 1.0).sqrt())


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten::bilinear: sums of (*, I) x weight (O, I, J) x (*, J), for each of O."""
    outputs, columns = weight.shape[0], weight.shape[2]
    rows = input1.flatten(0, -2) if input1.dim() > 1 else input1.unsqueeze(0)
    count = rows.shape[0]
    product = rows @ weight.permute(1, 0, 2).flatten(1)
    products = product.view(count, outputs, columns) * input2.reshape(count, 1, columns)
    result = products.sum(-1).view([*input1.shape[:-1], outputs])
    return result if bias is None else result + bias


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torch_nn::_linear_cross_entropy_batch_chunked: the loss of all rows at once.

    The gradients that it gives besides, for its own backward pass, are not computed.
    """
    logits = F.linear(input, linear_weight, linear_bias)
    loss = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    bias = linear_weight[:, 0] if linear_bias is None else linear_bias
    return loss, torch.zeros_like(input), torch.zeros_like(linear_weight), torch.zeros_like(bias)


def linear_cross_entropy_of_each(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    *settings: Any,
) -> Tensor:
    """torch_nn::_linear_cross_entropy_batch_chunked_no_reduction: the loss of each row."""
    return linear_cross_entropy(input, linear_weight, target, linear_bias, weight, "none", ignore_index, 0.0)[0]


def of_nothing(overload: Any, self: Tensor, mat2: Tensor) -> Tensor:
    """aten::mm or aten::bmm of matrices without columns and rows, which is 0: onnxruntime leaves it unwritten."""
    if not _is_nothing(self):
        return NotImplemented  # type: ignore[no-any-return]
    return self.new_zeros([*self.shape[:-1], mat2.shape[-1]])


def added_product(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """aten::addmm with such matrices."""
    if not _is_nothing(mat1):
        return NotImplemented  # type: ignore[no-any-return]
    return self * beta + of_nothing(aten.mm.default, mat1, mat2)


def _is_nothing(matrix: Tensor) -> bool:
    return isinstance(matrix.shape[-1], int) and matrix.shape[-1] == 0 and not matrix.is_complex()


def hypot(self: Tensor, other: Tensor) -> Tensor:
    """aten::hypot: the root of the sum of squares, of which the larger one is divided out."""
    largest = torch.maximum(self.abs(), other.abs())
    scale = torch.where((largest > 0.0) & largest.isfinite(), largest, 1.0)
    return scale * ((self / scale).square() + (other / scale).square()).sqrt()


def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """aten::multilabel_margin_loss_forward: hinges between the classes of an item, up to the first -1, and the others.

    Args:
        self: (N, C) or (C).
        target: likewise, in int64.
        reduction: 0 for the loss of each item, 1 for their mean, 2 for their sum.
    """
    if self.dim() == 0:
        self, target = self.unsqueeze(0), target.reshape(1)
    listed = (target < 0).to(torch.int64).cumsum(-1) == 0
    classes = torch.where(listed, target, 0)
    found = torch.zeros_like(self).scatter_add(-1, classes, listed.to(self.dtype)) > 0.0
    hinges = (1.0 - self.gather(-1, classes).unsqueeze(-1) + self.unsqueeze(-2)).relu()
    counted = listed.unsqueeze(-1) & found.logical_not().unsqueeze(-2)
    losses = torch.where(counted, hinges, 0.0).sum((-1, -2)) / self.shape[-1]
    total = (losses, losses.mean(), losses.sum())[reduction]
    return total, found.to(self.dtype)
