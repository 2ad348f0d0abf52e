"""`ScatterND` with a reduction, which onnxruntime computes wrongly in several threads, written as `ScatterElements`.

onnxruntime's CPU kernel of ScatterND shares the indices among its threads, and where two threads meet in one element,
an addend is lost (onnxruntime issues 18048 and 23396). ScatterND is how exporters write the gradients of embeddings and
of indexing, where indices come many times. onnxruntime's ScatterElements adds in the order of the indices; it does so
several times as fast along one axis as along two, so that the elements are numbered.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def reduces_by_scatter_nd(model: ir.Model) -> bool:
    """Return whether a model has a ScatterND with a reduction."""
    groups = (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values()))
    return any(_reduces(node) for group in groups for node in group)


def _reduces(node: ir.Node) -> bool:
    return node.op_type == "ScatterND" and not node.domain and node.attributes.get_string("reduction", "none") != "none"


def replace_scatter_nd(model: ir.Model) -> None:
    """Put ScatterElements in the place of every ScatterND of a model that has a reduction, and known ranks.

    Numbers of 16 bits, for which onnxruntime has no kernel of either, are added in float32.
    """
    for node in list(model.graph.all_nodes()):
        if not _reduces(node):
            continue
        data, indices, _ = node.inputs
        if data is None or indices is None or data.shape is None or indices.shape is None:
            continue
        if isinstance(indices.shape[-1], int):
            _replace(node, data, len(data.shape), indices.shape[-1], len(indices.shape))


def _replace(node: ir.Node, data: ir.Value, rank: int, depth: int, index_rank: int) -> None:
    """Replace a ScatterND whose indices, the last of their axes, are places on the first `depth` axes of the data."""
    tape = ir.tape.Tape()
    indices, updates, result = node.inputs[1], node.inputs[2], node.outputs[0]
    assert indices is not None and updates is not None and data.dtype is not None and node.graph is not None

    def op(
        op_type: str, *inputs: ir.Value, rank: int, dtype: ir.DataType = ir.DataType.INT64, **attributes: Any
    ) -> ir.Value:
        name = f"{result.name}/{op_type}_{len(tape.nodes)}"
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([None] * rank))
        return tape.op(op_type, list(inputs), attributes, output=output)

    def integers(*numbers: int) -> ir.Value:
        return op("Constant", rank=1, value=ir.tensor(numbers, dtype=ir.DataType.INT64))

    def flat(value: ir.Value, dtype: ir.DataType) -> ir.Value:
        line = op("Reshape", value, minus_one, rank=1, dtype=dtype)
        return op("Cast", line, rank=1, dtype=wide, to=wide) if dtype in _NARROW else line

    wide = ir.DataType.FLOAT if data.dtype in _NARROW else data.dtype
    minus_one, zero, shape = integers(-1), integers(0), op("Shape", data, rank=1)
    element: ir.Value | None = None
    for axis in range(depth):
        size, at = op("Gather", shape, integers(axis), rank=1), integers(axis)
        place = op("Gather", indices, at, rank=index_rank, axis=-1)
        # Negative indices count from the end. Out of range on the first axis stays so, for onnxruntime to refuse.
        negative = op("Less", place, zero, rank=index_rank, dtype=ir.DataType.BOOL)
        place = op("Where", negative, op("Add", place, size, rank=index_rank), place, rank=index_rank)
        before = None if element is None else op("Mul", element, size, rank=index_rank)
        element = place if before is None else op("Add", before, place, rank=index_rank)
    assert element is not None
    if depth < rank:
        sizes = op("Slice", shape, integers(depth), integers(rank), rank=1)
        width = op("ReduceProd", sizes, rank=0, keepdims=0)
        begin, step = (op("Squeeze", integers(number), rank=0) for number in (0, 1))
        column = op("Range", begin, width, step, rank=1)
        element = op("Add", op("Mul", element, width, rank=index_rank), column, rank=index_rank)
    sums = op(
        "ScatterElements",
        flat(data, data.dtype),
        op("Reshape", element, minus_one, rank=1),
        flat(updates, data.dtype),
        rank=1,
        dtype=wide,
        reduction=node.attributes.get_string("reduction", "none"),
    )
    if wide != data.dtype:
        sums = op("Cast", sums, rank=1, dtype=data.dtype, to=data.dtype)
    replacement = op("Reshape", sums, shape, rank=rank, dtype=data.dtype, allowzero=1)
    replacement.type, replacement.shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, [result], [replacement])
