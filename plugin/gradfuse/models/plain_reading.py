"""Reads models on a device with onnxruntime and numpy alone: inputs, outputs, tensors and metadata of a file.

onnxruntime gets the message as it is in the file, except for the default values of inputs, which it would keep in
addition to those that are bound to the inputs. It also validates the model.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gradfuse.errors import GradfuseError, ModelError, one_line
from gradfuse.models.wire import (
    BYTES,
    VARINT,
    Field,
    Unusual,
    field,
    fields,
    numbers,
    parts,
    read_bytes,
    varint,
    without,
)

# Fields of onnx.proto, by message.
_GRAPH, _METADATA = 7, 14
_INITIALIZER, _INPUT, _OUTPUT, _SPARSE = 5, 11, 12, 15
_DIMS, _TYPE, _NAME, _RAW, _EXTERNAL = 1, 2, 8, 9, 13
_TYPED = {4: "<f4", 10: "<f8", 5: "", 7: "", 11: ""}
"""Fields of elements that are listed: floats, or varints."""
_SPARSE_VALUES, _SPARSE_DIMS = 1, 3
_NUMPY = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
}
"""Types of tensors that numpy has, by ONNX's numbers."""
_FLOAT16, _BFLOAT16 = 10, 16
_MOST = 2**31
_LARGE = 2**16
"""Bytes from which on zeros take no memory as long as nobody writes into them."""


@dataclasses.dataclass(frozen=True)
class PlainType:
    """Type and shape of an input or output: ONNX's number of the type; sizes, names, and None where nothing is said."""

    number: int
    shape: tuple[int | str | None, ...]


@dataclasses.dataclass(frozen=True)
class PlainModel:
    """What a file has.

    Attributes:
        path: the file.
        message: the model without the default values of its inputs.
        inputs: name -> type.
        outputs: name -> type.
        metadata: the model's.
        has_files: whether tensors of the message are in files beside it.
    """

    path: str
    message: bytes
    inputs: Mapping[str, PlainType]
    outputs: Mapping[str, PlainType]
    metadata: Mapping[str, str]
    has_files: bool
    _tensors: Mapping[str, _Tensor]

    @property
    def defaults(self) -> list[str]:
        """The names of inputs with default values."""
        return [name for name in self.inputs if name in self._tensors]

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the elements of an initializer, or of the default value of an input.

        Raises:
            KeyError: there is none.
            ModelError: its elements are not where the file says.
            GradfuseError: it is of a type that numpy does not have, and ml_dtypes is not installed.
        """
        return self._tensors[name].read(self.path)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of a file: its elements lie at `offset` in it, or in the file `location` beside it; None: zeros."""

    name: str
    number: int
    shape: tuple[int, ...]
    offset: int | None
    nbytes: int
    location: str | None = None
    listed: tuple[tuple[int, int | bytes], ...] = ()

    def read(self, path: str) -> npt.NDArray[Any]:
        dtype = dtype_of(self.number, f"{path}: {self.name!r}")
        if self.offset is None:
            return np.zeros(self.shape, dtype)
        if self.listed:
            return self._of_list(dtype, path)
        if math.prod(self.shape) * dtype.itemsize != self.nbytes:
            raise ModelError(f"{path}: {self.name!r} has {self.nbytes} bytes; expected those of {self.shape} {dtype}")
        source = path if self.location is None else os.path.join(os.path.dirname(path), self.location)
        try:
            with open(source, "rb") as file:
                file.seek(self.offset)
                array = np.empty(self.shape, dtype)
                read = file.readinto(array.reshape(-1).view(np.uint8).data)
        except (OSError, ValueError, MemoryError) as error:
            raise ModelError(f"{source}: cannot read {self.name!r}: {one_line(error)}") from error
        if read != array.nbytes:
            raise ModelError(
                f"{source}: is too short for {self.name!r}; expected {array.nbytes} bytes at {self.offset}"
            )
        return np.zeros(self.shape, dtype) if array.nbytes >= _LARGE and not np.any(array) else array

    def _of_list(self, dtype: np.dtype[Any], path: str) -> npt.NDArray[Any]:
        """Return elements that the message has one by one; those of 16 bit floats as their bits."""
        pieces = [
            np.frombuffer(_bytes(content), _TYPED[kind])
            if _TYPED[kind]
            else np.array([one % 2**64 for one in numbers(content)], np.uint64).view(np.int64)
            for kind, content in self.listed
        ]
        values = np.concatenate(pieces)
        if self.number in (_FLOAT16, _BFLOAT16):
            values = values.astype(np.uint16).view(dtype)
        if values.size != math.prod(self.shape):
            raise ModelError(f"{path}: {self.name!r} has {values.size} elements; expected those of {self.shape}")
        return values.astype(dtype).reshape(self.shape)


