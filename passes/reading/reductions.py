"""Readers of sums along dimensions, and of softmaxes, which have such a sum in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly
from gradfuse.passes.reading.indexing import scattered
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import Opaque, attribute, given, is_float
from gradfuse.passes.reading.registry import reads


def _row_sum_of_exp(forms: KnownForms, x: Form, axes: Sequence[int]) -> tuple[Poly, Poly]:
    e = forms.algebra.exp(x.poly)
    sizes = x.sizes
    variables = {v: sizes[v] for axis in axes for v in x.variables(axis)}
    return e, forms.algebra.sum(e, variables, dict(enumerate(sizes)))


@reads("Softmax")
def _softmax(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    e, total = _row_sum_of_exp(forms, x, [attribute(node, "axis", -1) % len(x.groups)])
    return Form(x.groups, forms.algebra.mul(e, forms.algebra.power(total, -1)))


@reads("LogSoftmax")
def _log_softmax(forms: KnownForms, node: ir.Node) -> Form:
    (x,) = forms.operands(node)
    return log_softmax(forms, x, attribute(node, "axis", -1) % len(x.groups))


def log_softmax(forms: KnownForms, x: Form, axis: int) -> Form:
    """The logarithm of the softmax of a form along an axis."""
    _, total = _row_sum_of_exp(forms, x, [axis])
    return Form(x.groups, x.poly - forms.algebra.log(total))


def axis_of_classes(forms: KnownForms, scores: Form, labels: Form) -> int:
    """The axis of a loss's scores that the labels do not have: 1, and the last where they fit nothing else.

    The gradient builder of onnxruntime-training leaves out that tokens of sequences were reshaped to rows.
    """
    sizes, own = ([forms.extent(group) for group in form.groups] for form in (scores, labels))
    differs = [
        a.integer != b.integer for a, b in zip(own[1:], sizes[2:], strict=False) if None not in (a.integer, b.integer)
    ]
    return len(sizes) - 1 if own == sizes[:-1] and any(differs) else 1


def log_softmax_of_scores(forms: KnownForms, node: ir.Node) -> Form:
    """The log-probabilities that a loss of scores and labels gives beside itself."""
    scores, labels = forms.operand(node, 0), forms.operand(node, 1)
    return log_softmax(forms, scores, axis_of_classes(forms, scores, labels))


@reads("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy_loss(forms: KnownForms, node: ir.Node) -> list[Form | None]:
    return [None, log_softmax_of_scores(forms, node)]


def reduced_axes(forms: KnownForms, node: ir.Node, x: Form) -> tuple[list[int], list[int | None]]:
    """The axes of a reduction, and the order of the dimensions that are left."""
    rank = len(x.groups)
    keep = bool(attribute(node, "keepdims", 1))
    computed = node.inputs[1] if len(node.inputs) > 1 and forms.constant(node.inputs[1]) is None else None
    tested = axes_of_size_one(forms, computed)
    if tested is not None and keep and attribute(node, "noop_with_empty_axes", 0):
        # Where the size that is tested is the dimension's own, there is nothing to sum either way.
        if any(s != forms.extent(x.groups[a]) for a, s in enumerate(tested) if s.integer is None):
            raise Opaque("axes are not constant")
        axes = [a for a, s in enumerate(tested) if s.constant == 1]
    elif (stretched := broadcast_axes(forms, computed)) is not None:
        # Where the size is symbolic, and 1 in the end, there is nothing to sum either way.
        known = all(s is None or s.integer or s == forms.extent(x.groups[a]) for a, s in stretched.items())
        if not (keep and known and attribute(node, "noop_with_empty_axes", 0)):
            raise Opaque("axes are not constant")
        axes = list(stretched)
    else:
        everything = [] if attribute(node, "noop_with_empty_axes", 0) else list(range(rank))
        axes = forms.axes(node, 1, rank) or everything
    return axes, [None if a in axes else a for a in range(rank) if keep or a not in axes]


def axes_of_size_one(forms: KnownForms, value: ir.Value | None) -> list[Poly] | None:
    """The sizes of which those axes are taken that have size 1, as NonZero(Equal(sizes, 1)); None for other axes."""
    while value is not None and (node := forms.producer(value)) is not None and node.domain == "":
        if node.op_type not in ("Squeeze", "Reshape", "Flatten", "Cast", "Identity", "NonZero", "Transpose"):
            break
        value = node.inputs[0]
        if node.op_type == "NonZero":
            equal = forms.producer(value)
            if equal is None or equal.op_type != "Equal" or equal.domain:
                return None
            pair = [forms.vector(v) for v in equal.inputs]
            return next((p for p, q in (pair, pair[::-1]) if q is not None and q == [UNIT]), None)
    return None


def is_broadcast_axes(node: ir.Node) -> bool:
    """Whether a node gives the axes that broadcasting two shapes stretches: onnxruntime-training's way to undo it."""
    return (node.domain, node.op_type) == ("com.microsoft", "BroadcastGradientArgs")


