"""16 bits within a step of wider types, and small integers: onnxruntime computes them otherwise, or not at all."""

from __future__ import annotations

import onnx_ir as ir

_NARROW, _WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT
_KEPT = frozenset(("Cast", "Constant", "Identity", "Shape", "Size"))
"""What every runtime does with 16 bits."""

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
