"""State that a step's code keeps in Python: attributes, globals, closure variables, random generators.

A traced program holds the values that these have when it is traced. This module finds them, compares them before and
after a run, and puts them back. It imports torch.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import ctypes
import functools
import io
import itertools
import math
import mmap
import numbers
import os
import queue
import random
import sys
import threading
import time
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from ctypes import _SimpleCData
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from gradfuse.export import clocks, explaining
from gradfuse.export.torch_step import TorchStep

_MOST_HOLDERS, _MOST_ENTRIES = 20_000, 1_000
"""How many objects are examined, the nearest first, and how many entries one may hold: larger ones hold data."""
_MOST_NUMBERS = 1 << 24
"""Tensors in attributes are copied up to this many numbers; what is written into others stays."""

_MOST_ADDED = 15_000
"""Lists are extended up to this length, to see whether results depend on their lengths."""

_TENSORS = frozenset(("_parameters", "_buffers"))
"""Entries of modules whose tensors are replaced for each run."""
_SEQUENCES = (list, tuple, deque, array.array, bytearray)
_OF_LIBRARY = (
    *(types.SimpleNamespace, threading.local, WeakKeyDictionary, WeakValueDictionary, WeakSet),
    *(UserDict, UserList, ChainMap, queue.Queue),
)
"""Classes of Python's library whose instances keep what code puts there."""
_MOST_SECONDS = 1.0
"""For how long iterators are asked for later items."""
_FEW = 20
"""So much they are asked for where that is no number or text, but may be large."""
_ABSENT = object()


