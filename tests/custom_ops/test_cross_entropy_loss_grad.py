"""What CrossEntropyLossGrad computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, refuses, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators.cross_entropy_loss_grad import cross_entropy_loss_grad, smoothing_terms
from torch import Tensor

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

OP = "CrossEntropyLossGrad"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("mean", "sum", "none")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
IGNORED = -100


def body(
    backend: str, grad: Tensor, log_prob: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> Tensor:
    (out,) = run(OP, backend, grad, log_prob, target, weight, ranks=[2], **options)
    return out.to(log_prob.dtype)


def check(
    backend: str,
    grad: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    **options: Any,
) -> None:
    actual = body(backend, grad, log_prob, target, weight, **options)
    native = cross_entropy_loss_grad(grad, log_prob, target, weight, dtype=log_prob.dtype, **options)
    reference = cross_entropy_loss_grad(grad, log_prob, target, weight, **options)
    terms = smoothing_terms(grad, log_prob, target, weight, **options)
    assert_gradients_close(actual, native, reference, log_prob.dtype, terms=terms)


def sample(rows: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, targets of which about a third are ignored, and weights."""
    generator = torch.Generator().manual_seed(seed)
    log_prob = (3 * torch.randn(rows, classes, generator=generator)).log_softmax(1).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.3] = IGNORED
    return log_prob, target, torch.rand(classes, generator=generator) + 0.5


