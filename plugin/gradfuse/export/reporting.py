"""Messages of the exporter: its refusals, each in one line. Output of its libraries is suppressed."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import io
import logging
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradfuse.errors import ExportError, GradfuseError, one_line
from gradfuse.models.memory import give_back

if TYPE_CHECKING:
    from gradfuse.passes.progress import Progress

WHO = "export_training_step"


def refusal(text: str) -> ExportError:
    """Return the error to raise, which names `export_training_step`."""
    return ExportError(f"{WHO}: {text}")


def kind(value: object) -> str:
    """Return the type of a value, with its shape if it has one, for messages."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


_PARTS = (
    "running the step in PyTorch",
    "tracing",
    "translating",
    "running the step in float64",
    "exporting the evaluation model",
    "comparing the exported model with PyTorch",
    "fusing",
    "comparing the fused model with PyTorch",
    "comparing the update with PyTorch",
    "running the model in float64",
)
"""The parts of an export, in order; not every export has all of them."""


class Parts:
    """Tells which part of an export is being done.

    Args:
        progress: called with the part, how many are done, and how many there are; or None.
        large: whether what a part leaves behind is worth looking for.
    """

    def __init__(self, progress: Progress | None, large: bool) -> None:
        self._progress = progress
        self._large = large
        self._part: str | None = None
        self._told = 0.0

    @classmethod
    @contextlib.contextmanager
    def shown(cls, progress: Progress | bool, large: bool) -> Iterator[Parts]:
        """Tell a function of the user, or show a bar if `progress` is True; at the end, all parts are done."""
        with contextlib.ExitStack() as stack:
            if progress is True:
                from gradfuse.terminal import busy

                progress = stack.enter_context(busy("exporting"))
            parts = cls(progress or None, large)
            token = _current.set(parts)
            stack.callback(_current.reset, token)
            yield parts
            if parts._progress is not None:
                parts._progress("done", len(_PARTS), len(_PARTS))

    def begin(self, part: str) -> None:
        """Report that a part begins, after freeing the memory of the previous one."""
        if self._large:
            # Programs of torch.export hold copies of the parameters, in cycles.
            gc.collect()
            give_back()
        self._part, self._told = part, time.monotonic()
        if self._progress is not None:
            self._progress(part, _PARTS.index(part), len(_PARTS))

    def tell(self, share: float) -> None:
        """Report the fraction of a long part that is done."""
        now = time.monotonic()
        if self._progress is not None and self._part is not None and now - self._told >= _TELL_EVERY:
            self._told = now
            self._progress(f"{self._part}, {share:.0%}", _PARTS.index(self._part), len(_PARTS))


_TELL_EVERY = 1.0
"""Seconds before the first report of a part's fraction, and between two reports."""

_current: contextvars.ContextVar[Parts | None] = contextvars.ContextVar("_current", default=None)


def tell_share(share: float) -> None:
    """Report the fraction of a long task that is done, if there is a progress function."""
    parts = _current.get()
    if parts is not None:
        parts.tell(share)


@contextlib.contextmanager
def mistakes_named() -> Iterator[None]:
    """Turn an exception that no part of an export expects into a refusal that says where it comes from.

    What the user's own function raises, such as one that is told of progress, stays as it is.
    """
    try:
        yield
    except GradfuseError:
        raise
    except Exception as error:
        # Any other exception is a bug of this package.
        from gradfuse.export.explaining import is_users

        where = traceback.extract_tb(error.__traceback__)[-1]
        # A warning that the user turned into an error is raised as it is.
        if is_users(where.filename) or isinstance(error, Warning):
            raise
        raise refusal(
            f"{type(error).__name__} in {os.path.basename(where.filename)}:{where.lineno}: {one_line(error)}; expected "
            "an export or a reason, so this is a mistake in gradfuse: please report it with the module"
        ) from error


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the warnings of code that has run before: those of other numbers and sizes are not about the batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
