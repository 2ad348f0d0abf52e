"""What ScaledMaskedSoftmaxBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, refuses, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators.scaled_masked_softmax_backward import scaled_masked_softmax_backward
from torch import Tensor

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

OP = "ScaledMaskedSoftmaxBackward"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


def body(backend: str, grad: Tensor, y: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    (out,) = run(OP, backend, grad, y, mask, ranks=[4], scale=scale, fix_triu_mask=0)
    return out.to(grad.dtype)


def check(backend: str, grad: Tensor, y: Tensor, mask: Tensor | None, scale: float) -> None:
    actual = body(backend, grad, y, mask, scale)
    native = scaled_masked_softmax_backward(grad, y, mask, scale=scale, dtype=grad.dtype)
    reference = scaled_masked_softmax_backward(grad, y, mask, scale=scale)
    # The sum of a row cancels: what is added up there bounds what can be asked for.
    terms = abs(scale) * (grad.double() * y.double()).abs().sum(-1, keepdim=True)
    assert_gradients_close(actual, native, reference, grad.dtype, terms=terms.numpy())


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(shape, generator=generator).softmax(-1)
    return torch.randn(shape, generator=generator).to(dtype), y.to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 9)),
    whole=st.tuples(st.booleans(), st.booleans()),
    density=st.sampled_from((0.0, 0.5, 1.0)),
    scale=st.sampled_from((1.0, 0.125, -3.0, 0.0)),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=30, deadline=None)
def test_any_shape_and_mask(
    backend: str,
    shape: tuple[int, ...],
    whole: tuple[bool, bool],
    density: float,
    scale: float,
    dtype: torch.dtype,
) -> None:
    grad, y = sample(shape, dtype)
    mask_shape = (*(size if all_of_it else 1 for size, all_of_it in zip(shape[:2], whole, strict=True)), *shape[2:])
    mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1)) < density
    check(backend, grad, y, mask, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_positions_are_positive_zero(backend: str) -> None:
    grad, y = sample((1, 2, 3, 4), torch.float32)
    everything = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    out = body(backend, grad, y, everything, -1.0)
    assert (out == 0).all() and not torch.signbit(out).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_a_masked_nan_enters_only_the_row_sum(backend: str, bad: float) -> None:
    grad, y = sample((1, 1, 2, 3), torch.float32)
    grad[0, 0, 0, 0] = bad
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    mask[0, 0, 0, 0] = True
    out = body(backend, grad, y, mask)
    assert out[0, 0, 0, 0] == 0
    assert not out[0, 0, 0, 1:].isfinite().any()
    assert out[0, 0, 1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_do_not_fit_are_an_error_at_run_time(backend: str) -> None:
    grad, y = sample((2, 3, 4, 5), torch.float32)
    with refuses(backend, "shapes_differ"):
        body(backend, grad, y, torch.zeros(2, 3, 1, 5, dtype=torch.bool))
    with refuses(backend, "shapes_differ"):
        body(backend, grad, y[:, :1], None)


def test_shapes() -> None:
    whole, mask = (FLOAT, ("B", 8, "S", "S")), (BOOL, (1, 1, "S", 128))
    assert inferred(OP, whole, whole, mask) == [(FLOAT, ("B", 8, "S", 128))]
    assert inferred(OP, whole, whole) == [(FLOAT, ("B", 8, "S", "S"))]
    assert inferred(OP, whole, (FLOAT, (2, "H", 3, 4))) == [(FLOAT, (2, 8, 3, 4))]
    assert inferred(OP, (FLOAT, (2, 1, 3, 4)), (FLOAT, (2, 1, 3, 4)), (BOOL, ("B", "H", 3, 4))) == [
        (FLOAT, (2, 1, 3, 4))
    ]


def test_refusals() -> None:
    whole = (FLOAT, (2, 3, 4, 5))
    with pytest.raises(ArgumentError, match="fix_triu_mask is 1; expected 0"):
        inferred(OP, whole, whole, fix_triu_mask=1)
    with pytest.raises(ArgumentError, match="mask is of S1 1; expected S1 4"):
        inferred(OP, whole, whole, (BOOL, (2, 3, 1, 5)))
    with pytest.raises(ArgumentError, match="mask is of H 2; expected H 3"):
        inferred(OP, whole, whole, (BOOL, (2, 2, 4, 5)))
    with pytest.raises(ArgumentError, match=r"y is of shape \(3, 4, 5\); expected shape \(B, H, S1, S2\)"):
        inferred(OP, whole, (FLOAT, (3, 4, 5)))
    with pytest.raises(ArgumentError, match=r"mask is tensor\(float\); expected one of tensor\(bool\)"):
        inferred(OP, whole, whole, whole)
