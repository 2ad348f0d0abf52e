"""Calls of Convolution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic
from device import Values

OP = "Convolution"
DTYPES = (*SHORT, "float64")


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Convolutions and transposed ones: batch, channels, sizes of both sides, kernel, attributes."""
    calls: list[tuple[int, tuple[int, int], tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        (2, (3, 4), (6, 5), (6, 5), (3, 3), {"padding": (1,)}),
        (2, (4, 6), (7, 8), (3, 3), (3, 2), {"stride": (2,), "dilation": (1, 3), "groups": 2, "relu": 1}),
        (1, (2, 2), (5, 6), (6, 5), (2, 3), {"padding": (2, 0, 0, 1)}),
        (3, (4, 4), (9,), (5,), (3,), {"padding": (1,), "stride": (2,), "groups": 4}),
        (2, (2, 3), (3, 4, 5), (2, 4, 3), (2, 1, 3), {"relu": 1}),
        (2, (3, 2), (4, 3), (9, 5), (3, 3), {"transposed": 1, "stride": (2,), "padding": (0, 1), "relu": 1}),
        (2, (4, 2), (3,), (7,), (2,), {"transposed": 1, "stride": (2,), "output_padding": (1,), "groups": 2}),
        (0, (2, 3), (4, 4), (4, 4), (1, 1), {}),
    ]  # fmt: skip
    if large:
        calls += [(16, (64, 64), (56, 56), (56, 56), (3, 3), {"padding": (1,)})]
    for number, (batch, (channels, outputs), sizes, places, kernel, attributes) in enumerate(calls):
        groups, transposed = attributes.get("groups", 1), attributes.get("transposed", 0)
        ends = (channels, outputs // groups) if transposed else (outputs, channels // groups)
        shapes = [(batch, channels, *sizes), (*ends, *kernel), (outputs,)][: 2 + number % 2]
        values = [Values.of(random.standard_normal(shape), dtype) for shape in shapes]
        result = (batch, outputs, *places)
        expected = _convolution([value.wide() for value in values], result, attributes)
        magnitudes = _convolution([np.abs(value.wide()) for value in values], result, attributes)
        name = f"{batch} x {channels} x {sizes} to {outputs} x {places} by {kernel}, {attributes}"
        terms = [arithmetic(dtype) * magnitudes.max(initial=0.0)]
        given: list[Values | None] = [*values, *([] if len(values) == 3 else [None])]
        yield Case(name, OP, dtype, given, [expected], terms, attributes)


def _convolution(arguments: Sequence[Float64s], shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Float64s:
    """One place of the kernel after the other."""
    input, weight = arguments[:2]
    spatial, groups = weight.ndim - 2, attributes.get("groups", 1)

    def per_axis(name: str, default: int) -> list[int]:
        numbers = attributes.get(name, (default,))
        return [*numbers] * spatial if len(numbers) == 1 else [*numbers]

    stride, dilation, begin = per_axis("stride", 1), per_axis("dilation", 1), per_axis("padding", 0)[:spatial]
    transposed = bool(attributes.get("transposed", 0))
    output = np.zeros(shape)
    small, large = (input, output) if transposed else (output, input)
    of_small, of_large = (
        side.reshape(len(side), groups, side.shape[1] // groups, *side.shape[2:]) for side in (small, large)
    )
    taps = weight.reshape(groups, -1, *weight.shape[1:])
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
        w = taps[(slice(None),) * 3 + tap]
        if transposed:
            of_large[at_large] += np.einsum(f"ngm{letters},gmc->ngc{letters}", of_small[at_small], w)
        else:
            of_small[at_small] += np.einsum(f"ngc{letters},gmc->ngm{letters}", of_large[at_large], w)
    if len(arguments) > 2:
        output += arguments[2].reshape(-1, *[1] * spatial)
    return np.maximum(output, 0.0) if attributes.get("relu", 0) else output
