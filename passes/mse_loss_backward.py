"""MseLossBackward: ``2 (self - target) grad_output``, over the number of elements for the mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Monomial, Poly
from gradfuse.passes.matching import (
    TOLERANCE,
    Builder,
    FusePass,
    Mismatch,
    Rewrite,
    Site,
    bypassed,
    materialise,
    names_of,
    require_same,
)
from gradfuse.passes.reading import Form, is_float
from gradfuse.passes.report import NearMiss

_ARITHMETIC = {"Add", "Sub", "Sum", "Neg", "Mul", "Div", "Cast", "Identity"}
_MOVES = {
    *("Cast", "CastLike", "Compress", "DepthToSpace", "DequantizeLinear", "Flatten", "Gather"),
    *("GatherElements", "GatherND", "Identity", "Neg", "Pad", "Reshape", "ReverseSequence", "Slice", "SpaceToDepth"),
    *("Split", "Squeeze", "Transpose", "Unsqueeze"),
}
"""Operators whose results are the elements of their first operand, elsewhere or in another type or sign."""
_STEPS_OF_TARGET = 32
_REPEATED = (
    "a multiple of a difference from an input that is repeated: neither does the square of the difference go into an "
    "output, nor is it multiplied by 2 over the number of elements, as for a mean"
)
_SHARE = 1e-5  # by which a factor may differ from that of a mean
_NEAR = 12  # nodes ahead of a root among which the operands of a difference are looked for


class FuseMseLossBackwardPass(FusePass):
    """Finds, in a value P, a difference d = x - t of two tensors of the graph with P = r d, r a single term, and

    1. r depends on no index, x and t have P's shape, and one of them comes from inputs of the graph as the target of a
       loss does: moved, converted, or scaled and shifted by numbers; or repeated, if r is 2 over the number of elements
       of P, and no mean of something else; or d * d times r goes into an output, or into a
       YieldOp, by which a training graph hands its loss to PyTorch. Many computations, normalisations and sampling
       among them, have the loose form of a product with a difference;
    2. d is a subtraction of the graph; or r depends on no index and is not one, and x and t are of P's shape;
    3. x and t are values of P's type.

    "mean" where r has the inverse of the number of elements of x, else "sum", or "none" where r has indices.
    """

    operator = "MseLossBackward"
    order = 1

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        form = site.forms.form(root)
        differences = [
            (minuend, subtrahend, difference, ratio)
            for minuend, subtrahend, weighted, difference, ratio in _differences(site, root, form)
            if (not site.algebra.free(ratio) and _has_target(site, root, minuend, subtrahend))
            or _is_mean_to_given(site, form, ratio, minuend, subtrahend)
            or weighted()
        ]
        unwritten = (found for found in _unwritten_differences(site, root, form) if _has_target(site, root, *found[:2]))
        candidates = differences or unwritten
        return self.first_bound(builder, (partial(self._bound, site, builder, root, form, *c) for c in candidates))

    def possible(self, site: Site, form: Form) -> bool:
        return len(form.poly) > 1

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Multiples of a difference from an input that is repeated, of which nothing says what they are."""
        for node in site.graph:
            root = node.outputs[0]
            form = site.forms.get(root) if node.op_type in ("Mul", "Div") and root in site.position else None
            if form is None or node.domain or root.dtype not in TOLERANCE or not self.possible(site, form):
                continue
            found = (one for one in _differences(site, root, form) if not site.algebra.free(one[-1]))
            if any(_is_to_given(site, minuend, subtrahend) for minuend, subtrahend, *_ in found):
                yield NearMiss(names_of([node])[0], self.operator, _REPEATED)

    def refusal(self, site: Site, rewrite: Rewrite) -> str | None:
        for node in () if rewrite.by_body else bypassed(site, rewrite):
            if node.op_type != "Where" or node.domain or not is_float(node.outputs[0]) or node.inputs[0] is None:
                continue
            condition = site.forms.get(node.inputs[0])
            if condition is None or condition.poly.constant is None:
                return "a Where leaves out what may be infinite; the operator would multiply it by 0"
        return None

    def _bound(
        self,
        site: Site,
        builder: Builder,
        root: ir.Value,
        form: Form,
        minuend: ir.Value,
        subtrahend: ir.Value,
        difference: Poly,
        ratio: Poly,
    ) -> Rewrite:
        algebra = site.algebra
        assert root.dtype is not None
        (coefficient,) = ratio.terms.values()
        if coefficient < 0:
            minuend, subtrahend, ratio, difference = subtrahend, minuend, -ratio, -difference
        operands = [_of_type(site, v, root) for v in (minuend, subtrahend)]
        groups, _ = site.forms.broadcast([site.forms.form(v) for v in operands])
        extents = [site.forms.extent(g) for g in groups]
        if extents != site.extents(root):
            raise Mismatch("its shape is not the one of the difference")
        gradient = ratio.scaled(0.5)
        reduction = 2
        count = site.forms.extent(site.forms.form(operands[0]).sizes)
        mean = algebra.mul(gradient, count)
        if algebra.free(gradient):
            reduction = 0
        elif mean.constant is not None and abs(mean.constant - 1.0) <= 1e-2:
            gradient, reduction = UNIT, 1
        elif len(algebra.free(mean)) == 0 and _size(mean) < _size(gradient):
            gradient, reduction = mean, 1
        divisor = algebra.power(count, -1) if reduction == 1 else UNIT
        require_same(site, root, algebra.product([difference, gradient, divisor]).scaled(2.0))

        used = sorted(algebra.free(gradient))
        sizes = dict(enumerate(form.sizes))
        layout = [[v for v in form.variables(a) if v in used] for a in range(len(form.groups))] if used else []
        grad = materialise(builder, gradient, used, sizes, root.dtype, layout)
        fused = builder.fused(self.operator, [grad, *operands], extents, reduction=reduction)
        return builder.rewrite("squared-error-backward", [fused], fused)


