"""GroupedBiasAddGrad: sums of the rows of a gradient by groups, of equal size or up to given ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from gradfuse.passes import training_ops
from gradfuse.passes.algebra import ZERO, Algebra, Atom, Monomial, Poly, number
from gradfuse.passes.forms import Form
from gradfuse.passes.rewriting import Builder, FusePass, Mismatch, Rewrite, Site

MAX_GROUPS = 2048
UNSORTED = "its rows are grouped by an index that nothing proves sorted; the operator takes the ends of sorted groups"
_COMBINES = {
    *("Add", "Sum", "Where", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Concat", "Pad", "Identity", "Cast"),
    *("ReduceSum", "Flatten", "Transpose", "ScatterND", "ScatterElements", "ConcatTraining", "GatherGrad"),
}
_DOMAINS = ("", training_ops.DOMAIN)
_CUTS = {"Slice", "Split", "SplitTraining", "Cast"}
_SCATTERS = {"ScatterND", "ScatterElements", "GatherGrad"}
_CARRIERS = {
    "Where": (1, 3),
    "Add": (0, None),
    "Sum": (0, None),
    "Concat": (0, None),
    "ConcatTraining": (0, None),
    **dict.fromkeys(_SCATTERS, (2, 3)),
}


class FuseGroupedBiasAddGradPass(FusePass):
    """Finds a value that is, as a function of one tensor dY,

    1. the sum over a dimension of dY that has dimensions before and after it (groups of equal size); or
    2. the sum over g of [j = g] times the sum of the rows of dY from one end to the next, ends in order, the last one
       the number of rows (static groups, however they were cut and joined again); or
    3. the sum over rows r of [j = number of ends <= r] dY[r, h], the comparison with ends that proves the index sorted.

    An arbitrary index (of a Gather or an embedding) is no proof of order, and is left alone.
    """

    operator = "GroupedBiasAddGrad"
    linear = False  # It would be; but the sums are read relative to a tensor that has the factor already.

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if node is None or node.domain not in _DOMAINS or node.op_type not in _COMBINES:
            return None
        for source in _sources(site, root):
            if source in site.position and site.forms.get(source) is not None and source.dtype == root.dtype:
                rewrite = self._from(site, builder, root, source)
                if rewrite is not None:
                    return rewrite
        return None

    def _from(self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value) -> Rewrite | None:
        form, own = site.forms.relative(root, grad)
        if not form.poly or any(c < 0.5 for c in form.poly.terms.values()):
            return None
        terms = list(form.poly.terms.items())
        if len(terms) == 1:
            plain = self._equal_groups(site, builder, root, grad, form, own)
            return plain if plain is not None else self._given_ends(site, builder, root, grad, form, own)
        return self._static_ends(site, builder, root, grad, form, own)

    def _equal_groups(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        algebra = site.algebra
        rank = len(own.sizes)
        for c in range(1, rank - 1):
            if any(own.sizes[v] == number(1) for v in range(rank)):
                return None
            left = [v for v in range(rank) if v != c]
            names = {v: algebra.var(k) for k, v in enumerate(left)} | {c: algebra.var(-4_000_000)}
            expected = algebra.sum(algebra.substitute(own.poly, names), {-4_000_000: own.sizes[c]})
            layout = [form.sizes[v] for v in range(len(form.sizes))]
            if layout != [own.sizes[v] for v in left] or not form.poly.close_to(expected, 1e-9):
                continue
            sizes = dict(enumerate(own.sizes))
            before, after = left[:c], left[c:]
            value = builder.arrange(grad, list(range(rank)), [before, [c], after], sizes)
            extents = [algebra.product(sizes[v] for v in group) for group in (before, after)]
            fused = builder.fused(self.operator, [value], extents)
            output = builder.reshape(fused, site.extents(root))
            return replace(builder.rewrite("sum-over-group", [fused], output), frontier=(grad,))
        return None

    def _given_ends(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        algebra = site.algebra
        if not _same_columns(form, own):
            return None
        ((monomial, coefficient),) = form.poly.terms.items()
        if len(monomial) != 1 or coefficient != 1.0:
            return None
        outer = algebra.atoms[monomial[0][0]]
        if outer.kind != "sum" or len(outer.args[0]) != 1:
            return None
        row = -4_000_000
        ends = None
        for m in algebra.opened(outer, [row]).terms:
            for a, _ in m:
                atom = algebra.atoms[a]
                if atom.kind == "eq" and (index := algebra.solve(atom, 0)) is not None:
                    ends = _ends(algebra, index, row, form.sizes[0])
        if ends is None:
            raise Mismatch(UNSORTED)
        found = site.find(ends, [form.sizes[0]], root, dtypes=[ir.DataType.INT64, ir.DataType.INT32])
        if found is None or found[1] != 1.0:
            raise Mismatch("the ends of the groups are no value of the graph")
        g = -5_000_000
        below = algebra.less_than_zero(algebra.var(row) - algebra.substitute(ends, {0: algebra.var(g)}))
        index = form.sizes[0] - algebra.sum(below, {g: form.sizes[0]})
        hit = algebra.equal_zero(algebra.var(0) - index)
        element = algebra.substitute(own.poly, {0: algebra.var(row)})
        expected = algebra.sum(algebra.mul(hit, element), {row: own.sizes[0]})
        if not form.poly.close_to(expected, 1e-9):
            raise Mismatch("the rows are not summed by these ends")
        return self._with_ends(site, builder, root, grad, found[0], form, own)

    def _static_ends(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        algebra = site.algebra
        if not _same_columns(form, own):
            return None
        groups, rows = form.sizes[0].integer, own.sizes[0].integer
        if groups is None or rows is None or groups > MAX_GROUPS:
            return None
        counts = [0] * groups
        for monomial, coefficient in form.poly.terms.items():
            read = _static_group(algebra, monomial)
            if read is None or coefficient != 1.0 or not 0 <= read[0] < groups:
                return None
            counts[read[0]] += read[1]
        ends = np.cumsum(counts)
        if ends[-1] != rows:
            return None
        expected, start = ZERO, 0
        for j, count in enumerate(counts):
            if count:
                hit = algebra.equal_zero(algebra.var(0) - number(j))
                expected = expected + algebra.mul(hit, _block(algebra, own, start, count))
            start += count
        if not form.poly.close_to(expected, 1e-9):
            return None
        return self._with_ends(site, builder, root, grad, builder.ints([int(e) for e in ends]), form, own)

    def _with_ends(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, ends: ir.Value, form: Form, own: Form
    ) -> Rewrite:
        groups = form.sizes[0].integer
        if groups is not None and groups > MAX_GROUPS:
            raise Mismatch(f"{groups} groups, more than {MAX_GROUPS}")
        columns = list(range(1, len(own.sizes)))
        rows = builder.arrange(grad, [0, *columns], [[0], columns], dict(enumerate(own.sizes)))
        extents = [form.sizes[0], site.algebra.product(form.sizes[1:])]
        fused = builder.fused(self.operator, [rows, builder.reshape(ends, extents[:1])], extents)
        rewrite = builder.rewrite("sum-to-ends", [fused], builder.reshape(fused, site.extents(root)))
        return replace(rewrite, frontier=(grad, ends), ends={ends: own.sizes[0]})


def _same_columns(form: Form, own: Form) -> bool:
    """Whether both have rows or groups first, and then the same dimensions."""
    return len(own.sizes) > 1 and own.sizes[1:] == form.sizes[1:]


def _block(algebra: Algebra, own: Form, start: int, count: int) -> Poly:
    """The sum of `count` rows from `start` on."""
    if count == 1:
        return algebra.substitute(own.poly, {0: number(start)})
    row = -4_000_000
    return algebra.sum(algebra.substitute(own.poly, {0: algebra.var(row) + number(start)}), {row: number(count)})


def _static_group(algebra: Algebra, monomial: Monomial) -> tuple[int, int] | None:
    """The group and number of rows of a term [j = group] sum(dY rows)."""
    group, count = None, 1
    for a, e in monomial:
        atom: Atom = algebra.atoms[a]
        if e != 1:
            return None
        if atom.kind == "eq":
            x = algebra.solve(atom, 0)
            group = None if x is None else x.integer
        elif atom.kind == "sum" and len(atom.args[0]) == 1 and (n := atom.args[0][0].integer) is not None:
            count = n
        elif atom.kind != "tensor":
            return None
    return None if group is None else (group, count)


def _ends(algebra: Algebra, index: Poly, row: int, groups: Poly) -> Poly | None:
    """The ends, by group, of an index that is the number of ends that are not above the row."""
    counted = (groups - index).terms
    if len(counted) != 1:
        return None
    ((m, c),) = counted.items()
    atom = algebra.atoms[m[0][0]] if len(m) == 1 else None
    if atom is None or c != 1.0 or atom.kind != "sum" or atom.args[0] != (groups,):
        return None
    inner = next(iter(algebra.opened(atom, [0]).terms))
    below = algebra.atoms[inner[0][0]] if len(inner) == 1 else None
    if below is None or below.kind != "lt":
        return None
    ends = algebra.var(row) - below.args[0]
    return None if row in algebra.free(ends) else ends


def _first_input(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if node.inputs else None


def _sums_nothing(site: Site, node: ir.Node) -> bool:
    """Whether a ReduceSum goes over dimensions of size 1 only."""
    source = _first_input(node)
    before = None if source is None else site.forms.get(source)
    after = site.forms.get(node.outputs[0])
    return before is not None and after is not None and before.sizes == after.sizes


def _sources(site: Site, root: ir.Value) -> list[ir.Value]:
    """Tensors whose sums the root may be made of."""
    sources: dict[ir.Value, None] = {}
    todo, seen = [root], {root}
    while todo and len(seen) <= 4 * MAX_GROUPS:
        node = todo.pop().producer()
        if node is None or node.domain not in _DOMAINS or node.op_type not in _COMBINES | _CUTS:
            break
        sums = node.op_type == "ReduceSum" and not _sums_nothing(site, node)
        if sums or node.op_type in _CUTS - {"Cast"}:
            source = _first_input(node)
            while source is not None and (above := source.producer()) is not None and above.op_type in _CUTS:
                source = _first_input(above)
            if source is not None:
                sources[source] = None
            continue
        # The operands that carry sums: no indices, shapes and conditions.
        first, last = _CARRIERS.get(node.op_type, (0, 1))
        for v in node.inputs[first:last]:
            if v is not None and v not in seen and v.const_value is None:
                seen.add(v)
                todo.append(v)
    node = root.producer()
    scatters = node is not None and node.op_type in _SCATTERS and len(node.inputs) > 2
    updates = node.inputs[2] if node is not None and scatters else None
    return [*([updates] if updates is not None else []), *(sources if len(sources) == 1 else ())]