def read(path: str | os.PathLike[str]) -> PlainModel:
    """Read a model's file, without elements of tensors.

    Raises:
        ModelError: it cannot be read, is not an ONNX model, or stores tensors in a way that `TrainingStep.save` does
    not.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no file" if os.path.exists(path) else "does not exist"
        raise ModelError(f"{path}: {what}; expected an ONNX file")
    try:
        with open(path, "rb") as file:
            return _read(file, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot read the file: {one_line(error)}") from error
    except (Unusual, ValueError) as error:
        why = f": {one_line(error)}" if str(error) else ""
        raise ModelError(f"{path}: is damaged, or no ONNX model that TrainingStep.save wrote{why}") from error


def with_values(model: PlainModel, values: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return the message of a model in which some inputs are initializers.

    Raises:
        ModelError: it is too large for one protobuf message.
    """
    file, size = io.BytesIO(model.message), len(model.message)
    (graph,) = (one for one in fields(file, 0, size) if one.number == _GRAPH)
    left_out = [
        one
        for one in fields(file, graph.content, graph.end)
        if one.number == _INPUT and _typed(read_bytes(file, one.content, one.end))[0] in values
    ]
    added = []
    for name, array in values.items():
        shape = b"".join(varint(_DIMS << 3 | VARINT) + varint(size) for size in array.shape)
        number = varint(_TYPE << 3 | VARINT) + varint(model.inputs[name].number)
        named = field(_NAME, len(name.encode())) + name.encode()
        head = shape + number + named + field(_RAW, array.nbytes)
        added += [field(_INITIALIZER, len(head) + array.nbytes) + head, array.tobytes()]
    if size + sum(map(len, added)) >= _MOST:
        raise ModelError(f"{model.path}: is too large with its values; expected less than {_MOST} bytes")
    return without(file, size, graph, left_out, b"".join(added))


