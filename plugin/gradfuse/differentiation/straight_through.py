"""Quantisation-aware training: pairs of QuantizeLinear and DequantizeLinear that gradients pass as if nothing rounded.

While a graph is differentiated, each pair is one node. Its gradient is that of torch.fake_quantize_per_tensor_affine:
dy where round(x / scale) + zero_point is a number of the integer type, and 0 where it is cut off (Jacob et al. 2018,
arXiv:1712.05877; Bengio et al. 2013, arXiv:1308.3432, has the straight-through estimator). Scales and zero points are
constants of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from gradfuse.differentiation.rules import Call, Gradient, constant_of, error_of, gradient
from gradfuse.differentiation.tensors import Tensor

DOMAIN, _PAIR = "gradfuse.differentiation", "FakeQuantize"
"""What a pair is called within a graph that is being differentiated; no model has it."""
_NUMBERS = ("low", "high")


def join_pairs(model: ir.Model) -> int:
    """Put one node in the place of each pair whose scale and zero point are the same; return how many there are."""
    count = 0
    for node in list(model.graph.all_nodes()):
        first = None if node.op_type != "DequantizeLinear" or node.domain else _quantizes(node)
        if first is None:
            continue
        bounds = _bounds(first)
        if bounds is None:
            raise error_of(
                first, f"it gives {first.outputs[0].dtype}; expected integers for a straight-through gradient"
            )
        if node.attributes.get_int("block_size", 0):
            raise error_of(node, "it has a block_size; expected none for a straight-through gradient")
        old = node.outputs[0]
        new = ir.Value(name=f"{old.name}/fake", type=old.type, shape=old.shape)
        attributes = {
            "axis": node.attributes.get_int("axis", 1),
            "dtype": int(first.outputs[0].dtype or ir.DataType.UINT8),
            **dict(zip(_NUMBERS, bounds, strict=True)),
        }
        joined = ir.node(_PAIR, list(first.inputs), attributes, domain=DOMAIN, name=first.name, outputs=[new])
        assert node.graph is not None
        node.graph.insert_before(node, joined)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        old.name, new.name = f"{old.name}/pair", old.name
        if not first.outputs[0].uses() and not first.outputs[0].is_graph_output():
            assert first.graph is not None
            first.graph.remove(first, safe=True)
        count += 1
    if count:
        model.opset_imports[DOMAIN] = 1
    return count


def part_pairs(model: ir.Model) -> None:
    """Put the pairs back in the place of their nodes."""
    for node in list(model.graph.all_nodes()):
        if node.domain != DOMAIN:
            continue
        result, dtype = node.outputs[0], ir.DataType(node.attributes.get_int("dtype"))
        axis = {"axis": node.attributes.get_int("axis", 1)}
        x, scale, *zero_point = node.inputs
        given = {} if zero_point or dtype == ir.DataType.UINT8 else {"output_dtype": int(dtype)}
        integers = ir.Value(name=f"{result.name}/quantized", type=ir.TensorType(dtype), shape=result.shape)
        real = ir.Value(name=f"{result.name}/dequantized", type=result.type, shape=result.shape)
        first = ir.node("QuantizeLinear", [x, scale, *zero_point], axis | given, name=node.name, outputs=[integers])
        last = ir.node("DequantizeLinear", [integers, scale, *zero_point], axis, outputs=[real])
        assert node.graph is not None
        node.graph.insert_before(node, [first, last])
        ir.convenience.replace_all_uses_with(result, real, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        result.name, real.name = f"{result.name}/fake", result.name
    model.opset_imports.pop(DOMAIN, None)


def scales(model: ir.Model) -> set[str]:
    """Return the names of the scales of pairs."""
    pairs = (node for node in model.graph.all_nodes() if node.op_type == "DequantizeLinear" and not node.domain)
    return {str(first.inputs[1].name) for node in pairs if (first := _quantizes(node)) and first.inputs[1] is not None}


def _quantizes(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear that a DequantizeLinear takes back."""
    first = None if node.inputs[0] is None else node.inputs[0].producer()
    if first is None or first.op_type != "QuantizeLinear" or first.domain:
        return None
    if first.graph is not node.graph or len(first.inputs) != len(node.inputs):
        return None
    if not all(_equal(one, other) for one, other in zip(first.inputs[1:], node.inputs[1:], strict=True)):
        return None
    per_axis = first.inputs[1] is not None and (first.inputs[1].shape is None or first.inputs[1].shape != ir.Shape([]))
    if per_axis and _axis(first) != _axis(node):
        return None
    return first


def _axis(node: ir.Node) -> int:
    """Return the axis of the scales, from the front where the rank is known."""
    x, axis = node.inputs[0], node.attributes.get_int("axis", 1)
    return axis if x is None or x.shape is None or axis >= 0 else axis + len(x.shape)


def _equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    if one is other:
        return True
    arrays = [None if value is None else constant_of(value) for value in (one, other)]
    first, second = arrays
    return first is not None and second is not None and first.dtype == second.dtype and np.array_equal(first, second)


def _bounds(first: ir.Node) -> tuple[int, int] | None:
    """Return the smallest and the largest number of what a QuantizeLinear gives; None of floats."""
    dtype = first.outputs[0].dtype
    if dtype is None or not dtype.is_integer():
        return None
    bits = round(8 * dtype.itemsize)
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype.is_signed() else (0, 2**bits - 1)


@gradient(_PAIR, domain=DOMAIN, fixed=[1, 2])
def fake_quantize(call: Call) -> Iterator[Gradient]:
    """dy where the number is not cut off."""
    (x, scale), zero_point, dy = call.x[:2], call.input(2), call.dy[0]
    assert x is not None and scale is not None and dy is not None
    rank = call.rank(x)
    axis = call.attribute("axis", 1) % max(rank, 1)
    per_axis = call.rank(scale) > 0
    column = [-1 if k == axis else 1 for k in range(rank)]

    def beside(tensor: Tensor) -> Tensor:
        return tensor.reshape(column) if per_axis else tensor

    numbers = (x / beside(scale)).op("Round")
    if zero_point is not None:
        numbers = numbers + beside(zero_point.cast(x.dtype))
    low, high = (float(call.attribute(name)) for name in _NUMBERS)
    inside = numbers.op("GreaterOrEqual", low).op("And", numbers.op("LessOrEqual", high))
    yield dy.masked(inside)
