"""GridSample and CumProd by operators that have rules."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import onnx_ir as ir

from gradfuse.differentiation.expansion import expansion
from gradfuse.differentiation.rules import Call
from gradfuse.differentiation.tensors import Tape, Tensor


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
    channels = tape.concat([x.op("Shape", end=2), samples.slice(tape.ints(1), tape.ints(2), tape.ints(0))])
    total: Tensor | None = None
    for combination in itertools.product(*taps):
        at: Tensor | None = None
        weight: Tensor | None = None
        for tap, size in zip(combination, sizes, strict=True):
            index = tap.at.cast(ir.DataType.INT64)
            at = index if at is None else at * size + index
            if tap.weight is not None:
                weight = tap.weight if weight is None else weight * tap.weight
        assert at is not None
        value = flat.op("GatherElements", at.unsqueeze(1).expand(channels), axis=2)
        if weight is not None:
            value = value * weight.unsqueeze(1).cast(x.dtype)
        total = value if total is None else total + value
    assert total is not None
    return [total.reshape(tape.concat([x.op("Shape", end=2), grid.op("Shape", start=1, end=-1)]))]


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
