"""Scaled dot product attention: what its two operators' oracles and samples share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from operators.base import Changes, Sample
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered

THRESHOLD = round(0.3 * 2**31)


def kept(shape: Sequence[int], threshold: int, seed: int, draw: int) -> Tensor:
    """Which probabilities a dropout keeps, by the hash that docs/training.md describes, in unsigned words."""
    words = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(0x9E3779B1)
    words ^= words >> np.uint32(15)
    words += np.uint32(((seed % 2**31) * 0x9E3779B1 + draw * 0x85EBCA77) % 2**32)
    words *= np.uint32(0x21F0AAAD)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0x735A2D97)
    return torch.from_numpy((words >> np.uint32(1)) >= threshold).reshape(tuple(shape))


class Parts(NamedTuple):
    """What both passes compute, in one type: (B, H, L, S) each, but for key and value, which are of all heads."""

    scores: Tensor
    gains: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    drawn: Tensor | None,
    *,
    scale: float = 0.0,
    causal: int = 0,
    dropout_threshold: int = 0,
    draw: int = 0,
    work: torch.dtype,
) -> Parts:
    """Masked scores, and what the dropout multiplies probabilities by."""
    shared = query.shape[1] // key.shape[1] if key.shape[1] else 1
    q, k, v = (one.to(work) for one in (query, key, value))
    k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    # Attributes are float32 in ONNX.
    factor = float(np.float32(scale)) or max(q.shape[3], 1) ** -0.5
    scores = (q @ k.mT) * factor
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(work)
    if causal:
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows if causal == 2 else 0)
        scores = scores.masked_fill(~seen, -torch.inf)
    gains = torch.ones((), dtype=work)
    if dropout_threshold:
        assert seed is not None
        number = draw + (0 if drawn is None else int(drawn))
        gains = kept(scores.shape, dropout_threshold, int(seed), number).to(work) / (1 - dropout_threshold / 2**31)
    return Parts(scores, gains, q, k, v, factor)


def forward(
    query: Tensor, key: Tensor, value: Tensor, *optional: Tensor | None, dtype: torch.dtype, **attributes: Any
) -> tuple[Tensor, Tensor]:
    """``softmax(scores) value`` and ``logsumexp(scores)``; both 0 where a row sees nothing."""
    work = working_type(dtype)
    made = parts(query, key, value, *_three(optional), **attributes, work=work)
    dead = (made.scores == -torch.inf).all(-1, keepdim=True)
    scores = made.scores.masked_fill(dead, 0.0)
    p = scores.softmax(-1).masked_fill(dead, 0.0)
    logsumexp = scores.logsumexp(-1).masked_fill(dead[..., 0], 0.0)
    return ((p * made.gains) @ made.value).to(dtype), logsumexp


def backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
    *optional: Tensor | None, dtype: torch.dtype, **attributes: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients for the output and logsumexp that are given, as in a step whose forward pass has rounded them."""
    work = working_type(dtype)
    made = parts(query, key, value, *_three(optional), **attributes, work=work)
    grad, out = grad_output.to(work), output.to(work)
    p = _probabilities(made.scores, logsumexp)
    through = (grad @ made.value.mT) * made.gains
    of_scores = made.scale * p * (through - (grad * out).sum(-1, keepdim=True))
    grads = (of_scores @ made.key, of_scores.mT @ made.query, (p * made.gains).mT @ grad)
    groups = key.shape[1]
    shared = query.shape[1] // groups if groups else 1
    by_key = [one.reshape(one.shape[0], groups, shared, *one.shape[2:]).sum(2) for one in grads[1:]]
    return grads[0].to(dtype), by_key[0].to(dtype), by_key[1].to(dtype)


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Exponentials of scores less logsumexp; where that has no digits left to tell their sum, divided by it."""
    p = (scores - logsumexp.to(scores.dtype)[..., None]).exp()
    few = logsumexp[..., None].abs() > 1 / 1024 / torch.finfo(logsumexp.dtype).eps
    return torch.where(few, p / p.sum(-1, keepdim=True), p)


def _three(optional: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*optional, None, None, None][:3]


def by_autograd(sample: Sample, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of PyTorch's own operator, without dropout: of attention as its users call it.

    By its plain operators: the gradients of its flash kernel are wrong for rows that a large number hides.
    """
    query, key, value, mask = [*sample.inputs, None][:4]
    assert query is not None and key is not None and value is not None
    leaves = [one.to(dtype, copy=True).requires_grad_() for one in (query, key, value)]
    rows, keys, causal = query.shape[2], key.shape[2], sample.attributes.get("causal", 0)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    if causal:
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows if causal == 2 else 0)
        if mask is None or mask.dtype == torch.bool:
            mask = seen if mask is None else seen & mask
        else:
            mask = mask.masked_fill(~seen, -torch.inf)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], attn_mask=mask, scale=sample.attributes.get("scale"), enable_gqa=True
        )
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))]


