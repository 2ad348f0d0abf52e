"""Nodes that give what another value is already, as activation checkpointing and plain exporters leave them.

A gradient is found by what it reads. Where part of it reads one result and part of it another of the same computation,
the two are one value while a search runs, and so are a value and its `Identity`. What no rewrite has taken comes back
after the search.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.matching.graphs import TOLERANCE, graphs_in
from gradfuse.passes.reading import ort_training
from gradfuse.passes.reading.nodes import DRAWS

_SMALL = 64
"""Constants of at most so many elements are compared by their numbers."""


@dataclass(frozen=True)
class _Merged:
    """A node that was taken out.

    Attributes:
        inputs: what it read.
        first: the node that computes the same; None for an `Identity`.
        results: what stands for its results.
        serves: whether others read that.
        readers: the nodes that read them, by which input, and what they read now.
    """

    node: ir.Node
    inputs: Sequence[ir.Value | None]
    first: ir.Node | None
    results: Sequence[ir.Value]
    serves: bool
    readers: Sequence[tuple[ir.Node, int, ir.Value]]


class Duplicates:
    """The nodes of a graph that were taken out because another value is what they give.

    Draws, operators of domains other than ONNX's and onnxruntime-training's, and nodes with graphs of their own stay.
    Equal parameters are different values: they may be trained.

    Args:
        graph: the graph; it is changed.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        firsts = _firsts(graph)
        self._order: list[ir.Node] = list(graph) if firsts else []
        self._merged: dict[ir.Node, _Merged] = {}
        for node, first in firsts.items():
            # What an identity passes on may be the result of a node that stands for another by now.
            results = [v for v in node.inputs if v is not None] if first is None else first.outputs
            both = list(zip(node.outputs, results, strict=True))
            if not all(_says_as_much(same, value) for value, same in both):
                continue
            serves = any(same.uses() or same.is_graph_output() for same in results)
            uses = [(use, same) for value, same in both for use in value.uses()]
            readers = [(use.node, use.idx, same) for use, same in uses if _may_change(node, use.node)]
            for reader, index, same in readers:
                reader.replace_input_with(index, same)
            self._merged[node] = _Merged(node, node.inputs, first, results, serves, readers)
        for node in self._merged:
            # What is a result of the graph is computed again, as it was.
            if not any(value.is_graph_output() or value.uses() for value in node.outputs):
                graph.remove(node, safe=True)

    def restore(self) -> None:
        """Put back the nodes whose results something still reads."""
        after: ir.Node | None = None
        for node in reversed(self._order):
            one = self._merged.get(node)
            if one is not None and any(reader.inputs[index] is same for reader, index, same in one.readers):
                self._put_back(one, after)
            if node.graph is self._graph:
                after = node

    def _put_back(self, one: _Merged, after: ir.Node | None) -> None:
        node = one.node
        if node.graph is None:
            others = one.results if one.first is None else one.first.inputs
            for index, (value, other) in enumerate(zip(one.inputs, others, strict=True)):
                node.replace_input_with(index, value if self._is_there(value) else other)
            if after is None:
                self._graph.append(node)
            else:
                self._graph.insert_before(after, node)
        for reader, index, same in one.readers:
            if reader.inputs[index] is same:
                reader.replace_input_with(index, node.outputs[one.results.index(same)])
        if one.first is not None and one.serves:
            self._drop(one.first)

    def _drop(self, node: ir.Node) -> None:
        """Remove a node that did its work for others alone, and what it alone read."""
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            return
        inputs = dict.fromkeys(value for value in node.inputs if value is not None)
        self._graph.remove(node, safe=True)
        for value in inputs:
            above = value.producer()
            if above is not None and above.graph is self._graph:
                self._drop(above)
            elif not value.uses() and self._graph.initializers.get(str(value.name)) is value:
                del self._graph.initializers[str(value.name)]

    def _is_there(self, value: ir.Value | None) -> bool:
        """Whether a node that is put back may read what it read."""
        if value is None or value.is_graph_input() or value.is_initializer():
            return True
        node = value.producer()
        return node is not None and node.graph is not None


