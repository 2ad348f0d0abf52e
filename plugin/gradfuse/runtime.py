"""onnxruntime as gradfuse uses it: the module, its exceptions, and sessions of messages.

This module needs neither onnx nor numpy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gradfuse.errors import GradfuseError, ModelError, one_line

SILENT = 4
"""The log level of sessions whose errors are raised: onnxruntime would log them as well."""
_FOLDER = "session.model_external_initializers_file_folder_path"
"""onnxruntime's setting for the folder of the files that a message refers to."""


def import_onnxruntime() -> Any:
    """Return the module.

    Raises:
        GradfuseError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise GradfuseError("running a model needs onnxruntime: pip install onnxruntime") from error
    return onnxruntime


def is_at_least(major: int, minor: int) -> bool:
    """Whether onnxruntime is of a version or newer.

    Raises:
        GradfuseError: onnxruntime is not installed.
    """
    version: str = import_onnxruntime().__version__
    return tuple(map(int, version.split(".")[:2])) >= (major, minor)


def session_options(*, arena: bool = True) -> Any:
    """Return `onnxruntime.SessionOptions` that log nothing, let runs take little memory and round no inputs.

    Args:
        arena: whether memory is kept for the next run.

    Raises:
        GradfuseError: onnxruntime is not installed.
    """
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = SILENT
    # Products with weights behind DequantizeLinear would round what they multiply to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # The pattern is memory of its own beside what the first run took, and later runs are no faster for it.
    options.enable_mem_pattern = False
    if arena:
        # A value that takes over the memory of another of its size holds it from the first value on, unused between.
        options.enable_mem_reuse = False
    else:
        options.enable_cpu_mem_arena = False
    return options


def is_of_onnxruntime(error: Exception) -> bool:
    """Whether onnxruntime has raised an exception, and not a signal's handler while one of its functions was called."""
    if type(error).__module__.startswith("onnxruntime."):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return where.startswith("onnxruntime.") and isinstance(error, (RuntimeError, MemoryError, TypeError, ValueError))


def reason(error: Exception) -> str:
    """Return the text of an exception of onnxruntime in one line."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", one_line(error))


def session_of(content: bytes | str, source: str, options: Any, providers: Sequence[Any]) -> Any:
    """Return an onnxruntime session of a model's message or path.

    Args:
        content: the message, or the path.
        source: what to call the model in messages.
        options: the `onnxruntime.SessionOptions`.
        providers: execution providers, as for `onnxruntime.InferenceSession`.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """
    try:
        # Without the fallback, which silently uses other providers than those that were asked for.
        return import_onnxruntime().InferenceSession(content, options, providers=providers, enable_fallback=0)
    except Exception as error:
        # onnxruntime's exception classes share no public base.
        raise ModelError(f"{source}: onnxruntime cannot load the model: {reason(error)}") from error


def find_files_in(folder: str, options: Any) -> None:
    """Let a message that a session is made of refer to files in a folder."""
    try:
        known = options.get_session_config_entry(_FOLDER)
    except Exception:
        known = ""
    if known != folder:
        # It says so where an entry is set again. Models that refer to no file do not ask for the folder.
        options.add_session_config_entry(_FOLDER, folder)
