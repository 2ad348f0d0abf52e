"""The kernel of CtcLoss: lengths, layouts and types of targets, alignments that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import assert_refused, assert_same_bits, run
from ctc_samples import TARGET_TYPES, Item, batch, batches, joined
from hypothesis import given, settings
from operators.ctc_loss import ctc_loss
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "CtcLoss"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check(*inputs: Tensor, blank: int = 0) -> None:
    dtype = inputs[0].dtype
    actual = run(OP, *inputs, blank=blank)
    native = ctc_loss(*inputs, blank=blank, dtype=dtype)
    reference = ctc_loss(inputs[0].double(), *inputs[1:], blank=blank)
    for got, other, exact in zip(actual, native, reference, strict=True):
        assert_gradients_close(got, other, exact, dtype)


@given(batch=batches(DTYPES))
@settings(max_examples=120, deadline=None)
def test_agrees_with_pytorch_and_is_minus_infinity_past_the_lengths(batch: tuple[Tensor, ...]) -> None:
    *inputs, blank = batch
    check(*inputs, blank=int(blank))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_the_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    inputs = batch([Item(60, 20), Item(60, 25), Item(41, 0), Item(60, 9)], steps=60, classes=30, dtype=dtype)
    check(*inputs)
    for one, two in zip(run(OP, *inputs), run(OP, *inputs, threads=2), strict=True):
        assert_same_bits(one, two)


@pytest.mark.parametrize("target_type", TARGET_TYPES)
def test_every_type_and_layout_of_targets(target_type: torch.dtype) -> None:
    log_probs, targets, *lengths = batch([Item(9, 3), Item(8, 2)], steps=9, classes=2, dtype=torch.float32)
    expected = run(OP, log_probs, targets, *lengths)
    for layout in (targets, joined(targets, lengths[1])):
        for out, same in zip(run(OP, log_probs, layout.to(target_type), *lengths), expected, strict=True):
            assert_same_bits(out, same)


def test_labels_that_equal_the_blank_are_labels_as_in_pytorch() -> None:
    log_probs, targets, *lengths = batch([Item(6, 3), Item(6, 2)], steps=6, classes=4, dtype=torch.float32)
    targets[:, 1] = 0
    check(log_probs, targets, *lengths)


def test_infeasible_empty_and_without_steps() -> None:
    items = [Item(2, 3), Item(4, 0), Item(0, 0), Item(0, 2)]
    inputs = batch(items, steps=4, classes=5, dtype=torch.float32)
    for zero_infinity in (0, 1):
        nll, _ = run(OP, *inputs, zero_infinity=zero_infinity)
        assert nll[[0, 3]].isposinf().all() and nll[1].isfinite()
        assert_same_bits(nll[2], torch.tensor(0.0))
    check(*inputs)


@pytest.mark.parametrize("items, steps", [(0, 5), (0, 0), (2, 0)])
def test_no_items_and_no_steps(items: int, steps: int) -> None:
    lengths = torch.zeros(items, dtype=torch.int64)
    nll, alpha = run(OP, torch.zeros(steps, items, 3), torch.zeros(items, 0, dtype=torch.int64), lengths, lengths)
    assert nll.shape == (items,) and alpha.shape == (items, steps, 1)
    assert (nll == 0).all()


@pytest.mark.parametrize("bad", (torch.nan, -torch.inf))
def test_nan_and_infinity(bad: float) -> None:
    log_probs, *rest = batch([Item(6, 2), Item(6, 2)], steps=6, classes=4, dtype=torch.float32)
    log_probs[2, 0] = bad
    check(log_probs, *rest)


def refused(message: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return message, changes


BAD_ARGUMENTS = [
    refused("log_probs is float32(5,3); expected 3 dimensions (T,N,C)", log_probs=torch.zeros(5, 3)),
    refused("log_probs is float32(0,2,2147483648); expected at most 2147483647 classes",
            log_probs=torch.zeros(0, 2, 2**31)),
    refused("blank is 4; expected a class in [0, 4)", blank=4),
    refused("blank is -1; expected a class in [0, 4)", blank=-1),
    refused("zero_infinity is 2; expected 0 or 1", zero_infinity=2),
    refused("targets is int64(3,2); expected shape (2,S), a row an item, or all labels joined in one dimension",
            targets=torch.ones(3, 2, dtype=torch.int64)),
    refused("targets is int64(2); expected at least 3 labels, the sum of target_lengths",
            targets=torch.ones(2, dtype=torch.int64)),
    refused("targets is int64(4); expected 3 labels, the sum of target_lengths",
            targets=torch.ones(4, dtype=torch.int64)),
    refused("targets[1,0] is 4; expected a class in [0, 4)", targets=torch.tensor([[1, 2], [4, 9]])),
    refused("targets[2] is -1; expected a class in [0, 4)", targets=torch.tensor([1, 2, -1])),
    refused("targets[0,1] is 1.5; expected a class in [0, 4)", targets=torch.tensor([[1, 1.5], [1, torch.nan]])),
    refused("targets[0,0] is nan; expected a class in [0, 4)",
            targets=torch.tensor([[torch.nan, 1], [1, 1]], dtype=torch.float16)),
    refused("input_lengths is int64(1); expected int64(2), one length an item", input_lengths=torch.tensor([5])),
    refused("input_lengths[1] is 6; expected a length in [0, 5]", input_lengths=torch.tensor([5, 6])),
    refused("input_lengths[0] is -1; expected a length in [0, 5]", input_lengths=torch.tensor([-1, 5])),
    refused("target_lengths is int64(3); expected int64(2), one length an item",
            target_lengths=torch.tensor([2, 1, 0])),
    refused("target_lengths[0] is 3; expected a length in [0, 2], as targets is int64(2,2)",
            target_lengths=torch.tensor([3, 1])),
    refused("target_lengths[1] is -1; expected a length in [0, 2], as targets is int64(2,2)",
            target_lengths=torch.tensor([2, -1])),
    refused(f"target_lengths[0] is {2**62}; expected a length in [0, 2], as targets is int64(2,2)",
            target_lengths=torch.tensor([2**62, 2**62])),
]  # fmt: skip


@pytest.mark.parametrize("message, changes", BAD_ARGUMENTS)
def test_bad_arguments(message: str, changes: dict[str, Any]) -> None:
    log_probs, targets, input_lengths, target_lengths = batch(
        [Item(5, 2), Item(5, 1)], steps=5, classes=4, dtype=torch.float32
    )
    inputs = {
        "log_probs": log_probs,
        "targets": targets,
        "input_lengths": input_lengths,
        "target_lengths": target_lengths,
    }
    attributes = {name: value for name, value in changes.items() if name not in inputs}
    changed = [changes.get(name, value) for name, value in inputs.items()]
    assert_refused(OP, message, changed, attributes)
