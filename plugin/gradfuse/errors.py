"""The exceptions that gradfuse raises on purpose; their text is always one line."""

from __future__ import annotations

from collections.abc import Iterable


class GradfuseError(Exception):
    """Base of every error that gradfuse raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message))


class ModelError(GradfuseError):
    """A model cannot be read, is not valid ONNX, is outside the supported opsets, or cannot be run or written."""


class ArgumentError(GradfuseError, ValueError):
    """An argument of a public function has a value that is not accepted."""


class ExportError(GradfuseError):
    """A PyTorch training step cannot be exported, or the exported model does not agree with PyTorch."""


class WorkerError(GradfuseError):
    """A process that gradfuse works with cannot be started, or fails for a reason that is not the model."""


class CheckError(GradfuseError):
    """Two models that must compute the same do not.

    Attributes:
        report: the `gradfuse.CheckReport` with every output's largest error and bound.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


def one_line(error: BaseException) -> str:
    """Return the text of another library's exception in one line, cut to what a terminal can show."""
    reason = getattr(error, "strerror", None) or str(error)
    return cut(reason) or type(error).__name__


def listed(names: Iterable[str], *, quoted: bool = True, most: int = 5) -> str:
    """Return names as a part of a sentence: the first of them, and how many more there are."""
    names = [repr(name) if quoted else name for name in names]
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def cut(text: str) -> str:
    """Return a text in one line, cut to what a terminal can show."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:400]}..."


def few(names: Iterable[str]) -> str:
    """Return names for a message: all, or the first of them and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _FEW} more" if len(every) > _FEW + 1 else ""
    return ", ".join(every[:_FEW] if more else every) + more


def type_name(value: object) -> str:
    """Return the type of a value for a message, with its module: gradfuse has classes of the same names as torch's."""
    kind = value if isinstance(value, type) else type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{'the class ' if kind is value else ''}{module}{kind.__qualname__}"


_FEW = 8
"""An error lists at most this many names."""


def _printable(text: str) -> str:
    """The text in one line: names that it quotes come from files, and may hold anything."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return "".join(shown)
