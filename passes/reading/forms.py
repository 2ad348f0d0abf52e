"""The walk over a graph that gives each of its values a form."""

from __future__ import annotations

import contextlib
import copy
from collections import ChainMap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.algebra import Poly, Renaming, Reordered, TooComplex, number
from gradfuse.passes.progress import Progress, counted
from gradfuse.passes.reading import unread
from gradfuse.passes.reading.dims import LOSSES, live, rank_of
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import INTEGERS, Opaque, Unreadable, through_casts
from gradfuse.passes.reading.registry import Reader, reader_of
from gradfuse.passes.reading.replay import likeness

_ROW_OPERATORS = {"Softmax", "LogSoftmax", "ReduceMax", "ReduceLogSumExp"}
"""Operators whose operand gets a name, however it is computed: rules look for what is done with rows of it."""
_FEW_ELEMENTS = 4
"""Up to this many elements of a shape are told apart, as where each counts from the end for an index below 0."""


@dataclass
class _Relative:
    """What was read last with some values taken as opaque, as neighbours are mostly asked for one after another."""

    sources: tuple[ir.Value, ...]
    opaque: tuple[Form, ...]
    forms: Forms
    changed: set[ir.Value]
    """The values that depend on the sources."""
    read: set[ir.Node]


class Forms(KnownForms):
    """The canonical forms of the values of one graph (or function body)."""

    def __init__(
        self,
        graph: ir.Graph,
        progress: Progress | None = None,
        invented: Collection[str] = frozenset(),
        *,
        names_operands: bool = True,
    ) -> None:
        """The forms of a graph.

        Args:
            graph: the graph.
            progress: is told how far the reading is.
            invented: names of dimensions that say nothing but that the inference of shapes had no better one.
            names_operands: whether the operands of softmaxes and the like get names, however they are computed.
        """
        super().__init__(graph, invented)
        self._relative: _Relative | None = None
        self._examples: dict[object, tuple[tuple[object, ...], list[Form | None]]] = {}
        self._row_operands = {
            through_casts(node.inputs[0])
            for node in graph
            if names_operands and node.op_type in _ROW_OPERATORS and node.inputs and node.inputs[0] is not None
        }
        self._order: dict[ir.Node, tuple[int, ...]] = {node: (k,) for k, node in enumerate(graph)}
        run = set(live(graph))
        met: dict[str, Poly] = {}
        for node in counted(list(graph), "reading", progress):
            # What a node that is never run is broadcast with, proves nothing.
            self.layouts.met = met if node in run else None
            self._read(node)
        self.layouts.met = None
        self.dims.learn(met)
        if self._require_sizes(graph) or met:
            # Forms that were made before a size was known call it by another name.
            for memory in (self._forms, self.vectors, self._names, self._examples, self.opaque, self.tables):
                memory.clear()
            for node in graph:
                self._read(node)

    def set(self, value: ir.Value, form: Form) -> None:
        """Say what a value that is new to the graph computes."""
        self._relative = None
        self._forms[value] = form

    def place(self, nodes: Iterable[ir.Node], anchor: ir.Node) -> None:
        """Say that new nodes stand, in order, right before another."""
        self._relative = None
        *same, last = self._order[anchor]
        for k, node in enumerate(nodes):
            self._order[node] = (*same, last - 1, k)

    def read(self, node: ir.Node, anchor: ir.Node) -> None:
        """Find the forms of a new node that stands right before another."""
        self.place([node], anchor)
        self._read(node)

    def order(self, node: ir.Node) -> tuple[int, ...]:
        """What nodes of the graph are sorted by."""
        return self._order[node]

    def why_opaque(self, node: ir.Node) -> str | None:
        """The reason why a node that has a reader is not expressed; None where it is, or where there is no reader."""
        reader = reader_of(node)
        try:
            if reader is not None:
                reader.read(self, node)
        except Unreadable as unknown:
            return f"the shape of {unknown} is unknown"
        except (Opaque, TooComplex) as reason:
            return str(reason)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return "it is not as the operator wants it"
        return None

    # Reading nodes

    def _read(self, node: ir.Node) -> None:
        forms = self._expressed(node)
        for k, value in enumerate(node.outputs):
            form = forms[k] if k < len(forms) else None
            try:
                if value.dtype in INTEGERS and value.shape is not None and len(value.shape) <= 1:
                    vector = self.vector(value)
                    if vector is not None and len(vector) == 1:
                        form = Form(((),) * len(value.shape), vector[0])
                    elif vector is not None and form is None and 1 < len(vector) <= _FEW_ELEMENTS:
                        form = self._by_position(vector)
                if form is None:
                    form = unread.opaque(self, node, k)
                    self.opaque.add(value)
                elif value in self._row_operands:
                    self.opaque.add(value)
                    form = self.named(("operand", form), self.one_variable_each(form), value)
            except (Unreadable, TooComplex):
                form = None
            if form is not None and value not in self.opaque and rank_of(value) == len(form.groups):
                self.dims.resolve(value, form.groups)
            # Tensors that are always empty are left alone: there is nothing to gain, and size 0 is no size 1.
            self._forms[value] = None if form is None or any(s.constant == 0 for s in form.sizes) else form

    def _by_position(self, vector: Sequence[Poly]) -> Form:
        """The form of a vector that follows from shapes: what it has at each of its positions."""
        algebra, index = self.algebra, self.algebra.var(0)
        poly = vector[0]
        for position, element in enumerate(vector[1:], 1):
            here = algebra.equal_zero(index - number(position))
            poly = poly + algebra.mul(here, element - vector[0])
        return Form(((number(len(vector)),),), poly)

    def _expressed(self, node: ir.Node) -> list[Form | None]:
        """The forms of a node's outputs by the reader of its operation; None for what is to be named instead.

        Where an equal node was read before, on other tensors, these are its forms with the tensors renamed.
        """
        reader = reader_of(node)
        # What a function is called with, its body does not know.
        if reader is None or any(attr.is_ref() for attr in node.attributes.values()):
            return [None] * len(node.outputs)
        alike = likeness(self, node)
        if alike is not None and (example := self._examples.get(alike[0])) is not None:
            renaming = Renaming(self.algebra, dict(zip(example[0], alike[1], strict=True)))
            with contextlib.suppress(Reordered):
                return [None if f is None else Form(f.groups, renaming.poly(f.poly)) for f in example[1]]
        self.looked_at_output = self.looked_at_producer = False
        forms: list[Form | None]
        try:
            result = reader.read(self, node)
            forms = [result] if isinstance(result, Form) else list(result)
        except (Opaque, TooComplex, Unreadable):
            forms = [None] * len(node.outputs)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            # A node that breaks its operator's schema: what it means is not for us to say.
            forms = [None] * len(node.outputs)
        if self.looked_at_output or self.looked_at_producer:
            self._check_flags(reader, node)
        elif alike is not None and not any(self.algebra.tensors(s) for f in forms if f is not None for s in f.sizes):
            self._examples[alike[0]] = (alike[1], forms)
        return forms

    def _check_flags(self, reader: Reader, node: ir.Node) -> None:
        for flag, looked in (("uses_output_shape", self.looked_at_output), ("uses_producers", self.looked_at_producer)):
            if looked and not getattr(reader, flag):
                raise RuntimeError(f"the reader of {node.op_type} must be registered with {flag}=True")

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
            wanted = [self.extent(group) for group in (form.groups[0], *form.groups[2:])]
            for axis, (size, group) in enumerate(zip(wanted, own.groups, strict=True)):
                if size != self.extent(group) and self.dims.require(labels, axis, size):
                    found = True
        return found

    # Reading once more, with some values taken as opaque

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
            self.named(("source", own), self.one_variable_each(own), source)
            for own, source in zip(forms, sources, strict=True)
        )
        part = copy.copy(self)
        part.tables = dict(self.tables)
        part._forms = ChainMap(dict(zip(sources, opaque, strict=True)), self._forms)
        return _Relative(sources, opaque, part, set(sources), set())
