"""Models whose nodes are not in topological order: ONNX requires it, and onnxruntime sorts them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import onnx


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a topologically sorted copy of a model.

    It is the model itself if it is in order already, or has a cycle.
    """
    if all(_is_in_order(holder) for holder in (model.graph, *model.functions)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy if all(_sort(holder) for holder in (copy.graph, *copy.functions)) else model


def _is_in_order(holder: onnx.GraphProto | onnx.FunctionProto) -> bool:
    later = {name for node in holder.node for name in node.output if name}
    for node in holder.node:
        if not later.isdisjoint(_read_by(node)) or not all(map(_is_in_order, _graphs_of(node))):
            return False
        later.difference_update(node.output)
    return True


def _sort(holder: onnx.GraphProto | onnx.FunctionProto) -> bool:
    """Sort the nodes of a graph and of all within it; tell whether there is no cycle."""
    if not all(_sort(graph) for node in holder.node for graph in _graphs_of(node)):
        return False
    order = _order(holder.node)
    if len(order) < len(holder.node):
        return False
    copies = [onnx.NodeProto.FromString(holder.node[index].SerializeToString()) for index in order]
    del holder.node[:]
    holder.node.extend(copies)
    return True


def _order(nodes: Sequence[onnx.NodeProto]) -> list[int]:
    """Return the indices of nodes in an order that is near to theirs; those in a cycle are left out."""
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needed = [{producers[name] for name in _read_by(node) if name in producers} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for index, sources in enumerate(needed):
        for source in sources:
            readers[source].append(index)
    ready = [index for index, sources in enumerate(needed) if not sources]
    waiting = [len(sources) for sources in needed]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order


def _graphs_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    found: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        found += [attribute.g] if attribute.HasField("g") else []
        found += attribute.graphs
    return found


def _read_by(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads, with those that its subgraphs read from around them."""
    read = set(node.input)
    for graph in _graphs_of(node):
        inner = {value.name for value in graph.output}
        for one in graph.node:
            inner |= _read_by(one)
        own = {value.name for value in (*graph.input, *graph.initializer)}
        read |= inner - own - {name for one in graph.node for name in one.output}
    return read - {""}
