"""LayerNormBackward: the gradients of layer and RMS normalization."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from gradfuse.custom_ops.layer_norm_backward import MAX_RANK
from gradfuse.passes.algebra import UNIT, Poly, number
from gradfuse.passes.matching import (
    OTHERWISE,
    TOLERANCE,
    Builder,
    Context,
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
from gradfuse.passes.matching.regrouping import regrouped
from gradfuse.passes.reading import is_float
from gradfuse.passes.report import NearMiss

_CANDIDATES = 24  # that are tried
_ROWS = 4  # forms of a deviation
_NEAR = 24  # values between a sum and a product with it
_FAR = 96  # values behind a gradient in which its deviation is looked for
_STEPS = 3  # from a gradient to what is summed
_UNBIASED = "its variance is divided by one less than the number of elements, and the operator's by that number"
_ADDED = "a number is added to its deviation, and the operator has the root of a variance that one was added to"
_AXES = "it normalizes along other axes than the last ones, or all but the channels, which the operators do"
_RECOVERED = "its normalized values are results divided by the weight, and the operator takes what was normalized"
_JOINT = "its sums are of one Concat of what is summed, and the rule looks for each of them by itself"
_WITH_MEAN, _WITHOUT = "LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"


class FuseLayerNormBackwardPass(FusePass):
    """Finds, in a value P, sums over its last axes of products of whole tensors, and with them

    1. factors g and x, or x - m with a number m for each row, of one of the products;
    2. a number r for each row and a vector w over the last axes, or none, so that with y = r (x - m) and means over
       these axes P = r (w g - mean(w g) - y mean(w g y)). Without m, y is r x, and mean(w g) is missing;
    3. values of P's type that are g, x, m, r and w.

    The sums of g y and of g over all rows, where something else reads them, are replaced with P.

    Of a group normalization, w differs from row to row, and sums over each channel come before those over a group. The
    operator then gets the product of w and g.
    """

    operator = "LayerNormBackward"
    linear = False
    training_operators = ("InvertibleLayerNormalizationGrad",)

    def _replaced(self, context: Context, site: Site, root: ir.Value) -> Sequence[ir.Node]:
        """Replaces the root, or two terms of it where that is a sum: in a network of residual sums, of more gradients.

        What stays of the sum is read by what has read it.
        """
        missed = len(self.near_misses)
        dead = super()._replaced(context, site, root)
        if dead or root not in site.position or root not in normalizing.with_reduction(site):
            return dead
        found = len(self.near_misses)
        for way in regrouped(site, root, partial(_may_be_gradient, site)):
            dead = super()._replaced(context, site, way.pair)
            if dead:
                del self.near_misses[missed:]
                return [*dead, *way.kept()]
            way.undo()
            del self.near_misses[found:]
        return ()

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Normalizations whose deviation is another one, or along other axes, that a gradient goes through."""
        if any(miss.reason != OTHERWISE for miss in self.near_misses):
            return
        for node in site.graph:
            reason = _other_deviation(site, node) if node.op_type == "Sqrt" and not node.domain else None
            if reason is None and _is_joint(site, node):
                reason = _JOINT
            if reason is not None:
                yield NearMiss(names_of([node])[0], self.operator, reason)

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        node = root.producer()
        if is_node_of_training(node, _WITH_MEAN) or is_node_of_training(node, _WITHOUT):
            return _of_training(site, builder, root)
        if node is None or node.domain or node.op_type not in normalizing.CALCULATIONS:
            return None
        if not 1 <= len(site.extents(root)) <= MAX_RANK:
            return None
        if normalizing.with_reduction(site).isdisjoint([root, *node.inputs]):
            return None
        regions = list(_regions(site, root))
        found = list(itertools.chain.from_iterable(_candidates(site, region) for region in regions))
        possible = (parts for one in found for parts in _parts(site, one))
        tried = [partial(_bound, site, builder, parts) for parts in itertools.islice(possible, _CANDIDATES)]
        of_rows = (parts for one in found for parts in _parts_of_rows(site, one))
        of_groups = itertools.chain(of_rows, _parts_of_groups(site, root))
        tried += [partial(_bound_of_groups, site, builder, *one) for one in itertools.islice(of_groups, _CANDIDATES)]
        further = (
            parts for region in regions for one in _further_candidates(site, region) for parts in _parts(site, one)
        )
        last = (partial(_bound, site, builder, parts) for parts in itertools.islice(further, _CANDIDATES))
        try:
            rewrite = self.first_bound(builder, tried) or self._bound_if_any(builder, last)
        except Mismatch as miss:
            if (rewrite := self._bound_if_any(builder, last)) is not None:
                return rewrite
            roots = _roots_behind(site, root) if str(miss) == OTHERWISE else []
            reason = next((text for one in roots if (text := _other_deviation(site, one)) is not None), None)
            if reason is None:
                raise
            raise Mismatch(reason) from None
        if rewrite is None and any(_is_recovered(site, region) for region in regions):
            raise Mismatch(_RECOVERED)
        return rewrite

    def _bound_if_any(self, builder: Builder, candidates: Iterable[Callable[[], Rewrite]]) -> Rewrite | None:
        """The first candidate that can be bound; what speaks against the others is no reason to tell."""
        with contextlib.suppress(Mismatch):
            return self.first_bound(builder, candidates)
        return None


