"""CrossEntropyLossGrad: ``p q - [c = y] q`` by rows, p the softmax, q a factor of the row, and smoothing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops.operator import NOTHING_IGNORED
from gradfuse.passes.algebra import UNIT, ZERO, Algebra, Atom, Poly, TooComplex, number
from gradfuse.passes.matching import (
    TOLERANCE,
    VIEWS,
    Builder,
    FusePass,
    Mismatch,
    Rewrite,
    Site,
    find_mask,
    flattened_softmaxes,
    materialise,
    names_of,
    require_same,
    softmaxes,
)
from gradfuse.passes.reading import Form
from gradfuse.passes.report import NearMiss

_OF_AXES = (
    "its classes are several axes together, as a softmax up to default opset 12 has them, and the rule reads those "
    "of one"
)
_NO_ONE_HOT = (
    "the backward of a log-softmax, but nothing shows that what comes into it is a one-hot of class indices, which the "
    "operator takes: probability targets, a one-hot that is an input, or another loss"
)
_PICKED = (
    "the backward of a log-softmax whose elements are picked by an index, but nothing shows that it picks one class of "
    "each row: sizes of inputs that may differ, a mask, or several targets of a row"
)


@dataclass(frozen=True)
class _Loss:
    """A gradient read as p T + R with R = a [j = target] + b."""

    softmax: Poly
    classes: int  # the variable of the classes
    target: Poly
    ignore_index: int
    ending: tuple[int, Poly] | None  # the row and the number of targets, where there may be fewer of them than rows
    masks: tuple[Poly, ...]  # conditions on the row, each of which makes it count for nothing
    weight: Poly | None  # an element of the weights, by the variable of the classes
    parts: tuple[tuple[float, Poly], ...]
    """(label_smoothing, factor of the rows that count, without weight) of each op: one, but two where the one-hot and
    the smoothing term have factors that are not proportional."""


class FuseCrossEntropyLossGradPass(FusePass):
    """Finds, in a value P, a softmax p along j with

    1. P = p T + R, T free of j and T = -sum_j R;
    2. R = a [j = t] + b w[j], t from an integer tensor or the number of the row, b / a constant (label smoothing), w
       one or a tensor;
    3. [t = i] makes a zero: i is the ignore_index; so does [row < n], where t has n elements: t is padded with i; so do
       other conditions on the row: there t is replaced by i, as what they leave out may be infinite.

    The operator refuses a target that is not a class, so rules assume that t is one.

    The reduction is read from a alone: "mean" where it has the inverse of the number (or weight) of the rows that
    count, "sum" where it depends on no row, else "none" with a as the gradient of each row's loss.
    """

    operator = "CrossEntropyLossGrad"
    refuses_no_class = True
    training_operators = (
        "SoftmaxCrossEntropyLossGrad",
        "SoftmaxCrossEntropyLossInternalGrad",
        "SparseSoftmaxCrossEntropyGrad",
        "SoftmaxCrossEntropyGrad",
        "LogSoftmaxGrad",
        "LogSoftmaxGrad_13",
    )

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        form = _readable(site.algebra, site.forms.form(root))
        candidates = (
            (*c, ignored) for c in _candidates(site, form) for ignored in _ignored_targets(site.algebra, form, *c)
        )
        return self.first_bound(
            builder, (partial(self._read_and_bound, site, builder, root, form, *c) for c in candidates)
        )

    def possible(self, site: Site, form: Form) -> bool:
        return any(True for _ in _candidates(site, _readable(site.algebra, form)))

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Other losses on a log-softmax: p T + R with T = -sum(R), but R is not a [j = target] + b."""
        algebra = site.algebra
        for node in site.graph:
            if node.op_type == "Sub" and not node.domain and any(v in flattened_softmaxes(site) for v in node.inputs):
                forms = [site.forms.get(value) for value in node.inputs if value is not None]
                if any(a.kind == "eq" for form in forms if form is not None for a in _atoms(algebra, form.poly)):
                    yield NearMiss(names_of([node])[0], self.operator, _OF_AXES)
                    continue
            if node.domain == custom_ops.DOMAIN or (node.op_type in VIEWS and node.domain == ""):
                continue
            for value in node.outputs:
                form = site.forms.get(value) if value in site.position and value.dtype in TOLERANCE else None
                if form is None or len(form.poly) < 2:
                    continue
                for p, j in softmaxes(algebra, form.poly, range(len(form.sizes))):
                    (powers,) = (dict(m) for m in p.terms)
                    with_p = {m: c for m, c in form.poly.terms.items() if powers.items() <= dict(m).items()}
                    rest = Poly({m: c for m, c in form.poly.terms.items() if m not in with_p})
                    total = algebra.divide_monomial(Poly(with_p), next(iter(p.terms)))
                    if not rest or not total or j in algebra.free(total) or _has_one_hot(algebra, rest, j):
                        continue
                    sizes = dict(enumerate(form.sizes))
                    if not (total + algebra.sum(rest, {j: sizes[j]}, sizes)):
                        reason = _PICKED if _has_picks(algebra, rest, j) else _NO_ONE_HOT
                        yield NearMiss(names_of([node])[0], self.operator, reason)
                        break

    def _read_and_bound(
        self,
        site: Site,
        builder: Builder,
        root: ir.Value,
        form: Form,
        p: Poly,
        j: int,
        rest: Poly,
        ignored: tuple[int, Atom] | None,
    ) -> Rewrite:
        _, target = _hit(site.algebra, form, rest, j)
        classes = form.sizes[j]
        assume = partial(_assuming_class, site.algebra, target=target, classes=classes)
        wraps = _wrapped(site.algebra, rest, j, target + classes)
        form, rest = Form(form.groups, assume(form.poly, wraps=wraps)), assume(rest, wraps=wraps)
        loss = _read(site.algebra, form, p, j, rest, ignored, masked=True)
        if loss.masks:
            try:
                return self._bound(site, builder, root, form, loss)
            except Mismatch:
                # Where a mask is no value of the graph, its product with the gradient may be.
                builder.discard()
                loss = _read(site.algebra, form, p, j, rest, ignored, masked=False)
        return self._bound(site, builder, root, form, loss)

    def _bound(self, site: Site, builder: Builder, root: ir.Value, form: Form, loss: _Loss) -> Rewrite:
        algebra = site.algebra
        assert root.dtype is not None
        signed = loss.ignore_index == NOTHING_IGNORED
        if not loss.masks and algebra.tested_outside(loss.target, form.sizes[loss.classes], signed=signed):
            raise Mismatch("the graph tests its target for a number that is no class; here it is not ignored")
        sizes = dict(enumerate(form.sizes))
        rows = [v for v in sizes if v != loss.classes]
        reductions = [_reduction(algebra, form, loss, factor, rows) for _, factor in loss.parts]
        expected = ZERO
        for (smoothing, _), (reduction, gradient) in zip(loss.parts, reductions, strict=True):
            expected = expected + _definition(algebra, form, loss, smoothing, reduction, gradient)
        require_same(site, root, expected, form.poly)

        shared = [
            self._log_prob(site, builder, root, form, loss, rows),
            self._masked_target(site, builder, root, loss, rows, sizes),
        ]
        if loss.weight is not None:
            shared.append(self._weight(site, builder, root, loss, sizes))
        extents = [algebra.product(sizes[v] for v in rows), sizes[loss.classes]]
        results = []
        for (smoothing, _), (reduction, gradient) in zip(loss.parts, reductions, strict=True):
            by_row = rows if reduction == "none" else []
            grad = self._gradient(site, builder, root, loss, gradient, by_row, sizes)
            results.append(
                builder.fused(
                    self.operator,
                    [grad, *shared],
                    extents,
                    reduction=reduction,
                    ignore_index=loss.ignore_index,
                    label_smoothing=float(np.float32(smoothing)),
                    lse_square_scale_for_zloss=0.0,
                )
            )
        total = results[0] if len(results) == 1 else builder.op("Add", results, root.dtype, extents)
        shape = [list(form.variables(a)) for a in range(len(form.groups))]
        output = builder.arrange(total, [*rows, loss.classes], shape, sizes)
        return builder.rewrite("cross-entropy-backward", results, output)

    def _gradient(
        self,
        site: Site,
        builder: Builder,
        root: ir.Value,
        loss: _Loss,
        gradient: Poly,
        by_row: list[int],
        sizes: Mapping[int, Poly],
    ) -> ir.Value:
        """The gradient of the loss, or of each row's; its values for ignored rows do not matter."""
        assert root.dtype is not None
        layout = [by_row] if by_row else []
        before = len(builder.nodes)
        try:
            return materialise(builder, gradient, by_row, sizes, root.dtype, layout)
        except Mismatch:
            builder.discard(before)
            counted = site.algebra.mul(gradient, _counts(site.algebra, loss))
            if not by_row or counted == gradient:
                raise
            return materialise(builder, counted, by_row, sizes, root.dtype, layout)

    def _masked_target(
        self, site: Site, builder: Builder, root: ir.Value, loss: _Loss, rows: list[int], sizes: Mapping[int, Poly]
    ) -> ir.Value:
        """The target, and ignore_index where a mask holds."""
        target = self._target(site, builder, root, loss, rows, sizes)
        if not loss.masks:
            return target
        extents = [sizes[v] for v in rows]
        target = builder.reshape(target, extents)
        ignored = builder.constant(np.asarray(loss.ignore_index), ir.DataType.INT64)
        for mask in loss.masks:
            free = site.algebra.free(mask)
            found = find_mask(builder, mask, sorted(free), sizes, [[v] if v in free else [] for v in rows])
            target = builder.op("Where", [found, ignored, target], ir.DataType.INT64, extents)
        return builder.reshape(target, [site.algebra.product(extents)])

    def _target(
        self, site: Site, builder: Builder, root: ir.Value, loss: _Loss, rows: list[int], sizes: Mapping[int, Poly]
    ) -> ir.Value:
        integers = [ir.DataType.INT64, ir.DataType.INT32]
        own = dict(sizes)
        if loss.ending is not None:
            row, end = loss.ending
            own[row] = end
        found = site.find_turned(loss.target, rows, own, root, dtypes=integers)
        if found is None or found[2] != 1.0:
            return self._counted_target(site, builder, loss, rows, sizes)
        value, order = builder.cast(found[0], ir.DataType.INT64), found[1]
        if loss.ending is None:
            return builder.arrange(value, order, [rows], sizes)
        if order != tuple(rows):
            raise Mismatch("its targets, of fewer rows than there are, are transposed")
        value = builder.reshape(value, [own[v] for v in rows])
        missing = builder.op("Sub", [builder.shape([sizes[row]]), builder.shape([end])], ir.DataType.INT64, [UNIT])
        zeros, after = [0] * len(rows), len(rows) - 1 - rows.index(row)
        parts = [
            builder.ints(zeros + zeros[: rows.index(row)]),
            missing,
            *([builder.ints([0] * after)] if after else []),
        ]
        pads = builder.op("Concat", parts, ir.DataType.INT64, [number(2 * len(rows))], axis=0)
        blank = builder.constant(np.asarray(loss.ignore_index), ir.DataType.INT64)
        value = builder.op("Pad", [value, pads, blank], ir.DataType.INT64, [sizes[v] for v in rows])
        return builder.arrange(value, rows, [rows], sizes)

    def _counted_target(
        self, site: Site, builder: Builder, loss: _Loss, rows: list[int], sizes: Mapping[int, Poly]
    ) -> ir.Value:
        """One class for all rows, or as many as there are rows along a dimension, one after the other."""
        own = [v for v in rows if v in site.algebra.free(loss.target)]
        start = (loss.target - sum((site.algebra.var(v) for v in own), ZERO)).integer
        if start is None or len(own) > 1:
            raise Mismatch("the target is no integer value of the graph")
        target = builder.arange(start, sizes[own[0]]) if own else builder.constant(np.asarray(start), ir.DataType.INT64)
        return builder.arrange(target, own, [rows], sizes)

    def _weight(self, site: Site, builder: Builder, root: ir.Value, loss: _Loss, sizes: Mapping[int, Poly]) -> ir.Value:
        assert loss.weight is not None
        weight = site.algebra.substitute(loss.weight, {loss.classes: site.algebra.var(0)})
        size = [sizes[loss.classes]]
        found = site.find(weight, size, root, dtypes=[ir.DataType.FLOAT, root.dtype], shape=size)
        if found is None or found[1] != 1.0:
            raise Mismatch("the weights are no value of the graph")
        return builder.cast(builder.reshape(found[0], size), ir.DataType.FLOAT)

    def _log_prob(
        self, site: Site, builder: Builder, root: ir.Value, form: Form, loss: _Loss, rows: list[int]
    ) -> ir.Value:
        sizes = dict(enumerate(form.sizes))
        found = site.find_turned(site.algebra.log(loss.softmax), [*sizes], sizes, root, dtypes=[root.dtype])
        if found is None or found[2] != 1.0:
            found = self._log_softmax(site, builder, root, form, loss), tuple(sizes), 1.0
        value, order, _ = found
        return builder.arrange(value, order, [rows, [loss.classes]], sizes)

    def _log_softmax(self, site: Site, builder: Builder, root: ir.Value, form: Form, loss: _Loss) -> ir.Value:
        """log p from the logits, where the graph has no value of it."""
        (p,) = loss.softmax.terms
        along = tuple((a, e) for a, e in p if loss.classes in site.algebra.atoms[a].free)
        logits = site.algebra.log(Poly({along: 1.0}))
        assert root.dtype is not None
        cast = root.producer()
        if cast is not None and cast.op_type == "Cast":
            raise Mismatch("the log-probabilities are of another type; so is what is cast to it")
        sizes = dict(enumerate(form.sizes))
        found = site.find_turned(logits, [*sizes], sizes, root, dtypes=[root.dtype], shape=site.extents(root))
        axis = next((a for a in range(len(form.groups)) if list(form.variables(a)) == [loss.classes]), None)
        if found is None or found[2] != 1.0 or axis is None:
            raise Mismatch("neither the log-probabilities nor the logits are values of its type")
        layout = [list(form.variables(a)) for a in range(len(form.groups))]
        value = builder.arrange(found[0], found[1], layout, sizes)
        return builder.op("LogSoftmax", [value], root.dtype, site.extents(root), axis=axis)


