"""Files of named arrays in the format of safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradfuse.errors import GradfuseError, ModelError, one_line
from gradfuse.models.arrays import Arrays

RESERVED = "__metadata__"
"""What the format has in the place of a name."""


def require_names(names: Iterable[str], who: str) -> None:
    """Refuse names with which a file could be written, and not be read.

    Raises:
        ModelError: a name is `RESERVED`; `who` begins the message.
    """
    if RESERVED in names:
        raise ModelError(
            f"{who}: a tensor has the name {RESERVED!r}, which safetensors files reserve; expected another"
        )


def safetensors_numpy(who: str) -> Any:
    """Return the module `safetensors.numpy`.

    Raises:
        GradfuseError: safetensors is not installed; `who` begins the message.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise GradfuseError(f"{who}: safetensors is not installed; expected what gradfuse[train] installs") from error
    return safetensors.numpy


def content(tensors: Mapping[str, Any], who: str) -> bytes:
    """Return the content of a file of these arrays, marked as torch's names and layouts.

    Raises:
        ModelError: a name is `RESERVED`.
        GradfuseError: safetensors is not installed; `who` begins the message.
    """
    require_names(tensors, who)
    # Contiguous, as safetensors takes an array's memory as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    written: bytes = safetensors_numpy(who).save(arrays, metadata={"format": "pt"})
    return written


def read(path: str | os.PathLike[str], who: str, wanted: str) -> tuple[Arrays, dict[str, str]]:
    """Read all arrays of a file, and its metadata.

    Args:
        path: the file.
        who: what begins the message where safetensors is not installed.
        wanted: what the file should be, for the message.

    Raises:
        ModelError: there is no such file, or it cannot be read.
        GradfuseError: safetensors is not installed.
    """
    safetensors_numpy(who)
    import safetensors

    if os.path.exists(path) and not os.path.isfile(path):
        # Reading a pipe would wait for a writer.
        raise ModelError(f"{os.fspath(path)}: is no file; expected {wanted}")
    try:
        # Opened once: another process may put a newer file at the path meanwhile.
        with safetensors.safe_open(os.fsdecode(path), framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except Exception as error:
        # safetensors' own exception shares no base with those of files, and types that numpy lacks are KeyErrors.
        raise ModelError(f"{os.fspath(path)}: cannot read the file: {one_line(error)}") from error
