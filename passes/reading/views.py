"""Readers of views: dimensions permuted, put in, dropped, merged, split and repeated."""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.passes.algebra import ZERO
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form, groups_of_sizes
from gradfuse.passes.reading.nodes import Opaque, attribute
from gradfuse.passes.reading.registry import reads


@reads("Transpose")
def _transpose(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return forms.moved(x, attribute(node, "perm", range(len(x.groups))[::-1]))


@reads("Squeeze")
def _squeeze(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    rank = len(x.groups)
    axes = forms.axes(node, 1, rank)
    if axes is None:
        if any(s.constant is None for s in x.sizes):
            raise Opaque("which dimensions are squeezed depends on their sizes")
        axes = [a for a, g in enumerate(x.groups) if not g]
    if any(x.groups[a] for a in axes):
        raise Opaque("a squeezed dimension is symbolic")
    return forms.moved(x, [a for a in range(rank) if a not in axes])


@reads("Unsqueeze")
def _unsqueeze(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    axes = forms.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        raise Opaque("axes are not constant")
    rank = len(x.groups) + axes.size
    new = {int(a) % rank for a in axes.ravel()}
    old = iter(range(len(x.groups)))
    return forms.moved(x, [None if a in new else next(old) for a in range(rank)])


@reads("Reshape", "Flatten", uses_output_shape=True)
def _reshape(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    if node.op_type == "Flatten":
        axis = attribute(node, "axis", 1)
        axis = axis + len(x.groups) if axis < 0 else axis
        sizes = [forms.extent(tuple(s for g in part for s in g)) for part in (x.groups[:axis], x.groups[axis:])]
        return forms.regrouped(x, sizes)
    target = forms.vector(node.inputs[1])
    if target is None:
        target = [forms.extent(g) for g in forms.groups_of(forms.output(node))]
    if not attribute(node, "allowzero", 0):
        target = [forms.extent(x.groups[k]) if s.constant == 0 else s for k, s in enumerate(target)]
    if any(s.constant == -1 for s in target):
        known = forms.algebra.product(s for s in target if s.constant != -1)
        rest = forms.layouts.quotient(forms.extent(x.sizes), known)
        if rest is None:
            raise Opaque("a dimension of a Reshape is unknown")
        target = [rest if s.constant == -1 else s for s in target]
    return forms.regrouped(x, target, reshaped=True)


@reads("Expand", uses_output_shape=True)
def _expand(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    target = forms.vector(node.inputs[1])
    if target is None:
        target = [forms.extent(g) for g in forms.groups_of(forms.output(node))]
    shape = Form(groups_of_sizes(target), ZERO)
    groups, (poly, _) = forms.broadcast([x, shape])
    return Form(groups, poly)


@reads("Tile")
def _tile(forms: KnownForms, node: ir.Node) -> Form:
    x, repeats = forms.operand(node, 0), forms.vector(node.inputs[1])
    if repeats is None or any(g and n.constant != 1 for g, n in zip(x.groups, repeats, strict=True)):
        raise Opaque("a repeated dimension")
    shape = Form(groups_of_sizes(repeats), ZERO)
    groups, (poly, _) = forms.broadcast([x, shape])
    return Form(groups, poly)
