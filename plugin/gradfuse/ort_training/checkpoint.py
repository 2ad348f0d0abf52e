"""The checkpoint file of onnxruntime-training, read without it.

It is a FlatBuffers file of onnxruntime's public schema (`onnxruntime/core/flatbuffers/schema`, the files
`ort_training_checkpoint.fbs` and `ort.fbs`), of which the tables with tensors are read here.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.errors import GradfuseError, ModelError, one_line
from gradfuse.models.arrays import Arrays

try:
    from flatbuffers import number_types
    from flatbuffers.table import Table
except ImportError as error:
    raise GradfuseError("to_stock: flatbuffers is not installed; expected what gradfuse[train] installs") from error

_IDENTIFIER = b"ODTC"
EXTERNAL = ".data"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, but for the properties that users store in it.

    Attributes:
        trainable: name -> value of the parameters that require gradients.
        frozen: name -> value of the other parameters.
        steps: how often the optimizer has updated the parameters; 0 without optimizer state.
        learning_rate: the optimizer's; None without optimizer state.
        momentums: parameter -> name of the state -> value: `momentum0` and `momentum1` of AdamW.
    """

    trainable: Arrays
    frozen: Arrays
    steps: int
    learning_rate: float | None
    momentums: dict[str, Arrays]


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint file, and the data file beside it where it has one.

    Raises:
        ModelError: the file cannot be read, is no checkpoint or damaged, is a nominal checkpoint, which has names and
            no values, or has several parameter groups.
    """
    path = os.fspath(path)
    _require_file(path, "the checkpoint")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read the checkpoint: {one_line(error)}") from error
    if content[4:8] != _IDENTIFIER:
        raise ModelError(f"{path}: is not a checkpoint of onnxruntime-training 1.19")
    try:
        return _Reader(content, path).checkpoint()
    except (struct.error, IndexError, ValueError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: is truncated or damaged: {one_line(error)}") from error


def _require_file(path: str, what: str) -> None:
    """Refuse a pipe, which would be waited for, and devices."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ModelError(f"{path}: cannot read {what}: it is no file; expected one")


class _Reader:
    """Reads the tables of a checkpoint: the fields of a table are numbered as they stand in the schema."""

    def __init__(self, content: bytes, path: str) -> None:
        self._content = content
        self._path = path

    def checkpoint(self) -> Checkpoint:
        (position,) = struct.unpack_from("<I", self._content)
        root = Table(self._content, position)
        module = self._table(root, 1)
        if self._scalar(module, 2, number_types.BoolFlags, False):
            raise ModelError(f"{self._path}: is a nominal checkpoint, which has no values; expected the full one")
        trainable, frozen = (self._named(self._tensors(module, field)) for field in (0, 1))
        groups = list(self._tables(root, 2))
        if len(groups) > 1:
            raise ModelError(f"{self._path}: has {len(groups)} parameter groups; expected one")
        steps, learning_rate, momentums = 0, None, {}
        for group in groups:
            steps = self._scalar(group, 1, number_types.Int64Flags, 0)
            if steps < 0:
                raise ValueError(f"the optimizer has done {steps} steps; expected 0 or more")
            learning_rate = self._scalar(group, 2, number_types.Float32Flags, 0.0)
            if not (math.isfinite(learning_rate) and learning_rate >= 0):
                raise ValueError(f"the learning rate is {learning_rate}; expected a finite number from 0 on")
            states = (
                (self._string(state, 0), self._named(self._tensors(state, 1))) for state in self._tables(group, 3)
            )
            momentums = self._named(states)
        both = next((name for name in trainable if name in frozen), None)
        if both is not None:
            raise ValueError(f"{both!r} is a trainable parameter and a frozen one; expected one of them")
        return Checkpoint(trainable, frozen, steps, learning_rate, momentums)

    def _named(self, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{name!r} is there twice; expected different names")
            found[name] = value
        return found

    def _tensors(self, table: Table, field: int) -> Iterator[tuple[str, Any]]:
        for tensor in self._tables(table, field):
            name = self._string(tensor, 0)
            dtype = ir.DataType(self._scalar(tensor, 3, number_types.Int32Flags, 0)).numpy()
            shape = [int(size) for size in self._vector(tensor, 2, number_types.Int64Flags)]
            if any(size < 0 for size in shape):
                raise ValueError(f"{name!r} has shape {tuple(shape)}; expected sizes from 0 on")
            count = math.prod(shape)
            external = self._scalar(tensor, 6, number_types.Int64Flags, -1)
            if external >= 0:
                array = self._external(dtype, count, external)
            else:
                array = np.array(self._vector(tensor, 4, number_types.Uint8Flags)).view(dtype)
            if array.size != count:
                raise ValueError(f"{name!r} has {array.size} elements and shape {tuple(shape)}; expected {count}")
            yield name, array.reshape(shape)

    def _external(self, dtype: np.dtype[Any], count: int, offset: int) -> Any:
        path = self._path + EXTERNAL
        _require_file(path, "the checkpoint's data")
        try:
            # What is asked for is not allocated before it is known to be there.
            there = max(os.path.getsize(path) - offset, 0) // dtype.itemsize
            return np.fromfile(path, dtype, min(count, there), offset=offset)
        except OSError as error:
            raise ModelError(f"{path}: cannot read the checkpoint's data: {one_line(error)}") from error

    def _offset(self, table: Table, field: int) -> int:
        """The position of a field, 0 where the table leaves it out."""
        offset = int(table.Offset(4 + 2 * field))
        return offset + table.Pos if offset else 0

    def _scalar(self, table: Table, field: int, kind: Any, default: Any) -> Any:
        position = self._offset(table, field)
        return table.Get(kind, position) if position else default

    def _string(self, table: Table, field: int) -> str:
        position = self._offset(table, field)
        if not position:
            return ""
        text = bytes(table.String(position))
        if len(text) != table.VectorLen(position - table.Pos):
            raise ValueError("a name ends behind the file; expected all of it")
        return text.decode()

    def _vector(self, table: Table, field: int, kind: Any) -> Any:
        if not self._offset(table, field):
            return np.empty(0, number_types.to_numpy_type(kind))
        return table.GetVectorAsNumpy(kind, table.Offset(4 + 2 * field))

    def _table(self, table: Table, field: int) -> Table:
        position = self._offset(table, field)
        if not position:
            raise ValueError(f"field {field} is missing")
        return Table(self._content, table.Indirect(position))

    def _tables(self, table: Table, field: int) -> Iterator[Table]:
        position = self._offset(table, field)
        if position:
            start = table.Vector(position - table.Pos)
            for index in range(table.VectorLen(position - table.Pos)):
                yield Table(self._content, table.Indirect(start + 4 * index))
