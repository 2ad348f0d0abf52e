"""The kernel of CrossEntropyLossGrad: weights, ignored classes, label smoothing, reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import CUDA_SIMT, FLOATS, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators.cross_entropy_loss_grad import cross_entropy_loss_grad, smoothing_terms
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "CrossEntropyLossGrad"
IGNORED = -100


def sample(rows: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, targets of which about a third are ignored, and weights, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    log_prob = (3 * torch.randn(rows, classes, generator=generator)).log_softmax(1).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.3] = IGNORED
    return log_prob, target, torch.rand(classes, generator=generator).sub(0.1).clamp(min=0)


def grad_of(reduction: str, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1.0, 2.0, rows).to(dtype) if reduction == "none" else torch.tensor(1.5).to(dtype)


def check(grad: Tensor, log_prob: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> None:
    (actual,) = run(OP, grad, log_prob, target, weight, **options)
    native = cross_entropy_loss_grad(grad, log_prob, target, weight, dtype=log_prob.dtype, **options)
    reference = cross_entropy_loss_grad(grad, log_prob, target, weight, **options)
    terms = smoothing_terms(grad, log_prob, target, weight, **options)
    assert_gradients_close(actual, native, reference, log_prob.dtype, terms=terms)


@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 70),
    reduction=st.sampled_from(("mean", "sum", "none")),
    weighted=st.booleans(),
    label_smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    ignore_index=st.sampled_from((IGNORED, 0, 2)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_agrees_with_pytorch(
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
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    check(grad_of(reduction, rows, dtype), log_prob, target, weight if weighted else None, **options)


@pytest.mark.parametrize("dtype, sizes, label_smoothing", each_once(FLOATS, [(7, 50257), (3000, 37)], (0.0, 0.1)))
def test_large_and_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, sizes: tuple[int, int], label_smoothing: float
) -> None:
    rows, classes = sizes
    log_prob, target, weight = sample(rows, classes, dtype)
    target[-1] = classes - 1
    grad = grad_of("mean", rows, dtype)
    check(grad, log_prob, target, weight, label_smoothing=label_smoothing)
    (one,) = run(OP, grad, log_prob, target, weight, label_smoothing=label_smoothing)
    (two,) = run(OP, grad, log_prob, target, weight, label_smoothing=label_smoothing, threads=2)
    assert_same_bits(one, two)


@pytest.mark.parametrize("label", (0.0, -1e-6, -1e-3, -80.0, -100.0, -1e4))
def test_sure_and_impossible_classes(label: float) -> None:
    """The label's own gradient is exp(x) - 1, which must not cancel; subnormal gradients may be 0, nothing else."""
    log_prob = torch.tensor([[label, -80.0, -90.0, -103.0, -torch.inf]])
    (out,) = run(OP, torch.tensor(2.0), log_prob, torch.tensor([0]))
    limits = torch.finfo(torch.float32)
    expected = 2 * torch.cat((log_prob[:, :1].double().expm1(), log_prob[:, 1:].double().exp()), dim=1)
    assert ((out - expected).abs() <= 2 * limits.eps * expected.abs() + limits.tiny).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_ignored_rows_are_positive_zero_whatever_they_hold(dtype: torch.dtype) -> None:
    log_prob, target, weight = sample(4, 5, dtype)
    target[:] = torch.tensor([1, IGNORED, IGNORED, 2])
    log_prob[1], log_prob[2, 0] = torch.nan, torch.inf
    (out,) = run(OP, torch.tensor(-1.0, dtype=dtype), log_prob, target, weight, label_smoothing=0.1)
    assert_same_bits(out[1:3], torch.zeros(2, 5, dtype=dtype))
    assert out[[0, 3]].isfinite().all() and (out[[0, 3]] != 0).any()


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_all_rows_ignored(reduction: str) -> None:
    log_prob, target, _ = sample(3, 4, torch.float32)
    (out,) = run(OP, grad_of(reduction, 3, torch.float32), log_prob, torch.full_like(target, 7), ignore_index=7,
                 reduction=reduction)  # fmt: skip
    assert_same_bits(out, torch.zeros(3, 4))


