"""Axes of reductions, counted from the first one.

Of an empty tensor, such as the rows that a mask selects where it is false, onnxruntime's reductions along an axis that
is counted from the last one leave the axis as long as it is.
"""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.models.tensors import array_of

_AXES = 1
"""Which input."""


def count_axes_from_the_first(model: ir.Model) -> None:
    """Give reductions, and places of extremes, of known ranks their constant axes as numbers that are not negative."""
    made: dict[tuple[int, ...], ir.Value] = {}
    for graph in model.graphs():
        for node in graph:
            if not node.domain and node.op_type in ("ArgMax", "ArgMin"):
                data, axis = node.inputs[0], node.attributes.get_int("axis", 0)
                if axis < 0 and data is not None and data.shape:
                    node.attributes["axis"] = ir.AttrInt64("axis", axis % len(data.shape))
                continue
            if node.domain or not node.op_type.startswith("Reduce") or len(node.inputs) <= _AXES:
                continue
            data, axes = node.inputs[0], node.inputs[_AXES]
            given = None if axes is None else ir.convenience.get_const_tensor(axes)
            if given is None or data is None or not data.shape:
                continue
            numbers = array_of(given).flatten().tolist()
            counted = tuple(axis % len(data.shape) for axis in numbers)
            if counted != tuple(numbers):
                if counted not in made:
                    made[counted] = _constant(model.graph, counted)
                node.replace_input_with(_AXES, made[counted])


def _constant(graph: ir.Graph, axes: tuple[int, ...]) -> ir.Value:
    tensor = ir.tensor(axes, dtype=ir.DataType.INT64, name="axes/" + "_".join(map(str, axes)))
    value = ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([len(axes)]), const_value=tensor
    )
    graph.register_initializer(value)
    return value
