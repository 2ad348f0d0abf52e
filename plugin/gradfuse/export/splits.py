"""Splits whose traced programs hold for dynamic sizes.

In `tensor_split`, PyTorch gives the first parts one more where a size is no multiple of their count, and traces whether
it is one. Here the ends of the parts are formulas of the size. Parts whose sizes are taken out of a tensor are together
as long as the whole. This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private

_SPLITS = (torch.tensor_split, Tensor.tensor_split)
_BY_SIZES = (torch.split, Tensor.split, Tensor.split_with_sizes)


@contextlib.contextmanager
def sized() -> Iterator[None]:
    """Let splits under this be traced for any sizes."""
    with _Sized():
        yield


class _Sized(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SPLITS:
            parts = _parts(*args, **(kwargs or {}))
            if parts is not None:
                return parts
        if func in _BY_SIZES and (parts := _by_sizes(*args, **(kwargs or {}))) is not None:
            return parts
        return func(*args, **(kwargs or {}))


def _by_sizes(input: Tensor, sizes: Any = None, dim: int = 0, **named: Any) -> tuple[Tensor, ...] | None:
    """Return parts whose sizes are numbers of tensors; None: they are not.

    The last size is what the others leave, so that the parts together are known to be as long as the whole.
    """
    sizes = named.get("split_size", named.get("split_size_or_sections", sizes))
    if not isinstance(sizes, (list, tuple)) or not any(map(private.follows_from_values, sizes)):
        return None
    begins = [0]
    for one in sizes:
        private.assume(one >= 0)
        begins.append(begins[-1] + one)
    private.assume(begins[-1] == input.shape[dim])
    lengths = [*sizes[:-1], input.shape[dim] - begins[-2]]
    private.assume(lengths[-1] >= 0)
    return tuple(input.narrow(dim, begin, length) for begin, length in zip(begins, lengths, strict=False))


def _parts(
    input: Tensor, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Tensor, ...] | None:
    count = indices_or_sections if sections is None else sections
    if not isinstance(count, int) or count <= 0 or not -input.dim() <= dim < input.dim():
        return None
    size = input.shape[dim]
    if isinstance(size, int):
        return None
    each, more = size // count, size % count
    sizes = [each + torch.sym_min(1, torch.sym_max(0, more - part)) for part in range(count)]
    begins = [0]
    for one in sizes:
        begins.append(begins[-1] + one)
    return tuple(input.narrow(dim, begin, one) for begin, one in zip(begins, sizes, strict=False))
