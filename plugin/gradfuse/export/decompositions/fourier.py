"""Fourier transforms in float64 where onnxruntime's in float32 lose digits: of sizes that are no power of 2.

There it multiplies by chirps, whose angles grow with the square of the size. This module imports torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_UNCHANGED, _BY_COUNT = 0, 2
"""ATen's numbers of normalizations; the other one is by the root of the count."""
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
    wide = self.to(_WIDE[self.dtype])
    if overload is aten._fft_r2c.default and last and not all(isinstance(size, int) for size in sizes):
        result = _half(wide, dim, normalization, sizes)
    else:
        result = overload(wide, dim, normalization, last)
    return result.to(_NARROW[result.dtype])  # type: ignore[no-any-return]


def _half(self: Tensor, dim: Sequence[int], normalization: int, sizes: Sequence[Any]) -> Any:
    """Transform axis by axis, and normalise by another operator: so each result has a shape in the model.

    onnxruntime takes the last axis of half a transform to be as long as the whole where no shape says otherwise.
    """
    result = aten._fft_r2c.default(self, dim[-1:], _UNCHANGED, True)
    for axis in reversed(dim[:-1]):
        result = aten._fft_c2c.default(result, [axis], _UNCHANGED, True)
    if normalization == _UNCHANGED:
        return result
    count = math.prod(sizes)
    return result * (1 / count if normalization == _BY_COUNT else count**-0.5)
