"""`ScatterND` with a reduction, which onnxruntime computes wrongly in several threads, written as `ScatterElements`.

onnxruntime's CPU kernel of ScatterND shares the indices among its threads, and where two threads meet in one element,
an addend is lost (onnxruntime issues 18048 and 23396). ScatterND is how exporters write the gradients of embeddings and
of indexing, where indices come many times. onnxruntime's ScatterElements adds in the order of the indices.

It takes rows as they are, along the first axis, or elements of flat data, by number. Numbers take about two thirds of
the time, but the result has to get its shape back, which onnxruntime copies where it is an output of the model. So rows
stay rows where they are few and go to many places, as in the embedding of a large vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_PLACES = 4
"""The fewest places per row for which rows stay rows."""


def reduces_by_scatter_nd(model: ir.Model) -> bool:
    """Return whether a model has a ScatterND with a reduction."""
    groups = (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values()))
    return any(_reduces(node) for group in groups for node in group)


def _reduces(node: ir.Node, op_type: str = "ScatterND") -> bool:
    return node.op_type == op_type and not node.domain and node.attributes.get_string("reduction", "none") != "none"


def replace_scatter_nd(model: ir.Model) -> None:
    """Replace every ScatterND of a model that has a reduction, and known ranks, by ScatterElements.

    Numbers of 16 bits, for which onnxruntime has no kernel of either, are added in float32.
    """
    for node in list(model.graph.all_nodes()):
        # What comes of a ScatterND below is of 32 bits already.
        if _reduces(node, "ScatterElements"):
            _widen(node)
        if not _reduces(node):
            continue
        data, indices, _ = node.inputs
        if data is None or indices is None or data.shape is None or indices.shape is None:
            continue
        if isinstance(indices.shape[-1], int):
            _replace(node, data, data.shape, indices.shape)


def _widen(node: ir.Node) -> None:
    """Let a ScatterElements of 16 bits add in float32."""
    result = node.outputs[0]
    dtype, wide = result.dtype, ir.DataType.FLOAT
    if dtype not in _NARROW:
        return
    data, indices, updates = node.inputs
    assert node.graph is not None and data is not None and updates is not None and dtype is not None
    tape = ir.tape.Tape()

    def cast(value: ir.Value, to: ir.DataType, what: str) -> ir.Value:
        output = ir.Value(name=f"{result.name}/{what}", type=ir.TensorType(to), shape=value.shape)
        return tape.op("Cast", [value], {"to": to.value}, output=output)

    given = [cast(data, wide, "data"), indices, cast(updates, wide, "updates")]
    sums = ir.Value(name=f"{result.name}/sums", type=ir.TensorType(wide), shape=result.shape)
    replacement = cast(tape.op(node.op_type, given, dict(node.attributes), output=sums), dtype, "narrow")
    replacement.type, replacement.shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, [result], [replacement])


def _replace(node: ir.Node, data: ir.Value, shape: ir.Shape, index_shape: ir.Shape) -> None:
    """Replace a ScatterND whose indices, the last of their axes, are places on the first axes of the data."""
    tape = ir.tape.Tape()
    indices, updates, result, dtype = node.inputs[1], node.inputs[2], node.outputs[0], data.dtype
    assert indices is not None and updates is not None and dtype is not None and node.graph is not None
    wide = ir.DataType.FLOAT if dtype in _NARROW else dtype

    def op(
        op_type: str, *inputs: ir.Value, rank: int, dtype: ir.DataType = ir.DataType.INT64, **attributes: Any
    ) -> ir.Value:
        name = f"{result.name}/{op_type}_{len(tape.nodes)}"
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([None] * rank))
        return tape.op(op_type, list(inputs), attributes, output=output)

    def integers(*numbers: int) -> ir.Value:
        return op("Constant", rank=1, value=ir.tensor(numbers, dtype=ir.DataType.INT64))

    def reduced(data: ir.Value, places: ir.Value, updates: ir.Value, rank: int) -> ir.Value:
        if wide != dtype:
            data, updates = (op("Cast", value, rank=rank, dtype=wide, to=wide) for value in (data, updates))
        reduction = node.attributes.get_string("reduction", "none")
        sums = op("ScatterElements", data, places, updates, rank=rank, dtype=wide, axis=0, reduction=reduction)
        return sums if wide == dtype else op("Cast", sums, rank=rank, dtype=dtype, to=dtype)

    def by_rows() -> ir.Value:
        rank, row = len(shape), shape.numpy()[1:]
        rows = updates if len(index_shape) == 2 else op("Reshape", updates, integers(-1, *row), rank=rank, dtype=dtype)
        places = op("Reshape", indices, integers(-1, *[1] * len(row)), rank=rank)
        return reduced(data, op("Expand", places, op("Shape", rows, rank=1), rank=rank), rows, rank)

    def by_elements() -> ir.Value:
        rank, index_rank, depth = len(shape), len(index_shape), index_shape[-1]
        assert isinstance(depth, int)
        minus_one, zero, sizes = integers(-1), integers(0), op("Shape", data, rank=1)
        element: ir.Value | None = None
        for axis in range(depth):
            size, at = op("Gather", sizes, integers(axis), rank=1), integers(axis)
            place = op("Gather", indices, at, rank=index_rank, axis=-1)
            # Negative indices count from the end. Out of range on the first axis stays so, for onnxruntime to refuse.
            negative = op("Less", place, zero, rank=index_rank, dtype=ir.DataType.BOOL)
            place = op("Where", negative, op("Add", place, size, rank=index_rank), place, rank=index_rank)
            before = None if element is None else op("Mul", element, size, rank=index_rank)
            element = place if before is None else op("Add", before, place, rank=index_rank)
        assert element is not None
        if depth < rank:
            row = op("Slice", sizes, integers(depth), integers(rank), rank=1)
            width = op("ReduceProd", row, rank=0, keepdims=0)
            begin, step = (op("Squeeze", integers(number), rank=0) for number in (0, 1))
            column = op("Range", begin, width, step, rank=1)
            element = op("Add", op("Mul", element, width, rank=index_rank), column, rank=index_rank)
        flat, added = (op("Reshape", value, minus_one, rank=1, dtype=dtype) for value in (data, updates))
        sums = reduced(flat, op("Reshape", element, minus_one, rank=1), added, rank=1)
        return op("Reshape", sums, sizes, rank=rank, dtype=dtype, allowzero=1)

    replacement = by_rows() if _are_few_rows(shape, index_shape) else by_elements()
    replacement.type, replacement.shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, [result], [replacement])


def _are_few_rows(shape: ir.Shape, index_shape: ir.Shape) -> bool:
    """Whether whole rows are reduced, few to the places that there are; 0 columns have no shape to go back to."""
    if not (shape.is_static() and index_shape.is_static()) or 0 in shape[1:] or index_shape[-1] != 1:
        return False
    places, *_ = shape.numpy()
    return _PLACES * math.prod(index_shape.numpy()) <= places
