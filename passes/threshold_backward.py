"""ThresholdBackward: a gradient, or zeros where the result of a ReLU is at most 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.passes.algebra import UNIT
from gradfuse.passes.matching import TOLERANCE, Builder, FusePass, Mismatch, Rewrite, Site, names_of
from gradfuse.passes.report import NearMiss

_CUTS = {"LessOrEqual": (0, 1), "GreaterOrEqual": (1, 0)}
"""Comparisons, with the places of the value and the number in them."""
_COMPARISONS = {"Less", "Greater", *_CUTS}
_BETWEEN = {
    *("Cast", "Not", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Where"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Sum"),
}
_READERS = 24  # of a value that are looked at
_STEPS = 4  # from a factor to the mask that it is made of
_CUT = "a gradient that is cut by a comparison with 0, by which it is "
_AT_NAN = f"{_CUT}0 where the result is NaN, and the operator's is the whole gradient there"
_AT_ZERO = f"{_CUT}whole where the result is 0, and the operator's is 0 there"
_OTHERWISE = f"{_CUT}not the gradient itself or 0 with the shape and type of the result of a ReLU"
_FUSED_RELUS = ("BatchNorm", "Convolution")


class FuseThresholdBackwardPass(FusePass):
    """Finds a Where that takes zeros where the result of a ReLU is at most 0, and a value of its shape elsewhere.

    A product with a mask that is 0 there does so too. The argument of the ReLU serves as well as its result.

    Comparisons by `>` give another gradient where the result is NaN, and stay.
    """

    operator = "ThresholdBackward"
    linear = False
    order = 1
    training_operators = ("ReluGrad",)

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Gradients that other comparisons cut."""
        for node in site.graph:
            reason = _cut_otherwise(site, node) if node.outputs[0].dtype in TOLERANCE else None
            if reason is not None:
                yield NearMiss(names_of([node])[0], self.operator, reason)

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if node is None or node.domain or node.graph is not site.graph:
            return None
        found = next((one for one in _ways(site, node) if one is not None), None)
        if found is None:
            return None
        compared, grad, cut = found
        value, bound = compared
        value = None if value is None else _cut_value(site, value)
        if value is None or not _is_zero(site, bound):
            return None
        if not all(site.knows(one) and site.extents(one) == site.extents(root) for one in (value, grad)):
            return None
        if any(one.dtype != root.dtype for one in (value, grad)):
            raise Mismatch("it is computed of tensors of several types")
        fused = builder.fused(self.operator, [grad, value], site.extents(root))
        return replace(
            builder.rewrite("threshold-backward", [fused], fused),
            frontier=tuple(dict.fromkeys((grad, value))),
            runs=frozenset([cut]),
        )


_Comparison = tuple[ir.Value | None, ir.Value | None]


def _ways(site: Site, node: ir.Node) -> Iterator[tuple[_Comparison, ir.Value, ir.Node] | None]:
    """What a node cuts where what is at most what: the two, what is cut, and the comparison."""
    if node.op_type == "Where" and None not in node.inputs:
        condition, first, second = node.inputs
        for zero, grad, keeps in ((first, second, False), (second, first, True)):
            if _is_zero(site, zero):
                yield _cut_by(site, condition, grad, keeps=keeps)
    elif node.op_type == "Mul":
        for mask, grad in itertools.permutations(node.inputs):
            factor, keeps = mask, True
            for _ in range(_STEPS):
                made = None if factor is None else site.first(factor).producer()
                if made is None or made.domain or factor is None:
                    break
                if made.op_type == "Cast":
                    source = made.inputs[0]
                    if source is not None and source.dtype == ir.DataType.BOOL:
                        yield _cut_by(site, source, grad, keeps=keeps)
                        break
                    factor = source
                elif made.op_type == "Sub" and made.inputs[0] is not None and _is_one(site, made.inputs[0]):
                    factor, keeps = made.inputs[1], not keeps
                else:
                    break


