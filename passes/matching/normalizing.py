"""What the gradients of layer and batch normalization are written in: arithmetic, views and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from gradfuse.passes.matching.site import Site
from gradfuse.passes.matching.terms import chosen, constant

VIEWS = {"Squeeze", "Unsqueeze", "Reshape", "Flatten", "Expand", "Tile", "Cast", "Identity"}
CALCULATIONS = {"Add", "Sub", "Mul", "Div", "Neg", "Sum"}
REDUCTIONS = {"ReduceSum", "ReduceMean"}
PRODUCTS = {"MatMul", "Gemm", "Einsum"}
"""Operators that sum where one of their operands is ones."""
ALL = CALCULATIONS | VIEWS | REDUCTIONS | {"Where"}
_STATISTICS = ALL | {"ReduceSumSquare", "Pow", "Sqrt", "Reciprocal"}
_CUTS = {"Where", "Max", "Min", "Clip"}
CUT = "a condition is part of its deviation, such as a variance that is cut at 0: its gradient is another one there"
_FACTORS = 16  # of a product
_MOST = 48  # values that a statistic is made of


def reduced(site: Site, node: ir.Node) -> ir.Value | None:
    """What a node sums or averages, by itself or in a product with ones; None for other nodes."""
    if node.domain or not node.inputs:
        return None
    if node.op_type in REDUCTIONS or (node.op_type == "Einsum" and len(node.inputs) == 1):
        return node.inputs[0]
    if node.op_type in PRODUCTS and len(node.inputs) == 2 and None not in node.inputs:
        left, right = node.inputs
        if right is not None and constant(site, right) is not None:
            return left
        if left is not None and constant(site, left) is not None:
            return right
    return None


def with_reduction(site: Site) -> frozenset[ir.Value]:
    """The values that the arithmetic of a normalization makes of sums and means."""
    return site.reached("reductions", lambda node: reduced(site, node) is not None, ALL)


def operands(site: Site, node: ir.Node) -> Sequence[ir.Value | None] | None:
    """What the arithmetic of a node reads; None for nodes of other kinds."""
    if node.domain or node.graph is not site.graph:
        return None
    if node.op_type in CALCULATIONS:
        read: Sequence[ir.Value | None] = node.inputs
    elif node.op_type in VIEWS:
        read = node.inputs[:1]
    elif (summed := reduced(site, node)) is not None:
        read = [summed]
    elif (taken := chosen(site, node)) is not None:
        read = [taken]
    else:
        return None
    return [None if value is None else site.first(value) for value in read]


def factors(site: Site, value: ir.Value, is_whole: Callable[[ir.Value], bool]) -> list[ir.Value]:
    """The whole tensors that a product has as factors, the value itself first, the nearest first."""
    found = [value]
    for own in found:
        node = own.producer()
        if node is None or node.domain or len(found) >= _FACTORS:
            continue
        # What a whole tensor is divided by is a vector, or makes another gradient of it.
        inputs: Sequence[ir.Value | None] = [chosen(site, node) or _negated(site, own)]
        if node.op_type in ("Mul", "Identity", "Div"):
            inputs = node.inputs[:1] if node.op_type == "Div" else node.inputs
        found += [v for v in (site.first(v) for v in inputs if v is not None) if is_whole(v)]
    return found


def difference(
    site: Site, value: ir.Value, is_whole: Callable[[ir.Value], bool], is_mean: Callable[[ir.Value], bool]
) -> tuple[ir.Value, ir.Value] | None:
    """The whole tensor and the mean whose difference, either way round, a value is."""
    node = value.producer()
    if node is None or node.domain or node.op_type not in ("Add", "Sub") or not is_whole(value):
        return None
    for own, other in (node.inputs, node.inputs[::-1]):
        if own is None or other is None:
            continue
        x, mean = site.first(own), _narrow(site, other)
        if node.op_type == "Add":
            subtracted = _negated(site, mean)
            if subtracted is None:
                continue
            mean = _narrow(site, subtracted)
        if is_whole(x) and is_mean(mean):
            return x, mean
    return None


def _narrow(site: Site, value: ir.Value) -> ir.Value:
    """A value before it was repeated."""
    value = site.first(value)
    while (node := value.producer()) is not None and node.op_type in ("Expand", "Tile") and not node.domain:
        if node.inputs[0] is None:
            break
        value = site.first(node.inputs[0])
    return value


def _negated(site: Site, value: ir.Value) -> ir.Value | None:
    """What a value is the negative of."""
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Neg":
        return node.inputs[0]
    if node.op_type == "Sub":
        return node.inputs[1] if node.inputs[0] is not None and constant(site, node.inputs[0]) == 0 else None
    others = [v for v in node.inputs if v is not None and constant(site, v) != -1]
    return others[0] if node.op_type == "Mul" and len(others) == 1 else None


def is_size(site: Site, value: ir.Value) -> bool:
    """Whether a value is one number everywhere, computed from dimensions and constants."""
    form = site.forms.get(value)
    if form is None or not form.poly or site.algebra.tensors(form.poly):
        return False
    node = value.producer()
    return not form.sizes or (node is not None and node.op_type != "Constant" and not site.algebra.free(form.poly))


def is_inverse(site: Site, node: ir.Node) -> bool:
    """Whether a node divides a constant."""
    return node.op_type == "Div" and node.inputs[0] is not None and site.forms.constant(node.inputs[0]) is not None


def is_root(value: ir.Value) -> bool:
    """Whether a value is a square root."""
    node = value.producer()
    return node is not None and node.op_type == "Sqrt" and not node.domain


def is_cut(site: Site, statistic: ir.Value) -> bool:
    """Whether a condition chooses a value, or a bound cuts it."""
    node = statistic.producer()
    if node is None or node.domain:
        return False
    return node.op_type in _CUTS and chosen(site, node) is None


def is_made_of(site: Site, statistic: ir.Value, x: ir.Value) -> bool:
    """Whether a value is computed from another one as its mean or deviation would be."""
    todo, seen = [statistic], {statistic}
    for value in todo:
        if value is x:
            return True
        node = value.producer()
        if node is None or node.domain or node.op_type not in _STATISTICS or node.graph is not site.graph:
            continue
        new = [v for v in node.inputs if v is not None and v not in seen]
        if len(todo) + len(new) <= _MOST:
            seen.update(new)
            todo += new
    return False
