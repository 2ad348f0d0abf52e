"""Operators that are replaced by others, which have rules, where a gradient goes through them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradfuse.differentiation.dependence import depending, within
from gradfuse.differentiation.rules import Call
from gradfuse.differentiation.tensors import Tape, Tensor

Expansion: TypeAlias = "Callable[[Call], Sequence[Tensor | None]]"
"""Writes what an operator computes; returns its outputs, None or nothing for those that it does not give."""

FAMILIES = ("recurrences", "attention", "sampling", "fourier")

_EXPANSIONS: dict[tuple[str, str], tuple[Expansion, str]] = {}


def expansion(*op_types: str, domain: str = "", limits: str = "") -> Callable[[Expansion], Expansion]:
    """Put an expansion into the table, for operators of a domain."""

    def put(function: Expansion) -> Expansion:
        for op_type in op_types:
            _EXPANSIONS[domain, op_type] = function, limits
        return function

    return put


@functools.cache
def expansions() -> Mapping[tuple[str, str], tuple[Expansion, str]]:
    """Return (domain, operator) -> what expands it, and what it does not take."""
    for family in FAMILIES:
        importlib.import_module(f"gradfuse.differentiation.{family}")
    return _EXPANSIONS


def expand(graph: ir.Graph, wrt: Collection[ir.Value], prefix: str, opset: int) -> bool:
    """Replace the nodes that depend on some values and that have an expansion; return whether there were any.

    Args:
        graph: the graph; the outputs of its nodes keep their names.
        wrt: the values.
        prefix: what the names of new nodes begin with; nothing else in the graph begins with it.
        opset: the version of the default domain.

    Raises:
        ModelError: an expansion does not take a node.
    """
    if not any(_of(node) for node in graph.all_nodes()):
        return False
    graphs = [(graph, depending(list(graph), wrt)[0])]
    number = 0
    while graphs:
        inner, active = graphs.pop()
        for node in list(inner):
            graphs += within(node, active)
            found = _of(node)
            if found is None or not any(value in active for value in node.inputs):
                continue
            number += 1
            _put(inner, node, found, Tape(f"{prefix}{number}/", opset))
    return number > 0


def _of(node: ir.Node) -> Expansion | None:
    found = expansions().get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    return None if found is None else found[0]


def _put(graph: ir.Graph, node: ir.Node, function: Expansion, tape: Tape) -> None:
    call = Call(node, tape, [], frozenset())
    results = [*function(call), *[None] * len(node.outputs)]
    outputs: list[ir.Value] = []
    values: list[ir.Value] = []
    for k, (output, result) in enumerate(zip(node.outputs, results, strict=False)):
        if not output.uses() and not output.is_graph_output():
            continue
        if result is None:
            raise call.error(f"output {k}, {output.name!r}, is used; expected that it is not")
        outputs.append(output)
        values.append(result.op("Identity").value if result.value in values else result.value)
    nodes = nodes_read(tape.nodes, values)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, outputs, values)


def nodes_read(nodes: Sequence[ir.Node], values: Collection[ir.Value]) -> list[ir.Node]:
    """Return the nodes that values depend on; the others do not read anything any more."""
    kept = []
    for node in reversed(nodes):
        if any(value in values or value.uses() for value in node.outputs):
            kept.append(node)
        else:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    return kept[::-1]