def broadcast_axes(forms: KnownForms, value: ir.Value | None) -> dict[int, Poly | None] | None:
    """The axes along which a shape is repeated to broadcast with another one, and the sizes that the other one has.

    The size is None where the shape has no such axis. An axis whose size is symbolic is one only if that is not 1.
    None for axes that come from elsewhere; raises Opaque where the sizes do not tell.
    """
    if value is None or (node := forms.producer(value)) is None or not is_broadcast_axes(node):
        return None
    own, other = (forms.vector(v) for v in (node.inputs if value is node.outputs[0] else reversed(node.inputs)))
    if own is None or other is None:
        raise Opaque("axes are not constant")
    rank = max(len(own), len(other))
    axes: dict[int, Poly | None] = {}
    for axis in range(rank):
        mine, theirs = (sizes[axis - rank] if axis >= rank - len(sizes) else None for sizes in (own, other))
        if mine is None:
            axes[axis] = None
        elif theirs is None or mine == theirs or theirs == UNIT or (mine.integer or 0) > 1:
            continue
        elif mine == UNIT:
            axes[axis] = theirs
        else:
            raise Opaque("a dimension may be repeated")
    return axes


@reads(
    *("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"), uses_producers=True
)
def _reduce(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    x = forms.operand(node, 0)
    if node.op_type == "ReduceSum" and (sums := segment_sum(forms, x, lambda: reduced_axes(forms, node, x)[0])):
        return forms.moved(sums, [0, None, *range(1, len(sums.groups))]) if attribute(node, "keepdims", 1) else sums
    if node.op_type not in ("ReduceSum", "ReduceSumSquare") and not is_float(given(node.inputs, 0)):
        raise Opaque("a mean, root or logarithm of integers is rounded")
    axes, order = reduced_axes(forms, node, x)
    sizes = x.sizes
    variables = {v: sizes[v] for axis in axes for v in x.variables(axis)}
    if node.op_type == "ReduceLogSumExp":
        poly = algebra.log(_row_sum_of_exp(forms, x, axes)[1])
    else:
        squares = node.op_type in ("ReduceSumSquare", "ReduceL2")
        poly = algebra.sum(algebra.mul(x.poly, x.poly) if squares else x.poly, variables, dict(enumerate(sizes)))
        if node.op_type == "ReduceMean":
            poly = algebra.mul(poly, algebra.power(algebra.product(variables.values()), -1))
        elif node.op_type == "ReduceL2":
            poly = algebra.exponentiate(poly, 0.5)
        elif node.op_type == "ReduceLogSum":
            poly = algebra.log(poly)
    groups = tuple(() if a in axes else g for a, g in enumerate(x.groups))
    left = {v: algebra.var(k) for k, v in enumerate(v for v in range(len(sizes)) if v not in variables)}
    return forms.moved(Form(groups, algebra.substitute(poly, left)), order)


@reads("GlobalAveragePool")
def _global_average_pool(forms: KnownForms, node: ir.Node) -> Form:
    algebra, x = forms.algebra, forms.operand(node, 0)
    before = sum(len(group) for group in x.groups[:2])
    summed = {v: size for v, size in enumerate(x.sizes) if v >= before}
    total = algebra.sum(x.poly, summed, dict(enumerate(x.sizes)))
    mean = algebra.mul(total, algebra.power(algebra.product(summed.values()), -1))
    return Form((*x.groups[:2], *((),) * (len(x.groups) - 2)), mean)


@reads("AveragePool")
def _average_pool(forms: KnownForms, node: ir.Node) -> Form:
    """The mean over windows that lie side by side."""
    x = forms.operand(node, 0)
    kernel = [int(n) for n in attribute(node, "kernel_shape", ())]
    return _sum_of_windows(forms, node, x, kernel, 1 / math.prod(kernel))


@reads("Conv")
def _convolution(forms: KnownForms, node: ir.Node) -> Form:
    """The sum over windows that lie side by side, by a kernel of equal numbers; and over the channels of each group."""
    algebra, x = forms.algebra, forms.operand(node, 0)
    weight, groups = forms.constant(given(node.inputs, 1)), attribute(node, "group", 1)
    if weight is None or weight.ndim != len(x.groups) or weight.size == 0 or not np.all(weight == weight.flat[0]):
        raise Opaque("a kernel that is not of equal numbers")
    if len(weight) != groups or len(node.inputs) > 2 or not np.isfinite(weight.flat[0]):
        raise Opaque("a bias, or several results of a group")
    sums = _sum_of_windows(forms, node, x, list(weight.shape[2:]), float(weight.flat[0]))
    if weight.shape[1] == 1:
        return sums
    # The channels of a group become a dimension of their own, which is summed over.
    sizes = [forms.extent(group) for group in sums.groups]
    sizes[1:2] = [UNIT.scaled(groups), UNIT.scaled(weight.shape[1])]
    split = forms.regrouped(sums, sizes)
    inner = {v: split.sizes[v] for v in split.variables(2)}
    left = {v: algebra.var(k) for k, v in enumerate(v for v in range(len(split.sizes)) if v not in inner)}
    poly = algebra.substitute(algebra.sum(split.poly, inner, dict(enumerate(split.sizes))), left)
    return Form((*split.groups[:2], *split.groups[3:]), poly)


def _sum_of_windows(forms: KnownForms, node: ir.Node, x: Form, kernel: Sequence[int], factor: float) -> Form:
    """A number times the sums over windows of a node, which divide each dimension of an image that they are wide in."""
    algebra = forms.algebra
    strides = attribute(node, "strides", None) or [1] * len(kernel)
    if (
        len(kernel) != len(x.groups) - 2
        or any(attribute(node, "pads", ()))
        or any(step != 1 for step in attribute(node, "dilations", None) or ())
    ):
        raise Opaque("windows that are padded or dilated")
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Opaque("windows that are padded")
    sizes, windows = [forms.extent(group) for group in x.groups[:2]], list[int]()
    for group, width, step in zip(x.groups[2:], kernel, strides, strict=True):
        size = forms.extent(group)
        if (width, step) == (1, 1):
            sizes.append(size)
            continue
        count = UNIT if size.integer == width else None
        if width == step and count is None:
            count = forms.layouts.quotient(size, UNIT.scaled(width))
        if count is None:
            raise Opaque("windows that overlap or leave something out")
        windows.append(len(sizes) + 1)
        sizes += [count, UNIT.scaled(width)]
    split = forms.regrouped(x, sizes)
    summed = {v: split.sizes[v] for axis in windows for v in split.variables(axis)}
    total = algebra.sum(split.poly, summed, dict(enumerate(split.sizes))).scaled(factor)
    left = {v: algebra.var(k) for k, v in enumerate(v for v in range(len(split.sizes)) if v not in summed)}
    groups = tuple(group for axis, group in enumerate(split.groups) if axis not in windows)
    return Form(groups, algebra.substitute(total, left))


def segment_sum(forms: KnownForms, x: Form, axes: Callable[[], Sequence[int]]) -> Form | None:
    """The sum of the rows of segments, where they are gathered by a table, and a row of zeros comes after them.

    `axes` gives those that are summed over. None for other sums.
    """
    used = [name for name in forms.algebra.tensors(x.poly) if name in forms.tables]
    if not used or x.poly != forms.algebra.tensor(used[0], map(forms.algebra.var, range(len(x.sizes)))):
        return None
    table = forms.tables[used[0]]
    gather = table.gather
    source = None if gather is None else gather.inputs[0]
    concat = None if source is None else source.producer()
    if gather is None or concat is None or concat.domain or concat.op_type != "Concat" or attribute(concat, "axis", 0):
        return None
    rows, *end = forms.operands(concat)
    of_zeros = len(end) == 1 and not end[0].poly and not end[0].groups[0]
    if not of_zeros or forms.extent(rows.groups[0]) != forms.extent(table.ids.groups[0]):
        return None
    if list(axes()) != [1]:
        return None
    ids = Form((table.ids.groups[0], *rows.groups[1:]), table.ids.poly)
    sums, _ = scattered(forms, Form(((table.segments,), *rows.groups[1:]), ZERO), ids, rows, 0)
    forms.looked_through.update((gather, concat))
    return sums


@reads("CumSum")
def _cumsum(forms: KnownForms, node: ir.Node) -> Form:
    algebra = forms.algebra
    x, axis = forms.operand(node, 0), forms.constant(given(node.inputs, 1))
    if axis is None:
        raise Opaque("an axis that is not constant")
    variables = x.variables(int(axis.item()) % len(x.groups))
    strict = bool(attribute(node, "exclusive", 0))
    if len(variables) != 1:
        if variables or strict:
            raise Opaque("a sum along a composed dimension")
        return x
    sizes, v, (w,) = dict(enumerate(x.sizes)), variables[0], algebra.fresh(1)
    ahead = algebra.var(w) - algebra.var(v) if attribute(node, "reverse", 0) else algebra.var(v) - algebra.var(w)
    counts = algebra.less_than_zero(-ahead) if strict else UNIT - algebra.less_than_zero(ahead)
    term = algebra.mul(counts, algebra.substitute(x.poly, {v: algebra.var(w)}))
    return Form(x.groups, algebra.sum(term, {w: sizes[v]}, sizes))
