"""What PyTorch keeps from a forward pass for the backward pass, partly in files. This module imports torch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.models import spilling
from gradfuse.models.arrays import to_numpy, to_tensor
from gradfuse.models.spilling import Shelf, Spilled


@contextlib.contextmanager
def limited(state: Iterable[Tensor]) -> Iterator[None]:
    """Put the oldest of the tensors that autograd saves on the current shelf while there is no room for all.

    The backward pass reads the newest first. Those of `state` and views of them stay, as they are in memory anyway.
    """
    shelf = spilling.current()
    if shelf is None:
        yield
        return
    saved = _Saved(shelf, {private.storage(tensor) for tensor in state})
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
        yield


class _Kept:
    """A tensor that autograd has saved, in memory or in a file."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.size = tensor.nbytes
        self._order: list[int] = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        self._spilled: Spilled | None = None

    def spill(self, shelf: Shelf) -> bool:
        """Move the tensor to a file; tell whether that was possible."""
        assert self.tensor is not None
        self._spilled = shelf.spill(to_numpy(self.tensor.permute(self._order), copy=False))
        if self._spilled is None:
            return False
        self.tensor = None
        return True

    def read(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self._spilled is not None
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return to_tensor(self._spilled.read()).permute(back)


class _Saved:
    """The tensors of a forward pass that autograd has saved, the oldest first."""

    def __init__(self, shelf: Shelf, state: Container[int]) -> None:
        self._shelf, self._state = shelf, state
        # Those in memory; what is saved twice, as by an activation and by the layer behind it, is one.
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], _Kept] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        with private.untraced():
            if not _may_be_spilled(tensor) or private.storage(tensor) in self._state:
                return tensor
            tensor = tensor.detach()
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = _Kept(tensor)
                self._make_room()
            return kept

    def _make_room(self) -> None:
        total = sum(kept.size for kept in self._kept.values())
        for key, kept in list(self._kept.items()):
            if self._shelf.room is None or total <= self._shelf.room or not kept.spill(self._shelf):
                return
            total -= kept.size
            del self._kept[key]


def _may_be_spilled(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.nbytes >= spilling.SMALLEST
        and not any(stride == 0 for stride in tensor.stride())
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _unpack(kept: Tensor | _Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with private.untraced():
        return kept.read()
