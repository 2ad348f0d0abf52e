"""Fourier transforms in float64 where onnxruntime's in float32 lose digits: of sizes that are no power of 2.

There it multiplies by chirps, whose angles grow with the square of the size. This module imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROW = {wide: narrow for narrow, wide in _WIDE.items()}


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    overloads = aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default
    return {overload: functools.partial(transform, overload) for overload in overloads}


def transform(overload: Any, self: Tensor, dim: Sequence[int], normalization: int, last: Any) -> Tensor:
    """aten::_fft_r2c, _fft_c2c or _fft_c2r, whose last argument is the size of the result."""
    sizes = [self.shape[axis] for axis in dim]
    if overload is aten._fft_c2r.default:
        sizes[-1] = last
    exact = all(isinstance(size, int) and size & (size - 1) == 0 for size in sizes)
    if exact or self.dtype not in _WIDE:
        return NotImplemented  # type: ignore[no-any-return]
    result = overload(self.to(_WIDE[self.dtype]), dim, normalization, last)
    return result.to(_NARROW[result.dtype])  # type: ignore[no-any-return]