class Replayed:
    """An iterator, in its place, that can be put back to where it was.

    Attributes:
        iterator: what it takes from.
        at: how many items it has given since.
        of_call: how many items it gives in a call.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.at = self.of_call = 0
        self._given: list[Any] = []

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        if self.at == len(self._given):
            self._given.append(next(self.iterator))
        self.at += 1
        return self._given[self.at - 1]

    def __getattr__(self, name: str) -> Any:
        # A copy has no attributes yet when it is asked for what copies it.
        if _is_special(name):
            raise AttributeError(name)
        return getattr(self.iterator, name)

    def go(self, count: int) -> None:
        """Go to where it will have given `count` values, as far as it has them and gives them soon."""
        end = time.monotonic() + _MOST_SECONDS
        self.at = min(count, len(self._given))
        most = _MOST_ADDED if all(map(_is_small, self._given)) else _FEW
        try:
            while self.at < min(count, most) and time.monotonic() < end:
                next(self)
        except StopIteration:
            self.at = max(self.at - self.of_call, 0)

    def rest(self) -> Iterator[Any]:
        """Return an iterator over all items that it had not given before it was put here."""
        return itertools.chain(self._given, self.iterator) if self._given else self.iterator


def _is_small(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _FEW and all(map(_is_small, value))
    if isinstance(value, (Tensor, np.ndarray)):
        return math.prod(value.shape) <= _FEW
    return isinstance(value, (str, bytes, int, float, complex, np.generic, type(None)))


Number: TypeAlias = tuple[str, Any, Any, Callable[[Any], None]]
"""A number that has changed: its name, its old and new value, and a setter."""


class PythonState:
    """The current Python state that code can reach and change from some objects.

    Args:
        roots: names for messages -> modules and functions.

    Attributes:
        clocks: where code has functions that tell the time.
        is_endless: whether there are iterators that cannot be put back to where they were.
        is_stuck: whether a variable of the context had no value, and has one that cannot be taken away.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._holders: list[_Holder] = []
        self._seen: set[Any] = set()
        self._copied = 0
        self.is_endless = False
        self.clocks: list[clocks.Place] = []
        # Kept, so that no other object gets its id.
        self._alive: list[Any] = []
        self._iterators: list[Iterator[Any]] = []
        pending: deque[tuple[str, Any]] = deque(roots.items())
        while pending and len(self._seen) < _MOST_HOLDERS:
            pending.extend(self._visit(*pending.popleft()))
        replayed: dict[int, Replayed] = {}
        for holder in self._holders if self._iterators else ():
            holder.replay(replayed)
        self.is_endless = any(id(one) not in replayed for one in self._iterators)

    @classmethod
    def of(cls, step: TorchStep) -> PythonState:
        """Return what the code of a step can reach."""
        name = getattr(step.loss, "__name__", type(step.loss).__name__)
        hooks = {str(one): one.function for hooks in step.hooks.values() for one in hooks}
        return cls({type(step.module).__name__: step.module, name: step.loss, **hooks})

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """At the end, restore the state for good."""
        try:
            yield
        finally:
            self.restore()
            for holder in self._holders:
                holder.release()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Put back what was there, and once more at the end: a trace neither reads what runs have kept nor keeps any.

        What runs have kept would be a constant, and tensors of a trace have no numbers.
        """
        self.restore()
        try:
            yield
        finally:
            self.restore()

    @property
    def is_stuck(self) -> bool:
        return any(isinstance(one, _Variable) and one.is_stuck for one in self._holders)

    def mark(self) -> None:
        """Record the current state, after the first run."""
        for holder in self._holders:
            holder.mark()

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        return list(dict.fromkeys(name for holder in self._holders for name in holder.changed()))

    def numbers(self) -> list[Number]:
        """Return the numbers that have changed."""
        return [one for holder in self._holders for one in holder.numbers()]

    def draws(self) -> bool:
        """Whether a generator of random numbers has given some since `mark`."""
        return any(isinstance(one, _Generator) and one.has_drawn() for one in self._holders)

    def generators(self) -> dict[str, str]:
        """Return the states of generators of random numbers by their names, as texts."""
        found = [one for one in self._holders if isinstance(one, _Generator)]
        return {f"the generator {one.name}": repr(state_of(one.owner)) for one in found}

    def restore(self) -> None:
        """Put back what was there."""
        for holder in self._holders:
            holder.restore()

    def _visit(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note what a value keeps; yield what else can be reached from it."""
        plain = (str, bytes, int, float, complex, type(None), types.ModuleType)
        if isinstance(value, plain) or not self._is_new(value):
            return
        if isinstance(value, _GENERATORS):
            if not any(value is one for one in _OF_PROCESS):
                self._holders.append(_Generator(name, value))
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and value.layout == torch.strided:
                self._copied += value.numel()
                self._holders.append(_Written(name, value, value, copied=self._copied <= _MOST_NUMBERS))
                self._holders.append(_Entries(name, vars(value), _attribute))
        elif isinstance(value, np.ndarray):
            self._copied += value.size
            if value.dtype != object and value.flags.writeable and self._copied <= _MOST_NUMBERS:
                self._holders.append(_Array(name, value, value))
        elif _is_iterator(value):
            self._iterators.append(value)
            frame = getattr(value, "gi_frame", None)
            if frame is not None:
                yield from ((_attribute(name, key), one) for key, one in frame.f_locals.items())
        elif isinstance(value, io.IOBase):
            if not value.closed and value.seekable():
                self._holders.append(_Position(name, value))
        elif isinstance(value, (memoryview, mmap.mmap, ctypes.Structure, ctypes.Array)):
            view = _in_memory(value)
            if view is not None:
                self._holders.append(_Array(name, value, view))
        elif isinstance(value, type(os.environ)):
            self._holders.append(_Environment(name, value))
        elif isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
            self._holders.append(_Entries(name, value, _item))
            yield from ((_item(name, key), one) for key, one in _entries(value).items())
        elif isinstance(value, _SEQUENCES) and len(value) <= _MOST_ENTRIES:
            if not isinstance(value, tuple):
                self._holders.append(_List(name, value))
            yield from ((_item(name, key), one) for key, one in enumerate(_elements(value)))
        elif isinstance(value, set) and len(value) <= _MOST_ENTRIES:
            self._holders.append(_Set(name, value))
        elif isinstance(value, contextvars.ContextVar):
            self._holders.append(_Variable(name, value))
            yield name, value.get(None)
        elif isinstance(value, _SimpleCData):
            self._holders.append(_Attributes(name, value, ["value"]))
        elif isinstance(value, functools.partial):
            yield from ((name, one) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.BuiltinMethodType):
            # Of a module it is a function.
            yield name, None if isinstance(value.__self__, types.ModuleType) else value.__self__
        elif isinstance(value, types.MethodType):
            yield from ((name, one) for one in (value.__self__, value.__func__))
        elif isinstance(value, property):
            yield from ((name, one) for one in (value.fget, value.fset))
        elif isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, types.FunctionType):
            yield from self._visit_function(name, value)
        elif isinstance(value, type):
            if _is_users(value):
                self._holders.append(_Attributes(name, value, [key for key in vars(value) if not _is_special(key)]))
                yield from (
                    (f"{value.__name__}.{key}", one) for key, one in vars(value).items() if not _is_special(key)
                )
                yield from ((base.__name__, base) for base in value.__bases__)
        elif type(value).__module__ == "functools":
            code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
            if hasattr(value, "cache_info") and code is not None and explaining.is_users(code.co_filename):
                self._holders.append(_Results(name, value))
            yield name, getattr(value, "__wrapped__", None)
        elif isinstance(value, _OF_LIBRARY):
            yield from self._visit_instance(name, value)
        elif isinstance(value, nn.Module) or _is_users(type(value)):
            yield type(value).__name__, type(value)
            self._holders.append(_Class(name, value))
            yield from self._visit_instance(name, value)
        elif isinstance(getattr(value, "__dict__", None), dict):
            # Of a library: a logger, a semaphore, a number that processes share.
            self._holders.append(_Plain(name, vars(value), _attribute))
            yield from (
                (_attribute(name, key), one) for key, one in vars(value).items() if isinstance(one, _SimpleCData)
            )

    def _visit_instance(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and self._is_new(attributes):
            self._holders.append(_Entries(name, attributes, _attribute))
            for key, one in list(attributes.items()):
                if key == "_modules" and isinstance(value, nn.Module):
                    self._holders.append(_Entries(name, one, _attribute))
                    yield from ((f"{name}.{part}", module) for part, module in one.items())
                elif not (key in _TENSORS and isinstance(value, nn.Module)):
                    yield _attribute(name, key), one
                else:
                    yield from self._visit_tensors(name, one)
        slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
        if slots:
            self._holders.append(_Attributes(name, value, slots))
            yield from ((_attribute(name, slot), getattr(value, slot)) for slot in slots)

    def _visit_tensors(self, name: str, tensors: dict[str, Tensor | None]) -> Iterator[tuple[str, Any]]:
        """Note what parameters and buffers of a module have in attributes."""
        for key, tensor in tensors.items():
            if tensor is not None and self._is_new(tensor):
                shown = _attribute(name, key)
                self._holders.append(_Entries(shown, vars(tensor), _attribute))
                yield from ((_attribute(shown, one), value) for one, value in list(vars(tensor).items()))

    def _visit_function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        code = function.__code__
        if not explaining.is_users(code.co_filename):
            wrapped = function.__dict__.get("__wrapped__")
            if wrapped is not None:
                # A decorator's of a library.
                self._holders.append(_Entries(function.__name__, function.__dict__, _attribute))
                yield name, wrapped
            return
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                # It is not set yet.
                continue
            if self._is_new(cell):
                self._holders.append(_Attributes("", cell, ["cell_contents"], shown=variable))
                yield variable, value
        self._holders.append(_Entries(function.__name__, function.__dict__, _attribute))
        yield from ((_attribute(function.__name__, key), one) for key, one in list(function.__dict__.items()))
        defaults = function.__defaults__ or ()
        arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from zip(arguments, defaults, strict=True)
        yield from (function.__kwdefaults__ or {}).items()
        names = _names(code)
        if "globals" in names and self._is_new(function.__globals__):
            # It may ask for any of them by a text, or make new ones.
            self._holders.append(_Plain("", function.__globals__, _attribute))
        yield from self._visit_names("", function.__globals__, names, names)

    def _visit_names(
        self, name: str, namespace: dict[str, Any], wanted: frozenset[str], names: frozenset[str]
    ) -> Iterator[tuple[str, Any]]:
        """Note the values of some names in a namespace, and of the same in the modules that these are."""
        for key in wanted:
            if key not in namespace or (id(namespace), key) in self._seen:
                continue
            self._seen.add((id(namespace), key))
            value, shown = namespace[key], _attribute(name, key)
            if clocks.is_clock(value):
                self.clocks.append((namespace, key))
            if isinstance(value, types.ModuleType):
                if explaining.is_users(getattr(value, "__file__", None) or "<built-in>"):
                    yield from self._visit_names(shown, vars(value), names, names)
                else:
                    yield from self._visit_library(shown, vars(value), names)
                continue
            self._holders.append(_Entries(name, namespace, _attribute, only=key))
            yield shown, value

    def _visit_library(self, name: str, namespace: dict[str, Any], names: frozenset[str]) -> Iterator[tuple[str, Any]]:
        """Note the values of some names in a module of a library, or that it does not have them."""
        for key in names:
            if (id(namespace), key) in self._seen or not _is_value(namespace.get(key)):
                continue
            self._seen.add((id(namespace), key))
            self._holders.append(_OfLibrary(name, namespace, _attribute, only=key))
            if key in namespace:
                yield _attribute(name, key), namespace[key]

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._alive.append(value)
        return True


def _entries(held: dict[Any, Any]) -> dict[Any, Any]:
    """Return what is in a dictionary: a subclass may make something of a value when it is asked for it."""
    return dict(dict.items(held))


def _elements(held: Any) -> Iterator[Any]:
    """Yield what is in a list, a tuple or a queue with two ends, likewise."""
    kind = next(kind for kind in _SEQUENCES if isinstance(held, kind))
    return kind.__iter__(held)


class _Holder:
    """Something that keeps values.

    Attributes:
        name: what messages call it.
        owner: the thing itself.
    """

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self.owner = owner

    def changed(self) -> Iterator[str]:
        """Yield the names of what has changed."""
        raise NotImplementedError

    def numbers(self) -> Iterator[Number]:
        """Yield the numbers that are not as they were, as `PythonState.numbers` does."""
        return iter(())

    def restore(self) -> None:
        """Put back what was there."""
        raise NotImplementedError

    def mark(self) -> None:
        """Note what is so after the first run."""

    def replay(self, replayed: dict[int, Replayed]) -> None:
        """Replace iterators by ones that can be put back; `replayed` has them by the `id` of each."""

    def release(self) -> None:
        """Put iterators into their places again."""


class _Keyed(_Holder):
    """Something that keeps values under keys."""

    _makes_entries = True
    """Whether a number that was not there stands for one that was 0."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self._before = self._now()
        self._replayed: dict[Any, Replayed] = {}

    def replay(self, replayed: dict[int, Replayed]) -> None:
        for key, value in self._before.items():
            # Some places take no other value.
            if _is_iterator(value):
                with contextlib.suppress(Exception):
                    one = replayed.get(id(value)) or Replayed(value)
                    self._set(key, one)
                    self._before[key] = self._replayed[key] = replayed[id(value)] = one

    def mark(self) -> None:
        for one in self._replayed.values():
            one.of_call = one.at

    def release(self) -> None:
        for key, one in self._replayed.items():
            self._before[key] = one.rest()
            self._set(key, self._before[key])

    def changed(self) -> Iterator[str]:
        now = self._now()
        for key in {**self._before, **now}:
            before, value = self._before.get(key, _ABSENT), now.get(key, _ABSENT)
            if not _is_same(before, value) or (key in self._replayed and self._replayed[key].at):
                yield self._shown(key)

    def numbers(self) -> Iterator[Number]:
        for key, value in self._now().items():
            before = self._before.get(key)
            if key in self._replayed and self._replayed[key].at:
                yield self._shown(key), 0, self._replayed[key].at, self._replayed[key].go
            if before is None and self._makes_entries and (_is_number(value) or _is_decimal(value)):
                # It is made in the first call.
                before = type(value)(0)
            if _are_other_numbers(before, value):
                yield self._shown(key), before, value, functools.partial(self._set, key)
            elif isinstance(before, Tensor) and before is not value and _is_single(before) and _is_single(value):
                yield self._shown(key), before.item(), value.item(), functools.partial(self._put_into, key, value)
            elif _is_decimal(before) and _is_decimal(value) and before != value:
                yield self._shown(key), int(before or 0), int(value), functools.partial(self._put_digits, key)
            elif isinstance(before, _FIXED) and type(before) is type(value) and before != value:
                yield from self._numbers_in(key, before, value)
            elif before is not value and type(before) is type(value) and _is_users(type(value)):
                yield from self._numbers_of(key, before, value)

    def _numbers_in(self, key: Any, before: Any, value: Any) -> Iterator[Number]:
        """Yield those of a value that is replaced as a whole: of a tuple, or how long something is."""
        if len(before) != len(value):
            yield self._shown(key), len(before), len(value), lambda count: self._set(key, _lengthened(value, count))
        elif isinstance(value, tuple):
            for place, (one, other) in enumerate(zip(before, value, strict=True)):
                if _are_other_numbers(one, other):

                    def put(number: Any, place: int = place) -> None:
                        parts = [*value[:place], number, *value[place + 1 :]]
                        self._set(key, type(value)(*parts) if hasattr(value, "_fields") else tuple(parts))

                    yield self._shown(key), one, other, put

    def _numbers_of(self, key: Any, before: Any, value: Any) -> Iterator[Number]:
        """Yield those of an object that stands in the place of another one, as a dataclass that is replaced."""
        for name in (*getattr(value, "__dict__", ()), *_slots(type(value))):
            one, other = getattr(before, name, None), getattr(value, name, None)
            if _are_other_numbers(one, other):

                def put(number: Any, name: str = name) -> None:
                    changed = copy.copy(value)
                    object.__setattr__(changed, name, number)
                    self._set(key, changed)

                yield self._shown(key), one, other, put

    def _put_digits(self, key: Any, number: int) -> None:
        self._set(key, str(number))

    def _put_into(self, key: Any, like: Tensor, number: Any) -> None:
        self._set(key, torch.full_like(like, number))

    def restore(self) -> None:
        now = self._now()
        for key, before in self._before.items():
            if now.get(key, _ABSENT) is not before:
                self._set(key, before)
        for one in self._replayed.values():
            one.at = 0
        for key in now.keys() - self._before.keys():
            self._delete(key)

    def _now(self) -> dict[Any, Any]:
        raise NotImplementedError

    def _set(self, key: Any, value: Any) -> None:
        raise NotImplementedError

    def _delete(self, key: Any) -> None:
        raise NotImplementedError

    def _shown(self, key: Any) -> str:
        raise NotImplementedError


class _Entries(_Keyed):
    """A dictionary, or one entry of it."""

    def __init__(self, name: str, owner: dict[Any, Any], shown: Callable[[str, Any], str], only: Any = _ABSENT) -> None:
        self._text, self._only = shown, only
        super().__init__(name, owner)

    def _now(self) -> dict[Any, Any]:
        if self._only is _ABSENT:
            return _entries(self.owner)
        return {self._only: self.owner[self._only]} if self._only in self.owner else {}

    def _set(self, key: Any, value: Any) -> None:
        self.owner[key] = value

    def _delete(self, key: Any) -> None:
        del self.owner[key]

    def _shown(self, key: Any) -> str:
        return self._text(self.name, key)


class _OfLibrary(_Entries):
    """A name in a module of a library: it is code's if it stands for a value, and the library's otherwise."""

    def _now(self) -> dict[Any, Any]:
        return {key: one for key, one in super()._now().items() if _is_value(one)}


class _Plain(_Entries):
    """What a namespace has that is no object itself: of an object of a library, the others are the library's own."""

    def _now(self) -> dict[Any, Any]:
        return {key: one for key, one in super()._now().items() if isinstance(one, (str, int, float, type(None)))}


class _Environment(_Keyed):
    """The variables of the process's environment."""

    def _now(self) -> dict[str, str]:
        return dict(self.owner)

    def _set(self, key: str, value: str) -> None:
        self.owner[key] = value

    def _delete(self, key: str) -> None:
        del self.owner[key]

    def _shown(self, key: str) -> str:
        return _item(self.name, key)


class _Attributes(_Keyed):
    """Some attributes of a class, of an object with slots, or of a cell of a closure."""

    def __init__(self, name: str, owner: Any, keys: list[str], shown: str | None = None) -> None:
        self._keys, self._text = keys, shown
        super().__init__(name, owner)

    def _now(self) -> dict[str, Any]:
        if isinstance(self.owner, type):
            return {key: one for key, one in vars(self.owner).items() if not _is_special(key)}
        return {key: getattr(self.owner, key) for key in self._keys if hasattr(self.owner, key)}

    def _set(self, key: str, value: Any) -> None:
        setattr(self.owner, key, value)

    def _delete(self, key: str) -> None:
        delattr(self.owner, key)

    def _shown(self, key: str) -> str:
        return self._text if self._text is not None else _attribute(self.name, key)


class _List(_Keyed):
    """A list, or a queue with two ends."""

    _makes_entries = False

    def _now(self) -> dict[int, Any]:
        return dict(enumerate(_elements(self.owner)))

    def _shown(self, key: int) -> str:
        return self.name

    def numbers(self) -> Iterator[Number]:
        yield from super().numbers()
        if len(self._before) < len(self.owner):
            # Its length is a number as well.
            yield self.name, len(self._before), len(self.owner), self._lengthen

    def _lengthen(self, count: int) -> None:
        last = self.owner[-1]
        self.owner.extend([last] * (min(count, _MOST_ADDED) - len(self.owner)))

    def _set(self, key: int, value: Any) -> None:
        # Numbers in bytes and the like have a range.
        with contextlib.suppress(OverflowError, TypeError, ValueError):
            self.owner[key] = value

    def restore(self) -> None:
        now, before = list(_elements(self.owner)), list(self._before.values())
        for one in self._replayed.values():
            one.at = 0
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            while len(self.owner):
                self.owner.pop()
            self.owner.extend(before)


class _Set(_Holder):
    def __init__(self, name: str, owner: set[Any]) -> None:
        super().__init__(name, owner)
        self._before = set(owner)

    def changed(self) -> Iterator[str]:
        if self.owner != self._before:
            yield self.name

    def numbers(self) -> Iterator[Number]:
        if len(self._before) != len(self.owner):
            yield self.name, len(self._before), len(self.owner), self._lengthen

    def _lengthen(self, count: int) -> None:
        self.owner |= _lengthened(frozenset(self.owner), count)

    def restore(self) -> None:
        if self.owner != self._before:
            self.owner.clear()
            self.owner.update(self._before)


class _Variable(_Keyed):
    """A variable of the context that code runs in."""

    is_stuck = False
    """Whether it had no value, has no default, and has a value now."""

    def _now(self) -> dict[str, Any]:
        value = self.owner.get(_ABSENT)
        return {} if value is _ABSENT else {self.owner.name: value}

    def _set(self, key: str, value: Any) -> None:
        self.owner.set(value)

    def _delete(self, key: str) -> None:
        # Variables cannot be deleted again: a placeholder stands for a missing one.
        try:
            self.owner.set(contextvars.Context().run(self.owner.get))
        except LookupError:
            self.is_stuck = True

    def _shown(self, key: str) -> str:
        return self.name


class _Numbers(_Holder):
    """Numbers in memory, which may be written into.

    Args:
        name: what messages call them.
        owner: what has them.
        array: the same as an array of numpy, or as a tensor.
        copied: whether to look at them at all: of too many no copy is made.
    """

    def __init__(self, name: str, owner: Any, array: Any, *, copied: bool = True) -> None:
        super().__init__(name, owner)
        self._array = array
        self._before = self._copy() if copied else None
        self._first: Any = None

    def mark(self) -> None:
        self._first = self._copy() if self._before is not None and any(self.changed()) else None

    def changed(self) -> Iterator[str]:
        if self._before is not None and not self._is_as(self._before):
            yield self.name

    def numbers(self) -> Iterator[Number]:
        # Memory that the first run has filled, and the second one has left, does not count anything.
        if self._first is not None and not self._is_as(self._first):
            now = self._copy()
            yield self.name, 0, 2, lambda count: self._put_later(now, count / 2)

    def restore(self) -> None:
        if any(self.changed()):
            self._put(self._before)

    def _copy(self) -> Any:
        raise NotImplementedError

    def _is_as(self, other: Any) -> bool:
        raise NotImplementedError

    def _put(self, other: Any) -> None:
        raise NotImplementedError

    def _put_later(self, now: Any, times: float) -> None:
        """Write what will be there after `times` as many calls as have led to what is there now."""
        raise NotImplementedError


class _Written(_Numbers):
    """A tensor that is neither a parameter nor a buffer."""

    def _copy(self) -> Tensor:
        return self._array.detach().clone()  # type: ignore[no-any-return]

    def _is_as(self, other: Tensor) -> bool:
        return torch.equal(self._array.detach().nan_to_num(), other.nan_to_num())

    def _put(self, other: Tensor) -> None:
        self._array.detach().copy_(other)

    def _put_later(self, now: Tensor, times: float) -> None:
        if self._before is not None and now.dtype != torch.bool and not now.is_complex():
            before = self._before.double()
            self._put(_bounded(before + (now.double() - before) * times, now.dtype))


class _Array(_Numbers):
    """An array of numpy."""

    def _copy(self) -> Any:
        return self._array.copy()

    def _is_as(self, other: Any) -> bool:
        return bool(self._array.tobytes() == other.tobytes())

    def _put(self, other: Any) -> None:
        self._array[...] = other

    def _put_later(self, now: Any, times: float) -> None:
        for part, before, last in zip(*map(_fields, (self._array, self._before, now)), strict=True):
            if part.dtype.kind in "iuf":
                wide = torch.from_numpy(before.astype(np.float64))
                later = wide + (torch.from_numpy(last.astype(np.float64)) - wide) * times
                part[...] = _bounded(later, part.dtype).numpy()


def _bounded(numbers: Tensor, dtype: Any) -> Tensor:
    """Return numbers that a type of torch or numpy has."""
    kind = dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.zeros(1, dtype)).dtype
    if kind.is_floating_point:
        return numbers.to(kind)
    info = torch.iinfo(kind)
    return numbers.round().clamp(info.min, info.max).to(kind)


def _fields(array: Any) -> list[Any]:
    """Return the parts of an array of structures that are of one type each, in which one can write."""
    if array.dtype.names is None:
        return [array]
    return [part for name in array.dtype.names for part in _fields(array[name])]


def _in_memory(value: Any) -> Any:
    """Return numbers or structures in memory that may be written into as an array of numpy; None if they are not."""
    try:
        if isinstance(value, (ctypes.Structure, ctypes.Array)):
            view = np.frombuffer(memoryview(value).cast("B"), np.dtype(type(value)))
        else:
            view = np.asarray(value) if isinstance(value, memoryview) else np.frombuffer(value, np.uint8)
    except (TypeError, ValueError, BufferError):
        return None
    return view if view.flags.writeable and view.size <= _MOST_NUMBERS else None


class _Position(_Holder):
    """Where a file is read or written next."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self._before = self._now()

    def _now(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self.owner.tell())
        return -1

    def changed(self) -> Iterator[str]:
        if self._now() != self._before:
            yield self.name

    def numbers(self) -> Iterator[Number]:
        if any(self.changed()):
            yield self.name, self._before, self._now(), self._go

    def restore(self) -> None:
        if any(self.changed()):
            self._go(self._before)

    def _go(self, position: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.owner.seek(position)


class _Class(_Holder):
    """The class of an object."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self._before = type(owner)

    def changed(self) -> Iterator[str]:
        if type(self.owner) is not self._before:
            yield f"the class of {self.name}"

    def restore(self) -> None:
        if any(self.changed()):
            self.owner.__class__ = self._before


