"""What BatchNormBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.batch_norm_backward import arguments

from gradfuse.errors import ArgumentError

OP = "BatchNormBackward"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    relu=st.booleans(),
    weighted=st.booleans(),
    mask=st.tuples(*[st.integers(0, 1)] * 3),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=10, deadline=None)
def test_any_shape_and_any_inputs(
    backend: str, shape: list[int], relu: bool, weighted: bool, mask: tuple[int, ...], dtype: torch.dtype
) -> None:
    sample = arguments(shape, dtype, relu=relu, weighted=weighted, output_mask=mask)
    ranks = [output.dim() for output in SAMPLES[OP].expected(sample, torch.float64)]
    outputs = run(OP, backend, *sample.inputs, ranks=ranks, **sample.attributes)
    SAMPLES[OP].assert_close([output.to(dtype) for output in outputs], sample, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_relu_is_that_of_pytorch_at_nan_and_at_zeros(backend: str) -> None:
    sample = arguments((2, 2, 3), torch.float32, relu=True)
    output = torch.tensor([0.0, -0.0, 1.0, torch.nan, -1.0, 1e-45, torch.inf, -torch.inf, 0.0, 2.0, 3.0, 4.0])
    inputs = [*sample.inputs[:5], output.reshape(2, 2, 3)]
    found = run(OP, backend, *inputs, ranks=[3, 1, 1])
    SAMPLES[OP].assert_close(found, sample.with_inputs(inputs), torch.float32)


def test_shapes() -> None:
    whole, channels = (FLOAT, ("N", 4, "H")), (FLOAT, (4,))
    expected = [whole, channels, channels]
    assert inferred(OP, whole, whole, channels, channels, channels) == expected
    unknown = (FLOAT, ("N", None, "H"))
    assert inferred(OP, unknown, unknown, None, (FLOAT, (None,)), channels, whole) == expected
    for mask in product((0, 1), repeat=3):
        found = inferred(OP, whole, whole, channels, channels, channels, output_mask=mask)
        assert found == [one if wanted else (FLOAT, (0,)) for one, wanted in zip(expected, mask, strict=True)]


WHOLE, C = (3, 4, 5), (4,)


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((3, 4), WHOLE, C, C, C), {}, r"grad_output is of shape \(3, 4\); expected shape \(3, 4, 5\), as input"),
        (((3, 4, 6), WHOLE, C, C, C), {}, "grad_output is of dimension 2 6; expected dimension 2 5"),
        ((WHOLE, WHOLE, C, C, C, (1, 4, 5)), {}, "relu_output is of dimension 0 1; expected dimension 0 3"),
        (((4,), (4,), C, C, C), {}, r"input is of rank 1; expected rank 2 to 8: \(N, C, ...\)"),
        ((WHOLE, WHOLE, (5,), C, C), {}, "weight is of C 5; expected C 4"),
        ((WHOLE, WHOLE, C, (1,), C), {}, "save_mean is of C 1; expected C 4"),
        ((WHOLE, WHOLE, C, C, (4, 1)), {}, r"save_invstd is of shape \(4, 1\); expected shape \(C\)"),
        ((WHOLE, WHOLE, C, C, C), {"output_mask": (1, 1)}, r"output_mask is \[1, 1\]; expected 3 numbers, 0 or 1"),
        ((WHOLE, WHOLE, C, C, C), {"output_mask": (1, 2, 1)}, r"output_mask is \[1, 2, 1\]; expected 3 numbers"),
    ],
)  # fmt: skip
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)