def _candidates(site: Site, form: Form) -> Iterator[tuple[Poly, int, Poly]]:
    """Each softmax p along j with R of P = p T + R."""
    for p, j in softmaxes(site.algebra, form.poly, range(len(form.sizes))):
        if (rest := _rest(site.algebra, form, p, j)) is not None:
            yield p, j, rest


def _readable(algebra: Algebra, form: Form) -> Form:
    return _without_ignored_hits(algebra, _without_flat_indices(algebra, _without_two_sides(algebra, form)))


def _without_two_sides(algebra: Algebra, form: Form) -> Form:
    """The form with [x = 0] for 1 - [x < 0] - [-x < 0], as triangles of ones and pairs of comparisons write it."""
    poly = form.poly
    below = {a.args[0].key: a for a in _atoms(algebra, poly) if a.kind == "lt" and algebra.is_integer(a.args[0])}
    for atom in list(below.values()):
        other = below.get((-atom.args[0]).key)
        if other is None or other.id <= atom.id:
            continue
        result = ZERO
        for monomial, c in poly.terms.items():
            own = dict(monomial)
            if other.id not in own:
                result = result + Poly({monomial: c})
            elif atom.id not in own:
                del own[other.id]
                outside = UNIT - algebra.of(atom) - algebra.equal_zero(atom.args[0])
                result = result + algebra.mul(Poly({tuple(own.items()): c}), outside)
        poly = result
    return Form(form.groups, poly)


