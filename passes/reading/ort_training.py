"""Readers of the operators that onnxruntime-training's gradient builder emits, in the domain com.microsoft.

They have no specification of their own; each is read as the gradient that its name says, of the ONNX operator's inputs.
`reference_ops` has the same operators for onnx's reference evaluator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, number
from gradfuse.passes.reading.indexing import (
    from_start,
    scattered,
    scattered_by_rows,
    with_batch_indices,
)
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form, groups_of_sizes
from gradfuse.passes.reading.nodes import Opaque, attribute, given
from gradfuse.passes.reading.pieces import concatenated, sliced, windowed
from gradfuse.passes.reading.products import multiplied
from gradfuse.passes.reading.reductions import axis_of_classes, log_softmax_of_scores
from gradfuse.passes.reading.registry import reads

DOMAIN = "com.microsoft"
Array = npt.NDArray[Any]


@reads("Scale", domain=DOMAIN)
def _scale(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    groups, (x, factor) = forms.broadcast(forms.operands(node))
    return Form(groups, algebra.mul(x, algebra.power(factor, -1) if attribute(node, "scale_down", 0) else factor))


@reads("TanhGrad", "SigmoidGrad", domain=DOMAIN)
def _curve_grad(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    groups, (grad, y) = forms.broadcast(forms.operands(node))
    slope = UNIT - algebra.mul(y, y) if node.op_type == "TanhGrad" else algebra.mul(y, UNIT - y)
    return Form(groups, algebra.mul(grad, slope))


@reads("BroadcastGradientArgs", domain=DOMAIN)
def _broadcast_gradient_args(forms: KnownForms, node: ir.Node) -> Form:
    raise Opaque("axes, which the readers of reductions find in the shapes")


@reads("FusedMatMul", domain=DOMAIN)
def _fused_mat_mul(forms: KnownForms, node: ir.Node) -> Form:
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        raise Opaque("batches that are transposed")
    operands = forms.operands(node)
    turned = [len(x.groups) > 1 and attribute(node, flag, 0) for x, flag in zip(operands, _TRANSPOSES, strict=True)]
    product = multiplied(forms, [_transposed(forms, x) if t else x for x, t in zip(operands, turned, strict=True)])
    return Form(product.groups, product.poly.scaled(attribute(node, "alpha", 1.0)))


_TRANSPOSES = ("transA", "transB")


def _transposed(forms: KnownForms, x: Form) -> Form:
    rank = len(x.groups)
    return forms.moved(x, [*range(rank - 2), rank - 1, rank - 2])


@reads("SoftmaxGrad_13", "LogSoftmaxGrad_13", "SoftmaxGrad", "LogSoftmaxGrad", domain=DOMAIN)
def _softmax_grad(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    operands = forms.operands(node)
    groups, (grad, y) = forms.broadcast(operands)
    form = Form(groups, ZERO)
    sizes = dict(enumerate(form.sizes))
    if node.op_type.endswith("_13"):
        axes = [attribute(node, "axis", -1) % len(groups)]
    else:
        # Up to opset 12 a softmax took all dimensions from the axis on for one.
        axes = list(range(attribute(node, "axis", 1) % len(groups), len(groups)))
    along = {v: sizes[v] for axis in axes for v in form.variables(axis)}
    if node.op_type.startswith("Softmax"):
        return Form(groups, algebra.mul(y, grad - algebra.sum(algebra.mul(grad, y), along, sizes)))
    return Form(groups, grad - algebra.mul(algebra.exp(y), algebra.sum(grad, along, sizes)))


@reads("SoftmaxCrossEntropyLossInternal", domain=DOMAIN)
def _softmax_cross_entropy_loss_internal(forms: KnownForms, node: ir.Node) -> list[Form | None]:
    return [None, log_softmax_of_scores(forms, node)]


@reads("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad", domain=DOMAIN)
def _softmax_cross_entropy_loss_grad(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    loss_grad, log_prob, label, weight, ignored, more = (
        None if value is None else forms.form(value) for value in (*node.inputs, *(None,) * 6)[:6]
    )
    reduction = attribute(node, "reduction", "mean")
    if loss_grad is None or log_prob is None or label is None or reduction not in ("mean", "sum", "none"):
        raise Opaque("a loss that is not read")
    along, rank = axis_of_classes(forms, log_prob, label), len(log_prob.groups)
    per_row: list[int | None] = [*range(along), None, *range(along, rank - 1)]
    if len(log_prob.groups[along]) != 1:
        raise Opaque("the classes are composed")
    grad = forms.moved(loss_grad, per_row) if reduction == "none" else Form((), loss_grad.poly)
    groups, (z, g, t) = forms.broadcast([log_prob, grad, forms.moved(label, per_row)])
    form = Form(groups, ZERO)
    sizes = dict(enumerate(form.sizes))
    (c,) = form.variables(along)
    counts = UNIT
    if "ignore_index" in node.attributes:
        counts = UNIT - algebra.equal_zero(t - number(attribute(node, "ignore_index", 0)))
    elif ignored is not None:
        counts = UNIT - algebra.equal_zero(t - ignored.poly)
    if weight is not None:
        counts = algebra.mul(counts, algebra.substitute(weight.poly, {0: t}))
    q = algebra.mul(g, counts)
    if reduction == "mean":
        rows = {v: s for v, s in sizes.items() if v != c}
        q = algebra.mul(q, algebra.power(algebra.sum(counts, rows, sizes), -1))
    result = Form(groups, algebra.mul(q, algebra.exp(z) - algebra.equal_zero(algebra.var(c) - t)))
    if more is None:
        return result
    groups, (a, b) = forms.broadcast([result, more])
    return Form(groups, a + b)


def _blank(forms: KnownForms, node: ir.Node, shape: int) -> Form:
    """Zeros of the shape that an input of this number holds, which says more of sizes than the type of the output."""
    sizes = forms.vector(given(node.inputs, shape))
    if sizes is None:
        return Form(forms.groups_of(forms.output(node)), ZERO)
    return Form(groups_of_sizes(sizes), ZERO)


@reads("GatherElementsGrad", domain=DOMAIN, uses_output_shape=True)
def _gather_elements_grad(forms: KnownForms, node: ir.Node) -> Form:
    grad, index = forms.operand(node, 0), forms.operand(node, 2)
    blank = _blank(forms, node, 1)
    return scattered(forms, blank, index, grad, attribute(node, "axis", 0) % len(blank.groups))[0]


@reads("GatherGrad", domain=DOMAIN, uses_output_shape=True)
def _gather_grad(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    index, grad = forms.operand(node, 1), forms.operand(node, 2)
    out = _blank(forms, node, 0)
    axis = attribute(node, "axis", 0) % len(out.groups)
    if len(out.groups[axis]) != 1:
        raise Opaque("a gather from a composed dimension")
    # The gradient has the index's dimensions in the place of the gathered one; these are summed.
    (v,) = out.variables(axis)
    index = from_start(forms, index, out.groups[axis][0])
    lead = Form(grad.groups[axis : axis + len(index.groups)], ZERO)
    groups, (x, _) = forms.broadcast([index, lead])
    if groups != lead.groups:
        raise Opaque("layouts do not align")
    width = len(lead.sizes)
    bound = dict(zip(algebra.fresh(width), lead.sizes, strict=True))
    apart = {k: algebra.var(w) for k, w in enumerate(bound)}
    names = {v + k: p for k, p in apart.items()} | {
        w: algebra.var(w - width + 1) for w in range(v + width, len(grad.sizes))
    }
    hit = algebra.equal_zero(algebra.var(v) - algebra.substitute(x, apart))
    term = algebra.mul(hit, algebra.substitute(grad.poly, names))
    return Form(out.groups, algebra.sum(term, bound, dict(enumerate(out.sizes))))


@reads("GatherNDGrad", domain=DOMAIN, uses_output_shape=True)
def _gather_nd_grad(forms: KnownForms, node: ir.Node) -> Form:
    index, grad = forms.operand(node, 1), forms.operand(node, 2)
    blank = _blank(forms, node, 0)
    return scattered_by_rows(forms, blank, with_batch_indices(forms, index, attribute(node, "batch_dims", 0)), grad)[0]


@reads("SliceGrad", domain=DOMAIN, uses_output_shape=True)
def _slice_grad(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    rank = len(x.groups)
    starts, ends, axes, steps = (forms.constant(v) for v in (*node.inputs[2:], None, None)[:4])
    if starts is None or ends is None or (steps is not None and np.any(steps != 1)):
        raise Opaque("a slice that is not constant")
    if axes is None and len(node.inputs) > 4 and node.inputs[4] is not None:
        raise Opaque("axes are not constant")
    whole = _blank(forms, node, 1).groups
    for axis, start in zip(range(len(starts)) if axes is None else axes, starts, strict=True):
        axis = int(axis) % rank
        total = forms.extent(whole[axis])
        first = number(int(start)) if start >= 0 else total + number(int(start))
        if any(c < 0 for c in first.terms.values()) and first.integer is None:
            raise Opaque("a slice that may begin ahead of the first element")
        x = windowed(forms, x, axis, number(max(0, first.integer)) if first.integer is not None else first, total)
    return x


@reads("ConcatTraining", domain=DOMAIN)
def _concat_training(forms: KnownForms, node: ir.Node) -> list[Form | None]:
    parts = forms.operands(node)
    return [concatenated(forms, parts, attribute(node, "axis", 0) % len(parts[0].groups)), None]


@reads("SplitTraining", domain=DOMAIN, uses_output_shape=True)
def _split_training(forms: KnownForms, node: ir.Node) -> list[Form | None]:
    x = forms.operand(node, 0)
    axis = attribute(node, "axis", 0) % len(x.groups)
    result: list[Form | None] = []
    start = 0
    for k in range(len(node.outputs)):
        size = forms.extent(forms.groups_of(forms.output(node, k))[axis])
        if size.integer is None:
            raise Opaque("a part of symbolic size")
        result.append(sliced(forms, x, axis, number(start), 1, size))
        start += size.integer
    return result


# The same operators on arrays.


@cache
def reference_ops() -> list[type]:
    """The operators as classes of onnx's reference evaluator, for the test of a match by numbers."""
    from onnx.reference.op_run import OpRun

    def op(name: str, run: Callable[..., Array | tuple[Array, ...]], domain: str = DOMAIN) -> type:
        def _run(self: Any, *inputs: Array, **attributes: Any) -> tuple[Array, ...]:
            result = run(*inputs, **attributes)
            return result if isinstance(result, tuple) else (result,)

        return type(name, (OpRun,), {"op_domain": domain, "_run": _run, "__abstractmethods__": frozenset()})

    own = [op(name, run) for name, run in (ON_ARRAYS | WITHOUT_FORM).items()]
    return [*own, op("MaxPoolGrad", _max_pool_grad_array, domain="")]