class _Results(_Holder):
    """A function that keeps its results, as by `functools.lru_cache`."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self._before = owner.cache_info().currsize

    def changed(self) -> Iterator[str]:
        if self.owner.cache_info().currsize != self._before:
            yield f"the results of {self.name}"

    def restore(self) -> None:
        # Those from before would be lost.
        if not self._before and any(self.changed()):
            self.owner.cache_clear()


class _Generator(_Holder):
    """A generator of random numbers."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self._before = self._marked = state_of(owner)

    def mark(self) -> None:
        self._marked = state_of(self.owner)

    def has_drawn(self) -> bool:
        """Whether it is elsewhere than it was when it was marked."""
        return not _is_equal(state_of(self.owner), self._marked)

    def changed(self) -> Iterator[str]:
        if not _is_equal(state_of(self.owner), self._before):
            yield f"the generator {self.name}"

    def restore(self) -> None:
        if not any(self.changed()):
            return
        if isinstance(self.owner, random.Random):
            self.owner.setstate(self._before)
        elif isinstance(self.owner, np.random.Generator):
            self.owner.bit_generator.state = self._before
        elif isinstance(self.owner, np.random.BitGenerator):
            self.owner.state = self._before
        else:
            self.owner.set_state(self._before)


_OF_PROCESS = tuple(getattr(draw, "__self__", None) for draw in (random.random, np.random.random))
"""The generators of Python and numpy themselves, which code shares with others."""
_GENERATORS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)


