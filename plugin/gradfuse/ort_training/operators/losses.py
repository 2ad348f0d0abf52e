"""Gradients of losses."""

from __future__ import annotations

from gradfuse.ort_training.operators.building import Operators, Unsupported, Value, rank


def softmax_cross_entropy_loss_grad(
    op: Operators,
    dy: Value,
    log_prob: Value,
    label: Value,
    weight: Value | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Value:
    """With one row a label: row_weight (softmax - one hot) dy, for a mean over the sum of row weights.

    dy: shape (), or label's for reduction "none"; log_prob: (N, C, ...); label: (N, ...); weight: (C,).
    """
    zero, one, factor = op.number(0, log_prob), op.number(1, log_prob), None
    if ignore_index is None:
        factor = None if weight is None else op.Gather(weight, label)
    else:
        ignored = op.Equal(label, op.number(ignore_index, label))
        used = op.Where(ignored, op.number(0, label), label)
        factor = op.Where(ignored, zero, one if weight is None else op.Gather(weight, used))
    if reduction not in ("mean", "sum", "none"):
        raise Unsupported(f"reduction is {reduction!r}")
    if reduction == "mean" and factor is None:
        dy = op.Div(dy, op.cast(op.Size(label), log_prob))
    elif reduction == "mean":
        total = op.ReduceSum(factor, keepdims=0)
        # Where no row counts, the kernel gives zeros.
        dy = op.Div(dy, op.Where(op.Equal(total, zero), one, total))
    if factor is not None:
        dy = op.Mul(dy, factor)
    channel = op.ints([1])
    if factor is not None or reduction == "none":
        dy = op.Unsqueeze(dy, channel)
    classes = op.Range(op.integer(0), op.Squeeze(op.Shape(log_prob, start=1, end=2)), op.integer(1))
    classes = op.Reshape(op.cast(classes, label), op.ints([-1, *[1] * (rank(log_prob) - 2)]))
    at_label = op.cast(op.Equal(op.Unsqueeze(label, channel), classes), log_prob)
    return op.Mul(op.Sub(op.Exp(log_prob), at_label), dy)
