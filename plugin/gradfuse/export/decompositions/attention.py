"""PyTorch's attention kernel for the CPU and its backward pass, written in products of matrices and softmax.

In that form `gradfuse.fuse` finds the gradient of the scores. `export_training_step` has PyTorch choose it from the
start; the decompositions are for programs that are traced elsewhere. This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu: softmax(scale query key^T + mask) value.

    Args:
        query: (N, H, L, E), floating; key: (N, G, S, E); value: (N, G, S, Ev); H / G queries share a key.
        dropout_p: 0, as the kernel knows no dropout.
        is_causal: whether position l sees only positions up to l.
        attn_mask: what is added to the scores, (L, S) or with N and H before, floating, or None. A row that is
            -inf throughout gives zeros.
        scale: a factor of the scores; None is 1 / sqrt(E).

    Returns:
        The output, (N, H, L, Ev), and the log-sum-exp of each row of scores, (N, H, L), in float32 or float64; 0 for
        a row that is masked throughout.
    """
    key, value = _repeated(key, query), _repeated(value, query)
    scores = _scores(query, key, is_causal, attn_mask, _scale(query, scale))
    p, logsumexp = scores.softmax(-1), scores.logsumexp(-1)
    if attn_mask is not None:
        masked = _masked_rows(scores)
        p, logsumexp = p.masked_fill(masked, 0.0), logsumexp.masked_fill(masked.squeeze(-1), 0.0)
    return p.to(query.dtype) @ value, logsumexp


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: aten::_scaled_dot_product_flash_attention_for_cpu_backward.

    `grad_out` is (N, H, L, Ev); the other arguments are those and the results of `attention`. With p the softmax of the
    scores and g = grad_out value^T, the gradient of the scores is p (g - sum of p g over the row).
    """
    factor, groups = _scale(query, scale), key.shape[1]
    key, value = _repeated(key, query), _repeated(value, query)
    scores = _scores(query, key, is_causal, attn_mask, factor)
    p = scores.softmax(-1)
    if attn_mask is not None:
        p = p.masked_fill(_masked_rows(scores), 0.0)
    weighted = (grad_out @ value.transpose(-2, -1)).to(p.dtype) * p
    grad_scores = (weighted - p * weighted.sum(-1, keepdim=True)).to(query.dtype) * factor
    grad_key = grad_scores.transpose(-2, -1) @ query
    grad_value = p.to(query.dtype).transpose(-2, -1) @ grad_out
    return grad_scores @ key, _summed(grad_key, groups), _summed(grad_value, groups)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float) -> Tensor:
    """Return the masked scores, float32 for 16-bit queries."""
    scores = query @ key.transpose(-2, -1) * scale
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if is_causal:
        rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows.unsqueeze(1), -math.inf)
    return scores if attn_mask is None else scores + attn_mask


def _masked_rows(scores: Tensor) -> Tensor:
    """Return which rows, (*, L, 1), see nothing: their softmax would be NaN."""
    return (scores == -math.inf).all(-1, keepdim=True)


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values once for each head of the query."""
    shared = query.shape[1] // tensor.shape[1]
    return tensor if shared == 1 else tensor.repeat_interleave(shared, 1)


def _summed(grad: Tensor, groups: Any) -> Tensor:
    """Return the gradient of what `_repeated` has repeated."""
    return grad if grad.shape[1] == groups else torch.unflatten(grad, 1, (groups, -1)).sum(2)
