"""The CUDA kernels from Python, with nothing but numpy and ctypes; a GPU, or the SIMT machine of the tests."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3, "int32": 4, "int64": 5, "bool": 6, "uint8": 8}
"""Element types, by name, and the numbers that the library has for them."""

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}
"""The spacing of each type at 1."""


@dataclass(frozen=True)
class Values:
    """An array in a named type; numpy has no bfloat16, whose bits are uint16 here."""

    dtype: str
    bits: Array

    @classmethod
    def of(cls, values: Array, dtype: str) -> Values:
        """Round values to a type, to nearest even."""
        if dtype != "bfloat16":
            return cls(dtype, np.ascontiguousarray(values, dtype=dtype).reshape(np.shape(values)))
        words = np.asarray(values, np.float32).view(np.uint32)
        rounded = ((words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        quiet = ((words >> 16) | 0x40).astype(np.uint16)
        return cls(dtype, np.where(np.isnan(np.asarray(values, np.float32)), quiet, rounded))

    def wide(self) -> npt.NDArray[np.float64]:
        """The values in float64."""
        if self.dtype == "bfloat16":
            return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return self.bits.astype(np.float64)


class DeviceError(Exception):
    """The device, or an op, refuses what it is asked for."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("on_host", ctypes.c_int32),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_float),
        ("list", ctypes.POINTER(ctypes.c_int64)),
        ("list_size", ctypes.c_int64),
    )


class Buffer:
    """Device memory that is freed with this object."""

    def __init__(self, device: Device, size: int) -> None:
        self.size = size
        self._device = device
        self.address = device.call_pointer("allocate", ctypes.c_size_t(max(size, 1)))

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._device.library.gradfuse_device_free(ctypes.c_void_p(self.address))

    def fill(self, byte: int) -> None:
        """Set every byte."""
        self._device.call("fill", ctypes.c_void_p(self.address), byte, ctypes.c_size_t(self.size))


@dataclass(frozen=True)
class Operand:
    """A tensor of an op: device memory, or an array that stays with the host; `offset` bytes into the buffer."""

    memory: Buffer | Array
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


class Call:
    """An op with its operands, ready to run again and again."""

    def __init__(
        self, device: Device, op: str, operands: Sequence[Operand | None], attributes: Mapping[str, Any]
    ) -> None:
        self._device = device
        self._op = op.encode()
        self._operands = operands
        self._tensors = (_Tensor * len(operands))(*map(_tensor, operands))
        self._attributes = (_Attribute * len(attributes))(*(_attribute(*item) for item in attributes.items()))
        size = device.library.gradfuse_device_workspace(*self._arguments())
        if size < 0:
            raise DeviceError(f"{op}: {device.error()}")
        self.workspace = Buffer(device, size)
        self.fault = Buffer(device, 4)
        self.fault.fill(0)

    def _arguments(self) -> tuple[Any, ...]:
        return self._op, self._tensors, len(self._tensors), self._attributes, len(self._attributes)

    def run(self) -> None:
        """Start the op; does not wait for it."""
        arguments = (*self._arguments(), ctypes.c_void_p(self.workspace.address), ctypes.c_void_p(self.fault.address))
        if self._device.library.gradfuse_device_run(*arguments) != 0:
            raise DeviceError(f"{self._op.decode()}: {self._device.error()}")


