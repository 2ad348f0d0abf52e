"""The kernel of MaxPoolBackward: sizes at which its loops change, padding, ties, what is not finite, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import assert_refused, assert_same_bits, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operators import SAMPLES, Sample
from operators.max_pool_backward import arguments, places

pytestmark = pytest.mark.usefixtures("device")

OP = "MaxPoolBackward"
DTYPES = SAMPLES[OP].dtypes


def check(sample: Sample, dtype: torch.dtype) -> None:
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


@given(
    sizes=st.lists(st.integers(1, 45), min_size=1, max_size=2),
    depth=st.lists(st.integers(1, 4), max_size=1),
    kernel=st.tuples(*[st.integers(1, 5)] * 3),
    stride=st.tuples(*[st.integers(1, 4)] * 3),
    padding=st.tuples(*[st.integers(0, 3)] * 6),
    dilation=st.tuples(*[st.integers(1, 3)] * 3),
    ceil_mode=st.integers(0, 1),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=120, deadline=None)
def test_agrees_with_pytorch(
    sizes: list[int],
    depth: list[int],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    sizes = [*depth, *sizes]
    spatial = len(sizes)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)][:spatial]
    attributes = {
        "kernel_size": kernel[:spatial],
        "stride": stride[:spatial],
        "padding": tuple(min(pad, most) for pad, most in zip(padding, [*reach, *reach], strict=False)),
        "dilation": dilation[:spatial],
        "ceil_mode": ceil_mode,
    }
    assume(min(places(sizes, attributes)) >= 1)
    check(arguments(2, 3, sizes, attributes, dtype, seed), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attributes", [{"kernel_size": (2,), "stride": (2,)}, {"kernel_size": (3,), "padding": (1,)}])
@pytest.mark.sampled(every=3)
def test_many_planes_in_threads(dtype: torch.dtype, attributes: dict[str, tuple[int, ...]]) -> None:
    check(arguments(30, 7, (33, 34), attributes, dtype), dtype)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("width", [9, 71])
def test_not_finite_numbers_are_where_pytorch_has_them(stride: int, padding: int, width: int) -> None:
    """Windows of nothing but minus infinity too."""
    generator = torch.Generator().manual_seed(stride)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    image = special[torch.randint(0, len(special), (4, 3, 9, width), generator=generator)]
    image[0] = -torch.inf
    image[1, :, 3:] = torch.nan
    image.requires_grad_()
    out = torch.nn.functional.max_pool2d(image, 3, stride, padding)
    # Whole numbers, so that the order of sums makes no difference.
    grad = torch.randint(-9, 10, out.shape, generator=generator).float()
    out.backward(grad)  # type: ignore[no-untyped-call]
    assert image.grad is not None
    attributes: dict[str, Any] = {"kernel_size": (3,), "stride": (stride,), "padding": (padding,)}
    (actual,) = run(OP, grad, image.detach(), **attributes)
    assert torch.equal(actual, image.grad)


@pytest.mark.parametrize("width", [2, 40])
def test_windows_in_the_padding_have_no_gradient(width: int) -> None:
    attributes: dict[str, Any] = {"kernel_size": (2, 1), "padding": (2, 0), "dilation": (3, 1)}
    image = torch.randn(1, 1, 2, width)
    grad = torch.arange(1.0, 1 + 3 * width).reshape(1, 1, 3, width)
    (actual,) = run(OP, grad, image, **attributes)
    # Elements -2 and 1, -1 and 2, 0 and 3.
    assert torch.equal(actual, torch.stack([grad[:, :, 2], grad[:, :, 0]], 2))


def test_16_bit_sums_are_rounded_once() -> None:
    """All windows have one maximum. In bfloat16, 256 + 1 is 256."""
    image = torch.zeros(1, 1, 9)
    image[..., 4] = 1
    grad = torch.tensor([[[256.0, 1, 1, 1, 1]]])
    (actual,) = run(OP, grad.bfloat16(), image.bfloat16(), kernel_size=(5,))
    assert actual[0, 0, 4].item() == 260


def test_messages() -> None:
    grad, image = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4)
    halves = {"kernel_size": (2,), "stride": (2,)}
    wanted = "float32(1,1,2,2), an element for each window of input"
    assert_refused(OP, f"grad_output is float32(1,1,3,2); expected {wanted}", [torch.ones(1, 1, 3, 2), image], halves)
    message = "padding is [0, 2]; expected less than a window reaches"
    assert_refused(OP, message, [grad, image], {**halves, "padding": (0, 2)})
    message = "kernel_size is [2, 0]; expected 1 or 2 numbers from 1 to 2147483647"
    assert_refused(OP, message, [grad, image], {**halves, "kernel_size": (2, 0)})
    message = "input is float32(1,1,4,1); expected spatial dimensions that a window fits into"
    assert_refused(OP, message, [grad, torch.ones(1, 1, 4, 1)], halves)
    assert_refused(OP, "ceil_mode is 2; expected 0 or 1", [grad, image], {**halves, "ceil_mode": 2})
