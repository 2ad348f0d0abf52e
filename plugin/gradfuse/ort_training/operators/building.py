"""What the replacements are written with: operators that append nodes to those that take the place of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

Value: TypeAlias = ir.Value


class Unsupported(Exception):
    """A replacement does not cover what its operator is asked to do; the text says what."""


class Operators:
    """Makes the nodes that take the place of one: `op.Add(x, y)` appends one, and returns its output."""

    def __init__(self, opset: int, replaced: ir.Node) -> None:
        self.opset = opset
        self.outputs = len(replaced.outputs)
        self.nodes: list[ir.Node] = []
        self._prefix = replaced.name or replaced.outputs[0].name
        self._numbers: dict[tuple[float, ir.DataType], Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        return lambda *inputs, **attributes: self.several(op_type, 1, *inputs, **attributes)[0]

    def several(self, op_type: str, count: int, *inputs: Value | None, **attributes: Any) -> Sequence[Value]:
        """Append a node, and return all of its outputs."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        name = f"{self._prefix}/{op_type}_{len(self.nodes)}"
        attrs = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", op_type, given, attrs, num_outputs=count, name=name)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}_output_{index}"
        self.nodes.append(node)
        return node.outputs

    def number(self, number: float, like: Value) -> Value:
        """A scalar in the type of another value."""
        key = number, dtype_of(like)
        if key not in self._numbers:
            self._numbers[key] = self.Constant(value=ir.tensor(np.array(number, key[1].numpy()), dtype=key[1]))
        return self._numbers[key]

    def integer(self, number: int) -> Value:
        """A scalar of int64."""
        return self.Constant(value_int=number)

    def ints(self, values: Iterable[int]) -> Value:
        """A vector of int64."""
        return self.Constant(value=ir.tensor(np.array(list(values), np.int64)))

    def zeros(self, shape: Value, like: Value) -> Value:
        dtype = dtype_of(like)
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy()), dtype=dtype))

    def cast(self, x: Value, like: Value) -> Value:
        return x if x.dtype == dtype_of(like) else self.Cast(x, to=int(dtype_of(like)))

    def flat(self, x: Value) -> Value:
        return self.Reshape(x, self.ints([-1]))

    def sum(self, x: Value, axes: Iterable[int], keepdims: int = 1) -> Value:
        """The sum over axes; over none of them it is x itself."""
        return self.ReduceSum(x, self.ints(axes), keepdims=keepdims, noop_with_empty_axes=1)

    def mean(self, x: Value, axes: Sequence[int]) -> Value:
        if self.opset < 18:
            return self.ReduceMean(x, axes=list(axes), keepdims=1)
        return self.ReduceMean(x, self.ints(axes), keepdims=1)

    def square(self, x: Value) -> Value:
        return self.Mul(x, x)


def dtype_of(x: Value) -> ir.DataType:
    if x.dtype is None:
        raise Unsupported(f"the type of {x.name!r} is not known")
    return x.dtype


def rank(x: Value) -> int:
    if x.shape is None:
        raise Unsupported(f"the rank of {x.name!r} is not known")
    return len(x.shape)
