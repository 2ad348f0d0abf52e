"""Readers of the operators that onnxruntime-training's gradient builder emits, in the domain com.microsoft.

They have no specification of their own; each is read as the gradient that its name says, of the ONNX operator's inputs.
`reference_ops` has the same operators for onnx's reference evaluator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, number
from gradfuse.passes.forms import (
    Form,
    Forms,
    Opaque,
    attribute,
    concatenated,
    given,
    inputs_of,
    reads,
    scattered,
    sliced,
)

DOMAIN = "com.microsoft"
Array = npt.NDArray[Any]


@reads("Scale", domain=DOMAIN)
def _scale(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    groups, (x, factor) = forms.broadcast(inputs_of(forms, node))
    return Form(groups, algebra.mul(x, algebra.power(factor, -1) if attribute(node, "scale_down", 0) else factor))


@reads("SoftmaxGrad_13", "LogSoftmaxGrad_13", domain=DOMAIN)
def _softmax_grad(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    operands = inputs_of(forms, node)
    groups, (grad, y) = forms.broadcast(operands)
    form = Form(groups, ZERO)
    sizes = dict(enumerate(form.sizes))
    along = {v: sizes[v] for v in form.variables(attribute(node, "axis", -1) % len(groups))}
    if node.op_type == "SoftmaxGrad_13":
        return Form(groups, algebra.mul(y, grad - algebra.sum(algebra.mul(grad, y), along, sizes)))
    return Form(groups, grad - algebra.mul(algebra.exp(y), algebra.sum(grad, along, sizes)))


@reads("SoftmaxCrossEntropyLossGrad", domain=DOMAIN)
def _softmax_cross_entropy_loss_grad(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    loss_grad, log_prob, label, *rest = inputs_of(forms, node)
    rank = len(log_prob.groups)
    per_row: list[int | None] = [0, None, *range(1, rank - 1)]
    reduction = attribute(node, "reduction", "mean")
    if len(log_prob.groups[1]) != 1 or reduction not in ("mean", "sum", "none"):
        raise Opaque("a loss that is not read")
    grad = forms.moved(loss_grad, per_row) if reduction == "none" else Form((), loss_grad.poly)
    groups, (z, g, t) = forms.broadcast([log_prob, grad, forms.moved(label, per_row)])
    form = Form(groups, ZERO)
    sizes = dict(enumerate(form.sizes))
    (c,) = form.variables(1)
    counts = UNIT
    if "ignore_index" in node.attributes:
        counts = UNIT - algebra.equal_zero(t - number(attribute(node, "ignore_index", 0)))
    if rest:
        counts = algebra.mul(counts, algebra.substitute(rest[0].poly, {0: t}))
    q = algebra.mul(g, counts)
    if reduction == "mean":
        rows = {v: s for v, s in sizes.items() if v != c}
        q = algebra.mul(q, algebra.power(algebra.sum(counts, rows, sizes), -1))
    return Form(groups, algebra.mul(q, algebra.exp(z) - algebra.equal_zero(algebra.var(c) - t)))


@reads("GatherElementsGrad", domain=DOMAIN)
def _gather_elements_grad(forms: Forms, node: ir.Node) -> Form:
    grad, index = forms.form(given(node.inputs, 0)), forms.form(given(node.inputs, 2))
    blank = Form(forms.groups_of(node.outputs[0]), ZERO)
    return scattered(forms, blank, index, grad, attribute(node, "axis", 0) % len(blank.groups))[0]


@reads("GatherGrad", domain=DOMAIN)
def _gather_grad(forms: Forms, node: ir.Node) -> Form:
    algebra = forms.algebra
    index, grad = forms.form(given(node.inputs, 1)), forms.form(given(node.inputs, 2))
    out = Form(forms.groups_of(node.outputs[0]), ZERO)
    axis = attribute(node, "axis", 0) % len(out.groups)
    if len(out.groups[axis]) != 1:
        raise Opaque("a gather from a composed dimension")
    # The gradient has the index's dimensions in the place of the gathered one; these are summed.
    (v,) = out.variables(axis)
    lead = Form(grad.groups[axis : axis + len(index.groups)], ZERO)
    groups, (x, _) = forms.broadcast([index, lead])
    if groups != lead.groups:
        raise Opaque("layouts do not align")
    width = len(lead.sizes)
    bound = {-3_000_000 - k: size for k, size in enumerate(lead.sizes)}
    apart = {k: algebra.var(-3_000_000 - k) for k in range(width)}
    names = {v + k: p for k, p in apart.items()} | {
        w: algebra.var(w - width + 1) for w in range(v + width, len(grad.sizes))
    }
    hit = algebra.equal_zero(algebra.var(v) - algebra.substitute(x, apart))
    term = algebra.mul(hit, algebra.substitute(grad.poly, names))
    return Form(out.groups, algebra.sum(term, bound, dict(enumerate(out.sizes))))


@reads("ConcatTraining", domain=DOMAIN)
def _concat_training(forms: Forms, node: ir.Node) -> list[Form | None]:
    parts = inputs_of(forms, node)
    return [concatenated(forms, parts, attribute(node, "axis", 0) % len(parts[0].groups)), None]


@reads("SplitTraining", domain=DOMAIN)
def _split_training(forms: Forms, node: ir.Node) -> list[Form | None]:
    x = forms.form(given(node.inputs, 0))
    axis = attribute(node, "axis", 0) % len(x.groups)
    result: list[Form | None] = []
    start = 0
    for output in node.outputs:
        size = forms.extent(forms.groups_of(output)[axis])
        if size.integer is None:
            raise Opaque("a part of symbolic size")
        result.append(sliced(forms, x, axis, number(start), 1, size))
        start += size.integer
    return result


# The same operators on arrays.


@cache
def reference_ops() -> list[type]:
    """The operators as classes of onnx's reference evaluator, for the numerical proof of a match."""
    from onnx.reference.op_run import OpRun

    def op(name: str, run: Callable[..., Array | tuple[Array, ...]]) -> type:
        def _run(self: Any, *inputs: Array, **attributes: Any) -> tuple[Array, ...]:
            result = run(*inputs, **attributes)
            return result if isinstance(result, tuple) else (result,)

        return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": _run, "__abstractmethods__": frozenset()})

    return [op(name, run) for name, run in _ON_ARRAYS.items()]


