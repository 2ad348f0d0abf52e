"""What the C library keeps of the memory of this process."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Give freed memory back to the system, where glibc keeps it: arrays of up to 32 MiB stay in its heap."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
