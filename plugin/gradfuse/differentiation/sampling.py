"""GridSample, DeformConv, RoiAlign and CumProd by operators that have rules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from gradfuse.differentiation.convolutions import kernel_of
from gradfuse.differentiation.expansion import expansion
from gradfuse.differentiation.rules import Call
from gradfuse.differentiation.tensors import Tape, Tensor

_AXES_ARE_INPUT = 18
"""The opset from which on the axes of ReduceMax are an input."""


class _Tap(NamedTuple):
    """What a sample takes of one axis: indices, which lie within it, and weights; of (batch, samples) both."""

    at: Tensor
    weight: Tensor | None


@expansion("GridSample")
def grid_sample(call: Call) -> list[Tensor | None]:
    """Each sample is a sum of neighbours, weighted by where it lies between them along each axis.

    With padding by zeros the weights of those beyond the ends are 0; else coordinates and indices are brought within.
    """
    tape, x, grid = call.tape, call.x[0], call.x[1]
    assert x is not None and grid is not None
    axes = call.rank(x) - 2
    mode = call.attribute("mode", "linear")
    taps_of = {"linear": _linear, "bilinear": _linear, "nearest": _nearest, "cubic": _cubic, "bicubic": _cubic}[mode]
    padding, aligned = call.attribute("padding_mode", "zeros"), bool(call.attribute("align_corners", 0))
    samples = tape.concat([grid.size(0), grid.op("Shape", start=1, end=-1).op("ReduceProd", keepdims=1)])
    taps, sizes = [], []
    for axis in range(axes):
        # The grid's last axis begins with the last axis of the image.
        last = tape.ints(axes - 1 - axis)
        position = grid.op("Gather", last, axis=-1).reshape(samples)
        sizes.append(x.size(axis + 2))
        taps.append(_taps(position, sizes[-1].cast(grid.dtype), taps_of, padding, aligned))
    flat = x.reshape(tape.concat([x.op("Shape", end=2), tape.ints(-1)]) if axes > 1 else x.shape())
    values = functools.reduce(Tensor.__add__, _weighted(flat, taps, sizes))
    return [values.reshape(tape.concat([x.op("Shape", end=2), grid.op("Shape", start=1, end=-1)]))]


def _weighted(
    flat: Tensor, taps: Sequence[Sequence[_Tap]], sizes: Sequence[Tensor], first: Tensor | None = None
) -> list[Tensor]:
    """Return what each combination of taps finds, times its weight: (B, C, samples) each.

    Args:
        flat: (B, C, elements).
        taps: of each axis; indices and weights of several axes broadcast to (B, ...).
        sizes: of each axis, a vector of one element.
        first: where the elements begin, which broadcasts likewise; None: at 0.
    """
    tape, found = flat.tape, []
    for combination in itertools.product(*taps):
        within: Tensor | None = None
        weight: Tensor | None = None
        for tap, size in zip(combination, sizes, strict=True):
            index = tap.at.cast(ir.DataType.INT64)
            within = index if within is None else within * size + index
            if tap.weight is not None:
                weight = tap.weight if weight is None else weight * tap.weight
        assert within is not None
        at = within if first is None else first + within
        rows = at.reshape(tape.concat([flat.size(0), tape.ints(-1)]))
        places = rows.unsqueeze(1).expand(tape.concat([flat.op("Shape", end=2), rows.size(1)]))
        value = flat.op("GatherElements", places, axis=2)
        if weight is not None:
            value = value * weight.cast(flat.dtype).reshape(rows.shape()).unsqueeze(1)
        found.append(value)
    return found


def _taps(position: Tensor, size: Tensor, taps_of: object, padding: str, aligned: bool) -> list[_Tap]:
    """Return the taps along an axis of positions from -1 to 1."""
    assert callable(taps_of)
    where = (position + 1) * 0.5 * (size - 1) if aligned else ((position + 1) * size - 1) * 0.5
    if taps_of is not _cubic:
        where = _within(where, size, padding, aligned)
    found = []
    for index, weight in taps_of(where):
        inside = _within(index, size, padding, aligned)
        if padding == "zeros":
            inside = index.op("Clip", 0.0).op("Min", size - 1)
            there = (index.op("Equal", inside)).cast(position.dtype)
            weight = there if weight is None else weight * there
        found.append(_Tap(inside, weight))
    return found


def _within(where: Tensor, size: Tensor, padding: str, aligned: bool) -> Tensor:
    """Bring coordinates between the ends of an axis, as the padding says."""
    if padding == "border":
        return where.op("Max", 0.0).op("Min", size - 1)
    if padding == "reflection":
        low = 0.0 if aligned else -0.5
        length = size - 1 if aligned else size
        # An axis of one element has no length, and reflects everything to it.
        length = length.op("Max", 1e-30) if aligned else length
        ahead = where - low
        period = length * 2.0
        rest = ahead - (ahead / period).op("Floor") * period
        reflected = length - (rest - length).op("Abs") + low
        return reflected.op("Max", 0.0).op("Min", size - 1)
    return where


def _linear(where: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    before = where.op("Floor")
    beyond = where - before
    return [(before, 1 - beyond), (before + 1, beyond)]


def _nearest(where: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    return [(where.op("Round"), None)]


def _cubic(where: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Keys' cubic convolution with a = -0.75."""
    before = where.op("Floor")
    beyond = where - before

    def near(x: Tensor) -> Tensor:
        return (x * 1.25 - 2.25) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((x * -0.75 + 3.75) * x - 6.0) * x + 3.0

    weights = [far(beyond + 1), near(beyond), near(1 - beyond), far(2 - beyond)]
    return [(before + (k - 1) if k != 1 else before, weight) for k, weight in enumerate(weights)]


