"""GroupedBiasAddGrad: sums of the rows of a gradient by groups, of equal size or up to given ends."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops.grouped_bias_add_grad import MAX_GROUPS
from gradfuse.passes.algebra import MOST_SUMMED, UNIT, ZERO, Algebra, Atom, Monomial, Poly, number
from gradfuse.passes.matching import TOLERANCE, VIEWS, Builder, FusePass, Mismatch, Rewrite, Site, names_of, normalizing
from gradfuse.passes.reading import Form, Order, attribute, ort_training
from gradfuse.passes.reading.nodes import constant_of
from gradfuse.passes.report import NearMiss

UNSORTED = "its rows are grouped by an index that nothing proves sorted; the operator takes the ends of sorted groups"
_VIEWS = {"Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Identity"}
_WRAPS = (
    "it takes the running sum at one less than each end, which for an end of 0 is the last row, and the operator's sum "
    "is 0 there"
)
_IN_LOOP = "a loop over the groups, whose body sums the rows of one: what runs of a body give together is not read"
_IN_PIECES = (
    "the rows of each group are cut out and summed by themselves, and only a run knows where they begin and end: the "
    "rule reads sums over all rows"
)
_COMBINES = {
    *("Add", "Sum", "Where", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Concat", "Pad", "Identity", "Cast"),
    *("ReduceSum", "Flatten", "Transpose", "ScatterND", "ScatterElements", "ConcatTraining", "GatherGrad"),
    *("MatMul", "Gemm", "Einsum", "Tile", "Sub"),
}
_BEHIND_ENDS = {"Gather", "Concat", "Pad", "Slice", "Sub", *_VIEWS}
"""What takes the differences of running sums at the ends of groups."""
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_SEARCHED = 256  # values behind a sum in which its index is looked for
_SCATTER_ADD_OPSET = 16
_DOMAINS = ("", ort_training.DOMAIN)
_CUTS = {"Slice", "Split", "SplitTraining", "Cast"}
_MEANS = normalizing.REDUCTIONS - {"ReduceSum"}
_SCATTERS = {"ScatterND", "ScatterElements", "GatherGrad"}
_PRODUCTS = {"MatMul", "Gemm", "Einsum"}
_CARRIERS = {
    "Where": (1, 3),
    "Add": (0, None),
    "Sum": (0, None),
    "Sub": (0, None),
    "Gather": (0, 1),
    "Concat": (0, None),
    "ConcatTraining": (0, None),
    **dict.fromkeys(_SCATTERS, (2, 3)),
}


class FuseGroupedBiasAddGradPass(FusePass):
    """Finds a value that is, as a function of one tensor dY,

    1. the sum over a dimension of dY that has dimensions before and after it (groups of equal size); or
    2. the sum over g of [j = g] times the sum of the rows of dY from one end to the next, ends in order, the last one
       the number of rows (static groups, however they were cut and joined again); or
    3. the sum over rows r of [j = number of ends <= r] dY[r, h], the comparison with ends that proves the index sorted;
    4. the same with a mask [r < end of j] less [r < end of j - 1], which is 1 in the rows of a group only; or
    5. the same with any other index that never decreases and is never negative, whatever the inputs are
       (`reading/order.py`): the ends are counted from it.

    Ends that do not increase are an error for the op. Where rows past the last end have no group in the graph, and the
    graph allows them, the op gets one more group for them, which is cut off.

    An arbitrary index (of a Gather or an embedding) is not known to be sorted, and is left alone.
    """

    operator = "GroupedBiasAddGrad"
    linear = False  # It would be; but the sums are read relative to a tensor that has the factor already.

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if node is None or node.domain not in _DOMAINS:
            return None
        if node.op_type not in _COMBINES and not _sums_windows(site, node) and _scaled_mean(site, node) is None:
            return None
        if node.op_type == "Sub" and root not in _running_sums(site):
            return None
        if _sums_nothing(site, node) and any(_sums_nothing(site, use.node) for use in root.uses()):
            return None  # It was tried as its successor.
        miss: Mismatch | None = None
        sources = _sources(site, root)
        for source in dict.fromkeys([*sources, *map(_behind_own_views, sources)]):
            if source in site.position and site.forms.get(source) is not None and source.dtype == root.dtype:
                try:
                    rewrite = self._from(site, builder, root, source)
                    if rewrite is not None and _may_wrap(site, root):
                        raise Mismatch(_WRAPS)
                except Mismatch as reason:
                    # Rows that are gathered in another order are not groups, but they may be in the gathered order.
                    miss = miss or reason
                    continue
                if rewrite is not None:
                    return rewrite
        if miss is not None:
            raise miss
        return None

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        yield from _rows_by_index(site)
        yield from _rows_by_masks(site)
        yield from _rows_by_loops(site)
        yield from _rows_in_pieces(site)

    def _from(self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value) -> Rewrite | None:
        form, own = site.forms.relative(root, grad)
        if not form.poly:
            return None
        ways: tuple[Callable[..., Rewrite | None], ...] = (self._static_ends, self._masked_rows, self._sorted_index)
        if len(form.poly) == 1:
            ways = (self._equal_groups, self._blocks, self._given_ends, self._sorted_index)
        miss: Mismatch | None = None
        for way in ways:
            try:
                rewrite = way(site, builder, root, grad, form, own)
            except Mismatch as reason:
                miss = miss or reason
                builder.discard()
                continue
            if rewrite is not None:
                return rewrite
        if miss is not None:
            raise miss
        return None

    def _equal_groups(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        algebra = site.algebra
        rank = len(own.sizes)
        if any(size == number(1) for size in own.sizes):
            return None
        for c, after_c in itertools.combinations(range(1, rank), 2):
            summed = list(range(c, after_c))
            left = [v for v in range(rank) if v not in summed]
            apart = dict(zip(summed, algebra.fresh(len(summed)), strict=True))
            names = {v: algebra.var(k) for k, v in enumerate(left)} | {v: algebra.var(w) for v, w in apart.items()}
            bound = {w: own.sizes[v] for v, w in apart.items()}
            if len(bound) > MOST_SUMMED:
                continue
            expected = algebra.sum(algebra.substitute(own.poly, names), bound)
            layout = [form.sizes[v] for v in range(len(form.sizes))]
            if layout != [own.sizes[v] for v in left] or not form.poly.close_to(expected, 1e-9):
                continue
            sizes = dict(enumerate(own.sizes))
            before, after = left[:c], left[c:]
            value = builder.arrange(grad, list(range(rank)), [before, summed, after], sizes)
            extents = [algebra.product(sizes[v] for v in group) for group in (before, after)]
            fused = builder.fused(self.operator, [value], extents)
            output = builder.reshape(fused, site.extents(root))
            return replace(builder.rewrite("sum-over-group", [fused], output), frontier=(grad,))
        return None

    def _blocks(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        """Groups of equal size whose rows are one dimension."""
        algebra = site.algebra
        if not _same_columns(form, own) or len(own.sizes) < 2:
            return None
        groups, rows = form.sizes[0].integer, own.sizes[0].integer
        if not groups or not rows or rows % groups or groups in (1, rows):
            return None
        (row,), count = algebra.fresh(1), number(rows // groups)
        block = {0: algebra.mul(count, algebra.var(0)) + algebra.var(row)}
        expected = algebra.sum(algebra.substitute(own.poly, block), {row: count}, {0: form.sizes[0]})
        if not form.poly.close_to(expected, 1e-9):
            return None
        width = algebra.product(form.sizes[1:])
        columns = list(range(1, len(own.sizes)))
        value = builder.arrange(grad, [0, *columns], [[0], columns], dict(enumerate(own.sizes)))
        value = builder.reshape(value, [form.sizes[0], count, width])
        fused = builder.fused(self.operator, [value], [form.sizes[0], width])
        rewrite = builder.rewrite("sum-over-group", [fused], builder.reshape(fused, site.extents(root)))
        return replace(rewrite, frontier=(grad,))

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
        row, g = algebra.fresh(2)
        index = None
        for m in algebra.opened(outer, [row]).terms:
            for a, _ in m:
                atom = algebra.atoms[a]
                if atom.kind == "eq" and (x := algebra.solve(atom, 0)) is not None and row in algebra.free(x):
                    index = x
        if index is None and len(own.sizes) < 2:
            return None  # Blocks of a vector are no groups of rows.
        counted = None if index is None else _ends(algebra, index, row)
        if counted is None:
            known = form.sizes[0].integer or 0
            raise Mismatch(UNSORTED + (f"; {known} groups, more than {MAX_GROUPS}" if known > MAX_GROUPS else ""))
        ends, count = counted
        groups = form.sizes[0]
        if (groups - count).constant not in (0.0, 1.0):
            raise Mismatch("there are more or fewer groups than ends")
        below = algebra.less_than_zero(algebra.var(row) - algebra.substitute(ends, {0: algebra.var(g)}))
        hit = algebra.equal_zero(algebra.var(0) - count + algebra.sum(below, {g: count}))
        if not form.poly.close_to(_summed(algebra, own, hit, row), 1e-9):
            raise Mismatch("the rows are not summed by these ends")
        # A scatter has no place for rows past its last group.
        node = root.producer()
        closed = node is not None and node.op_type in _SCATTERS and groups == count
        return self._with_given_ends(site, builder, root, grad, ends, count, closed, form, own)

    def _masked_rows(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        algebra = site.algebra
        if len(form.poly) > 3 or not _same_columns(form, own):
            return None
        (row,), groups = algebra.fresh(1), form.sizes[0]
        form = Form(form.groups, _without_implied(algebra, form.poly, row))
        sums = {atom for m in form.poly.terms for a, _ in m if _is_row_sum(atom := algebra.atoms[a])}
        inside = {a for atom in sums for m in algebra.opened(atom, [row]).terms for a, _ in m}
        ends = [algebra.var(row) - algebra.atoms[a].args[0] for a in sorted(inside) if algebra.atoms[a].kind == "lt"]
        for end in ends:
            if row in algebra.free(end):
                continue
            below = algebra.less_than_zero(algebra.var(row) - end)
            before = {0: algebra.var(0) - UNIT}
            start = algebra.substitute(below, before)
            earlier = algebra.mul(UNIT - algebra.less_than_zero(algebra.var(0) - UNIT), start)
            # Where the first group has a start as well, the rows before it are in none.
            for first, ahead in ((0, earlier), (1, start)):
                both = algebra.mul(below, ahead)
                for mask in (below - ahead, below - both, below + ahead - both.scaled(2.0)):
                    if form.poly.close_to(_summed(algebra, own, mask, row), 1e-9):
                        last = algebra.substitute(end, before) if first else end
                        count = groups + number(first)
                        return self._with_given_ends(site, builder, root, grad, last, count, False, form, own, first)
        return None

    def _sorted_index(
        self, site: Site, builder: Builder, root: ir.Value, grad: ir.Value, form: Form, own: Form
    ) -> Rewrite | None:
        """Rows by an index that never decreases, however it is computed: the number of rows up to a group is its
        end."""
        if not _same_columns(form, own):
            return None
        algebra, order, rows, groups = site.algebra, Order(site.forms), own.sizes[0], form.sizes[0]
        (row,) = algebra.fresh(1)
        for index in _indices(site, order, root, grad, rows):
            known, taken, picked = site.forms.relative(root, grad, index)
            hit = algebra.equal_zero(algebra.var(0) - algebra.substitute(picked.poly, {0: algebra.var(row)}))
            try:
                summed, tested = _without_range_tests(algebra, known.poly, hit, row, groups)
            except Mismatch:
                continue
            if not summed.close_to(algebra.mul(hit, _row(algebra, taken, row)), 1e-9):
                continue
            scatter = root.producer()
            closed = scatter is not None and scatter.op_type in _SCATTERS and not tested
            limit = groups.integer
            closed = closed or (limit is not None and order.most(index) < limit)
            ends = _counted_ends(site, builder, builder.reshape(index, [rows]), rows, groups, closed)
            return self._with_ends(site, builder, root, grad, ends, form, own)
        return None

    def _with_given_ends(
        self,
        site: Site,
        builder: Builder,
        root: ir.Value,
        grad: ir.Value,
        ends: Poly,
        count: Poly,
        closed: bool,
        form: Form,
        own: Form,
        first: int = 0,
    ) -> Rewrite:
        """Groups up to the given ends, elements of an integer tensor, and unless closed one more up to the last row.

        Those before the first one are left out.
        """
        integers = [ir.DataType.INT64, ir.DataType.INT32]
        found = site.find(ends, [count], root, dtypes=integers)
        if found is None or found[1] != 1.0:
            raise Mismatch("the ends of the groups are no value of the graph")
        value = builder.reshape(found[0], [count])
        if not closed:
            assert value.dtype is not None
            rows = builder.cast(builder.shape([own.sizes[0]]), value.dtype)
            value = builder.op("Concat", [value, rows], value.dtype, [count + UNIT], axis=0)
        return self._with_ends(site, builder, root, grad, value, form, own, (found[0],), first)

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
        self,
        site: Site,
        builder: Builder,
        root: ir.Value,
        grad: ir.Value,
        ends: ir.Value,
        form: Form,
        own: Form,
        given: tuple[ir.Value, ...] = (),
        first: int = 0,
    ) -> Rewrite:
        (count,) = site.extents(ends)
        if count.integer is not None and count.integer > MAX_GROUPS:
            raise Mismatch(f"{count.integer} groups, more than {MAX_GROUPS}")
        columns = list(range(1, len(own.sizes)))
        rows = builder.arrange(grad, [0, *columns], [[0], columns], dict(enumerate(own.sizes)))
        groups, width = form.sizes[0], site.algebra.product(form.sizes[1:])
        output = fused = builder.fused(self.operator, [rows, ends], [count, width])
        if count != groups:
            cut = [builder.ints([first]), builder.ints([-1]), builder.ints([0])]
            output = builder.op("Slice", [fused, *cut], fused.dtype, [groups, width])
        rewrite = builder.rewrite("sum-to-ends", [fused], builder.reshape(output, site.extents(root)))
        return replace(rewrite, frontier=(grad, *given), ends=dict.fromkeys(given, own.sizes[0]))


def _indices(site: Site, order: Order, root: ir.Value, grad: ir.Value, rows: Poly) -> Iterator[ir.Value]:
    """The integers behind the root, as many as rows, that are sorted and not negative whatever the inputs are."""
    todo, seen = deque([root]), {root, grad}
    while todo and len(seen) <= _SEARCHED:
        value = todo.popleft()
        form = site.forms.get(value) if value.dtype in _INTEGERS and value in site.position else None
        if form is not None and form.sizes == (rows,) and order.rises(value) and order.least(value) >= 0:
            yield value
            continue
        node = value.producer()
        for v in () if node is None else node.inputs:
            if v is not None and v not in seen and _is_made_of_conditions(site, v):
                seen.add(v)
                todo.append(v)


def _is_made_of_conditions(site: Site, value: ir.Value) -> bool:
    """Whether a value is an integer or a condition, or a number made of conditions, such as a one-hot."""
    form = site.forms.get(value)
    if value.dtype in (*_INTEGERS, ir.DataType.BOOL):
        return True
    return form is not None and all(site.algebra.atoms[a].indicator for m in form.poly.terms for a, _ in m)


def _without_range_tests(algebra: Algebra, poly: Poly, hit: Poly, row: int, groups: Poly) -> tuple[Poly, bool]:
    """The summand of a sum over rows, all of whose terms have the factor hit, [group = index of the row], without tests
    for what a group, variable 0, is anyhow: in range. Also gives whether there were any.

    Raises Mismatch for any other sum.
    """
    ((factor,),) = hit.terms
    summand, tested = ZERO, False
    for monomial, c in poly.terms.items():
        atom = algebra.atoms[monomial[0][0]] if len(monomial) == 1 else None
        if atom is None or not _is_row_sum(atom):
            raise Mismatch(UNSORTED)
        summand = summand + algebra.opened(atom, [row]).scaled(c)
    if not all(factor in monomial for monomial in summand.terms):
        raise Mismatch(UNSORTED)
    difference = algebra.atoms[factor[0]].args[0]
    mirrored = {0: groups - UNIT - algebra.var(0)}
    for condition in algebra.indicators(summand):
        for sign in (1.0, -1.0) if condition.kind == "lt" else ():
            # What is tested, of an index that is the group.
            own = condition.args[0] + difference.scaled(sign)
            for at in (own, algebra.substitute(own, mirrored)):
                verdict = algebra.less_than_zero(at).constant
                if verdict is not None:
                    summand, tested = algebra.given(summand, condition, verdict == 1), True
    return summand, tested


def _row(algebra: Algebra, own: Form, row: int) -> Poly:
    return algebra.substitute(own.poly, {0: algebra.var(row)})


def _counted_ends(site: Site, builder: Builder, index: ir.Value, rows: Poly, groups: Poly, closed: bool) -> ir.Value:
    """The ends of the groups of a sorted index; unless closed, of one more, for the rows that are in none of them."""
    if site.opset < _SCATTER_ADD_OPSET:
        raise Mismatch(f"to count the rows of each group takes opset {_SCATTER_ADD_OPSET}")
    count = groups if closed else groups + UNIT
    integers = ir.DataType.INT64
    index = builder.cast(index, integers)
    if not closed:
        number_of_groups = builder.shape([groups])
        index = builder.op("Min", [index, number_of_groups], integers, [rows])
    blank = builder.op("Expand", [builder.ints([0]), builder.shape([count])], integers, [count])
    ones = builder.op("Expand", [builder.ints([1]), builder.shape([rows])], integers, [rows])
    counts = builder.op("ScatterElements", [blank, index, ones], integers, [count], axis=0, reduction="add")
    axis = builder.constant(np.asarray(0), integers)
    return builder.op("CumSum", [counts, axis], integers, [count])


def _same_columns(form: Form, own: Form) -> bool:
    """Whether both have rows or groups first, and then the same dimensions."""
    return bool(own.sizes and form.sizes) and own.sizes[1:] == form.sizes[1:]


def _block(algebra: Algebra, own: Form, start: int, count: int) -> Poly:
    """The sum of `count` rows from `start` on."""
    if count == 1:
        return algebra.substitute(own.poly, {0: number(start)})
    (row,) = algebra.fresh(1)
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


def _ends(algebra: Algebra, index: Poly, row: int) -> tuple[Poly, Poly] | None:
    """The ends of an index that is the number of ends that are not above the row; and how many there are."""
    above = [(m, c) for m, c in index.terms.items() if row in algebra.free_of_monomial(m)]
    if len(above) != 1 or len(above[0][0]) != 1 or above[0][1] != -1.0:
        return None
    atom = algebra.atoms[above[0][0][0][0]]
    if not _is_row_sum(atom) or index - Poly(dict(above)) != atom.args[0][0]:
        return None
    inner = next(iter(algebra.opened(atom, [0]).terms))
    below = algebra.atoms[inner[0][0]] if len(inner) == 1 else None
    if below is None or below.kind != "lt":
        return None
    ends = algebra.var(row) - below.args[0]
    return None if row in algebra.free(ends) else (ends, atom.args[0][0])


def _without_implied(algebra: Algebra, poly: Poly, row: int) -> Poly:
    """A sum of sums over rows [row < end] without factors [0 < end], as before the first end there is no row."""
    result = ZERO
    for monomial, c in poly.terms.items():
        kept = dict(monomial)
        for atom in (algebra.atoms[a] for a, _ in monomial):
            inside = algebra.opened(atom, [row]).terms if _is_row_sum(atom) else ()
            tests = [algebra.atoms[a] for m in inside for a, _ in m if algebra.atoms[a].kind == "lt"]
            for test in tests:
                for a in [a for a in kept if algebra.atoms[a].kind == "lt"]:
                    if algebra.atoms[a].args[0] == test.args[0] - algebra.var(row):
                        del kept[a]
        result = result + Poly({tuple(kept.items()): c})
    return result


def _is_row_sum(atom: Atom) -> bool:
    return atom.kind == "sum" and len(atom.args[0]) == 1


def _summed(algebra: Algebra, own: Form, mask: Poly, row: int) -> Poly:
    """The sum over the rows of a mask, by the group 0 and the row, times dY."""
    return algebra.sum(algebra.mul(mask, _row(algebra, own, row)), {row: own.sizes[0]}, {0: own.sizes[0]})


def _first_input(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if node.inputs else None


def _sums_nothing(site: Site, node: ir.Node) -> bool:
    """Whether it is a ReduceSum that goes over dimensions of size 1 only."""
    source = _first_input(node) if node.op_type == "ReduceSum" and not node.domain else None
    before = None if source is None else site.forms.get(source)
    after = None if before is None else site.forms.get(node.outputs[0])
    return before is not None and after is not None and before.sizes == after.sizes


def _scaled_mean(site: Site, node: ir.Node) -> ir.Value | None:
    """What a node multiplies the mean of by a number, as by how many elements there are."""
    if node.op_type != "Mul" or node.domain or len(node.inputs) != 2:
        return None
    for value, other in itertools.permutations(node.inputs):
        number = None if other is None else site.forms.get(other)
        if value is None or number is None or site.algebra.free(number.poly) or site.algebra.tensors(number.poly):
            continue
        above = _behind_views(value).producer()
        if above is not None and above.op_type in _MEANS and not above.domain:
            return normalizing.reduced(site, above)
    return None


@dataclass(frozen=True)
class _Behind:
    """What the sums are made of that a value carries: the first two of the tensors, and what ends the way to more."""

    sources: tuple[ir.Value, ...] = ()
    end: Literal["", "other", "product"] = ""


def _sources(site: Site, root: ir.Value) -> list[ir.Value]:
    """Tensors whose sums the root may be made of."""
    top = root.producer()
    if top is not None and (averaged := _scaled_mean(site, top)) is not None:
        return [averaged]
    if top is not None and _is_product(site, top):
        return [] if _is_opaque(site, root) else _factors(site, top)
    summed = top is not None and top.op_type == "ReduceSum"
    sources: dict[ir.Value, None] = {}
    if top is not None and summed and not _sums_nothing(site, top):
        sources.update(dict.fromkeys(_factors(site, top)))
    todo, seen = [root], {root}
    while todo and len(seen) <= 4 * MAX_GROUPS and (summed or len(sources) <= 1):
        value = todo.pop()
        known = _what_is_behind(site, value)
        if known.end == "product":
            return []
        if len(known.sources) > 1 and summed:
            # There may be more of them.
            new = [v for v in _carried(site, value) or () if v not in seen]
            seen.update(new)
            todo += new
            continue
        sources.update(dict.fromkeys(known.sources))
        if known.end:
            break
    scatters = top is not None and top.op_type in _SCATTERS and len(top.inputs) > 2
    updates = top.inputs[2] if top is not None and scatters else None
    # Rows that are left out of a scatter, as those of no group are, are picked from all of them.
    picks = None if updates is None else _behind_views(updates).producer()
    picked = _first_input(picks) if picks is not None and picks.op_type == "Gather" else None
    clear = summed or len(sources) == 1
    return [*(v for v in (picked, updates) if v is not None), *(sources if clear else ())]


def _what_is_behind(site: Site, root: ir.Value) -> _Behind:
    """What a value carries, cached so that each value is examined once.

    Roots come from the end of the graph, so cached facts about values before them stay valid.
    """
    behind: dict[ir.Value, _Behind] = site.notes("what sums carry")
    todo = [root]
    while todo:
        value = todo[-1]
        operands = [] if value in behind else _carried(site, value)
        unknown = [] if operands is None else [v for v in operands if v not in behind]
        if unknown:
            todo += unknown
            continue
        todo.pop()
        if value not in behind:
            behind[value] = _joined(site, value, None if operands is None else [behind[v] for v in operands])
    return behind[root]


def _joined(site: Site, value: ir.Value, operands: list[_Behind] | None) -> _Behind:
    node = value.producer()
    if node is not None and _is_product(site, node):
        return _Behind(end="product")
    if operands is None:
        return _Behind(end="other")
    sources: dict[ir.Value, None] = {}
    if node is not None and _is_end(site, node):
        source = normalizing.reduced(site, node) or _first_input(node)
        # A view and its inverse cancel, and zeros beside what running sums are of add nothing.
        passed = _CUTS | {"Pad"} if _is_running_sum(node) else _CUTS
        while source is not None and (above := site.first(source).producer()) is not None and above.op_type in passed:
            source = _first_input(above)
        return _Behind(() if source is None else (source,))
    # The last first, as far as the first end or the second tensor.
    for operand in reversed(operands):
        sources.update(dict.fromkeys(operand.sources))
        if len(sources) > 1 or operand.end:
            return _Behind(tuple(sources)[:2], operand.end if len(sources) < 2 else "")
    return _Behind(tuple(sources))


def _is_end(site: Site, node: ir.Node) -> bool:
    """Whether what a node takes is one of the tensors that sums are made of."""
    if node.op_type in _PRODUCTS:
        return not _is_product(site, node)
    if _sums_windows(site, node):
        return True
    if node.op_type in _CUTS and node.inputs[0] in _running_sums(site):
        return False  # The ends are ends of these.
    return (
        _is_running_sum(node)
        or node.op_type in _CUTS - {"Cast"}
        or (node.op_type == "ReduceSum" and not _sums_nothing(site, node))
    )


def _sums_windows(site: Site, node: ir.Node) -> bool:
    """Whether it is a Conv by equal numbers, with windows side by side."""
    return node.op_type == "Conv" and not node.domain and normalizing.reduced(site, node) is not None


def _is_running_sum(node: ir.Node) -> bool:
    return node.op_type == "CumSum" and not node.domain


def _may_wrap(site: Site, root: ir.Value) -> bool:
    """Whether running sums behind a value are picked at one less than an end, which may be the start."""
    todo, seen = [root], {root}
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or value not in _running_sums(site) or _is_running_sum(node):
            continue
        index = node.inputs[1] if node.op_type == "Gather" else None
        form = None if index is None else site.forms.get(index)
        if form is not None and site.algebra.tensors(form.poly) and form.poly.terms.get((), 0.0) < 0:
            return True
        new = [v for v in node.inputs if v is not None and v not in seen]
        seen.update(new)
        todo += new
    return False


def _running_sums(site: Site) -> frozenset[ir.Value]:
    """Running sums, and what is picked from them."""
    return site.reached("running sums", _is_running_sum, _BEHIND_ENDS)


def _is_product(site: Site, node: ir.Node) -> bool:
    """Whether a node is a matrix product, and not a sum by ones."""
    return node.op_type in _PRODUCTS and not node.domain and normalizing.reduced(site, node) is None


def _carried(site: Site, value: ir.Value) -> list[ir.Value] | None:
    """The operands of its node that carry sums: no indices, shapes and conditions. None where it carries none."""
    node = value.producer()
    if node is not None and node.op_type in ("Mul", "Neg") and not node.domain:
        varying = [v for v in node.inputs if v is not None and site.forms.constant(v) is None]
        others = [v for v in varying if not _is_condition(site, v)]
        return others if len(others) == 1 else None
    if node is not None and _sums_windows(site, node):
        return []
    if node is None or node.domain not in _DOMAINS or node.op_type not in _COMBINES | _CUTS | {"Gather", "CumSum"}:
        return None
    if _is_product(site, node) or _is_end(site, node):
        return []
    first, last = _CARRIERS.get(node.op_type, (0, 1))
    return list(dict.fromkeys(v for v in node.inputs[first:last] if v is not None and constant_of(v) is None))


def _factors(site: Site, node: ir.Node) -> list[ir.Value]:
    """What a mask is multiplied by, behind views, in a product of matrices, or in the product that is summed."""
    inputs = list(node.inputs)
    if node.op_type == "ReduceSum":
        summed = _first_input(node)
        above = None if summed is None else _behind_views(summed).producer()
        if above is None or above.op_type not in ("Mul", "Where") or above.domain:
            return []
        inputs = list(above.inputs)
    operands = [_behind_views(value) for value in inputs if value is not None]
    forms = [site.forms.get(value) for value in operands]
    atoms = [set() if f is None else {site.algebra.atoms[a] for m in f.poly.terms for a, _ in m} for f in forms]
    others = [value for value, own in zip(operands, atoms, strict=True) if any(not atom.indicator for atom in own)]
    return others if len(others) == 1 else []


def _is_condition(site: Site, value: ir.Value) -> bool:
    """Whether a value is made of conditions alone: a mask."""
    form = site.forms.get(value)
    atoms = [] if form is None else [site.algebra.atoms[a] for m in form.poly.terms for a, _ in m]
    return bool(atoms) and all(atom.indicator for atom in atoms)


def _is_opaque(site: Site, value: ir.Value) -> bool:
    """Whether the form of a value is no more than a name for it."""
    form = site.forms.get(value)
    names = [] if form is None else [site.algebra.atoms[a] for m in form.poly.terms for a, _ in m]
    return len(names) == 1 and names[0].kind == "tensor"


def _behind_own_views(value: ir.Value) -> ir.Value:
    """What a value is a view of, through views that one node reads each: others stay, and moving is no gain."""
    return _behind_views(value, 1)


def _behind_views(value: ir.Value, most: int | None = None) -> ir.Value:
    """What a value is a view of, through views with `most` readers each at most."""
    while (node := value.producer()) is not None and node.op_type in _VIEWS and not node.domain:
        if most is not None and len(value.uses()) > most:
            break
        source = _first_input(node)
        if source is None:
            break
        value = source
    return value


def _rows_by_index(site: Site) -> Iterator[NearMiss]:
    """Rows that are added up at an index: of a Gather, an embedding, or a product with a one-hot."""
    for node in site.graph:
        read = _scatter(site, node) or _one_hot_product(site, node)
        if read is None:
            continue
        groups, index = read
        constant = site.forms.constant(index) if index is not None else None
        reasons = []
        if isinstance(groups, int) and groups > MAX_GROUPS:
            reasons.append(f"{groups} groups, more than {MAX_GROUPS}")
        if constant is None:
            reasons.append(UNSORTED)
        elif not reasons:
            reasons.append("its group indices are a constant, and only ends of groups are read")
        yield NearMiss(names_of([node])[0], FuseGroupedBiasAddGradPass.operator, "; ".join(reasons))


def _scatter(site: Site, node: ir.Node) -> tuple[object, ir.Value | None] | None:
    """The number of groups and the index of a node that adds rows at an index of the first dimension."""
    inputs, out = node.inputs, node.outputs[0] if node.outputs else None
    if out is None or out.dtype not in TOLERANCE or len(inputs) < 3:
        return None
    kind = (node.domain, node.op_type)
    index = inputs[2] if kind == (ort_training.DOMAIN, "GatherElementsGrad") else inputs[1]
    form, whole = None if index is None else site.forms.get(index), site.forms.get(out)
    if form is None or whole is None or len(whole.groups) < 2:
        return None
    if kind in ((ort_training.DOMAIN, "GatherGrad"), (ort_training.DOMAIN, "GatherElementsGrad")):
        rows = attribute(node, "axis", 0) == 0
    elif kind == ("", "ScatterND"):
        rows = attribute(node, "reduction", "none") == "add" and bool(form.groups) and not form.groups[-1]
    elif kind == ("", "ScatterElements"):
        adds = attribute(node, "reduction", "none") == "add" and attribute(node, "axis", 0) == 0
        rows = adds and site.algebra.free(form.poly) <= set(form.variables(0))
    else:
        return None
    if not rows or not (form.sizes or site.algebra.tensors(form.poly)):
        return None
    return site.forms.extent(whole.groups[0]).integer, index


def _one_hot_product(site: Site, node: ir.Node) -> tuple[object, ir.Value | None] | None:
    """As :func:`_scatter`, for a product that contracts the rows of a one-hot of an index."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    out = node.outputs[0]
    for k, (value, flag) in enumerate(zip(node.inputs[:2], ("transA", "transB"), strict=True)):
        form = None if value is None else site.forms.get(value)
        if form is None or len(form.groups) < 2 or len(form.poly) != 1 or out.dtype not in TOLERANCE:
            continue
        last = len(form.groups) - 1
        contracted = (last if k == 0 else last - 1) if not attribute(node, flag, 0) else (last - 1 if k == 0 else last)
        kept = last - 1 if contracted == last else last
        rows, group = list(form.variables(contracted)), list(form.variables(kept))
        ((monomial, _),) = form.poly.terms.items()
        if len(monomial) != 1 or len(rows) != 1 or len(group) != 1:
            continue
        atom = site.algebra.atoms[monomial[0][0]]
        index = site.algebra.solve(atom, group[0]) if atom.kind == "eq" else None
        if index is not None and site.algebra.tensors(index) and rows[0] in site.algebra.free(index):
            return form.sizes[group[0]].integer, None
    return None


