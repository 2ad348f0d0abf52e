"""What the gradients of layer and batch normalization are written in: arithmetic, views and sums.

They are made of whole tensors, of the gradient's shape, and of vectors, which have an element a row or a channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir

from gradfuse.passes.algebra import ZERO, Poly
from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.graphs import TOLERANCE
from gradfuse.passes.matching.rewrite import Mismatch, Rewrite
from gradfuse.passes.matching.site import Site
from gradfuse.passes.matching.terms import chosen, constant, parts_of_sum
from gradfuse.passes.reading import attribute, is_float

VIEWS = {"Squeeze", "Unsqueeze", "Reshape", "Flatten", "Expand", "Tile", "Cast", "Identity"}
CALCULATIONS = {"Add", "Sub", "Mul", "Div", "Neg", "Sum"}
REDUCTIONS = {"ReduceSum", "ReduceMean", "GlobalAveragePool", "AveragePool"}
PRODUCTS = {"MatMul", "Gemm", "Einsum", "Conv"}
"""Operators that sum where one of their operands is ones."""
ALL = CALCULATIONS | VIEWS | REDUCTIONS | {"Where"}
_STATISTICS = ALL | PRODUCTS | {"ReduceSumSquare", "Pow", "Sqrt", "Reciprocal", "Transpose"}
_CUTS = {"Where", "Max", "Min", "Clip"}
CUT = "a condition is part of its deviation, such as a variance that is cut at 0: its gradient is another one there"
_FACTORS = 16  # of a product
_MOST = 48  # values that a statistic is made of
_VALUES = 120  # that a gradient is made of


def reduced(site: Site, node: ir.Node) -> ir.Value | None:
    """What a node sums or averages, by itself or in a product with ones; None for other nodes."""
    if node.domain or not node.inputs:
        return None
    if node.op_type in ("AveragePool", "Conv") and node.outputs[0] in site.forms.opaque:
        return None  # Its windows overlap, or its kernel is not of equal numbers.
    if node.op_type in REDUCTIONS or (node.op_type == "Einsum" and len(node.inputs) == 1):
        return node.inputs[0]
    if node.op_type in PRODUCTS and len(node.inputs) == 2 and None not in node.inputs:
        left, right = node.inputs
        if right is not None and _is_uniform(site, right):
            return left
        if left is not None and _is_uniform(site, left):
            return right
    return None


def _is_uniform(site: Site, value: ir.Value) -> bool:
    """Whether all elements of a value are one number, also of one that nodes compute, such as ones over a size."""
    if constant(site, value) is not None:
        return True
    form = site.forms.get(value)
    return form is not None and bool(form.poly) and form.poly.constant is not None


def summed(site: Site, node: ir.Node) -> tuple[ir.Value, ...]:
    """The factors of what a node sums or averages: one, but of an `Einsum` of rows by rows; none for other nodes."""
    whole = reduced(site, node)
    if whole is not None:
        return (whole,)
    if node.op_type != "Einsum" or node.domain or None in node.inputs:
        return ()
    terms, _, kept = attribute(node, "equation", "").replace(" ", "").partition("->")
    first, *others = terms.split(",")
    adds_up = set(kept) < set(first) and all(term == first for term in others)
    return tuple(value for value in node.inputs if value is not None) if adds_up else ()


def with_reduction(site: Site) -> frozenset[ir.Value]:
    """The values that the arithmetic of a normalization makes of sums and means."""
    return site.reached("reductions", lambda node: bool(summed(site, node)), ALL | {"Transpose"})


def operands(site: Site, node: ir.Node) -> Sequence[ir.Value | None] | None:
    """What the arithmetic of a node reads; None for nodes of other kinds."""
    if node.domain or node.graph is not site.graph:
        return None
    if node.op_type in CALCULATIONS:
        read: Sequence[ir.Value | None] = node.inputs
    elif node.op_type in VIEWS:
        read = node.inputs[:1]
    elif factors_of_sum := summed(site, node):
        read = factors_of_sum
    elif _is_small_power(site, node):
        read = node.inputs[:1]
    elif (taken := chosen(site, node)) is not None:
        read = [taken]
    else:
        return None
    return [None if value is None else site.first(value) for value in read]


def _is_small_power(site: Site, node: ir.Node) -> bool:
    """Whether a node squares something, or leaves it as it is, as PyTorch's gradient of a square does."""
    exponent = node.inputs[1] if node.op_type == "Pow" and len(node.inputs) > 1 else None
    return exponent is not None and constant(site, exponent) in (1.0, 2.0)


@dataclass(frozen=True)
class Region:
    """The arithmetic behind a value, up to other layers.

    Attributes:
        root: the value.
        axis: the dimension of the channels, or the first of those that are normalized.
        nodes: what computes the value.
        reduced: whole tensors whose products are summed; mostly one alone.
        centred: differences of a whole tensor and a vector, with the two.
    """

    root: ir.Value
    axis: int
    nodes: frozenset[ir.Node]
    reduced: tuple[tuple[ir.Value, ...], ...]
    centred: Mapping[ir.Value, tuple[ir.Value, ir.Value]]

    def products(self, site: Site) -> list[list[ir.Value]]:
        """The factors of what is summed, the furthest first, which a weight has not been multiplied with."""
        whole = partial(is_whole, site, root=self.root)
        terms: dict[tuple[ir.Value, ...], None] = {}
        for one, *others in self.reduced:
            parts = [one] if others else parts_of_sum(site, one, whole, _FACTORS)
            terms.update(dict.fromkeys((part, *others) for part in parts))
        return [[own for value in term for own in factors(site, value, whole)][::-1] for term in terms]