def grads(reduction: str, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1.0, 2.0, rows).to(dtype) if reduction == "none" else torch.tensor(1.5).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.integers(0, 6),
    classes=st.integers(1, 9),
    reduction=st.sampled_from(REDUCTIONS),
    weighted=st.booleans(),
    label_smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    ignore_index=st.sampled_from((IGNORED, 0, 3)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_size_and_option(
    backend: str,
    rows: int,
    classes: int,
    reduction: str,
    weighted: bool,
    label_smoothing: float,
    ignore_index: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    log_prob, target, weight = sample(rows, classes, dtype, seed)
    target[target == IGNORED] = ignore_index
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    check(backend, grads(reduction, rows, dtype), log_prob, target, weight if weighted else None, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", (0.0, 0.2))
def test_ignored_rows_are_positive_zero_whatever_they_hold(
    backend: str, reduction: str, label_smoothing: float
) -> None:
    log_prob, target, weight = sample(4, 3, torch.float32)
    target[:] = torch.tensor([1, IGNORED, IGNORED, 2])
    log_prob[1], log_prob[2, 0] = torch.nan, torch.inf
    out = body(
        backend, -grads(reduction, 4, torch.float32), log_prob, target, weight,
        reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip
    assert (out[1:3] == 0).all() and not torch.signbit(out[1:3]).any()
    assert out[[0, 3]].isfinite().all() and (out[[0, 3]] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", (0.0, 0.2))
def test_all_rows_ignored(backend: str, reduction: str, label_smoothing: float) -> None:
    log_prob, target, _ = sample(3, 4, torch.float32)
    out = body(
        backend, grads(reduction, 3, torch.float32), log_prob, torch.full_like(target, IGNORED),
        reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(3, 4)) and not torch.signbit(out).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("label_smoothing", (0.0, 0.3))
def test_impossible_and_certain_classes(backend: str, label_smoothing: float) -> None:
    log_prob = torch.tensor([[0.0, -torch.inf, -torch.inf], [-104.0, -80.0, 0.0], [-torch.inf, 0.0, -torch.inf]])
    check(
        backend, torch.tensor(1.0), log_prob, torch.tensor([0, 1, 2]),
        reduction="sum", label_smoothing=label_smoothing,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_likely_target_keeps_its_digits(backend: str) -> None:
    log_prob = torch.tensor([[-1e-6, -14.0], [-0.7, -0.69]])
    out = body(backend, torch.tensor(1.0), log_prob, torch.tensor([0, 0]), reduction="sum")
    torch.testing.assert_close(out[:, 0], log_prob[:, 0].expm1(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_counts_keeps_its_nan_to_itself(backend: str) -> None:
    log_prob, _, weight = sample(3, 4, torch.float32)
    log_prob[1] = torch.nan
    out = body(backend, torch.tensor(1.0), log_prob, torch.tensor([0, 1, 2]), weight)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_of_one_element(backend: str) -> None:
    log_prob, target, _ = sample(3, 4, torch.float32)
    scalar, vector = (body(backend, torch.full(shape, 2.0), log_prob, target) for shape in ((), (1,)))
    assert torch.equal(scalar, vector)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", (-1, 4, 2**40))
@pytest.mark.parametrize("weighted", (False, True))
def test_a_target_out_of_range_is_an_error_at_run_time(backend: str, wrong: int, weighted: bool) -> None:
    log_prob, target, weight = sample(3, 4, torch.float32)
    target[:] = torch.tensor([0, wrong, IGNORED])
    with refuses(backend, "target_out_of_range"):
        body(backend, torch.tensor(1.0), log_prob, target, weight if weighted else None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_do_not_fit_are_an_error_at_run_time(backend: str) -> None:
    log_prob, target, weight = sample(3, 4, torch.float32)
    for arguments in ((torch.tensor(1.0), log_prob, target[:1]), (torch.tensor(1.0), log_prob, target, weight[:3])):
        with pytest.raises(Exception, match=r"[Rr]eshape"):
            body(backend, *arguments)


def test_shapes() -> None:
    scalar, target = (FLOAT, ()), (INT64, ("N",))
    assert inferred(OP, scalar, (FLOAT, ("N", 10)), target) == [(FLOAT, ("N", 10))]
    assert inferred(OP, scalar, (FLOAT, (None, "C")), (INT64, (32,)), (FLOAT, (10,))) == [(FLOAT, (32, 10))]
    per_row = inferred(OP, (FLOAT, (8,)), (FLOAT, ("N", 10)), target, reduction="none")
    assert per_row == [(FLOAT, (8, 10))]


def test_refusals() -> None:
    scalar, log_prob, target = (FLOAT, ()), (FLOAT, (8, 10)), (INT64, (8,))
    with pytest.raises(
        ArgumentError, match=r"CrossEntropyLossGrad \(node 'node'\): reduction is 'avg'; expected 'mean'"
    ):
        inferred(OP, scalar, log_prob, target, reduction="avg")
    with pytest.raises(ArgumentError, match=r"label_smoothing is 1\.5; expected a number in \[0, 1\]"):
        inferred(OP, scalar, log_prob, target, label_smoothing=1.5)
    with pytest.raises(ArgumentError, match=r"lse_square_scale_for_zloss is 0\.5; expected 0"):
        inferred(OP, scalar, log_prob, target, lse_square_scale_for_zloss=0.5)
    with pytest.raises(ArgumentError, match="lse_for_zloss is given; expected absent"):
        inferred(OP, scalar, log_prob, target, None, None, (FLOAT, (8,)))
    with pytest.raises(ArgumentError, match="target is of N 7; expected N 8"):
        inferred(OP, scalar, log_prob, (INT64, (7,)))
    with pytest.raises(ArgumentError, match="weight is of C 9; expected C 10"):
        inferred(OP, scalar, log_prob, target, (FLOAT, (9,)))
    with pytest.raises(ArgumentError, match=r"log_prob is of shape \(8, 0\); expected C > 0"):
        inferred(OP, scalar, (FLOAT, (8, 0)), target)
    with pytest.raises(
        ArgumentError, match=r"grad_loss is of shape \(8\); expected shape \(\) or \(1\) for reduction 'mean'"
    ):
        inferred(OP, (FLOAT, (8,)), log_prob, target)
    with pytest.raises(ArgumentError, match=r"target is tensor\(int32\); expected one of tensor\(int64\)"):
        inferred(OP, scalar, log_prob, (TensorProto.INT32, (8,)))
