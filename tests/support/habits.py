"""Graphs as exporters with other habits write them: they compute the same numbers."""

from __future__ import annotations

import random

import onnx
from onnx import helper

READERS = ("odd", "even", "late")
"""Which of the readers of a value read its copy: every second one, the others, or the second half of them."""
_DRAWS = ("Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")


def with_identities(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy of a model in which some inputs of nodes go through an Identity of their own."""
    model, draw = _copy(model), random.Random(seed)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for n, node in enumerate(nodes):
        for k, name in enumerate(node.input):
            if name and draw.random() < 0.3:
                node.input[k] = f"identity_{n}_{k}"
                model.graph.node.append(helper.make_node("Identity", [name], [f"identity_{n}_{k}"]))
        model.graph.node.append(node)
    return model


def with_constant_nodes(model: onnx.ModelProto, _: int) -> onnx.ModelProto:
    """A copy of a model whose initializers are Constant nodes."""
    model = _copy(model)
    graph = model.graph
    asked = {value.name for value in graph.input}
    own = [tensor for tensor in graph.initializer if tensor.name not in asked]
    defaults = [tensor for tensor in graph.initializer if tensor.name in asked]
    nodes = [*(helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in own), *graph.node]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(defaults)
    return model


def in_another_order(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy of a model whose nodes stand in another topological order."""
    model, draw = _copy(model), random.Random(seed)
    nodes = list(model.graph.node)
    made = {name for node in nodes for name in node.output if name}
    waits = [read_by(node) & made for node in nodes]
    left, there = list(range(len(nodes))), set[str]()
    del model.graph.node[:]
    while left:
        k = draw.choice([k for k in left if waits[k] <= there])
        left.remove(k)
        there |= set(nodes[k].output)
        model.graph.node.append(nodes[k])
    return model


def read_by(node: onnx.NodeProto) -> set[str]:
    """The values that a node reads, those that its graphs read included."""
    graphs = [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]
    inner = {name for graph in graphs for one in graph.node for name in read_by(one)}
    return {*node.input, *inner, *(value.name for graph in graphs for value in graph.output)}


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def twice(model: onnx.ModelProto, readers: str) -> onnx.ModelProto:
    """A copy of a model in which each value with several readers is computed twice, for some of its readers each."""
    model = _copy(model)
    graph = model.graph
    told = {value.name: value for value in graph.value_info}
    nodes = list(graph.node)
    reads = [name for node in nodes for name in node.input]
    copies = {}
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        has_graph = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if node.domain not in ("", "ai.onnx") or has_graph or node.op_type in (*_DRAWS, "Constant"):
            continue
        if all(reads.count(name) < 2 for name in node.output):
            continue
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = f"{node.name}_twin" if node.name else ""
        for k, name in enumerate(node.output):
            if name:
                copies[name] = copy.output[k] = f"{name}_twin"
                if name in told:
                    info = graph.value_info.add()
                    info.CopyFrom(told[name])
                    info.name = copies[name]
    count = dict.fromkeys(copies, 0)
    for node in graph.node:
        for k, name in enumerate(node.input):
            if name in copies:
                place, count[name] = count[name], count[name] + 1
                late = place >= reads.count(name) // 2
                if {"odd": place % 2 == 1, "even": place % 2 == 0, "late": late}[readers]:
                    node.input[k] = copies[name]
    return model


def with_unread_twins(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy of a model in which each node, but for draws, comes with a copy that nothing reads, before or after it."""
    model, draw = _copy(model), random.Random(seed)
    graph = model.graph
    told = {value.name: value for value in (*graph.value_info, *graph.output)}
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        has_graph = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if has_graph or node.op_type in (*_DRAWS, "Constant", "YieldOp"):
            graph.node.append(node)
            continue
        twin = onnx.NodeProto()
        twin.CopyFrom(node)
        twin.name = f"{node.name}_unread" if node.name else ""
        for k, name in enumerate(node.output):
            twin.output[k] = f"{name}_unread" if name else ""
            if name in told:
                info = graph.value_info.add()
                info.CopyFrom(told[name])
                info.name = twin.output[k]
        graph.node.extend(draw.sample([node, twin], 2))
    return model
