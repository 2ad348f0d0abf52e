"""Readers of operators that pick elements by their indices, or put them at indices."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly, Positions, number
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form, groups_of_sizes
from gradfuse.passes.reading.nodes import INTEGERS, Opaque, attribute
from gradfuse.passes.reading.pieces import concatenated, sliced
from gradfuse.passes.reading.registry import reads
from gradfuse.passes.reading.segments import table


def from_start(forms: KnownForms, index: Form, size: Poly) -> Form:
    """The index of an element of a dimension of this size; where it is negative, it counts from the end.

    Data are taken to count from the start. Raises Opaque where some of an index counts from the end, and some does not.
    """
    bounds = forms.bounds(index)
    if bounds is None or _sign(bounds[0], 1):
        return index
    if not _sign(bounds[1] + UNIT, -1):
        raise Opaque("an index that counts from both ends")
    return Form(index.groups, index.poly + size)


def _sign(bound: Poly, sign: int) -> bool:
    """Whether a function of dimensions, none of which is below 1, is never negative; or, for -1, never positive."""
    rising = all(c * sign >= 0 for m, c in bound.terms.items() if m)
    return rising and sum(bound.terms.values()) * sign >= 0


@reads("Gather")
def _gather(forms: KnownForms, node: ir.Node) -> Form:
    data, index = forms.operands(node)
    axis = attribute(node, "axis", 0) % len(data.groups)
    used = [name for name in forms.algebra.tensors(index.poly) if name in forms.tables]
    if not used:
        return _gathered(forms, data, index, axis, node.outputs[0])
    # Some of its numbers count from the end.
    value = node.outputs[0]
    if axis or index.poly != forms.algebra.tensor(used[0], map(forms.algebra.var, range(2))):
        raise Opaque("an index that counts from both ends")
    forms.tables[str(value.name)] = replace(forms.tables[used[0]], gather=node)
    return forms.named(("by table", value.name), (*index.groups, *data.groups[1:]), value)


def _gathered(forms: KnownForms, data: Form, index: Form, axis: int, value: ir.Value) -> Form:
    algebra = forms.algebra
    if len(data.groups[axis]) > 1:
        return _gathered_from_parts(forms, data, index, axis, value)
    if not data.groups[axis]:
        # Of one element there is nothing to choose.
        order = [*range(axis), *[None] * len(index.groups), *range(axis + 1, len(data.groups))]
        around = (*((),) * axis, *index.groups, *((),) * (len(data.groups) - axis - 1))
        groups, (poly, _) = forms.broadcast([forms.moved(data, order), Form(around, ZERO)])
        return Form(groups, poly)
    v = data.variables(axis)[0]
    width = len(index.sizes)
    if data.groups[axis]:
        index = from_start(forms, index, data.groups[axis][0])
    x = algebra.substitute(index.poly, {w: algebra.var(v + w) for w in range(width)})
    names = {v: x} | {w: algebra.var(w + width - 1) for w in range(v + 1, len(data.sizes))}
    groups = (*data.groups[:axis], *index.groups, *data.groups[axis + 1 :])
    return Form(groups, algebra.substitute(data.poly, names))


def _gathered_from_parts(forms: KnownForms, data: Form, index: Form, axis: int, value: ir.Value) -> Form:
    """What an index picks along a dimension of several variables, such as a matrix in one dimension.

    The index C i + t is that of row i and column t where t is below the number C of columns. Elsewhere the result has a
    name, as nothing is known of it.
    """
    algebra, variables, width = forms.algebra, data.variables(axis), len(index.sizes)
    rest, inside, parts = index.poly, UNIT, list[Poly]()
    for size in reversed(data.groups[axis][1:]):
        rest, part = _divided(forms, rest, size)
        if not _is_inside(forms, Form(index.groups, part), size):
            if not algebra.tensors(part):
                raise Opaque("a gather from a composed dimension")
            inside = algebra.mul(inside, algebra.inside(part, size))
        parts.append(part)
    has_rows = inside == UNIT or algebra.has_variable_factor(rest)
    if not has_rows or not _is_inside(forms, Form(index.groups, rest), data.groups[axis][0]):
        raise Opaque("a gather from a composed dimension")
    first = variables[0]
    moved = {w: algebra.var(first + w) for w in range(width)}
    names = {v: algebra.substitute(part, moved) for v, part in zip(variables, [rest, *reversed(parts)], strict=True)}
    names |= {w: algebra.var(w + width - len(variables)) for w in range(variables[-1] + 1, len(data.sizes))}
    groups = (*data.groups[:axis], *index.groups, *data.groups[axis + 1 :])
    picked = algebra.substitute(data.poly, names)
    if inside == UNIT:
        return Form(groups, picked)
    inside = algebra.substitute(inside, moved)
    other = forms.named(("picked", data, index, axis), groups, value)
    return Form(groups, algebra.mul(inside, picked) + algebra.mul(UNIT - inside, other.poly))


def _is_inside(forms: KnownForms, index: Form, size: Poly) -> bool:
    """Whether an index is proven to be in range."""
    if forms.algebra.inside_proven(index.poly, size, dict(enumerate(index.sizes))):
        return True
    bounds = forms.bounds(index)
    return bounds is not None and _sign(bounds[0], 1) and _sign(size - UNIT - bounds[1], 1)


def _divided(forms: KnownForms, index: Poly, size: Poly) -> tuple[Poly, Poly]:
    """Quotient and remainder of an index by a size: terms that are multiples of it, and the others."""
    quotient, remainder = ZERO, ZERO
    for m, c in index.terms.items():
        share = forms.layouts.quotient(Poly({m: c}), size)
        if share is None:
            remainder = remainder + Poly({m: c})
        else:
            quotient = quotient + share
    return quotient, remainder


@reads("GatherElements")
def _gather_elements(forms: KnownForms, node: ir.Node) -> Form:
    data, index = forms.operands(node)
    if len(data.groups) == len(index.groups) == 1:
        return _gathered(forms, data, index, 0, node.outputs[0])
    axis = attribute(node, "axis", 0) % len(data.groups)
    if len(data.groups[axis]) > 1 or len(data.groups) != len(index.groups):
        raise Opaque("a gather from a composed dimension")
    if data.groups[axis]:
        index = from_start(forms, index, data.groups[axis][0])
    # Along other dimensions the index may end before the data do.
    names: dict[int, Poly] = {}
    for a in range(len(data.groups)):
        if a == axis:
            names |= dict.fromkeys(data.variables(a), index.poly)
        else:
            names |= _leading(forms, data, index, a)
    return Form(index.groups, forms.algebra.substitute(data.poly, names))


def _leading(forms: KnownForms, data: Form, part: Form, axis: int) -> dict[int, Poly]:
    """The variables of a dimension of `data` by those of `part`, which has as many elements along it or fewer."""
    own, others = data.variables(axis), part.variables(axis)
    if not own:
        return {}
    if not others:
        return dict.fromkeys(own, ZERO)
    if len(own) == 1:
        return {own[0]: forms.layouts.assembled(list(others), part.sizes)}
    if data.groups[axis] != part.groups[axis]:
        raise Opaque("layouts do not align")
    return {v: forms.algebra.var(w) for v, w in zip(own, others, strict=True)}


@reads("GatherND")
def _gather_nd(forms: KnownForms, node: ir.Node) -> Form:
    data, index = forms.operands(node)
    batch_dims = attribute(node, "batch_dims", 0)
    for own, other in zip(data.groups[:batch_dims], index.groups[:batch_dims], strict=True):
        forms.layouts.demand(forms.extent(own), forms.extent(other))
    index = with_batch_indices(forms, index, batch_dims)
    depth = forms.extent(index.groups[-1]).integer
    if depth is None:
        raise Opaque("a gather by several indices")
    # One index after the other, from the last dimension on; those of one element stay beside each other.
    lead = len(index.groups) - 1
    picks = [index if depth == 1 else sliced(forms, index, lead, number(k), 1, UNIT) for k in range(depth)]
    picks = [forms.moved(pick, range(lead)) for pick in picks]
    algebra, width, count = forms.algebra, len(picks[0].sizes), len(data.sizes)
    if depth == 1 and len(data.groups[0]) > 1:
        return _gathered(forms, data, picks[0], 0, node.outputs[0])
    if any(len(g) != 1 for g in data.groups[:depth]) or any(p.groups != picks[0].groups for p in picks):
        raise Opaque("a gather from a composed dimension")
    names = {k: from_start(forms, pick, data.groups[k][0]).poly for k, pick in enumerate(picks)}
    names |= {w: algebra.var(w - depth + width) for w in range(depth, count)}
    return Form((*picks[0].groups, *data.groups[depth:]), algebra.substitute(data.poly, names))


def with_batch_indices(forms: KnownForms, index: Form, batch_dims: int) -> Form:
    """The index with the numbers of its first dimensions in front of each row: what batch_dims leaves out."""
    rank = len(index.groups)
    if not batch_dims:
        return index
    lead = Form((*index.groups[:-1], ()), ZERO)
    numbers = [Form(lead.groups, forms.layouts.position(lead, axis)) for axis in range(batch_dims)]
    return concatenated(forms, [*numbers, index], rank - 1)


@reads("NonZero", uses_output_shape=True)
def _nonzero(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    groups = forms.groups_of(forms.output(node))
    if len(x.groups) != 1 or len(x.sizes) != 1 or len(groups) != 2 or groups[0] or not groups[1]:
        raise Opaque("positions in several dimensions")
    holds = x.poly if forms.algebra.is_boolean(x.poly) else UNIT - forms.algebra.equal_zero(x.poly)
    name = Positions(holds, x.sizes[0], groups[1][0])
    return Form(groups, forms.algebra.tensor(name, [forms.algebra.var(0)], integer=True))


def scattered(forms: KnownForms, data: Form, index: Form, updates: Form, axis: int) -> tuple[Form, Poly]:
    """The updates added up at their indices along an axis, in the data's shape; and how many hit each element."""
    algebra = forms.algebra
    # Along other dimensions the updates may end before the data do.
    ends = [
        (a, forms.extent(index.groups[a]))
        for a, g in enumerate(data.groups)
        if a != axis and forms.extent(g) != forms.extent(index.groups[a])
    ]
    if any(len(data.groups[a]) != 1 or len(index.groups[a]) != 1 for a, _ in ends):
        raise Opaque("a scatter into a part of the data")
    if data.groups[axis]:
        index = from_start(forms, index, forms.extent(data.groups[axis]))
    groups, (x, u) = forms.broadcast([index, updates])
    joined = Form(groups, ZERO)
    # The variables of the indexed dimension of the updates move out of the way, to be summed.
    inner = list(joined.variables(axis))
    start = sum(len(g) for g in groups[:axis])
    bound = dict(zip(algebra.fresh(len(inner)), groups[axis], strict=True))
    names = {v: algebra.var(w) for v, w in zip(inner, bound, strict=True)}
    width = len(data.groups[axis])
    names |= {w: algebra.var(w - len(inner) + width) for w in range(start + len(inner), len(joined.sizes))}
    # Of one element there is nothing to choose.
    place = forms.layouts.assembled(range(width), data.groups[axis], start)
    hit = algebra.equal_zero(place - algebra.substitute(x, names)) if width else UNIT
    apart = [a for a, _ in ends]
    if apart and updates.groups != index.groups:
        raise Opaque("a scatter into a part of the data")
    groups = tuple(data.groups[a] if a == axis or a in apart else g for a, g in enumerate(groups))
    for a, end in ends:
        (v,) = Form(groups, ZERO).variables(a)
        hit = algebra.mul(hit, algebra.less_than_zero(algebra.var(v) - end))
    sizes = dict(enumerate(s for g in groups for s in g))
    placed = algebra.sum(algebra.mul(hit, algebra.substitute(u, names)), bound, sizes)
    return Form(groups, placed), algebra.sum(hit, bound, sizes)


