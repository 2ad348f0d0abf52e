"""What MaxPoolBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.max_pool_backward import arguments

from gradfuse.errors import ArgumentError

OP = "MaxPoolBackward"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    sizes=st.tuples(st.integers(5, 8), st.integers(5, 8)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(*[st.integers(0, 1)] * 4),
    dilation=st.integers(1, 2),
    ceil_mode=st.integers(0, 1),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=15, deadline=None)
def test_any_attributes(
    backend: str,
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, ...],
    dilation: int,
    ceil_mode: int,
    dtype: torch.dtype,
) -> None:
    # With strides and dilations of 1, onnx.reference gives wrong indices for windows of more than a row.
    assume(backend != "reference" or kernel[0] == 1 or max(*stride, dilation) > 1)
    attributes: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": tuple(min(pad, most - 1) for pad, most in zip(padding, kernel * 2, strict=True)),
        "dilation": (dilation,),
        "ceil_mode": ceil_mode,
    }
    sample = arguments(2, 3, sizes, attributes, dtype)
    outputs = run(OP, backend, *sample.inputs, ranks=[4], **attributes)
    SAMPLES[OP].assert_close([output.to(dtype) for output in outputs], sample, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("padding", [0, 1])
def test_not_finite_numbers_are_where_pytorch_has_them(dtype: torch.dtype, padding: int) -> None:
    generator = torch.Generator().manual_seed(padding)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, 0.0, -0.0, 1.0], dtype=dtype)
    image = special[torch.randint(0, len(special), (4, 3, 9, 8), generator=generator)]
    image[0] = -torch.inf
    image[1, :, 3:] = torch.nan
    image.requires_grad_()
    out = torch.nn.functional.max_pool2d(image, 3, 2, padding)
    grad = torch.randint(-9, 10, out.shape, generator=generator).to(dtype)
    out.backward(grad)  # type: ignore[no-untyped-call]
    assert image.grad is not None
    attributes: dict[str, Any] = {"kernel_size": (3,), "stride": (2,), "padding": (padding,)}
    (actual,) = run(OP, "onnxruntime", grad, image.detach(), ranks=[4], **attributes)
    assert torch.equal(actual, image.grad)


def test_shapes() -> None:
    halves: dict[str, Any] = {"kernel_size": (2,), "stride": (2,)}
    grad, x = (FLOAT, ("N", 6, 4, "W")), (FLOAT, (None, "C", 9, None))
    assert inferred(OP, grad, x, **halves) == [(FLOAT, ("N", 6, 9, None))]
    assert inferred(OP, (FLOAT, (1, 1, 5)), (FLOAT, (1, 1, 9)), **halves, ceil_mode=1) == [(FLOAT, (1, 1, 9))]
    # The window that would begin behind the input is left out.
    three: dict[str, Any] = {"kernel_size": (1,), "stride": (3,), "ceil_mode": 1}
    assert inferred(OP, (FLOAT, (1, 1, 3)), (FLOAT, (1, 1, 9)), **three) == [(FLOAT, (1, 1, 9))]
    # One window that the input is too small for.
    assert inferred(OP, (FLOAT, (1, 1, 1)), (FLOAT, (1, 1, 1)), **halves, ceil_mode=1) == [(FLOAT, (1, 1, 1))]


def test_refusals() -> None:
    grad, x = (FLOAT, (2, 3, 4)), (FLOAT, (2, 3, 8))
    halves: dict[str, Any] = {"kernel_size": (2,), "stride": (2,)}
    with pytest.raises(ArgumentError, match=r"grad_output is of dimension 2 5; expected dimension 2 4"):
        inferred(OP, (FLOAT, (2, 3, 5)), x, **halves)
    with pytest.raises(ArgumentError, match=r"grad_output is of C 4; expected C 3"):
        inferred(OP, (FLOAT, (2, 4, 4)), x, **halves)
    with pytest.raises(ArgumentError, match=r"input is of rank 2; expected rank 3 to 5"):
        inferred(OP, grad, (FLOAT, (2, 3)), **halves)
    with pytest.raises(ArgumentError, match=r"padding is \[2\]; expected less than a window reaches"):
        inferred(OP, grad, x, **halves, padding=(2,))
    with pytest.raises(ArgumentError, match=r"kernel_size is \[2, 2\]; expected 1 numbers"):
        inferred(OP, grad, x, kernel_size=(2, 2))
    with pytest.raises(ArgumentError, match=r"stride is \[0\]; expected numbers from 1 to 2147483647"):
        inferred(OP, grad, x, stride=(0,))
    with pytest.raises(ArgumentError, match=r"input is of dimension 2 1; expected a dimension that a window fits into"):
        inferred(OP, grad, (FLOAT, (2, 3, 1)), **halves)
    with pytest.raises(ArgumentError, match=r"ceil_mode is 2; expected 0 or 1"):
        inferred(OP, grad, x, **halves, ceil_mode=2)
