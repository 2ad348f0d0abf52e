"""Python's functions `len`, `max`, `min` and `sum`, which take no dynamic sizes, and decide by numbers in tensors.

Python insists on an integer of `len`, which makes a dynamic size a constant of the traced program, and on truth values
of the comparisons by which `max` chooses. This module imports torch.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.chosen import as_tensor, better_of, count_of, holds_some, sum_of
from gradfuse.export.torch_step import TorchStep


@contextlib.contextmanager
def replaced(step: TorchStep) -> Iterator[None]:
    """Let the packages of module and loss call others."""
    owners: list[Any] = [step.loss]
    for owner in (step.module, step.loss):
        owners += [type(module) for module in owner.modules()] if isinstance(owner, torch.nn.Module) else [owner]
    packages = {str(getattr(owner, "__module__", "")).partition(".")[0] for owner in owners} - {"torch", "builtins", ""}
    namespaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and hasattr(module, "__dict__")
    ]
    with contextlib.ExitStack() as installed:
        for namespace in namespaces:
            for name, function in _FUNCTIONS.items():
                if name not in namespace:
                    namespace[name] = function
                    installed.callback(namespace.pop, name)
        yield


def _len(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return value.shape[0]
    return count_of(value) if holds_some(value) else builtins.len(value)


def _sum(values: Any, /, start: Any = 0) -> Any:
    listed = values if isinstance(values, (list, tuple)) or not hasattr(values, "__iter__") else list(values)
    return sum_of(listed, start) if holds_some(listed) else builtins.sum(listed, start)


def _of_several(name: str) -> Callable[..., Any]:
    """Return `max` or `min`: the first of equal ones."""
    of_sizes = getattr(torch, f"sym_{name}")

    def among(*values: Any, **settings: Any) -> Any:
        # torch.export has another one in its place while it traces, which takes dynamic sizes.
        own = getattr(builtins, name)
        if len(values) == 1 and not isinstance(values[0], (list, tuple, Tensor)):
            values = (list(values[0]),)
        given = values if len(values) > 1 else () if isinstance(values[0], Tensor) else values[0]
        if not settings and holds_some(given):
            return better_of(name, given)
        in_tensors = any(isinstance(one, Tensor) for one in given)
        if settings or not (in_tensors or any(map(private.follows_from_values, given))):
            return own(*values, **settings)
        if in_tensors and not all(isinstance(one, _NUMBERS) or _is_number(one) for one in given):
            return own(*values)
        return functools.reduce(functools.partial(_better, name) if in_tensors else of_sizes, given)

    return among


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _better(name: str, best: Any, other: Any) -> Any:
    """Return one of two numbers, of which one is in a tensor at least."""
    like = best if isinstance(best, Tensor) else other
    first, second = (as_tensor(one, like) for one in (best, other))
    assert first is not None and second is not None
    chosen = torch.where(second > first if name == "max" else second < first, second, first)
    # Of a whole number in a tensor and another number, either counts as a number in arithmetic.
    is_number = first.dtype != second.dtype and not (first.requires_grad or second.requires_grad)
    return chosen.item() if is_number else chosen


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "len": _len,
    "sum": _sum,
    "max": _of_several("max"),
    "min": _of_several("min"),
}