def state_of(generator: Any) -> Any:
    """Return the state of a generator of random numbers of Python, numpy or torch."""
    if isinstance(generator, random.Random):
        # The operating system's has none.
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, np.random.BitGenerator):
        return copy.deepcopy(generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=True)
    return generator.get_state()


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def _is_same(a: Any, b: Any) -> bool:
    plain = (int, float, str, bytes)
    return a is b or (type(a) is type(b) and isinstance(a, plain) and a == b)


_FIXED = (tuple, str, bytes, frozenset)
"""Values that change as a whole."""


def _lengthened(value: Any, count: int) -> Any:
    """Return a value of at most `count` parts."""
    more = min(count, _MOST_ADDED) - len(value)
    if isinstance(value, frozenset):
        return value.union(object() for _ in range(more))
    return value + value[-1:] * more


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Number, np.number)) and not isinstance(value, bool)


def _are_other_numbers(one: Any, other: Any) -> bool:
    """Whether two values are numbers that differ; NaN is no other number than NaN."""
    return _is_number(one) and _is_number(other) and one != other and not (one != one and other != other)


def _is_decimal(value: Any) -> bool:
    """Whether a value is a number in digits."""
    return isinstance(value, str) and value.isdecimal()


def _is_single(value: Any) -> bool:
    """Whether a value is a tensor of one number."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator that is no object of the user's, of which nobody knows where it is."""
    known = (io.IOBase, Replayed, nn.Module)
    return isinstance(value, Iterator) and not isinstance(value, known) and not _is_users(type(value))


def _is_value(value: Any) -> bool:
    """Whether a value is no part of a library: functions, classes, modules, and the table of these."""
    parts = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return not isinstance(value, parts) and value is not sys.modules


def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names that code and the functions in it look up."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ()) if _is_users(kind) else ()
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_users(kind: type) -> bool:
    """Whether a class is of the user's code, or of a library of models."""
    filename = getattr(sys.modules.get(kind.__module__), "__file__", None)
    # A notebook's cells and a script that is read from a pipe have no file.
    return explaining.is_users(filename) if filename else kind.__module__ == "__main__"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _attribute(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _item(name: str, key: Any) -> str:
    return f"{name}[{key!r}]" if isinstance(key, (int, str)) else name
