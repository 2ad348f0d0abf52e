"""The memory of this process: when the interpreter looks for garbage, and what the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the search for cyclic garbage: what runs under it makes millions of objects that stay until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            # What came about meanwhile is the youngest; it may hold the weights of a model.
            gc.collect(0)


def give_back() -> None:
    """Give freed memory back to the system, where glibc keeps it: arrays of up to 32 MiB stay in its heap."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
