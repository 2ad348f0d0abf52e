"""The registry of readers: which function reads which operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form

Reader = Callable[[KnownForms, ir.Node], Form | Sequence[Form | None]]
"""Gives the form of a node's output, or a list with one for each of its outputs and None for those it does not read."""

READERS: dict[tuple[str, str], Reader] = {}
"""By domain and operator."""


def reads(*ops: str, domain: str = "") -> Callable[[Reader], Reader]:
    """Register a function as the reader of operators."""

    def register(reader: Reader) -> Reader:
        for op in ops:
            READERS[domain, op] = reader
        return reader

    return register


def reader_of(node: ir.Node) -> Reader | None:
    return READERS.get((node.domain, node.op_type))


def has_reader(node: ir.Node) -> bool:
    """Whether a rule reads the operation."""
    return (node.domain, node.op_type) in READERS
