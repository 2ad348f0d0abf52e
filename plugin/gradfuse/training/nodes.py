"""Graph nodes written as arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.models.inlining import captured_by
from gradfuse.models.tensors import as_attributes


class Nodes:
    """Collects nodes, and gives names, types and shapes to their outputs.

    Args:
        prefix: what the names of nodes and values begin with.

    Attributes:
        tape: what holds the nodes.
        prefix: the argument.
    """

    def __init__(self, prefix: str) -> None:
        self.tape = ir.tape.Tape()
        self.prefix = prefix
        self._count = 0
        self._constants: dict[tuple[float, ir.DataType], GraphTensor] = {}
        self._shared: dict[str, GraphTensor] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType,
        shape: Any,
        attributes: Mapping[str, Any] | None = None,
    ) -> GraphTensor:
        """Append a node with one output of a type and shape."""
        name = self._name(op_type)
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        return GraphTensor(
            self, self.tape.op(op_type, inputs, as_attributes(attributes or {}), name=name, output=output)
        )

    def ours(
        self, op_type: str, inputs: Sequence[ir.Value | None], like: ir.Value, attributes: Mapping[str, Any], count: int
    ) -> list[GraphTensor]:
        """Append a node of the domain `aclnn` with some outputs, all of the type and shape of a value."""
        name = self._name(op_type)
        outputs = [ir.Value(name=f"{name}/{index}", type=like.type, shape=like.shape) for index in range(count)]
        self.tape.op_multi_out(op_type, inputs, attributes, outputs=outputs, domain=DOMAIN, name=name)
        return [GraphTensor(self, output) for output in outputs]

    def _name(self, op_type: str) -> str:
        # The tape copies its nodes whenever their number is read.
        self._count += 1
        return f"{self.prefix}/{op_type}_{self._count - 1}"

    def constant(self, number: float, dtype: ir.DataType) -> GraphTensor:
        """Return a scalar of a type; equal ones share a node."""
        if (number, dtype) not in self._constants:
            tensor = ir.tensor(np.array(number, dtype=dtype.numpy()), dtype=dtype)
            self._constants[number, dtype] = self.op("Constant", [], dtype, (), {"value": tensor})
        return self._constants[number, dtype]

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        """Return a vector of integers, such as axes or a shape."""
        # An empty list has no type by itself.
        values = ir.AttrInt64s("value_ints", list(numbers))
        return self.op("Constant", [], ir.DataType.INT64, (len(numbers),), {"value_ints": values}).value

    def filled(self, shape: Sequence[int], number: float, dtype: ir.DataType) -> GraphTensor:
        """Return a tensor of one number."""
        tensor = ir.tensor(np.full(shape, number, dtype=dtype.numpy()), dtype=dtype)
        return self.op("Constant", [], dtype, shape, {"value": tensor})

    def shared(self, key: str, make: Callable[[], GraphTensor]) -> GraphTensor:
        """Return the value cached for this key, or make it."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def of(self, value: ir.Value) -> GraphTensor:
        """Return a value with arithmetic that appends to these nodes."""
        return GraphTensor(self, value)

    @staticmethod
    def _copied_within(attribute: ir.Attr, new: Mapping[ir.Value, ir.Value], name: str) -> ir.Attr:
        """Return an attribute, of a graph a copy that reads other values from outside; the name is its node's."""
        if attribute.type != ir.AttributeType.GRAPH:
            return attribute
        body = attribute.as_graph().clone(allow_outer_scope_values=True)
        for part in (body, *body.subgraphs()):
            for value in (*part.inputs, *(one for node in part for one in node.outputs)):
                value.name = f"{name}/{value.name}"
            for node in part:
                node.name = f"{name}/{node.name}"
                for index, read in enumerate(node.inputs):
                    if read is not None and read in new:
                        node.replace_input_with(index, new[read])
        return ir.AttrGraph(attribute.name, body)

    def copied(
        self, graph: ir.Graph, given: Mapping[ir.Value, GraphTensor], outputs: Sequence[ir.Value]
    ) -> list[GraphTensor]:
        """Append copies of the nodes of another graph that some of its values need, and return the copies of these.

        Args:
            graph: the graph, in order; initializers have values, and graphs within have none of their own.
            given: inputs of the graph -> the values that replace them.
            outputs: the values.
        """
        needed: set[ir.Value] = set()
        rest = list(outputs)
        while rest:
            value = rest.pop()
            if value not in needed:
                needed.add(value)
                producer = value.producer()
                if producer is not None:
                    rest += [*(one for one in producer.inputs if one is not None), *captured_by(producer)]
        new = {value: tensor.value for value, tensor in given.items()}
        for value in graph.initializers.values():
            if value in needed:
                assert value.const_value is not None and value.dtype is not None
                tensor = value.const_value
                new[value] = self.op("Constant", [], value.dtype, tensor.shape, {"value": tensor}).value
        for node in graph:
            if needed.isdisjoint(node.outputs):
                continue
            name = self._name(node.op_type)
            copies = [
                ir.Value(name=f"{name}/{index}", type=one.type, shape=one.shape)
                for index, one in enumerate(node.outputs)
            ]
            inputs = [None if one is None else new[one] for one in node.inputs]
            attributes = {key: self._copied_within(one, new, name) for key, one in node.attributes.items()}
            self.tape.op_multi_out(node.op_type, inputs, attributes, outputs=copies, domain=node.domain, name=name)
            new |= dict(zip(node.outputs, copies, strict=True))
        results: list[GraphTensor] = []
        for value in outputs:
            result = GraphTensor(self, new[value])
            is_own = value not in given and all(result.value is not other.value for other in results)
            # Each gets a name of its own.
            results.append(result if is_own else result.op("Identity"))
        return results


