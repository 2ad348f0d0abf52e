"""Default values of inputs, read from a model's file one at a time, and the model without them.

A saved training step is mostly the values that training starts from. Read as one protobuf message, they would be in
memory several times at once. This module finds their place in the file by the wire format of protobuf messages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from gradfuse.models.arrays import Arrays
from gradfuse.models.streaming import varint

_SMALLEST = 2**16
"""Bytes from which on a tensor is left out of the message."""
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
"""Kinds of fields on the wire."""
_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_INPUT = onnx.GraphProto.INPUT_FIELD_NUMBER
_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_KNOWN = ("name", "dims", "data_type", "doc_string")
"""The fields that a tensor may have beside its elements."""


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a message in a file: where it begins, where its content begins and ends."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


@dataclasses.dataclass(frozen=True)
class _Default:
    """The default value of an input: its elements lie in the file at `offset`."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int


class _Unusual(Exception):
    """What this module does not read; the file may still be a model."""


def read(path: str) -> tuple[bytes, Arrays]:
    """Return a model's message without the larger default values of its inputs, and those.

    Whatever is unusual about a file, damage too, stays in the message for those who parse it.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        try:
            graph, left_out = _defaults(file, size)
        except (_Unusual, ValueError, DecodeError):
            return _bytes(file, 0, size), {}
        if len({default.name for default in left_out.values()}) < len(left_out):
            return _bytes(file, 0, size), {}
        pieces, begin = [], graph.content
        for field in left_out:
            pieces.append(_bytes(file, begin, field.begin))
            begin = field.end
        pieces.append(_bytes(file, begin, graph.end))
        # The graph is shorter than it was: its length is written anew.
        tag = _bytes(file, graph.begin, graph.begin + 1)
        head = [_bytes(file, 0, graph.begin), tag, varint(sum(map(len, pieces)))]
        message = b"".join([*head, *pieces, _bytes(file, graph.end, size)])
        return message, {default.name: _elements(file, default) for default in left_out.values()}


def _defaults(file: BinaryIO, size: int) -> tuple[_Field, dict[_Field, _Default]]:
    """Return the field of the graph, and those of the initializers to leave out, in their order."""
    graphs = [field for field in _fields(file, 0, size) if field.number == _GRAPH]
    if len(graphs) != 1 or graphs[0].kind != _BYTES or graphs[0].content - graphs[0].begin < 2:
        raise _Unusual
    (graph,) = graphs
    fields = [field for field in _fields(file, graph.content, graph.end) if field.number in (_INITIALIZER, _INPUT)]
    if any(field.kind != _BYTES for field in fields):
        raise _Unusual
    inputs = {
        onnx.ValueInfoProto.FromString(_bytes(file, field.content, field.end)).name
        for field in fields
        if field.number == _INPUT
    }
    found = {}
    for field in fields:
        if field.number == _INITIALIZER and field.end - field.content >= _SMALLEST:
            default = _default(file, field)
            if default.name in inputs:
                found[field] = default
    return graph, found


def _default(file: BinaryIO, field: _Field) -> _Default:
    """Return what a large tensor is.

    Raises:
        _Unusual: its elements are not the bytes of one field, or other bytes than it needs.
        ValueError: its type is none of ONNX's.
    """
    fields = list(_fields(file, field.content, field.end))
    data = [part for part in fields if part.number == _RAW_DATA]
    if len(data) != 1 or data[0].kind != _BYTES or field.end - field.content - data[0].end + data[0].begin > _SMALLEST:
        raise _Unusual
    head = b"".join(_bytes(file, part.begin, part.end) for part in fields if part.number != _RAW_DATA)
    tensor = onnx.TensorProto.FromString(head)
    if any(descriptor.name not in _KNOWN for descriptor, _ in tensor.ListFields()):
        raise _Unusual
    dtype, shape = ir.DataType(tensor.data_type), tuple(tensor.dims)
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or dtype.itemsize < 1 or len(shape) > 8:
        raise _Unusual
    elements = dtype.numpy()
    if min(shape, default=0) < 0 or math.prod(shape) * elements.itemsize != data[0].end - data[0].content:
        raise _Unusual
    return _Default(tensor.name, elements, shape, data[0].content)


def _elements(file: BinaryIO, default: _Default) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    file.seek(default.offset)
    array = np.empty(default.shape, default.dtype)
    if file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:  # type: ignore[attr-defined]
        raise OSError(f"the file became shorter while {default.name!r} was read")
    # An optimizer's state begins with zeros: those that nobody writes take no memory.
    return array if np.any(array) else np.zeros(array.shape, array.dtype)


def _fields(file: BinaryIO, begin: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message that lies between two places of a file.

    Raises:
        _Unusual: it is no message, or has groups.
    """
    while begin < end:
        file.seek(begin)
        tag, place = _read_varint(file)
        kind, content = tag & 7, place
        if kind == _VARINT:
            _, stop = _read_varint(file)
        elif kind == _BYTES:
            length, content = _read_varint(file)
            stop = content + length
        elif kind in (_FIXED_64, _FIXED_32):
            stop = content + (8 if kind == _FIXED_64 else 4)
        else:
            raise _Unusual
        if stop > end:
            raise _Unusual
        yield _Field(tag >> 3, kind, begin, content, stop)
        begin = stop


def _read_varint(file: BinaryIO) -> tuple[int, int]:
    """Return a varint, and the place behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise _Unusual
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return number, file.tell()
    raise _Unusual


def _bytes(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