def _roots_behind(site: Site, root: ir.Value) -> list[ir.Node]:
    """The square roots that are part of the arithmetic behind a value."""
    found, todo = dict[ir.Node, None](), [root]
    seen = {root}
    for value in todo:
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph or len(todo) > _FAR:
            continue
        if node.op_type == "Sqrt":
            found[node] = None
        new = [one for one in node.inputs if one is not None and is_float(one) and one not in seen]
        seen.update(new)
        todo += new
    return list(found)


def _other_deviation(site: Site, root: ir.Node) -> str | None:
    """What is other than the operator's in the root of a mean of squares, by which a whole tensor is divided."""
    squared = _squared(site, root)
    if squared is None:
        return None
    whole, is_along = squared
    if not any(_is_sum_with(site, node, whole) for node in site.graph):
        return None
    readers = [use.node for use in root.outputs[0].uses() if use.node not in site.unread]
    added = [one for one in readers if one.op_type == "Add" and not one.domain]
    if any(value is not None and site.forms.constant(value) is not None for one in added for value in one.inputs):
        return _ADDED
    return None if is_along else _AXES


def _is_recovered(site: Site, region: normalizing.Region) -> bool:
    """Whether a product is summed of which one factor was divided by a vector over these axes, as by a weight."""
    extents = site.extents(region.root)
    for product in region.products(site):
        for node in (value.producer() for value in product):
            by = node.inputs[1] if node is not None and node.op_type == "Div" and not node.domain else None
            if by is None or site.forms.constant(by) is not None or len(set(product)) == 1:
                continue
            if _is_inner(site, by, region.root, region.axis) and site.extents(by) != extents:
                return True
    return False


def _is_joint(site: Site, node: ir.Node) -> bool:
    """Whether a node sums a Concat of a gradient and its product with something else of its shape."""
    for value in normalizing.summed(site, node):
        concat = _viewed(site, site.first(value))[-1].producer()
        if concat is None or concat.op_type != "Concat" or concat.domain or concat.graph is not site.graph:
            continue
        parts = [_viewed(site, site.first(part))[-1] for part in concat.inputs if part is not None and is_float(part)]
        for one, other in itertools.permutations(dict.fromkeys(parts), 2):
            if site.knows(one) and one in normalizing.factors(
                site, other, partial(normalizing.is_whole, site, root=one)
            ):
                return True
    return False


