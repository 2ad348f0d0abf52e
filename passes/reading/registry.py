"""The registry of readers: which function reads which operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form

Read = Callable[[KnownForms, ir.Node], Form | Sequence[Form | None]]
"""Gives the form of a node's output, or a list with one for each of its outputs and None for those it does not read."""


@dataclass(frozen=True)
class Reader:
    """A function that reads nodes, and what it looks at beside their operands, attributes and types."""

    read: Read
    uses_output_shape: bool
    uses_producers: bool


READERS: dict[tuple[str, str], Reader] = {}
"""By domain and operator."""


def reads(
    *ops: str, domain: str = "", uses_output_shape: bool = False, uses_producers: bool = False
) -> Callable[[Read], Read]:
    """Register a function as the reader of operators.

    The function raises Opaque where it has no rule for a node, whose outputs are then named.

    Args:
        ops: operator types.
        domain: their domain.
        uses_output_shape: the function looks at the shapes that a model states for outputs, by `KnownForms.output`.
        uses_producers: the function looks at the nodes that compute operands, by `KnownForms.producer`.
    """

    def register(read: Read) -> Read:
        for op in ops:
            READERS[domain, op] = Reader(read, uses_output_shape, uses_producers)
        return read

    return register


def reader_of(node: ir.Node) -> Reader | None:
    return READERS.get((node.domain, node.op_type))


def has_reader(node: ir.Node) -> bool:
    """Whether a rule reads the operation."""
    return (node.domain, node.op_type) in READERS
