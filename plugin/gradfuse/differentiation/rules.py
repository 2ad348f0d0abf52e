"""The table of gradient rules, and what a rule sees of a node."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ModelError

Gradient: TypeAlias = "Tensor | Callable[[], Tensor | None] | None"
"""The gradient of an input: a tensor, a function that writes it if it is needed, or None: there is no derivative."""
Rule: TypeAlias = "Callable[[Call], Iterable[Gradient]]"
"""The gradients of a node's inputs, in order; what is left out at the end has none."""

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

FUSES = "gradfuse.fuses"
"""In the `meta` of a node: whether operators of the domain `aclnn` may stand for it, or in its gradient."""

FAMILIES = (
    "elementwise",
    "straight_through",
    "reductions",
    "products",
    "views",
    "indexing",
    "convolutions",
    "pooling",
    "normalization",
    "losses",
    "linear_cross_entropy",
    "fourier",
    "contrib",
)

CONSTANT = "gradfuse.constant"
"""In the `meta` of a value: the integers that it always holds, as an array."""

_DOMAINS = {"ai.onnx": ""}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A rule in the table.

    Attributes:
        rule: the rule; None for an operator whose derivative is 0 wherever it has one, or that has none.
        broadcasts: whether inputs broadcast: the rule gives gradients of the output's shape, which are summed.
        limits: what the rule does not support, for `gradfuse ops --differentiable`; empty: it supports everything.
        fixed: the inputs that get no gradient although they are floats, such as class weights.
        refused: why a gradient through the operator is an error; empty: it is not.
    """

    rule: Rule | None
    broadcasts: bool = False
    limits: str = ""
    fixed: frozenset[int] = frozenset()
    refused: str = ""


_TABLE: dict[tuple[str, str], Entry] = {}


def gradient(
    *op_types: str, domain: str = "", broadcasts: bool = False, limits: str = "", fixed: Iterable[int] = ()
) -> Callable[[Rule], Rule]:
    """Put a rule into the table, for operators of a domain."""

    def put(rule: Rule) -> Rule:
        for op_type in op_types:
            _TABLE[domain, op_type] = Entry(rule, broadcasts, limits, frozenset(fixed))
        return rule

    return put


def no_gradient(*op_types: str, domain: str = "") -> None:
    """Put operators into the table whose outputs do not depend on their inputs in a differentiable way."""
    for op_type in op_types:
        _TABLE[domain, op_type] = Entry(None)


def refuse(*op_types: str, why: str, domain: str = "") -> None:
    """Put operators into the table through which a gradient is an error, also where their outputs are integers."""
    for op_type in op_types:
        _TABLE[domain, op_type] = Entry(None, refused=why)


@functools.cache
def table() -> Mapping[tuple[str, str], Entry]:
    """Return (domain, operator) -> rule, of all families."""
    for family in FAMILIES:
        importlib.import_module(f"gradfuse.differentiation.{family}")
    return _TABLE


def entry_of(node: ir.Node) -> Entry | None:
    """Return the rule of a node's operator; None where there is none."""
    return table().get((_DOMAINS.get(node.domain, node.domain), node.op_type))


