"""16-bit types within a step of wider types, and small integers: onnxruntime computes them differently, or not at
all."""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.models.inlining import captured_by
from gradfuse.training.step import LOSS

_NARROW, _WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT
_KEPT = frozenset(("Cast", "Constant", "Identity", "Shape", "Size"))
"""Operators that every runtime runs on 16-bit types."""
_MOVES = frozenset(
    """
    CastLike Concat Flatten Gather GatherElements GatherND If Loop Reshape Scan Slice Split Squeeze Transpose Unsqueeze
    """.split()
)
"""Operators that move numbers without computing: onnxruntime's CPU kernels of these take bfloat16."""

_INTEGERS = {
    "Pow": frozenset((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16)),
    **dict.fromkeys(("Where", "Max", "Min"), frozenset((ir.DataType.INT16,))),
}
"""Integers that an operator of ONNX does not take, or onnxruntime has no kernel for; int32 wraps around as they do."""


def compute_wider(model: ir.Model, *, narrow: bool) -> None:
    """Let operators on 16 bits compute in float32 and round each result, as PyTorch's kernels for CPUs do.

    Not where the step itself is narrow: such a model is for a device. Small integers become int32 in any step.

    Args:
        model: the model, which is changed.
        narrow: whether the step itself is of 16 bits.
    """
    for graph in model.graphs():
        for node in list(graph):
            types = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
            if node.domain:
                continue
            for small in _NARROW:
                if small in types and node.op_type not in _KEPT and not narrow:
                    _compute_wider(graph, node, small, _WIDE)
            for integer in types & _INTEGERS.get(node.op_type, frozenset()):
                assert integer is not None
                _compute_wider(graph, node, integer, ir.DataType.INT32)


def widen_bfloat16(model: ir.Model) -> None:
    """Let arithmetic on bfloat16 that onnxruntime's CPU provider has no kernels for be in float32, between casts.

    What only moves numbers stays narrow, and so do operators of gradfuse. A result that is used in float32 in its own
    pass, forward or backward, is not rounded on the way; what the backward pass takes from the forward pass is kept in
    bfloat16, in which it takes half of the memory.
    """
    for graph in model.graphs():
        for node in list(graph):
            types = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
            if not node.domain and ir.DataType.BFLOAT16 in types and node.op_type not in _KEPT | _MOVES:
                _compute_wider(graph, node, ir.DataType.BFLOAT16, _WIDE)
    _skip_roundings(model.graph)


def _skip_roundings(graph: ir.Graph) -> None:
    """Let what widens a rounded result read the result, where both are in the forward pass, or neither."""
    forward = _forward_pass(graph)
    for rounding in list(graph):
        if not _casts(rounding, _WIDE, ir.DataType.BFLOAT16):
            continue
        rounded, source = rounding.outputs[0], rounding.inputs[0]
        assert source is not None
        for widening in {use.node for use in rounded.uses()}:
            together = (rounding in forward) == (widening in forward)
            if widening.graph is graph and _casts(widening, ir.DataType.BFLOAT16, _WIDE) and together:
                if widening.outputs[0].is_graph_output():
                    continue
                ir.convenience.replace_all_uses_with(widening.outputs[0], source)
                graph.remove(widening, safe=True)
        if not rounded.uses() and not rounded.is_graph_output():
            graph.remove(rounding, safe=True)


def _forward_pass(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes of a graph that the loss depends on."""
    found: set[ir.Node] = set()
    waiting = [value for value in graph.outputs if value.name == LOSS]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            waiting += [*(value for value in node.inputs if value is not None), *captured_by(node)]
    return found


def _casts(node: ir.Node, source: ir.DataType, to: ir.DataType) -> bool:
    """Whether a node casts from one type to the other."""
    value = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
    return value is not None and value.dtype == source and node.outputs[0].dtype == to


def _compute_wider(graph: ir.Graph, node: ir.Node, narrow: ir.DataType, wide: ir.DataType) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == narrow:
            cast = _cast(value, wide)
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == narrow:
            numbers = attribute.as_tensor().numpy().astype(wide.numpy())
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(numbers))
        elif name == "dtype" and attribute.type == ir.AttributeType.INT and attribute.as_int() == narrow:
            node.attributes[name] = ir.AttrInt64(name, int(wide))
    for value in node.outputs:
        if value.dtype == narrow:
            value.dtype = wide
            cast = _cast(value, narrow)
            graph.insert_after(node, cast)
            ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, value)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": dtype})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast
