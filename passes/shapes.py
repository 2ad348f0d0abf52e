"""Types and shapes that an exporter left out, inferred by onnx."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

_SECONDS = 120
_Inferred = tuple[int | None, list[int | str | None] | None]


def infer(model: ir.Model, values: Sequence[ir.Value]) -> None:
    """Give the values of a model the types and shapes that onnx infers, as far as it does.

    onnx's inference aborts the process on some models whose shapes contradict each other, so it runs in a child process
    where the system can fork one; if the child fails, the values stay as they are.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
        return
    for value, (dtype, shape) in zip(values, _in_child(model, values), strict=False):
        if dtype is not None:
            value.dtype = ir.DataType(dtype)
        if shape is not None:
            value.shape = ir.Shape(shape)


def _in_child(model: ir.Model, values: Sequence[ir.Value]) -> list[_Inferred]:
    receive, send = os.pipe()
    collects = gc.isenabled()
    # The child has none of the threads: to collect what waits for them, as sessions of onnxruntime do, would never end.
    gc.disable()
    try:
        with warnings.catch_warnings():
            # The inference needs none of the threads' locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _answer(model, values, send)
    finally:
        if collects:
            gc.enable()
    os.close(send)
    answer = bytearray()
    with os.fdopen(receive, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], _SECONDS)[0]:
            part = pipe.read(1 << 20)
            if not part:
                break
            answer += part
        else:
            os.kill(child, signal.SIGKILL)
            answer.clear()
    _, status = os.waitpid(child, 0)
    found: list[_Inferred] = pickle.loads(bytes(answer)) if status == 0 and answer else []
    return found


def _answer(model: ir.Model, values: Sequence[ir.Value], send: int) -> None:
    """What the child does: infer, write the result, and leave without any clean-up of the parent's."""
    code = 1
    try:
        # What onnx says while it fails is of no use to anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable()
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
        with os.fdopen(send, "wb") as pipe:
            pickle.dump([_described(value) for value in values], pipe)
        code = 0
    finally:
        os._exit(code)


def _described(value: ir.Value) -> _Inferred:
    dtype = None if value.dtype is None else int(value.dtype)
    if value.shape is None:
        return dtype, None
    return dtype, [d if isinstance(d, int) else None if d.value is None else str(d.value) for d in value.shape]
