"""Cross entropy of many logits in float64, some rows at a time.

PyTorch's own makes two more tensors of their size, the log-probabilities and the gradient of those. This module imports
torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FEWEST = 2**24
"""How many logits are many."""
_AT_ONCE = 2**22
_SIGNATURE = inspect.signature(functional.cross_entropy)


class LargeLosses(TorchFunctionMode):
    """Compute `torch.nn.functional.cross_entropy` of many float64 logits (N, C) and labels (N) by rows.

    Each row's loss and gradient are PyTorch's own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            call = _SIGNATURE.bind(*args, **kwargs)
            call.apply_defaults()
            if _fits(**call.arguments):
                return _by_rows(**call.arguments)
        return func(*args, **kwargs)


def _fits(input: Any, target: Any, size_average: Any, reduce: Any, **_: Any) -> bool:
    return (
        type(input) is Tensor
        and type(target) is Tensor
        and input.dtype == torch.float64
        and (input.dim(), target.dim()) == (2, 1)
        and input.numel() >= FEWEST
        and size_average is None
        and reduce is None
    )


def _by_rows(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    **_: Any,
) -> Tensor:
    def losses(rows: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            rows, labels, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )

    each: Tensor = _Rows.apply(input, target, losses)  # type: ignore[no-untyped-call]
    if reduction != "mean":
        return each.sum() if reduction == "sum" else each
    counted = target != ignore_index
    count = counted.sum() if weight is None else weight[target[counted]].sum()
    return each.sum() / count


class _Rows(torch.autograd.Function):
    """The losses of rows, of which only these are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, target: Tensor, losses: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(input, target)
        ctx.losses = losses
        return torch.cat([losses(input[rows], target[rows]) for rows in _parts(input)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, target = ctx.saved_tensors
        (gradient,) = gradients
        if torch.is_grad_enabled():
            found = torch.autograd.grad(ctx.losses(input, target), input, gradient, create_graph=True)
            return found[0], None, None
        result = torch.empty_like(input)
        for rows in _parts(input):
            with torch.enable_grad():
                part = input[rows].detach().requires_grad_()
                loss = ctx.losses(part, target[rows])
            result[rows] = torch.autograd.grad(loss, part, gradient[rows])[0]
        return result, None, None


def _parts(input: Tensor) -> Iterator[slice]:
    """The rows of the tensor, as many at a time as have `_AT_ONCE` elements."""
    step = max(1, _AT_ONCE // input.shape[1])
    return (slice(begin, begin + step) for begin in range(0, input.shape[0], step))
