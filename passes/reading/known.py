"""What a reader sees of a graph: the forms that are known so far, and how new ones are made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Algebra, Poly, TooComplex, number
from gradfuse.passes.reading.constants import Constants
from gradfuse.passes.reading.dims import Dims
from gradfuse.passes.reading.layouts import Form, Group, Layouts
from gradfuse.passes.reading.nodes import INTEGERS, Opaque, Unreadable, given
from gradfuse.passes.reading.vectors import Vectors


@dataclass(frozen=True)
class Table:
    """A tensor of row numbers in which each row is once, in the line of its segment, beside that of a row of zeros."""

    ids: Form  # the segment of each row, with one dimension
    segments: Poly  # how many there are
    gather: ir.Node | None = None  # what takes rows by it, where the tensor is these rows


class KnownForms:
    """The forms of the values of one graph that were read, and its constants, dimensions and layouts."""

    def __init__(self, graph: ir.Graph, invented: Collection[str]) -> None:
        """`invented`: names of dimensions that say nothing but that the inference of shapes had no better one."""
        self.algebra = Algebra()
        self.layouts = Layouts(self.algebra)
        self.constants = Constants(self.algebra)
        self.dims = Dims(self.layouts, graph, invented)
        self.vectors = Vectors(self.layouts, self.constants, self.form)
        self.opaque: set[ir.Value] = set()
        """The values that are named, not expressed."""
        self.tables: dict[object, Table] = {}
        """By the names of tensors."""
        self.looked_through: set[ir.Node] = set()
        """Nodes that make what another node computes what its form says it is: no values that are chosen freely."""
        self.looked_at_output = self.looked_at_producer = False
        self._forms: MutableMapping[ir.Value, Form | None] = {}
        self._names: dict[tuple[object, tuple[Group, ...]], str] = {}
        # What most readers need is one dot nearer.
        self.constant = self.constants.array
        self.vector = self.vectors.of
        self.groups_of = self.dims.groups
        self.extent = self.layouts.extent
        self.moved = self.layouts.moved
        self.regrouped = self.layouts.regrouped
        self.broadcast = self.layouts.broadcast
        self.repeated = self.layouts.repeated

    def get(self, value: ir.Value) -> Form | None:
        """The form of a value; None where its rank is unknown."""
        if value in self._forms:
            return self._forms[value]
        try:
            return self.form(value)
        except (Unreadable, TooComplex):
            return None

    def form(self, value: ir.Value) -> Form:
        """The form of a value. Raises Unreadable where its rank is unknown."""
        if value not in self._forms:
            # Not produced by a node that was read: an input, an initializer, or a value of an outer graph.
            self._forms[value] = self._leaf(value)
        form = self._forms[value]
        if form is None:
            raise Unreadable(value.name)
        return form

    def operand(self, node: ir.Node, k: int) -> Form:
        """The form of input `k` of a node. Raises Opaque where it is absent."""
        return self.form(given(node.inputs, k))

    def operands(self, node: ir.Node) -> list[Form]:
        """The forms of all inputs of a node. Raises Opaque where one is absent."""
        return [self.form(given(node.inputs, k)) for k in range(len(node.inputs))]

    def output(self, node: ir.Node, k: int = 0) -> ir.Value:
        """Output `k` of the node that is read, for a reader that looks at the shape that the model states for it.

        The reader must be registered with `uses_output_shape`. What it returns is not replayed for other nodes.
        """
        self.looked_at_output = True
        return node.outputs[k]

    def producer(self, value: ir.Value | None) -> ir.Node | None:
        """The node that computes a value, for a reader that looks how an operand was made.

        The reader must be registered with `uses_producers`. What it returns is not replayed for other nodes.
        """
        self.looked_at_producer = True
        return None if value is None else value.producer()

    def axes(self, node: ir.Node, position: int, rank: int) -> list[int] | None:
        """The axes of a node, from the input at the position or the attribute; None where it has none."""
        axes: Iterable[int]
        if len(node.inputs) > position and node.inputs[position] is not None:
            array = self.constant(node.inputs[position])
            if array is None:
                raise Opaque("axes are not constant")
            axes = (int(x) for x in array.ravel())
        elif "axes" in node.attributes:
            axes = node.attributes["axes"].as_ints()
        else:
            return None
        return sorted(a % rank for a in axes)

    def bounds(self, form: Form) -> tuple[Poly, Poly] | None:
        """The least and the greatest element of what is made of positions, conditions and constants; None for data."""
        algebra, sizes, ranges = self.algebra, form.sizes, self.constants.ranges
        ends = [ZERO, ZERO]
        for m, c in form.poly.terms.items():
            low, high = ZERO, UNIT
            own = [algebra.atoms[a] for a, _ in m]
            if len(own) == 1 and m[0][1] == 1 and own[0].kind == "var":
                high = sizes[own[0].args[0]] - UNIT
            elif len(own) == 1 and m[0][1] == 1 and own[0].kind == "tensor" and own[0].args[0] in ranges:
                low, high = (number(x) for x in ranges[own[0].args[0]])
            elif all(atom.kind == "dim" for atom in own):
                low = high = Poly({m: 1.0})
            elif algebra.tensors(form.poly) or not all(atom.indicator for atom in own):
                return None
            for k, end in enumerate((low, high) if c > 0 else (high, low)):
                ends[k] = ends[k] + end.scaled(c)
        return ends[0], ends[1]

    def named(self, name: object, groups: tuple[Group, ...], value: ir.Value) -> Form:
        """A form that is a name alone: that of the first value with an equal `name` and equal dimensions."""
        count = sum(len(group) for group in groups)
        indices = [self.algebra.var(v) for v in range(count)]
        first = self._names.setdefault((name, groups), str(value.name))
        kinds = (value.dtype == ir.DataType.BOOL, value.dtype in INTEGERS)
        return Form(groups, self.algebra.tensor(first, indices, *kinds))

    def one_variable_each(self, form: Form) -> tuple[Group, ...]:
        """The dimensions of a form with one variable each."""
        return tuple((self.extent(g),) if g else () for g in form.groups)

    def _leaf(self, value: ir.Value) -> Form | None:
        array = self.constant(value)
        try:
            if array is not None:
                return self.constants.form(array)
            return self.named(("value", value.name), self.groups_of(value), value)
        except Unreadable:
            return None
