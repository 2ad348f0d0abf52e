"""What Convolution computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.convolution import arguments

from gradfuse.errors import ArgumentError

OP = "Convolution"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    groups=st.integers(1, 2),
    sizes=st.tuples(st.integers(3, 7), st.integers(3, 7)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 1)] * 4),
    transposed=st.integers(0, 1),
    biased=st.booleans(),
    relu=st.integers(0, 1),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=10, deadline=None)
def test_any_attributes(
    backend: str,
    groups: int,
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, ...],
    transposed: int,
    biased: bool,
    relu: int,
    dtype: torch.dtype,
) -> None:
    attributes: dict[str, Any] = {
        "stride": stride, "padding": padding, "transposed": transposed, "groups": groups, "relu": relu,
        "output_padding": (0, stride[1] - 1) if transposed else (0,),
    }  # fmt: skip
    if transposed and any(
        (size - 1) * step - padding[axis] - padding[axis + 2] + taps < 1
        for axis, (size, step, taps) in enumerate(zip(sizes, stride, kernel, strict=True))
    ):
        return
    sample = arguments((2, (2 * groups, 3 * groups), sizes, kernel), attributes, dtype, biased=biased)
    (output,) = run(OP, backend, *sample.inputs, ranks=[4], **attributes)
    SAMPLES[OP].assert_close([output.to(dtype)], sample, dtype)


def test_shapes() -> None:
    x, w, b = (FLOAT, ("N", 4, "H", 5)), (FLOAT, (6, 4, 3, 3)), (FLOAT, (6,))
    assert inferred(OP, x, w, b, padding=(1,)) == [(FLOAT, ("N", 6, None, 5))]
    assert inferred(OP, (FLOAT, ("N", None, 9)), (FLOAT, ("M", 2, 3)), groups=2, stride=(2,)) == [
        (FLOAT, ("N", "M", 4))
    ]
    assert inferred(OP, (FLOAT, (2, 6, 3)), (FLOAT, (6, 2, 3)), transposed=1, stride=(2,), groups=2) == [
        (FLOAT, (2, 4, 7))
    ]
    assert inferred(OP, (FLOAT, (2, "C", 3)), (FLOAT, (None, None, 3)), b) == [(FLOAT, (2, 6, 1))]


VALID = ((2, 4, 5, 5), (6, 4, 3, 3))


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((2, 4, 5, 5), (6, 4, 3)), {}, "weight is of rank 3; expected rank 4, as input"),
        (((2, 4), (6, 4)), {}, r"input is of rank 2; expected rank 3 to 5: \(N, C, ...\)"),
        (((2, 4, 5, 5), (6, 3, 3, 3)), {}, "weight is of dimension 1 3; expected dimension 1 4"),
        (((2, 4, 5, 2), (6, 4, 3, 3)), {}, "input is of dimension 3 2; expected room for the kernel"),
        ((*VALID, (5,)), {}, "bias is of M 5; expected M 6"),
        (VALID, {"groups": 3}, "groups is 3; expected a divisor of the 4 channels of input"),
        (VALID, {"groups": 0}, "groups is 0; expected 1 or more"),
        (((2, 4, 5, 5), (5, 2, 3, 3)), {"groups": 2}, "groups is 2; expected a divisor of the 5 channels of weight"),
        (VALID, {"stride": (0,)}, r"stride is \[0\]; expected numbers from 1"),
        (VALID, {"relu": 2}, "relu is 2; expected 0 or 1"),
        (VALID, {"transposed": 2}, "transposed is 2; expected 0 or 1"),
        (VALID, {"output_padding": (1,)}, "output_padding is .*; expected 0 with"),
    ],
)  # fmt: skip
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)
