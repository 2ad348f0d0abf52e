"""What the code of a step asks that is not kept in Python: files, connections, databases, objects of libraries in C.

Nobody can put that back or make it what it will be in later calls, as `python_state` does with all else. Here it is
noted, so that the user is told where the code asks for what is there from one call to the next. This module imports
torch.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import stat
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from gradfuse.export import explaining

_MOST_BYTES = 1 << 16
"""Files are compared by what is in them up to this size: their time of change may be the same after a quick one."""

_OPENS = ((builtins, "open"), (io, "open"))
_LOOKS = ((os, "stat"), (os, "listdir"), (os, "scandir"))

_KNOWN = frozenset(
    """
    builtins collections types functools itertools operator _operator re io _io _thread contextvars _contextvars weakref
    _weakref _abc datetime decimal _decimal fractions random _random struct _struct array csv _csv ctypes _ctypes mmap
    string torch numpy gradfuse sympy
    """.split()
)
"""Packages of classes whose objects never change, or whose state is seen otherwise, or written only."""


class Outside:
    """What a run of a step asks.

    Attributes:
        files: path of a file or folder that is read or looked at -> what it was like, and where that is.
        objects: `id` of an object of a library in C that a method of is called -> the object, the method, and where.
    """

    def __init__(self) -> None:
        self.files: dict[str, tuple[Any, str]] = {}
        self.objects: dict[int, tuple[Any, str, str]] = {}
        self._is_users: dict[types.CodeType, bool] = {}
        self._is_of_library: dict[type, bool] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is asked meanwhile."""
        kept = [(module, name, getattr(module, name)) for module, name in (*_OPENS, *_LOOKS)]
        # A debugger, or what measures coverage, is left alone.
        is_free = sys.getprofile() is None
        try:
            for module, name, original in kept:
                look = functools.partial(self._look, original, (module, name) in _OPENS)
                setattr(module, name, look)
            if is_free:
                sys.setprofile(self._called)
            yield
        finally:
            if is_free:
                sys.setprofile(None)
            for module, name, original in kept:
                setattr(module, name, original)

    def changing(self, later: Outside) -> list[str]:
        """Return what is there in a later run as well, and may be another then, with the lines that ask for it."""
        files = [
            f"the file {path} in {place}"
            for path, (found, place) in later.files.items()
            if path in self.files and found != self.files[path][0]
        ]
        objects = [
            f"{type(one).__name__}.{method} in {place}"
            for key, (one, method, place) in later.objects.items()
            if key in self.objects and self.objects[key][0] is one
        ]
        return [*files, *objects]

    def _look(self, original: Callable[..., Any], opens: bool, *args: Any, **kwargs: Any) -> Any:
        path = next(iter((*args, *kwargs.values())), None)
        mode = str(args[1] if len(args) > 1 else kwargs.get("mode", "r"))
        if isinstance(path, (str, bytes, os.PathLike)) and (not opens or "r" in mode or "+" in mode):
            key, place = os.path.abspath(os.fsdecode(path)), explaining.current_place()
            if place is not None and key not in self.files:
                self.files[key] = _like(key), place
        return original(*args, **kwargs)

    def _called(self, frame: types.FrameType, event: str, function: Any) -> None:
        """See calls of methods of objects in C, by lines of the user's."""
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, (type, types.ModuleType)) or id(owner) in self.objects:
            return
        kind = type(owner)
        if kind not in self._is_of_library:
            self._is_of_library[kind] = _is_of_library(kind)
        if not self._is_of_library[kind]:
            return
        code = frame.f_code
        if code not in self._is_users:
            self._is_users[code] = explaining.is_users(code.co_filename)
        if self._is_users[code]:
            self.objects[id(owner)] = owner, function.__name__, explaining.text_of(code, frame.f_lineno)


def _is_of_library(kind: type) -> bool:
    """Whether objects of a class, or of what it is derived from, are kept in C by a library that is not known."""
    others = [one for one in kind.__mro__ if one is not object and not _is_pythons(one)]
    return bool(others) and all(one.__module__.partition(".")[0] not in _KNOWN for one in others)


def _is_pythons(kind: type) -> bool:
    names = vars(kind)
    return (
        "__dict__" in names
        or "__slots__" in names
        or any(isinstance(one, types.FunctionType) for one in names.values())
    )


def _like(path: str) -> Any:
    """Return what a file or folder is like; None: it is not there."""
    try:
        # As descriptors, so that nothing is noted.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        is_small = stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES
        return found.st_ino, found.st_size, found.st_mtime_ns, os.read(handle, _MOST_BYTES) if is_small else None
    finally:
        os.close(handle)
