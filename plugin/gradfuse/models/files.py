"""Writes files atomically, and never replaces what belongs to something else.

A file is written in a temporary folder beside its place, and then renamed. The folder is locked while its process
lives: the next write to the same path removes what a killed process has left, and nothing of a live one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator

from gradfuse.errors import ModelError, one_line

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, and nothing of dead processes cleared.
    fcntl = None  # type: ignore[assignment]

DATA = ".data"
"""The suffix of files with external data."""
_PREFIX = ".gradfuse-"
_NEW, _OLD, _MOVED = "new", "old", "moved"
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def require_regular(path: str | os.PathLike[str], wanted: str) -> None:
    """Refuse to write to a path that holds anything but a regular file; links are followed.

    Args:
        path: where to write.
        wanted: what is to be written, for the message.

    Raises:
        ModelError: there is a folder, a named pipe, a device or a socket.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                raise
            reason = getattr(error, "strerror", None) or str(error)
            raise ModelError(f"{os.fspath(path)}: cannot be written: {reason}") from error
        for is_kind, text in _KINDS:
            if is_kind(mode):
                raise ModelError(f"{os.fspath(path)}: is {text}; expected a path for {wanted}")


def same(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Return whether two paths name one file, by any links, whether it exists yet or not."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    with contextlib.suppress(OSError):
        return os.path.samefile(first, second)
    return False


def require_other(path: str | os.PathLike[str], inputs: Iterable[str], wanted: str) -> None:
    """Refuse a path to write to that is one of the files that are read.

    Raises:
        ModelError: it is one of them, by whatever links.
    """
    for file in inputs:
        if same(path, file):
            raise ModelError(
                f"{os.fspath(path)}: is {file}, which the input is read from; expected a path for {wanted}"
            )


def write(
    path: str | os.PathLike[str],
    make: Callable[[str], None],
    *,
    beside: Collection[str] = (),
    durable: bool = False,
) -> None:
    """Write a file, and those that belong to it, whole or not at all; if `path` is a link, write its target.

    Args:
        path: the file to write. What is there before, its mode excepted, is replaced.
        make: writes the file to the path it is given, and beside it those files named in `beside` that it needs.
        beside: the names of the other files that `make` may write, which get the mode of the first.
        durable: return only when the data is on the disk.

    Raises:
        OSError: there is no such folder, it is full, or it may not be written to. What was there before is there still.
    """
    folder, name = os.path.split(os.path.realpath(path))
    place = _Place(folder, name, beside)
    with temporary_folder(folder, _label(name), place.roll_back) as temporary:
        new = os.path.join(temporary, _NEW)
        os.mkdir(new)
        make(os.path.join(new, name))
        if durable:
            for written in os.scandir(new):
                _sync(written.path)
        place.fill(temporary)
        if durable:
            _sync(folder)


def write_file(
    path: str | os.PathLike[str],
    content: bytes | Callable[[str], None],
    inputs: Iterable[str] = (),
    *,
    durable: bool = False,
) -> None:
    """Write a file whole or not at all.

    Args:
        path: the file to write; where it is a link, its target.
        content: what is in it, or a function that writes it to the path it is given.
        inputs: files that must stay as they are.
        durable: return only when the disk has the file, so that a power cut leaves the old file or the new one.

    Raises:
        ModelError: the file cannot be written, or would replace a folder, a pipe, a device or an input.
    """
    path = os.fspath(path)
    require_free(path, inputs)

    def make(written: str) -> None:
        if callable(content):
            content(written)
            return
        with open(written, "wb") as file:
            file.write(content)

    try:
        write(path, make, durable=durable)
    except ModelError:
        raise
    except Exception as error:
        # Errors of the disk and of what writes the content have no common base. All mean that nothing was written.
        raise ModelError(f"{path}: cannot write the file: {one_line(error)}") from error


def require_free(path: str | os.PathLike[str], inputs: Iterable[str] = ()) -> None:
    """Refuse a path that `write_file` would not write to.

    Raises:
        ModelError: it is a folder, a pipe, a device or an input.
    """
    require_regular(path, "a file")
    require_other(path, inputs, "a file")


def identity(path: str) -> str:
    """Return what differs once another file is at a path, or the file there has been written to.

    Raises:
        OSError: there is no file.
    """
    status = os.stat(path)
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def data_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the data file of a model at `path`."""
    return os.path.realpath(path) + DATA


@contextlib.contextmanager
def temporary_folder(parent: str, label: str, recover: Callable[[str], None] = lambda folder: None) -> Iterator[str]:
    """A folder for the time of the context; those of the same label that dead processes left are removed before.

    Args:
        parent: the folder to make it in.
        label: what tells its kind from others'.
        recover: what to do with the folder of a dead process before it is removed.
    """
    prefix = f"{_PREFIX}{label}-"
    _clear(parent, prefix, recover)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            lock = _lock(folder)
            break
        except FileNotFoundError:
            # Another process took it for one of the dead before it was locked.
            continue
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


class _Place:
    """Where a file and those beside it belong.

    The temporary folder has what is new in one folder, and what it replaces beside the file in another. The file itself
    comes last, so that as long as it is in the temporary folder, all can be undone.
    """

    def __init__(self, folder: str, name: str, beside: Collection[str]) -> None:
        self._folder, self._name, self._beside = folder, name, beside

    def fill(self, temporary: str) -> None:
        """Rename the new files to where they belong; all or none."""
        new, target = os.path.join(temporary, _NEW, self._name), os.path.join(self._folder, self._name)
        if os.path.exists(target):
            shutil.copymode(target, new)
        try:
            for name in self._beside:
                if os.path.exists(os.path.join(temporary, _NEW, name)):
                    shutil.copymode(new, os.path.join(temporary, _NEW, name))
                    self._move(temporary, name)
            os.replace(new, target)
        except BaseException:
            self.roll_back(temporary)
            raise

    def _move(self, temporary: str, name: str) -> None:
        new, old, moved = (os.path.join(temporary, kind, name) for kind in (_NEW, _OLD, _MOVED))
        for path in (old, moved):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(moved, "w", encoding="ascii") as file:
            file.write(identity(new))
        target = os.path.join(self._folder, name)
        if os.path.exists(target):
            os.rename(target, old)
        os.rename(new, target)

    def roll_back(self, temporary: str) -> None:
        """Undo the renaming of the other files where the file that they belong to has not been renamed."""
        moved = os.path.join(temporary, _MOVED)
        if not (os.path.exists(os.path.join(temporary, _NEW, self._name)) and os.path.exists(moved)):
            return
        for name in os.listdir(moved):
            target, old = os.path.join(self._folder, name), os.path.join(temporary, _OLD, name)
            with open(os.path.join(moved, name), encoding="ascii") as file:
                ours = file.read()
            # A file that another process has put there since belongs to that process.
            if not os.path.exists(target) or identity(target) == ours:
                if os.path.exists(old):
                    os.replace(old, target)
                elif os.path.exists(target):
                    os.remove(target)


def _sync(path: str) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    if os.path.isdir(path) and os.name == "nt":  # Windows opens no folders.
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _label(name: str) -> str:
    """A label that identifies the temporary folders of one name, and is short even if the name is long."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _lock(folder: str) -> int | None:
    """Lock a folder until the descriptor that is returned is closed; None where the file system has no locks.

    Raises:
        FileNotFoundError: another process has locked it, or has removed it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from error
        return None
    return descriptor


def _clear(parent: str, prefix: str, recover: Callable[[str], None]) -> None:
    """Remove the temporary folders of processes that have died."""
    with contextlib.suppress(OSError):
        with os.scandir(parent) as entries:
            left = [entry for entry in entries if entry.name.startswith(prefix)]
        for entry in left:
            with contextlib.suppress(OSError):
                folder = entry.path
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                lock = _lock(folder)
                if lock is None:
                    continue
                try:
                    recover(folder)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
