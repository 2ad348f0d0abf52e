"""The kernel of CtcLossBackward: lengths, layouts and types of targets, alignments that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, CUDA_SIMT, assert_refused, assert_same_bits, run
from ctc_samples import TARGET_TYPES, Item, batch, batches, joined
from hypothesis import given, settings
from operators.ctc_loss import ctc_loss
from operators.ctc_loss_backward import ctc_loss_backward
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "CtcLossBackward"
WIDE = (torch.float32, torch.float64)
NARROW = (torch.float16, torch.bfloat16)


def inputs_of(forward_inputs: Sequence[Tensor], blank: int = 0) -> list[Tensor]:
    """The operator's inputs after PyTorch's forward pass, with NaN wherever log_alpha is not to be read."""
    log_probs, *rest = forward_inputs
    _, input_lengths, target_lengths = rest
    nll, alpha = ctc_loss(log_probs, *rest, blank=blank, dtype=log_probs.dtype)
    steps = torch.arange(alpha.shape[1])[None, :, None] < input_lengths[:, None, None]
    states = torch.arange(alpha.shape[2])[None, None, :] <= 2 * target_lengths[:, None, None]
    poisoned = alpha.masked_fill(~(steps & states), torch.nan)
    grad_out = torch.linspace(-1.0, 2.0, log_probs.shape[1]).to(log_probs.dtype)
    return [grad_out, log_probs, *rest, nll, poisoned]


def check(*inputs: Tensor, blank: int = 0, zero_infinity: int = 0) -> Tensor:
    options = {"blank": blank, "zero_infinity": zero_infinity}
    (actual,) = run(OP, *inputs, **options)
    dtype = actual.dtype
    native = ctc_loss_backward(*inputs[:5], blank=blank, zero_infinity=bool(zero_infinity), dtype=dtype)
    wide = [tensor.double() if tensor.dtype == dtype else tensor for tensor in inputs[:5]]
    reference = ctc_loss_backward(*wide, blank=blank, zero_infinity=bool(zero_infinity))
    terms = inputs[0].double().abs()[None, :, None].expand(actual.shape)
    if dtype == torch.float64:
        # The reference has no wider type: it carries the roundings of log_alpha, at every step, too.
        terms = terms * len(actual) * inputs[6].nan_to_num(0, 0, 0).abs().max()
    assert_gradients_close(actual, native, reference, dtype, terms=terms.numpy())
    return actual


@given(batch=batches(WIDE))
@settings(max_examples=150, deadline=None)
def test_agrees_with_pytorch_and_reads_nothing_past_the_lengths(batch: tuple[Tensor, ...]) -> None:
    *inputs, blank = batch
    for zero_infinity in (0, 1):
        check(*inputs_of(inputs, blank=int(blank)), blank=int(blank), zero_infinity=zero_infinity)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("classes", (30, 2001))
def test_large_and_the_same_bits_for_any_number_of_threads(dtype: torch.dtype, classes: int) -> None:
    items = [Item(90, 20), Item(90, 25), Item(61, 0), Item(90, 9)]
    inputs = inputs_of(batch(items, steps=90, classes=classes, dtype=dtype))
    check(*inputs)
    assert_same_bits(*run(OP, *inputs), *run(OP, *inputs, threads=2))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_types_are_as_good_as_their_log_alpha(dtype: torch.dtype) -> None:
    inputs = inputs_of(batch([Item(12, 3), Item(9, 4)], steps=12, classes=6, dtype=dtype))
    (out,) = run(OP, *inputs)
    assert out.dtype == dtype
    exact = ctc_loss_backward(inputs[0].double(), inputs[1].double(), *inputs[2:5])
    largest = inputs[6].double().nan_to_num(0, 0, 0).abs().max()
    assert (out.double() - exact).abs().max() < torch.finfo(dtype).eps * (1 + largest) * inputs[0].abs().max()
    assert (out.double() - exact).abs().max() < 0.1


@pytest.mark.parametrize("target_type", TARGET_TYPES)
def test_every_type_and_layout_of_targets(target_type: torch.dtype) -> None:
    inputs = inputs_of(batch([Item(9, 3), Item(8, 2)], steps=9, classes=2, dtype=torch.float32))
    (expected,) = run(OP, *inputs)
    for layout in (inputs[2], joined(inputs[2], inputs[4])):
        (out,) = run(OP, *inputs[:2], layout.to(target_type), *inputs[3:])
        assert_same_bits(out, expected)


def test_labels_that_equal_the_blank_are_labels_as_in_pytorch() -> None:
    """But as the last label: there PyTorch's own backward drops the path that ends in the blank itself."""
    forward_inputs = batch([Item(6, 3), Item(5, 3)], steps=6, classes=4, dtype=torch.float32)
    forward_inputs[1][:, 1] = 0
    check(*inputs_of(forward_inputs))


def test_log_alpha_may_be_wider_than_it_needs() -> None:
    inputs = inputs_of(batch([Item(9, 3), Item(8, 2)], steps=9, classes=5, dtype=torch.float32))
    wide = torch.nn.functional.pad(inputs[6], (0, 5), value=torch.nan)
    assert_same_bits(*run(OP, *inputs[:6], wide), *run(OP, *inputs))


@pytest.mark.parametrize("dtype", (*WIDE, *NARROW))
def test_infeasible_items(dtype: torch.dtype) -> None:
    inputs = inputs_of(batch([Item(3, 3), Item(2, 3), Item(0, 1)], steps=4, classes=5, dtype=dtype))
    inputs[2][0] = torch.tensor([1, 1, 2])  # a repeated label needs a blank between: four steps
    inputs = inputs_of(inputs[1:5])
    (out,) = run(OP, *inputs, zero_infinity=0)
    assert out[:3, 0].isnan().all() and out[:2, 1].isnan().all()
    for rest in (out[3:, 0], out[2:, 1], out[:, 2]):
        assert_same_bits(rest, torch.zeros_like(rest))
    (out,) = run(OP, *inputs, zero_infinity=1)
    assert_same_bits(out, torch.zeros_like(out))


