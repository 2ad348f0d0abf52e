"""The memory of this process: when the interpreter looks for garbage, and what the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

_MMAP_THRESHOLD = -3
"""glibc's number of the size from which on arrays are mapped."""
_MAPPED, _MAPPED_LATER = 2**21, 2**25
"""That size in bytes: where memory is short, and what glibc itself ends at."""


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


@contextlib.contextmanager
def arrays_mapped() -> Iterator[None]:
    """Let each large array have pages of its own, which are the system's again once it is freed.

    glibc has them in its heap up to 32 MiB, once one of that size was freed: there they leave gaps, which may take a
    fifth of the memory of a model that just fits.
    """
    mallopt = _of_c("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _MAPPED_LATER)
        give_back()


def give_back() -> None:
    """Give freed memory back to the system, where glibc keeps it: arrays of up to 32 MiB stay in its heap."""
    trim = _of_c("malloc_trim")
    if trim is not None:
        trim(0)


def _of_c(name: str) -> Any:
    """Return a function of glibc; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
