"""Sizes that code computes by tensors, as `torch.div(x.shape[1], 2, rounding_mode="floor")`, and takes out again.

torch.export would know nothing of the number that comes out, so that no tensor could have that size. Here such a tensor
remembers what it holds. This module imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradfuse import _torch_private as private

_Numbers = npt.NDArray[np.object_]
"""What a tensor holds: whole numbers, some of them symbolic."""

_MAKERS = frozenset((torch.tensor, torch.as_tensor, torch.scalar_tensor))
_PARTED = frozenset((torch.unbind, torch.Tensor.unbind))
_SAME = frozenset("to long int clone detach contiguous cpu".split())
"""Methods that change nothing about whole numbers."""


class SizesInTensors:
    """Follows the numbers of tensors that are made of sizes through a traced function."""

    def __init__(self) -> None:
        # With the tensor itself, so that no other gets its id; written into, it holds something else.
        self._known: dict[tuple[int, int], tuple[Tensor, _Numbers]] = {}

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch; what it returns remembers the numbers in it, if they are known."""
        if function is torch.as_tensor and isinstance(args[0], (list, tuple)):
            # Of a sequence, it takes symbolic numbers for constants.
            function = torch.tensor
        if function is torch.Tensor.new_tensor and _given(args[1]) is not None:
            # So does this.
            like, args = args[0], args[1:]
            function, kwargs = torch.tensor, {"dtype": like.dtype, "device": like.device, **kwargs}
        if function is torch.Tensor.tolist and (numbers := self._numbers(args[0])) is not None:
            return numbers.tolist()
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            self._remember(function, args, kwargs, result)
        elif isinstance(result, tuple) and function in _PARTED and (numbers := self._numbers(args[0])) is not None:
            for one, of_one in zip(result, numbers, strict=True):
                self._put(one, of_one)
        return result

    def _remember(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        if result.is_floating_point() or result.is_complex() or result.dtype == torch.bool or not args:
            return
        if function in _MAKERS:
            numbers = _given(args[0])
        else:
            name = getattr(function, "__name__", "").strip("_")
            operands = [self._numbers(one) for one in args]
            if operands[0] is None:
                return
            numbers = self._computed(name, operands, args, kwargs)
        if numbers is not None and numbers.shape == tuple(result.shape):
            self._put(result, numbers)

    def _computed(
        self, name: str, operands: list[_Numbers | None], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Numbers | None:
        first = operands[0]
        assert first is not None
        if name in _SAME:
            return first
        if name == "getitem":
            return np.asarray(first[args[1]], dtype=object) if _is_index(args[1]) else None
        if name == "prod" and len(args) == 1 and not kwargs:
            return np.asarray(first.prod(), dtype=object)
        if name == "div" and kwargs.get("rounding_mode") in ("trunc", "floor"):
            name = "floordiv"
        elif kwargs:
            return None
        function = _ARITHMETIC.get(name)
        if function is None or len(operands) != 2 or operands[1] is None:
            return None
        if function is operator.floordiv and not _is_counting(first, operands[1]):
            # Below 0, the kinds of rounding differ.
            return None
        return np.asarray(function(first, operands[1]), dtype=object)

    def _numbers(self, value: Any) -> _Numbers | None:
        if isinstance(value, Tensor):
            found = self._known.get((id(value), private.version(value)))
            return None if found is None else found[1]
        return _given(value) if isinstance(value, (int, torch.SymInt)) else None

    def _put(self, tensor: Tensor, numbers: Any) -> None:
        numbers = np.asarray(numbers, dtype=object)
        self._known[id(tensor), private.version(tensor)] = tensor, numbers
        if tensor.dim() == 0:
            private.remember_item(tensor, numbers.item())


_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "rmul": operator.mul,
    "floordiv": operator.floordiv,
    "floor_divide": operator.floordiv,
}
"""By the name of a function of torch, without underscores ahead and behind."""


def _given(value: Any) -> _Numbers | None:
    """Return the numbers of a number or nested sequences of them; None if there are others than whole ones."""
    try:
        numbers = np.array(value, dtype=object) if not isinstance(value, Tensor) else None
    except ValueError:
        return None
    if numbers is None or not all(isinstance(one, (int, torch.SymInt)) for one in numbers.flat):
        return None
    return numbers


def _is_index(index: Any) -> bool:
    return all(isinstance(one, (int, slice, type(...))) for one in (index if isinstance(index, tuple) else (index,)))


def _is_counting(numbers: _Numbers, divisors: _Numbers) -> bool:
    counts: list[Any] = [*numbers.flat]
    others: list[Any] = [*divisors.flat]
    return all(private.known_true(one >= 0) for one in counts) and all(private.known_true(one > 0) for one in others)
