"""What MseLossBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators.mse_loss_backward import mse_loss_backward
from torch import Tensor

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def body(backend: str, *inputs: Tensor, reduction: int) -> Tensor:
    rank = max(tensor.dim() for tensor in inputs)
    (out,) = run("MseLossBackward", backend, *inputs, ranks=[rank], reduction=reduction)
    return out.to(inputs[0].dtype)


def check(backend: str, *inputs: Tensor, reduction: int) -> None:
    actual = body(backend, *inputs, reduction=reduction)
    native = mse_loss_backward(*inputs, reduction=reduction, dtype=inputs[0].dtype)
    reference = mse_loss_backward(*inputs, reduction=reduction)
    assert_gradients_close(actual, native, reference, inputs[0].dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=4),
    reduction=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=25, deadline=None)
def test_broadcasts_all_three_inputs(
    backend: str, shapes: hnp.BroadcastableShapes, reduction: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes.input_shapes]
    check(backend, *inputs, reduction=reduction)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_8(backend: str) -> None:
    self = torch.randn(1, 2, 1, 3, 1, 2, 1, 1)
    check(backend, torch.randn(2), self, torch.randn(2, 3, 1, 1, 1, 2), reduction=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_neither_overflows_nor_underflows_inside(backend: str) -> None:
    wide = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    out = body(backend, torch.tensor(0.25, dtype=torch.float16), wide, -wide, reduction=0)
    assert out.tolist() == [60000.0, 1.0]
    many = torch.full((70000,), 30000.0, dtype=torch.float16)
    assert float(body(backend, torch.tensor(1.0).half(), many, many * 0, reduction=1)[0]) == pytest.approx(
        6 / 7, rel=1e-3
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_original(backend: str) -> None:
    grid = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    assert body(backend, grid, grid, torch.ones(2, 2), reduction=1).tolist() == [[0.0, 0.0], [1.0, 3.0]]


def test_shapes() -> None:
    scalar = (FLOAT, ())
    assert inferred("MseLossBackward", scalar, (FLOAT, (2, 3)), (FLOAT, (3,))) == [(FLOAT, (2, 3))]
    assert inferred("MseLossBackward", scalar, (FLOAT, ("N", 3)), (FLOAT, ("N", 1))) == [(FLOAT, ("N", 3))]
    assert inferred("MseLossBackward", scalar, (FLOAT, ("N", 3)), (FLOAT, ("M", 3))) == [(FLOAT, (None, 3))]
    assert inferred("MseLossBackward", scalar, (FLOAT, ("N",)), (FLOAT, (4, 5))) == [(FLOAT, (4, 5))]
    assert inferred("MseLossBackward", scalar, (FLOAT, (0, 3)), (FLOAT, (1, 3))) == [(FLOAT, (0, 3))]


def test_refusals() -> None:
    scalar = (FLOAT, ())
    with pytest.raises(ArgumentError, match=r"MseLossBackward \(node 'node'\): reduction is 3; expected 0 "):
        inferred("MseLossBackward", scalar, scalar, scalar, reduction=3)
    with pytest.raises(ArgumentError, match=r"\(2, 3\), target \(2, 4\); expected shapes that broadcast"):
        inferred("MseLossBackward", scalar, (FLOAT, (2, 3)), (FLOAT, (2, 4)))
    with pytest.raises(ArgumentError, match="self is of rank 9; expected at most rank 8"):
        inferred("MseLossBackward", scalar, (FLOAT, (1,) * 9), scalar)
    with pytest.raises(ArgumentError, match=r"self is tensor\(float16\); expected tensor\(float\), as grad_output"):
        inferred("MseLossBackward", scalar, (HALF, (2,)), (FLOAT, (2,)))
    with pytest.raises(ArgumentError, match=r"grad_output is tensor\(double\); expected one of tensor\(float\)"):
        inferred("MseLossBackward", *[(TensorProto.DOUBLE, (2,))] * 3)
