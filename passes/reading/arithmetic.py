"""Readers of arithmetic and of casts, one element at a time."""

from __future__ import annotations

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import FLOATS, INTEGERS, Opaque, given, is_float
from gradfuse.passes.reading.registry import reads

_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@reads("Identity")
def _identity(forms: KnownForms, node: ir.Node) -> Form:
    return forms.operand(node, 0)


@reads("Cast", "CastLike")
def _cast(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    source = given(node.inputs, 0)
    form = forms.form(source)
    to = ir.DataType(node.attributes["to"].as_int()) if node.op_type == "Cast" else given(node.inputs, 1).dtype
    if to is None or source.dtype is None:
        raise Opaque("unknown type")
    if source.dtype == ir.DataType.BOOL or (to == ir.DataType.BOOL and algebra.is_boolean(form.poly)):
        return form
    if to == ir.DataType.BOOL:
        return Form(form.groups, UNIT - algebra.equal_zero(form.poly))
    if to in FLOATS:
        counts = algebra.has_variable_factor(form.poly) or algebra.tensors(form.poly)
        if source.dtype not in FLOATS and to in _HALF and counts and not algebra.is_boolean(form.poly):
            raise Opaque("integers that 16 bits round")
        return form
    if source.dtype in FLOATS:
        if algebra.is_count(form.poly):
            return form
        raise Opaque("a cast that rounds")
    if to not in INTEGERS or (to == ir.DataType.INT32 and any(abs(c) >= 1 << 31 for c in form.poly.terms.values())):
        raise Opaque("a cast that wraps around")
    return form


@reads("Add", "Sum")
def _add(forms: KnownForms, node: ir.Node) -> Form:
    groups, polys = forms.broadcast(forms.operands(node))
    return Form(groups, sum(polys[1:], polys[0]))


@reads("Mean")
def _mean(forms: KnownForms, node: ir.Node) -> Form:
    groups, polys = forms.broadcast(forms.operands(node))
    return Form(groups, sum(polys[1:], polys[0]).scaled(1 / len(polys)))


@reads("Sub")
def _sub(forms: KnownForms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(forms.operands(node))
    return Form(groups, a - b)


@reads("Mul")
def _mul(forms: KnownForms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(forms.operands(node))
    return Form(groups, forms.algebra.mul(a, b))


@reads("Div")
def _div(forms: KnownForms, node: ir.Node) -> Form:
    groups, (a, b) = forms.broadcast(forms.operands(node))
    if node.outputs[0].dtype not in FLOATS:
        quotient = forms.layouts.quotient(a, b)
        if quotient is None:
            raise Opaque("integer division")
        return Form(groups, quotient)
    return Form(groups, forms.algebra.mul(a, forms.algebra.power(b, -1)))


@reads("Neg")
def _neg(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return Form(x.groups, -x.poly)


@reads("Reciprocal")
def _reciprocal(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return Form(x.groups, forms.algebra.power(x.poly, -1))


@reads("Sqrt")
def _sqrt(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return Form(x.groups, forms.algebra.exponentiate(x.poly, 0.5))


@reads("Pow")
def _pow(forms: KnownForms, node: ir.Node) -> Form:
    groups, (base, exponent) = forms.broadcast(forms.operands(node))
    if exponent.constant is None:
        raise Opaque("an exponent that is no constant")
    if not is_float(node.outputs[0]) and (exponent.integer is None or exponent.integer < 0):
        raise Opaque("a power of integers is rounded")
    return Form(groups, forms.algebra.exponentiate(base, exponent.constant))


@reads("Exp")
def _exp(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return Form(x.groups, forms.algebra.exp(x.poly))


@reads("Cosh", "Sinh")
def _hyperbolic(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    up, down = forms.algebra.exp(x.poly), forms.algebra.exp(-x.poly)
    return Form(x.groups, (up + down if node.op_type == "Cosh" else up - down).scaled(0.5))


@reads("Log")
def _log(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return Form(x.groups, forms.algebra.log(x.poly))
