"""EmbeddingDenseBackward: row v is the sum of the rows of a gradient whose index is v."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

import onnx_ir as ir

from gradfuse.custom_ops.operator import NOTHING_IGNORED
from gradfuse.passes.algebra import Algebra, Atom, Poly
from gradfuse.passes.matching import Builder, FusePass, Mismatch, Rewrite, Site, names_of
from gradfuse.passes.reading import Form, Opaque, Order, attribute, ort_training
from gradfuse.passes.report import NearMiss

_ROWS = {
    ("", "ScatterND"): 2,
    ("", "ScatterElements"): 2,
    (ort_training.DOMAIN, "GatherGrad"): 2,
    (ort_training.DOMAIN, "GatherElementsGrad"): 0,
}
"""Operators that add rows at indices, with the place of the rows."""
_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Expand", "Tile"}
_KEEPING = _VIEWS | {"Cast", "Clip"}
"""Operators behind which an index is the same, if it is one."""
_PICKS = {"Gather", "Slice"}
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_BY_TABLE = (
    "its rows are gathered by a table of the rows of each segment, as tf2onnx has it, and a row of zeros is joined to "
    "them; only the sum of the gathered rows over the places of a segment is read as theirs"
)
_STEPS = 6  # from a scatter to its index
_FEW = 3  # columns are enough for the test by numbers: each is the same
_MOST = 1 << 14  # elements of a result for which all columns are run
_MOST_WITH_FEW = 1 << 20


class FuseEmbeddingDenseBackwardPass(FusePass):
    """Finds a value that is, as a function of one tensor dY of rows, the sum over all rows r of [v = index of r] dY[r].

    The operator refuses an index that is out of range. So an index that is a graph input is assumed to be in range, and
    others must be non-negative. Rows in order of their index go to GroupedBiasAddGrad, which comes first.
    """

    operator = "EmbeddingDenseBackward"
    refuses_no_class = True
    looks_at_views = True
    linear = False  # It would be; but the sums are read relative to a tensor that has the factor already.

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        if len(site.forms.form(root).groups) < 2:
            return None
        for rows in _tensors_of_rows(site, root):
            if rows not in site.position or rows.dtype != root.dtype or site.forms.get(rows) is None:
                continue
            # An index that is counted from the start is one value: the sum over it is several without.
            for others in ([], *([whole] for whole in _wholes(site, root))):
                form, own, *index_forms = site.forms.relative(root, rows, *others)
                ways = _as_summed(site, form, own) if len(form.groups[0]) == 1 else ()
                found = ((way, index) for way in ways if (index := _index(site.algebra, form, way)) is not None)
                own, index = next(found, (own, None))
                if index is None:
                    continue
                if not index_forms or [form.poly for form in index_forms] == [index]:
                    return self._bound(site, builder, root, rows, form, own, index, *others)
        return None

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Rows that are gathered by a table of segments, and added up in a way that no rule reads."""
        for node in site.graph:
            if any(table.gather is node for table in site.forms.tables.values()):
                yield NearMiss(names_of([node])[0], self.operator, _BY_TABLE)

    def _bound(
        self,
        site: Site,
        builder: Builder,
        root: ir.Value,
        rows: ir.Value,
        form: Form,
        own: Form,
        index: Poly,
        whole: ir.Value | None = None,
    ) -> Rewrite:
        number = form.sizes[0]
        count = len(own.sizes) - len(form.sizes) + 1
        weights = number.integer
        if weights is None:
            raise Mismatch("the number of weights is not static")
        sizes = dict(enumerate(own.sizes))
        found = (whole, 1.0)
        if whole is None:
            found = site.find(index, own.sizes[:count], root, dtypes=_INTEGERS) or (None, 0.0)
        if found[0] is None or found[1] != 1.0:
            raise Mismatch("its index is no integer value of the graph")
        if not _is_in_range(site, found[0], weights):
            raise Mismatch("its index may count from the end, which the operator refuses")
        lead, columns = list(range(count)), list(range(count, len(own.sizes)))
        width = site.algebra.product(sizes[v] for v in columns)
        fused = builder.fused(
            self.operator,
            [
                builder.arrange(rows, [*lead, *columns], [lead, columns], sizes),
                builder.arrange(found[0], lead, [lead], sizes),
            ],
            [number, width],
            num_weights=weights,
            padding_idx=NOTHING_IGNORED,
            scale_grad_by_freq=0,
        )
        rewrite = builder.rewrite("sum-at-index", [fused], builder.reshape(fused, site.extents(root)))
        table = _fewer_columns(form, own, weights)
        return replace(rewrite, frontier=(rows, found[0]), linear=bool(table), table=table)


