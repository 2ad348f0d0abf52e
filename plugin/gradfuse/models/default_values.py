"""Default values of inputs, read from a model's file one at a time, and the model without them.

A saved training step is mostly the values that training starts from. Read as one protobuf message, they would be in
memory several times at once. This module finds their place in the file by the wire format of protobuf messages.
"""

from __future__ import annotations

import dataclasses
import math
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from gradfuse.models.arrays import Arrays
from gradfuse.models.wire import BYTES, Field, Unusual, fields, read_bytes, without

_SMALLEST = 2**16
"""Bytes from which on a tensor is left out of the message."""
_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_INPUT = onnx.GraphProto.INPUT_FIELD_NUMBER
_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_KNOWN = ("name", "dims", "data_type", "doc_string")
"""The fields that a tensor may have beside its elements."""


@dataclasses.dataclass(frozen=True)
class _Default:
    """The default value of an input: its elements lie in the file at `offset`."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int


def read(path: str) -> tuple[bytes, Arrays]:
    """Return a model's message without the larger default values of its inputs, and those.

    Whatever is unusual about a file, also damage, stays in the message for the parser.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        try:
            graph, left_out = _defaults(file, size)
        except (Unusual, ValueError, DecodeError):
            return read_bytes(file, 0, size), {}
        if len({default.name for default in left_out.values()}) < len(left_out):
            return read_bytes(file, 0, size), {}
        values = {default.name: _elements(file, default) for default in left_out.values()}
        return without(file, size, graph, left_out), values


def _defaults(file: BinaryIO, size: int) -> tuple[Field, dict[Field, _Default]]:
    """Return the field of the graph, and those of the initializers to leave out, in their order."""
    graphs = [field for field in fields(file, 0, size) if field.number == _GRAPH]
    if len(graphs) != 1 or graphs[0].kind != BYTES or graphs[0].content - graphs[0].begin < 2:
        raise Unusual
    (graph,) = graphs
    tensors = [field for field in fields(file, graph.content, graph.end) if field.number in (_INITIALIZER, _INPUT)]
    if any(field.kind != BYTES for field in tensors):
        raise Unusual
    inputs = {
        onnx.ValueInfoProto.FromString(read_bytes(file, field.content, field.end)).name
        for field in tensors
        if field.number == _INPUT
    }
    found = {}
    for field in tensors:
        if field.number == _INITIALIZER and field.end - field.content >= _SMALLEST:
            default = _default(file, field)
            if default.name in inputs:
                found[field] = default
    return graph, found


def _default(file: BinaryIO, field: Field) -> _Default:
    """Return what a large tensor is.

    Raises:
        Unusual: its elements are not the bytes of one field, or other bytes than it needs.
        ValueError: its type is none of ONNX's.
    """
    parts = list(fields(file, field.content, field.end))
    data = [part for part in parts if part.number == _RAW_DATA]
    if len(data) != 1 or data[0].kind != BYTES or field.end - field.content - data[0].end + data[0].begin > _SMALLEST:
        raise Unusual
    head = b"".join(read_bytes(file, part.begin, part.end) for part in parts if part.number != _RAW_DATA)
    tensor = onnx.TensorProto.FromString(head)
    if any(descriptor.name not in _KNOWN for descriptor, _ in tensor.ListFields()):
        raise Unusual
    dtype, shape = ir.DataType(tensor.data_type), tuple(tensor.dims)
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or dtype.itemsize < 1 or len(shape) > 8:
        raise Unusual
    elements = dtype.numpy()
    if min(shape, default=0) < 0 or math.prod(shape) * elements.itemsize != data[0].end - data[0].content:
        raise Unusual
    return _Default(tensor.name, elements, shape, data[0].content)


def _elements(file: BinaryIO, default: _Default) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    file.seek(default.offset)
    array = np.empty(default.shape, default.dtype)
    if file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:  # type: ignore[attr-defined]
        raise OSError(f"the file became shorter while {default.name!r} was read")
    # An optimizer's state begins with zeros: while they are not written, they take no memory.
    return array if np.any(array) else np.zeros(array.shape, array.dtype)
