"""Readers of bounds and signs of integers: of one-hots in arithmetic, such as 1 - min(abs(c - t), 1)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import FLOATS, INTEGERS, Opaque, given
from gradfuse.passes.reading.registry import reads

_CAST = FLOATS | INTEGERS
_NO_DISTANCE = "a bound or sign of what is no distance of integers"


def _above(forms: KnownForms, value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value, before casts."""
    node = forms.producer(value)
    while node is not None and not node.domain and node.op_type in ("Cast", "Identity"):
        if node.outputs[0].dtype not in _CAST:
            return None
        node = forms.producer(node.inputs[0])
    return None if node is None or node.domain else node


def _distance(forms: KnownForms, value: ir.Value | None) -> Form | None:
    """The integer of which a value is the magnitude or the square: 0 where that is 0, or else 1 or more."""
    node = _above(forms, value)
    if node is None or node.op_type not in ("Abs", "Mul", "Pow") or node.inputs[0] is None:
        return None
    is_square = node.op_type == "Abs" or node.inputs[0] is node.inputs[1]
    if node.op_type == "Pow":
        is_square = _is_number(forms, node.inputs[1], 2)
    inner = forms.form(node.inputs[0]) if is_square else None
    if inner is None or not forms.algebra.is_integer(inner.poly):
        return None
    forms.looked_through.add(node)
    return inner


def _nearness(forms: KnownForms, value: ir.Value | None) -> Form | None:
    """The integer of which a value is 1 less the distance: 1 where that is 0, or else 0 or less."""
    node = _above(forms, value)
    if node is None or len(node.inputs) != 2:
        return None
    one, other = node.inputs
    if node.op_type == "Add":
        negative, number = (one, other) if _is_number(forms, other, 1) else (other, one)
        above = _above(forms, negative)
        if above is None or above.op_type != "Neg" or not _is_number(forms, number, 1):
            return None
        return _distance(forms, above.inputs[0])
    return _distance(forms, other) if node.op_type == "Sub" and _is_number(forms, one, 1) else None


def _is_number(forms: KnownForms, value: ir.Value | None, number: float) -> bool:
    return value is not None and forms.form(value).poly.constant == number


def _hit(forms: KnownForms, integer: Form) -> Form:
    return Form(integer.groups, forms.algebra.equal_zero(integer.poly))


def _inverted(form: Form) -> Form:
    return Form(form.groups, UNIT - form.poly)


def _with_shape(forms: KnownForms, form: Form, others: Sequence[Form]) -> Form:
    """A form repeated as a node with further operands repeats it."""
    groups, (poly, *_) = forms.broadcast([form, *(Form(other.groups, ZERO) for other in others)])
    return Form(groups, poly)


@reads("Abs", uses_producers=True)
def _abs(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    if forms.algebra.is_positive(x.poly):
        return x
    above = _above(forms, given(node.inputs, 0))
    if above is None or above.op_type != "Sign":
        raise Opaque("a number that may be negative")
    sign_of = forms.operand(above, 0)
    if not forms.algebra.is_integer(sign_of.poly):
        raise Opaque("a number that may be negative")
    forms.looked_through.add(above)
    return _inverted(_hit(forms, sign_of))


@reads("Sign", uses_producers=True)
def _sign(forms: KnownForms, node: ir.Node) -> Form:
    integer = _distance(forms, given(node.inputs, 0))
    if integer is None:
        raise Opaque(_NO_DISTANCE)
    return _inverted(_hit(forms, integer))


@reads("Relu", uses_producers=True)
def _relu(forms: KnownForms, node: ir.Node) -> Form:
    integer = _nearness(forms, given(node.inputs, 0))
    if integer is None:
        raise Opaque(_NO_DISTANCE)
    return _hit(forms, integer)


@reads("Min", "Max", uses_producers=True)
def _bounded_by(forms: KnownForms, node: ir.Node) -> Form:
    if len(node.inputs) != 2:
        raise Opaque(_NO_DISTANCE)
    is_min = node.op_type == "Min"
    for value, bound in (node.inputs, node.inputs[::-1]):
        if _is_number(forms, bound, 1 if is_min else 0):
            integer = _distance(forms, value) if is_min else _nearness(forms, value)
            if integer is not None:
                hit = _hit(forms, integer)
                return _with_shape(forms, _inverted(hit) if is_min else hit, forms.operands(node))
    raise Opaque(_NO_DISTANCE)


@reads("Clip", uses_producers=True)
def _clip(forms: KnownForms, node: ir.Node) -> Form:
    low, high = (_bound(forms, node, name, k) for k, name in ((1, "min"), (2, "max")))
    value = given(node.inputs, 0)
    if high == UNIT and _is_at_most(low, 0.0) and (integer := _distance(forms, value)) is not None:
        return _inverted(_hit(forms, integer))
    if low == ZERO and (high is None or (high.constant or 0.0) >= 1) and (integer := _nearness(forms, value)):
        return _hit(forms, integer)
    raise Opaque(_NO_DISTANCE)


def _bound(forms: KnownForms, node: ir.Node, name: str, k: int) -> Poly | None:
    if len(node.inputs) > k and (value := node.inputs[k]) is not None:
        return forms.form(value).poly
    found = node.attributes.get(name)
    return None if found is None else UNIT.scaled(found.as_float())


def _is_at_most(bound: Poly | None, number: float) -> bool:
    return bound is None or (bound.constant is not None and bound.constant <= number)
