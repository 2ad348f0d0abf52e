"""Attention that was found in a graph, as operands of `aclnn::ScaledDotProductAttention` and its backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops.operator import computed_type
from gradfuse.passes.algebra import UNIT, Poly
from gradfuse.passes.matching.attention import Same, Written, masks
from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.rewrite import Mismatch
from gradfuse.passes.matching.site import Site
from gradfuse.passes.reading import attribute

_OF_MATRIX = 2
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
        deepest = max((site.extents(v) for v in (found.products.outputs[0], found.softmax.outputs[0])), key=len)
        *lead, self._rows, self._keys = deepest
        self._lead: Sequence[Poly] = lead
        batch, heads = ([UNIT, UNIT, *lead] if len(lead) < 1 else [*lead, UNIT] if len(lead) == 1 else lead)[-2:]
        if len(lead) > _OF_MATRIX:
            batch = site.algebra.product(lead[:-1])
        self._heads = [batch, heads]
        key = matrices(found.turned_key, site.first).transposed
        self.query, self.key, self.value = (
            self.by_head(one, what)
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
        seen = masks(site.forms, found)
        if seen.uniform:
            raise Mismatch("a finite number takes the place of its scores, and some may be lower")
        self._spreads_nan = seen.may_see_nothing and not found.safe
        self._adds = bool(seen.added)
        if self._spreads_nan and seen.shown and seen.added:
            raise Mismatch("a row may see nothing, by a mask that is added and one that is not")
        given += [value for value, *_ in (*seen.shown, *seen.added)]
        self.given = tuple(given)
        """What is taken from the graph as it is."""
        self._mask = self._masked(seen.shown, seen.added)
        self._scale, self._causal = float(np.float32(found.scale)), seen.causal

    def by_head(self, given: Matrices, what: str) -> ir.Value:
        """Return a tensor (*, M, N) of the graph as (B, H, M, N)."""
        site, builder = self._site, self._builder
        value = _laid_out(builder, given)
        extents = site.extents(value)
        if site.algebra.product(extents[:-_OF_MATRIX]) != site.algebra.product(self._heads):
            raise Mismatch(f"its {what} are shared by heads or by items of the batch")
        return builder.reshape(value, [*self._heads, *extents[-_OF_MATRIX:]])

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

    def gradients_with_nan(self, gradients: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Return gradients with the NaN of rows that see nothing: in all values of their head, and if a mask is added,
        in these rows of the queries and in all keys too. Where scores are replaced, they have no gradient."""
        if not self._spreads_nan:
            return gradients
        grad_query, grad_key, grad_value = gradients
        builder, sizes = self._builder, [*self._heads, UNIT, UNIT]
        row = self._nan_by_row()
        total = builder.op("ReduceSum", [row, builder.ints([2])], row.dtype, sizes, keepdims=1)
        head = self._where(builder.op("IsNaN", [total], ir.DataType.BOOL, sizes), math.nan, 1.0)
        if self._adds:
            grad_query, grad_key = self._times(grad_query, row), self._times(grad_key, head)
        return grad_query, grad_key, self._times(grad_value, head)

    def _nan_by_row(self) -> ir.Value:
        """Return NaN for rows that see nothing and 1 for others, (B, H, L, 1), by attention to ones of size 1."""
        builder = self._builder
        rows, keys = ([*self._heads, size, UNIT] for size in (self._rows, self._keys))
        inputs = [self._full(0.0, rows), self._full(0.0, keys), self._full(1.0, keys), *self._mask]
        seen, _ = self._attended(inputs, UNIT, scale=1.0)
        condition = builder.op("Greater", [seen, self._number(0.0)], ir.DataType.BOOL, rows)
        return self._where(condition, 1.0, math.nan)

    def _number(self, number: float) -> ir.Value:
        dtype = self._builder.root.dtype
        assert dtype is not None
        return self._builder.constant(np.asarray(number), dtype)

    def _full(self, number: float, sizes: Sequence[Poly]) -> ir.Value:
        builder = self._builder
        return builder.op("Expand", [self._number(number), builder.shape(sizes)], builder.root.dtype, sizes)

    def _where(self, condition: ir.Value, chosen: float, other: float) -> ir.Value:
        inputs = [condition, self._number(chosen), self._number(other)]
        return self._builder.op("Where", inputs, self._builder.root.dtype, self._site.extents(condition))

    def _times(self, value: ir.Value, factor: ir.Value) -> ir.Value:
        return self._builder.op("Mul", [value, factor], value.dtype, self._site.extents(value))

    def backward(self, grad_output: ir.Value, output: ir.Value, logsumexp: ir.Value) -> tuple[ir.Value, ...]:
        """Return the gradients of queries, keys and values, each (B, H, *, *)."""
        operands = [self.query, self.key, self.value]
        inputs = [grad_output, *operands, output, logsumexp, *self._mask]
        sizes = [self._site.extents(value) for value in operands]
        options = {"scale": self._scale, "causal": self._causal}
        return self._builder.fused_whole("ScaledDotProductAttentionBackward", inputs, sizes, **options)

    def _masked(
        self, shown: Sequence[tuple[ir.Value, object, bool]], added: Sequence[tuple[ir.Value, object, float]]
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
        joined = [self._joined("And", conditions), self._joined("Add", addends)]
        if None not in joined:
            parts = [one for one in joined if one is not None]
            return [builder.op("Where", [*parts, self._number(-math.inf)], dtype)]
        return [one for one in joined if one is not None]

    def _joined(self, op_type: str, values: Sequence[ir.Value]) -> ir.Value | None:
        found: ir.Value | None = None
        for value in values:
            found = value if found is None else self._builder.op(op_type, [found, value], value.dtype)
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
