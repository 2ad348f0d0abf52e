"""The kernel of LstmRecurrenceBackward: sizes at which its loops change, how work is divided, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES
from operators.base import Sample
from operators.lstm_recurrence_backward import arguments
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "LstmRecurrenceBackward"


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 60)),
    grad_cell=st.booleans(),
    reverse=st.integers(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_agrees_with_pytorch(sizes: tuple[int, int, int], grad_cell: bool, reverse: int) -> None:
    check(arguments(*sizes, torch.float32, grad_cell=grad_cell, reverse=reverse), torch.float32)


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("sizes", [(9, 37, 64), (3, 5, 270), (2, 20, 260)], ids=str)
def test_the_same_bits_for_any_number_of_threads(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """By rows of the batch; a small batch of many units, which is divided by units; and rows with many weights."""
    sample = arguments(*sizes, dtype)
    one, two = (check(sample, dtype, threads) for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_an_item_that_is_not_finite_spoils_no_other(bad: float) -> None:
    sample = arguments(3, 9, 20, torch.float32)
    grad, *others = sample.inputs
    assert grad is not None
    spoiled = grad.clone()
    spoiled[1, 4, 3] = bad
    clean, outputs = run(OP, grad, *others), run(OP, spoiled, *others)
    for one, other in zip(clean, outputs, strict=True):
        kept = [item for item in range(9) if item != 4]
        axis = one.dim() - 2
        assert_same_bits(*(each.index_select(axis, torch.tensor(kept)).contiguous() for each in (one, other)))
    assert not outputs[1][4].isfinite().any()


STATES, STATE, GATES, WEIGHT = torch.zeros(2, 3, 5), torch.zeros(3, 5), torch.zeros(2, 3, 20), torch.zeros(20, 5)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        (
            (STATE, None, STATE, STATES, GATES, WEIGHT),
            {},
            "grad_hidden is float32(3,5); expected 3 dimensions (T,N,H)",
        ),
        (
            (STATES, STATES[:1], STATE, STATES, GATES, WEIGHT),
            {},
            "grad_cell is float32(1,3,5); expected float32(2,3,5) to fit grad_hidden",
        ),
        (
            (STATES, None, STATES, STATES, GATES, WEIGHT),
            {},
            "initial_c is float32(2,3,5); expected float32(3,5) to fit grad_hidden",
        ),
        (
            (STATES, None, STATE, GATES, GATES, WEIGHT),
            {},
            "cell is float32(2,3,20); expected float32(2,3,5) to fit grad_hidden",
        ),
        (
            (STATES, None, STATE, STATES, STATES, WEIGHT),
            {},
            "gates is float32(2,3,5); expected float32(2,3,20) to fit grad_hidden",
        ),
        (
            (STATES, None, STATE, STATES, GATES, WEIGHT[:5]),
            {},
            "weight is float32(5,5); expected float32(20,5) to fit grad_hidden",
        ),
        ((STATES, None, STATE, STATES, GATES, WEIGHT), {"reverse": 2}, "reverse is 2; expected 0 or 1"),
    ],
)
def test_bad_arguments(inputs: tuple[Tensor | None, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
