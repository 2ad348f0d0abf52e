"""Functions of torch that fail for nothing, such as the maximum, in sides of decisions that are not taken.

Such a side is computed with what masks select for it, which may be nothing. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.traced_functions import pairwise_distances


def instead(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], taken: Tensor) -> Callable[..., Any]:
    """Return a function as one that takes nothing where a side is not taken; itself if that is not needed.

    Args:
        function: a function of torch.
        args: its arguments.
        kwargs: those by name.
        taken: whether the side is taken.
    """
    name = getattr(function, "__name__", "")
    if name == "pdist":
        return pairwise_distances
    of_two = len(args) > 1 and isinstance(args[1], Tensor)
    if name not in _LARGEST or of_two or "other" in kwargs or "out" in kwargs or not args:
        return function  # type: ignore[no-any-return]
    return lambda input, *axes, **named: _reduced(function, name in _OF_MOST, taken, input, *axes, **named)


_OF_MOST = frozenset("max amax argmax".split())
_LARGEST = _OF_MOST | frozenset("min amin argmin".split())


def _reduced(
    function: Callable[..., Any], of_most: bool, taken: Tensor, input: Tensor, dim: Any = None, *rest: Any, **named: Any
) -> Any:
    """Reduce with one more element that counts for nothing: it is chosen of nothing alone, as NaN if that is used."""
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else dim
    if not (dim is None or isinstance(dim, int)) or (dim is None and rest):
        return function(input, dim, *rest, **named)
    size = input.numel() if dim is None else input.shape[dim]
    if not private.follows_from_values(size) and (not isinstance(size, int) or size):
        return function(input, *(() if dim is None else (dim, *rest)), **named)
    given = input.flatten() if dim is None else input
    shape = list(given.shape)
    shape[0 if dim is None else dim] = 1
    filled = given.new_full(shape, _least(given.dtype, of_most))
    if given.is_floating_point():
        is_used = taken & (torch.scalar_tensor(size, dtype=torch.int64) == 0)
        filled = torch.where(is_used, torch.full([], torch.nan, dtype=given.dtype), filled)
    given = torch.cat([given, filled], 0 if dim is None else dim)
    return function(given, *(() if dim is None else (dim, *rest)), **named)


def _least(dtype: torch.dtype, of_most: bool) -> float:
    if dtype == torch.bool:
        return not of_most
    if dtype.is_floating_point:
        return -torch.inf if of_most else torch.inf
    return torch.iinfo(dtype).min if of_most else torch.iinfo(dtype).max
