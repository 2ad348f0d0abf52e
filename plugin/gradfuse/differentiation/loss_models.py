"""Losses that are ONNX models or onnxscript functions: (output, targets) -> scalar."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from gradfuse.differentiation.differentiate import free_prefix, infer, prepared
from gradfuse.differentiation.rules import FLOATS
from gradfuse.errors import ArgumentError, listed, one_line
from gradfuse.models import reading
from gradfuse.models.conversion import raise_opset
from gradfuse.models.inlining import graphs_of
from gradfuse.models.tensors import rename

_WHO = "build_training_step"
_DOMAIN = "gradfuse.loss"
"""The domain of an onnxscript function in the model that calls it."""


@dataclasses.dataclass(frozen=True)
class SameSize:
    """Two sizes that must be equal for a loss, or a size that it fixes.

    Attributes:
        output: an output of the model.
        axis: one of its axes.
        other: a target; or the size.
        other_axis: an axis of the target.
    """

    output: ir.Value
    axis: int
    other: ir.Value | int
    other_axis: int = 0


@dataclasses.dataclass(frozen=True)
class AppendedLoss:
    """A loss that was appended to an output.

    Attributes:
        result: its value.
        outputs: what it is taken of.
        targets: the inputs that it adds to the model, which have the names that it gives them.
        nodes: its nodes, in order.
        initializers: the initializers that these read.
        opsets: the opsets of its domains; that of ONNX's may be newer than the graph's.
        sizes: which sizes must be equal, as the loss gives them one name.
    """

    result: ir.Value
    outputs: list[ir.Value]
    targets: list[ir.Value]
    nodes: list[ir.Node]
    initializers: list[ir.Value]
    opsets: Mapping[str, int]
    sizes: Sequence[SameSize]


def is_model(loss: Any) -> bool:
    """Whether a loss is a path, a model, or what `onnxscript.script` has made of a function."""
    if isinstance(loss, str):
        return loss.endswith(".onnx")
    return isinstance(loss, (os.PathLike, onnx.ModelProto, ir.Model)) or _is_function(loss) or hasattr(loss, "model")


def behind(outputs: Sequence[ir.Value], loss: Any, graph: ir.Graph, opset: int) -> AppendedLoss:
    """Return the nodes of a loss that takes outputs of a graph.

    Its first inputs are outputs of the graph, by their names; where the first one has no such name, it is the first
    output. The others are targets.

    Args:
        outputs: what the loss may be taken of, with types and shapes; the one that it is taken of by default first.
        loss: what `is_model` takes. Inputs without a type have that of their output, or of the first.
        graph: the graph of the outputs, whose names the nodes do not have.
        opset: the graph's opset.

    Raises:
        ArgumentError: the loss does not fit the outputs.
        ModelError: the loss cannot be read, or brought to the opset.
    """
    by_name = {str(output.name): output for output in outputs}
    given = _calling(loss) if _is_function(loss) else loss
    if isinstance(given, onnx.ModelProto):
        given = _typed(given, outputs[0], by_name)
    model = prepared(reading.load(given))
    if model.opset_imports[""] < opset:
        raise_opset(model, opset)
        infer(model)
    own = model.graph
    inputs = [value for value in own.inputs if value.name not in own.initializers]
    if not inputs or len(own.outputs) != 1:
        raise ArgumentError(
            f"{_WHO}: the loss has {len(inputs)} inputs and {len(own.outputs)} outputs; "
            "expected outputs of the model and targets, and one scalar"
        )
    taken = list(itertools.takewhile(lambda value: value.name in by_name, inputs)) or inputs[:1]
    targets = inputs[len(taken) :]
    late = [str(value.name) for value in targets if value.name in by_name]
    if late:
        raise ArgumentError(
            f"{_WHO}: the loss takes {listed(late)} behind {targets[0].name!r} or {taken[-1].name!r}; expected outputs "
            f"of the model first, by their names: {listed(by_name)}"
        )
    prefix = free_prefix(graph, "loss/")
    sizes: dict[str, int | str | None] = {}
    places: dict[str, tuple[ir.Value, int]] = {}
    for value in taken:
        output = by_name.get(str(value.name), outputs[0])
        sizes = _sizes(value, output) | sizes
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                places.setdefault(dim.value, (output, axis))
    same: list[SameSize] = []
    for value in targets:
        if value.dtype is None or value.shape is None:
            raise ArgumentError(f"{_WHO}: the target {value.name!r} of the loss has no type or shape; expected both")
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, ir.SymbolicDim) and dim.value in places:
                same.append(SameSize(*places[dim.value], value, axis))
        value.shape = ir.Shape([_size(dim, sizes, prefix) for dim in value.shape])
    of = [by_name.get(str(value.name), outputs[0]) for value in taken]
    for value, output in zip(taken, of, strict=True):
        ir.convenience.replace_all_uses_with(value, output, replace_graph_outputs=True)
    (result,) = own.outputs
    initializers = list(own.initializers.values())
    nodes = list(own)
    own.inputs.clear()
    own.outputs.clear()
    own.initializers.clear()
    own.remove(nodes)
    for value in initializers:
        rename(value, f"{prefix}{value.name}")
    for node in nodes:
        _rename(node, prefix)
    return AppendedLoss(result, of, targets, nodes, initializers, dict(model.opset_imports), same)


def require_scalar(result: ir.Value, outputs: Collection[ir.Value]) -> None:
    """Refuse a loss that is not a float, or has more than one element.

    Raises:
        ArgumentError: it is refused.
    """
    if result in outputs or result.dtype not in FLOATS or result.shape is None or any(d != 1 for d in result.shape):
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


def _typed(model: onnx.ModelProto, output: ir.Value, by_name: Mapping[str, ir.Value]) -> onnx.ModelProto:
    """Return the model with types that onnxscript leaves out: inputs like an output, and a scalar result."""
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    like = ir.serde.serialize_value(output).type
    for value in typed.graph.input:
        if not value.type.WhichOneof("value"):
            value.type.CopyFrom(ir.serde.serialize_value(by_name.get(value.name, output)).type)
    for value in typed.graph.output:
        # What it is in fact follows from the nodes.
        if not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or like.tensor_type.elem_type
            value.type.tensor_type.shape.SetInParent()
    return typed


def _sizes(first: ir.Value, output: ir.Value) -> dict[str, int | str | None]:
    """Return what the named dimensions of the loss's first input are in the model.

    Raises:
        ArgumentError: the output does not fit this input.
    """
    if output.shape is None:
        raise ArgumentError(f"{_WHO}: the rank of the output {output.name!r} is unknown; expected a model with shapes")
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
            rename(value, f"{prefix}{value.name}")
        for one in graph:
            _rename(one, prefix)
    node.name = f"{prefix}{node.name}" if node.name else node.name
    for value in node.outputs:
        value.name = f"{prefix}{value.name}" if value.name else value.name
        value.shape = None
