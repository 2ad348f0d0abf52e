"""Sums over segments as tf2onnx writes them, for want of an operator: the gradient of a gather, and tf's segment sums.

    order = TopK(ids)                       the rows, sorted by the segment that each belongs to
    table[segment, place] = row             by ScatterND; the place tells the rows of a segment apart, -1 fills the rest
    ReduceSum(Gather(rows and a row of zeros, table), 1)

Each row is in the table once, in the line of its segment, so that the sum has the rows of a segment: that holds
whatever the places are, as long as no two rows of a segment have one. A table that is too narrow is an error at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly, number
from gradfuse.passes.reading.indexing import scattered
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import INTEGERS, attribute

_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")


def segment_sum(forms: KnownForms, node: ir.Node) -> Form | None:
    """What a ReduceSum of gathered rows is, where it adds up the rows of segments; None for other sums."""
    found = _SegmentSum(forms)
    sums = found.read(node)
    if sums is not None:
        forms.looked_through.update(found.nodes)
    return sums


@dataclass(frozen=True)
class _Table:
    """Which rows belong to which segment."""

    ids: Form  # of each row, with one dimension
    segments: Poly  # how many there are


class _SegmentSum:
    """One sum, and the nodes that make it one over segments."""

    def __init__(self, forms: KnownForms) -> None:
        self.nodes: list[ir.Node] = []
        self._forms = forms

    def read(self, node: ir.Node) -> Form | None:
        forms = self._forms
        gather = self._made_by(node.inputs[0], "Gather")
        if gather is None or attribute(gather, "axis", 0) != 0:
            return None
        rows = self._rows(gather.inputs[0])
        table = None if rows is None else self._table(gather.inputs[1], rows)
        if rows is None or table is None or forms.axes(node, 1, len(rows.groups) + 1) != [1]:
            return None
        index = Form((table.ids.groups[0], *rows.groups[1:]), table.ids.poly)
        sums, _ = scattered(forms, Form(((table.segments,), *rows.groups[1:]), ZERO), index, rows, 0)
        if not attribute(node, "keepdims", 1):
            return sums
        return forms.moved(sums, [0, None, *range(1, len(sums.groups))])

    def _rows(self, value: ir.Value | None) -> Form | None:
        """The rows that come before a row of zeros; None where there is no such row."""
        concat = self._made_by(value, "Concat")
        if concat is None or len(concat.inputs) != 2 or attribute(concat, "axis", 0) != 0:
            return None
        rows, end = self._forms.operands(concat)
        return None if end.poly or end.groups[0] else rows

    def _table(self, value: ir.Value | None, rows: Form) -> _Table | None:
        """The table in which each row stands in the line of its segment; None for other indices."""
        scatter = self._made_by(value, "ScatterND")
        if scatter is None or attribute(scatter, "reduction", "none") != "none":
            return None
        blank, places, numbers = scatter.inputs
        segments = self._segments(blank, rows)
        pair = self._made_by(places, "Concat")
        if segments is None or pair is None or len(pair.inputs) != 2 or attribute(pair, "axis", 0) not in (1, -1):
            return None
        columns = [*self._forms.operands(pair), self._forms.operand(scatter, 2)]
        if [len(column.groups) for column in columns] != [2, 2, 1] or any(c.groups[1] for c in columns[:2]):
            return None
        key, place = (self._source(v) for v in pair.inputs)
        numbers = self._source(numbers)
        ids = self._ids(key, numbers)
        if ids is None or key is None or self._forms.extent(ids.groups[0]) != self._forms.extent(rows.groups[0]):
            return None
        if not (self._counts_up(place) or self._counts_in_runs(key, place)):
            return None
        return _Table(ids, segments)

    def _segments(self, blank: ir.Value | None, rows: Form) -> Poly | None:
        """The lines of a table that is filled with the number of the row of zeros, which comes last."""
        array = self._forms.constant(blank)
        if array is not None:
            content, sizes = self._forms.constants.form(array).poly, [number(n) for n in array.shape]
        elif (node := self._made_by(blank, "ConstantOfShape")) is not None:
            fill = node.attributes.get("value")
            content = ZERO if fill is None else number(int(fill.as_tensor().numpy().item()))
            sizes = self._sizes(node.inputs[0])
        elif (node := self._made_by(blank, "Expand")) is not None:
            content, sizes = self._forms.operand(node, 0).poly, self._sizes(node.inputs[1])
        else:
            return None
        if content not in (-UNIT, self._forms.extent(rows.groups[0])) or not sizes or sizes[0].constant == 1:
            return None
        return sizes[0]

    def _sizes(self, shape: ir.Value | None) -> list[Poly]:
        """The sizes of the dimensions up to one that depends on data."""
        known = self._forms.vector(shape)
        concat = self._made_by(shape, "Concat") if known is None else None
        return (known or []) if concat is None else (self._forms.vector(concat.inputs[0]) or [])

    def _ids(self, key: ir.Value | None, numbers: ir.Value | None) -> Form | None:
        """The segment of each row, where `key` has those of the rows with these numbers, each of them once."""
        if key is None or numbers is None:
            return None
        if self._counts_up(numbers):
            ids = self._forms.form(key)
        else:
            sort = self._made_by(key, "TopK")
            if sort is None or key is not sort.outputs[0] or numbers is not sort.outputs[1]:
                return None
            ids = self._forms.operand(sort, 0)
            if self._forms.vector(sort.inputs[1]) != [self._forms.extent(ids.groups[0])]:
                return None
        return ids if len(ids.groups) == 1 and ids.groups[0] else None

    def _counts_up(self, value: ir.Value | None) -> bool:
        """Whether a line has the numbers 0, 1, 2 and so on."""
        form = None if value is None else self._forms.get(value)
        return form is not None and len(form.groups) == 1 and form.poly == self._forms.layouts.position(form, 0)

    def _counts_in_runs(self, key: ir.Value, place: ir.Value | None) -> bool:
        """Whether no two places are the same where the keys are, and none is below 0.

        They are the numbers of the keys, less that of the first of its kind; or modulo the number of keys of the kind,
        where those of a kind are next to each other.
        """
        for op, output in (("Sub", 1), ("Mod", 3)):
            node = self._made_by(place, op)
            if node is None or not self._counts_up(self._source(node.inputs[0])):
                continue
            pick = self._made_by(self._source(node.inputs[1]), "Gather")
            kinds = None if pick is None else self._made_by(pick.inputs[1], "Unique")
            if pick is None or kinds is None or self._source(kinds.inputs[0]) is not key or len(kinds.outputs) <= output:
                continue
            if pick.inputs[1] is not kinds.outputs[2] or self._source(pick.inputs[0]) is not kinds.outputs[output]:
                continue
            if op == "Sub":
                return True
            sort = self._made_by(key, "TopK")
            if sort is not None and key is sort.outputs[0] and attribute(sort, "sorted", 1):
                return True
        return False

    def _source(self, value: ir.Value | None) -> ir.Value | None:
        """The line of integers that a value is a view of; the order of its elements is the same."""
        while value is not None and (node := self._forms.producer(value)) is not None and node.domain == "":
            source = node.inputs[0] if node.inputs else None
            if node.op_type not in _VIEWS or source is None or {value.dtype, source.dtype} - INTEGERS:
                break
            self.nodes.append(node)
            value = source
        return value

    def _made_by(self, value: ir.Value | None, op: str) -> ir.Node | None:
        """The node of this operator that computes a value; None where another one does."""
        node = self._forms.producer(value)
        if node is None or node.domain or node.op_type != op:
            return None
        self.nodes.append(node)
        return node
