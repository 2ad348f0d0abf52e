"""Modules that are imported when something of them is first used."""

from __future__ import annotations

import importlib


class Module:
    """Stands for a module: reading an attribute imports it.

    A device that trains has neither onnx nor onnx_ir, and needs nothing that uses them.

    Args:
        name: the module's full name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] == "gradfuse":
                raise
            raise _missing(error.name) from error
        value: object = getattr(module, attribute)
        return value


def _missing(name: str) -> Exception:
    from gradfuse.errors import GradfuseError

    return GradfuseError(f"this needs {name}, which is not installed; expected all that pip install gradfuse brings")
