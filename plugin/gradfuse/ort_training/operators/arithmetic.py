"""Scaled and fused products, and gradients that broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from gradfuse.ort_training.operators.building import Operators, Unsupported, Value, rank


def scale(op: Operators, x: Value, factor: Value, scale_down: int = 0) -> Value:
    factor = op.cast(factor, x)
    return op.Div(x, factor) if scale_down else op.Mul(x, factor)


def fused_mat_mul(
    op: Operators,
    a: Value,
    b: Value,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Value:
    if transBatchA or transBatchB:
        raise Unsupported("it transposes batch axes")
    operands = [_transposed(op, value) if swap else value for value, swap in ((a, transA), (b, transB))]
    product = op.MatMul(*operands)
    return product if alpha == 1 else op.Mul(product, op.number(alpha, a))


def _transposed(op: Operators, x: Value) -> Value:
    axes = list(range(rank(x)))
    axes[-2:] = reversed(axes[-2:])
    return op.Transpose(x, perm=axes)


def broadcast_gradient_args(op: Operators, a_shape: Value, b_shape: Value) -> Sequence[Value]:
    """Returns, for two shapes that broadcast, the axes of the result that were stretched for each."""
    one, absent = op.integer(1), op.integer(-1)
    sizes = [op.Shape(shape) for shape in (a_shape, b_shape)]
    length = op.Max(*sizes)
    own, other = (
        op.Concat(op.Expand(absent, op.Sub(length, size)), shape, axis=0)
        for shape, size in zip((a_shape, b_shape), sizes, strict=True)
    )
    result = []
    for mine, theirs in ((own, other), (other, own)):
        longer = op.Not(op.Equal(op.Abs(theirs), one))
        stretched = op.Or(op.Equal(mine, absent), op.And(op.Equal(mine, one), longer))
        result.append(op.flat(op.NonZero(stretched)))
    return result


def div_grad(op: Operators, dy: Value, a: Value, b: Value) -> Sequence[Value]:
    """Returns the gradients of a and b in a / b, in their shapes."""
    by_a = op.Div(dy, b)
    grads = by_a, op.Neg(op.Mul(by_a, op.Div(a, b)))
    if _same_shape(a, b):
        return grads
    shapes = [op.Shape(value) for value in (a, b)]
    axes = broadcast_gradient_args(op, *shapes)
    return [
        op.Reshape(op.ReduceSum(grad, stretched, noop_with_empty_axes=1), shape)
        for grad, stretched, shape in zip(grads, axes, shapes, strict=True)
    ]


def _same_shape(a: Value, b: Value) -> bool:
    if a.shape is None or b.shape is None:
        return False
    known = all(isinstance(dim, int) or dim.value is not None for dim in a.shape)
    return known and a.shape == b.shape
