"""Reads an ONNX graph as canonical forms: each tensor as a polynomial in its index variables.

A :class:`Form` has one group of index variables per dimension (outermost first; a dimension of size 1 has none) and
the value of an element as a `Poly` of gradfuse.passes.algebra over these variables, numbered 0, 1, ... in the
order of the groups. Views (Reshape, Transpose, Expand, Cast between floats, ...) act on the groups only, arithmetic on
the polynomial, and what has no rule is opaque: a tensor atom of its own, named by its operation and operands, so that
equal computations have equal names.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Algebra, Poly, Positions, Renaming, Reordered, TooComplex, number
from gradfuse.passes.progress import Progress, counted
from gradfuse.passes.reading.dims import ELEMENTWISE, LOSSES, SAME_SHAPE, Sizes, live, nameless, rank_of, symbol

_finfo: Any = ml_dtypes.finfo
Group = tuple[Poly, ...]
Array = npt.NDArray[Any]

CONSTANT_LIMIT = 1 << 20  # larger constants are opaque, unless all of their elements are one number
_VECTOR_LIMIT = 64
_END = (1 << 31) - 1  # what slices to the end of a dimension have at least
_ALIKE_LIMIT = 1 << 16  # elements of constants that are compared with multiples of each other
_STEPS = 8  # rises of a constant that is read as a sum of steps
_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}
_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_RANDOM = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    "Dropout",
}
_REDUCTIONS = {"ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceMean", "ReduceSum", "ReduceL2"}
_ROW_OPERATORS = {"Softmax", "LogSoftmax", "ReduceMax", "ReduceLogSumExp"}


@dataclass(frozen=True)
class Form:
    """`groups`: the sizes of the index variables of each dimension; `poly`: an element."""

    groups: tuple[Group, ...]
    poly: Poly

    @property
    def sizes(self) -> Group:
        return tuple(size for group in self.groups for size in group)

    def variables(self, axis: int) -> range:
        """The variables of a dimension."""
        start = sum(len(group) for group in self.groups[:axis])
        return range(start, start + len(self.groups[axis]))


class Unreadable(Exception):
    """A value whose rank is unknown, or which is no tensor; nothing is said about it."""


class Opaque(Exception):
    """An operation that no rule reads; its outputs are named, not expressed."""


def is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    found = node.attributes.get(name)
    return default if found is None or found.value is None else found.value


def _are_numbers(array: Array) -> bool:
    """Whether the algebra can calculate with the elements: integers that float64 holds, or finite normal floats."""
    if array.dtype.kind in "iu":
        return array.size == 0 or bool(array.max() < 1 << 53 and array.min() > -(1 << 53))
    if array.dtype.kind in "cSUO":
        return False
    sizes = np.abs(array.astype(np.float64))
    return bool(np.all(((sizes >= np.finfo(np.float64).tiny) & np.isfinite(sizes)) | (sizes == 0)))


def _repeated(array: Array) -> Array | None:
    """One number for a large constant that repeats it, such as the zeros that gradients are scattered into."""
    first = array.flat[0]
    # Weights show at the first glance, without a read of all of them.
    if any(array.flat[k] != first for k in range(0, array.size, array.size // 64)) or not (array == first).all():
        return None
    return np.broadcast_to(first, array.shape)


@dataclass
class _Relative:
    """What was read last with some values taken as opaque, as neighbours are mostly asked for one after another."""

    sources: tuple[ir.Value, ...]
    opaque: tuple[Form, ...]
    forms: Forms
    changed: set[ir.Value]
    """The values that depend on the sources."""
    read: set[ir.Node]


def _epsilon(dtype: np.dtype[Any]) -> float:
    """The distance of 1 to the next number of a type."""
    return float(_finfo(dtype).eps)


class Forms:
    """The canonical forms of the values of one graph (or function body)."""

    def __init__(
        self, graph: ir.Graph, progress: Progress | None = None, invented: Collection[str] = frozenset()
    ) -> None:
        """`invented`: names of dimensions that say nothing but that the inference of shapes had no better one."""
        self.algebra = Algebra()
        self._forms: MutableMapping[ir.Value, Form | None] = {}
        self._vectors: dict[ir.Value, list[Poly] | None] = {}
        self._constants: dict[ir.Value, Array | None] = {}
        self._small_constants: dict[object, Form] = {}
        self._alike_constants: dict[tuple[int, ...], list[tuple[object, Array]]] = {}
        self._dims: dict[str, str] = {}
        self._sizes: dict[str, Poly] = {}
        self._invented = invented
        self._resolved: dict[str, Poly] = {}
        self._required: dict[tuple[ir.Value, int], Poly] = {}
        self._cuts: dict[str, Poly] = {}
        self._met: dict[str, Poly] | None = {}
        self._reads_live = False
        self._names: dict[object, str] = {}
        self._relative: _Relative | None = None
        self._examples: dict[object, tuple[tuple[object, ...], list[Form | None]]] = {}
        self._ranges: dict[object, tuple[float, float]] = {}
        self.opaque: set[ir.Value] = set()
        """The values that are named, not expressed."""
        self._merge_dims(graph)
        self._row_operands = {
            _through_casts(node.inputs[0])
            for node in graph
            if node.op_type in _ROW_OPERATORS and node.inputs and node.inputs[0] is not None
        }
        self._order: dict[ir.Node, tuple[int, ...]] = {node: (k,) for k, node in enumerate(graph)}
        run = set(live(graph))
        for node in counted(list(graph), "reading", progress):
            self._reads_live = node in run
            self._read(node)
        met, self._met = self._met or {}, None
        self._resolved |= met
        if self._require_sizes(graph) or met:
            # Forms that were made before a size was known call it by another name.
            for memory in (self._forms, self._vectors, self._sizes, self._names, self._examples, self.opaque):
                memory.clear()
            for node in graph:
                self._read(node)

    def get(self, value: ir.Value) -> Form | None:
        """The form of a value; None where its rank is unknown."""
        if value in self._forms:
            return self._forms[value]
        try:
            return self.form(value)
        except (Unreadable, TooComplex):
            return None

    # Values

    def form(self, value: ir.Value) -> Form:
        if value not in self._forms:
            # Not produced by a node that was read: an input, an initializer, or a value of an outer graph.
            self._forms[value] = self._leaf(value)
        form = self._forms[value]
        if form is None:
            raise Unreadable(value.name)
        return form

    def set(self, value: ir.Value, form: Form) -> None:
        """Says what a value that is new to the graph computes."""
        self._relative = None
        self._forms[value] = form

    def place(self, nodes: Iterable[ir.Node], anchor: ir.Node) -> None:
        """Says that new nodes stand, in order, right before another."""
        self._relative = None
        *same, last = self._order[anchor]
        for k, node in enumerate(nodes):
            self._order[node] = (*same, last - 1, k)

    def relative(self, root: ir.Value, *sources: ir.Value) -> tuple[Form, ...]:
        """The forms of a value and of others that it is computed from, with the latter taken as opaque."""
        if self._relative is None or self._relative.sources != sources:
            self._relative = self._opaque_sources(sources)
        known = self._relative
        above = [node for source in sources if (node := source.producer()) is not None]
        first = min(self._order.get(node, ()) for node in above) if len(above) == len(sources) else ()
        cone: set[ir.Node] = set()
        todo, seen = [root], {root, *sources}
        while todo:
            node = todo.pop().producer()
            # What comes before the sources, or is of an outer graph, is not computed from them.
            if node is None or node in cone or (order := self._order.get(node)) is None or order < first:
                continue
            if node in known.read:
                continue
            cone.add(node)
            for value in node.inputs:
                if value is not None and value not in seen:
                    seen.add(value)
                    todo.append(value)
        for node in sorted(cone, key=self._order.__getitem__):
            if any(v in known.changed for v in node.inputs):
                known.forms._read(node)
                known.changed.update(node.outputs)
            known.read.add(node)
        return known.forms.form(root), *known.opaque

    def _opaque_sources(self, sources: tuple[ir.Value, ...]) -> _Relative:
        forms = [self.form(source) for source in sources]
        opaque = tuple(
            self._named(("source", own), self._simple_groups(own), source)
            for own, source in zip(forms, sources, strict=True)
        )
        part = copy.copy(self)
        part._forms = ChainMap(dict(zip(sources, opaque, strict=True)), self._forms)
        return _Relative(sources, opaque, part, set(sources), set())

    def _leaf(self, value: ir.Value) -> Form | None:
        array = self.constant(value)
        try:
            if array is not None:
                return self._constant_form(array)
            return self._named(("value", value.name), self.groups_of(value), value)
        except Unreadable:
            return None

    def constant(self, value: ir.Value | None) -> Array | None:
        """The content of a constant that is small enough to be looked at."""
        if value is None:
            return None
        if value not in self._constants:
            self._constants[value] = self._find_constant(value)
        return self._constants[value]

    def _find_constant(self, value: ir.Value) -> Array | None:
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
        array = np.asarray(tensor.numpy())
        if array.size > CONSTANT_LIMIT:
            return _repeated(array)
        # A file that is mapped into memory must not stay so for a few numbers: it may be written anew.
        return array.copy() if isinstance(tensor, ir.ExternalTensor) else array

    def _constant_form(self, array: Array) -> Form:
        if array.size > _VECTOR_LIMIT:
            return self._form_of_numbers(array)
        key = (array.dtype, array.shape, array.tobytes())
        known = self._small_constants.get(key)
        if known is None:
            known = self._small_constants[key] = self._form_of_numbers(array)
        return known

    def _form_of_numbers(self, array: Array) -> Form:
        groups = tuple((number(n),) if n != 1 else () for n in array.shape)
        variables = list(range(sum(n != 1 for n in array.shape)))
        boolean = array.dtype == np.bool_
        if array.size == 0:
            return Form(groups, self.algebra.tensor(("empty", array.shape), ()))
        if not any(array.strides) and _are_numbers(array.flat[:1]):
            return Form(groups, number(float(array.flat[0])))
        exact = _are_numbers(array)
        numbers = array.astype(np.float64) if array.dtype.kind != "c" and exact else array
        axes = [axis for axis, n in enumerate(array.shape) if n != 1]
        varying = [v for v, axis in zip(variables, axes, strict=True) if np.any(numbers != numbers.take([0], axis))]
        if not varying and exact:
            return Form(groups, number(float(numbers.flat[0])))
        for v, axis in zip(reversed(variables), reversed(axes), strict=True):
            if v not in varying:
                numbers = numbers.take([0], axis)
        numbers = numbers.reshape([n for n in numbers.shape if n != 1])
        if numbers.ndim == 1 and exact:
            with np.errstate(over="ignore"):
                steps = np.diff(numbers)
            index = self.algebra.var(varying[0])
            if np.all(steps == steps[0]) and _are_numbers(steps[:1]) and not boolean:
                return Form(groups, index.scaled(float(steps[0])) + number(float(numbers[0])))
            if array.dtype.kind in "iu" and steps.max() > 0 and np.all((steps == 0) | (steps == steps.max())):
                rises = np.flatnonzero(steps)
                if len(rises) <= _STEPS:
                    past = [UNIT - self.algebra.less_than_zero(index - number(int(k) + 1)) for k in rises]
                    return Form(groups, sum(past, ZERO).scaled(float(steps.max())) + number(float(numbers[0])))
            if boolean and numbers.sum() == 1:
                return Form(groups, self.algebra.equal_zero(index - number(float(numbers.argmax()))))
        if (
            exact
            and numbers.ndim == 2
            and len(set(numbers.shape)) == 1
            and np.all(numbers == numbers[0, 0] * np.eye(len(numbers)))
        ):
            row, column = (self.algebra.var(v) for v in varying)
            return Form(groups, self.algebra.equal_zero(column - row).scaled(float(numbers[0, 0])))
        if numbers.ndim == 2 and (blocks := self._blocks(numbers, varying)) is not None:
            return Form(groups, blocks)
        name, factor = self._constant_name(numbers, array.dtype)
        return Form(groups, self.algebra.tensor(name, [self.algebra.var(v) for v in varying], boolean).scaled(factor))

    def _constant_name(self, numbers: Array, dtype: np.dtype[Any]) -> tuple[object, float]:
        """A name for numbers of a type, or for what they are a multiple of but for rounding, and the factor.

        Exporters multiply constants ahead of time, such as the weights of classes by a factor of the loss.
        """
        digest = hashlib.sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest()[:16]
        name = ("constant", numbers.shape, digest)
        if dtype.kind in "iu":
            self._ranges[name] = (float(numbers.min()), float(numbers.max()))
        floats = dtype.kind == "f" or dtype == ml_dtypes.bfloat16
        if not floats or numbers.size > _ALIKE_LIMIT or not np.all(np.isfinite(numbers)):
            return name, 1.0
        alike = self._alike_constants.setdefault(numbers.shape, [])
        largest = np.abs(numbers).argmax()
        for first, other in alike:
            factor = float(numbers.flat[largest] / other.flat[largest]) if other.flat[largest] else 0.0
            if factor and np.allclose(numbers, factor * other, rtol=4 * _epsilon(dtype), atol=0):
                return first, factor
        alike.append((name, numbers))
        return name, 1.0

    def _blocks(self, numbers: Array, variables: Sequence[int]) -> Poly | None:
        """A few rows (or columns) of zeros with one run of ones in each, by conditions; None for other matrices."""
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

    def _named(self, name: object, groups: tuple[Group, ...], value: ir.Value) -> Form:
        count = sum(len(group) for group in groups)
        indices = [self.algebra.var(v) for v in range(count)]
        # An equal computation goes by the name of the first one.
        first = self._names.setdefault((name, groups), str(value.name))
        kinds = (value.dtype == ir.DataType.BOOL, value.dtype in _INTEGERS)
        return Form(groups, self.algebra.tensor(first, indices, *kinds))

    # Dimensions

    def _merge_dims(self, graph: ir.Graph) -> None:
        """Symbols that are proved to be equal get one name, before any form is made.

        They are where an operation would fail otherwise, and where it gives its result the size of its operand.
        Operands of an elementwise operation prove nothing: where one of them has size 1 it is repeated.
        """
        inputs = [(v, axis) for v in graph.inputs for axis in range(rank_of(v))]
        taken = {name for v, axis in inputs if (name := symbol(v, axis)) is not None}
        sizes = Sizes(self._dim_name)
        for node in live(graph):
            for names in sizes.read(node):
                self._merge(names)
            for value in node.outputs:
                # What an exporter calls a dimension here is another word for it, unless it is the word for an input's.
                for axis, size in enumerate(sizes.of(value) or ()):
                    word = symbol(value, axis) if axis < rank_of(value) else None
                    if isinstance(size, str) and word is not None and word not in taken:
                        self._merge({size, word})
        self._taken = {self._dim_name(name) for name in taken}

    def _merge(self, names: Collection[str]) -> None:
        # Names of the model's own come before invented ones and those of nameless dimensions.
        first, *others = sorted({self._dim_name(n) for n in names}, key=lambda n: (n[0] == "?", n in self._invented, n))
        for other in others:
            self._dims[other] = first

    def _require_sizes(self, graph: ir.Graph) -> bool:
        """Note the sizes that losses demand of their labels; whether there is one that is not known by its name.

        Tokens of sequences are the rows of a reshape: their number is a product, and whatever an exporter calls it.
        """
        found = False
        for node in graph:
            scores, labels = (*node.inputs, None, None)[:2]
            if scores is None or labels is None or node.op_type not in LOSSES or labels.producer() is not None:
                continue
            form, own = self.get(scores), self.get(labels)
            if form is None or own is None or len(form.groups) != len(own.groups) + 1:
                continue
            groups = (form.groups[0], *form.groups[2:])
            for axis, (wanted, given) in enumerate(
                zip(map(self.extent, groups), map(self.extent, own.groups), strict=True)
            ):
                name = symbol(labels, axis)
                if wanted == given or name is None:
                    continue
                found = True
                name = self._dim_name(name)
                others = [wanted, *self._resolved.values()]
                if (
                    name.startswith("?")
                    or self._resolved.keys() & self._dims_in([wanted])
                    or name in self._dims_in(others)
                ):
                    # No name, or one for a number and its multiple: exporters call rows "batch", too.
                    self._required[labels, axis] = wanted
                else:
                    self._resolved[name] = wanted
        return found

    def _dims_in(self, sizes: Iterable[Poly]) -> frozenset[str]:
        atoms = (self.algebra.atoms[a] for size in sizes for m in size.terms for a, _ in m)
        return frozenset(str(atom.args[0]) for atom in atoms if atom.kind == "dim")

    def _dim_name(self, name: str) -> str:
        while name in self._dims:
            name = self._dims[name]
        return name

    def size(self, dim: int | ir.SymbolicDim, fallback: str) -> Poly:
        if isinstance(dim, int):
            return number(dim)
        return self._size_of_text(fallback if dim.value is None else str(dim.value))

    def _size_of_text(self, text: str) -> Poly:
        known = self._sizes.get(text)
        if known is None:
            try:
                known = self._size_of_tree(ast.parse(text.strip(), mode="eval").body)
            except (SyntaxError, ValueError, ArithmeticError, TooComplex, RecursionError, MemoryError):
                # The last two are what Python makes of an expression that is nested too deeply.
                known = self._size_of_name(text)
            self._sizes[text] = known
        return known

    def _size_of_name(self, name: str) -> Poly:
        name = self._dim_name(name)
        if name in self._resolved:
            return self._resolved[name]
        self._taken.add(name)
        return self.algebra.dim(name)

    def _size_of_tree(self, tree: ast.expr) -> Poly:
        match tree:
            case ast.Constant(value=int(n)):
                return number(n)
            case ast.Name(id=name):
                return self._size_of_name(name)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._size_of_tree(left), self._size_of_tree(right)
                if isinstance(op, ast.Add):
                    return a + b
                if isinstance(op, ast.Sub):
                    return a - b
                if isinstance(op, ast.Mult):
                    return self.algebra.mul(a, b)
        raise ValueError

    def _resolve(self, value: ir.Value, form: Form) -> None:
        """Notes what dimensions of a value are by its form, where the model calls them by words of their own."""
        for axis in range(len(form.groups)):
            name = symbol(value, axis)
            if name is None or (name := self._dim_name(name)) in self._taken or name in self._resolved:
                continue
            size = self.extent(form.groups[axis])
            if size != self.algebra.dim(name):
                self._resolved[name] = size
                self._sizes.clear()

    def groups_of(self, value: ir.Value) -> tuple[Group, ...]:
        """One variable per dimension of the value's own shape."""
        if value.shape is None:
            raise Unreadable(value.name)
        sizes = [self._required.get((value, k)) or self.size(d, nameless(value, k)) for k, d in enumerate(value.shape)]
        return tuple(() if s.constant == 1 else (s,) for s in sizes)

    def extent(self, group: Group) -> Poly:
        return group[0] if len(group) == 1 else self.algebra.product(group)

    def bounds(self, form: Form) -> tuple[Poly, Poly] | None:
        """The least and the greatest element of what is made of positions, conditions and constants; None for data."""
        algebra, sizes = self.algebra, form.sizes
        ends = [ZERO, ZERO]
        for m, c in form.poly.terms.items():
            low, high = ZERO, UNIT
            own = [self.algebra.atoms[a] for a, _ in m]
            if len(own) == 1 and m[0][1] == 1 and own[0].kind == "var":
                high = sizes[own[0].args[0]] - UNIT
            elif len(own) == 1 and m[0][1] == 1 and own[0].kind == "tensor" and own[0].args[0] in self._ranges:
                low, high = (number(x) for x in self._ranges[own[0].args[0]])
            elif all(atom.kind == "dim" for atom in own):
                low = high = Poly({m: 1.0})
            elif algebra.tensors(form.poly) or not all(atom.indicator for atom in own):
                return None
            for k, end in enumerate((low, high) if c > 0 else (high, low)):
                ends[k] = ends[k] + end.scaled(c)
        return ends[0], ends[1]

    # Layouts

    def refine(
        self, a: Sequence[Poly], b: Sequence[Poly], reshaped: bool = False
    ) -> tuple[list[Poly], list[list[int]], list[list[int]]]:
        """The coarsest variables of which both lists of sizes are made, and the pieces of each of their members.

        `reshaped` says that a node of the graph makes one layout of the other, so that their products are equal: two
        sizes that are left over beside equal ones are equal as well.
        """
        if len(a) == len(b) and all(s == t for s, t in zip(a, b, strict=True)):
            return list(a), [[k] for k in range(len(a))], [[k] for k in range(len(a))]
        common: list[Poly] = []
        left, right = list(a), list(b)
        pieces: tuple[list[list[int]], list[list[int]]] = ([[] for _ in a], [[] for _ in b])
        while left and right:
            s, t = left[-1], right[-1]
            k = len(common)
            pieces[0][len(left) - 1].append(k)
            pieces[1][len(right) - 1].append(k)
            if s == t or (reshaped and self._must_be_equal(left, right)):
                common.append(s)
                left.pop()
                right.pop()
            elif (q := self._quotient(s, t)) is not None:
                common.append(t)
                left[-1] = q
                right.pop()
            elif (q := self._quotient(t, s)) is not None:
                common.append(s)
                right[-1] = q
                left.pop()
            else:
                raise Opaque("layouts do not align")
        if left or right:
            raise Opaque("layouts do not align")
        last = len(common) - 1
        flipped = [[[last - k for k in reversed(p)] for p in side] for side in pieces]
        return common[::-1], flipped[0], flipped[1]

    def _must_be_equal(self, a: Sequence[Poly], b: Sequence[Poly]) -> bool:
        """Whether the last members are equal because the others are, and the products of all."""
        return len(a) == len(b) and all(s == t for s, t in zip(a[:-1], b[:-1], strict=True))

    def _quotient(self, a: Poly, b: Poly) -> Poly | None:
        q = self.algebra.ratio(a, b)
        if q is None or any(c != int(c) for c in q.terms.values()):
            return None
        return None if any(e < 0 for m in q.terms for _, e in m) else q

    def assembled(self, pieces: Sequence[int], sizes: Sequence[Poly]) -> Poly:
        """The index that the pieces (outermost first) make up."""
        return self._index(pieces, sizes, 0)

    def regrouped(self, form: Form, sizes: Sequence[Poly], reshaped: bool = False) -> Form:
        """The form in dimensions of these sizes, row-major; `reshaped` as for `refine`."""
        wanted = [s for s in sizes if s.constant != 1]
        own_sizes = form.sizes
        if list(own_sizes) == wanted:
            return Form(tuple(() if s.constant == 1 else (s,) for s in sizes), form.poly)
        common, own, new = self.refine(own_sizes, wanted, reshaped)
        poly = self.algebra.substitute(form.poly, {v: self.assembled(p, common) for v, p in enumerate(own)})
        parts = iter(new)
        groups = tuple(() if s.constant == 1 else tuple(common[k] for k in next(parts)) for s in sizes)
        return Form(groups, poly)

    def broadcast(self, forms: Sequence[Form]) -> tuple[tuple[Group, ...], list[Poly]]:
        """The forms by the variables of the shape that they broadcast to (NumPy's rules).

        Of sizes that nothing proves equal, one may be 1 at run time: the index of what is then repeated is 0.
        """
        rank = max(len(f.groups) for f in forms)
        names: list[dict[int, Poly]] = [{} for _ in forms]
        groups: list[Group] = []
        start = 0
        for axis in range(rank):
            present = [(n, f, axis - rank + len(f.groups)) for n, f in enumerate(forms)]
            present = [(n, f, k) for n, f, k in present if k >= 0 and f.groups[k]]
            common: Group = ()
            for _, f, k in present:
                common = self._joined(common, f.groups[k])
            for n, f, k in present:
                names[n] |= self._placed(f, k, common, start)
            groups.append(common)
            start += len(common)
        return tuple(groups), [self.algebra.substitute(f.poly, m) for f, m in zip(forms, names, strict=True)]

    def repeated(self, form: Form, sizes: Sequence[Poly]) -> Poly | None:
        """An element of the form, its variables repeated to these sizes; None where that takes more than one way."""
        if len(form.sizes) != len(sizes):
            return None
        names: dict[int, Poly] = {}
        for v, (own, size) in enumerate(zip(form.sizes, sizes, strict=True)):
            if own != size:
                if not set(self.algebra.parts(own)) < set(self.algebra.parts(size)):
                    return None
                names[v] = self.algebra.mul(self.algebra.wide(own), self.algebra.var(v))
        return self.algebra.substitute(form.poly, names)

    def _joined(self, a: Group, b: Group) -> Group:
        """The variables of a dimension that two broadcast to."""
        if not a:
            return b
        try:
            return tuple(self.refine(a, b)[0])
        except Opaque:
            if self._is_cut(a, b):
                return b
            if self._is_cut(b, a):
                return a
            s, t = self.extent(a), self.extent(b)
            size = self.algebra.broadcast_size(s, t)
            if None not in (s.constant, t.constant) or (len(a) > 1 and size != s) or (len(b) > 1 and size != t):
                raise
            return a if size == s else b if size == t else (size,)

    def cut(self, size: Poly, end: Poly) -> None:
        """Say that a size is that of elements 0, 1, ... of a dimension of more than one, ahead of an end.

        It is the end, or less, and 1 only where the end is. Beside a dimension of the size of the end it is the end, or
        the two would not broadcast.
        """
        for name in self._dims_in([size]):
            if size == self.algebra.dim(name) and name not in self._dims_in([end]):
                self._cuts[name] = end

    def _is_cut(self, a: Group, b: Group) -> bool:
        if len(a) != 1 or not b:
            return False
        for name in self._dims_in(a):
            if a[0] == self.algebra.dim(name) and self._cuts.get(name) == self.extent(b):
                if self._met is not None and self._reads_live:
                    self._met[name] = self.extent(b)
                return True
        return False

    def _placed(self, form: Form, axis: int, common: Group, start: int) -> dict[int, Poly]:
        """The variables of a dimension by those of the one that it is broadcast to, which begin at `start`."""
        group, variables = form.groups[axis], form.variables(axis)
        try:
            _, own, _ = self.refine(group, common)
        except Opaque:
            if len(group) > 1:
                raise
            index = self._index(range(len(common)), common, start)
            if self._is_cut(group, common):
                return {variables[0]: index}
            return {variables[0]: self.algebra.mul(self.algebra.wide(group[0]), index)}
        return {v: self._index(pieces, common, start) for v, pieces in zip(variables, own, strict=True)}

    def _index(self, pieces: Sequence[int], sizes: Sequence[Poly], start: int) -> Poly:
        index, stride = ZERO, UNIT
        for piece in reversed(pieces):
            index = index + self.algebra.mul(stride, self.algebra.var(start + piece))
            stride = self.algebra.mul(stride, sizes[piece])
        return index

    def moved(self, form: Form, order: Sequence[int | None]) -> Form:
        """Dimensions permuted, dropped (they must have size 1) and put in (None, of size 1)."""
        names: dict[int, Poly] = {}
        groups: list[Group] = []
        start = 0
        for axis in order:
            group: Group = () if axis is None else form.groups[axis]
            if axis is not None:
                for k, v in enumerate(form.variables(axis)):
                    names[v] = self.algebra.var(start + k)
            groups.append(group)
            start += len(group)
        return Form(tuple(groups), self.algebra.substitute(form.poly, names))

    # Reading nodes

    def _read(self, node: ir.Node) -> None:
        forms = self._expressed(node)
        for k, value in enumerate(node.outputs):
            form = forms[k] if k < len(forms) else None
            try:
                if value.dtype in _INTEGERS and value.shape is not None and len(value.shape) <= 1:
                    vector = self.vector(value)
                    if vector is not None and len(vector) == 1:
                        form = Form(((),) * len(value.shape), vector[0])
                if form is None:
                    form = self._opaque(node, k)
                    self.opaque.add(value)
                elif value in self._row_operands:
                    self.opaque.add(value)
                    form = self._named(("operand", form), self._simple_groups(form), value)
            except (Unreadable, TooComplex):
                form = None
            if form is not None and value not in self.opaque and rank_of(value) == len(form.groups):
                self._resolve(value, form)
            # Tensors that are always empty are left alone: there is nothing to gain, and size 0 is no size 1.
            self._forms[value] = None if form is None or any(s.constant == 0 for s in form.sizes) else form

    def _expressed(self, node: ir.Node) -> list[Form | None]:
        """The forms of a node's outputs by the reader of its operation; None for what is to be named instead.

        Where an equal node was read before, on other tensors, these are its forms with the tensors renamed.
        """
        reader = _READERS.get((node.domain, node.op_type))
        # What a function is called with, its body does not know.
        if reader is None or any(attr.is_ref() for attr in node.attributes.values()):
            return [None] * len(node.outputs)
        alike = self._alike(node)
        if alike is not None and (example := self._examples.get(alike[0])) is not None:
            renaming = Renaming(self.algebra, dict(zip(example[0], alike[1], strict=True)))
            with contextlib.suppress(Reordered):
                return [None if f is None else Form(f.groups, renaming.poly(f.poly)) for f in example[1]]
        forms: list[Form | None]
        try:
            result = reader(self, node)
            forms = [result] if isinstance(result, Form) else list(result)
        except (Opaque, TooComplex, Unreadable):
            forms = [None] * len(node.outputs)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            # A node that breaks its operator's schema: what it means is not for us to say.
            forms = [None] * len(node.outputs)
        if alike is not None and not any(self.algebra.tensors(s) for f in forms if f is not None for s in f.sizes):
            self._examples[alike[0]] = (alike[1], forms)
        return forms

    def why_opaque(self, node: ir.Node) -> str | None:
        """The reason why a node that has a reader is not expressed; None where it is, or where there is no reader."""
        reader = _READERS.get((node.domain, node.op_type))
        try:
            if reader is not None:
                reader(self, node)
        except Unreadable as unknown:
            return f"the shape of {unknown} is unknown"
        except (Opaque, TooComplex) as reason:
            return str(reason)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return "it is not as the operator wants it"
        return None

    def _alike(self, node: ir.Node) -> tuple[object, tuple[object, ...]] | None:
        """What nodes have in common of which readers say the same, up to the names of tensors; and these names.

        None for a node whose reader may look further than at operands, attributes and types.
        """
        axes = node.inputs[1] if node.op_type.startswith("Reduce") and len(node.inputs) > 1 else None
        if not node.inputs or (axes is not None and self.constant(axes) is None):
            return None
        places: dict[object, int] = {}
        operands = [None if value is None else self._operand(value, places) for value in node.inputs]
        ends = node.inputs[2] if node.op_type == "Slice" and len(node.inputs) > 2 else None
        if any(size.integer is None for size in self.vector(ends) or ()):
            return None
        if node.op_type in _ASK_FOR_SHAPE or (node.op_type in _FOLLOW_SHAPE and self.vector(node.inputs[-1]) is None):
            return None
        if any(isinstance(tensor, Positions) for tensor in places):
            return None  # whose name holds what they are the positions of
        types = tuple([value.dtype for value in node.outputs])
        key = (node.domain, node.op_type, _attributes_key(node), tuple(operands), types)
        return key, tuple(places)

    def _operand(self, value: ir.Value, places: dict[object, int]) -> tuple[object, ...]:
        """All that a reader may ask of an operand, with its tensors numbered as they come."""
        form, array = self.get(value), self.constant(value)
        content: object = None
        if array is not None:
            # Readers want the numbers of axes, sizes and the like; others are in the form as far as they matter.
            if array.size <= _VECTOR_LIMIT:
                content = (array.dtype, array.shape, array.tobytes())
            elif array.dtype.kind in "iu":
                content = hashlib.sha256(array.tobytes()).digest()
        elif value.dtype not in FLOATS and (vector := self.vector(value)) is not None:
            content = tuple(vector)
        if form is None:
            return value.dtype, content
        number, tensors = self.algebra.pattern(form.poly)
        return value.dtype, content, form.groups, number, *[places.setdefault(t, len(places)) for t in tensors]

    def _simple_groups(self, form: Form) -> tuple[Group, ...]:
        return tuple((self.extent(g),) if g else () for g in form.groups)

    def _opaque(self, node: ir.Node, output: int) -> Form:
        value = node.outputs[output]
        constant = self.constant(value)
        if constant is not None:
            return self._constant_form(constant)
        name: object = ("value", value.name)
        if node.op_type not in _RANDOM and not any(a.type in _GRAPHS for a in node.attributes.values()):
            try:
                operands = tuple(None if v is None else self.form(v) for v in node.inputs)
                name = (node.domain, node.op_type, _attributes_key(node), operands, output)
            except Unreadable:
                pass
        return self._named(name, self._opaque_groups(node, output), value)

    def _opaque_groups(self, node: ir.Node, output: int) -> tuple[Group, ...]:
        """The dimensions of a named value: those that follow from its operands before those that the model states."""
        if not node.domain and (output == 0 or node.op_type == "Dropout"):
            with contextlib.suppress(Opaque, Unreadable, TooComplex, LookupError, TypeError, ValueError):
                groups = self._following_groups(node)
                if groups is not None:
                    return groups
        return self.groups_of(node.outputs[output])

    def _following_groups(self, node: ir.Node) -> tuple[Group, ...] | None:
        """The dimensions that an operator gives its output by those of its inputs."""
        if node.op_type in SAME_SHAPE:
            return self._simple_groups(self.form(given(node.inputs, 0)))
        if node.op_type in ELEMENTWISE or node.op_type == "MatMul":
            shapes = [Form(self._simple_groups(f), ZERO) for f in inputs_of(self, node)]
            if node.op_type in ELEMENTWISE:
                return self._simple_groups(Form(self.broadcast(shapes)[0], ZERO))
            if all(len(f.groups) > 1 for f in shapes):
                batch, _ = self.broadcast([Form(f.groups[:-2], ZERO) for f in shapes])
                return (*batch, shapes[0].groups[-2], shapes[1].groups[-1])
        elif node.op_type == "Gemm":
            a, b = (self._simple_groups(self.form(given(node.inputs, k))) for k in range(2))
            return (a[1 if attribute(node, "transA", 0) else 0], b[0 if attribute(node, "transB", 0) else 1])
        elif node.op_type in _REDUCTIONS:
            x = Form(self._simple_groups(self.form(given(node.inputs, 0))), ZERO)
            _, order = _reduced(self, node, x)
            return tuple(() if a is None else x.groups[a] for a in order)
        elif node.op_type == "Reshape":
            target = self.vector(node.inputs[1])
            if target is not None and not any(s.integer is not None and s.integer < 1 for s in target):
                return tuple(() if s == UNIT else (s,) for s in target)
        return None

    # Shape arithmetic

    def vector(self, value: ir.Value | None) -> list[Poly] | None:
        """The elements of an integer tensor of rank 0 or 1 as functions of dimensions; None where they are not."""
        if value is None:
            return None
        if value not in self._vectors:
            try:
                self._vectors[value] = self._read_vector(value)
            except (Opaque, TooComplex, Unreadable, ArithmeticError, LookupError, TypeError, ValueError):
                self._vectors[value] = None
        return self._vectors[value]

    def _read_vector(self, value: ir.Value) -> list[Poly] | None:
        array = self.constant(value)
        if array is not None:
            if array.ndim > 1 or array.size > _VECTOR_LIMIT or array.dtype.kind not in "iu":
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
                sizes = [self.extent(g) for g in self.form(given(inputs, 0)).groups]
                return sizes[slice(attribute(node, "start", 0), attribute(node, "end", None))]
            case "Size":
                return [self.extent(self.form(given(inputs, 0)).sizes)]
            case "Identity" | "Squeeze" | "Unsqueeze" | "Reshape" | "Cast" | "Flatten":
                return self.vector(inputs[0]) if value.shape is None or len(value.shape) <= 1 else None
            case "Concat" | "ConcatTraining":
                parts = [self.vector(v) for v in inputs]
                return None if any(p is None for p in parts) else [x for p in parts if p is not None for x in p]
            case "Gather":
                data, index = self.vector(inputs[0]), self.vector(inputs[1])
                if data is None or index is None:
                    return None
                return [data[k] for x in index if (k := x.integer) is not None]
            case "Slice":
                data = self.vector(inputs[0])
                ends = [self.vector(v) for v in inputs[1:3]]
                step = self.vector(inputs[4]) if len(inputs) > 4 else [UNIT]
                if data is None or step is None or any(e is None or len(e) != 1 for e in ends):
                    return None
                start, stop = (e[0].integer for e in ends if e is not None)
                if start is None or stop is None:
                    return None
                return data[start : stop : step[0].integer]
            case "Add" | "Sub" | "Mul" | "Div":
                pair = [self.vector(v) for v in inputs]
                if pair[0] is None or pair[1] is None:
                    return None
                count = max(len(pair[0]), len(pair[1]))
                left, right = (p * count if len(p) == 1 else p for p in (pair[0], pair[1]))
                if len(left) != len(right):
                    return None
                return [self._vector_arithmetic(node.op_type, a, b) for a, b in zip(left, right, strict=True)]
            case "ReduceProd":
                data = self.vector(inputs[0])
                return None if data is None else [self.algebra.product(data)]
            case _:
                return None

    def _vector_arithmetic(self, op: str, a: Poly, b: Poly) -> Poly:
        match op:
            case "Add":
                return a + b
            case "Sub":
                return a - b
            case "Mul":
                return self.algebra.mul(a, b)
            case _:
                quotient = self._quotient(a, b)
                if quotient is None:
                    raise Opaque("division of dimensions")
                return quotient

    def axes(self, node: ir.Node, position: int, rank: int) -> list[int] | None:
        """The axes of a node, from the input at the position or the attribute; None where it has none."""
        given: Iterable[int]
        if len(node.inputs) > position and node.inputs[position] is not None:
            array = self.constant(node.inputs[position])
            if array is None:
                raise Opaque("axes are not constant")
            given = (int(x) for x in array.ravel())
        elif "axes" in node.attributes:
            given = node.attributes["axes"].as_ints()
        else:
            return None
        return sorted(a % rank for a in given)


