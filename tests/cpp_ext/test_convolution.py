"""The kernel of Convolution: sizes at which its loops change, padding, what is not finite, bias and ReLU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, CUDA_SIMT, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators import SAMPLES
from operators.convolution import arguments, convolution
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "Convolution"


def check(
    *described: Any, dtype: torch.dtype = torch.float32, threads: int = 1, biased: bool = True, **attributes: Any
) -> Tensor:
    sample = arguments(described, attributes, dtype, biased=biased)
    (output,) = run(OP, *sample.inputs, threads=threads, **attributes)
    SAMPLES[OP].assert_close([output], sample, dtype)
    return output


def fits(
    sizes: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], transposed: int,
) -> bool:  # fmt: skip
    for axis in range(len(sizes)):
        reach, pads = dilation[axis] * (kernel[axis] - 1) + 1, padding[axis] + padding[axis + len(sizes)]
        size = (sizes[axis] - 1) * stride[axis] - pads + reach if transposed else sizes[axis] + pads - reach + 1
        if size < 1:
            return False
    return True


@given(
    batch=st.integers(1, 4),
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 6), st.integers(1, 10)),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    transposed=st.integers(0, 1),
    biased=st.booleans(),
    relu=st.integers(0, 1),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=80, deadline=None)
def test_agrees_with_pytorch(
    batch: int,
    groups: int,
    channels: tuple[int, int],
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, ...],
    dilation: tuple[int, int],
    transposed: int,
    biased: bool,
    relu: int,
    dtype: torch.dtype,
) -> None:
    if not fits(sizes, kernel, stride, padding, dilation, transposed):
        return
    scaled = (channels[0] * groups, channels[1] * groups)
    check(
        *(batch, scaled, sizes, kernel), dtype=dtype, biased=biased, stride=stride, padding=padding, dilation=dilation,
        transposed=transposed, groups=groups, relu=relu,
    )  # fmt: skip


@pytest.mark.parametrize("device", [CPU], indirect=True)
@given(
    batch=st.integers(1, 9),
    groups=st.integers(1, 2),
    channels=st.tuples(st.integers(1, 20), st.sampled_from((120, 127, 128, 131, 200))),
    sizes=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 5)] * 4),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    relu=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_many_channels(
    batch: int,
    groups: int,
    channels: tuple[int, int],
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, ...],
    dilation: tuple[int, int],
    relu: int,
) -> None:
    """Windows are copied side by side there, panel by panel."""
    if not fits(sizes, kernel, stride, padding, dilation, 0):
        return
    scaled = (channels[0] * groups, channels[1] * groups)
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    check(batch, scaled, sizes, kernel, threads=2, groups=groups, relu=relu, **options)


@pytest.mark.parametrize("device", [CPU], indirect=True)
@given(
    batch=st.integers(4, 40),
    groups=st.integers(1, 2),
    channels=st.tuples(st.integers(8, 40), st.integers(8, 40)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)),
    kernel=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(*[st.integers(1, 3)] * 3),
    padding=st.tuples(*[st.integers(0, 3)] * 6),
    dilation=st.tuples(*[st.integers(1, 2)] * 3),
    transposed=st.integers(0, 1),
    relu=st.integers(0, 1),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=60, deadline=None)
def test_many_items_of_small_planes(
    batch: int,
    groups: int,
    channels: tuple[int, int],
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: int,
    relu: int,
    dtype: torch.dtype,
) -> None:
    """Items are packed side by side there."""
    if not fits(sizes, kernel, stride, padding, dilation, transposed):
        return
    scaled = (channels[0] * groups, channels[1] * groups)
    check(
        *(batch, scaled, sizes, kernel), dtype=dtype, threads=2, stride=stride, padding=padding, dilation=dilation,
        transposed=transposed, groups=groups, relu=relu,
    )  # fmt: skip


LARGE: list[tuple[Any, ...]] = [
    (32, (16, 16), (32, 32), (3, 3), {"padding": (1,)}),
    (32, (32, 32), (16, 16), (3, 3), {"padding": (1,), "relu": 1}),
    (35, (64, 60), (9, 8), (3, 3), {"padding": (1,), "stride": (2,)}),
    (130, (64, 64), (12, 12), (5, 5), {"padding": (2,)}),
    (16, (32, 24), (3, 4, 5), (3, 3, 3), {"padding": (1,)}),
    (9, (24, 31), (16, 16), (1, 1), {}),
    (4, (48, 48), (25, 24), (3, 3), {"padding": (1,), "groups": 48, "relu": 1}),
    (3, (3, 64), (65, 64), (7, 7), {"padding": (3,), "stride": (2,)}),
    (4, (16, 40), (300,), (9,), {"padding": (4,)}),
    (2, (6, 8), (9, 10, 11), (3, 3, 3), {"padding": (1,)}),
    (8, (40, 130), (7, 7), (3, 3), {"padding": (1,)}),
    (8, (130, 257), (7, 7), (3, 3), {"padding": (1,), "stride": (2,)}),
    (2, (512, 128), (4, 4), (3, 3), {"padding": (1,)}),
    (11, (130, 128), (14, 14), (3, 3), {"padding": (1,), "relu": 1}),
    (2, (5, 128), (3, 4, 5), (3, 3, 3), {"padding": (1,), "dilation": (1, 2, 1)}),
    (3, (20, 9), (13, 14), (4, 4), {"padding": (1,), "stride": (2,), "transposed": 1}),
    (3, (130, 9), (5, 6), (4, 4), {"padding": (1,), "stride": (2,), "transposed": 1, "relu": 1}),
]


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("described, dtype", each_once(LARGE, (torch.float32, torch.bfloat16, torch.float64)), ids=str)
def test_large_and_the_same_bits_for_any_number_of_threads(described: tuple[Any, ...], dtype: torch.dtype) -> None:
    *sizes, attributes = described
    sample = arguments(sizes, attributes, dtype)
    one, two = (run(OP, *sample.inputs, threads=threads, **attributes) for threads in (1, 2))
    SAMPLES[OP].assert_close(one, sample, dtype)
    assert_same_bits(one[0], two[0])


@pytest.mark.parametrize("device", [CUDA_SIMT], indirect=True)
def test_large_on_cuda() -> None:
    """Its kernels are direct loops, which take the machine of the tests long: one size stands for all."""
    *sizes, attributes = LARGE[1]
    check(*sizes, **attributes)


@pytest.mark.parametrize("narrow", (0, 1))
@pytest.mark.parametrize("bad", (torch.inf, torch.nan))
@pytest.mark.parametrize("place", [(0, 0), (0, -1), (-1, 0), (-1, -1), (1, 1)])
@pytest.mark.parametrize("index", (0, 1, 2))
@pytest.mark.parametrize(
    "described",
    [
        (2, (5, 7), (9, 9), (3, 3), {"padding": (1,)}),
        (2, (5, 129), (7, 7), (3, 3), {"padding": (1,)}),
        (16, (16, 20), (6, 7), (3, 3), {"padding": (1,)}),
        (2, (5, 7), (12, 11), (3, 3), {"padding": (1,), "stride": (2,)}),
        (2, (6, 6), (9, 9), (3, 3), {"padding": (1,), "groups": 6}),
        (2, (5, 7), (6, 7), (3, 3), {"padding": (1,), "transposed": 1}),
    ],
    ids=str,
)
def test_what_is_not_finite_reaches_what_it_takes_part_in(
    described: tuple[Any, ...], index: int, place: tuple[int, int], bad: float, narrow: int
) -> None:
    *sizes, attributes = described
    attributes = {**attributes, "factors_in_bfloat16": narrow}
    sample = arguments(sizes, attributes, torch.float32, activations=torch.bfloat16 if narrow else None)
    tensors = [tensor.clone() for tensor in sample.inputs if tensor is not None]
    first = 0 if index == 2 else (0, 1, *place) if not attributes.get("groups") or index == 0 else (1, 0, *place)
    tensors[index][first] = bad
    (output,) = run(OP, *tensors, **attributes)
    # PyTorch multiplies with the zeros of padding in some cases, and not in others.
    ones = [torch.ones_like(tensor) for tensor in tensors]
    ones[2 if index < 2 else 0] *= 0
    ones[index] = torch.zeros_like(tensors[index])
    ones[index][first] = 1.0
    reached = convolution(*ones, **attributes) != 0
    assert torch.equal(output.isnan() if math.isnan(bad) else output.isinf(), reached)
    assert torch.equal(output.isfinite(), ~reached)


@pytest.mark.parametrize("spatial", (1, 2, 3))
def test_a_window_far_larger_than_the_image(spatial: int) -> None:
    """Every other element of the window lies in the padding, which is not stored."""
    far = 2**31 - 1
    image, weight = torch.full((1, 1, *[1] * spatial), 3.0), torch.arange(2.0, 2.0 + 2**spatial)
    ends = (0,) * spatial + (far,) * spatial
    (output,) = run(OP, image, weight.reshape(1, 1, *[2] * spatial), dilation=(far,), padding=ends)
    assert output.shape == image.shape
    assert output.item() == 6.0


@pytest.mark.parametrize("transposed", (0, 1))
def test_relu_keeps_nan(transposed: int) -> None:
    sample = arguments((1, (2, 2), (5, 5), (3, 3)), {}, torch.float32)
    x, weight, bias = sample.inputs
    assert x is not None and bias is not None
    (clean,) = run(OP, x, weight, bias, transposed=transposed, relu=1)
    assert (clean >= 0).all() and (clean == 0).any() and (clean > 0).any()
    bias = bias.clone()
    bias[1] = torch.nan
    (output,) = run(OP, x, weight, bias, transposed=transposed, relu=1)
    assert output[:, 1].isnan().all()
    assert torch.equal(output[:, 0], clean[:, 0])


X = torch.zeros(2, 4, 5, 5)
W = torch.zeros(6, 4, 3, 3)
B = torch.zeros(6)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((X[0, 0], W, B), {}, "input is float32(5,5); expected 3 to 5 dimensions (N,C,...)"),
        ((X, W[0], B), {}, "weight is float32(4,3,3); expected 4 dimensions as input"),
        ((X, W[:, :3], B), {}, "weight is float32(6,3,3,3); expected float32(6,4,3,3) as 1 group of channels"),
        ((X, W, B[:5]), {}, "bias is float32(5); expected float32(6) as the channels of weight"),
        ((X[..., :2], W, B), {}, "input is float32(2,4,5,2); expected room for the kernel along dimension 3"),
        ((X, W, B), {"groups": 4}, "groups is 4; expected a divisor of 4 and 6 channels"),
        ((X, W, B), {"stride": (1, 0)}, "stride is [1, 0]; expected 1 or 2 numbers from 1 to 2147483647"),
        ((X, W, B), {"output_padding": (1,)}, "output_padding is [1]; expected 0 without transposed"),
        ((X, W, B), {"transposed": 2}, "transposed is 2; expected 0 or 1"),
        ((X, W, B), {"relu": 2}, "relu is 2; expected 0 or 1"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