@expansion("DeformConv")
def deform_conv(call: Call) -> list[Tensor | None]:
    """Every element of the window takes a sample at an offset; the window's products are those of matrices.

    With K elements of the window, P places and G groups of offsets, the samples are (N G, C / G, K P).
    """
    tape, (x, weight, offset), (bias, mask) = call.tape, call.x[:3], (call.input(k) for k in (3, 4))
    assert x is not None and weight is not None and offset is not None
    group, offsets = call.attribute("group", 1), call.attribute("offset_group", 1)
    kernel = kernel_of(call, weight)
    axes, elements = len(kernel), int(np.prod(kernel))
    strides, dilations = (call.attribute(name, [1] * axes) for name in ("strides", "dilations"))
    pads = call.attribute("pads", [0] * (2 * axes))
    batch, places = x.size(0), offset.op("Shape", start=2)
    joined = tape.concat([batch * offsets, tape.ints(elements), tape.ints(axes), tape.ints(-1)])
    moved = offset.reshape(joined)
    inside = np.stack(np.meshgrid(*(np.arange(size) for size in kernel), indexing="ij")).reshape(axes, elements)
    taps, sizes = [], []
    for axis in range(axes):
        count = offset.size(2 + axis).squeeze(0)
        steps = tape.op("Range", tape.constant(0), count, tape.constant(1)) * strides[axis]
        row = steps.reshape([1] * axis + [-1] + [1] * (axes - 1 - axis)).expand(places).reshape([1, -1])
        base = row + tape.constant(inside[axis][:, None] * dilations[axis] - pads[axis])
        position = moved.op("Gather", tape.constant(axis), axis=2) + base.cast(offset.dtype)
        sizes.append(x.size(2 + axis))
        taps.append([_zero_outside(tap, sizes[-1]) for tap in itertools.starmap(_Tap, _linear(position))])
    channels = x.size(1) / tape.ints(offsets)
    flat = x.reshape(tape.concat([batch * offsets, channels, tape.ints(-1)]))
    samples = functools.reduce(Tensor.__add__, _weighted(flat, taps, sizes))
    if mask is not None:
        samples = samples * mask.reshape(tape.concat([batch * offsets, tape.ints(1, -1)]))
    columns = samples.reshape(
        tape.concat([batch, tape.ints(group), x.size(1) / tape.ints(group) * elements, tape.ints(-1)])
    )
    rows = weight.reshape(tape.concat([tape.ints(group, -1), weight.size(1) * elements]))
    result = rows.matmul(columns).reshape(tape.concat([batch, weight.size(0), places]))
    return [result if bias is None else result + bias.reshape([-1, *[1] * axes])]


def _zero_outside(tap: _Tap, size: Tensor) -> _Tap:
    """The tap with an index within an axis, and a weight of 0 where it was not."""
    inside = tap.at.op("Max", 0.0).op("Min", size.cast(tap.at.dtype) - 1)
    there = tap.at.equals(inside).cast(inside.dtype)
    return _Tap(inside, there if tap.weight is None else tap.weight * there)