def given(inputs: Sequence[ir.Value | None], k: int) -> ir.Value:
    value = inputs[k] if k < len(inputs) else None
    if value is None:
        raise Opaque("an input is absent")
    return value


def _through_casts(value: ir.Value) -> ir.Value:
    """The first value of the chain of Identity and Cast between floats that ends here."""
    while (node := value.producer()) is not None and node.domain == "" and node.op_type in ("Identity", "Cast"):
        source = node.inputs[0]
        if source is None or (node.op_type == "Cast" and not (is_float(value) and is_float(source))):
            break
        value = source
    return value


_ASK_FOR_SHAPE = {"Range", "NonZero", "GatherElementsGrad", "GatherGrad", "GatherNDGrad", "SliceGrad", "SplitTraining"}
"""Operations whose readers look at the shapes of a node's outputs."""
_FOLLOW_SHAPE = {"Reshape", "Expand", "ConstantOfShape"}
"""Those whose readers do where nothing is known of the last operand."""
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _attributes_key(node: ir.Node) -> tuple[object, ...]:
    return tuple(sorted([(n, _attribute_key(a)) for n, a in node.attributes.items()]))


def _attribute_key(attr: ir.Attr) -> object:
    value = attr.value
    if attr.type == ir.AttributeType.TENSOR and value is not None:
        array = np.asarray(value.numpy())
        return (str(array.dtype), array.shape, array.tobytes())
    return tuple(value) if isinstance(value, (list, tuple)) else value