def _squared(site: Site, root: ir.Node) -> tuple[ir.Value, bool] | None:
    """The tensor whose squares a root is of, and whether they are added along axes that an operator has."""
    todo = [value for value in root.inputs if value is not None]
    for value in todo:
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph or len(todo) > _NEAR:
            continue
        summed = node.inputs[0] if node.op_type in normalizing.REDUCTIONS else None
        above = None if summed is None else site.first(summed).producer()
        if summed is not None and above is not None and site.knows(summed) and site.knows(value):
            squares = above.op_type == "Pow" or (above.op_type == "Mul" and above.inputs[0] is above.inputs[1])
            if squares and not above.domain and above.inputs[0] is not None:
                whole = site.extents(summed)
                left = [size for size in site.extents(value) if size != UNIT]
                of_channels = not left or left in ([whole[-1]], whole[1:2])
                return site.first(above.inputs[0]), of_channels or _first_summed(site, value, summed) is not None
        todo += [v for v in normalizing.operands(site, node) or () if v is not None and v not in todo]
    return None


def _is_sum_with(site: Site, node: ir.Node, whole: ir.Value) -> bool:
    """Whether a node adds up a product of a tensor and another one of its shape, which is not computed from it."""
    summed = [site.first(value) for value in normalizing.summed(site, node)]
    if not summed or not site.knows(whole):
        return False
    is_wide = partial(normalizing.is_whole, site, root=whole)
    found = [one for value in summed for one in normalizing.factors(site, value, is_wide)]
    others = [
        one
        for one in (found if len(summed) > 1 else found[1:])
        if one is not whole and not normalizing.is_made_of(site, one, whole)
    ]
    return whole in found and bool(others)


def _may_be_gradient(site: Site, first: ir.Value, second: ir.Value) -> bool:
    """Whether one of two terms of a sum may come through the sums of a normalization, and the other not."""
    return _is_near_sum(site, first) != _is_near_sum(site, second)


def _is_near_sum(site: Site, value: ir.Value) -> bool:
    """Whether arithmetic makes a value of a sum, without sums of tensors of its own shape on the way."""
    todo, seen = [value], {value}
    whole = site.extents(value) if site.knows(value) else []
    for own in todo:
        node = own.producer()
        if node is None or len(todo) > _NEAR:
            continue
        if normalizing.summed(site, node):
            return True
        if node.op_type in ("Add", "Sum", "Sub") and site.knows(own) and site.extents(own) == whole:
            continue
        new = [one for one in normalizing.operands(site, node) or () if one is not None and one not in seen]
        seen.update(new)
        todo += new
    return False


