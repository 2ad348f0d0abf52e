"""BatchNormBackward: the gradients of batch normalization in training mode, and of a ReLU that follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from gradfuse.custom_ops.batch_norm_backward import MAX_RANK
from gradfuse.passes.algebra import UNIT, Poly
from gradfuse.passes.matching import (
    OTHERWISE,
    TOLERANCE,
    Builder,
    FusePass,
    Mismatch,
    Rewrite,
    Site,
    is_node_of_training,
    names_of,
    normalizing,
    require_same,
    wanted_outputs,
)
from gradfuse.passes.reading import Form, is_float
from gradfuse.passes.report import NearMiss

_CHANNELS = 1  # the dimension of channels in the operator
_GIVEN = (
    "its mean is given and no gradient goes through the statistics, as in evaluation: there the gradients are products "
    "with vectors and sums, and the operator's are those of statistics of the batch"
)
_MEANS = 6  # vectors of which one may be the mean
_VECTORS = 5  # forms of a deviation, and a weight
_CANDIDATES = 8  # for the gradient of the result that are tried
_READERS = 24  # of a value that are looked at


class FuseBatchNormBackwardPass(FusePass):
    """Finds, in a value P, sums over all but the channels of products of whole tensors, and with them

    1. d = x - m of a whole tensor x and a vector m of channels, in one of the products, and a factor g beside it;
    2. vectors r and w (or none), so that P = w r (g - sum(g) / n - d r^2 sum(g d) / n), n elements a channel, where m
       and sums may be written in x: sum(d) is 0 where m is the mean of x;
    3. values of P's type that are g, x, m, r and w.

    The values r sum(g d) and sum(g), where something else reads them, are replaced with P. A g that a Where makes 0
    where a tensor is at most 0 gives relu_output.
    """

    operator = "BatchNormBackward"
    linear = False

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Differences from given statistics whose products with a gradient are summed by channels."""
        if self.near_misses:
            return
        for node in site.graph:
            if node not in site.unread and _is_subtraction(node) and _is_evaluated(site, node.outputs[0]):
                yield NearMiss(names_of([node])[0], self.operator, _GIVEN)

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if is_node_of_training(node, "BatchNormalizationGrad"):
            return _of_training(site, builder, root)
        if node is None or node.domain or node.op_type not in normalizing.CALCULATIONS:
            return None
        rank = len(site.extents(root))
        if not 2 <= rank <= MAX_RANK:
            return None
        subtracted = site.reached("subtractions", _is_subtraction, normalizing.ALL)
        if root not in subtracted or root not in normalizing.with_reduction(site):
            return None
        # Channels are the second dimension, or the last.
        regions = (_region(site, root, channels) for channels in dict.fromkeys((1, rank - 1)))
        possible = ((region, *one) for region in regions if region is not None for one in _candidates(site, region))
        candidates = itertools.islice(possible, _CANDIDATES)
        return self.first_bound(builder, (partial(_bound, site, builder, *one) for one in candidates))


def _is_evaluated(site: Site, centred: ir.Value) -> bool:
    """Whether a value is the difference from a given mean, and goes into the gradient of a weight of channels."""
    if not is_float(centred) or not site.knows(centred) or not 2 <= len(site.extents(centred)) <= MAX_RANK:
        return False
    is_whole = partial(normalizing.is_whole, site, root=centred)
    for channels in dict.fromkeys((_CHANNELS, len(site.extents(centred)) - 1)):
        is_vector = partial(_is_vector, site, root=centred, channels=channels)
        pair = normalizing.difference(site, centred, is_whole, is_vector)
        if pair is None or not _is_input(pair[1]):
            continue
        for total in (node for node in site.graph if normalizing.summed(site, node)):
            if not is_vector(total.outputs[0]):
                continue
            summed = normalizing.summed(site, total)
            found = [one for value in summed for one in normalizing.factors(site, site.first(value), is_whole)]
            others = [one for one in found if not normalizing.is_made_of(site, one, pair[0])]
            if centred in found and others:
                return True
    return False


def _is_input(vector: ir.Value) -> bool:
    """Whether a vector is given to the graph, in other dimensions perhaps."""
    while (node := vector.producer()) is not None and node.op_type in normalizing.VIEWS and not node.domain:
        if node.inputs[0] is None:
            return False
        vector = node.inputs[0]
    return node is None


