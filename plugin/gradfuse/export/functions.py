"""Finds the functions of a step by their code. This module imports torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch

from gradfuse.export.torch_step import TorchStep

_Where = TypeVar("_Where")


def functions_of(codes: Collection[CodeType], step: TorchStep) -> dict[int, list[FunctionType]]:
    """Return the functions that have each of these codes, by its id: those of several files may be equal."""
    found: dict[int, list[FunctionType]] = {id(code): [] for code in codes}
    for one in _functions(codes, step):
        if (code := id(one.__code__)) in found:
            found[code].append(one)
    return found


def outermost(places: Sequence[tuple[CodeType, _Where]], step: TorchStep) -> list[tuple[CodeType, _Where]]:
    """Return places in code, those in functions and lists that each call makes anew as places in what makes them."""
    functions = functions_of([code for code, _ in places], step)
    made = [code for code, _ in places if not functions[id(code)] or code.co_name.startswith("<")]
    outer = around(made, step)
    return [(outer.get(id(code), code), where) for code, where in places]


def around(codes: Collection[CodeType], step: TorchStep) -> dict[int, CodeType]:
    """Return the code of the innermost function that each of these codes is defined in, by its id; none for others."""
    found: dict[int, CodeType] = {}
    for one in _functions(codes, step):
        if one.__code__.co_name.startswith("<"):
            continue
        for code in codes:
            if code is not one.__code__ and is_within(code, one.__code__):
                known = found.get(id(code))
                found[id(code)] = one.__code__ if known is None or is_within(one.__code__, known) else known
    return found


def is_within(code: CodeType, outer: CodeType) -> bool:
    """Whether a code is another one's, or that of a function, a list or the like within."""
    if code.co_filename != outer.co_filename:
        return False
    return code is outer or any(is_within(code, one) for one in outer.co_consts if isinstance(one, CodeType))


def _functions(codes: Collection[CodeType], step: TorchStep) -> Iterator[FunctionType]:
    """Yield the functions of a step, and those of the files that codes are of."""
    if not codes:
        return
    # The garbage collector does not track frozen objects; modules and classes do not refer to nested functions. All
    # that it tracks is gone through, whatever the number of codes.
    pending: list[Any] = [one for one in gc.get_referrers(*codes) if isinstance(one, FunctionType)]
    for owner in (step.module, step.loss):
        modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else [owner]
        pending += [kind for module in modules for kind in type(module).__mro__]
        kept = [value for module in modules for value in getattr(module, "__dict__", {}).values()]
        pending += [one for one in (*modules, *kept) if isinstance(one, FunctionType)]
    loaded, files = list(sys.modules.values()), {code.co_filename for code in codes}
    pending += [module for module in loaded if getattr(module, "__file__", None) in files]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            yield one
            pending += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
        elif isinstance(one, (type, ModuleType)):
            pending += [value for value in vars(one).values() if isinstance(value, _HOLDERS)]
        elif isinstance(one, (staticmethod, classmethod, MethodType)):
            pending.append(one.__func__)
        elif isinstance(one, property):
            pending.append(one.fget)


_EMPTY = CellType()
_HOLDERS = (FunctionType, MethodType, staticmethod, classmethod, property, type)