@dataclasses.dataclass(frozen=True, eq=False)
class GraphTensor:
    """A value of a graph with Python's arithmetic: each operation appends a node.

    A number as an operand becomes a constant of the value's type.
    """

    nodes: Nodes
    value: ir.Value

    @property
    def dtype(self) -> ir.DataType:
        assert self.value.dtype is not None
        return self.value.dtype

    @property
    def shape(self) -> ir.Shape:
        assert self.value.shape is not None
        return self.value.shape

    def op(self, op_type: str, *others: GraphTensor | float, dtype: ir.DataType | None = None) -> GraphTensor:
        """Append an elementwise operator; all operands have one shape, or none.

        A scalar of another type is cast to that of the tensor, as PyTorch's kernels do with Python's numbers.
        """

        def operand(other: GraphTensor | float) -> GraphTensor:
            if not isinstance(other, GraphTensor):
                return self.nodes.constant(other, self.dtype)
            return other if len(other.shape) else other.cast(self.dtype)

        operands = [self, *map(operand, others)]
        shape = max((operand.shape for operand in operands), key=len)
        return self.nodes.op(op_type, [operand.value for operand in operands], dtype or self.dtype, shape)

    def __add__(self, other: GraphTensor | float) -> GraphTensor:
        return self.op("Add", other)

    def __sub__(self, other: GraphTensor | float) -> GraphTensor:
        return self.op("Sub", other)

    def __mul__(self, other: GraphTensor | float) -> GraphTensor:
        return self.op("Mul", other)

    def __truediv__(self, other: GraphTensor | float) -> GraphTensor:
        return self.op("Div", other)

    def __neg__(self) -> GraphTensor:
        return self.op("Neg")

    def __rtruediv__(self, other: float) -> GraphTensor:
        return self.nodes.constant(other, self.dtype) / self

    def __rsub__(self, other: float) -> GraphTensor:
        return self.nodes.constant(other, self.dtype) - self

    def __pow__(self, other: GraphTensor) -> GraphTensor:
        return self.op("Pow", other)

    def __rpow__(self, other: float) -> GraphTensor:
        return self.nodes.constant(other, self.dtype).op("Pow", self)

    def exp(self) -> GraphTensor:
        return self.op("Exp")

    def sqrt(self) -> GraphTensor:
        return self.op("Sqrt")

    def maximum(self, other: GraphTensor) -> GraphTensor:
        return self.op("Max", other)

    def equals(self, number: float) -> GraphTensor:
        return self.op("Equal", number, dtype=ir.DataType.BOOL)

    def less(self, number: float) -> GraphTensor:
        return self.op("Less", number, dtype=ir.DataType.BOOL)

    def where(self, chosen: GraphTensor, other: GraphTensor | float) -> GraphTensor:
        """Return `chosen` if this boolean, of shape (), is true, otherwise the other."""
        otherwise = other if isinstance(other, GraphTensor) else self.nodes.constant(other, chosen.dtype)
        inputs = [self.value, chosen.value, otherwise.value]
        return self.nodes.op("Where", inputs, chosen.dtype, max((chosen.shape, otherwise.shape), key=len))

    def element(self, index: int) -> GraphTensor:
        """Return an element of a vector, of shape ()."""
        place = self.nodes.op("Constant", [], ir.DataType.INT64, (), {"value_int": index})
        return self.nodes.op("Gather", [self.value, place.value], self.dtype, ())

    def cast(self, dtype: ir.DataType) -> GraphTensor:
        if dtype == self.dtype:
            return self
        return self.nodes.op("Cast", [self.value], dtype, self.shape, {"to": dtype})

    def reshape(self, shape: Sequence[int]) -> GraphTensor:
        """Return the same elements in another shape, without -1 and 0."""
        return self.nodes.op("Reshape", [self.value, self.nodes.integers(shape)], self.dtype, shape)

    def norm(self) -> GraphTensor:
        """Return the 2-norm of all elements, of shape ()."""
        return self.nodes.op("ReduceL2", [self.value], self.dtype, (), {"keepdims": 0})
