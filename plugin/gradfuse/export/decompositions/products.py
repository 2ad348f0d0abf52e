"""Products along an axis, distances and bilinear forms, written in operators that torch.onnx knows.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_BY_PRODUCTS = 25
"""From more rows on, PyTorch computes Euclidean distances by a product of matrices."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.cumprod.default: cumprod,
        aten._cdist_forward.default: cdist,
        aten.bilinear.default: bilinear,
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
    """aten::_cdist_forward: the distances of all rows of (*, P, M) from all rows of (*, R, M), in the norms 1 and 2.

    Where a distance is 0, so is its gradient. As in PyTorch, many rows have their Euclidean distances computed from a
    product of matrices, which loses the digits of those that are much smaller than the rows.
    """
    if p not in (1.0, 2.0):
        return NotImplemented  # type: ignore[no-any-return]
    many = any(isinstance(rows, int) and rows > _BY_PRODUCTS for rows in (x1.shape[-2], x2.shape[-2]))
    if p == 2.0 and (compute_mode == 1 or (compute_mode in (None, 0) and many)):
        squares = x1.square().sum(-1, keepdim=True) + x2.square().sum(-1).unsqueeze(-2)
        squares = squares - 2.0 * (x1 @ x2.transpose(-1, -2))
    else:
        difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
        if p == 1.0:
            return difference.abs().sum(-1)
        squares = difference.square().sum(-1)
    apart = squares > 0.0
    # The root of 0 has no gradient, also where it is not taken. A NaN stays one.
    return torch.where(squares <= 0.0, 0.0, torch.where(apart | squares.isnan(), squares, 1.0).sqrt())


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten::bilinear: sums of (*, I) x weight (O, I, J) x (*, J), for each of O."""
    outputs, columns = weight.shape[0], weight.shape[2]
    rows = input1.flatten(0, -2) if input1.dim() > 1 else input1.unsqueeze(0)
    product = rows @ weight.permute(1, 0, 2).flatten(1)
    products = product.view(-1, outputs, columns) * input2.reshape(-1, 1, columns)
    result = products.sum(-1).view([*input1.shape[:-1], outputs])
    return result if bias is None else result + bias


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
    listed = (target < 0).to(torch.int64).cumsum(-1) == 0
    classes = torch.where(listed, target, 0)
    found = torch.zeros_like(self).scatter_add(-1, classes, listed.to(self.dtype)) > 0.0
    hinges = (1.0 - self.gather(-1, classes).unsqueeze(-1) + self.unsqueeze(-2)).relu()
    counted = listed.unsqueeze(-1) & found.logical_not().unsqueeze(-2)
    losses = torch.where(counted, hinges, 0.0).sum((-1, -2)) / self.shape[-1]
    total = (losses, losses.mean(), losses.sum())[reduction]
    return total, found.to(self.dtype)
