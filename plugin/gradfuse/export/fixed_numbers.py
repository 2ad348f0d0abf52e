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

_MOST, _MOST_FRACTIONS = 4096, 64
"""Tensors with more whole numbers, or with more fractions, are no settings."""

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "exponential", "empty")
_ASKS = frozenset("tolist item __bool__ __int__ __index__ __float__ __format__".split())
"""Functions that give Python's numbers, or their text."""
_MAKERS = frozenset("tensor as_tensor arange zeros ones full".split())
"""Functions that make tensors of Python's numbers."""
_OF_ANY_SIZE = frozenset("nonzero argwhere where unique repeat_interleave masked_select __getitem__".split())
"""Functions whose results may have a size that depends on the numbers."""


def is_fixed(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are of the kind that code takes out as settings, if no step changes them."""
    return not tensor.is_complex() and tensor.numel() <= (_MOST_FRACTIONS if tensor.is_floating_point() else _MOST)


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
        fixed = self._result(function, args, kwargs) if self._known or name in _MAKERS else None
        if name in _ASKS and fixed is not None:
            return fixed
        if name in _OF_ANY_SIZE and fixed is not None:
            # Its traced result would have a size of which nothing is known.
            found = tuple(_traced(one) for one in fixed) if isinstance(fixed, tuple) else _traced(fixed)
        else:
            found = call(function, args, kwargs)
        if fixed is not None:
            for traced, numbers in zip(_listed(found), _listed(fixed), strict=False):
                if isinstance(traced, Tensor) and isinstance(numbers, Tensor):
                    self._put(traced, numbers)
        return found

    def _result(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function gives of tensors whose numbers are fixed; None if they are not, or it is another."""
        name = getattr(function, "__name__", "")
        leaves = private.tensors_in((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        writes = name == "__setitem__" or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
        if writes or not (tensors or name in _MAKERS) or any(word in name for word in _RANDOM):
            return None
        if any(self._numbers(one) is None for one in tensors) or any(map(private.is_symbolic, leaves)):
            return None
        try:
            with private.untraced():
                found = function(*_replaced(args, self._numbers), **_replaced(dict(kwargs), self._numbers))
        except (RuntimeError, TypeError, ValueError, IndexError):
            # The traced call says what is wrong.
            return None
        if name in _ASKS:
            return found
        results = [one for one in _listed(found) if isinstance(one, Tensor)]
        return found if results and all(map(is_fixed, results)) else None

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


def _traced(numbers: Tensor) -> Tensor:
    """Return these numbers as a constant of what is traced."""
    with private.untraced():
        listed = numbers.tolist()
    return torch.tensor(listed, dtype=numbers.dtype).reshape(numbers.shape)


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
