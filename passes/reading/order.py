"""Bounds of the integers of a graph, their order, and whether one comes twice: what holds for every input.

The canonical forms take some of it for granted, such as that no index is negative. What is said here takes nothing for
granted but that no sum of integers overflows, so that it holds where a graph drops or wraps an index.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Poly, number
from gradfuse.passes.reading.constants import Array
from gradfuse.passes.reading.forms import Forms
from gradfuse.passes.reading.nodes import Opaque, attribute
from gradfuse.passes.reading.pieces import sliced

_T = TypeVar("_T")
_DEPTH_LIMIT = 100  # nodes behind each other that are looked at
_VIEWS = {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"}
_PICKS = {"Slice", "Gather", "GatherElements", "GatherND", "Split", "Tile"}
_SCATTERS = {"ScatterND", "ScatterElements"}
_ON_NUMBERS: dict[str, Callable[[float, float], float]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Max": max,
    "Min": min,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Equal": operator.eq,
    "And": min,
    "Or": max,
}


class Order:
    """What the nodes of one graph say about the integers (and conditions, as 0 and 1) that they compute."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._depth = 0
        self._known: dict[tuple[str, ir.Value], Any] = {}

    def least(self, value: ir.Value) -> float:
        """A number that no element is below; minus infinity where nothing is known."""
        return self._looked_up("least", value, self._least, -math.inf)

    def most(self, value: ir.Value) -> float:
        """A number that no element is above; infinity where nothing is known."""
        return self._looked_up("most", value, self._most, math.inf)

    def first(self, value: ir.Value) -> float | None:
        """The first element, if there is one, where it is the same number for every input."""
        return self._looked_up("first", value, self._find_first, None)

    def rises(self, value: ir.Value) -> bool:
        """Whether a tensor that has one dimension, but for others of size 1, never decreases along it."""
        return self._looked_up("rises", value, self._rises, False)

    def names_apart(self, indices: ir.Value) -> bool:
        """Whether no two of the index tuples, which lie along the last dimension, name one element."""
        return self._looked_up("apart", indices, self._names_apart, False)

    def _looked_up(self, name: str, value: ir.Value, compute: Callable[[ir.Value], _T], unknown: _T) -> _T:
        key = (name, value)
        if key not in self._known:
            if self._depth > _DEPTH_LIMIT:
                return unknown
            self._depth += 1
            self._known[key] = compute(value)
            self._depth -= 1
        found: _T = self._known[key]
        return found

    def _opened(self, value: ir.Value) -> tuple[str, ir.Node | None, list[ir.Value]]:
        """The operation that makes a value, its node and those of its inputs that are there."""
        node = value.producer()
        if node is None or node.domain:
            return "", None, []
        return node.op_type, node, [v for v in node.inputs if v is not None]

    def _least(self, value: ir.Value) -> float:
        if not _is_exact(value):
            return -math.inf
        array = self._forms.constant(value)
        if array is not None:
            return float(array.min()) if array.size else -math.inf
        if value.dtype == ir.DataType.BOOL:
            return 0.0
        op, node, inputs = self._opened(value)
        if node is None:
            return -math.inf
        if op in _VIEWS | _PICKS:
            return self.least(inputs[0]) if _is_kept(value, inputs[0]) else -math.inf
        if op == "CumSum" and self.least(inputs[0]) >= 0:
            plain = not attribute(node, "exclusive", 0) and not attribute(node, "reverse", 0)
            return self._least_first(inputs[0]) if plain and self._runs_along(node) else 0.0
        if op in _SCATTERS:
            return self._scattered(node, self.least(inputs[0]), self.least(inputs[2]))
        match op:
            case "Concat" | "Min":
                return min(self.least(v) for v in inputs)
            case "Max":
                return max(self.least(v) for v in inputs)
            case "Add":
                return self.least(inputs[0]) + self.least(inputs[1])
            case "Sub":
                return self.least(inputs[0]) - self.most(inputs[1])
            case "Mul" | "Div":
                return 0.0 if all(self.least(v) >= 0 for v in inputs) else -math.inf
            case "Range":
                return self.least(inputs[0]) if self.least(inputs[2]) > 0 else -math.inf
            case "ReduceSum":
                return 0.0 if self.least(inputs[0]) >= 0 else -math.inf
            case "Where":
                return min(self.least(v) for v in self._taken(inputs))
            case "Abs" | "NonZero" | "Shape" | "Size" | "ArgMax" | "ArgMin":
                return 0.0
            case "TopK":
                return self.least(inputs[0]) if value is node.outputs[0] else 0.0
            case _:
                return -math.inf

    def _most(self, value: ir.Value) -> float:
        if not _is_exact(value):
            return math.inf
        array = self._forms.constant(value)
        if array is not None:
            return float(array.max()) if array.size else math.inf
        if value.dtype == ir.DataType.BOOL:
            return 1.0
        op, node, inputs = self._opened(value)
        if node is None:
            return math.inf
        if op in _VIEWS | _PICKS:
            return self.most(inputs[0]) if _is_kept(value, inputs[0]) else math.inf
        match op:
            case "Concat" | "Max":
                return max(self.most(v) for v in inputs)
            case "Min":
                return min(self.most(v) for v in inputs)
            case "Add":
                return self.most(inputs[0]) + self.most(inputs[1])
            case "Sub":
                return self.most(inputs[0]) - self.least(inputs[1])
            case "CumSum" if self.least(inputs[0]) >= 0:
                return self._total(inputs[0])
            case "Where":
                return max(self.most(v) for v in self._taken(inputs))
            case _:
                return math.inf

    def _total(self, value: ir.Value) -> float:
        """A number that the sum of the elements, none of them negative, is not above."""
        return self._looked_up("total", value, self._find_total, math.inf)

    def _find_total(self, value: ir.Value) -> float:
        op, node, inputs = self._opened(value)
        if node is not None and op in _SCATTERS and attribute(node, "reduction", "none") == "add":
            return self._total(inputs[0]) + self._total(inputs[2])
        if op == "Gather" and self._is_distinct(inputs[1]) and self._is_line(inputs[0]):
            return self._total(inputs[0])
        form, most = self._forms.get(value), self.most(value)
        counts = [None] if form is None else [size.integer for size in form.sizes]
        return most and most * math.prod(math.inf if n is None else n for n in counts)

    def _is_distinct(self, value: ir.Value) -> bool:
        """Whether no two elements are indices of one place, as is so of those that NonZero finds in a line."""
        return self._looked_up("distinct", value, self._find_distinct, False)

    def _find_distinct(self, value: ir.Value) -> bool:
        array, form = self._forms.constant(value), self._forms.get(value)
        if array is not None:
            return _has_no_row_twice(array.reshape(-1, 1))
        op, node, inputs = self._opened(value)
        match op:
            case "Where":
                taken = self._taken(inputs)
                return len(taken) == 1 and self._is_as_large(value, taken[0]) and self._is_distinct(taken[0])
            case "Expand" if not self._is_as_large(value, inputs[0]):
                return False
            case _ if op in _VIEWS | {"Slice"}:
                return _is_kept(value, inputs[0]) and self._is_distinct(inputs[0])
            case "NonZero":
                source = self._forms.get(inputs[0])
                return source is not None and len(source.groups) == 1
            case "TopK" if node is not None:
                return value is node.outputs[1] and self._sorts_along(node)
            case "Gather":
                return all(map(self._is_distinct, inputs))
        return form is not None and self._tells_apart(form.poly) >= set(range(len(form.sizes)))

    def _names_apart(self, indices: ir.Value) -> bool:
        form = self._forms.get(indices)
        depth = self._forms.extent(form.groups[-1]).integer if form is not None and form.groups else None
        if form is None or depth is None:
            return False
        if depth == 1 and self._is_distinct(indices):
            return True
        array, last = self._forms.constant(indices), len(form.groups) - 1
        if array is not None:
            return _has_no_row_twice(array.reshape(-1, depth))
        op, node, inputs = self._opened(indices)
        if op in ("Identity", "Cast"):
            return _is_kept(indices, inputs[0]) and self.names_apart(inputs[0])
        if op == "Transpose" and self._opened(inputs[0])[0] == "NonZero":
            return True
        if node is not None and op == "Concat" and attribute(node, "axis", 0) in (-1, last):
            # Tuples that differ in one number are not the same.
            if any(map(self.names_apart, inputs)):
                return True
        try:
            places = [number(k) for k in range(depth)]
            numbers = [form if depth == 1 else sliced(self._forms, form, last, k, 1, UNIT) for k in places]
        except Opaque:
            return False
        told = frozenset().union(*(self._tells_apart(n.poly) for n in numbers))
        return told >= {v for axis in range(last) for v in form.variables(axis)}

    def _tells_apart(self, poly: Poly) -> frozenset[int]:
        """The variable that a number belongs to, where each of its values has a number of its own, none negative."""
        algebra = self._forms.algebra
        free = algebra.free(poly)
        if len(free) != 1:
            return frozenset()
        position = algebra.var(*free)
        (monomial,) = position.terms
        slope = poly.terms.get(monomial, 0.0)
        start = (poly - position.scaled(slope)).constant
        return free if slope > 0 and start is not None and start >= 0 else frozenset()

    def _least_first(self, value: ir.Value) -> float:
        """A number that the first element is not below."""
        return self._looked_up("least first", value, self._find_least_first, -math.inf)

    def _find_least_first(self, value: ir.Value) -> float:
        known = self.first(value)
        if known is not None:
            return known
        op, node, inputs = self._opened(value)
        if node is not None and op in _VIEWS and _is_kept(value, inputs[0]):
            return self._least_first(inputs[0])
        if node is not None and op in _SCATTERS and attribute(node, "reduction", "none") == "add":
            updates = self.least(inputs[2])
            if updates >= 0 and self._is_line(value) and self.first(inputs[1]) == 0 and self._is_filled(inputs[1]):
                return self._least_first(inputs[0]) + updates
        return self.least(value)

    def _find_first(self, value: ir.Value) -> float | None:
        array = self._forms.constant(value)
        if array is not None:
            return float(array.flat[0]) if array.size else None
        vector = self._forms.vector(value)
        if vector:
            return vector[0].constant
        op, node, inputs = self._opened(value)
        if node is None or not _is_exact(value):
            return None
        if op in _VIEWS:
            return self.first(inputs[0]) if _is_kept(value, inputs[0]) else None
        match op:
            case "CumSum" if not attribute(node, "reverse", 0):
                return 0.0 if attribute(node, "exclusive", 0) else self.first(inputs[0])
            case "ScatterND" | "ScatterElements" if attribute(node, "reduction", "none") == "none":
                # Which of several updates of one element is the last, nothing says.
                alone = self._is_level(inputs[1]) and self._is_level(inputs[2]) and self._is_line(value)
                return self.first(inputs[2]) if alone and self.first(inputs[1]) == 0 else None
            case "Concat":
                return self.first(inputs[0]) if self._is_filled(inputs[0]) else None
            case "Gather":
                return self.first(inputs[0]) if self.first(inputs[1]) == 0 else None
            case "NonZero":
                return 0.0 if self.first(inputs[0]) else None
            case "Not":
                known = self.first(inputs[0])
                return None if known is None else float(not known)
            case "Where":
                condition = self.first(inputs[0])
                return None if condition is None else self.first(inputs[1 if condition else 2])
        compute = _ON_NUMBERS.get(op)
        operands = [x for v in inputs if (x := self.first(v)) is not None]
        return None if compute is None or len(operands) != 2 or len(inputs) != 2 else float(compute(*operands))

    def _is_filled(self, value: ir.Value) -> bool:
        """Whether there are elements, whatever the symbolic dimensions are."""
        return self._looked_up("filled", value, self._find_filled, False)

    def _find_filled(self, value: ir.Value) -> bool:
        form = self._forms.get(value)
        if form is not None and all(size.integer is not None for size in form.sizes):
            return True
        op, _, inputs = self._opened(value)
        if op in _VIEWS:
            return self._is_filled(inputs[0])
        return (op == "Gather" and all(map(self._is_filled, inputs))) or (
            op == "NonZero" and bool(self.first(inputs[0]))
        )

    def _scattered(self, node: ir.Node, data: float, updates: float) -> float:
        match attribute(node, "reduction", "none"):
            case "none" | "min":
                return min(data, updates)
            case "add" if updates >= 0:
                return data
            case "max":
                return data
            case _:
                return -math.inf

    def _taken(self, inputs: list[ir.Value]) -> list[ir.Value]:
        """The branches of a Where that its condition may choose."""
        condition, yes, no = inputs
        op, _, operands = self._opened(condition)
        if op in ("Less", "Greater"):
            small, large = operands if op == "Less" else operands[::-1]
            if self.least(small) >= self.most(large):
                return [no]
            if self.most(small) < self.least(large):
                return [yes]
        return [yes, no]

    def _rises(self, value: ir.Value) -> bool:
        if self._is_level(value):
            return True
        if not self._is_line(value):
            return False
        array = self._forms.constant(value)
        if array is not None:
            return bool((array.ravel()[1:] >= array.ravel()[:-1]).all())
        op, node, inputs = self._opened(value)
        if node is None or not _is_exact(value):
            return False
        if op in _VIEWS:
            return _is_kept(value, inputs[0]) and self.rises(inputs[0])
        match op:
            case "CumSum":
                return not attribute(node, "reverse", 0) and self._runs_along(node) and self.least(inputs[0]) >= 0
            case "Range":
                return self.least(inputs[2]) > 0
            case "TopK":
                ascends = not attribute(node, "largest", 1) and attribute(node, "sorted", 1)
                return bool(ascends) and value is node.outputs[0] and self._sorts_along(node)
            case "Add" | "Min" | "Max":
                return all(self.rises(v) for v in inputs)
            case "Sub":
                return self.rises(inputs[0]) and self._is_level(inputs[1])
            case "Mul" | "Div":
                return self.rises(inputs[0]) and self._is_level(inputs[1]) and self.least(inputs[1]) >= 0
            case "Where":
                taken = self._taken(inputs)
                return len(taken) == 1 and self.rises(taken[0])
            case "Gather":
                return self.rises(inputs[0]) and self.rises(inputs[1]) and self.least(inputs[1]) >= 0
            case _:
                return False

    def _sorts_along(self, node: ir.Node) -> bool:
        """Whether a TopK goes along the only dimension that its input has."""
        form = None if node.inputs[0] is None else self._forms.get(node.inputs[0])
        return form is not None and len(form.groups) == 1

    def _runs_along(self, node: ir.Node) -> bool:
        """Whether a CumSum goes along the only dimension of a size other than 1."""
        source, axis = node.inputs[:2]
        form, number = None if source is None else self._forms.get(source), self._forms.constant(axis)
        if form is None or number is None:
            return False
        along = int(number.item()) % len(form.groups)
        return bool(form.groups[along]) and not any(g for a, g in enumerate(form.groups) if a != along)

    def _is_line(self, value: ir.Value) -> bool:
        """Whether no more than one dimension has a size other than 1."""
        form = self._forms.get(value)
        return form is not None and sum(bool(group) for group in form.groups) <= 1

    def _is_as_large(self, value: ir.Value, source: ir.Value) -> bool:
        """Whether a value that is broadcast from another has as many elements."""
        own, other = self._forms.get(value), self._forms.get(source)
        return own is not None and other is not None and own.sizes == other.sizes

    def _is_level(self, value: ir.Value) -> bool:
        """Whether all elements are one number."""
        form = self._forms.get(value)
        return form is not None and not form.sizes


def _is_exact(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def _is_kept(view: ir.Value, source: ir.Value) -> bool:
    """Whether a view or cast of integers or conditions has their numbers."""
    return _is_exact(source) and (source.dtype == view.dtype or view.dtype != ir.DataType.BOOL)


def _has_no_row_twice(array: Array) -> bool:
    """Whether no two rows are index tuples of one place, for any sizes: negative numbers count from the end."""
    return bool((array >= 0).all()) and len(np.unique(array, axis=0)) == len(array)
