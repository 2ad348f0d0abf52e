"""Constants of a graph: their content, and their forms."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.models.tensors import array_of
from gradfuse.passes.algebra import UNIT, ZERO, Algebra, Poly, number
from gradfuse.passes.reading.layouts import Form

Array = npt.NDArray[Any]
VECTOR_LIMIT = 64
"""Constants of up to this many elements may be axes, sizes and the like."""
_CONTENT_LIMIT = 1 << 20  # larger constants are opaque, unless all of their elements are one number
_KEPT_LIMIT = 1 << 16  # larger constants in files are read again where they are asked for again: they may be weights
_ALIKE_LIMIT = 1 << 16  # elements of constants that are compared with multiples of each other
_MAKING = {"Identity", "Squeeze", "Unsqueeze", "Reshape", "Expand", "Cast", "Concat", "ConstantOfShape"}
"""Operators that make constants of constants."""
_DEPTH = 4  # such nodes, one after the other
_STEPS = 8  # rises of a constant that is read as a sum of steps
_finfo: Any = ml_dtypes.finfo


class Constants:
    """The constants of one graph. Equal ones, and multiples of each other, have one name."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.ranges: dict[object, tuple[float, float]] = {}
        """The least and the greatest element of integers, by the name of the tensor."""
        self._arrays: dict[ir.Value, Array | None] = {}
        self._small: dict[object, Form] = {}
        self._alike: dict[tuple[int, ...], list[tuple[object, Array]]] = {}

    def array(self, value: ir.Value | None, depth: int = 0) -> Array | None:
        """The content of a constant that is small enough to be looked at; None for other values.

        Args:
            value: the value, or None.
            depth: how many nodes that make constants of others were looked through to come to it.
        """
        if value is None:
            return None
        if value in self._arrays:
            return self._arrays[value]
        array = _content(value)
        if array is None and (array := self._computed(value, depth)) is None and depth:
            return None
        in_file = array is not None and isinstance(value.const_value, ir.ExternalTensor)
        if array is None or not in_file or array.size <= _KEPT_LIMIT or not any(array.strides):
            self._arrays[value] = array
        return array

    def _computed(self, value: ir.Value, depth: int) -> Array | None:
        """What a node makes of constants by filling, viewing or joining them; None for other values."""
        node = value.producer()
        if node is None or node.domain or node.op_type not in _MAKING or depth >= _DEPTH or value.is_graph_input():
            return None
        given = [self.array(one, depth + 1) for one in node.inputs]
        if not given or any(array is None for array in given):
            return None
        try:
            return _made(node, [array for array in given if array is not None])
        except (ValueError, TypeError, LookupError):
            return None  # The shapes do not fit, or an attribute is what a function is called with.

    def form(self, array: Array) -> Form:
        """The form of a constant: an expression of its index variables where there is a short one, or else a name."""
        if array.size > VECTOR_LIMIT:
            return self._form(array)
        key = (array.dtype, array.shape, array.tobytes())
        known = self._small.get(key)
        if known is None:
            known = self._small[key] = self._form(array)
        return known

    def _form(self, array: Array) -> Form:
        groups = tuple((number(n),) if n != 1 else () for n in array.shape)
        if array.size == 0:
            return Form(groups, self.algebra.tensor(("empty", array.shape), ()))
        if not any(array.strides) and _are_numbers(array.flat[:1]):
            return Form(groups, number(float(array.flat[0])))
        exact = _are_numbers(array)
        numbers = array.astype(np.float64) if array.dtype.kind != "c" and exact else array
        # Along some dimensions nothing changes; the others, without those of size 1, are left.
        axes = [axis for axis, n in enumerate(array.shape) if n != 1]
        varying = [v for v, axis in enumerate(axes) if np.any(numbers != numbers.take([0], axis))]
        if not varying and exact:
            return Form(groups, number(float(numbers.flat[0])))
        for v, axis in reversed([*enumerate(axes)]):
            if v not in varying:
                numbers = numbers.take([0], axis)
        numbers = numbers.reshape([n for n in numbers.shape if n != 1])
        poly = self._expression(numbers, varying, array.dtype) if exact else None
        if poly is None:
            name, factor = self._name(numbers, array.dtype)
            indices = [self.algebra.var(v) for v in varying]
            poly = self.algebra.tensor(name, indices, array.dtype == np.bool_).scaled(factor)
        return Form(groups, poly)

    def _expression(self, numbers: Array, variables: Sequence[int], dtype: np.dtype[Any]) -> Poly | None:
        """Numbers as a short expression of the variables of their dimensions; None where there is none."""
        if numbers.ndim == 1:
            return self._line(numbers, self.algebra.var(variables[0]), dtype)
        if numbers.ndim == 2 and (found := self._diagonal(numbers, variables)) is not None:
            return found
        if dtype.kind in "iu" and (found := self._plane(numbers, variables)) is not None:
            return found
        return self._blocks(numbers, variables) if numbers.ndim == 2 else None

    def _line(self, numbers: Array, index: Poly, dtype: np.dtype[Any]) -> Poly | None:
        """Numbers that rise evenly, or in a few equal steps; one True."""
        with np.errstate(over="ignore"):
            steps = np.diff(numbers)
        boolean = dtype == np.bool_
        if np.all(steps == steps[0]) and _are_numbers(steps[:1]) and not boolean:
            return index.scaled(float(steps[0])) + number(float(numbers[0]))
        if dtype.kind in "iu" and steps.max() > 0 and np.all((steps == 0) | (steps == steps.max())):
            rises = np.flatnonzero(steps)
            if len(rises) <= _STEPS:
                past = [UNIT - self.algebra.less_than_zero(index - number(int(k) + 1)) for k in rises]
                return sum(past, ZERO).scaled(float(steps.max())) + number(float(numbers[0]))
        if boolean and numbers.sum() == 1:
            return self.algebra.equal_zero(index - number(float(numbers.argmax())))
        return None

    def _plane(self, numbers: Array, variables: Sequence[int]) -> Poly | None:
        """Integers that rise evenly along each dimension, such as the numbers of the rows of a batch of sequences."""
        poly, rest = number(float(numbers.flat[0])), numbers - numbers.flat[0]
        for axis, v in enumerate(variables):
            step = float(rest[tuple(int(axis == a) for a in range(rest.ndim))])
            places = np.arange(rest.shape[axis]).reshape([-1 if axis == a else 1 for a in range(rest.ndim)])
            poly, rest = poly + self.algebra.var(v).scaled(step), rest - step * places
        return None if rest.any() else poly

    def _diagonal(self, numbers: Array, variables: Sequence[int]) -> Poly | None:
        """A multiple of the identity matrix."""
        if len(set(numbers.shape)) != 1 or not np.all(numbers == numbers[0, 0] * np.eye(len(numbers))):
            return None
        row, column = (self.algebra.var(v) for v in variables)
        return self.algebra.equal_zero(column - row).scaled(float(numbers[0, 0]))

    def _blocks(self, numbers: Array, variables: Sequence[int]) -> Poly | None:
        """A few rows (or columns) of zeros with one run of ones in each, by conditions."""
        if not np.all((numbers == 0) | (numbers == 1)):
            return None
        axis = int(numbers.shape[1] < numbers.shape[0])
        row, column = variables[axis], self.algebra.var(variables[1 - axis])
        result = ZERO
        for k, own in enumerate(numbers.T if axis else numbers):
            edges = np.flatnonzero(np.diff(own, prepend=0, append=0))
            if k >= _STEPS or len(edges) > 2:
                return None
            for edge, sign in zip(edges, (-1.0, 1.0), strict=False):
                below = self.algebra.less_than_zero(column - number(int(edge)))
                full = UNIT if edge == len(own) else below
                here = self.algebra.equal_zero(self.algebra.var(row) - number(k))
                result = result + self.algebra.mul(here, full).scaled(sign)
        return result

    def _name(self, numbers: Array, dtype: np.dtype[Any]) -> tuple[object, float]:
        """A name for numbers of a type, or for what they are a multiple of but for rounding, and the factor.

        Exporters multiply constants ahead of time, such as the weights of classes by a factor of the loss.
        """
        digest = hashlib.sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest()[:16]
        name = ("constant", numbers.shape, digest)
        if dtype.kind in "iu":
            self.ranges[name] = (float(numbers.min()), float(numbers.max()))
        floats = dtype.kind == "f" or dtype == ml_dtypes.bfloat16
        if not floats or numbers.size > _ALIKE_LIMIT or not np.all(np.isfinite(numbers)):
            return name, 1.0
        alike = self._alike.setdefault(numbers.shape, [])
        largest = np.abs(numbers).argmax()
        for first, other in alike:
            factor = float(numbers.flat[largest] / other.flat[largest]) if other.flat[largest] else 0.0
            if factor and np.allclose(numbers, factor * other, rtol=4 * _epsilon(dtype), atol=0):
                return first, factor
        alike.append((name, numbers))
        return name, 1.0


