"""Pooling: maxima give their gradient to where they came from, means to all of their window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.custom_ops.spatial import MOST_SPATIAL
from gradfuse.differentiation.convolutions import Window
from gradfuse.differentiation.rules import FUSES, Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor
from gradfuse.differentiation.views import scattered

_KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@gradient("MaxPool")
def max_pool(call: Call) -> Iterator[Gradient]:
    """The first of equal maxima gets the gradient, as in torch."""
    x, dy = call.operands()
    node = call.node
    if (options := _of_operator(call, x)) is not None:
        node.resize_outputs(1)
        yield dy.op("MaxPoolBackward", x, domain="aclnn", **options)
        return
    if call.attribute("storage_order", 0):
        # Its indices count columns first: another node gives those of the same maxima by rows.
        again = call.tape.parts("MaxPool", 2, x, **{**_plain(node), "storage_order": 0})[1]
        again.value.type = ir.TensorType(ir.DataType.INT64)
        yield scattered(call, again, dy, x)
        return
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    indices = node.outputs[1]
    if not indices.name:
        indices.name = f"{node.outputs[0].name}.indices"
    indices.dtype, indices.shape = ir.DataType.INT64, node.outputs[0].shape
    yield scattered(call, call.tape.of(indices), dy, x)


def _plain(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _of_operator(call: Call, x: Tensor) -> dict[str, Any] | None:
    """Return the attributes of the operator for a node's gradient; None where the gradient needs indices.

    Where the model has the indices, they cost nothing more. With ceil_mode, versions of onnxruntime differ in whether a
    window may begin behind the image; those of the operator never do.
    """
    node, kernel = call.node, call.attribute("kernel_shape")
    has_indices = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    if not node.meta.get(FUSES) or has_indices or x.dtype not in _KERNEL_TYPES:
        return None
    if len(kernel) > MOST_SPATIAL or call.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    window = Window(call, x, call.y[0], kernel, pooling=True)
    if any(max(pads) > reach for *pads, reach in zip(window.begin, window.end, window.reach, strict=True)):
        return None
    ceil_mode = call.attribute("ceil_mode", 0)
    if ceil_mode and not _begin_in_image(call, window):
        return None
    return {
        "kernel_size": kernel,
        "stride": window.strides,
        "padding": [*window.begin, *window.end],
        "dilation": window.dilations,
        "ceil_mode": ceil_mode,
    }


def _begin_in_image(call: Call, window: Window) -> bool:
    """Whether no window of those that ceil_mode gives begins behind the image, as far as sizes are known."""
    for axis, size in enumerate(call.dims(window.image)[2:]):
        if not isinstance(size, int):
            return False
        room = size + window.begin[axis] + window.end[axis] - window.reach[axis] - 1
        if -(-room // window.strides[axis]) * window.strides[axis] >= size + window.begin[axis]:
            return False
    return True


@gradient("AveragePool")
def average_pool(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    window = Window(call, x, call.y[0], call.attribute("kernel_shape"), pooling=True)
    shares = dy / _count(window)
    yield shares.expand(call.shape(x)) if _covers_image(window) else _spread_in_channels(window, shares)


def _covers_image(window: Window) -> bool:
    """Whether there is one place, and the window has all of the image there, as far as sizes are known.

    A kernel may be far larger than images, as in transformers' EfficientNet: spread over it, gradients fill the memory.
    """
    call = window.call
    sizes = zip(call.dims(window.image)[2:], call.dims(window.places)[2:], strict=True)
    return all(
        isinstance(size, int)
        and places == 1
        and window.dilations[axis] == 1
        and 0 <= begin <= window.kernel[axis] - size
        for axis, ((size, places), begin) in enumerate(zip(sizes, window.begin, strict=True))
    )


def _known_count(window: Window, sizes: list[int]) -> npt.NDArray[np.float64]:
    """How many elements each mean is taken of, for an image of known sizes: (1, 1, places, ...)."""
    include_pad = window.call.attribute("count_include_pad", 0)
    counts = np.ones((1, 1))
    for axis, size in enumerate(sizes):
        begin, end, stride, reach = window.begin[axis], window.end[axis], window.strides[axis], window.reach[axis]
        room = begin + size + end - reach - 1
        places = (-(-room // stride) if window.call.attribute("ceil_mode", 0) else room // stride) + 1
        if (places - 1) * stride >= size + begin:
            places -= 1  # no window begins in the padding behind the image
        at = np.arange(places)[:, None] * stride - begin + np.arange(window.kernel[axis]) * window.dilations[axis]
        inside = (at >= -begin) & (at < size + end) if include_pad else (at >= 0) & (at < size)
        counts = counts[..., None] * inside.sum(1)
    return counts


def _count(window: Window) -> Tensor | float:
    """How many elements each mean is taken of."""
    call = window.call
    include_pad, ceil_mode = call.attribute("count_include_pad", 0), call.attribute("ceil_mode", 0)
    padded = any([*window.begin, *window.end])
    if not ceil_mode and (include_pad or not padded):
        return float(np.prod(window.kernel))
    tape = call.tape
    known = [size for size in call.dims(window.image)[2:] if isinstance(size, int)]
    if len(known) == window.axes:
        return tape.constant(_known_count(window, known), window.image.dtype)
    # One item and one channel stand for all: they are counted with ones.
    places = call.y[0].op("Shape", start=2)
    sizes = call.shape(window.image).slice(tape.ints(2), tape.ints(2 + window.axes), tape.ints(0))
    one = ir.tensor([1.0], dtype=window.image.dtype)
    image = tape.op("ConstantOfShape", tape.concat([tape.ints(1, 1), sizes]), dtype=window.image.dtype, value=one)
    pads = tape.ints(0, 0, *window.begin, 0, 0, *window.end)
    image = image.op("Pad", pads, 1.0 if include_pad else 0.0)
    # Behind that, ceil_mode lets the last window reach less than a stride and its own length further.
    behind = [s + r for s, r in zip(window.strides, window.reach, strict=True)]
    image = image.op("Pad", tape.ints(*[0] * (4 + window.axes), *behind), 0.0)
    counts = image.op("Conv", _ones(window), **window.options)
    none, axes = tape.ints(*[0] * window.axes), tape.ints(*range(2, 2 + window.axes))
    return counts.slice(none, places, axes)


def _ones(window: Window) -> Tensor:
    tape = window.call.tape
    return tape.constant(np.ones((1, 1, *window.kernel)), window.image.dtype)


def _spread_in_channels(window: Window, values: Tensor) -> Tensor:
    """Add up values at the window's places over the image, each channel by itself."""
    call = window.call
    # Each channel of each item is an image of one channel.
    tape = call.tape
    shape = call.shape(window.image)
    batch = shape.slice(tape.ints(0), tape.ints(2), tape.ints(0)).op("ReduceProd", keepdims=1)
    rows = values.reshape(tape.concat([batch, tape.ints(1), values.op("Shape", start=2)]))
    full = rows.op("ConvTranspose", _ones(window), **window.options)
    return window.crop(full).reshape(shape)


