"""Calls of ScaledDotProductAttentionBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from case import Case, Float64s, arithmetic
from device import Values

from cases.scaled_dot_product_attention import COMPUTED, DTYPES, Call, calls

OP = "ScaledDotProductAttentionBackward"
__all__ = ["DTYPES", "OP", "cases"]


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    for call in calls(random, dtype, large):
        exact_output, exact_logsumexp = call.forward()
        grad = Values.of(random.standard_normal(exact_output.shape), dtype)
        output = Values.of(exact_output, dtype)
        logsumexp = Values.of(exact_logsumexp, COMPUTED.get(dtype, "float32"))
        p = np.exp(call.scores - logsumexp.wide()[..., None])
        through = grad.wide() @ call.value.swapaxes(2, 3) * call.gains
        row_sum = (grad.wide() * output.wide()).sum(-1, keepdims=True)
        expected = _gradients(
            call, call.scale * p * (through - row_sum), p * call.gains, grad.wide(), call.key, call.query
        )
        rough = p * (call.rounding + np.abs(logsumexp.wide()[..., None]))
        size = np.abs(grad.wide())
        sums = size @ np.abs(call.value).swapaxes(2, 3) * call.gains + (size * np.abs(output.wide())).sum(
            -1, keepdims=True
        )
        terms = _gradients(
            call, abs(call.scale) * rough * sums, rough * call.gains, size, np.abs(call.key), np.abs(call.query)
        )
        yield Case(
            call.name, OP, dtype, [grad, *call.tensors, output, logsumexp, *call.optional], expected,
            [arithmetic(dtype) * one for one in terms], dict(call.attributes),
        )  # fmt: skip


def _gradients(
    call: Call, of_scores: Float64s, p: Float64s, grad: Float64s, key: Float64s, query: Float64s
) -> list[Float64s]:
    """The gradients of query, key and value; heads that share keys add up."""
    batch, heads, groups, _, keys, _, _ = call.sizes
    of_heads = [of_scores.swapaxes(2, 3) @ query, p.swapaxes(2, 3) @ grad]
    shared = [one.reshape(batch, groups, heads // groups, keys, one.shape[3]).sum(2) for one in of_heads]
    return [of_scores @ key, *shared]
