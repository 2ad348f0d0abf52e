"""Operators of gradfuse's own domain and of onnxruntime's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.differentiation.elementwise import gelu_gradient
from gradfuse.differentiation.normalization import (
    by_operator,
    computed_statistics,
    fits_operator,
    normalized_by_deviation,
    through_deviation,
)
from gradfuse.differentiation.rules import FUSES, Call, Gradient, gradient, summed_at_run_time
from gradfuse.differentiation.tensors import Tensor
from gradfuse.passes.reading import attribute

_MICROSOFT = "com.microsoft"


@gradient("CtcLoss", domain="aclnn")
def ctc_loss(call: Call) -> Iterator[Gradient]:
    """CtcLossBackward takes the gradient through the softmax along: of the logits, as `aten::_ctc_loss_backward`."""
    dy = call.dy[0]
    if dy is None or (len(call.dy) > 1 and call.dy[1] is not None):
        raise call.error("the result depends on log_alpha; expected on the losses only")
    options = {name: call.attribute(name, 0) for name in ("blank", "zero_infinity")}
    yield call.tape.op("CtcLossBackward", dy, *call.x[:4], *call.y[:2], domain="aclnn", **options)


@gradient("BatchNorm", domain="aclnn", limits="its first output")
def batch_norm(call: Call) -> Iterator[Gradient]:
    dy, x, weight = call.dy[0], call.x[0], call.input(1)
    if dy is None or any(other is not None for other in call.dy[1:]):
        raise call.error("the result depends on its statistics; expected on its first output only")
    relu = call.y[0] if call.attribute("relu", 0) else None
    if not call.node.meta.get(FUSES) and relu is None:
        yield from _batch_norm_in_nodes(call, dy)
        return
    wanted, statistics = [int(index in call.needed) for index in range(3)], call.y[1:3]
    yield from call.tape.parts(
        "BatchNormBackward", 3, dy, x, weight, *statistics, relu,
        domain="aclnn", output_mask=wanted, dtypes=[dy.dtype, *(one.dtype for one in statistics)],
    )  # fmt: skip


def _batch_norm_in_nodes(call: Call, dy: Tensor) -> Iterator[Gradient]:
    """PyTorch's formula: (dy - mean(dy) - (x - m) r^2 mean(dy (x - m))) r w, where means are over all but channels."""
    given, weight, (mean, invstd) = call.x[0], call.input(1), call.y[1:3]
    assert given is not None
    others = [axis for axis in range(call.rank(given)) if axis != 1]
    x, dy = given.cast(mean.dtype), dy.cast(mean.dtype)

    def column(vector: Tensor) -> Tensor:
        return vector.unsqueeze(*others)

    share = 1.0 / (x.op("Size") / mean.op("Size")).cast(x.dtype)
    distance = x - column(mean)
    sum_dy = dy.sum(others, keepdims=False)
    products = (dy * distance).sum(others, keepdims=False)

    def of_input() -> Tensor:
        slope = products * share * (invstd * invstd)
        centred = dy - distance * column(slope) - column(sum_dy * share)
        return (centred * column(invstd if weight is None else invstd * weight)).cast(given.dtype)

    yield of_input
    yield lambda: products * invstd
    yield sum_dy


@gradient("Convolution", domain="aclnn")
def convolution(call: Call) -> Iterator[Gradient]:
    dy, y = call.dy[0], call.y[0]
    assert dy is not None
    if call.attribute("relu", 0):
        dy = y.op("LessOrEqual", 0.0).where(dy.tape.constant(0.0, dy.dtype), dy)
    wanted = [int(index in call.needed) for index in range(3)]
    lists = {
        name: call.attribute(name, [default]) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    lists["output_padding"] = call.attribute("output_padding", [0])
    numbers = {
        name: call.attribute(name, default)
        for name, default in (("transposed", 0), ("groups", 1), ("factors_in_bfloat16", 0))
    }
    image, weight = call.x[:2]
    assert image is not None and weight is not None
    found = call.tape.parts(
        "ConvolutionBackward", 3, dy, image, weight, domain="aclnn",
        **lists, **numbers, output_mask=wanted, dtypes=[image.dtype, weight.dtype, weight.dtype],
    )  # fmt: skip
    yield from (one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))


