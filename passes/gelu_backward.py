"""GeluBackward: ``grad_output (P(x) + x p(x))``, with the normal distribution P and its density p, or by a tanh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Algebra, Poly, TooComplex, number
from gradfuse.passes.matching import Builder, FusePass, Mismatch, Rewrite, Site, require_same
from gradfuse.passes.reading import Form, ort_training

_CURVES = {"Erf": "none", "Tanh": "tanh", "Sigmoid": "tanh"}
_WHOLE = {"GeluGrad": "none", "BiasGeluGrad_dX": "none", "FastGeluGrad": "tanh", "BiasFastGeluGrad_dX": "tanh"}
_EXPONENTIALS = {"Exp": (2, -2, 1, -1), "Cosh": (1, -1), "Sinh": (1, -1)}
"""Operators that are exponentials, and the multiples of the argument of the Tanh that they may be of."""
_LOGISTIC = "1 / (1 + exp)"
_NEAR_ROOT, _NEAR_CURVE = 64, 8  # nodes ahead among which gradient and input are looked for
_FEWEST_TERMS = 3  # of a slope, and so of its product with a gradient
_CLOSE = 1e-6  # to the constants within a curve, which no form of the root has

_ROOT_HALF = 1 / math.sqrt(2)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


class FuseGeluBackwardPass(FusePass):
    """Finds, in a value P, an Erf E of x / sqrt(2) or a Tanh T of sqrt(2 / pi) (x + 0.044715 x^3) with P = g s, where

    1. s is the slope of the unit at x: (1 + E) / 2 + x D / sqrt(2 pi), with an Exp D of -x^2 / 2 that the graph has, or
       (1 + T) / 2 + x (1 - T^2) sqrt(2 / pi) (1 + 3 * 0.044715 x^2) / 2, where T may be 2 S - 1 with a Sigmoid S of
       twice as much, and T and 1 - T^2 may be written in exponentials;
    2. g and x are values of P's type and shape, or x is repeated along the last dimension.

    GeluGrad and FastGeluGrad of onnxruntime-training are the same in one node, of an x plus a bias too.
    """

    operator = "GeluBackward"
    linear = False
    training_operators = ("GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX")

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        whole = root.producer()
        if whole is not None and whole.domain == ort_training.DOMAIN and whole.op_type in _WHOLE:
            return _of_one_node(site, builder, root, whole)
        form = site.forms.form(root)
        by_exponentials = _has_exponentials(site, form.poly)
        if not by_exponentials and _curves(site).isdisjoint(site.algebra.tensors(form.poly)):
            return None
        near = list(_ahead(site, root, form, _NEAR_ROOT))
        units = itertools.chain(
            ((unit, form.poly) for unit in _units(site, near, form)),
            _units_of_exponentials(site, near, form) if by_exponentials else (),
        )
        candidates = (
            partial(_bound, site, builder, root, grad, unit, poly)
            for unit, poly in units
            for grad in near
            if site.forms.form(grad).groups == form.groups and _is_product(site, poly, grad, unit)
        )
        return self.first_bound(builder, candidates)

    def possible(self, site: Site, form: Form) -> bool:
        return len(form.poly) >= _FEWEST_TERMS or not _wholes(site).isdisjoint(site.algebra.tensors(form.poly))


@dataclass(frozen=True)
class _Unit:
    """A unit that a graph computes.

    Attributes:
        x: its input.
        curves: the nodes of its Erf or Tanh.
        slope: its slope at x.
        approximate: the kind of unit.
    """

    x: ir.Value
    curves: tuple[ir.Node, ...]
    slope: Poly
    approximate: str


def _curves(site: Site) -> Set[object]:
    """The names of the tensors that are a curve, in forms."""

    def find() -> Set[object]:
        curves = (node.outputs[0] for node in site.graph if node.op_type in _CURVES and not node.domain)
        forms = (site.forms.get(value) for value in curves)
        return frozenset(name for form in forms if form is not None for name in site.algebra.tensors(form.poly))

    return site.answer("curves of GELU", (), (), find)


def _wholes(site: Site) -> Set[object]:
    """The names, in forms, of what GeluGrad and its like give."""

    def find() -> Set[object]:
        nodes = (n for n in site.graph if n.domain == ort_training.DOMAIN and n.op_type in _WHOLE)
        forms = (site.forms.get(node.outputs[0]) for node in nodes)
        return frozenset(name for form in forms if form is not None for name in site.algebra.tensors(form.poly))

    return site.answer("gradients of GELU", (), (), find)


def _ahead(site: Site, value: ir.Value, form: Form, most: int) -> Iterator[ir.Value]:
    """Values of a form's shape that the `most` nodes nearest to a value read.

    Or of its shape but for the last dimension, along which onnx-ad has several gradients.
    """
    layouts = (form.groups, form.groups[:-1], (*form.groups[:-1], ()))
    todo, seen = [site.first(value)], {value}
    for known in todo:
        node = known.producer()
        if node is None or node.graph is not site.graph or most == 0:
            continue
        most -= 1
        for read in node.inputs:
            source = None if read is None else site.first(read)
            own = None if source is None or source in seen else site.forms.get(source)
            if source is not None and own is not None and own.groups in layouts:
                seen.add(source)
                todo.append(source)
                yield source


def _units(site: Site, near: Sequence[ir.Value], form: Form) -> Iterator[_Unit]:
    """The units that have their curve among some values of a form's shape."""
    for curve in _made_by(near, _CURVES):
        inner, height = curve.inputs[0], site.forms.form(curve.outputs[0]).poly
        inside = None if inner is None else site.forms.get(inner)
        if inner is None or inside is None:
            continue
        for x in (inner, *_ahead(site, inner, form, _NEAR_CURVE)):
            at = site.forms.form(x).poly
            # Curves are odd, and may be of the opposite.
            for sign in (1.0, -1.0):
                if curve.op_type == "Sigmoid":
                    if inside.poly.close_to(_inside(site, at, "tanh").scaled(2 * sign), _CLOSE):
                        yield _Unit(x, (curve,), _slope(site, at, (height.scaled(2) - UNIT).scaled(sign)), "tanh")
                elif inside.poly.close_to(_inside(site, at, _CURVES[curve.op_type]).scaled(sign), _CLOSE):
                    own = height.scaled(sign)
                    is_erf = curve.op_type == "Erf"
                    slopes = _slopes_of_erf(site, at, own, near) if is_erf else [_slope(site, at, own)]
                    yield from (_Unit(x, (curve,), slope, _CURVES[curve.op_type]) for slope in slopes)


