"""Operators that read and write elements by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from gradfuse.custom_ops.embedding_dense_backward import MAX_RANK
from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Part, Tensor
from gradfuse.differentiation.views import padded, positions_of, scattered

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
    x, dy = call.operands()
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
    place = call.constant(1)
    if place is not None and place.size == 1 and place.ndim <= 1:
        part = dy if place.ndim else dy.unsqueeze(axis)
        yield _padded(call, x, part, int(place.item()), axis)
        return
    yield _added(call, x, dy, indices, axis)


def _padded(call: Call, x: Tensor, part: Tensor, place: int, axis: int) -> Tensor:
    """Zeros in the shape of `x`, with a part of size 1 along an axis at a place."""
    tape, rank = call.tape, call.rank(x)
    number = None if x.value.shape is None else x.value.shape[axis]
    if isinstance(number, int):
        return Part(part, rank, axis, place % number, 1, number)
    size = x.size(axis).reshape([1])
    begin = tape.ints(place) if place >= 0 else size + place
    return padded(call, part, tape.ints(axis), begin, size - 1 - begin, rank)


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
    x, dy = call.operands()
    indices, axis = call.x[1], call.attribute("axis", 0)
    assert indices is not None
    shape = indices.value.shape
    if shape is None or shape[axis] != 1:
        yield x.zeros().op("ScatterElements", indices, dy, axis=axis, reduction="add")
        return
    # No two places of one index are the same, and onnxruntime takes several times as long to add as to set.
    places = _places_of_rows(call, indices, axis % call.rank(x))
    if places is None:
        yield x.zeros().op("ScatterElements", indices, dy, axis=axis)
    else:
        yield x.zeros().op("ScatterND", places, dy)


def _places_of_rows(call: Call, indices: Tensor, axis: int) -> Tensor | None:
    """Return where whole rows come from, as ScatterND takes it; None: the indices are not repeated along the last axes.

    onnxruntime copies rows many times as fast as elements, and in threads.
    """
    data, spread = call.node.inputs[:2]
    node = None if spread is None else spread.producer()
    column = node.inputs[0] if node is not None and (node.domain, node.op_type) == ("", "Expand") else None
    if data is None or spread is None or column is None or None in (data.shape, spread.shape, column.shape):
        return None
    assert data.shape is not None and spread.shape is not None and column.shape is not None
    rank = spread.shape.rank()
    if column.shape.rank() != rank:
        return None
    leading = rank
    while leading > axis + 1 and column.shape[leading - 1] == 1:
        size = spread.shape[leading - 1]
        if not isinstance(size, int) or size != data.shape[leading - 1]:
            break
        leading -= 1
    if leading == rank:
        return None
    tape = call.tape
    counts = indices.shape().slice(tape.ints(0), tape.ints(leading), tape.ints(0))
    along = []
    for one in range(leading):
        if one == axis:
            places = tape.of(column).cast(ir.DataType.INT64).squeeze(*range(leading, rank))
        else:
            count = indices.size(one).squeeze(0)
            places = tape.op("Range", tape.constant(0), count, tape.constant(1))
            places = places.unsqueeze(*(other for other in range(leading) if other != one))
        along.append(places.expand(counts).unsqueeze(leading))
    return tape.concat(along, axis=leading)


@gradient("GatherND")
def gather_nd(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    indices, last = call.x[1], call.node.inputs[1]
    assert indices is not None and last is not None
    if not call.attribute("batch_dims", 0) and last.shape is not None and last.shape[-1] == 1:
        yield _added(call, x, dy, indices, 0)
        return
    positions = positions_of(call, x).op("GatherND", call.x[1], batch_dims=call.attribute("batch_dims", 0))
    yield scattered(call, positions, dy, x)


@gradient("ScatterElements", "Scatter")
def scatter_elements(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    indices, updates = call.x[1], call.x[2]
    assert indices is not None and updates is not None
    axis, reduction = call.attribute("axis", 0), call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        by_x, by_updates = _of_reduced(x, updates, indices, call.y[0], dy, axis, reduction)
        yield by_x
        yield None
        yield by_updates
        return
    yield (
        lambda: (
            dy if reduction == "add" else dy.op("ScatterElements", indices, updates.zeros().cast(dy.dtype), axis=axis)
        )
    )
    yield None
    yield lambda: dy.op("GatherElements", indices, axis=axis)


@gradient("ScatterND")
def scatter_nd(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    indices, updates = call.x[1], call.x[2]
    assert updates is not None
    reduction = call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        # The elements of the flattened tensors, each at its place.
        places = positions_of(call, x).op("GatherND", indices)
        flat, new, at, result, slope = (one.reshape([-1]) for one in (x, updates, places, call.y[0], dy))
        by_x, by_updates = _of_reduced(flat, new, at, result, slope, 0, reduction)
        yield lambda: by_x().like(x)
        yield None
        yield lambda: by_updates().like(updates)
        return
    yield lambda: dy if reduction == "add" else dy.op("ScatterND", indices, updates.zeros())
    yield None
    yield lambda: dy.op("GatherND", indices)


def _of_reduced(
    x: Tensor, updates: Tensor, indices: Tensor, y: Tensor, dy: Tensor, axis: int, reduction: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The gradients of `x` and of updates that were scattered into it by "mul", "max" or "min".

    Elements that are equal share the gradient of an extreme. That of a factor is the product of the others: by division
    where none of them is 0, else for the only zero.
    """

    def gathered(tensor: Tensor) -> Tensor:
        return tensor.op("GatherElements", indices, axis=axis)

    def scattered_into(tensor: Tensor, others: Tensor, how: str) -> Tensor:
        return tensor.op("ScatterElements", indices, others, axis=axis, reduction=how)

    if reduction != "mul":
        hit, hits = (one.equals(result).cast(dy.dtype) for one, result in ((x, y), (updates, gathered(y))))
        share = dy / scattered_into(hit, hits, "add")
        return lambda: hit * share, lambda: hits * gathered(share)
    zero, zeros = x.equals(0), updates.equals(0)
    other, others = (at.where(one.ones(), one) for at, one in ((zero, x), (zeros, updates)))
    product = scattered_into(other, others, "mul") * dy
    count = scattered_into(zero.cast(dy.dtype), zeros.cast(dy.dtype), "add")

    def of(factor: Tensor, is_zero: Tensor, product: Tensor, count: Tensor) -> Tensor:
        alone = is_zero.op("And", count.equals(1))
        return count.equals(0).where(product / factor, product.masked(alone))

    return (
        lambda: of(other, zero, product, count),
        lambda: of(others, zeros, gathered(product), gathered(count)),
    )


@gradient("TensorScatter", fixed=[2])
def tensor_scatter(call: Call) -> Iterator[Gradient]:
    """Of the past, what was not written over; of the update, what is found at the places that it was written to."""
    past, dy = call.operands()
    update, begin, tape = call.x[1], call.input(2), call.tape
    assert update is not None
    rank = call.rank(past)
    axis, mode = call.attribute("axis", -2) % rank, call.attribute("mode", "linear")
    yield lambda: dy.op("TensorScatter", update.zeros(), begin, axis=axis, mode=mode)

    def of_update() -> Tensor:
        zero, one = tape.constant(0), tape.constant(1)
        places = tape.op("Range", zero, update.size(axis).squeeze(0), one).reshape([-1, *[1] * (rank - axis - 1)])
        if begin is not None:
            places = places + begin.cast(ir.DataType.INT64).reshape([-1, *[1] * (rank - 1)])
        if mode == "circular":
            places = places.op("Mod", past.size(axis))
        return dy.op("GatherElements", places.expand(update.shape()), axis=axis)

    yield of_update


@gradient("TopK")
def top_k(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield x.zeros().op("ScatterElements", call.y[1], dy, axis=call.attribute("axis", -1))


@gradient("Compress")
def compress(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
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
