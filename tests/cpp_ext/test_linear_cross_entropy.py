"""The kernel of LinearCrossEntropy: sizes at which its loops change, threads, what is not finite, unwanted results."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from operators import SAMPLES
from operators.base import Sample
from operators.linear_cross_entropy import IGNORED, REDUCTIONS, arguments
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "LinearCrossEntropy"


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


def check_threads(sample: Sample, dtype: torch.dtype) -> None:
    one, two = (check(sample, dtype, threads) for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


SIZES = [(241, 3, 257), (130, 300, 40), (12, 257, 513), (500, 2, 3), (1, 1, 1), (61, 16, 4099)]
"""Rows, features and classes around those of blocks and tiles."""


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("summed", (False, True))
def test_blocks_and_the_same_bits_for_any_number_of_threads(
    sizes: tuple[int, int, int], dtype: torch.dtype, summed: bool
) -> None:
    check_threads(arguments(*sizes, dtype, label_smoothing=0.1, summed=summed), dtype)


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize(
    "dtype, sizes",
    [
        # The logits of some rows are kept, then those of others; and they are computed twice.
        (torch.float32, (700, 3, 33000)),
        (torch.float64, (130, 3, 70000)),
        (torch.bfloat16, (250, 3, 70000)),
    ],
    ids=str,
)
def test_more_logits_than_are_kept(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    check_threads(arguments(*sizes, dtype, bias=False, weighted=False, summed=True), dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_rows_have_no_part_in_it_whatever_they_hold(reduction: str) -> None:
    sample = arguments(30, 9, 20, torch.float32, reduction=reduction, label_smoothing=0.1)
    x, weight, target, *rest = sample.inputs
    assert x is not None and target is not None
    spoiled = x.clone()
    spoiled[target == IGNORED] = torch.nan
    clean, found = (run(OP, one, weight, target, *rest, **sample.attributes) for one in (x, spoiled))
    for one, other in zip(clean, found, strict=True):
        assert_same_bits(one, other)
    assert not found[1][target == IGNORED].any() and found[1][target != IGNORED].any(1).all()


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    sample = arguments(30, 9, 20, torch.float32, reduction="none", ignored=0.0)
    x, *rest = sample.inputs
    assert x is not None
    kept = [row for row in range(30) if row != 3]
    for bad in (torch.nan, torch.inf):
        spoiled = x.clone()
        spoiled[3, 0] = bad
        clean, found = (run(OP, one, *rest, **sample.attributes)[:2] for one in (x, spoiled))
        for one, other in zip(clean, found, strict=True):
            assert_same_bits(one[kept].contiguous(), other[kept].contiguous())
            assert not other[3].isfinite().all()


def test_no_rows_and_rows_that_are_all_ignored() -> None:
    x, weight, target, *_ = arguments(3, 2, 4, torch.float32).inputs
    assert x is not None and target is not None
    for one, classes in ((x[:0], target[:0]), (x, torch.full_like(target, IGNORED))):
        loss, *gradients = run(OP, one, weight, classes)
        assert loss.isnan() and not any(gradient.any() for gradient in gradients)


def test_likely_targets_have_small_gradients() -> None:
    """exp(x) - 1 would be 0, or nothing but rounding."""
    x, weight = torch.tensor([[15.0, 0.0]]), torch.eye(2)
    sample = Sample([x, weight, torch.tensor([0])], {})
    loss, of_input, *_ = check(sample, torch.float32)
    assert loss > 0 and of_input[0, 0] < 0


@pytest.mark.parametrize("ignored", (IGNORED, 0))
def test_ignored_rows_have_a_logsumexp_and_its_gradient(ignored: int) -> None:
    sample = arguments(30, 9, 20, torch.float32, ignored=0.5, ignore_index=ignored, summed=True)
    _, of_input, _, _, sums = check(sample, torch.float32)
    target = sample.inputs[2]
    assert target is not None and (target == ignored).any()
    assert sums[target == ignored].all() and of_input[target == ignored].any(1).all()
    everything = torch.full_like(target, ignored)
    check(Sample([*sample.inputs[:2], everything, *sample.inputs[3:]], sample.attributes), torch.float32)


def test_classes_that_the_bias_excludes() -> None:
    """Whole blocks of them too, and all in a row."""
    sample = arguments(5, 4, 600, torch.float32, ignored=0.0, weighted=False, summed=True)
    target, bias = sample.inputs[2:4]
    assert target is not None and bias is not None
    bias[250:520] = -torch.inf
    target %= 250
    check(sample, torch.float32)
    bias.fill_(-torch.inf)
    loss, *_, sums = run(OP, *sample.inputs, **sample.attributes)
    assert loss.isnan() and torch.equal(sums, torch.full((5,), -torch.inf))


@pytest.mark.parametrize("mask", list(product((0, 1), repeat=5)))
def test_only_what_is_wanted_is_computed(mask: tuple[int, ...]) -> None:
    outputs = check(arguments(5, 3, 4, torch.float32, output_mask=mask), torch.float32)
    assert [output.numel() > 0 for output in outputs] == list(map(bool, mask))


X, W, T = torch.zeros(6, 4), torch.zeros(7, 4), torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((X, W[:, :3], T), {}, "linear_weight is float32(7,3); expected shape (C,4) with C > 0"),
        ((X, W, T[:5]), {}, "target is int64(5); expected int64(6), one class a row of input"),
        ((X, W, T + 7), {}, "target[0] is 7; expected a class in [0, 7) or ignore_index -100"),
        ((X, W, T, X[0]), {}, "linear_bias is float32(4); expected float32(7), one number a class"),
        ((X, W, T, None, W[:, 0].double()), {}, "weight is float64; expected float32, as input is float32"),
        (
            (X, W, T, None, None, X[:, 0]),
            {},
            "grad_loss is float32(6); expected shape () or (1), as reduction is 'mean'",
        ),
        (
            (X, W, T, None, None, None, X[:5, 0]),
            {},
            "grad_logsumexp is float32(5); expected float32(6), one value a row",
        ),
        ((X, W, T), {"softcap": -1.0}, "softcap is -1; expected 0 or a positive number"),
        ((X, W, T), {"output_mask": (1, 0)}, "output_mask is [1, 0]; expected 5 numbers, 0 or 1"),
    ],
)
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
