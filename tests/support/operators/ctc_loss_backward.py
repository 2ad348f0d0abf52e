"""CtcLossBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.ctc_loss import (
    ctc_loss,
    invalid_inputs,
    longest,
    row_inputs,
    sized_inputs,
    strided_inputs,
    typical_inputs,
    valid_inputs,
    working_type,
)
from operators.strides import repeated, scattered


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
    work = working_type(dtype)
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
        log_alpha[:, :, : 2 * longest(target_lengths) + 1].to(work),
        blank,
        zero_infinity,
    )
    impossible = torch.isneginf(wide) & ~torch.isposinf(neg_log_likelihood)[None, :, None]
    return out.masked_fill(impossible, 0.0).to(dtype)


def _from_log_probs(
    grad_out: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *_: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """PyTorch's answer whatever the forward pass has saved, which is rounded."""
    inputs = (grad_out, log_probs, targets, input_lengths, target_lengths)
    return ctc_loss_backward(*inputs, blank=blank, zero_infinity=zero_infinity, dtype=dtype)


def _after_forward(inputs: Sequence[Tensor], grad_out: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    return [grad_out, *inputs, *ctc_loss(*inputs, dtype=dtype)]


def _terms(grad_out: Tensor) -> Tensor:
    return grad_out.double().abs()[None, :, None]


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    inputs = strided_inputs(rng, dtype)
    grad = repeated(torch.randn(len(inputs[2])).to(dtype), rng)
    loss, alpha = (scattered(value, rng) for value in ctc_loss(*inputs, dtype=dtype))
    return Sample([grad, *inputs, loss, alpha], {}, _terms(grad))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    grad = torch.randn(3, generator=torch.Generator().manual_seed(size)).to(dtype)
    return Sample(_after_forward(sized_inputs(size, dtype), grad, dtype), {"zero_infinity": 1})


def _typical(dtype: torch.dtype) -> list[Sample]:
    grad = torch.linspace(-1.0, 2.0, 3).to(dtype)
    samples = []
    for inputs in typical_inputs(dtype):
        saved = _after_forward(inputs, grad, dtype)
        # A logarithm of the size of the loss was rounded: that is its share of each posterior.
        posterior = inputs[0].double().exp() - ctc_loss_backward(torch.ones_like(grad), *inputs)
        loss = ctc_loss(*inputs)[0].nan_to_num(posinf=0.0)
        samples.append(Sample(saved, {}, ((1 + loss.abs()) * grad.abs())[:, None] * posterior.abs().nan_to_num()))
    return samples


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    grad = torch.linspace(-1.0, 2.0, 2).to(dtype)
    return [Sample(_after_forward(row_inputs(length, dtype), grad, dtype), {}, _terms(grad))]


def _valid() -> Sample:
    return Sample(_after_forward(valid_inputs(), torch.ones(2), torch.float32))


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from invalid_inputs(_valid, 1)
    for index in (0, 5, 6):
        yield from near.retyped(index, torch.float64, torch.float16, torch.bfloat16, torch.int64)
    yield from near.reshaped(0, (3,), (), (2, 1))
    yield from near.reshaped(5, (3,), (), (2, 1))
    yield from near.reshaped(6, (2, 5, 4), (2, 4, 5), (3, 5, 5), (2, 5), (2, 5, 5, 1), (1,) * 9)


_NO_LENGTHS = torch.zeros(0, dtype=torch.int64)
_NO_ITEMS = [torch.zeros(0), torch.zeros(4, 0, 3), *[_NO_LENGTHS] * 3, torch.zeros(0), torch.zeros(0, 4, 1)]

SAMPLES = Samples(
    oracle=_from_log_probs,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    # Gradients of 16-bit losses are as good as their log_alpha: tests/cpp_ext has its own measure for them.
    dtypes=(torch.float32,),
    typical=_typical,
    rows=_rows,
    empty=[(Sample(_NO_ITEMS), [(4, 0, 3)])],
)
