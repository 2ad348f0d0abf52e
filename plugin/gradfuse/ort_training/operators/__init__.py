"""The operators that exist in onnxruntime's training build only, written in ONNX's standard operators.

`replace` rewrites a graph; `REPLACEMENTS` has one function an operator. These operators have no specification of their
own: each is the gradient that its name says, of the ONNX operator's inputs, and tests compare it with the kernel of
onnxruntime-training 1.19.2. The operators of onnxruntime's own domain that such graphs hold beside them, such as
FusedMatMul and Gelu, are replaced too, so that what comes out is plain ONNX.

A function gets the operator's inputs, None where one is left out, and its attributes by name, and returns a value for
each output that the operator can have.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from gradfuse.errors import ModelError, one_line

DOMAIN = "com.microsoft"
OLDEST_OPSET = 17
"""The default-domain opset that the replacements are written for, or any newer one."""

Value: TypeAlias = ir.Value
Replacement: TypeAlias = Callable[..., "Value | Sequence[Value]"]


class Unsupported(Exception):
    """A replacement does not cover what its operator is asked to do; the text says what."""


class Operators:
    """Makes the nodes that take the place of one: `op.Add(x, y)` appends one, and returns its output."""

    def __init__(self, opset: int, replaced: ir.Node) -> None:
        self.opset = opset
        self.outputs = len(replaced.outputs)
        self.nodes: list[ir.Node] = []
        self._prefix = replaced.name or replaced.outputs[0].name
        self._numbers: dict[tuple[float, ir.DataType], Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        return lambda *inputs, **attributes: self.several(op_type, 1, *inputs, **attributes)[0]

    def several(self, op_type: str, count: int, *inputs: Value | None, **attributes: Any) -> Sequence[Value]:
        """Append a node, and return all of its outputs."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        name = f"{self._prefix}/{op_type}_{len(self.nodes)}"
        attrs = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", op_type, given, attrs, num_outputs=count, name=name)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}_output_{index}"
        self.nodes.append(node)
        return node.outputs

    def number(self, number: float, like: Value) -> Value:
        """A scalar in the type of another value."""
        key = number, dtype_of(like)
        if key not in self._numbers:
            self._numbers[key] = self.Constant(value=ir.tensor(np.array(number, key[1].numpy()), dtype=key[1]))
        return self._numbers[key]

    def integer(self, number: int) -> Value:
        """A scalar of int64."""
        return self.Constant(value_int=number)

    def ints(self, values: Iterable[int]) -> Value:
        """A vector of int64."""
        return self.Constant(value=ir.tensor(np.array(list(values), np.int64)))

    def zeros(self, shape: Value, like: Value) -> Value:
        dtype = dtype_of(like)
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy()), dtype=dtype))

    def cast(self, x: Value, like: Value) -> Value:
        return x if x.dtype == dtype_of(like) else self.Cast(x, to=int(dtype_of(like)))

    def flat(self, x: Value) -> Value:
        return self.Reshape(x, self.ints([-1]))

    def sum(self, x: Value, axes: Iterable[int], keepdims: int = 1) -> Value:
        """The sum over axes; over none of them it is x itself."""
        return self.ReduceSum(x, self.ints(axes), keepdims=keepdims, noop_with_empty_axes=1)

    def mean(self, x: Value, axes: Sequence[int]) -> Value:
        if self.opset < 18:
            return self.ReduceMean(x, axes=list(axes), keepdims=1)
        return self.ReduceMean(x, self.ints(axes), keepdims=1)

    def square(self, x: Value) -> Value:
        return self.Mul(x, x)


def dtype_of(x: Value) -> ir.DataType:
    if x.dtype is None:
        raise Unsupported(f"the type of {x.name!r} is not known")
    return x.dtype


def rank(x: Value) -> int:
    if x.shape is None:
        raise Unsupported(f"the rank of {x.name!r} is not known")
    return len(x.shape)


# Activations. y is the result of the forward pass, x its argument, dy the gradient that arrives.


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


# Losses.


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


# Normalisation.


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


# Convolution and pooling.


