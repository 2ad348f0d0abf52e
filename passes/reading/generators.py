"""Readers of operators that make tensors of nothing but sizes and constants."""

from __future__ import annotations

import math

import onnx_ir as ir

from gradfuse.passes.algebra import number
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form, groups_of_sizes
from gradfuse.passes.reading.nodes import Opaque, attribute
from gradfuse.passes.reading.registry import reads


@reads("EyeLike")
def _eye_like(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    row, column = (forms.layouts.position(x, axis) for axis in range(2))
    return Form(x.groups, forms.algebra.equal_zero(column - row - number(attribute(node, "k", 0))))


@reads("ConstantOfShape", uses_output_shape=True)
def _constant_of_shape(forms: KnownForms, node: ir.Node) -> Form:
    target = forms.vector(node.inputs[0])
    groups = groups_of_sizes(target) if target is not None else forms.groups_of(forms.output(node))
    value = attribute(node, "value", None)
    fill = 0.0 if value is None else float(value.numpy().ravel()[0])
    if not math.isfinite(fill):
        raise Opaque("not finite")
    return Form(groups, number(fill))


@reads("Constant")
def _constant(forms: KnownForms, node: ir.Node) -> Form:
    array = forms.constant(node.outputs[0])
    if array is None:
        raise Opaque("a large constant")
    return forms.constants.form(array)


@reads("Range", uses_output_shape=True)
def _range(forms: KnownForms, node: ir.Node) -> Form:
    start, limit, step = (f.poly for f in forms.operands(node))
    if step.constant is None:
        raise Opaque("an unknown step")
    size = forms.layouts.quotient(limit - start, step)
    if size is not None and size.constant is not None and size.constant <= 0:
        raise Opaque("an empty range")
    group = (size,) if size is not None else forms.groups_of(forms.output(node))[0]
    if len(group) == 1 and group[0].constant == 1:
        return Form(((),), start)
    return Form((group,), start + forms.algebra.mul(step, forms.algebra.var(0)))