def _of_training(site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
    """The rewrite of an operator of onnxruntime-training, which computes the same."""
    node = root.producer()
    assert node is not None
    count = 5 if node.op_type == _WITH_MEAN else 4
    given, wanted = list(node.inputs[:count]), wanted_outputs(node, count - 2)
    if len(given) < count or None in given or root is not next((v for v in wanted if v is not None), None):
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
    operands = [*inputs[:3], *([] if count == 5 else [None]), *statistics]
    operator, sizes, axis = FuseLayerNormBackwardPass.operator, (whole, inner, inner), first - len(whole)
    rule = "layer-norm-backward"
    return normalizing.of_training(builder, operator, rule, node, inputs, operands, wanted, sizes, axis=axis)


def _regions(site: Site, root: ir.Value) -> Iterator[normalizing.Region]:
    """The arithmetic behind a value, for each number of axes that it sums over."""
    whole = partial(normalizing.is_whole, site, root=root)
    reduced: dict[int, list[tuple[ir.Value, ...]]] = {}
    found = dict(normalizing.arithmetic(site, root))
    for value, node in found.items():
        summed = tuple(_unviewed(site, one, whole) for one in normalizing.summed(site, node))
        if summed and all(map(whole, summed)):
            first = _first_summed(site, value, root)
            if first is not None:
                reduced.setdefault(first, []).append(summed)
    nodes = frozenset(found.values())
    for first, sums in reduced.items():
        mean = partial(_is_of_rows, site, root=root, first=first)
        pairs = {value: normalizing.difference(site, value, whole, mean) for value in found if value is not root}
        centred = {value: pair for value, pair in pairs.items() if pair is not None}
        yield normalizing.Region(root, first, nodes, tuple(dict.fromkeys(sums)), centred)


def _unviewed(site: Site, value: ir.Value, is_whole: Callable[[ir.Value], bool]) -> ir.Value:
    """The whole tensor of which a value is a view, or the value."""
    found = site.first(value)
    return found if is_whole(found) else next(filter(is_whole, _viewed(site, found)), found)


def _first_summed(site: Site, total: ir.Value, root: ir.Value) -> int | None:
    """The first of the last axes that a whole tensor was summed over; None where others were."""
    if not site.knows(total):
        return None
    whole, left = site.extents(root), site.extents(total)
    if left == whole[: len(left)] and len(left) < len(whole):
        return len(left)
    firsts = range(len(whole) - 1, -1, -1)
    if left == whole:
        # A product with a whole matrix of ones has each sum once for each of its columns.
        return next((k for k in reversed(firsts) if _is_repeated(site, total, k)), None)
    found = next((k for k in firsts if left == [*whole[:k], *(UNIT for _ in whole[k:])]), None)
    if found is None and left[-1:] == [UNIT]:
        # What was summed is a view, as the rows of a matrix, or an image with a channel for each row.
        rows = site.algebra.product(left)
        found = next((k for k in firsts if k and site.algebra.product(whole[:k]) == rows), None)
    return found


def _is_repeated(site: Site, value: ir.Value, first: int) -> bool:
    """Whether a value has the same element at each place of the axes from the first one on."""
    form = site.forms.get(value)
    if form is None:
        return False
    along = {v for axis in range(first, len(form.groups)) for v in form.variables(axis)}
    return bool(along) and along.isdisjoint(site.algebra.free(form.poly))


def _is_of_rows(site: Site, value: ir.Value, root: ir.Value, first: int) -> bool:
    """Whether a value has one element a row, and all dimensions; or has it at each place of the row."""
    if not is_float(value) or not site.knows(value):
        return False
    whole, extents = site.extents(root), site.extents(value)
    if extents == whole:
        return _is_repeated(site, value, first)
    return extents == [*whole[:first], *(UNIT for _ in whole[first:])]


def _one_a_row(site: Site, builder: Builder, value: ir.Value, first: int) -> ir.Value:
    """A statistic in float32, with one element a row."""
    value, extents = builder.cast(value, ir.DataType.FLOAT), site.extents(value)
    axes = [axis for axis in range(first, len(extents)) if extents[axis] != UNIT]
    if not axes:
        return value
    rows = [*extents[:first], *(UNIT for _ in extents[first:])]
    ends = [builder.ints(numbers) for numbers in ([0] * len(axes), [1] * len(axes), axes)]
    return builder.op("Slice", [value, *ends], ir.DataType.FLOAT, rows)


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

    region: normalizing.Region
    gradient: ir.Value
    x: ir.Value
    mean: ir.Value | None


def _candidates(site: Site, region: normalizing.Region) -> Iterator[_Candidate]:
    products = region.products(site)
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
                own = (_before_cast(gradient, region.root), _before_cast(x, region.root))
                yield _Candidate(region, *own, mean)


def _further_candidates(site: Site, region: normalizing.Region) -> Iterator[_Candidate]:
    """Those whose difference from the mean is formed of multiples by the deviation, x r - m r, or not at all."""
    is_wide = partial(normalizing.is_whole, site, root=region.root)
    scaled = {data: normalizing.factors(site, x, is_wide)[1:] for data, (x, _) in region.centred.items()}
    products = region.products(site)
    for product in products:
        for data, gradient in itertools.permutations(dict.fromkeys(product), 2):
            if not any(gradient in other and data not in other for other in products):
                continue
            for x in (data, *scaled.get(data, ())):
                own = (_before_cast(gradient, region.root), _before_cast(x, region.root))
                yield from (_Candidate(region, *own, one) for one in _means_beside(site, region, gradient))


def _means_beside(site: Site, region: normalizing.Region, gradient: ir.Value) -> list[ir.Value]:
    """The numbers for each row of which one may be the mean, where no difference from it is formed.

    The gradient may be written as g r + a x + b, with two numbers for each row in which the mean is a factor.
    """
    read = (v for node in region.nodes for v in normalizing.operands(site, node) or () if v is not None)
    is_of_rows = partial(_is_of_rows, site, root=region.root, first=region.axis)
    found = [v for v in dict.fromkeys(read) if is_of_rows(v) and not normalizing.is_made_of(site, v, gradient)]
    return found if len(found) <= _ROWS else []


def _before_cast(value: ir.Value, root: ir.Value) -> ir.Value:
    """A value before it was widened, if it had the type of the root then."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" and not node.domain else None
    return value if source is None or source.dtype != root.dtype or value.dtype == root.dtype else source


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
    root, first = one.region.root, one.region.axis
    is_of_rows = partial(_is_of_rows, site, root=root, first=first)
    is_inner = partial(_is_inner, site, root=root, first=first)
    # Any per-row number serves as the mean; a reader of several forms of the mean of x asks to expand them.
    for own_mean in [[]] if one.mean is None else [[one.mean], []]:
        stops = [one.gradient, one.x, *own_mean]
        try:
            vectors = normalizing.vectors(site, root, stops, lambda value: is_of_rows(value) or is_inner(value))
        except Mismatch:
            continue
        rows = [value for value in vectors if is_of_rows(value)]
        inner = [value for value in vectors if not is_of_rows(value)]
        if len(inner) > 1:
            continue
        weight = next(iter(inner), None)
        cut = any(normalizing.is_cut(site, value) for value in rows)
        ways = [(value, True, cut) for value in rows]
        ways += [(value, False, cut) for value in rows if normalizing.is_root(value)]
        if len(rows) == 1:
            yield from (_Parts(one, (*stops, *rows, *inner), *way, weight) for way in ways)
        if len(rows) > 1 or any(normalizing.is_made_of(site, value, one.x) for value in rows):
            # Differentiating node by node leaves the deviation in several forms, not all of which need be values.
            yield from (_Parts(one, (*stops, *inner), *way, weight) for way in ways if len(rows) <= _ROWS)


def _parts_of_rows(site: Site, one: _Candidate) -> Iterator[tuple[_Parts, int]]:
    """The parts of a normalization with a weight for each row, as of channels that were made rows.

    With them the axis that the sums begin at.
    """
    if one.mean is None:
        return
    is_of_rows = partial(_is_of_rows, site, root=one.region.root, first=one.region.axis)
    stops = (one.gradient, one.x, one.mean)
    try:
        vectors = normalizing.vectors(site, one.region.root, stops, is_of_rows)
    except Mismatch:
        return
    for deviation, weight in itertools.permutations(vectors) if len(vectors) == 2 else ():
        for own in (stops, stops[:2]):
            yield _Parts(one, (*own, *vectors), deviation, True, False, weight), one.region.axis


def _bound(site: Site, builder: Builder, parts: _Parts) -> Rewrite:
    one, root = parts.candidate, parts.candidate.region.root
    values = [one.gradient, one.x, *([] if parts.weight is None else [parts.weight])]
    statistics = [value for value in (one.mean, parts.deviation) if value is not None]
    is_float32 = all(value.dtype in (root.dtype, ir.DataType.FLOAT) for value in statistics)
    if root.dtype not in TOLERANCE or not is_float32 or any(value.dtype != root.dtype for value in values):
        raise Mismatch("it is computed of tensors of several types")
    definition = _definition(site, parts)
    try:
        require_same(site, root, definition.grad_input, definition.root)
    except Mismatch:
        if parts.is_cut:
            raise Mismatch(normalizing.CUT) from None
        unbiased = _definition(site, parts, less=1)
        if unbiased.root.close_to(unbiased.grad_input, 8 * TOLERANCE[root.dtype]):
            raise Mismatch(_UNBIASED) from None
        raise
    return _rewrite(site, builder, parts, definition)


def _parts_of_groups(site: Site, root: ir.Value) -> Iterator[tuple[_Parts, int]]:
    """The parts of a group normalization, whose sums over each channel are multiplied with its weight, and added up.

    With them the axis that those sums begin at.
    """
    found = dict(normalizing.arithmetic(site, root))
    is_wide = partial(normalizing.is_whole, site, root=root)
    read = dict.fromkeys(v for node in found.values() for v in normalizing.operands(site, node) or () if v is not None)
    wholes = [v for v in read if is_wide(v) and (v not in found or found[v].op_type in normalizing.VIEWS)]
    whole = site.extents(root)
    rows = {k: [v for v in found if _is_of_rows(site, v, root, k)] for k in range(1, len(whole) - 1)}
    if not any(rows.values()):
        return
    for channel, (gradient, x) in itertools.product(range(2, len(whole)), itertools.permutations(wholes, 2)):
        channels = [*whole[:channel], *(UNIT for _ in whole[channel:])]
        stops = [*_viewed(site, gradient), *_viewed(site, x)]
        for first in range(channel - 1, 0, -1):
            is_of_rows = partial(_is_of_rows, site, root=root, first=first)

            def is_vector(
                value: ir.Value, channels: list[Poly] = channels, is_of_rows: Callable[[ir.Value], bool] = is_of_rows
            ) -> bool:
                known = is_float(value) and site.knows(value) and len(site.extents(value)) == len(whole)
                fits = known and all(size in (UNIT, n) for size, n in zip(site.extents(value), channels, strict=True))
                return fits or is_of_rows(value)

            for mean in (value for value in rows[first] if not normalizing.is_made_of(site, value, stops[0])):
                try:
                    vectors = normalizing.vectors(site, root, [*stops, *_viewed(site, mean)], is_vector)
                except Mismatch:
                    continue
                weights = [value for value in vectors if not is_of_rows(value)]
                if len(weights) > 1 or len(vectors) - len(weights) != 1:
                    continue
                (deviation,) = (value for value in vectors if value not in weights)
                one = _Candidate(normalizing.Region(root, first, frozenset(), (), {}), gradient, x, mean)
                weight = next(iter(weights), None)
                # Where the mean of x is several values, it is read in x.
                for own in ([mean], []):
                    behind = [_viewed(site, value)[-1] for value in (gradient, x, *own, deviation, *weights)]
                    yield _Parts(one, tuple(behind), deviation, is_inverse=True, is_cut=False, weight=weight), channel


def _viewed(site: Site, value: ir.Value) -> list[ir.Value]:
    """A value and what it is a view of, the nearest first."""
    found = [value]
    while (node := found[-1].producer()) is not None and node.op_type in normalizing.VIEWS and not node.domain:
        if node.inputs[0] is None or not site.knows(node.inputs[0]) or node.op_type in ("Cast", "Expand", "Tile"):
            break
        found.append(site.first(node.inputs[0]))
    return found


def _bound_of_groups(site: Site, builder: Builder, parts: _Parts, channel: int) -> Rewrite:
    one, sources = parts.candidate, parts.sources
    root, first = one.region.root, one.region.axis
    if root.dtype not in TOLERANCE or any(value.dtype != root.dtype for value in sources) or one.mean is None:
        raise Mismatch("it is computed of tensors of several types")
    definition = _definition(site, parts, channel)
    require_same(site, root, definition.grad_input, definition.root)
    extents = site.extents(root)
    through = one.gradient
    if parts.weight is not None:
        through = builder.op("Mul", [through, parts.weight], root.dtype, extents)
    statistics = [_one_a_row(site, builder, value, first) for value in (one.mean, parts.deviation)]
    fused, _ = normalizing.fused_with_sums(
        *(site, builder, FuseLayerNormBackwardPass.operator, [through, one.x, None, *statistics]),
        *(extents, extents[first:], [None, None]),
        axis=first - len(extents),
    )
    given = _chosen_freely(site, root, sources, first)
    return replace(builder.rewrite("group-norm-backward", [fused], fused), frontier=given)


@dataclass(frozen=True)
class _Definition:
    """What the operator computes of some values, over the variables of the whole tensors, and what the root is."""

    root: Poly
    grad_input: Poly
    grad_weight: Poly
    grad_bias: Poly
    inner: tuple[int, ...]


def _definition(site: Site, parts: _Parts, channel: int | None = None, *, less: int = 0) -> _Definition:
    """What the operator computes. Sums over the axes from the channel on come before those over all normalized axes."""
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
    before = sum(len(group) for group in groups[: one.region.axis])
    inner = {v: size for v, size in sizes.items() if v >= before}
    share = algebra.power(algebra.product(inner.values()), -1)
    m = others[0] if one.mean is not None else None
    w = others[-1:] if weight is not None else []
    y = algebra.mul(r, data if m is None else data - m)

    own = sum(len(group) for group in groups[: one.region.axis if channel is None else channel])

    def mean(poly: Poly) -> Poly:
        of_channels = algebra.sum(poly, {v: size for v, size in inner.items() if v >= own}, sizes)
        return algebra.mul(share, algebra.sum(of_channels, {v: n for v, n in inner.items() if v < own}, sizes))

    through = algebra.product([*w, g])
    count = algebra.product(inner.values())
    of_variance = algebra.mul(count, algebra.power(count - number(less), -1)) if less else UNIT
    inside = through - algebra.product([of_variance, y, mean(algebra.mul(through, y))])
    if m is not None:
        inside = inside - mean(through)
    outer = {v: size for v, size in sizes.items() if v < before}
    grad_weight = algebra.sum(algebra.mul(g, y), outer, sizes)
    grad_bias = algebra.sum(g, outer, sizes)
    return _Definition(p, algebra.mul(r, inside), grad_weight, grad_bias, tuple(inner))


def _rewrite(site: Site, builder: Builder, parts: _Parts, definition: _Definition) -> Rewrite:
    one, sources, weight = parts.candidate, parts.sources, parts.weight
    root, first = one.region.root, one.region.axis
    extents = site.extents(root)
    inner = extents[first:]
    sums = _sums(site, one, sources, definition)
    rstd = _one_a_row(site, builder, parts.deviation, first)
    if not parts.is_inverse:
        rstd = builder.op("Reciprocal", [rstd], ir.DataType.FLOAT, site.extents(rstd))
    inputs = [
        one.gradient,
        one.x,
        None if weight is None else builder.reshape(weight, inner),
        None if one.mean is None else _one_a_row(site, builder, one.mean, first),
        rstd,
    ]
    operator, axis = FuseLayerNormBackwardPass.operator, first - len(extents)
    fused, others = normalizing.fused_with_sums(site, builder, operator, inputs, extents, inner, sums, axis=axis)
    rule = "rms-norm-backward" if one.mean is None else "layer-norm-backward"
    given = _chosen_freely(site, root, sources, first)
    return replace(builder.rewrite(rule, [fused], fused), frontier=given, others=others)


def _chosen_freely(site: Site, root: ir.Value, sources: Sequence[ir.Value], first: int) -> tuple[ir.Value, ...]:
    """Those of the sources that may be any numbers: not a statistic that is the same at each place of a row."""
    whole = site.extents(root)
    return tuple(v for v in sources if site.extents(v) != whole or not _is_repeated(site, v, first))


def _sums(site: Site, one: _Candidate, sources: Sequence[ir.Value], definition: _Definition) -> list[ir.Value | None]:
    """The gradients of weight and bias, if anything other than the gradient of the input reads them."""
    region = one.region
    products = new = [one.gradient]
    for _ in range(_STEPS):
        new = site.read_by(new, {"Mul"} | normalizing.VIEWS)
        products = [*dict.fromkeys([*products, *new])]
    reduced = site.read_by(products, normalizing.REDUCTIONS | normalizing.PRODUCTS)
    values = [*reduced, *site.read_by(reduced, normalizing.VIEWS)]
    names = {v: site.algebra.var(k) for k, v in enumerate(definition.inner)}
    wanted = [site.algebra.substitute(one, names) for one in (definition.grad_weight, definition.grad_bias)]
    is_inner = partial(_is_inner, site, root=region.root, first=region.axis)
    return normalizing.sums(site, region, sources, values, wanted, is_inner)
