"""Losses and parts of attention whose backward pass is one of the operators; to be called as torch.nn.functional is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradfuse.custom_ops.grouped_bias_add_grad import MAX_GROUPS
from gradfuse.errors import ArgumentError

_REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int] | int,
    target_lengths: Tensor | Sequence[int] | int,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Connectionist temporal classification loss: `torch.nn.functional.ctc_loss` on our kernels.

    Args:
        log_probs: logarithms of the probabilities, (T, N, C) or (T, C): float32 or float64. What is float16 or bfloat16
            is widened to float32 first, as under autocast.
        targets: labels, (N, S) or those of all items joined, (sum(target_lengths)).
        input_lengths: steps of each item, (N), at most T; a number for (T, C).
        target_lengths: labels of each item, (N), at most S; a number for (T, C).
        blank: the class of the blank label.
        reduction: 'none', 'mean' (each loss divided by its number of labels, then averaged) or 'sum'.
        zero_infinity: whether the loss and gradient of an item without an alignment are 0, not infinite and NaN.

    Returns:
        The loss: () or, for 'none', (N), or () for (T, C).

    Raises:
        ArgumentError: a shape, type, length or label is not accepted.
    """
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"ctc_loss: reduction is {reduction!r}; expected {' or '.join(map(repr, _REDUCTIONS))}")
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        # The roundings of a 16-bit log_alpha would add up in the gradient, step by step.
        log_probs = log_probs.float()
    batched = log_probs.dim() != 2
    lengths = _lengths("target_lengths", target_lengths)
    losses: Tensor = torch.ops.aclnn.ctc_loss(
        log_probs if batched else log_probs.unsqueeze(1),
        targets,
        _lengths("input_lengths", input_lengths),
        lengths,
        blank,
        zero_infinity,
    )[0]
    if zero_infinity:
        losses = losses.masked_fill(losses.isposinf(), 0.0)
    if reduction == "mean":
        return (losses / lengths.clamp_min(1).to(losses)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of logits and classes: `torch.nn.functional.cross_entropy`, with a backward pass of one operator.

    Where PyTorch's backward pass writes, and reads again, the gradient of the log-softmax, which is as large as the
    logits, `torch.ops.aclnn.cross_entropy_loss_grad` reads the log-softmax and writes the gradient of the logits. What
    it does not take is left to PyTorch: float64, logits of other ranks, targets of other types, and values of
    label_smoothing that neither takes.

    Args:
        input: logits, (N, C).
        target: classes, int64 (N).
        weight: weight of each class, (C).
        ignore_index: the target of rows that do not count.
        reduction: 'none', 'mean' (over the weights of the targets) or 'sum'.
        label_smoothing: the share of the target that is spread over all classes, in [0, 1].

    Returns:
        The loss: () or, for 'none', (N).

    Raises:
        RuntimeError, IndexError, ValueError: those of PyTorch.
    """
    is_taken = input.dim() == 2 and input.dtype != torch.float64 and target.dtype == torch.int64
    if not is_taken or not 0 <= label_smoothing <= 1:
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()
    loss: Tensor
    loss, _ = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        input, target, weight, ignore_index, reduction, label_smoothing
    )
    return loss


def scaled_masked_softmax(input: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Softmax of attention scores over the last dimension: `softmax(masked_fill(scale * input, mask, -inf), -1)`.

    The forward pass is PyTorch's; only its result is kept for the backward pass, which is one operator,
    `torch.ops.aclnn.scaled_masked_softmax_backward`. In float64, which that operator does not support, both are
    PyTorch's.

    Args:
        input: scores, (B, H, S1, S2).
        mask: True where masked: bool, of a shape that broadcasts to (B, H, S1, S2). A row masked throughout is NaN, and
            its gradient 0.
        scale: the factor.

    Returns:
        The probabilities, (B, H, S1, S2), of the type that torch.softmax gives them, also under autocast.

    Raises:
        ArgumentError: `input` does not have four dimensions.
    """
    if input.dim() != 4:
        raise ArgumentError(f"scaled_masked_softmax: input is of shape {_show(input)}; expected (B, H, S1, S2)")
    if input.dtype == torch.float64:
        return _softmax(input, mask, scale)
    result: Tensor = _ScaledMaskedSoftmax.apply(input, mask, scale)  # type: ignore[no-untyped-call]
    return result


def grouped_bias_add(input: Tensor, bias: Tensor, offs: Tensor | None = None) -> Tensor:
    """Add a bias to each group of rows, such as those of a layer's experts.

    The backward pass sums the rows of each group in `torch.ops.aclnn.grouped_bias_add_grad`, in float32 and in blocks,
    without atomic additions, so that every run gives the same bits. In float64, which that operator does not support,
    it is PyTorch's.

    Args:
        input: (R, H) with `offs`, else (G, C, H).
        bias: (G, H), G at most 2048 with `offs`.
        offs: end of each group of rows, (G), int32 or int64, as `torch.nn.functional.grouped_mm` takes them: group j
            has the rows from offs[j - 1] (0 for the first) up to but not including offs[j]. They do not decrease, and
            the last is R; the backward pass checks it.

    Returns:
        The sum, in the shape of `input`.

    Raises:
        ArgumentError: the shapes do not fit each other, or offs are not integers.
    """
    groups = input.shape[:1] if offs is None else offs.shape
    rank = 3 if offs is None else 2
    if input.dim() != rank or bias.shape != (*groups, input.shape[-1]):
        wanted = "(G, C, H) and (G, H)" if offs is None else "(R, H) and (G, H) for offs of shape (G)"
        found = f"{_show(input)} and {_show(bias)}"
        raise ArgumentError(f"grouped_bias_add: shape of input and bias is {found}; expected {wanted}")
    if offs is not None and offs.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"grouped_bias_add: offs is {_type_of(offs)}; expected int32 or int64")
    if offs is not None and len(offs) > MAX_GROUPS:
        raise ArgumentError(f"grouped_bias_add: offs is of {len(offs)} groups; expected at most {MAX_GROUPS}")
    if torch.float64 in (input.dtype, bias.dtype):
        return _add_bias(input, bias, offs)
    result: Tensor = _GroupedBiasAdd.apply(input, bias, offs)  # type: ignore[no-untyped-call]
    return result


