"""The C API from Python: the operators' two phases on tensors of PyTorch, whatever their strides."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import gradfuse
from gradfuse.custom_ops import OPS
from gradfuse.custom_ops.operator import Input

NULL_POINTER, INVALID = 161001, 161002
ND = 2
TYPES = {
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
"""The enumerators of aclDataType."""

_ATTRIBUTE_TYPES: Mapping[str, Any] = {
    "int": ctypes.c_int64,
    "bool": ctypes.c_bool,
    "float": ctypes.c_double,
    "str": ctypes.c_char_p,
    "List[int]": ctypes.c_void_p,
    "List[bool]": ctypes.c_void_p,
}
"""Of each type in a torch schema the C type; the operator in PyTorch has all arguments of the C function in order.
Lists are pointers to an aclIntArray."""


@cache
def attributes_of(op: str) -> Mapping[str, tuple[Any, Any]]:
    """The attributes of an operator in the order of the C function: each with its C type and its default."""
    operator = OPS[op]
    arguments = torch._C.parse_schema(f"aclnn::{operator.stem}{operator.torch_schema}").arguments
    kinds = [_ATTRIBUTE_TYPES[str(argument.type)] for argument in arguments[len(operator.inputs) :]]
    return {a.name: (kind, a.default) for a, kind in zip(operator.attributes, kinds, strict=True)}


def is_array(input: Input) -> bool:
    """Whether an input is an aclIntArray in C: lengths are."""
    return input.type == "L"


class RefusedError(Exception):
    """A function of the C API did not succeed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@cache
def library() -> ctypes.CDLL:
    """The library, with the types of those functions that ctypes would take for others."""
    os.environ["GRADFUSE_DEVICE"] = "cpu"
    loaded = ctypes.CDLL(gradfuse.get_aclnn_library_path())
    for name in ("aclCreateTensor", "aclCreateIntArray"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return loaded


def expect_success(code: int) -> None:
    """Raise what the last function said, unless it succeeded."""
    if code != 0:
        raise RefusedError(code, library().aclGetRecentErrMsg().decode())


def int64s(values: Sequence[int]) -> Any:
    """An array of C."""
    return (ctypes.c_int64 * len(values))(*values)


def create_tensor(tensor: Tensor, format: int = ND) -> ctypes.c_void_p:
    """An aclTensor over the memory of a tensor; the caller destroys it."""
    rank = ctypes.c_uint64(tensor.dim())
    storage = tensor.untyped_storage()
    made = library().aclCreateTensor(
        int64s([int(size) for size in tensor.shape]),
        rank,
        TYPES[tensor.dtype],
        int64s([int(stride) for stride in tensor.stride()]),
        ctypes.c_int64(int(tensor.storage_offset())),
        format,
        int64s([int(storage.nbytes()) // tensor.element_size()]),
        ctypes.c_uint64(1),
        ctypes.c_void_p(storage.data_ptr()),
    )
    if not made:
        raise RefusedError(0, library().aclGetRecentErrMsg().decode())
    return ctypes.c_void_p(made)


def create_int_array(values: Sequence[int]) -> ctypes.c_void_p:
    """An aclIntArray of some numbers; the caller destroys it."""
    return ctypes.c_void_p(library().aclCreateIntArray(int64s(values), ctypes.c_uint64(len(values))))


@contextmanager
def int_array(values: Sequence[int]) -> Iterator[ctypes.c_void_p]:
    """An aclIntArray of some numbers."""
    array = create_int_array(values)
    yield array
    expect_success(library().aclDestroyIntArray(array))


@contextmanager
def argument(value: Tensor | None, *, as_array: bool) -> Iterator[ctypes.c_void_p]:
    """A pointer to an aclTensor or aclIntArray of the value; a null pointer for None."""
    if value is None:
        yield ctypes.c_void_p()
    elif as_array:
        with int_array(value.tolist()) as array:
            yield array
    else:
        tensor = create_tensor(value)
        yield tensor
        expect_success(library().aclDestroyTensor(tensor))


def prepare(
    op: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attributes: Mapping[str, Any]
) -> tuple[ctypes.c_void_p, int]:
    """The first phase: an executor and the size of the workspace. The aclTensors are destroyed before it returns."""
    workspace_size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    values = []
    with ExitStack() as stack:
        for name, (kind, default) in attributes_of(op).items():
            value = attributes.get(name, default)
            if isinstance(value, tuple):
                values.append(stack.enter_context(int_array(value)))
            else:
                values.append(kind(value.encode() if isinstance(value, str) else value))
        arguments = [
            stack.enter_context(argument(value, as_array=is_array(described)))
            for described, value in zip_longest(OPS[op].inputs, inputs)
        ]
        results = [stack.enter_context(argument(output, as_array=False)) for output in outputs]
        first_phase = getattr(library(), f"aclnn{op}GetWorkspaceSize")
        code = first_phase(*arguments, *values, *results, ctypes.byref(workspace_size), ctypes.byref(executor))
        expect_success(code)
    return executor, workspace_size.value


def execute(
    op: str, executor: ctypes.c_void_p, workspace: Tensor | None, stream: ctypes.c_void_p | None = None
) -> None:
    """The second phase, with a tensor of bytes for the workspace."""
    address = None if workspace is None else ctypes.c_void_p(workspace.data_ptr())
    size = ctypes.c_uint64(0 if workspace is None else workspace.numel())
    expect_success(getattr(library(), f"aclnn{op}")(address, size, executor, stream))


def run(op: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], **attributes: Any) -> None:
    """Both phases, without a stream: the outputs are written when this returns."""
    executor, size = prepare(op, inputs, outputs, attributes)
    execute(op, executor, torch.empty(size, dtype=torch.uint8))
