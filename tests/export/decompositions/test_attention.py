"""The attention kernel's decompositions compute what the kernel and its backward pass compute, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradfuse.export.decompositions import attention

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TABLE = attention.table()
MASK = torch.linspace(-2, 1, 35, dtype=torch.float64).view(5, 7)
# One row that sees nothing, and one that sees a single column.
BLIND = torch.zeros(5, 7, dtype=torch.float64)
BLIND[1], BLIND[3, 1:] = -torch.inf, -torch.inf


def _assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    # Sums of some tens of products behind each other.
    assert ((actual - expected).abs() <= 1e3 * torch.finfo(expected.dtype).eps * expected.abs().max()).all()


@pytest.mark.parametrize(
    "columns, groups, causal, named",
    [
        (7, 4, False, {}),
        (5, 2, True, {"scale": 0.3}),
        (7, 1, False, {"attn_mask": MASK}),
        (7, 4, False, {"attn_mask": BLIND}),
    ],
)
def test_attention(columns: int, groups: int, causal: bool, named: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    key, value = (torch.randn(2, groups, columns, 8, dtype=torch.float64) for _ in range(2))
    out, logsumexp = FORWARD(query, key, value, 0.0, causal, **named)
    for one, other in zip(TABLE[FORWARD](query, key, value, 0.0, causal, **named), (out, logsumexp), strict=True):
        _assert_equal(one, other)
    arguments = (torch.randn_like(out), query, key, value, out, logsumexp, 0.0, causal)
    for one, other in zip(TABLE[BACKWARD](*arguments, **named), BACKWARD(*arguments, **named), strict=True):
        _assert_equal(one, other)
