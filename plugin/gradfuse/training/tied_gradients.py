"""Gradients of embeddings that are tied to another layer, without a second tensor of the weight's size."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.passes import shapes

ADD = "EmbeddingDenseBackwardAdd"
"""An operator of gradfuse's library: its first input, plus EmbeddingDenseBackward of the others, in the memory of the
first if nothing else reads that."""

_ATTRIBUTES = ("num_weights", "padding_idx")


def add_in_place(model: ir.Model) -> None:
    """Let gradients of embeddings be added to other gradients of their weights where these are, with the same bits.

    Only in rows that no index names, a zero keeps its sign. Gradients have to be float32, and those of embeddings not
    divided by the number of their terms.

    Args:
        model: a step whose kernels are there; it is changed.
    """
    sums = [node for node in model.graph if not node.domain and node.op_type in ("Add", "Sum")]
    found = [(node, terms) for node in sums if (terms := _terms(node))]
    # Files do not say what gradients are.
    unknown = [term for _, terms in found for term in terms if term.shape is None or term.dtype is None]
    if unknown:
        shapes.infer(model, unknown)
    for node, terms in found:
        shape = terms[0].shape
        is_float = all(term.dtype == ir.DataType.FLOAT for term in terms)
        # Others may broadcast.
        if is_float and shape is not None and shape.is_static() and all(term.shape == shape for term in terms):
            _replace(model.graph, node, terms)


def _terms(node: ir.Node) -> list[ir.Value]:
    """Return the terms of a sum, the first of which others can be added to; none if no other is of an embedding."""
    terms = [value for value in node.inputs if value is not None]
    if len(terms) > 1 and _lookup(terms[0]) is not None:
        terms[:2] = terms[1::-1]
    is_base = len(terms) > 1 and terms[0].producer() is not None
    return terms if is_base and any(_lookup(term) is not None for term in terms[1:]) else []


def _lookup(value: ir.Value) -> ir.Node | None:
    """Return the node of an embedding's gradient that nothing else reads."""
    node = value.producer()
    if node is None or node.domain != DOMAIN or node.op_type != "EmbeddingDenseBackward":
        return None
    if len(value.uses()) != 1 or value.is_graph_output():
        return None
    return None if node.attributes.get_int("scale_grad_by_freq", 0) else node


def _replace(graph: ir.Graph, node: ir.Node, terms: Sequence[ir.Value]) -> None:
    """Put the sum of two terms after the other in the place of a sum."""
    (total,) = node.outputs
    name, result, replaced = total.name, terms[0], [node]
    for number, term in enumerate(terms[1:]):
        lookup = _lookup(term)
        if lookup is None:
            # onnxruntime would make an Add behind a product part of it, and round otherwise.
            added = ir.node("Sum", [result, term])
        else:
            attributes = {one: lookup.attributes[one] for one in _ATTRIBUTES if one in lookup.attributes}
            added = ir.node(ADD, [result, *lookup.inputs], attributes, domain=DOMAIN)
            replaced.append(lookup)
        graph.insert_before(node, added)
        # onnxruntime looks at the shapes before it lets a result have the memory.
        shape, (result,) = result.shape, added.outputs
        result.name, result.type, result.shape = f"{name}/{number}", total.type, shape
    ir.convenience.replace_all_uses_with(total, result, replace_graph_outputs=True)
    graph.remove(replaced, safe=True)
    result.name = name
