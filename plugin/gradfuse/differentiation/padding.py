"""Padding of windows, written so that onnxruntime infers the sizes that it computes.

Its inference is onnx's, and differs from its kernels in a last window that would begin behind the image, and in padding
that follows from the size beside `output_padding`. A step whose other sizes are right would not load.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradfuse.models.propagation.windows import Axis, axes_of, is_same


def make_explicit(graph: ir.Graph, prefix: str) -> None:
    """Write the windows of a graph, and of those within it, for which onnx infers other sizes, with other padding.

    Names of new nodes and values begin with `prefix`.
    """
    for node in list(graph.all_nodes()):
        if node.domain:
            continue
        if node.op_type in ("AveragePool", "LpPool", "MaxPool") and node.attributes.get_int("ceil_mode", 0) == 1:
            _cut(node, prefix)
        elif node.op_type == "ConvTranspose" and is_same(node) and "output_padding" in node.attributes:
            _pad(node)


def _sizes(value: ir.Value | None) -> list[int] | None:
    """Return the spatial sizes of an image or a weight, where all are known."""
    if value is None or value.shape is None:
        return None
    spatial = list(value.shape)[2:]
    sizes = [size for size in spatial if isinstance(size, int)]
    return sizes if len(sizes) == len(spatial) else None


def _cut(node: ir.Node, prefix: str) -> None:
    """Cut off what is behind the last whole window of a pooling, along axes where no other one counts."""
    sizes = _sizes(node.inputs[0])
    if sizes is None or is_same(node):
        return
    axes = axes_of(node, node.attributes["kernel_shape"].as_ints())
    rests = [axis.rest(size) for axis, size in zip(axes, sizes, strict=True)]
    left_out = [
        rest > 0 and axis.places(size, ceil=True) == axis.places(size)
        for axis, size, rest in zip(axes, sizes, rests, strict=True)
    ]
    if not any(left_out):
        return
    if all(out or not rest for out, rest in zip(left_out, rests, strict=True)):
        del node.attributes["ceil_mode"]
        return
    ends = [axis.end - rest * out for axis, rest, out in zip(axes, rests, left_out, strict=True)]
    if min(ends) < 0:
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            return  # Its indices are those of places in the whole image.
        _crop(node, [size + min(end, 0) for size, end in zip(sizes, ends, strict=True)], prefix)
    node.attributes.pop("auto_pad", None)
    pads = [*(axis.begin for axis in axes), *(max(end, 0) for end in ends)]
    node.attributes.add(ir.AttrInt64s("pads", pads))


def _crop(node: ir.Node, sizes: list[int], prefix: str) -> None:
    """Leave out what is behind these sizes of a node's image."""
    x, graph = node.inputs[0], node.graph
    assert x is not None and x.shape is not None and graph is not None
    stem = f"{prefix}{node.outputs[0].name}"
    numbers = {"starts": [0] * len(sizes), "ends": sizes, "axes": range(2, 2 + len(sizes))}
    constants = [
        ir.node("Constant", [], {"value": ir.tensor(np.array(given, np.int64))}, name=f"{stem}/{name}")
        for name, given in numbers.items()
    ]
    cropped = ir.node("Slice", [x, *(constant.outputs[0] for constant in constants)], name=f"{stem}/Slice")
    for new in (*constants, cropped):
        new.outputs[0].name = new.name
    result = cropped.outputs[0]
    result.type, result.shape = x.type, ir.Shape([*x.shape[:2], *sizes])
    for constant in constants:
        constant.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        constant.outputs[0].shape = ir.Shape([len(sizes)])
    graph.insert_before(node, [*constants, cropped])
    node.replace_input_with(0, result)


def _pad(node: ir.Node) -> None:
    """Give a transposed convolution the padding that follows from its size."""
    kernel = _sizes(node.inputs[1])
    if kernel is None or "output_shape" in node.attributes:
        return
    upper = node.attributes["auto_pad"].as_string() == "SAME_UPPER"
    begins, ends, more = [], [], []
    for axis, extra in zip(axes_of(node, kernel), node.attributes["output_padding"].as_ints(), strict=True):
        begin, end = _same(axis, extra, upper=upper)
        # What is added behind the last window and what is cut off there are one number.
        begins.append(begin)
        ends.append(max(end - extra, 0))
        more.append(max(extra - end, 0))
    del node.attributes["auto_pad"]
    node.attributes.add(ir.AttrInt64s("pads", [*begins, *ends]))
    node.attributes.add(ir.AttrInt64s("output_padding", more))


def _same(axis: Axis, extra: int, *, upper: bool) -> tuple[int, int]:
    """Return the padding with which each element gives as many as the stride is."""
    total = max(axis.reach + 1 + extra - axis.stride, 0)
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)
