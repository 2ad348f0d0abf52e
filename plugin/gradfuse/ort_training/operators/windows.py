"""Gradients of convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradfuse.ort_training.operators.building import Operators, Unsupported, Value, rank


def conv_grad(
    op: Operators,
    dy: Value,
    x: Value,
    w: Value,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Sequence[Value]:
    """Returns the gradients of x (N, C, ...), w (O, C / group, ...) and the bias (O,), for dy: (N, O, ...).

    The gradient of x is the transposed convolution of dy by w, cut or filled with zeros to x's size. That of w is the
    convolution of x by dy, in which batch and channels have changed places, as have stride and dilation.
    """
    if auto_pad not in ("NOTSET", "VALID"):
        raise Unsupported(f"auto_pad is {auto_pad}")
    spatial = rank(x) - 2
    axes = range(2, rank(x))
    strides, dilations = list(strides or [1] * spatial), list(dilations or [1] * spatial)
    pads = list(pads or [0] * 2 * spatial)

    whole = op.ConvTranspose(dy, w, strides=strides, dilations=dilations, group=group)
    begin = op.ints(-pad for pad in pads[:spatial])
    missing = op.Sub(op.Shape(x, start=2), op.Add(op.Shape(whole, start=2), begin))
    none = op.ints([0, 0])
    dx = op.Pad(whole, op.Concat(none, begin, none, missing, axis=0))

    if group == 1:
        by_channel = op.Transpose(x, perm=[1, 0, *axes])
    else:
        split = op.Reshape(x, op.Concat(op.ints([0, group, -1]), op.Shape(x, start=2), axis=0))
        by_channel = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in axes)])
        merged = op.Concat(op.Shape(by_channel, start=0, end=1), op.ints([-1]), op.Shape(x, start=2), axis=0)
        by_channel = op.Reshape(by_channel, merged)
    by_output = op.Transpose(dy, perm=[1, 0, *axes])
    windows = op.Conv(by_channel, by_output, strides=dilations, dilations=strides, pads=pads, group=group)
    # Where the stride does not divide the size, windows begin that the forward pass had no room for.
    fitting = op.Slice(windows, op.ints([0] * spatial), op.Shape(w, start=2), op.ints(axes))
    dw = op.Transpose(fitting, perm=[1, 0, *axes])
    return dx, dw, op.sum(dy, [0, *axes], keepdims=0)


def max_pool_grad(op: Operators, dy: Value, indices: Value, storage_order: int = 0, **window: Any) -> Value:
    """dy added up at the places of the maxima, which the forward pass gives as indices into the whole of x."""
    forward = indices.producer()
    if forward is None or forward.op_type != "MaxPool":
        raise Unsupported(f"{indices.name!r} is not the second output of a MaxPool node")
    if storage_order:
        raise Unsupported("storage_order is 1")
    x = forward.inputs[0]
    blank = op.zeros(op.Reshape(op.Size(x), op.ints([1])), dy)
    dx = op.ScatterElements(blank, op.flat(indices), op.flat(dy), axis=0, reduction="add")
    return op.Reshape(dx, op.Shape(x))