def _size(poly: Poly) -> int:
    return sum(len(m) for m in poly.terms)


def _of_type(site: Site, value: ir.Value, root: ir.Value) -> ir.Value:
    """The value in the root's type: itself, or what it was cast from."""
    if value.dtype == root.dtype:
        return value
    form = site.forms.form(value)
    found = site.find(form.poly, form.sizes, root, dtypes=[root.dtype], shape=site.extents(value))
    if found is None or found[1] != 1.0 or site.extents(found[0]) != site.extents(value):
        raise Mismatch("an operand of the difference is no value of its type")
    return found[0]


def _differences(
    site: Site, root: ir.Value, form: Form
) -> Iterator[tuple[ir.Value, ir.Value, Callable[[], bool], Poly, Poly]]:
    """Subtractions ahead of the root of which it is a multiple.

    Gives the operands, a test whether the square is part of an output, the difference in the root's variables, and
    the ratio.
    """
    wanted = site.algebra.tensors(form.poly)
    for node in site.differences(form.poly):
        value = node.outputs[0]
        if not site.is_ahead(value, root):
            continue
        own = site.forms.get(value)
        if own is None or len(own.poly) != len(form.poly) or not site.algebra.tensors(own.poly) <= wanted:
            continue
        if [site.forms.extent(g) for g in own.groups] != site.extents(root):
            continue
        _, (difference, poly) = site.forms.broadcast([own, form])
        ratio = site.algebra.ratio(poly, difference)
        operands = site.operands_of_difference(node)
        if ratio is not None and poly == form.poly and operands is not None:
            yield *operands, partial(_weighted, site, value, root), difference, ratio


def _unwritten_differences(site: Site, root: ir.Value, form: Form) -> Iterator[tuple[ir.Value, ir.Value, Poly, Poly]]:
    """Pairs of values whose difference no node computes, as in x / n - t / n, and of which the root is a multiple."""
    node = root.producer()
    if node is None or node.op_type not in _ARITHMETIC or node.domain:
        return
    near: dict[ir.Value, Poly] = {}
    todo, seen = [node], {node}
    while todo and len(seen) <= _NEAR:
        for value in todo.pop(0).inputs:
            own = None if value is None or value.const_value is not None else site.forms.get(value)
            if value is None or own is None or value not in site.position or own.groups != form.groups:
                continue
            if any(site.algebra.atoms[a].kind == "eq" for m in own.poly.terms for a, _ in m):
                continue  # This assumes that a row of a one-hot sums to 1; this op has no class to refuse.
            near[value] = own.poly
            above = value.producer()
            if above is not None and above not in seen and above.op_type in _ARITHMETIC and not above.domain:
                seen.add(above)
                todo.append(above)
    # Earliest first: then most of the graph becomes unused.
    values = sorted(near, key=site.position.__getitem__)
    polys = [near[value] for value in values]
    for i, k in site.answer(
        "unwritten difference", form.groups, [form.poly, *polys], lambda: _pairs(site, form, polys)
    ):
        difference = polys[i] - polys[k]
        ratio = site.algebra.ratio(form.poly, difference)
        if ratio is not None:
            yield values[i], values[k], difference, ratio


def _pairs(site: Site, form: Form, polys: list[Poly]) -> list[tuple[int, int]]:
    """The pairs of polynomials of whose difference the form is a multiple, but not the difference itself."""
    found = []
    wanted, factors = _varying(site, form.poly), [_varying(site, poly) for poly in polys]
    for (i, x), (k, t) in itertools.combinations(enumerate(polys), 2):
        if len(x) + len(t) != len(form.poly):
            continue
        one, other = factors[i], factors[k]
        if wanted is not None and one is not None and other is not None and sorted(one + other) != wanted:
            continue  # Constant factors change no term in these, and a quotient takes far longer.
        ratio = site.algebra.ratio(form.poly, x - t)
        if ratio is not None and not site.algebra.free(ratio) and ratio.constant not in (1.0, -1.0):
            found.append((i, k))
    return found


