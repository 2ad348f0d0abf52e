"""Decisions by random numbers, such as layerdrop, as selections: both sides are computed, and a draw chooses.

A graph has no branches, but it can compute a layer and then take or leave its result. So functions that decide by a
random number are rewritten while a step is traced (see `rewriting`): each decision runs both of its sides from the same
values, and every variable that they bind becomes `torch.where` of both. What cannot be chosen so, as lists of another
length or tensors of another shape, must not be used afterwards.

PyTorch draws no numbers for the side that it does not take. So a side is enclosed in two operators, from which the
number of each draw follows. This module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import _torch_private as private
from gradfuse.export import dropout, rewriting
from gradfuse.export.torch_step import TorchStep

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class CannotSelectError(BaseException):
    """The sides of a decision do not give what one can choose from. Modules do not catch it, unlike exceptions."""


class _Either:
    """What is one thing or another by a random number, and can be neither in a graph."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _used(self, *args: Any, **kwargs: Any) -> Any:
        raise CannotSelectError(self._name)

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __call__ = __contains__ = _used
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = __rmatmul__ = __index__ = _used
    __int__ = __float__ = __torch_function__ = _used
    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Selections:
    """Functions that compute both sides of what they decide by random numbers.

    Attributes:
        codes: the code of each -> the code that takes its place.
        lines: the code of each -> the lines in which it decides.
        written: for each decision in turn the buffers that its sides write; None: it is to be found out.
    """

    codes: Mapping[CodeType, CodeType] = dataclasses.field(default_factory=dict)
    lines: Mapping[CodeType, frozenset[int]] = dataclasses.field(default_factory=dict)
    written: tuple[frozenset[str], ...] | None = None

    def including(self, step: TorchStep, places: Sequence[tuple[CodeType, int]]) -> Selections:
        """Return the same with decisions of a step in these lines of functions, which may be rewritten ones.

        Raises:
            rewriting.CannotRewriteError: one of them cannot be rewritten, or is rewritten already.
        """
        originals = {new: old for old, new in self.codes.items()}
        lines = dict(self.lines)
        for code, line in places:
            old = originals.get(code, code)
            if line in self.lines.get(old, ()) or not _functions(old, step):
                raise rewriting.CannotRewriteError
            lines[old] = lines.get(old, frozenset()) | {line}
        codes = {
            old: self.codes[old] if self.lines.get(old) == asked else rewriting.rewritten(old, asked)
            for old, asked in lines.items()
        }
        return Selections(codes, lines)

    def surveyed(self, written: Sequence[frozenset[str]]) -> Selections:
        """Return the same with the buffers that the sides of each decision write."""
        return dataclasses.replace(self, written=tuple(written))

    @contextlib.contextmanager
    def installed(self, step: TorchStep) -> Iterator[_Decisions]:
        """Let the functions compute both sides."""
        changed = [(function, function.__code__) for code in self.codes for function in _functions(code, step)]
        namespaces = [function.__globals__ for function, _ in changed]
        decisions = _Decisions(step, self.written)
        try:
            for namespace in namespaces:
                namespace[rewriting.HELPER] = decisions
            for function, code in changed:
                function.__code__ = self.codes[code]
            yield decisions
        finally:
            for function, code in changed:
                function.__code__ = code
            for namespace in namespaces:
                namespace.pop(rewriting.HELPER, None)


def _functions(code: CodeType, step: TorchStep) -> list[FunctionType]:
    """Return the functions that have this code."""
    # The garbage collector does not know what was frozen; modules and classes do not know functions within functions.
    pending: list[Any] = [one for one in gc.get_referrers(code) if isinstance(one, FunctionType)]
    for owner in (step.module, step.loss):
        modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else [owner]
        pending += [kind for module in modules for kind in type(module).__mro__]
    loaded = list(sys.modules.values())
    pending += [module for module in loaded if getattr(module, "__file__", None) == code.co_filename]
    found: dict[int, FunctionType] = {}
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            if one.__code__ is code:
                found[id(one)] = one
            pending += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
        elif isinstance(one, (type, ModuleType)):
            pending += [value for value in vars(one).values() if isinstance(value, _HOLDERS)]
        elif isinstance(one, (staticmethod, classmethod, MethodType)):
            pending.append(one.__func__)
        elif isinstance(one, property):
            pending.append(one.fget)
    return list(found.values())


_EMPTY = CellType()
_HOLDERS = (FunctionType, MethodType, staticmethod, classmethod, property, type)


