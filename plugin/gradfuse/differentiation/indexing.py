"""Operators that read and write elements by index."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from gradfuse.custom_ops.embedding_dense_backward import MAX_RANK
from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor
from gradfuse.differentiation.views import positions_of, scattered

LOOKS_UP = "gradfuse.looks_up_rows"
"""Key in the metadata of a Gather whose gradient may be `aclnn::EmbeddingDenseBackward`."""

_SUMMED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def mark_embeddings(graph: ir.Graph) -> None:
    """Mark nodes that look up rows of a matrix, whose number is known."""
    for node in graph:
        data = node.inputs[0] if node.op_type == "Gather" and not node.domain else None
        if data is None or data.dtype not in _SUMMED or data.shape is None or data.shape.rank() != 2:
            continue
        output = node.outputs[0]
        known = isinstance(data.shape[0], int) and output.shape is not None and output.shape.rank() <= MAX_RANK
        if known and node.attributes.get_int("axis", 0) in (0, -2):
            node.meta[LOOKS_UP] = True


@gradient("Gather")
def gather(call: Call) -> Iterator[Gradient]:
    """Rows of the gradient are added up where their indices say."""
    x, dy = _operands(call)
    indices, rank = call.x[1], call.rank(x)
    assert indices is not None
    axis = call.attribute("axis", 0) % rank
    if call.node.meta.get(LOOKS_UP):
        data = call.node.inputs[0]
        assert data is not None and data.shape is not None
        number = data.shape[0]
        assert isinstance(number, int)
        places = indices.cast(ir.DataType.INT64)
        places = (places < 0).where(places + number, places)
        yield dy.op("EmbeddingDenseBackward", places, domain="aclnn", num_weights=number)
        return
    yield _added(call, x, dy, indices, axis)


def _added(call: Call, x: Tensor, dy: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Zeros in the shape of `x`, with parts of the gradient added up along an axis where indices say."""
    tape, shape, rank = call.tape, call.shape(x), call.rank(x)
    count = indices.op("Size").reshape([1])
    parts = [shape.slice(tape.ints(0), tape.ints(axis), tape.ints(0))] if axis else []
    parts.append(count)
    if axis + 1 < rank:
        parts.append(shape.slice(tape.ints(axis + 1), tape.ints(rank), tape.ints(0)))
    rows = dy.reshape(tape.concat(parts))
    column = indices.cast(ir.DataType.INT64).reshape(tape.concat([count, tape.ints(*[1] * (rank - axis - 1))]))
    spread = column.expand(rows.shape()) if rank > 1 else column
    added: Tensor = x.zeros().op("ScatterElements", spread, rows, axis=axis, reduction="add")
    return added


@gradient("GatherElements")
def gather_elements(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    yield x.zeros().op("ScatterElements", call.x[1], dy, axis=call.attribute("axis", 0), reduction="add")


@gradient("GatherND")
def gather_nd(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    indices, last = call.x[1], call.node.inputs[1]
    assert indices is not None and last is not None
    if not call.attribute("batch_dims", 0) and last.shape is not None and last.shape[-1] == 1:
        yield _added(call, x, dy, indices, 0)
        return
    positions = positions_of(call, x).op("GatherND", call.x[1], batch_dims=call.attribute("batch_dims", 0))
    yield scattered(call, positions, dy, x)


@gradient("ScatterElements", "Scatter", limits="reduction none or add")
def scatter_elements(call: Call) -> Iterator[Gradient]:
    _, dy = _operands(call)
    indices, updates = call.x[1], call.x[2]
    assert updates is not None
    axis, reduction = call.attribute("axis", 0), _reduction(call)
    yield (
        lambda: (
            dy if reduction == "add" else dy.op("ScatterElements", indices, updates.zeros().cast(dy.dtype), axis=axis)
        )
    )
    yield None
    yield lambda: dy.op("GatherElements", indices, axis=axis)


@gradient("ScatterND", limits="reduction none or add")
def scatter_nd(call: Call) -> Iterator[Gradient]:
    _, dy = _operands(call)
    indices, updates = call.x[1], call.x[2]
    assert updates is not None
    reduction = _reduction(call)
    yield lambda: dy if reduction == "add" else dy.op("ScatterND", indices, updates.zeros())
    yield None
    yield lambda: dy.op("GatherND", indices)


@gradient("TopK")
def top_k(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    yield x.zeros().op("ScatterElements", call.y[1], dy, axis=call.attribute("axis", -1))


@gradient("Compress")
def compress(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    positions = positions_of(call, x).op("Compress", call.x[1], axis=call.attribute("axis"))
    yield scattered(call, positions, dy, x)


@gradient("OneHot", fixed=[0, 1])
def one_hot(call: Call) -> Iterator[Gradient]:
    """Its values are the only thing that is differentiable: that of the others, and that of the class."""
    dy = call.dy[0]
    assert dy is not None
    values = call.tape.constant([0.0, 1.0], dy.dtype)
    hot: Tensor = call.tape.op("OneHot", call.x[0], call.x[1], values, dtype=dy.dtype, axis=call.attribute("axis", -1))
    yield None
    yield None
    on = (dy * hot).sum(None, keepdims=False).reshape([1])
    yield call.tape.concat([dy.sum(None, keepdims=False).reshape([1]) - on, on])


def _reduction(call: Call) -> str:
    reduction: str = call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.error(f"reduction is {reduction!r}; expected 'none' or 'add'")
    return reduction


def _operands(call: Call) -> tuple[Tensor, Tensor]:
    x, dy = call.x[0], call.dy[0]
    assert x is not None and dy is not None
    return x, dy