def _updated(
    forms: KnownForms, data: Form, index: Form, updates: Form, placed: tuple[Form, Poly], node: ir.Node
) -> Form:
    """The data with the updates added, or in the place of the elements that they hit."""
    algebra, (sums, hits) = forms.algebra, placed
    groups, (old, new, count) = forms.broadcast([data, sums, Form(sums.groups, hits)])
    reduction = attribute(node, "reduction", "none")
    if reduction == "none":
        # A number that is its own square is 0 or 1: no element is hit twice.
        if not algebra.is_boolean(count):
            new = new + _overwritten(forms, index, Form(groups, ZERO), ("overwritten", data, index, updates), node)
        old = algebra.mul(UNIT - count, old)
    elif reduction != "add":
        raise Opaque("a scatter that multiplies")
    return Form(groups, old + new)


def _overwritten(forms: KnownForms, index: Form, result: Form, name: object, node: ir.Node) -> Poly:
    """What is else in the result of a scatter by an index C i + t, of row i and column t: 0 where t is always below C.

    Then no element is hit twice; or else nothing is known of the result.
    """
    algebra, count = forms.algebra, len(index.sizes)
    by_several = node.op_type == "ScatterND" and forms.extent(index.groups[-1]) != UNIT
    columns = ZERO if by_several or not count else _slope(forms, index.poly, count - 1)
    row = forms.layouts.assembled(range(count), index.sizes)
    column = index.poly - algebra.mul(columns, row)
    if not columns or algebra.tensors(columns) or not algebra.tensors(column) or algebra.has_variable_factor(column):
        raise Opaque("a scatter that overwrites itself")
    bound = dict(zip(algebra.fresh(count), index.sizes, strict=True))
    names = {v: algebra.var(w) for v, w in enumerate(bound)}
    outside = UNIT - algebra.inside(algebra.substitute(column, names), columns)
    named = forms.named(name, (*groups_of_sizes(index.sizes), *result.groups), node.outputs[0])
    names |= {count + w: algebra.var(w) for w in range(len(result.sizes))}
    summed = algebra.mul(outside, algebra.substitute(named.poly, names))
    return algebra.sum(summed, bound, dict(enumerate(result.sizes)))


