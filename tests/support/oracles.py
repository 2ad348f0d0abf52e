"""PyTorch references of the six aclnn operators, shared by the tests of function bodies, kernels and rewrites.

Every function takes torch tensors in the element type T of the operator and a ``dtype``: ``torch.float64`` gives the
reference (inputs widened first), T itself gives PyTorch's own result in that type, which an implementation must not be
worse than. Where PyTorch has no CPU kernel for T, the computation runs in float32 and is rounded once to T.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
"""Names of the reductions, at the index which stands for them in ATen and in ``MseLossBackward``."""


def _native(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in where PyTorch lacks 16-bit CPU kernels."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cross_entropy_loss_grad(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Gradient of cross entropy w.r.t. the logits: autograd of the loss w.r.t. ``log_prob``, then of log-softmax.

    ``grad_loss`` () or (1,) for mean and sum, (N,) for none; ``log_prob`` (N, C); ``target`` int64 (N,); ``weight``
    (C,) float32. Ignored rows are +0 even where PyTorch gives NaN for a NaN in them. A target out of range raises.
    """
    ignored = target == ignore_index
    wide = log_prob.to(dtype).masked_fill(ignored[:, None], 0.0)
    w = None if weight is None else weight.to(dtype)
    classes = wide.shape[1]
    with torch.enable_grad():
        leaf = wide.detach().clone().requires_grad_(True)
        options = {"weight": w, "ignore_index": ignore_index}
        loss = torch.nn.functional.nll_loss(leaf, target, reduction=reduction, **options)  # type: ignore[arg-type]
        if label_smoothing > 0:
            weighted = leaf if w is None else leaf * w
            smooth = -weighted.sum(1).masked_fill(ignored, 0.0)
            if reduction == "mean":
                safe = target.masked_fill(ignored, 0)
                counts = torch.ones_like(smooth) if w is None else w[safe]
                smooth = smooth.sum() / counts.masked_fill(ignored, 0.0).sum()
            elif reduction == "sum":
                smooth = smooth.sum()
            loss = (1.0 - label_smoothing) * loss + label_smoothing / classes * smooth
        (grad,) = torch.autograd.grad(loss, leaf, grad_loss.to(dtype).reshape(loss.shape))
    logits: Tensor = torch.ops.aten._log_softmax_backward_data(grad, wide, 1, dtype)
    return logits.masked_fill(ignored[:, None], 0.0)


def smoothing_terms(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> float:
    """How large the two terms are whose difference is the smoothed part of the gradient above: they may cancel."""
    if label_smoothing == 0 or grad_loss.numel() == 0:
        return 0.0
    weights = torch.ones(log_prob.shape[1]) if weight is None else weight.float()
    kept = target[target != ignore_index]
    total = (float(weights[kept].sum()) if reduction == "mean" else 1.0) or 1.0
    return label_smoothing * float(grad_loss.abs().max()) * float(weights.mean()) / total


def mse_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, *, reduction: int = 1, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``aten.mse_loss_backward`` on the broadcast of all three tensors; mean divides by ``self``'s own count."""
    shape = torch.Size(np.broadcast_shapes(grad_output.shape, self.shape, target.shape))
    wide = [tensor.to(dtype).expand(shape) for tensor in (grad_output, self, target)]
    out: Tensor = torch.ops.aten.mse_loss_backward(*wide, reduction if shape == self.shape else 0)
    return out / self.numel() if reduction == 1 and shape != self.shape else out


def scaled_masked_softmax_backward(
    grad_output: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``masked_fill(scale * aten._softmax_backward_data(grad_output, y, -1), mask, 0)``; all (B, H, S1, S2)."""
    out: Tensor = scale * torch.ops.aten._softmax_backward_data(grad_output.to(dtype), y.to(dtype), -1, dtype)
    return out if mask is None else out.masked_fill(mask, 0.0)


def grouped_bias_add_grad(
    grad_y: Tensor, group_idx: Tensor | None = None, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Sums of row segments: (R, H) with ends (G,), or (G, C, H) over its middle dimension; output (G, H)."""
    wide = grad_y.to(dtype)
    if group_idx is None:
        return wide.sum(1)
    ends = [int(end) for end in group_idx]
    starts = [0, *ends][:-1]
    rows = [wide[start:end].sum(0) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(rows) if rows else wide.new_zeros((0, wide.shape[1]))


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """``aten._ctc_loss``: (neg_log_likelihood (N,), log_alpha (N, T, 2 max + 1)).

    Entries of log_alpha outside t < input_length, s <= 2 target_length are set to -inf: PyTorch leaves them unset. It
    refuses log_probs without an element: no items, or items without a step, of which only one without labels has a
    finite loss, 0.
    """
    work = _native(dtype)
    if log_probs.numel() == 0:
        impossible = torch.where(target_lengths > 0, torch.inf, 0.0).to(dtype)
        return impossible, torch.zeros(
            len(impossible), log_probs.shape[0], 2 * _longest(target_lengths) + 1, dtype=dtype
        )
    nll, alpha = torch.ops.aten._ctc_loss(
        log_probs.to(work),
        targets.to(torch.int64),
        input_lengths.tolist(),
        target_lengths.tolist(),
        blank,
        zero_infinity,
    )
    steps = torch.arange(alpha.shape[1])[None, :, None] < input_lengths[:, None, None]
    states = torch.arange(alpha.shape[2])[None, None, :] <= 2 * target_lengths[:, None, None]
    return nll.to(dtype), alpha.masked_fill(~(steps & states), -torch.inf).to(dtype)


def ctc_loss_backward(
    grad_out: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor | None = None,
    log_alpha: Tensor | None = None,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``aten._ctc_loss_backward``, the gradient w.r.t. the logits behind ``log_probs``: (T, N, C).

    Without ``neg_log_likelihood`` and ``log_alpha`` both come from :func:`ctc_loss` in ``dtype``: the right reference
    for an implementation which was given rounded ones. A class with log-probability -inf gets 0, its limit, where
    PyTorch gives NaN.
    """
    work = _native(dtype)
    if log_probs.numel() == 0:
        return log_probs.to(dtype)
    if neg_log_likelihood is None or log_alpha is None:
        neg_log_likelihood, log_alpha = ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank=blank, dtype=work
        )
    wide = log_probs.to(work)
    out: Tensor = torch.ops.aten._ctc_loss_backward(
        grad_out.to(work),
        wide,
        targets.to(torch.int64),
        input_lengths.tolist(),
        target_lengths.tolist(),
        neg_log_likelihood.to(work),
        log_alpha[:, :, : 2 * _longest(target_lengths) + 1].to(work),
        blank,
        zero_infinity,
    )
    impossible = torch.isneginf(wide) & ~torch.isposinf(neg_log_likelihood)[None, :, None]
    return out.masked_fill(impossible, 0.0).to(dtype)


def _longest(target_lengths: Tensor) -> int:
    return int(target_lengths.max()) if target_lengths.numel() else 0
