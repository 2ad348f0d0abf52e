"""Inputs of the six operators of any strides that are not negative, with PyTorch's answers: for the tests of views."""

from __future__ import annotations

import random
from collections.abc import Callable

import oracles
import torch
from torch import Tensor

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
