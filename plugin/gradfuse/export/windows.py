"""Tensors that PyTorch makes of a length alone, for dynamic lengths: windows, and the indices of triangles.

PyTorch takes these lengths as Python's numbers. This module imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private


@contextlib.contextmanager
def sized() -> Iterator[None]:
    """Let such tensors under this be traced for any lengths."""
    with _Sized():
        yield


class _Sized(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = _MADE.get(func) if isinstance(func, Hashable) else None
        if make is not None and any(isinstance(one, torch.SymInt) for one in (*args, *kwargs.values())):
            settings = {name: one for name, one in kwargs.items() if name not in _OF_MEMORY}
            try:
                inspect.signature(make).bind(*args, **settings)
            except TypeError:
                return func(*args, **kwargs)
            made = make(*args, **settings)
            if made is not None:
                return made
        return func(*args, **kwargs)


_OF_MEMORY = frozenset(("layout", "pin_memory", "requires_grad"))


def _places(length: Any, periodic: bool, dtype: Any, device: Any) -> tuple[Tensor, Any]:
    """Return the places in a window, and the last one: a periodic window has one more, which is left out."""
    last = length if periodic else length - 1
    return torch.arange(length, dtype=dtype or torch.get_default_dtype(), device=device), last


def _hamming(
    window_length: Any,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    *,
    dtype: Any = None,
    device: Any = None,
) -> Tensor:
    places, last = _places(window_length, periodic, dtype, device)
    return _unless_single(alpha - beta * (places * (2.0 * math.pi / last)).cos(), window_length)


def _hann(window_length: Any, periodic: bool = True, *, dtype: Any = None, device: Any = None) -> Tensor:
    return _hamming(window_length, periodic, 0.5, 0.5, dtype=dtype, device=device)


def _blackman(window_length: Any, periodic: bool = True, *, dtype: Any = None, device: Any = None) -> Tensor:
    places, last = _places(window_length, periodic, dtype, device)
    angles = places * (math.pi / last)
    return _unless_single((angles * 4.0).cos() * 0.08 - (angles * 2.0).cos() * 0.5 + 0.42, window_length)


def _bartlett(window_length: Any, periodic: bool = True, *, dtype: Any = None, device: Any = None) -> Tensor:
    places, last = _places(window_length, periodic, dtype, device)
    return _unless_single(1.0 - (places * (2.0 / last) - 1.0).abs(), window_length)


def _unless_single(window: Tensor, length: Any) -> Tensor:
    """Return a window, or 1.0 where it has a single place."""
    return torch.where(torch.scalar_tensor(length, dtype=torch.float64) == 1.0, 1.0, window)


def _lower(row: Any, col: Any, offset: int = 0, *, dtype: Any = torch.long, device: Any = None) -> Tensor | None:
    """Return the indices of a triangle of a square matrix, on or below its diagonal; None: another one is asked for."""
    if not private.known_true(row == col) or offset > 0:
        return None
    size = row + offset
    numbers = torch.arange(size * (size + 1) // 2, device=device)
    # The k-th triangular number is the first in row k; a root of float64 is that of its square.
    rows = (((numbers * 8 + 1).double().sqrt() - 1.0) / 2.0).floor().long()
    return torch.stack([rows - offset, numbers - rows * (rows + 1) // 2]).to(dtype)


def _upper(row: Any, col: Any, offset: int = 0, *, dtype: Any = torch.long, device: Any = None) -> Tensor | None:
    """Return likewise those on or above it: the lower ones, backwards from the last."""
    lower = _lower(row, col, -offset, dtype=dtype, device=device)
    return None if lower is None else ((row - 1) - lower).flip(1)


_MADE: Mapping[Any, Callable[..., Tensor | None]] = {
    torch.hann_window: _hann,
    torch.hamming_window: _hamming,
    torch.blackman_window: _blackman,
    torch.bartlett_window: _bartlett,
    torch.tril_indices: _lower,
    torch.triu_indices: _upper,
}
