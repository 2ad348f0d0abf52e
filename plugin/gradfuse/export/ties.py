"""Operators that choose among equal numbers in an order that PyTorch does not define. This module imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import explaining

aten = torch.ops.aten

_TOPK = aten.topk.default
_OF_RANK = {aten.kthvalue.default: 1, aten.median.dim: None, aten.nanmedian.dim: None, aten.mode.default: None}
"""Operators that find one number along an axis, by the argument that says which."""


class Ties(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records where one of several equal numbers is first chosen.

    Attributes:
        operator, place: which operator chooses, and where; None: none does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: str | None = None
        self.place: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.place is None and (func is _TOPK or func in _OF_RANK) and _has_ties(func, args, result):
            self.operator = func._schema.name.removeprefix("aten::")
            self.place = explaining.current_place() or "the loss"
        return result


class OtherChoices(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes these operators choose differently among equal numbers, as if the numbers were in reverse order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func is _TOPK or func in _OF_RANK) and args[0].dim():
            axis = _axis(func, args)
            numbers, places = func(args[0].flip(axis), *args[1:], **(kwargs or {}))
            return numbers, args[0].shape[axis] - 1 - places
        return func(*args, **(kwargs or {}))


def _axis(func: Any, args: Any) -> int:
    place = 2 if func is _TOPK or _OF_RANK[func] is not None else 1
    return args[place] if len(args) > place else -1


def _has_ties(func: Any, args: Any, result: Any) -> bool:
    """Whether there are equal numbers, some of which are chosen."""
    tensor, axis = args[0], _axis(func, args)
    if not tensor.dim() or not tensor.numel() or not result[0].numel():
        return False
    if func is not _TOPK:
        keeps = result[0].dim() == tensor.dim()
        found: Tensor = result[0] if keeps else result[0].unsqueeze(axis)
        return bool(((tensor == found).sum(axis) > 1).any())
    count, largest = args[1], args[3] if len(args) > 3 else True
    if count >= tensor.shape[axis]:
        return False
    ordered = tensor.sort(axis, descending=largest)[0]
    last, beyond = (ordered.select(axis, place) for place in (count - 1, count))
    return bool((last == beyond).any())
