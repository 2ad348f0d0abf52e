"""BatchNormBackward: the gradients of batch normalization in training mode, and of a ReLU that follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from gradfuse.custom_ops.batch_norm_backward import MAX_RANK
from gradfuse.passes.algebra import UNIT, ZERO, Poly
from gradfuse.passes.matching import (
    TOLERANCE,
    Builder,
    FusePass,
    Mismatch,
    Rewrite,
    Site,
    is_node_of_training,
    require_same,
    wanted_outputs,
)
from gradfuse.passes.matching.terms import parts_of_sum
from gradfuse.passes.reading import Form, is_float

_CHANNELS = 1  # the dimension of channels
_VIEWS = {"Squeeze", "Unsqueeze", "Reshape", "Flatten", "Expand", "Tile", "Cast", "Identity"}
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Neg", "Sum"} | _VIEWS
_REDUCTIONS = {"ReduceSum", "ReduceMean"}
_VALUES = 120  # that a gradient is made of
_FACTORS = 16  # of a product
_VECTORS = 3  # forms of a deviation, and a weight
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

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if is_node_of_training(node, "BatchNormalizationGrad"):
            return _of_training(site, builder, root)
        if node is None or node.domain or node.op_type not in _ARITHMETIC - _VIEWS:
            return None
        if not 2 <= len(site.extents(root)) <= MAX_RANK:
            return None
        behind = [site.reached(*search, _ARITHMETIC | _REDUCTIONS) for search in _SEARCHES]
        if any(root not in values for values in behind):
            return None
        region = _region(site, root)
        if region is None:
            return None
        candidates = itertools.islice(_candidates(site, root, region), _CANDIDATES)
        return self.first_bound(builder, (partial(_bound, site, builder, root, region, *c) for c in candidates))


def _of_training(site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
    """The rewrite of an operator of onnxruntime-training, which computes the same."""
    node = root.producer()
    assert node is not None
    given, wanted = list(node.inputs[:5]), wanted_outputs(node, 3)
    if len(given) < 5 or None in given or next(v for v in wanted if v is not None) is not root:
        return None
    inputs = [value for value in given if value is not None]
    if not all(site.knows(value) for value in inputs) or not 2 <= len(site.extents(inputs[1])) <= MAX_RANK:
        raise Mismatch("shapes of what it reads are unknown")
    if any(value.dtype != root.dtype for value in inputs):
        raise Mismatch("it is computed of tensors of several types")
    whole, vector = site.extents(inputs[1]), site.extents(inputs[2])
    sizes = [size if value is not None else [ZERO] for size, value in zip((whole, vector, vector), wanted, strict=True)]
    outputs = builder.fused_whole(
        FuseBatchNormBackwardPass.operator, inputs, sizes, output_mask=[int(value is not None) for value in wanted]
    )
    (output, *others) = ((value, new) for value, new in zip(wanted, outputs, strict=True) if value is not None)
    rewrite = builder.rewrite("batch-norm-backward", [output[1]], output[1])
    return replace(rewrite, frontier=tuple(inputs), others=tuple(others), runs=frozenset([node]))


def _is_reduction(node: ir.Node) -> bool:
    return not node.domain and node.op_type in _REDUCTIONS


def _is_subtraction(node: ir.Node) -> bool:
    return not node.domain and node.op_type == "Sub"


_SEARCHES = (("reductions", _is_reduction), ("subtractions", _is_subtraction))


@dataclass(frozen=True)
class _Region:
    """The arithmetic behind a value, up to other layers.

    Attributes:
        nodes: what computes the value.
        reduced: whole tensors that are summed.
        centred: subtractions of a vector from a whole tensor.
    """

    nodes: frozenset[ir.Node]
    reduced: tuple[ir.Value, ...]
    centred: tuple[ir.Value, ...]


def _region(site: Site, root: ir.Value) -> _Region | None:
    """The arithmetic behind a value; None where there is none of the gradient's, or more than that."""
    reduced: dict[ir.Value, None] = {}
    centred: dict[ir.Value, None] = {}
    nodes: dict[ir.Node, None] = {}
    todo, seen = [root], {root}
    for value in todo:
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph or not is_float(value):
            continue
        if node.op_type in _REDUCTIONS and node.inputs[0] is not None and _is_whole(site, node.inputs[0], root):
            reduced[node.inputs[0]] = None
        elif node.op_type not in _ARITHMETIC:
            continue
        if node.op_type == "Sub" and _is_whole(site, value, root) and None not in node.inputs:
            left, right = node.inputs
            assert left is not None and right is not None
            if _is_whole(site, left, root) and _is_vector(site, right, root):
                centred[value] = None
        nodes[node] = None
        for other in node.inputs:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
        if len(todo) > _VALUES:
            break
    if not reduced or not centred:
        return None
    return _Region(frozenset(nodes), tuple(reduced), tuple(centred))


