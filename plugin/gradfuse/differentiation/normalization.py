"""Normalisations: differences from a mean over some axes, divided by a deviation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from gradfuse.custom_ops.layer_norm_backward import MAX_RANK
from gradfuse.differentiation.rules import FLOATS, FUSES, Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor

MICROSOFT = "com.microsoft"
BY_BATCH = "gradfuse.normalizes_by_batch"
"""The key of `meta` that says of a BatchNormalization: its mean and variance are the batch's, and read by it alone."""


def normalized_by_deviation(
    x: Tensor, axes: list[int], epsilon: float, *, centred: bool = True
) -> tuple[Tensor, Tensor]:
    """Return x without its mean, if it is to be, divided by what is left's root of the mean square; and 1 / that."""
    values = x - mean(x, axes) if centred else x
    inverse = _inverse_deviation(values, axes, epsilon)
    return values * inverse, inverse


def _inverse_deviation(values: Tensor, axes: list[int], epsilon: float) -> Tensor:
    return 1 / (mean(values * values, axes) + epsilon).sqrt()


def mean(x: Tensor, axes: list[int]) -> Tensor:
    """Return the mean over axes, which are kept as 1."""
    if x.tape.opset >= 18:
        return x.op("ReduceMean", x.tape.ints(*axes), keepdims=1)
    return x.op("ReduceMean", axes=axes, keepdims=1)


def through_deviation(
    scaled: Tensor, normalized: Tensor, inverse: Tensor, axes: list[int], *, centred: bool = True
) -> Tensor:
    """The gradient of the input from that of the normalized values, as mean and deviation depend on it as well."""
    through = scaled - mean(scaled, axes) if centred else scaled
    return inverse * (through - normalized * mean(scaled * normalized, axes))


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
        normalized, inverse = normalized_by_deviation(x, others, epsilon)
        yield lambda: through_deviation(dy * column(scale), normalized, inverse, others)
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
        if gated is None or gate is None or gate.op_type != "ThresholdBackward" or gate.domain != "aclnn":
            continue
        source, output = gate.inputs
        alone = len(list(gated.uses())) == 1 and not gated.is_graph_output()
        if alone and "threshold" not in gate.attributes:
            node.replace_input_with(0, source)
            node.replace_input_with(_RELU_OUTPUT, output)


_RELU_OUTPUT = 5


@gradient("InstanceNormalization")
def instance_normalization(call: Call) -> Iterator[Gradient]:
    x, scale, dy = call.x[0], call.x[1], call.dy[0]
    assert x is not None and scale is not None and dy is not None
    rank = call.rank(x)
    axes, others = list(range(2, rank)), [axis for axis in range(rank) if axis != 1]
    normalized, inverse = normalized_by_deviation(x, axes, call.attribute("epsilon", 1e-5))
    column = scale.reshape([-1, *[1] * (rank - 2)])
    yield lambda: through_deviation(dy * column, normalized, inverse, axes)
    yield lambda: (dy * normalized).sum(others, keepdims=False)
    yield lambda: dy.sum(others, keepdims=False)


@gradient("LayerNormalization")
def layer_normalization(call: Call) -> Iterator[Gradient]:
    x, scale = call.x[0], call.x[1]
    assert x is not None and scale is not None
    rank, epsilon = call.rank(x), call.attribute("epsilon", 1e-5)
    axis = call.attribute("axis", -1)
    axes = list(range(axis % rank, rank))
    dy, by_mean, by_inverse = [*call.dy, None, None][:3]
    bias = call.input(2)
    if dy is not None and by_mean is None and by_inverse is None and fits_operator(call, axis, scale, bias):
        # onnxruntime's statistics are float32 at most.
        middle: Tensor | None
        if x.dtype != ir.DataType.DOUBLE and call.attribute("stash_type", 1) == ir.DataType.FLOAT:
            middle, inverse = statistics_of(call, 3)
        else:
            middle, inverse = computed_statistics(x, axes, epsilon)
        wanted = [index in call.needed for index in range(3)]
        yield from by_operator(call, dy, x, scale, middle, inverse, axis, wanted)
        return
    normalized, inverse = normalized_by_deviation(x, axes, epsilon)

    def by_x() -> Tensor:
        terms = []
        if dy is not None:
            terms.append(through_deviation(dy * scale, normalized, inverse, axes))
        if by_mean is not None:
            terms.append(x.ones() * (by_mean.cast(x.dtype) / _count(x, axes)))
        if by_inverse is not None:
            terms.append(-by_inverse.cast(x.dtype) * inverse * inverse * normalized / _count(x, axes))
        return call.tape.total(terms)

    yield by_x
    yield lambda: None if dy is None else call.summed_to(dy * normalized, scale, call.y[0])
    if bias is not None:
        yield lambda: None if dy is None else call.summed_to(dy, bias, call.y[0])