def conv_grad(
    op: Operators,
    dy: Value,
    x: Value,
    w: Value,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Sequence[Value]:
    """Returns the gradients of x (N, C, ...), w (O, C / group, ...) and the bias (O,), for dy: (N, O, ...).

    The gradient of x is the transposed convolution of dy by w, cut or filled with zeros to x's size. That of w is the
    convolution of x by dy, in which batch and channels have changed places, as have stride and dilation.
    """
    if auto_pad not in ("NOTSET", "VALID"):
        raise Unsupported(f"auto_pad is {auto_pad}")
    spatial = rank(x) - 2
    axes = range(2, rank(x))
    strides, dilations = list(strides or [1] * spatial), list(dilations or [1] * spatial)
    pads = list(pads or [0] * 2 * spatial)

    whole = op.ConvTranspose(dy, w, strides=strides, dilations=dilations, group=group)
    begin = op.ints(-pad for pad in pads[:spatial])
    missing = op.Sub(op.Shape(x, start=2), op.Add(op.Shape(whole, start=2), begin))
    none = op.ints([0, 0])
    dx = op.Pad(whole, op.Concat(none, begin, none, missing, axis=0))

    if group == 1:
        by_channel = op.Transpose(x, perm=[1, 0, *axes])
    else:
        split = op.Reshape(x, op.Concat(op.ints([0, group, -1]), op.Shape(x, start=2), axis=0))
        by_channel = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in axes)])
        merged = op.Concat(op.Shape(by_channel, start=0, end=1), op.ints([-1]), op.Shape(x, start=2), axis=0)
        by_channel = op.Reshape(by_channel, merged)
    by_output = op.Transpose(dy, perm=[1, 0, *axes])
    windows = op.Conv(by_channel, by_output, strides=dilations, dilations=strides, pads=pads, group=group)
    # Where the stride does not divide the size, windows begin that the forward pass had no room for.
    fitting = op.Slice(windows, op.ints([0] * spatial), op.Shape(w, start=2), op.ints(axes))
    dw = op.Transpose(fitting, perm=[1, 0, *axes])
    return dx, dw, op.sum(dy, [0, *axes], keepdims=0)


def max_pool_grad(op: Operators, dy: Value, indices: Value, storage_order: int = 0, **window: Any) -> Value:
    """dy added up at the places of the maxima, which the forward pass gives as indices into the whole of x."""
    forward = indices.producer()
    if forward is None or forward.op_type != "MaxPool":
        raise Unsupported(f"{indices.name!r} is not the second output of a MaxPool node")
    if storage_order:
        raise Unsupported("storage_order is 1")
    x = forward.inputs[0]
    blank = op.zeros(op.Reshape(op.Size(x), op.ints([1])), dy)
    dx = op.ScatterElements(blank, op.flat(indices), op.flat(dy), axis=0, reduction="add")
    return op.Reshape(dx, op.Shape(x))


# Selections. `shape` is the shape of what was selected from.


def gather_grad(op: Operators, shape: Value, indices: Value, dy: Value, axis: int = 0) -> Value:
    before, width = axis % (rank(dy) - rank(indices) + 1), rank(indices)
    size = rank(dy) - width + 1
    others = [i for i in range(size) if i != before]
    # What is gathered from comes first, for scatters work on the first axes.
    selected = list(range(before, before + width))
    first = op.Transpose(dy, perm=[*selected, *(i for i in range(rank(dy)) if i not in selected)])
    blank = op.zeros(op.Gather(shape, op.ints([before, *others])), dy)
    dx = op.ScatterND(blank, op.Unsqueeze(indices, op.ints([-1])), first, reduction="add")
    return op.Transpose(dx, perm=[i + 1 if i < before else 0 if i == before else i for i in range(size)])


def gather_elements_grad(op: Operators, dy: Value, shape: Value, indices: Value, axis: int = 0) -> Value:
    return op.ScatterElements(op.zeros(shape, dy), indices, dy, axis=axis, reduction="add")


def gather_nd_grad(op: Operators, shape: Value, indices: Value, dy: Value, batch_dims: int = 0) -> Value:
    if batch_dims:
        raise Unsupported(f"batch_dims is {batch_dims}")
    return op.ScatterND(op.zeros(shape, dy), indices, dy, reduction="add")


