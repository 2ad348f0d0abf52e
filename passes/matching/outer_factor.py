"""Factors that stay outside of a fused operator: those that have some of a value's dimensions to themselves.

In ``s[b] * dX[r, c]`` the operator computes dX alone, and a product with s follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Algebra, Poly
from gradfuse.passes.matching.builder import Builder, Layout
from gradfuse.passes.matching.materialise import find_mask, materialise
from gradfuse.passes.matching.rewrite import Rewrite
from gradfuse.passes.matching.site import Site
from gradfuse.passes.reading import Form


@dataclass(frozen=True)
class Outer:
    """A form as `factor` times `inner`, which has the variables `kept` of the form."""

    inner: Form
    kept: list[int]
    factor: Poly


def outer_factor(algebra: Algebra, form: Form) -> Outer | None:
    """The outer factor of a form; None if it has none."""
    factors = algebra.common(form.poly)
    if not factors:
        return None
    rest = algebra.divide_monomial(form.poly, factors)
    alone = set(range(len(form.sizes))) - algebra.free(rest)
    apart = tuple(f for f in factors if (free := algebra.atoms[f[0]].free) and free <= alone)
    gone = algebra.free_of_monomial(apart)
    left = tuple(f for f in factors if f not in apart)
    if not apart or gone & algebra.free_of_monomial(left) or any(algebra.atoms[a].indicator for a, _ in apart):
        return None
    kept = [v for v in range(len(form.sizes)) if v not in gone]
    names = {v: algebra.var(k) for k, v in enumerate(kept)}
    poly = algebra.mul(algebra.substitute(rest, names), algebra.substitute(Poly({left: 1.0}), names))
    axes = [a for a, group in enumerate(form.groups) if not group or not gone.issuperset(form.variables(a))]
    groups = [tuple(form.sizes[v] for v in form.variables(a) if v in kept) for a in axes]
    return Outer(Form(tuple(groups), poly), kept, Poly({apart: 1.0}))


def without_outer_factor(site: Site, root: ir.Value) -> tuple[ir.Value, Outer] | None:
    """A placeholder for what is left of the root without its outer factor, and that factor; None if it has none."""
    known = site.notes("outer factor")
    if root not in known:
        outer = outer_factor(site.algebra, site.forms.form(root))
        if outer is not None:
            inner = ir.Value(name=root.name, type=root.type)
            site.forms.set(inner, outer.inner)
            site.position[inner] = site.position[root]
        known[root] = None if outer is None else (inner, outer)
    found: tuple[ir.Value, Outer] | None = known[root]
    return found


def multiplied(builder: Builder, rewrite: Rewrite, outer: Outer, *, refuses_no_class: bool) -> Rewrite:
    """The rewrite of the builder's root, from the one of the placeholder without the outer factor.

    Args:
        builder: has made the nodes of the rewrite.
        rewrite: what the placeholder becomes.
        outer: the factor to multiply it by.
        refuses_no_class: whether the operator refuses an index that is no class.

    Raises:
        Mismatch: nothing in the graph leads to the factor.
    """
    site, root = builder.site, builder.root
    assert root.dtype is not None
    form = site.forms.form(root)
    sizes = dict(enumerate(form.sizes))
    layout = [list(form.variables(a)) for a in range(len(form.groups))]
    own = [[v for v in group if v in outer.kept] for group in layout]
    other = [[v for v in group if v not in outer.kept] for group in layout]
    value = builder.arrange(rewrite.output, outer.kept, own, sizes)
    scale = materialise(builder, outer.factor, [v for group in other for v in group], sizes, root.dtype, other)
    scale = _guarded(builder, scale, form, layout, other, sizes, refuses_no_class=refuses_no_class)
    output = builder.op("Mul", [value, scale], root.dtype, site.extents(root))
    return replace(rewrite, root=root, output=output)


def _guarded(
    builder: Builder,
    factor: ir.Value,
    form: Form,
    layout: Layout,
    factor_layout: Layout,
    sizes: Mapping[int, Poly],
    *,
    refuses_no_class: bool,
) -> ir.Value:
    """The factor, but 0 where a condition makes all of the form 0: the factor may be infinite there."""
    algebra = builder.site.algebra
    for condition in algebra.indicators(form.poly):
        if condition.kind == "inside" and refuses_no_class:
            continue
        for case in (True, False):
            if algebra.given(form.poly, condition, case):
                continue
            zero = algebra.of(condition) if case else UNIT - algebra.of(condition)
            variables = sorted(condition.free)
            groups = [[v for v in group if v in condition.free] for group in layout]
            mask = find_mask(builder, zero, variables, sizes, groups)
            assert factor.dtype is not None
            shape = [algebra.product(sizes[v] for v in (*a, *b)) for a, b in zip(groups, factor_layout, strict=True)]
            nothing = builder.constant(np.asarray(0.0), factor.dtype)
            factor = builder.op("Where", [mask, nothing, factor], factor.dtype, shape)
    return factor