def _varying(site: Site, poly: Poly) -> list[Monomial] | None:
    """The factors of each term that vary, sorted; None where there are conditions, by which terms may become alike."""
    atoms = site.algebra.atoms
    if any(atoms[a].idempotent for m in poly.terms for a, _ in m):
        return None
    return sorted(tuple((a, e) for a, e in m if atoms[a].free) for m in poly.terms)


def _weighted(site: Site, difference: ir.Value, root: ir.Value) -> bool:
    """Whether the square of the difference goes, by linear operations only, into an output of the graph."""
    multiples = [difference]
    for use in difference.uses():
        if use.node.op_type in ("Mul", "Div", "Neg", "Cast", "Identity") and use.node.inputs.count(difference) == 1:
            multiples += use.node.outputs
    squares = [square for value in multiples for square in _squares(site, value)]
    # Where squares are weighted, one of the two factors may be.
    products = (use.node for value in multiples for use in value.uses() if use.node.op_type == "Mul")
    squares += [n.outputs[0] for n in products if all(v in multiples and v is not root for v in n.inputs)]
    return any(square in site.parts_of_outputs for square in squares)


def _squares(site: Site, value: ir.Value) -> Iterator[ir.Value]:
    """What is computed from a value as its square, or as a sum of squares."""
    for use in value.uses():
        node = use.node
        twice = node.op_type in ("Mul", "Einsum") and node.inputs.count(value) == 2
        if twice or node.op_type == "ReduceSumSquare" or (node.op_type == "Pow" and _is_two(site, node.inputs[1])):
            yield node.outputs[0]
        elif node.op_type == "ReduceL2":
            yield from _squares(site, node.outputs[0])


def _has_target(site: Site, root: ir.Value, *operands: ir.Value) -> bool:
    """Whether the operands of a difference have the root's shape, and one of them may be a loss's target."""
    alike = all(site.knows(value) and site.extents(value) == site.extents(root) for value in operands)
    constant = any(site.forms.constant(value) is not None for value in operands)
    return alike and not constant and any(_is_given(site, value) for value in operands)


def _is_mean_to_given(site: Site, form: Form, ratio: Poly, *operands: ir.Value) -> bool:
    """Whether a difference is multiplied as for a mean of squares, and one operand is an input, repeated perhaps.

    What has the same for all of a row is rather a mean, which nothing divides by half the number of all elements.
    """
    algebra = site.algebra
    share = algebra.mul(ratio, site.forms.extent(form.sizes)).scaled(0.5)
    if algebra.free(share) or len(share) != 1 or ratio.constant in (1.0, -1.0):
        return False
    ((factors, number),) = share.terms.items()
    if any(algebra.atoms[a].kind == "dim" for a, _ in factors) or abs(abs(number) - 1.0) > _SHARE:
        return False
    return _is_to_given(site, *operands)


def _is_to_given(site: Site, *operands: ir.Value) -> bool:
    """Whether one operand of a difference comes from the caller, and may be repeated then."""
    sources = [_narrow(site, value) for value in operands]
    return any(source is not None and _is_given(site, source) for source in sources)


def _narrow(site: Site, value: ir.Value) -> ir.Value | None:
    """A value before it was repeated; None for constants."""
    node = value.producer()
    while node is not None and node.op_type == "Expand" and not node.domain and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return None if site.forms.constant(value) is not None else value


def _is_given(site: Site, value: ir.Value) -> bool:
    """Whether a value is an input of the graph, moved or converted, or several inputs in one.

    A number may be added to it, or multiply it, as where a target is normalized.
    """
    todo = [value]
    for value in todo:
        node = value.producer()
        if node is None:
            if not value.is_graph_input():
                return False
            continue
        inputs = [one for one in node.inputs if one is not None]
        if node.domain or not inputs or len(todo) > _STEPS_OF_TARGET:
            return False
        if node.op_type == "Concat":
            todo += inputs
        elif node.op_type in _MOVES or (node.op_type == "Expand" and _is_alike(site, value, inputs[0])):
            # What has the same for all of a row is rather a mean.
            todo.append(inputs[0])
        elif node.op_type in ("Add", "Sub", "Mul", "Div") and len(inputs) == 2:
            numbers = [one for one in inputs[1 if node.op_type == "Div" else 0 :] if _is_number(site, one)]
            if not numbers:
                return False
            todo.append(inputs[0] if numbers[0] is inputs[1] else inputs[1])
        else:
            return False
    return True


def _is_alike(site: Site, value: ir.Value, other: ir.Value) -> bool:
    return site.knows(value) and site.knows(other) and site.extents(value) == site.extents(other)


def _is_number(site: Site, value: ir.Value) -> bool:
    return site.knows(value) and all(extent.constant == 1 for extent in site.extents(value))


def _is_two(site: Site, value: ir.Value | None) -> bool:
    array = site.forms.constant(value)
    return array is not None and bool(np.all(array == 2))
