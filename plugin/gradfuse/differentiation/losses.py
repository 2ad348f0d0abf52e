"""Softmax and the losses that are operators."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor


@gradient("Softmax")
def softmax(call: Call) -> Iterator[Gradient]:
    """Rows that are -inf throughout, and that the model replaces, have no gradient instead of NaN."""
    dy, y = call.dy[0], call.y[0]
    assert dy is not None
    axis = [call.attribute("axis", -1) % call.rank(y)]
    if _is_replaced(y.value):
        y = y.masked(y.op("IsNaN").op("Not"))
    yield y * (dy - (dy * y).sum(axis))


def _is_replaced(value: ir.Value) -> bool:
    """Whether a model chooses between a value and another one."""
    for node, index in value.uses():
        if node.op_type == "Where" and index > 0:
            return True
        if node.op_type in ("Cast", "CastLike") and _is_replaced(node.outputs[0]):
            return True
    return False


@gradient("LogSoftmax")
def log_softmax(call: Call) -> Iterator[Gradient]:
    dy, y = call.dy[0], call.y[0]
    assert dy is not None
    axis = [call.attribute("axis", -1) % call.rank(y)]
    yield dy - y.exp() * dy.sum(axis)


@gradient("SoftmaxCrossEntropyLoss", limits="labels lie within the classes or are ignore_index", fixed=[2])
def softmax_cross_entropy_loss(call: Call) -> Iterator[Gradient]:
    """(softmax - one_hot) times the weight of the row; `log_prob`, its second output, may be used as well."""
    scores = call.x[0]
    assert scores is not None
    log_prob: Tensor = scores.op("LogSoftmax", axis=1)
    by_log_prob = _of_log_prob(call, scores) if call.dy[0] is not None else None
    second = call.dy[1] if len(call.dy) > 1 else None
    if by_log_prob is None:
        assert second is not None
        yield second - log_prob.exp() * second.sum([1])
        return
    weights, hot = by_log_prob
    gradient = (log_prob.exp() - hot) * weights
    if second is not None:
        gradient = gradient + (second - log_prob.exp() * second.sum([1]))
    yield gradient


@gradient("NegativeLogLikelihoodLoss", limits="labels lie within the classes or are ignore_index", fixed=[2])
def negative_log_likelihood_loss(call: Call) -> Iterator[Gradient]:
    x = call.x[0]
    assert x is not None
    weights, hot = _of_log_prob(call, x)
    yield -(hot * weights)


def _of_log_prob(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of each row's loss, with an axis of size 1 for the classes, and the one-hot rows."""
    labels, dy = call.x[1], call.dy[0]
    assert labels is not None and dy is not None
    tape, rank, dtype = call.tape, call.rank(x), x.dtype
    target = labels.cast(ir.DataType.INT64)
    ignored = call.attribute("ignore_index")
    counted = None
    if ignored is not None:
        counted = target.equals(tape.constant(ignored)).op("Not")
        target = counted.where(target, tape.constant(0))
    classes: Tensor = tape.op("Range", tape.constant(0), call.size(x, 1).squeeze(0), tape.constant(1))
    hot = target.unsqueeze(1).equals(classes.reshape([-1, *[1] * (rank - 2)])).cast(dtype)
    weight = call.input(2)
    rows: Tensor | None = None if weight is None else weight.op("Gather", target, axis=0)
    if counted is not None:
        rows = counted.cast(dtype) if rows is None else rows.masked(counted)
    match call.attribute("reduction", "mean"):
        case "none":
            factor = dy if rows is None else dy * rows
        case "sum":
            factor = dy if rows is None else rows * dy
        case _ if rows is None:
            factor = dy / target.op("Size").cast(dtype)
        case _:
            factor = rows * (dy / rows.sum(None, keepdims=False))
    return (factor.unsqueeze(1) if rows is not None or call.attribute("reduction") == "none" else factor), hot
