"""Fourier transforms."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from gradfuse.differentiation.expansion import expansion
from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor
from gradfuse.differentiation.views import padded

_AXIS_IS_INPUT = 20
"""The opset from which on the axis of DFT is an input."""


@gradient("DFT", fixed=[1, 2])
def dft(call: Call) -> Iterator[Gradient]:
    """The transposed map: the transform the other way, of complex numbers as pairs of real ones.

    Of a real input only the real part counts. Half a spectrum has zeros in the other half where it is the output; where
    it is the input, all but its ends stand for two.
    """
    (x, dy), tape = call.operands(), call.tape
    rank, inverse, half = call.rank(x), call.attribute("inverse", 0), call.attribute("onesided", 0)
    axis: int | Tensor = int(call.attribute("axis", 1)) % rank
    at = tape.ints(int(call.attribute("axis", 1)) % rank)
    if tape.opset >= _AXIS_IS_INPUT:
        given = call.input(2)
        axis = tape.constant(-2) if given is None else given.cast(ir.DataType.INT64).reshape([])
        at = ((axis + rank).op("Mod", tape.constant(rank))).reshape([1])
    none = tape.ints(0)

    def size(tensor: Tensor) -> Tensor:
        return tensor.shape().op("Gather", at, axis=0)

    def fitted(tensor: Tensor, wanted: Tensor) -> Tensor:
        """With zeros behind, or without what is too much."""
        return padded(call, tensor, at, none, wanted - size(tensor), rank)

    if half and inverse:
        length = size(dy)
        spectrum = fitted(transformed(dy, axis, length, onesided=1), size(x))
        bins = tape.op("Range", tape.constant(0), size(x).squeeze(0), tape.constant(1))
        ends = bins.equals(0).op("Or", (bins * 2).equals(length))
        weights = ends.where(tape.constant(1.0, dy.dtype), 2.0) / length.cast(dy.dtype)
        column = tape.ints(*[1] * rank).op("ScatterElements", at, tape.ints(-1), axis=0)
        yield spectrum * weights.op("Reshape", column)
        return
    given = call.input(1)
    length = size(x) if given is None else given.cast(ir.DataType.INT64).reshape([1])
    turned = transformed(fitted(dy, length) if half else dy, axis, length, inverse=1 - inverse)
    scale = length.cast(dy.dtype)
    whole = fitted(turned / scale if inverse else turned * scale, size(x))
    yield whole.slice(none, x.size(-1), tape.ints(-1))


@expansion("STFT")
def stft(call: Call) -> list[Tensor | None]:
    """Windows of the signal, transformed."""
    tape, signal, step, window, length = call.tape, *(call.input(k) for k in range(4))
    assert signal is not None and step is not None
    zero, one = tape.constant(0), tape.constant(1)
    size = length.cast(ir.DataType.INT64) if length is not None else None
    if size is None:
        assert window is not None
        size = window.op("Size")
    size, stride = size.reshape([]), step.cast(ir.DataType.INT64).reshape([])
    count = (signal.size(1).squeeze(0) - size) / stride + 1
    begins = tape.op("Range", zero, count, one) * stride
    places = begins.unsqueeze(1) + tape.op("Range", zero, size, one).unsqueeze(0)
    frames = signal.op("Gather", places, axis=1)
    if window is not None:
        frames = frames * window.unsqueeze(1)
    return [transformed(frames, 2, size, onesided=call.attribute("onesided", 1))]


def transformed(x: Tensor, axis: int | Tensor, length: Tensor, *, inverse: int = 0, onesided: int = 0) -> Tensor:
    """Append a DFT."""
    tape, length = x.tape, length.reshape([])
    if tape.opset >= _AXIS_IS_INPUT:
        along = tape.constant(axis) if isinstance(axis, int) else axis
        return x.op("DFT", length, along, inverse=inverse, onesided=onesided)
    return x.op("DFT", length, axis=axis, inverse=inverse, onesided=onesided)