class Call:
    """A node whose gradients are asked for.

    Attributes:
        node: the node.
        tape: where its gradients are written.
        x: its inputs, None where one is left out.
        y: its outputs.
        dy: the gradients of its outputs, None where the result does not depend on one.
        needed: the indices of the inputs whose gradients are needed.
    """

    def __init__(self, node: ir.Node, tape: Tape, dy: Sequence[Tensor | None], needed: frozenset[int]) -> None:
        self.node = node
        self.tape = tape
        self.x = [None if value is None else tape.of(value) for value in node.inputs]
        self.y = [tape.of(value) for value in node.outputs]
        self.dy = list(dy)
        self.needed = needed

    def input(self, index: int) -> Tensor | None:
        """Return an input; None where it is left out."""
        return self.x[index] if index < len(self.x) else None

    def operands(self) -> tuple[Tensor, Tensor]:
        """Return the first input and the gradient of the first output, where both are there."""
        x, dy = self.x[0], self.dy[0]
        assert x is not None and dy is not None
        return x, dy

    def pair(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first two inputs and the gradient of the first output, where all are there."""
        a, b, dy = self.x[0], self.x[1], self.dy[0]
        assert a is not None and b is not None and dy is not None
        return a, b, dy

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute: a number, a string, a list; `default` where the node has none."""
        found = self.node.attributes.get(name)
        if found is None or found.value is None:
            return default
        return list(found.value) if isinstance(found.value, (tuple, list)) else found.value

    def constant(self, index: int) -> npt.NDArray[Any] | None:
        """Return the value of an input that is a constant of the graph; None where it is not, or is left out."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        return None if value is None else constant_of(value)

    def dims(self, tensor: Tensor) -> tuple[int | str | None, ...]:
        """Return the dimensions of a value of the model: sizes, names, or None where nothing is known.

        Raises:
            ModelError: its rank is not known.
        """
        if tensor.value.shape is None:
            raise self.error(f"the rank of {tensor.value.name!r} is unknown; expected a model with shapes")
        return tuple(dim if isinstance(dim, int) else dim.value for dim in tensor.value.shape)

    def rank(self, tensor: Tensor) -> int:
        return len(self.dims(tensor))

    def shape(self, tensor: Tensor) -> Tensor:
        """Return the shape of a value of the model as a tensor: a constant where all sizes are known."""
        found = tensor.value.shape
        if found is not None and all(isinstance(dim, int) for dim in found):
            return self.tape.ints(*(int(dim) for dim in found if isinstance(dim, int)))
        return tensor.shape()

    def size(self, tensor: Tensor, axis: int) -> Tensor:
        """Return a dimension of a value of the model as a vector of one element."""
        found = tensor.value.shape
        dim = None if found is None else found[axis]
        return self.tape.ints(dim) if isinstance(dim, int) else tensor.size(axis)

    def error(self, what: str) -> ModelError:
        """The error for a node that its rule does not take, to be raised by the caller."""
        return error_of(self.node, what)

    def summed_to(self, gradient: Tensor, to: Tensor, of: Tensor) -> Tensor:
        """Return a gradient of the shape of `of`, summed to the shape of `to`, which was broadcast to it."""
        to_dims, of_dims = _dims(to.value), _dims(of.value)
        if to_dims is None or of_dims is None:
            return summed_at_run_time(gradient, to, of)
        extra = len(of_dims) - len(to_dims)
        axes = list(range(extra))
        for axis, (small, large) in enumerate(zip(to_dims, of_dims[extra:], strict=True)):
            if small == 1 and large != 1:
                axes.append(extra + axis)
            elif not (isinstance(small, int) or (small is not None and small == large)):
                # It may be 1 at run time where the other is not.
                return summed_at_run_time(gradient, to, of)
        if not axes:
            return gradient
        if len(axes) == extra:
            return gradient.sum(axes, keepdims=False)
        return gradient.sum(axes).squeeze(*range(extra))


def error_of(node: ir.Node, what: str) -> ModelError:
    """Return the error for a node that cannot be differentiated."""
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return ModelError(f"{operator} (node {node.name!r}): {what}")


def constant_of(value: ir.Value) -> npt.NDArray[Any] | None:
    """Return the value of an initializer that is no input, or of what follows from constants; None of others."""
    known: npt.NDArray[Any] | None = value.meta.get(CONSTANT)
    if known is not None:
        return known
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    if node is None:
        if value.const_value is None or value.is_graph_input():
            return None
        return value.const_value.numpy()
    if node.op_type != "Constant":
        return None
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor().numpy()
        if name in ("value_int", "value_ints"):
            return np.asarray(attribute.value, np.int64)
        if name in ("value_float", "value_floats"):
            return np.asarray(attribute.value, np.float32)
    return None


def _dims(value: ir.Value) -> tuple[int | str | None, ...] | None:
    return None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)


def summed_at_run_time(gradient: Tensor, to: Tensor, of: Tensor) -> Tensor:
    """Sum over the axes in which the sizes differ once the smaller shape is filled up with ones."""
    tape = gradient.tape
    small, large = to.shape(), of.shape()
    count = large.shape() - small.shape()
    one = ir.tensor(np.ones(1, np.int64))
    filled = tape.concat([tape.op("ConstantOfShape", count, dtype=ir.DataType.INT64, value=one), small])
    differs = filled.equals(large).op("Not")
    axes = differs.op("NonZero").reshape([-1])
    return gradient.sum(axes).reshape(small)
