"""MseLossBackward: ``2 (self - target) grad_output``, over the number of elements for the mean."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Poly
from gradfuse.passes.forms import Form
from gradfuse.passes.rewriting import Builder, FusePass, Mismatch, Rewrite, Site, require_same

_LINEAR = {
    *("ReduceSum", "ReduceMean", "Mul", "Div", "Add", "Sub", "Sum", "Neg", "Cast", "Identity", "Reshape", "Squeeze"),
    *("Unsqueeze", "Expand", "Where", "Transpose", "Flatten", "Mean"),
}


class FuseMseLossBackwardPass(FusePass):
    """Finds, in a value P, a difference d = x - t of two tensors of the graph with P = r d, r a single term, and

    1. r depends on no index and x and t are no constants, or d * d times r goes into an output: many computations, the
       backward of LayerNorm and the making of masks among them, have the loose form of a product with a difference;
    2. x and t are values of P's type.

    "mean" where r has the inverse of the number of elements of x, else "sum", or "none" where r has indices.
    """

    operator = "MseLossBackward"
    weak = True

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        form = site.forms.form(root)
        if len(form.poly) < 2:
            return None
        candidates = (
            (node, difference, ratio)
            for node, difference, ratio in _differences(site, root, form)
            if not (site.algebra.free(ratio) or _has_constant(site, node)) or _weighted(site, node)
        )
        return self.first_bound(builder, (partial(self._bound, site, builder, root, form, *c) for c in candidates))

    def _bound(
        self, site: Site, builder: Builder, root: ir.Value, form: Form, node: ir.Node, difference: Poly, ratio: Poly
    ) -> Rewrite:
        algebra = site.algebra
        assert root.dtype is not None
        (coefficient,) = ratio.terms.values()
        minuend, subtrahend = (v for v in node.inputs if v is not None)
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
        grad = site.materialise(builder, gradient, used, sizes, root.dtype, layout)
        fused = builder.fused(self.operator, [grad, *operands], extents, reduction=reduction)
        return builder.rewrite("squared-error-backward", [fused], fused)


def _size(poly: Poly) -> int:
    return sum(len(m) for m in poly.terms)


def _of_type(site: Site, value: ir.Value, root: ir.Value) -> ir.Value:
    """The value in the root's type: itself, or what it was cast from."""
    form = site.forms.form(value)
    found = site.find(form.poly, form.sizes, root, dtypes=[root.dtype], shape=site.extents(value))
    if found is None or found[1] != 1.0 or site.extents(found[0]) != site.extents(value):
        raise Mismatch("an operand of the difference is no value of its type")
    return found[0]


def _differences(site: Site, root: ir.Value, form: Form) -> list[tuple[ir.Node, Poly, Poly]]:
    """Subtractions ahead of the root of which it is a multiple: node, difference in the root's variables, ratio."""
    found = []
    wanted = site.algebra.tensors(form.poly)
    for node in site.differences:
        value = node.outputs[0]
        if site.position.get(value, site.position[root]) >= site.position[root]:
            continue
        own = site.forms.get(value)
        if own is None or len(own.poly) != len(form.poly) or not site.algebra.tensors(own.poly) <= wanted:
            continue
        if [site.forms.extent(g) for g in own.groups] != site.extents(root):
            continue
        _, (difference, poly) = site.forms.broadcast([own, form])
        ratio = site.algebra.ratio(poly, difference)
        if ratio is not None and poly == form.poly:
            found.append((node, difference, ratio))
    return found


def _weighted(site: Site, node: ir.Node) -> bool:
    """Whether the square of the difference goes, by linear operations only, into an output of the graph."""
    squares = [
        out
        for use in node.outputs[0].uses()
        for out in use.node.outputs
        if (use.node.op_type == "Mul" and use.node.inputs[0] is use.node.inputs[1])
        or (use.node.op_type == "Pow" and use.idx == 0 and _is_two(site, use.node.inputs[1]))
    ]
    todo, seen = squares, set(squares)
    while todo:
        value = todo.pop()
        if value.is_graph_output():
            return True
        for use in value.uses():
            if use.node.op_type in _LINEAR:
                new = [v for v in use.node.outputs if v not in seen]
                seen.update(new)
                todo.extend(new)
    return False


def _has_constant(site: Site, node: ir.Node) -> bool:
    """Whether an operand of a difference is a constant, as in 1 - mask."""
    return any(site.forms.constant(value) is not None for value in node.inputs)


def _is_two(site: Site, value: ir.Value | None) -> bool:
    array = site.forms.constant(value)
    return array is not None and bool(np.all(array == 2))
