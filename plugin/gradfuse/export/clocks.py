"""The time, as code asks for it: it can be told another one. This module imports nothing but the standard library."""

from __future__ import annotations

import contextlib
import datetime
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ASKED = frozenset(
    """
    time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time
    thread_time_ns localtime gmtime ctime strftime now utcnow today
    """.split()
)
"""Functions that tell the time."""

Place = tuple[dict[str, Any], str]
"""A namespace, and a name in it."""


def is_clock(value: Any) -> bool:
    """Whether a value tells the time: a function of `time`, a class of `datetime`, or one of these modules."""
    if value is time or value is datetime or (isinstance(value, type) and issubclass(value, datetime.date)):
        return True
    return getattr(value, "__self__", None) is time and value.__name__ in ASKED


@contextlib.contextmanager
def later(by: datetime.timedelta, places: Sequence[Place], note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let it be later for who asks by the modules `time` and `datetime`, or by what other places have of them.

    Args:
        by: by how much.
        places: these places.
        note: called whenever somebody asks.
    """
    own = [(vars(module), name) for module, names in _OF_MODULES.items() for name in names if hasattr(module, name)]
    kept = [(namespace, name, namespace[name]) for namespace, name in (*own, *places)]
    try:
        for namespace, name, value in kept:
            namespace[name] = _moved(value, by, note)
        yield
    finally:
        for namespace, name, value in kept:
            namespace[name] = value


_OF_MODULES: dict[Any, tuple[str, ...]] = {
    time: tuple(ASKED - {"now", "utcnow", "today"}),
    datetime: ("datetime", "date"),
}
_NOW, _LOCAL = time.time, time.localtime


def _moved(value: Any, by: datetime.timedelta, note: Callable[[], None]) -> Any:
    """Return what stands in the place of a function or a class."""
    if isinstance(value, type):
        return _moved_class(value, by, note)
    if isinstance(value, types.ModuleType):
        return value
    name, seconds = value.__name__, by.total_seconds()

    def ask(*given: Any) -> Any:
        note()
        if name == "strftime":
            return value(*given) if len(given) > 1 else value(*given, _LOCAL(_NOW() + seconds))
        if name in ("localtime", "gmtime", "ctime"):
            return value(*given) if given and given[0] is not None else value(_NOW() + seconds)
        return value() + (int(seconds) * 10**9 if name.endswith("_ns") else seconds)

    return ask


def _moved_class(value: Any, by: datetime.timedelta, note: Callable[[], None]) -> Any:
    def asked(name: str) -> Any:
        original: Callable[..., Any] = getattr(value, name)

        def ask(cls: Any, *args: Any, **kwargs: Any) -> Any:
            note()
            return original(*args, **kwargs) + by

        return classmethod(ask)

    kind = type("Kind", (type(value),), {"__instancecheck__": lambda cls, one: isinstance(one, value)})
    names = [name for name in ("now", "utcnow", "today") if hasattr(value, name)]
    return kind(value.__name__, (value,), {name: asked(name) for name in names})
