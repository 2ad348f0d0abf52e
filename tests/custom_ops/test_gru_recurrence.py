"""What GruRecurrence computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.gru_recurrence import arguments

from gradfuse.errors import ArgumentError

OP = "GruRecurrence"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@given(sizes=st.tuples(*[st.integers(0, 4)] * 2, st.integers(1, 5)), bias=st.booleans(), reverse=st.integers(0, 1))
@settings(max_examples=10, deadline=None)
def test_any_sizes(backend: str, sizes: tuple[int, int, int], bias: bool, reverse: int) -> None:
    sample = arguments(*sizes, torch.float32, bias=bias, reverse=reverse)
    outputs = run(OP, backend, *sample.inputs, ranks=[3, 3], **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, torch.float32)


def test_shapes() -> None:
    x, state, weight = (FLOAT, ("T", "N", 15)), (FLOAT, ("N", 5)), (FLOAT, (15, 5))
    assert inferred(OP, x, state, weight) == [(FLOAT, ("T", "N", 5)), (FLOAT, ("T", "N", 20))]
    unknown = (FLOAT, (None, None, None))
    found = inferred(OP, unknown, (FLOAT, (3, None)), (FLOAT, (None, None)), (FLOAT, (15,)))
    assert found == [(FLOAT, (None, 3, 5)), (FLOAT, (None, 3, 20))]


X, STATE, WEIGHT = (3, 4, 15), (4, 5), (15, 5)


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((4, 15), STATE, WEIGHT), {}, r"input is of shape \(4, 15\); expected shape \(T, N, 3 H\)"),
        (((3, 4, 16), STATE, WEIGHT), {}, "input is of 3 H 16; expected a multiple of 3"),
        ((X, (5, 5), WEIGHT), {}, "initial_h is of N 5; expected N 4"),
        ((X, STATE, (18, 5)), {}, "weight is of H 6; expected H 5"),
        ((X, STATE, WEIGHT, (12,)), {}, "bias is of H 4; expected H 5"),
        ((X, STATE, WEIGHT), {"reverse": 2}, "reverse is 2; expected 0 or 1"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)
