"""onnxruntime's values from and to numpy arrays, bfloat16 included, which the functions of onnxruntime do not take.

numpy has bfloat16 from ml_dtypes. onnxruntime takes its bits as integers, and gives the address of a value on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradfuse.errors import GradfuseError
from gradfuse.runtime import import_onnxruntime

_BFLOAT16 = 16
"""ONNX's number of the type."""


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    # numpy takes microseconds to make the name of a type.
    return dtype.kind == "V" and dtype.name == "bfloat16"


def allocate(new_value: Any, shape: Sequence[int], dtype: np.dtype[Any], device: tuple[str, int], what: str) -> Any:
    """Return a value whose numbers are not set.

    Args:
        new_value: `OrtValue.ortvalue_from_shape_and_type`.
        shape: its shape.
        dtype: its type.
        device: kind and number of the device that holds it.
        what: what to call it in messages.

    Raises:
        GradfuseError: it is bfloat16, and on another device than the CPU, or onnxruntime is too old for that.
    """
    if not is_bfloat16(dtype):
        return new_value(list(shape), dtype, *device)
    if device[0] != "cpu":
        raise GradfuseError(f"{what} is bfloat16 on {device[0]}; expected another type there")
    try:
        return new_value(list(shape), _BFLOAT16, *device)
    except Exception as error:
        # It raises different ones in different versions.
        raise GradfuseError(f"{what} is bfloat16; expected onnxruntime 1.20 or newer for that") from error


def of_array(array: npt.NDArray[Any], what: str) -> Any:
    """Return a value on the CPU of a contiguous array, which may share its memory: the array has to live as long.

    Raises:
        GradfuseError: as `allocate`.
    """
    types = import_onnxruntime().OrtValue
    if not is_bfloat16(array.dtype):
        return types.ortvalue_from_numpy(array)
    value = allocate(types.ortvalue_from_shape_and_type, array.shape, array.dtype, ("cpu", 0), what)
    write(value, array)
    return value


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return the numbers of a value; on the CPU they may be in its own memory, which later steps write into."""
    if value.element_type() != _BFLOAT16:
        return np.asarray(value.numpy())
    import ml_dtypes

    shape = value.shape()
    bits = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    array: npt.NDArray[Any] = np.ctypeslib.as_array(bits).view(ml_dtypes.bfloat16)
    return array.reshape(shape)


def write(value: Any, array: npt.NDArray[Any]) -> None:
    """Set the numbers of a value, from a contiguous array of its type and shape."""
    value.update_inplace(array.view(np.uint16) if is_bfloat16(array.dtype) else array)


def bind(binding: Any, name: str, array: npt.NDArray[Any]) -> None:
    """Let a run read an input from a contiguous array, which has to live as long as the binding."""
    if is_bfloat16(array.dtype):
        binding.bind_input(name, "cpu", 0, _BFLOAT16, array.shape, array.ctypes.data)
    else:
        binding.bind_cpu_input(name, array)
