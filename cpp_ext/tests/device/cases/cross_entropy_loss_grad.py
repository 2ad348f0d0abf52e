"""Calls of CrossEntropyLossGrad."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import SHORT, Case, arithmetic, int64s, log_softmax
from device import Values

OP = "CrossEntropyLossGrad"
DTYPES = SHORT


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    shapes = [(0, 3), (1, 1), (5, 3), (300, 7), (3, 4099), (2, 50257)]
    shapes += [(4096, 32000), (1000, 50257), (1, 5_000_001), (2_000_001, 3)] if large else []
    for rows, classes in shapes:
        for reduction, smoothing, weighted in (("mean", 0.0, False), ("none", 0.1, True), ("sum", 1.0, False)):
            if large and rows * classes > 10**6 and dtype != "bfloat16" and reduction != "mean":
                continue
            log_prob = Values.of(log_softmax(3 * random.standard_normal((rows, classes))), dtype)
            target = random.integers(0, classes, rows)
            target[random.random(rows) < 0.3] = -100
            if rows > 4:
                target[3] = classes  # out of range
            weight = random.random(classes).astype(np.float32)
            grad = Values.of(random.standard_normal(rows) if reduction == "none" else np.full((), 1.5), dtype)
            w = weight.astype(np.float64) if weighted else np.ones(classes)
            used = (target >= 0) & (target < classes)
            safe = np.where(used, target, 0)
            denominator = max((w[safe] * used).sum(), np.finfo(np.float64).tiny) if reduction == "mean" else 1.0
            g = np.broadcast_to(grad.wide(), (rows,)) / denominator
            q, s = g * (1 - smoothing) * w[safe], g * smoothing / classes
            p = np.exp(log_prob.wide())
            exact = p * (q + s * w.sum())[:, None] - s[:, None] * w
            exact[np.arange(rows), safe] -= q
            exact[~used] = 0
            exact[(target != -100) & ~used] = np.nan
            terms = arithmetic(dtype) * np.nan_to_num(np.abs(exact)).max(initial=0.0)
            inputs = (grad, log_prob, int64s(target), Values("float32", weight) if weighted else None)
            attributes = {"reduction": reduction, "label_smoothing": smoothing}
            fault = 3 if rows > 4 else 0
            name = f"{reduction} {rows}x{classes}"
            yield Case(name, OP, dtype, inputs, [exact], [terms], attributes, fault)