def _without_flat_indices(algebra: Algebra, form: Form) -> Form:
    """The form with [j = t[v]] u[v] for sum_i [C v + j = C i + t[i]] u[i], as t is below the number C of classes.

    Rows of several dimensions, v and w, have one number as well: n v + w, where w is below n.

    Elements of a matrix are picked by one index, and that is what their gradients are scattered by.
    """
    single: dict[int, Poly] = {}
    for atom in _atoms(algebra, form.poly):
        if atom.kind == "sum" and (found := _at_one_row(algebra, form, atom)) is not None:
            single[atom.id] = found
    if not single:
        return form
    result = ZERO
    for monomial, c in form.poly.terms.items():
        factors = (single.get(a, algebra.of(algebra.atoms[a])) for a, _ in monomial)
        powers = (algebra.power(factor, e) for factor, (_, e) in zip(factors, monomial, strict=True))
        result = result + algebra.product(powers).scaled(c)
    return Form(form.groups, result)


def _at_one_row(algebra: Algebra, form: Form, atom: Atom) -> Poly | None:
    """A sum over rows with a condition that only the row of the element fulfils; None for other sums."""
    sizes, bound = form.sizes, algebra.fresh(len(atom.args[0]))
    summand = algebra.opened(atom, bound)
    for condition in _atoms(algebra, summand):
        if not condition.free & set(bound) or condition.kind not in ("eq", "inside"):
            continue
        for j, classes in enumerate(sizes):
            index = condition.args[0] if condition.kind == "inside" else algebra.solve(condition, j)
            if index is None or (condition.kind == "inside" and condition.args[1] != classes):
                continue
            others = [v for v in condition.free if v != j and 0 <= v < len(sizes)]
            for rows in itertools.permutations(others, len(bound)):
                for own in itertools.permutations(bound):
                    if [sizes[v] for v in rows] != [atom.args[0][bound.index(w)] for w in own]:
                        continue
                    target, stride = index, classes
                    for v, w in zip(reversed(rows), reversed(own), strict=True):
                        target = target + algebra.mul(stride, algebra.var(v) - algebra.var(w))
                        stride = algebra.mul(stride, sizes[v])
                    is_class = algebra.tensors(target) and not algebra.has_variable_factor(target)
                    if not is_class or not algebra.free(target) <= set(bound):
                        continue
                    here = {w: algebra.var(v) for v, w in zip(rows, own, strict=True)}
                    hit = UNIT
                    if condition.kind == "eq":
                        hit = algebra.equal_zero(algebra.var(j) - algebra.substitute(target, here))
                    return algebra.mul(hit, algebra.substitute(algebra.given(summand, condition, True), here))
    return None


