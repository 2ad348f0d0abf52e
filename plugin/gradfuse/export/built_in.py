"""Python's functions `len`, `max`, `min` and `sum`, which take no dynamic sizes, and decide by numbers in tensors.

Python insists on an integer of `len`, which makes a dynamic size a constant of the traced program, and on truth values
of the comparisons by which `max` chooses. This module imports torch.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export.chosen import as_tensor, count_of, holds_some, sum_of
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
    own = getattr(builtins, name)
    of_sizes = getattr(torch, f"sym_{name}")

    def among(*values: Any, **settings: Any) -> Any:
        if len(values) == 1 and not isinstance(values[0], (list, tuple)) and not isinstance(values[0], Tensor):
            values = (list(values[0]),)
        among = values[0] if len(values) == 1 else values
        scalars = [one for one in among if isinstance(one, Tensor) and one.numel() == 1] if len(values) > 1 else []
        if settings or not (scalars or any(map(private.follows_from_values, among))):
            return own(*values, **settings)
        best, *others = among
        for other in others:
            best = _better(name, best, other) if scalars else of_sizes(best, other)
        return best

    return among


def _better(name: str, best: Any, other: Any) -> Tensor:
    """Return one of two numbers, of which one is in a tensor at least."""
    like = best if isinstance(best, Tensor) else other
    first, second = (as_tensor(one, like) for one in (best, other))
    assert first is not None and second is not None
    return torch.where(second > first if name == "max" else second < first, second, first)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "len": _len,
    "sum": _sum,
    "max": _of_several("max"),
    "min": _of_several("min"),
}