def _lengths(name: str, given: Tensor | Sequence[int] | int) -> Tensor:
    lengths = torch.as_tensor(given)
    is_integral = not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
    if lengths.numel() > 0 and not is_integral:
        raise ArgumentError(f"ctc_loss: {name} is {_type_of(lengths)}; expected integers")
    return lengths.to(torch.int64).reshape(-1)


class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        log_prob = torch.log_softmax(input, 1)
        loss = F.nll_loss(log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
        if label_smoothing == 0:
            return loss, log_prob
        weights = log_prob.new_ones(log_prob.shape[1]) if weight is None else weight
        ignored = target == ignore_index
        smooth = -(log_prob * weights).sum(1).masked_fill(ignored, 0.0)
        if reduction == "mean":
            smooth = smooth.sum() / weights[target.masked_fill(ignored, 0)].masked_fill(ignored, 0.0).sum()
        elif reduction == "sum":
            smooth = smooth.sum()
        return (1 - label_smoothing) * loss + label_smoothing / log_prob.shape[1] * smooth, log_prob

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, target, weight, *ctx.options = inputs
        ctx.save_for_backward(output[1], target, weight)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 6
        log_prob, target, weight = ctx.saved_tensors
        weight = None if weight is None else weight.float()
        ignore_index, reduction, label_smoothing = ctx.options
        grad = torch.ops.aclnn.cross_entropy_loss_grad(
            grad_loss, log_prob, target, weight, None, None, reduction, ignore_index, label_smoothing
        )
        return (grad, *(None,) * 5)


def _softmax(input: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = input * scale
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -torch.inf), -1)


class _ScaledMaskedSoftmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return _softmax(input, mask, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, mask, ctx.scale = inputs
        ctx.save_for_backward(output, mask)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        y, mask = ctx.saved_tensors
        if mask is not None:
            # The operator takes masks that are the same for all batches or heads, and repeats no rows.
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
            mask = mask.expand(*mask.shape[:2], *y.shape[2:])
        return torch.ops.aclnn.scaled_masked_softmax_backward(grad_output, y, mask, ctx.scale), None, None


def _add_bias(input: Tensor, bias: Tensor, offs: Tensor | None) -> Tensor:
    if offs is None:
        return input + bias.unsqueeze(1)
    rows = torch.arange(input.shape[0], dtype=offs.dtype, device=offs.device)
    return input + bias[torch.searchsorted(offs, rows, right=True)]


class _GroupedBiasAdd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, bias: Tensor, offs: Tensor | None) -> Tensor:
        return _add_bias(input, bias, offs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (offs,) = ctx.saved_tensors
        grad_bias = torch.ops.aclnn.grouped_bias_add_grad(grad_output, offs) if ctx.needs_input_grad[1] else None
        return grad_output if ctx.needs_input_grad[0] else None, grad_bias, None


def _type_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _show(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
