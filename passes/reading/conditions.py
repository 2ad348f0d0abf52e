"""Readers of comparisons, of logic, and of choices by a condition."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly, number
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form, Group
from gradfuse.passes.reading.nodes import Opaque, attribute, given, is_float
from gradfuse.passes.reading.registry import reads


def _compared(forms: KnownForms, node: ir.Node) -> tuple[tuple[Group, ...], Poly, Poly]:
    """The operands of a comparison, whose difference has the sign that onnxruntime finds."""
    groups, (a, b) = forms.broadcast(forms.operands(node))
    if is_float(given(node.inputs, 0)):
        # What rounding leaves of a difference decides where algebra finds none.
        if any(len(p) > 1 and not forms.algebra.is_integer(p) for p in (a, b)):
            raise Opaque("a comparison of floats that are rounded")
        if a == b and forms.algebra.tensors(a):
            raise Opaque("a number is not equal to itself where it is NaN")
    return groups, a, b


@reads("Equal")
def _equal(forms: KnownForms, node: ir.Node) -> Form:
    groups, a, b = _compared(forms, node)
    return Form(groups, forms.algebra.equal_zero(a - b))


@reads("Less", "Greater", "LessOrEqual", "GreaterOrEqual")
def _compare(forms: KnownForms, node: ir.Node) -> Form:
    groups, a, b = _compared(forms, node)
    if node.op_type in ("Greater", "LessOrEqual"):
        a, b = b, a
    below = forms.algebra.less_than_zero(a - b)
    if node.op_type in ("Less", "Greater"):
        return Form(groups, below)
    # What is above 0 is so but for NaN, with which all that it is compared for is NaN.
    if is_float(given(node.inputs, 0)) and not forms.algebra.is_positive(a - b):
        raise Opaque("not less is not greater or equal where there are NaNs")
    return Form(groups, UNIT - below)


@reads("Not")
def _not(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return Form(x.groups, UNIT - x.poly)


@reads("And")
def _and(forms: KnownForms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(forms.operands(node))
    return Form(groups, forms.algebra.mul(a, b))


@reads("Or")
def _or(forms: KnownForms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(forms.operands(node))
    return Form(groups, a + b - forms.algebra.mul(a, b))


@reads("Xor")
def _xor(forms: KnownForms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(forms.operands(node))
    return Form(groups, a + b - forms.algebra.mul(a, b).scaled(2.0))


@reads("Where")
def _where(forms: KnownForms, node: ir.Node) -> Form:
    condition = forms.operand(node, 0)
    if condition.poly.constant is not None:
        # The branch that is never taken gives its shape only.
        taken, other = (1, 2) if condition.poly.constant else (2, 1)
        x, dead = forms.operand(node, taken), forms.operand(node, other)
        groups, (poly, _, _) = forms.broadcast([x, Form(dead.groups, ZERO), Form(condition.groups, ZERO)])
        return Form(groups, poly)
    groups, (c, a, b) = forms.broadcast(forms.operands(node))
    return Form(groups, forms.algebra.mul(c, a) + forms.algebra.mul(UNIT - c, b))


@reads("Trilu")
def _trilu(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    shift = forms.constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else np.asarray(0)
    if shift is None:
        raise Opaque("an unknown diagonal")
    row, column = (forms.layouts.position(x, axis % len(x.groups)) for axis in (-2, -1))
    above = column - row - number(int(shift.item()))
    gone = forms.algebra.less_than_zero(above if attribute(node, "upper", 1) else -above)
    return Form(x.groups, forms.algebra.mul(UNIT - gone, x.poly))