def _made(node: ir.Node, given: Sequence[Array]) -> Array | None:
    """What a node makes of constants; None where that is large, or of a type that numpy does not have."""
    first = given[0]
    match node.op_type:
        case "ConstantOfShape":
            if first.prod() > _CONTENT_LIMIT:
                return None
            fill = node.attributes.get("value")
            content = np.zeros(1, np.float32) if fill is None else fill.as_tensor().numpy()
            return np.broadcast_to(content.reshape(()), [int(n) for n in first])
        case "Expand":
            shape = np.broadcast_shapes(first.shape, tuple(int(n) for n in given[1]))
            return np.broadcast_to(first, shape) if math.prod(shape) <= _CONTENT_LIMIT else None
        case "Reshape":
            return first.reshape([int(n) for n in given[1]]) if given[1].all() else None
        case "Concat":
            joined = sum(array.size for array in given)
            return np.concatenate(given, node.attributes.get_int("axis", 0)) if joined <= VECTOR_LIMIT else None
        case "Cast":
            dtype = ir.DataType(node.attributes["to"].as_int())
            kinds = {first.dtype.kind, dtype.numpy().kind}
            return first.astype(dtype.numpy()) if kinds <= set("iufb") and first.size <= VECTOR_LIMIT else None
        case "Squeeze" | "Unsqueeze":
            axes = tuple(int(a) for a in given[1]) if len(given) > 1 else None
            if "axes" in node.attributes:
                axes = tuple(node.attributes["axes"].as_ints())
            if node.op_type == "Squeeze":
                return first.squeeze(axes)
            return None if axes is None else np.expand_dims(first, axes)
        case _:
            return first


