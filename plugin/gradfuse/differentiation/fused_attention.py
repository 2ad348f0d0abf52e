"""Attention that a forward graph writes out, by one operator: no tensor of rows times keys is left of it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.differentiation.dependence import depending
from gradfuse.differentiation.expansion import nodes_read
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.passes.matching import Mismatch, attention
from gradfuse.passes.matching.attention import Dims, Written, dims_of, pays
from gradfuse.passes.matching.contractions import Contractions
from gradfuse.passes.matching.cost import ASSUMED_DIM
from gradfuse.passes.matching.written_softmax import may_be_softmax
from gradfuse.passes.reading import Forms
from gradfuse.passes.reading.nodes import attribute
from gradfuse.passes.report import NearMiss

OPERATOR = "ScaledDotProductAttention"
LEFT = "gradfuse.attention"
"""In the `meta` of a model: why attention in it was left as it is written, as near misses."""

_RANK = 4
_ROUNDING = 1e-6


def fuse_attention(
    graph: ir.Graph, prefix: str, opset: int, wrt: Collection[ir.Value], sizes: Mapping[str, int]
) -> list[NearMiss]:
    """Put `aclnn::ScaledDotProductAttention` where a graph writes attention out; return what was left, and why.

    Args:
        graph: the graph, with types and shapes.
        prefix: what the names of new nodes begin with; nothing else in the graph begins with it.
        opset: the version of the default domain.
        wrt: what gradients will be taken by: the operator has none for masks.
        sizes: what named dimensions are taken to be.
    """
    if not any(map(may_be_softmax, graph)):
        return []
    numbers = itertools.count()
    products = Contractions(graph, lambda stem: f"{prefix}{stem.lower()}_{next(numbers)}")
    with _unknown(wrt):
        forms = Forms(graph, names_operands=False)
        left = _fused(graph, forms, prefix, opset, wrt, sizes)
    products.restore()
    return left


@contextlib.contextmanager
def _unknown(values: Collection[ir.Value]) -> Iterator[None]:
    """Let initializers that will change be no constants."""
    contents = {value: value.const_value for value in values}
    for value in contents:
        value.const_value = None
    try:
        yield
    finally:
        for value, content in contents.items():
            value.const_value = content


def _fused(
    graph: ir.Graph, forms: Forms, prefix: str, opset: int, wrt: Collection[ir.Value], sizes: Mapping[str, int]
) -> list[NearMiss]:
    left: list[NearMiss] = []
    learning = depending(list(graph), wrt)[0]
    number = 0
    for node in list(graph):
        if not attention.is_candidate(node):
            continue
        number += 1
        tape = Tape(f"{prefix}{number}/", opset)
        try:
            found = attention.written(forms, node)
            if found is None:
                continue
            _Placing(graph, forms, found, learning, tape).place(sizes)
        except (Mismatch, _Short) as reason:
            nodes_read(tape.nodes, [])
            match = "attention" if isinstance(reason, _Short) else ""
            left.append(NearMiss(str(node.name or node.outputs[0].name), OPERATOR, str(reason), match=match))
    return left


class _Short(Exception):
    """The operator could stand there, but there are few scores."""


class _Placing:
    """Attention that was found, and the operator in its place."""

    def __init__(
        self, graph: ir.Graph, forms: Forms, found: Written, learning: Collection[ir.Value], tape: Tape
    ) -> None:
        self._graph, self._forms, self._found = graph, forms, found
        self._learning, self._tape = learning, tape
        self._lead, self._rows, self._keys = self._layout()

    def _layout(self) -> tuple[Dims, int | str | None, int | str | None]:
        """Return the dimensions ahead of (L, S) that masks are made for, L and S."""
        if not self._found.shapes:
            raise Mismatch("it has one query or one key")
        deepest = max(self._found.shapes, key=len)
        if any(len(dims) == len(deepest) and dims != deepest for dims in self._found.shapes):
            raise Mismatch("its scores are arranged in several ways")
        if len(deepest) < 2:
            raise Mismatch(f"its scores have rank {len(deepest)}")
        *lead, rows, keys = deepest
        return tuple(lead), rows, keys

    def place(self, sizes: Mapping[str, int]) -> None:
        """Put the operator into the graph.

        Raises:
            Mismatch: it would compute something else.
            _Short: it is not worth it.
        """
        found, tape = self._found, self._tape
        masks = attention.masks(self._forms, found)
        for addend, *_ in masks.added:
            if addend in self._learning:
                raise Mismatch("what is added to its scores learns")
        if found.products not in _dead(found.last):
            raise Mismatch("its scores or probabilities are read by something else")
        query, of_query = self._scaled(found.query)
        turned_key, of_key = self._scaled(found.turned_key)
        scale = found.scale * of_query * of_key
        q = self._by_head(query, "queries")
        key, value = self._keys_and_values(turned_key, found.value)
        counts = (
            dim if isinstance(dim, int) else sizes.get(dim or "", ASSUMED_DIM) for dim in (self._rows, self._keys)
        )
        if not pays(*counts):
            raise _Short(f"not profitable: {self._rows} queries and {self._keys} keys are few")
        mask = self._mask(masks)
        sees: Tensor | None = None
        if masks.uniform and mask is not None:
            # A row of zeros has equal scores, and no gradient.
            sees = mask.cast(ir.DataType.FLOAT).op("ReduceMax", *self._last_axis(), keepdims=1, **self._last_axes())
            sees = sees > 0.0
            q, mask = self._like(q.masked(sees), q), mask.op("Or", sees.op("Not"))
        causal = 0 if masks.uniform else masks.causal
        options: dict[str, Any] = {"causal": causal or None, "scale": self._scale(scale, q)}
        if found.draw is not None:
            options |= {"dropout_threshold": found.draw.threshold, "draw": found.draw.layer or None}
        own = q.dtype
        if mask is not None and mask.dtype not in (own, ir.DataType.BOOL):
            q, key, value = (self._like(one.cast(mask.dtype), one) for one in (q, key, value))
        inputs: list[Tensor | None] = [q, key, value, mask]
        if found.draw is not None:
            inputs.append(tape.of(found.draw.seed))
            if found.draw.before is not None:
                inputs.append(tape.of(found.draw.before))
        while inputs[-1] is None:
            inputs.pop()
        output, _ = self._attended(inputs, options)
        output = self._like(output.cast(own), output)
        if masks.may_see_nothing and not found.safe:
            seen = self._seen(q, key, mask, causal)
            # A factor, as NaN spreads to gradients as well.
            output = output * seen.where(self._tape.constant(1.0, output.dtype), math.nan)
        self._put(output)

    @staticmethod
    def _like(tensor: Tensor, other: Tensor) -> Tensor:
        tensor.value.shape = other.value.shape
        return tensor

    def _attended(self, inputs: Sequence[Tensor | None], options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        tape, query, value = self._tape, inputs[0], inputs[2]
        assert query is not None and value is not None
        output, logsumexp = tape.parts(OPERATOR, 2, *inputs, domain=DOMAIN, **options)
        batch, heads, rows, _ = dims_of(query.value) or (None,) * _RANK
        width = (dims_of(value.value) or (None,))[-1]
        output.value.shape = ir.Shape([batch, heads, rows, width])
        logsumexp.value.shape = ir.Shape([batch, heads, rows])
        wide = ir.DataType.DOUBLE if query.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        logsumexp.value.type = ir.TensorType(wide)
        return output, logsumexp

    def _seen(self, q: Tensor, key: Tensor, mask: Tensor | None, causal: int) -> Tensor:
        """Return which rows see a key, by attention to ones of size 1: softmax gives NaN in the others."""
        zero, one = self._tape.ints(0), self._tape.ints(1)
        row, column = (one_.slice(zero, one, self._tape.ints(3)).zeros() for one_ in (q, key))
        ones = column.op("Exp")
        for new, old in ((row, q), (column, key), (ones, key)):
            new.value.shape = ir.Shape([*(dims_of(old.value) or (None,) * _RANK)[:-1], 1])
        output, _ = self._attended([row, column, ones, mask], {"causal": causal or None, "scale": 1.0})
        return output > 0.0

    def _last_axis(self) -> list[Tensor]:
        return [self._tape.ints(-1)] if self._tape.opset >= 18 else []

    def _last_axes(self) -> dict[str, list[int]]:
        return {} if self._tape.opset >= 18 else {"axes": [-1]}

    def _scale(self, scale: float, query: Tensor) -> float | None:
        """Return the attribute: None is the operator's own, which is exact in float64 too."""
        width = (dims_of(query.value) or (None,))[-1]
        own = 1 / math.sqrt(width) if isinstance(width, int) and width else 0.0
        if abs(scale - own) <= _ROUNDING * own:
            return None
        if not np.isfinite(np.float32(scale)) or not np.float32(scale):
            raise Mismatch(f"its scale is {scale:.6g}")
        return float(np.float32(scale))

    # Queries, keys and values by head

    def _scaled(self, value: ir.Value) -> tuple[ir.Value, float]:
        """Return what an operand of the scores is a multiple of, with heads apart where it can be, and the factor."""
        factor = 1.0
        while (node := value.producer()) is not None:
            numbers = attention.factors(self._forms, node)
            if numbers is not None and len(numbers[1]) == 1 and dims_of(numbers[1][0]) == dims_of(value):
                factor *= numbers[0]
                (value,) = numbers[1]
                continue
            source = self._unmerged(value)
            if source is None:
                break
            value = source
        return value, factor

    def _unmerged(self, value: ir.Value) -> ir.Value | None:
        """Return the (B, H, *, *) of which a (B H, *, *) is a view."""
        node, dims = value.producer(), dims_of(value)
        if node is None or node.domain or node.op_type != "Reshape" or dims is None or len(self._lead) != 2:
            return None
        source = node.inputs[0]
        before = None if source is None else dims_of(source)
        if before is None or len(before) != _RANK or len(dims) != _RANK - 1:
            return None
        same = before[2:] == dims[1:] and before[:2] == self._lead and None not in before
        return source if same else None

    def _keys_and_values(self, turned_key: ir.Value, value: ir.Value) -> tuple[Tensor, Tensor]:
        """Return keys and values by head; heads that queries share are there once."""
        key = self._turned(turned_key)
        value = self._unmerged(value) or value
        if len(self._lead) == 2:
            alone = [self._ungrouped(one) for one in (key, value)]
            if alone[0] is not None and alone[1] is not None and _heads(alone[0]) == _heads(alone[1]):
                return alone[0], alone[1]
        both = self._by_head(key, "keys"), self._by_head(value, "values")
        if _heads(both[0]) != _heads(both[1]):
            raise Mismatch(f"it has {_heads(both[0])} heads of keys and {_heads(both[1])} of values")
        return both

    def _turned(self, turned_key: ir.Value) -> ir.Value:
        """Return (*, S, E) for (*, E, S)."""
        node, dims = turned_key.producer(), dims_of(turned_key)
        if dims is None or len(dims) < 2:
            raise Mismatch("the shape of its keys is unknown")
        perm = list(range(len(dims)))
        perm[-2:] = reversed(perm[-2:])
        source: ir.Value | None = turned_key
        if node is not None and node.op_type == "Transpose" and not node.domain:
            before = attribute(node, "perm", list(reversed(range(len(dims)))))
            source, perm = node.inputs[0], [before[axis] for axis in perm]
        assert source is not None
        if perm == sorted(perm):
            return source
        found = self._tape.of(source).op("Transpose", perm=perm).value
        found.shape = ir.Shape([*dims[:-2], dims[-1], dims[-2]])
        return found

    def _ungrouped(self, value: ir.Value) -> Tensor | None:
        """Return the (B, G, S, *) of which a (B, H, S, *) repeats each head several times; None of another value."""
        dims, node = dims_of(value), value.producer()
        if dims is None or len(dims) != _RANK or node is None or None in dims:
            return None
        perm = list(range(_RANK))
        if node.op_type == "Transpose" and not node.domain and node.inputs[0] is not None:
            perm = list(attribute(node, "perm", list(reversed(range(_RANK)))))
            value = node.inputs[0]
        axis = perm[1]
        alone = self._once(value, axis)
        if alone is None:
            return None
        found = alone.transpose(perm)
        heads = (dims_of(alone.value) or (None,) * _RANK)[axis]
        found.value.shape = ir.Shape([heads if k == 1 else dims[k] for k in range(_RANK)])
        return found if self._fits(dims_of(found.value)) else None

    def _once(self, value: ir.Value, axis: int) -> Tensor | None:
        """Return what a value repeats along an axis, each element several times in a row."""
        node, dims = value.producer(), dims_of(value)
        if node is None or node.domain or dims is None or not node.inputs or node.inputs[0] is None:
            return None
        if node.op_type == "Expand":
            before = dims_of(node.inputs[0])
            alone = tuple(1 if k == axis else dim for k, dim in enumerate(dims))
            return self._tape.of(node.inputs[0]) if before == alone else None
        if node.op_type == "Gather" and attribute(node, "axis", 0) % _RANK == axis and node.inputs[1] is not None:
            source, places = node.inputs[0], self._forms.constant(node.inputs[1])
            before = dims_of(source)
            heads = None if before is None else before[axis]
            if places is None or not isinstance(heads, int) or not heads or places.ndim != 1 or places.size % heads:
                return None
            wanted = np.repeat(np.arange(heads), places.size // heads)
            return self._tape.of(source) if np.array_equal(places, wanted) else None
        if node.op_type != "Reshape":
            return None
        repeated = node.inputs[0].producer()
        if repeated is None or repeated.domain or repeated.op_type != "Expand" or repeated.inputs[0] is None:
            return None
        source = repeated.inputs[0]
        before, after = dims_of(source), dims_of(repeated.outputs[0])
        if before is None or after is None or len(after) != _RANK + 1 or len(before) != _RANK + 1:
            return None
        rest = [k for k in range(_RANK + 1) if k != axis + 1]
        kept = [after[k] for k in rest]
        if before[axis + 1] != 1 or [before[k] for k in rest] != kept or None in kept:
            return None
        if [d for k, d in enumerate(kept) if k != axis] != [d for k, d in enumerate(dims) if k != axis]:
            return None
        above = source.producer()
        inner = above.inputs[0] if above is not None and above.op_type == "Unsqueeze" and not above.domain else None
        if inner is not None and dims_of(inner) == tuple(kept):
            return self._tape.of(inner)
        found = self._tape.of(source).squeeze(axis + 1)
        found.value.shape = ir.Shape(kept)
        return found

    def _fits(self, dims: Dims | None) -> bool:
        """Whether keys of some dimensions, (B, G, S, *), go with the queries."""
        if dims is None or len(dims) != _RANK:
            return False
        batch, heads = self._by_four()
        groups = dims[1]
        whole = isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups == 0
        return dims[0] == batch and batch is not None and (whole or groups == heads is not None)

    def _by_four(self) -> tuple[int | str | None, int | str | None]:
        """Return the batch and the heads that the operator sees."""
        lead = self._lead
        if len(lead) < 2:
            return (lead[0] if lead else 1), 1
        if len(lead) == 2:
            return lead[0], lead[1]
        sizes = [dim for dim in lead[:-1] if isinstance(dim, int)]
        return (math.prod(sizes) if len(sizes) == len(lead) - 1 else None), lead[-1]

    def _by_head(self, value: ir.Value, what: str) -> Tensor:
        """Return queries, keys or values as (B, H, *, *)."""
        dims = dims_of(value)
        if dims is None:
            raise Mismatch(f"the shape of its {what} is unknown")
        tensor, (batch, heads), alone = self._tape.of(value), self._by_four(), False
        before, ends = dims[:-2], dims[-2:]
        if len(self._lead) == 2 and len(before) == 2:
            if what == "queries" and before != self._lead:
                raise Mismatch("its queries are repeated")
        elif len(self._lead) == 2 and isinstance(heads, int) and self._is_merged(dims):
            shape = self._tape.concat([self._tape.ints(-1, heads), tensor.op("Shape", start=1)])
            tensor = tensor.op("Reshape", shape)
        elif not (alone := what != "queries" and self._is_alone(before)) and (before != self._lead or None in before):
            raise Mismatch(f"its {what} are shared by the batch, or of another rank")
        elif len(before) < 2:
            tensor = tensor.unsqueeze(*((1,) if before else (0, 1)))
        else:
            rest = tensor.op("Shape", start=len(before) - 1)
            tensor = tensor.op("Reshape", self._tape.concat([self._tape.ints(-1), rest]))
        if len(before) != 2 or len(self._lead) != 2:
            tensor.value.shape = ir.Shape([batch, 1 if alone else heads, *ends])
        elif not self._fits(dims):
            raise Mismatch(f"its {what} are of {list(before)} heads; expected {list(self._lead)}")
        return tensor

    def _is_alone(self, lead: Dims) -> bool:
        """Whether keys of some leading dimensions are those of one head, where there are groups of heads."""
        return len(self._lead) > 2 and lead == (*self._lead[:-1], 1) and None not in lead

    def _is_merged(self, dims: Dims) -> bool:
        """Whether dimensions are (B H, *, *), as those of scores are somewhere."""
        merged = {shape[0] for shape in self._found.shapes if len(shape) == _RANK - 1}
        return len(dims) == _RANK - 1 and dims[0] is not None and merged == {dims[0]}

    # Masks

    def _mask(self, masks: attention.Masks) -> Tensor | None:
        """Return the operator's mask."""
        dtype = self._found.query.dtype
        shown: Tensor | None = None
        conditions = [
            self._aligned(value, dims) if holds else self._aligned(value, dims).op("Not")
            for value, dims, holds in masks.shown
        ]
        if masks.uniform and masks.causal:
            conditions.append(self._triangle(masks.causal))
        for one in conditions:
            shown = one if shown is None else shown.op("And", one)
        added: Tensor | None = None
        wide = any(value.dtype != dtype for value, *_ in masks.added)
        for value, dims, factor in masks.added:
            if value.dtype not in (dtype, ir.DataType.FLOAT):
                raise Mismatch(f"what is added to its scores is {value.dtype}; expected {dtype}")
            one = self._aligned(value, dims)
            # In 16 bits the least number of float32 is none.
            one = (one.cast(ir.DataType.FLOAT) if wide else one) * factor
            added = one if added is None else added + one
        if shown is None or added is None:
            return shown if added is None else added
        return shown.where(added, -math.inf)

    def _triangle(self, causal: int) -> Tensor:
        """Return what each row sees of (L, S), as booleans."""
        tape, found = self._tape, self._found
        rows, keys = tape.of(found.query).size(-2), tape.of(found.turned_key).size(-1)
        row = tape.op("Range", tape.constant(0), rows.squeeze(0), tape.constant(1)).unsqueeze(1)
        column = tape.op("Range", tape.constant(0), keys.squeeze(0), tape.constant(1))
        return (column > (row if causal == 1 else row + (keys - rows))).op("Not")

    def _aligned(self, value: ir.Value, dims: Dims) -> Tensor:
        """Return a mask of scores of some dimensions for scores (B, H, L, S), as far as it is not whole."""
        own, tensor = dims_of(value), self._tape.of(value)
        if own is None or None in own or len(own) > len(dims) or dims[-2:] != (self._rows, self._keys):
            raise Mismatch(f"the shape of the mask {value.name!r} is unknown")
        if len(own) < 2:
            return tensor.unsqueeze(*range(2 - len(own)))
        lead = own[:-2]
        if all(dim == 1 for dim in lead):
            return tensor.squeeze(*range(len(lead)))
        if len(self._lead) == 2 and len(dims) == _RANK:
            return tensor
        if len(self._lead) == 1:
            return tensor.unsqueeze(1)
        _, heads = self._by_four()
        if lead != dims[:-2] or not isinstance(heads, int):
            raise Mismatch(f"the mask {value.name!r} has the shape {list(own)}")
        shape = self._tape.concat([self._tape.ints(-1, heads), tensor.op("Shape", start=len(lead))])
        return tensor.op("Reshape", shape)

    # Into the graph

    def _put(self, output: Tensor) -> None:
        last = self._found.last
        old = last.outputs[0]
        dims = dims_of(old)
        assert dims is not None
        if len(dims) != _RANK or len(self._lead) != 2:
            output = self._shaped_as(output, dims)
        new = output.value
        self._graph.insert_before(last, nodes_read(self._tape.nodes, [new]))
        new.type, new.shape = old.type, old.shape
        name = old.name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self._graph.remove(_dead(last), safe=True)
        new.name = name

    def _shaped_as(self, output: Tensor, dims: Dims) -> Tensor:
        *lead, _, _ = dims
        if not lead:
            return output.squeeze(0, 1)
        tape = self._tape
        unknown = [axis for axis, dim in enumerate(lead) if not isinstance(dim, int)]
        if len(unknown) > 1:
            raise Mismatch("the shape of its output is unknown")
        sizes = [dim if isinstance(dim, int) else -1 for dim in lead]
        return output.op("Reshape", tape.concat([tape.ints(*sizes), output.op("Shape", start=2)]))


def _heads(tensor: Tensor) -> int | str | None:
    return (dims_of(tensor.value) or (None, None))[1]


def _dead(last: ir.Node) -> dict[ir.Node, None]:
    """Return the nodes that nothing needs any more where nothing reads the results of one."""
    dead = {last: None}
    todo = [last]
    while todo:
        for value in todo.pop().inputs:
            node = None if value is None else value.producer()
            if node is None or node in dead or any(one.is_graph_output() for one in node.outputs):
                continue
            if all(use.node in dead for one in node.outputs for use in one.uses()):
                dead[node] = None
                todo.append(node)
    return dead