def _rows_by_masks(site: Site) -> Iterator[NearMiss]:
    """[j = g] sum of the rows where the index is g, for each group g: a loop over the groups with masks."""
    algebra = site.algebra
    for node in site.graph:
        value = node.outputs[0] if len(node.outputs) == 1 else None
        if value is None or value not in site.position or value.dtype not in TOLERANCE or node.op_type in VIEWS:
            continue
        form = site.forms.get(value)
        if form is None or len(form.sizes) < 2 or len(form.poly) < 2:
            continue
        groups = set()
        for monomial in form.poly.terms:
            atoms = [algebra.atoms[a] for a, _ in monomial]
            placed = [g.integer for a in atoms if a.kind == "eq" and (g := algebra.solve(a, 0)) is not None]
            masked = any(
                algebra.atoms[a].kind == "eq" and algebra.tensors(algebra.atoms[a].args[0])
                for s in atoms
                if s.kind == "sum"
                for a, _ in s.args[1]
            )
            groups.add(placed[0] if len(placed) == 1 and masked else None)
        if None not in groups and len(groups) > 1:
            reason = f"a loop over {len(groups)} groups, each masked out of all rows; {UNSORTED}"
            yield NearMiss(names_of([node])[0], FuseGroupedBiasAddGradPass.operator, reason)