def _is_in_range(site: Site, index: ir.Value, weights: int) -> bool:
    """Whether an index is non-negative: by the nodes that compute it, or because it is a graph input."""
    if (ends := _counted(site, index, weights)) is not None:
        return _is_given(ends) or Order(site.forms).least(ends) >= -weights
    return _is_given(index) or Order(site.forms).least(index) >= 0


def _is_given(index: ir.Value) -> bool:
    return _behind(index).producer() is None


def _behind(index: ir.Value, kinds: Collection[str] = _KEEPING) -> ir.Value:
    while (node := index.producer()) is not None and not node.domain and node.op_type in kinds:
        if node.inputs[0] is None:
            break
        index = node.inputs[0]
    return index


def _counted(site: Site, index: ir.Value, weights: int) -> ir.Value | None:
    """Of an index from the start, the one that may count from the end; None where it is no such."""
    node = _behind(index, _KEEPING | _PICKS).producer()
    if node is None or node.domain or node.op_type != "Where":
        return None
    whole = site.forms.get(node.outputs[0])
    for value in node.inputs[1:]:
        form = None if value is None else site.forms.get(value)
        if form is None or whole is None or form.groups != whole.groups:
            continue
        from_end = site.algebra.less_than_zero(form.poly).scaled(weights)
        if whole.poly == form.poly + from_end:
            return value
    return None


def _wholes(site: Site, root: ir.Value) -> Iterator[ir.Value]:
    """The integers that are to be taken as they are for the index of a scatter.

    What chooses between an index and the same, counted from the end; and positions, of which nothing is left in a sum
    over rows if they are looked into.
    """
    node = root.producer()
    if node is None or node.domain or node.op_type not in ("ScatterND", "ScatterElements") or node.inputs[1] is None:
        return
    index = node.inputs[1]
    last = _behind(index).producer()
    if last is not None and last.op_type == "Where" and not last.domain:
        yield last.outputs[0]
        return
    for _ in range(_STEPS):
        form, above = site.forms.get(index), index.producer()
        if form is None or not form.sizes or site.algebra.tensors(form.poly):
            return
        yield index
        if above is None or above.domain or above.op_type not in _KEEPING or above.inputs[0] is None:
            return
        index = above.inputs[0]


def _tensors_of_rows(site: Site, root: ir.Value) -> Iterator[ir.Value]:
    """The tensors whose rows a value may add up."""
    node = root.producer()
    if node is not None and node.op_type == "Transpose" and not node.domain and node.inputs[0] is not None:
        # A product with swapped operands.
        node = site.first(node.inputs[0]).producer()
        if node is None or node.op_type not in _PRODUCTS:
            return
    if node is None:
        return
    place = _ROWS.get((node.domain, node.op_type))
    if place is not None and len(node.inputs) > place:
        if not node.domain and attribute(node, "reduction", "none") != "add":
            return  # It puts each row in a place of its own.
        yield from _with_what_is_behind(site, node.inputs[place])
    elif (not node.domain and node.op_type in _PRODUCTS and len(node.inputs) > 1) or node.op_type == "FusedMatMul":
        yield from _rows_of_product(site, node)
    elif not node.domain and node.op_type in ("ReduceSum", "Einsum") and node.inputs[0] is not None:
        product = site.first(node.inputs[0]).producer()
        if product is not None and not product.domain and product.op_type in _PRODUCTS:
            # One for each item of a batch.
            yield from _rows_of_product(site, product)
            return
        # By a table of the numbers of rows, to which a row of zeros is joined.
        value: ir.Value | None = node.inputs[0]
        for op in ("Gather", "Concat"):
            above = None if value is None else site.first(value).producer()
            if above is None or above.domain or above.op_type != op:
                return
            value = above.inputs[0]
        yield from _with_what_is_behind(site, value)