@gradient("ScaledDotProductAttention", domain="aclnn", limits="no gradient of attn_mask", fixed=(4, 5))
def scaled_dot_product_attention(call: Call) -> Iterator[Gradient]:
    dy, (query, key, value, *optional) = call.dy[0], call.x
    if dy is None or call.dy[1] is not None:
        raise call.error("the result depends on logsumexp; expected on the output only")
    options = {name: call.attribute(name) for name in ("scale", "causal", "dropout_threshold", "draw")}
    yield from call.tape.parts(
        "ScaledDotProductAttentionBackward", 3, dy, query, key, value, *call.y[:2], *optional, domain="aclnn", **options
    )


@gradient("LstmRecurrence", domain="aclnn")
def lstm_recurrence(call: Call) -> Iterator[Gradient]:
    x, h, c, weight, bias = [*call.x, None][:5]
    hidden, cell, gates = call.y
    assert x is not None and h is not None and c is not None and weight is not None
    if call.dy[2] is not None:
        raise call.error("the result depends on gates; expected on the states only")
    grad_hidden = hidden.zeros() if call.dy[0] is None else call.dy[0]
    reverse = call.attribute("reverse", 0)
    grads = call.tape.parts(
        "LstmRecurrenceBackward", 3, grad_hidden, call.dy[1], c, cell, gates, weight, domain="aclnn", reverse=reverse
    )
    yield from grads
    yield from _of_recurrent_weights(grads[0], hidden, h, bias, reverse)


@gradient("GruRecurrence", domain="aclnn")
def gru_recurrence(call: Call) -> Iterator[Gradient]:
    x, h, weight, bias = [*call.x, None][:4]
    hidden, gates = call.y
    grad_hidden = call.dy[0]
    assert x is not None and h is not None and weight is not None
    if call.dy[1] is not None or grad_hidden is None:
        raise call.error("the result depends on gates; expected on the states only")
    reverse = call.attribute("reverse", 0)
    grad_x, grad_h, grad_recurrent = call.tape.parts(
        "GruRecurrenceBackward", 3, grad_hidden, h, hidden, gates, weight, domain="aclnn", reverse=reverse
    )
    yield grad_x
    yield grad_h
    yield from _of_recurrent_weights(grad_recurrent, hidden, h, bias, reverse)


def _of_recurrent_weights(
    grad: Tensor, hidden: Tensor, first: Tensor, bias: Tensor | None, reverse: int
) -> Iterator[Gradient]:
    """The gradients of weight and bias of a recurrence, by that of its gates (T, N, gates H)."""
    tape = grad.tape

    def of_weight() -> Tensor:
        parts = [first.unsqueeze(0), hidden]
        states = tape.concat(parts[::-1] if reverse else parts)
        begin, end = (1, 2**63 - 1) if reverse else (0, -1)
        before = states.slice(tape.ints(begin), tape.ints(end), tape.ints(0))
        # All rows are of one product.
        rows, states = (one.op("Flatten", axis=2) for one in (grad, before))
        return rows.transpose([1, 0]).matmul(states)

    yield of_weight
    if bias is not None:
        yield lambda: grad.sum([0, 1], keepdims=False)


