"""Protobuf messages by their wire format, without the classes that protobuf makes of them.

The numbers of fields are those of onnx.proto.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
"""Kinds of fields on the wire."""


class Unusual(Exception):
    """What this module does not read; the file may still be a model."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a message in a file: where it begins, where its content begins and ends."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


def fields(file: BinaryIO, begin: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message that lies between two places of a file.

    Raises:
        Unusual: it is no message, or has groups.
    """
    while begin < end:
        file.seek(begin)
        tag, place = read_varint(file)
        kind, content = tag & 7, place
        if kind == VARINT:
            _, stop = read_varint(file)
        elif kind == BYTES:
            length, content = read_varint(file)
            stop = content + length
        elif kind in (FIXED_64, FIXED_32):
            stop = content + (8 if kind == FIXED_64 else 4)
        else:
            raise Unusual
        if stop > end:
            raise Unusual
        yield Field(tag >> 3, kind, begin, content, stop)
        begin = stop


def read_varint(file: BinaryIO) -> tuple[int, int]:
    """Return a varint, and the place behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise Unusual
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return number, file.tell()
    raise Unusual


def read_bytes(file: BinaryIO, begin: int, end: int) -> bytes:
    """Return what lies between two places of a file."""
    file.seek(begin)
    return file.read(end - begin)


def without(file: BinaryIO, size: int, outer: Field, left_out: Iterable[Field], added: bytes = b"") -> bytes:
    """Return the message that a file is, without some fields of a field of it, in the file's order, and with others."""
    pieces, begin = [], outer.content
    for one in left_out:
        pieces.append(read_bytes(file, begin, one.begin))
        begin = one.end
    pieces += [read_bytes(file, begin, outer.end), added]
    # The field has another size: its length is written anew.
    tag = read_bytes(file, outer.begin, outer.begin + 1)
    head = [read_bytes(file, 0, outer.begin), tag, varint(sum(map(len, pieces)))]
    return b"".join([*head, *pieces, read_bytes(file, outer.end, size)])


def parts(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a message: bytes, or an integer.

    Raises:
        Unusual: it is no message.
    """
    file = io.BytesIO(message)
    for one in fields(file, 0, len(message)):
        if one.kind == VARINT:
            file.seek(one.begin)
            read_varint(file)
            yield one.number, read_varint(file)[0]
        else:
            yield one.number, message[one.content : one.end]


def numbers(content: int | bytes) -> list[int]:
    """Return the integers of a repeated field: one of several, or all of them packed.

    Raises:
        Unusual: they are no integers.
    """
    if isinstance(content, int):
        return [content]
    file, found = io.BytesIO(content), []
    while file.tell() < len(content):
        found.append(read_varint(file)[0])
    return found


def field(number: int, size: int) -> bytes:
    """Return what a field of bytes begins with on the wire: its number, its kind and its size."""
    return varint(number << 3 | BYTES) + varint(size)


def varint(number: int) -> bytes:
    """Return a number as messages have it."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
