"""Normalization and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from gradfuse.ort_training.operators.building import Operators, Unsupported, Value, rank


def layer_normalization_grad(
    op: Operators,
    dy: Value,
    x: Value,
    scale: Value,
    mean: Value,
    inv_std: Value,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Sequence[Value]:
    """Returns the gradients of x, scale and bias; epsilon is in inv_std."""
    normalized = op.Mul(op.Sub(x, mean), inv_std)
    leading, inner = _split_axes(x, axis)
    direct = op.Mul(dy, scale)
    through_mean = op.mean(direct, inner)
    through_std = op.Mul(normalized, op.mean(op.Mul(direct, normalized), inner))
    return (
        op.Mul(op.Sub(op.Sub(direct, through_mean), through_std), inv_std),
        op.sum(op.Mul(dy, normalized), leading, keepdims=0),
        op.sum(dy, leading, keepdims=0),
    )


def simplified_layer_normalization(
    op: Operators, x: Value, scale: Value, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Sequence[Value]:
    """Returns x / rms(x) * scale and 1 / rms(x)."""
    _, inner = _split_axes(x, axis)
    inv_std = op.Reciprocal(op.Sqrt(op.Add(op.mean(op.square(x), inner), op.number(epsilon, x))))
    return op.Mul(op.Mul(x, inv_std), scale), inv_std


def simplified_layer_normalization_grad(
    op: Operators,
    dy: Value,
    x: Value,
    scale: Value,
    inv_std: Value,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Sequence[Value]:
    normalized = op.Mul(x, inv_std)
    leading, inner = _split_axes(x, axis)
    direct = op.Mul(dy, scale)
    through_std = op.Mul(normalized, op.mean(op.Mul(direct, normalized), inner))
    return op.Mul(op.Sub(direct, through_std), inv_std), op.sum(op.Mul(dy, normalized), leading, keepdims=0)


def _split_axes(x: Value, axis: int) -> tuple[list[int], list[int]]:
    axis %= rank(x)
    return list(range(axis)), list(range(axis, rank(x)))


def batch_norm_internal(
    op: Operators,
    x: Value,
    scale: Value,
    bias: Value,
    running_mean: Value,
    running_var: Value,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> Sequence[Value]:
    """Batch normalisation in training mode, of x: (N, C, ...), with the variance of the population throughout.

    Returns y, the new running mean and variance, the batch's mean and its inverse standard deviation.
    """
    if not training_mode:
        raise Unsupported("training_mode is 0")
    batch, spatial = _batch_axes(x)
    mean = op.mean(x, batch)
    centred = op.Sub(x, mean)
    var = op.mean(op.square(centred), batch)
    inv_std = op.Reciprocal(op.Sqrt(op.Add(var, op.number(epsilon, x))))
    scaled = op.Mul(op.Mul(centred, inv_std), op.Unsqueeze(scale, op.ints(spatial)))
    return (
        op.Add(scaled, op.Unsqueeze(bias, op.ints(spatial))),
        *(
            op.Add(op.Mul(old, op.number(momentum, old)), op.Mul(op.flat(new), op.number(1 - momentum, old)))
            for old, new in ((running_mean, mean), (running_var, var))
        ),
        op.flat(mean),
        op.flat(inv_std),
    )


def batch_normalization_grad(
    op: Operators, dy: Value, x: Value, scale: Value, mean: Value, inv_std: Value, epsilon: float = 1e-5
) -> Sequence[Value]:
    """Returns the gradients of x, scale and bias; epsilon is in inv_std."""
    batch, spatial = _batch_axes(x)
    wide_inv_std = op.Unsqueeze(inv_std, op.ints(spatial))
    normalized = op.Mul(op.Sub(x, op.Unsqueeze(mean, op.ints(spatial))), wide_inv_std)
    weighted = op.Mul(dy, normalized)
    rest = op.Sub(op.Sub(dy, op.mean(dy, batch)), op.Mul(normalized, op.mean(weighted, batch)))
    return (
        op.Mul(rest, op.Mul(wide_inv_std, op.Unsqueeze(scale, op.ints(spatial)))),
        op.sum(weighted, batch, keepdims=0),
        op.sum(dy, batch, keepdims=0),
    )


def _batch_axes(x: Value) -> tuple[list[int], list[int]]:
    """The axes that a batch normalisation averages over, and those that a vector of channels lacks at its end."""
    spatial = list(range(2, rank(x)))
    return [0, *spatial], [axis - 1 for axis in spatial]
