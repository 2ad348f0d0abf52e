"""What the rules share: finding a value by what it computes, making the few nodes that an op's layout needs, and
putting a fused node in the place of the subgraph that it computes.

A rule proposes; the algebra decides: a proposal is taken only where the fused op's own definition, written in the
forms of the values that it was bound to, is the form of the value that it replaces.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes import shapes
from gradfuse.passes.algebra import ONE, UNIT, Algebra, Monomial, Poly, TooComplex, number
from gradfuse.passes.matching import bodies
from gradfuse.passes.progress import Progress, counted
from gradfuse.passes.proving import Refuted, Unproved, prove
from gradfuse.passes.reading import Form, Forms, Opaque, attribute
from gradfuse.passes.report import Fusion, NearMiss

_Answer = TypeVar("_Answer")
Policy = Literal["profitable", "all"]

# The constants of the predictions, explained and measured in docs/cost-model.md.
ASSUMED_DIM = 64  # size of a symbolic dimension
NODE = 4096  # bytes that move in the time that a node takes beside its work
POWER = 128  # bytes that move in the time that Pow takes for an element, unless it squares or cubes
SCATTERED = 128  # bytes that move in the time that ScatterElements takes for an update

VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Expand", "Flatten", "Shape", "Size", "Constant"}
_FREE = VIEWS - {"Transpose", "Expand"}
# What onnxruntime's CPU provider does in 16 bits; the rest it does in float32, between casts.
_IN_HALF = {
    *("Cast", "Transpose", "Expand", "Concat", "Slice", "Split", "Gather", "GatherElements", "GatherND"),
    *("ScatterElements", "ScatterND", "ConstantOfShape", "Max", "Min"),
}
_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_WIDE = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16}

_LINEAR = {
    *("ReduceSum", "ReduceMean", "Mul", "Div", "Add", "Sub", "Sum", "Neg", "Cast", "Identity", "Reshape", "Squeeze"),
    *("Unsqueeze", "Expand", "Where", "Transpose", "Flatten", "Mean"),
}

_ALLOWZERO_OPSET = 14

# How far constants of a type may be from the ones of the formula: a few roundings of that type.
TOLERANCE = {
    ir.DataType.DOUBLE: 1e-6,
    ir.DataType.FLOAT: 1e-6,
    ir.DataType.FLOAT16: 4e-3,
    ir.DataType.BFLOAT16: 3e-2,
}

Layout = Sequence[Sequence[int]]
"""Dimensions as lists of index variables, outermost first."""


@dataclass(frozen=True)
class Cost:
    """A prediction for some nodes: bytes that they move, and the bytes that would move in the time that they take."""

    bytes: int
    equivalent: int

    def pays(self, before: Cost) -> bool:
        """Whether nodes of this cost in the place of others take less time, and move no more bytes."""
        return self.bytes <= before.bytes and self.equivalent < before.equivalent

    def against(self, before: Cost) -> str:
        if self.bytes > before.bytes:
            return f"would move {self.bytes - before.bytes} bytes more"
        return f"would take as long as moving {self.equivalent} bytes, for {before.equivalent} now"


class Mismatch(Exception):
    """The value has something of an op's form, but cannot be replaced; the text says why."""


@dataclass
class Rewrite:
    """A fused node ready to be put in: `output` arranges its result as the root's shape."""

    operator: str
    rule: str
    root: ir.Value
    nodes: list[ir.Node]
    fused: list[ir.Node]
    output: ir.Value
    frontier: tuple[ir.Value, ...] = ()
    """The values that the match takes as given; where there are none, every value that its form does not express."""
    ends: Mapping[ir.Value, Poly] = field(default_factory=dict)
    """Those of them that are ends of groups, with the number of rows."""
    by_body: bool = False
    """Whether the nodes that go are the body of the operator, which is what a proof would run for the fused node."""


