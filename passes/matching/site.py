"""A graph under rewriting: the forms of its values, and the search for a value by what it computes."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import onnx_ir as ir

from gradfuse.passes.algebra import Algebra, Poly, TooComplex
from gradfuse.passes.matching.graphs import TOLERANCE, Names
from gradfuse.passes.progress import Progress
from gradfuse.passes.reading import Form, Forms, Opaque, ort_training

_Answer = TypeVar("_Answer")

_READERS = 24  # of a value that are looked at
_MOST_TURNED = 4  # variables whose orders are tried

_WIDE = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL}
_NEGATING = ("Neg", "Mul", "Sub")
_LINEAR = {
    *("ReduceSum", "ReduceMean", "Mul", "Div", "Add", "Sub", "Sum", "Neg", "Cast", "Identity", "Reshape", "Squeeze"),
    *("Unsqueeze", "Expand", "Where", "Transpose", "Flatten", "Mean"),
}


class Site:
    """One graph of a model, or the body of a function.

    A value is part of the graph as long as it has a position: the number of its node, or -1 for inputs, initializers
    and values of outer graphs. The indices keep values that a rewrite has taken out; a search skips them.

    Args:
        names: the names of the whole model.
        invented: names of dimensions that come from the inference of shapes.
    """

    def __init__(
        self,
        graph: ir.Graph,
        opset: int,
        names: Names,
        *,
        is_main: bool = True,
        is_function: bool = False,
        progress: Progress | None = None,
        invented: Collection[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.opset = opset
        self.names = names
        self.is_main = is_main
        self.is_function = is_function
        self.forms = Forms(graph, progress, invented)
        self.algebra: Algebra = self.forms.algebra
        self.position: dict[ir.Value, int] = {}
        self.refused: dict[bytes, Exception] = {}
        """What the test by numbers found against rewrites, by what it ran."""
        self.derived_sizes: dict[object, dict[str, int]] = {}
        """What the test by numbers knows of sizes that derive from others, by the sizes of the symbols."""
        self._extents: dict[ir.Value, list[Poly]] = {}
        self._index: dict[tuple[frozenset[object], object], list[tuple[int, ir.Value]]] = {}
        self._rounded: set[ir.Value] = set()
        self._equal: dict[tuple[object, Poly, ir.DataType | None], list[ir.Value]] = {}
        self._donors: dict[Poly, list[tuple[ir.Value, int]]] = {}
        self._answers: dict[object, Any] = {}
        self._reached: dict[str, frozenset[ir.Value]] = {}
        self._notes: dict[str, dict[ir.Value, Any]] = {}
        for value in self._leaves():
            self.enter(value, -1)
        for k, node in enumerate(graph):
            for value in node.outputs:
                self.enter(value, k)
        self._differences = self._subtractions()
        self.unread = self._unread()
        """Nodes that no output depends on: of those of the graph as it was given, what no rewrite reads by now."""
        self.parts_of_outputs = self._linear_parts()
        """The values that linear operations alone take into an output of the graph as it was given, or a YieldOp."""

    # What the graph holds

    def _leaves(self) -> Iterator[ir.Value]:
        """Inputs, initializers, and values of outer graphs."""
        seen: set[ir.Value] = set(self.graph.inputs)
        yield from self.graph.inputs
        own = {v for node in self.graph for v in node.outputs}
        for node in self.graph:
            for value in node.inputs:
                if value is not None and value not in seen and value not in own:
                    seen.add(value)
                    yield value

    def enter(self, value: ir.Value, position: int) -> None:
        """Makes a value part of the graph, and its form known to the searches."""
        self.position[value] = position
        is_rounded = self._is_rounded(value)
        form = self.forms.get(value)
        if form is not None:
            # Sorted by position; a new value mostly comes last.
            insort(self._index.setdefault(self._index_key(form.poly), []), (position, value), key=itemgetter(0))
            if self.algebra.tensors(form.poly) and not is_rounded:
                self._equal.setdefault((form.groups, form.poly, value.dtype), []).append(value)
            for axis, size in enumerate(self.extents(value)):
                if size.integer is None:
                    self._donors.setdefault(size, []).append((value, axis))

    def leave(self, value: ir.Value) -> None:
        """Takes a value out of the graph, so that no search finds it."""
        self.position.pop(value, None)

    def first(self, value: ir.Value) -> ir.Value:
        """The first value with the same elements in the same dimensions: what an Identity, or two views, are of."""
        values = self.equal(value)
        return values[0] if len(values) == 1 else min(values, key=lambda v: self.position.get(v, -1))

    def equal(self, value: ir.Value) -> list[ir.Value]:
        """The values with the same elements in the same dimensions, with the value itself."""
        form = self.forms.get(value)
        if form is None or self.position.get(value, -1) < 0 or value in self._rounded:
            return [value]
        found = self._equal.get((form.groups, form.poly, value.dtype), ())
        return [v for v in found if v in self.position] or [value]

    def copies(self, value: ir.Value) -> list[ir.Value]:
        """A value, which may be an input, and the values with the same elements that nodes make."""
        form = self.forms.get(value)
        if form is None or value in self._rounded:
            return [value]
        found = self._equal.get((form.groups, form.poly, value.dtype), ())
        return [value, *(v for v in found if v is not value and self.position.get(v, -1) >= 0)]

    def _is_rounded(self, value: ir.Value) -> bool:
        """Whether a value is of a narrow type or computed from one: its form says nothing of what was lost there."""
        node = value.producer()
        read = () if node is None else [v for v in node.inputs if v is not None]
        if value.dtype not in _WIDE or any(v.dtype not in _WIDE or v in self._rounded for v in read):
            self._rounded.add(value)
        return value in self._rounded

    def is_ahead(self, value: ir.Value, root: ir.Value) -> bool:
        """Whether a value is part of the graph, and computed before the root."""
        return self.position.get(value, self.position[root]) < self.position[root]

    def knows(self, value: ir.Value) -> bool:
        """Whether the dimensions of a value are known."""
        return value in self._extents or self.forms.get(value) is not None

    def extents(self, value: ir.Value) -> list[Poly]:
        """The sizes of the dimensions of a value."""
        known = self._extents.get(value)
        if known is None:
            known = self._extents[value] = [self.forms.extent(g) for g in self.forms.form(value).groups]
        return known

    def set_extents(self, value: ir.Value, sizes: Sequence[Poly]) -> None:
        """Says what the dimensions of a new value are."""
        self._extents[value] = list(sizes)

    # Answers that are kept

    def answer(self, question: str, groups: object, polys: Sequence[Poly], find: Callable[[], _Answer]) -> _Answer:
        """What `find` returns for polynomials over groups of variables, whatever their tensors are called.

        It is called once for all polynomials of one pattern, so its result must depend on the pattern alone.
        """
        key = (question, groups, self.algebra.joint_pattern(polys))
        if key not in self._answers:
            self._answers[key] = find()
        found: _Answer = self._answers[key]
        return found

    def notes(self, subject: str) -> dict[ir.Value, Any]:
        """What a rule keeps about values of this graph. It must stay true when a value behind them is replaced."""
        return self._notes.setdefault(subject, {})

    def reached(self, subject: str, starts: Callable[[ir.Node], bool], through: Collection[str]) -> frozenset[ir.Value]:
        """The values of the graph as it was given that operators of some kinds take from some nodes on.

        All are found in one pass over the graph, so that rules need not look behind every value.

        Args:
            subject: what the answer is kept by.
            starts: whether a node is one to begin at.
            through: the operators of the default domain.
        """
        if subject not in self._reached:
            found: set[ir.Value] = set()
            for node in self.graph:
                if starts(node) or (
                    not node.domain and node.op_type in through and any(v in found for v in node.inputs)
                ):
                    found.update(node.outputs)
            self._reached[subject] = frozenset(found)
        return self._reached[subject]

    # Finding values

    def read_by(self, values: Iterable[ir.Value], kinds: Collection[str]) -> list[ir.Value]:
        """What nodes of some kinds, operators of the default domain, make of values; not all of a value with many."""
        nodes = {
            use.node: None
            for value in values
            for use in itertools.islice(value.uses(), _READERS)
            if use.node.op_type in kinds and not use.node.domain and use.node.graph is self.graph
        }
        return [node.outputs[0] for node in nodes if node.outputs[0] in self.position]

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

    def find_turned(
        self,
        poly: Poly,
        variables: Sequence[int],
        sizes: Mapping[int, Poly],
        root: ir.Value,
        *,
        dtypes: Iterable[ir.DataType | None],
        shape: Sequence[Poly] | None = None,
    ) -> tuple[ir.Value, tuple[int, ...], float] | None:
        """As `find`, of a polynomial over some variables, but their order may be another one; with that order.

        onnxruntime moves transpositions past what is elementwise, and exporters have them where they like.
        """
        orders = itertools.permutations(variables) if len(variables) <= _MOST_TURNED else [tuple(variables)]
        turned = None
        for order in orders:
            own = self.algebra.substitute(poly, {v: self.algebra.var(k) for k, v in enumerate(order)})
            found = self.find(own, [sizes[v] for v in order], root, dtypes=dtypes, shape=shape)
            if found is not None and found[1] == 1.0:
                return found[0], order, 1.0
            if found is not None and turned is None:
                turned = found[0], order, found[1]
        return turned

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
        if own.terms == poly.terms:
            return 1.0
        ratio = self.algebra.ratio(own, poly)
        factor = None if ratio is None else ratio.constant
        # What counts as equal may be 1e-5 off, as by an epsilon beside 1, which is more than a rounding.
        is_same = own == poly and (factor is None or abs(factor - 1.0) <= TOLERANCE[ir.DataType.FLOAT])
        return 1.0 if is_same else factor

    def _index_key(self, poly: Poly) -> tuple[frozenset[object], object]:
        """What values that are multiples of each other have in common, however their dimensions are grouped."""
        tensors = self.algebra.tensors(poly)
        return (tensors, len(poly)) if self.algebra.free(poly) else (tensors, frozenset(poly.terms))

    def donor(self, size: Poly, root: ir.Value) -> tuple[ir.Value, int] | None:
        """A value ahead of the root, and its dimension of this size."""
        for value, axis in self._donors.get(size, ()):
            if self.is_ahead(value, root):
                return value, axis
        return None

    def differences(self, poly: Poly) -> list[ir.Node]:
        """The subtractions of floats, in order, that a polynomial may be a multiple of."""
        tensors = (None, *self.algebra.tensors(poly))
        spread = _spread(poly)
        spreads = (None, spread - 1, spread, spread + 1)
        keys = [(len(poly), tensor, s) for tensor in tensors for s in spreads]
        found = [entry for key in keys for entry in self._differences.get(key, ())]
        return [node for _, node in sorted(found, key=itemgetter(0))]

    def operands_of_difference(self, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        """What a node subtracts from what, the latter first: as a difference, or a sum with a negative."""
        if node.domain or node.op_type not in ("Sub", "Add", "Sum") or len(node.inputs) != 2:
            return None
        first, second = node.inputs
        if first is None or second is None:
            return None
        if node.op_type == "Sub":
            return first, second
        for own, other in ((first, second), (second, first)):
            above, form = other.producer(), self.forms.get(other)
            if above is None or above.domain or above.op_type not in _NEGATING or form is None or not form.poly:
                continue
            for value in above.inputs:
                opposite = None if value is None else self.forms.get(value)
                if value is not None and opposite == Form(form.groups, -form.poly):
                    return own, value
        return None

    def _subtractions(self) -> dict[tuple[int, object, int | None], list[tuple[int, ir.Node]]]:
        """The subtractions of floats, in order, by what their multiples share.

        That is the number of terms, the rarest of the tensors and the spread of the coefficients.
        """
        found = []
        for k, node in enumerate(self.graph):
            if node.outputs[0].dtype in TOLERANCE and self.operands_of_difference(node) is not None:
                form = self.forms.get(node.outputs[0])
                if form is not None:
                    found.append((k, node, form.poly, self.algebra.tensors(form.poly)))
        uses = Counter(tensor for *_, tensors in found for tensor in tensors)
        index: dict[tuple[int, object, int | None], list[tuple[int, ir.Node]]] = {}
        for k, node, poly, tensors in found:
            rarest = min(tensors, key=lambda t: (uses[t], str(t)), default=None)
            # With other groups of dimensions, index variables have other coefficients.
            spread = None if self.algebra.has_variable_factor(poly) else _spread(poly)
            index.setdefault((len(poly), rarest, spread), []).append((k, node))
        return index

    def _unread(self) -> set[ir.Node]:
        found: set[ir.Node] = set()
        for node in reversed(self.graph):
            # Operators of others may have effects.
            if (not node.domain or ort_training.is_pure(node)) and not any(
                v.is_graph_output() or any(use.node not in found for use in v.uses()) for v in node.outputs
            ):
                found.add(node)
        return found

    def unread_behind(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """Those of the nodes that nothing reads of which values are computed."""
        found, todo = set[ir.Node](), list(values)
        while todo:
            node = todo.pop().producer()
            if node is not None and node in self.unread and node not in found:
                found.add(node)
                todo += [v for v in node.inputs if v is not None]
        return found

    def _linear_parts(self) -> set[ir.Value]:
        graphs = {self.graph, *self.graph.subgraphs()}
        todo = [v for graph in graphs for v in graph.outputs]
        # By these, onnxruntime-training hands results to PyTorch in the middle of a graph.
        yields = (node for graph in graphs for node in graph if node.op_type == "YieldOp")
        todo += [v for node in yields for v in node.inputs if v is not None]
        found = set(todo)
        while todo:
            node = todo.pop().producer()
            if node is not None and node.graph in graphs and node.op_type in _LINEAR:
                new = [v for v in dict.fromkeys(node.inputs) if v is not None and v not in found]
                found.update(new)
                todo.extend(new)
        return found


def _spread(poly: Poly) -> int:
    """The logarithm of the ratio of the largest to the smallest coefficient, in steps of 0.0001."""
    sizes = [abs(c) for c in poly.terms.values()]
    ratio = max(sizes, default=1.0) / min(sizes, default=1.0)
    return round(1e4 * math.log(ratio)) if math.isfinite(ratio) else 0
