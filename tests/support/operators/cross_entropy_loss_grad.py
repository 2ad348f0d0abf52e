"""CrossEntropyLossGrad: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from operators.base import Changes, Sample, Samples
from operators.strides import repeated, scattered

REDUCTIONS = ("none", "mean", "sum")
IGNORED = -100


def cross_entropy_loss_grad(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = IGNORED,
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
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> float:
    """How large the two terms are whose difference is the smoothed part of the gradient above: they may cancel."""
    if label_smoothing == 0 or grad_loss.numel() == 0:
        return 0.0
    weights = torch.ones(log_prob.shape[1]) if weight is None else weight.float()
    kept = target[target != ignore_index]
    total = (float(weights[kept].sum()) if reduction == "mean" else 1.0) or 1.0
    return label_smoothing * float(grad_loss.abs().max()) * float(weights.mean()) / total


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    rows, classes = rng.randint(1, 6), rng.randint(1, 7)
    reduction = rng.choice(REDUCTIONS)
    grad = torch.randn((rows,) if reduction == "none" else ()).to(dtype)
    log_prob = scattered(torch.randn(rows, classes).log_softmax(1).to(dtype), rng)
    target = repeated(torch.randint(0, classes, (rows,)), rng)
    weight = repeated(torch.rand(classes) + 0.5, rng)
    attributes = {"reduction": reduction, "label_smoothing": rng.choice((0.0, 0.25))}
    return Sample([scattered(grad, rng), log_prob, target, weight], attributes)


def _sized(size: int, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(size)
    grad = torch.randn((), generator=generator).to(dtype)
    target = torch.randint(0, 5, (size,), generator=generator)
    target[0] = 3
    log_prob = torch.randn(size, 5, generator=generator).log_softmax(1).to(dtype)
    weight = torch.rand(5, generator=generator)
    return Sample([grad, log_prob, target, weight], {"ignore_index": 2, "label_smoothing": 0.1})


def _typical(dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    log_prob = (3 * torch.randn(9, 70, generator=generator)).log_softmax(1).to(dtype)
    target = torch.randint(0, 70, (9,), generator=generator)
    target[torch.rand(9, generator=generator) < 0.3] = IGNORED
    weight = torch.rand(70, generator=generator) + 0.5
    samples = []
    for reduction in REDUCTIONS:
        grad = torch.linspace(-1.0, 2.0, 9).to(dtype) if reduction == "none" else torch.tensor(1.5).to(dtype)
        smoothed: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
        terms = smoothing_terms(grad, log_prob, target, weight, **smoothed)
        samples.append(Sample([grad, log_prob, target], {"reduction": reduction}))
        samples.append(Sample([grad, log_prob, target, weight], smoothed, terms))
    return samples


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    generator = torch.Generator().manual_seed(length)
    log_prob = torch.randn(2, length, generator=generator).to(dtype).float().log_softmax(-1).to(dtype)
    weight = torch.rand(length, generator=generator)
    inputs = [torch.tensor(1.5, dtype=dtype), log_prob, torch.tensor([0, length - 1])]
    # Smoothed by 1, gradients are small differences of larger numbers.
    cases: list[tuple[float, list[Tensor]]] = [(0.0, [weight]), (0.1, [weight]), (0.1, []), (1.0, [])]
    return [Sample([*inputs, *weights], {"label_smoothing": smoothing}) for smoothing, weights in cases]


def _valid() -> Sample:
    generator = torch.Generator().manual_seed(0)
    log_prob = torch.randn(4, 5, generator=generator).log_softmax(1)
    return Sample([torch.ones(()), log_prob, torch.tensor([0, 4, 2, 1]), torch.rand(5, generator=generator)])


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    yield from near.without(0, 1, 2)
    for index in range(2):
        yield from near.retyped(index, f16, bf16, f64, torch.int64)
    yield from near.all_retyped(range(2), f64, torch.int32)
    yield from near.retyped(2, torch.int32, f32, torch.bool)
    yield from near.retyped(3, f16, bf16, f64)
    yield from near.reshaped(0, (4,), (2,), (1, 1), (0,))
    yield from near.reshaped(0, (4,), (5,), reduction="sum")
    yield from near.reshaped(0, (), (1,), (5,), (4, 1), reduction="none")
    yield from near.reshaped(1, (4,), (4, 5, 1), (4, 0), (), (1,) * 9, (3, 5))
    yield from near.reshaped(2, (5,), (4, 1), (), (0,), (1,) * 9)
    yield from near.reshaped(3, (4,), (5, 1), (), (0,), (1,))
    for class_ in (-1, 5, 2**40, -(2**63)):
        yield from near.changed(2, torch.tensor([class_, 0, 0, 0]), torch.tensor([0, 0, 0, class_]))
    yield from near.changed(2, torch.tensor([0, -100, 1, 2]), ignore_index=-1)
    names = ("max", "", "Mean", "batchmean", "none ", "mean\n", "méan", "x" * 1000)
    yield from near.with_attributes("reduction", *names)
    yield from near.with_attributes("label_smoothing", -0.125, 1.5, float("nan"), float("inf"))
    yield from near.with_attributes("lse_square_scale_for_zloss", 1.0, -0.5, float("nan"))
    yield from near.changed(4, torch.zeros(()))
    yield from near.changed(5, torch.zeros(4))


SAMPLES = Samples(
    oracle=cross_entropy_loss_grad,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    typical=_typical,
    rows=_rows,
    empty=[(Sample([torch.zeros(()), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)]), [(0, 3)])],
)
