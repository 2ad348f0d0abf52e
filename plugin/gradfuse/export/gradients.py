"""The gradients of a translated forward program, by the rules for ONNX operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradfuse.differentiation.differentiate import append_gradients, expand_on_the_way, free_prefix, prepared
from gradfuse.differentiation.rules import FUSES
from gradfuse.differentiation.tensors import Tape
from gradfuse.models import reading


def append(model: ir.Model, wrt: Sequence[int], *, fuse: bool, sizes: Mapping[str, int]) -> ir.Model:
    """Return a model with the gradients of its first output, with respect to some inputs, as further outputs.

    Args:
        model: the translation of a forward program.
        wrt: which inputs these are, counted from 0.
        fuse: whether operators of gradfuse may stand in it.
        sizes: what named dimensions are in the batch.

    Raises:
        ModelError: an operator has no gradient rule.
    """
    work = prepared(reading.load(model))
    graph = work.graph
    chosen = [graph.inputs[index] for index in wrt]
    for node in graph:
        node.meta[FUSES] = fuse
    expand_on_the_way(work, chosen)
    found = append_gradients(work, graph.outputs[0], chosen, fuse=fuse, sizes=sizes)
    tape = Tape(free_prefix(graph), work.opset_imports[""])
    # PyTorch has gradients of 0 where no rule has any, as behind a rounding.
    gradients = [found[value] if value in found else tape.of(value).zeros() for value in chosen]
    graph.extend(tape.nodes)
    for value, gradient in zip(chosen, gradients, strict=True):
        output = gradient.value
        if output.producer() is None or output.is_graph_output():
            copy = ir.node("Identity", [output])
            graph.append(copy)
            output = copy.outputs[0]
        output.type, output.shape = value.type, value.shape
        graph.outputs.append(output)
    return work