def _read(file: BinaryIO, path: str) -> PlainModel:
    size = file.seek(0, 2)
    graphs, metadata = [], {}
    for one in fields(file, 0, size):
        if one.number == _GRAPH:
            graphs.append(one)
        elif one.number == _METADATA:
            key, value = _entry(read_bytes(file, one.content, one.end))
            metadata[key] = value
    if len(graphs) != 1 or graphs[0].kind != BYTES:
        raise Unusual
    (graph,) = graphs
    inside = list(fields(file, graph.content, graph.end))
    inputs, outputs = (
        dict(_typed(read_bytes(file, one.content, one.end)) for one in inside if one.number == number)
        for number in (_INPUT, _OUTPUT)
    )
    tensors: dict[str, _Tensor] = {}
    left_out, has_files = [], False
    for one in inside:
        if one.number not in (_INITIALIZER, _SPARSE):
            continue
        tensor = _tensor(file, one, path) if one.number == _INITIALIZER else _zeros(file, one)
        if tensor is None:
            continue
        if tensor.name in tensors:
            raise Unusual(f"{tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
        if tensor.name in inputs:
            left_out.append(one)
        else:
            has_files = has_files or tensor.location is not None
    return PlainModel(path, without(file, size, graph, left_out), inputs, outputs, metadata, has_files, tensors)


def _tensor(file: BinaryIO, one: Field, path: str) -> _Tensor:
    """Return where the elements of a dense tensor are.

    Raises:
        Unusual: not in a file of the model's folder.
    """
    shape: list[int] = []
    number, name, place, files = 0, "", None, {}
    listed: list[tuple[int, int | bytes]] = []
    for part in fields(file, one.content, one.end):
        if part.number == _RAW:
            place = part
        elif part.number in (_DIMS, _TYPE, _NAME, _EXTERNAL):
            # Of the elements, nothing is read here.
            ((_, content),) = parts(read_bytes(file, part.begin, part.end))
            if part.number == _DIMS:
                shape += numbers(content)
            elif part.number == _TYPE:
                (number,) = numbers(content)
            elif part.number == _NAME:
                name = _text(content)
            else:
                key, value = _entry(content)
                files[key] = value
        elif part.number in _TYPED:
            ((_, content),) = parts(read_bytes(file, part.begin, part.end))
            listed.append((part.number, content))
    if files:
        location = files.get("location", "")
        folder = os.path.realpath(os.path.dirname(path) or os.curdir)
        if os.path.commonpath([folder, os.path.realpath(os.path.join(folder, location))]) != folder:
            raise Unusual(f"{name!r} is in {location}, outside the folder")
        nbytes = int(files["length"]) if "length" in files else _nbytes(number, shape)
        return _Tensor(name, number, tuple(shape), int(files.get("offset", 0)), nbytes, location)
    if place is None:
        return _Tensor(name, number, tuple(shape), 0, 0, listed=tuple(listed))
    return _Tensor(name, number, tuple(shape), place.content, place.end - place.content)


def _nbytes(number: int, shape: list[int]) -> int:
    return math.prod(shape) * np.dtype(_NUMPY.get(number, "uint16")).itemsize


def _zeros(file: BinaryIO, one: Field) -> _Tensor | None:
    """Return a sparse tensor without elements; of others, which inputs do not have, None."""
    shape: list[int] = []
    number, name, values = 0, "", [-1]
    for part, content in parts(read_bytes(file, one.content, one.end)):
        if part == _SPARSE_DIMS:
            shape += numbers(content)
        elif part == _SPARSE_VALUES:
            found: list[int] = []
            for inner, of in parts(_bytes(content)):
                if inner == _DIMS:
                    found += numbers(of)
                elif inner == _TYPE:
                    (number,) = numbers(of)
                elif inner == _NAME:
                    name = _text(of)
            values = found
    return _Tensor(name, number, tuple(shape), None, 0) if values == [0] else None


def _typed(message: bytes) -> tuple[str, PlainType]:
    """Return name and type of an input or output."""
    found = dict(parts(message))
    tensor = dict(parts(_bytes(dict(parts(_bytes(found.get(2, b"")))).get(1, b""))))
    (number,) = numbers(tensor.get(1, 0))
    shape = (_size(_bytes(dim)) for kind, dim in parts(_bytes(tensor.get(2, b""))) if kind == 1)
    return _text(found.get(1, b"")), PlainType(number, tuple(shape))


def _size(message: bytes) -> int | str | None:
    for one, content in parts(message):
        if one == 1:
            (size,) = numbers(content)
            return size
        if one == 2:
            return _text(content) or None
    return None


def _entry(content: int | bytes) -> tuple[str, str]:
    found = dict(parts(_bytes(content)))
    return _text(found.get(1, b"")), _text(found.get(2, b""))


def _bytes(content: int | bytes) -> bytes:
    if isinstance(content, int):
        raise Unusual
    return content


def _text(content: int | bytes) -> str:
    return _bytes(content).decode()


def dtype_of(number: int, what: str) -> np.dtype[Any]:
    """Return numpy's type of a tensor.

    Args:
        number: ONNX's number of the type.
        what: what has it, for the message.

    Raises:
        GradfuseError: numpy does not have it, and ml_dtypes is not installed.
    """
    if number in _NUMPY:
        return np.dtype(_NUMPY[number])
    if number == _BFLOAT16:
        try:
            import ml_dtypes

            bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return bfloat16
        except ImportError:
            raise GradfuseError(f"{what} is bfloat16, which numpy does not have; expected ml_dtypes as well") from None
    raise GradfuseError(f"{what} has the type {number} of ONNX, which numpy does not have; expected another")
