"""Arrays that memory has no room for, in temporary files until they are read."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SMALLEST = 2**20
"""Arrays of fewer bytes stay in memory."""
_LEAST_ROOM = 2**27
"""So many bytes a run may always keep in memory: the libraries that it needs take several times that."""
# Large files belong there, by the Filesystem Hierarchy Standard; /tmp may be memory.
_FOLDER = "/var/tmp"

_current: ContextVar[Shelf | None] = ContextVar("shelf", default=None)


class Spilled:
    """An array in a file.

    Args:
        path: the file, which is removed with the object.
        array: what is in it.
    """

    def __init__(self, path: Path, array: npt.NDArray[Any]) -> None:
        self._path, self._dtype, self._shape = path, array.dtype, array.shape

    def read(self) -> npt.NDArray[Any]:
        """Return the array."""
        return np.fromfile(self._path, self._dtype).reshape(self._shape)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class Shelf:
    """A folder of spilled arrays, and how much of what runs keep for later may stay in memory."""

    def __init__(self) -> None:
        self.room: int | None = None
        """In bytes; None: all."""
        self._folder: Path | None = None
        self._numbers = itertools.count()

    def limit(self, room: int) -> None:
        """Let runs keep so many bytes in memory, or the least that there is any use in."""
        self.room = max(room, _LEAST_ROOM)

    def spill(self, array: npt.NDArray[Any]) -> Spilled | None:
        """Write a C-contiguous array to a file; None if that is not possible: then all others stay in memory, too."""
        path: Path | None = None
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="gradfuse-", dir=_folder()))
            path = self._folder / str(next(self._numbers))
            self._write(path, array)
            return Spilled(path, array)
        except OSError:
            # The disk is full, or nothing may be written anywhere.
            if path is not None:
                path.unlink(missing_ok=True)
            self.room = None
            return None

    @staticmethod
    def _write(path: Path, array: npt.NDArray[Any]) -> None:
        if array.nbytes > shutil.disk_usage(path.parent).free // 2:
            # Others need some of it.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        array.tofile(path)

    def close(self) -> None:
        """Remove the folder; its arrays are lost."""
        if self._folder is not None:
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
            self._folder = None


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


def _folder() -> str | None:
    """Return where temporary files go; None: where Python puts them."""
    return None if "TMPDIR" in os.environ or not os.access(_FOLDER, os.W_OK) else _FOLDER
