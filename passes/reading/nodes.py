"""What readers ask of ONNX nodes and values, whatever the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}
FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


class Unreadable(Exception):
    """A value has no known rank, or is no tensor. It gets no form."""


class Opaque(Exception):
    """No rule reads the operation. Its outputs get a name in place of an expression; the text says why."""


DRAWS = frozenset(
    {
        *("Bernoulli", "Dropout", "Multinomial"),
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    }
)
"""Operators that draw numbers: two of the same inputs give different ones."""


def is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute, or the default where the node does not have it."""
    found = node.attributes.get(name)
    return default if found is None or found.value is None else found.value


def given(inputs: Sequence[ir.Value | None], k: int) -> ir.Value:
    """Input `k`. Raises Opaque where it is absent."""
    value = inputs[k] if k < len(inputs) else None
    if value is None:
        raise Opaque("an input is absent")
    return value


def constant_of(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a `Constant`, which the caller cannot replace."""
    if value.is_graph_input():
        return None
    node = value.producer()
    if node is None:
        return value.const_value
    held = node.attributes.get("value") if node.op_type == "Constant" and not node.domain else None
    return None if held is None or held.is_ref() else held.as_tensor()


def through_casts(value: ir.Value) -> ir.Value:
    """The first value of the chain of Identity and Cast between floats that ends here."""
    while (node := value.producer()) is not None and node.domain == "" and node.op_type in ("Identity", "Cast"):
        source = node.inputs[0]
        if source is None or (node.op_type == "Cast" and not (is_float(value) and is_float(source))):
            break
        value = source
    return value