def _of_training(site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
    """The rewrite of an operator of onnxruntime-training, which computes the same."""
    node = root.producer()
    assert node is not None
    given, wanted = list(node.inputs[:5]), wanted_outputs(node, 3)
    if len(given) < 5 or None in given or root is not next((v for v in wanted if v is not None), None):
        return None
    inputs = [value for value in given if value is not None]
    if not all(site.knows(value) for value in inputs) or not 2 <= len(site.extents(inputs[1])) <= MAX_RANK:
        raise Mismatch("shapes of what it reads are unknown")
    if any(value.dtype != root.dtype for value in inputs):
        raise Mismatch("it is computed of tensors of several types")
    whole, vector = site.extents(inputs[1]), site.extents(inputs[2])
    operator, sizes = FuseBatchNormBackwardPass.operator, (whole, vector, vector)
    return normalizing.of_training(builder, operator, "batch-norm-backward", node, inputs, inputs, wanted, sizes)


def _is_subtraction(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ("Add", "Sub", "Sum")


def _region(site: Site, root: ir.Value, channels: int) -> normalizing.Region | None:
    """The arithmetic behind a value; None if there is none of the gradient's."""
    is_whole = partial(normalizing.is_whole, site, root=root)
    is_mean = partial(_is_vector, site, root=root, channels=channels)
    found = dict(normalizing.arithmetic(site, root))
    sums = (tuple(map(site.first, normalizing.summed(site, node))) for node in found.values())
    reduced = dict.fromkeys(one for one in sums if one and all(map(is_whole, one)))
    # Most values have no sum behind them; only with one are differences worth a search.
    if not reduced:
        return None
    pairs = {value: normalizing.difference(site, value, is_whole, is_mean) for value in found}
    centred = {value: pair for value, pair in pairs.items() if pair is not None}
    return normalizing.Region(root, channels, frozenset(found.values()), tuple(reduced), centred)


def _is_vector(site: Site, value: ir.Value, root: ir.Value, channels: int) -> bool:
    """Whether a value has one element a channel, at the place of the channels in whole tensors or alone."""
    if not is_float(value) or not site.knows(value):
        return False
    extents, whole = site.extents(value), site.extents(root)
    size = whole[channels]
    place = 0 if len(extents) == 1 else len(extents) - (len(whole) - channels)
    return 0 <= place < len(extents) and [s for s in extents if s != UNIT] in ([size], []) and (extents[place] == size)


def _candidates(site: Site, region: normalizing.Region) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Gradients of the result, inputs and means that a value may be made of."""
    products = region.products(site)
    met: set[tuple[ir.Value, ir.Value]] = set()
    pairs = [(centred, x, mean) for centred, (x, mean) in region.centred.items()]
    # A product with a difference may be written term by term.
    for data, x, mean in (*pairs, *((x, x, mean) for _, x, mean in pairs)):
        beside = [one for product in products if data in product for one in product]
        for gradient in beside:
            alone = any(gradient in product and data not in product for product in products)
            if alone and gradient is not data and gradient is not x and (gradient, data) not in met:
                met.add((gradient, data))
                yield gradient, x, mean
    if met:
        return
    # Kernels write g r w + a x + b, with two vectors of which the mean is a factor, and sum what they read.
    read = (v for node in region.nodes for v in normalizing.operands(site, node) or () if v is not None)
    is_vector = partial(_is_vector, site, root=region.root, channels=region.axis)
    vectors = [v for v in dict.fromkeys(read) if is_vector(v) and not _is_viewed(site, v)]
    for product in products:
        for x, gradient in itertools.permutations(dict.fromkeys(product), 2):
            if any(gradient in other and x not in other for other in products):
                means = [v for v in vectors if not normalizing.is_made_of(site, v, gradient)]
                yield from ((gradient, x, mean) for mean in (means if len(means) <= _MEANS else ()))


def _is_viewed(site: Site, vector: ir.Value) -> bool:
    """Whether a vector is a view of another one."""
    node = vector.producer()
    return node is not None and node.op_type in normalizing.VIEWS and not node.domain


def _bound(
    site: Site, builder: Builder, region: normalizing.Region, gradient: ir.Value, x: ir.Value, mean: ir.Value
) -> Rewrite:
    # Any vector serves as the mean; what reads the mean of x in several forms asks to look into them.
    try:
        return _bound_beside(site, builder, region, _Whole(gradient, x, mean, (mean,)))
    except Mismatch:
        if not normalizing.is_made_of(site, mean, x):
            raise
    return _bound_beside(site, builder, region, _Whole(gradient, x, mean, ()))


@dataclass(frozen=True)
class _Whole:
    """The gradient of the result, the input and its mean; `own` is the mean, unless it is to be looked into."""

    gradient: ir.Value
    x: ir.Value
    mean: ir.Value
    own: tuple[ir.Value, ...]


@dataclass(frozen=True)
class _Parts:
    """All that a value may be made of.

    Attributes:
        whole: the whole tensors, and the mean.
        sources: these, as far as they are not to be looked into, and the vectors.
        deviation: the vector that r is, or 1 over that.
        is_inverse: whether it is r.
        weight: the other vector.
    """

    whole: _Whole
    sources: tuple[ir.Value, ...]
    deviation: ir.Value
    is_inverse: bool
    weight: ir.Value | None


def _bound_beside(site: Site, builder: Builder, region: normalizing.Region, whole: _Whole) -> Rewrite:
    stops = [whole.gradient, whole.x, *whole.own]
    is_vector = partial(_is_vector, site, root=region.root, channels=region.axis)
    vectors = normalizing.vectors(site, region.root, stops, is_vector)
    if not 1 <= len(vectors) <= _VECTORS:
        raise Mismatch(f"it has {len(vectors)} vectors of the channels beside the mean, not 1 to {_VECTORS}")
    dtype = region.root.dtype
    if dtype not in TOLERANCE or any(v.dtype != dtype for v in (*stops, *vectors, whole.mean)):
        raise Mismatch("it is computed of tensors of several types")
    for deviation, weight in _pairs(site, whole.x, vectors):
        of_weight = [] if weight is None else [weight]
        # Differentiating node by node leaves the deviation in several forms, not all of which need be values.
        read = [[*stops, *vectors]] if len(vectors) <= 2 else []
        if len(vectors) > 2 or normalizing.is_made_of(site, deviation, whole.x):
            read.append([*stops, *of_weight])
        inverse = (True, False) if normalizing.is_root(deviation) else (True,)
        for sources, is_inverse in itertools.product(read, inverse):
            parts = _Parts(whole, tuple(sources), deviation, is_inverse, weight)
            definition = _definition(site, region, parts)
            try:
                require_same(site, region.root, definition.grad_input, definition.root)
            except Mismatch:
                continue
            return _rewrite(site, builder, region, parts, definition)
    if any(normalizing.is_cut(site, vector) for vector in vectors):
        raise Mismatch(normalizing.CUT)
    raise Mismatch(OTHERWISE)


def _pairs(site: Site, x: ir.Value, vectors: Sequence[ir.Value]) -> list[tuple[ir.Value, ir.Value | None]]:
    """The vectors that may be deviation and weight."""
    if len(vectors) <= 2:
        return [(v, w) for v in vectors for w in (*vectors, None) if w is not v and (w is None) == (len(vectors) == 1)]
    deviations = [v for v in vectors if normalizing.is_made_of(site, v, x)]
    weights = [v for v in vectors if v not in deviations]
    return [(v, next(iter(weights), None)) for v in deviations] if len(weights) <= 1 else []


@dataclass(frozen=True)
class _Definition:
    """What the operator computes of some values, over the variables of the whole tensors, and what the root is."""

    root: Poly
    grad_input: Poly
    grad_weight: Poly
    grad_bias: Poly
    channel: tuple[int, ...]


def _definition(site: Site, region: normalizing.Region, parts: _Parts) -> _Definition:
    algebra, forms, root, whole, sources = site.algebra, site.forms, region.root, parts.whole, parts.sources
    rank = len(site.extents(root))
    values = [whole.gradient, whole.x, whole.mean, parts.deviation, *([] if parts.weight is None else [parts.weight])]
    result, *given = forms.relative(root, *sources)
    opaque = dict(zip(sources, given, strict=True))
    known = [result, *(opaque.get(value) or forms.relative(value, *sources)[0] for value in values)]
    vectors = [_column(form, rank, region.axis) for form in known[3:]]
    groups, (p, g, data, m, r, *w) = forms.broadcast([*known[:3], *vectors])
    if not parts.is_inverse:
        r = algebra.power(r, -1)
    sizes = dict(enumerate(size for group in groups for size in group))
    form = Form(groups, p)
    channel = tuple(form.variables(region.axis))
    others = {v: size for v, size in sizes.items() if v not in channel}
    count = algebra.product(others.values())
    d = data - m
    grad_bias = algebra.sum(g, others, sizes)
    grad_weight = algebra.mul(r, algebra.sum(algebra.mul(g, d), others, sizes))
    share = algebra.power(count, -1)
    inside = g - algebra.mul(share, grad_bias) - algebra.product([share, d, r, grad_weight])
    return _Definition(p, algebra.product([*w, r, inside]), grad_weight, grad_bias, channel)


def _column(form: Form, rank: int, channels: int) -> Form:
    """A vector of channels, in whatever dimensions, as dimensions of whole tensors."""
    own = next((group for group in form.groups if group), ())
    return Form(tuple(own if axis == channels else () for axis in range(rank)), form.poly)


def _rewrite(
    site: Site, builder: Builder, region: normalizing.Region, parts: _Parts, definition: _Definition
) -> Rewrite:
    root, gradient = region.root, parts.whole.gradient
    extents = site.extents(root)
    size = extents[region.axis]
    sums = _sums(site, region, parts, definition)
    gate = _gate(site, gradient, root)
    source, relu_output = (gradient, None) if gate is None else gate
    # Channels that are last are the second dimension of the same elements in two.
    shape = extents
    if region.axis != _CHANNELS:
        shape = [site.algebra.product(extents[: region.axis]), size]
    vectors = [parts.weight, parts.whole.mean, parts.deviation]
    weight, mean, invstd = (None if v is None else builder.reshape(_flat(site, v, region), [size]) for v in vectors)
    if not parts.is_inverse:
        assert invstd is not None
        invstd = builder.op("Reciprocal", [invstd], invstd.dtype, [size])
    inputs = [
        builder.reshape(source, shape),
        builder.reshape(parts.whole.x, shape),
        weight,
        mean,
        invstd,
        *([] if relu_output is None else [builder.reshape(relu_output, shape)]),
    ]
    operator = FuseBatchNormBackwardPass.operator
    fused, others = normalizing.fused_with_sums(site, builder, operator, inputs, shape, [size], sums)
    frontier = [v for v in parts.sources if v is not gradient]
    frontier += [source] if relu_output is None else [source, relu_output]
    rule = "batch-norm-backward" if relu_output is None else "batch-norm-relu-backward"
    rewrite = builder.rewrite(rule, [fused], builder.reshape(fused, extents))
    return replace(rewrite, frontier=tuple(frontier), others=others)


def _flat(site: Site, vector: ir.Value, region: normalizing.Region) -> ir.Value:
    """A vector with one dimension, where the graph has it ahead of the root; or else as it is."""
    todo, seen = [vector], {vector}
    for value in todo:
        if len(site.extents(value)) == 1:
            return value
        uses = itertools.islice(value.uses(), _READERS)
        views = [use.node.outputs[0] for use in uses if use.node.op_type in normalizing.VIEWS]
        new = [v for v in views if v not in seen and v.dtype == vector.dtype and v in site.position]
        new = [v for v in new if site.is_ahead(v, region.root) and _is_vector(site, v, region.root, region.axis)]
        seen.update(new)
        todo += new
    return vector


def _sums(site: Site, region: normalizing.Region, parts: _Parts, definition: _Definition) -> list[ir.Value | None]:
    """The gradients of weight and bias, if anything other than the gradient of the input reads them."""
    if len(definition.channel) != 1:
        return [None, None]
    products = [parts.whole.gradient, *site.read_by([parts.whole.gradient], {"Mul"})]
    reduced = site.read_by(products, normalizing.REDUCTIONS | normalizing.PRODUCTS)
    scaled = site.read_by(reduced, {"Mul"} | normalizing.VIEWS)
    values = [*reduced, *scaled, *site.read_by(scaled, normalizing.VIEWS)]
    names = {definition.channel[0]: site.algebra.var(0)}
    wanted = [site.algebra.substitute(one, names) for one in (definition.grad_weight, definition.grad_bias)]
    is_vector = partial(_is_vector, site, root=region.root, channels=region.axis)
    sums = normalizing.sums(site, region, parts.sources, values, wanted, is_vector)
    if sums[0] is not None and _is_0_of_nothing(site, parts, sums[0]):
        sums[0] = None
    return sums


def _is_0_of_nothing(site: Site, parts: _Parts, total: ir.Value) -> bool:
    """Whether a sum of products with r is 0 for an empty batch, for which r, and so the operator's result, is NaN."""
    if all(size.integer is not None for size in site.extents(parts.whole.x)):
        return False
    node = total.producer()
    while node is not None and node.op_type in normalizing.VIEWS and not node.domain and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    is_sum = node is not None and bool(normalizing.summed(site, node))
    return is_sum and normalizing.is_made_of(site, parts.deviation, parts.whole.x)


def _gate(site: Site, gradient: ir.Value, root: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """What a Where takes where a tensor is above 0, and the tensor; it is 0 elsewhere."""
    node = gradient.producer()
    if node is None or node.op_type != "Where" or node.domain or None in node.inputs or node.graph is not site.graph:
        return None
    condition, nothing, source = node.inputs
    assert condition is not None and nothing is not None and source is not None
    test = condition.producer()
    # Other comparisons cut NaN.
    if test is None or test.op_type != "LessOrEqual" or test.domain or None in test.inputs:
        return None
    output, least = test.inputs
    assert output is not None and least is not None
    if not _is_zero(site, nothing) or not _is_zero(site, least):
        return None
    fits = all(normalizing.is_whole(site, v, root) and v.dtype == root.dtype for v in (source, output))
    return (source, output) if fits else None


def _is_zero(site: Site, value: ir.Value) -> bool:
    array = site.forms.constant(value)
    return array is not None and array.size > 0 and not array.any()
