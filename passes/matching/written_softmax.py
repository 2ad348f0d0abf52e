"""A softmax along the last dimension in a graph: one node, or exponentials divided by their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse.passes.reading import Forms
from gradfuse.passes.reading.nodes import attribute, through_casts

Same = Callable[[ir.Value], ir.Value]

SOFTMAXES = {("", "Softmax"): False, ("gradfuse.export", "SafeSoftmax"): True}
"""Operators -> whether a row that is -inf throughout gives zeros."""


@dataclass(frozen=True)
class WrittenSoftmax:
    """A softmax of scores.

    Attributes:
        nodes: those of the size of the scores, the last first.
        scores: what it is taken of.
        safe: whether a row that is -inf throughout gives zeros, and not NaN.
    """

    nodes: Sequence[ir.Node]
    scores: ir.Value
    safe: bool = False


def may_be_softmax(node: ir.Node) -> bool:
    """Whether a graph with this node may have a softmax."""
    return (node.domain, node.op_type) in SOFTMAXES or (not node.domain and node.op_type == "Exp")


def softmax_of(forms: Forms, node: ir.Node, same: Same) -> WrittenSoftmax | None:
    """Return the softmax that a node is the last one of; None of another node.

    That is a softmax, the exponential of a `LogSoftmax`, or exponentials divided by their sum. Ahead of those any
    number of the row may have been taken off the scores, such as their maximum: it does not change the quotients.
    """
    if (node.domain, node.op_type) in SOFTMAXES:
        scores = _along_last(node)
        return None if scores is None else WrittenSoftmax([node], scores, SOFTMAXES[node.domain, node.op_type])
    if _is(node, "Exp"):
        inner = _producer(node.inputs[0], same)
        scores = _along_last(inner) if inner is not None and _is(inner, "LogSoftmax") else None
        return None if inner is None or scores is None else WrittenSoftmax([node, inner], scores)
    for powers, total in _quotients(node, same):
        exponentials = _producer(powers, same)
        if exponentials is None or not _is(exponentials, "Exp") or not _is_sum(forms, total, exponentials, same):
            continue
        scores = exponentials.inputs[0]
        shifted = _producer(scores, same)
        if shifted is not None and _is(shifted, "Sub"):
            whole, of_row = shifted.inputs
            if whole is not None and _dims(whole) == _dims(shifted.outputs[0]) and _of_rows(of_row) is not None:
                return WrittenSoftmax([node, exponentials, shifted], whole)
        return None if scores is None else WrittenSoftmax([node, exponentials], scores)
    return None


def _is(node: ir.Node, op_type: str) -> bool:
    return not node.domain and node.op_type == op_type


def _along_last(node: ir.Node) -> ir.Value | None:
    """Return what a softmax is taken of, if it is along the last dimension."""
    scores = node.inputs[0]
    if scores is None or scores.shape is None or not _is_last(attribute(node, "axis", -1), len(scores.shape)):
        return None
    return scores


def _is_last(axis: int, rank: int) -> bool:
    return rank > 0 and axis % rank == rank - 1


def _dims(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _producer(value: ir.Value | None, same: Same) -> ir.Node | None:
    """Return the node that computes a value, but for its type and what changes nothing."""
    return None if value is None else through_casts(same(through_casts(value))).producer()


def _quotients(node: ir.Node, same: Same) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield the two values of which a node may give the quotient."""
    first, second = [*node.inputs, None, None][:2]
    if first is None or second is None:
        return
    if _is(node, "Div"):
        yield first, second
    if _is(node, "Mul"):
        for one, other in ((first, second), (second, first)):
            for inverse in (_producer(other, same), _producer(_of_rows(other), same)):
                if inverse is not None and _is(inverse, "Reciprocal") and inverse.inputs[0] is not None:
                    yield one, inverse.inputs[0]


def _of_rows(value: ir.Value | None) -> ir.Value | None:
    """Return the numbers, one a row with a last dimension of 1, that a value is or repeats; None of another value."""
    while value is not None:
        dims, node = _dims(value), value.producer()
        if dims is None or not dims or dims[-1] == 1:
            return value if dims is not None else None
        value = node.inputs[0] if node is not None and _is(node, "Expand") else None
    return None


def _is_sum(forms: Forms, value: ir.Value, exponentials: ir.Node, same: Same) -> bool:
    """Whether a value is the sum of exponentials along the last dimension, which is 1 in it or repeats it."""
    dims, total = _dims(exponentials.outputs[0]), _of_rows(through_casts(value))
    if dims is None or None in dims or total is None or len(dims) < 2:
        return False
    node = _producer(total, same)
    while node is not None and node.op_type in ("Reshape", "Unsqueeze", "Expand") and not node.domain:
        # Rows with a last dimension of 1, or without it.
        if not {_dims(node.inputs[0]), _dims(node.outputs[0])} <= {(*dims[:-1], 1), dims[:-1]}:
            return False
        node = _producer(node.inputs[0], same)
    if node is None or not _is(node, "ReduceSum") or _producer(node.inputs[0], same) is not exponentials:
        return False
    given = forms.constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    axes = list(attribute(node, "axes", ())) if given is None else given.ravel().tolist()
    return len(axes) == 1 and _is_last(axes[0], len(dims)) and _dims(node.inputs[0]) == dims
