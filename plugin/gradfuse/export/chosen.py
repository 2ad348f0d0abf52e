"""Values that are chosen from those of a decision's two sides: tensors, numbers, lists and dictionaries.

A list that only one side has appended to holds elements that are there under a condition. What joins such a list,
`torch.stack` or `torch.cat`, selects from all of them. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.rewriting import CannotSelectError

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_OF_SIZES = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64}


class Either:
    """A value that depends on a decision, and that a graph cannot represent."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _used(self, *args: Any, **kwargs: Any) -> Any:
        raise CannotSelectError(self._name)

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __call__ = __contains__ = _used
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = __rmatmul__ = __index__ = _used
    __int__ = __float__ = _used
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CannotSelectError(getattr(func, "__name__", "a function"))


class Some(Either):
    """An element that a list, or an entry that a dictionary, has if a condition holds.

    Attributes:
        value: what it is.
        condition: a tensor of one truth value.
    """

    def __init__(self, name: str, value: Any, condition: Tensor) -> None:
        super().__init__(name)
        nested = isinstance(value, Some)
        self.value = value.value if nested else value
        self.condition = condition & value.condition if nested else condition

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return joined(func, args, kwargs or {})


class Choice:
    """Chooses from the values of two sides.

    Args:
        condition: a tensor of one truth value: whether it is the first one's.
        by_values: whether that follows from the batch, not from a random number: what is chosen of two numbers is a
            number, and the size of an axis may follow from the choice.
    """

    def __init__(self, condition: Tensor, *, by_values: bool) -> None:
        self._condition = condition
        self._by_values = by_values

    def of(self, name: str, first: Any, second: Any) -> Any:
        """Return the first if the condition holds, otherwise the second; `name` is what messages call them."""
        if first is second or (type(first) is type(second) and type(first) in _NUMBERS and first == second):
            return first
        if isinstance(first, list) and isinstance(second, list):
            return self.of_lists(name, [], first, second)
        if type(first) is type(second) is tuple and len(first) == len(second):
            return tuple(self.of(name, *pair) for pair in zip(first, second, strict=True))
        if type(first) is type(second) is dict:
            return self.of_dictionaries(name, {}, first, second)
        if type(first) is type(second) is bool:
            return self._condition if first else ~self._condition
        are_numbers = not any(isinstance(one, Tensor) for one in (first, second))
        like = next((one for one in (first, second) if isinstance(one, Tensor)), None)
        first, second = (as_tensor(one, like) for one in (first, second))
        if first is None or second is None or first.dtype != second.dtype or first.device != second.device:
            return Either(name)
        axes = _other_axes(first, second)
        if axes is None or len(axes) > int(self._by_values):
            return Either(name)
        if axes:
            return self._of_lengths(first, second, axes[0])
        if first.dtype == torch.bool:
            # onnxruntime has no Where for them.
            return (self._condition & first) | (~self._condition & second)
        chosen = torch.where(self._condition, first, second)
        return chosen.item() if are_numbers and self._by_values else chosen

    def of_lists(self, name: str, before: Sequence[Any], first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        """Return what is in a list after the decision, from what was in it ahead of it and after each side."""
        if len(first) == len(second):
            return [self.of(name, *pair) for pair in zip(first, second, strict=True)]
        count = len(before)
        if any(len(one) < count or any(map(_differ, one, before)) for one in (first, second)):
            raise CannotSelectError(name)
        return [
            *before,
            *(Some(name, one, self._condition) for one in first[count:]),
            *(Some(name, one, ~self._condition) for one in second[count:]),
        ]

    def of_dictionaries(
        self, name: str, before: Mapping[Any, Any], first: Mapping[Any, Any], second: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        """Likewise."""
        if any(key not in one for key in before for one in (first, second)):
            raise CannotSelectError(name)
        chosen = {}
        for key in {**first, **second}:
            if key in first and key in second:
                chosen[key] = self.of(name, first[key], second[key])
            else:
                sides = (first[key], self._condition) if key in first else (second[key], ~self._condition)
                chosen[key] = Some(name, *sides)
        return chosen

    def _of_lengths(self, first: Tensor, second: Tensor, axis: int) -> Tensor:
        """Choose from tensors whose sizes of an axis differ: of one of them, all is selected."""
        kept = [
            condition.expand(one.shape[axis])
            for one, condition in ((first, self._condition), (second, ~self._condition))
        ]
        return _selected(torch.cat([first, second], axis), torch.cat(kept), axis)


def as_tensor(value: Any, like: Tensor | None) -> Tensor | None:
    """Return a tensor or number as a tensor that is equivalent in arithmetic; None: there is none."""
    if isinstance(value, Tensor):
        return value
    if type(value) in _OF_SIZES:
        return torch.scalar_tensor(value, dtype=_OF_SIZES[type(value)])
    if type(value) not in _NUMBERS:
        return None
    dtype = _NUMBERS[type(value)]
    if like is not None and like.dim() == 0 and torch.result_type(like, value) == like.dtype:
        dtype = like.dtype
    return torch.full([], value, dtype=dtype)


def holds_some(values: Any) -> bool:
    """Whether a list or dictionary has elements under a condition."""
    if isinstance(values, dict):
        return holds_some(list(values.values()))
    return isinstance(values, (list, tuple)) and any(isinstance(one, Some) for one in values)


def count_of(values: Any) -> Any:
    """Return the length of such a list or dictionary, as a number."""
    return _count(values).item()


def is_filled(values: Any) -> Tensor:
    """Return the truth value of such a list or dictionary."""
    return _count(values) > 0


def _count(values: Any) -> Tensor:
    return torch.stack([condition.long() for _, condition in _parts(values)]).sum()


def sum_of(values: Iterable[Any], start: Any) -> Any:
    """Return the sum of a list that has elements under a condition."""
    total = start
    for one in values:
        if not isinstance(one, Some):
            total = total + one
            continue
        total = Choice(one.condition, by_values=True).of("sum", total + one.value, total)
    return total


def joined(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what a function of torch gives of a list that has elements under a condition."""
    name = getattr(function, "__name__", "")
    tensors, axis = _arguments(*args, **kwargs) if name in _JOINS else ((), 0)
    if not holds_some(tensors) or not isinstance(axis, int):
        raise CannotSelectError(name)
    values, conditions = zip(*_parts(tensors), strict=True)
    whole: Tensor = function(values, axis)
    axis %= whole.dim()
    kept = (
        conditions
        if name == "stack"
        else [one.expand(v.shape[axis]) for v, one in zip(values, conditions, strict=True)]
    )
    return _selected(whole, (torch.stack if name == "stack" else torch.cat)(list(kept)), axis)


_JOINS = frozenset("stack cat concat concatenate".split())


def _arguments(tensors: Any, dim: Any = 0, *, axis: Any = None) -> tuple[Any, Any]:
    return tensors, dim if axis is None else axis


def _parts(values: Any) -> list[tuple[Any, Tensor]]:
    """Return the elements of a list, or the entries of a dictionary, and whether it has each."""
    listed = list(values.values()) if isinstance(values, dict) else values
    return [
        (one.value, one.condition) if isinstance(one, Some) else (one, torch.ones([], dtype=torch.bool))
        for one in listed
    ]


def _selected(tensor: Tensor, mask: Tensor, axis: int) -> Tensor:
    return tensor[mask] if axis == 0 else tensor.movedim(axis, 0)[mask].movedim(0, axis)


def _other_axes(first: Tensor, second: Tensor) -> list[int] | None:
    """Return the axes whose sizes may differ; None: tensors have other numbers of axes."""
    if first.dim() != second.dim():
        return None
    sizes = zip(first.shape, second.shape, strict=True)
    return [axis for axis, (one, other) in enumerate(sizes) if not private.known_true(one == other)]


def _differ(one: Any, other: Any) -> bool:
    return one is not other
