"""Arithmetic of shapes: integer vectors as functions of the dimensions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Poly, TooComplex, number
from gradfuse.passes.reading.constants import VECTOR_LIMIT, Constants
from gradfuse.passes.reading.layouts import Form, Layouts
from gradfuse.passes.reading.nodes import Opaque, Unreadable, attribute, given


class Vectors:
    """The integer tensors of rank 0 or 1 of one graph that follow from the shapes of others."""

    def __init__(self, layouts: Layouts, constants: Constants, form: Callable[[ir.Value], Form]) -> None:
        """`form` gives the form of a value whose shape is asked for."""
        self._layouts = layouts
        self._constants = constants
        self._form = form
        self._known: dict[ir.Value, list[Poly] | None] = {}

    def of(self, value: ir.Value | None) -> list[Poly] | None:
        """The elements of an integer tensor of rank 0 or 1 as functions of dimensions; None where they are not."""
        if value is None:
            return None
        if value not in self._known:
            try:
                self._known[value] = self._read(value)
            except (Opaque, TooComplex, Unreadable, ArithmeticError, LookupError, TypeError, ValueError):
                self._known[value] = None
        return self._known[value]

    def clear(self) -> None:
        """Forget the elements, which were read before the names of some dimensions were known."""
        self._known.clear()

    def _read(self, value: ir.Value) -> list[Poly] | None:
        if value.dtype is not None and value.dtype.is_floating_point():
            # No shape: a chain of these may be thousands of nodes long.
            return None
        array = self._constants.array(value)
        if array is not None:
            if array.ndim > 1 or array.size > VECTOR_LIMIT or array.dtype.kind not in "iu":
                return None
            return [number(int(x)) for x in array.ravel()]
        node = value.producer()
        if node is None or value is not node.outputs[0]:
            return None
        if node.domain and (node.domain, node.op_type) != ("com.microsoft", "ConcatTraining"):
            return None
        inputs = node.inputs
        match node.op_type:
            case "Shape":
                sizes = [self._layouts.extent(g) for g in self._form(given(inputs, 0)).groups]
                return sizes[slice(attribute(node, "start", 0), attribute(node, "end", None))]
            case "Size":
                return [self._layouts.extent(self._form(given(inputs, 0)).sizes)]
            case "Identity" | "Squeeze" | "Unsqueeze" | "Reshape" | "Cast" | "Flatten":
                return self.of(inputs[0]) if value.shape is None or len(value.shape) <= 1 else None
            case "Concat" | "ConcatTraining":
                parts = [self.of(v) for v in inputs]
                return None if any(p is None for p in parts) else [x for p in parts if p is not None for x in p]
            case "Gather":
                data, index = self.of(inputs[0]), self.of(inputs[1])
                if data is None or index is None:
                    return None
                return [data[k] for x in index if (k := x.integer) is not None]
            case "Slice":
                data = self.of(inputs[0])
                ends = [self.of(v) for v in inputs[1:3]]
                step = self.of(inputs[4]) if len(inputs) > 4 else [UNIT]
                if data is None or step is None or any(e is None or len(e) != 1 for e in ends):
                    return None
                start, stop = (e[0].integer for e in ends if e is not None)
                if start is None or stop is None:
                    return None
                return data[start : stop : step[0].integer]
            case "Add" | "Sub" | "Mul" | "Div":
                pair = [self.of(v) for v in inputs]
                if pair[0] is None or pair[1] is None:
                    return None
                count = max(len(pair[0]), len(pair[1]))
                left, right = (p * count if len(p) == 1 else p for p in (pair[0], pair[1]))
                if len(left) != len(right):
                    return None
                return [self._arithmetic(node.op_type, a, b) for a, b in zip(left, right, strict=True)]
            case "ReduceProd":
                data = self.of(inputs[0])
                return None if data is None else [self._layouts.algebra.product(data)]
            case _:
                return None

    def _arithmetic(self, op: str, a: Poly, b: Poly) -> Poly:
        match op:
            case "Add":
                return a + b
            case "Sub":
                return a - b
            case "Mul":
                return self._layouts.algebra.mul(a, b)
            case _:
                quotient = self._layouts.quotient(a, b)
                if quotient is None:
                    raise Opaque("division of dimensions")
                return quotient
