"""Attention that was found in a graph, as operands of `aclnn::ScaledDotProductAttention` and its backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops.operator import computed_type
from gradfuse.passes.algebra import UNIT, Poly
from gradfuse.passes.matching.attention import NOTHING_BESIDE_ANY, Written, masks
from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.rewrite import Mismatch
from gradfuse.passes.matching.site import Site
from gradfuse.passes.matching.written_softmax import Same
from gradfuse.passes.reading import attribute

_OF_MATRIX = 2
_TO_THE_END = 2
"""The operator's `causal` where the last row sees the last key."""
_LARGEST = 1e3
"""Of numbers that large, scores stay far from a finite one that takes their place."""
_FORWARD = "ScaledDotProductAttention"


@dataclass(frozen=True)
class Matrices:
    """A tensor of matrices, or of their transposes."""

    value: ir.Value
    turned: bool

    @property
    def transposed(self) -> Matrices:
        return Matrices(self.value, not self.turned)


def matrices(value: ir.Value, same: Same = lambda value: value) -> Matrices:
    """Return what a value is but for transpositions of its last two dimensions, and what `same` looks through."""
    turned = False
    while (node := (value := same(value)).producer()) is not None and node.op_type == "Transpose" and not node.domain:
        perm = list(attribute(node, "perm", ()))
        rank = len(perm)
        if perm != [*range(rank - _OF_MATRIX), rank - 1, rank - _OF_MATRIX] or node.inputs[0] is None:
            break
        value, turned = node.inputs[0], not turned
    return Matrices(value, turned)


def source(value: ir.Value, same: Same = lambda value: value) -> ir.Value:
    """Return what a value is a transposition of, through what `same` looks through."""
    while (node := (value := same(value)).producer()) is not None and node.op_type == "Transpose" and not node.domain:
        if node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


