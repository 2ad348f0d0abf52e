"""Values that are chosen from those of a decision's two sides: tensors, numbers, lists and dictionaries.

A list that only one side has appended to holds elements that are there under a condition. What joins such a list,
`torch.stack` or `torch.cat`, selects from all of them. What is None on one side is None under a condition. This module
imports torch.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import ItemsView, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import explaining
from gradfuse.export.rewriting import CannotSelectError, MoreToRewriteError

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_OF_SIZES = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64}


class Either:
    """A value that depends on a decision, and that a graph cannot represent."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _used(self, *args: Any, **kwargs: Any) -> Any:
        raise _used_as_it_is(self._name)

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __call__ = __contains__ = _used
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = __rmatmul__ = __index__ = _used
    __int__ = __float__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __abs__ = _used
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _used_as_it_is(getattr(func, "__name__", "a function"))


def _used_as_it_is(name: str) -> CannotSelectError:
    """Return the error of a function that takes such a value, and may be rewritten to take what it is in a side."""
    frame = inspect.currentframe()
    while frame is not None and not explaining.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return CannotSelectError(name) if frame is None else MoreToRewriteError(name, (frame.f_code, None))


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


class Maybe(Either):
    """A value that is None unless a condition holds.

    Attributes:
        value: what it is.
        condition: a tensor of one truth value.
    """

    def __init__(self, name: str, value: Any, condition: Tensor) -> None:
        super().__init__(name)
        self.value = value
        self.condition = condition

    def or_nothing(self) -> Any:
        """Return it as NaN where it is None."""
        return Choice(self.condition, by_values=True).of("None", self.value, _nothing_like(self.value))


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
        # One tensor, so that lists that grow together are known to.
        self._otherwise = ~condition

    def of(self, name: str, first: Any, second: Any) -> Any:
        """Return the first if the condition holds, otherwise the second; `name` is what messages call them."""
        if first is second or (type(first) is type(second) and type(first) in _NUMBERS and first == second):
            return first
        if self._by_values and any(one is None or isinstance(one, Maybe) for one in (first, second)):
            return self._of_some(name, first, second)
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

    def _of_some(self, name: str, first: Any, second: Any) -> Any:
        """Choose from values of which one is None, or both may be."""
        if first is None and not isinstance(second, Maybe):
            return Maybe(name, second, self._otherwise)
        if second is None and not isinstance(first, Maybe):
            return Maybe(name, first, self._condition)
        values, conditions = [], []
        for one, taken in ((first, self._condition), (second, self._otherwise)):
            values += [] if one is None else [one.value if isinstance(one, Maybe) else one]
            conditions += [] if one is None else [taken & one.condition if isinstance(one, Maybe) else taken]
        value = self.of(name, *values) if len(values) > 1 else values[0]
        condition = conditions[0] | conditions[1] if len(values) > 1 else conditions[0]
        return value if type(value) is Either else Maybe(name, value, condition)

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
            *(Some(name, one, self._otherwise) for one in second[count:]),
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
                sides = (first[key], self._condition) if key in first else (second[key], self._otherwise)
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


def unfolded(values: Any) -> list[tuple[Any, Any]]:
    """Return what a loop goes through, each with the condition under which it is there: True, or a tensor.

    Raises:
        CannotSelectError: elements of several lists that are there under other conditions are taken together.
    """
    listed = list(values)
    if type(values) is enumerate:
        return _numbered(listed)
    if type(values) is zip or isinstance(values, ItemsView):
        return [_together(row, keyed=type(values) is not zip) for row in listed]
    return list(map(_parted, listed))


UNFOLDED: tuple[type, ...] = (
    list,
    tuple,
    zip,
    enumerate,
    type(reversed([])),
    *(type(of({})) for of in (dict.items, dict.values)),
)
"""The types of what `unfolded` looks into."""


def _numbered(rows: Sequence[tuple[int, Any]]) -> list[tuple[Any, Any]]:
    """Return elements with their numbers, which follow from how many are there ahead of them."""
    found: list[tuple[Any, Any]] = []
    number: Any = rows[0][0] if rows else 0
    for _, row in rows:
        # Of several lists, as `enumerate(zip(a, b))` gives them.
        condition, one = _together(row, keyed=False) if type(row) is tuple and row else _parted(row)
        found.append((condition, (number, one)))
        number = number + 1 if condition is True else (number + condition.long()).item()
    return found


def _together(row: tuple[Any, ...], *, keyed: bool) -> tuple[Any, Any]:
    parts = row[1:] if keyed else row
    conditions, values = zip(*map(_parted, parts), strict=True)
    if any(one is not conditions[0] for one in conditions):
        raise CannotSelectError("zip")
    return conditions[0], (*row[: len(row) - len(parts)], *values)


def _parted(one: Any) -> tuple[Any, Any]:
    return (one.condition, one.value) if isinstance(one, Some) else (True, one)


def element_of(values: Sequence[Any], index: Any) -> Any:
    """Return the first or last element of a list that has some under a condition.

    If there is none, where Python raises an error, it is NaN.
    """
    if isinstance(index, Tensor) or index not in (0, -1):
        raise CannotSelectError("an element")
    ordered = list(values) if index == 0 else list(reversed(values))
    under = list(itertools.takewhile(lambda one: isinstance(one, Some), ordered))
    chosen = _nothing_like(ordered[-1].value) if len(under) == len(ordered) else ordered[len(under)]
    for one in reversed(under):
        chosen = Choice(one.condition, by_values=True).of("an element", one.value, chosen)
    return chosen


def better_of(name: str, values: Sequence[Any]) -> Any:
    """Return what `max` or `min` gives of such a list: the first of equal ones, and NaN of none."""
    (best, exists), *others = _parts(values)
    for value, condition in others:
        first, second = (as_tensor(one, None) for one in (best, value))
        if first is None or second is None or first.numel() != 1 or second.numel() != 1:
            raise CannotSelectError(name)
        is_better = (second > first if name == "max" else second < first).reshape([])
        best = Choice(condition & (is_better | ~exists), by_values=True).of(name, value, best)
        exists = exists | condition
    return Choice(exists, by_values=True).of(name, best, _nothing_like(best))


def _nothing_like(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.full_like(value, torch.nan)
    if isinstance(value, (float, torch.SymFloat)):
        return torch.nan
    raise CannotSelectError("an element")


def tensor_of(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return what `torch.tensor` gives of a list of numbers that has some under a condition."""
    numbers = [(as_tensor(value, None), condition) for value, condition in _parts(values)]
    if any(value is None or value.dim() for value, _ in numbers):
        raise CannotSelectError("tensor")
    whole = torch.stack([value for value, _ in numbers if value is not None])
    dtype = torch.get_default_dtype() if dtype is None and whole.is_floating_point() else dtype
    return _selected(whole.detach(), torch.stack([condition for _, condition in numbers]), 0).to(dtype or whole.dtype)


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
    parted = map(_parted, listed)
    return [(one, torch.ones([], dtype=torch.bool) if condition is True else condition) for condition, one in parted]


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
