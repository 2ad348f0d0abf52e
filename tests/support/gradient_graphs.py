"""Gradient graphs of onnxruntime-training that ort_training/gradient_graphs.py made, for stock onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from producers import COMMITTED

from gradfuse.custom_ops import functions
from gradfuse.ort_training import operators
from gradfuse.passes import shapes

Array = np.ndarray[Any, Any]
FOLDER = COMMITTED / "ort_module"
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))


def load(name: str) -> ir.Model:
    return ir.load(FOLDER / f"{name}.onnx")


def arrays(name: str, kind: str) -> dict[str, Array]:
    """The inputs ("in") or PyTorch's gradients in float64 ("out")."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key.removeprefix(f"{kind}."): file[key] for key in file.files if key.startswith(f"{kind}.")}


def without_yield(model: ir.Model) -> ir.Model:
    """The model with 1 for the gradient of the loss."""
    for node in list(model.graph):
        if node.op_type == "YieldOp":
            one = ir.node("Constant", [], {"value": ir.tensor(np.ones((), np.float32))})
            one.outputs[0].name = f"{node.outputs[0].name}_one"
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], [one], node.outputs, one.outputs)
    return model


def in_standard_operators(model: ir.Model) -> onnx.ModelProto:
    """The model for stock onnxruntime; the gradient of the loss is 1."""
    functions.attach(without_yield(model))
    shapes.infer(model, [value for node in model.graph for value in node.outputs])
    for node in list(model.graph):
        if node.op_type == "SoftmaxCrossEntropyLossInternal":
            node.domain, node.op_type = "", "SoftmaxCrossEntropyLoss"
            ignored = node.inputs[3]
            assert ignored is not None
            constant = ir.convenience.get_const_tensor(ignored)
            assert constant is not None
            node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", int(constant.numpy()))
            node.resize_inputs(3 if node.inputs[2] is not None else 2)
    operators.replace(model.graph, "model")
    model.opset_imports.pop("com.microsoft", None)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto
