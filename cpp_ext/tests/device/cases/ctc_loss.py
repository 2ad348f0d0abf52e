"""Calls of CtcLoss, and what those of CtcLossBackward are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from case import Case, Float64s, arithmetic, int64s, log_softmax
from device import Values

OP = "CtcLoss"
DTYPES = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Problem:
    """A batch with its losses: log_probs (T, N, C), labels, and the posterior of each class (T, N, C)."""

    log_probs: Values
    labels: list[list[int]]
    input_lengths: list[int]
    target_lengths: list[int]
    alpha: Float64s
    loss: Float64s
    posterior: Float64s

    @property
    def largest_alpha(self) -> float:
        """The magnitude of what log_alpha adds up."""
        return float(np.abs(np.where(np.isfinite(self.alpha), self.alpha, 0)).max())

    def named_inputs(self) -> Iterator[tuple[str, tuple[Values, ...]]]:
        """The four inputs of CtcLoss with targets in both layouts, each with a title."""
        steps, items, classes = self.log_probs.bits.shape
        targets = np.full((items, max(self.target_lengths)), -7)
        for row, own in zip(targets, self.labels, strict=True):
            row[: len(own)] = own
        line = Values("int32", np.concatenate([np.asarray(own, np.int32) for own in self.labels]))
        lengths = (int64s(self.input_lengths), int64s(self.target_lengths))
        for name, layout in (("padded", int64s(targets)), ("joined", line)):
            title = f"{name} {steps}x{items}x{classes}, labels {self.target_lengths}"
            yield title, (self.log_probs, layout, *lengths)


def problems(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Problem]:
    """Batches of small and long sequences."""
    shapes: list[tuple[int, int, list[int], list[int]]] = [
        (7, 5, [7, 6, 3], [2, 0, 1]), (40, 6, [40, 33], [12, 9]), (12, 1100, [12], [3]), (30, 3, [30], [10]),
    ]  # fmt: skip
    if dtype in ("float32", "float64"):
        shapes += [(340, 30, [340], [300]), (1300, 5, [1300], [1100])]
        shapes += [(400, 1024, [400] * 8, [60] * 8), (1500, 32, [1500, 1200], [200, 150])] if large else []
    for steps, classes, input_lengths, target_lengths in shapes:
        items = len(input_lengths)
        log_probs = Values.of(log_softmax(random.standard_normal((steps, items, classes))), dtype)
        labels = [random.integers(1, classes, length).tolist() for length in target_lengths]
        alpha = np.full((items, steps, 2 * max(target_lengths) + 1), -np.inf)
        loss = np.zeros(items)
        posterior = np.zeros((steps, items, classes))
        for item, (length, own) in enumerate(zip(input_lengths, labels, strict=True)):
            found, loss[item], of_classes = _alpha_and_loss(log_probs.wide()[:length, item], own, 0)
            alpha[item, :length, : found.shape[1]] = found
            posterior[:length, item] = of_classes
        yield Problem(log_probs, labels, input_lengths, target_lengths, alpha, loss, posterior)


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    for problem in problems(random, dtype, large):
        terms = [arithmetic(dtype) * np.sqrt(len(problem.log_probs.bits)) * problem.largest_alpha] * 2
        for title, inputs in problem.named_inputs():
            yield Case(title, OP, dtype, inputs, [problem.loss, problem.alpha], terms)


def _alpha_and_loss(lp: Float64s, labels: list[int], blank: int) -> tuple[Float64s, float, Float64s]:
    """Of one item, lp (T, C): alpha (T, 2L+1), the negative log-likelihood, and the posterior of each class (T, C)."""
    steps, states = len(lp), 2 * len(labels) + 1
    extended = np.full(states, blank)
    extended[1::2] = labels
    jumps = np.zeros(states, bool)
    jumps[3::2] = extended[3::2] != extended[1:-2:2]

    def sweep(emitted: Float64s, jumps: npt.NDArray[np.bool_]) -> Float64s:
        table = np.full((steps, states), -np.inf)
        table[0, :2] = emitted[0, :2]
        for t in range(1, steps):
            before = table[t - 1]
            table[t, 0] = before[0]
            table[t, 1:] = np.logaddexp(before[1:], before[:-1])
            table[t, 2:] = np.where(jumps[2:], np.logaddexp(table[t, 2:], before[:-2]), table[t, 2:])
            table[t] += emitted[t]
        return table

    with np.errstate(invalid="ignore"):
        emitted = lp[:, extended]
        alpha = sweep(emitted, jumps)
        backward_jumps = np.zeros(states, bool)
        backward_jumps[2:] = jumps[::-1][:-2]
        beta = sweep(emitted[::-1, ::-1], backward_jumps)[::-1, ::-1]
        likelihood = np.logaddexp(alpha[-1, -1], alpha[-1, -2]) if states > 1 else alpha[-1, -1]
        gamma = np.exp(alpha + beta - emitted - likelihood)
    posterior = np.zeros_like(lp)
    np.add.at(posterior.T, extended, gamma.T)
    return alpha, -float(likelihood), posterior