def _without_ignored_hits(algebra: Algebra, form: Form) -> Form:
    """The form with [j = t] as [j = t] (1 - [t = i]) where t is compared with an i that is no class."""
    poly, sizes = form.poly, dict(enumerate(form.sizes))
    conditions = [a for a in _atoms(algebra, poly) if a.kind == "eq"]
    hits = [(a, v, x) for a in conditions for v in a.free if v >= 0 and (x := algebra.solve(a, v)) is not None]
    for hit, v, target in hits:
        for other in conditions:
            if other is not hit and _is_no_class(algebra, other, target, sizes[v]):
                at = Poly({m: c for m, c in poly.terms.items() if (hit.id, 1) in m})
                poly = poly - at + algebra.mul(at, UNIT - algebra.of(other))
    return Form(form.groups, poly)


def _is_no_class(algebra: Algebra, condition: Atom, target: Poly, classes: Poly) -> bool:
    """Whether a condition says that a target is a number below 0, or not below the number of classes."""
    for sign in (1.0, -1.0):
        value = target - condition.args[0].scaled(sign)
        below, above = value.integer, (value - classes).integer
        if (below is not None and below < 0) or (above is not None and above >= 0):
            return True
    return False


def _rest(algebra: Algebra, form: Form, p: Poly, j: int) -> Poly | None:
    """R of P = p T + R, where T is free of j and R has a condition; None where P is not of that form."""
    (pm,) = p.terms
    powers = dict(pm)
    with_p, rest = {}, {}
    for monomial, c in form.poly.terms.items():
        own = dict(monomial)
        if all(own.get(a) == e for a, e in powers.items()):
            with_p[monomial] = c
        else:
            rest[monomial] = c
    t, r = algebra.divide_monomial(Poly(with_p), pm), Poly(rest)
    if not r or not t or j in algebra.free(t):
        return None
    if not any(a.kind == "eq" for a in _atoms(algebra, r)):
        return None
    return r