class Operands:
    """The inputs and attributes of both operators, for an attention of a graph.

    Raises:
        Mismatch: the operators do not compute it.
    """

    def __init__(self, site: Site, builder: Builder, found: Written) -> None:
        self._site, self._builder = site, builder
        deepest = max((site.extents(v) for v in (found.products.outputs[0], found.softmax[0].outputs[0])), key=len)
        *lead, self._rows, self._keys = deepest
        self._lead: Sequence[Poly] = lead
        batch, heads = ([UNIT, UNIT, *lead] if len(lead) < 1 else [*lead, UNIT] if len(lead) == 1 else lead)[-2:]
        if len(lead) > _OF_MATRIX:
            batch = site.algebra.product(lead[:-1])
        self._heads = [batch, heads]
        key = matrices(found.turned_key, site.first).transposed
        self.query, self.key, self.value = (
            self._by_head(one, what, self._heads)
            for one, what in (
                (matrices(found.query, site.first), "queries"),
                (key, "keys"),
                (matrices(found.value, site.first), "values"),
            )
        )
        if not np.isfinite(np.float32(found.scale)) or not np.float32(found.scale):
            raise Mismatch(f"its scale is {found.scale:.6g}")
        if found.draw is not None:
            raise Mismatch("its probabilities are dropped")
        given = [source(value, site.first) for value in (found.query, found.turned_key, found.value)]
        seen = masks(site.forms, found, NOTHING_BESIDE_ANY)
        self._spreads_nan = seen.may_see_nothing and not found.safe
        self._adds = bool(seen.added)
        if self._spreads_nan and seen.shown and seen.added:
            raise Mismatch("a row may see nothing, by a mask that is added and one that is not")
        given += [value for value, *_ in (*seen.shown, *seen.added)]
        self.given = tuple(given)
        """What is taken from the graph as it is."""
        probabilities = found.softmax[0].outputs[0]
        uses = [use for one in site.copies(probabilities) for use in one.uses()]
        self.runs = frozenset(use.node for use in uses if use.node.op_type == "IsNaN")
        """What the test by numbers runs beside: where rows see nothing."""
        self.within = _LARGEST if any(term.fill is not None for term in found.terms) else math.inf
        """How large the numbers of its test may be."""
        self._scale, self._causal = float(np.float32(found.scale)), seen.causal
        self._mask = self._masked(seen.shown, seen.added, with_triangle=seen.uniform)
        self._sees: ir.Value | None = None
        if seen.uniform:
            self._show_all_where_none()

    def _by_head(self, given: Matrices, what: str, heads: Sequence[Poly]) -> ir.Value:
        """Return a tensor (*, M, N) of the graph as (B, H, M, N)."""
        site, builder = self._site, self._builder
        value = _laid_out(builder, given)
        extents = site.extents(value)
        if site.algebra.product(extents[:-_OF_MATRIX]) != site.algebra.product(heads):
            value, extents = self._repeated(value, what)
        return builder.reshape(value, [*heads, *extents[-_OF_MATRIX:]])

    def _repeated(self, value: ir.Value, what: str) -> tuple[ir.Value, list[Poly]]:
        """Return a tensor for each head, of one that a product repeats for some of them, and its sizes."""
        extents = self._site.extents(value)
        own = [UNIT] * (len(self._lead) + _OF_MATRIX - len(extents)) + extents
        fits = len(own) == len(self._lead) + _OF_MATRIX
        if not fits or any(one not in (size, UNIT) for one, size in zip(own, self._lead, strict=False)):
            raise Mismatch(f"its {what} are shared by heads or by items of the batch")
        sizes = [*self._lead, *own[-_OF_MATRIX:]]
        return self._builder.op("Expand", [value, self._builder.shape(sizes)], value.dtype, sizes), sizes

    def forward(self) -> tuple[ir.Value, ir.Value]:
        """Return the output and the logsumexp of the operator."""
        inputs = [self.query, self.key, self.value, *self._mask]
        return self._attended(inputs, self._site.extents(self.value)[-1], scale=self._scale)

    def _attended(self, inputs: Sequence[ir.Value], width: Poly, *, scale: float) -> tuple[ir.Value, ir.Value]:
        sizes = [[*self._heads, self._rows, width], [*self._heads, self._rows]]
        options = {"scale": scale, "causal": self._causal}
        output, logsumexp = self._builder.fused_whole(_FORWARD, inputs, sizes, **options)
        assert output.dtype is not None
        logsumexp.type = ir.TensorType(ir.DataType(computed_type(int(output.dtype))))
        return output, logsumexp

    def with_nan(self, output: ir.Value) -> ir.Value:
        """Return an output with NaN in rows that see nothing, as a softmax gives them: the operator has zeros there."""
        return self._times(output, self._nan_by_row()) if self._spreads_nan else output

    def _nan_by_row(self) -> ir.Value:
        """Return NaN for rows that see nothing and 1 for others, (B, H, L, 1), by attention to ones of size 1."""
        builder = self._builder
        rows, keys = ([*self._heads, size, UNIT] for size in (self._rows, self._keys))
        inputs = [self._full(0.0, rows), self._full(0.0, keys), self._full(1.0, keys), *self._mask]
        seen, _ = self._attended(inputs, UNIT, scale=1.0)
        condition = builder.op("Greater", [seen, self._number(0.0)], ir.DataType.BOOL, rows)
        if self._keys.integer is None:
            # Of no keys at all the product is 0.
            none = builder.op("Equal", [builder.shape([self._keys]), builder.ints([0])], ir.DataType.BOOL, [UNIT])
            condition = builder.op("Or", [condition, none], ir.DataType.BOOL, rows)
        return self._where(condition, self._number(1.0), math.nan)

    def _number(self, number: float) -> ir.Value:
        dtype = self._builder.root.dtype
        assert dtype is not None
        return self._builder.constant(np.asarray(number), dtype)

    def _full(self, number: float, sizes: Sequence[Poly]) -> ir.Value:
        builder = self._builder
        return builder.op("Expand", [self._number(number), builder.shape(sizes)], builder.root.dtype, sizes)

    def _where(self, condition: ir.Value, chosen: ir.Value, other: float) -> ir.Value:
        inputs = [condition, chosen, self._number(other)]
        return self._builder.op("Where", inputs, self._builder.root.dtype, self._met([condition, chosen]))

    def _met(self, values: Sequence[ir.Value]) -> list[Poly]:
        """Return the sizes of what an elementwise operator makes of some values."""
        sizes: list[Poly] = []
        for extents in map(self._site.extents, values):
            rank = max(len(sizes), len(extents))
            both = ([UNIT] * (rank - len(own)) + list(own) for own in (sizes, extents))
            sizes = [first if other == UNIT else other for first, other in zip(*both, strict=True)]
        return sizes

    def _times(self, value: ir.Value, factor: ir.Value) -> ir.Value:
        return self._builder.op("Mul", [value, factor], value.dtype, self._met([value, factor]))

    def backward(self, given: Matrices, output: ir.Value, logsumexp: ir.Value) -> tuple[ir.Value, ...]:
        """Return the gradients of queries, keys and values, each (B, H, *, *), for that of the output.

        There may be several of the output, ahead of the batch, and then there are as many of the others.
        """
        operands = [self.query, self.key, self.value]
        read = [*operands, output, logsumexp, *self._mask]
        extents = self._site.extents(given.value)
        self._ahead = extents[: max(0, len(extents) - len(self._lead) - _OF_MATRIX)]
        if self._ahead:
            shared = [v for v in self._mask if len(own := self._site.extents(v)) <= _OF_MATRIX or own[0] == UNIT]
            read = [value if value in shared else self._for_each_gradient(value) for value in read]
        batch, heads = self._heads
        of_all = [self._site.algebra.product([*self._ahead, batch]), heads]
        inputs = [self._by_head(given, "gradients", of_all), *read]
        sizes = [[*of_all, *self._site.extents(value)[-_OF_MATRIX:]] for value in operands]
        options = {"scale": self._scale, "causal": self._causal}
        return self._builder.fused_whole("ScaledDotProductAttentionBackward", inputs, sizes, **options)

    def _for_each_gradient(self, value: ir.Value) -> ir.Value:
        """Return a tensor (B, H, *) once for each gradient of the output."""
        extents = self._site.extents(value)
        sizes = [*self._ahead, *extents]
        repeated = self._builder.op("Expand", [value, self._builder.shape(sizes)], value.dtype, sizes)
        return self._builder.reshape(repeated, [self._site.algebra.product([*self._ahead, extents[0]]), *extents[1:]])

    def gradients(self, found: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Return the gradients of the graph's queries, keys and values, for those that the operator gives.

        Where rows see nothing and give NaN, it has spread: to all values of their head, and if a mask is added, to
        these rows of the queries and to all keys too. Scores that are replaced have no gradient.
        """
        builder = self._builder
        if self._ahead:
            ahead = [*self._ahead, *self._heads]
            found = [builder.reshape(one, [*ahead, *self._site.extents(one)[-_OF_MATRIX:]]) for one in found]
        grad_query, grad_key, grad_value = found
        if self._sees is not None:
            return self._where(self._sees, grad_query, 0.0), grad_key, grad_value
        if not self._spreads_nan:
            return found
        sizes = [*self._heads, UNIT, UNIT]
        row = self._nan_by_row()
        total = builder.op("ReduceSum", [row, builder.ints([2])], row.dtype, sizes, keepdims=1)
        head = self._where(builder.op("IsNaN", [total], ir.DataType.BOOL, sizes), self._number(math.nan), 1.0)
        if self._adds:
            grad_query, grad_key = self._times(grad_query, row), self._times(grad_key, head)
        return grad_query, grad_key, self._times(grad_value, head)

    def _show_all_where_none(self) -> None:
        """Let rows that see nothing see all: they have queries of 0, whose scores are equal, and no gradient."""
        builder, wide = self._builder, ir.DataType.FLOAT
        (mask,) = self._mask
        extents = self._site.extents(mask)
        rows = [*extents[:-1], UNIT]
        count = builder.op("ReduceSum", [builder.cast(mask, wide), builder.ints([-1])], wide, rows, keepdims=1)
        zero = builder.constant(np.asarray(0.0), wide)
        self._sees = builder.op("Greater", [count, zero], ir.DataType.BOOL, rows)
        self.query = self._where(self._sees, self.query, 0.0)
        nothing = builder.op("Not", [self._sees], ir.DataType.BOOL, rows)
        self._mask, self._causal = [builder.op("Or", [mask, nothing], ir.DataType.BOOL, extents)], 0

    def _triangle(self) -> ir.Value:
        """Return what each row sees, (L, S), as booleans."""
        builder, integers = self._builder, ir.DataType.INT64
        zero, one = (builder.constant(np.asarray(n), integers) for n in (0, 1))
        rows, keys = (builder.op("Squeeze", [builder.shape([n])], integers, []) for n in (self._rows, self._keys))
        row, column = (
            builder.op("Range", [zero, n, one], integers, [e]) for n, e in ((rows, self._rows), (keys, self._keys))
        )
        last = builder.op("Unsqueeze", [row, builder.ints([1])], integers, [self._rows, UNIT])
        if self._causal == _TO_THE_END:
            ahead = builder.op("Sub", [keys, rows], integers, [])
            last = builder.op("Add", [last, ahead], integers, [self._rows, UNIT])
        sizes = [self._rows, self._keys]
        later = builder.op("Greater", [column, last], ir.DataType.BOOL, sizes)
        return builder.op("Not", [later], ir.DataType.BOOL, sizes)

    def _masked(
        self,
        shown: Sequence[tuple[ir.Value, object, bool]],
        added: Sequence[tuple[ir.Value, object, float]],
        *,
        with_triangle: bool,
    ) -> list[ir.Value]:
        """Return the operator's mask; none where every row sees every key."""
        builder, dtype = self._builder, self._builder.root.dtype
        assert dtype is not None
        conditions, addends = list[ir.Value](), list[ir.Value]()
        for value, _, holds in shown:
            one = self._aligned(value)
            sizes = self._site.extents(one)
            conditions.append(one if holds else builder.op("Not", [one], ir.DataType.BOOL, sizes))
        for value, _, factor in added:
            if value.dtype != dtype:
                raise Mismatch(f"what is added to its scores is {value.dtype}; expected {dtype}")
            one = self._aligned(value)
            if factor != 1.0:
                one = builder.op("Mul", [one, self._number(factor)], dtype, self._site.extents(one))
            addends.append(one)
        if with_triangle and self._causal:
            conditions.append(self._triangle())
        joined = [self._joined("And", conditions), self._joined("Add", addends)]
        if None not in joined:
            parts = [one for one in joined if one is not None]
            return [builder.op("Where", [*parts, self._number(-math.inf)], dtype, self._met(parts))]
        return [one for one in joined if one is not None]

    def _joined(self, op_type: str, values: Sequence[ir.Value]) -> ir.Value | None:
        found: ir.Value | None = None
        for value in values:
            pair = [value] if found is None else [found, value]
            found = value if len(pair) == 1 else self._builder.op(op_type, pair, value.dtype, self._met(pair))
        return found

    def _aligned(self, value: ir.Value) -> ir.Value:
        """Return a mask of scores as one of (B, H, L, S)."""
        extents = self._site.extents(value)
        scores = [self._rows, self._keys]
        if any(own not in (size, UNIT) for own, size in zip(extents[::-1], scores[::-1], strict=False)):
            raise Mismatch(f"the mask {value.name!r} has other rows and keys")
        lead = extents[:-_OF_MATRIX]
        if all(size == UNIT for size in lead):
            sizes = extents[len(lead) :]
            return self._builder.reshape(value, [UNIT] * (_OF_MATRIX - len(sizes)) + sizes)
        if len(lead) == len(self._lead) == _OF_MATRIX:
            return value
        if self._site.algebra.product(lead) != self._site.algebra.product(self._heads):
            raise Mismatch(f"the mask {value.name!r} is shared by some heads")
        return self._builder.reshape(value, [*self._heads, *extents[-_OF_MATRIX:]])


def _laid_out(builder: Builder, given: Matrices) -> ir.Value:
    """Return the matrices themselves, without a transposition of a transposition."""
    value, node = given.value, given.value.producer()
    extents = builder.site.extents(value)
    if not given.turned:
        return value
    perm = list(range(len(extents)))
    perm[-_OF_MATRIX:] = perm[: -_OF_MATRIX - 1 : -1]
    sizes = [extents[axis] for axis in perm]
    if node is not None and node.op_type == "Transpose" and not node.domain and node.inputs[0] is not None:
        before = attribute(node, "perm", list(range(len(extents)))[::-1])
        value, perm = node.inputs[0], [before[axis] for axis in perm]
    if perm == sorted(perm):
        return value
    return builder.op("Transpose", [value], value.dtype, sizes, perm=perm)


def in_graph(builder: Builder, gradient: ir.Value, wanted: Matrices) -> ir.Value:
    """Return a gradient (B, H, *, *) in the dimensions of a value of the graph, which may be its transpose."""
    extents = builder.site.extents(wanted.value)
    perm = list(range(len(extents)))
    perm[-_OF_MATRIX:] = perm[: -_OF_MATRIX - 1 : -1]
    if not wanted.turned:
        return builder.reshape(gradient, extents)
    plain = builder.reshape(gradient, [extents[axis] for axis in perm])
    return builder.op("Transpose", [plain], plain.dtype, extents, perm=perm)
