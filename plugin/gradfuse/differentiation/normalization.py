"""Normalisations: differences from a mean over some axes, divided by a deviation."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from gradfuse.differentiation.rules import Call, Gradient, constant_of, gradient
from gradfuse.differentiation.tensors import Tensor

BY_BATCH = "gradfuse.normalizes_by_batch"
"""The key of `meta` that says of a BatchNormalization: its mean and variance are the batch's, and read by it alone."""


def _centred(x: Tensor, axes: list[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / deviation, and 1 / deviation, over axes."""
    centred = x - mean(x, axes)
    inverse = 1 / (mean(centred * centred, axes) + epsilon).sqrt()
    return centred * inverse, inverse


def mean(x: Tensor, axes: list[int]) -> Tensor:
    """Return the mean over axes, which are kept as 1."""
    if x.tape.opset >= 18:
        return x.op("ReduceMean", x.tape.ints(*axes), keepdims=1)
    return x.op("ReduceMean", axes=axes, keepdims=1)


def _through_centring(scaled: Tensor, normalized: Tensor, inverse: Tensor, axes: list[int]) -> Tensor:
    """The gradient of the input from that of the normalized values, as mean and deviation depend on it as well."""
    return inverse * (scaled - mean(scaled, axes) - normalized * mean(scaled * normalized, axes))


@gradient("BatchNormalization", limits="in training mode, its first output")
def batch_normalization(call: Call) -> Iterator[Gradient]:
    """In training mode mean and variance are those of the batch, and depend on the input."""
    x, scale, dy = call.x[0], call.x[1], call.dy[0]
    if any(other is not None for other in call.dy[1:]):
        raise call.error("the result depends on its running statistics; expected on its first output only")
    assert x is not None and scale is not None and dy is not None
    rank, epsilon = call.rank(x), call.attribute("epsilon", 1e-5)
    if call.node.meta.get(BY_BATCH):
        yield from _by_batch(call, epsilon)
        return
    others = [axis for axis in range(rank) if axis != 1]

    def column(vector: Tensor | None) -> Tensor:
        assert vector is not None
        return vector.cast(x.dtype).reshape([-1, *[1] * (rank - 2)])

    if call.attribute("training_mode", 0):
        normalized, inverse = _centred(x, others, epsilon)
        yield lambda: _through_centring(dy * column(scale), normalized, inverse, others)
    else:
        inverse = 1 / (column(call.x[4]) + epsilon).sqrt()
        normalized = (x - column(call.x[3])) * inverse
        yield lambda: dy * (column(scale) * inverse)
    yield lambda: (dy * normalized).sum(others, keepdims=False).cast(scale.dtype)
    yield lambda: dy.sum(others, keepdims=False).cast(scale.dtype)
    if not call.attribute("training_mode", 0):
        scaled = column(scale) * inverse
        yield lambda: -(dy * scaled).sum(others, keepdims=False).cast(scale.dtype)
        yield lambda: (dy * normalized * (scaled * inverse * -0.5)).sum(others, keepdims=False).cast(scale.dtype)


def _by_batch(call: Call, epsilon: float) -> Iterator[Gradient]:
    """One operator, whose gradient of the input goes through mean and variance as well, which then get none."""
    x, scale, _, mean, variance = call.x
    assert x is not None and scale is not None and mean is not None and variance is not None
    wanted = [index in call.needed for index in range(3)]
    inverse = 1 / (variance + epsilon).sqrt()
    yield from call.tape.parts(
        "BatchNormBackward", 3, call.dy[0], x, scale, mean, inverse, None,
        domain="aclnn", output_mask=[int(one) for one in wanted],
    )  # fmt: skip
    yield lambda: None
    yield lambda: None


def fold_relus(graph: ir.Graph) -> None:
    """Let gradients of batch normalization read what comes into a ReLU's gradient that nothing else reads."""
    for node in graph:
        if node.op_type != "BatchNormBackward" or node.domain != "aclnn" or node.inputs[_RELU_OUTPUT] is not None:
            continue
        gated = node.inputs[0]
        gate = None if gated is None else gated.producer()
        if gated is None or gate is None or gate.op_type != "Where":
            continue
        condition, other, source = gate.inputs
        cut = None if condition is None else condition.producer()
        if cut is None or cut.op_type != "LessOrEqual" or len(list(gated.uses())) > 1 or gated.is_graph_output():
            continue
        output, least = cut.inputs
        producer = None if output is None else output.producer()
        if producer is not None and producer.op_type == "Relu" and _is_zero(other) and _is_zero(least):
            node.replace_input_with(0, source)
            node.replace_input_with(_RELU_OUTPUT, output)


_RELU_OUTPUT = 5


def _is_zero(value: ir.Value | None) -> bool:
    found = None if value is None else constant_of(value)
    return found is not None and found.size == 1 and not found.any()


@gradient("InstanceNormalization")
def instance_normalization(call: Call) -> Iterator[Gradient]:
    x, scale, dy = call.x[0], call.x[1], call.dy[0]
    assert x is not None and scale is not None and dy is not None
    rank = call.rank(x)
    axes, others = list(range(2, rank)), [axis for axis in range(rank) if axis != 1]
    normalized, inverse = _centred(x, axes, call.attribute("epsilon", 1e-5))
    column = scale.reshape([-1, *[1] * (rank - 2)])
    yield lambda: _through_centring(dy * column, normalized, inverse, axes)
    yield lambda: (dy * normalized).sum(others, keepdims=False)
    yield lambda: dy.sum(others, keepdims=False)


@gradient("LayerNormalization")
def layer_normalization(call: Call) -> Iterator[Gradient]:
    x, scale = call.x[0], call.x[1]
    assert x is not None and scale is not None
    rank = call.rank(x)
    axes = list(range(call.attribute("axis", -1) % rank, rank))
    normalized, inverse = _centred(x, axes, call.attribute("epsilon", 1e-5))
    dy, by_mean, by_inverse = [*call.dy, None, None][:3]

    def by_x() -> Tensor:
        terms = []
        if dy is not None:
            terms.append(_through_centring(dy * scale, normalized, inverse, axes))
        if by_mean is not None:
            terms.append(x.ones() * (by_mean.cast(x.dtype) / _count(x, axes)))
        if by_inverse is not None:
            terms.append(-by_inverse.cast(x.dtype) * inverse * inverse * normalized / _count(x, axes))
        return call.tape.total(terms)

    yield by_x
    yield lambda: None if dy is None else call.summed_to(dy * normalized, scale, call.y[0])
    bias = call.input(2)
    if bias is not None:
        yield lambda: None if dy is None else call.summed_to(dy, bias, call.y[0])


def _count(x: Tensor, axes: list[int]) -> Tensor:
    """How many elements there are along axes, in the type of `x`."""
    sizes = x.shape().op("Gather", x.tape.ints(*axes), axis=0)
    return sizes.op("ReduceProd", keepdims=0).cast(x.dtype)


@gradient("LpNormalization")
def lp_normalization(call: Call) -> Iterator[Gradient]:
    """x / |x|, with the 1-norm or the 2-norm along an axis; 0 where the norm is 0."""
    x, dy, y = call.x[0], call.dy[0], call.y[0]
    assert x is not None and dy is not None
    axis = [call.attribute("axis", -1) % call.rank(x)]
    along = (dy * y).sum(axis)
    if call.attribute("p", 2) == 2:
        inner, norm = dy - y * along, (x * x).sum(axis).sqrt()
    else:
        inner, norm = dy - x.sign() * along, x.op("Abs").sum(axis)
    yield (inner / norm).masked(norm > 0)


@gradient("LRN")
def lrn(call: Call) -> Iterator[Gradient]:
    """x / s^beta, where s is bias + alpha / size times the sum of x^2 over neighbouring channels."""
    x, dy = call.x[0], call.dy[0]
    assert x is not None and dy is not None
    size, alpha = call.attribute("size"), call.attribute("alpha", 1e-4)
    beta, bias = call.attribute("beta", 0.75), call.attribute("bias", 1.0)
    before, behind = (size - 1) // 2, size // 2

    def window(tensor: Tensor, first: int, last: int) -> Tensor:
        """The mean over channels from `first` below to `last` above, of which those beyond the ends are 0."""
        pooled = _as_rows(tensor).op(
            "AveragePool", kernel_shape=[size, 1], pads=[first, 0, last, 0], count_include_pad=1
        )
        return pooled.like(tensor)

    s = window(x * x, before, behind) * alpha + bias
    inner = window(dy * call.y[0] / s, behind, before)
    yield dy / s.op("Pow", beta) - x * inner * (2 * alpha * beta)


def _as_rows(tensor: Tensor) -> Tensor:
    """(N, C, ...) as (N, 1, C, elements)."""
    tape = tensor.tape
    elements = tensor.op("Shape", start=2).op("ReduceProd", keepdims=1)
    return tensor.reshape(tape.concat([tensor.size(0), tape.ints(1), tensor.size(1), elements]))
