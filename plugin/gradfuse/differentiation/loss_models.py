"""Losses that are ONNX models or onnxscript functions: (output, targets) -> scalar."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from gradfuse.differentiation.differentiate import free_prefix, infer, prepared
from gradfuse.differentiation.rules import FLOATS
from gradfuse.errors import ArgumentError, ModelError, one_line
from gradfuse.models import reading
from gradfuse.models.conversion import raise_opset
from gradfuse.models.inlining import graphs_of

_WHO = "build_training_step"
_DOMAIN = "gradfuse.loss"
"""The domain of an onnxscript function in the model that calls it."""


@dataclasses.dataclass(frozen=True)
class AppendedLoss:
    """What came of a loss behind an output.

    Attributes:
        result: its value.
        targets: the inputs that it adds to the model, which have the names that it gives them.
        nodes: its nodes, in order.
        initializers: the initializers that these read.
        opsets: the opsets of other domains than ONNX's.
    """

    result: ir.Value
    targets: list[ir.Value]
    nodes: list[ir.Node]
    initializers: list[ir.Value]
    opsets: Mapping[str, int]


def is_model(loss: Any) -> bool:
    """Whether a loss is a path, a model, or what `onnxscript.script` has made of a function."""
    if isinstance(loss, str):
        return loss.endswith(".onnx")
    return isinstance(loss, (os.PathLike, onnx.ModelProto, ir.Model)) or _is_function(loss) or hasattr(loss, "model")


def behind(output: ir.Value, loss: Any, graph: ir.Graph, opset: int) -> AppendedLoss:
    """Return the nodes of a loss that takes an output of a graph.

    Args:
        output: what the loss is taken of, with type and shape.
        loss: what `is_model` takes. Inputs without a type have that of the output.
        graph: the graph of the output, whose names the nodes do not have.
        opset: the graph's opset.

    Raises:
        ArgumentError: the loss does not fit the output.
        ModelError: the loss cannot be read, or brought to the opset.
    """
    given = _calling(loss) if _is_function(loss) else loss
    if isinstance(given, onnx.ModelProto):
        given = _typed(given, output)
    model = _of_opset(prepared(reading.load(given)), opset)
    own = model.graph
    inputs = [value for value in own.inputs if value.name not in own.initializers]
    if not inputs or len(own.outputs) != 1:
        raise ArgumentError(
            f"{_WHO}: the loss has {len(inputs)} inputs and {len(own.outputs)} outputs; "
            "expected an output of the model and targets, and one scalar"
        )
    first, *targets = inputs
    prefix = free_prefix(graph, "loss/")
    sizes = _sizes(first, output)
    for value in targets:
        if value.dtype is None or value.shape is None:
            raise ArgumentError(f"{_WHO}: the target {value.name!r} of the loss has no type or shape; expected both")
        value.shape = ir.Shape([_size(dim, sizes, prefix) for dim in value.shape])
    ir.convenience.replace_all_uses_with(first, output, replace_graph_outputs=True)
    (result,) = own.outputs
    initializers = list(own.initializers.values())
    nodes = list(own)
    own.inputs.clear()
    own.outputs.clear()
    own.initializers.clear()
    own.remove(nodes)
    for value in initializers:
        value.name = f"{prefix}{value.name}"
    for node in nodes:
        _rename(node, prefix)
    opsets = {domain: version for domain, version in model.opset_imports.items() if domain}
    return AppendedLoss(result, targets, nodes, initializers, opsets)


def require_scalar(result: ir.Value, output: ir.Value) -> None:
    """Refuse a loss that is no float, or of more than one element.

    Raises:
        ArgumentError: it is refused.
    """
    if result is output or result.dtype not in FLOATS or result.shape is None or any(d != 1 for d in result.shape):
        shape = "unknown" if result.shape is None else str(result.shape)
        raise ArgumentError(f"{_WHO}: the loss gives {result.dtype} of shape {shape}; expected a float scalar")


def _is_function(loss: Any) -> bool:
    return hasattr(loss, "to_function_proto")


def _calling(function: Any) -> onnx.ModelProto:
    """Return a model that calls an onnxscript function, so that its attributes have their defaults."""
    try:
        model: onnx.ModelProto = function.to_model_proto()
        called: onnx.FunctionProto = function.to_function_proto()
    except Exception as error:  # onnxscript documents none
        raise ArgumentError(f"{_WHO}: the loss is no onnxscript function of tensors: {one_line(error)}") from error
    called.domain = _DOMAIN
    model.functions.append(called)
    model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    graph = model.graph
    del graph.node[:], graph.value_info[:]
    names = [value.name for value in graph.input]
    graph.node.append(onnx.helper.make_node(called.name, names, list(called.output), domain=_DOMAIN))
    for value, name in zip(graph.output, called.output, strict=True):
        value.name = name
    return model


def _typed(model: onnx.ModelProto, output: ir.Value) -> onnx.ModelProto:
    """Return the model with types that onnxscript leaves out: inputs like the output, and a scalar result."""
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    like = ir.serde.serialize_value(output).type
    for value in typed.graph.input:
        if not value.type.WhichOneof("value"):
            value.type.CopyFrom(like)
    for value in typed.graph.output:
        # What it is in fact follows from the nodes.
        if not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or like.tensor_type.elem_type
            value.type.tensor_type.shape.SetInParent()
    return typed


def _of_opset(model: ir.Model, opset: int) -> ir.Model:
    own = model.opset_imports[""]
    if own <= opset:
        raise_opset(model, opset)
        infer(model)
        return model
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), opset)
    except Exception as error:  # the converter's adapters raise exceptions without a common base
        raise ModelError(
            f"{_WHO}: the loss is of opset {own}; expected {opset}, as the model: {one_line(error)}"
        ) from error
    return prepared(reading.load(proto))


def _sizes(first: ir.Value, output: ir.Value) -> dict[str, int | str | None]:
    """Return what the named dimensions of the loss's first input are in the model.

    Raises:
        ArgumentError: the output does not fit this input.
    """
    assert output.shape is not None
    if first.dtype is not None and first.dtype != output.dtype:
        raise ArgumentError(f"{_WHO}: the loss takes {first.dtype}; the output {output.name!r} is {output.dtype}")
    dims = [dim if isinstance(dim, int) else dim.value for dim in output.shape]
    if first.shape is None:
        return {}
    pairs = list(zip(first.shape, dims, strict=False))
    if len(first.shape) != len(dims) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        raise ArgumentError(
            f"{_WHO}: the loss takes shape {first.shape}; the output {output.name!r} has {output.shape}"
        )
    return {dim.value: size for dim, size in pairs if not isinstance(dim, int) and dim.value is not None}


def _size(dim: int | ir.SymbolicDim, sizes: Mapping[str, int | str | None], prefix: str) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return sizes.get(dim.value, f"{prefix}{dim.value}")


def _rename(node: ir.Node, prefix: str) -> None:
    """Give a node's values and those of its subgraphs names with a prefix; their shapes are to be inferred anew."""
    for graph in graphs_of(node):
        for value in (*graph.inputs, *graph.initializers.values()):
            value.name = f"{prefix}{value.name}"
        for one in graph:
            _rename(one, prefix)
    node.name = f"{prefix}{node.name}" if node.name else node.name
    for value in node.outputs:
        value.name = f"{prefix}{value.name}" if value.name else value.name
        value.shape = None