@pytest.mark.parametrize("device", [CUDA_SIMT], indirect=True)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_rows_with_a_target_out_of_range_are_nan_where_no_check_can_read_it(reduction: str, dtype: torch.dtype) -> None:
    log_prob, target, weight = sample(300, 7, dtype)
    good = target.clone()
    good[[1, 100, 299]] = IGNORED
    target[[1, 100, 299]] = torch.tensor([7, -1, 2**40])
    grad = grad_of(reduction, 300, dtype)
    (out,) = run(OP, grad, log_prob, target, weight, reduction=reduction, label_smoothing=0.1)
    with pytest.raises(Exception, match="target is out of range in an earlier run"):
        run(OP, grad, log_prob, good, weight, reduction=reduction, label_smoothing=0.1)
    (expected,) = run(OP, grad, log_prob, good, weight, reduction=reduction, label_smoothing=0.1)
    assert out[[1, 100, 299]].isnan().all()
    kept = torch.tensor([row not in (1, 100, 299) for row in range(300)])
    assert_same_bits(out[kept], expected[kept])


def test_nan_and_infinity_stay_where_they_are() -> None:
    log_prob = torch.full((3, 4), 0.25).log()
    log_prob[0, 1], log_prob[1, 2], log_prob[2, 3] = torch.nan, torch.inf, -torch.inf
    check(torch.tensor([1.0, 1.0, 1.0]), log_prob, torch.tensor([0, 0, 0]), reduction="none")


def test_an_infinite_weight_stays_in_the_rows_of_its_class() -> None:
    log_prob, weight = torch.randn(3, 4).log_softmax(1), torch.tensor([0.5, torch.inf, 0.25, 1.0])
    check(torch.tensor(1.0), log_prob, torch.tensor([0, 2, 3]), weight, reduction="sum")
    (out,) = run(OP, torch.tensor(1.0), log_prob, torch.tensor([0, 1, 3]), weight, reduction="sum")
    assert out[[0, 2]].isfinite().all() and not out[1].isfinite().any()


def test_grad_loss_may_have_one_dimension_or_none() -> None:
    log_prob, target, _ = sample(3, 4, torch.float32)
    assert_same_bits(*run(OP, torch.tensor([2.0]), log_prob, target), *run(OP, torch.tensor(2.0), log_prob, target))


LOG_PROB = torch.zeros(2, 3)
TARGET = torch.tensor([0, 1])
ONE = torch.tensor(1.0)
TWO_GRADS = torch.ones(2)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((ONE, LOG_PROB, torch.tensor([0, 3])), {},
         "target[1] is 3; expected a class in [0, 3) or ignore_index -100"),
        ((ONE, LOG_PROB, torch.tensor([-1, 0])), {},
         "target[0] is -1; expected a class in [0, 3) or ignore_index -100"),
        ((ONE, LOG_PROB, torch.tensor([0])), {},
         "target is int64(1); expected int64(2), one class a row of log_prob"),
        ((ONE, LOG_PROB[0], TARGET), {}, "log_prob is float32(3); expected shape (N,C) with C > 0"),
        ((ONE, LOG_PROB[:, :0], TARGET), {}, "log_prob is float32(2,0); expected shape (N,C) with C > 0"),
        ((TWO_GRADS, LOG_PROB, TARGET), {},
         "grad_loss is float32(2); expected shape () or (1), as reduction is 'mean'"),
        ((ONE, LOG_PROB, TARGET), {"reduction": "none"},
         "grad_loss is float32(); expected float32(2), one value a row, as reduction is 'none'"),
        ((ONE, LOG_PROB, TARGET, torch.ones(2)), {},
         "weight is float32(2); expected float32(3), one weight a class of log_prob"),
        ((ONE, LOG_PROB, TARGET), {"reduction": "max"}, "reduction is 'max'; expected 'mean', 'sum' or 'none'"),
        ((ONE, LOG_PROB, TARGET), {"label_smoothing": 1.5}, "label_smoothing is 1.5; expected a number in [0, 1]"),
        ((ONE, LOG_PROB, TARGET), {"label_smoothing": float("nan")},
         "label_smoothing is nan; expected a number in [0, 1]"),
        ((ONE, LOG_PROB, TARGET, None, ONE), {},
         "grad_zloss is given; expected none: the z-loss is not supported"),
        ((ONE, LOG_PROB, TARGET, None, None, TWO_GRADS), {},
         "lse_for_zloss is given; expected none: the z-loss is not supported"),
        ((ONE, LOG_PROB, TARGET), {"lse_square_scale_for_zloss": 0.5},
         "lse_square_scale_for_zloss is 0.5; expected 0: the z-loss is not supported"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor | None, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