def fits_operator(call: Call, axis: int, *vectors: Tensor | None) -> bool:
    """Whether the gradients of a normalization from an axis on may be `LayerNormBackward`.

    Weight and bias, which may broadcast, must then have the sizes of the axes that are normalized.
    """
    x = call.x[0]
    if not call.node.meta.get(FUSES) or x is None or x.dtype not in FLOATS or not 1 <= call.rank(x) <= MAX_RANK:
        return False
    inner = call.dims(x)[axis % call.rank(x) :]
    given = [vector for vector in vectors if vector is not None]
    return None not in inner and all(
        vector.dtype == x.dtype and vector.value.shape is not None and call.dims(vector) == inner for vector in given
    )


def statistics_of(call: Call, count: int) -> list[Tensor]:
    """Return what a normalization gives behind its result, `count` outputs in all, in float32."""
    node, x = call.node, call.x[0]
    assert x is not None
    if len(node.outputs) < count:
        node.resize_outputs(count)
    rank = call.rank(x)
    first = call.attribute("axis", -1) % rank
    for index, value in enumerate(node.outputs):
        if index and not value.name:
            value.name = f"{call.tape.prefix}{node.outputs[0].name}.{index}"
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.shape = ir.Shape([*call.dims(x)[:first], *(1 for _ in range(first, rank))])
    return [call.tape.of(value) for value in node.outputs[1:]]


def computed_statistics(
    x: Tensor, axes: list[int], epsilon: float, *, centred: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Return the mean, if values are to be centred, and 1 / deviation, in float32 or float64."""
    wide = x if x.dtype == ir.DataType.DOUBLE else x.cast(ir.DataType.FLOAT)
    middle = mean(wide, axes) if centred else None
    return middle, _inverse_deviation(wide if middle is None else wide - middle, axes, epsilon)


def by_operator(
    call: Call,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    middle: Tensor | None,
    inverse: Tensor,
    axis: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias by one operator, as far as they are wanted."""
    mask = [int(one) for one in wanted]
    found = call.tape.parts(
        "LayerNormBackward", 3, dy, x, weight, middle, inverse, domain="aclnn", axis=axis, output_mask=mask
    )
    return tuple(one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))


def _count(x: Tensor, axes: list[int]) -> Tensor:
    """How many elements there are along axes, in the type of `x`."""
    sizes = x.shape().op("Gather", x.tape.ints(*axes), axis=0)
    return sizes.op("ReduceProd", keepdims=0).cast(x.dtype)


@gradient("RMSNormalization")
@gradient("SimplifiedLayerNormalization", domain="")
@gradient("SimplifiedLayerNormalization", domain=MICROSOFT)
def rms_normalization(call: Call) -> Iterator[Gradient]:
    """x / sqrt(mean(x^2) + epsilon) * scale, over the axes from `axis` on."""
    x, scale, dy = call.x[0], call.x[1], call.dy[0]
    assert x is not None and scale is not None
    if dy is None or any(other is not None for other in call.dy[1:]):
        raise call.error("the result depends on its second output; expected on its first only")
    rank, axis, epsilon = call.rank(x), call.attribute("axis", -1), call.attribute("epsilon", 1e-5)
    axes = list(range(axis % rank, rank))
    if fits_operator(call, axis, scale):
        # onnxruntime's statistics are float32 at most; RMSNormalization gives none.
        if x.dtype != ir.DataType.DOUBLE and call.node.op_type != "RMSNormalization":
            (inverse,) = statistics_of(call, 2)
        else:
            _, inverse = computed_statistics(x, axes, epsilon, centred=False)
        wanted = [0 in call.needed, 1 in call.needed, False]
        yield from by_operator(call, dy, x, scale, None, inverse, axis, wanted)[:2]
        return
    normalized, inverse = normalized_by_deviation(x, axes, epsilon, centred=False)
    yield lambda: through_deviation(dy * scale, normalized, inverse, axes, centred=False)
    yield lambda: call.summed_to(dy * normalized, scale, call.y[0])


@gradient("LpNormalization")
def lp_normalization(call: Call) -> Iterator[Gradient]:
    """x / |x|, with the 1-norm or the 2-norm along an axis; 0 where the norm is 0."""
    (x, dy), y = call.operands(), call.y[0]
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
    x, dy = call.operands()
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
