"""Calls of libgradfuse_aclnn on torch tensors of any strides.

By ctypes, so that one wheel serves every Python; ctypes gives up the GIL while a function of the library runs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.custom_ops.operator import Operator
from gradfuse.errors import ArgumentError, GradfuseError
from gradfuse.library import get_aclnn_library_path

_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int16: 6,
    torch.int64: 9,
    torch.float64: 11,
    torch.bool: 12,
    torch.bfloat16: 27,
}
"""The enumerators of aclDataType in acl/acl.h."""
_FORMAT_ND = 2
_PARAMETER_ERRORS = (161001, 161002)
_ATTRIBUTE_TYPES: dict[str, Any] = {
    "int": ctypes.c_int64,
    "bool": ctypes.c_bool,
    "float": ctypes.c_double,
    "str": ctypes.c_char_p,
    "List[int]": ctypes.c_void_p,
    "List[bool]": ctypes.c_void_p,
}
"""Of each type in a torch schema the C type; lists are pointers to an aclIntArray."""
_LENGTHS = "L"
"""The type variable of the inputs that the C API takes as aclIntArray."""


@cache
def _device_type() -> str:
    """The type of the one device that a program has in the C API."""
    # Without a choice the library would take a GPU where it finds one, and be given the addresses of CPU tensors.
    if not os.environ.get("GRADFUSE_DEVICE"):
        os.environ["GRADFUSE_DEVICE"] = "cpu"
    return os.environ["GRADFUSE_DEVICE"]


@cache
def _library() -> ctypes.CDLL:
    _device_type()
    library = ctypes.CDLL(get_aclnn_library_path())
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint64
    library.aclCreateTensor.argtypes = [
        *(pointer, unsigned, ctypes.c_int, pointer, ctypes.c_int64, ctypes.c_int, pointer, unsigned, pointer)
    ]
    library.aclCreateTensor.restype = pointer
    library.aclDestroyTensor.argtypes = [pointer]
    library.aclCreateIntArray.argtypes = [pointer, unsigned]
    library.aclCreateIntArray.restype = pointer
    library.aclDestroyIntArray.argtypes = [pointer]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


@lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Arrays of the shape and the strides of a view, and the shape of the memory that it reaches: one dimension."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return _int64s(shape), _int64s(strides), _int64s([0 if 0 in shape else last + 1])


class Kernel:
    """The kernel of one operator, called with the arguments of its torch schema (see :class:`TorchOp`).

    Raises:
        ArgumentError: the library refuses an argument; the text is its own.
        GradfuseError: it has no memory, or the device has failed.
        NotImplementedError: it is called where forward-mode derivatives are taken.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._torch_op = operator.torch_op
        self._who = f"aclnn::{operator.stem}"
        arguments = private.schema_arguments(f"{self._who}{operator.torch_schema}")
        self._names = [argument.name for argument in arguments]
        self._defaults = tuple(argument.default_value for argument in arguments)
        self._attribute_types = [_ATTRIBUTE_TYPES[str(argument.type)] for argument in arguments[len(operator.inputs) :]]
        self._is_array = [input.type == _LENGTHS for input in operator.inputs]

    def __call__(self, *given: Any) -> Tensor | tuple[Tensor, ...]:
        # torch.library knows no forward-mode derivatives: the tangents of the results would be zero.
        if private.forward_mode_is_on():
            raise NotImplementedError(f"forward-mode derivative for {self._who} is not implemented")
        args = self._complete(given)
        device = args[0].device
        if device.type == "cpu":
            results = self._run(args, device, None)
        else:
            with torch.cuda.device(device):
                results = self._run(args, device, torch.cuda.current_stream().cuda_stream)
        return results if len(results) > 1 else results[0]

    def fake(self, *given: Any) -> Tensor | tuple[Tensor, ...]:
        """The results for fake tensors: shapes and types, and nothing computed."""
        results = (self._torch_op.fake or self._torch_op.outputs)(*self._complete(given))
        return results if len(results) > 1 else results[0]

    def _complete(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments: the dispatcher leaves out those at the end that have their default values.

        Tensors are there where they must be, and on one device: the dispatcher asks for neither, and would have results
        for fake tensors, which nothing writes to, be those of real ones beside them.
        """
        args = (*given, *self._defaults[len(given) :])
        for input, is_array, value in zip(self._operator.inputs, self._is_array, args, strict=False):
            if value is None:
                if not input.optional:
                    raise self._error(input.name, "None", "a tensor")
            elif not is_array and value.device != args[0].device:
                raise self._error(input.name, f"on {value.device}", f"{args[0].device}, as {self._names[0]}")
        return args

    def _run(self, args: tuple[Any, ...], device: torch.device, stream: int | None) -> tuple[Tensor, ...]:
        if device.type != _device_type():
            wanted = f"{_device_type()}, the device of GRADFUSE_DEVICE"
            raise self._error(self._names[0], f"on {device}", wanted)
        library = _library()
        first_phase, second_phase = self._phases
        count = len(self._is_array)
        tensors: list[int] = []
        arrays: list[int] = []
        attributes: list[Any] = []
        inputs: list[int | None] = []
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        try:
            for name, is_array, value in zip(self._names, self._is_array, args, strict=False):
                if value is None:
                    inputs.append(None)
                elif is_array:
                    arrays.append(self._create_int_array(self._lengths(name, value)))
                    inputs.append(arrays[-1])
                else:
                    tensors.append(self._create_tensor(name, value))
                    inputs.append(tensors[-1])
            for name, value in zip(self._names[count:], args[count:], strict=True):
                if isinstance(value, (list, tuple)):
                    arrays.append(self._create_int_array([int(number) for number in value]))
                    attributes.append(arrays[-1])
                else:
                    attributes.append(self._attribute(name, value))
            outputs = self._torch_op.outputs(*args)
            tensors += (self._create_tensor("output", output) for output in outputs)
            results = tensors[len(tensors) - len(outputs) :]
            code = first_phase(*inputs, *attributes, *results, ctypes.byref(size), ctypes.byref(executor))
            self._expect_success(code)
        finally:
            for tensor in tensors:
                library.aclDestroyTensor(tensor)
            for array in arrays:
                library.aclDestroyIntArray(array)
        workspace = torch.empty(size.value, dtype=torch.uint8, device=device) if size.value else None
        address = None if workspace is None else workspace.data_ptr()
        self._expect_success(second_phase(address, size, executor, stream))
        return outputs

    @cached_property
    def _phases(self) -> tuple[Callable[..., int], Callable[..., int]]:
        """The two functions of the operator in C."""
        pointer = ctypes.c_void_p
        first: Any = getattr(_library(), f"aclnn{self._operator.name}GetWorkspaceSize")
        inputs, outputs = len(self._operator.inputs), len(self._operator.outputs)
        first.argtypes = [*[pointer] * inputs, *self._attribute_types, *[pointer] * (outputs + 2)]
        second: Any = getattr(_library(), f"aclnn{self._operator.name}")
        second.argtypes = [pointer, ctypes.c_uint64, pointer, pointer]
        return first, second

    def _attribute(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if "\0" in value:
            raise self._error(name, repr(value), "text without null characters")
        return value.encode()

    def _create_tensor(self, name: str, tensor: Tensor) -> int:
        """An aclTensor over the memory of a tensor; the caller destroys it."""
        if tensor.dtype not in _DTYPES:
            raise self._error(name, _show(tensor), f"one of {', '.join(map(_type_name, _DTYPES))}")
        shape, strides, extent = _layout(tensor.shape, tensor.stride())
        made: int | None = _library().aclCreateTensor(
            shape, len(shape), _DTYPES[tensor.dtype], strides, 0, _FORMAT_ND, extent, 1, tensor.data_ptr()
        )
        return made or self._fail()

    def _lengths(self, name: str, lengths: Tensor) -> list[int]:
        """The values of a tensor, which may be on any device."""
        if lengths.dtype != torch.int64 or lengths.dim() != 1:
            raise self._error(name, _show(lengths), "int64 of shape (N)")
        values: list[int] = lengths.tolist()
        return values

    def _create_int_array(self, values: list[int]) -> int:
        """An aclIntArray of some numbers; the caller destroys it."""
        made: int | None = _library().aclCreateIntArray(_int64s(values), len(values))
        return made or self._fail()

    def _error(self, argument: str, got: str, wanted: str) -> ArgumentError:
        return ArgumentError(f"{self._who}: {argument} is {got}; expected {wanted}")

    def _expect_success(self, code: int) -> None:
        if code != 0:
            self._fail(ArgumentError if code in _PARAMETER_ERRORS else GradfuseError)

    def _fail(self, error: type[GradfuseError] = GradfuseError) -> Any:
        """Raise what the last function that failed in this thread says, in the name of the torch op."""
        _, _, text = _library().aclGetRecentErrMsg().decode().partition(": ")
        raise error(f"{self._who}: {text}")


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show(tensor: Tensor) -> str:
    """A tensor as the messages of the library write it: ``int64(2,2)``."""
    return f"{_type_name(tensor.dtype)}({','.join(map(str, tensor.shape))})"