class Builder:
    """Makes nodes beside the graph; they are put in only when the rewrite is accepted."""

    def __init__(self, site: Site, root: ir.Value) -> None:
        self.site = site
        self.root = root
        self.nodes: list[ir.Node] = []
        self._initializers: list[ir.Value] = []

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType | None,
        sizes: Sequence[Poly] | None = None,
        *,
        domain: str = "",
        **attributes: int | float | str | Sequence[int],
    ) -> ir.Value:
        name = self.site.fresh(op_type)
        node = ir.Node(domain, op_type, inputs, ir.convenience.convert_attributes(attributes), name=name)
        out = node.outputs[0]
        out.name = name
        if dtype is not None:
            out.type = ir.TensorType(dtype)
        if sizes is not None:
            out.shape = ir.Shape([self.site.dim(s) for s in sizes])
            self.site.sizes_of[out] = list(sizes)
        self.nodes.append(node)
        return out

    def constant(self, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        if dtype in TOLERANCE:
            rounded = array.astype(dtype.numpy()).astype(np.float64)
            if np.any(np.abs(rounded - array) > TOLERANCE[dtype] * np.abs(array)):
                raise Mismatch(f"a constant {float(array.flat[0]):.6g} is no number of type {dtype.name}")
        tensor = ir.tensor(array.astype(dtype.numpy()), dtype=dtype, name=self.site.fresh("constant"))
        value = ir.Value(name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor)
        self.site.sizes_of[value] = [number(n) for n in array.shape]
        self._initializers.append(value)
        return value

    def ints(self, values: Sequence[int]) -> ir.Value:
        return self.constant(np.asarray(values, np.int64), ir.DataType.INT64)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        return self.op("Cast", [value], dtype, self.site.extents(value), to=int(dtype))

    def reshape(self, value: ir.Value, sizes: Sequence[Poly]) -> ir.Value:
        """The value in row-major order as dimensions of these sizes."""
        if list(sizes) == self.site.extents(value):
            return value
        symbolic = [k for k, s in enumerate(sizes) if s.integer is None]
        unknown = [k for k in symbolic if self._factors(sizes[k]) is None]
        if len(symbolic) < 2 or unknown or self.site.opset < _ALLOWZERO_OPSET:
            inferred = next(iter((*unknown, *symbolic)), None)
            return self.op("Reshape", [value, self.shape(sizes, inferred)], value.dtype, sizes)
        # A size that is 0 at run time is a size here, not a request to copy one.
        return self.op("Reshape", [value, self.shape(sizes)], value.dtype, sizes, allowzero=1)

    def shape(self, sizes: Sequence[Poly], inferred: int | None = None) -> ir.Value:
        """The sizes as an int64 tensor, -1 for the inferred one."""
        known = [-1 if k == inferred else s.integer for k, s in enumerate(sizes)]
        constants = [n for n in known if n is not None]
        if len(constants) == len(known):
            return self.ints(constants)
        parts = [self._extent(s) if n is None else self.ints([n]) for n, s in zip(known, sizes, strict=True)]
        return self.op("Concat", parts, ir.DataType.INT64, [number(len(sizes))], axis=0)

    def _factors(self, size: Poly) -> list[tuple[ir.Value, int]] | None:
        """Dimensions of values that a size is the product of."""
        found = self.site.donor(size, self.root)
        if found is not None:
            return [found]
        ((m, c),) = size.terms.items() if len(size) == 1 else ((ONE, 0.0),)
        parts = [self.site.donor(self.site.algebra.of(self.site.algebra.atoms[a]), self.root) for a, e in m if e == 1]
        known = [part for part in parts if part is not None]
        return known if known and c == 1.0 and len(known) == len(m) else None

    def _extent(self, size: Poly) -> ir.Value:
        found = self._factors(size)
        if found is None:
            raise Mismatch(f"a dimension {self.site.algebra.text(size)} is in no shape")
        integers = ir.DataType.INT64
        parts = [self.op("Shape", [value], integers, [UNIT], start=axis, end=axis + 1) for value, axis in found]
        product = parts[0]
        for part in parts[1:]:
            product = self.op("Mul", [product, part], integers, [UNIT])
        return product

    def arange(self, start: int, size: Poly) -> ir.Value:
        """start, start + 1, ... as an int64 tensor of this size."""
        if size.integer is not None:
            return self.ints(range(start, start + size.integer))
        first, one = (self.constant(np.asarray(n), ir.DataType.INT64) for n in (start, 1))
        count = self.op("Squeeze", [self._extent(size)], ir.DataType.INT64, [])
        end = self.op("Add", [count, first], ir.DataType.INT64, [])
        return self.op("Range", [first, end, one], ir.DataType.INT64, [size])

    def arrange(self, value: ir.Value, variables: Sequence[int], layout: Layout, sizes: Mapping[int, Poly]) -> ir.Value:
        """A value whose row-major elements run over `variables`, in the given layout; further variables repeat it."""
        value = self._repeated(value, [sizes[v] for v in variables])
        target = [v for group in layout for v in group]
        own = [v for v in target if v in variables]
        if own != list(variables):
            value = self.reshape(value, [sizes[v] for v in variables])
            order = [list(variables).index(v) for v in own]
            value = self.op("Transpose", [value], value.dtype, [sizes[v] for v in own], perm=order)
        if len(target) > len(own):
            value = self.reshape(value, [sizes[v] if v in own else UNIT for v in target])
            full = [sizes[v] for v in target]
            value = self.op("Expand", [value, self.shape(full)], value.dtype, full)
        return self.reshape(value, [self.site.algebra.product(sizes[v] for v in group) for group in layout])

    def _repeated(self, value: ir.Value, sizes: Sequence[Poly]) -> ir.Value:
        """A value of the graph, repeated where its variables may have size 1 beside others of these sizes."""
        form = self.site.forms.get(value) if value in self.site.position else None
        if form is None or len(form.sizes) != len(sizes) or list(form.sizes) == list(sizes):
            return value
        others = []
        for own, size in zip(form.sizes, sizes, strict=True):
            parts = self.site.algebra.parts(own)
            rest = [part for part in self.site.algebra.parts(size) if own != size and part not in parts]
            if len(rest) > 1:
                raise Mismatch("which of several dimensions are 1 is not known")
            others += rest or [UNIT]
        value = self.reshape(value, form.sizes)
        return self.op("Expand", [value, self.shape(others)], value.dtype, sizes)

    def fused(
        self, operator: str, inputs: Sequence[ir.Value], sizes: Sequence[Poly], **attributes: int | float | str
    ) -> ir.Value:
        return self.op(operator, inputs, self.root.dtype, sizes, domain=custom_ops.DOMAIN, **attributes)

    def rewrite(self, rule: str, fused: Sequence[ir.Value], output: ir.Value) -> Rewrite:
        nodes = [node for value in fused if (node := value.producer()) is not None]
        return Rewrite(nodes[0].op_type, rule, self.root, self.nodes, nodes, output)

    def discard(self, kept: int = 0) -> None:
        """Drop the nodes, but for the first ones."""
        for node in self.nodes[kept:]:
            for k in range(len(node.inputs)):
                node.replace_input_with(k, None)
        del self.nodes[kept:]

    def commit(self) -> None:
        for value in self._initializers:
            if any(u.node in self.nodes for u in value.uses()):
                self.site.add_constant(value, self.root)


class Site:
    """One graph, or the body of a function, under rewriting, with the forms of its values."""

    def __init__(
        self,
        graph: ir.Graph,
        names: set[str],
        opset: int,
        is_function: bool = False,
        progress: Progress | None = None,
        invented: Collection[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.opset = opset
        self.is_function = is_function
        self.forms = Forms(graph, progress, invented)
        self.algebra: Algebra = self.forms.algebra
        self.sizes_of: dict[ir.Value, list[Poly]] = {}
        self.proofs: dict[bytes, Exception | None] = {}
        self.sites: Mapping[ir.Graph, Site] = {}
        """The sites of the same model."""
        self.is_removed = False
        """Whether a rewrite made the node superfluous that the graph is in."""
        self._names = names
        self._counts: dict[str, int] = {}
        self.position: dict[ir.Value, int] = {}
        self._index: dict[tuple[frozenset[object], object], list[tuple[int, ir.Value]]] = {}
        self._dead: dict[ir.Node, None] = {}
        self._outer_factors: dict[ir.Value, tuple[ir.Value, list[int], Poly] | None] = {}
        self._answers: dict[object, Any] = {}
        self._donors: dict[Poly, list[tuple[ir.Value, int]]] = {}
        for value in self._leaves():
            self._enter(value, -1)
        for k, node in enumerate(graph):
            for value in node.outputs:
                self._enter(value, k)
        self._differences = self._subtractions()

    def _leaves(self) -> Iterator[ir.Value]:
        seen: set[ir.Value] = set(self.graph.inputs)
        yield from self.graph.inputs
        own = {v for node in self.graph for v in node.outputs}
        for node in self.graph:
            for value in node.inputs:
                # Initializers, and values of an outer graph.
                if value is not None and value not in seen and value not in own:
                    seen.add(value)
                    yield value

    def _enter(self, value: ir.Value, position: int) -> None:
        self.position[value] = position
        form = self.forms.get(value)
        if form is not None:
            # In the order of positions, where it mostly comes last.
            insort(self._index.setdefault(self._index_key(form.poly), []), (position, value), key=itemgetter(0))
            for axis, size in enumerate(self.extents(value)):
                if size.integer is None:
                    self._donors.setdefault(size, []).append((value, axis))

    def _index_key(self, poly: Poly) -> tuple[frozenset[object], object]:
        """What values that are multiples of each other have in common, however their dimensions are grouped."""
        tensors = self.algebra.tensors(poly)
        return (tensors, len(poly)) if self.algebra.free(poly) else (tensors, frozenset(poly.terms))

    def _subtractions(self) -> dict[tuple[int, object, int | None], list[tuple[int, ir.Node]]]:
        """The subtractions of floats, in order, by what multiples share: the number of terms, the rarest of the tensors
        and the spread of the coefficients."""
        found = []
        for k, node in enumerate(self.graph):
            if node.op_type == "Sub" and node.domain == "" and node.outputs[0].dtype in TOLERANCE:
                form = self.forms.get(node.outputs[0])
                if form is not None:
                    found.append((k, node, form.poly, self.algebra.tensors(form.poly)))
        uses = Counter(tensor for *_, tensors in found for tensor in tensors)
        index: dict[tuple[int, object, int | None], list[tuple[int, ir.Node]]] = {}
        for k, node, poly, tensors in found:
            rarest = min(tensors, key=lambda t: (uses[t], str(t)), default=None)
            # Other groups of dimensions change the coefficients of index variables.
            spread = None if self.algebra.has_variable_factor(poly) else _spread(poly)
            index.setdefault((len(poly), rarest, spread), []).append((k, node))
        return index

    def differences(self, poly: Poly) -> list[ir.Node]:
        """The subtractions of floats, in order, that a polynomial may be a multiple of."""
        tensors = (None, *self.algebra.tensors(poly))
        spread = _spread(poly)
        spreads = (None, spread - 1, spread, spread + 1)
        keys = [(len(poly), tensor, s) for tensor in tensors for s in spreads]
        found = [entry for key in keys for entry in self._differences.get(key, ())]
        return [node for _, node in sorted(found, key=itemgetter(0))]

    @cached_property
    def parts_of_outputs(self) -> set[ir.Value]:
        """The values that go, by linear operations only, into an output; of the graph as it is when first asked."""
        graphs = {self.graph, *self.graph.subgraphs()}
        todo = [v for graph in graphs for v in graph.outputs]
        found = set(todo)
        while todo:
            node = todo.pop().producer()
            if node is not None and node.graph in graphs and node.op_type in _LINEAR:
                new = [v for v in dict.fromkeys(node.inputs) if v is not None and v not in found]
                found.update(new)
                todo.extend(new)
        return found

    def fresh(self, stem: str) -> str:
        stem = stem.lower()
        while True:
            k = self._counts[stem] = self._counts.get(stem, -1) + 1
            if (name := f"{stem}_{k}") not in self._names:
                self._names.add(name)
                return name

    def dim(self, size: Poly) -> int | ir.SymbolicDim:
        n = size.integer
        if n is not None:
            return n
        text = self.algebra.text(size)
        return ir.SymbolicDim(text if text.isidentifier() else None)

    def extents(self, value: ir.Value) -> list[Poly]:
        """The sizes of the dimensions of a value."""
        known = self.sizes_of.get(value)
        if known is None:
            known = self.sizes_of[value] = [self.forms.extent(g) for g in self.forms.form(value).groups]
        return known

    def donor(self, size: Poly, root: ir.Value) -> tuple[ir.Value, int] | None:
        """A value ahead of the root and its dimension of this size."""
        for value, axis in self._donors.get(size, ()):
            if self.position.get(value, self.position[root]) < self.position[root]:
                return value, axis
        return None

    def without_outer_factor(self, root: ir.Value) -> tuple[ir.Value, list[int], Poly] | None:
        """A value for what is left of the root without the factor that has all of some variables to itself.

        Gives that value, the root's variables that it has, and the factor; None where no variable is left over.
        """
        if root not in self._outer_factors:
            found = self.outer_factor(self.forms.form(root))
            if found is not None:
                form, kept, factor = found
                inner = ir.Value(name=root.name, type=root.type)
                self.forms.set(inner, form)
                self.position[inner] = self.position[root]
            self._outer_factors[root] = None if found is None else (inner, kept, factor)
        return self._outer_factors[root]

    def outer_factor(self, form: Form) -> tuple[Form, list[int], Poly] | None:
        """As :meth:`without_outer_factor`, for a form."""
        factors = self.algebra.common(form.poly)
        if not factors:
            return None
        rest = self.algebra.divide_monomial(form.poly, factors)
        alone = set(range(len(form.sizes))) - self.algebra.free(rest)
        apart = tuple(f for f in factors if (free := self.algebra.atoms[f[0]].free) and free <= alone)
        gone = self.algebra.free_of_monomial(apart)
        left = tuple(f for f in factors if f not in apart)
        if (
            not apart
            or gone & self.algebra.free_of_monomial(left)
            or any(self.algebra.atoms[a].indicator for a, _ in apart)
        ):
            return None
        kept = [v for v in range(len(form.sizes)) if v not in gone]
        names = {v: self.algebra.var(k) for k, v in enumerate(kept)}
        poly = self.algebra.mul(self.algebra.substitute(rest, names), self.algebra.substitute(Poly({left: 1.0}), names))
        axes = [a for a, group in enumerate(form.groups) if not group or not gone.issuperset(form.variables(a))]
        groups = [tuple(form.sizes[v] for v in form.variables(a) if v in kept) for a in axes]
        return Form(tuple(groups), poly), kept, Poly({apart: 1.0})

    def answer(self, question: str, groups: object, polys: Sequence[Poly], find: Callable[[], _Answer]) -> _Answer:
        """What `find` gives for polynomials over groups of variables, whatever the tensors in them are called.

        It is called once for all of one pattern, so that it must not depend on anything else.
        """
        key = (question, groups, self.algebra.joint_pattern(polys))
        if key not in self._answers:
            self._answers[key] = find()
        found: _Answer = self._answers[key]
        return found

    # Finding values

    def find(
        self,
        poly: Poly,
        sizes: Sequence[Poly],
        root: ir.Value,
        *,
        dtypes: Iterable[ir.DataType | None],
        shape: Sequence[Poly] | None = None,
    ) -> tuple[ir.Value, float] | None:
        """A value ahead of the root whose row-major elements are factor * poly, and the factor.

        The polynomial's variables 0, 1, ... have these sizes. A value with the factor 1 and the wanted shape comes
        first, then the earliest.
        """
        wanted = set(dtypes)
        limit = self.position[root]
        best: tuple[tuple[bool, bool, int], ir.Value, float] | None = None
        for position, value in self._index.get(self._index_key(poly), ()):
            if position >= limit:
                break
            # Values that went with a rewrite have no position any more.
            if value not in self.position or value.dtype not in wanted:
                continue
            factor = self._factor(value, poly, sizes)
            if factor is None:
                continue
            rank = (factor != 1.0, shape is not None and self.extents(value) != list(shape), position)
            if best is None or rank < best[0]:
                best = (rank, value, factor)
            if not any(rank[:2]):
                break
        return None if best is None else (best[1], best[2])

    def _factor(self, value: ir.Value, poly: Poly, sizes: Sequence[Poly]) -> float | None:
        form = self.forms.get(value)
        if form is None or len(form.poly) != len(poly):
            return None
        try:
            own = self.forms.repeated(form, sizes)
            if own is None:
                own = self.forms.regrouped(form, sizes).poly
        except (Opaque, TooComplex):
            return None
        if own == poly:
            return 1.0
        ratio = self.algebra.ratio(own, poly)
        return None if ratio is None else ratio.constant

    def materialise(
        self,
        builder: Builder,
        poly: Poly,
        variables: Sequence[int],
        sizes: Mapping[int, Poly],
        dtype: ir.DataType,
        layout: Layout,
    ) -> ir.Value:
        """The polynomial as a tensor: a constant, a value of the graph, or a few small nodes on such values."""
        algebra = self.algebra
        if poly.constant is not None:
            return builder.constant(np.asarray(poly.constant), dtype)
        names = {v: algebra.var(k) for k, v in enumerate(variables)}
        extents = [sizes[v] for v in variables]
        local = algebra.substitute(poly, names)
        shape = [algebra.product(sizes[v] for v in group) for group in layout]
        for dtypes in ([dtype], [t for t in TOLERANCE if t != dtype]):
            found = self.find(local, extents, builder.root, dtypes=dtypes, shape=shape)
            if found is not None and math.isfinite(found[1]):
                if dtype == ir.DataType.FLOAT16 and found[0].dtype in _WIDE:
                    # A loss is scaled because its gradients do not fit: 65536 would become infinite.
                    raise Mismatch(f"{found[0].name} may be beyond the range of float16")
                value = builder.cast(builder.arrange(found[0], variables, layout, sizes), dtype)
                if abs(found[1] - 1.0) > TOLERANCE[dtype]:
                    factor = builder.constant(np.asarray(1.0 / found[1]), dtype)
                    value = builder.op("Mul", [value, factor], dtype, shape)
                return value
        selected = self._selected(builder, poly, variables, sizes, dtype, layout)
        if selected is not None:
            return selected
        if len(poly) > 4:
            raise Mismatch(f"no value of the graph is {algebra.text(poly)[:120]}")
        terms = [self._term(builder, m, c, variables, sizes, dtype, layout) for m, c in sorted(poly.terms.items())]
        total = terms[0]
        for term in terms[1:]:
            total = builder.op("Add", [total, term], dtype, _broadcast(self.extents(total), self.extents(term)))
        return total

    def _term(
        self,
        builder: Builder,
        monomial: Monomial,
        coefficient: float,
        variables: Sequence[int],
        sizes: Mapping[int, Poly],
        dtype: ir.DataType,
        layout: Layout,
    ) -> ir.Value:
        algebra = self.algebra
        if len(monomial) == 1 and monomial[0][1] == 1 and coefficient == 1.0:
            atom = algebra.atoms[monomial[0][0]]
            if atom.indicator:
                local = algebra.substitute(algebra.of(atom), {v: algebra.var(k) for k, v in enumerate(variables)})
                found = self.find(local, [sizes[v] for v in variables], builder.root, dtypes=[ir.DataType.BOOL])
                if found is not None and found[1] == 1.0:
                    return builder.cast(builder.arrange(found[0], variables, layout, sizes), dtype)
            raise Mismatch(f"no value of the graph is {algebra.text(algebra.of(atom))[:120]}")
        result = builder.constant(np.asarray(coefficient), dtype)
        shape = [UNIT] * len(layout)
        for a, e in monomial:
            atom = algebra.atoms[a]
            used = [v for v in variables if v in atom.free]
            # A dimension of several variables is whole, or the parts would not broadcast.
            part_layout = [list(group) if atom.free.intersection(group) else [] for group in layout]
            exponent = e if e > 0 else -e
            power = algebra.power(atom.args[0], exponent) if atom.kind == "pow" else algebra.of(atom, exponent)
            if abs(e) != 1:
                local = algebra.substitute(power, {v: algebra.var(k) for k, v in enumerate(used)})
                if self.find(local, [sizes[v] for v in used], builder.root, dtypes=TOLERANCE) is None:
                    raise Mismatch(f"no value of the graph is {algebra.text(Poly({monomial: 1.0}))[:120]}")
            factor = self.materialise(builder, power, used, sizes, dtype, part_layout)
            # Where no factor has a dimension yet, their product is still 1 there.
            shape = _broadcast(shape, [algebra.product(sizes[v] for v in group) for group in part_layout])
            result = builder.op("Mul" if e > 0 else "Div", [result, factor], dtype, shape)
        return result

    def _selected(
        self,
        builder: Builder,
        poly: Poly,
        variables: Sequence[int],
        sizes: Mapping[int, Poly],
        dtype: ir.DataType,
        layout: Layout,
    ) -> ir.Value | None:
        """The polynomial by a condition that makes it 0, which selects: what it leaves out may be infinite."""
        algebra = self.algebra
        for condition in algebra.indicators(poly):
            for case in (False, True):
                rest = algebra.given(poly, condition, not case)
                if algebra.given(poly, condition, case) or rest.constant is not None:
                    continue
                free = (condition.free, algebra.free(rest))
                groups, own = ([list(g) if f.intersection(g) else [] for g in layout] for f in free)
                mask = self.find_mask(builder, algebra.of(condition), sorted(free[0]), sizes, groups)
                used = [v for v in variables if v in free[1]]
                parts = [self.materialise(builder, rest, used, sizes, dtype, own)]
                parts.insert(int(not case), builder.constant(np.asarray(0.0), dtype))
                shape = [algebra.product(sizes[v] for v in group) for group in layout]
                return builder.op("Where", [mask, *parts], dtype, shape)
        return None

    def find_mask(
        self, builder: Builder, poly: Poly, variables: Sequence[int], sizes: Mapping[int, Poly], layout: Layout
    ) -> ir.Value:
        """A boolean tensor that is the polynomial, or a few nodes that make it from such tensors."""
        algebra = self.algebra
        shape = [algebra.product(sizes[v] for v in group) for group in layout]
        names = {v: algebra.var(k) for k, v in enumerate(variables)}
        extents = [sizes[v] for v in variables]
        for negated in (False, True):
            local = algebra.substitute(UNIT - poly if negated else poly, names)
            found = self.find(local, extents, builder.root, dtypes=[ir.DataType.BOOL], shape=shape)
            if found is None or found[1] != 1.0:
                number_like = self.find(local, extents, builder.root, dtypes=TOLERANCE, shape=shape)
                found = number_like if number_like is not None and number_like[1] == 1.0 else None
            if found is not None:
                value = builder.cast(builder.arrange(found[0], variables, layout, sizes), ir.DataType.BOOL)
                return builder.op("Not", [value], ir.DataType.BOOL, shape) if negated else value
        keep = UNIT - poly
        if len(keep) == 1 and len(next(iter(keep.terms))) > 1 and next(iter(keep.terms.values())) == 1.0:
            # Kept where every one of several conditions keeps: masked where one of them masks.
            parts = [UNIT - algebra.of(algebra.atoms[a], e) for a, e in next(iter(keep.terms))]
            masks = []
            for part in parts:
                used = [v for v in variables if v in algebra.free(part)]
                part_layout = [list(group) if set(used).intersection(group) else [] for group in layout]
                masks.append(self.find_mask(builder, part, used, sizes, part_layout))
            result = masks[0]
            for mask in masks[1:]:
                result = builder.op("Or", [result, mask], ir.DataType.BOOL, shape)
            return result
        for negated in (False, True):
            condition = UNIT - poly if negated else poly
            end = self.algebra.end_of(condition)
            if end is not None:
                value = builder.arrange(_below(builder, end[1], sizes[end[0]]), [end[0]], layout, sizes)
                return builder.op("Not", [value], ir.DataType.BOOL, shape) if negated else value
        raise Mismatch("the mask is no boolean value of the graph")

    # Shapes of softmax

    def softmaxes(self, poly: Poly, variables: Iterable[int]) -> Iterator[tuple[Poly, int]]:
        """Softmax rows that divide some term: y, an element of the row, and the variable that runs along it."""
        variables = list(variables)
        seen: set[int] = set()
        for monomial in poly.terms:
            for a, e in monomial:
                atom = self.algebra.atoms[a]
                if atom.kind != "sum" or e >= 0 or a in seen or len(atom.args[0]) != 1 or not atom.positive:
                    continue
                seen.add(a)
                for j in variables:
                    summand = self.algebra.opened(atom, [j])
                    if j not in self.algebra.free(summand) or len(summand) != 1:
                        continue
                    (m,) = summand.terms
                    if any(self.divides(m, n) for n in poly.terms):
                        yield self.algebra.mul(summand, self.algebra.of(atom, -1)), j

    def divides(self, factor: Monomial, monomial: Monomial) -> bool:
        """Whether the monomial has every power of the factor, or a higher one of the same sign."""
        powers = {a: float(e) for a, e in monomial}
        return all(powers.get(a, 0.0) * float(e) > 0 and abs(powers[a]) >= abs(float(e)) for a, e in factor)

    # Putting the fused node in

    def bypassed(self, rewrite: Rewrite) -> Iterator[ir.Node]:
        """The nodes between the values that the rewrite reads and the root."""
        given = {v for node in rewrite.nodes for v in node.inputs}
        todo, seen = [rewrite.root], {rewrite.root}
        while todo:
            node = todo.pop().producer()
            if node is None or node.graph is not self.graph:
                continue
            yield node
            for value in node.inputs:
                if value is not None and value not in given and value not in seen:
                    seen.add(value)
                    todo.append(value)

    def superfluous(self, rewrite: Rewrite) -> list[ir.Node]:
        """The nodes that nothing needs any more once the root has its new producer."""
        needed = {v for node in rewrite.nodes for v in node.inputs if v is not None}
        producer = rewrite.root.producer()
        assert producer is not None
        if any(v is not rewrite.root and (v.uses() or v.is_graph_output()) for v in producer.outputs):
            return []
        dead: dict[ir.Node, None] = {producer: None}
        # Of branches and loop bodies all nodes go.
        todo = [producer, *_inside(producer)]
        gone = set(todo)
        while todo:
            for value in todo.pop().inputs:
                node = None if value is None else value.producer()
                # A body leaves the nodes of the graphs around it alone.
                if node is None or node in gone or node.graph is not self.graph:
                    continue
                if all(
                    not v.is_graph_output() and v not in needed and all(u.node in gone for u in v.uses())
                    for v in node.outputs
                ):
                    dead[node] = None
                    inside = _inside(node)
                    todo += [node, *inside]
                    gone |= {node, *inside}
        return list(dead)

    def cost(self, nodes: Sequence[ir.Node]) -> Cost:
        """What one run of the nodes in stock onnxruntime moves and takes (docs/cost-model.md)."""
        in_float32 = {n for n in nodes if n.domain == "" and n.op_type not in _IN_HALF | VIEWS}
        moved = equivalent = 0.0
        cast: set[ir.Value] = set()
        for node in nodes:
            own = node.domain == custom_ops.DOMAIN
            if node.op_type == "Constant" or (not own and all(v is None or _is_constant(v) for v in node.inputs)):
                continue  # folded when the session is made
            equivalent += NODE
            if node.op_type in _FREE and not own:
                continue
            exponent = self.forms.constant(node.inputs[1]) if node.op_type == "Pow" else None
            if node.op_type == "Pow" and (exponent is None or exponent.size != 1 or exponent.item() not in (2, 3)):
                equivalent += POWER * self._count(node.outputs[0])
            updates = node.inputs[2] if node.op_type in {"ScatterElements", "ScatterND"} and not own else None
            if updates is not None and updates.dtype is not None:
                count = self._count(updates)
                # What a reduction updates is read once more than the data it is in.
                again = 0 if attribute(node, "reduction", "none") == "none" else count * updates.dtype.itemsize
                moved += again
                equivalent += again + (SCATTERED * count if node.op_type == "ScatterElements" else 0)
            for value in (*node.inputs, *node.outputs):
                if value is None or value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.STRING):
                    continue
                each = value.dtype.itemsize
                if value.dtype in _HALF and node in in_float32:
                    each = 4
                    ends = [value.producer(), *(u.node for u in value.uses())]
                    outside = value.is_graph_output() or any(n not in in_float32 for n in ends)
                    if outside and value not in cast and not _is_constant(value):
                        cast.add(value)
                        each += 2 + 4  # what the cast between the types reads and writes
                count = self._count(value)
                moved += count * each
                equivalent += count * each
        return Cost(int(moved), int(equivalent))

    def _count(self, value: ir.Value) -> float:
        """The elements of a value, with the assumed size for symbolic dimensions."""
        count = 1.0
        if value in self.sizes_of or self.forms.get(value) is not None:
            for size in self.extents(value):
                count *= sum(c * ASSUMED_DIM ** sum(int(e) for _, e in m) for m, c in size.terms.items())
        elif value.shape is not None:
            count = math.prod(d if isinstance(d, int) else ASSUMED_DIM for d in value.shape)
        return count

    def apply(self, rewrite: Rewrite, builder: Builder, dead: Sequence[ir.Node], costs: tuple[Cost, Cost]) -> Fusion:
        root = rewrite.root
        anchor = root.producer()
        assert anchor is not None
        name = root.name
        replaced = names_of(dead)
        builder.commit()
        self.graph.insert_before(anchor, rewrite.nodes)
        self.forms.place(rewrite.nodes, anchor)
        output = rewrite.output
        root.name = self.fresh(f"{name}_plain")
        output.name = name
        output.shape, output.type = root.shape, root.type
        output.doc_string = root.doc_string
        output.metadata_props.update(root.metadata_props)
        output.meta.update(root.meta)  # quantization annotations
        for node in rewrite.nodes:
            node.metadata_props["gradfuse.rule"] = rewrite.rule
        for node in rewrite.fused:
            node.metadata_props["gradfuse.replaced"] = ", ".join(replaced)
        ir.convenience.replace_all_uses_with(root, output, replace_graph_outputs=root.is_graph_output())
        self.forms.set(output, self.forms.form(root))
        self.position[output] = self.position[root]
        gone = [*dead, *(inner for node in dead for inner in _inside(node))]
        for graph in (graph for node in dead for graph in _graphs_in(node)):
            if graph in self.sites:
                self.sites[graph].is_removed = True
        read = {v for node in gone for v in node.inputs if v is not None}
        for node in gone:
            for k in range(len(node.inputs)):
                node.replace_input_with(k, None)
        self._dead.update(dict.fromkeys(dead))
        for value in read:
            unused = not value.uses() and not value.is_graph_output() and not value.is_graph_input()
            if unused and self.graph.initializers.get(str(value.name)) is value:
                del self.graph.initializers[str(value.name)]
                self.position.pop(value, None)
        for node in dead:
            for value in node.outputs:
                self.position.pop(value, None)
        self._enter(output, self.position[output])
        before, after = costs
        speedup = before.equivalent / max(after.equivalent, 1)
        return Fusion(
            rewrite.operator, str(rewrite.fused[0].name), rewrite.rule, replaced, before.bytes, after.bytes, speedup
        )

    def is_dead(self, node: ir.Node) -> bool:
        """Whether a rewrite made the node superfluous."""
        return node in self._dead

    def sweep(self) -> None:
        """Takes the nodes that rewrites made superfluous out of the graph: all at once, as it goes by its outputs."""
        self.graph.remove(self._dead, safe=True)
        self._dead.clear()

    def add_constant(self, value: ir.Value, root: ir.Value) -> None:
        if not self.is_function:
            self.graph.register_initializer(value)
            return
        # Functions have no initializers.
        node = ir.node("Constant", [], {"value": value.const_value}, outputs=[value])
        anchor = root.producer()
        assert anchor is not None
        self.graph.insert_before(anchor, node)


class Sites:
    """The sites of a model, shared by the passes of a pipeline: what one pass replaces, the next still knows.

    Types and shapes that an exporter left out are inferred for the time of the work.

    Args:
        progress: what to tell of the work.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress
        self._model: ir.Model | None = None
        self._sites: list[Site] = []
        self._left_out: list[tuple[ir.Value, ir.TypeProtocol | None, ir.Shape | None]] = []

    def of(self, model: ir.Model) -> list[Site]:
        if self._model is not model:
            graphs = _graphs(model)
            invented: set[str] = set()
            values = [v for g in graphs for n in g for v in n.outputs]
            if any(v.dtype is None or v.shape is None for v in values if v.name):
                self._left_out = [(v, v.type, v.shape) for v in values]
                known = _symbols([*values, *(v for g in graphs for v in g.inputs)])
                shapes.infer(model, values)
                invented = _symbols(values) - known
            names = {str(v.name) for v in values}
            names |= {str(v.name) for g in graphs for v in (*g.inputs, *g.initializers.values())}
            names |= {str(n.name) for g in graphs for n in g}
            own = {f.graph for f in model.functions.values()}
            self._sites = [Site(g, names, opset, g in own, self.progress, invented) for g, opset in graphs.items()]
            by_graph = {site.graph: site for site in self._sites}
            for site in self._sites:
                site.sites = by_graph
            self._model = model
        return [site for site in self._sites if not site.is_removed]

    def forget(self) -> None:
        """Drops the analyses, and the types and shapes that the model did not have."""
        for value, type_, shape in self._left_out:
            value.type, value.shape = type_, shape
        self._model, self._sites, self._left_out = None, [], []


class ForgetPass(ir.passes.InPlacePass):
    """Ends a pipeline whose passes share their analyses."""

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self._sites = sites

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._sites.forget()
        return ir.passes.PassResult(model, False)


def _below(builder: Builder, end: Poly, size: Poly) -> ir.Value:
    """Which of so many indices are below the end."""
    integers = ir.DataType.INT64
    first, step = (builder.constant(np.asarray(n), integers) for n in (0, 1))
    indices = builder.op("Range", [first, builder.reshape(builder.shape([size]), []), step], integers, [size])
    return builder.op("Less", [indices, builder.shape([end])], ir.DataType.BOOL, [size])


def _broadcast(a: Sequence[Poly], b: Sequence[Poly]) -> list[Poly]:
    """The shape of what two tensors of these shapes, one of which may have no dimensions, give together."""
    if not (a and b):
        return list(a or b)
    return [y if x == UNIT else x for x, y in zip(a, b, strict=True)]


def _symbols(values: Iterable[ir.Value]) -> set[str]:
    """The names of symbolic dimensions."""
    dims = (d for v in values if v.shape is not None for d in v.shape)
    return {str(d.value) for d in dims if isinstance(d, ir.SymbolicDim) and d.value is not None}


def _graphs_in(node: ir.Node) -> list[ir.Graph]:
    """The branches or the body of a node, and the graphs in these."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    values = [a.value for a in node.attributes.values() if a.type in kinds and not a.is_ref()]
    own = [graph for value in values for graph in ([value] if isinstance(value, ir.Graph) else value)]
    return own + [inner for graph in own for inner in graph.subgraphs()]


def _inside(node: ir.Node) -> list[ir.Node]:
    return [inner for graph in _graphs_in(node) for inner in graph]


def _graphs(model: ir.Model) -> dict[ir.Graph, int]:
    """The graphs of a model that are rewritten, with the version of the default domain in each."""
    own = model.opset_imports.get("", 1)
    functions = [f for f in model.functions.values() if f.domain != custom_ops.DOMAIN]
    found = {model.graph: own} | {f.graph: f.opset_imports.get("", own) for f in functions}
    return found | {sub: version for graph, version in found.items() for sub in graph.subgraphs()}


class FusePass(ir.passes.InPlacePass):
    """Puts one fused operator in the place of every subgraph that computes it.

    Args:
        policy: "profitable" leaves alone what would move more bytes or not be faster; "all" takes every legal match.
        sites: the analyses to share with the other passes of a pipeline, which then ends with a ForgetPass.

    After a call, `fusions` and `near_misses` say what was done.
    """

    operator: ClassVar[str]
    weak: ClassVar[bool] = False
    """Whether the op's form tells so little that the other operators go first."""
    refuses_no_class: ClassVar[bool] = False
    """Whether the op refuses an index that is no class, so that it is taken for granted that it is one."""
    linear: ClassVar[bool] = True
    """Whether the op on a factor times its input is the factor times the op, so that a factor may stay outside."""

    def __init__(self, policy: Policy = "profitable", sites: Sites | None = None) -> None:
        super().__init__()
        self.policy = policy
        self._sites = sites if sites is not None else Sites()
        self._alone = sites is None
        self.fusions: list[Fusion] = []
        self.near_misses: list[NearMiss] = []

    def refusal(self, site: Site, rewrite: Rewrite) -> str | None:
        """Why the op is not to stand for what is between its operands and the root; None where it may."""
        return None

    @abstractmethod
    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        """The rewrite of a value; None where it has nothing of the op, Mismatch where it has but cannot be replaced."""

    def possible(self, site: Site, form: Form) -> bool:
        """Whether a value of this form may have something of the op: what `propose` can tell from the form alone."""
        return True

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.fusions, self.near_misses = [], []
        for site in self._sites.of(model):
            # From the end: the whole of a backward subgraph before its parts.
            for node in counted(list(reversed(site.graph)), self.operator, self._sites.progress):
                view = node.op_type in VIEWS and node.domain == ""
                if site.is_removed or site.is_dead(node) or view or node.domain == custom_ops.DOMAIN:
                    continue
                for root in node.outputs:
                    self._try(site, root)
            site.sweep()
        if self._alone:
            self._sites.forget()
        if self.fusions:
            model.graph.opset_imports.setdefault(custom_ops.DOMAIN, custom_ops.VERSION)
        return ir.passes.PassResult(model, bool(self.fusions))

    def first_bound(self, builder: Builder, candidates: Iterable[Callable[[], Rewrite]]) -> Rewrite | None:
        """The first candidate that can be bound; where none can, Mismatch with the reason of the last."""
        miss: Mismatch | None = None
        for candidate in candidates:
            try:
                return candidate()
            except Mismatch as reason:
                miss = reason
                builder.discard()
        if miss is not None:
            raise miss
        return None

    def _proposed(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        """A rewrite of the root, or of what is left of it without a factor that has dimensions of its own."""
        body = bodies.find(site, builder, root, self.operator)
        if body is not None:
            return body
        form = site.forms.form(root)
        if not site.answer(self.operator, form.groups, [form.poly], lambda: self._possible(site, form)):
            return None
        outer = site.without_outer_factor(root) if self.linear else None
        if outer is None:
            return self.propose(site, builder, root)
        inner, kept, factor = outer
        rewrite = self.propose(site, builder, inner)
        if rewrite is None:
            return None
        sizes = dict(enumerate(form.sizes))
        layout = [list(form.variables(a)) for a in range(len(form.groups))]
        own = [[v for v in group if v in kept] for group in layout]
        other = [[v for v in group if v not in kept] for group in layout]
        assert root.dtype is not None
        value = builder.arrange(rewrite.output, kept, own, sizes)
        rest = [v for group in other for v in group]
        scale = site.materialise(builder, factor, rest, sizes, root.dtype, other)
        scale = self._guarded(site, builder, scale, form, layout, other, sizes)
        output = builder.op("Mul", [value, scale], root.dtype, site.extents(root))
        return replace(rewrite, root=root, output=output)

    def _possible(self, site: Site, form: Form) -> bool:
        outer = site.outer_factor(form) if self.linear else None
        return self.possible(site, form if outer is None else outer[0])

    def _guarded(
        self,
        site: Site,
        builder: Builder,
        factor: ir.Value,
        form: Form,
        layout: Layout,
        factor_layout: Layout,
        sizes: Mapping[int, Poly],
    ) -> ir.Value:
        """The factor, but 0 where a condition makes all of the form 0: it may be infinite."""
        algebra = site.algebra
        for condition in algebra.indicators(form.poly):
            if condition.kind == "inside" and self.refuses_no_class:
                continue
            for case in (True, False):
                if algebra.given(form.poly, condition, case):
                    continue
                zero = algebra.of(condition) if case else UNIT - algebra.of(condition)
                variables = sorted(condition.free)
                groups = [[v for v in group if v in condition.free] for group in layout]
                mask = site.find_mask(builder, zero, variables, sizes, groups)
                assert factor.dtype is not None
                shape = [
                    algebra.product(sizes[v] for v in (*a, *b)) for a, b in zip(groups, factor_layout, strict=True)
                ]
                nothing = builder.constant(np.asarray(0.0), factor.dtype)
                factor = builder.op("Where", [mask, nothing, factor], factor.dtype, shape)
        return factor

    def _try(self, site: Site, root: ir.Value) -> None:
        if root.dtype not in TOLERANCE or root not in site.position or site.forms.get(root) is None:
            return
        builder = Builder(site, root)
        reason: str | None = None
        bug, match, saved = False, "", None
        dead: list[ir.Node] = []
        try:
            rewrite = self._proposed(site, builder, root)
            if rewrite is not None:
                dead = site.superfluous(rewrite)
                before, after = site.cost(dead), site.cost(rewrite.nodes)
                saved = before.bytes - after.bytes
                if root.dtype == ir.DataType.DOUBLE:
                    reason = "its type is float64; the operator takes float32, float16 and bfloat16"
                elif not dead:
                    reason = "another output of its node is in use"
                elif (refusal := self.refusal(site, rewrite)) is not None:
                    reason = refusal
                elif all(n.domain == "" and n.op_type in VIEWS | {"Cast"} for n in dead):
                    pass  # The arithmetic lives on for another consumer: it is the root.
                elif self.policy == "profitable" and not after.pays(before):
                    reason = f"not profitable: {after.against(before)}"
                    match = rewrite.rule
                else:
                    if not rewrite.by_body:
                        prove(site, rewrite, TOLERANCE[root.dtype])
                    self.fusions.append(site.apply(rewrite, builder, dead, (before, after)))
                    return
        except Unproved as error:
            reason = f"it could not be checked with numbers: {error}"
        except Refuted as difference:
            reason = f"a bug in this rule, please report it: for the same numbers the original is {difference}"
            bug = True
        except Mismatch as miss:
            reason = str(miss)
        except (Opaque, TooComplex) as error:
            reason = f"its form outgrew the analysis ({error})"
        builder.discard()
        if reason is not None:
            node = root.producer()
            assert node is not None
            (name,) = names_of([node])
            self.near_misses.append(NearMiss(name, self.operator, reason, bug, match, names_of(dead), saved))


def names_of(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """What to call nodes in a report: by their first output where they have no name. Constants are not worth a word."""
    return tuple(str(n.name or n.outputs[0].name) for n in nodes if n.op_type != "Constant" or n.domain)


def _is_constant(value: ir.Value) -> bool:
    if value.is_graph_input():
        return False
    node = value.producer()
    return value.const_value is not None if node is None else node.op_type == "Constant" and node.domain == ""


def _spread(poly: Poly) -> int:
    """The logarithm of the ratio of the largest to the smallest coefficient, in steps of a tenth of a thousandth."""
    sizes = [abs(c) for c in poly.terms.values()]
    ratio = max(sizes, default=1.0) / min(sizes, default=1.0)
    return round(1e4 * math.log(ratio)) if math.isfinite(ratio) else 0


def require_same(site: Site, root: ir.Value, expected: Poly, known: Poly | None = None) -> None:
    """The op's definition, in the values that it was bound to, must be what the root computes: its form, or `known`."""
    assert root.dtype is not None
    own, algebra = site.forms.form(root).poly if known is None else known, site.algebra
    same = own.close_to(expected, 8 * TOLERANCE[root.dtype])
    # Small terms beside large ones of the same kind may be all that a condition leaves.
    for condition in algebra.indicators(expected) if same else ():
        for case in (True, False):
            left = algebra.given(own, condition, case)
            same = same and left.close_to(algebra.given(expected, condition, case), 8 * TOLERANCE[root.dtype])
    if not same:
        raise Mismatch("it has the gradient's form, but the operator on the same values would compute something else")
