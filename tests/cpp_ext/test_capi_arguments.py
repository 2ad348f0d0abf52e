"""Bad arguments: the C API and onnxruntime refuse the same ones, with the same words."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from backends import ONNX_TYPES, one_node, to_ort_value
from cpp_ext.single_node import session_of
from torch import Tensor

from cpp_ext import capi
from cpp_ext.capi import INVALID, NULL_POINTER, RefusedError
from gradfuse.custom_ops import OPS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64, BOOL = torch.int32, torch.int64, torch.bool

Case = tuple[str, list[Tensor | None], dict[str, Any]]


def valid(op: str) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs that an operator takes, and its outputs."""
    torch.manual_seed(0)
    if op == "MseLossBackward":
        return [torch.randn(2, 3) for _ in range(3)], [torch.empty(2, 3)]
    if op == "CrossEntropyLossGrad":
        log_prob = torch.randn(4, 5).log_softmax(1)
        return [torch.ones(()), log_prob, torch.tensor([0, 4, 2, 1]), torch.rand(5)], [torch.empty(4, 5)]
    if op == "ScaledMaskedSoftmaxBackward":
        shape = (2, 3, 4, 5)
        return [torch.randn(shape), torch.randn(shape).softmax(3), torch.rand(shape) < 0.3], [torch.empty(shape)]
    if op == "GroupedBiasAddGrad":
        return [torch.randn(6, 4), torch.tensor([2, 2, 6])], [torch.empty(3, 4)]
    log_probs = torch.randn(5, 2, 4).log_softmax(2)
    targets, lengths = torch.tensor([[1, 2], [3, 0]]), [torch.tensor([5, 4]), torch.tensor([2, 1])]
    loss, alpha = torch.ops.aten._ctc_loss(log_probs, targets, *(n.tolist() for n in lengths))
    if op == "CtcLoss":
        return [log_probs, targets, *lengths], [torch.empty(2), torch.empty(2, 5, 5)]
    return [torch.ones(2), log_probs, targets, *lengths, loss, alpha], [torch.empty(5, 2, 4)]


def changed(op: str, index: int, *values: Tensor, **attributes: Any) -> Iterator[Case]:
    """The operator with each of some values for one input."""
    for value in values:
        inputs: list[Tensor | None] = list(valid(op)[0])
        inputs += [None] * (index + 1 - len(inputs))
        inputs[index] = value
        yield op, inputs, attributes


def retyped(op: str, index: int, *dtypes: torch.dtype) -> Iterator[Case]:
    return changed(op, index, *(valid(op)[0][index].to(dtype) for dtype in dtypes))


def all_retyped(op: str, indices: Sequence[int], *dtypes: torch.dtype) -> Iterator[Case]:
    for dtype in dtypes:
        inputs: list[Tensor | None] = list(valid(op)[0])
        for index in indices:
            inputs[index] = valid(op)[0][index].to(dtype)
        yield op, inputs, {}


def reshaped(op: str, index: int, *shapes: tuple[int, ...], **attributes: Any) -> Iterator[Case]:
    dtype = valid(op)[0][index].dtype
    return changed(op, index, *(torch.zeros(shape, dtype=dtype) for shape in shapes), **attributes)


def with_attributes(op: str, name: str, *values: Any) -> Iterator[Case]:
    for value in values:
        yield op, list(valid(op)[0]), {name: value}


def without(op: str, *indices: int) -> Iterator[Case]:
    for index in indices:
        inputs: list[Tensor | None] = list(valid(op)[0])
        inputs[index] = None
        yield op, inputs, {}


def mse() -> Iterator[Case]:
    op = "MseLossBackward"
    yield from without(op, 0, 1, 2)
    for index in range(3):
        yield from retyped(op, index, F16, BF16, F64, I32, I64, BOOL)
        yield from reshaped(op, index, (4,), (3, 2), (3, 3), (2, 2, 2), (0, 3), (1,) * 9)
    yield from all_retyped(op, range(3), F64, I32, I64, BOOL)
    yield from with_attributes(op, "reduction", -1, 3, 2**40, -(2**63))
    yield op, [torch.zeros(shape) for shape in ((2048, 1, 1) * 2, (1, 2048, 1) * 2, (1, 1, 2048) * 2)], {}


def cross_entropy() -> Iterator[Case]:
    op = "CrossEntropyLossGrad"
    yield from without(op, 0, 1, 2)
    for index in range(2):
        yield from retyped(op, index, F16, BF16, F64, I64)
    yield from all_retyped(op, range(2), F64, I32)
    yield from retyped(op, 2, I32, F32, BOOL)
    yield from retyped(op, 3, F16, BF16, F64)
    yield from reshaped(op, 0, (4,), (2,), (1, 1), (0,))
    yield from reshaped(op, 0, (4,), (5,), reduction="sum")
    yield from reshaped(op, 0, (), (1,), (5,), (4, 1), reduction="none")
    yield from reshaped(op, 1, (4,), (4, 5, 1), (4, 0), (), (1,) * 9, (3, 5))
    yield from reshaped(op, 2, (5,), (4, 1), (), (0,), (1,) * 9)
    yield from reshaped(op, 3, (4,), (5, 1), (), (0,), (1,))
    for class_ in (-1, 5, 2**40, -(2**63)):
        yield from changed(op, 2, torch.tensor([class_, 0, 0, 0]), torch.tensor([0, 0, 0, class_]))
    yield from changed(op, 2, torch.tensor([0, -100, 1, 2]), ignore_index=-1)
    yield from with_attributes(op, "reduction", "max", "", "Mean", "batchmean", "none ", "mean\n", "méan", "x" * 1000)
    yield from with_attributes(op, "label_smoothing", -0.125, 1.5, float("nan"), float("inf"))
    yield from with_attributes(op, "lse_square_scale_for_zloss", 1.0, -0.5, float("nan"))
    yield from changed(op, 4, torch.zeros(()))
    yield from changed(op, 5, torch.zeros(4))