def _cut_by(
    site: Site, condition: ir.Value | None, grad: ir.Value | None, *, keeps: bool
) -> tuple[_Comparison, ir.Value, ir.Node] | None:
    """The comparison by which a gradient is cut, or with `keeps` kept, if it says that something is at most a bound."""
    cut = None if condition is None else site.first(condition).producer()
    while cut is not None and cut.op_type in ("Not", "Identity") and not cut.domain and cut.inputs[0] is not None:
        keeps ^= cut.op_type == "Not"
        cut = site.first(cut.inputs[0]).producer()
    compared = None if cut is None else _compared(cut)
    return None if cut is None or compared is None or grad is None or keeps else (compared, grad, cut)


def _cut_otherwise(site: Site, node: ir.Node) -> str | None:
    """How a node makes zeros of a tensor by what a ReLU cuts, its argument or its result; None where it does not."""
    if node.domain or node.op_type not in ("Mul", "Where"):
        return None
    for value in node.inputs[:1] if node.op_type == "Where" else node.inputs:
        for made in () if value is None else _comparisons(site, value):
            for place, bound in enumerate(made.inputs[::-1]):
                cut = made.inputs[place]
                if cut is None or not _is_zero(site, bound) or _cut_value(site, cut) is None:
                    continue
                if made.op_type not in _CUTS:
                    return _AT_NAN if (made.op_type == "Greater") == (place == 0) else _AT_ZERO
                return _OTHERWISE if place == _CUTS[made.op_type][0] else _AT_ZERO
    return None


def _comparisons(site: Site, value: ir.Value) -> Iterator[ir.Node]:
    """The comparisons that a mask is made of, by arithmetic with numbers."""
    todo = [site.first(value)]
    for own in todo:
        made, form = own.producer(), site.forms.get(own)
        if made is None or made.domain or form is None or len(todo) > _READERS:
            continue
        if made.op_type in _COMPARISONS and len(made.inputs) == 2:
            yield made
        elif made.op_type in _BETWEEN and all(site.algebra.atoms[a].indicator for m in form.poly.terms for a, _ in m):
            todo += [first for v in made.inputs if v is not None and (first := site.first(v)) not in todo]


def _is_cut(site: Site, node: ir.Node | None) -> bool:
    if node is None or node.domain:
        return False
    if node.op_type == "Clip":
        least, *most = (*node.inputs[1:], None)
        return _is_zero(site, least) and all(value is None for value in most)
    return node.op_type == "Relu" or (node.op_type == "Max" and any(_is_zero(site, v) for v in node.inputs))


def _is_read_by_cut(site: Site, value: ir.Value) -> bool:
    return any(_is_cut(site, use.node) for use in itertools.islice(value.uses(), _READERS))


def _compared(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None] | None:
    """What is compared with what, where a condition says that a value is at most another one; None: it does not."""
    places = None if node.domain else _CUTS.get(node.op_type)
    return None if places is None else (node.inputs[places[0]], node.inputs[places[1]])


def _cut_value(site: Site, value: ir.Value) -> ir.Value | None:
    """The result of a ReLU that a value is, or its argument: one is at most 0 where the other is."""
    ways = [value, site.first(value)]
    return next(
        (one for one in ways if _is_of_relu(one) or _is_cut(site, one.producer()) or _is_read_by_cut(site, one)), None
    )


def _is_of_relu(value: ir.Value) -> bool:
    """Whether a fused operator gives what a ReLU does."""
    node = value.producer()
    if node is None or node.domain != DOMAIN:
        return False
    return node.op_type in _FUSED_RELUS and node.attributes.get_int("relu", 0) == 1


def _is_one(site: Site, value: ir.Value) -> bool:
    form = site.forms.get(value)
    return form is not None and form.poly == UNIT


def _is_zero(site: Site, value: ir.Value | None) -> bool:
    form = None if value is None else site.forms.get(value)
    return form is not None and not form.poly
