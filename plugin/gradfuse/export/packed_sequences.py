"""Packed sequences of `torch.nn.utils.rnn` in a trace: their layers run on padded ones.

A packed sequence has a row for each step of each sequence, so its sizes depend on lengths that a trace does not know.
Under `padded()` it is selected from its padded sequence, which is kept beside it: a recurrent layer and
`pad_packed_sequence` read that, and where nothing else reads the rows, nothing selects them. This module imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PACK, _PADDED, _ITEMS = "_gradfuse_pack", "_gradfuse_padded", "_gradfuse_items"
"""Attributes: of batch sizes, which sequences of the same lengths share, their pack; of rows, the padded sequence,
and both versions; of the first of the batch sizes, as which layers read the number of items, that number."""


@contextmanager
def padded() -> Iterator[None]:
    """Let packed sequences that are made under it be selected from padded ones."""
    classes: tuple[Any, ...] = (torch.nn.RNNBase, torch.nn.LSTM)
    originals = [layer.check_forward_args for layer in classes]

    def unchecked(original: Any) -> Any:
        # It would compare, and so fix, the number of items.
        def check(module: torch.nn.RNNBase, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
            if pack_of(batch_sizes) is None:
                original(module, input, hidden, batch_sizes)

        return check

    for layer, original in zip(classes, originals, strict=True):
        layer.check_forward_args = unchecked(original)
    try:
        with _Padded():
            yield
    finally:
        for layer, original in zip(classes, originals, strict=True):
            layer.check_forward_args = original


def pack_of(batch_sizes: object) -> Pack | None:
    """The pack that has these batch sizes."""
    pack: Pack | None = _attribute(batch_sizes, _PACK, None)
    return pack


def _attribute(value: object, name: str, default: Any) -> Any:
    """An attribute of a tensor itself: what stands in for one refuses those that it does not know."""
    return vars(value).get(name, default) if isinstance(value, Tensor) else default


class _Padded(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            made = Pack(*args, **(kwargs or {}))
            return made.packed(made.sequence), made.batch_sizes
        items = _attribute(args[0], _ITEMS, None) if name in ("item", "__int__", "__index__") else None
        if items is not None:
            return items
        if name == "zeros":
            args = [_attribute(one, _ITEMS, one) for one in args]  # Of the first states of a layer.
        pack = next(filter(None, map(pack_of, args[:2])), None)
        if pack is not None and name == "_pad_packed_sequence":
            return pack.unpacked(args[0], *args[2:])
        if pack is not None and name == "size" and args[1:] == (0,):
            return pack.longest
        result = func(*args, **(kwargs or {}))
        if pack is not None and name == "__getitem__" and isinstance(args[1], int) and args[1] == 0:
            setattr(result, _ITEMS, pack.items)
        return result


class Pack:
    """Sequences of several lengths.

    Args:
        input: the padded sequences.
        lengths: of each of them, at least 1.
        batch_first: whether the first dimension of the input is that of the items, not of the steps.

    Attributes:
        sequence: the padded sequences, steps first, with zeros after the end of each.
        items: how many they are.
        batch_sizes: how many sequences have each step of the longest.
    """

    def __init__(self, input: Tensor, lengths: Tensor, batch_first: bool) -> None:
        sequence = input.transpose(0, 1) if batch_first else input
        self.items = sequence.shape[1]
        steps = torch.arange(sequence.shape[0])
        # An index, so that a step refuses lengths which PyTorch refuses.
        self._lengths = (steps + 1).index_select(0, lengths.to(torch.int64) - 1)
        self._inside = steps[:, None] < self._lengths
        # Not even a NaN in what PyTorch never reads goes on.
        self.sequence = self._or(sequence, 0)
        # Before the end of a sequence the steps from its end on, afterwards those themselves.
        self._mirrored = torch.where(self._inside, self._lengths - 1 - steps[:, None], steps[:, None])
        self.batch_sizes = self._inside.sum(1)[: self.longest]
        setattr(self.batch_sizes, _PACK, self)

    @functools.cached_property
    def longest(self) -> int:
        """The length of the longest sequence, which a trace knows no bound of but that of the padded ones."""
        longest = self._lengths.max().item()
        torch._check(longest >= 1)  # type: ignore[no-untyped-call]
        torch._check(longest <= self._inside.shape[0])  # type: ignore[no-untyped-call]
        return longest  # type: ignore[return-value]

    def packed(self, sequence: Tensor) -> Tensor:
        """The rows of a padded sequence of these lengths."""
        rows = sequence[self._inside]
        setattr(rows, _PADDED, (sequence, sequence._version, rows._version))
        return rows

    def padded(self, rows: Tensor) -> Tensor:
        """The padded sequence of packed rows, of which the steps after the end of each may be any finite numbers."""
        sequence, *versions = _attribute(rows, _PADDED, (rows,))
        if versions == [sequence._version, rows._version]:
            unchanged: Tensor = sequence  # Nothing has been written into either since.
            return unchanged
        return rows.new_zeros(*self._inside.shape, *rows.shape[1:]).index_put((self._inside,), rows)

    def unpacked(
        self, rows: Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        """What `torch.nn.utils.rnn.pad_packed_sequence` returns of packed rows."""
        sequence = self._or(self.padded(rows), padding_value)
        most = self._inside.shape[0]
        if total_length is self.longest or total_length < 0:
            sequence = sequence[: self.longest]
        elif total_length > most:
            more = sequence.new_full((total_length - most, *sequence.shape[1:]), padding_value)
            sequence = torch.cat([sequence, more])
        else:
            sequence = sequence[:total_length]
        return sequence.transpose(0, 1) if batch_first else sequence, self._lengths

    def _or(self, sequence: Tensor, padding_value: float) -> Tensor:
        """A padded sequence with a number after the end of each item."""
        inside = self._inside.reshape(*self._inside.shape, *[1] * (sequence.dim() - 2))
        return torch.where(inside, sequence, padding_value)

    def reversed(self, sequence: Tensor) -> Tensor:
        """A padded sequence with the steps of each item in reverse order."""
        return sequence.gather(0, self._mirrored[..., None].expand_as(sequence))

    def last(self, sequence: Tensor) -> Tensor:
        """The last step of each item."""
        return sequence[self._lengths - 1, torch.arange(self.items)]
