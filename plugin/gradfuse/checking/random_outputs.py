"""Which outputs of a model depend on operators that draw random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

RANDOM_OPS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def random_outputs(model: ir.Model) -> set[str]:
    """Return the names of the outputs that depend on a node that draws random numbers."""
    random_functions: set[ir.OperatorIdentifier] = set()
    # One round for each level of calls.
    for _ in model.functions:
        random_functions |= {
            key
            for key, function in model.functions.items()
            if any(_draws(n, random_functions) for n in function.all_nodes())
        }
    tainted: set[ir.Value | None] = set()
    for node in model.graph:
        if any(_draws(n, random_functions) or not tainted.isdisjoint(n.inputs) for n in with_subgraphs(node)):
            tainted.update(node.outputs)
    return {str(value.name) for value in model.graph.outputs if value in tainted}


def with_subgraphs(node: ir.Node) -> Iterator[ir.Node]:
    """Yield a node and those of its subgraphs."""
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield from attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            for graph in attribute.as_graphs():
                yield from graph.all_nodes()


def _draws(node: ir.Node, random_functions: set[ir.OperatorIdentifier]) -> bool:
    if node.op_identifier() in random_functions:
        return True
    if node.domain not in ("", "com.microsoft"):
        return False
    if node.op_type != "Dropout":
        return node.op_type in RANDOM_OPS
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is None:
        return False
    constant = ir.convenience.get_const_tensor(mode)
    return constant is None or bool(constant.numpy().any())
