"""Rules for operators that move a window over images: what onnxruntime gives, where onnx says otherwise too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.models.propagation.elements import INT64
from gradfuse.models.propagation.facts import Operands, Result, rule
from gradfuse.models.propagation.sizes import Size, Sizes, Unknown


@dataclasses.dataclass(frozen=True)
class Axis:
    """How a window moves along an axis: padding at both ends, stride, and from its first to its last element."""

    begin: int
    end: int
    stride: int
    reach: int

    def rest(self, size: int) -> int:
        """How many elements of the padded image are behind the last whole window."""
        return (size + self.begin + self.end - self.reach - 1) % self.stride

    def places(self, size: int, *, ceil: bool = False) -> int:
        """How many places the window has over an image.

        With `ceil`, one may reach beyond the padded image, unless it begins behind the image: onnxruntime and PyTorch
        leave that one out, and onnx's inference counts it.
        """
        whole = (size + self.begin + self.end - self.reach - 1) // self.stride + 1
        return whole + (ceil and self.rest(size) > 0 and whole * self.stride < size + self.begin)


def axes_of(node: ir.Node, kernel: Sequence[int]) -> list[Axis]:
    """Return how the window of a node moves along each spatial axis; its padding is that of the attributes."""
    count = len(kernel)

    def ints(name: str, default: list[int]) -> list[int]:
        attribute = node.attributes.get(name)
        return default if attribute is None else list(attribute.as_ints())

    strides, dilations = ints("strides", [1] * count), ints("dilations", [1] * count)
    # Without padding, "VALID" may be given.
    pads = ints("pads", [0] * (2 * count)) if _auto_pad(node) == "NOTSET" else [0] * (2 * count)
    spans = zip(pads[:count], pads[count:], strides, dilations, kernel, strict=True)
    return [Axis(begin, end, stride, d * (k - 1)) for begin, end, stride, d, k in spans]


def _auto_pad(node: ir.Node) -> str:
    return node.attributes.get_string("auto_pad", "NOTSET") or "NOTSET"


def is_same(node: ir.Node) -> bool:
    """Whether the padding of a node follows from the size of its image."""
    return _auto_pad(node).startswith("SAME")


def _kernel(operands: Operands) -> list[int]:
    given = operands.attribute("kernel_shape") or operands.sizes(1)[2:]
    kernel = [size for size in given if isinstance(size, int)]
    if len(kernel) < len(given) or len(kernel) != len(operands.sizes()) - 2:
        raise Unknown
    return kernel


@rule("Conv")
def _conv(operands: Operands) -> list[Result]:
    kernel = _kernel(operands)
    if is_same(operands.node):
        raise Unknown
    batch, _, *sizes = operands.sizes()
    spatial = [
        axis.places(size) if isinstance(size, int) else None
        for axis, size in zip(axes_of(operands.node, kernel), sizes, strict=True)
    ]
    return [(operands.dtype(), [batch, operands.sizes(1)[0], *spatial], None)]


@rule("AveragePool", "LpPool", "MaxPool")
def _pool(operands: Operands) -> list[Result]:
    kernel = _kernel(operands)
    if is_same(operands.node):
        raise Unknown
    ceil = bool(operands.attribute("ceil_mode", 0))
    batch, channels, *sizes = operands.sizes()
    spatial = [
        axis.places(size, ceil=ceil) if isinstance(size, int) else None
        for axis, size in zip(axes_of(operands.node, kernel), sizes, strict=True)
    ]
    found: Sizes = [batch, channels, *spatial]
    return [(operands.dtype(), found, None), (INT64, [*found], None)]


@rule("ConvTranspose")
def _conv_transpose(operands: Operands) -> list[Result]:
    kernel = _kernel(operands)
    batch, _, *sizes = operands.sizes()
    channels, group = operands.sizes(1)[1], operands.attribute("group", 1)
    width: Size = channels * group if isinstance(channels, int) else channels if group == 1 else None
    spatial: Sizes = operands.attribute("output_shape") or []
    if not spatial:
        more = operands.attribute("output_padding", [0] * len(kernel))
        for axis, size, extra in zip(axes_of(operands.node, kernel), sizes, more, strict=True):
            spatial.append(_spread(axis, size, extra, same=is_same(operands.node)) if isinstance(size, int) else None)
    return [(operands.dtype(), [batch, width, *spatial[-len(kernel) :]], None)]


def _spread(axis: Axis, size: int, more: int, *, same: bool) -> int:
    """How many elements a transposed convolution gives along an axis.

    With padding that follows, onnxruntime adds no `output_padding` to what the stride makes of the size.
    """
    whole = (size - 1) * axis.stride + more + axis.reach + 1
    return min(whole, size * axis.stride) if same else whole - axis.begin - axis.end
