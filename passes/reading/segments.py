"""The tables that tf2onnx sums segments by, for want of an operator: the gradient of a gather, and tf's segment sums.

    order = TopK(ids)                       the rows, sorted by the segment that each belongs to
    table[segment, place] = row             by ScatterND; the place tells the rows of a segment apart, -1 fills the rest
    ReduceSum(Gather(rows and a row of zeros, table), 1)

Each row is in the table once, in the line of its segment, so that the sum has the rows of a segment. That holds
whatever the places are, as long as no two rows of a segment have the same. Where a table is too narrow, it fails.
"""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly, number
from gradfuse.passes.reading.known import KnownForms, Table
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import INTEGERS, attribute

_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")


def table(forms: KnownForms, scatter: ir.Node) -> Form | None:
    """The form of the table that a ScatterND makes, a name; None where it makes something else."""
    found = _Tables(forms)
    rows = found.of(scatter)
    blank = None if rows is None else forms.operand(scatter, 0)
    if rows is None or blank is None or len(blank.groups) != 2:
        return None
    value = scatter.outputs[0]
    forms.tables[str(value.name)] = rows
    forms.looked_through.update(found.nodes)
    return forms.named(("table", value.name), ((rows.segments,), blank.groups[1]), value)


class _Tables:
    """Reads one table, and notes the nodes that make it one."""

    def __init__(self, forms: KnownForms) -> None:
        self.nodes: list[ir.Node] = []
        self._forms = forms

    def of(self, scatter: ir.Node) -> Table | None:
        blank, places, numbers = scatter.inputs
        pair = self._made_by(places, "Concat")
        if pair is None or len(pair.inputs) != 2 or attribute(pair, "axis", 0) not in (1, -1):
            return None
        if attribute(scatter, "reduction", "none") != "none":
            return None
        columns = [*self._forms.operands(pair), self._forms.operand(scatter, 2)]
        if [len(column.groups) for column in columns] != [2, 2, 1] or any(c.groups[1] for c in columns[:2]):
            return None
        key, place = (self._source(v) for v in pair.inputs)
        ids = self._ids(key, self._source(numbers))
        if ids is None or key is None or not (self._counts_up(place) or self._counts_in_runs(key, place)):
            return None
        segments = self._segments(blank, self._forms.extent(ids.groups[0]))
        return None if segments is None else Table(ids, segments)

    def _segments(self, blank: ir.Value | None, rows: Poly) -> Poly | None:
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
        if content not in (-UNIT, rows) or not sizes or sizes[0].constant == 1:
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
            if pick is None or kinds is None or pick.inputs[1] is not kinds.outputs[2]:
                continue
            if self._source(pick.inputs[0]) is not kinds.outputs[output] or self._source(kinds.inputs[0]) is not key:
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
