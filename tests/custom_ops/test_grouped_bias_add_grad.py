"""What GroupedBiasAddGrad computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, refuses, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators.grouped_bias_add_grad import grouped_bias_add_grad
from torch import Tensor

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

OP = "GroupedBiasAddGrad"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def body(backend: str, grad_y: Tensor, group_idx: Tensor | None) -> Tensor:
    (out,) = run(OP, backend, grad_y, group_idx, ranks=[2])
    return out.to(grad_y.dtype)


def check(backend: str, grad_y: Tensor, group_idx: Tensor | None) -> None:
    actual = body(backend, grad_y, group_idx)
    native = grouped_bias_add_grad(grad_y, group_idx, dtype=grad_y.dtype)
    reference = grouped_bias_add_grad(grad_y, group_idx)
    # Where a sum cancels, what is added up bounds what can be asked for.
    terms = grouped_bias_add_grad(grad_y.abs(), group_idx)
    assert_gradients_close(actual, native, reference, grad_y.dtype, terms=terms.numpy())


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    lengths=st.lists(st.sampled_from((0, 1, 2, 127, 128, 129, 256)), max_size=5),
    columns=st.integers(0, 3),
    ends_type=st.sampled_from((torch.int32, torch.int64)),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=30, deadline=None)
def test_any_groups(backend: str, lengths: list[int], columns: int, ends_type: torch.dtype, dtype: torch.dtype) -> None:
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(ends_type)
    grad_y = torch.randn(sum(lengths), columns, generator=torch.Generator().manual_seed(0))
    check(backend, grad_y.to(dtype), ends)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.tuples(st.integers(0, 3), st.sampled_from((0, 1, 2, 127, 128, 129, 256)), st.integers(0, 3)),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=30, deadline=None)
def test_any_middle_dimension(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(backend, torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_original(backend: str) -> None:
    out = body(backend, torch.ones(1000, 30), torch.tensor([400, 600, 1000]))
    assert torch.equal(out, torch.tensor([400.0, 200.0, 400.0])[:, None].expand(3, 30))


def test_the_error_does_not_grow_with_the_rows() -> None:
    # 0.1 is rounded, so each addition to a large sum rounds the same way: a plain sum of these is wrong by 1e-4.
    rows = torch.full((65536, 1), 0.1)
    exact = rows.double().sum()
    for out in (body("onnxruntime", rows, torch.tensor([65536])), body("onnxruntime", rows[None], None)):
        assert abs(out.double() - exact) / exact < 1e-5
    odd = rows[:65521]
    assert abs(body("onnxruntime", odd[None], None).double() - odd.double().sum()) / exact < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_a_group_keeps_its_nan_to_itself(backend: str, bad: float) -> None:
    rows = torch.ones(6, 2)
    rows[2, 0] = bad
    out = body(backend, rows, torch.tensor([2, 4, 6]))
    assert torch.equal(out[[0, 2]], torch.full((2, 2), 2.0))
    assert not out[1, 0].isfinite() and out[1, 1] == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", ([2, 1, 6], [-1, 6], [2, 5], [2, 7], [], [6, 5]))
def test_bad_ends_are_an_error_at_run_time(backend: str, ends: list[int]) -> None:
    with refuses(backend, "group_ends_decrease_or_miss_the_last_row"):
        body(backend, torch.ones(6, 2), torch.tensor(ends, dtype=torch.int64))


def test_shapes() -> None:
    assert inferred(OP, (FLOAT, ("R", "H")), (INT64, ("G",))) == [(FLOAT, ("G", "H"))]
    assert inferred(OP, (FLOAT, (10, 4)), (INT64, (3,))) == [(FLOAT, (3, 4))]
    assert inferred(OP, (FLOAT, ("G", 7, 4))) == [(FLOAT, ("G", 4))]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"grad_y is of shape \(5, 4\); expected shape \(G, C, H\)"):
        inferred(OP, (FLOAT, (5, 4)))
    with pytest.raises(ArgumentError, match=r"grad_y is of shape \(5, 4, 3\); expected shape \(R, H\)"):
        inferred(OP, (FLOAT, (5, 4, 3)), (INT64, (2,)))
    with pytest.raises(ArgumentError, match=r"group_idx is of 2049 groups; expected at most 2048"):
        inferred(OP, (FLOAT, (5, 4)), (INT64, (2049,)))
    with pytest.raises(ArgumentError, match=r"group_idx is of shape \(2, 1\); expected shape \(G\)"):
        inferred(OP, (FLOAT, (5, 4)), (INT64, (2, 1)))
