"""What LstmRecurrenceBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.lstm_recurrence_backward import arguments

from gradfuse.errors import ArgumentError

OP = "LstmRecurrenceBackward"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@given(sizes=st.tuples(*[st.integers(0, 4)] * 2, st.integers(1, 5)), grad_cell=st.booleans(), reverse=st.integers(0, 1))
@settings(max_examples=10, deadline=None)
def test_any_sizes(backend: str, sizes: tuple[int, int, int], grad_cell: bool, reverse: int) -> None:
    sample = arguments(*sizes, torch.float32, grad_cell=grad_cell, reverse=reverse)
    outputs = run(OP, backend, *sample.inputs, ranks=[3, 2, 2], **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, torch.float32)


def test_shapes() -> None:
    states, state, weight = (FLOAT, ("T", "N", 5)), (FLOAT, ("N", 5)), (FLOAT, (20, 5))
    gates = (FLOAT, ("T", "N", 20))
    assert inferred(OP, states, None, state, states, gates, weight) == [gates, state, state]
    unknown = (FLOAT, (None, None, None))
    found = inferred(OP, unknown, states, (FLOAT, (3, None)), unknown, unknown, (FLOAT, (None, None)))
    assert found == [(FLOAT, ("T", 3, 20)), (FLOAT, (3, 5)), (FLOAT, (3, 5))]


STATES, STATE, GATES, WEIGHT = (3, 4, 5), (4, 5), (3, 4, 20), (20, 5)


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((4, 5), None, STATE, STATES, GATES, WEIGHT), {}, r"grad_hidden is of shape \(4, 5\); expected shape \(T, N"),
        ((STATES, (2, 4, 5), STATE, STATES, GATES, WEIGHT), {}, "grad_cell is of T 2; expected T 3"),
        ((STATES, None, (4, 6), STATES, GATES, WEIGHT), {}, "initial_c is of H 6; expected H 5"),
        ((STATES, None, STATE, (3, 5, 5), GATES, WEIGHT), {}, "cell is of N 5; expected N 4"),
        ((STATES, None, STATE, STATES, (3, 4, 22), WEIGHT), {}, "gates is of 4 H 22; expected a multiple of 4"),
        ((STATES, None, STATE, STATES, GATES, (20, 4)), {}, "weight is of H 4; expected H 5"),
        ((STATES, None, STATE, STATES, GATES, WEIGHT), {"reverse": -1}, "reverse is -1; expected 0 or 1"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, ...] | None, ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *(None if shape is None else (FLOAT, shape) for shape in shapes), **attributes)
