"""Calls of LinearCrossEntropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic, int64s, log_softmax
from device import Values

OP = "LinearCrossEntropy"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Sizes (rows, features, classes), the reduction, smoothing, cap, and whether there are a bias and weights.

    With weights there is also the logsumexp, and a gradient of it.
    """
    calls: list[tuple[tuple[int, int, int], str, float, float, bool, bool]] = [
        ((4, 3, 5), "mean", 0.0, 0.0, False, False),
        ((30, 20, 70), "none", 0.1, 0.0, True, True),
        ((7, 300, 300), "sum", 0.0, 3.0, True, False),
        ((70, 9, 33), "mean", 1.0, 2.0, False, True),
    ]
    if large:
        calls += [((512, 256, 4099), "mean", 0.0, 0.0, True, False)]
    for (rows, features, classes), reduction, smoothing, softcap, biased, weighted in calls:
        x = Values.of(random.standard_normal((rows, features)), dtype)
        w = Values.of(random.standard_normal((classes, features)) / np.sqrt(features), dtype)
        bias = Values.of(random.standard_normal(classes), dtype) if biased else None
        weight = Values.of(random.random(classes) + 0.5, "float64" if dtype == "float64" else "float32")
        target = random.integers(0, classes, rows)
        target[random.random(rows) < 0.3] = -100
        grad = Values.of(random.standard_normal(rows) if reduction == "none" else np.full((), 1.5), dtype)
        of_sums = Values.of(random.standard_normal(rows), dtype)
        for fault in (False, True) if rows == 30 else (False,):
            labels = target.copy()
            if fault:
                labels[3] = classes
            class_weight = weight.wide() if weighted else np.ones(classes)
            expected, terms = _results(
                x.wide(), w.wide(), labels, np.zeros(classes) if bias is None else bias.wide(), class_weight,
                grad.wide(), of_sums.wide() if weighted else None, reduction, smoothing, softcap,
            )  # fmt: skip
            attributes: dict[str, Any] = {
                "reduction": reduction, "label_smoothing": smoothing, "softcap": softcap,
                "output_mask": (1, 1, 1, 1, int(weighted)),
            }  # fmt: skip
            yield Case(
                f"{reduction} {rows}x{features}x{classes}", OP, dtype,
                (x, w, int64s(labels), bias, *((weight, grad, of_sums) if weighted else (None, grad))), expected,
                [arithmetic(dtype) * one for one in terms], attributes, 3 if fault else 0,
            )  # fmt: skip


def _results(
    x: Float64s, w: Float64s, target: Any, bias: Float64s, weight: Float64s, grad: Float64s, of_sums: Float64s | None,
    reduction: str, smoothing: float, softcap: float,
) -> tuple[list[Float64s], list[Float64s]]:  # fmt: skip
    """The loss, the gradients and the logsumexp, and the magnitudes that they add up."""
    rows, classes = len(x), len(w)
    sharp = float(np.float32(smoothing))
    products = x @ w.T + bias
    logits = softcap * np.tanh(products / softcap) if softcap else products
    lp = log_softmax(logits)
    used = (target >= 0) & (target < classes)
    wrong = ~used & (target != -100)
    label = np.where(used, target, 0)
    of_row = weight[label] * used
    total = of_row.sum() if reduction == "mean" else 1.0
    losses = -(1 - sharp) * of_row * lp[np.arange(rows), label] - sharp / classes * (lp * weight).sum(1) * used
    losses[wrong] = np.nan
    g = np.broadcast_to(grad, (rows,)) / total
    q, s = g * (1 - sharp) * of_row, g * sharp / classes * used
    logit_grad = np.exp(lp) * (q + s * weight.sum())[:, None] - s[:, None] * weight
    sizes = np.exp(lp) * np.abs(q + s * weight.sum())[:, None] + np.abs(s)[:, None] * weight
    logit_grad[np.arange(rows), label] -= q
    sizes[np.arange(rows), label] += np.abs(q)
    if of_sums is not None:
        logit_grad += np.exp(lp) * of_sums[:, None]
        sizes += np.exp(lp) * np.abs(of_sums)[:, None]
    if softcap:
        logit_grad *= 1 - (logits / softcap) ** 2
    # A logit is rounded as the sum that it is.
    sizes *= 1 + (np.abs(x) @ np.abs(w).T + np.abs(bias)).max()
    logit_grad[wrong] = np.nan
    loss = losses if reduction == "none" else np.asarray(losses.sum() / total)
    sums = np.where(wrong, np.nan, (logits - lp)[:, 0])
    kept = np.where(used[:, None] | (of_sums is not None), x, 0.0)
    kept[wrong] = np.nan
    expected = [
        loss,
        logit_grad @ w,
        logit_grad.T @ kept,
        logit_grad.sum(0),
        sums if of_sums is not None else np.zeros(0),
    ]
    spread = np.abs(logits).max(initial=0.0) + np.log(classes)
    of_loss = np.abs(np.nan_to_num(losses)) + spread * (1 + np.abs(x).sum(1))
    terms = [
        of_loss if reduction == "none" else np.asarray(of_loss.sum() / total),
        sizes @ np.abs(w),
        sizes.T @ np.abs(x),
        sizes.sum(0),
        spread * (1 + np.abs(x).sum(1)) if of_sums is not None else np.zeros(0),
    ]
    return [np.asarray(one) for one in expected], [np.asarray(one) for one in terms]