@expansion("RoiAlign")
def roi_align(call: Call) -> list[Tensor | None]:
    """Each bin of a region is a mean, or the maximum, of samples of the image. Regions have a gradient as well.

    As onnxruntime does it, "max" takes the largest of neighbours times their weights, not of their sums.
    """
    tape, x, regions, items = call.tape, *call.x[:3]
    assert x is not None and regions is not None and items is not None
    half = call.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    ratio, largest = call.attribute("sampling_ratio", 0), call.attribute("mode", "avg") == "max"
    zero, one = tape.constant(0), tape.constant(1)
    scaled = regions * call.attribute("spatial_scale", 1.0) - (0.5 if half else 0.0)
    count = regions.size(0)
    bins = [call.attribute("output_height", 1), call.attribute("output_width", 1)]
    taps: list[list[_Tap]] = []
    sizes, grids, counted, numbers = [], [], [], []
    for axis, number in enumerate(bins):
        # Regions are x1, y1, x2, y2.
        begin, end = (scaled.op("Gather", tape.constant(k), axis=1) for k in (1 - axis, 3 - axis))
        length = (end - begin) if half else (end - begin).op("Max", 1.0)
        width = length / float(number)
        grid = width.op("Ceil") if ratio <= 0 else width.ones() * float(ratio)
        # One at least: there may be no regions, or only some without an extent.
        points = tape.concat([grid, tape.constant([1.0], grid.dtype)]).op("ReduceMax", keepdims=0)
        points = points.cast(ir.DataType.INT64)
        inner = tape.op("Range", zero, points, one).cast(regions.dtype)
        outer = tape.op("Range", zero, tape.constant(number), one).cast(regions.dtype).unsqueeze(1)
        # (regions, bins, points)
        share = (inner + 0.5) / grid.unsqueeze(1, 2)
        at = begin.unsqueeze(1, 2) + (outer + share) * width.unsqueeze(1, 2)
        size = x.size(2 + axis)
        wide = size.cast(regions.dtype)
        beyond = (at < -1.0).op("Or", at > wide)
        clipped = at.op("Max", 0.0).op("Min", wide - 1)
        every, one_each = points.reshape([1]) * number, tape.ints(1)
        shape = tape.concat([count, *([every, one_each] if axis == 0 else [one_each, every])])
        taps.append([])
        for index, weight in _linear(clipped):
            assert weight is not None
            inside = index.op("Min", wide - 1).reshape(shape)
            taps[-1].append(_Tap(inside, weight.masked(beyond.op("Not")).reshape(shape)))
        sizes.append(size)
        grids.append(grid)
        counted.append(inner < grid.unsqueeze(1))
        numbers.append(points.reshape([1]))
    channels = x.size(1)
    flat = x.transpose([1, 0, 2, 3]).reshape(tape.concat([tape.ints(1), channels, tape.ints(-1)]))
    first = items.cast(ir.DataType.INT64).reshape([-1, 1, 1]) * sizes[0] * sizes[1]
    found = _weighted(flat, taps, sizes, first)
    values = tape.op("Max", *found) if largest else functools.reduce(Tensor.__add__, found)
    parts = [channels, count, tape.ints(bins[0]), numbers[0], tape.ints(bins[1]), numbers[1]]
    values = values.reshape(tape.concat(parts))
    # Regions of other sizes have other numbers of samples; those behind the last one do not count.
    takes = counted[0].unsqueeze(1, 3, 4).op("And", counted[1].unsqueeze(1, 2, 3))
    if largest:
        # A bin without samples is 0.
        least = tape.concat([values.reshape([-1]), tape.constant([0.0], values.dtype)])
        lowest = least.op("ReduceMin", keepdims=0)
        chosen = takes.where(values, lowest)
        if tape.opset >= _AXES_ARE_INPUT:
            result = chosen.op("ReduceMax", tape.ints(3, 5), keepdims=0)
        else:
            result = chosen.op("ReduceMax", axes=[3, 5], keepdims=0)
    else:
        samples = (grids[0] * grids[1]).op("Max", 1.0).reshape([-1, 1, 1]).cast(x.dtype)
        result = values.masked(takes).sum([3, 5], keepdims=False) / samples
    return [result.transpose([1, 0, 2, 3])]


@expansion("CumProd", limits="a constant axis")
def cum_prod(call: Call) -> list[Tensor | None]:
    """A Scan that multiplies: no division, so that zeros do no harm."""
    tape, x, axis = call.tape, call.x[0], call.constant(1)
    assert x is not None
    if axis is None:
        raise call.error("its axis is no constant; expected one")
    at = int(axis.reshape(())) % call.rank(x)
    direction = int(call.attribute("reverse", 0))
    name = f"{tape.prefix}Scan"
    inner = Tape(f"{name}/", tape.opset)
    kind = ir.TensorType(x.dtype)
    before, now = (ir.Value(name=f"{name}/{part}", type=kind) for part in ("before", "now"))
    product = inner.of(before) * inner.of(now)
    shown = inner.of(before).op("Identity") if call.attribute("exclusive", 0) else product.op("Identity")
    body = ir.Graph([before, now], [product.value, shown.value], nodes=inner.nodes, name=name)
    outputs = [ir.Value(name=f"{name}.{k}", type=kind) for k in range(2)]
    start = x.sum([at], keepdims=False).ones()
    options: dict[str, Any] = {
        "num_scan_inputs": 1,
        "scan_input_axes": [at],
        "scan_output_axes": [at],
        "scan_input_directions": [direction],
        "scan_output_directions": [direction],
    }
    tape.nodes.append(ir.node("Scan", [start.value, x.value], {"body": body, **options}, name=name, outputs=outputs))
    return [tape.of(outputs[1])]
