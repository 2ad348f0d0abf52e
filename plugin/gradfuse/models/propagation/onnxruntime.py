"""Rules of operators that onnxruntime has, with those of its training build, and of ONNX's for scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from gradfuse.models.propagation.elements import INT64, as_sizes
from gradfuse.models.propagation.facts import Operands, Result, length_of, rule
from gradfuse.models.propagation.operators import concat, matmul, reduce, split
from gradfuse.models.propagation.sizes import Sizes, Unknown, broadcast, normal_axis

_ORT = "com.microsoft"
_LIKE_INPUTS: Mapping[str, Mapping[int, int]] = {
    **{key: {0: 0} for key in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasSoftmax", "Scale", "ScaledSum")},
    **{key: {0: 0} for key in ("ReluGrad", "LeakyReluGrad", "SigmoidGrad", "TanhGrad", "DropoutGrad")},
    **{key: {0: 0} for key in ("GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX")},
    **{key: {0: 0} for key in ("SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13")},
    **{key: {0: 1} for key in ("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad", "DivGrad")},
    "RotaryEmbedding": {0: 0},
    "SkipLayerNormalization": {0: 0, 3: 0},
    "SkipSimplifiedLayerNormalization": {0: 0, 3: 0},
    "ConvGrad": {0: 1, 1: 2},
    "BatchNormInternal": {0: 0, 1: 3, 2: 4, 3: 1, 4: 1},
    "BatchNormalizationGrad": {0: 1, 1: 2, 2: 2},
    "LayerNormalizationGrad": {0: 0, 1: 2, 2: 2},
    "SimplifiedLayerNormalizationGrad": {0: 0, 1: 2},
}
"""Operators whose outputs have the types and shapes of inputs: output -> input."""
_OF_SHAPE = {"GatherGrad": (2, 0), "GatherNDGrad": (2, 0), "GatherElementsGrad": (0, 1), "SliceGrad": (0, 1)}
"""Those whose first output has the type of one input, and the shape that another one holds."""


@rule(*_LIKE_INPUTS, domain=_ORT)
def _like_inputs(operands: Operands) -> list[Result]:
    found: list[Result] = []
    for output in range(len(operands.node.outputs)):
        like = _LIKE_INPUTS[operands.node.op_type].get(output)
        value = None if like is None else operands.value(like)
        if like is None or value is None or value not in operands.facts.shapes:
            found.append((None, None, None))
        else:
            found.append((operands.dtype(like), [*operands.sizes(like)], None))
    return found


@rule("Binarizer", "Imputer", "Normalizer", "Scaler", domain="ai.onnx.ml")
def _of_scikit_learn(operands: Operands) -> list[Result]:
    dtype = operands.dtype() if operands.node.op_type in ("Binarizer", "Imputer") else ir.DataType.FLOAT
    return [(dtype, [*operands.sizes()], None)]


@rule("SimplifiedLayerNormalization")
def _simplified_layer_normalization(operands: Operands) -> list[Result]:
    """In ONNX's domain, where onnxruntime has it; with the inverse of the deviation of each row."""
    sizes = [*operands.sizes()]
    first = normal_axis(operands.attribute("axis", -1), len(sizes))
    rows = [size if axis < first else 1 for axis, size in enumerate(sizes)]
    return [(operands.dtype(), sizes, None), (ir.DataType.FLOAT, rows, None)]


@rule("MaxPoolGrad")
def _max_pool_grad(operands: Operands) -> list[Result]:
    """In ONNX's domain too; what was pooled is an input of the node that gives the indices."""
    indices = operands.value(1)
    pool = None if indices is None else indices.producer()
    pooled = pool.inputs[0] if pool is not None and pool.op_type == "MaxPool" and pool.inputs else None
    if pooled is None or pooled not in operands.facts.shapes:
        raise Unknown
    return [(operands.dtype(), [*operands.facts.shapes[pooled]], None)]


@rule("MatMulNBits", domain=_ORT)
def _matmul_nbits(operands: Operands) -> list[Result]:
    columns = operands.attribute("N")
    if columns is None:
        raise Unknown
    return [(operands.dtype(), [*operands.sizes()[:-1], columns], None)]


