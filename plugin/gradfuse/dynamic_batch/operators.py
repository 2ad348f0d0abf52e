"""Rules of operators that compute."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gradfuse.custom_ops.operator import DOMAIN
from gradfuse.custom_ops.pointwise_expressions import INPUTS, OUTPUTS, parse
from gradfuse.dynamic_batch.analysis import DETERMINISTIC, DRAWS, Call, kept, rule
from gradfuse.dynamic_batch.layouts import Layout, Multiple

_ORT = "com.microsoft"
_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip", "Cos"),
    *("Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign"),
    *("Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
)
_BROADCAST = (
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater"),
    *("GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum"),
    *("Where", "Xor"),
)
_OTHER_AXES = "computes along the batch"
_MATRIX = 2
"""How many axes at the end a product of matrices takes."""

DETERMINISTIC.update(_UNARY, _BROADCAST)


def _first(call: Call) -> Layout:
    """Return where the batch is in the first input, of a node that takes nothing of it in others."""
    call.require_fixed(0)
    layout = call.layout(0)
    assert layout is not None
    return layout


@rule(*_UNARY, "Bernoulli", "Dropout", "RandomNormalLike", "RandomUniformLike")
@rule("Gelu", "QuickGelu", domain=_ORT)
def _like_first(call: Call) -> None:
    call.give(_first(call))


@rule("CastLike")
def _cast_like(call: Call) -> None:
    layout = call.layout(0)
    if call.value(0) in call.known.counts:
        call.refuse("computes with the size of the batch")
    if layout is not None:
        call.give(layout)


@rule(*_BROADCAST)
@rule("BiasGelu", "FastGelu", domain=_ORT)
def _broadcast(call: Call) -> None:
    indices = range(len(call.node.inputs))
    call.require_fixed(*indices)
    call.give(call.joined(indices, len(call.result_sizes())))


@rule("Pointwise", domain=DOMAIN)
def _pointwise(call: Call) -> None:
    call.require_fixed(*range(len(INPUTS)))
    layout = call.joined(range(len(INPUTS)), call.rank())
    if call.layout(0) is None:
        # Results have the shape of the first input.
        call.repeat(0, layout, broadcasts=False)
    assigned = parse(call.attribute("expression", "y0 = x0")).outputs
    call.give(layout, *(index for index, name in enumerate(OUTPUTS) if name in assigned))


@rule("Binarizer", "Imputer", "Normalizer", "Scaler", domain="ai.onnx.ml")
def _of_scikit_learn(call: Call) -> None:
    layout = _first(call)
    if layout.axis == call.rank() - 1:
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=_ORT)
def _skip(call: Call) -> None:
    call.require_fixed(0, 1)
    layout, rank = call.joined([0, 1], call.rank()), call.rank()
    if layout.axis == rank - 1:
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("RandomNormal", "RandomUniform", table=DRAWS)
def _draws(call: Call) -> None:
    if call.known.batch in call.attribute("shape", ()):
        call.refuse(f"draws numbers of shape {call.attribute('shape')}, which may be of the batch")


@rule("BatchNormalization")
def _batch_normalization(call: Call) -> None:
    layout = _first(call)
    if layout.axis == 1:
        call.refuse(_OTHER_AXES)
    call.give(layout, 0)
    call.give_statistics(1, 2)


_ROWS = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "DepthToSpace", "SpaceToDepth", "LRN"), (0,)),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool"), (0,)),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "QLinearConv", "Col2Im", "Multinomial"), (0,)),
    "DeformConv": (0, 2, 4),
    "GridSample": (0, 1),
}
"""Operators whose first axis is the batch -> the inputs that have it."""


@rule(*_ROWS)
def _rows(call: Call) -> None:
    _of_rows(call, _ROWS[call.node.op_type])


def _of_rows(call: Call, indices: Iterable[int], axis: int = 0) -> Layout:
    """Give outputs the batch of inputs that all have it at one axis."""
    indices = [index for index in indices if call.has(index)]
    call.require_fixed(*indices)
    for index in indices:
        layout = call.layout(index)
        if layout is not None and layout.axis != axis:
            call.refuse(f"has the batch at axis {axis}, and input {index} has it at axis {layout.axis}")
    layouts = {layout for index in call.batched() if (layout := call.layout(index)) is not None}
    if len(layouts) != 1:
        call.refuse("joins two different batches")
    (layout,) = layouts
    for index in indices:
        if call.layout(index) is None:
            call.repeat(index, layout, broadcasts=False)
    call.give(layout)
    return layout


@rule("MaxPool")
def _max_pool(call: Call) -> None:
    if len(call.node.outputs) > 1 and (call.node.outputs[1].uses() or call.node.outputs[1].is_graph_output()):
        call.refuse("counts places over the whole batch")
    _of_rows(call, [0])


@rule("FusedConv", domain=_ORT)
def _fused_conv(call: Call) -> None:
    _of_rows(call, [0, 3])


@rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def _layer_normalization(call: Call) -> None:
    layout = _first(call)
    if layout.axis >= call.axis(-1) or any(call.rank(k) > call.rank() - call.axis(-1) for k in (1, 2) if call.has(k)):
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("Hardmax", "LogSoftmax", "LpNormalization", "Softmax", "TopK")
def _along_axis(call: Call) -> None:
    layout = _first(call)
    if layout.axis == call.axis(-1):
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("CumSum", "CumProd")
def _cumulative(call: Call) -> None:
    layout, axis = _first(call), call.constant(1)
    if axis is None or layout.axis == int(axis.reshape(())) % call.rank():
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("Trilu")
def _trilu(call: Call) -> None:
    layout = _first(call)
    if layout.axis >= call.rank() - _MATRIX:
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("ArgMax", "ArgMin")
def _arg_extreme(call: Call) -> None:
    layout, axis = _first(call), call.axis()
    if layout.axis == axis:
        call.refuse(_OTHER_AXES)
    call.give(layout if call.attribute("keepdims", 1) or layout.axis < axis else layout.at(layout.axis - 1))


@rule(*(f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")))
@rule("ReduceSumSquare")
def _reduce(call: Call) -> None:
    layout, axes = _first(call), call.ints(1, "axes")
    if not axes and call.attribute("noop_with_empty_axes", 0):
        call.give(layout)
        return
    gone = {axis % call.rank() for axis in axes or range(call.rank())}
    if layout.axis in gone:
        call.give_statistics(0)
        return
    keeps = call.attribute("keepdims", 1)
    call.give(layout if keeps else layout.at(layout.axis - sum(axis < layout.axis for axis in gone)))


@rule("MeanVarianceNormalization")
def _mean_variance(call: Call) -> None:
    layout = _first(call)
    if layout.axis in {axis % call.rank() for axis in call.attribute("axes", [0, 2, 3])}:
        call.refuse(_OTHER_AXES)
    call.give(layout)


@rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _cross_entropy(call: Call) -> None:
    call.require_fixed(0, 1)
    layout = call.joined([0], call.rank()) if call.layout(0) else call.joined([1], call.rank(1))
    for index in (0, 1):
        if call.layout(index) is None:
            call.repeat(index, layout, broadcasts=False)
        elif call.layout(index) != layout or layout.axis != 0:
            call.refuse(_OTHER_AXES)
    if call.attribute("reduction", "mean") == "none":
        call.give(layout)
        return
    call.give_statistics(0)
    call.give(layout, 1)


@rule("MatMul", "MatMulInteger")
def _matmul(call: Call) -> None:
    if any(call.has(index) and call.rank(index) for index in (2, 3)):
        call.refuse("has a zero point for each row or column")
    _product(call, transposed=(False, False))


@rule("FusedMatMul", domain=_ORT)
def _fused_matmul(call: Call) -> None:
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        call.refuse("it has transBatchA or transBatchB")
    _product(call, transposed=(bool(call.attribute("transA", 0)), bool(call.attribute("transB", 0))))


def _product(call: Call, *, transposed: tuple[bool, bool]) -> None:
    call.require_fixed(0, 1)
    ranks, rank = (call.rank(0), call.rank(1)), len(call.result_sizes())
    vectors = [one == 1 for one in ranks]
    if not any(vectors) and all(
        layout is None or layout.axis < one - _MATRIX
        for layout, one in zip(map(call.layout, (0, 1)), ranks, strict=True)
    ):
        call.give(call.joined([0, 1], rank, last=_MATRIX))
        return
    if len(call.batched()) > 1:
        call.refuse("multiplies the batch by itself")
    (index,) = call.batched()
    layout, own = call.layout(index), ranks[index]
    assert layout is not None
    # Counted from the end: rows of the first and columns of the second are kept.
    kept = 1 if transposed[index] != (index == 1) else _MATRIX
    if layout.axis >= own - _MATRIX and own - layout.axis != kept:
        call.refuse("adds up the batch")
    if vectors[index]:
        call.refuse("adds up the batch")
    if layout.axis < own - _MATRIX:
        # The other one is a vector: its axis is gone.
        call.give(layout)
        return
    call.give(layout.at(rank - (1 if index == 1 or vectors[1] else _MATRIX)))


@rule("MatMulNBits", domain=_ORT)
def _matmul_n_bits(call: Call) -> None:
    layout = _first(call)
    if layout.axis == call.rank() - 1:
        call.refuse("adds up the batch")
    call.give(layout)


@rule("Gemm")
@rule("FusedGemm", domain=_ORT)
def _gemm(call: Call) -> None:
    call.require_fixed(0, 1, 2)
    if 0 in call.batched() and 1 in call.batched():
        call.refuse("multiplies the batch by itself")
    found = None
    for index, name, rows in ((0, "transA", 0), (1, "transB", 1)):
        layout = call.layout(index)
        if layout is None:
            continue
        if layout.axis != (1 - rows if call.attribute(name, 0) else rows):
            call.refuse("adds up the batch")
        found = layout.at(rows)
    other = call.layout(2)
    if found is None or (other is not None and other.at(other.axis + _MATRIX - call.rank(2)) != found):
        call.refuse("joins the batch with what has another")
    at = found.axis - _MATRIX + call.rank(2) if call.has(2) else -1
    if other is None and at >= 0:
        call.repeat(2, found.at(at), broadcasts=True)
    call.give(found)


@rule("Einsum")
def _einsum(call: Call) -> None:
    left, arrow, result = call.attribute("equation").replace(" ", "").partition("->")
    if not arrow:
        call.refuse("its equation has no result")
    terms = [_letters(term, call.rank(k)) for k, term in enumerate(left.split(","))]
    of_result = _letters(result, len(call.result_sizes()))
    call.require_fixed(*range(len(terms)))
    letters = {term[layout.axis] for k, term in enumerate(terms) if (layout := call.layout(k)) is not None}
    if len(letters) != 1 or (letter := next(iter(letters))) not in of_result:
        call.refuse("adds up the batch, or multiplies it by itself")
    layouts = {layout.at(0) for layout in map(call.layout, call.batched()) if layout is not None}
    if len(layouts) != 1 or any(term.count(letter) > 1 for term in terms):
        call.refuse("joins two different batches")
    (layout,) = layouts
    for k, term in enumerate(terms):
        if call.layout(k) is None and letter in term:
            call.repeat(k, layout.at(term.index(letter)), broadcasts=letter.startswith("."))
    call.give(layout.at(of_result.index(letter)))


def _letters(term: str, rank: int) -> list[str]:
    """The letters of a term of an equation; the axes of an ellipsis are counted from the end."""
    ahead, dots, behind = term.partition("...")
    count = rank - len(ahead) - len(behind) if dots else 0
    return [*ahead, *(f".{k}" for k in range(count, 0, -1)), *behind]


@rule("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> None:
    first = bool(call.attribute("layout", 0))
    axis = 0 if first else 1
    states = [index for index in (5, 6) if call.has(index)]
    axes = {0: axis, **dict.fromkeys(states, axis), **({4: 0} if call.has(4) else {})}
    call.require_fixed(*axes)
    layouts = {layout.at(0) for index in call.batched() if (layout := call.layout(index)) is not None}
    if len(layouts) != 1:
        call.refuse("joins two different batches")
    (layout,) = layouts
    for index, at in axes.items():
        own = call.layout(index)
        if own is None:
            call.repeat(index, layout.at(at), broadcasts=False)
        elif own.axis != at:
            call.refuse(f"has the batch at axis {at}, and input {index} has it at axis {own.axis}")
    call.give(layout.at(0 if first else _MATRIX), 0)
    call.give(layout.at(axis), 1, 2)


@rule("Resize")
def _resize(call: Call) -> None:
    layout = _of_first_and_sizes(call)
    axes = call.attribute("axes")
    axes = list(range(call.rank())) if axes is None else [axis % call.rank() for axis in axes]
    if call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        call.refuse("crops")
    call.give(layout)
    if layout.axis not in axes:
        return
    at, scales, sizes = axes.index(layout.axis), call.constant(2), call.elements(3)
    if call.has(3) and sizes is not None and call.attribute("keep_aspect_ratio_policy", "stretch") == "stretch":
        size = sizes[at]
        if size == Multiple(layout.per_row):
            return
        if isinstance(size, (int, np.integer)) and size == call.known.batch and layout.plain:
            call.shape(3, [Multiple() if k == at else kept(one, k) for k, one in enumerate(sizes)])
            return
    elif scales is not None and scales.size == len(axes) and scales[at] == 1:
        return
    call.refuse("resizes the batch")


def _of_first_and_sizes(call: Call) -> Layout:
    layout = call.layout(0)
    if layout is None or call.known.depends(call.value(1)) or call.known.depends(call.value(2)):
        call.refuse("resizes by the size of the batch")
    return layout


@rule("QuantizeLinear", "DequantizeLinear")
def _quantize(call: Call) -> None:
    layout = _first(call)
    if call.rank(1) > 0 and (layout.axis == call.axis(1) or call.attribute("block_size", 0)):
        call.refuse("has a scale for each row of the batch")
    call.give(layout)


@rule("OneHot")
def _one_hot(call: Call) -> None:
    layout = _first(call)
    axis = call.axis(-1, rank=call.rank() + 1)
    call.give(layout.at(layout.axis + (axis <= layout.axis)))


@rule("ReverseSequence")
def _reverse_sequence(call: Call) -> None:
    axis = call.attribute("batch_axis", 1)
    call.require_fixed(0, 1)
    layout = call.layout(0) or call.layout(1)
    assert layout is not None
    for index, at in ((0, axis), (1, 0)):
        own = call.layout(index)
        if own is None:
            call.repeat(index, layout.at(at), broadcasts=False)
        elif own != layout.at(at):
            call.refuse("has the batch at another axis")
    call.give(layout.at(axis))


@rule("EmbedLayerNormalization", domain=_ORT)
def _embed(call: Call) -> None:
    _of_rows(call, [0, *(k for k in (1, 7) if call.has(k)), *([8] if call.layout(8) is not None else [])])


@rule("Attention")
@rule("MultiHeadAttention", domain=_ORT)
def _attention(call: Call) -> None:
    """Queries, keys and values have the batch first, and a mask of rank 4 may have it."""
    mask = 5 if call.node.domain == _ORT else 3
    rows = [0, 1, 2, *([4] if call.node.domain == _ORT else [])]
    indices = [index for index in rows if call.has(index)]
    call.require_fixed(*indices, mask)
    layouts = {layout for layout in map(call.layout, [*indices, mask]) if layout is not None}
    if len(layouts) != 1 or next(iter(layouts)) != Layout(0):
        call.refuse("has the batch at axis 0, and an input has it at another")
    if any(call.has(index) for index in ([6, 7] if call.node.domain == _ORT else [4, 5, 6])):
        call.refuse("it has a past")
    if call.has(4) and call.node.domain == _ORT and call.rank(4) != _MATRIX:
        call.refuse("its mask has the batch at another axis")
    for index in indices:
        if call.layout(index) is None:
            call.repeat(index, Layout(0), broadcasts=False)
    whole = 4
    if call.has(mask) and call.layout(mask) is None and call.rank(mask) == whole:
        call.repeat(mask, Layout(0), broadcasts=True)
    elif call.layout(mask) is not None and call.rank(mask) != whole:
        call.refuse("its mask has the batch at another axis")
    call.give(Layout(0))


@rule("If")
def _if(call: Call) -> None:
    if call.known.depends(call.value(0)):
        call.refuse("its condition depends on the batch")
    branches = [call.node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for branch in branches:
        call.known.follow(branch)
    for index, (one, other) in enumerate(zip(*(branch.outputs for branch in branches), strict=True)):
        layout = call.known.layouts.get(one)
        if any(call.known.depends(value) and value not in call.known.layouts for value in (one, other)):
            call.refuse("gives the size of the batch")
        if layout != call.known.layouts.get(other):
            call.refuse("its branches give the batch at different axes")
        if layout is not None:
            call.give(layout, index)


@rule("Loop", "Scan")
def _repeated(call: Call) -> None:
    known, node = call.known, call.node
    body, scans = node.attributes["body"].as_graph(), node.op_type == "Scan"
    first, ahead = (0, 0) if scans else (2, 1)
    sliced = call.attribute("num_scan_inputs", 0) if scans else 0
    carried = len(body.inputs) - first - sliced
    if not scans and any(known.depends(call.value(index)) for index in (0, 1)):
        call.refuse("how often it runs depends on the batch")
    if any(value in known.counts for value in node.inputs):
        call.refuse("computes with the size of the batch")
    for k in range(sliced):
        layout, axis = call.layout(carried + k), (call.attribute("scan_input_axes") or [0] * sliced)[k]
        if layout is None:
            continue
        axis %= call.rank(carried + k)
        if layout.axis == axis:
            call.refuse("runs over the batch")
        known.layouts[body.inputs[carried + k]] = layout.at(layout.axis - (axis < layout.axis))
    for k in range(carried):
        layout = call.layout(first + k)
        if layout is not None:
            known.layouts[body.inputs[first + k]] = layout
    edits, attributes = dict(known.edits), dict(known.attributes)
    while True:
        known.follow(body)
        grown = False
        for k in range(carried):
            before, after = body.inputs[first + k], body.outputs[ahead + k]
            layout = known.layouts.get(after)
            if after in known.counts:
                call.refuse("carries the size of the batch")
            if layout == known.layouts.get(before):
                continue
            if layout is None or before in known.layouts:
                call.refuse("carries the batch at several axes")
            known.layouts[before], grown = layout, True
        if not grown:
            break
        # What it begins with is repeated then.
        known.edits, known.attributes = dict(edits), dict(attributes)
    if not scans and known.depends(body.outputs[0]):
        call.refuse("how often it runs depends on the batch")
    for k in range(carried):
        layout = known.layouts.get(body.inputs[first + k])
        if layout is not None:
            shapes = [known.facts.shapes.get(one) for one in (body.inputs[first + k], body.outputs[ahead + k])]
            if shapes != [call.sizes(first + k)] * len(shapes):
                call.refuse("carries a value whose shape changes")
            if call.layout(first + k) is None:
                call.repeat(first + k, layout, broadcasts=False)
            call.give(layout, k)
    axes = call.attribute("scan_output_axes") if scans else None
    for k, value in enumerate(body.outputs[ahead + carried :]):
        if value in known.counts:
            call.refuse("gives the size of the batch")
        layout = known.layouts.get(value)
        if layout is not None:
            axis = 0 if axes is None else axes[k] % (len(known.facts.shapes[value]) + 1)
            call.give(layout.at(layout.axis + (axis <= layout.axis)), carried + k)
