"""`ScatterND` with a reduction, written as `ScatterElements`.

onnxruntime's CPU kernel of ScatterND shares the indices among its threads, and where two threads meet in one element,
an addend is lost (onnxruntime issues 18048 and 23396). ScatterND is how exporters write the gradients of embeddings and
of indexing, where indices come many times. onnxruntime's ScatterElements adds in the order of the indices. Of 16-bit
types it adds in float32.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def replace_scatter_nd(model: ir.Model) -> None:
    """Put ScatterElements in the place of every ScatterND of a model that has a reduction, and known ranks."""
    for node in list(model.graph.all_nodes()):
        if node.op_type != "ScatterND" or node.domain or node.attributes.get_string("reduction", "none") == "none":
            continue
        data, indices, _ = node.inputs
        if data is None or indices is None or data.shape is None or indices.shape is None:
            continue
        if isinstance(indices.shape[-1], int):
            _replace(node, data, indices, indices.shape[-1])


def _replace(node: ir.Node, data: ir.Value, indices: ir.Value, depth: int) -> None:
    """Replace one ScatterND whose indices, (..., depth), are places on the first `depth` axes of the data."""
    tape = ir.tape.Tape()
    updates, result = node.inputs[2], node.outputs[0]
    assert updates is not None and data.shape is not None and indices.shape is not None

    def op(op_type: str, *inputs: ir.Value, like: ir.Value = indices, rank: int = 0, **attributes: Any) -> ir.Value:
        name = f"{result.name}/{op_type}_{len(tape.nodes)}"
        output = ir.Value(name=name, type=like.type, shape=ir.Shape([None] * rank))
        return tape.op(op_type, list(inputs), attributes, output=output)

    def constant(number: int) -> ir.Value:
        return op("Constant", value=ir.tensor(number, dtype=ir.DataType.INT64))

    shape = op("Shape", data, rank=1)
    rank = len(indices.shape)
    if depth > 1:
        place = None
        for axis in range(depth):
            size = op("Gather", shape, constant(axis))
            # Negative indices count from the end.
            on_axis = op("Mod", op("Gather", indices, constant(axis), rank=rank - 1, axis=-1), size, rank=rank - 1)
            before = None if place is None else op("Mul", place, size, rank=rank - 1)
            place = on_axis if before is None else op("Add", before, on_axis, rank=rank - 1)
        assert place is not None
        last = op("Constant", rank=1, value=ir.tensor([-1], dtype=ir.DataType.INT64))
        indices = op("Unsqueeze", place, last, rank=rank)
    flat = depth == 1 and len(data.shape) == 2 and rank == 2
    rows, added, places = data, updates, indices
    if not flat:
        rows = op("Flatten", data, like=data, rank=2, axis=depth)
        added = op("Flatten", updates, like=data, rank=2, axis=rank - 1)
        places = op("Flatten", indices, rank=2, axis=rank - 1)
    places = op("Expand", places, op("Shape", added, rank=1), rank=2)
    places.shape = added.shape
    if data.dtype in _NARROW:
        # onnxruntime has no kernel for these.
        wide = ir.Value(name="", type=ir.TensorType(ir.DataType.FLOAT))
        rows, added = (op("Cast", value, like=wide, rank=2, to=ir.DataType.FLOAT) for value in (rows, added))
    reduction = node.attributes.get_string("reduction", "none")
    sums = op("ScatterElements", rows, places, added, like=rows, rank=2, axis=0, reduction=reduction)
    sums.shape = rows.shape
    if data.dtype in _NARROW:
        sums = op("Cast", sums, like=data, rank=2, to=data.dtype)
    replacement = sums if flat else op("Reshape", sums, shape, like=data, allowzero=1)
    replacement.type, replacement.shape = result.type, result.shape
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, [result], [replacement])