@gradient("GlobalAveragePool")
def global_average_pool(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    count = x.op("Shape", start=2).op("ReduceProd", keepdims=0).cast(dy.dtype)
    yield (dy / count).expand(call.shape(x))


@gradient("GlobalMaxPool")
def global_max_pool(call: Call) -> Iterator[Gradient]:
    """Equal maxima share the gradient, as in torch.amax."""
    x, dy = call.operands()
    hits = x.equals(call.y[0]).cast(dy.dtype)
    yield dy / hits.sum(list(range(2, call.rank(x)))) * hits


@gradient("LpPool")
def lp_pool(call: Call) -> Iterator[Gradient]:
    """(sum of |x|^p)^(1/p)."""
    x, dy = call.operands()
    p, y = call.attribute("p", 2), call.y[0]
    window = Window(call, x, y, call.attribute("kernel_shape"), pooling=True)
    share = (dy * y.op("Pow", 1.0 - p)).masked(y > 0)
    spread = _spread_in_channels(window, share)
    yield spread * x.sign() * x.op("Abs").op("Pow", p - 1.0) if p != 1 else spread * x.sign()


@gradient("GlobalLpPool")
def global_lp_pool(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    p, y = call.attribute("p", 2), call.y[0]
    share = (dy * y.op("Pow", 1.0 - p)).masked(y > 0)
    yield share * x.sign() * x.op("Abs").op("Pow", p - 1.0)


@gradient("MaxUnpool", limits="no output_shape")
def max_unpool(call: Call) -> Iterator[Gradient]:
    """Each element takes the gradient of the place that it was put at."""
    dy, indices = call.dy[0], call.x[1]
    assert dy is not None and indices is not None
    if call.input(2) is not None:
        raise call.error("it has an output_shape; expected none")
    yield dy.reshape([-1]).op("Gather", indices, axis=0)