def terms(sample: Sequence[Tensor | None], attributes: Mapping[str, Any], *, grads: bool) -> float:
    """The largest sum of magnitudes that any result adds up, with the rounding of scores as that of their size."""
    first = 1 if grads else 0
    query, key, value = sample[first : first + 3]
    assert query is not None and key is not None and value is not None
    made = parts(query, key, value, *_three(sample[6 if grads else 3 :]), **attributes, work=torch.float64)
    if made.scores.numel() == 0:
        return 0.0
    products = made.query.abs() @ made.key.abs().mT * made.scale
    unsafe = 1 + products.max(-1, keepdim=True).values
    if not grads:
        p = made.scores.masked_fill((made.scores == -torch.inf).all(-1, keepdim=True), 0.0).softmax(-1)
        rows = (p * made.gains) @ made.value.abs() * unsafe
        return float(rows.max()) if rows.numel() else 0.0
    grad, output, logsumexp = (sample[index] for index in (0, 4, 5))
    assert grad is not None and output is not None and logsumexp is not None
    size = grad.double().abs()
    p = _probabilities(made.scores, logsumexp)
    p = p * (unsafe + logsumexp.double()[..., None].abs().nan_to_num(0, 0, 0).clamp(max=1e4))
    through = (size @ made.value.abs().mT) * made.gains + (size * output.double().abs()).sum(-1, keepdim=True)
    of_scores = made.scale * p * through
    shared = query.shape[1] // max(key.shape[1], 1)
    sums = [
        of_scores @ made.key.abs(),
        shared * (of_scores.mT @ made.query.abs()),
        shared * ((p * made.gains).mT @ size),
    ]
    return max((float(one.max()) for one in sums if one.numel()), default=0.0)


def arguments(
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    mask: str = "",
    mask_shape: Sequence[int] = (),
    drawn: int | None = None,
    seed: int = 0,
    measured: bool = True,
    **attributes: Any,
) -> Sample:
    """Queries, keys and values of sizes (B, H, G, L, S, E, Ev), with a mask: "", "shown" or "added".

    With `measured` the sample's terms are found, which takes tensors of L times S.
    """
    batch, heads, groups, rows, keys, width, value_width = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    inputs: list[Tensor | None] = [
        normal(batch, heads, rows, width), normal(batch, groups, keys, width), normal(batch, groups, keys, value_width)
    ]  # fmt: skip
    whole = tuple(mask_shape) or (batch, heads, rows, keys)
    shown = torch.rand(whole, generator=generator) < 0.7
    if mask == "shown":
        inputs.append(shown)
    elif mask == "added":
        inputs.append(torch.randn(whole, generator=generator).masked_fill(~shown, -torch.inf).to(dtype))
    else:
        inputs.append(None)
    if attributes.get("dropout_threshold"):
        inputs.append(torch.tensor(seed + 2**40 + 3))
        inputs.append(None if drawn is None else torch.tensor([drawn]))
    while inputs[-1] is None:
        inputs.pop()
    return Sample(inputs, attributes, terms(inputs, attributes, grads=False) if measured else 0.0)


def backward_arguments(sizes: Sequence[int], dtype: torch.dtype, **options: Any) -> Sample:
    """The same for the backward pass, with the output and logsumexp of the forward pass."""
    return of_backward(arguments(sizes, dtype, **options), dtype)


