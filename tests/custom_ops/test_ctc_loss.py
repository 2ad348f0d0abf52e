"""What CtcLoss computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import BACKENDS, inferred, refuses, run
from ctc_samples import Sample, sample, samples
from hypothesis import given, settings
from onnx import TensorProto
from operators.ctc_loss import ctc_loss
from torch import Tensor

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

OP = "CtcLoss"
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def body(backend: str, given_sample: Sample, zero_infinity: int = 0) -> tuple[Tensor, Tensor]:
    nll, alpha = run(
        OP, backend, *given_sample.tensors,
        ranks=[1, 3], blank=given_sample.blank, zero_infinity=zero_infinity,
    )  # fmt: skip
    dtype = given_sample.log_probs.dtype
    return nll.to(dtype), alpha.to(dtype)


def check(backend: str, given_sample: Sample) -> None:
    dtype = given_sample.log_probs.dtype
    native = ctc_loss(*given_sample.tensors, blank=given_sample.blank, dtype=dtype)
    reference = ctc_loss(*given_sample.tensors, blank=given_sample.blank)
    # Log probabilities are added up before a probability near 1 is left.
    added = given_sample.log_probs[given_sample.log_probs.isfinite()].abs().double()
    terms = float(added.max()) if added.numel() else 0.0
    for actual, other, exact in zip(body(backend, given_sample), native, reference, strict=True):
        assert_gradients_close(actual, other, exact, dtype, terms=terms)


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_equal_the_blank_are_labels_as_in_pytorch(backend: str) -> None:
    plain = sample(12, 4, [12, 10], [4, 3])
    check(backend, replace(plain, targets=torch.tensor([[1, 0, 2, 2], [0, 3, 1, 1]])))


@pytest.mark.parametrize("backend", BACKENDS)
@given(given_sample=samples())
@settings(max_examples=40, deadline=None)
def test_any_size(backend: str, given_sample: Sample) -> None:
    check(backend, given_sample)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("labels", (torch.int64, torch.int32, torch.bool, torch.float32, torch.float16))
def test_target_types(backend: str, labels: torch.dtype) -> None:
    check(backend, sample(8, 2, [8, 7], [3, 1]).label_type(labels))


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_labels_need_a_blank_between_them(backend: str) -> None:
    repeated = replace(sample(3, 3, [3, 3], [2, 2]), targets=torch.tensor([[1, 1], [1, 2]]))
    check(backend, repeated)
    check(backend, replace(repeated, input_lengths=torch.tensor([2, 2])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_alignment_the_loss_is_infinite_whatever_zero_infinity(backend: str) -> None:
    for zero_infinity in (0, 1):
        nll, _ = body(backend, sample(4, 5, [4, 1, 0, 0], [4, 2, 1, 0]), zero_infinity=zero_infinity)
        assert nll.isposinf().tolist() == [False, True, True, False]
        assert nll[3] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_steps(backend: str) -> None:
    nll, alpha = body(backend, sample(0, 3, [0, 0], [0, 2]))
    assert nll.tolist() == [0.0, torch.inf]
    assert alpha.shape == (2, 0, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_alpha_is_minus_infinity_past_the_end_of_an_item(backend: str) -> None:
    _, alpha = body(backend, sample(5, 4, [5, 3], [3, 1]))
    assert alpha[1, 3:].isneginf().all() and alpha[1, :, 3:].isneginf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_classes(backend: str) -> None:
    found = sample(5, 4, [5, 5, 5], [2, 2, 2])
    found = replace(found, targets=torch.tensor([[1, 2], [1, 3], [2, 1]]))
    found.log_probs[:, :, 3] = -torch.inf
    check(backend, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_item_keeps_its_nan_to_itself(backend: str) -> None:
    found = sample(6, 4, [6, 6, 6], [2, 2, 2])
    expected = body(backend, found)[0]
    found.log_probs[2, 1] = torch.nan
    nll = body(backend, found)[0]
    assert nll[1].isnan() and torch.equal(nll[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_lengths_and_labels_are_an_error_at_run_time(backend: str) -> None:
    good = sample(4, 3, [4, 3], [2, 1])
    for lengths in ([5, 3], [4, -1]):
        with refuses(backend, "input_length_out_of_range"):
            body(backend, replace(good, input_lengths=torch.tensor(lengths)))
    for lengths in ([3, 1], [2, -1]):
        with refuses(backend, "target_lengths_do_not_fit_targets"):
            body(backend, replace(good, target_lengths=torch.tensor(lengths)))
    with refuses(backend, "target_lengths_do_not_fit_targets"):
        body(backend, replace(good.joined(), target_lengths=torch.tensor([1, 1])))
    for label in (3, -1):
        with refuses(backend, "label_(is_)?out_of_range"):
            body(backend, replace(good, targets=torch.tensor([[1, 2], [label, 0]])))
    # What pads a row is no label.
    check(backend, replace(good, targets=torch.tensor([[1, 2], [1, -1]])))


def test_shapes() -> None:
    lengths = (INT64, ("N",))
    dims = [(FLOAT, (4,)), (FLOAT, (4, "T", None))]
    assert inferred(OP, (FLOAT, ("T", 4, 9)), (INT64, ("N", 5)), lengths, lengths) == dims
    assert inferred(OP, (FLOAT, ("T", 4, 9)), (FLOAT, ("L",)), lengths, lengths) == dims


def test_refusals() -> None:
    log_probs, targets, lengths = (FLOAT, (7, 4, 9)), (INT64, (4, 5)), (INT64, (4,))
    with pytest.raises(ArgumentError, match=r"CtcLoss \(node 'node'\): blank is 9; expected a class in \[0, 9\)"):
        inferred(OP, log_probs, targets, lengths, lengths, blank=9)
    with pytest.raises(ArgumentError, match="zero_infinity is 2; expected 0 or 1"):
        inferred(OP, log_probs, targets, lengths, lengths, zero_infinity=2)
    with pytest.raises(ArgumentError, match="input_lengths is of N 3; expected N 4"):
        inferred(OP, log_probs, targets, (INT64, (3,)), lengths)
    with pytest.raises(ArgumentError, match=r"targets is of shape \(4, 5, 1\); expected shape \(N, S\), or 1-D"):
        inferred(OP, log_probs, (INT64, (4, 5, 1)), lengths, lengths)
    with pytest.raises(ArgumentError, match=r"log_probs is of shape \(7, 9\); expected shape \(T, N, C\)"):
        inferred(OP, (FLOAT, (7, 9)), targets, lengths, lengths)