def further_inputs(node: ir.Node) -> list[ir.Value]:
    """What the array version of an operator reads beside a node's inputs.

    onnxruntime knows the shape of what was pooled from the graph.
    """
    if node.op_type != "MaxPoolGrad" or node.domain or node.inputs[1] is None:
        return []
    pool = node.inputs[1].producer()
    return [] if pool is None or pool.inputs[0] is None else [pool.inputs[0]]


def _scale_array(x: Array, factor: Array, scale_down: int = 0) -> Array:
    return np.asarray(x / factor if scale_down else x * factor)


def _broadcast_gradient_args_array(a: Array, b: Array) -> tuple[Array, ...]:
    rank = max(len(a), len(b))
    sizes = [[None] * (rank - len(shape)) + [int(n) for n in shape] for shape in (a, b)]
    pairs = (list(zip(mine, theirs, strict=True)) for mine, theirs in (sizes, sizes[::-1]))
    axes = ([k for k, (m, t) in enumerate(own) if m is None or (m == 1 and t not in (None, 1))] for own in pairs)
    return tuple(np.asarray(own, np.int64) for own in axes)


def _fused_mat_mul_array(
    a: Array,
    b: Array,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    **_: int,
) -> Array:
    turned = (x.swapaxes(-1, -2) if flag and x.ndim > 1 else x for x, flag in ((a, transA), (b, transB)))
    return np.asarray(alpha * np.matmul(*turned))


