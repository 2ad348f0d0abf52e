"""Arrays that memory has no room for, in temporary files until they are read."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

SMALLEST = 2**20
"""Arrays of fewer bytes stay in memory."""
_LEAST_ROOM = 2**27
"""How many bytes a run may always keep in memory: its libraries take several times that."""
# Large files belong there, by the Filesystem Hierarchy Standard; /tmp may be memory.
_FOLDER = "/var/tmp"

_current: ContextVar[Shelf | None] = ContextVar("shelf", default=None)


class Spilled:
    """An array in the file of a shelf; its place there becomes free when the object is garbage.

    Args:
        shelf: the shelf.
        place: where in its file.
        array: what is there.
    """

    def __init__(self, shelf: Shelf, place: int, array: npt.NDArray[Any]) -> None:
        self._shelf, self._place = shelf, place
        self._dtype, self._shape, self._size = array.dtype, array.shape, array.nbytes

    def read(self) -> npt.NDArray[Any]:
        """Return the array."""
        return self._shelf.read(self._place, self._dtype, self._size).reshape(self._shape)

    def __del__(self) -> None:
        self._shelf.free(self._place, self._size)


class Shelf:
    """A file of spilled arrays, and how much data runs may keep in memory for later.

    The file has no name if the system allows that, and vanishes with the process, however that ends.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        """In bytes; None: all."""
        self._file: Any = None
        self._end = 0
        self._free: dict[int, list[int]] = {}
        # The backward pass of PyTorch may have threads of its own.
        self._lock = threading.Lock()

    def limit(self, room: int) -> None:
        """Let runs keep `room` bytes in memory, or the least useful amount."""
        self.room = max(room, _LEAST_ROOM)

    def spill(self, array: npt.NDArray[Any]) -> Spilled | None:
        """Write a C-contiguous array to the file; None if that is not possible: then all others stay in memory, too."""
        with self._lock:
            free = self._free.get(array.nbytes)
            place = free.pop() if free else self._end
            try:
                self._write(place, array)
            except OSError:
                # The disk is full, or nothing may be written anywhere.
                self.room = None
                return None
            self._end = max(self._end, place + array.nbytes)
        return Spilled(self, place, array)

    def read(self, place: int, dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
        """Return what was written in a place, in one dimension."""
        with self._lock:
            self._file.seek(place)
            return np.fromfile(self._file, dtype, size // np.dtype(dtype).itemsize)

    def free(self, place: int, size: int) -> None:
        """Let an array of the same size reuse a place: most layers are alike."""
        self._free.setdefault(size, []).append(place)

    def close(self) -> None:
        """Close the file; its arrays are lost."""
        if self._file is not None:
            self._file.close()

    def _write(self, place: int, array: npt.NDArray[Any]) -> None:
        folder = _folder()
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, prefix="gradfuse-", dir=folder)
        if place == self._end and array.nbytes > shutil.disk_usage(folder).free // 2:
            # Others need some of it.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file.seek(place)
        array.tofile(self._file)


def current() -> Shelf | None:
    """Return where the runs of this export may put arrays; None where all stays in memory."""
    shelf = _current.get()
    return shelf if shelf is not None and shelf.room is not None else None


@contextlib.contextmanager
def shelf() -> Iterator[Shelf]:
    """Make a shelf the current one."""
    made = Shelf()
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)
        made.close()


@contextlib.contextmanager
def everything_in_memory() -> Iterator[None]:
    """Leave the current shelf alone."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def _folder() -> str:
    return tempfile.gettempdir() if "TMPDIR" in os.environ or not os.access(_FOLDER, os.W_OK) else _FOLDER