def _may_change(node: ir.Node, reader: ir.Node) -> bool:
    """Whether a reader may read what stands for the result of a node."""
    # Those of onnxruntime-training's gradients are part of them, and go with them.
    return node.op_type != "Identity" or not reader.domain


def _says_as_much(same: ir.Value, value: ir.Value) -> bool:
    """Whether as much is known of the type and the sizes of one value as of another, which it is to stand for."""
    if same.dtype != value.dtype or value.shape is None:
        return same.dtype == value.dtype
    sizes = list(value.shape)
    if same.shape is None or len(same.shape) != len(sizes):
        return False
    return all(own == size or not isinstance(size, int) for own, size in zip(same.shape, sizes, strict=True))


def _firsts(graph: ir.Graph) -> dict[ir.Node, ir.Node | None]:
    """Nodes that compute what an earlier one computes, each with that, and every `Identity`, with None."""
    found: dict[ir.Node, ir.Node | None] = {}
    known: dict[Hashable, list[ir.Node]] = {}
    same: dict[ir.Value, Hashable] = {}

    def key(value: ir.Value | None) -> Hashable:
        if value is not None and value not in same:
            same[value] = value if (contents := _constant(value)) is None else contents
        return None if value is None else same[value]

    for node in graph:
        is_known = not node.domain or ort_training.is_pure(node)
        if not is_known or node.op_type in DRAWS or node.op_type == "Constant" or graphs_in(node):
            continue
        if (
            node.op_type == "Identity"
            and not node.domain
            and len(node.inputs) == len(node.outputs) == 1
            and node.inputs[0] is not None
        ):
            found[node] = None
            same[node.outputs[0]] = key(node.inputs[0])
            continue
        # Outputs that a node leaves out have no name.
        made = tuple(bool(value.name) for value in node.outputs)
        alike = known.setdefault((node.domain, node.op_type, tuple(map(key, node.inputs)), made), [])
        first = next((one for one in alike if _attributes(one) == _attributes(node)), None)
        if first is None:
            alike.append(node)
            continue
        if any(value.uses() for value in node.outputs):
            found[node] = first
        same.update(zip(node.outputs, map(key, first.outputs), strict=True))
    return found


def _constant(value: ir.Value) -> Hashable:
    """The contents of a constant; None for others, and for what may be trained."""
    node = value.producer()
    if node is not None and (node.op_type != "Constant" or node.domain or len(node.attributes) != 1):
        return None
    if node is None:
        tensor = None if value.is_graph_input() else value.const_value
        return None if tensor is None or tensor.dtype in TOLERANCE else _contents(tensor)
    (attribute,) = node.attributes.values()
    match attribute.type:
        case ir.AttributeType.TENSOR if not attribute.is_ref():
            tensor = attribute.as_tensor()
            return None if tensor.dtype in TOLERANCE and tensor.size > 1 else _contents(tensor)
        case ir.AttributeType.FLOAT | ir.AttributeType.INT | ir.AttributeType.INTS:
            return _attribute(attribute)
    return None


def _attributes(node: ir.Node) -> dict[str, Hashable]:
    return {name: _attribute(attribute) for name, attribute in node.attributes.items()}


def _attribute(attribute: ir.Attr) -> Hashable:
    if attribute.is_ref():
        return attribute.type, attribute.ref_attr_name
    if attribute.type == ir.AttributeType.TENSOR:
        return _contents(attribute.as_tensor())
    value = attribute.value
    return attribute.type, tuple(value) if isinstance(value, Sequence) else value


def _contents(tensor: ir.TensorProtocol) -> Hashable:
    """What equal small tensors have in common; a larger one, or one in a file, is equal to itself alone."""
    if tensor.size > _SMALL or tensor.dtype == ir.DataType.STRING or isinstance(tensor, ir.ExternalTensor):
        return id(tensor)
    try:
        return tensor.dtype, tuple(tensor.shape), tensor.tobytes()
    except Exception:  # Of a malformed tensor.
        return id(tensor)