def _rows_of_product(site: Site, node: ir.Node) -> Iterator[ir.Value]:
    """What a node multiplies by a one-hot."""
    for value, other in itertools.permutations(node.inputs[:2]) if len(node.inputs) > 1 else ():
        if other is not None and _is_one_hot(site, other):
            yield from _with_what_is_behind(site, value)


def _is_one_hot(site: Site, value: ir.Value) -> bool:
    form = site.forms.get(value)
    return form is not None and len(form.poly) == 1 and any(True for _ in _conditions(site.algebra, form.poly))


def _with_what_is_behind(site: Site, value: ir.Value | None) -> Iterator[ir.Value]:
    while value is not None:
        value = site.first(value)
        yield value
        node = value.producer()
        value = node.inputs[0] if node is not None and not node.domain and node.op_type in _VIEWS else None


def _as_summed(site: Site, form: Form, own: Form) -> Iterator[Form]:
    """The rows as they are, and in the dimensions of the sum: an index may have several where rows have one."""
    yield own
    atoms = [site.algebra.atoms[a] for monomial in form.poly.terms for a, _ in monomial]
    if len(atoms) != 1 or atoms[0].kind != "sum":
        return
    for sizes in itertools.permutations(atoms[0].args[0]) if len(own.sizes) == len(form.sizes) else ():
        with contextlib.suppress(Opaque):
            yield site.forms.regrouped(own, [*sizes, *form.sizes[1:]])


def _index(algebra: Algebra, form: Form, own: Form) -> Poly | None:
    """The index of each row, by the variables of the rows of dY; None where the form is no sum of rows at an index."""
    ((monomial, factor),) = form.poly.terms.items() if len(form.poly) == 1 else (((), 0.0),)
    atom = algebra.atoms[monomial[0][0]] if len(monomial) == 1 and monomial[0][1] == 1 else None
    if atom is None or atom.kind != "sum" or factor != 1.0:
        return None
    count = len(atom.args[0])
    columns = len(form.sizes) - 1
    if len(own.sizes) != count + columns or own.sizes[count:] != form.sizes[1:]:
        return None
    bound = algebra.fresh(count)
    summand = algebra.opened(atom, bound)
    for order in itertools.permutations(range(count)):
        if [atom.args[0][k] for k in order] != list(own.sizes[:count]):
            continue
        names = {v: algebra.var(bound[k]) for v, k in enumerate(order)}
        names |= {count + k: algebra.var(1 + k) for k in range(columns)}
        rows = algebra.substitute(own.poly, names)
        for hit in _conditions(algebra, summand):
            index = algebra.solve(hit, 0)
            if index is None or not algebra.tensors(index) or not algebra.free(index) <= set(bound):
                continue
            if summand == algebra.mul(algebra.of(hit), rows):
                return algebra.substitute(index, {bound[k]: algebra.var(v) for v, k in enumerate(order)})
    return None


def _conditions(algebra: Algebra, poly: Poly) -> Iterator[Atom]:
    for a in sorted({a for monomial in poly.terms for a, _ in monomial}):
        if algebra.atoms[a].kind == "eq":
            yield algebra.atoms[a]


def _fewer_columns(form: Form, own: Form, weights: int) -> dict[int, int]:
    """The few columns that the test of a large result is run on: the operation is linear, and does the same to each."""
    widths = [size.integer for size in form.sizes[1:]]
    whole = weights
    for n in widths:
        whole *= n or 1
    if whole <= _MOST:
        return {}
    others = {n for size in (*own.sizes[: len(own.sizes) - len(widths)], form.sizes[0]) if (n := size.integer)}
    table = {n: _FEW for n in widths if n is not None and n > _FEW and n not in others}
    if len(table) < len({n for n in widths if n}) or weights * _FEW ** len(widths) > _MOST_WITH_FEW:
        raise Mismatch("it is too large to be checked with numbers")
    return table