class _Decisions:
    """What rewritten functions call.

    Attributes:
        written: for each decision that was made the buffers that its sides write; None: it is to be found out.
    """

    def __init__(self, step: TorchStep, written: Sequence[frozenset[str]] | None) -> None:
        self.step = step
        self.surveys = written is None
        self.written = [] if written is None else list(written)
        self._count = 0

    def begun(self) -> int:
        """Return the number of a decision that begins."""
        if self.surveys:
            self.written.append(frozenset())
        self._count += 1
        return self._count - 1

    def buffers(self, number: int) -> Collection[str]:
        """Return the buffers that the sides of a decision may write."""
        return self.step.buffers if self.surveys else self.written[number]

    def begin(self, test: Any, names: Sequence[str], before: Mapping[str, Any]) -> _Decision:
        return _Decision(self, test, names, before)

    def negated(self, value: Any) -> Any:
        return value.logical_not() if isinstance(value, Tensor) else not value

    def both(self, value: Any, other: Callable[[], Any]) -> Any:
        return self.either(value, other, lambda: False) if isinstance(value, Tensor) else value and other()

    def any(self, value: Any, other: Callable[[], Any]) -> Any:
        return self.either(value, lambda: True, other) if isinstance(value, Tensor) else value or other()

    def either(self, test: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        value = None
        decision = self.begin(test, ("value",), {})
        for side in decision:
            value = first() if side else second()
            if decision.leave({"value": value}):
                value = decision["value"]
        return value


class _Decision:
    """One decision, whose sides are run one after the other.

    Args:
        all: the decisions that it is one of.
        test: a tensor of one element, for a selection; anything else is decided as Python does.
        names: the variables that the sides bind.
        before: all variables ahead of it.
    """

    def __init__(self, all: _Decisions, test: Any, names: Sequence[str], before: Mapping[str, Any]) -> None:
        self._all = all
        self._step = all.step
        self._test = test
        self._names = names
        self._before = dict(before)
        self._values: Mapping[str, Any] = {}
        self._sides: list[tuple[Mapping[str, Any], dict[str, Tensor]]] = []

    def __iter__(self) -> Iterator[bool]:
        if not isinstance(self._test, Tensor):
            yield bool(self._test)
            return
        if self._test.numel() != 1:
            raise CannotSelectError("a condition")
        self._condition = self._test.detach().reshape([]).bool()
        self._number = self._all.begun()
        self._buffers = {name: self._step.places[name][0].tensor() for name in self._all.buffers(self._number)}
        for side in (True, False):
            self._held = _held(self._before, self._step) if self._all.surveys else []
            self._copies = {name: tensor.clone() for name, tensor in self._buffers.items()}
            self._step.place(self._copies)
            self._taken = self._condition if side else self._condition.logical_not()
            dropout.begin_side(self._taken)
            yield side

    def leave(self, after: Mapping[str, Any]) -> bool:
        """End a side with these variables; return whether they are to be bound anew."""
        if not isinstance(self._test, Tensor):
            return False
        dropout.end_side(self._taken)
        if self._all.surveys and not _are_same(self._held, _held(self._before, self._step)):
            raise CannotSelectError("something that is changed in place")
        self._sides.append(({name: after[name] for name in self._names if name in after}, self._written()))
        if len(self._sides) == 1:
            self._values = self._before
            return True
        (first, one), (second, other) = self._sides
        self._step.place(
            self._buffers
            | {
                name: self._chosen(name, one.get(name, self._buffers[name]), other.get(name, self._buffers[name]))
                for name in (*one, *other)
            }
        )
        self._values = {
            name: self._chosen(name, first[name], second[name])
            for name in self._names
            if name in first and name in second
        }
        return True

    def __getitem__(self, name: str) -> Any:
        return self._values[name] if name in self._values else _Either(name)

    def _written(self) -> dict[str, Tensor]:
        """Return the buffers that a side has written, as it left them."""
        after = {name: self._step.places[name][0].tensor() for name in self._buffers}
        if self._all.surveys:
            after = {
                name: tensor
                for name, tensor in after.items()
                if tensor is not self._copies[name] or not torch.equal(tensor, self._buffers[name])
            }
            self._all.written[self._number] |= frozenset(after)
        return after

    def _chosen(self, name: str, first: Any, second: Any) -> Any:
        """Return what is the first if the condition holds, and else the second."""
        if first is second or (type(first) is type(second) and type(first) in _NUMBERS and first == second):
            return first
        if type(first) is type(second) and isinstance(first, (tuple, list)) and len(first) == len(second):
            made = [self._chosen(name, *pair) for pair in zip(first, second, strict=True)]
            return made if isinstance(first, list) else tuple(made) if type(first) is tuple else _Either(name)
        if type(first) is type(second) is bool:
            return self._condition if first else ~self._condition
        like = next((one for one in (first, second) if isinstance(one, Tensor)), None)
        first, second = (_as_tensor(one, like) for one in (first, second))
        if first is None or second is None or not _are_alike(first, second):
            return _Either(name)
        if first.dtype == torch.bool:
            # onnxruntime has no Where for them.
            return (self._condition & first) | (~self._condition & second)
        return torch.where(self._condition, first, second)


def _as_tensor(value: Any, like: Tensor | None) -> Tensor | None:
    """Return a tensor or number as a tensor that is as good in arithmetic; None: there is none."""
    if isinstance(value, Tensor):
        return value
    if type(value) not in _NUMBERS:
        return None
    dtype = _NUMBERS[type(value)]
    if like is not None and like.dim() == 0 and torch.result_type(like, value) == like.dtype:
        dtype = like.dtype
    return torch.full([], value, dtype=dtype)


def _are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one type and shape, whatever their dynamic sizes."""
    return (first.dtype, first.device, first.dim()) == (second.dtype, second.device, second.dim()) and all(
        private.known_true(a == b) for a, b in zip(first.shape, second.shape, strict=True)
    )


def _held(variables: Mapping[str, Any], step: TorchStep) -> list[Any]:
    """Return what sides must leave as it is: versions of tensors, and what is in lists and modules."""
    modules = [one for one in (step.module, step.loss) if isinstance(one, torch.nn.Module)]
    held: list[Any] = []
    for value in (*variables.values(), *(vars(part) for one in modules for part in one.modules())):
        if isinstance(value, Tensor):
            held += [value, private.version(value)]
        elif isinstance(value, (list, set)):
            held += [value, *value]
        elif isinstance(value, dict):
            held += [value, *value.keys(), *value.values()]
    return held


def _are_same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) == len(after) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(before, after, strict=True)
    )