def _softmax_grad_array(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(y * (grad - (grad * y).sum(axis, keepdims=True)))


def _log_softmax_grad_array(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(grad - np.exp(y) * grad.sum(axis, keepdims=True))


def axis_of_classes_at(scores: tuple[int, ...], labels: tuple[int, ...]) -> int:
    """`axis_of_classes` of tensors of these shapes."""
    return len(scores) - 1 if scores[:-1] == labels != (*scores[:1], *scores[2:]) else 1


def _softmax_cross_entropy_loss_internal_array(scores: Array, label: Array, *_: Array, **__: Any) -> tuple[Array, ...]:
    """The log-probabilities; the loss itself, which no backward pass reads, is left out."""
    along = axis_of_classes_at(scores.shape, label.shape)
    shifted = scores - scores.max(along, keepdims=True, initial=-np.inf)
    return np.zeros(()), shifted - np.log(np.exp(shifted).sum(along, keepdims=True))


def _flat_softmax_grad(run: Callable[..., Array]) -> Callable[..., Array]:
    def flat(grad: Array, y: Array, axis: int = 1) -> Array:
        rows = (int(np.prod(y.shape[: axis % y.ndim])), -1)
        return run(grad.reshape(rows), y.reshape(rows)).reshape(y.shape)

    return flat


def _softmax_cross_entropy_loss_grad_array(
    grad: Array,
    log_prob: Array,
    label: Array,
    weight: Array | None = None,
    ignored: Array | None = None,
    more: Array | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    output_type: int = 0,
) -> Array:
    if ignored is not None:
        ignore_index = int(ignored)
    along = axis_of_classes_at(log_prob.shape, label.shape)
    log_prob = np.moveaxis(log_prob, along, 1)
    counted = np.ones(label.shape, bool) if ignore_index is None else label != ignore_index
    label = np.where(counted, label, 0)
    row = counted * (np.ones(label.shape) if weight is None else weight[label])
    scale = grad * row / (row.sum() if reduction == "mean" else 1.0)
    classes = np.arange(log_prob.shape[1]).reshape(-1, *(1,) * (log_prob.ndim - 2))
    result = np.exp(log_prob) - (np.expand_dims(label, 1) == classes)
    result = np.moveaxis(np.where(np.expand_dims(counted, 1), np.expand_dims(scale, 1) * result, 0.0), 1, along)
    return result if more is None else result + more


def _gather_elements_grad_array(grad: Array, shape: Array, index: Array, axis: int = 0) -> Array:
    out = np.zeros(shape, grad.dtype)
    places: list[Array] = list(np.indices(index.shape, sparse=True))
    places[axis] = index
    np.add.at(out, tuple(places), grad)
    return out


def _gather_grad_array(shape: Array, index: Array, grad: Array, axis: int = 0) -> Array:
    out = np.zeros(shape, grad.dtype)
    axis %= out.ndim
    moved = np.moveaxis(grad, range(axis), range(index.ndim, index.ndim + axis))
    np.add.at(np.moveaxis(out, axis, 0), index, moved)
    return out


def _gather_nd_grad_array(shape: Array, index: Array, grad: Array, batch_dims: int = 0) -> Array:
    out = np.zeros(shape, grad.dtype)
    batches = np.indices(index.shape[:-1])[:batch_dims]
    np.add.at(out, (*batches, *np.moveaxis(index, -1, 0)), grad)
    return out


def _slice_grad_array(
    grad: Array, shape: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    out = np.zeros(shape, grad.dtype)
    places = [slice(None)] * out.ndim
    for k, axis in enumerate(range(len(starts)) if axes is None else axes):
        places[int(axis)] = slice(int(starts[k]), int(ends[k]), 1 if steps is None else int(steps[k]))
    out[tuple(places)] = grad
    return out


def _concat_training_array(*parts: Array, axis: int = 0) -> tuple[Array, ...]:
    return np.concatenate(parts, axis), np.asarray([p.shape[axis] for p in parts], np.int64)


def _conv_grad_array(dy: Array, x: Array, w: Array, group: int = 1, **options: Any) -> tuple[Array, ...]:
    """The gradients of x, w and the bias, tap by tap."""
    spatial = w.ndim - 2
    others, ones = (0, *range(2, w.ndim)), [1] * spatial
    strides, dilations = (options.get(name) or ones for name in ("strides", "dilations"))
    pads = options.get("pads") or [0] * 2 * spatial
    edges = list(zip(pads[:spatial], pads[spatial:], strict=True))
    wide = np.pad(x, [(0, 0), (0, 0), *edges])
    dx, dw = np.zeros_like(wide), np.zeros_like(w)
    gradients, images = (np.split(a, group, 1) for a in (dy, wide))
    for tap in np.ndindex(*w.shape[2:]):
        own: Any = (..., *tap)
        steps = zip(tap, dilations, strides, dy.shape[2:], strict=True)
        places: Any = (..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, s, n in steps))
        kernels = np.split(w[own], group)
        dx[places] += np.concatenate(
            [np.einsum("no...,oc->nc...", g, k) for g, k in zip(gradients, kernels, strict=True)], 1
        )
        parts = [np.tensordot(g, i[places], (others, others)) for g, i in zip(gradients, images, strict=True)]
        dw[own] = np.concatenate(parts)
    inner: Any = (..., *(slice(p, n - q) for (p, q), n in zip(edges, wide.shape[2:], strict=True)))
    return dx[inner], dw, dy.sum(others)


def _max_pool_grad_array(grad: Array, indices: Array, pooled: Array, **_: Any) -> Array:
    out = np.zeros(pooled.size, grad.dtype)
    np.add.at(out, indices.ravel(), grad.ravel())
    return out.reshape(pooled.shape)


def _batch_normalization_grad_array(
    dy: Array, x: Array, scale: Array, mean: Array, invstd: Array, **_: Any
) -> tuple[Array, ...]:
    others = (0, *range(2, x.ndim))
    column = [1, -1, *[1] * (x.ndim - 2)]
    normalized = (x - mean.reshape(column)) * invstd.reshape(column)
    d_scale, d_bias = (dy * normalized).sum(others), dy.sum(others)
    count = x.size / max(x.shape[1], 1)
    centred = dy - (d_bias.reshape(column) + normalized * d_scale.reshape(column)) / count
    return centred * (scale * invstd).reshape(column), d_scale, d_bias


def _layer_normalization_grad_array(
    dy: Array, x: Array, scale: Array, *statistics: Array, axis: int = -1, **_: Any
) -> tuple[Array, ...]:
    """With the mean and the inverse deviation, or without a mean, as in RMS normalization."""
    first = axis % x.ndim
    outer, inner = tuple(range(first)), tuple(range(first, x.ndim))
    *mean, inverse = statistics
    normalized = (x - mean[0] if mean else x) * inverse
    scaled = dy * scale
    left = scaled - normalized * (scaled * normalized).mean(inner, keepdims=True)
    if mean:
        left -= scaled.mean(inner, keepdims=True)
    sums = [(dy * normalized).sum(outer), dy.sum(outer)]
    return left * inverse, *sums[: 1 + len(mean)]


def _gelu_grad_array(grad: Array, x: Array, bias: float | Array = 0.0) -> tuple[Array, ...]:
    x = x + bias
    cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x * math.sqrt(0.5)))
    return (grad * (cdf + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)),)


