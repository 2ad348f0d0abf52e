"""The kernel of MseLossBackward: broadcast gradients, reductions, NaN and infinities."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import pytest
import torch
from cpp_ext.single_node import FLOATS, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators.mse_loss_backward import mse_loss_backward
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "MseLossBackward"
NONE, MEAN, SUM = range(3)


def check(*inputs: Tensor, reduction: int) -> None:
    (actual,) = run(OP, *inputs, reduction=reduction)
    native = mse_loss_backward(*inputs, reduction=reduction, dtype=inputs[0].dtype)
    reference = mse_loss_backward(*inputs, reduction=reduction)
    assert_gradients_close(actual, native, reference, inputs[0].dtype)


@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, min_dims=0, max_dims=5, min_side=0, max_side=6),
    reduction=st.sampled_from((NONE, MEAN, SUM)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_agrees_with_pytorch_on_any_broadcast(
    shapes: hnp.BroadcastableShapes, reduction: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(*(torch.randn(s, generator=generator).to(dtype) for s in shapes.input_shapes), reduction=reduction)


def test_eight_dimensions() -> None:
    torch.manual_seed(0)
    grad, self = torch.randn(2, 1, 2, 1, 2, 1, 2, 3), torch.randn(1, 3, 2, 1, 1, 2, 1, 3)
    check(grad, self, torch.randn(2, 3, 1, 2, 2, 1, 1, 1), reduction=MEAN)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shapes",
    [
        ((), (300, 517), (300, 517)),
        ((300, 517), (300, 517), (300, 517)),
        ((517,), (300, 1), (300, 517)),
        ((4, 1, 517), (1, 75, 517), (4, 75, 1)),
        ((50000, 3), (3,), (50000, 1)),
    ],
)
@pytest.mark.sampled(every=3)
def test_large_and_the_same_bits_for_any_number_of_threads(dtype: torch.dtype, shapes: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    check(*inputs, reduction=MEAN)
    assert_same_bits(*run(OP, *inputs), *run(OP, *inputs, threads=2))


def test_example_of_the_original() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    assert torch.equal(run(OP, x, x, torch.ones(2, 2))[0], torch.tensor([[0.0, 0.0], [1.0, 3.0]]))


def test_half_neither_overflows_nor_underflows_on_the_way() -> None:
    big = torch.full((4096, 16), 60000.0, dtype=torch.float16)
    (out,) = run(OP, torch.ones((), dtype=torch.float16), big, -big, reduction=MEAN)
    assert_same_bits(out, torch.full_like(out, 2 * 120000.0 / 65536))


def test_nan_and_infinity() -> None:
    grad = torch.tensor([1.0, 1.0, torch.nan, torch.inf, 0.0])
    self = torch.tensor([torch.nan, torch.inf, 1.0, 1.0, 2.0])
    check(grad, self, torch.tensor(1.0), reduction=NONE)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bit_conversions(dtype: torch.dtype) -> None:
    """All 65,536 values in; products out, exact in float32, that need every kind of rounding, subnormals too."""
    torch.manual_seed(0)
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for grad in (torch.tensor(0.5).to(dtype).expand(65536), values.roll(12345), torch.randn(65536).to(dtype)):
        (out,) = run(OP, grad, values, torch.zeros(65536, dtype=dtype), reduction=NONE)
        expected = (2 * values.float() * grad.float()).to(dtype)
        nan = expected.isnan()
        assert torch.equal(out.isnan(), nan)
        assert torch.equal(out[~nan], expected[~nan])


@pytest.mark.parametrize(
    "shapes, reduction, message",
    [
        (((2, 3), (4,), ()), MEAN,
         "grad_output is float32(2,3), self float32(4) and target float32(); expected shapes that broadcast together"),
        (((3,), (3, 0), ()), MEAN,
         "grad_output is float32(3), self float32(3,0) and target float32(); expected shapes that broadcast together"),
        (((1,) * 9, (1,), (1,)), MEAN, "grad_output is of rank 9; expected rank 8 or less"),
        (((), (2,), (2,)), 3, "reduction is 3; expected 0 (none), 1 (mean) or 2 (sum)"),
        (((), (2,), (2,)), -1, "reduction is -1; expected 0 (none), 1 (mean) or 2 (sum)"),
        (((2048, 1, 1) * 2, (1, 2048, 1) * 2, (1, 1, 2048) * 2), MEAN,
         "grad_input is float32(2048,2048,2048,2048,2048,2048); expected fewer than 2^63 bytes"),
    ],
)  # fmt: skip
def test_bad_arguments(shapes: tuple[tuple[int, ...], ...], reduction: int, message: str) -> None:
    assert_refused(OP, message, [torch.zeros(shape) for shape in shapes], {"reduction": reduction})
