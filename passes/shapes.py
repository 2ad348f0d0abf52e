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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

_SECONDS = 120
_Inferred = tuple[int | None, list[int | str | None] | None]

# What onnx knows nothing of: operators of onnxruntime whose first output has the type and shape of one of their inputs.
_LIKE_INPUT = {
    **dict.fromkeys(("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasSoftmax", "Scale", "ScaledSum"), 0),
    **dict.fromkeys(("ReluGrad", "LeakyReluGrad", "SigmoidGrad", "TanhGrad"), 0),
    **dict.fromkeys(("GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX"), 0),
    **dict.fromkeys(("SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13", "DropoutGrad"), 0),
    **dict.fromkeys(("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad", "BatchNormalizationGrad"), 0),
    **dict.fromkeys(("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad", "DivGrad"), 1),
}
# Those whose first output has the type of one input, and the shape that another one holds.
_OF_SHAPE = {"GatherGrad": (2, 0), "GatherNDGrad": (2, 0), "GatherElementsGrad": (0, 1), "SliceGrad": (0, 1)}
_STANDARD = {
    "ConcatTraining": "Concat",
    "SplitTraining": "Split",
    "ReduceSumTraining": "ReduceSum",
    "SoftmaxCrossEntropyLossInternal": "SoftmaxCrossEntropyLoss",
}


def infer(model: ir.Model, values: Sequence[ir.Value]) -> None:
    """Give the values of a model the types and shapes that onnx infers, as far as it does.

    onnx's inference aborts the process on some models whose shapes contradict each other, so it runs in a child process
    where the system can fork one; if the child fails, the values stay as they are.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        _infer_here(model)
        return
    for value, (dtype, shape) in zip(values, _in_child(model, values), strict=False):
        if dtype is not None:
            value.dtype = ir.DataType(dtype)
        if shape is not None:
            value.shape = ir.Shape(shape)


def _infer_here(model: ir.Model) -> None:
    with _stand_ins(model):
        ShapeInferencePass(check_type=False, strict_mode=False)(model)


@contextmanager
def _stand_ins(model: ir.Model) -> Iterator[None]:
    """For the time of the inference, standard operators of the same types and shapes stand for onnxruntime's own."""
    replaced: list[tuple[ir.Node, str, str, Sequence[ir.Value | None], Mapping[str, ir.Attr]]] = []
    for graph in (model.graph, *(f.graph for f in model.functions.values())):
        for node in graph.all_nodes():
            stand_in = _stand_in(node)
            if stand_in is not None:
                replaced.append((node, node.domain, node.op_type, tuple(node.inputs), dict(node.attributes)))
                _become(node, "", *stand_in)
    try:
        yield
    finally:
        for node, domain, op_type, inputs, attributes in replaced:
            _become(node, domain, op_type, inputs, attributes)


def _become(
    node: ir.Node, domain: str, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]
) -> None:
    node.domain, node.op_type = domain, op_type
    node.resize_inputs(len(inputs))
    for k, value in enumerate(inputs):
        node.replace_input_with(k, value)
    node.attributes.clear()
    node.attributes.update(attributes)


def _stand_in(node: ir.Node) -> tuple[str, Sequence[ir.Value | None], Mapping[str, ir.Attr]] | None:
    """Operator, inputs and attributes of a standard node whose outputs have the types and shapes of the node's."""
    inputs, name = node.inputs, node.op_type
    if name == "SimplifiedLayerNormalization" and node.domain == "":
        return "Identity", inputs[:1], {}
    if node.domain != "com.microsoft" or not inputs:
        return None
    if name in _LIKE_INPUT and len(inputs) > _LIKE_INPUT[name]:
        return "Identity", [inputs[_LIKE_INPUT[name]]], {}
    if name in _OF_SHAPE and len(inputs) > max(_OF_SHAPE[name]):
        like, shape = _OF_SHAPE[name]
        return "Reshape", [inputs[like], inputs[shape]], {}
    if name in _STANDARD:
        # What comes after scores, labels and weights is the class to ignore.
        return _STANDARD[name], inputs[:3] if name.startswith("Softmax") else inputs, dict(node.attributes)
    if name == "FusedMatMul" and len(inputs) == 2:
        flags = [node.attributes.get(flag) for flag in ("transA", "transB", "transBatchA", "transBatchB")]
        trans_a, trans_b, *batches = (flag is not None and bool(flag.value) for flag in flags)
        left, right = "ji" if trans_a else "ij", "kj" if trans_b else "jk"
        # onnx has no ellipsis for operands of different ranks.
        by_matrix = _rank(inputs[1]) == 2 and not trans_a
        equation = f"...j,{right}->...k" if by_matrix else f"...{left},...{right}->...ik"
        return None if any(batches) else ("Einsum", inputs, {"equation": ir.AttrString("equation", equation)})
    return None


def _rank(value: ir.Value | None) -> int | None:
    node = None if value is None else value.producer()
    if value is not None and value.shape is not None:
        return len(value.shape)
    perm = node.attributes.get("perm") if node is not None and node.op_type == "Transpose" else None
    return None if perm is None else len(perm.as_ints())


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
        _infer_here(model)
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
