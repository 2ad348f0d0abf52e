"""The compiled libraries of kernels: where they are, and how they get into an onnxruntime session or a C program."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

from gradfuse.errors import ArgumentError, GradfuseError

_FILE_NAMES = {"win32": "{}.dll", "darwin": "lib{}.dylib"}
LIBRARY_NAME, ACLNN_LIBRARY_NAME = (
    _FILE_NAMES.get(sys.platform, "lib{}.so").format(name) for name in ("gradfuse", "gradfuse_aclnn")
)
EP_NAME = "GradfuseCudaExecutionProvider"


def _find(folder: str, name: str) -> str | None:
    import gradfuse

    # An editable install has two folders in __path__: the sources, and the place CMake installs to.
    for root in gradfuse.__path__:
        path = os.path.abspath(os.path.join(root, folder, name))
        if os.path.exists(path):
            return path
    return None


def _get(folder: str, name: str) -> str:
    path = _find(folder, name)
    if path is None:
        import gradfuse

        searched = ", ".join(os.path.join(root, folder) for root in gradfuse.__path__)
        raise GradfuseError(f"{name} is not in {searched}; expected an installation that was built with CMake")
    return path


def find_library() -> str | None:
    """Return the absolute path of the compiled library, or None where there is none."""
    return _find("lib", LIBRARY_NAME)


def get_library_path() -> str:
    """Return the absolute path of the library that holds the onnxruntime custom operators.

    Raises:
        GradfuseError: the installation holds no compiled library.
    """
    return _get("lib", LIBRARY_NAME)


def get_aclnn_library_path() -> str:
    """Return the absolute path of the library of the C API; beside it lie `pkgconfig` and `cmake`.

    Raises:
        GradfuseError: the installation holds no compiled library.
    """
    return _get("lib", ACLNN_LIBRARY_NAME)


def get_include() -> str:
    """Return the absolute path of the folder with the headers of the C API, `acl/` and `aclnnop/`.

    Raises:
        GradfuseError: the installation holds no headers.
    """
    return _get("", "include")


def get_ep_name() -> str:
    """Return the name of the library's execution provider, which onnxruntime's devices of it have as `ep_name`.

    `onnxruntime.register_execution_provider_library(get_ep_name(), get_library_path())` makes onnxruntime 1.24 or newer
    list them. There are none where there is no GPU, or where the library was built without CUDA kernels.
    """
    return EP_NAME


def get_ep_names() -> list[str]:
    """Return the names of all execution providers of the library: only that of `get_ep_name`."""
    return [EP_NAME]


def register(session_options: Any) -> None:
    """Register gradfuse's operators (domain aclnn) in an onnxruntime session.

    A session to which a device of gradfuse's execution provider was added has them already.

    Args:
        session_options: an `onnxruntime.SessionOptions`, of any onnxruntime from 1.18 on.

    Raises:
        ArgumentError: `session_options` is something else.
        GradfuseError: there is no compiled library, or onnxruntime refuses it.
    """
    if not hasattr(session_options, "register_custom_ops_library"):
        raise ArgumentError(
            f"register: session_options is {type(session_options).__name__}; expected onnxruntime.SessionOptions"
        )
    path = get_library_path()
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:
        # onnxruntime's own exception classes share no public base.
        raise GradfuseError(f"register: onnxruntime refuses {path}: {' '.join(str(error).split())}") from error


def register_with_memory_pool(session_options: Any) -> None:
    """Register gradfuse's operators in a session that takes memory for large values from the library's pool.

    Args and errors are those of `register`.
    """
    session_options.add_session_config_entry("gradfuse.memory_pool", "1")
    register(session_options)


def trim_memory_pool() -> None:
    """Return to the system what the library's pool holds for later values."""
    path = find_library()
    # Nothing is in the pool of a library that this process has not loaded.
    if path is None or not hasattr(os, "RTLD_NOLOAD"):
        return
    with contextlib.suppress(OSError, AttributeError):
        unused = ctypes.c_uint64()
        ctypes.CDLL(path, os.RTLD_NOLOAD).gradfuse_memory_pool(1, ctypes.byref(unused), ctypes.byref(unused))
