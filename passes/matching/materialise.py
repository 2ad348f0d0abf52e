"""Polynomials as tensors: a value of the graph, or a few small nodes that compute the polynomial from such values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Monomial, Poly
from gradfuse.passes.matching.builder import Builder, Layout
from gradfuse.passes.matching.graphs import TOLERANCE
from gradfuse.passes.matching.rewrite import Mismatch

_WIDE = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16}
_MOST_TERMS = 4  # that are worth a node each


def materialise(
    builder: Builder,
    poly: Poly,
    variables: Sequence[int],
    sizes: Mapping[int, Poly],
    dtype: ir.DataType,
    layout: Layout,
) -> ir.Value:
    """The polynomial as a tensor: a constant, a value of the graph, or a few small nodes on such values.

    Args:
        builder: makes the nodes.
        poly: a polynomial in `variables`.
        variables: index variables, outermost first.
        sizes: the size of each variable.
        dtype: the type of the result.
        layout: the variables of each dimension of the result.

    Raises:
        Mismatch: nothing in the graph leads to it.
    """
    site, algebra = builder.site, builder.site.algebra
    if poly.constant is not None:
        return builder.constant(np.asarray(poly.constant), dtype)
    extents = [sizes[v] for v in variables]
    local = algebra.substitute(poly, {v: algebra.var(k) for k, v in enumerate(variables)})
    shape = [algebra.product(sizes[v] for v in group) for group in layout]
    for dtypes in ([dtype], [t for t in TOLERANCE if t != dtype]):
        found = site.find(local, extents, builder.root, dtypes=dtypes, shape=shape)
        if found is not None and math.isfinite(found[1]):
            if dtype == ir.DataType.FLOAT16 and found[0].dtype in _WIDE:
                # A loss is scaled because its gradients do not fit: 65536 would become infinite.
                raise Mismatch(f"{found[0].name} may be beyond the range of float16")
            value = builder.cast(builder.arrange(found[0], variables, layout, sizes), dtype)
            if abs(found[1] - 1.0) > TOLERANCE[dtype]:
                factor = builder.constant(np.asarray(1.0 / found[1]), dtype)
                value = builder.op("Mul", [value, factor], dtype, shape)
            return value
    selected = _selected(builder, poly, variables, sizes, dtype, layout)
    if selected is not None:
        return selected
    if len(poly) > _MOST_TERMS:
        raise Mismatch(f"no value of the graph is {algebra.text(poly)[:120]}")
    terms = [_term(builder, m, c, variables, sizes, dtype, layout) for m, c in sorted(poly.terms.items())]
    total = terms[0]
    for term in terms[1:]:
        total = builder.op("Add", [total, term], dtype, _broadcast(site.extents(total), site.extents(term)))
    return total


def _selected(
    builder: Builder,
    poly: Poly,
    variables: Sequence[int],
    sizes: Mapping[int, Poly],
    dtype: ir.DataType,
    layout: Layout,
) -> ir.Value | None:
    """The polynomial by a Where on a condition that makes it 0. A product would not do: the rest may be infinite."""
    algebra = builder.site.algebra
    for condition in algebra.indicators(poly):
        for case in (False, True):
            rest = algebra.given(poly, condition, not case)
            if algebra.given(poly, condition, case) or rest.constant is not None:
                continue
            free = (condition.free, algebra.free(rest))
            groups, own = ([list(g) if f.intersection(g) else [] for g in layout] for f in free)
            mask = find_mask(builder, algebra.of(condition), sorted(free[0]), sizes, groups)
            used = [v for v in variables if v in free[1]]
            parts = [materialise(builder, rest, used, sizes, dtype, own)]
            parts.insert(int(not case), builder.constant(np.asarray(0.0), dtype))
            shape = [algebra.product(sizes[v] for v in group) for group in layout]
            return builder.op("Where", [mask, *parts], dtype, shape)
    return None


def _term(
    builder: Builder,
    monomial: Monomial,
    coefficient: float,
    variables: Sequence[int],
    sizes: Mapping[int, Poly],
    dtype: ir.DataType,
    layout: Layout,
) -> ir.Value:
    """One term, as a product of its factors."""
    site, algebra = builder.site, builder.site.algebra
    if len(monomial) == 1 and monomial[0][1] == 1 and coefficient == 1.0:
        atom = algebra.atoms[monomial[0][0]]
        if atom.indicator:
            local = algebra.substitute(algebra.of(atom), {v: algebra.var(k) for k, v in enumerate(variables)})
            found = site.find(local, [sizes[v] for v in variables], builder.root, dtypes=[ir.DataType.BOOL])
            if found is not None and found[1] == 1.0:
                return builder.cast(builder.arrange(found[0], variables, layout, sizes), dtype)
        raise Mismatch(f"no value of the graph is {algebra.text(algebra.of(atom))[:120]}")
    result = builder.constant(np.asarray(coefficient), dtype)
    shape = [UNIT] * len(layout)
    for a, e in monomial:
        atom = algebra.atoms[a]
        used = [v for v in variables if v in atom.free]
        # A dimension of several variables is whole, or the parts would not broadcast.
        part_layout = [list(group) if atom.free.intersection(group) else [] for group in layout]
        exponent = e if e > 0 else -e
        power = algebra.power(atom.args[0], exponent) if atom.kind == "pow" else algebra.of(atom, exponent)
        if abs(e) != 1:
            local = algebra.substitute(power, {v: algebra.var(k) for k, v in enumerate(used)})
            if site.find(local, [sizes[v] for v in used], builder.root, dtypes=TOLERANCE) is None:
                raise Mismatch(f"no value of the graph is {algebra.text(Poly({monomial: 1.0}))[:120]}")
        factor = materialise(builder, power, used, sizes, dtype, part_layout)
        # Where no factor has had a dimension yet, their product is still of size 1.
        shape = _broadcast(shape, [algebra.product(sizes[v] for v in group) for group in part_layout])
        result = builder.op("Mul" if e > 0 else "Div", [result, factor], dtype, shape)
    return result


def find_mask(
    builder: Builder, poly: Poly, variables: Sequence[int], sizes: Mapping[int, Poly], layout: Layout
) -> ir.Value:
    """The polynomial, which is 0 or 1 everywhere, as a boolean tensor: a value of the graph, or a few nodes on such.

    Args and errors are those of :func:`materialise`.
    """
    site, algebra = builder.site, builder.site.algebra
    shape = [algebra.product(sizes[v] for v in group) for group in layout]
    names = {v: algebra.var(k) for k, v in enumerate(variables)}
    extents = [sizes[v] for v in variables]
    for negated in (False, True):
        local = algebra.substitute(UNIT - poly if negated else poly, names)
        found = site.find(local, extents, builder.root, dtypes=[ir.DataType.BOOL], shape=shape)
        if found is None or found[1] != 1.0:
            number_like = site.find(local, extents, builder.root, dtypes=TOLERANCE, shape=shape)
            found = number_like if number_like is not None and number_like[1] == 1.0 else None
        if found is not None:
            value = builder.cast(builder.arrange(found[0], variables, layout, sizes), ir.DataType.BOOL)
            return builder.op("Not", [value], ir.DataType.BOOL, shape) if negated else value
    keep = UNIT - poly
    if len(keep) == 1 and len(next(iter(keep.terms))) > 1 and next(iter(keep.terms.values())) == 1.0:
        # Kept where every one of several conditions keeps: masked where one of them masks.
        parts = [UNIT - algebra.of(algebra.atoms[a], e) for a, e in next(iter(keep.terms))]
        masks = []
        for part in parts:
            used = [v for v in variables if v in algebra.free(part)]
            part_layout = [list(group) if set(used).intersection(group) else [] for group in layout]
            masks.append(find_mask(builder, part, used, sizes, part_layout))
        result = masks[0]
        for mask in masks[1:]:
            result = builder.op("Or", [result, mask], ir.DataType.BOOL, shape)
        return result
    for negated in (False, True):
        condition = UNIT - poly if negated else poly
        end = algebra.end_of(condition)
        if end is not None:
            value = builder.arrange(builder.below(end[1], sizes[end[0]]), [end[0]], layout, sizes)
            return builder.op("Not", [value], ir.DataType.BOOL, shape) if negated else value
    raise Mismatch("the mask is no boolean value of the graph")


def _broadcast(a: Sequence[Poly], b: Sequence[Poly]) -> list[Poly]:
    """The shape that tensors of these two shapes give together; one of them may have no dimensions."""
    if not (a and b):
        return list(a or b)
    return [y if x == UNIT else x for x, y in zip(a, b, strict=True)]