def softmax() -> Iterator[Case]:
    op = "ScaledMaskedSoftmaxBackward"
    yield from without(op, 0, 1)
    for index in range(2):
        yield from retyped(op, index, F16, BF16, F64, I64)
        yield from reshaped(op, index, (4, 5), (2, 3, 4), (2, 3, 4, 6), (3, 2, 4, 5), (1, 3, 4, 5), (), (1,) * 9)
    yield from all_retyped(op, range(2), F64, I32, BOOL)
    yield from retyped(op, 2, F32, I64, torch.uint8, torch.int8)
    yield from reshaped(op, 2, (4, 5), (2, 3, 4, 1), (2, 3, 1, 5), (1, 2, 4, 5), (3, 1, 4, 5), (2, 1, 1, 4, 5), ())
    yield from with_attributes(op, "fix_triu_mask", 1)


def grouped_bias() -> Iterator[Case]:
    op = "GroupedBiasAddGrad"
    yield from without(op, 0)
    yield from retyped(op, 0, F64, I64, BOOL)
    yield from retyped(op, 1, F32, BOOL, torch.int16, torch.uint8)
    yield from reshaped(op, 0, (6,), (6, 4, 1), (), (1,) * 9)
    yield from reshaped(op, 1, (3, 1), (), (0,), (2049,))
    for shape in ((6, 4), (6,), (), (2, 3, 4, 5)):
        yield op, [torch.zeros(shape)], {}
    for dtype in (I32, I64):
        ends = [[2, 1, 6], [-1, 2, 6], [2, 2, 5], [2, 2, 7], [2, 7, 6], [6, 6, 0], [-(2**31), 0, 6]]
        yield from changed(op, 1, *(torch.tensor(values, dtype=dtype) for values in ends))


def ctc(op: str, first: int) -> Iterator[Case]:
    """What both CTC operators ask of what both take: from input `first` on."""
    log_probs, targets, input_lengths, target_lengths = range(first, first + 4)
    yield from without(op, *range(len(valid(op)[0])))
    yield from retyped(op, log_probs, I64, BOOL)
    yield from retyped(op, targets, torch.uint8, torch.int8, torch.int16, F64, BF16)
    yield from reshaped(op, log_probs, (5, 2), (5, 2, 4, 1), (5, 3, 4), (5, 2, 0), (), (1,) * 9)
    yield from reshaped(op, targets, (3, 2), (2, 2, 1), (4,), (2,), (2, 1), (), (1,) * 9)
    yield from reshaped(op, input_lengths, (3,), (1,), (0,))
    yield from reshaped(op, target_lengths, (3,), (1,), (0,))
    yield from changed(op, input_lengths, *(torch.tensor([5, n]) for n in (6, -1, 2**40, -(2**63))))
    yield from changed(op, target_lengths, *(torch.tensor([n, 1]) for n in (3, -1, 2**40, -(2**63))))
    yield from changed(op, targets, *(torch.tensor([[1, n], [3, 0]]) for n in (4, -1, 2**40, -(2**63))))
    yield from changed(op, targets, torch.tensor([[1.5, 2], [3, 0]]), torch.tensor([[1, 2], [float("nan"), 0]]))
    yield from with_attributes(op, "blank", -1, 4, 2**40)


def ctc_backward() -> Iterator[Case]:
    op = "CtcLossBackward"
    yield from ctc(op, 1)
    for index in (0, 5, 6):
        yield from retyped(op, index, F64, F16, BF16, I64)
    yield from reshaped(op, 0, (3,), (), (2, 1))
    yield from reshaped(op, 5, (3,), (), (2, 1))
    yield from reshaped(op, 6, (2, 5, 4), (2, 4, 5), (3, 5, 5), (2, 5), (2, 5, 5, 1), (1,) * 9)


TABLES: dict[str, Callable[[], Iterator[Case]]] = {
    "MseLossBackward": mse,
    "CrossEntropyLossGrad": cross_entropy,
    "ScaledMaskedSoftmaxBackward": softmax,
    "GroupedBiasAddGrad": grouped_bias,
    "CtcLossBackward": ctc_backward,
    "CtcLoss": lambda: ctc("CtcLoss", 0),
}


def refusal_of_c(op: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> RefusedError:
    outputs = valid(op)[1]
    before = [output.fill_(7).clone() for output in outputs]
    with pytest.raises(RefusedError) as caught:
        capi.prepare(op, inputs, outputs, attributes)
    assert all(torch.equal(*pair) for pair in zip(before, outputs, strict=True))
    return caught.value


def refusal_of_onnxruntime(op: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> str:
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


@pytest.mark.parametrize("op", TABLES)
def test_what_is_bad_is_refused_in_c_and_in_onnxruntime_alike(op: str) -> None:
    capi.run(op, *valid(op))
    of_ours = 0
    cases = list(TABLES[op]())
    for _, inputs, attributes in cases:
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


def test_the_table_is_long() -> None:
    assert sum(len(list(cases())) for op, cases in TABLES.items() if op != "CtcLoss") >= 150


@pytest.mark.parametrize("op", TABLES)
def test_outputs_are_checked(op: str) -> None:
    inputs, outputs = valid(op)
    for index, output in enumerate(outputs):
        for wrong in (output.double(), output.half(), output.unsqueeze(0), output[:-1], output.long(), None):
            changed_outputs: list[Tensor | None] = list(outputs)
            changed_outputs[index] = wrong
            with pytest.raises(RefusedError) as caught:
                capi.prepare(op, inputs, changed_outputs, {})
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
