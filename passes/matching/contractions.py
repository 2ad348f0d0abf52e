"""Stacks of products of matrices that a graph writes otherwise, as `MatMul` for the time of a search.

Attention is found by its products. Those that are an `Einsum`, or the product of transposes for the transpose of a
product, are exchanged before the search. What no rewrite has taken comes back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.matching.written_softmax import may_be_softmax
from gradfuse.passes.reading.nodes import FLOATS, attribute, through_casts

_OF_MATRIX = 2
_Dims = Sequence[int | ir.SymbolicDim]
_Label = str | int


@dataclass(frozen=True)
class _Plan:
    """A product of transpositions of two operands, and the transposition of what it gives.

    Attributes:
        operands: which operand is the left one, and which the right one.
        axes: for each of them, the axes that are its dimensions ahead of the last two, and those two in their order.
        turned: for each of them, whether these two are exchanged then.
        result: the order of the dimensions of the product in the result.
    """

    operands: tuple[int, int]
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    turned: tuple[bool, bool]
    result: tuple[int, ...]


@dataclass(frozen=True)
class _Exchanged:
    """A node that was taken out: its operator and attributes, and what stands for it."""

    node: ir.Node
    starts: Sequence[tuple[ir.Node, int]]
    product: ir.Node
    last: ir.Node


class Contractions:
    """The products of a graph that were exchanged.

    Args:
        graph: the graph, with types and shapes; it is changed.
        fresh: gives names that nothing else has.
    """

    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str]) -> None:
        self._graph, self._fresh = graph, fresh
        self._exchanged: list[_Exchanged] = []
        if any(map(may_be_softmax, graph)):
            for node in list(graph):
                plan = _of_einsum(node) or _of_transposes(node)
                if plan is not None:
                    self._exchange(node, plan)

    def restore(self) -> None:
        """Put back the nodes whose products are still there."""
        for one in self._exchanged:
            if one.product.graph is not self._graph or one.last.graph is not self._graph:
                continue
            inputs = [start.inputs[index] for start, index in one.starts]
            node = ir.Node("", one.node.op_type, inputs, list(one.node.attributes.values()), name=one.node.name)
            node.doc_string = one.node.doc_string
            node.metadata_props.update(one.node.metadata_props)
            self._graph.insert_before(one.last, node)
            _take_over(one.last.outputs[0], node.outputs[0], one.node.outputs[0])
            self._drop(one.last)

    def _drop(self, node: ir.Node) -> None:
        """Remove a node, and what stood for others with it, if nothing reads its results."""
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            return
        above = [None if value is None else value.producer() for value in node.inputs]
        self._graph.remove(node, safe=True)
        for one in above:
            if one is not None and one.graph is self._graph and _IS_NEW in one.meta:
                self._drop(one)

    def _exchange(self, node: ir.Node, plan: _Plan) -> None:
        factors, starts = list[ir.Value](), dict[int, tuple[ir.Node, int]]()
        views = list[tuple[int, ir.Node]]()
        for operand, axes, turned in zip(plan.operands, plan.axes, plan.turned, strict=True):
            value = node.inputs[operand]
            assert value is not None
            for perm in (axes, _exchanged_ends(len(axes)) if turned else tuple(range(len(axes)))):
                if perm != tuple(range(len(perm))):
                    value = self._transposed(node, value, perm)
                    made = value.producer()
                    assert made is not None
                    views.append((operand, made))
            factors.append(value)
        product = ir.Node("", "MatMul", factors, name=node.name)
        left, right = map(_sizes, factors)
        self._insert(node, product, [*max(left[:-_OF_MATRIX], right[:-_OF_MATRIX], key=len), left[-2], right[-1]])
        for place, operand in enumerate(plan.operands):
            starts[operand] = next(((view, 0) for index, view in views if index == operand), (product, place))
        result = product.outputs[0]
        if plan.result != tuple(range(len(plan.result))):
            result = self._transposed(node, result, plan.result)
        last = result.producer()
        assert last is not None
        self._exchanged.append(_Exchanged(node, [starts[0], starts[1]], product, last))
        _take_over(node.outputs[0], result, node.outputs[0])
        self._graph.remove(node)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)

    def _transposed(self, before: ir.Node, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        sizes = _sizes(value)
        node = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", perm)], name=self._fresh("transpose"))
        return self._insert(before, node, [sizes[axis] for axis in perm])

    def _insert(self, before: ir.Node, node: ir.Node, sizes: _Dims) -> ir.Value:
        (value,) = node.outputs
        value.name, value.shape = self._fresh(node.op_type), ir.Shape(sizes)
        assert node.inputs[0] is not None and node.inputs[0].dtype is not None
        value.type = ir.TensorType(node.inputs[0].dtype)
        node.meta[_IS_NEW] = True
        self._graph.insert_before(before, node)
        return value


_IS_NEW = "gradfuse.exchanged"


def _take_over(old: ir.Value, new: ir.Value, told: ir.Value) -> None:
    """Give the name and readers of a value to another one, with the type and shape that are told of it."""
    name, old.name = old.name, None
    new.name, new.type, new.shape, new.doc_string = name, told.type, told.shape, told.doc_string
    new.metadata_props.update(told.metadata_props)
    new.meta.update(told.meta)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _sizes(value: ir.Value) -> _Dims:
    assert value.shape is not None
    return list(value.shape)


def _exchanged_ends(rank: int) -> tuple[int, ...]:
    return (*range(rank - _OF_MATRIX), rank - 1, rank - _OF_MATRIX)


def _of_einsum(node: ir.Node) -> _Plan | None:
    """Return how an `Einsum` of two stacks of matrices is a `MatMul`; None of another node."""
    if node.op_type != "Einsum" or node.domain or len(node.inputs) != 2 or None in node.inputs:
        return None
    given, arrow, result = attribute(node, "equation", "").replace(" ", "").partition("->")
    terms = given.split(",")
    shapes = [None if value is None else value.shape for value in node.inputs]
    if not arrow or len(terms) != 2 or None in shapes or any(v is None or v.dtype not in FLOATS for v in node.inputs):
        return None
    widths = [len(shape or ()) - len(term.replace("...", "")) for shape, term in zip(shapes, terms, strict=True)]
    if ("..." in given or "..." in result) and (
        widths[0] != widths[1] or not all("..." in t for t in (*terms, result))
    ):
        return None
    labels = [_labels(term, widths[0]) for term in (*terms, result)]
    if any(len(set(own)) != len(own) for own in labels):
        return None
    first, second, kept = labels
    batch = [label for label in kept if label in first and label in second]
    free = [[label for label in own if label in kept and label not in batch] for own in (first, second)]
    summed = [[label for label in own if label not in kept] for own in (first, second)]
    # One operand may be several stacks, as onnx-ad's gradients are, along its last axis.
    several = [own.pop() for own, whole in zip(free, (first, second), strict=True) if _are_several(own, whole, kept)]
    if not batch or [len(one) for one in free] != [1, 1] or summed[0] != summed[1] or len(summed[0]) != 1:
        return None
    if len(several) > 1 or set(kept) != {*batch, *several, *free[0], *free[1]}:
        return None
    sizes = [dict(zip(own, shape or (), strict=True)) for own, shape in zip(labels, shapes, strict=False)]
    if any(sizes[0][label] != sizes[1][label] or not _is_known(sizes[0][label]) for label in (*batch, *summed[0])):
        return None
    plans = [_plan(order, labels, [*several, *batch]) for order in ((0, 1), (1, 0))]
    return min(plans, key=_transpositions)


def _are_several(free: Sequence[_Label], operand: Sequence[_Label], kept: Sequence[_Label]) -> bool:
    return len(free) == _OF_MATRIX and free[-1] == operand[-1] == kept[-1]


def _plan(order: tuple[int, int], labels: Sequence[Sequence[_Label]], batch: Sequence[_Label]) -> _Plan:
    *operands, kept = labels
    ends = [[label for label in operands[k] if label not in batch] for k in order]
    axes = [
        tuple(operands[k].index(label) for label in (*batch, *end) if label in operands[k])
        for k, end in zip(order, ends, strict=True)
    ]
    left, right = ends
    turned = left[-1] in kept, right[-1] not in kept
    product = [*batch, next(label for label in left if label in kept), next(label for label in right if label in kept)]
    return _Plan(order, (axes[0], axes[1]), turned, tuple(product.index(label) for label in kept))


def _transpositions(plan: _Plan) -> tuple[bool, bool]:
    """Whether a plan turns the left factor, which may be probabilities, and whether it turns the result."""
    rank = len(plan.result)
    return plan.turned[0], plan.result.index(rank - 2) > plan.result.index(rank - 1)


def _labels(term: str, width: int) -> list[_Label]:
    """The labels of a term of an equation, with a number for each dimension of an ellipsis."""
    before, dots, after = term.partition("...")
    return [*before, *(range(width) if dots else ()), *after]


def _is_known(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int) or size.value is not None


def _of_transposes(node: ir.Node) -> _Plan | None:
    """Return how a product with transposed probabilities is the transpose of one with them; None of another node."""
    if node.op_type != "MatMul" or node.domain or None in node.inputs:
        return None
    first, second = node.inputs
    assert first is not None and second is not None
    turned = through_casts(second).producer()
    if turned is None or turned.op_type != "Transpose" or turned.domain or turned.inputs[0] is None:
        return None
    rank = len(attribute(turned, "perm", ()))
    if rank < _OF_MATRIX or tuple(attribute(turned, "perm", ())) != _exchanged_ends(rank):
        return None
    softmax = through_casts(turned.inputs[0]).producer()
    if softmax is None or softmax.domain or softmax.op_type not in ("Softmax", "Div") or first.shape is None:
        return None
    if second.shape is None or list(first.shape[:-2]) != list(second.shape[:-2]):
        return None
    whole = tuple(range(rank))
    return _Plan((1, 0), (whole, whole), (True, True), _exchanged_ends(rank))