def _atoms(algebra: Algebra, poly: Poly) -> Iterator[Atom]:
    for a in sorted({a for monomial in poly.terms for a, _ in monomial}):
        yield algebra.atoms[a]


def _has_one_hot(algebra: Algebra, poly: Poly, j: int) -> bool:
    """Whether a term is there for one j only, so that the rule has its say."""
    return any(atom.kind == "eq" and algebra.solve(atom, j) is not None for atom in _atoms(algebra, poly))


def _has_picks(algebra: Algebra, poly: Poly, j: int) -> bool:
    """Whether a sum adds up what an index puts at some of the classes."""
    sums = (atom for atom in _atoms(algebra, poly) if atom.kind == "sum" and j in atom.free)
    opened = (algebra.opened(atom, algebra.fresh(len(atom.args[0]))) for atom in sums)
    return any(a.kind == "eq" and j in a.free for summand in opened for a in _atoms(algebra, summand))


def _hit(algebra: Algebra, form: Form, r: Poly, j: int) -> tuple[Atom, Poly]:
    """[j = target], and the target: class indices of a tensor, else a class that the number of the row says."""
    hits = [(a, x) for a in _atoms(algebra, r) if a.kind == "eq" and (x := algebra.solve(a, j)) is not None]
    sizes = dict(enumerate(form.sizes))
    hits = [(a, x) for a, x in hits if algebra.tensors(x)] or [
        (a, x) for a, x in hits if algebra.is_count(x) and algebra.inside_proven(x, sizes[j], sizes)
    ]
    if len(hits) == 2:
        # A negative number may count from the end. It is not a class, and the operator refuses it.
        hits = [(a, x) for a, x in hits if _wrapped(algebra, r, j, x + sizes[j])] or hits
    if len(hits) != 1:
        raise Mismatch(f"it has {len(hits) or 'no'} one-hot targets; the operator takes one, of class indices")
    return hits[0]