# One reader per operation. A reader gives the forms of a node's outputs; where it raises Opaque they are named instead.

Reader = Callable[[Forms, ir.Node], "Form | Sequence[Form | None]"]
_READERS: dict[tuple[str, str], Reader] = {}


def reads(*ops: str, domain: str = "") -> Callable[[Reader], Reader]:
    def add(reader: Reader) -> Reader:
        for op in ops:
            _READERS[domain, op] = reader
        return reader

    return add


def has_reader(node: ir.Node) -> bool:
    """Whether a rule reads the operation."""
    return (node.domain, node.op_type) in _READERS


def inputs_of(forms: Forms, node: ir.Node) -> list[Form]:
    return [forms.form(given(node.inputs, k)) for k in range(len(node.inputs))]


@reads("Identity")
def _identity(forms: Forms, node: ir.Node) -> Form:
    return forms.form(given(node.inputs, 0))


@reads("Cast", "CastLike")
def _cast(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    source = given(node.inputs, 0)
    form = forms.form(source)
    to = ir.DataType(node.attributes["to"].as_int()) if node.op_type == "Cast" else given(node.inputs, 1).dtype
    if to is None or source.dtype is None:
        raise Opaque("unknown type")
    if source.dtype == ir.DataType.BOOL or (to == ir.DataType.BOOL and algebra.is_boolean(form.poly)):
        return form
    if to == ir.DataType.BOOL:
        return Form(form.groups, UNIT - algebra.equal_zero(form.poly))
    if to in FLOATS:
        counts = algebra.has_variable_factor(form.poly) or algebra.tensors(form.poly)
        if source.dtype not in FLOATS and to in _HALF and counts and not algebra.is_boolean(form.poly):
            raise Opaque("integers that 16 bits round")
        return form
    if source.dtype in FLOATS:
        if algebra.is_count(form.poly):
            return form
        raise Opaque("a cast that rounds")
    if to not in _INTEGERS or (to == ir.DataType.INT32 and any(abs(c) >= 1 << 31 for c in form.poly.terms.values())):
        raise Opaque("a cast that wraps around")
    return form


@reads("Add", "Sum")
def _add(forms: Forms, node: ir.Node) -> Form:
    groups, polys = forms.broadcast(inputs_of(forms, node))
    return Form(groups, sum(polys[1:], polys[0]))


@reads("Mean")
def _mean(forms: Forms, node: ir.Node) -> Form:
    groups, polys = forms.broadcast(inputs_of(forms, node))
    return Form(groups, sum(polys[1:], polys[0]).scaled(1 / len(polys)))


@reads("Sub")
def _sub(forms: Forms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, a - b)


@reads("Mul")
def _mul(forms: Forms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, forms.algebra.mul(a, b))


@reads("Div")
def _div(forms: Forms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    if node.outputs[0].dtype not in FLOATS:
        quotient = forms._quotient(a, b)
        if quotient is None:
            raise Opaque("integer division")
        return Form(groups, quotient)
    return Form(groups, forms.algebra.mul(a, forms.algebra.power(b, -1)))


@reads("Neg")
def _neg(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return Form(x.groups, -x.poly)


@reads("Reciprocal")
def _reciprocal(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return Form(x.groups, forms.algebra.power(x.poly, -1))


@reads("Sqrt")
def _sqrt(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return Form(x.groups, forms.algebra.exponentiate(x.poly, 0.5))


@reads("Pow")
def _pow(forms: Forms, node: ir.Node) -> Form:
    groups, (base, exponent) = forms.broadcast(inputs_of(forms, node))
    if exponent.constant is None:
        raise Opaque("an exponent that is no constant")
    if not is_float(node.outputs[0]) and (exponent.integer is None or exponent.integer < 0):
        raise Opaque("a power of integers is rounded")
    return Form(groups, forms.algebra.exponentiate(base, exponent.constant))


@reads("Exp")
def _exp(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return Form(x.groups, forms.algebra.exp(x.poly))


@reads("Log")
def _log(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return Form(x.groups, forms.algebra.log(x.poly))


def _row_sum_of_exp(forms: Forms, x: Form, axes: Sequence[int]) -> tuple[Poly, Poly]:
    e = forms.algebra.exp(x.poly)
    sizes = x.sizes
    variables = {v: sizes[v] for axis in axes for v in x.variables(axis)}
    return e, forms.algebra.sum(e, variables, dict(enumerate(sizes)))


@reads("Softmax")
def _softmax(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    e, total = _row_sum_of_exp(forms, x, [attribute(node, "axis", -1) % len(x.groups)])
    return Form(x.groups, forms.algebra.mul(e, forms.algebra.power(total, -1)))


@reads("LogSoftmax")
def _log_softmax(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return log_softmax(forms, x, attribute(node, "axis", -1) % len(x.groups))


def log_softmax(forms: Forms, x: Form, axis: int) -> Form:
    """The logarithm of the softmax of a form along an axis."""
    _, total = _row_sum_of_exp(forms, x, [axis])
    return Form(x.groups, x.poly - forms.algebra.log(total))


@reads("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy_loss(forms: Forms, node: ir.Node) -> list[Form | None]:
    return [None, log_softmax(forms, forms.form(given(node.inputs, 0)), 1)]


def _reduced(forms: Forms, node: ir.Node, x: Form) -> tuple[list[int], list[int | None]]:
    """The axes of a reduction, and the order of the dimensions that are left."""
    rank = len(x.groups)
    keep = bool(attribute(node, "keepdims", 1))
    tested = axes_of_size_one(forms, node.inputs[1]) if len(node.inputs) > 1 else None
    if tested is not None and keep and attribute(node, "noop_with_empty_axes", 0):
        # Where the size that is tested is the dimension's own, there is nothing to sum either way.
        if any(s != forms.extent(x.groups[a]) for a, s in enumerate(tested) if s.integer is None):
            raise Opaque("axes are not constant")
        axes = [a for a, s in enumerate(tested) if s.constant == 1]
    elif len(node.inputs) > 1 and (stretched := broadcast_axes(forms, node.inputs[1])) is not None:
        # Where the size is symbolic, and 1 in the end, there is nothing to sum either way.
        known = all(s is None or s.integer or s == forms.extent(x.groups[a]) for a, s in stretched.items())
        if not (keep and known and attribute(node, "noop_with_empty_axes", 0)):
            raise Opaque("axes are not constant")
        axes = list(stretched)
    else:
        everything = [] if attribute(node, "noop_with_empty_axes", 0) else list(range(rank))
        axes = forms.axes(node, 1, rank) or everything
    return axes, [None if a in axes else a for a in range(rank) if keep or a not in axes]


def axes_of_size_one(forms: Forms, value: ir.Value | None) -> list[Poly] | None:
    """The sizes of which those axes are taken that have size 1, as NonZero(Equal(sizes, 1)); None for other axes."""
    while value is not None and (node := value.producer()) is not None and node.domain == "":
        if node.op_type not in ("Squeeze", "Reshape", "Flatten", "Cast", "Identity", "NonZero", "Transpose"):
            break
        value = node.inputs[0]
        if node.op_type == "NonZero":
            equal = None if value is None else value.producer()
            if equal is None or equal.op_type != "Equal" or equal.domain:
                return None
            pair = [forms.vector(v) for v in equal.inputs]
            sizes = next((p for p, q in (pair, pair[::-1]) if q is not None and q == [UNIT]), None)
            return sizes
    return None


def is_broadcast_axes(node: ir.Node) -> bool:
    """Whether a node gives the axes that broadcasting two shapes stretches: onnxruntime-training's way to undo it."""
    return (node.domain, node.op_type) == ("com.microsoft", "BroadcastGradientArgs")


def broadcast_axes(forms: Forms, value: ir.Value | None) -> dict[int, Poly | None] | None:
    """The axes along which a shape is repeated to broadcast with another one, and the sizes that the other one has.

    The size is None where the shape has no such axis. An axis whose size is symbolic is one only if that is not 1.
    None for axes that come from elsewhere; raises Opaque where the sizes do not tell.
    """
    node = None if value is None else value.producer()
    if node is None or value is None or not is_broadcast_axes(node):
        return None
    own, other = (forms.vector(v) for v in (node.inputs if value is node.outputs[0] else reversed(node.inputs)))
    if own is None or other is None:
        raise Opaque("axes are not constant")
    rank = max(len(own), len(other))
    axes: dict[int, Poly | None] = {}
    for axis in range(rank):
        mine, theirs = (sizes[axis - rank] if axis >= rank - len(sizes) else None for sizes in (own, other))
        if mine is None:
            axes[axis] = None
        elif theirs is None or mine == theirs or theirs == UNIT or (mine.integer or 0) > 1:
            continue
        elif mine == UNIT:
            axes[axis] = theirs
        else:
            raise Opaque("a dimension may be repeated")
    return axes


@reads("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
def _reduce(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    x = forms.form(given(node.inputs, 0))
    if node.op_type not in ("ReduceSum", "ReduceSumSquare") and not is_float(given(node.inputs, 0)):
        raise Opaque("a mean, root or logarithm of integers is rounded")
    axes, order = _reduced(forms, node, x)
    sizes = x.sizes
    variables = {v: sizes[v] for axis in axes for v in x.variables(axis)}
    if node.op_type == "ReduceLogSumExp":
        poly = algebra.log(_row_sum_of_exp(forms, x, axes)[1])
    else:
        squares = node.op_type in ("ReduceSumSquare", "ReduceL2")
        poly = algebra.sum(algebra.mul(x.poly, x.poly) if squares else x.poly, variables, dict(enumerate(sizes)))
        if node.op_type == "ReduceMean":
            poly = algebra.mul(poly, algebra.power(algebra.product(variables.values()), -1))
        elif node.op_type == "ReduceL2":
            poly = algebra.exponentiate(poly, 0.5)
        elif node.op_type == "ReduceLogSum":
            poly = algebra.log(poly)
    groups = tuple(() if a in axes else g for a, g in enumerate(x.groups))
    left = {v: algebra.var(k) for k, v in enumerate(v for v in range(len(sizes)) if v not in variables)}
    return forms.moved(Form(groups, algebra.substitute(poly, left)), order)


@reads("CumSum")
def _cumsum(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    x, axis = forms.form(given(node.inputs, 0)), forms.constant(given(node.inputs, 1))
    if axis is None:
        raise Opaque("an axis that is not constant")
    variables = x.variables(int(axis.item()) % len(x.groups))
    strict = bool(attribute(node, "exclusive", 0))
    if len(variables) != 1:
        if variables or strict:
            raise Opaque("a sum along a composed dimension")
        return x
    sizes, v, w = dict(enumerate(x.sizes)), variables[0], -3_000_000
    ahead = algebra.var(w) - algebra.var(v) if attribute(node, "reverse", 0) else algebra.var(v) - algebra.var(w)
    counts = algebra.less_than_zero(-ahead) if strict else UNIT - algebra.less_than_zero(ahead)
    term = algebra.mul(counts, algebra.substitute(x.poly, {v: algebra.var(w)}))
    return Form(x.groups, algebra.sum(term, {w: sizes[v]}, sizes))


def _contracted(
    forms: Forms, operands: Sequence[Form], labels: Sequence[Sequence[object]], kept: Sequence[object]
) -> Form:
    """The sum of products of the operands, whose dimensions have labels, over the labels that are not kept.

    Raises Opaque for a product of two matrices, whose elements are no simpler as sums: read are rows times rows, outer
    products, sums by a mask or one-hot, and what has a diagonal in it.
    """
    algebra = forms.algebra
    order = [*kept, *dict.fromkeys(label for own in labels for label in own if label not in kept)]
    if any(len(set(own)) != len(own) for own in labels):
        raise Opaque("a diagonal")
    named = list(zip(operands, labels, strict=True))
    wide = [{label for label, group in zip(own, f.groups, strict=True) if group} for f, own in named]
    rows = all((a - b).isdisjoint(kept) or (b - a).isdisjoint(kept) for a in wide for b in wide)
    whole = all(own & set(kept) == wide[0] & set(kept) for own in wide)
    if not (whole or all(own <= set(kept) for own in wide) or any(_selects(algebra, f.poly, rows) for f in operands)):
        raise Opaque("a product of matrices")
    placed = [forms.moved(f, [own.index(label) if label in own else None for label in order]) for f, own in named]
    groups, polys = forms.broadcast(placed)
    joined = Form(groups, ZERO)
    sizes = dict(enumerate(joined.sizes))
    summed = {v: sizes[v] for axis in range(len(kept), len(order)) for v in joined.variables(axis)}
    return Form(groups[: len(kept)], algebra.sum(algebra.product(polys), summed, sizes))


def _selects(algebra: Algebra, poly: Poly, rows: bool) -> bool:
    """Whether a factor is made of conditions only; or, of a matrix times a row, has a diagonal."""
    atoms = [[algebra.atoms[a] for a, _ in monomial] for monomial in poly.terms]
    if all(atom.indicator or atom.kind == "dim" for own in atoms for atom in own):
        return True
    return rows and any(
        atom.kind == "eq" and all(algebra.atoms[a].kind == "var" for m in atom.args[0].terms for a, _ in m)
        for own in atoms
        for atom in own
    )


@reads("MatMul")
def _matmul(forms: Forms, node: ir.Node) -> Form:
    return multiplied(forms, inputs_of(forms, node))


def multiplied(forms: Forms, operands: Sequence[Form]) -> Form:
    """The product of two forms as matrices, or stacks of matrices."""
    labels: list[list[object]] = []
    for k, form in enumerate(operands):
        rank = len(form.groups)
        own: list[object] = ["k"] if rank == 1 else [("m", "k"), ("k", "n")][k]  # type: ignore[assignment]
        labels.append([*range(2 - rank, 0), *own])
    batch = range(min(2 - len(form.groups) for form in operands), 0)
    kept = [*batch, *(label for label in ("m", "n") if any(label in own for own in labels))]
    return _contracted(forms, operands, labels, kept)


@reads("Gemm")
def _gemm(forms: Forms, node: ir.Node) -> Form:
    if not is_float(given(node.inputs, 0)):
        raise Opaque("a factor of integers is rounded")
    operands = inputs_of(forms, node)
    labels = [
        ["k", "m"] if attribute(node, "transA", 0) else ["m", "k"],
        ["n", "k"] if attribute(node, "transB", 0) else ["k", "n"],
    ]
    product = _contracted(forms, operands[:2], labels, ["m", "n"])
    product = Form(product.groups, product.poly.scaled(attribute(node, "alpha", 1.0)))
    if len(operands) == 2:
        return product
    groups, (a, b) = forms.broadcast([product, operands[2]])
    return Form(groups, a + b.scaled(attribute(node, "beta", 1.0)))


@reads("Einsum")
def _einsum(forms: Forms, node: ir.Node) -> Form:
    operands = inputs_of(forms, node)
    left, arrow, right = attribute(node, "equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        names = left.replace(",", "").replace(".", "")
        right = ("..." if "." in left else "") + "".join(sorted(c for c in set(names) if names.count(c) == 1))
    if len(terms) != len(operands):
        raise Opaque("an equation for another number of operands")
    pairs = zip(operands, terms, strict=True)
    widths = [len(f.groups) - len(t.replace("...", "")) if "..." in t else 0 for f, t in pairs]
    labels = [_labels(term, width) for term, width in zip(terms, widths, strict=True)]
    return _contracted(forms, operands, labels, _labels(right, max(widths)))


def _labels(term: str, width: int) -> list[object]:
    """The labels of a term of an equation, the dimensions of an ellipsis counted from its end."""
    before, dots, after = term.partition("...")
    return [*before, *(range(-width, 0) if dots else ()), *after]


def _position(forms: Forms, form: Form, axis: int) -> Poly:
    """The index of an element along a dimension."""
    return forms.assembled(list(form.variables(axis)), form.sizes)


@reads("EyeLike")
def _eye_like(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    row, column = (_position(forms, x, axis) for axis in range(2))
    return Form(x.groups, forms.algebra.equal_zero(column - row - number(attribute(node, "k", 0))))


@reads("Trilu")
def _trilu(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    shift = forms.constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else np.asarray(0)
    if shift is None:
        raise Opaque("an unknown diagonal")
    row, column = (_position(forms, x, axis % len(x.groups)) for axis in (-2, -1))
    above = column - row - number(int(shift.item()))
    gone = forms.algebra.less_than_zero(above if attribute(node, "upper", 1) else -above)
    return Form(x.groups, forms.algebra.mul(UNIT - gone, x.poly))


# Views


@reads("Transpose")
def _transpose(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return forms.moved(x, attribute(node, "perm", range(len(x.groups))[::-1]))


@reads("Squeeze")
def _squeeze(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    rank = len(x.groups)
    axes = forms.axes(node, 1, rank)
    if axes is None:
        if any(s.constant is None for s in x.sizes):
            raise Opaque("which dimensions are squeezed depends on their sizes")
        axes = [a for a, g in enumerate(x.groups) if not g]
    if any(x.groups[a] for a in axes):
        raise Opaque("a squeezed dimension is symbolic")
    return forms.moved(x, [a for a in range(rank) if a not in axes])


@reads("Unsqueeze")
def _unsqueeze(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    axes = forms.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        raise Opaque("axes are not constant")
    rank = len(x.groups) + axes.size
    new = {int(a) % rank for a in axes.ravel()}
    old = iter(range(len(x.groups)))
    return forms.moved(x, [None if a in new else next(old) for a in range(rank)])


@reads("Reshape", "Flatten")
def _reshape(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    if node.op_type == "Flatten":
        axis = attribute(node, "axis", 1)
        axis = axis + len(x.groups) if axis < 0 else axis
        sizes = [forms.extent(tuple(s for g in part for s in g)) for part in (x.groups[:axis], x.groups[axis:])]
        return forms.regrouped(x, sizes)
    target = forms.vector(node.inputs[1])
    if target is None:
        target = [forms.extent(g) for g in forms.groups_of(node.outputs[0])]
    if not attribute(node, "allowzero", 0):
        target = [forms.extent(x.groups[k]) if s.constant == 0 else s for k, s in enumerate(target)]
    if any(s.constant == -1 for s in target):
        known = forms.algebra.product(s for s in target if s.constant != -1)
        rest = forms._quotient(forms.extent(x.sizes), known)
        if rest is None:
            raise Opaque("a dimension of a Reshape is unknown")
        target = [rest if s.constant == -1 else s for s in target]
    return forms.regrouped(x, target, reshaped=True)


@reads("Expand")
def _expand(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    target = forms.vector(node.inputs[1])
    if target is None:
        target = [forms.extent(g) for g in forms.groups_of(node.outputs[0])]
    shape = Form(tuple(() if s.constant == 1 else (s,) for s in target), ZERO)
    groups, (poly, _) = forms.broadcast([x, shape])
    return Form(groups, poly)


@reads("Tile")
def _tile(forms: Forms, node: ir.Node) -> Form:
    x, repeats = forms.form(given(node.inputs, 0)), forms.vector(node.inputs[1])
    if repeats is None or any(g and n.constant != 1 for g, n in zip(x.groups, repeats, strict=True)):
        raise Opaque("a repeated dimension")
    shape = Form(tuple(() if n.constant == 1 else (n,) for n in repeats), ZERO)
    groups, (poly, _) = forms.broadcast([x, shape])
    return Form(groups, poly)


@reads("ConstantOfShape")
def _constant_of_shape(forms: Forms, node: ir.Node) -> Form:
    target = forms.vector(node.inputs[0])
    groups = (
        tuple(() if s.constant == 1 else (s,) for s in target)
        if target is not None
        else forms.groups_of(node.outputs[0])
    )
    value = attribute(node, "value", None)
    fill = 0.0 if value is None else float(value.numpy().ravel()[0])
    if not math.isfinite(fill):
        raise Opaque("not finite")
    return Form(groups, number(fill))


@reads("Constant")
def _constant(forms: Forms, node: ir.Node) -> Form:
    array = forms.constant(node.outputs[0])
    if array is None:
        raise Opaque("a large constant")
    return forms._constant_form(array)


@reads("Range")
def _range(forms: Forms, node: ir.Node) -> Form:
    start, limit, step = (f.poly for f in inputs_of(forms, node))
    if step.constant is None:
        raise Opaque("an unknown step")
    size = forms._quotient(limit - start, step)
    if size is not None and size.constant is not None and size.constant <= 0:
        raise Opaque("an empty range")
    group = (size,) if size is not None else forms.groups_of(node.outputs[0])[0]
    if len(group) == 1 and group[0].constant == 1:
        return Form(((),), start)
    return Form((group,), start + forms.algebra.mul(step, forms.algebra.var(0)))


def sliced(forms: Forms, x: Form, axis: int, start: Poly, step: int, size: Poly) -> Form:
    """size elements from `start` on along an axis of one variable."""
    if len(x.groups[axis]) != 1:
        raise Opaque("a slice of a composed dimension")
    v = x.variables(axis)[0]
    index = start if size.constant == 1 else forms.algebra.var(v).scaled(step) + start
    names = {v: index}
    groups = tuple((() if size.constant == 1 else (size,)) if a == axis else g for a, g in enumerate(x.groups))
    if size.constant == 1:
        names |= {w: forms.algebra.var(w - 1) for w in range(v + 1, len(x.sizes))}
    return Form(groups, forms.algebra.substitute(x.poly, names))


def _slice_of_symbol(forms: Forms, size: Poly, start: int, end: int, step: int) -> tuple[Poly, Poly]:
    """Where a slice of a dimension that is not known begins, and how many elements it has."""
    if step < 1 or start < -1:
        raise Opaque("a slice from the end of a symbolic dimension")
    first = number(start) if start >= 0 else size - UNIT
    if step == 1 and start >= 0 and (end == _END or end < 0):
        rest = size - number(start) + number(0 if end == _END else end)
        # All but one element are as many where there is one.
        if start - (0 if end == _END else end) <= 1:
            return first, rest
    return first, forms.algebra.slice_size(size, start, end, step)


def _known_integers(forms: Forms, value: ir.Value) -> list[int]:
    """The elements of a constant, or of what the shapes of tensors say, where these are numbers."""
    found = [size.integer for size in _known_sizes(forms, value)]
    numbers = [n for n in found if n is not None]
    if len(numbers) < len(found):
        raise Opaque("a slice that is not constant")
    return numbers


def _known_sizes(forms: Forms, value: ir.Value) -> list[Poly]:
    array = forms.constant(value)
    found = forms.vector(value) if array is None else [number(int(n)) for n in array.ravel()]
    if found is None:
        raise Opaque("a slice that is not constant")
    return found


@reads("Slice")
def _slice(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    rank = len(x.groups)
    starts, ends = _known_integers(forms, given(node.inputs, 1)), _known_sizes(forms, given(node.inputs, 2))
    axes, steps = (None if v is None else _known_integers(forms, v) for v in (*node.inputs[3:], None, None)[:2])
    axes = list(range(len(starts))) if axes is None else [axis % rank for axis in axes]
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, limit, step in zip(axes, starts, ends, steps, strict=True):
        size = forms.extent(x.groups[axis])
        if limit.integer is None:
            if start != 0 or step != 1 or (limit != size and (size.integer or 0) < 2):
                raise Opaque("a slice that is not constant")
            if limit != size:
                count = forms.extent(forms.groups_of(node.outputs[0])[axis])
                x = sliced(forms, x, axis, ZERO, 1, count)
                forms.cut(count, limit)
            continue
        end = min(limit.integer, _END)
        if start == 0 and step == 1 and end == _END:
            continue
        total = size.integer
        if total is None:
            first, count = _slice_of_symbol(forms, size, start, end, step)
            # One that the exporter knows to be there is not repeated.
            stated = None if node.outputs[0].shape is None else node.outputs[0].shape[axis]
            x = sliced(forms, x, axis, first, step, UNIT if stated == 1 else count)
            continue
        span = range(total)[start:end:step]
        if span == range(total):
            continue
        if not len(span):
            raise Opaque("an empty slice")
        x = sliced(forms, x, axis, number(span[0]), span.step, number(len(span)))
    return x


@reads("Split")
def _split(forms: Forms, node: ir.Node) -> list[Form | None]:
    x = forms.form(given(node.inputs, 0))
    axis = attribute(node, "axis", 0) % len(x.groups)
    total = forms.extent(x.groups[axis]).integer
    if total is None:
        raise Opaque("a split of a symbolic dimension")
    array = forms.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    count = len(node.outputs)
    if array is not None:
        sizes = [int(n) for n in array.ravel()]
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        raise Opaque("a split that is not constant")
    else:
        part = -(-total // count)
        sizes = [min(part, total - k * part) for k in range(count)]
    result: list[Form | None] = []
    start = 0
    for size in sizes:
        result.append(
            x if size == total else sliced(forms, x, axis, number(start), 1, number(size)) if size > 0 else None
        )
        start += size
    return result


def _window(forms: Forms, x: Form, axis: int, start: Poly, size: Poly, total: Poly) -> Form:
    """x at positions start, start + 1, ... of a dimension of `total` elements, 0 elsewhere."""
    algebra = forms.algebra
    if len(x.groups[axis]) > 1:
        raise Opaque("a padded dimension is composed")
    first = sum(len(g) for g in x.groups[:axis])
    if not x.groups[axis]:
        shifted = {w: algebra.var(w + 1) for w in range(first, len(x.sizes))}
        inside = algebra.equal_zero(algebra.var(first) - start)
    else:
        v = algebra.var(first)
        shifted = {first: v - start}
        above = UNIT if not start else UNIT - algebra.less_than_zero(v - start)
        below = UNIT if start + size == total else algebra.less_than_zero(v - start - size)
        inside = algebra.mul(above, below)
    groups = tuple((total,) if a == axis else g for a, g in enumerate(x.groups))
    return Form(groups, algebra.mul(inside, algebra.substitute(x.poly, shifted)))


def windowed(forms: Forms, x: Form, axis: int, start: Poly, total: Poly) -> Form:
    """x as the elements from `start` on of a dimension of `total` elements, which are 0 elsewhere."""
    size = forms.extent(x.groups[axis])
    return x if size == total else _window(forms, x, axis, start, size, total)


@reads("Concat")
def _concat(forms: Forms, node: ir.Node) -> Form:
    parts = inputs_of(forms, node)
    return concatenated(forms, parts, attribute(node, "axis", 0) % len(parts[0].groups))


def concatenated(forms: Forms, parts: Sequence[Form], axis: int) -> Form:
    """The forms one after the other along an axis."""
    sizes = [forms.extent(p.groups[axis]) for p in parts]
    live = [k for k, s in enumerate(sizes) if s.constant != 0]
    if len(live) == 1:
        return parts[live[0]]
    total = sum(sizes[1:], sizes[0])
    placed, start = [], ZERO
    for part, size in zip(parts, sizes, strict=True):
        placed.append(_window(forms, part, axis, start, size, total))
        start = start + size
    groups, polys = forms.broadcast(placed)
    return Form(groups, sum(polys[1:], polys[0]))


@reads("Pad")
def _pad(forms: Forms, node: ir.Node) -> Form:
    x = forms.form(given(node.inputs, 0))
    pads = forms.constant(given(node.inputs, 1))
    axes = forms.vector(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    rank = len(x.groups)
    order = list(range(rank)) if len(node.inputs) < 4 or node.inputs[3] is None else _axes_in_order(axes, rank)
    if pads is None or attribute(node, "mode", "constant") != "constant" or pads.size != 2 * len(order):
        raise Opaque("a pad that is not constant")
    if len(node.inputs) > 2 and node.inputs[2] is not None and forms.form(node.inputs[2]).poly.constant != 0:
        raise Opaque("a pad that is not zero")
    for k, axis in enumerate(order):
        before, after = int(pads[k]), int(pads[k + len(order)])
        if before or after:
            if before < 0 or after < 0:
                raise Opaque("a negative pad")
            size = forms.extent(x.groups[axis])
            x = _window(forms, x, axis, number(before), size, size + number(before + after))
    return x


def _axes_in_order(axes: Sequence[Poly] | None, rank: int) -> list[int]:
    """Axes that other inputs refer to one by one."""
    found = [None if a.integer is None else a.integer % rank for a in axes or [ZERO, ZERO]]
    if None in found or len(set(found)) < len(found):
        raise Opaque("axes are not constant")
    return [a for a in found if a is not None]


# Indexing


def from_start(forms: Forms, index: Form, size: Poly) -> Form:
    """The index of an element of a dimension of this size; where it is negative, it counts from the end.

    Data are taken to count from the start. Raises Opaque where some of an index counts from the end, and some does not.
    """
    bounds = forms.bounds(index)
    if bounds is None or _sign(bounds[0], 1):
        return index
    if not _sign(bounds[1] + UNIT, -1):
        raise Opaque("an index that counts from both ends")
    return Form(index.groups, index.poly + size)


def _sign(bound: Poly, sign: int) -> bool:
    """Whether a function of dimensions, none of which is below 1, is never negative; or, for -1, never positive."""
    rising = all(c * sign >= 0 for m, c in bound.terms.items() if m)
    return rising and sum(bound.terms.values()) * sign >= 0


@reads("Gather")
def _gather(forms: Forms, node: ir.Node) -> Form:
    data, index = inputs_of(forms, node)
    return _gathered(forms, data, index, attribute(node, "axis", 0) % len(data.groups))


def _gathered(forms: Forms, data: Form, index: Form, axis: int) -> Form:
    algebra = forms.algebra
    if len(data.groups[axis]) > 1:
        raise Opaque("a gather from a composed dimension")
    if not data.groups[axis]:
        # Of one element there is nothing to choose.
        order = [*range(axis), *[None] * len(index.groups), *range(axis + 1, len(data.groups))]
        around = (*((),) * axis, *index.groups, *((),) * (len(data.groups) - axis - 1))
        groups, (poly, _) = forms.broadcast([forms.moved(data, order), Form(around, ZERO)])
        return Form(groups, poly)
    v = data.variables(axis)[0]
    width = len(index.sizes)
    if data.groups[axis]:
        index = from_start(forms, index, data.groups[axis][0])
    x = algebra.substitute(index.poly, {w: algebra.var(v + w) for w in range(width)})
    names = {v: x} | {w: algebra.var(w + width - 1) for w in range(v + 1, len(data.sizes))}
    groups = (*data.groups[:axis], *index.groups, *data.groups[axis + 1 :])
    return Form(groups, algebra.substitute(data.poly, names))


@reads("GatherElements")
def _gather_elements(forms: Forms, node: ir.Node) -> Form:
    data, index = inputs_of(forms, node)
    axis = attribute(node, "axis", 0) % len(data.groups)
    if len(data.groups[axis]) > 1 or len(data.groups) != len(index.groups):
        raise Opaque("a gather from a composed dimension")
    if data.groups[axis]:
        index = from_start(forms, index, data.groups[axis][0])
    # Along other dimensions the index may end before the data do.
    names: dict[int, Poly] = {}
    for a in range(len(data.groups)):
        if a == axis:
            names |= dict.fromkeys(data.variables(a), index.poly)
        else:
            names |= _leading(forms, data, index, a)
    return Form(index.groups, forms.algebra.substitute(data.poly, names))


def _leading(forms: Forms, data: Form, part: Form, axis: int) -> dict[int, Poly]:
    """The variables of a dimension of `data` by those of `part`, which has as many elements along it or fewer."""
    own, others = data.variables(axis), part.variables(axis)
    if not own:
        return {}
    if not others:
        return dict.fromkeys(own, ZERO)
    if len(own) == 1:
        return {own[0]: forms.assembled(list(others), part.sizes)}
    if data.groups[axis] != part.groups[axis]:
        raise Opaque("layouts do not align")
    return {v: forms.algebra.var(w) for v, w in zip(own, others, strict=True)}


@reads("GatherND")
def _gather_nd(forms: Forms, node: ir.Node) -> Form:
    data, index = inputs_of(forms, node)
    index = with_batch_indices(forms, index, attribute(node, "batch_dims", 0))
    depth = forms.extent(index.groups[-1]).integer
    if depth is None:
        raise Opaque("a gather by several indices")
    # One index after the other, from the last dimension on; those of one element stay beside each other.
    lead = len(index.groups) - 1
    picks = [index if depth == 1 else sliced(forms, index, lead, number(k), 1, UNIT) for k in range(depth)]
    picks = [forms.moved(pick, range(lead)) for pick in picks]
    algebra, width, count = forms.algebra, len(picks[0].sizes), len(data.sizes)
    if any(len(g) != 1 for g in data.groups[:depth]) or any(p.groups != picks[0].groups for p in picks):
        raise Opaque("a gather from a composed dimension")
    names = {k: from_start(forms, pick, data.groups[k][0]).poly for k, pick in enumerate(picks)}
    names |= {w: algebra.var(w - depth + width) for w in range(depth, count)}
    return Form((*picks[0].groups, *data.groups[depth:]), algebra.substitute(data.poly, names))


def with_batch_indices(forms: Forms, index: Form, batch_dims: int) -> Form:
    """The index with the numbers of its first dimensions in front of each row: what batch_dims leaves out."""
    rank = len(index.groups)
    if not batch_dims:
        return index
    lead = Form((*index.groups[:-1], ()), ZERO)
    numbers = [Form(lead.groups, _position(forms, lead, axis)) for axis in range(batch_dims)]
    return concatenated(forms, [*numbers, index], rank - 1)


@reads("NonZero")
def _nonzero(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    groups = forms.groups_of(node.outputs[0])
    if len(x.groups) != 1 or len(x.sizes) != 1 or len(groups) != 2 or groups[0] or not groups[1]:
        raise Opaque("positions in several dimensions")
    holds = x.poly if forms.algebra.is_boolean(x.poly) else UNIT - forms.algebra.equal_zero(x.poly)
    name = Positions(holds, x.sizes[0], groups[1][0])
    return Form(groups, forms.algebra.tensor(name, [forms.algebra.var(0)], integer=True))


def scattered(forms: Forms, data: Form, index: Form, updates: Form, axis: int) -> tuple[Form, Poly]:
    """The updates added up at their indices along an axis, in the data's shape; and how many hit each element."""
    algebra = forms.algebra
    if len(data.groups[axis]) > 1:
        raise Opaque("a scatter into a composed dimension")
    # Along other dimensions the updates may end before the data do.
    ends = [
        (a, forms.extent(index.groups[a]))
        for a, g in enumerate(data.groups)
        if a != axis and forms.extent(g) != forms.extent(index.groups[a])
    ]
    if any(len(data.groups[a]) != 1 or len(index.groups[a]) != 1 for a, _ in ends):
        raise Opaque("a scatter into a part of the data")
    if data.groups[axis]:
        index = from_start(forms, index, data.groups[axis][0])
    summed = index.groups[axis]
    groups, (x, u) = forms.broadcast([index, updates])
    joined = Form(groups, ZERO)
    # The variables of the indexed dimension of the updates move out of the way, to be summed.
    inner = list(joined.variables(axis))
    start = sum(len(g) for g in groups[:axis])
    names = {v: algebra.var(-3_000_000 - k) for k, v in enumerate(inner)}
    width = len(data.groups[axis])
    names |= {w: algebra.var(w - len(inner) + width) for w in range(start + len(inner), len(joined.sizes))}
    # Of one element there is nothing to choose.
    hit = algebra.equal_zero(algebra.var(start) - algebra.substitute(x, names)) if width else UNIT
    apart = [a for a, _ in ends]
    if apart and updates.groups != index.groups:
        raise Opaque("a scatter into a part of the data")
    groups = tuple(data.groups[a] if a == axis or a in apart else g for a, g in enumerate(groups))
    for a, end in ends:
        (v,) = Form(groups, ZERO).variables(a)
        hit = algebra.mul(hit, algebra.less_than_zero(algebra.var(v) - end))
    sizes = dict(enumerate(s for g in groups for s in g))
    bound = {-3_000_000 - k: s for k, s in enumerate(summed)}
    placed = algebra.sum(algebra.mul(hit, algebra.substitute(u, names)), bound, sizes)
    return Form(groups, placed), algebra.sum(hit, bound, sizes)


def _updated(forms: Forms, data: Form, placed: Form, hits: Poly, reduction: str) -> Form:
    """The data with the updates added, or in the place of the elements that they hit."""
    algebra = forms.algebra
    groups, (old, new, count) = forms.broadcast([data, placed, Form(placed.groups, hits)])
    if reduction == "none":
        # A number that is its own square is 0 or 1: no element is hit twice.
        if not algebra.is_boolean(count):
            raise Opaque("a scatter that overwrites itself")
        old = algebra.mul(UNIT - count, old)
    elif reduction != "add":
        raise Opaque("a scatter that multiplies")
    return Form(groups, old + new)


@reads("ScatterElements")
def _scatter_elements(forms: Forms, node: ir.Node) -> Form:
    data, index, updates = inputs_of(forms, node)
    axis = attribute(node, "axis", 0) % len(data.groups)
    placed, hits = scattered(forms, data, index, updates, axis)
    return _updated(forms, data, placed, hits, attribute(node, "reduction", "none"))


@reads("ScatterND")
def _scatter_nd(forms: Forms, node: ir.Node) -> Form:
    data, index, updates = inputs_of(forms, node)
    placed, hits = scattered_by_rows(forms, data, index, updates)
    return _updated(forms, data, placed, hits, attribute(node, "reduction", "none"))


def scattered_by_rows(forms: Forms, data: Form, index: Form, updates: Form) -> tuple[Form, Poly]:
    """The updates added up where the rows of the index say, in the data's shape; and how many hit each element."""
    algebra = forms.algebra
    depth = forms.extent(index.groups[-1]).integer if index.groups else None
    if depth is None or any(len(g) != 1 for g in data.groups[:depth]):
        raise Opaque("a scatter that is not read")
    lead = len(index.groups) - 1
    width = sum(len(g) for g in index.groups[:lead])
    # Align the updates with the indices, then name the summed variables apart.
    picks = []
    for k in range(depth):
        element = index if depth == 1 else sliced(forms, index, lead, number(k), 1, UNIT)
        element = from_start(forms, element, data.groups[k][0])
        picks.append(Form((*element.groups[:lead], *((),) * (len(updates.groups) - lead)), element.poly))
    groups, polys = forms.broadcast([updates, *picks])
    width = sum(len(g) for g in groups[:lead])
    tail = len([s for g in groups for s in g]) - width
    names = {v: algebra.var(-3_000_000 - v) for v in range(width)}
    names |= {width + k: algebra.var(depth + k) for k in range(tail)}
    moved = [algebra.substitute(p, names) for p in polys]
    hit = algebra.product(algebra.equal_zero(algebra.var(k) - x) for k, x in enumerate(moved[1:]))
    sizes = [s for g in groups for s in g]
    out = (*data.groups[:depth], *groups[lead:])
    bound = {-3_000_000 - v: sizes[v] for v in range(width)}
    free = dict(enumerate(s for g in out for s in g))
    placed, hits = (algebra.sum(term, bound, free) for term in (algebra.mul(hit, moved[0]), hit))
    return Form(out, placed), hits


@reads("OneHot")
def _one_hot(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    index, _, values = (forms.form(given(node.inputs, k)) for k in range(3))
    depth = forms.vector(node.inputs[1])
    size = depth[0] if depth else None
    rank = len(index.groups) + 1
    axis = attribute(node, "axis", -1) % rank
    if size is None or size.constant == 1:
        raise Opaque("an unknown depth")
    pair = forms.constant(node.inputs[2])
    if pair is None or len(values.groups) != 1:
        raise Opaque("unknown values")
    order: list[int | None] = list(range(axis))
    order += [None, *range(axis, rank - 1)]
    x = forms.moved(index, order)
    groups, (i, _) = forms.broadcast([x, Form(tuple((size,) if a == axis else () for a in range(rank)), ZERO)])
    v = sum(len(g) for g in groups[:axis])
    hit = algebra.equal_zero(algebra.var(v) - i)
    off, on = (float(p) for p in pair.ravel())
    return Form(groups, hit.scaled(on - off) + number(off))


# Conditions


def _compared(forms: Forms, node: ir.Node) -> tuple[tuple[Group, ...], Poly, Poly]:
    """The operands of a comparison, whose difference has the sign that onnxruntime finds."""
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    if is_float(given(node.inputs, 0)):
        # What rounding leaves of a difference decides where algebra finds none.
        if any(len(p) > 1 and not forms.algebra.is_integer(p) for p in (a, b)):
            raise Opaque("a comparison of floats that are rounded")
        if a == b and forms.algebra.tensors(a):
            raise Opaque("a number is not equal to itself where it is NaN")
    return groups, a, b


@reads("Equal")
def _equal(forms: Forms, node: ir.Node) -> Form:
    groups, a, b = _compared(forms, node)
    return Form(groups, forms.algebra.equal_zero(a - b))


@reads("Less", "Greater", "LessOrEqual", "GreaterOrEqual")
def _compare(forms: Forms, node: ir.Node) -> Form:
    groups, a, b = _compared(forms, node)
    if node.op_type in ("Greater", "LessOrEqual"):
        a, b = b, a
    below = forms.algebra.less_than_zero(a - b)
    if node.op_type in ("Less", "Greater"):
        return Form(groups, below)
    if is_float(given(node.inputs, 0)):
        raise Opaque("not less is not greater or equal where there are NaNs")
    return Form(groups, UNIT - below)


@reads("Not")
def _not(forms: Forms, node: ir.Node) -> Form:
    (x,) = inputs_of(forms, node)
    return Form(x.groups, UNIT - x.poly)


@reads("And")
def _and(forms: Forms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, forms.algebra.mul(a, b))


@reads("Or")
def _or(forms: Forms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, a + b - forms.algebra.mul(a, b))


@reads("Xor")
def _xor(forms: Forms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, a + b - forms.algebra.mul(a, b).scaled(2.0))


@reads("Where")
def _where(forms: Forms, node: ir.Node) -> Form:
    condition = forms.form(given(node.inputs, 0))
    if condition.poly.constant is not None:
        # The branch that is never taken gives its shape only.
        taken, other = (1, 2) if condition.poly.constant else (2, 1)
        x, dead = forms.form(given(node.inputs, taken)), forms.form(given(node.inputs, other))
        groups, (poly, _, _) = forms.broadcast([x, Form(dead.groups, ZERO), Form(condition.groups, ZERO)])
        return Form(groups, poly)
    groups, (c, a, b) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, forms.algebra.mul(c, a) + forms.algebra.mul(UNIT - c, b))
