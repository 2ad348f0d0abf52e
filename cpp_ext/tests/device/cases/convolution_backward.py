"""Calls of ConvolutionBackward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Values

OP = "ConvolutionBackward"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Convolutions and transposed ones: batch, channels, sizes of both sides, kernel, attributes."""
    calls: list[tuple[int, tuple[int, int], tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        (2, (3, 4), (6, 5), (6, 5), (3, 3), {"padding": (1,)}),
        (2, (4, 6), (7, 8), (3, 3), (3, 2), {"stride": (2,), "dilation": (1, 3), "groups": 2}),
        (1, (2, 2), (5, 6), (6, 5), (2, 3), {"padding": (2, 0, 0, 1), "output_mask": (1, 1, 0)}),
        (3, (4, 4), (9,), (5,), (3,), {"padding": (1,), "stride": (2,), "groups": 4}),
        (2, (2, 3), (3, 4, 5), (2, 4, 3), (2, 1, 3), {}),
        (2, (3, 2), (4, 3), (9, 5), (3, 3), {"transposed": 1, "stride": (2,), "padding": (0, 1)}),
        (2, (4, 2), (3,), (7,), (2,), {"transposed": 1, "stride": (2,), "output_padding": (1,), "groups": 2}),
        (0, (2, 3), (4, 4), (4, 4), (1, 1), {}),
    ]  # fmt: skip
    if large:
        calls += [(16, (64, 64), (56, 56), (56, 56), (3, 3), {"padding": (1,)})]
    for batch, (channels, outputs), sizes, places, kernel, attributes in calls:
        groups, transposed = attributes.get("groups", 1), attributes.get("transposed", 0)
        ends = (channels, outputs // groups) if transposed else (outputs, channels // groups)
        shapes = ((batch, outputs, *places), (batch, channels, *sizes), (*ends, *kernel))
        values = [Values.of(random.standard_normal(shape), dtype) for shape in shapes]
        expected = _gradients([value.wide() for value in values], attributes)
        magnitudes = _gradients([np.abs(value.wide()) for value in values], attributes)
        terms = [arithmetic(dtype) * one.max(initial=0.0) for one in magnitudes]
        name = f"{batch} x {channels} x {sizes} to {outputs} x {places} by {kernel}, {attributes}"
        yield Case(name, OP, dtype, values, expected, terms, attributes)


def _gradients(arguments: Sequence[Float64s], attributes: Mapping[str, Any]) -> list[Float64s]:
    """All three, one place of the kernel after the other."""
    grad, input, weight = arguments
    spatial, groups = weight.ndim - 2, attributes.get("groups", 1)

    def per_axis(name: str, default: int) -> list[int]:
        numbers = attributes.get(name, (default,))
        return [*numbers] * spatial if len(numbers) == 1 else [*numbers]

    stride, dilation, begin = per_axis("stride", 1), per_axis("dilation", 1), per_axis("padding", 0)[:spatial]
    small, large = (input, grad) if attributes.get("transposed", 0) else (grad, input)
    in_groups = [side.reshape(len(side), groups, side.shape[1] // groups, *side.shape[2:]) for side in (small, large)]
    taps = weight.reshape(groups, -1, *weight.shape[1:])
    of_small, of_large, of_taps = (np.zeros_like(one) for one in (*in_groups, taps))
    letters = "xyz"[:spatial]
    for tap in product(*map(range, weight.shape[2:])):
        windows, elements = [], []
        for axis, place in enumerate(tap):
            met = np.arange(small.shape[axis + 2]) * stride[axis] + place * dilation[axis] - begin[axis]
            inside = (met >= 0) & (met < large.shape[axis + 2])
            windows.append(np.flatnonzero(inside))
            elements.append(met[inside])
        at_small = (slice(None),) * 3 + np.ix_(*windows)
        at_large = (slice(None),) * 3 + np.ix_(*elements)
        at_tap = (slice(None),) * 3 + tap
        s, b, w = in_groups[0][at_small], in_groups[1][at_large], taps[at_tap]
        of_taps[at_tap] = np.einsum(f"ngm{letters},ngc{letters}->gmc", s, b)
        of_small[at_small] += np.einsum(f"ngc{letters},gmc->ngm{letters}", b, w)
        of_large[at_large] += np.einsum(f"ngm{letters},gmc->ngc{letters}", s, w)
    of_input = of_small if attributes.get("transposed", 0) else of_large
    of_bias = grad.sum((0, *range(2, grad.ndim)))
    results = (of_input.reshape(input.shape), of_taps.reshape(weight.shape), of_bias)
    nothing = np.zeros(0)
    mask = attributes.get("output_mask", (1, 1, 1))
    return [result if wanted else nothing for result, wanted in zip(results, mask, strict=True)]
