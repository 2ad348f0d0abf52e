"""onnxruntime's attention, rotary embeddings, embeddings and fused convolutions by standard operators.

These are what its optimizer and the exporters for it leave in models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.differentiation.expansion import expansion
from gradfuse.differentiation.rules import Call
from gradfuse.differentiation.tensors import Tape, Tensor

_DOMAIN = "com.microsoft"
_INT64 = ir.DataType.INT64


@expansion("Attention", domain=_DOMAIN, limits="no past, and no rotary embedding")
def attention(call: Call) -> list[Tensor | None]:
    """Softmax(Q K^T scale + mask) V, where Q, K and V are parts of input weights + bias."""
    x, weights = _given(call, 0), _given(call, 1)
    _refuse_inputs(call, {4: "past", 6: "past_sequence_length"})
    _refuse_attributes(call, "do_rotary", "past_present_share_buffer")
    product = x.matmul(weights)
    bias = call.input(2)
    if bias is not None:
        product = product + bias
    heads = call.attribute("num_heads")
    sizes = call.attribute("qkv_hidden_sizes")
    q, k, v = (_by_head(part, heads) for part in _parts(product, 3, sizes))
    terms = _padding(call, call.input(3), x, "mask_index")
    attention_bias = call.input(5)
    if attention_bias is not None:
        terms.append(attention_bias)
    y = _attended(call, q, k, v, terms, bool(call.attribute("unidirectional", 0)))
    return [_joined(y), call.tape.concat([k.unsqueeze(0), v.unsqueeze(0)])]


@expansion("MultiHeadAttention", domain=_DOMAIN, limits="no past")
def multi_head_attention(call: Call) -> list[Tensor | None]:
    """Queries, keys and values come apart, or packed into one tensor, or keys with values."""
    query, key, value, bias = _given(call, 0), call.input(1), call.input(2), call.input(3)
    _refuse_inputs(call, {6: "past_key", 7: "past_value", 8: "past_sequence_length", 9: "cache_indirection"})
    heads = call.attribute("num_heads")
    biases: Sequence[Tensor | None] = [None] * 3
    if bias is not None:
        if key is None or value is None or call.rank(value) != 3:
            raise call.error("it has a bias and packed inputs, or keys by head; expected one of these")
        sizes = [query.size(-1), key.size(-1), value.size(-1)]
        biases = call.tape.parts("Split", 3, bias, call.tape.concat(sizes), axis=0)
    if key is None:
        q, k, v = _unpacked(query, 3)
    else:
        q = _by_head(_plus(query, biases[0]), heads)
        if value is None:
            k, v = _unpacked(key, 2)
        elif call.rank(key) == 4:
            k, v = key, value
        else:
            k, v = _by_head(_plus(key, biases[1]), heads), _by_head(_plus(value, biases[2]), heads)
    terms = _padding(call, call.input(4), query, "key_padding_mask")
    attention_bias = call.input(5)
    if attention_bias is not None:
        terms.append(attention_bias)
    y = _attended(call, q, k, v, terms, bool(call.attribute("unidirectional", 0)))
    return [_joined(y), k, v]


@expansion("GroupQueryAttention", domain=_DOMAIN, limits="no past, sinks, norms and position_ids, and float caches")
def group_query_attention(call: Call) -> list[Tensor | None]:
    """Several heads of queries share one of keys and values; each position sees those up to itself.

    Nobody sees what lies behind the end of a sequence, of which `seqlens_k` is the last position.
    """
    tape, query, key, value = call.tape, _given(call, 0), call.input(1), call.input(2)
    names = ("position_ids", None, "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight")
    absent = {9 + k: name for k, name in enumerate(names) if name is not None}
    _refuse_inputs(call, {3: "past_key", 4: "past_value", **absent})
    _refuse_attributes(call, "smooth_softmax", "kv_cache_bit_width", "sliding_window_cache")
    heads, groups = call.attribute("num_heads"), call.attribute("kv_num_heads")
    if key is None or value is None:
        by_position = query.reshape([0, 0, heads + 2 * groups, -1])
        parts = tape.parts("Split", 3, by_position, tape.ints(heads, groups, groups), axis=2)
    else:
        parts = tuple(one.reshape([0, 0, count, -1]) for one, count in ((query, heads), (key, groups), (value, groups)))
    q, k, v = parts
    if call.attribute("do_rotary", 0):
        positions = _range(tape, q.size(1)).unsqueeze(0)
        cos, sin = (_given(call, index).op("Gather", positions, axis=0) for index in (7, 8))
        interleaved = bool(call.attribute("rotary_interleaved", 0))
        q, k = (_rotated(one, cos, sin, interleaved, True) for one in (q, k))
    q, k, v = (one.transpose([0, 2, 1, 3]) for one in (q, k, v))
    attention_bias = call.input(10)
    terms = [] if attention_bias is None else [attention_bias]
    wide_k, wide_v = (_repeated(one, groups, heads // groups) for one in (k, v))
    causal = bool(call.attribute("causal", 1))
    window, softcap = call.attribute("local_window_size", -1), call.attribute("softcap", 0.0)
    last = _given(call, 5).cast(_INT64).reshape([-1, 1, 1, 1])
    seen = (_range(tape, k.size(2)) > last).op("Not")
    return [_joined(_attended(call, q, wide_k, wide_v, terms, causal, window, softcap, seen)), k, v]


@expansion("RotaryEmbedding", domain=_DOMAIN, limits="no packed batches, and scale 1")
def rotary_embedding(call: Call) -> list[Tensor | None]:
    """Turn pairs of elements of each head by an angle that depends on the position."""
    tape = call.tape
    x, positions, cos_cache, sin_cache = (_given(call, k) for k in range(4))
    _refuse_attributes(call, "is_packed_batching")
    if call.attribute("scale", 1.0) != 1:
        raise call.error(f"scale is {call.attribute('scale')}; expected 1")
    by_head = call.rank(x) == 4
    size, heads = call.attribute("rotary_embedding_dim", 0), call.attribute("num_heads", 0)
    if by_head:
        rows = x.transpose([0, 2, 1, 3])
    elif heads:
        rows = x.reshape([0, 0, heads, -1])
    else:
        head = cos_cache.size(1) * tape.constant(2)
        rows = x.op("Reshape", tape.concat([tape.ints(0, 0, -1), head]))
    if call.rank(positions) == 1:
        positions = (positions + _range(tape, rows.size(1))).unsqueeze(0)
    cos, sin = (cache.op("Gather", positions, axis=0) for cache in (cos_cache, sin_cache))
    turned = _rotated(rows, cos, sin, bool(call.attribute("interleaved", 0)), bool(size))
    return [turned.transpose([0, 2, 1, 3]) if by_head else turned.like(x)]


@expansion("EmbedLayerNormalization", domain=_DOMAIN)
def embed_layer_normalization(call: Call) -> list[Tensor | None]:
    """LayerNormalization of the sum of the embeddings of words, positions and segments."""
    tape, ids, segments = call.tape, _given(call, 0), call.input(1)
    words, by_position, by_segment = _given(call, 2), _given(call, 3), call.input(4)
    total = words.op("Gather", ids, axis=0)
    positions = call.input(8)
    if positions is None:
        positions = _range(tape, ids.size(1)).unsqueeze(0)
    total = total + by_position.op("Gather", positions, axis=0)
    if segments is not None and by_segment is not None:
        total = total + by_segment.op("Gather", segments, axis=0)
    y = total.op(
        "LayerNormalization",
        _given(call, 5),
        _given(call, 6),
        axis=-1,
        epsilon=call.attribute("epsilon", 1e-12),
    )
    mask = call.input(7)
    if mask is None:
        zero = ir.tensor([0], dtype=ir.DataType.INT32)
        lengths = tape.op("ConstantOfShape", ids.size(0), dtype=ir.DataType.INT32, value=zero)
    else:
        lengths = mask.op("ReduceSum", tape.ints(1), keepdims=0)
    return [y, lengths, total]


@expansion("FusedConv", domain=_DOMAIN, limits="activations Relu, Tanh, Sigmoid, LeakyRelu, Clip and HardSigmoid")
def fused_conv(call: Call) -> list[Tensor | None]:
    """An activation of Conv + Z."""
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {name: call.attribute(name) for name in names}
    y = _given(call, 0).op("Conv", call.x[1], call.input(2), **attributes)
    z = call.input(3)
    return [_activated(call, y if z is None else y + z, call.attribute("activation_params") or [])]


@expansion("FusedGemm", domain=_DOMAIN, limits="activations Relu, Tanh, Sigmoid and LeakyRelu")
def fused_gemm(call: Call) -> list[Tensor | None]:
    """An activation of Gemm."""
    attributes = {name: call.attribute(name) for name in ("alpha", "beta", "transA", "transB")}
    y = _given(call, 0).op("Gemm", call.x[1], call.input(2), **attributes)
    alpha = call.attribute("activation_alpha")
    return [_activated(call, y, [] if alpha is None else [alpha])]


def _activated(call: Call, x: Tensor, given: Sequence[float]) -> Tensor:
    name = call.attribute("activation", "")
    if name in ("Relu", "Tanh", "Sigmoid"):
        return x.op(name)
    if name == "LeakyRelu":
        return x.op(name, alpha=given[0] if given else None)
    if name == "Clip" and len(given) == 2:
        return x.op(name, *given)
    if name == "HardSigmoid" and len(given) == 2:
        return x.op(name, alpha=given[0], beta=given[1])
    raise call.error(f"activation is {name!r}; expected Relu, Tanh, Sigmoid, LeakyRelu, Clip or HardSigmoid")


def _attended(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    causal: bool,
    window: int = -1,
    softcap: float = 0.0,
    seen: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T scale + terms) v, all of (batch, heads, positions, size).

    Where `seen` is given, of (batch, 1, 1, positions of keys), the others are not; what sees no key at all is 0.
    """
    tape = call.tape
    scale = call.attribute("scale", 0.0)
    factor = tape.constant(scale, q.dtype) if scale else 1 / q.size(-1).cast(q.dtype).sqrt()
    scores = (q * factor).matmul(k.transpose([0, 1, 3, 2]))
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    for term in terms:
        scores = scores + term
    allowed = seen
    if causal:
        rows, columns = _range(tape, scores.size(2)).unsqueeze(1), _range(tape, scores.size(3))
        # Where there are more keys than queries, the last ones belong together.
        ahead = scores.size(3) - scores.size(2)
        allowed = (columns > rows + ahead).op("Not")
        if window > 0:
            allowed = allowed.op("And", columns > rows + ahead - tape.constant(window))
        if seen is not None:
            allowed = allowed.op("And", seen)
    if allowed is None:
        return scores.op("Softmax", axis=-1).matmul(v)
    if seen is None:
        return allowed.where(scores, -math.inf).op("Softmax", axis=-1).matmul(v)
    sees_none = (allowed.cast(scores.dtype).sum([-1], keepdims=True) > 0.0).op("Not")
    weights = allowed.op("Or", sees_none).where(scores, -math.inf).op("Softmax", axis=-1)
    return weights.masked(allowed).matmul(v)


