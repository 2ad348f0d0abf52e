"""bfloat16 within a step of wider types: onnxruntime's CPU provider has no arithmetic in it."""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.export.torch_step import TorchStep

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_KEPT = frozenset(("Cast", "Constant", "Identity", "Shape", "Size"))
"""What every runtime does with bfloat16."""


def compute_wider(model: ir.Model, step: TorchStep) -> None:
    """Let operators compute in float32 and round each result to bfloat16, as PyTorch's kernels for CPUs do.

    Not where the step itself is narrow: such a model is for a device.
    """
    if step.is_narrow:
        return
    for graph in model.graphs():
        for node in list(graph):
            narrow = [value for value in (*node.inputs, *node.outputs) if value is not None and value.dtype == _NARROW]
            if narrow and node.op_type not in _KEPT and not node.domain:
                _compute_wider(graph, node)


def _compute_wider(graph: ir.Graph, node: ir.Node) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == _NARROW:
            cast = _cast(value, _WIDE)
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _NARROW:
            wide = attribute.as_tensor().numpy().astype(_WIDE.numpy())
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(wide))
    for value in node.outputs:
        if value.dtype == _NARROW:
            value.dtype = _WIDE
            cast = _cast(value, _NARROW)
            graph.insert_after(node, cast)
            ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, value)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": dtype})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast
