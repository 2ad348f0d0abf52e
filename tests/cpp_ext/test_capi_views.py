"""Views of the C API: any strides that are not negative, of inputs and outputs, against PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import oracles
import pytest
import torch
from cpp_ext.single_node import FLOATS, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpp_ext import capi
from gradfuse.testing import assert_gradients_close

Sample = tuple[list[Tensor | None], dict[str, object], Callable[[torch.dtype], list[Tensor]], Tensor]
"""Inputs, attributes, the oracle of the outputs in a type, and the magnitude of what sums add up."""

POISON = 77


def scattered(tensor: Tensor, rng: random.Random) -> Tensor:
    """The values of a tensor at odd places of a larger memory: dimensions in any order, gaps, an offset."""
    order = rng.sample(range(tensor.dim()), tensor.dim())
    strides = [0] * tensor.dim()
    step = rng.randint(1, 3)
    for axis in order:
        strides[axis] = step
        step *= max(tensor.shape[axis], 1) * rng.randint(1, 2) + rng.randint(0, 1)
    offset = rng.randint(0, 5)
    memory = torch.full((offset + step + 5,), POISON).to(tensor.dtype)
    view = memory.as_strided(tensor.shape, strides, offset)
    return view.copy_(tensor)


def repeated(tensor: Tensor, rng: random.Random) -> Tensor:
    """A tensor that is the same along some dimensions, which have stride 0."""
    narrow = tensor
    for axis in range(tensor.dim()):
        if tensor.shape[axis] and rng.random() < 0.4:
            narrow = narrow.narrow(axis, 0, 1)
    return scattered(narrow, rng).expand(tensor.shape)


def mse(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(0 if rng.random() < 0.1 else 1, 5) for _ in range(rng.randint(0, 5))]
    inputs = [repeated(torch.randn(shape).to(dtype), rng) for _ in range(3)]
    for index in range(3):  # those of fewer dimensions broadcast
        inputs[index] = inputs[index][(0,) * rng.randint(0, len(shape))] if 0 not in shape else inputs[index]
    whole = rng.randrange(3)
    inputs[whole] = scattered(torch.randn(shape).to(dtype), rng)
    reduction = rng.randrange(3)
    return (
        list(inputs),
        {"reduction": reduction},
        lambda type_: [oracles.mse_loss_backward(*inputs, reduction=reduction, dtype=type_)],
        torch.zeros(()),
    )


def cross_entropy(rng: random.Random, dtype: torch.dtype) -> Sample:
    rows, classes = rng.randint(1, 6), rng.randint(1, 7)
    reduction = rng.choice(oracles.REDUCTIONS)
    grad = torch.randn((rows,) if reduction == "none" else ()).to(dtype)
    log_prob = scattered(torch.randn(rows, classes).log_softmax(1).to(dtype), rng)
    target = repeated(torch.randint(0, classes, (rows,)), rng)
    weight = repeated(torch.rand(classes) + 0.5, rng)
    smoothing = rng.choice((0.0, 0.25))
    attributes = {"reduction": reduction, "label_smoothing": smoothing}
    inputs = [scattered(grad, rng), log_prob, target, weight]
    return (
        list(inputs),
        dict(attributes),
        lambda type_: [
            oracles.cross_entropy_loss_grad(*inputs, reduction=reduction, label_smoothing=smoothing, dtype=type_)
        ],
        torch.zeros(()),
    )


def softmax(rng: random.Random, dtype: torch.dtype) -> Sample:
    shape = [rng.randint(1, 4) for _ in range(4)]
    grad = repeated(torch.randn(shape).to(dtype), rng)
    y = scattered(torch.randn(shape).softmax(3).to(dtype), rng)
    mask = repeated(torch.rand(shape) < 0.4, rng)
    return (
        [grad, y, mask],
        {"scale": 0.5},
        lambda type_: [oracles.scaled_masked_softmax_backward(grad, y, mask, scale=0.5, dtype=type_)],
        (grad.double() * y.double()).abs().sum(-1, keepdim=True),
    )


def grouped_bias(rng: random.Random, dtype: torch.dtype) -> Sample:
    group_idx = None
    if rng.random() < 0.5:
        grad = repeated(torch.randn([rng.randint(1, 6) for _ in range(3)]).to(dtype), rng)
    else:
        rows = rng.randint(1, 9)
        grad = repeated(torch.randn(rows, rng.randint(1, 5)).to(dtype), rng)
        ends = torch.tensor([*sorted(rng.randint(0, rows) for _ in range(3)), rows])
        group_idx = scattered(ends.to(rng.choice((torch.int32, torch.int64))), rng)
    return (
        [grad, group_idx],
        {},
        lambda type_: [oracles.grouped_bias_add_grad(grad, group_idx, dtype=type_)],
        oracles.grouped_bias_add_grad(grad.abs(), group_idx),
    )


def ctc_arguments(rng: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, items, classes = rng.randint(4, 7), rng.randint(1, 3), rng.randint(2, 5)
    target_lengths = torch.tensor([rng.randint(0, 2) for _ in range(items)])
    input_lengths = torch.tensor([rng.randint(4, steps) for _ in range(items)])
    log_probs = scattered(torch.randn(steps, items, classes).log_softmax(2).to(dtype), rng)
    targets = scattered(torch.randint(1, classes, (items, 2)), rng)
    return log_probs, targets, input_lengths, target_lengths


def ctc(rng: random.Random, dtype: torch.dtype) -> Sample:
    inputs = ctc_arguments(rng, dtype)
    return list(inputs), {}, lambda type_: list(oracles.ctc_loss(*inputs, dtype=type_)), torch.zeros(())


def ctc_backward(rng: random.Random, dtype: torch.dtype) -> Sample:
    inputs = ctc_arguments(rng, dtype)
    grad = repeated(torch.randn(len(inputs[2])).to(dtype), rng)
    loss, alpha = (scattered(value, rng) for value in oracles.ctc_loss(*inputs, dtype=dtype))
    return (
        [grad, *inputs, loss, alpha],
        {},
        lambda type_: [oracles.ctc_loss_backward(grad, *inputs, dtype=type_)],
        grad.double().abs()[None, :, None],
    )


SAMPLES = {
    "MseLossBackward": mse,
    "CrossEntropyLossGrad": cross_entropy,
    "ScaledMaskedSoftmaxBackward": softmax,
    "GroupedBiasAddGrad": grouped_bias,
    "CtcLoss": ctc,
    "CtcLossBackward": ctc_backward,
}


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, POISON, memory_format=torch.contiguous_format)


def memory_of(view: Tensor) -> Tensor:
    """All of the memory that a view lies in."""
    size = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((size,), (1,), 0)


def check(op: str, dtype: torch.dtype, rng: random.Random) -> None:
    inputs, attributes, oracle, terms = SAMPLES[op](rng, dtype)
    references, natives = oracle(torch.float64), oracle(dtype)
    outputs = [scattered(poisoned(native), rng) for native in natives]
    capi.run(op, inputs, outputs, **attributes)
    for output, native, reference in zip(outputs, natives, references, strict=True):
        assert_gradients_close(output, native, reference, dtype, terms=terms.numpy())
    # Dense copies of the same give the same bits, and nothing beside the outputs was written.
    dense = [poisoned(native) for native in natives]
    capi.run(op, [None if value is None else value.contiguous() for value in inputs], dense, **attributes)
    for output, expected in zip(outputs, dense, strict=True):
        assert_same_bits(output, expected)
        output.fill_(POISON)
        assert bool((memory_of(output) == POISON).all())


@pytest.mark.parametrize("op", SAMPLES)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(FLOATS))
@settings(max_examples=25)
def test_any_strides_give_what_dense_tensors_give(op: str, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    check(op, torch.float32 if op.startswith("Ctc") else dtype, random.Random(seed))


def test_large_views_are_packed_by_all_threads() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(700, 600).t(), torch.randn(600, 1).expand(600, 700), torch.randn(1200, 700)[::2]]
    output = torch.full((700, 1200), float(POISON)).t()[::2]
    capi.run("MseLossBackward", inputs, [output], reduction=0)
    assert_gradients_close(
        output,
        oracles.mse_loss_backward(*inputs, reduction=0, dtype=torch.float32),
        oracles.mse_loss_backward(*inputs, reduction=0),
        torch.float32,
    )


def overlapping() -> Sequence[Callable[[Tensor], tuple[list[Tensor], Tensor]]]:
    return (
        lambda memory: ([memory[:6], memory[6:12], memory[12:18]], memory[:6]),  # in place
        lambda memory: ([memory[:6], memory[6:12], memory[12:18]], memory[3:9]),  # across two inputs
        lambda memory: ([memory[0:12:2], memory[1:13:2], memory[12:18]], memory[0:12:2]),  # in place, with gaps
        lambda memory: ([memory[:6], memory[6:12], memory[:6]], memory[2:8]),
    )


@pytest.mark.parametrize("views", overlapping())
def test_an_output_may_lie_on_inputs(views: Callable[[Tensor], tuple[list[Tensor], Tensor]]) -> None:
    torch.manual_seed(0)
    inputs, output = views(torch.randn(20))
    expected = oracles.mse_loss_backward(*[value.clone() for value in inputs], reduction=1, dtype=torch.float32)
    capi.run("MseLossBackward", inputs, [output])
    torch.testing.assert_close(output, expected)


def test_elements_of_an_output_at_one_place_hold_one_of_their_values() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(300, 200) for _ in range(3)]
    output = torch.full((300, 1), float(POISON)).expand(300, 200)
    capi.run("MseLossBackward", inputs, [output], reduction=0)
    expected = torch.empty(300, 200)
    capi.run("MseLossBackward", inputs, [expected], reduction=0)
    assert bool((output == expected).any(1).all())
