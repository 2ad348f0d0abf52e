"""The kernel of ScaledMaskedSoftmaxBackward: masks, lengths of rows, NaN and infinities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import FLOATS, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators.scaled_masked_softmax_backward import scaled_masked_softmax_backward
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "ScaledMaskedSoftmaxBackward"


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = (3 * torch.randn(shape, generator=generator)).softmax(-1).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype), y


def check(grad: Tensor, y: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    (actual,) = run(OP, grad, y, mask, scale=scale)
    native = scaled_masked_softmax_backward(grad, y, mask, scale=scale, dtype=y.dtype)
    reference = scaled_masked_softmax_backward(grad, y, mask, scale=scale)
    products = (grad.double() * y.double()).abs().sum(-1, keepdim=True)
    assert_gradients_close(actual, native, reference, y.dtype, terms=abs(scale) * products.nan_to_num(0, 0, 0).numpy())
    return actual


@given(
    batch=st.integers(0, 3),
    heads=st.integers(0, 3),
    queries=st.integers(0, 5),
    keys=st.integers(0, 70),
    masked=st.sampled_from(("", "bh", "b1", "1h", "11")),
    scale=st.sampled_from((1.0, 0.125, -3.0)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_agrees_with_pytorch(
    batch: int, heads: int, queries: int, keys: int, masked: str, scale: float, dtype: torch.dtype, seed: int
) -> None:
    grad, y = sample((batch, heads, queries, keys), dtype, seed)
    mask_shape = (batch if "b" in masked else 1, heads if "h" in masked else 1, queries, keys)
    mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    actual = check(grad, y, mask if masked else None, scale)
    if masked:
        blocked = actual[mask.expand_as(actual)]
        assert_same_bits(blocked, torch.zeros_like(blocked))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 3, 40, 512), (1, 2, 3, 40000), (1, 1, 30000, 5)])
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.sampled(every=3)
def test_large_and_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, shape: tuple[int, ...], masked: bool
) -> None:
    grad, y = sample(shape, dtype)
    mask = (torch.arange(y[0].numel()) % 3 == 0).reshape(1, *shape[1:]) if masked else None
    check(grad, y, mask, 0.5)
    assert_same_bits(*run(OP, grad, y, mask), *run(OP, grad, y, mask, threads=2))


def test_all_masked() -> None:
    grad, y = sample((2, 2, 3, 5), torch.float32)
    (out,) = run(OP, -grad.abs(), y, torch.ones(1, 1, 3, 5, dtype=torch.bool), scale=-2.0)
    assert_same_bits(out, torch.zeros_like(out))


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_nan_and_infinity_at_a_masked_position_reach_the_row_but_not_their_own_output(bad: float) -> None:
    grad, y = sample((1, 1, 2, 4), torch.float32)
    mask = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    mask[0, 0, 0, 1] = True
    grad[0, 0, 0, 1] = bad
    out = check(grad, y, mask)
    assert_same_bits(out[0, 0, 0, 1], torch.tensor(0.0))
    assert not out[0, 0, 0, [0, 2, 3]].isfinite().any() and out[0, 0, 1].isfinite().all()


FOUR = torch.zeros(2, 2, 3, 5)
MASK = torch.zeros(2, 2, 3, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((FOUR[0], FOUR[0]), {}, "grad_output is float32(2,3,5); expected 4 dimensions (B,H,S1,S2)"),
        ((FOUR, FOUR[:1]), {}, "y is float32(1,2,3,5); expected float32(2,2,3,5) as grad_output"),
        ((FOUR, FOUR, MASK[..., :1]), {},
         "mask is bool(2,2,3,1); expected bool(2,2,3,5), the first two dimensions or 1"),
        ((FOUR, FOUR, MASK[0]), {}, "mask is bool(2,3,5); expected bool(2,2,3,5), the first two dimensions or 1"),
        ((FOUR, FOUR, MASK[:, :0]), {}, "mask is bool(2,0,3,5); expected bool(2,2,3,5), the first two dimensions or 1"),
        ((FOUR, FOUR, MASK), {"fix_triu_mask": 1},
         "fix_triu_mask is 1; expected 0: a fixed triangular mask is not supported"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
