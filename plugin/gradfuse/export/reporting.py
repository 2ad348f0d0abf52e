"""What the exporter says: its refusals, each in one line. What its libraries say about themselves is suppressed."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from gradfuse.errors import ExportError

WHO = "export_training_step"


def refusal(text: str) -> ExportError:
    """Return the error to raise, which names `export_training_step`."""
    return ExportError(f"{WHO}: {text}")


def kind(value: object) -> str:
    """Return the type of a value, with its shape if it has one, for messages."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of torch and onnxscript, and the graphs that torch.export prints."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
