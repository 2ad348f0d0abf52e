"""Operators that read and write elements by index."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor
from gradfuse.differentiation.views import positions_of, scattered


@gradient("Gather")
def gather(call: Call) -> Iterator[Gradient]:
    """Rows of the gradient are added up where their indices say."""
    x, dy = _operands(call)
    indices, rank = call.x[1], call.rank(x)
    assert indices is not None
    axis = call.attribute("axis", 0) % rank
    tape, shape = call.tape, call.shape(x)
    count = indices.op("Size").reshape([1])
    parts = [shape.slice(tape.ints(0), tape.ints(axis), tape.ints(0))] if axis else []
    parts.append(count)
    if axis + 1 < rank:
        parts.append(shape.slice(tape.ints(axis + 1), tape.ints(rank), tape.ints(0)))
    rows = dy.reshape(tape.concat(parts))
    column = indices.cast(ir.DataType.INT64).reshape(tape.concat([count, tape.ints(*[1] * (rank - axis - 1))]))
    spread = column.expand(rows.shape()) if rank > 1 else column
    yield x.zeros().op("ScatterElements", spread, rows, axis=axis, reduction="add")


@gradient("GatherElements")
def gather_elements(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    yield x.zeros().op("ScatterElements", call.x[1], dy, axis=call.attribute("axis", 0), reduction="add")


@gradient("GatherND")
def gather_nd(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
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
