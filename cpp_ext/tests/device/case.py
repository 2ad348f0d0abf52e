"""Calls of an op with results in float64, by numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from device import EPS, Values

Float64s = npt.NDArray[np.float64]

SHORT = ("float32", "float16", "bfloat16")
"""The types of most ops."""


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
    output_dtypes: Sequence[str] = ()  # where not all are of the type of the case

    def dtypes(self) -> list[str]:
        """The type of each output."""
        return list(self.output_dtypes) or [self.dtype] * len(self.expected)

    def error_bounds(self) -> list[Float64s]:
        """How far each output may be from what is expected: eight roundings of the result and of what leads to it."""
        tiny = {"float16": 2.0**-24, "float64": 0.0}
        return [
            8
            * (
                EPS.get(dtype, 0.0) * np.abs(np.nan_to_num(exact, posinf=0, neginf=0))
                + np.asarray(terms)
                + tiny.get(dtype, 2.0**-126)
            )
            for exact, terms, dtype in zip(self.expected, self.terms, self.dtypes(), strict=True)
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


def arithmetic(dtype: str) -> float:
    """The spacing at 1 of the type that an op computes in."""
    return EPS["float64" if dtype == "float64" else "float32"]


def int64s(values: Any) -> Values:
    """Class indices, lengths and the like."""
    return Values("int64", np.asarray(values, np.int64))


def log_softmax(x: Float64s) -> Float64s:
    """Along the last dimension."""
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def kept(shape: tuple[int, ...], threshold: int, seed: int, draw: int) -> npt.NDArray[np.bool_]:
    """Which elements a dropout keeps."""
    words = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(0x9E3779B1)
    words ^= words >> np.uint32(15)
    words += np.uint32((seed % 2**31 * 0x9E3779B1 + draw * 0x85EBCA77) % 2**32)
    words *= np.uint32(0x21F0AAAD)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0x735A2D97)
    return ((words >> np.uint32(1)) >= threshold).reshape(shape)
