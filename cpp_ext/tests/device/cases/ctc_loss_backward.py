"""Calls of CtcLossBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from case import Case
from device import EPS, Values

from cases.ctc_loss import DTYPES, Problem, problems

__all__ = ["DTYPES", "OP", "cases"]

OP = "CtcLossBackward"


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    for problem in problems(random, dtype, large):
        steps, items, _ = problem.log_probs.bits.shape
        inside = (np.arange(steps)[:, None] < np.asarray(problem.input_lengths)[None])[:, :, None]
        alpha = problem.alpha
        poisoned = np.where(np.isneginf(alpha) & (np.arange(steps)[None, :, None] >= 1), np.nan, alpha)
        poisoned = np.where(np.isnan(poisoned) & _is_read(problem), -np.inf, poisoned)
        saved = (Values.of(problem.loss, dtype), Values.of(poisoned, dtype))
        for title, inputs in problem.named_inputs():
            grad = Values.of(random.standard_normal((items,)), dtype)
            each = (np.exp(problem.log_probs.wide()) - problem.posterior) * grad.wide()[:, None]
            rounding = [EPS[dtype] * (1 + problem.largest_alpha) * np.abs(grad.wide()).max()]
            yield Case(title, OP, dtype, (grad, *inputs, *saved), [np.where(inside, each, 0.0)], rounding)


def _is_read(problem: Problem) -> npt.NDArray[np.bool_]:
    """Where log_alpha may be read: steps within the input's length, states within the target's."""
    shape = problem.alpha.shape
    steps = np.arange(shape[1])[None, :, None] < np.asarray(problem.input_lengths)[:, None, None]
    states = np.arange(shape[2])[None, None, :] <= 2 * np.asarray(problem.target_lengths)[:, None, None]
    return np.asarray(steps & states)
