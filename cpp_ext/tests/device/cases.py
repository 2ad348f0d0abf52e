"""Calls of every op with results in float64, by numpy alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from device import EPS, Values

Float64s = npt.NDArray[np.float64]

SHORT = ("float32", "float16", "bfloat16")
CTC = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """An op, its inputs in the order of its signature, and what must come out."""

    name: str
    op: str
    dtype: str
    inputs: Sequence[Values | None]
    expected: Sequence[Float64s]
    terms: Sequence[Any]  # for each output, the magnitude of what rounds on the way to it
    attributes: dict[str, Any] = field(default_factory=dict)
    fault: int = 0
    host_inputs: tuple[int, ...] = ()

    def error_bounds(self) -> list[Float64s]:
        """How far each output may be from what is expected: eight roundings of the result and of what leads to it."""
        eps = EPS[self.dtype]
        tiny = {"float16": 2.0**-24, "float64": 0.0}.get(self.dtype, 2.0**-126)
        return [
            8 * (eps * np.abs(np.nan_to_num(exact, posinf=0, neginf=0)) + np.asarray(terms) + tiny)
            for exact, terms in zip(self.expected, self.terms, strict=True)
        ]

    def problem(self, results: Sequence[Float64s]) -> str:
        """What is wrong with the outputs, or "" where they are right."""
        for got, exact, bound in zip(results, self.expected, self.error_bounds(), strict=True):
            if got.shape != exact.shape:
                return f"has shape {list(got.shape)}; expected {list(exact.shape)}"
            with np.errstate(invalid="ignore"):
                error = np.where((got == exact) | (np.isnan(got) & np.isnan(exact)), 0.0, np.abs(got - exact))
            wrong = ~(error <= bound)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                off = f"{int(wrong.sum())} of {got.size} are off"
                return f"is {got[at]:.9g} at {list(at)}; expected {exact[at]:.9g}; {off}"
        return ""


def cases(*, large: bool, seed: int = 0) -> Iterator[Case]:
    """Every op in every type; `large` adds sizes that fill a GPU."""
    random = np.random.default_rng(seed)
    for dtype in SHORT:
        yield from _cross_entropy(random, dtype, large)
        yield from _mse(random, dtype, large)
        yield from _softmax(random, dtype, large)
        yield from _grouped(random, dtype, large)
    for dtype in CTC:
        yield from _ctc(random, dtype, large)


def _arithmetic(dtype: str) -> float:
    return EPS["float64" if dtype == "float64" else "float32"]


def _int64(values: Any) -> Values:
    return Values("int64", np.asarray(values, np.int64))


def _log_softmax(x: Float64s) -> Float64s:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _cross_entropy(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    shapes = [(0, 3), (1, 1), (5, 3), (300, 7), (3, 4099), (2, 50257)]
    shapes += [(4096, 32000), (1000, 50257), (1, 5_000_001), (2_000_001, 3)] if large else []
    for rows, classes in shapes:
        for reduction, smoothing, weighted in (("mean", 0.0, False), ("none", 0.1, True), ("sum", 1.0, False)):
            if large and rows * classes > 10**6 and dtype != "bfloat16" and reduction != "mean":
                continue
            log_prob = Values.of(_log_softmax(3 * random.standard_normal((rows, classes))), dtype)
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
            terms = _arithmetic(dtype) * np.nan_to_num(np.abs(exact)).max(initial=0.0)
            inputs = (grad, log_prob, _int64(target), Values("float32", weight) if weighted else None)
            attributes = {"reduction": reduction, "label_smoothing": smoothing}
            fault = 3 if rows > 4 else 0
            name = f"{reduction} {rows}x{classes}"
            yield Case(name, "CrossEntropyLossGrad", dtype, inputs, [exact], [terms], attributes, fault)


def _mse(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    shapes: list[tuple[tuple[int, ...], ...]] = [
        ((), (0, 3), (0, 3)), ((), (), ()), ((), (5, 3), (5, 3)), ((300, 17),) * 3, ((17,), (300, 1), (300, 17)),
        ((4, 1, 33), (1, 5, 33), (4, 5, 1)), ((500, 3), (3,), (500, 1)), ((64, 64), (64, 64), (1, 64)),
        ((2, 1, 2, 1, 2, 1, 2, 3), (1, 3, 2, 1, 1, 2, 1, 3), (2, 3, 1, 2, 2, 1, 1, 1)),
    ]  # fmt: skip
    if large:
        shapes += [((4099, 4097),) * 3, ((), (4096, 4096), (4096, 4096)), ((4096, 1), (4097,), (4096, 4097))]
    for shape in shapes:
        for reduction in range(3):
            grad, self, target = (Values.of(random.standard_normal(own), dtype) for own in shape)
            exact = 2 * (self.wide() - target.wide()) * grad.wide() / (self.bits.size if reduction == 1 else 1)
            terms = _arithmetic(dtype) * np.abs(exact).max(initial=0.0)
            name = f"{'none mean sum'.split()[reduction]} {shape}"
            inputs = (grad, self, target)
            yield Case(name, "MseLossBackward", dtype, inputs, [exact], [terms], {"reduction": reduction})


def _softmax(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    sizes = [0, 1, 5, 32, 63, 64, 127, 200, 256, 509, 512, 1000, 1024, 2047, 2048, 4095, 4096, 8192, 20001]
    for size in sizes:
        batch, heads, queries = (2, 3, 128) if large else (2, 2, 3)
        for masked in (None, (batch, heads), (batch, 1), (1, 1)):
            shape = (batch, heads, queries, size)
            y = Values.of(np.exp(_log_softmax(3 * random.standard_normal(shape))) if size else np.zeros(shape), dtype)
            grad = Values.of(random.standard_normal(shape), dtype)
            mask = None if masked is None else random.random((*masked, queries, size)) < 0.4
            products = grad.wide() * y.wide()
            exact = 0.5 * y.wide() * (grad.wide() - products.sum(-1, keepdims=True))
            exact = exact if mask is None else np.where(mask, 0.0, exact)
            terms = _arithmetic(dtype) * (0.5 * np.abs(products).sum(-1, keepdims=True) * y.wide() + np.abs(exact))
            inputs = (grad, y, None if mask is None else Values("bool", mask))
            name = f"{shape} mask {masked}"
            yield Case(name, "ScaledMaskedSoftmaxBackward", dtype, inputs, [exact], [terms], {"scale": 0.5})


def _grouped(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    for shape in [(0, 4, 3), (3, 0, 5), (5, 7, 1), (3, 300, 30), (2, 129, 64)] + ([(128, 512, 2048)] if large else []):
        grad = Values.of(random.standard_normal(shape), dtype)
        terms = _arithmetic(dtype) * np.abs(grad.wide()).sum(1)
        yield Case(f"{shape}", "GroupedBiasAddGrad", dtype, (grad, None), [grad.wide().sum(1)], [terms])
    skewed = [*[3] * 50, 700, *[700] * 60, 999, 1000]
    tables = [([400, 600, 1000], 30), (skewed, 64), ([1000], 8), ([], 4), ([5, 3, 1000, 999], 6)]
    if large:
        tables += [([65536], 2048), ([*np.sort(random.integers(0, 65537, 127)).tolist(), 65536], 2048)]
    for ends, columns in tables:
        rows = max(ends, default=0)
        grad = Values.of(random.standard_normal((rows, columns)), dtype)
        last = np.maximum.accumulate(np.asarray(ends, np.int64))
        sums = np.concatenate((np.zeros((1, columns)), grad.wide().cumsum(0)))
        sizes = np.concatenate((np.zeros((1, columns)), np.abs(grad.wide()).cumsum(0)))
        first = np.concatenate(([0], last))[: len(ends)].astype(np.int64)
        exact = sums[last] - sums[first]
        terms = _arithmetic(dtype) * (sizes[last] - sizes[first]) + 2.0**-50 * sizes[-1]
        fault = 2 if ends != sorted(ends) else 0
        for index_type in ("int64", "int32"):
            inputs = (grad, Values(index_type, np.asarray(ends, index_type)))
            name = f"{index_type} {len(ends)} groups of {rows}x{columns}"
            yield Case(name, "GroupedBiasAddGrad", dtype, inputs, [exact], [terms], fault=fault)


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


def _ctc(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    shapes: list[tuple[int, int, list[int], list[int]]] = [
        (7, 5, [7, 6, 3], [2, 0, 1]), (40, 6, [40, 33], [12, 9]), (12, 1100, [12], [3]), (30, 3, [30], [10]),
    ]  # fmt: skip
    wide = dtype in ("float32", "float64")
    if wide:
        shapes += [(340, 30, [340], [300]), (1300, 5, [1300], [1100])]
        shapes += [(400, 1024, [400] * 8, [60] * 8), (1500, 32, [1500, 1200], [200, 150])] if large else []
    for steps, classes, input_lengths, target_lengths in shapes:
        items = len(input_lengths)
        lp = Values.of(_log_softmax(random.standard_normal((steps, items, classes))), dtype)
        labels = [random.integers(1, classes, length).tolist() for length in target_lengths]
        longest = max(target_lengths)
        width = 2 * longest + 1
        alpha = np.full((items, steps, width), -np.inf)
        nll = np.zeros(items)
        posterior = np.zeros((steps, items, classes))
        targets = np.full((items, longest), -7)
        for item, (length, own) in enumerate(zip(input_lengths, labels, strict=True)):
            targets[item, : len(own)] = own
            found, nll[item], of_classes = _alpha_and_loss(lp.wide()[:length, item], own, 0)
            alpha[item, :length, : found.shape[1]] = found
            posterior[:length, item] = of_classes
        largest = np.abs(np.where(np.isfinite(alpha), alpha, 0)).max()
        lengths = (_int64(input_lengths), _int64(target_lengths))
        line = Values("int32", np.concatenate([np.asarray(own, np.int32) for own in labels]))
        for name, layout in (("padded", _int64(targets)), ("joined", line)):
            terms = [_arithmetic(dtype) * np.sqrt(steps) * largest] * 2
            title = f"{name} {steps}x{items}x{classes}, labels {target_lengths}"
            yield Case(title, "CtcLoss", dtype, (lp, layout, *lengths), [nll, alpha], terms, host_inputs=(3,))
            grad = Values.of(random.standard_normal(items), dtype)
            inside = (np.arange(steps)[:, None] < np.asarray(input_lengths)[None])[:, :, None]
            exact = np.where(inside, (np.exp(lp.wide()) - posterior) * grad.wide()[:, None], 0.0)
            poisoned = np.where(np.isneginf(alpha) & (np.arange(steps)[None, :, None] >= 1), np.nan, alpha)
            poisoned = np.where(np.isnan(poisoned) & _is_read(alpha, input_lengths, target_lengths), -np.inf, poisoned)
            given = (grad, lp, layout, *lengths, Values.of(nll, dtype), Values.of(poisoned, dtype))
            rounding = [EPS[dtype] * (1 + largest) * np.abs(grad.wide()).max()]
            yield Case(title, "CtcLossBackward", dtype, given, [exact], rounding)


def _is_read(alpha: Float64s, input_lengths: list[int], target_lengths: list[int]) -> npt.NDArray[np.bool_]:
    """Where log_alpha may be read: steps within the input's length, states within the target's."""
    steps = np.arange(alpha.shape[1])[None, :, None] < np.asarray(input_lengths)[:, None, None]
    states = np.arange(alpha.shape[2])[None, None, :] <= 2 * np.asarray(target_lengths)[:, None, None]
    return np.asarray(steps & states)
