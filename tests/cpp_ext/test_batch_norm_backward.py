"""The kernel of BatchNormBackward: sizes at which its loops change, threads, what is not finite, unwanted results."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators import SAMPLES
from operators.base import Sample
from operators.batch_norm_backward import arguments
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "BatchNormBackward"


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 70)),
        st.tuples(st.integers(1, 140), st.integers(1, 40)),
        st.tuples(*[st.integers(1, 4)] * 6),
    ),
    relu=st.booleans(),
    weighted=st.booleans(),
    mask=st.tuples(*[st.integers(0, 1)] * 3),
    centre=st.sampled_from((0.0, 100.0)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_pytorch(
    shape: tuple[int, ...], relu: bool, weighted: bool, mask: tuple[int, ...], centre: float, dtype: torch.dtype
) -> None:
    sample = arguments(shape, dtype, relu=relu, weighted=weighted, centre=centre, output_mask=mask)
    check(sample, dtype)


LARGE = [(32, 16, 32, 32), (7, 3, 65, 67), (2, 1, 130, 140), (1, 5, 9001), (1000, 300), (64, 600), (40, 33, 3, 3)]


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize(
    "shape, relu, dtype",
    each_once(LARGE, (False, True), (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    ids=str,
)
def test_large_and_the_same_bits_for_any_number_of_threads(
    shape: tuple[int, ...], relu: bool, dtype: torch.dtype
) -> None:
    sample = arguments(shape, dtype, relu=relu)
    one, two = (check(sample, dtype, threads) for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU], indirect=True)
def test_written_around_the_caches() -> None:
    """The whole is larger than what is written into them, and rows are no multiple of a vector."""
    check(arguments((33, 17, 115, 117), torch.float32, relu=True), torch.float32)


@pytest.mark.parametrize("shape", [(2, 3, 70), (40, 20)], ids=str)
def test_a_channel_that_is_not_finite_spoils_no_other(shape: tuple[int, ...]) -> None:
    for index, bad in product((0, 1, 3, 4), (torch.nan, torch.inf)):
        sample = arguments(shape, torch.float32)
        inputs = [None if tensor is None else tensor.clone() for tensor in sample.inputs]
        spoiled = inputs[index]
        assert spoiled is not None
        spoiled[(0, 1) if index < 2 else (1,)] = bad
        for output, clean in zip(run(OP, *inputs), run(OP, *sample.inputs), strict=True):
            kept = [channel for channel in range(shape[1]) if channel != 1]
            axis = min(1, output.dim() - 1)
            assert_same_bits(*(one.index_select(axis, torch.tensor(kept)).contiguous() for one in (output, clean)))
        of_input = run(OP, *inputs)[0]
        assert not of_input[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("shape", [(1, 2, 7), (7, 2)], ids=str)
def test_the_gradient_of_a_relu_is_that_of_pytorch_at_nan_and_at_zeros(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    sample = arguments(shape, dtype, relu=True)
    output = torch.tensor([0.0, -0.0, 1.0, torch.nan, -1.0, torch.inf, -torch.inf] * 2).reshape(shape).to(dtype)
    check(sample.with_inputs([*sample.inputs[:5], output]), dtype)


@pytest.mark.parametrize("mask", list(product((0, 1), repeat=3)))
def test_only_what_is_wanted_is_computed(mask: tuple[int, ...]) -> None:
    for shape in ((3, 4, 5), (3, 20, 5), (5, 4)):
        outputs = check(arguments(shape, torch.float32, output_mask=mask), torch.float32)
        assert [output.numel() > 0 for output in outputs] == list(map(bool, mask))


X = torch.zeros(2, 4, 5)
C = torch.zeros(4)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((C, C, C, C, C), {}, "input is float32(4); expected 2 to 8 dimensions (N,C,...)"),
        ((X[:, :, :4], X, C, C, C), {}, "grad_output is float32(2,4,4); expected float32(2,4,5) as input"),
        ((X, X, C, C, C, X[:1]), {}, "relu_output is float32(1,4,5); expected float32(2,4,5) as input"),
        ((X, X, C[:1], C, C), {}, "weight is float32(1); expected float32(4) as the channels of input"),
        ((X, X, None, C[:3], C), {}, "save_mean is float32(3); expected float32(4) as the channels of input"),
        ((X, X, None, C, X), {}, "save_invstd is float32(2,4,5); expected float32(4) as the channels of input"),
        ((X, X, C, C, C), {"output_mask": (1, 0)}, "output_mask is [1, 0]; expected 3 numbers, 0 or 1"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