def _wrapped(algebra: Algebra, r: Poly, j: int, end: Poly) -> bool:
    """Whether there is a one-hot of a target that counts from the end, beside the one of the target itself."""
    return any(a.kind == "eq" and algebra.solve(a, j) == end for a in _atoms(algebra, r))


def _assuming_class(algebra: Algebra, poly: Poly, target: Poly, classes: Poly, wraps: bool) -> Poly:
    """The polynomial where the target is a class; not below 0 either, if that asks whether it counts from the end."""
    poly = algebra.assuming_inside(poly, target, classes)
    if not wraps:
        return poly
    for atom in _atoms(algebra, algebra.less_than_zero(target)):
        poly = algebra.given(poly, atom, False)
    return poly


def _parts(algebra: Algebra, hit: Atom, target: Poly, j: int, r: Poly) -> tuple[Poly, Poly]:
    """R at the target, and elsewhere."""
    on = algebra.given(Poly({m: c for m, c in r.terms.items() if (hit.id, 1) in m}), hit, True)
    off = Poly({m: c for m, c in r.terms.items() if (hit.id, 1) not in m})
    return algebra.substitute(on, {j: target}), off


def _ignored_targets(algebra: Algebra, form: Form, p: Poly, j: int, r: Poly) -> Iterator[tuple[int, Atom] | None]:
    """Numbers i with the condition [t = i] that makes all of a row zero; None where there is no such number."""
    try:
        hit, target = _hit(algebra, form, r, j)
    except Mismatch:
        yield None  # reading it says why
        return
    on, off = _parts(algebra, hit, target, j, r)
    found = False
    for atom in _atoms(algebra, on):
        if atom.kind != "eq":
            continue
        for sign in (1.0, -1.0):
            value = (target - atom.args[0].scaled(sign)).integer
            if value is not None and not any(algebra.mul(algebra.of(atom), part) for part in (on, off)):
                found = True
                yield value, atom
                break
    if not found:
        yield None


def _read(
    algebra: Algebra, form: Form, p: Poly, j: int, r: Poly, ignored: tuple[int, Atom] | None, masked: bool
) -> _Loss:
    hit, target = _hit(algebra, form, r, j)
    on, off = _parts(algebra, hit, target, j, r)
    ignore_index = NOTHING_IGNORED
    if ignored is not None:
        ignore_index, atom = ignored
        on, off = algebra.given(on, atom, False), algebra.given(off, atom, False)

    ending = None
    for atom in _atoms(algebra, on):
        end = algebra.end_of(algebra.of(atom))
        if end is not None and end[0] in algebra.free(target) and _is_factor(atom, on) and _is_factor(atom, off):
            ending = end
            on, off = algebra.given(on, atom, True), algebra.given(off, atom, True)
            break

    masks = []
    for atom in list(_atoms(algebra, on)) if masked else ():
        for case in (False, True) if atom.indicator and atom.free and j not in atom.free else ():
            if not algebra.given(on, atom, case) and not algebra.given(off, atom, case):
                on, off = algebra.given(on, atom, not case), algebra.given(off, atom, not case)
                masks.append(algebra.of(atom) if case else UNIT - algebra.of(atom))
                break

    weight = None
    for atom in _atoms(algebra, on):
        if atom.kind == "tensor" and atom.args[1:] == (target,) and _is_factor(atom, on):
            weight = algebra.tensor(atom.args[0], [algebra.var(j)])
            on = algebra.divide_monomial(on, ((atom.id, 1),))
            break
    if not off:
        return _Loss(p, j, target, ignore_index, ending, tuple(masks), weight, ((0.0, -on),))
    # Smoothing spreads over the classes, in proportion to their weights.
    classes = form.sizes[j].integer
    spread = off if weight is None else algebra.divide_monomial(off, next(iter(weight.terms)))
    if classes is None or j in algebra.free(spread):
        raise Mismatch("it holds more than a one-hot target: target probabilities, or a further loss term")
    ratio = algebra.ratio(spread, on)
    share = None if ratio is None or ratio.constant is None else ratio.constant * classes
    smoothing = 1.0 if share is None or share <= 0 else share / (1.0 + share)
    if smoothing < 1.0:
        parts: tuple[tuple[float, Poly], ...] = ((smoothing, on.scaled(-1.0 / (1.0 - smoothing))),)
    else:
        parts = ((0.0, -on), (1.0, spread.scaled(-classes)))
    return _Loss(p, j, target, ignore_index, ending, tuple(masks), weight, parts)


