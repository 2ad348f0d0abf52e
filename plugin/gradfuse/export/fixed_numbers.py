"""Numbers in tensors that are the same in every batch: those of buffers that no step changes, those that code
makes of Python's numbers, and what is made of them.

Code takes them out as Python's numbers, as in `x.split(self.sizes.tolist())`, where torch.export would know nothing of
them. Here such a tensor remembers its numbers. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private

_MOST, _MOST_FRACTIONS, _MOST_OF_MASKS = 4096, 64, 2**18
"""Tensors with more whole numbers, with more fractions, or with more zeros and ones, are no settings."""

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "exponential", "empty")
_ASKS = frozenset("tolist item __bool__ __int__ __index__ __float__ __format__".split())
"""Functions that give Python's numbers, or their text."""
_MAKERS = frozenset("tensor as_tensor arange eye zeros ones full".split())
"""Functions that make tensors of Python's numbers."""
_LIKE = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full".split())
"""Functions that do so, and read the shape and the type of a tensor alone."""
_OF_ANY_SIZE = frozenset("nonzero argwhere where unique repeat_interleave masked_select __getitem__".split())
"""Functions whose results may have a size that depends on the numbers. None is a view, but for items without a mask."""


def is_fixed(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are of the kind that code takes out as settings, if no step changes them."""
    if tensor.is_complex():
        return False
    if tensor.numel() <= (_MOST_FRACTIONS if tensor.is_floating_point() else _MOST):
        return True
    if tensor.numel() > _MOST_OF_MASKS or tensor.dtype == torch.bool:
        return tensor.numel() <= _MOST_OF_MASKS
    with private.untraced():
        return bool(((tensor == 0) | (tensor == 1)).all())


class FixedNumbers:
    """Follows such tensors through a traced function.

    Args:
        known: traced tensors, and tensors with their numbers.
    """

    def __init__(self, known: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        # With the traced tensor itself, so that no other gets its id; written into, it holds something else.
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for traced, numbers in known:
            self._put(traced, numbers)

    def called(
        self, call: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function of torch by `call`; what it returns remembers its numbers, if they are fixed."""
        name = getattr(function, "__name__", "")
        fixed = self._result(function, args, kwargs) if self._known or name in _MAKERS | _LIKE else None
        if name in _ASKS and fixed is not None:
            return fixed
        if name in _OF_ANY_SIZE and fixed is not None and (name != "__getitem__" or _has_mask(args[1])):
            # Its traced result would have a size of which nothing is known.
            found = tuple(_traced(one) for one in fixed) if isinstance(fixed, tuple) else _traced(fixed)
        else:
            found = call(*self._by_indices(name, function, args), kwargs)
        if name == "__setitem__" and fixed is not None:
            self._put(args[0], fixed)
        elif fixed is not None:
            for traced, numbers in zip(_listed(found), _listed(fixed), strict=False):
                if isinstance(traced, Tensor) and isinstance(numbers, Tensor):
                    self._put(traced, numbers)
        return found

    def _by_indices(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a function and its arguments with indices in place of masks, whose counts of elements are known."""
        if name not in ("__getitem__", "masked_select") or not self._known or len(args) != 2:
            return function, args
        tensor, index = args
        axis = 0
        found: list[Any] = []
        for one in index if type(index) is tuple else (index,):
            numbers = self._numbers(one) if isinstance(one, Tensor) and one.dtype == torch.bool and one.dim() else None
            if numbers is not None and tensor.shape[axis : axis + numbers.dim()] == numbers.shape:
                with private.untraced():
                    indices = numbers.nonzero(as_tuple=True)
                found += [_traced(of_axis) for of_axis in indices]
                axis += numbers.dim()
            elif isinstance(one, (int, slice)) and not isinstance(one, bool) and name == "__getitem__":
                found.append(one)
                axis += 1
            else:
                # The call itself says what is wrong with shapes.
                return function, args
        return Tensor.__getitem__, (tensor, tuple(found))

    def _result(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function gives of tensors whose numbers are fixed; None if they are not, or it is another.

        Of an item that is set that is the whole tensor.
        """
        name = getattr(function, "__name__", "")
        if name in _LIKE:
            return _like(function, args, kwargs)
        leaves = private.tensors_in((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        sets = name == "__setitem__"
        writes = sets or (name.endswith("_") and not name.endswith("__"))
        if "out" in kwargs or not (tensors or name in _MAKERS) or any(word in name for word in _RANDOM):
            return None
        if any(self._numbers(one) is None for one in tensors) or any(map(private.is_symbolic, leaves)):
            return None
        try:
            with private.untraced():
                given = _replaced(args, self._numbers)
                if writes:
                    given = given[0].clone(), *given[1:]
                found = function(*given, **_replaced(dict(kwargs), self._numbers))
        except (RuntimeError, TypeError, ValueError, IndexError):
            # The traced call says what is wrong.
            return None
        if name in _ASKS:
            return found
        results = [one for one in _listed(given[0] if sets else found) if isinstance(one, Tensor)]
        return (given[0] if sets else found) if results and all(map(is_fixed, results)) else None

    def _numbers(self, tensor: Tensor) -> Tensor | None:
        if private.is_wrapped(tensor):
            return None
        found = self._known.get((id(tensor), private.version(tensor)))
        return None if found is None else found[1]

    def _put(self, traced: Tensor, numbers: Tensor) -> None:
        if traced.dtype != numbers.dtype or traced.dim() != numbers.dim() or private.is_wrapped(traced):
            return
        self._known[id(traced), private.version(traced)] = traced, numbers
        if numbers.dim() == 0:
            with private.untraced():
                number = numbers.item()
            private.remember_item(traced, number)


def _like(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a function gives that reads the shape and the type of its first argument alone."""
    if not args or not isinstance(args[0], Tensor):
        return None
    leaves = private.tensors_in((args[0].shape, args[1:], kwargs))
    if any(isinstance(one, Tensor) or private.is_symbolic(one) for one in leaves) or args[0].numel() > _MOST_OF_MASKS:
        return None
    with private.untraced():
        found: Tensor = function(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs)
        return found if is_fixed(found) else None


def _traced(numbers: Tensor) -> Tensor:
    """Return these numbers as a constant of what is traced."""
    with private.untraced():
        listed = numbers.tolist()
    return torch.tensor(listed, dtype=numbers.dtype).reshape(numbers.shape)


def _has_mask(index: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in _listed(index))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _replaced(value: Any, numbers: Callable[[Tensor], Tensor | None]) -> Any:
    if isinstance(value, Tensor):
        return numbers(value)
    if isinstance(value, dict):
        return {key: _replaced(one, numbers) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replaced(one, numbers) for one in value)
    return value
