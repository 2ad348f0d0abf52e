"""The kernel of BatchNorm: sizes at which its loops change, numbers far from 0, threads, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators import SAMPLES
from operators.base import Sample
from operators.batch_norm import arguments
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "BatchNorm"


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@given(
    shape=st.one_of(
        st.tuples(st.integers(2, 5), st.integers(1, 20), st.integers(1, 70)),
        st.tuples(st.integers(2, 140), st.integers(1, 40)),
        st.tuples(*[st.integers(2, 4)] * 6),
    ),
    present=st.tuples(*[st.booleans()] * 4),
    relu=st.integers(0, 1),
    centre=st.sampled_from((0.0, 100.0)),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_pytorch(shape: tuple[int, ...], present: tuple[bool, ...], relu: int, centre: float) -> None:
    check(arguments(shape, torch.float32, given=present, relu=relu, centre=centre), torch.float32)


LARGE = [(32, 16, 32, 32), (7, 3, 65, 67), (2, 1, 130, 140), (1, 5, 9001), (1000, 300), (64, 600), (40, 33, 3, 3)]


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize(
    "shape, relu, dtype", each_once(LARGE, (0, 1), (torch.float32, torch.bfloat16, torch.float16)), ids=str
)
def test_large_and_the_same_bits_for_any_number_of_threads(
    shape: tuple[int, ...], relu: int, dtype: torch.dtype
) -> None:
    sample = arguments(shape, dtype, relu=relu)
    one, two = (check(sample, dtype, threads) for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU], indirect=True)
def test_written_around_the_caches() -> None:
    """The whole is larger than what is written into them, and rows are no multiple of a vector."""
    check(arguments((33, 17, 115, 117), torch.float32, relu=1), torch.float32)


@pytest.mark.parametrize("shape", [(4, 3, 50), (300, 5)], ids=str)
def test_a_variance_that_is_small_beside_the_mean(shape: tuple[int, ...]) -> None:
    """Differences of squares would lose all of it."""
    check(arguments(shape, torch.float32, centre=1e4), torch.float32)


@pytest.mark.parametrize("shape", [(2, 3, 70), (40, 20)], ids=str)
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
@pytest.mark.parametrize("relu", (0, 1))
def test_a_channel_that_is_not_finite_spoils_no_other(shape: tuple[int, ...], bad: float, relu: int) -> None:
    sample = arguments(shape, torch.float32, relu=relu)
    x, *others = sample.inputs
    assert x is not None
    spoiled = x.clone()
    spoiled[1, 1] = bad
    outputs = run(OP, spoiled, *others, **sample.attributes)
    for output, clean in zip(outputs, run(OP, *sample.inputs, **sample.attributes), strict=True):
        axis = min(1, output.dim() - 1)
        kept = torch.tensor([channel for channel in range(shape[1]) if channel != 1])
        assert_same_bits(*(one.index_select(axis, kept).contiguous() for one in (output, clean)))
    assert outputs[0][:, 1].isnan().all()


X = torch.zeros(2, 4, 5)
C = torch.zeros(4)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((C,), {}, "input is float32(4); expected 2 to 8 dimensions (N,C,...)"),
        ((X, C[:1]), {}, "weight is float32(1); expected float32(4) as the channels of input"),
        ((X, None, X), {}, "bias is float32(2,4,5); expected float32(4) as the channels of input"),
        ((X, C, C, C[:3]), {}, "running_mean is float32(3); expected float32(4) as the channels of input"),
        ((X, C, C, None, C[:3]), {}, "running_var is float32(3); expected float32(4) as the channels of input"),
        ((X,), {"momentum": -0.5}, "momentum is -0.5; expected 0 to 1"),
        ((X,), {"eps": -0.5}, "eps is -0.5; expected 0 or more"),
        ((X,), {"relu": 2}, "relu is 2; expected 0 or 1"),
    ],
)
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