def _fast_gelu_grad_array(grad: Array, x: Array, bias: float | Array = 0.0) -> tuple[Array, ...]:
    x = x + bias
    scale, cube = math.sqrt(2 / math.pi), 0.044715
    curve = np.tanh(scale * (x + cube * x**3))
    return (grad * 0.5 * (1 + curve + x * (1 - curve * curve) * scale * (1 + 3 * cube * x * x)),)


ON_ARRAYS: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "Scale": _scale_array,
    "TanhGrad": lambda grad, y: np.asarray(grad * (1 - y * y)),
    "SigmoidGrad": lambda grad, y: np.asarray(grad * y * (1 - y)),
    "SoftmaxGrad_13": _softmax_grad_array,
    "LogSoftmaxGrad_13": _log_softmax_grad_array,
    "SoftmaxGrad": _flat_softmax_grad(_softmax_grad_array),
    "LogSoftmaxGrad": _flat_softmax_grad(_log_softmax_grad_array),
    "BroadcastGradientArgs": _broadcast_gradient_args_array,
    "FusedMatMul": _fused_mat_mul_array,
    "SoftmaxCrossEntropyLossInternal": _softmax_cross_entropy_loss_internal_array,
    "SoftmaxCrossEntropyLossGrad": _softmax_cross_entropy_loss_grad_array,
    "SoftmaxCrossEntropyLossInternalGrad": _softmax_cross_entropy_loss_grad_array,
    "GatherElementsGrad": _gather_elements_grad_array,
    "GatherGrad": _gather_grad_array,
    "GatherNDGrad": _gather_nd_grad_array,
    "SliceGrad": _slice_grad_array,
    "ConcatTraining": _concat_training_array,
    "SplitTraining": lambda x, split, axis=0: tuple(np.split(x, np.cumsum(split)[:-1], axis)),
}

WITHOUT_FORM: dict[str, Callable[..., tuple[Array, ...]]] = {
    "ConvGrad": _conv_grad_array,
    **dict.fromkeys(("GeluGrad", "BiasGeluGrad_dX"), _gelu_grad_array),
    **dict.fromkeys(("FastGeluGrad", "BiasFastGeluGrad_dX"), _fast_gelu_grad_array),
    "BatchNormalizationGrad": _batch_normalization_grad_array,
    **dict.fromkeys(("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"), _layer_normalization_grad_array),
}
"""Those that are not read, which rules know by name."""


def is_pure(node: ir.Node) -> bool:
    """Whether a node is of onnxruntime-training, and does nothing but compute its results of what it reads."""
    return node.domain == DOMAIN and (node.op_type in ON_ARRAYS or node.op_type in WITHOUT_FORM)