def _is_factor(atom: Atom, poly: Poly) -> bool:
    return all((atom.id, 1) in m for m in poly.terms)


def _counts(algebra: Algebra, loss: _Loss) -> Poly:
    """1 for rows that count, 0 for ignored ones."""
    present = algebra.product(UNIT - mask for mask in loss.masks)
    if loss.ending is not None:
        row, end = loss.ending
        present = algebra.mul(present, algebra.less_than_zero(algebra.var(row) - end))
    if loss.ignore_index == NOTHING_IGNORED:
        return present
    return algebra.mul(present, UNIT - algebra.equal_zero(loss.target - number(loss.ignore_index)))


def _row_weight(algebra: Algebra, loss: _Loss) -> Poly:
    own = UNIT if loss.weight is None else algebra.substitute(loss.weight, {loss.classes: loss.target})
    return algebra.mul(own, _counts(algebra, loss))


def _mean_divisor(algebra: Algebra, form: Form, loss: _Loss) -> Poly:
    sizes = dict(enumerate(form.sizes))
    rows = {v: s for v, s in sizes.items() if v != loss.classes}
    return algebra.sum(_row_weight(algebra, loss), rows, sizes)


def _reduction(algebra: Algebra, form: Form, loss: _Loss, factor: Poly, rows: list[int]) -> tuple[str, Poly]:
    """The reduction with the simplest gradient of the loss, and that gradient."""
    found: list[tuple[tuple[int, float], str, Poly]] = []
    gradients = {"sum": factor}
    # A single row that may be ignored has no mean.
    with contextlib.suppress(TooComplex):
        inverse = algebra.power(_mean_divisor(algebra, form, loss), -1)
        (m,) = inverse.terms
        gradients = {"mean": algebra.divide_monomial(factor, m).scaled(1 / inverse.terms[m]), **gradients}
    for reduction, gradient in gradients.items():
        if not algebra.free(gradient) & set(rows):
            size = sum(len(monomial) for monomial in gradient.terms)
            constant = gradient.constant
            found.append(((size, 0.0 if constant is None else abs(constant - 1.0)), reduction, gradient))
    if not found:
        return "none", factor
    _, reduction, gradient = min(found, key=lambda f: f[0])
    return reduction, gradient


def _definition(algebra: Algebra, form: Form, loss: _Loss, smoothing: float, reduction: str, gradient: Poly) -> Poly:
    """The op's formula in the values that it is bound to."""
    sizes = dict(enumerate(form.sizes))
    row = algebra.mul(gradient, _counts(algebra, loss))
    if reduction == "mean":
        row = algebra.mul(row, algebra.power(_mean_divisor(algebra, form, loss), -1))
    own = UNIT if loss.weight is None else algebra.substitute(loss.weight, {loss.classes: loss.target})
    every = UNIT if loss.weight is None else loss.weight
    q = algebra.mul(row, own).scaled(1.0 - smoothing)
    classes = form.sizes[loss.classes]
    hit = algebra.equal_zero(algebra.var(loss.classes) - loss.target)
    result = algebra.mul(q, loss.softmax - hit)
    if smoothing:
        s = algebra.mul(row, algebra.power(classes, -1)).scaled(smoothing)
        total = algebra.sum(every, {loss.classes: classes}, sizes)
        result = result + algebra.mul(s, algebra.mul(loss.softmax, total) - every)
    return result
