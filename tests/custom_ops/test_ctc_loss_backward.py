"""What CtcLossBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, opsets, refuses, run
from ctc_samples import DTYPES, Sample, sample, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators.ctc_loss import ctc_loss
from operators.ctc_loss_backward import ctc_loss_backward
from torch import Tensor

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

OP = "CtcLossBackward"
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def body(
    backend: str,
    found: Sample,
    saved: tuple[Tensor, Tensor] | None = None,
    *,
    grad_out: Tensor | None = None,
    opset: int = 17,
    zero_infinity: int = 0,
) -> Tensor:
    """The gradient from what the forward saved: by default PyTorch's, with NaN in what may not be read of it."""
    dtype = found.log_probs.dtype
    nll, alpha = saved or stale(found, *ctc_loss(*found.tensors, blank=found.blank, dtype=dtype))
    grad = torch.ones_like(nll) if grad_out is None else grad_out
    (out,) = run(
        OP, backend, grad, *found.tensors, nll, alpha,
        ranks=[3], opset=opset, blank=found.blank, zero_infinity=zero_infinity,
    )  # fmt: skip
    return out.to(dtype)


def stale(found: Sample, nll: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.cat([alpha, alpha.new_zeros(*alpha.shape[:2], 2)], dim=2)
    steps = torch.arange(wide.shape[1])[None, :, None] < found.input_lengths[:, None, None]
    states = torch.arange(wide.shape[2])[None, None, :] <= 2 * found.target_lengths[:, None, None]
    return nll, wide.masked_fill(~(steps & states), torch.nan)


def check(backend: str, found: Sample, *, opset: int = 17, zero_infinity: int = 0) -> None:
    dtype = found.log_probs.dtype
    grad_out = torch.linspace(-1.0, 2.0, len(found.input_lengths)).to(dtype)
    options: dict[str, Any] = {"blank": found.blank, "zero_infinity": bool(zero_infinity)}
    saved = ctc_loss(*found.tensors, blank=found.blank, dtype=dtype)
    actual = body(backend, found, grad_out=grad_out, opset=opset, zero_infinity=zero_infinity)
    native = ctc_loss_backward(grad_out, *found.tensors, *saved, dtype=dtype, **options)
    reference = ctc_loss_backward(grad_out, *found.tensors, **options)
    # A logarithm of the size of the loss was rounded: that is its share of each posterior.
    loss = saved[0].double().nan_to_num(posinf=0.0)
    posterior = found.log_probs.double().exp() - ctc_loss_backward(torch.ones_like(grad_out), *found.tensors, **options)
    terms = ((1 + loss.abs()) * grad_out.abs())[:, None] * posterior.abs().nan_to_num()
    assert_gradients_close(actual, native, reference, dtype, terms=terms.numpy())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("opset", opsets()[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled(every=3)
def test_agrees_with_pytorch(backend: str, opset: int, dtype: torch.dtype) -> None:
    padded = sample(20, 7, [20, 18, 11], [5, 0, 4], width=6).cast(dtype)
    check(backend, padded, opset=opset)
    check(backend, padded.joined(), opset=opset)


@pytest.mark.parametrize("backend", BACKENDS)
@given(found=samples(), zero_infinity=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_any_size(backend: str, found: Sample, zero_infinity: int) -> None:
    check(backend, found, zero_infinity=zero_infinity)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("labels", (torch.int64, torch.int32, torch.bool, torch.float32, torch.float16))
def test_target_types(backend: str, labels: torch.dtype) -> None:
    check(backend, sample(8, 2, [8, 7], [3, 1]).label_type(labels))


@pytest.mark.parametrize("backend", BACKENDS)
def test_takes_what_the_forward_body_saved(backend: str) -> None:
    found = sample(9, 5, [9, 6, 2], [4, 3, 3])
    nll, alpha = run("CtcLoss", backend, *found.tensors, ranks=[1, 3], blank=0, zero_infinity=1)
    out = body(backend, found, (nll, alpha), zero_infinity=1)
    options: dict[str, Any] = {"zero_infinity": True}
    ones = torch.ones(3)
    native = ctc_loss_backward(ones, *found.tensors, dtype=torch.float32, **options)
    assert_gradients_close(out, native, ctc_loss_backward(ones, *found.tensors, **options), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_alignment(backend: str) -> None:
    found = sample(4, 5, [4, 1, 0], [4, 2, 1])
    out = body(backend, found)
    assert out[:, 0].isfinite().all() and out[:, 2].eq(0).all()
    assert out[:1, 1].isnan().all() and out[1:, 1].eq(0).all()
    kept = body(backend, found, zero_infinity=1)
    assert torch.equal(kept[:, 0], out[:, 0]) and kept[:, 1:].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_steps(backend: str) -> None:
    found = sample(0, 3, [0, 0], [0, 2])
    saved = torch.tensor([0.0, torch.inf]), torch.zeros(2, 0, 5)
    assert body(backend, found, saved).shape == (0, 2, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_classes_get_zero(backend: str) -> None:
    found = sample(5, 4, [5, 5, 5], [2, 2, 2])
    found = replace(found, targets=torch.tensor([[1, 2], [1, 3], [2, 1]]))
    found.log_probs[:, :, 3] = -torch.inf
    out = body(backend, found)
    assert out[:, [0, 2], 3].eq(0).all() and out[:, 1].isnan().all()
    check(backend, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_item_keeps_its_nan_to_itself(backend: str) -> None:
    found = sample(6, 4, [6, 6, 6], [2, 2, 2])
    expected = body(backend, found)
    found.log_probs[2, 1] = torch.nan
    out = body(backend, found)
    assert out[:, 1].isnan().any() and torch.equal(out[:, [0, 2]], expected[:, [0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_sequences(backend: str) -> None:
    check(backend, sample(150, 6, [150, 120], [20, 40]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_lengths_and_labels_are_an_error_at_run_time(backend: str) -> None:
    good = sample(4, 3, [4, 3], [2, 1])
    saved = ctc_loss(*good.tensors, dtype=torch.float32)
    with refuses(backend, "input_length_out_of_range"):
        body(backend, replace(good, input_lengths=torch.tensor([5, 3])), saved)
    with refuses(backend, "target_lengths_do_not_fit_targets"):
        body(backend, replace(good, target_lengths=torch.tensor([3, 1])), saved)
    with refuses(backend, "log_alpha_has_too_few_states"):
        body(backend, good, (saved[0], saved[1][:, :, :4]))
    for label in (3, -1):
        with refuses(backend, "label_(is_)?out_of_range"):
            body(backend, replace(good, targets=torch.tensor([[1, 2], [label, 0]])), saved)


def test_shapes() -> None:
    item, log_probs = (FLOAT, ("N",)), (FLOAT, ("T", "N", 9))
    lengths, alpha = (INT64, ("N",)), (FLOAT, ("N", 7, "X"))
    assert inferred(OP, item, log_probs, (INT64, ("N", 5)), lengths, lengths, item, alpha) == [(FLOAT, (7, "N", 9))]
    assert inferred(OP, (FLOAT, (4,)), log_probs, (INT64, ("L",)), lengths, lengths, item, alpha) == [
        (FLOAT, (7, 4, 9))
    ]


def test_refusals() -> None:
    item, log_probs, targets, lengths = (FLOAT, (4,)), (FLOAT, (7, 4, 9)), (INT64, (4, 5)), (INT64, (4,))
    start = (item, log_probs, targets, lengths, lengths)
    with pytest.raises(ArgumentError, match=r"CtcLossBackward \(node 'node'\): log_alpha is of T 6; expected T 7"):
        inferred(OP, *start, item, (FLOAT, (4, 6, 11)))
    with pytest.raises(ArgumentError, match="neg_log_likelihood is of N 3; expected N 4"):
        inferred(OP, *start, (FLOAT, (3,)), (FLOAT, (4, 7, 11)))
    with pytest.raises(ArgumentError, match=r"log_alpha is tensor\(double\); expected tensor\(float\), as grad_out"):
        inferred(OP, *start, item, (TensorProto.DOUBLE, (4, 7, 11)))
