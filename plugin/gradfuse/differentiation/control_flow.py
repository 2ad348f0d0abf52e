"""If: its gradient is another If, whose branches compute what they need of the forward ones again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from gradfuse.differentiation.rules import error_of
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.models.inlining import graphs_of

Walk = Callable[[ir.Graph, Tape, Mapping[ir.Value, Tensor], Collection[ir.Value]], dict[ir.Value, Tensor]]

_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial"}
    | {f"Random{kind}{like}" for kind in ("Normal", "Uniform") for like in ("", "Like")}
)


def of_branches(
    node: ir.Node, tape: Tape, dy: Sequence[Tensor | None], captured: Sequence[ir.Value], walk: Walk
) -> dict[ir.Value, Tensor]:
    """Return the gradients of what the branches of an If read from outside, zeros where the taken one does not.

    Args:
        node: the If.
        tape: where its gradient is written.
        dy: the gradients of its outputs.
        captured: the values whose gradients are asked for.
        walk: writes the gradients of a graph: `reverse.gradients`.

    Raises:
        ModelError: a node of a branch has no rule, or draws numbers, which would be others the second time.
    """
    prefix = f"{tape.prefix}If_{len(tape.nodes)}"
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = node.attributes[name].as_graph().clone(allow_outer_scope_values=True)
        _rename(body, f"{prefix}/{name}/")
        inner = Tape(f"{prefix}/{name}/gradient/", tape.opset)
        seeds: dict[ir.Value, Tensor] = {}
        for output, gradient in zip(body.outputs, dy, strict=True):
            if gradient is not None:
                seed = inner.of(gradient.value)
                seeds[output] = seeds[output] + seed if output in seeds else seed
        found = walk(body, inner, seeds, captured)
        results = [found[value].op("Identity") if value in found else inner.of(value).zeros() for value in captured]
        body.extend(inner.nodes)
        body.outputs[:] = [_typed(result.value, value) for result, value in zip(results, captured, strict=True)]
        branches[name] = body
    outputs = [_typed(ir.Value(name=f"{prefix}.{k}"), value) for k, value in enumerate(captured)]
    backward = ir.node("If", node.inputs, branches, name=prefix, outputs=outputs)
    tape.nodes.append(backward)
    return {value: tape.of(output) for value, output in zip(captured, outputs, strict=True)}


def _typed(value: ir.Value, like: ir.Value) -> ir.Value:
    value.type, value.shape = like.type, like.shape
    return value


def _rename(body: ir.Graph, prefix: str) -> None:
    """Put a prefix ahead of all names in a graph and those within it, and refuse nodes that draw numbers."""
    graphs = [body]
    while graphs:
        graph = graphs.pop()
        initializers = list(graph.initializers.values())
        graph.initializers.clear()
        for value in {*graph.inputs, *initializers}:
            value.name = f"{prefix}{value.name}"
        for value in initializers:
            graph.register_initializer(value)
        for node in graph:
            if node.op_type in _RANDOM:
                raise error_of(node, "draws numbers in a branch of If; expected them from outside")
            node.name = f"{prefix}{node.name}" if node.name else node.name
            for value in node.outputs:
                value.name = f"{prefix}{value.name}" if value.name else value.name
            graphs += graphs_of(node)
