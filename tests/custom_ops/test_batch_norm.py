"""What BatchNorm computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.batch_norm import arguments

from gradfuse.errors import ArgumentError

OP = "BatchNorm"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.lists(st.integers(2, 5), min_size=2, max_size=6),
    present=st.tuples(*[st.booleans()] * 4),
    relu=st.integers(0, 1),
    momentum=st.sampled_from((0.0, 0.1, 0.25, 1.0)),
)
@settings(max_examples=10, deadline=None)
def test_any_shape_and_any_inputs(
    backend: str, shape: list[int], present: tuple[bool, ...], relu: int, momentum: float
) -> None:
    sample = arguments(shape, torch.float32, given=present, relu=relu, momentum=momentum)
    ranks = [len(shape), 1, 1, 1, 1]
    outputs = run(OP, backend, *sample.inputs, ranks=ranks, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, torch.float32)


def test_shapes() -> None:
    whole, channels, none = (FLOAT, ("N", 4, "H")), (FLOAT, (4,)), (FLOAT, (0,))
    assert inferred(OP, whole) == [whole, channels, channels, none, none]
    assert inferred(OP, whole, channels, channels, channels, channels) == [whole, *[channels] * 4]
    unknown = (FLOAT, ("N", None, "H"))
    assert inferred(OP, unknown, None, None, None, channels) == [whole, channels, channels, none, channels]


WHOLE, C = (3, 4, 5), (4,)


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((4,),), {}, r"input is of rank 1; expected rank 2 to 8: \(N, C, ...\)"),
        ((WHOLE, (5,)), {}, "weight is of C 5; expected C 4"),
        ((WHOLE, C, (4, 1)), {}, r"bias is of shape \(4, 1\); expected shape \(C\)"),
        ((WHOLE, C, C, C, (1,)), {}, "running_var is of C 1; expected C 4"),
        ((WHOLE,), {"momentum": 1.5}, "momentum is 1.5; expected 0 to 1"),
        ((WHOLE,), {"eps": -1.0}, "eps is -1.0; expected 0 or more"),
        ((WHOLE,), {"relu": 2}, "relu is 2; expected 0 or 1"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)