def slice_grad(
    op: Operators,
    dy: Value,
    shape: Value,
    starts: Value,
    ends: Value,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value:
    """dy at the places that the same slice of all places takes, zero elsewhere."""
    count = op.ReduceProd(shape, keepdims=0)
    places = op.Reshape(op.Range(op.integer(0), count, op.integer(1)), shape)
    taken = op.Slice(places, starts, ends, axes, steps)
    blank = op.zeros(op.Reshape(count, op.ints([1])), dy)
    return op.Reshape(op.ScatterElements(blank, op.flat(taken), op.flat(dy), axis=0), shape)


def concat_training(op: Operators, *parts: Value, axis: int) -> Sequence[Value]:
    """Returns the concatenation, and the length of each part."""
    sizes = [op.Gather(op.Shape(part), op.ints([axis])) for part in parts]
    return op.Concat(*parts, axis=axis), op.Concat(*sizes, axis=0)


def split_training(op: Operators, x: Value, split: Value, axis: int = 0) -> Sequence[Value]:
    return op.several("Split", op.outputs, x, split, axis=axis)


# Arithmetic.


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


REPLACEMENTS: dict[tuple[str, str], Replacement] = {
    ("", "MaxPoolGrad"): max_pool_grad,
    ("", "SimplifiedLayerNormalization"): simplified_layer_normalization,
    (DOMAIN, "BatchNormInternal"): batch_norm_internal,
    (DOMAIN, "BatchNormalizationGrad"): batch_normalization_grad,
    (DOMAIN, "BroadcastGradientArgs"): broadcast_gradient_args,
    (DOMAIN, "ConcatTraining"): concat_training,
    (DOMAIN, "ConvGrad"): conv_grad,
    (DOMAIN, "DivGrad"): div_grad,
    (DOMAIN, "DropoutGrad"): dropout_grad,
    (DOMAIN, "FastGelu"): fast_gelu,
    (DOMAIN, "FastGeluGrad"): fast_gelu_grad,
    (DOMAIN, "FusedMatMul"): fused_mat_mul,
    (DOMAIN, "GatherElementsGrad"): gather_elements_grad,
    (DOMAIN, "GatherGrad"): gather_grad,
    (DOMAIN, "GatherNDGrad"): gather_nd_grad,
    (DOMAIN, "Gelu"): gelu,
    (DOMAIN, "GeluGrad"): gelu_grad,
    (DOMAIN, "LayerNormalizationGrad"): layer_normalization_grad,
    (DOMAIN, "LeakyReluGrad"): leaky_relu_grad,
    (DOMAIN, "LogSoftmaxGrad_13"): log_softmax_grad,
    (DOMAIN, "QuickGelu"): quick_gelu,
    (DOMAIN, "QuickGeluGrad"): quick_gelu_grad,
    (DOMAIN, "ReluGrad"): relu_grad,
    (DOMAIN, "Scale"): scale,
    (DOMAIN, "SigmoidGrad"): sigmoid_grad,
    (DOMAIN, "SimplifiedLayerNormalizationGrad"): simplified_layer_normalization_grad,
    (DOMAIN, "SliceGrad"): slice_grad,
    (DOMAIN, "SoftmaxCrossEntropyLossGrad"): softmax_cross_entropy_loss_grad,
    (DOMAIN, "SoftmaxGrad_13"): softmax_grad,
    (DOMAIN, "SplitTraining"): split_training,
    (DOMAIN, "TanhGrad"): tanh_grad,
}


def replace(graph: ir.Graph, source: str) -> None:
    """Put standard operators in the place of onnxruntime's in a graph.

    Args:
        graph: is changed in place. The version of its default domain is at least `OLDEST_OPSET`.
        source: what to call the model in messages.

    Raises:
        ModelError: an operator of onnxruntime has no replacement; one error names them all.
    """
    opset = graph.opset_imports[""]
    failures: dict[str, str] = {}
    for node in list(graph.all_nodes()):
        replacement = REPLACEMENTS.get((node.domain, node.op_type))
        if replacement is None:
            if node.domain == DOMAIN or (node.domain == "" and not onnx.defs.has(node.op_type)):
                failures.setdefault(node.op_type, node.op_type)
            continue
        op = Operators(opset, node)
        try:
            outputs = _call(replacement, op, node)
        except Unsupported as error:
            failures.setdefault(node.op_type, f"{node.op_type} ({error})")
            continue
        pairs = [pair for pair in zip(node.outputs, outputs, strict=False) if pair[0].name]
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], op.nodes, *zip(*pairs, strict=True))
    if failures:
        raise ModelError(
            f"{source}: has operators of onnxruntime-training that gradfuse cannot replace: "
            f"{', '.join(sorted(failures.values()))}"
        )


def _call(replacement: Replacement, op: Operators, node: ir.Node) -> Sequence[Value]:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    try:
        call = inspect.signature(replacement).bind(op, *node.inputs, **attributes)
    except TypeError as error:
        raise Unsupported(str(error)) from error
    try:
        result = replacement(*call.args, **call.kwargs)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # No schema has checked the attributes and inputs of these operators.
        raise Unsupported(f"malformed: {one_line(error)}") from error
    return [result] if isinstance(result, ir.Value) else result
