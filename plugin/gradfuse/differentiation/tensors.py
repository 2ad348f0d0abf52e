"""Arithmetic that appends nodes to a graph: what gradient rules are written in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.errors import ModelError
from gradfuse.models.tensors import as_attributes

Operand: TypeAlias = "Tensor | float | None"
"""A tensor, a number that becomes a constant of the other operands' type, or an input that is left out."""

_BOOLEAN = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "IsNaN"})
_INT64 = frozenset({"Shape", "Size", "NonZero"})
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})
_NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_OF_SECOND_INPUT = frozenset({"Where", "CastLike"})


class Tape:
    """Collects nodes in the order in which they are written, and names them and their outputs.

    Args:
        prefix: what all names begin with; nothing else in the graph begins with it.
        opset: the version of the default domain that the nodes are of.
    """

    def __init__(self, prefix: str, opset: int) -> None:
        self.nodes: list[ir.Node] = []
        self.opset = opset
        self.prefix = prefix
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], Tensor] = {}

    def of(self, value: ir.Value) -> Tensor:
        return Tensor(self, value)

    def op(
        self, op_type: str, *inputs: Operand, dtype: ir.DataType | None = None, domain: str = "", **attributes: Any
    ) -> Tensor:
        """Append a node and return its output.

        Arithmetic of 16 bits with a number that they do not hold is in float32, as in PyTorch, and rounded once.

        Args:
            op_type: the operator.
            inputs: its inputs; numbers become constants of the first tensor's type.
            dtype: the element type of the output; None: what follows from the inputs.
            domain: the operator's domain.
            attributes: its attributes; those that are None are left out.
        """
        if op_type in _ARITHMETIC and not domain:
            narrow = next((x.dtype for x in inputs if isinstance(x, Tensor) and x.dtype in _NARROW), None)
            if narrow is not None and not all(_holds(narrow, x) for x in inputs if isinstance(x, (int, float))):
                wide = [x.cast(ir.DataType.FLOAT) if isinstance(x, Tensor) else x for x in inputs]
                return self.op(op_type, *wide).cast(narrow)
        return self.parts(op_type, 1, *inputs, dtype=dtype, domain=domain, **attributes)[0]

    def parts(
        self,
        op_type: str,
        count: int,
        *inputs: Operand,
        dtype: ir.DataType | None = None,
        dtypes: Sequence[ir.DataType] = (),
        domain: str = "",
        **attributes: Any,
    ) -> tuple[Tensor, ...]:
        """Append a node and return its `count` outputs, which are of one type or of `dtypes`; the rest as in `op`."""
        while inputs and inputs[-1] is None and not domain:
            inputs = inputs[:-1]  # Older versions of an operator do not have the inputs that are left out.
        typed = [operand for operand in inputs if isinstance(operand, Tensor)]
        # A condition or an index says nothing of the type of the numbers beside it.
        like = next((t.dtype for t in typed if t.dtype != ir.DataType.BOOL), ir.DataType.FLOAT)
        operands = [self.constant(x, like) if isinstance(x, (int, float)) else x for x in inputs]
        name = f"{self.prefix}{op_type}_{len(self.nodes)}"
        suffixes = [""] if count == 1 else [f".{k}" for k in range(count)]
        types = dtypes or [dtype or _dtype(op_type, operands, attributes)] * count
        node = ir.node(
            op_type,
            [None if operand is None else operand.value for operand in operands],
            as_attributes({key: value for key, value in attributes.items() if value is not None}),
            domain=domain,
            name=name,
            outputs=[
                ir.Value(name=name + suffix, type=ir.TensorType(type_))
                for suffix, type_ in zip(suffixes, types, strict=True)
            ],
        )
        self.nodes.append(node)
        return tuple(Tensor(self, value) for value in node.outputs)

    def constant(self, data: npt.ArrayLike, dtype: ir.DataType = ir.DataType.INT64) -> Tensor:
        """Return a constant; equal ones are one node."""
        if dtype == ir.DataType.INT64:
            array = np.asarray(data, np.int64)
        else:
            array = np.asarray(data, np.float64).astype(dtype.numpy())
        key = (array.tobytes(), dtype.name, array.shape)
        if key not in self._constants:
            tensor = ir.tensor(array, dtype=dtype)
            self._constants[key] = self.op("Constant", dtype=dtype, value=tensor)
        return self._constants[key]

    def ints(self, *numbers: int) -> Tensor:
        """Return a vector of int64."""
        return self.constant(np.asarray(numbers, np.int64))

    def concat(self, parts: Iterable[Tensor], axis: int = 0) -> Tensor:
        found = list(parts)
        return found[0] if len(found) == 1 else self.op("Concat", *found, axis=axis)

    def total(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the sum of tensors of one shape; parts that make up a whole tensor are joined."""
        terms = self._joined(terms)
        if len(terms) == 1:
            return terms[0]
        return self.op("Add", *terms) if len(terms) == 2 else self.op("Sum", *terms)

    def _joined(self, terms: Sequence[Tensor]) -> list[Tensor]:
        rest = list(terms)
        for first in terms:
            if not isinstance(first, Part) or first.begin or first not in rest:
                continue
            row, end = [first], first.length
            while end < first.whole:
                following = next((one for one in rest if isinstance(one, Part) and one.follows(first, end)), None)
                if following is None:
                    break
                row.append(following)
                end += following.length
            else:
                # A part that is added several times is a term for each time.
                for one in row:
                    rest.remove(one)
                rest.append(self.concat([one.part for one in row], first.axis))
        return rest


def _holds(dtype: ir.DataType, number: float) -> bool:
    """Whether a type has a number, or one that float32 does not tell from it."""
    with np.errstate(over="ignore"):
        held = np.float64(number).astype(dtype.numpy())
    return np.float32(held) == np.float32(number) or math.isnan(number)


def _dtype(op_type: str, operands: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> ir.DataType:
    """Return the element type of what an operator gives."""
    if op_type in _BOOLEAN:
        return ir.DataType.BOOL
    if op_type in _INT64:
        return ir.DataType.INT64
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    first = operands[1 if op_type in _OF_SECOND_INPUT else 0]
    assert first is not None
    return first.dtype


class Tensor:
    """A value of a graph with the arithmetic of Python; a number beside it is a constant of its type."""

    __slots__ = ("_value", "tape")

    def __init__(self, tape: Tape, value: ir.Value | None) -> None:
        self.tape = tape
        self._value = value

    @property
    def value(self) -> ir.Value:
        assert self._value is not None
        return self._value

    @property
    def dtype(self) -> ir.DataType:
        if self.value.dtype is None:
            raise ModelError(f"the type of {self.value.name!r} is unknown; expected a model with types and shapes")
        return self.value.dtype

    def op(self, op_type: str, *others: Operand, **attributes: Any) -> Tensor:
        """Append an operator with this as its first input."""
        return self.tape.op(op_type, self, *others, **attributes)

    def __add__(self, other: Tensor | float) -> Tensor:
        return self.op("Add", other)

    def __radd__(self, other: float) -> Tensor:
        return self.tape.op("Add", other, self)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self.op("Sub", other)

    def __rsub__(self, other: float) -> Tensor:
        return self.tape.op("Sub", other, self)

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, (int, float)) and other == 1:
            return self
        return self.op("Mul", other)

    def __rmul__(self, other: float) -> Tensor:
        return self * other

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self.op("Div", other)

    def __rtruediv__(self, other: float) -> Tensor:
        return self.tape.op("Div", other, self)

    def __neg__(self) -> Tensor:
        return self.op("Neg")

    def __pow__(self, other: float) -> Tensor:
        return self * self if other == 2 else self.op("Pow", other)

    def __gt__(self, other: Tensor | float) -> Tensor:
        return self.op("Greater", other)

    def __lt__(self, other: Tensor | float) -> Tensor:
        return self.op("Less", other)

    def equals(self, other: Tensor | float) -> Tensor:
        return self.op("Equal", other)

    def where(self, chosen: Tensor, otherwise: Tensor | float) -> Tensor:
        """Return `chosen` where this condition holds, else the other."""
        if not isinstance(otherwise, Tensor):
            otherwise = self.tape.constant(otherwise, chosen.dtype)
        return self.op("Where", chosen, otherwise)

    def masked(self, condition: Tensor) -> Tensor:
        """Return this where a condition holds, else 0: a NaN or an infinity that is not selected does no harm."""
        return condition.where(self, 0.0)

    def cast(self, dtype: ir.DataType) -> Tensor:
        return self if dtype == self.dtype else self.op("Cast", to=dtype)

    def sum(self, axes: Sequence[int] | Tensor | None, keepdims: bool = True) -> Tensor:
        """Return the sum over axes: all of them where None, none where the sequence is empty."""
        if isinstance(axes, Sequence):
            if not axes:
                return self
            axes = self.tape.ints(*axes)
        noop = 1 if axes is not None else None
        return self.op("ReduceSum", axes, keepdims=int(keepdims), noop_with_empty_axes=noop)

    def shape(self) -> Tensor:
        return self.op("Shape")

    def size(self, axis: int) -> Tensor:
        """Return the size of one dimension, as a vector of one element; `axis` may be negative."""
        return self.op("Shape", start=axis, end=axis + 1 if axis != -1 else None)

    def reshape(self, shape: Tensor | Sequence[int]) -> Tensor:
        if not isinstance(shape, Tensor):
            # A 0 copies the size, and -1 is what is left, as in Reshape without allowzero.
            return self.op("Reshape", self.tape.ints(*shape))
        return self.op("Reshape", shape, allowzero=1)

    def like(self, other: Tensor) -> Tensor:
        """Return this with the shape of another tensor that has as many elements."""
        return self.reshape(other.shape())

    def transpose(self, perm: Sequence[int]) -> Tensor:
        node = self.value.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Transpose" and not node.domain else None
        if node is not None and source is not None:
            before = node.attributes.get_ints("perm", range(len(perm) - 1, -1, -1))
            if [before[axis] for axis in perm] == list(range(len(perm))):
                return self.tape.of(source)
        return self if list(perm) == list(range(len(perm))) else self.op("Transpose", perm=list(perm))

    def unsqueeze(self, *axes: int) -> Tensor:
        return self.op("Unsqueeze", self.tape.ints(*axes)) if axes else self

    def squeeze(self, *axes: int) -> Tensor:
        return self.op("Squeeze", self.tape.ints(*axes)) if axes else self

    def expand(self, shape: Tensor) -> Tensor:
        return self.op("Expand", shape)

    def slice(self, starts: Tensor, ends: Tensor, axes: Tensor, steps: Tensor | None = None) -> Tensor:
        return self.op("Slice", starts, ends, axes, steps)

    def zeros(self) -> Tensor:
        """Return zeros of this shape and type."""
        zero = ir.tensor(np.zeros(1, self.dtype.numpy()), dtype=self.dtype)
        return self.tape.op("ConstantOfShape", self.shape(), dtype=self.dtype, value=zero)

    def ones(self) -> Tensor:
        """Return ones of this shape and type."""
        one = ir.tensor(np.ones(1, self.dtype.numpy()), dtype=self.dtype)
        return self.tape.op("ConstantOfShape", self.shape(), dtype=self.dtype, value=one)

    def exp(self) -> Tensor:
        return self.op("Exp")

    def log(self) -> Tensor:
        return self.op("Log")

    def sqrt(self) -> Tensor:
        return self.op("Sqrt")

    def sign(self) -> Tensor:
        return self.op("Sign")

    def tanh(self) -> Tensor:
        return self.op("Tanh")

    def sigmoid(self) -> Tensor:
        return self.op("Sigmoid")

    def softplus(self) -> Tensor:
        """Return log(1 + exp(x)); of float64 onnxruntime's Softplus has no kernel, and its body is soon infinite."""
        if self.dtype != ir.DataType.DOUBLE:
            return self.op("Softplus")
        small = (-self.op("Abs")).exp()
        more = small + 1.0
        # The sum rounds small numbers off, which the second term adds again.
        return self.op("Max", 0.0) + (more.log() + (small - (more - 1.0)) / more)

    def matmul(self, other: Tensor) -> Tensor:
        return self.op("MatMul", other)


class Part(Tensor):
    """A tensor of zeros but for a part of it; a node is written for it when something reads it.

    Args:
        part: the part, of which the size along the axis is known.
        rank: the number of axes.
        axis: the axis along which there are zeros.
        begin: how many of them are ahead of the part.
        length: the size of the part along the axis, more than 0.
        whole: the size of the tensor along it.
    """

    __slots__ = ("axis", "begin", "length", "part", "rank", "whole")

    def __init__(self, part: Tensor, rank: int, axis: int, begin: int, length: int, whole: int) -> None:
        super().__init__(part.tape, None)
        self.part, self.rank, self.axis = part, rank, axis
        self.begin, self.length, self.whole = begin, length, whole

    @property
    def value(self) -> ir.Value:
        if self._value is None:
            pads = [0] * (2 * self.rank)
            pads[self.axis], pads[self.rank + self.axis] = self.begin, self.whole - self.begin - self.length
            self._value = self.part.op("Pad", self.tape.ints(*pads), 0.0).value
        return self._value

    def follows(self, other: Part, end: int) -> bool:
        """Whether this begins where parts along the axis of another one end."""
        return self.begin == end and (self.axis, self.whole, self.rank) == (other.axis, other.whole, other.rank)


def normal_density(x: Tensor) -> Tensor:
    """Return exp(-x^2 / 2) / sqrt(2 pi)."""
    return (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
