"""The kernel of GruRecurrence: sizes at which its loops change, how work is divided, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES
from operators.base import Sample
from operators.gru_recurrence import arguments
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "GruRecurrence"


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 40)),
    bias=st.booleans(),
    reverse=st.integers(0, 1),
    scale=st.sampled_from((0.01, 1.0, 30.0)),
)
@settings(max_examples=40, deadline=None)
def test_agrees_with_pytorch(sizes: tuple[int, int, int], bias: bool, reverse: int, scale: float) -> None:
    check(arguments(*sizes, torch.float32, bias=bias, reverse=reverse, scale=scale), torch.float32)


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("sizes", [(9, 37, 64), (3, 5, 270), (2, 20, 260)], ids=str)
def test_the_same_bits_for_any_number_of_threads(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """By rows of the batch; a small batch of many units, which is divided by units; and rows with many weights."""
    sample = arguments(*sizes, dtype)
    one, two = (check(sample, dtype, threads) for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


def test_items_do_not_depend_on_the_others() -> None:
    sample = arguments(3, 23, 20, torch.float32)
    x, h, weight, bias = sample.inputs
    assert x is not None and h is not None
    whole = run(OP, x, h, weight, bias)
    part = run(OP, x[:, 5:8].contiguous(), h[5:8], weight, bias)
    for all_items, some in zip(whole, part, strict=True):
        assert_same_bits(all_items[:, 5:8].contiguous(), some)


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_an_item_that_is_not_finite_spoils_no_other(bad: float) -> None:
    sample = arguments(3, 9, 20, torch.float32)
    x, *others = sample.inputs
    assert x is not None
    spoiled = x.clone()
    spoiled[1, 4, 43] = bad
    clean, outputs = run(OP, x, *others), run(OP, spoiled, *others)
    for one, other in zip(clean, outputs, strict=True):
        kept = [item for item in range(9) if item != 4]
        assert_same_bits(one[:, kept].contiguous(), other[:, kept].contiguous())
        assert_same_bits(one[0], other[0])
    assert bool(outputs[0][1, 4, 3].isnan()) == (bad != torch.inf)


@pytest.mark.parametrize("scale", (1e3, 1e30))
def test_gates_that_are_shut_or_open(scale: float) -> None:
    sample = arguments(4, 3, 17, torch.float32, scale=scale)
    gates = check(sample, torch.float32)[1][..., :51]
    assert gates.min() >= -1 and gates.max() <= 1


X, STATE, WEIGHT = torch.zeros(2, 3, 15), torch.zeros(3, 5), torch.zeros(15, 5)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((STATE, STATE, WEIGHT), {}, "input is float32(3,5); expected 3 dimensions (T,N,3 H)"),
        ((X, STATE[:2], WEIGHT), {}, "initial_h is float32(2,5); expected float32(3,5) to fit input"),
        ((X, STATE, WEIGHT[:5]), {}, "weight is float32(5,5); expected float32(15,5) to fit input"),
        ((X, STATE, WEIGHT, WEIGHT), {}, "bias is float32(15,5); expected float32(15) to fit input"),
        ((X, STATE, WEIGHT), {"reverse": 2}, "reverse is 2; expected 0 or 1"),
    ],
)
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
