"""Convolutions: the gradient of the input is a transposed convolution, that of the weights one over the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from gradfuse.custom_ops.spatial import MOST_SPATIAL
from gradfuse.differentiation.rules import FUSES, Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor
from gradfuse.differentiation.views import padded
from gradfuse.passes.reading import attribute

_UNKNOWN = 64
"""The size that an unknown one is taken to have."""
_FEWEST_TERMS = 16
"""The products of a sum from which `aclnn::Convolution` is faster than `Conv`."""

_KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


class Window:
    """The window of a convolution or a pooling with d spatial axes, and where it goes.

    Attributes:
        image: the value (N, C, ...) that the window moves over.
        places: the value (N, M, ...) that has an element for each place of the window.
        kernel, strides, dilations, begin, end: d integers each; `begin` and `end` are the padding of the image.
    """

    def __init__(
        self,
        call: Call,
        image: Tensor,
        places: Tensor,
        kernel: list[int],
        *,
        padded: bool = True,
        pooling: bool = False,
    ) -> None:
        self.call, self.image, self.places, self.kernel = call, image, places, kernel
        self.axes = len(kernel)
        self.strides: list[int] = call.attribute("strides", [1] * self.axes)
        self.dilations: list[int] = call.attribute("dilations", [1] * self.axes)
        pads: list[int] = call.attribute("pads", [0] * (2 * self.axes))
        self.begin, self.end = pads[: self.axes], pads[self.axes :]
        # From the first to the last element of the window.
        self.reach = [d * (k - 1) for d, k in zip(self.dilations, kernel, strict=True)]
        auto_pad = call.attribute("auto_pad", "NOTSET")
        if auto_pad == "VALID" or not padded:
            self.begin, self.end = [0] * self.axes, [0] * self.axes
        elif auto_pad != "NOTSET":
            self._set_same(auto_pad, pooling)
        self.unused = self.behind()

    def _set_same(self, auto_pad: str, pooling: bool) -> None:
        """Pad so that there are as many places as elements, divided by the stride and rounded up.

        As onnxruntime does it, pooling cuts off what a stride leaps over: its padding may be negative. What it makes of
        dilations beside that contradicts ONNX's shapes.
        """
        if pooling and any(reach >= k for reach, k in zip(self.reach, self.kernel, strict=True)):
            raise self.call.error(f"auto_pad is {auto_pad} with dilations; expected pads")
        self.begin, self.end = [0] * self.axes, [0] * self.axes
        for axis, size in enumerate(self.call.dims(self.image)[2:]):
            stride, total = self.strides[axis], self.reach[axis]
            if stride > 1:
                if not isinstance(size, int):
                    raise self.call.error(f"auto_pad is {auto_pad} with a stride; expected pads, or a known size")
                total += (-(-size // stride) - 1) * stride + 1 - size
                total = total if pooling else max(total, 0)
            # Halves are rounded towards 0.
            self.begin[axis] = int((total + int(auto_pad == "SAME_LOWER")) / 2)
            self.end[axis] = total - self.begin[axis]

    def behind(self) -> list[int] | None:
        """How many elements of the padded image lie behind the last window, by axis; None where sizes are unknown."""
        found = []
        images, places = self.call.dims(self.image)[2:], self.call.dims(self.places)[2:]
        for axis, (size, count) in enumerate(zip(images, places, strict=True)):
            if not isinstance(size, int) or not isinstance(count, int):
                return None
            covered = (count - 1) * self.strides[axis] + self.reach[axis] + 1
            found.append(size + self.begin[axis] + self.end[axis] - covered)
        return found

    @property
    def options(self) -> dict[str, Any]:
        return {"strides": self.strides, "dilations": self.dilations}

    def spread(self, values: Tensor, weight: Tensor, group: int) -> Tensor:
        """Add up values at the window's places, times a weight, over the image: the transposed convolution."""
        if self.unused is not None and all(0 <= n < s for n, s in zip(self.unused, self.strides, strict=True)):
            padding = self.unused if any(self.unused) else None
            pads = [*self.begin, *self.end]
            return values.op("ConvTranspose", weight, pads=pads, output_padding=padding, group=group, **self.options)
        full = values.op("ConvTranspose", weight, group=group, **self.options)
        return self.crop(full)

    def crop(self, full: Tensor) -> Tensor:
        """Return the image's part of values over the padded image, which may end with the last window."""
        tape, axes = self.call.tape, self.call.tape.ints(*range(2, 2 + self.axes))
        # Less than a stride of the padded image is behind the last window; where ceil_mode adds one, nothing is.
        missing = [max(s - 1 - e, 0) + max(e, 0) for s, e in zip(self.strides, self.end, strict=True)]
        # Negative padding cut off elements, which have a gradient of 0.
        ahead = tape.ints(*(max(-b, 0) for b in self.begin))
        full = padded(self.call, full, axes, ahead, tape.ints(*missing), 2 + self.axes)
        begin = tape.ints(*(max(b, 0) for b in self.begin))
        sizes = self.call.shape(self.image).slice(tape.ints(2), tape.ints(2 + self.axes), tape.ints(0))
        return full.slice(begin, begin + sizes, axes)

    def products(self, images: Tensor, values: Tensor, group: int) -> Tensor:
        """Return the gradient of a weight (M, C / group, ...), for images (N, C, ...) and values (N, M, ...).

        It is a convolution with the items of the batch in the place of channels.
        """
        tape, swapped = self.call.tape, [1, 0, *range(2, 2 + self.axes)]
        if group == 1:
            turned = images.transpose(swapped)
        else:
            # (N, G C, ...) -> (C, G N, ...)
            spatial = images.op("Shape", start=2)
            channels = images.size(1) / tape.ints(group)
            apart = images.reshape(tape.concat([images.size(0), tape.ints(group), channels, spatial]))
            turned = apart.transpose([2, 1, 0, *range(3, 3 + self.axes)])
            turned = turned.reshape(tape.concat([channels, images.size(0) * tape.ints(group), spatial]))
        found = turned.op(
            "Conv",
            values.transpose(swapped),
            strides=self.dilations,
            dilations=self.strides,
            pads=[*self.begin, *self.end],
            group=group,
        )
        if self.unused is None or any(self.unused):
            # What is behind the last window makes further products.
            none, axes = tape.ints(*[0] * self.axes), tape.ints(*range(2, 2 + self.axes))
            found = found.slice(none, tape.ints(*self.kernel), axes)
        return found.transpose(swapped)