def _is_product(site: Site, poly: Poly, grad: ir.Value, unit: _Unit) -> bool:
    """Whether a polynomial is the product of a value and the slope of a unit."""
    try:
        return poly.close_to(site.algebra.mul(site.forms.form(grad).poly, unit.slope), _CLOSE)
    except TooComplex:
        return False


def _has_exponentials(site: Site, poly: Poly) -> bool:
    """Whether exponentials are part of a value, and it is divided by a sum."""
    kinds = {site.algebra.atoms[a].kind for m in poly.terms for a, _ in m}
    return {"exp", "pow"} <= kinds


def _units_of_exponentials(site: Site, near: Sequence[ir.Value], form: Form) -> Iterator[tuple[_Unit, Poly]]:
    """The units whose Tanh, or 1 less its square, is written in exponentials; and what the form is then.

    With R = 1 / (1 + E) and E = e^2u both are polynomials: tanh(u) = 1 - 2 R and 1 - tanh(u)^2 = 4 R (1 - R).
    """
    algebra = site.algebra
    share = algebra.tensor(_LOGISTIC, map(algebra.var, range(len(form.sizes))))
    for node in _made_by(near, _EXPONENTIALS):
        inner, inside = node.inputs[0], None if node.inputs[0] is None else site.forms.get(node.inputs[0])
        for x in () if inner is None or inside is None else (inner, *_ahead(site, inner, form, _NEAR_CURVE)):
            assert inside is not None
            wanted = _inside(site, site.forms.form(x).poly, "tanh")
            times = next((k for k in _EXPONENTIALS[node.op_type] if inside.poly.close_to(wanted.scaled(k), _CLOSE)), 0)
            if not times:
                continue
            curves = tuple(_curves_of(site, near, wanted))
            known = {a: UNIT.scaled(one) - share.scaled(two) for _, a, one, two in curves}
            poly = _in_logistic(algebra, form.poly, algebra.power(algebra.exp(inside.poly), 2 // times), share, known)
            if poly is not None:
                slope = _slope(site, site.forms.form(x).poly, UNIT - share.scaled(2))
                yield _Unit(x, tuple(one for one, *_ in curves), slope, "tanh"), poly


def _curves_of(site: Site, near: Sequence[ir.Value], inside: Poly) -> Iterator[tuple[ir.Node, int, float, float]]:
    """Nodes of a Tanh of u, or a Sigmoid of 2 u; their atoms, a and b where they are a - b R with R as above."""
    for node in _made_by(near, {"Tanh", "Sigmoid"}):
        own = None if node.inputs[0] is None else site.forms.get(node.inputs[0])
        times, two = (1, 2.0) if node.op_type == "Tanh" else (2, 1.0)
        if own is not None and own.poly.close_to(inside.scaled(times), _CLOSE):
            ((monomial, _),) = site.forms.form(node.outputs[0]).poly.terms.items()
            ((atom, _),) = monomial
            yield node, atom, 1.0, two


def _in_logistic(
    algebra: Algebra, poly: Poly, exponential: Poly, share: Poly, known: Mapping[int, Poly]
) -> Poly | None:
    """A polynomial in R = 1 / (1 + E), given E and atoms that are functions of R; None where it is none."""
    (factors,) = exponential.terms
    sums = {1: UNIT + exponential, 2: UNIT + exponential.scaled(2) + algebra.mul(exponential, exponential)}
    result = ZERO
    for monomial, c in poly.terms.items():
        powers = dict(monomial)
        first, of_first = factors[0]
        above = powers.get(first, 0) / of_first
        if any(powers.pop(a, 0) != e * above for a, e in factors):
            return None
        term, below = number(c), 0.0
        for a, e in powers.items():
            degree = next((n for n, own in sums.items() if _is_power_of(algebra, a, own)), 0)
            below -= degree * e
            if not degree:
                term = algebra.mul(term, algebra.power(known.get(a) or algebra.of(algebra.atoms[a]), e))
        if not 0 <= above <= below or above != int(above) or below != int(below):
            return None
        rest = [algebra.power(share, int(below - above)), *([UNIT - share] * int(above))]
        result = result + algebra.product([term, *rest])
    return result


def _is_power_of(algebra: Algebra, atom: int, poly: Poly) -> bool:
    return algebra.atoms[atom].kind == "pow" and bool(algebra.atoms[atom].args[0].close_to(poly, _CLOSE))


def _made_by(values: Sequence[ir.Value], operators: Collection[str]) -> Iterator[ir.Node]:
    for value in values:
        node = value.producer()
        if node is not None and not node.domain and node.op_type in operators:
            yield node


def _inside(site: Site, x: Poly, approximate: str) -> Poly:
    """What the curve of a unit is of."""
    if approximate == "none":
        return x.scaled(_ROOT_HALF)
    try:
        return (x + site.algebra.product([x, x, x]).scaled(_CUBIC)).scaled(_SCALE)
    except TooComplex:
        return ZERO  # The argument of a curve itself: it is not what that is an argument for.


def _slopes_of_erf(site: Site, x: Poly, height: Poly, near: Sequence[ir.Value]) -> Iterator[Poly]:
    """The slopes of a unit by Erf, with each value that may be its density.

    The density is written as the graph has it: a form keeps all digits of an exponent.
    """
    exponent = site.algebra.mul(x, x).scaled(-0.5)
    for node in _made_by(near, {"Exp"}):
        inside = None if node.inputs[0] is None else site.forms.get(node.inputs[0])
        if inside is not None and inside.poly.close_to(exponent, _CLOSE):
            density = site.forms.form(node.outputs[0]).poly.scaled(_DENSITY)
            yield (UNIT + height).scaled(0.5) + site.algebra.mul(x, density)


def _slope(site: Site, x: Poly, height: Poly) -> Poly:
    """The slope of a unit by Tanh."""
    algebra = site.algebra
    inner_slope = (UNIT + algebra.mul(x, x).scaled(3 * _CUBIC)).scaled(_SCALE)
    moved = algebra.product([x, UNIT - algebra.mul(height, height), inner_slope])
    return (UNIT + height + moved).scaled(0.5)


def _of_one_node(site: Site, builder: Builder, root: ir.Value, node: ir.Node) -> Rewrite | None:
    grad, x = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    extents = site.extents(root)
    if grad is None or x is None or not all(site.knows(v) and site.extents(v) == extents for v in (grad, x)):
        return None
    added = [] if bias is None else [bias]
    if any(not site.knows(value) or site.extents(value) != extents[-1:] for value in added):
        raise Mismatch("its bias is no vector of the last dimension")
    if any(value.dtype != root.dtype for value in (grad, x, *added)):
        raise Mismatch("it is computed of tensors of several types")
    whole = x if bias is None else builder.op("Add", [x, bias], root.dtype, extents)
    fused = builder.fused(FuseGeluBackwardPass.operator, [grad, whole], extents, approximate=_WHOLE[node.op_type])
    rewrite = builder.rewrite("gelu-backward", [fused], fused)
    return replace(rewrite, frontier=tuple(dict.fromkeys((grad, x, *added))), runs=frozenset([node]))


def _bound(site: Site, builder: Builder, root: ir.Value, grad: ir.Value, unit: _Unit, poly: Poly) -> Rewrite:
    if any(value.dtype != root.dtype for value in (grad, unit.x)):
        raise Mismatch("it is computed of tensors of several types")
    require_same(site, root, site.algebra.mul(site.forms.form(grad).poly, unit.slope), poly)
    x, form = unit.x, site.forms.form(root)
    if site.extents(x) != site.extents(root):
        layout = [list(form.variables(axis)) for axis in range(len(form.groups))]
        x = builder.arrange(x, range(len(site.forms.form(x).sizes)), layout, dict(enumerate(form.sizes)))
    fused = builder.fused(FuseGeluBackwardPass.operator, [grad, x], site.extents(root), approximate=unit.approximate)
    return replace(
        builder.rewrite("gelu-backward", [fused], fused),
        frontier=tuple(dict.fromkeys((grad, unit.x))),
        runs=frozenset(unit.curves),
    )
