"""Graphs that compute things twice, as checkpointing of activations and plain exporters leave them."""

from __future__ import annotations

import onnx

READERS = ("odd", "even", "late")
"""Which of the readers of a value read its copy: every second one, the others, or the second half of them."""
_DRAWS = ("Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")


def twice(model: onnx.ModelProto, readers: str) -> onnx.ModelProto:
    """A copy of a model in which each value with several readers is computed twice, for some of its readers each."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
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