def of_backward(sample: Sample, dtype: torch.dtype) -> Sample:
    """Arguments of the backward pass for those of the forward pass."""
    output, logsumexp = forward(*sample.inputs, **sample.attributes, dtype=torch.float64)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(output.numel())
    grad = torch.randn(output.shape, generator=generator).to(dtype)
    computed = working_type(dtype)
    inputs = [grad, *sample.inputs[:3], output.to(dtype), logsumexp.to(computed), *sample.inputs[3:]]
    return Sample(inputs, sample.attributes, terms(inputs, sample.attributes, grads=True))


def strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    """Small arguments of any strides."""
    batch, groups, shared, rows, keys, width, value_width = (rng.randint(1, 4) for _ in range(7))
    sizes = (batch, groups * shared, groups, rows, keys, width, value_width)
    whole = (batch, groups * shared, rows, keys)[rng.randint(0, 2) :]
    dropout: dict[str, Any] = {"dropout_threshold": THRESHOLD, "draw": 5} if rng.random() < 0.5 else {}
    sample = arguments(
        sizes, dtype, mask=rng.choice(("", "shown", "added")),
        mask_shape=[size if rng.random() < 0.7 else 1 for size in whole], causal=rng.randint(0, 2),
        seed=rng.randint(0, 2**30), **dropout,
    )  # fmt: skip
    views = [
        None if one is None else repeated(one, rng) if index < 3 else scattered(one, rng)
        for index, one in enumerate(sample.inputs)
    ]
    return Sample(views, sample.attributes, terms(views, sample.attributes, grads=False))


def typical(dtype: torch.dtype) -> list[Sample]:
    """Arguments of the forward pass that reach every branch."""
    drop: dict[str, Any] = {"dropout_threshold": THRESHOLD}
    return [
        arguments((2, 3, 3, 5, 7, 4, 6), dtype),
        arguments((1, 4, 2, 70, 70, 16, 16), dtype, causal=1),
        arguments((2, 2, 1, 9, 20, 8, 5), dtype, causal=2, scale=0.5),
        arguments((1, 2, 2, 20, 9, 3, 8), dtype, causal=2, mask="shown", mask_shape=(1, 1, 20, 9)),
        arguments((2, 4, 2, 6, 33, 8, 8), dtype, mask="shown", mask_shape=(2, 1, 1, 33), **drop, draw=3),
        arguments((2, 4, 4, 6, 33, 8, 8), dtype, mask="added", mask_shape=(6, 33), **drop, drawn=4),
        arguments((2, 2, 2, 5, 6, 7, 3), dtype, mask="added", causal=1, seed=1),
        arguments((1, 2, 1, 4, 0, 3, 2), dtype, mask="shown"),
        arguments((1, 2, 1, 4, 0, 3, 2), dtype, causal=2),
    ]


def valid() -> Sample:
    """Small arguments in float32 with every input."""
    return arguments((2, 4, 2, 3, 5, 6, 7), torch.float32, mask="shown", dropout_threshold=THRESHOLD, drawn=1, causal=1)


def invalid(near: Changes, first: int) -> Iterator[Sample]:
    """Bad ones, of an operator whose query is its input of number `first` and whose optional inputs come last."""
    count = len(near.valid().inputs)
    mask, seed, drawn = range(count - 3, count)
    query, key, value = range(first, first + 3)
    yield from near.without(query, key, value)
    for index in (query, key, value):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.reshaped(query, (2, 4, 3), (2, 3, 3, 6), (1, 4, 3, 6), (2, 4, 3, 5), (), (1,) * 9)
    yield from near.reshaped(key, (2, 2, 5), (2, 3, 5, 6), (1, 2, 5, 6), (2, 2, 4, 6), (2, 2, 5, 7), (2, 0, 5, 6), ())
    yield from near.reshaped(value, (2, 2, 5), (2, 1, 5, 7), (1, 2, 5, 7), (2, 2, 4, 7), ())
    yield from near.retyped(mask, torch.float16, torch.float64, torch.int64, torch.uint8)
    yield from near.reshaped(mask, (2, 4, 3, 4), (2, 2, 3, 5), (3, 4, 3, 5), (1, 2, 4, 3, 5), (5,), (), (4, 5), (3, 3))
    for index in (seed, drawn):
        yield from near.retyped(index, torch.int32, torch.float32)
        yield from near.reshaped(index, (2,), (1, 1), (0,))
    yield from near.with_attributes("causal", -1, 3)
    yield from near.with_attributes("dropout_threshold", -1, 2**31)
