"""ThresholdBackward: a gradient, or zeros where the result of a ReLU is at most 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.passes.algebra import UNIT
from gradfuse.passes.matching import TOLERANCE, Builder, FusePass, Mismatch, Rewrite, Site, names_of
from gradfuse.passes.report import NearMiss

_CUTS = {"LessOrEqual": (0, 1), "GreaterOrEqual": (1, 0)}
"""Comparisons, with the places of the value and the number in them."""
_OF_RESULT = {"Equal", "Cast"}
"""What tells where a value is 0: with the result of a ReLU, where it is at most 0."""
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
_BY_SIGN = "a gradient times a sign, which is NaN where the result is, and the operator's is the whole gradient there"
_OTHERWISE = f"{_CUT}not the gradient itself or 0 with the shape and type of the result of a ReLU"
_FUSED_RELUS = ("BatchNorm", "Convolution")


class FuseThresholdBackwardPass(FusePass):
    """Finds a Where that takes zeros where the result of a ReLU is at most 0, and a value of its shape elsewhere.

    A product with a mask that is 0 there does so too. The argument of the ReLU serves as well as its result, and so
    does an input of the graph: a backward pass on its own is given what the forward pass has kept. Of a result, which
    is never below 0, it may also be asked whether it is 0.

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
        value, grad, cut = found
        if not all(site.knows(one) and site.extents(one) == site.extents(root) for one in (value, grad)):
            return None
        if any(one.dtype != root.dtype for one in (value, grad)):
            raise Mismatch("it is computed of tensors of several types")
        fused = builder.fused(self.operator, [grad, value], site.extents(root))
        frontier, runs = [grad, value], [cut]
        if cut.op_type in _OF_RESULT and (relu := value.producer()) is not None:
            # Not any numbers, but results.
            frontier = [grad, *(v for v in relu.inputs if v is not None and not _is_zero(site, v))]
            runs.append(relu)
        return replace(
            builder.rewrite("threshold-backward", [fused], fused),
            frontier=tuple(dict.fromkeys(frontier)),
            runs=frozenset(runs),
        )


def _ways(site: Site, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, ir.Node] | None]:
    """What a node cuts where what is at most 0: the latter, what is cut, and the comparison."""
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
) -> tuple[ir.Value, ir.Value, ir.Node] | None:
    """What is compared where a gradient is cut, or with `keeps` kept, if that is where it is at most 0."""
    cut = None if condition is None else site.first(condition).producer()
    while cut is not None and cut.op_type in ("Not", "Identity") and not cut.domain and cut.inputs[0] is not None:
        keeps ^= cut.op_type == "Not"
        cut = site.first(cut.inputs[0]).producer()
    if cut is None or cut.domain or grad is None:
        return None
    if cut.op_type == "Cast":
        keeps ^= True
    value = _at_most_zero(site, cut)
    return None if value is None or keeps else (value, grad, cut)


def _cut_otherwise(site: Site, node: ir.Node) -> str | None:
    """How a node makes zeros of a tensor by what a ReLU cuts, its argument or its result; None where it does not."""
    if node.domain or node.op_type not in ("Mul", "Where"):
        return None
    root = node.outputs[0]
    if node.op_type == "Where" and not any(_is_zero(site, value) for value in node.inputs[1:]):
        return None
    for value in node.inputs[:1] if node.op_type == "Where" else node.inputs:
        if value is not None and _is_of_sign(site, value):
            return _BY_SIGN
        for made in () if value is None else _comparisons(site, value):
            for place, bound in enumerate(made.inputs[::-1]):
                cut = made.inputs[place]
                known = None if cut is None or not _is_zero(site, bound) else _cut_value(site, cut)
                if known is None or (known.is_graph_input() and not _is_like(site, known, root)):
                    continue
                if made.op_type not in _CUTS:
                    return _AT_NAN if (made.op_type == "Greater") == (place == 0) else _AT_ZERO
                return _OTHERWISE if place == _CUTS[made.op_type][0] else _AT_ZERO
    return None


def _is_of_sign(site: Site, value: ir.Value) -> bool:
    """Whether a value is the sign of the result of a ReLU."""
    node = site.first(value).producer()
    source = node.inputs[0] if node is not None and node.op_type == "Sign" and not node.domain else None
    return source is not None and _is_result(site, site.first(source))


def _is_like(site: Site, value: ir.Value, root: ir.Value) -> bool:
    is_known = site.knows(value) and site.knows(root)
    return is_known and value.dtype == root.dtype and site.extents(value) == site.extents(root)


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


def _at_most_zero(site: Site, node: ir.Node) -> ir.Value | None:
    """What a condition says to be at most 0, or, as a Cast to truth values, to be above it; None: it says neither."""
    if node.op_type in _OF_RESULT:
        pairs: Iterable[Sequence[ir.Value | None]] = itertools.permutations(node.inputs)
        values = [v for v, *bound in pairs if v is not None and all(_is_zero(site, one) for one in bound)]
        return next((one for v in values for one in (v, site.first(v)) if _is_cut(site, one.producer())), None)
    above, least = _CUTS.get(node.op_type, (None, None))
    value = None if above is None else node.inputs[above]
    if value is None or least is None or not _is_zero(site, node.inputs[least]):
        return None
    return _cut_value(site, value)


def _cut_value(site: Site, value: ir.Value) -> ir.Value | None:
    """The result of a ReLU that a value is, or its argument: one is at most 0 where the other is."""
    ways = [value, site.first(value)]
    return next((v for v in ways if _is_result(site, v) or _is_read_by_cut(site, v) or v.is_graph_input()), None)


def _is_result(site: Site, value: ir.Value) -> bool:
    return _is_of_relu(value) or _is_cut(site, value.producer())


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