def kernel_of(call: Call, weight: Tensor) -> list[int]:
    """Return the sizes of a convolution's window."""
    found = call.attribute("kernel_shape") or call.dims(weight)[2:]
    sizes = [size for size in found if isinstance(size, int)]
    if len(sizes) < len(found):
        raise call.error("its kernel_shape is unknown; expected a weight whose shape is known")
    return sizes


def _fits_operator(window: Window) -> bool:
    pads = (*window.begin, *window.end)
    return window.axes <= MOST_SPATIAL and min(pads) >= 0 and window.image.dtype in _KERNEL_TYPES


def _by_operator(call: Call, window: Window, dy: Tensor, weight: Tensor, group: int) -> Iterator[Gradient]:
    mask = [int(index in call.needed) for index in range(3)]
    found = call.tape.parts(
        "ConvolutionBackward",
        3,
        dy,
        window.image,
        weight,
        domain="aclnn",
        stride=window.strides,
        padding=[*window.begin, *window.end],
        dilation=window.dilations,
        groups=group,
        output_mask=mask,
    )
    for wanted, gradient_ in zip(mask, found, strict=True):
        yield gradient_ if wanted else None


@gradient("Conv")
def conv(call: Call) -> Iterator[Gradient]:
    x, weight, dy = call.pair()
    window, group = Window(call, x, call.y[0], kernel_of(call, weight)), call.attribute("group", 1)
    if call.node.meta.get(FUSES) and _fits_operator(window):
        yield from _by_operator(call, window, dy, weight, group)
        return
    yield lambda: window.spread(dy, weight, group)
    yield lambda: window.products(x, dy, group)
    yield lambda: dy.sum([0, *range(2, 2 + window.axes)], keepdims=False)


def fuse_convolutions(graph: ir.Graph) -> None:
    """Put `aclnn::Convolution` where a convolution's weight trains, and a ReLU that is all that reads it in it.

    Its weight is no constant in a training step, for which alone onnxruntime has fast kernels.
    """
    for backward in list(graph):
        if backward.op_type != "ConvolutionBackward" or backward.domain != "aclnn":
            continue
        of_weight = backward.attributes["output_mask"].as_ints()[1]
        image, weight = backward.inputs[1:3]
        if not of_weight or image is None or weight is None:
            continue
        for node in list(image.consumers()):
            if _is_forward(node, backward) and _pays(weight, node):
                _fuse_convolution(node, backward)


def _is_forward(node: ir.Node, backward: ir.Node) -> bool:
    if node.op_type != "Conv" or node.domain or tuple(node.inputs[:2]) != tuple(backward.inputs[1:3]):
        return False
    if node.graph is not backward.graph:
        return False
    spatial = len(backward.attributes["stride"].as_ints())
    ones = [1] * spatial
    pads = attribute(node, "pads", [0] * (2 * spatial))
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return False
    own = {
        "stride": attribute(node, "strides", ones),
        "dilation": attribute(node, "dilations", ones),
        "padding": [0] * (2 * spatial) if attribute(node, "auto_pad", "NOTSET") == "VALID" else pads,
    }
    same = all(list(numbers) == list(backward.attributes[name].as_ints()) for name, numbers in own.items())
    return same and attribute(node, "group", 1) == backward.attributes["groups"].as_int()