def test_class_that_no_label_uses_and_that_cannot_be_gets_zero() -> None:
    inputs = inputs_of(batch([Item(6, 2)], steps=6, classes=4, dtype=torch.float32))
    inputs[2][0] = torch.tensor([1, 2])
    inputs[1][:, :, 3] = -torch.inf
    inputs = inputs_of(inputs[1:5])
    out = check(*inputs)
    assert (out[:, :, 3] == 0).all() and out.isfinite().all()


def test_nan_reaches_its_own_item_only() -> None:
    log_probs, *rest = batch([Item(6, 2), Item(6, 2), Item(6, 2)], steps=6, classes=4, dtype=torch.float32)
    log_probs[2, 0] = torch.nan
    rest[0][1] = torch.tensor([1, 2])
    log_probs[2, 1, 3] = torch.nan  # of a class that the item does not use
    out = check(*inputs_of([log_probs, *rest]))
    assert out[:, 0].isnan().all() and out[:, 2].isfinite().all()
    assert out[:, 1].isnan().nonzero().tolist() == [[2, 3]]


def test_sure_paths_do_not_cancel_and_long_ones_do_not_drift() -> None:
    """Peaky log-probabilities over a thousand steps: most posteriors are subnormal or nothing."""
    steps, classes = 1000, 12
    log_probs, *rest = batch([Item(steps, 100)], steps=steps, classes=classes, dtype=torch.float32)
    peaky = (log_probs.double() * 40).log_softmax(2).float()
    check(*inputs_of([peaky, *rest]))


@pytest.mark.parametrize("items, steps", [(0, 5), (0, 0), (2, 0)])
def test_no_items_and_no_steps(items: int, steps: int) -> None:
    lengths = torch.zeros(items, dtype=torch.int64)
    per_item = torch.zeros(items)
    (out,) = run(OP, per_item, torch.zeros(steps, items, 3), torch.zeros(items, 0, dtype=torch.int64), lengths, lengths,
                 per_item, torch.zeros(items, steps, 1))  # fmt: skip
    assert out.shape == (steps, items, 3)


NAMES = (
    "grad_out", "log_probs", "targets", "input_lengths", "target_lengths", "neg_log_likelihood", "log_alpha",
)  # fmt: skip


@pytest.mark.parametrize(
    "message, changes",
    [
        ("grad_out is float32(3); expected float32(2), one value an item", {"grad_out": torch.ones(3)}),
        ("neg_log_likelihood is float32(2,1); expected float32(2), one value an item",
         {"neg_log_likelihood": torch.ones(2, 1)}),
        ("targets[0,0] is 4; expected a class in [0, 4)", {"targets": torch.tensor([[4, 1], [1, 1]])}),
        ("input_lengths[1] is 6; expected a length in [0, 5]", {"input_lengths": torch.tensor([5, 6])}),
        ("blank is 4; expected a class in [0, 4)", {"blank": 4}),
    ],
)  # fmt: skip
def test_bad_arguments(message: str, changes: dict[str, Any]) -> None:
    inputs = inputs_of(batch([Item(5, 2), Item(5, 1)], steps=5, classes=4, dtype=torch.float32))
    attributes = {name: value for name, value in changes.items() if name not in NAMES}
    changed = [changes.get(name, value) for name, value in zip(NAMES, inputs, strict=True)]
    assert_refused(OP, message, changed, attributes)


def test_log_alpha_of_the_wrong_shape(device: str) -> None:
    inputs = inputs_of(batch([Item(5, 2), Item(5, 1)], steps=5, classes=4, dtype=torch.float32))
    wanted = f"shape (2,5,X) with X at least {'5, ' if device == CPU else ''}twice the longest target and one"
    assert_refused(OP, f"log_alpha is float32(2,4,5); expected {wanted}", [*inputs[:6], torch.zeros(2, 4, 5)], {})
    narrow = (
        "target_lengths[0] is too long" if device == CUDA_SIMT else "log_alpha is float32(2,5,4); expected " + wanted
    )
    assert_refused(OP, narrow, [*inputs[:6], torch.zeros(2, 5, 4)], {})


@pytest.mark.parametrize("device", [CUDA_SIMT], indirect=True)
def test_values_out_of_range_spoil_their_own_item_where_no_check_can_read_them() -> None:
    inputs = inputs_of(batch([Item(5, 2), Item(5, 1), Item(4, 2)], steps=5, classes=4, dtype=torch.float32))
    (expected,) = run(OP, *inputs)
    for index, value in ((2, 4), (2, -1), (3, 6), (3, -1), (4, 3), (4, -(2**62)), (4, 2**62)):
        bad = [tensor.clone() for tensor in inputs]
        bad[index][0, ...] = value
        (out,) = run(OP, *bad)
        assert_same_bits(out[:, 1:], expected[:, 1:])
        length = 5 if index == 3 else int(inputs[3][0])
        assert out[:length, 0].isnan().all()
        with pytest.raises(Exception, match="is out of range in an earlier run"):
            run(OP, *inputs)
    for lengths in ([2, 2, 2], [2, 0, 2], [2**62, 2**62, 2**62]):
        line = joined(inputs[2], inputs[4])
        run(OP, *inputs[:2], line, inputs[3], torch.tensor(lengths), *inputs[5:])
        with pytest.raises(Exception, match="is out of range in an earlier run"):
            run(OP, *inputs[:2], line, *inputs[3:])