def _padding(call: Call, mask: Tensor | None, like: Tensor, name: str) -> list[Tensor]:
    """Return what a mask adds to the scores: 0 where it is 1, `mask_filter_value` where it is 0."""
    if mask is None:
        return []
    tape, rank = call.tape, call.rank(mask)
    if rank == 1:
        if call.dims(mask)[0] is None or call.dims(mask)[0] != call.dims(like)[0]:
            raise call.error(f"{name} has shape {mask.value.shape}; expected one number a sequence, or a mask")
        key = call.input(1) if call.node.op_type == "MultiHeadAttention" else None
        of = like if key is None else key
        if call.rank(of) == 4:
            raise call.error(f"{name} has lengths, and keys are by head; expected a mask")
        positions = _range(tape, of.size(1))
        seen = (positions < mask.cast(_INT64).unsqueeze(1)).cast(like.dtype).unsqueeze(1, 2)
    elif rank in (2, 3):
        seen = mask.cast(like.dtype).unsqueeze(*((1, 2) if rank == 2 else (1,)))
    else:
        raise call.error(f"{name} has rank {rank}; expected 1, 2 or 3")
    return [(1 - seen) * call.attribute("mask_filter_value", -10000.0)]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, partial: bool) -> Tensor:
    """Turn (batch, positions, heads, size) by cosines and sines of (batch, positions, half of what is turned)."""
    tape = x.tape
    rest = None
    if partial:
        size, last = cos.size(-1) * tape.constant(2), tape.ints(-1)
        x, rest = x.slice(tape.ints(0), size, last), x.slice(size, x.size(-1), last)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if interleaved:
        pairs = x.op("Reshape", tape.ints(0, 0, 0, -1, 2))
        one, other = (part.squeeze(-1) for part in _parts(pairs, 2))
    else:
        one, other = _parts(x, 2)
    turned = [one * cos - other * sin, other * cos + one * sin]
    if interleaved:
        y = tape.concat([part.unsqueeze(-1) for part in turned], axis=-1).like(x)
    else:
        y = tape.concat(turned, axis=-1)
    return y if rest is None else tape.concat([y, rest], axis=-1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, positions, heads size) as (batch, heads, positions, size)."""
    return x.reshape([0, 0, heads, -1]).transpose([0, 2, 1, 3])


def _joined(x: Tensor) -> Tensor:
    """(batch, heads, positions, size) as (batch, positions, heads size)."""
    return x.transpose([0, 2, 1, 3]).reshape([0, 0, -1])


def _unpacked(x: Tensor, count: int) -> list[Tensor]:
    """(batch, positions, heads, count, size) as `count` tensors of (batch, heads, positions, size)."""
    parts = x.tape.parts("Split", count, x, x.tape.ints(*[1] * count), axis=3)
    return [part.squeeze(3).transpose([0, 2, 1, 3]) for part in parts]


def _repeated(x: Tensor, groups: int, count: int) -> Tensor:
    """Give each head of (batch, groups, positions, size) to `count` heads of queries."""
    if count == 1:
        return x
    tape = x.tape
    shape = tape.concat([x.size(0), tape.ints(groups, count), x.op("Shape", start=2)])
    wide = x.unsqueeze(2).expand(shape)
    return wide.op("Reshape", tape.concat([tape.ints(0, groups * count), x.op("Shape", start=2)]))


def _parts(x: Tensor, count: int, sizes: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Split the last axis, into parts of one size where none are given."""
    if sizes:
        return x.tape.parts("Split", count, x, x.tape.ints(*sizes), axis=-1)
    return x.tape.parts("Split", count, x, axis=-1, num_outputs=count if x.tape.opset >= 18 else None)


def _range(tape: Tape, size: Tensor) -> Tensor:
    """Return 0, 1, ... as int64, of a size that is a vector of one element."""
    return tape.op("Range", tape.constant(0), size.squeeze(0), tape.constant(1))


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _given(call: Call, index: int) -> Tensor:
    found = call.input(index)
    if found is None:
        raise call.error(f"input {index} is left out; expected a tensor")
    return found


def _refuse_inputs(call: Call, names: dict[int, str]) -> None:
    for index, name in names.items():
        if call.input(index) is not None:
            raise call.error(f"{name} is given; expected that it is not")


def _refuse_attributes(call: Call, *names: str) -> None:
    for name in names:
        if call.attribute(name, 0):
            raise call.error(f"{name} is {call.attribute(name)}; expected 0")
