"""ThresholdBackward: a gradient, or zeros where the result of a ReLU is at most 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
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
_OTHERWISE = (
    "a gradient that is cut by a comparison with 0, but not by a Where that takes zeros where the result of a ReLU is "
    "at most 0, as the operator does: at 0 or at NaN it may be another one"
)
_FUSED_RELUS = ("BatchNorm", "Convolution")


class FuseThresholdBackwardPass(FusePass):
    """Finds a Where that takes zeros where the result of a ReLU is at most 0, and a value of its shape elsewhere.

    Comparisons by `>` give another gradient where the result is NaN, and stay.
    """

    operator = "ThresholdBackward"
    linear = False
    order = 1
    training_operators = ("ReluGrad",)

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Gradients that other comparisons cut."""
        for node in site.graph:
            if node.outputs[0].dtype in TOLERANCE and _cut_otherwise(site, node):
                yield NearMiss(names_of([node])[0], self.operator, _OTHERWISE)

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if node is None or node.domain or node.op_type != "Where" or node.graph is not site.graph:
            return None
        condition, *branches = node.inputs
        cut = None if condition is None else site.first(condition).producer()
        while cut is not None and cut.op_type in ("Not", "Identity") and not cut.domain and cut.inputs[0] is not None:
            branches = branches[:: -1 if cut.op_type == "Not" else 1]
            cut = site.first(cut.inputs[0]).producer()
        zero, grad = branches
        compared = None if cut is None else _compared(cut)
        if cut is None or compared is None or grad is None or not _is_zero(site, zero):
            return None
        value, bound = compared
        value = None if value is None else _of_relu(site, value)
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


def _cut_otherwise(site: Site, node: ir.Node) -> bool:
    """Whether a node makes zeros of a tensor by what a ReLU, or a maximum with 0, cuts: its argument or its result."""
    if node.domain or node.op_type not in ("Mul", "Where"):
        return False
    for value in node.inputs[:1] if node.op_type == "Where" else node.inputs:
        for made in () if value is None else _comparisons(site, value):
            for cut, bound in itertools.permutations(made.inputs):
                if cut is None or not _is_zero(site, bound):
                    continue
                if _is_cut(site, site.first(cut).producer()) or _is_read_by_cut(site, cut):
                    return True
    return False


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
    return node.op_type == "Relu" or (node.op_type == "Max" and any(_is_zero(site, v) for v in node.inputs))


def _is_read_by_cut(site: Site, value: ir.Value) -> bool:
    return any(_is_cut(site, use.node) for use in itertools.islice(value.uses(), _READERS))


def _compared(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None] | None:
    """What is compared with what, where a condition says that a value is at most another one; None: it does not."""
    places = None if node.domain else _CUTS.get(node.op_type)
    return None if places is None else (node.inputs[places[0]], node.inputs[places[1]])


def _of_relu(site: Site, value: ir.Value) -> ir.Value | None:
    """The result of a ReLU that a value is."""
    return next((one for one in (value, site.first(value)) if _is_of_relu(one)), None)


def _is_of_relu(value: ir.Value) -> bool:
    node = value.producer()
    if node is None:
        return False
    if node.domain == DOMAIN:
        return node.op_type in _FUSED_RELUS and node.attributes.get_int("relu", 0) == 1
    return node.op_type == "Relu" and not node.domain


def _is_zero(site: Site, value: ir.Value | None) -> bool:
    form = None if value is None else site.forms.get(value)
    return form is not None and not form.poly
