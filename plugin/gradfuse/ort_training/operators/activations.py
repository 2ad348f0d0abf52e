"""Activations and their gradients: y is the result of the forward pass, x its argument, dy the gradient of y."""

from __future__ import annotations

import math

from gradfuse.ort_training.operators.building import Operators, Unsupported, Value


def relu_grad(op: Operators, dy: Value, y: Value) -> Value:
    return op.Where(op.Greater(y, op.number(0, y)), dy, op.number(0, dy))


def leaky_relu_grad(op: Operators, dy: Value, y: Value, alpha: float = 0.01) -> Value:
    return op.Where(op.Greater(y, op.number(0, y)), dy, op.Mul(dy, op.number(alpha, dy)))


def sigmoid_grad(op: Operators, dy: Value, y: Value) -> Value:
    return op.Mul(dy, op.Mul(y, op.Sub(op.number(1, y), y)))


def tanh_grad(op: Operators, dy: Value, y: Value) -> Value:
    return op.Mul(dy, op.Sub(op.number(1, y), op.square(y)))


def _normal_cdf(op: Operators, x: Value) -> Value:
    erf = op.Erf(op.Mul(x, op.number(math.sqrt(0.5), x)))
    return op.Mul(op.Add(erf, op.number(1, x)), op.number(0.5, x))


def gelu(op: Operators, x: Value) -> Value:
    return op.Mul(x, _normal_cdf(op, x))


def gelu_grad(op: Operators, dy: Value, x: Value) -> Value:
    density = op.Mul(
        op.Exp(op.Mul(op.square(x), op.number(-0.5, x))),
        op.number(1 / math.sqrt(2 * math.pi), x),
    )
    return op.Mul(dy, op.Add(_normal_cdf(op, x), op.Mul(x, density)))


_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(op: Operators, x: Value) -> Value:
    inner = op.Add(op.number(1, x), op.Mul(op.number(_TANH_CUBE, x), op.square(x)))
    return op.Tanh(op.Mul(op.Mul(x, inner), op.number(_TANH_SCALE, x)))


def fast_gelu(op: Operators, x: Value, bias: Value | None = None) -> Value:
    if bias is not None:
        raise Unsupported("it has a bias")
    return op.Mul(x, op.Mul(op.number(0.5, x), op.Add(op.number(1, x), _gelu_tanh(op, x))))


def fast_gelu_grad(op: Operators, dy: Value, x: Value) -> Value:
    tanh = _gelu_tanh(op, x)
    half = op.number(0.5, x)
    left = op.Mul(half, op.Add(op.number(1, x), tanh))
    slope = op.Add(op.number(_TANH_SCALE, x), op.Mul(op.number(3 * _TANH_SCALE * _TANH_CUBE, x), op.square(x)))
    right = op.Mul(op.Mul(half, x), op.Mul(op.Sub(op.number(1, x), op.square(tanh)), slope))
    return op.Mul(dy, op.Add(left, right))


def quick_gelu(op: Operators, x: Value, alpha: float = 1.702) -> Value:
    return op.Mul(x, op.Sigmoid(op.Mul(x, op.number(alpha, x))))


def quick_gelu_grad(op: Operators, dy: Value, x: Value, alpha: float = 1.702) -> Value:
    scaled = op.Mul(x, op.number(alpha, x))
    gate = op.Sigmoid(scaled)
    return op.Mul(dy, op.Mul(gate, op.Add(op.number(1, x), op.Mul(scaled, op.Sub(op.number(1, x), gate)))))


def softmax_grad(op: Operators, dy: Value, y: Value, axis: int = -1) -> Value:
    weighted = op.Mul(dy, y)
    return op.Sub(weighted, op.Mul(y, op.sum(weighted, [axis])))


def log_softmax_grad(op: Operators, dy: Value, y: Value, axis: int = -1) -> Value:
    return op.Sub(dy, op.Mul(op.Exp(y), op.sum(dy, [axis])))


def dropout_grad(
    op: Operators, dy: Value, mask: Value, ratio: Value | None = None, training_mode: Value | None = None
) -> Value:
    zero, one = op.number(0, dy), op.number(1, dy)
    dropped = op.number(0.5, dy) if ratio is None else op.cast(ratio, dy)
    if training_mode is not None:
        dropped = op.Where(training_mode, dropped, zero)
    return op.Where(mask, op.Div(dy, op.Sub(one, dropped)), zero)