def _slope(forms: KnownForms, index: Poly, variable: int) -> Poly:
    """What a variable is multiplied by in an index."""
    ((factor, _),) = next(iter(forms.algebra.var(variable).terms))
    own = {m: c for m, c in index.terms.items() if (factor, 1) in m}
    return forms.algebra.divide_monomial(Poly(own), ((factor, 1),))


@reads("ScatterElements")
def _scatter_elements(forms: KnownForms, node: ir.Node) -> Form:
    data, index, updates = forms.operands(node)
    axis = attribute(node, "axis", 0) % len(data.groups)
    placed = scattered(forms, data, index, updates, axis)
    return _updated(forms, data, index, updates, placed, node)


@reads("ScatterND", uses_producers=True)
def _scatter_nd(forms: KnownForms, node: ir.Node) -> Form:
    data, index, updates = forms.operands(node)
    if node.outputs[0].dtype in INTEGERS and (found := table(forms, node)) is not None:
        return found
    placed = scattered_by_rows(forms, data, index, updates)
    return _updated(forms, data, index, updates, placed, node)


def scattered_by_rows(forms: KnownForms, data: Form, index: Form, updates: Form) -> tuple[Form, Poly]:
    """The updates added up where the rows of the index say, in the data's shape; and how many hit each element."""
    algebra = forms.algebra
    depth = forms.extent(index.groups[-1]).integer if index.groups else None
    if depth is None or any(not g for g in data.groups[:depth]):
        raise Opaque("a scatter that is not read")
    lead = len(index.groups) - 1
    # Align the updates with the indices, then name the summed variables apart.
    picks = []
    for k in range(depth):
        element = index if depth == 1 else sliced(forms, index, lead, number(k), 1, UNIT)
        element = from_start(forms, element, forms.extent(data.groups[k]))
        picks.append(Form((*element.groups[:lead], *((),) * (len(updates.groups) - lead)), element.poly))
    groups, polys = forms.broadcast([updates, *picks])
    width = sum(len(g) for g in groups[:lead])
    sizes = [s for g in groups for s in g]
    bound = dict(zip(algebra.fresh(width), sizes, strict=False))
    names = {v: algebra.var(w) for v, w in enumerate(bound)}
    places = Form(data.groups[:depth], ZERO)
    names |= {width + k: algebra.var(len(places.sizes) + k) for k in range(len(sizes) - width)}
    moved = [algebra.substitute(p, names) for p in polys]
    hit = algebra.product(algebra.equal_zero(forms.layouts.position(places, k) - x) for k, x in enumerate(moved[1:]))
    out = (*data.groups[:depth], *groups[lead:])
    free = dict(enumerate(s for g in out for s in g))
    placed, hits = (algebra.sum(term, bound, free) for term in (algebra.mul(hit, moved[0]), hit))
    return Form(out, placed), hits


@reads("OneHot")
def _one_hot(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    index, _, values = (forms.operand(node, k) for k in range(3))
    depth = forms.vector(node.inputs[1])
    size = depth[0] if depth else None
    rank = len(index.groups) + 1
    axis = attribute(node, "axis", -1) % rank
    if size is None or size.constant == 1:
        raise Opaque("an unknown depth")
    pair = forms.constant(node.inputs[2])
    if pair is None or len(values.groups) != 1:
        raise Opaque("unknown values")
    order: list[int | None] = list(range(axis))
    order += [None, *range(axis, rank - 1)]
    x = forms.moved(index, order)
    groups, (i, _) = forms.broadcast([x, Form(tuple((size,) if a == axis else () for a in range(rank)), ZERO)])
    v = sum(len(g) for g in groups[:axis])
    hit = algebra.equal_zero(algebra.var(v) - i)
    off, on = (float(p) for p in pair.ravel())
    return Form(groups, hit.scaled(on - off) + number(off))