def arithmetic(site: Site, root: ir.Value) -> Iterator[tuple[ir.Value, ir.Node]]:
    """The values of the arithmetic behind a value, itself first, with what computes them."""
    todo, seen = [root], {root}
    for value in todo:
        node = value.producer()
        inputs = None if node is None or not is_float(value) else operands(site, node)
        if node is None or inputs is None:
            continue
        yield value, node
        for other in inputs:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
        if len(todo) > _VALUES:
            break


def is_whole(site: Site, value: ir.Value, root: ir.Value) -> bool:
    return is_float(value) and site.knows(value) and site.extents(value) == site.extents(root)


def vectors(
    site: Site, root: ir.Value, stops: Sequence[ir.Value], is_vector: Callable[[ir.Value], bool]
) -> list[ir.Value]:
    """The vectors that a value is made of, beside others that are given.

    Raises:
        Mismatch: it is made of more than vectors.
    """
    found: dict[ir.Value, None] = {}
    views: dict[ir.Value, ir.Value] = {}
    todo, seen = [root], {root, *stops}
    for value in todo:
        if len(todo) > _VALUES:
            raise Mismatch("it is made of more than the gradient is")
        node = value.producer()
        if (site.forms.constant(value) is not None and not is_vector(value)) or is_size(site, value):
            continue
        inputs = None if node is None or is_inverse(site, node) else operands(site, node)
        if node is None or inputs is None:
            # What has its elements in other dimensions may be viewed as a vector.
            vector = value
            while not is_vector(vector):
                if vector not in views:
                    raise Mismatch(f"{value.name} is part of it, which is no vector of the channels")
                vector = views[vector]
            found[vector] = None
            continue
        for other in inputs:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
                if node.op_type in VIEWS:
                    views[other] = value
    return list(found)


def sums(
    site: Site,
    region: Region,
    sources: Sequence[ir.Value],
    values: Sequence[ir.Value],
    wanted: Sequence[Poly],
    is_vector: Callable[[ir.Value], bool],
) -> list[ir.Value | None]:
    """The vectors among some values that are certain sums, where something else than the gradient reads them."""
    root = region.root
    assert root.dtype is not None
    tolerance = 8 * TOLERANCE[root.dtype]

    def fits(value: ir.Value) -> bool:
        inside = not value.is_graph_output() and all(use.node in region.nodes for use in value.uses())
        return value.dtype == root.dtype and is_vector(value) and not inside

    def is_sum(value: ir.Value, expected: Poly) -> bool:
        return fits(value) and site.forms.relative(value, *sources)[0].poly.close_to(expected, tolerance)

    return [next((value for value in values if is_sum(value, expected)), None) for expected in wanted]


def fused_with_sums(
    site: Site,
    builder: Builder,
    operator: str,
    inputs: Sequence[ir.Value | None],
    shape: Sequence[Poly],
    vector: Sequence[Poly],
    sums: Sequence[ir.Value | None],
    **attributes: Any,
) -> tuple[ir.Value, tuple[tuple[ir.Value, ir.Value], ...]]:
    """The gradient by an operator, and the sums that something reads with what takes their place."""
    mask = [1, *(int(value is not None) for value in sums)]
    sizes = [vector if value is not None else [ZERO] for value in sums]
    fused = builder.fused_whole(operator, inputs, [shape, *sizes], **attributes, output_mask=mask)
    pairs = zip(sums, fused[1:], strict=True)
    others = [(value, builder.reshape(new, site.extents(value))) for value, new in pairs if value is not None]
    return fused[0], tuple(others)


def of_training(
    builder: Builder,
    operator: str,
    rule: str,
    node: ir.Node,
    inputs: Sequence[ir.Value],
    operands: Sequence[ir.Value | None],
    wanted: Sequence[ir.Value | None],
    sizes: Sequence[Sequence[Poly]],
    **attributes: Any,
) -> Rewrite:
    """The rewrite of an operator of onnxruntime-training, of whose outputs some are wanted."""
    mask = [int(value is not None) for value in wanted]
    shapes = [size if value is not None else [ZERO] for size, value in zip(sizes, wanted, strict=True)]
    outputs = builder.fused_whole(operator, operands, shapes, **attributes, output_mask=mask)
    (output, *others) = ((value, new) for value, new in zip(wanted, outputs, strict=True) if value is not None)
    rewrite = builder.rewrite(rule, [output[1]], output[1])
    return replace(rewrite, frontier=tuple(inputs), others=tuple(others), runs=frozenset([node]))


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
    if node is None or node.domain or node.op_type not in ("Add", "Sub", "Sum") or not is_whole(value):
        return None
    for own, other in itertools.permutations(node.inputs) if len(node.inputs) == 2 else ():
        if own is None or other is None:
            continue
        x, mean = site.first(own), _narrow(site, other)
        if node.op_type != "Sub":
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
