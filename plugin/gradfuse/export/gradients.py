"""The gradients of a translated forward program, by the rules for ONNX operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.differentiation.differentiate import append_gradients, expand_on_the_way, prepared
from gradfuse.differentiation.recurrences import FUSES
from gradfuse.export.reporting import refusal
from gradfuse.models import reading


def append(model: ir.Model, names: Sequence[str], *, fuse: bool) -> ir.Model:
    """Return a model with the gradients of its first output, with respect to its first inputs, as further outputs.

    Args:
        model: the translation of a forward program.
        names: the parameters that these inputs are, for messages.
        fuse: whether operators of gradfuse may stand in the gradients.

    Raises:
        ModelError: an operator has no gradient rule.
        ExportError: the loss does not depend on a parameter.
    """
    work = prepared(reading.load(model))
    graph = work.graph
    chosen = list(graph.inputs[: len(names)])
    for node in graph:
        node.meta[FUSES] = fuse
    expand_on_the_way(work, chosen)
    found = append_gradients(work, graph.outputs[0], chosen, fuse=fuse)
    for name, value in zip(names, chosen, strict=True):
        if value not in found:
            raise refusal(f"the exported loss does not depend on {name!r}; expected what PyTorch has a gradient of")
        output = found[value].value
        if output.producer() is None or output.is_graph_output():
            copy = ir.node("Identity", [output])
            graph.append(copy)
            output = copy.outputs[0]
        output.type, output.shape = value.type, value.shape
        graph.outputs.append(output)
    return work
