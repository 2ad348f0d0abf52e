"""Calls of ScaledDotProductAttention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from case import SHORT, Case, Float64s, arithmetic, int64s, kept
from device import Values

OP = "ScaledDotProductAttention"
DTYPES = (*SHORT, "float64")
COMPUTED = {"float64": "float64"}
"""Type -> the type that it is computed in, where that is not float32."""
Sizes = tuple[int, int, int, int, int, int, int]

_DROPOUT = {"dropout_threshold": round(0.4 * 2**31), "draw": 2}
_CALLS: list[tuple[Sizes, str, tuple[int, ...], dict[str, Any]]] = [
    ((1, 2, 2, 5, 7, 4, 6), "", (), {}),
    ((2, 4, 2, 70, 130, 16, 8), "", (), {"causal": 2}),
    ((1, 2, 1, 131, 70, 8, 130), "", (), {"causal": 2, "scale": 0.5}),
    ((1, 3, 1, 33, 140, 130, 5), "shown", (33, 140), {"causal": 1}),
    ((2, 2, 2, 9, 20, 8, 8), "shown", (2, 1, 1, 20), dict(_DROPOUT)),
    ((2, 2, 2, 9, 20, 8, 8), "added", (1, 2, 9, 20), {**_DROPOUT, "causal": 1}),
    ((1, 2, 1, 3, 0, 4, 5), "", (), {}),
    ((1, 2, 1, 0, 3, 4, 5), "", (), {}),
]
_LARGE: list[tuple[Sizes, str, tuple[int, ...], dict[str, Any]]] = [
    ((2, 12, 4, 1024, 1024, 64, 64), "", (), {"causal": 1})
]


@dataclass(frozen=True)
class Call:
    """The inputs of a call, and in float64 what both passes need: (B, H, L, S) each, but for heads of keys."""

    name: str
    attributes: Mapping[str, Any]
    tensors: list[Values]  # query, key, value
    optional: list[Values | None]  # attn_mask, seed, drawn
    scores: Float64s
    gains: Float64s
    scale: float
    query: Float64s
    key: Float64s  # one for each head of queries, as value
    value: Float64s
    sizes: Sizes

    @property
    def largest(self) -> Float64s:
        """The largest score of each row, and 0 where it sees no key: (B, H, L, 1)."""
        most = self.scores.max(-1, keepdims=True, initial=-np.inf)
        return np.where(most == -np.inf, 0.0, most)

    @property
    def rounding(self) -> Float64s:
        """How much larger than that of a probability's own size its error is, for the size of its score."""
        return np.asarray(1 + np.abs(self.query) @ np.abs(self.key).swapaxes(2, 3) * abs(self.scale))

    def forward(self) -> tuple[Float64s, Float64s]:
        """The output and logsumexp."""
        parts = np.exp(self.scores - self.largest)
        sums = parts.sum(-1, keepdims=True)
        divisor = np.where(sums == 0, 1.0, sums)
        return (parts / divisor * self.gains) @ self.value, (self.largest + np.log(divisor))[..., 0]


def calls(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Call]:
    """Sizes (B, H, G, L, S, E, Ev), masks, causal both ways, and dropout."""
    for sizes, mask, mask_shape, attributes in [*_CALLS, *(_LARGE if large else [])]:
        batch, heads, groups, rows, keys, width, value_width = sizes
        shapes = [(batch, heads, rows, width), (batch, groups, keys, width), (batch, groups, keys, value_width)]
        tensors = [Values.of(random.standard_normal(shape), dtype) for shape in shapes]
        query, key, value = (one.wide() for one in tensors)
        key, value = (np.repeat(one, heads // groups, 1) for one in (key, value))
        scale = attributes.get("scale", width**-0.5)
        scores = query @ key.swapaxes(2, 3) * scale
        optional: list[Values | None] = [None, None, None]
        shown = random.random(mask_shape) < 0.7 if mask else np.ones((1, 1), bool)
        if mask == "shown":
            optional[0] = Values("bool", shown)
            scores = np.where(shown, scores, -np.inf)
        elif mask == "added":
            added = Values.of(np.where(shown, random.standard_normal(mask_shape), -np.inf), dtype)
            optional[0] = added
            scores = scores + added.wide()
        if attributes.get("causal"):
            ahead = keys - rows if attributes["causal"] == 2 else 0
            scores = np.where(np.arange(rows)[:, None] + ahead >= np.arange(keys), scores, -np.inf)
        gains = np.ones(())
        if "dropout_threshold" in attributes:
            optional[1:] = [int64s(2**35 + 7), int64s([3])]
            threshold = attributes["dropout_threshold"]
            gains = kept(scores.shape, threshold, 2**35 + 7, attributes["draw"] + 3) / (1 - threshold / 2**31)
        name = f"{sizes}, mask: {mask or None} {mask_shape}, {attributes}"
        yield Call(name, attributes, tensors, optional, scores, gains, scale, query, key, value, sizes)


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    for call in calls(random, dtype, large):
        output, logsumexp = call.forward()
        rounding = call.rounding.max(-1, keepdims=True, initial=1.0)
        p = np.exp(call.scores - logsumexp[..., None])
        terms = [rounding * ((p * call.gains) @ np.abs(call.value)), rounding[..., 0] + np.abs(logsumexp)]
        yield Case(
            call.name, OP, dtype, [*call.tensors, *call.optional], [output, logsumexp],
            [arithmetic(dtype) * one for one in terms], dict(call.attributes),
            output_dtypes=(dtype, COMPUTED.get(dtype, "float32")),
        )  # fmt: skip
