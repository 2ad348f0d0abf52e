"""Sequences that are taken apart where they are made: exporters write torch.split and torch.cat so."""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.differentiation.rules import constant_of, error_of
from gradfuse.differentiation.tensors import Tape, Tensor

OPERATORS = ("SequenceAt", "ConcatFromSequence")
"""What takes sequences apart."""


def without_sequences(graph: ir.Graph, prefix: str, opset: int) -> None:
    """Put Split and Slice in the place of elements of split tensors, and Concat in that of joined sequences.

    Args:
        graph: the graph, whose values have types; it is changed, as are those within it.
        prefix: what the names of new nodes begin with; nothing else in the graph begins with it.
        opset: the version of the default domain.

    Raises:
        ModelError: a sequence has no element of an index.
    """
    number = 0
    splits: dict[ir.Node, tuple[Tensor, ...]] = {}
    for node in list(graph.all_nodes()):
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if node.domain or source is None or source.domain:
            continue
        number += 1
        tape = Tape(f"{prefix}{number}/", opset)
        result = None
        if node.op_type == "SequenceAt" and source.op_type == "SplitToSequence":
            result = _element(node, source, tape, splits)
        elif node.op_type == "SequenceAt" and source.op_type == "SequenceConstruct":
            result = _constructed(node, source, tape)
        elif node.op_type == "ConcatFromSequence" and source.op_type == "SequenceConstruct":
            result = _joined(node, source, tape)
        if result is not None:
            assert node.graph is not None and source.graph is not None
            if result.value.producer() not in tape.nodes:
                result = tape.op("Identity", result)
            outputs = [result.value]
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, node.outputs, outputs)
            if not source.outputs[0].uses() and not source.outputs[0].is_graph_output():
                source.graph.remove(source, safe=True)


def _element(node: ir.Node, source: ir.Node, tape: Tape, splits: dict[ir.Node, tuple[Tensor, ...]]) -> Tensor | None:
    """Return one of the parts of a split tensor; None where it is not known which."""
    x, index = source.inputs[0], node.inputs[1]
    at = None if index is None else constant_of(index)
    if x is None or at is None:
        return None
    number, axis = int(at.reshape(())), _int(source, "axis", 0)
    given = source.inputs[1] if len(source.inputs) > 1 else None
    sizes = None if given is None else constant_of(given)
    if given is not None and sizes is None:
        return None
    if sizes is not None and sizes.ndim:
        _require_within(node, number, sizes.size)
        if source not in splits:
            assert source.graph is not None
            before = Tape(f"{tape.prefix}split/", tape.opset)
            lengths = before.ints(*(int(size) for size in sizes))
            splits[source] = before.parts("Split", sizes.size, before.of(x), lengths, axis=axis)
            source.graph.insert_after(source, before.nodes)
        return splits[source][number]
    size = 1 if sizes is None else int(sizes.reshape(()))
    begin = tape.ints(number * size)
    if number < 0:
        # Of the parts, the last of which may be smaller.
        begin = ((tape.of(x).size(axis) + (size - 1)) / tape.ints(size) + number) * size
    part = tape.of(x).slice(begin, begin + size, tape.ints(axis))
    return part.squeeze(axis) if sizes is None and not _int(source, "keepdims", 1) else part


def _constructed(node: ir.Node, source: ir.Node, tape: Tape) -> Tensor | None:
    index = node.inputs[1]
    at = None if index is None else constant_of(index)
    if at is None:
        return None
    number = int(at.reshape(()))
    _require_within(node, number, len(source.inputs))
    value = source.inputs[number]
    return None if value is None else tape.of(value)


def _require_within(node: ir.Node, number: int, count: int) -> None:
    if not -count <= number < count:
        raise error_of(node, f"its index is {number}, of a sequence of {count}")


def _joined(node: ir.Node, source: ir.Node, tape: Tape) -> Tensor:
    axis = _int(node, "axis", 0)
    parts = [tape.of(value) for value in source.inputs if value is not None]
    if _int(node, "new_axis", 0):
        at = tape.ints(axis)
        parts = [tape.op("Unsqueeze", part, at) for part in parts]
    return tape.op("Concat", *parts, axis=axis)


def _int(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default
