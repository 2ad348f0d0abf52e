"""Bad arguments: the C API and onnxruntime refuse the same ones, with the same words."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from backends import ONNX_TYPES, one_node, to_ort_value
from cpp_ext.single_node import session_of
from operators import SAMPLES
from torch import Tensor

from cpp_ext import capi
from cpp_ext.capi import INVALID, NULL_POINTER, RefusedError
from gradfuse.custom_ops import OPS

MANY = 20


@cache
def valid(op: str) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs that an operator takes, and its outputs."""
    sample = SAMPLES[op].valid()
    inputs = [value for value in sample.inputs if value is not None]
    assert len(inputs) == len(sample.inputs)
    return inputs, [torch.empty_like(output) for output in SAMPLES[op].expected(sample, torch.float32)]


def refusal_of_c(op: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> RefusedError:
    outputs = valid(op)[1]
    before = [output.fill_(7).clone() for output in outputs]
    with pytest.raises(RefusedError) as caught:
        capi.prepare(op, inputs, outputs, attributes)
    assert all(torch.equal(*pair) for pair in zip(before, outputs, strict=True))
    return caught.value


def refusal_of_onnxruntime(op: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> str:
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    shapes = [None if value is None else (ONNX_TYPES[value.dtype], [None] * value.dim()) for value in given]
    model = one_node(op, shapes, attributes)
    feeds = {i.name: to_ort_value(value) for i, value in zip(OPS[op].inputs, given, strict=False) if value is not None}
    with pytest.raises(Exception) as caught:
        session_of(model).run(None, feeds)
    assert type(caught.value).__module__.startswith("onnxruntime")
    return str(caught.value).strip()


@pytest.mark.parametrize("op", OPS)
def test_what_is_bad_is_refused_in_c_and_in_onnxruntime_alike(op: str) -> None:
    capi.run(op, *valid(op), **SAMPLES[op].valid().attributes)
    of_ours = 0
    cases = list(SAMPLES[op].invalid())
    for case in cases:
        inputs, attributes = case.inputs, case.attributes
        refused = refusal_of_c(op, inputs, attributes)
        absent = any(value is None for value in inputs[: len(valid(op)[0])])
        assert refused.code == (NULL_POINTER if absent else INVALID)
        prefix, _, message = refused.message.partition(": ")
        assert prefix == f"aclnn{op}GetWorkspaceSize"
        assert "\n" not in message and "; expected " in message
        text = refusal_of_onnxruntime(op, inputs, attributes)
        # onnxruntime itself refuses types that no kernel has, and operands that are left out.
        if f"{op} (node 'node'): " in text and not absent:
            assert text.endswith(f"{op} (node 'node'): {message}")
            of_ours += 1
    assert of_ours > len(cases) / 3


@pytest.mark.parametrize("op", OPS)
def test_there_are_many_bad_arguments(op: str) -> None:
    assert len(list(SAMPLES[op].invalid())) >= MANY


@pytest.mark.parametrize("op", OPS)
def test_outputs_are_checked(op: str) -> None:
    inputs, outputs = valid(op)
    for index, output in enumerate(outputs):
        for wrong in (output.double(), output.half(), output.unsqueeze(0), output[:-1], output.long(), None):
            changed_outputs: list[Tensor | None] = list(outputs)
            changed_outputs[index] = wrong
            with pytest.raises(RefusedError) as caught:
                capi.prepare(op, inputs, changed_outputs, SAMPLES[op].valid().attributes)
            assert caught.value.code == (NULL_POINTER if wrong is None else INVALID)


def test_null_pointers_come_first() -> None:
    inputs, _ = valid("MseLossBackward")
    first_phase = capi.library().aclnnMseLossBackwardGetWorkspaceSize
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    tensor = capi.create_tensor(inputs[0])
    good = [tensor, tensor, tensor, ctypes.c_int64(9), tensor, ctypes.byref(size), ctypes.byref(executor)]
    assert first_phase(*good) == INVALID  # the reduction
    for index in (0, 1, 2, 4, 5, 6):
        assert first_phase(*good[:index], None, *good[index + 1 :]) == NULL_POINTER
        message = capi.library().aclGetRecentErrMsg().decode()
        assert "null pointer" in message
    capi.expect_success(capi.library().aclDestroyTensor(tensor))


@pytest.mark.parametrize("format", (-1, 0, 1))
def test_formats_other_than_nd_are_refused(format: int) -> None:
    tensors = [capi.create_tensor(torch.zeros(2, 2), format if index == 1 else capi.ND) for index in range(4)]
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    code = capi.library().aclnnMseLossBackwardGetWorkspaceSize(
        *tensors[:3], ctypes.c_int64(1), tensors[3], ctypes.byref(size), ctypes.byref(executor)
    )
    assert code == INVALID
    assert capi.library().aclGetRecentErrMsg().decode().endswith(f"self is of format {format}; expected ACL_FORMAT_ND")
    for tensor in tensors:
        capi.expect_success(capi.library().aclDestroyTensor(tensor))


def create(
    dims: Sequence[int] | None,
    strides: Sequence[int] | None,
    *,
    dtype: int = 0,
    offset: int = 0,
    storage: Sequence[int] | None = (6,),
    rank: int | None = None,
) -> str:
    """What aclCreateTensor says to arguments: "" where it makes a tensor."""
    made = capi.library().aclCreateTensor(
        None if dims is None else capi.int64s(dims),
        ctypes.c_uint64(len(dims or ()) if rank is None else rank),
        dtype,
        None if strides is None else capi.int64s(strides),
        ctypes.c_int64(offset),
        capi.ND,
        None if storage is None else capi.int64s(storage),
        ctypes.c_uint64(1 if storage is None else len(storage)),
        ctypes.c_void_p(4096),
    )
    if not made:
        return str(capi.library().aclGetRecentErrMsg().decode())
    capi.expect_success(capi.library().aclDestroyTensor(ctypes.c_void_p(made)))
    return ""


def test_views_that_are_none_are_refused_when_they_are_made() -> None:
    assert create((2, 3), (3, 1)) == ""
    assert create((2, 3), (1, 2)) == ""
    assert create((3,), (2,), offset=1) == ""
    assert create((7, 9), (0, 0), offset=5) == ""
    assert create((), ()) == ""
    assert create(None, None, rank=0) == ""
    assert create((0, 100), (100, 1), offset=1000) == ""
    assert create((1, 3), (2**62, 1)) == ""
    refused = {
        "viewDims[1] is -3; expected 0 or more": create((2, -3), (3, 1)),
        "stride[0] is -1; expected 0 or more": create((2, 3), (-1, 1)),
        "offset is -1; expected 0 or more": create((2, 3), (3, 1), offset=-1),
        "storageDims[0] is -6; expected 0 or more": create((2, 3), (3, 1), storage=(-6,)),
        "viewDims is a null pointer; expected an array": create(None, (3, 1), rank=2),
        "stride is a null pointer; expected an array": create((2, 3), None),
        "storageDims is a null pointer; expected an array": create((2, 3), (3, 1), storage=None),
        "dataType is 77; expected one of the types of aclDataType but ACL_DT_UNDEFINED": create((2,), (1,), dtype=77),
        "dataType is -1; expected one of the types of aclDataType but ACL_DT_UNDEFINED": create((2,), (1,), dtype=-1),
        "viewDimsNum is 65; expected 8 or less": create((1,) * 65, (1,) * 65),
        "viewDims is of more than 2^62 bytes; expected a shape that fits in memory": create((2**31,) * 2, (0, 0)),
        "stride[0] is 4611686018427387904; expected a view that stays in its storage": create((3,), (2**62,)),
    }
    for message, said in refused.items():
        assert said == f"aclCreateTensor: {message}"
    for said in (
        create((2, 3), (3, 1), offset=1),
        create((2, 3), (4, 1)),
        create((4,), (2,)),
        create((1,), (1,), offset=6),
    ):
        assert said.startswith("aclCreateTensor: the view's last element is element")
    assert "expected less than the 6 that storageDims has" in create((2, 3), (4, 1))
    assert create((2, 3), (3, 1), storage=()).endswith("expected less than the 1 that storageDims has")


def test_a_tensor_without_memory_is_refused_when_it_is_used() -> None:
    inputs, (output,) = valid("MseLossBackward")
    tensors = [capi.create_tensor(inputs[0]) for _ in range(3)]
    dims, strides = capi.int64s((2, 3)), capi.int64s((3, 1))
    for address, message in (
        (0, "target is without memory; expected the address of its elements"),
        (output.data_ptr() + 2, "target is at an address that is not aligned; expected a multiple of 4"),
    ):
        bad = capi.library().aclCreateTensor(
            dims, ctypes.c_uint64(2), 0, strides, ctypes.c_int64(0), capi.ND, dims, ctypes.c_uint64(2),
            ctypes.c_void_p(address),
        )  # fmt: skip
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        code = capi.library().aclnnMseLossBackwardGetWorkspaceSize(
            tensors[0], tensors[1], ctypes.c_void_p(bad), ctypes.c_int64(1), tensors[2], ctypes.byref(size),
            ctypes.byref(executor),
        )  # fmt: skip
        assert code == INVALID
        assert capi.library().aclGetRecentErrMsg().decode() == f"aclnnMseLossBackwardGetWorkspaceSize: {message}"
        capi.expect_success(capi.library().aclDestroyTensor(ctypes.c_void_p(bad)))
    for tensor in tensors:
        capi.expect_success(capi.library().aclDestroyTensor(tensor))


@pytest.mark.parametrize("kind", (-1, 4))
def test_copies_of_no_kind_are_refused(kind: int) -> None:
    memory = torch.zeros(2)
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(4)
    assert capi.library().aclrtMemcpy(address, size, address, size, kind) != 0
    message = capi.library().aclGetRecentErrMsg().decode()
    assert message == f"aclrtMemcpy: kind is {kind}; expected one of aclrtMemcpyKind"
