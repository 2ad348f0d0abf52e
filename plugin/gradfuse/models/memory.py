"""The memory of this process: garbage collection, and what the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradfuse.library import trim_memory_pool

_MMAP_THRESHOLD = -3
"""glibc's number of the size from which on arrays are mapped."""
_MAPPED, _MAPPED_LATER = 2**21, 2**25
"""That size in bytes: where memory is short, and what glibc itself ends at."""
SMALL = 2**26
"""Of what takes fewer bytes, weights or activations, a few dozen copies may live until an export ends: the search for
cyclic garbage takes a fifth of it."""


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses garbage collection for code that creates millions of objects that live until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            # Objects created meanwhile are in the youngest generation; they may hold the weights of a model.
            gc.collect(0)


@contextlib.contextmanager
def arrays_mapped() -> Iterator[None]:
    """Give each large array pages of its own, which go back to the system when it is freed.

    glibc has them in its heap up to 32 MiB, once one of that size was freed: there they leave gaps, which may take a
    fifth of the memory of a model that just fits, or twice a session's weights if a model was freed before it is made.
    What the environment says of that size stands.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc.mmap_threshold" in tunables
    mallopt = None if is_set else _of_c("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _MAPPED_LATER)
        give_back()


@contextlib.contextmanager
def sparing(large: bool) -> Iterator[Callable[[], None]]:
    """Save memory where there is much of it, and time elsewhere, where the search for cyclic garbage is paused.

    Args:
        large: whether there is much of it. Else the yielded function says later that there is.
    """
    with contextlib.ExitStack() as paused, contextlib.ExitStack() as kept:

        def save_memory() -> None:
            paused.close()
            kept.enter_context(older_objects_kept())
            kept.enter_context(arrays_mapped())

        if large:
            save_memory()
        else:
            paused.enter_context(collection_paused())
        yield save_memory


@contextlib.contextmanager
def older_objects_kept() -> Iterator[None]:
    """Let the garbage collector look at what is made from now on alone: libraries make a million objects."""
    if gc.get_freeze_count():
        # Somebody else has done so, and it cannot be undone in part.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back() -> None:
    """Give freed memory back to the system, where glibc keeps it, arrays of up to 32 MiB, and where the pool does."""
    trim_memory_pool()
    trim = _of_c("malloc_trim")
    if trim is not None:
        trim(0)


def resident() -> int | None:
    """Return how many bytes of memory this process has; None where the system does not say."""
    return _stated("/proc/self/status", "VmRSS")


def most_resident() -> int | None:
    """Return the peak number of bytes of memory of this process."""
    return _stated("/proc/self/status", "VmHWM")


def available() -> int | None:
    """Return how many bytes of memory this process may still get; None where the system does not say."""
    free = _stated("/proc/meminfo", "MemAvailable")
    swap = _stated("/proc/meminfo", "SwapFree")
    rest = None if free is None else free + (swap or 0)
    # Of a container, whose caches of files go where memory is needed.
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stated = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= sum(int(number) for key, number in stated if key in ("inactive_file", "active_file"))
        rest = most - used if rest is None else min(rest, most - used)
    return rest


def _stated(path: str, key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def _of_c(name: str) -> Any:
    """Return a function of glibc; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