def _content(value: ir.Value) -> Array | None:
    tensor = value.const_value
    node = value.producer()
    if tensor is None and node is not None and node.op_type == "Constant" and node.domain == "":
        for name, attr in node.attributes.items():
            if attr.is_ref():
                return None  # What a function is called with, its body does not know.
            if name in ("value_float", "value_floats"):
                return np.asarray(attr.value, np.float32)
            if name in ("value_int", "value_ints"):
                return np.asarray(attr.value, np.int64)
            if name == "value":
                tensor = attr.value
    # An initializer that is also an input is a default that the caller may replace.
    if tensor is None or value.is_graph_input() or tensor.dtype == ir.DataType.STRING:
        return None
    # A file that is mapped into memory must not stay so for a few numbers: it may be written anew.
    array = array_of(tensor)
    if array.size > _CONTENT_LIMIT:
        return _repeated(array)
    return array.copy() if isinstance(tensor, ir.ExternalTensor) else array


def _repeated(array: Array) -> Array | None:
    """One number for a large constant that repeats it, such as the zeros that gradients are scattered into."""
    first = array.flat[0]
    # Weights show at the first glance, without a read of all of them.
    if any(array.flat[k] != first for k in range(0, array.size, array.size // 64)) or not (array == first).all():
        return None
    return np.broadcast_to(first, array.shape)


def _are_numbers(array: Array) -> bool:
    """Whether the algebra can calculate with the elements: integers that float64 holds, or finite normal floats."""
    if array.dtype.kind in "iu":
        return array.size == 0 or bool(array.max() < 1 << 53 and array.min() > -(1 << 53))
    if array.dtype.kind in "cSUO":
        return False
    sizes = np.abs(array.astype(np.float64))
    return bool(np.all(((sizes >= np.finfo(np.float64).tiny) & np.isfinite(sizes)) | (sizes == 0)))


def _epsilon(dtype: np.dtype[Any]) -> float:
    """The distance of 1 to the next number of a type."""
    return float(_finfo(dtype).eps)
