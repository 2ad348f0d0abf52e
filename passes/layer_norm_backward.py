"""LayerNormBackward: the gradients of layer and RMS normalization."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from gradfuse.custom_ops.layer_norm_backward import MAX_RANK
from gradfuse.passes.algebra import UNIT, ZERO, Poly
from gradfuse.passes.matching import (
    TOLERANCE,
    Builder,
    FusePass,
    Mismatch,
    Rewrite,
    Site,
    is_node_of_training,
    normalizing,
    require_same,
    wanted_outputs,
)
from gradfuse.passes.matching.terms import parts_of_sum
from gradfuse.passes.reading import is_float

_VALUES = 120  # that a gradient is made of
_CANDIDATES = 16  # that are tried
_FACTORS = 16  # of a product
_ROWS = 4  # forms of a deviation
_STEPS = 3  # from a gradient to what is summed
_WITH_MEAN, _WITHOUT = "LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"


class FuseLayerNormBackwardPass(FusePass):
    """Finds, in a value P, sums over its last axes of products of whole tensors, and with them

    1. factors g and x, or x - m with a number m for each row, of one of the products;
    2. a number r for each row and a vector w over the last axes, or none, so that with y = r (x - m) and means over
       these axes P = r (w g - mean(w g) - y mean(w g y)). Without m, y is r x, and mean(w g) is missing;
    3. values of P's type that are g, x, m, r and w.

    The sums of g y and of g over all rows, where something else reads them, are replaced with P.
    """

    operator = "LayerNormBackward"
    linear = False
    training_operators = ("InvertibleLayerNormalizationGrad",)

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if is_node_of_training(node, _WITH_MEAN) or is_node_of_training(node, _WITHOUT):
            return _of_training(site, builder, root)
        if node is None or node.domain or node.op_type not in normalizing.CALCULATIONS:
            return None
        if not 1 <= len(site.extents(root)) <= MAX_RANK:
            return None
        if root not in normalizing.with_reduction(site):
            return None
        found = itertools.chain.from_iterable(_candidates(site, region) for region in _regions(site, root))
        possible = (parts for one in found for parts in _parts(site, one))
        tried = [partial(_bound, site, builder, parts) for parts in itertools.islice(possible, _CANDIDATES)]
        return self.first_bound(builder, tried)


def _of_training(site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
    """The rewrite of an operator of onnxruntime-training, which computes the same."""
    node = root.producer()
    assert node is not None
    count = 5 if node.op_type == _WITH_MEAN else 4
    given, wanted = list(node.inputs[:count]), wanted_outputs(node, count - 2)
    if len(given) < count or None in given or next(v for v in wanted if v is not None) is not root:
        return None
    inputs = [value for value in given if value is not None]
    if not all(site.knows(value) for value in inputs):
        raise Mismatch("shapes of what it reads are unknown")
    whole, inner = site.extents(inputs[1]), site.extents(inputs[2])
    axis = node.attributes.get_int("axis", -1)
    first = axis % len(whole) if whole else 0
    if not 1 <= len(whole) <= MAX_RANK or inner != whole[first:]:
        raise Mismatch("its weight does not have the shape of the normalized axes")
    rows = [*whole[:first], *(UNIT for _ in whole[first:])]
    statistics = inputs[3:]
    if any(value.dtype != root.dtype for value in inputs[:3]) or any(v.dtype != ir.DataType.FLOAT for v in statistics):
        raise Mismatch("it is computed of tensors of several types")
    if any(site.extents(value) != rows for value in statistics):
        raise Mismatch("its statistics are not one a row")
    wanted += [None] * (3 - len(wanted))
    sizes = [size if value is not None else [ZERO] for size, value in zip((whole, inner, inner), wanted, strict=True)]
    operands = [*inputs[:3], *([] if count == 5 else [None]), *statistics]
    mask = [int(value is not None) for value in wanted]
    outputs = builder.fused_whole(
        FuseLayerNormBackwardPass.operator, operands, sizes, axis=first - len(whole), output_mask=mask
    )
    (output, *others) = ((value, new) for value, new in zip(wanted, outputs, strict=True) if value is not None)
    rewrite = builder.rewrite("layer-norm-backward", [output[1]], output[1])
    return replace(rewrite, frontier=tuple(inputs), others=tuple(others), runs=frozenset([node]))


@dataclass(frozen=True)
class _Region:
    """The arithmetic that computes a value, up to other layers.

    Attributes:
        root: the value.
        first: the first of the axes that are summed over.
        nodes: what computes the value.
        reduced: whole tensors that are summed over these axes.
        centred: differences of a whole tensor and a number for each row, with the two.
    """

    root: ir.Value
    first: int
    nodes: frozenset[ir.Node]
    reduced: tuple[ir.Value, ...]
    centred: Mapping[ir.Value, tuple[ir.Value, ir.Value]]

    @property
    def rule(self) -> str:
        return "layer-norm-backward" if self.centred else "rms-norm-backward"


def _regions(site: Site, root: ir.Value) -> Iterator[_Region]:
    """The arithmetic behind a value, for each number of axes that it sums over."""
    nodes: dict[ir.Node, None] = {}
    reduced: dict[int, list[ir.Value]] = {}
    todo, seen = [root], {root}
    for value in todo:
        node = value.producer()
        inputs = None if node is None or not is_float(value) else normalizing.operands(site, node)
        if node is None or inputs is None:
            continue
        if normalizing.reduced(site, node) is not None and inputs[0] is not None and _is_whole(site, inputs[0], root):
            first = _first_summed(site, value, root)
            if first is not None:
                reduced.setdefault(first, []).append(inputs[0])
        nodes[node] = None
        for other in inputs:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
        if len(todo) > _VALUES:
            break
    for first, sums in reduced.items():
        whole, mean = partial(_is_whole, site, root=root), partial(_is_of_rows, site, root=root, first=first)
        values = dict.fromkeys(node.outputs[0] for node in nodes)
        found = {value: normalizing.difference(site, value, whole, mean) for value in values}
        centred = {value: pair for value, pair in found.items() if pair is not None}
        yield _Region(root, first, frozenset(nodes), tuple(dict.fromkeys(sums)), centred)


def _first_summed(site: Site, total: ir.Value, root: ir.Value) -> int | None:
    """The first of the last axes that a whole tensor was summed over; None where others were."""
    if not site.knows(total):
        return None
    whole, left = site.extents(root), site.extents(total)
    if len(left) < len(whole):
        return len(left) if left == whole[: len(left)] else None
    firsts = range(len(whole) - 1, -1, -1)
    return next((k for k in firsts if left == [*whole[:k], *(UNIT for _ in whole[k:])]), None)


def _is_whole(site: Site, value: ir.Value, root: ir.Value) -> bool:
    return is_float(value) and site.knows(value) and site.extents(value) == site.extents(root)


def _is_of_rows(site: Site, value: ir.Value, root: ir.Value, first: int) -> bool:
    """Whether a value has one element a row, and all dimensions."""
    whole = site.extents(root)
    rows = [*whole[:first], *(UNIT for _ in whole[first:])]
    return is_float(value) and site.knows(value) and site.extents(value) == rows


def _is_inner(site: Site, value: ir.Value, root: ir.Value, first: int) -> bool:
    """Whether a value has an element for each place in a row, and perhaps further dimensions of 1 ahead."""
    if not is_float(value) or not site.knows(value):
        return False
    extents, inner = site.extents(value), site.extents(root)[first:]
    ahead = len(extents) - len(inner)
    return 0 <= ahead <= first and extents[ahead:] == inner and all(size == UNIT for size in extents[:ahead])


@dataclass(frozen=True)
class _Candidate:
    """A gradient of the result, the input and perhaps the mean that a value may be made of."""

    region: _Region
    gradient: ir.Value
    x: ir.Value
    mean: ir.Value | None


def _candidates(site: Site, region: _Region) -> Iterator[_Candidate]:
    """The furthest factors first, which a weight has not been multiplied with."""
    is_whole = partial(_is_whole, site, root=region.root)
    terms = dict.fromkeys(term for value in region.reduced for term in parts_of_sum(site, value, is_whole, _FACTORS))
    products = [normalizing.factors(site, term, is_whole)[::-1] for term in terms]
    met: set[tuple[ir.Value, ir.Value]] = set()
    # A product with a difference may be written term by term.
    centred = {**{x: (x, mean) for x, mean in region.centred.values()}, **region.centred}
    for product in products:
        for data, gradient in itertools.permutations(dict.fromkeys(product), 2):
            pair: tuple[ir.Value, ir.Value | None] = centred.get(data, (data, None))
            x, mean = pair
            if (gradient, data) in met or x is gradient or (mean is None) == bool(region.centred):
                continue
            met.add((gradient, data))
            if mean is None or any(gradient in other and data not in other for other in products):
                yield _Candidate(region, gradient, x, mean)


@dataclass(frozen=True)
class _Parts:
    """All that a value may be made of.

    Attributes:
        candidate: the whole tensors, and perhaps the mean.
        sources: these, as far as they are not to be looked into, and the vectors.
        deviation: the number for each row that r is, or 1 over that.
        is_inverse: whether it is r.
        is_cut: whether a condition is part of one of its forms.
        weight: the vector.
    """

    candidate: _Candidate
    sources: tuple[ir.Value, ...]
    deviation: ir.Value
    is_inverse: bool
    is_cut: bool
    weight: ir.Value | None


def _parts(site: Site, one: _Candidate) -> Iterator[_Parts]:
    # Any per-row number serves as the mean; a reader of several forms of the mean of x asks to expand them.
    for own_mean in [[]] if one.mean is None else [[one.mean], []]:
        stops = [one.gradient, one.x, *own_mean]
        vectors = _vectors(site, one.region, stops)
        if vectors is None or len(vectors[1]) > 1:
            continue
        rows, inner = vectors
        weight = next(iter(inner), None)
        cut = any(normalizing.is_cut(site, value) for value in rows)
        ways = [(value, True, cut) for value in rows]
        ways += [(value, False, cut) for value in rows if normalizing.is_root(value)]
        if len(rows) == 1:
            yield from (_Parts(one, (*stops, *rows, *inner), *way, weight) for way in ways)
        elif len(rows) <= _ROWS:
            # Differentiating node by node leaves the deviation in several forms.
            yield from (_Parts(one, (*stops, *inner), *way, weight) for way in ways)


def _vectors(site: Site, region: _Region, stops: Sequence[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]] | None:
    """The numbers of rows, and the vectors over the last axes, that a value is made of beside others that are given.

    None if it is made of anything else as well.
    """
    root, first = region.root, region.first
    rows: dict[ir.Value, None] = {}
    inner: dict[ir.Value, None] = {}
    views: dict[ir.Value, ir.Value] = {}
    todo, seen = [root], {root, *stops}
    for value in todo:
        if len(todo) > _VALUES:
            return None
        node = value.producer()
        fits = _is_of_rows(site, value, root, first) or _is_inner(site, value, root, first)
        if (site.forms.constant(value) is not None and not fits) or normalizing.is_size(site, value):
            continue
        inputs = None if node is None or normalizing.is_inverse(site, node) else normalizing.operands(site, node)
        if node is None or inputs is None:
            # What has its elements in other dimensions may be viewed as such a vector.
            vector = value
            while not (
                (of_rows := _is_of_rows(site, vector, root, first)) or _is_inner(site, vector, root, first)
            ):  # fmt: skip
                if vector not in views:
                    return None
                vector = views[vector]
            (rows if of_rows else inner)[vector] = None
            continue
        for other in inputs:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
                if node.op_type in normalizing.VIEWS:
                    views[other] = value
    return list(rows), list(inner)


def _bound(site: Site, builder: Builder, parts: _Parts) -> Rewrite:
    root, mean = parts.candidate.region.root, parts.candidate.mean
    values = [*parts.sources, *([] if mean is None else [mean])]
    if root.dtype not in TOLERANCE or any(value.dtype != root.dtype for value in values):
        raise Mismatch("it is computed of tensors of several types")
    definition = _definition(site, parts)
    try:
        require_same(site, root, definition.grad_input, definition.root)
    except Mismatch:
        if parts.is_cut:
            raise Mismatch(normalizing.CUT) from None
        raise
    return _rewrite(site, builder, parts, definition)


@dataclass(frozen=True)
class _Definition:
    """What the operator computes of some values, over the variables of the whole tensors, and what the root is."""

    root: Poly
    grad_input: Poly
    grad_weight: Poly
    grad_bias: Poly
    inner: tuple[int, ...]


def _definition(site: Site, parts: _Parts) -> _Definition:
    one, sources, weight = parts.candidate, parts.sources, parts.weight
    algebra, forms, root = site.algebra, site.forms, one.region.root
    result, *given = forms.relative(root, *sources)
    opaque = dict(zip(sources, given, strict=True))
    values = [one.gradient, one.x, parts.deviation, *(v for v in (one.mean, weight) if v is not None)]
    known = [opaque.get(value) or forms.relative(value, *sources)[0] for value in values]
    groups, (p, g, data, r, *others) = forms.broadcast([result, *known])
    if not parts.is_inverse:
        r = algebra.power(r, -1)
    sizes = dict(enumerate(size for group in groups for size in group))
    before = sum(len(group) for group in groups[: one.region.first])
    inner = {v: size for v, size in sizes.items() if v >= before}
    share = algebra.power(algebra.product(inner.values()), -1)
    m = others[0] if one.mean is not None else None
    w = others[-1:] if weight is not None else []
    y = algebra.mul(r, data if m is None else data - m)

    def mean(poly: Poly) -> Poly:
        return algebra.mul(share, algebra.sum(poly, inner, sizes))

    through = algebra.product([*w, g])
    inside = through - algebra.mul(y, mean(algebra.mul(through, y)))
    if m is not None:
        inside = inside - mean(through)
    outer = {v: size for v, size in sizes.items() if v < before}
    grad_weight = algebra.sum(algebra.mul(g, y), outer, sizes)
    grad_bias = algebra.sum(g, outer, sizes)
    return _Definition(p, algebra.mul(r, inside), grad_weight, grad_bias, tuple(inner))


def _rewrite(site: Site, builder: Builder, parts: _Parts, definition: _Definition) -> Rewrite:
    one, sources, weight = parts.candidate, parts.sources, parts.weight
    root, first = one.region.root, one.region.first
    extents = site.extents(root)
    inner = extents[first:]
    sums = _sums(site, one, sources, definition)
    rstd = builder.cast(parts.deviation, ir.DataType.FLOAT)
    if not parts.is_inverse:
        rstd = builder.op("Reciprocal", [rstd], ir.DataType.FLOAT, site.extents(rstd))
    inputs = [
        one.gradient,
        one.x,
        None if weight is None else builder.reshape(weight, inner),
        None if one.mean is None else builder.cast(one.mean, ir.DataType.FLOAT),
        rstd,
    ]
    sizes = [inner if value is not None else [ZERO] for value in sums]
    mask = [1, *(int(value is not None) for value in sums)]
    fused = builder.fused_whole(
        FuseLayerNormBackwardPass.operator, inputs, [extents, *sizes], axis=first - len(extents), output_mask=mask
    )
    others = [
        (value, builder.reshape(output, site.extents(value)))
        for value, output in zip(sums, fused[1:], strict=True)
        if value is not None
    ]
    return replace(
        builder.rewrite(one.region.rule, [fused[0]], fused[0]), frontier=tuple(sources), others=tuple(others)
    )


def _sums(
    site: Site, one: _Candidate, sources: Sequence[ir.Value], definition: _Definition
) -> tuple[ir.Value | None, ir.Value | None]:
    """The gradients of weight and bias, if anything other than the gradient of the input reads them."""
    products = new = [one.gradient]
    for _ in range(_STEPS):
        new = site.read_by(new, {"Mul"} | normalizing.VIEWS)
        products = [*dict.fromkeys([*products, *new])]
    reduced = site.read_by(products, normalizing.REDUCTIONS | normalizing.PRODUCTS)
    values = [*reduced, *site.read_by(reduced, normalizing.VIEWS)]
    names = {v: site.algebra.var(k) for k, v in enumerate(definition.inner)}
    found: list[ir.Value | None] = []
    for expected in (definition.grad_weight, definition.grad_bias):
        wanted = site.algebra.substitute(expected, names)
        found.append(next((v for v in values if _is_sum(site, one, sources, v, wanted)), None))
    return found[0], found[1]


def _is_sum(site: Site, one: _Candidate, sources: Sequence[ir.Value], value: ir.Value, wanted: Poly) -> bool:
    root = one.region.root
    if value.dtype != root.dtype or not _is_inner(site, value, root, one.region.first):
        return False
    if not value.is_graph_output() and all(use.node in one.region.nodes for use in value.uses()):
        return False
    assert root.dtype is not None
    return site.forms.relative(value, *sources)[0].poly.close_to(wanted, 8 * TOLERANCE[root.dtype])