@rule("GatherBlockQuantized", domain=_ORT)
def _gather_block_quantized(operands: Operands) -> list[Result]:
    """A row of bytes holds several numbers a byte."""
    sizes, indices = [*operands.sizes(0)], operands.sizes(1)
    last = sizes[-1] if sizes else None
    if operands.dtype(0) == ir.DataType.UINT8 and isinstance(last, int):
        sizes[-1] = last * (8 // operands.attribute("bits", 4))
    axis = normal_axis(operands.attribute("gather_axis", 0), len(sizes))
    return [(operands.dtype(2), [*sizes[:axis], *indices, *sizes[axis + 1 :]], None)]


@rule(*_OF_SHAPE, domain=_ORT)
def _of_shape(operands: Operands) -> list[Result]:
    like, shape = _OF_SHAPE[operands.node.op_type]
    elements = operands.elements(shape)
    sizes: Sizes = as_sizes(elements) if elements is not None else [None] * length_of(operands, shape)
    return [(operands.dtype(like), sizes, None)]


@rule("YieldOp", domain=_ORT)
def _yield(operands: Operands) -> list[Result]:
    """Gradients of the inputs that have one; those that are not said to have their shape may be of one element."""
    without, full = (operands.attribute(name, []) for name in ("non_differentiable_outputs", "full_shape_outputs"))
    differentiated = [k for k in range(len(operands.node.inputs)) if k not in without]
    return [(operands.dtype(k), [*operands.sizes(k)] if k in full else None, None) for k in differentiated]


@rule("BroadcastGradientArgs", domain=_ORT)
def _broadcast_gradient_args(operands: Operands) -> list[Result]:
    return [(INT64, [None], None), (INT64, [None], None)]


@rule("ConcatTraining", domain=_ORT)
def _concat_training(operands: Operands) -> list[Result]:
    """The second output holds the size of each part."""
    count = len(operands.node.inputs)
    shapes = [operands.sizes(k) for k in range(count)]
    parts = np.empty(count, object)
    parts[:] = [shape[normal_axis(operands.attribute("axis"), len(shape))] for shape in shapes]
    return [*concat(operands), (INT64, [count], parts)]


@rule("QuantizeLinear", "DequantizeLinear", domain=_ORT)
def _quantized(operands: Operands) -> list[Result]:
    """Of the type of the scale, or of the zero point, which is a byte where it is left out."""
    if operands.node.op_type == "DequantizeLinear":
        dtype = operands.dtype(1)
    else:
        dtype = ir.DataType.UINT8 if operands.value(2) is None else operands.dtype(2)
    return [(dtype, [*operands.sizes()], None)]


@rule("DynamicQuantizeMatMul", "MatMulIntegerToFloat", domain=_ORT)
def _product_of_integers(operands: Operands) -> list[Result]:
    """Of the type of the scales."""
    return [(operands.dtype(2), matmul(operands)[0][1], None)]


rule("SplitTraining", domain=_ORT)(split)
rule("ReduceSumTraining", domain=_ORT)(reduce)


@rule("SoftmaxCrossEntropyLossInternal", domain=_ORT)
@rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss_of_classes(operands: Operands) -> list[Result]:
    whole = operands.attribute("reduction", "mean") == "none"
    return [
        (operands.dtype(), [*operands.sizes(1)] if whole else [], None),
        (operands.dtype(), [*operands.sizes()], None),
    ]


@rule("FusedMatMul", domain=_ORT)
def _fused_matmul(operands: Operands) -> list[Result]:
    a, b = [*operands.sizes(0)], [*operands.sizes(1)]
    if len(a) < 2 or len(b) < 2 or any(operands.attribute(f"transBatch{name}", 0) for name in "AB"):
        raise Unknown
    rows = a[-1 if operands.attribute("transA", 0) else -2]
    columns = b[-2 if operands.attribute("transB", 0) else -1]
    return [(operands.dtype(), [*broadcast(a[:-2], b[:-2]), rows, columns], None)]
