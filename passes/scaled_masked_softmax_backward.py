"""ScaledMaskedSoftmaxBackward: ``scale y (g - sum(g y))`` along the rows of a softmax, zero where masked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import ONE, UNIT, ZERO, Algebra, Atom, Monomial, Poly, TooComplex
from gradfuse.passes.matching import (
    OTHERWISE,
    TOLERANCE,
    Builder,
    FusePass,
    Mismatch,
    Policy,
    Rewrite,
    Site,
    divides,
    find_mask,
    flattened_softmaxes,
    normalizing,
    require_same,
    softmaxes,
)
from gradfuse.passes.reading import Form, Opaque, attribute
from gradfuse.passes.reading.layouts import Group

_MOST_PRODUCTS = 8  # with the same values
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class FuseScaledMaskedSoftmaxBackwardPass(FusePass):
    """Finds, in a value P, a softmax y along j with

    1. P = K y G - K y sum_j(G y): the summed terms give K y (what does not depend on the bound variable) and G;
    2. K = scale * keep, keep being 0 or 1;
    3. values of P's type that are y and a multiple of G, boolean values for keep or its opposite, or nothing to keep.

    Where y is multiplied with values v, and G is a gradient d times their transpose, sum_j(G y) may be written as the
    sum of the row of d (y v), as FlashAttention has it.
    """

    operator = "ScaledMaskedSoftmaxBackward"
    training_operators = ("SoftmaxGrad", "SoftmaxGrad_13")

    def __init__(self, policy: Policy = "profitable") -> None:
        super().__init__(policy)
        self._through: tuple[Site, dict[int, _ThroughValues]] | None = None

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        form = site.forms.form(root)
        candidates = _candidates(site, form)
        found = self.first_bound(builder, (partial(self._bound, site, builder, root, form, *c) for c in candidates))
        if found is None:
            of_axes = (partial(_bound_of_axes, site, builder, root, c) for c in _of_several_axes(site, root))
            found = self.first_bound(builder, of_axes)
        if found is not None or not _may_go_through_values(site, form):
            return found
        if self._through is None or self._through[0] is not site:
            self._through = site, _sums_through_values(site)
        known = self._through[1]
        used = [known[a] for monomial in form.poly.terms for a, e in monomial if a in known and e == 1]
        if not used:
            return None
        form = Form(form.groups, _opened(site.algebra, form.poly, known))
        candidates = _candidates(site, form)
        found = self.first_bound(builder, (partial(self._bound, site, builder, root, form, *c) for c in candidates))
        return None if found is None else replace(found, runs=frozenset(n for one in used for n in one.products))

    def possible(self, site: Site, form: Form) -> bool:
        sums = [site.algebra.atoms[a] for m in form.poly.terms for a, _ in m if site.algebra.atoms[a].kind == "sum"]
        if any(len(atom.args[0]) > 1 for atom in sums) or (sums and flattened_softmaxes(site)):
            return True
        return any(True for _ in _candidates(site, form)) or _may_go_through_values(site, form)

    def _bound(
        self, site: Site, builder: Builder, root: ir.Value, form: Form, y: Poly, j: int, k: Poly, g: Poly
    ) -> Rewrite:
        algebra = site.algebra
        sizes = dict(enumerate(form.sizes))
        variables = list(sizes)
        scale, keep = _scale_and_keep(site, k)
        assert root.dtype is not None
        shape = site.extents(root)
        of_y = sorted(algebra.free(y))
        found_y = site.find_turned(y, of_y, sizes, root, dtypes=[root.dtype], shape=shape)
        is_value = found_y is not None and found_y[2] == 1.0
        if not is_value and algebra.sum(y, {j: sizes[j]}, sizes) == UNIT:
            # Where nothing else needs it, JAX has the exponentials and their sum only.
            found_y = site.find_turned(_scores(algebra, y, j), of_y, sizes, root, dtypes=[root.dtype])
        if found_y is None or found_y[2] != 1.0:
            raise Mismatch("neither the softmax nor what it is of is a value of its type")
        found_g = site.find_turned(g, variables, sizes, root, dtypes=[root.dtype], shape=shape)
        if found_g is None:
            raise Mismatch("no value of its type is the gradient of the softmax")
        g, scale = g.scaled(found_g[2]), scale / found_g[2]
        # The definition, in these values.
        total = algebra.sum(algebra.mul(g, y), {j: sizes[j]}, sizes)
        inside = algebra.mul(y, g - total)
        require_same(site, root, algebra.mul(keep.scaled(scale), inside), form.poly)

        masked = algebra.free(keep)
        layout = _layout(form, of_y, j, masked)
        softmax = builder.arrange(found_y[0], found_y[1], layout, sizes)
        if not is_value:
            softmax = builder.op("Softmax", [softmax], root.dtype, site.extents(softmax), axis=-1)
        inputs = [builder.arrange(found_g[0], found_g[1], layout, sizes), softmax]
        if keep.constant is None:
            # The op lets a mask be repeated over B and H; its last two dimensions are whole.
            own = [group if masked & set(group) else [] for group in layout[:2]]
            inputs.append(find_mask(builder, UNIT - keep, sorted(masked), sizes, [*own, *layout[2:]]))
        if not _SMALLEST <= abs(scale) <= _LARGEST:
            raise Mismatch(f"its scale {scale:.6g} is no float32")
        extents = [algebra.product(sizes[v] for v in group) for group in layout]
        fused = builder.fused(self.operator, inputs, extents, scale=float(np.float32(scale)), fix_triu_mask=0)
        ordered = [v for group in layout for v in group]
        output = builder.arrange(fused, ordered, [list(form.variables(a)) for a in range(len(form.groups))], sizes)
        return builder.rewrite("softmax-backward", [fused], output)


@dataclass(frozen=True)
class _OfAxes:
    """A softmax along several axes, and the gradient that it is multiplied with in a sum."""

    y: ir.Value
    g: ir.Value
    axes: tuple[int, ...]


def _of_several_axes(site: Site, root: ir.Value) -> Iterator[_OfAxes]:
    """The factors of products that are summed behind a value, of which one is a softmax along several axes."""
    node = root.producer()
    if node is None or node.domain or node.op_type not in normalizing.CALCULATIONS:
        return
    flattened = flattened_softmaxes(site)
    for total, above in normalizing.arithmetic(site, root):
        for value in normalizing.summed(site, above):
            product = site.first(value).producer()
            if product is None or product.op_type != "Mul" or product.domain or None in product.inputs:
                continue
            for y, g in itertools.permutations(v for v in product.inputs if v is not None):
                if not all(site.knows(v) for v in (y, g, total)) or site.extents(y) != site.extents(g):
                    continue
                whole, left = site.extents(y), site.extents(total)
                if len(left) != len(whole):
                    continue
                axes = tuple(axis for axis, size in enumerate(whole) if left[axis] == UNIT != size)
                of_rows = y in flattened and _is_row(site, y, axes)
                if of_rows or (len(axes) > 1 and _adds_up_to_1(site, y, axes)):
                    yield _OfAxes(y, g, axes)


def _is_row(site: Site, y: ir.Value, axes: Sequence[int]) -> bool:
    """Whether the last axes of a view of a softmax, flattened, are a row of it."""
    node = y.producer()
    while node is not None and node.op_type != "Softmax" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    rank = len(site.extents(y))
    if node is None or not site.knows(node.outputs[0]) or list(axes) != list(range(rank - len(axes), rank)):
        return False
    return site.extents(node.outputs[0])[-1] == site.algebra.product(site.extents(y)[axis] for axis in axes)


def _adds_up_to_1(site: Site, y: ir.Value, axes: Sequence[int]) -> bool:
    """Whether a value is a distribution along some axes."""
    form = site.forms.form(y)
    sizes = dict(enumerate(form.sizes))
    along = {v: sizes[v] for axis in axes for v in form.variables(axis)}
    return site.algebra.sum(form.poly, along, sizes) == UNIT


def _bound_of_axes(site: Site, builder: Builder, root: ir.Value, one: _OfAxes) -> Rewrite:
    """K (y g - y sum(y g)) with sums over several axes, which are rows to the operator."""
    algebra, y, g = site.algebra, one.y, one.g
    if root.dtype not in TOLERANCE or root.dtype != y.dtype or root.dtype != g.dtype:
        raise Mismatch("it is computed of tensors of several types")
    own, *given = site.forms.relative(root, y, g)
    groups, (p, q) = site.forms.broadcast(given)
    whole = Form(groups, ZERO)
    sizes = dict(enumerate(whole.sizes))
    along = [v for axis in one.axes for v in whole.variables(axis)]
    total = algebra.sum(algebra.mul(p, q), {v: sizes[v] for v in along}, sizes)
    inside = site.forms.regrouped(Form(groups, algebra.mul(p, q - total)), site.extents(root), reshaped=True)
    scale = algebra.ratio(own.poly, inside.poly) if own.poly and inside.poly else None
    factor = 0.0 if scale is None or scale.constant is None else float(np.float32(scale.constant))
    if not factor or own.groups != inside.groups:
        raise Mismatch(OTHERWISE)
    require_same(site, root, inside.poly.scaled(factor), own.poly)
    if not _SMALLEST <= abs(factor) <= _LARGEST:
        raise Mismatch(f"its scale {factor:.6g} is no float32")
    layout = [[], [], [v for v in sizes if v not in along], along]
    inputs = [builder.arrange(value, list(sizes), layout, sizes) for value in (g, y)]
    rows = [algebra.product(sizes[v] for v in group) for group in layout]
    fused = builder.fused(FuseScaledMaskedSoftmaxBackwardPass.operator, inputs, rows, scale=factor, fix_triu_mask=0)
    ordered = [v for group in layout for v in group]
    output = builder.arrange(fused, ordered, [list(whole.variables(axis)) for axis in range(len(groups))], sizes)
    rewrite = builder.rewrite("softmax-backward", [fused], builder.reshape(output, site.extents(root)))
    return replace(rewrite, frontier=(y, g))


@dataclass(frozen=True)
class _ThroughValues:
    """The sum of a row of G y, and the products d times the transpose of v, which is G, and y v."""

    sum: Poly
    products: tuple[ir.Node, ir.Node]


def _may_go_through_values(site: Site, form: Form) -> bool:
    """Whether the rows of a product of two tensors are summed, and something else runs along these rows."""
    algebra = site.algebra
    sums = [algebra.atoms[a] for monomial in form.poly.terms for a, e in monomial if e == 1]
    return any(s.kind == "sum" and len(s.tensors) == 2 and len(s.free) < len(form.sizes) for s in sums)


def _opened(algebra: Algebra, poly: Poly, known: Mapping[int, _ThroughValues]) -> Poly:
    """A polynomial with the sums of the rows of G y in the place of those of d (y v)."""
    result = ZERO
    for monomial, c in poly.terms.items():
        rest = tuple((a, e) for a, e in monomial if a not in known or e != 1)
        sums = [known[a].sum for a, e in monomial if a in known and e == 1]
        result = result + algebra.product([Poly({rest: c}), *sums])
    return result


def _sums_through_values(site: Site) -> dict[int, _ThroughValues]:
    """Each sum of the rows of d (y v), where the graph also has d times the transpose of v, by its atom."""
    products: dict[ir.Value, list[tuple[ir.Node, bool]]] = {}
    for node in site.graph:
        values = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
        if values is not None and all(site.knows(v) for v in (*node.inputs, *node.outputs) if v is not None):
            source, turned = _turned_back(site, values)
            products.setdefault(source, []).append((node, turned))
    found: dict[int, _ThroughValues] = {}
    for several in products.values():
        for (back, turned), (forth, other) in itertools.permutations(several[:_MOST_PRODUCTS], 2):
            d, y = back.inputs[0], forth.inputs[0]
            if turned == other or d is None or y is None:
                continue
            try:
                groups, through = _row_sum(site, d, forth.outputs[0])
                rows, whole = _row_sum(site, y, back.outputs[0])
            except (Opaque, TooComplex):
                continue
            ((monomial, c), *more) = through.terms.items() or [((), 0.0)]
            if not more and c == 1.0 and len(monomial) == 1 and monomial[0][1] == 1 and groups == rows:
                found[monomial[0][0]] = _ThroughValues(whole, (back, forth))
    return found


def _turned_back(site: Site, value: ir.Value) -> tuple[ir.Value, bool]:
    """A stack of matrices, or what it is the transposes of; and whether it is."""
    value = site.first(value)
    node = value.producer()
    perm = list(attribute(node, "perm", ())) if node is not None and node.op_type == "Transpose" else []
    turned = perm[-2:] == [len(perm) - 1, len(perm) - 2] and perm[:-2] == list(range(len(perm) - 2))
    if not perm or not turned or node is None or node.inputs[0] is None:
        return value, False
    return site.first(node.inputs[0]), True


def _row_sum(site: Site, first: ir.Value, second: ir.Value) -> tuple[tuple[Group, ...], Poly]:
    """The sums of the last dimension of the product of two values, with the other dimensions."""
    algebra = site.algebra
    groups, (a, b) = site.forms.broadcast([site.forms.form(first), site.forms.form(second)])
    joined = Form(groups, ZERO)
    sizes = dict(enumerate(joined.sizes))
    return groups[:-1], algebra.sum(algebra.mul(a, b), {v: sizes[v] for v in joined.variables(len(groups) - 1)}, sizes)


def _scores(algebra: Algebra, y: Poly, j: int) -> Poly:
    """What a softmax along a variable is of."""
    (factors,) = y.terms
    return algebra.log(Poly({tuple((a, e) for a, e in factors if j in algebra.atoms[a].free): 1.0}))


def _candidates(site: Site, form: Form) -> Iterator[tuple[Poly, int, Poly, Poly]]:
    """Each softmax y along j with K and G of P = K y G - K y sum(G y)."""
    for y, j in _rows(site, form):
        if (cofactors := _cofactors(site, form, y, j)) is not None:
            yield y, j, *cofactors


def _rows(site: Site, form: Form) -> list[tuple[Poly, int]]:
    """Candidates for y: softmaxes that the form divides by, and tensors that stand inside and outside of a row sum."""
    rows = list(softmaxes(site.algebra, form.poly, range(len(form.sizes))))
    algebra = site.algebra
    for monomial in form.poly.terms:
        for a, e in monomial:
            atom = algebra.atoms[a]
            if atom.kind != "sum" or e != 1 or len(atom.args[0]) != 1:
                continue
            own = [algebra.atoms[b] for b, f in monomial if f == 1]
            own = [t for t in own if t.kind == "tensor" and t.args[0] in atom.tensors]
            for j in set(range(len(form.sizes))) - atom.free:
                along = [t for t in own if j in t.free]
                if along:
                    for inside in algebra.opened(atom, [j]).terms:
                        rows += [(algebra.of(t), j) for t in along if (t.id, 1) in inside]
    return list(dict.fromkeys(rows))


def _cofactors(site: Site, form: Form, y: Poly, j: int) -> tuple[Poly, Poly] | None:
    """K and G of P = K y G - K y sum(G y); None where P is not of that form."""
    algebra = site.algebra
    picked = _picked(site, form.poly, y, j)
    if picked is None:
        return None
    sizes = dict(enumerate(form.sizes))
    rest = form.poly - algebra.mul(y, picked - algebra.sum(algebra.mul(picked, y), {j: sizes[j]}, sizes))
    if not rest:
        return UNIT, picked
    cofactors = _cofactors_of_sums(site, rest, y, j, sizes[j])
    if cofactors is None or not picked:
        return cofactors
    k, g = cofactors
    return None if k.constant is None else (k, g + picked.scaled(1 / k.constant))


def _picked(site: Site, poly: Poly, y: Poly, j: int) -> Poly | None:
    """The part of G that is there at one element c of a row only, as K y G then has y[c] [j = c] for y [j = c]."""
    algebra = site.algebra
    (ym,) = y.terms
    found = ZERO
    for monomial, coefficient in poly.terms.items():
        if divides(ym, monomial):
            continue
        for a, _ in monomial:
            atom = algebra.atoms[a]
            place = algebra.solve(atom, j) if atom.kind == "eq" else None
            there = ZERO if place is None else algebra.substitute(y, {j: place})
            factor = next(iter(there.terms), ONE)
            if len(there) == 1 and divides(factor, monomial):
                found = found + algebra.divide_monomial(Poly({monomial: coefficient}), factor)
                break
        else:
            return None
    return found


def _cofactors_of_sums(site: Site, poly: Poly, y: Poly, j: int, size: Poly) -> tuple[Poly, Poly] | None:
    """K and G of P, whose every term has the factor y."""
    algebra = site.algebra
    (ym,) = y.terms
    along = [(a, e) for a, e in ym if j in algebra.atoms[a].free]
    summed: dict[int, Poly] = {}
    for monomial, c in poly.terms.items():
        if not divides(ym, monomial):
            return None
        for a, e in monomial:
            atom = algebra.atoms[a]
            if atom.kind != "sum" or e != 1 or len(atom.args[0]) != 1 or j in atom.free:
                continue
            if all(divides(tuple(along), inside) for inside in algebra.opened(atom, [j]).terms):
                rest = algebra.divide_monomial(Poly({monomial: -c}), ((a, 1),))
                summed[a] = summed.get(a, ZERO) + rest
                break
    if not summed or len(summed) == len(poly) == 1:
        return None
    # The second part is the sum of R_a A_a over its sum atoms, R_a = K y r_a. What of y does not run along the row has
    # left the sums, so R has it twice. G is the sum of r_a times the summand of A_a without y.
    (first, lead), *others = summed.items()
    across = tuple(f for f in ym if f not in along)
    k = algebra.divide_monomial(algebra.divide_monomial(lead, ym), across)
    g = _summand(algebra, algebra.atoms[first], j, size, tuple(along))
    for a, rest in others:
        r = algebra.ratio(rest, lead)
        if r is None:
            return None
        g = g + algebra.mul(r, _summand(algebra, algebra.atoms[a], j, size, tuple(along)))
    # Factors of K that are no mask, such as a loss scale, belong to the gradient.
    factors = tuple((a, e) for a, e in algebra.content(k)[1] if not algebra.atoms[a].indicator)
    return algebra.divide_monomial(k, factors), algebra.mul(g, Poly({factors: 1.0}))


def _summand(algebra: Algebra, atom: Atom, j: int, size: Poly, along: Monomial) -> Poly:
    """What is summed, without y: 0 behind the end of the sum, which may be ahead of that of the row."""
    summand = algebra.divide_monomial(algebra.opened(atom, [j]), along)
    (end,) = atom.args[0]
    return summand if end == size else algebra.mul(summand, algebra.less_than_zero(algebra.var(j) - end))


def _scale_and_keep(site: Site, k: Poly) -> tuple[float, Poly]:
    for c in sorted(set(k.terms.values()), key=abs):
        for scale in (c, -c):
            keep = k.scaled(1 / scale)
            if site.algebra.is_boolean(keep):
                return scale, keep
    raise Mismatch(f"its factor {site.algebra.text(k)[:80]} is no scale and mask")


def _layout(form: Form, of_y: Sequence[int], j: int, masked: frozenset[int]) -> list[list[int]]:
    """The variables as (B, H, S1, S2), j last; where it can be, the mask has the whole of B and H or none of it."""
    lead = [[v for v in form.variables(a) if v != j] for a in range(len(form.groups))]
    # Variables that the softmax does not have, of gradients of several losses at once, go ahead of the others.
    others = [v for group in lead for v in group if v not in of_y]
    lead = [own for group in lead if (own := [v for v in group if v in of_y])]
    rows = lead.pop() if lead else []
    rest = others + [v for group in lead for v in group]
    first = len(others) + (len(lead[0]) if len(lead) > 1 else 0)
    splits = sorted(range(len(rest) + 1), key=lambda p: p != first)
    for p in splits:
        parts = [rest[:p], rest[p:]]
        if all(not (set(part) & masked) or set(part) <= masked for part in parts):
            return [*parts, rows, [j]]
    return [rest[:first], rest[first:], rows, [j]]