def _scale_array(x: Array, factor: Array, scale_down: int = 0) -> Array:
    return np.asarray(x / factor if scale_down else x * factor)


def _softmax_grad_array(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(y * (grad - (grad * y).sum(axis, keepdims=True)))


def _log_softmax_grad_array(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(grad - np.exp(y) * grad.sum(axis, keepdims=True))


def _softmax_cross_entropy_loss_grad_array(
    grad: Array,
    log_prob: Array,
    label: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Array:
    counted = np.ones(label.shape, bool) if ignore_index is None else label != ignore_index
    label = np.where(counted, label, 0)
    row = counted * (np.ones(label.shape) if weight is None else weight[label])
    scale = grad * row / (row.sum() if reduction == "mean" else 1.0)
    classes = np.arange(log_prob.shape[1]).reshape(-1, *(1,) * (log_prob.ndim - 2))
    result = np.exp(log_prob) - (np.expand_dims(label, 1) == classes)
    return np.where(np.expand_dims(counted, 1), np.expand_dims(scale, 1) * result, 0.0)


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


def _concat_training_array(*parts: Array, axis: int = 0) -> tuple[Array, ...]:
    return np.concatenate(parts, axis), np.asarray([p.shape[axis] for p in parts], np.int64)


_ON_ARRAYS: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "Scale": _scale_array,
    "SoftmaxGrad_13": _softmax_grad_array,
    "LogSoftmaxGrad_13": _log_softmax_grad_array,
    "SoftmaxCrossEntropyLossGrad": _softmax_cross_entropy_loss_grad_array,
    "GatherElementsGrad": _gather_elements_grad_array,
    "GatherGrad": _gather_grad_array,
    "ConcatTraining": _concat_training_array,
    "SplitTraining": lambda x, split, axis=0: tuple(np.split(x, np.cumsum(split)[:-1], axis)),
}
