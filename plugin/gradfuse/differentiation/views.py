"""Operators that move elements about: shapes, pieces, order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir

from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Part, Tensor


def scattered(call: Call, positions: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Add the elements of a gradient to zeros of the shape of `x`, each at its position in the flattened `x`."""
    zeros = call.tape.op(
        "ConstantOfShape",
        x.op("Size").reshape([1]),
        dtype=dy.dtype,
        value=ir.tensor([0.0], dtype=dy.dtype),
    )
    flat = zeros.op("ScatterElements", positions.reshape([-1]), dy.reshape([-1]), axis=0, reduction="add")
    return flat.reshape(call.shape(x))


def positions_of(call: Call, x: Tensor) -> Tensor:
    """Return int64 of the shape of `x`: the position of each element in the flattened `x`."""
    tape = call.tape
    zero, one = tape.constant(0), tape.constant(1)
    return tape.op("Range", zero, x.op("Size"), one).reshape(call.shape(x))


@gradient("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def reshape(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield dy.reshape(call.shape(x))


@gradient("Transpose")
def transpose(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    perm = call.attribute("perm")
    if perm is None:
        perm = list(reversed(range(call.rank(x))))
    yield dy.transpose([perm.index(axis) for axis in range(len(perm))])


@gradient("Expand")
def expand(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield call.summed_to(dy, x, call.y[0])


@gradient("Tile")
def tile(call: Call) -> Iterator[Gradient]:
    """With every axis split into repeats and elements, the repeats are summed."""
    x, dy = call.operands()
    repeats, rank = call.x[1], call.rank(x)
    assert repeats is not None
    if not rank:
        yield dy
        return
    pairs = call.tape.concat([repeats.unsqueeze(1), call.shape(x).unsqueeze(1)], axis=1)
    split = dy.reshape(pairs.reshape([-1]))
    yield split.sum(list(range(0, 2 * rank, 2)), keepdims=False)


@gradient("Concat")
def concat(call: Call) -> Iterator[Gradient]:
    dy = call.dy[0]
    assert dy is not None
    axis = call.attribute("axis")
    inputs = [x for x in call.x if x is not None]
    if len(inputs) == 1:
        yield dy
        return
    sizes = call.tape.concat([call.size(x, axis) for x in inputs])
    yield from call.tape.parts("Split", len(inputs), dy, sizes, axis=axis)


@gradient("Split")
def split(call: Call) -> Iterator[Gradient]:
    """The parts of which the result does not depend have zeros."""
    parts = [y.zeros() if dy is None else dy for y, dy in zip(call.y, call.dy, strict=True)]
    yield call.tape.concat(parts, axis=call.attribute("axis", 0))


@gradient("Slice")
def slice_(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    starts, steps, axes = call.input(1), call.constant(4), call.constant(3)
    assert starts is not None
    count = call.constant(1)
    if axes is None and call.input(3) is None and count is not None:
        axes = list(range(count.size))  # type: ignore[assignment]
    in_ones = call.input(4) is None or (steps is not None and (steps == 1).all())
    if not in_ones or axes is None:
        positions = positions_of(call, x).op("Slice", *call.x[1:])
        yield scattered(call, positions, dy, x)
        return
    rank = call.rank(x)
    part = _known_part(call, x, dy, axes)
    if part is not None:
        yield part
        return
    # Zeros on both sides: begin of them ahead, and as many behind as are missing.
    at = call.tape.ints(*(int(axis) % rank for axis in axes))
    sizes = call.shape(x).op("Gather", at, axis=0)
    begin = (starts.cast(ir.DataType.INT64) < call.tape.constant(0)).where(
        starts.cast(ir.DataType.INT64) + sizes, starts.cast(ir.DataType.INT64)
    )
    begin = begin.op("Max", call.tape.constant(0)).op("Min", sizes)
    behind = sizes - begin - dy.shape().op("Gather", at, axis=0)
    yield padded(call, dy, at, begin, behind, rank)


def _known_part(call: Call, x: Tensor, dy: Tensor, axes: Iterable[Any]) -> Tensor | None:
    """Return the gradient of a slice along one axis whose place is known; None where it is not."""
    starts, rank = call.constant(1), call.rank(x)
    cuts = []
    for index, axis in enumerate(axes):
        whole, size = (call.dims(value)[int(axis) % rank] for value in (x, call.y[0]))
        if starts is None or not isinstance(whole, int) or not isinstance(size, int) or not size:
            return None
        start = int(starts.flat[index])
        begin = min(max(start + whole if start < 0 else start, 0), whole)
        if size < whole:
            cuts.append(Part(dy, rank, int(axis) % rank, begin, size, whole))
    if not cuts:
        return dy
    return cuts[0] if len(cuts) == 1 else None


def padded(call: Call, tensor: Tensor, axes: Tensor, begin: Tensor, end: Tensor, rank: int) -> Tensor:
    """Return a tensor with zeros ahead of and behind its elements along some axes."""
    tape = call.tape
    none = tape.ints(*[0] * rank)
    pads = tape.concat([none.op("ScatterElements", axes, amounts, axis=0) for amounts in (begin, end)])
    return tensor.op("Pad", pads, 0.0)


@gradient("Pad")
def pad(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    pads, axes = call.x[1], call.input(3)
    assert pads is not None
    if call.attribute("mode", "constant") == "constant":
        # Padding by less than nothing cuts off.
        yield dy.op("Pad", -pads, 0.0, axes)
        value = call.input(2)
        inside = None if value is None or 2 not in call.needed else x.ones().op("Pad", pads, 0.0, axes)
        yield lambda: None
        yield lambda: None if inside is None else dy.masked(inside.equals(0)).sum(None, keepdims=False)
        return
    positions = positions_of(call, x).op("Pad", pads, None, axes, mode=call.attribute("mode"))
    yield scattered(call, positions, dy, x)


@gradient("DepthToSpace")
def depth_to_space(call: Call) -> Iterator[Gradient]:
    _, dy = call.operands()
    block = call.attribute("blocksize")
    depth = dy.op("SpaceToDepth", blocksize=block)
    if call.attribute("mode", "DCR") == "DCR":
        yield depth
        return
    # SpaceToDepth gives (block, block, C); the other mode has (C, block, block).
    tape = call.tape
    spatial = depth.op("Shape", start=2)
    apart = depth.reshape(tape.concat([depth.size(0), tape.ints(block * block), dy.size(1), spatial]))
    yield apart.transpose([0, 2, 1, 3, 4]).reshape(depth.shape())


@gradient("SpaceToDepth")
def space_to_depth(call: Call) -> Iterator[Gradient]:
    _, dy = call.operands()
    yield dy.op("DepthToSpace", blocksize=call.attribute("blocksize"), mode=call.attribute("mode"))


@gradient("ReverseSequence")
def reverse_sequence(call: Call) -> Iterator[Gradient]:
    _, dy = call.operands()
    axes = {name: call.attribute(name) for name in ("batch_axis", "time_axis")}
    yield dy.op("ReverseSequence", call.x[1], **axes)


@gradient("Trilu")
def trilu(call: Call) -> Iterator[Gradient]:
    _, dy = call.operands()
    yield dy.op("Trilu", call.input(1), upper=call.attribute("upper", 1))


@gradient("Resize", limits="no policy that keeps the aspect ratio", fixed=[1, 2])
def resize(call: Call) -> Iterator[Gradient]:
    """Each axis is resized by a matrix: what Resize makes of the unit vectors. The gradient is multiplied by it."""
    x, dy = call.operands()
    mode = call.attribute("coordinate_transformation_mode", "half_pixel")
    crops = mode == "tf_crop_and_resize"
    if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise call.error("it keeps the aspect ratio; expected 'stretch'")
    tape, rank = call.tape, call.rank(x)
    names = ("coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "mode", "nearest_mode", "antialias")
    options = {name: call.attribute(name) for name in names}
    region, scales, sizes = (call.input(k) for k in (1, 2, 3))
    before, after = call.dims(x), call.dims(call.y[0])
    axes = [axis % rank for axis in call.attribute("axes") or range(rank)]
    for position, axis in enumerate(axes):
        if before[axis] is not None and before[axis] == after[axis] and not crops:
            continue
        n = x.size(axis)
        square = tape.concat([n, n])
        none = ir.tensor([0.0], dtype=ir.DataType.FLOAT)
        empty = tape.op("ConstantOfShape", square, dtype=ir.DataType.FLOAT, value=none)
        units = empty.op("EyeLike").reshape(tape.concat([tape.ints(1, 1), square]))
        at = tape.ints(position)
        one = tape.constant([1.0, 1.0, 1.0], ir.DataType.FLOAT)
        part = None
        if crops and region is not None:
            # What lies outside has the extrapolation value, which is 0 here: it does not depend on the input.
            whole = tape.constant([0.0, 0.0, 0.0], region.dtype)
            begin, end = (region.op("Gather", tape.ints(k), axis=0) for k in (position, position + len(axes)))
            part = tape.concat([whole, begin, tape.constant([1.0, 1.0, 1.0], region.dtype), end])
        if sizes is not None:
            wanted = tape.concat([tape.ints(1, 1), n, sizes.op("Gather", at, axis=0)])
            matrix = units.op("Resize", part, None, wanted, **options)
        else:
            assert scales is not None
            scale = tape.concat([one, scales.op("Gather", at, axis=0)])
            matrix = units.op("Resize", part, scale, **options)
        # (n, m), transposed: the gradient of this axis goes last, is multiplied and goes back.
        matrix = matrix.cast(dy.dtype).squeeze(0, 1)
        order = [*(k for k in range(rank) if k != axis), axis]
        product = dy.transpose(order).matmul(matrix.transpose([1, 0]))
        dy = product.transpose([order.index(k) for k in range(rank)])
    yield dy
