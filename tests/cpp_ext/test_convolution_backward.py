"""The kernel of ConvolutionBackward: sizes at which its loops change, padding, what is not finite, unwanted results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, CUDA_SIMT, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators import SAMPLES
from operators.convolution_backward import arguments, convolution_backward
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "ConvolutionBackward"


def check(*described: Any, dtype: torch.dtype = torch.float32, threads: int = 1, **attributes: Any) -> list[Tensor]:
    sample = arguments(described, attributes, dtype)
    outputs = run(OP, *sample.inputs, threads=threads, **attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@given(
    batch=st.integers(1, 4),
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    transposed=st.integers(0, 1),
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
    dtype: torch.dtype,
) -> None:
    for axis in range(2):
        reach, pads = dilation[axis] * (kernel[axis] - 1) + 1, padding[axis] + padding[axis + 2]
        size = (sizes[axis] - 1) * stride[axis] - pads + reach if transposed else sizes[axis] + pads - reach + 1
        if size < 1:
            return
    scaled = (channels[0] * groups, channels[1] * groups)
    check(
        *(batch, scaled, sizes, kernel), dtype=dtype, stride=stride, padding=padding, dilation=dilation,
        transposed=transposed, groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize("device", [CPU], indirect=True)
@given(
    batch=st.integers(1, 5),
    groups=st.integers(1, 2),
    channels=st.tuples(st.integers(1, 20), st.sampled_from((64, 127, 128, 131))),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 5)] * 4),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=60, deadline=None)
def test_many_channels_and_small_planes(
    batch: int,
    groups: int,
    channels: tuple[int, int],
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, ...],
    dilation: tuple[int, int],
) -> None:
    for axis in range(2):
        if sizes[axis] + padding[axis] + padding[axis + 2] < dilation[axis] * (kernel[axis] - 1) + 1:
            return
    scaled = (channels[0] * groups, channels[1] * groups)
    check(batch, scaled, sizes, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)


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
    dtype: torch.dtype,
) -> None:
    """Items are packed side by side there."""
    for axis in range(3):
        reach, pads = dilation[axis] * (kernel[axis] - 1) + 1, padding[axis] + padding[axis + 3]
        size = (sizes[axis] - 1) * stride[axis] - pads + reach if transposed else sizes[axis] + pads - reach + 1
        if size < 1:
            return
    scaled = (channels[0] * groups, channels[1] * groups)
    check(
        *(batch, scaled, sizes, kernel), dtype=dtype, threads=2, stride=stride, padding=padding, dilation=dilation,
        transposed=transposed, groups=groups,
    )  # fmt: skip


LARGE: list[tuple[Any, ...]] = [
    (32, (16, 16), (32, 32), (3, 3), {"padding": (1,)}),
    (32, (32, 32), (16, 16), (3, 3), {"padding": (1,)}),
    (35, (64, 60), (9, 8), (3, 3), {"padding": (1,), "stride": (2,)}),
    (130, (64, 64), (12, 12), (5, 5), {"padding": (2,)}),
    (16, (32, 24), (3, 4, 5), (3, 3, 3), {"padding": (1,)}),
    (7, (40, 23), (17, 19), (3, 3), {"padding": (1,)}),
    (9, (24, 31), (16, 16), (1, 1), {}),
    (3, (33, 70), (20, 22), (1, 1), {"stride": (2,)}),
    (4, (48, 48), (25, 24), (3, 3), {"padding": (1,), "groups": 48}),
    (4, (20, 20), (25, 26), (5, 3), {"padding": (2, 1), "stride": (2,), "groups": 20}),
    (3, (3, 64), (65, 64), (7, 7), {"padding": (3,), "stride": (2,)}),
    (4, (16, 40), (300,), (9,), {"padding": (4,)}),
    (2, (6, 8), (9, 10, 11), (3, 3, 3), {"padding": (1,)}),
    (3, (20, 9), (13, 14), (4, 4), {"padding": (1,), "stride": (2,), "transposed": 1}),
    (8, (40, 130), (7, 7), (3, 3), {"padding": (1,)}),
    (40, (9, 64), (8, 7), (3, 3), {"padding": (1,)}),
    (4, (30, 260), (15, 14), (3, 3), {"padding": (1,), "stride": (2,), "groups": 2}),
    (2, (5, 128), (3, 4, 5), (3, 3, 3), {"padding": (1,), "dilation": (1, 2, 1)}),
    (3, (130, 9), (5, 6), (4, 4), {"padding": (1,), "stride": (2,), "transposed": 1}),
]


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("described, dtype", each_once(LARGE, (torch.float32, torch.bfloat16, torch.float64)), ids=str)
def test_large_and_the_same_bits_for_any_number_of_threads(described: tuple[Any, ...], dtype: torch.dtype) -> None:
    *sizes, attributes = described
    sample = arguments(sizes, attributes, dtype)
    one, two = (run(OP, *sample.inputs, threads=threads, **attributes) for threads in (1, 2))
    SAMPLES[OP].assert_close(one, sample, dtype)
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


@pytest.mark.parametrize("device", [CUDA_SIMT], indirect=True)
@pytest.mark.parametrize(
    "described", [(35, (16, 12), (9, 8), (3, 3), {"padding": (1,), "stride": (2,)}), LARGE[7]], ids=str
)
def test_large_on_cuda(described: tuple[Any, ...]) -> None:
    """Of more places, and more elements, than a block has threads.

    The kernels are direct loops, which take the machine of the tests long: two sizes stand for all.
    """
    *sizes, attributes = described
    check(*sizes, **attributes)


PADDED = [
    (2, (5, 7), (9, 9), (3, 3), {"padding": (1,)}),
    (2, (5, 7), (9, 9), (1, 1), {"padding": (1,)}),
    (2, (5, 7), (12, 11), (3, 3), {"padding": (1,), "stride": (2,)}),
    (2, (6, 6), (9, 9), (3, 3), {"padding": (1,), "groups": 6}),
    (2, (6, 6), (12, 11), (3, 3), {"padding": (1,), "stride": (2,), "groups": 6}),
    (2, (5, 7), (6, 7), (3, 3), {"padding": (1,), "transposed": 1}),
    (2, (5, 130), (9, 9), (3, 3), {"padding": (1,)}),
    (16, (16, 20), (6, 7), (3, 3), {"padding": (1,)}),
    (2, (5, 130), (12, 11), (3, 3), {"padding": (1,), "stride": (2,)}),
]


@pytest.mark.parametrize(
    "described, index, place", each_once(PADDED, (0, 1), [(0, 0), (0, -1), (-1, 0), (-1, -1), (4, 5)]), ids=str
)
@pytest.mark.parametrize("narrow", (0, 1))
def test_nothing_is_multiplied_with_padding(
    described: tuple[Any, ...], index: int, place: tuple[int, int], narrow: int
) -> None:
    """An infinity times the zeros of padding would be NaN, and in a pair of numbers with another too."""
    *sizes, attributes = described
    attributes = {**attributes, "factors_in_bfloat16": narrow}
    sample = arguments(sizes, attributes, torch.float32, activations=torch.bfloat16 if narrow else None)
    tensors = [tensor.clone() for tensor in sample.inputs if tensor is not None]
    tensors[index][0, 1, place[0], place[1]] = torch.inf
    outputs = run(OP, *tensors, **attributes)
    # What the element takes part in. PyTorch multiplies with the zeros of padding in some cases, and not in others.
    ones = [torch.ones_like(tensor) for tensor in tensors]
    ones[index] = torch.zeros_like(tensors[index])
    ones[index][0, 1, place[0], place[1]] = 1.0
    reached = [gradient != 0 for gradient in convolution_backward(*ones, **attributes)]
    if index == 1:
        reached = [torch.zeros_like(reached[0]), reached[1], torch.zeros_like(reached[2])]
    for output, expected in zip(outputs, reached, strict=True):
        assert torch.equal(output.isinf(), expected)
        assert torch.equal(output.isfinite(), ~expected)


@pytest.mark.parametrize("spatial", (1, 2, 3))
def test_a_window_far_larger_than_the_image(spatial: int) -> None:
    """Every other element of the window lies in the padding, which is not stored."""
    far = 2**31 - 1
    image, grad = torch.full((1, 1, *[1] * spatial), 3.0), torch.full((1, 1, *[1] * spatial), 5.0)
    weight = torch.arange(2.0, 2.0 + 2**spatial).reshape(1, 1, *[2] * spatial)
    ends = (0,) * spatial + (far,) * spatial
    of_input, of_weight, of_bias = run(OP, grad, image, weight, dilation=(far,), padding=ends)
    assert of_input.flatten().tolist() == [10.0]
    assert of_weight.flatten().tolist() == [15.0, *[0.0] * (2**spatial - 1)]
    assert of_bias.tolist() == [5.0]


@pytest.mark.parametrize("mask", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_only_what_is_wanted_is_computed(mask: tuple[int, ...]) -> None:
    outputs = check(2, (3, 4), (5, 6), (3, 3), output_mask=mask)
    assert [output.numel() > 0 for output in outputs] == list(map(bool, mask))


X = torch.zeros(2, 4, 5, 5)
W = torch.zeros(6, 4, 3, 3)
G = torch.zeros(2, 6, 3, 3)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((G, X[0, 0], W), {}, "input is float32(5,5); expected 3 to 5 dimensions (N,C,...)"),
        ((G[0], X, W), {}, "grad_output is float32(6,3,3); expected 4 dimensions as input"),
        ((G, X, W[0]), {}, "weight is float32(4,3,3); expected 4 dimensions as input"),
        ((G[:, :, :2], X, W), {},
         "grad_output is float32(2,6,2,3); expected float32(2,6,3,3) as input and weight give"),
        ((G, X, W[:, :3]), {}, "weight is float32(6,3,3,3); expected float32(6,4,3,3) as 1 group of channels"),
        ((G, X, W[:, :, :0]), {},
         "weight is float32(6,4,0,3); expected a kernel of 1 to 2147483647 elements along each dimension"),
        ((G, X, W), {"groups": 4}, "groups is 4; expected a divisor of 4 and 6 channels"),
        ((G, X, W), {"stride": (1, 0)}, "stride is [1, 0]; expected 1 or 2 numbers from 1 to 2147483647"),
        ((G, X, W), {"padding": (0, 0, 0)}, "padding is [0, 0, 0]; expected 1 or 2 or 4 numbers from 0 to 2147483647"),
        ((G, X, W), {"output_padding": (1,)}, "output_padding is [1]; expected 0 without transposed"),
        ((G, X, W), {"transposed": 1, "output_padding": (1,)},
         "output_padding is [1]; expected numbers below stride or dilation"),
        ((G, X, W), {"transposed": 2}, "transposed is 2; expected 0 or 1"),
        ((G, X, W), {"output_mask": (1, 0)}, "output_mask is [1, 0]; expected 3 numbers, 0 or 1"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