@gradient("Gelu", domain=_MICROSOFT)
def gelu(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield gelu_gradient(call, x, dy, "none")


@gradient("FastGelu", domain=_MICROSOFT)
def fast_gelu(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    bias = call.input(1)
    inner = x if bias is None else x + bias
    gradient_ = gelu_gradient(call, inner, dy, "tanh")
    yield gradient_
    if bias is not None:
        yield lambda: call.summed_to(gradient_, bias, call.y[0])


@gradient("BiasGelu", domain=_MICROSOFT)
def bias_gelu(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    bias = call.x[1]
    assert bias is not None
    gradient_ = gelu_gradient(call, x + bias, dy, "none")
    yield gradient_
    yield lambda: call.summed_to(gradient_, bias, call.y[0])


@gradient("QuickGelu", domain=_MICROSOFT)
def quick_gelu(call: Call) -> Iterator[Gradient]:
    """x sigmoid(alpha x)."""
    x, dy = call.operands()
    alpha = call.attribute("alpha", 1.702)
    s = (x * alpha).sigmoid()
    yield dy * (s + x * alpha * s * (1 - s))


@gradient("FusedMatMul", domain=_MICROSOFT, limits="no transposed batches, and no vectors")
def fused_matmul(call: Call) -> Iterator[Gradient]:
    """alpha op(A) op(B), where op may transpose the last two axes."""
    a, dy = call.operands()
    b = call.x[1]
    assert b is not None
    flags = [call.attribute(name, 0) for name in ("transA", "transB", "transBatchA", "transBatchB")]
    ranks = call.rank(a), call.rank(b)
    if any(flags[2:]) or min(ranks) < 2:
        raise call.error("it transposes batches or has a vector; expected neither")
    alpha = call.attribute("alpha", 1.0)

    def transposed(tensor: Tensor, rank: int) -> Tensor:
        return tensor.transpose([*range(rank - 2), rank - 1, rank - 2])

    rank = max(ranks)
    left = transposed(a, ranks[0]) if flags[0] else a
    right = transposed(b, ranks[1]) if flags[1] else b

    def by(product: Tensor, to: Tensor, flag: int) -> Tensor:
        whole = transposed(product * alpha, rank) if flag else product * alpha
        return whole if rank == 2 else summed_at_run_time(whole, to, whole)

    yield lambda: by(dy.matmul(transposed(right, ranks[1])), a, flags[0])
    yield lambda: by(transposed(left, ranks[0]).matmul(dy), b, flags[1])


_BITS = (2, 4, 8)
_IN_INTEGERS = 4
"""The accuracy_level from which on MatMulNBits multiplies whole numbers of 8 bits."""


@gradient(
    "MatMulNBits", domain=_MICROSOFT, limits="2, 4 or 8 bits, no g_idx; the quantised weight is frozen", fixed=(2, 3)
)
def matmul_n_bits(call: Call) -> Iterator[Gradient]:
    """x W^T + bias: the weight's own gradient is not given, nor those of its scales and zero points."""
    _, dy = call.operands()
    bits, prepacked = call.attribute("bits", 4), call.attribute("weight_prepacked", 0)
    missing = [name for name in ("K", "N", "block_size") if call.attribute(name) is None]
    if missing or call.input(2) is None:
        raise call.error(f"it has no {missing[0] if missing else 'scales'}; expected weight, scales and their sizes")
    if bits not in _BITS:
        raise call.error(f"bits is {bits}; expected 2, 4 or 8")
    if prepacked:
        raise call.error(f"weight_prepacked is {prepacked}; expected 0, the layout that is documented")
    if call.input(4) is not None:
        raise call.error("g_idx is given; expected blocks of columns that follow each other")
    yield lambda: _by_operator(call, dy, bits) or dy.matmul(_dequantized(call, dy, bits).cast(dy.dtype))
    yield None
    yield None
    yield None
    yield None
    bias = call.input(5)
    yield lambda: None if bias is None else call.summed_to(dy, bias, call.y[0])


def _by_operator(call: Call, dy: Tensor, bits: int) -> Tensor | None:
    """Return the gradient by the operator that dequantises a part of the weight at a time, where it takes this one."""
    packed, scales, zero_points = call.x[1], call.x[2], call.input(3)
    assert packed is not None and scales is not None
    fits = dy.dtype == scales.dtype and packed.dtype == ir.DataType.UINT8 and call.rank(packed) == 3
    if not (call.node.meta.get(FUSES) and fits) or (zero_points and zero_points.dtype != ir.DataType.UINT8):
        return None
    columns = int(call.attribute("K"))
    return call.tape.op(
        "MatmulNBitsBackward", dy, packed, scales, zero_points, domain=DOMAIN, in_features=columns, bits=bits
    )


@gradient("MatmulNBits", domain=DOMAIN, limits="the quantised weight is frozen", fixed=(2, 3))
def stored_n_bits(call: Call) -> Iterator[Gradient]:
    """The same by the operators that read the weight as it is stored."""
    x, dy = call.operands()
    columns = call.dims(x)[-1]
    if not isinstance(columns, int):
        raise call.error("the size of its input's last dimension is not known; expected that it is")
    options = {"in_features": columns, "bits": call.attribute("bits", 4)}
    yield lambda: call.tape.op("MatmulNBitsBackward", dy, *call.x[1:3], call.input(3), domain=DOMAIN, **options)
    yield None
    yield None
    yield None
    bias = call.input(4)
    yield lambda: None if bias is None else call.summed_to(dy, bias, call.y[0])


def share_packed_weights(graph: ir.Graph) -> None:
    """Put `aclnn::MatmulNBits` where a product's gradient is `MatmulNBitsBackward`, which reads the same weight.

    onnxruntime packs the weight of a `MatMulNBits` for its own kernel, and would have both layouts in memory. Its
    kernel stays where the model asks for products of whole numbers, which are faster.
    """
    for backward in list(graph):
        if backward.op_type != "MatmulNBitsBackward" or backward.domain != DOMAIN:
            continue
        packed, bits = [*backward.inputs[1:], None][:3], backward.attributes["bits"]
        for node in list(packed[0].consumers() if packed[0] is not None else ()):
            if (node.op_type, node.domain) != ("MatMulNBits", _MICROSOFT) or node.graph is not graph:
                continue
            inputs = [*node.inputs, *[None] * 6][:6]
            # Equal bytes may be one tensor with other scales.
            if inputs[1:4] != packed or attribute(node, "bits", 4) != bits.as_int():
                continue
            if attribute(node, "accuracy_level", 0) >= _IN_INTEGERS:
                continue
            stored = [inputs[0], *packed, inputs[5]]
            fused = ir.Node(DOMAIN, "MatmulNBits", stored, [bits], name=node.name)
            old, output = node.outputs[0], fused.outputs[0]
            output.name, output.type, output.shape = old.name, old.type, old.shape
            graph.insert_before(node, fused)
            ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def _dequantized(call: Call, dy: Tensor, bits: int) -> Tensor:
    """Return the weight (N, K) of a MatMulNBits in float32, from blocks of columns that have one scale each.

    It depends on the gradient, though its value does not: onnxruntime would otherwise compute it when it loads the
    model, or ahead of all else in a run, and have the weights of all layers in memory in full at once.
    """
    packed, scales, zero_points = call.x[1], call.x[2], call.input(3)
    assert packed is not None and scales is not None
    rows, columns, size = (int(call.attribute(name)) for name in ("N", "K", "block_size"))
    blocks = -(-columns // size)
    late = dy.sum(None, keepdims=False) < 0.0

    def unpacked(source: Tensor, count: int) -> Tensor:
        """The first `count` numbers of each row of bytes; the lowest bits of a byte are its first number."""
        per_byte = 8 // bits
        # In two dimensions: onnxruntime is slow at a number for all where the last dimension is 1.
        bytes_of_row = source.reshape([rows, -1])
        parts = []
        for index in range(per_byte):
            above = 8 - bits * (index + 1)
            kept = _shifted(bytes_of_row, late, above, "LEFT") if above else bytes_of_row
            parts.append(_shifted(kept, late, 8 - bits, "RIGHT").unsqueeze(2))
        numbers = call.tape.concat(parts, axis=-1).reshape([rows, -1])
        if count % per_byte:
            numbers = _first_columns(numbers, count)
        return numbers

    weight = unpacked(packed, blocks * size).reshape([rows * blocks, size])
    if zero_points is None:
        zeros = call.tape.constant(np.full(rows * blocks, 2 ** (bits - 1)), ir.DataType.UINT8)
    elif zero_points.dtype == ir.DataType.UINT8:
        zeros = unpacked(zero_points, blocks).reshape([rows * blocks])
    else:
        zeros = None
    if zeros is None:
        assert zero_points is not None
        weight = weight.cast(ir.DataType.FLOAT) - zero_points.reshape([-1, 1]).cast(ir.DataType.FLOAT)
        weight = weight * scales.reshape([-1, 1]).cast(ir.DataType.FLOAT)
    else:
        factors = scales.reshape([-1]).cast(ir.DataType.FLOAT)
        weight = weight.op("DequantizeLinear", factors, zeros, axis=0, dtype=ir.DataType.FLOAT)
    weight = weight.reshape([rows, blocks * size])
    return weight if blocks * size == columns else _first_columns(weight, columns)


def _shifted(source: Tensor, late: Tensor, count: int, direction: str) -> Tensor:
    """Return bytes shifted by a number of bits that is known when `late` is, whatever it is."""
    number = source.tape.constant(count, ir.DataType.UINT8)
    return source.op("BitShift", late.where(number, number), direction=direction)


def _first_columns(matrix: Tensor, count: int) -> Tensor:
    ints = matrix.tape.ints
    return matrix.slice(ints(0), ints(count), ints(1))


@gradient("SkipLayerNormalization", domain=_MICROSOFT, limits="the outputs mean and inv_std_var are not used")
def skip_layer_normalization(call: Call) -> Iterator[Gradient]:
    """LayerNormalization of input + skip + bias, a sum that is its fourth output; the rest is gamma and beta."""
    gamma, beta, bias = call.input(2), call.input(3), call.input(4)
    yield from _skip(call, gamma, beta, bias, centred=True)


@gradient("SkipSimplifiedLayerNormalization", domain=_MICROSOFT, limits="the outputs mean and inv_std_var are not used")
def skip_simplified_layer_normalization(call: Call) -> Iterator[Gradient]:
    gamma, bias = call.input(2), call.input(3)
    yield from _skip(call, gamma, None, bias, centred=False)


def _skip(
    call: Call, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, centred: bool
) -> Iterator[Gradient]:
    x, skip = call.x[0], call.x[1]
    assert x is not None and skip is not None and gamma is not None
    dy, *statistics = [*call.dy, None, None, None][:4]
    by_sum = statistics.pop()
    if any(other is not None for other in statistics):
        raise call.error("the result depends on its statistics; expected on its first and fourth output only")
    total = x + skip if bias is None else x + skip + bias
    axes, shape, epsilon = [call.rank(x) - 1], x, call.attribute("epsilon", 1e-12)
    terms = [] if by_sum is None else [by_sum]
    normalized: Tensor | None = None
    fused: tuple[Tensor | None, ...] = ()
    if dy is not None and fits_operator(call, -1, gamma, beta):
        middle, inverse = computed_statistics(total, axes, epsilon, centred=centred)
        wanted = [True, 2 in call.needed, beta is not None and 3 in call.needed]
        fused = by_operator(call, dy, total, gamma, middle, inverse, -1, wanted)
        terms += [one for one in fused[:1] if one is not None]
    elif dy is not None:
        normalized, inverse = normalized_by_deviation(total, axes, epsilon, centred=centred)
        terms.append(through_deviation(dy * gamma, normalized, inverse, axes, centred=centred))
    gradient = call.tape.total(terms)
    yield lambda: gradient
    yield lambda: call.summed_to(gradient, skip, shape)
    if fused:
        yield from fused[1 : 3 if centred else 2]
    else:
        yield lambda: None if dy is None or normalized is None else call.summed_to(dy * normalized, gamma, shape)
        if centred:
            yield lambda: None if dy is None or beta is None else call.summed_to(dy, beta, shape)
    yield lambda: None if bias is None else call.summed_to(gradient, bias, shape)
