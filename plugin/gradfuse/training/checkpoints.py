"""Checkpoints: safetensors files of what a session carries from step to step, and the thread that writes them."""

from __future__ import annotations

import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gradfuse.errors import ArgumentError, ModelError, one_line
from gradfuse.models import files, tensor_files
from gradfuse.models.arrays import Arrays
from gradfuse.training.arguments import in_short

_METADATA_KEY = "gradfuse.checkpoint"
_STEP_COUNT, _EXTRA = "step_count", "extra"


def text_of(step_count: int | None, extra: Mapping[str, Any], where: str) -> str:
    """Return the metadata of a checkpoint, as JSON.

    Args:
        step_count: the steps done; None: the file is of the module alone.
        extra: what the user keeps.
        where: what messages name first.

    Raises:
        ArgumentError: `extra` does not survive a round trip through JSON.
    """
    if not isinstance(extra, Mapping):
        raise ArgumentError(f"{where}: extra is {in_short(extra)}; expected a dictionary")
    content = {_EXTRA: dict(extra)} | ({} if step_count is None else {_STEP_COUNT: step_count})
    try:
        text = json.dumps(content)
        _require_text_keys(extra, where)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        wanted = "what JSON can hold: numbers, strings, booleans, None, lists and dictionaries"
        raise ArgumentError(f"{where}: extra cannot be written: {one_line(error)}; expected {wanted}") from error


def write(path: str | os.PathLike[str], tensors: Arrays, text: str, inputs: Iterable[str], where: str) -> None:
    """Write a checkpoint whole or not at all, and wait until the disk has it.

    Args:
        path: the file.
        tensors: the arrays by name.
        text: what `text_of` returned.
        inputs: files that must stay as they are.
        where: what messages name first.

    Raises:
        ModelError: the file cannot be written.
        GradfuseError: safetensors is not installed.
    """
    save_file = tensor_files.safetensors_numpy(where).save_file
    # Contiguous, because safetensors writes an array's memory as it is; and marked as torch's names and layouts.
    metadata = {"format": "pt", _METADATA_KEY: text}

    def make(written: str) -> None:
        save_file({name: np.asarray(array, order="C") for name, array in tensors.items()}, written, metadata)

    files.write_file(path, make, inputs, durable=True)


def read(path: str | os.PathLike[str], where: str) -> tuple[Arrays, int, dict[str, Any]]:
    """Return the tensors of a safetensors file, the steps done, and what the user keeps: 0 and {} if it has neither.

    Raises:
        ModelError: the file cannot be read, or what it holds beside tensors cannot be understood.
        GradfuseError: safetensors is not installed.
    """
    tensors, metadata = tensor_files.read(path, where, "one that save wrote")
    try:
        content = json.loads(metadata.get(_METADATA_KEY, "{}"))
        step_count, extra = content.get(_STEP_COUNT, 0), content.get(_EXTRA, {})
        if type(step_count) is not int or step_count < 0 or not isinstance(extra, dict):
            raise ValueError(f"{_STEP_COUNT} is {in_short(step_count)}, {_EXTRA} is {in_short(extra)}")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{os.fspath(path)}: its {_METADATA_KEY} cannot be understood: {one_line(error)}") from error
    return tensors, step_count, extra


class BackgroundWork:
    """Does one piece of work at a time in a thread, and keeps its error for the next caller.

    The interpreter does not end before the thread does. If the owner is gone before an error was raised, it becomes a
    warning.

    Args:
        owner: the object that asks for errors.
    """

    def __init__(self, owner: object) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        # The collector may run the finalizer in a thread that holds the lock.
        self._lock = threading.RLock()
        weakref.finalize(owner, self._abandon)

    def start(self, work: Callable[[], None]) -> None:
        """Begin some work, after the previous work has ended; one thread at a time may call this."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="gradfuse checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the work, and raise its error, once; any thread may, also while another begins some."""
        # Nothing is written here: another thread may have begun new work by the end of this.
        thread = self._thread
        # A signal's handler may have raised before the thread was started.
        if thread is not None and thread.ident is not None:
            thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of work that has failed, once."""
        if self._error is not None:
            with self._lock:
                error, self._error = self._error, None
            # Another thread may have raised it.
            if error is not None:
                raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._lock:
                self._error = error
                self._warn_if_lost()

    def _abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            self._warn_if_lost()

    def _warn_if_lost(self) -> None:
        if self._is_abandoned and self._error is not None:
            warnings.warn(f"no checkpoint was written: {self._error}", RuntimeWarning, stacklevel=2)


def _require_text_keys(value: Any, where: str) -> None:
    """Refuse dictionaries whose keys JSON would turn into text."""
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        _require_text_keys(inner, where)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentError(f"{where}: extra has the key {in_short(key)}; expected text")