def _pays(weight: ir.Value, node: ir.Node) -> bool:
    """Whether the operator is faster than `Conv`: measured, see docs/performance.md."""
    if weight.dtype == ir.DataType.DOUBLE:
        return True  # onnxruntime has no convolution of float64.
    sizes = [size if isinstance(size, int) else _UNKNOWN for size in weight.shape or ()]
    if len(sizes) < 3:
        return False
    outputs, channels, taps = sizes[0], sizes[1], math.prod(sizes[2:])
    is_depthwise = attribute(node, "group", 1) == outputs
    return taps > 1 and (is_depthwise or channels * taps >= _FEWEST_TERMS)


def _fuse_convolution(node: ir.Node, backward: ir.Node) -> None:
    attributes = [backward.attributes[name] for name in ("stride", "padding", "dilation", "groups")]
    result, last = node.outputs[0], node
    readers = [use.node for use in result.uses()]
    if [(reader.op_type, reader.domain) for reader in readers] == [("Relu", "")] and not result.is_graph_output():
        last = readers[0]
        attributes.append(ir.AttrInt64("relu", 1))
    graph, old = node.graph, last.outputs[0]
    if graph is None or last.graph is not graph:
        return
    fused = ir.Node("aclnn", "Convolution", node.inputs, attributes, name=node.name)
    output = fused.outputs[0]
    output.name, output.type, output.shape = old.name, old.type, old.shape
    graph.insert_before(node, fused)
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    graph.remove([last] if last is node else [last, node], safe=True)


@gradient("ConvTranspose", limits="with output_shape or auto_pad, a known size")
def conv_transpose(call: Call) -> Iterator[Gradient]:
    """Input and output change places: the gradient of the input is a convolution."""
    x, weight, dy = call.pair()
    window, group = _transposed_window(call, x, kernel_of(call, weight)), call.attribute("group", 1)
    # The output padding is behind the last window, which a convolution leaves out by itself if it is below the stride.
    padding = call.attribute("output_padding", [0] * window.axes)
    if any(p >= s for p, s in zip(padding, window.strides, strict=True)):
        raise call.error(f"output_padding is {padding}; expected less than the strides, {window.strides}")
    pads = [*window.begin, *window.end]
    yield lambda: dy.op("Conv", weight, pads=pads, group=group, **window.options)
    yield lambda: window.products(dy, x, group)
    yield lambda: dy.sum([0, *range(2, 2 + window.axes)], keepdims=False)


def _transposed_window(call: Call, x: Tensor, kernel: list[int]) -> Window:
    """The window of a transposed convolution, whose padding may follow from the size of its output."""
    auto_pad = call.attribute("auto_pad", "NOTSET")
    if not call.attribute("output_shape") and auto_pad in ("NOTSET", "VALID"):
        return Window(call, call.y[0], x, kernel)
    window = Window(call, call.y[0], x, kernel, padded=False)
    more = call.attribute("output_padding", [0] * window.axes)
    for axis, (size, count) in enumerate(zip(call.dims(call.y[0])[2:], call.dims(x)[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(count, int):
            raise call.error("it has output_shape or auto_pad; expected pads, or a known size")
        total = (count - 1) * window.strides[axis] + more[axis] + window.reach[axis] + 1 - size
        # An output that is larger has elements behind the last window.
        if total <= -window.strides[axis]:
            raise call.error(f"its output has {size} elements along axis {axis + 2}; expected at most {size + total}")
        total = max(total, 0)
        half = total // 2
        window.begin[axis] = half if auto_pad == "SAME_UPPER" else total - half
        window.end[axis] = total - window.begin[axis]
    window.unused = window.behind()
    return window


@gradient("Col2Im")
def col2im(call: Call) -> Iterator[Gradient]:
    """Blocks that overlap are added up; their gradients are those of the image, cut out by a convolution."""
    x, block, dy = call.x[0], call.x[2], call.dy[0]
    assert x is not None and block is not None and dy is not None
    tape = call.tape
    count = block.op("ReduceProd", keepdims=0)
    places = tape.op("Range", tape.constant(0), count, tape.constant(1))
    eye = places.unsqueeze(0).equals(places.unsqueeze(1)).cast(dy.dtype)
    kernel = eye.op("Reshape", tape.concat([tape.ints(-1, 1), block]))
    options = {name: call.attribute(name) for name in ("dilations", "pads", "strides")}
    images = dy.op("Reshape", tape.concat([tape.ints(-1, 1), dy.op("Shape", start=2)]))
    yield images.op("Conv", kernel, **options).like(x)