def _is_whole(site: Site, value: ir.Value, root: ir.Value) -> bool:
    return is_float(value) and site.knows(value) and site.extents(value) == site.extents(root)


def _is_vector(site: Site, value: ir.Value, root: ir.Value) -> bool:
    """Whether a value has one element a channel, at the place of the channels in whole tensors or alone."""
    if not is_float(value) or not site.knows(value):
        return False
    extents, rank, channels = site.extents(value), len(site.extents(root)), site.extents(root)[_CHANNELS]
    place = 0 if len(extents) == 1 else len(extents) - (rank - _CHANNELS)
    return (
        0 <= place < len(extents)
        and [s for s in extents if s != UNIT] in ([channels], [])
        and (extents[place] == channels)
    )


def _factors(site: Site, value: ir.Value, root: ir.Value) -> Iterator[ir.Value]:
    """The whole tensors that a product has as factors, the value itself first, the nearest first."""
    todo = [value]
    for own in todo:
        yield own
        node = own.producer()
        if node is not None and node.op_type in ("Mul", "Identity") and not node.domain and len(todo) < _FACTORS:
            todo += [v for v in node.inputs if v is not None and _is_whole(site, v, root)]


def _candidates(site: Site, root: ir.Value, region: _Region) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Gradients of the result, inputs and means that a value may be made of."""
    is_whole = partial(_is_whole, site, root=root)
    terms = dict.fromkeys(term for value in region.reduced for term in parts_of_sum(value, is_whole, _FACTORS))
    products = [list(_factors(site, term, root)) for term in terms]
    met: set[tuple[ir.Value, ir.Value]] = set()
    for centred in region.centred:
        node = centred.producer()
        assert node is not None
        x, mean = node.inputs
        assert x is not None and mean is not None
        beside = [one for product in products if centred in product for one in product]
        for gradient in beside:
            alone = any(gradient in product and centred not in product for product in products)
            if alone and gradient is not centred and gradient is not x and (gradient, centred) not in met:
                met.add((gradient, centred))
                yield gradient, x, mean


def _vectors(site: Site, root: ir.Value, stops: Sequence[ir.Value]) -> list[ir.Value]:
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
        inner = node is not None and not node.domain and node.graph is site.graph
        if (site.forms.constant(value) is not None and not _is_vector(site, value, root)) or _is_size(site, value):
            continue
        if node is None or not inner or node.op_type not in _ARITHMETIC | _REDUCTIONS or _is_inverse(site, node):
            # What has its elements in other dimensions may be viewed as a vector.
            vector = value
            while not _is_vector(site, vector, root):
                if vector not in views:
                    raise Mismatch(f"{value.name} is part of it, which is no vector of the channels")
                vector = views[vector]
            found[vector] = None
            continue
        operands = node.inputs if node.op_type in _ARITHMETIC - _VIEWS else node.inputs[:1]
        for other in operands:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
                if node.op_type in _VIEWS:
                    views[other] = value
    return list(found)


def _is_size(site: Site, value: ir.Value) -> bool:
    """Whether a value is computed from dimensions alone."""
    form = site.forms.get(value)
    return form is not None and bool(form.poly) and not site.algebra.tensors(form.poly) and not form.sizes


def _is_inverse(site: Site, node: ir.Node) -> bool:
    return node.op_type == "Div" and node.inputs[0] is not None and site.forms.constant(node.inputs[0]) is not None


def _bound(
    site: Site,
    builder: Builder,
    root: ir.Value,
    region: _Region,
    gradient: ir.Value,
    x: ir.Value,
    mean: ir.Value,
) -> Rewrite:
    # Any vector serves as the mean; what reads the mean of x in several forms asks to look into them.
    try:
        return _bound_beside(site, builder, root, region, gradient, x, mean, [mean])
    except Mismatch:
        if not _is_made_of(site, mean, x):
            raise
    return _bound_beside(site, builder, root, region, gradient, x, mean, [])


def _bound_beside(
    site: Site,
    builder: Builder,
    root: ir.Value,
    region: _Region,
    gradient: ir.Value,
    x: ir.Value,
    mean: ir.Value,
    own_mean: Sequence[ir.Value],
) -> Rewrite:
    stops = [gradient, x]
    vectors = _vectors(site, root, [*stops, *own_mean])
    if not 1 <= len(vectors) <= _VECTORS:
        raise Mismatch(f"it has {len(vectors)} vectors of the channels beside the mean, not 1 to {_VECTORS}")
    if root.dtype not in TOLERANCE or any(v.dtype != root.dtype for v in (*stops, *own_mean, *vectors, mean)):
        raise Mismatch("it is computed of tensors of several types")

    for invstd, weight in [(v, w) for v in vectors for w in (*vectors, None) if w is not v]:
        if len(vectors) == 2 and weight is None:
            continue
        # Differentiating node by node leaves the deviation in several forms, of which one is its inverse.
        of_weight = [] if weight is None else [weight]
        sources = [*stops, *own_mean, *(vectors if len(vectors) <= 2 else of_weight)]
        definition = _definition(site, root, sources, gradient, x, mean, invstd, weight)
        try:
            require_same(site, root, definition.grad_input, definition.root)
        except Mismatch:
            continue
        return _rewrite(site, builder, root, region, sources, gradient, x, mean, invstd, weight, definition)
    raise Mismatch("it has the gradient's form, but the operator on the same values would compute something else")


@dataclass(frozen=True)
class _Definition:
    """What the operator computes of some values, over the variables of the whole tensors, and what the root is."""

    root: Poly
    grad_input: Poly
    grad_weight: Poly
    grad_bias: Poly
    channel: tuple[int, ...]


def _definition(
    site: Site,
    root: ir.Value,
    sources: Sequence[ir.Value],
    gradient: ir.Value,
    x: ir.Value,
    mean: ir.Value,
    invstd: ir.Value,
    weight: ir.Value | None,
) -> _Definition:
    algebra, forms = site.algebra, site.forms
    rank = len(site.extents(root))
    values = [gradient, x, mean, invstd, *([] if weight is None else [weight])]
    result, *given = forms.relative(root, *sources)
    opaque = dict(zip(sources, given, strict=True))
    known = [result, *(opaque.get(value) or forms.relative(value, *sources)[0] for value in values)]
    whole, vectors = known[:3], [_column(form, rank) for form in known[3:]]
    groups, (p, g, data, m, r, *w) = forms.broadcast([*whole, *vectors])
    sizes = dict(enumerate(size for group in groups for size in group))
    form = Form(groups, p)
    channel = tuple(form.variables(_CHANNELS))
    others = {v: size for v, size in sizes.items() if v not in channel}
    count = algebra.product(others.values())
    d = data - m
    grad_bias = algebra.sum(g, others, sizes)
    grad_weight = algebra.mul(r, algebra.sum(algebra.mul(g, d), others, sizes))
    share = algebra.power(count, -1)
    inside = g - algebra.mul(share, grad_bias) - algebra.product([share, d, r, grad_weight])
    return _Definition(p, algebra.product([*w, r, inside]), grad_weight, grad_bias, channel)


def _column(form: Form, rank: int) -> Form:
    """A vector of channels, in whatever dimensions, as dimensions of whole tensors."""
    own = next((group for group in form.groups if group), ())
    return Form(tuple(own if axis == _CHANNELS else () for axis in range(rank)), form.poly)


def _is_made_of(site: Site, mean: ir.Value, x: ir.Value) -> bool:
    """Whether a vector is computed from a whole tensor by reductions and arithmetic."""
    todo, seen = [mean], {mean}
    for value in todo:
        if value is x:
            return True
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph or len(todo) > _READERS:
            continue
        if node.op_type in _ARITHMETIC | _REDUCTIONS:
            operands = node.inputs if node.op_type in _ARITHMETIC - _VIEWS else node.inputs[:1]
            todo += [v for v in operands if v is not None and v not in seen]
            seen.update(todo)
    return False


def _rewrite(
    site: Site,
    builder: Builder,
    root: ir.Value,
    region: _Region,
    sources: Sequence[ir.Value],
    gradient: ir.Value,
    x: ir.Value,
    mean: ir.Value,
    invstd: ir.Value,
    weight: ir.Value | None,
    definition: _Definition,
) -> Rewrite:
    extents = site.extents(root)
    channels = extents[_CHANNELS]
    sums = _sums(site, root, region, sources, gradient, definition)
    gate = _gate(site, gradient, root)
    source, relu_output = (gradient, None) if gate is None else gate
    inputs = [
        source,
        x,
        None if weight is None else builder.reshape(_flat(site, weight, root), [channels]),
        builder.reshape(_flat(site, mean, root), [channels]),
        builder.reshape(_flat(site, invstd, root), [channels]),
        *([] if relu_output is None else [relu_output]),
    ]
    sizes = [[channels] if value is not None else [ZERO] for value in sums]
    mask = [1, *(int(value is not None) for value in sums)]
    fused = builder.fused_whole(FuseBatchNormBackwardPass.operator, inputs, [extents, *sizes], output_mask=mask)
    others = [
        (value, builder.reshape(output, site.extents(value)))
        for value, output in zip(sums, fused[1:], strict=True)
        if value is not None
    ]
    frontier = [v for v in sources if v is not gradient]
    frontier += [source] if relu_output is None else [source, relu_output]
    rule = "batch-norm-backward" if relu_output is None else "batch-norm-relu-backward"
    return replace(builder.rewrite(rule, [fused[0]], fused[0]), frontier=tuple(frontier), others=tuple(others))


def _flat(site: Site, vector: ir.Value, root: ir.Value) -> ir.Value:
    """A vector with one dimension, where the graph has it ahead of the root; or else as it is."""
    todo, seen = [vector], {vector}
    for value in todo:
        if len(site.extents(value)) == 1:
            return value
        views = [use.node.outputs[0] for use in itertools.islice(value.uses(), _READERS) if use.node.op_type in _VIEWS]
        new = [v for v in views if v not in seen and v.dtype == vector.dtype and v in site.position]
        new = [v for v in new if site.is_ahead(v, root) and _is_vector(site, v, root)]
        seen.update(new)
        todo += new
    return vector


def _sums(
    site: Site,
    root: ir.Value,
    region: _Region,
    sources: Sequence[ir.Value],
    gradient: ir.Value,
    definition: _Definition,
) -> tuple[ir.Value | None, ir.Value | None]:
    """The gradients of weight and bias, where something else than the gradient of the input reads them."""
    if len(definition.channel) != 1:
        return None, None
    products = [gradient, *site.read_by([gradient], {"Mul"})]
    reduced = site.read_by(products, _REDUCTIONS)
    scaled = site.read_by(reduced, {"Mul"} | _VIEWS)
    values = [*reduced, *scaled, *site.read_by(scaled, _VIEWS)]
    found: list[ir.Value | None] = []
    for expected in (definition.grad_weight, definition.grad_bias):
        wanted = site.algebra.substitute(expected, {definition.channel[0]: site.algebra.var(0)})
        found.append(next((v for v in values if _is_sum(site, root, region, sources, v, wanted)), None))
    return found[0], found[1]


def _is_sum(
    site: Site, root: ir.Value, region: _Region, sources: Sequence[ir.Value], value: ir.Value, wanted: Poly
) -> bool:
    if value.dtype != root.dtype or not _is_vector(site, value, root):
        return False
    if not value.is_graph_output() and all(use.node in region.nodes for use in value.uses()):
        return False
    assert root.dtype is not None
    return site.forms.relative(value, *sources)[0].poly.close_to(wanted, 8 * TOLERANCE[root.dtype])


def _gate(site: Site, gradient: ir.Value, root: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """What a Where takes where a tensor is above 0, and the tensor; it is 0 elsewhere."""
    node = gradient.producer()
    if node is None or node.op_type != "Where" or node.domain or None in node.inputs or node.graph is not site.graph:
        return None
    condition, nothing, source = node.inputs
    assert condition is not None and nothing is not None and source is not None
    test = condition.producer()
    # Other comparisons cut what is NaN.
    if test is None or test.op_type != "LessOrEqual" or test.domain or None in test.inputs:
        return None
    output, least = test.inputs
    assert output is not None and least is not None
    if not _is_zero(site, nothing) or not _is_zero(site, least):
        return None
    fits = all(_is_whole(site, v, root) and v.dtype == root.dtype for v in (source, output))
    return (source, output) if fits else None


def _is_zero(site: Site, value: ir.Value) -> bool:
    array = site.forms.constant(value)
    return array is not None and array.size > 0 and not array.any()
