"""Softmax and the losses that are operators."""

from __future__ import annotations

import dataclasses
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
    values = [value]
    for one in values:  # The list grows: converted values are appended as they are found.
        for node, index in one.uses():
            if node.op_type == "Where" and index > 0:
                return True
            if node.op_type in ("Cast", "CastLike") and index == 0:
                values.append(node.outputs[0])
    return False


@gradient("LogSoftmax")
def log_softmax(call: Call) -> Iterator[Gradient]:
    dy, y = call.dy[0], call.y[0]
    assert dy is not None
    axis = [call.attribute("axis", -1) % call.rank(y)]
    yield dy - y.exp() * dy.sum(axis)


@gradient("SoftmaxCrossEntropyLoss", limits="labels lie within the classes or are ignore_index")
def softmax_cross_entropy_loss(call: Call) -> Iterator[Gradient]:
    """(softmax - one_hot) times the weight of the row; `log_prob`, its second output, may be used as well."""
    scores = call.x[0]
    assert scores is not None
    log_prob: Tensor = scores.op("LogSoftmax", axis=1)
    second = call.dy[1] if len(call.dy) > 1 else None
    if call.dy[0] is None:
        assert second is not None
        yield second - log_prob.exp() * second.sum([1])
        return
    labels = _Labels.of(call, scores)

    def of_scores() -> Tensor:
        gradient = (log_prob.exp() - labels.hot) * labels.factor
        return gradient if second is None else gradient + (second - log_prob.exp() * second.sum([1]))

    yield of_scores
    yield None
    yield lambda: labels.gradient_of_weight(log_prob)


@gradient("NegativeLogLikelihoodLoss", limits="labels lie within the classes or are ignore_index")
def negative_log_likelihood_loss(call: Call) -> Iterator[Gradient]:
    x = call.x[0]
    assert x is not None
    labels = _Labels.of(call, x)
    yield lambda: -(labels.hot * labels.factor)
    yield None
    yield lambda: labels.gradient_of_weight(x)


@dataclasses.dataclass(frozen=True)
class _Labels:
    """The labels of a loss, beside log-probabilities whose axis 1 is the classes.

    Attributes:
        call: the node.
        hot: the one-hot rows.
        counted: which rows count; None: all.
        weights: the weights of the rows, 0 for those that do not count; None: all are 1.
    """

    call: Call
    hot: Tensor
    counted: Tensor | None
    weights: Tensor | None

    @classmethod
    def of(cls, call: Call, x: Tensor) -> _Labels:
        labels = call.x[1]
        assert labels is not None
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
        weights: Tensor | None = None if weight is None else weight.op("Gather", target, axis=0)
        if counted is not None:
            weights = counted.cast(dtype) if weights is None else weights.masked(counted)
        return cls(call, hot, counted, weights)

    @property
    def reduction(self) -> str:
        return str(self.call.attribute("reduction", "mean"))

    @property
    def factor(self) -> Tensor:
        """The gradient of each row's negative log-probability, with an axis of size 1 for the classes, or a scalar."""
        dy, weights = self.call.dy[0], self.weights
        assert dy is not None
        if weights is None:
            if self.reduction == "none":
                return dy.unsqueeze(1)
            labels = self.call.x[1]
            assert labels is not None
            return dy if self.reduction == "sum" else dy / labels.op("Size").cast(self.hot.dtype)
        if self.reduction == "mean":
            dy = dy / weights.sum(None, keepdims=False)
        return (weights * dy).unsqueeze(1)

    def gradient_of_weight(self, log_prob: Tensor) -> Tensor:
        """Return the sum of the losses of each class; the mean is divided by the sum of the weights as well."""
        dy, weights = self.call.dy[0], self.weights
        assert dy is not None and weights is not None
        rows = -log_prob.masked(self.hot.cast(ir.DataType.BOOL)).sum([1], keepdims=False)
        if self.reduction == "mean":
            rows = rows - self.call.y[0]
            dy = dy / weights.sum(None, keepdims=False)
        rows = rows * dy
        if self.counted is not None:
            rows = rows.masked(self.counted)
        scores = self.call.x[0]
        assert scores is not None
        axes = [axis for axis in range(self.call.rank(scores)) if axis != 1]
        return (self.hot * rows.unsqueeze(1)).sum(axes, keepdims=False)