class Device:
    """A library that `device_library.py` built."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.gradfuse_describe_ops.restype = ctypes.c_char_p
        self.signatures: dict[str, dict[str, Any]] = {
            signature["name"]: signature for signature in json.loads(self.library.gradfuse_describe_ops())
        }
        self.library.gradfuse_device_error.restype = ctypes.c_char_p
        self.library.gradfuse_device_workspace.restype = ctypes.c_int64
        for name in ("allocate", "event"):
            getattr(self.library, f"gradfuse_device_{name}").restype = ctypes.c_void_p
        text = ctypes.create_string_buffer(256)
        if self.library.gradfuse_device_name(text, ctypes.c_size_t(256)) != 0:
            raise DeviceError(f"no device: {text.value.decode()}")
        self.name = text.value.decode()

    def error(self) -> str:
        """What failed last."""
        return str(self.library.gradfuse_device_error().decode())

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the library that gives 0 for success."""
        code = getattr(self.library, f"gradfuse_device_{function}")(*arguments)
        if code != 0:
            raise DeviceError(f"{function} failed with CUDA's error {code}")

    def call_pointer(self, function: str, *arguments: Any) -> int:
        """Call a function of the library that gives a pointer, null for failure."""
        pointer = getattr(self.library, f"gradfuse_device_{function}")(*arguments)
        if not pointer:
            raise DeviceError(f"{function}{[argument.value for argument in arguments]} failed")
        return int(pointer)

    def upload(self, values: Values, *, shift: int = 0) -> Operand:
        """Values in device memory of their own, `shift` elements after its beginning."""
        bits = np.ascontiguousarray(values.bits)
        offset = shift * bits.itemsize
        buffer = Buffer(self, bits.nbytes + offset)
        address = ctypes.c_void_p(buffer.address + offset)
        self.call("upload", address, bits.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(bits.nbytes))
        return Operand(buffer, values.dtype, np.shape(values.bits), offset)

    def empty(self, shape: tuple[int, ...], dtype: str, *, shift: int = 0) -> Operand:
        """Device memory of NaN (of -1 for integers), `shift` elements after its beginning."""
        size = 1 if dtype == "bool" else {"64": 8, "32": 4, "16": 2, "t8": 1}[dtype[-2:]]
        buffer = Buffer(self, (int(np.prod(shape, dtype=np.int64)) + shift) * size)
        buffer.fill(0xFF)
        return Operand(buffer, dtype, shape, shift * size)

    def download(self, operand: Operand) -> Values:
        """The values of an operand, when the device is done with it."""
        assert isinstance(operand.memory, Buffer)
        bits = np.empty(operand.shape, np.uint16 if operand.dtype == "bfloat16" else operand.dtype)
        address = ctypes.c_void_p(operand.memory.address + operand.offset)
        self.call("synchronize")
        self.call("download", bits.ctypes.data_as(ctypes.c_void_p), address, ctypes.c_size_t(bits.nbytes))
        return Values(operand.dtype, bits)

    def prepare(self, op: str, operands: Sequence[Operand | None], **attributes: Any) -> Call:
        """An op on inputs and then outputs, in the order of its signature."""
        return Call(self, op, operands, attributes)

    def fault_of(self, call: Call) -> int:
        """The place of an input, counted from 1, that held values which the op does not take; 0 for none."""
        return int(self.download(Operand(call.fault, "int32", (1,))).bits[0])

    def milliseconds(self, start: Callable[[], None], repeats: int) -> list[float]:
        """The device's time for each of some starts."""
        events = [ctypes.c_void_p(self.call_pointer("event")) for _ in range(repeats + 1)]
        self.call("record", events[0])
        for event in events[1:]:
            start()
            self.call("record", event)
        times = []
        for first, last in pairwise(events):
            time = ctypes.c_float()
            self.call("elapsed", first, last, ctypes.byref(time))
            times.append(time.value)
        return times


def _tensor(operand: Operand | None) -> _Tensor:
    if operand is None:
        return _Tensor(rank=-1)
    on_device = isinstance(operand.memory, Buffer)
    address = operand.memory.address if isinstance(operand.memory, Buffer) else operand.memory.ctypes.data
    dims = (ctypes.c_int64 * 8)(*operand.shape)
    return _Tensor(address + operand.offset, DTYPES[operand.dtype], len(operand.shape), dims, not on_device)


def _attribute(name: str, value: Any) -> _Attribute:
    if isinstance(value, str):
        return _Attribute(name.encode(), value.encode(), 0, 0.0)
    if isinstance(value, tuple):
        numbers = (ctypes.c_int64 * len(value))(*value)
        return _Attribute(name.encode(), b"", 0, 0.0, numbers, len(value))
    return _Attribute(name.encode(), b"", int(value), float(value))