def _rows_by_loops(site: Site) -> Iterator[NearMiss]:
    """Sums of a part of the rows in each run of the body of a Loop or Scan."""
    for node in site.graph:
        attr = node.attributes.get("body") if node.op_type in ("Loop", "Scan") and not node.domain else None
        summed = () if attr is None else (one for one in attr.as_graph() if one.op_type == "ReduceSum")
        for source in (_behind_views(value) for one in summed if (value := _first_input(one)) is not None):
            part = source.producer()
            if part is None or part.op_type != "Slice" or part.domain or source.dtype not in TOLERANCE:
                continue
            if any(value is not None and constant_of(value) is None for value in part.inputs[1:3]):
                yield NearMiss(names_of([node])[0], FuseGroupedBiasAddGradPass.operator, _IN_LOOP)
                break


def _rows_in_pieces(site: Site) -> Iterator[NearMiss]:
    """Sums of pieces of one tensor, which are put together again, where a run tells how large each is."""
    for node in site.graph:
        if node.op_type != "Concat" or node.domain or node.outputs[0].dtype not in TOLERANCE:
            continue
        sums = [_behind_views(value).producer() for value in node.inputs if value is not None]
        pieces = [
            _behind_views(value).producer()
            for one in sums
            if one is not None and one.op_type == "ReduceSum" and not one.domain
            for value in one.inputs[:1]
            if value is not None
        ]
        sources = [None if piece is None else _cut_from(piece) for piece in pieces]
        if len(sources) == len(node.inputs) > 1 and sources[0] is not None and len(set(sources)) == 1:
            yield NearMiss(names_of([node])[0], FuseGroupedBiasAddGradPass.operator, _IN_PIECES)


def _cut_from(piece: ir.Node) -> ir.Value | None:
    """The tensor that a piece is cut from at places that only a run knows; None for what is cut otherwise."""
    if piece.domain:
        return None
    if piece.op_type == "SequenceAt" and piece.inputs[0] is not None:
        split = piece.inputs[0].producer()
        return _first_input(split) if split is not None and split.op_type == "SplitToSequence" else None
    bounds = {"Slice": piece.inputs[1:3], "Split": piece.inputs[1:2]}.get(piece.op_type, ())
    varies = any(value is not None and constant_of(value) is None for value in bounds)
    return _first_input(piece) if varies else None
