"""What matching needs to know of ONNX graphs themselves: kinds of operators and types, nested graphs, names."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Expand", "Flatten", "Shape", "Size", "Constant"}
"""Operators that compute no new numbers."""

TOLERANCE = {
    ir.DataType.DOUBLE: 1e-6,
    ir.DataType.FLOAT: 1e-6,
    ir.DataType.FLOAT16: 4e-3,
    ir.DataType.BFLOAT16: 3e-2,
}
"""The types of gradients, and how far a constant of each may be from the formula's: a few roundings of the type."""


def names_of(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """What reports call these nodes: by their name or else their first output. Constants are left out."""
    return tuple(str(n.name or n.outputs[0].name) for n in nodes if n.op_type != "Constant" or n.domain)


def is_node_of_training(node: ir.Node | None, op_type: str) -> bool:
    """Whether a node is an operator of onnxruntime-training."""
    return node is not None and node.op_type == op_type and node.domain == "com.microsoft"


def wanted_outputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    """The first outputs of a node, None for what nothing reads."""
    found = [value if value.uses() or value.is_graph_output() else None for value in node.outputs[:count]]
    return [*found, *[None] * (count - len(found))]


def graphs_in(node: ir.Node) -> list[ir.Graph]:
    """The branches or the body of a node, and the graphs nested in them."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    values = [a.value for a in node.attributes.values() if a.type in kinds and not a.is_ref()]
    own = [graph for value in values for graph in ([value] if isinstance(value, ir.Graph) else value)]
    return own + [inner for graph in own for inner in graph.subgraphs()]


def nodes_in(node: ir.Node) -> list[ir.Node]:
    """The nodes of the graphs in a node."""
    return [inner for graph in graphs_in(node) for inner in graph]


class Names:
    """The names that values and nodes of a model have, and new ones."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """A name that begins with the stem in lower case and that nothing in the model has."""
        stem = stem.lower()
        while True:
            k = self._counts[stem] = self._counts.get(stem, -1) + 1
            if (name := f"{stem}_{k}") not in self._taken:
                self._taken.add(name)
                return name
