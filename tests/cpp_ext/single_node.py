"""Runs one aclnn operator by its kernel: a model of a single node, in onnxruntime with our library.

On the device "cuda-simt" the CUDA kernels run, in onnxruntime's CPU provider, on the host machine of
cpp_ext/tests/simt. Inputs are then as on a GPU: but for those that decide output shapes, no check reads their values.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from backends import ONNX_TYPES, one_node, to_ort_value, types_of_outputs
from onnx import TensorProto, helper
from torch import Tensor

import gradfuse
from gradfuse.custom_ops import OPS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tools"))
import device_library

CPU, CUDA_SIMT = "cpu", "cuda-simt"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_TORCH_TYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in ONNX_TYPES.items()}


_device = CPU


def use_device(device: str) -> None:
    """From now on, run kernels on this device."""
    global _device
    _device = device


@cache
def library_of(device: str) -> str:
    """The path of the library with the kernels of a device."""
    return gradfuse.get_library_path() if device == CPU else str(device_library.build("simt-ort"))


@cache
def described() -> dict[str, dict[str, Any]]:
    """The table of ops that the library was built with, by their names."""
    describe = ctypes.CDLL(gradfuse.get_library_path()).gradfuse_describe_ops
    describe.restype = ctypes.c_char_p
    return {op["name"]: op for op in json.loads(describe())}


def read_by_host(op: str) -> set[str]:
    """The names of the inputs whose values decide the outputs' shapes: the host reads them on every device."""
    return {input["name"] for input in described()[op]["inputs"] if input["read_by_host"]}


def session_of(model: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    """A session of stock onnxruntime with our library registered."""
    options = _options(library_of(_device), threads)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@cache
def _options(library: str, threads: int) -> ort.SessionOptions:
    """To register a library takes a third of the time of a session."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(library)
    return options


def run(op: str, *inputs: Tensor | None, threads: int = 1, **attributes: Any) -> list[Tensor]:
    """Run one operator on tensors, given in the schema's order, None for an absent one; gives its outputs."""
    present = [tensor for tensor in inputs if tensor is not None]
    types = tuple(None if tensor is None else (ONNX_TYPES[tensor.dtype], tensor.dim()) for tensor in inputs)
    session = _session(op, types, tuple(sorted(attributes.items())), threads, _device)
    feeds = {i.name: to_ort_value(t) for i, t in zip(session.get_inputs(), present, strict=True)}
    dtypes = types_of_outputs(op, [None if given is None else given[0] for given in types])
    # onnxruntime hands no bfloat16 to Python: such outputs were widened, which is exact.
    return [
        torch.from_numpy(out).to(_TORCH_TYPES[dtype])
        for out, dtype in zip(session.run(None, feeds), dtypes, strict=True)
    ]


@lru_cache(64)  # each takes megabytes
def _session(
    op: str,
    types: tuple[tuple[int, int] | None, ...],
    attributes: tuple[tuple[str, Any], ...],
    threads: int,
    device: str,  # a session of its own
) -> ort.InferenceSession:
    trimmed = list(types)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    shapes = [None if given is None else (given[0], [None] * given[1]) for given in trimmed]
    model = one_node(op, shapes, dict(attributes))
    del model.graph.output[:]
    for output, dtype in zip(
        OPS[op].outputs, types_of_outputs(op, [given and given[0] for given in types]), strict=True
    ):
        name = output.name
        if dtype == TensorProto.BFLOAT16:
            name, dtype = f"{name}_wide", TensorProto.FLOAT
            model.graph.node.append(helper.make_node("Cast", [output.name], [name], to=dtype))
        model.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    return session_of(model, threads)


def assert_refused(op: str, message: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> None:
    """Assert that the operator refuses these arguments, in one line that says exactly `message`.

    On a device whose memory the host does not read, values of inputs are refused a run later, without details.
    """
    name = message.partition("[")[0]
    if _device != CPU and name.isidentifier() and name not in read_by_host(op):
        run(op, *inputs, **attributes)
        message = f"{name} is out of range in an earlier run; expected values that the operator takes"
    with pytest.raises(Exception, match=r"\(node 'node'\)") as caught:
        run(op, *inputs, **attributes)
    text = str(caught.value).strip()
    assert "\n" not in text
    assert text.endswith(f"{op} (node 'node'): {message}"), text


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert that two tensors are the same, NaN and the signs of zeros included."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))
