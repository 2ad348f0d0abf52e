"""`tensor_split` whose traced program holds for dynamic sizes.

PyTorch gives the first parts one more where a size is no multiple of their count, and traces whether it is one. Here
the ends of the parts are formulas of the size. This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SPLITS = (torch.tensor_split, Tensor.tensor_split)


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
        return func(*args, **(kwargs or {}))


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
