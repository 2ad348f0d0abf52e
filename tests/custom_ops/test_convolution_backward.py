"""What ConvolutionBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.convolution_backward import arguments

from gradfuse.errors import ArgumentError

OP = "ConvolutionBackward"
FLOAT = TensorProto.FLOAT


def check(backend: str, *described: Any, dtype: torch.dtype, **attributes: Any) -> None:
    sample = arguments(described, attributes, dtype)
    ranks = [output.dim() for output in SAMPLES[OP].expected(sample, torch.float64)]
    outputs = run(OP, backend, *sample.inputs, ranks=ranks, **attributes)
    SAMPLES[OP].assert_close([output.to(dtype) for output in outputs], sample, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    groups=st.integers(1, 2),
    sizes=st.tuples(st.integers(3, 7), st.integers(3, 7)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 1)] * 4),
    transposed=st.integers(0, 1),
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
    dtype: torch.dtype,
) -> None:
    described = (2, (2 * groups, 3 * groups), sizes, kernel)
    check(backend, *described, dtype=dtype, stride=stride, padding=padding, transposed=transposed, groups=groups)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("transposed", (0, 1))
def test_what_is_not_wanted_is_empty(backend: str, mask: tuple[int, ...], transposed: int) -> None:
    described = (2, (4, 4), (5, 6), (3, 3))
    check(backend, *described, dtype=torch.float32, output_mask=mask, transposed=transposed, groups=2)


def test_shapes() -> None:
    grad, x, w = (FLOAT, ("N", 6, 5, 5)), (FLOAT, ("N", 4, "H", 5)), (FLOAT, (6, 4, 3, 3))
    assert inferred(OP, grad, x, w, padding=(1,)) == [(FLOAT, ("N", 4, "H", 5)), (FLOAT, (6, 4, 3, 3)), (FLOAT, (6,))]
    masked = inferred(OP, grad, x, w, padding=(1, 1), output_mask=(0, 1, 0))
    assert masked == [(FLOAT, (0,)), (FLOAT, (6, 4, 3, 3)), (FLOAT, (0,))]
    grouped = inferred(OP, (FLOAT, (2, "M", 3)), (FLOAT, (None, None, 3)), (FLOAT, (6, 2, 1)), groups=2)
    assert grouped == [(FLOAT, (2, 4, 3)), (FLOAT, (6, 2, 1)), (FLOAT, (6,))]
    transposed = inferred(OP, (FLOAT, (2, "M", 7)), (FLOAT, (2, 6, 3)), (FLOAT, (6, 2, 3)), transposed=1, stride=(2,))
    assert transposed == [(FLOAT, (2, 6, 3)), (FLOAT, (6, 2, 3)), (FLOAT, (2,))]


VALID = ((2, 6, 3, 3), (2, 4, 5, 5), (6, 4, 3, 3))


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((2, 6, 3, 3), (2, 4, 5, 5), (6, 4, 3)), {}, "weight is of rank 3; expected rank 4, as grad_output"),
        (((2, 6), (2, 4), (6, 4)), {}, r"grad_output is of rank 2; expected rank 3 to 5: \(N, C, ...\)"),
        (((2, 6, 3, 3), (3, 4, 5, 5), (6, 4, 3, 3)), {}, "grad_output is of N 2; expected N 3"),
        (((2, 6, 3, 3), (2, 4, 5, 5), (5, 4, 3, 3)), {}, "weight is of dimension 0 5; expected dimension 0 6"),
        (((2, 6, 3, 3), (2, 4, 5, 5), (6, 3, 3, 3)), {}, "weight is of dimension 1 3; expected dimension 1 4"),
        (((2, 6, 3, 4), (2, 4, 5, 5), (6, 4, 3, 3)), {}, "grad_output is of dimension 3 4; expected dimension 3 3"),
        (VALID, {"groups": 4}, "groups is 4; expected a divisor of the 6 channels of grad_output"),
        (VALID, {"groups": 0}, "groups is 0; expected 1 or more"),
        (VALID, {"stride": (0,)}, r"stride is \[0\]; expected numbers from 1"),
        (VALID, {"padding": (0,) * 3}, r"padding is .*; expected 1 or 2 or 4 num"),
        (VALID, {"transposed": 2}, "transposed is 2; expected 0 or 1"),
        (VALID, {"output_padding": (1,)}, "output_padding is .*; expected 0 with"),
        (VALID, {"output_mask": (1, 2, 1)}, "output_mask is .*; expected 3 numb"),
    ],
)  # fmt: skip
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)
