"""LinearCrossEntropy: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered

IGNORED = -100
REDUCTIONS = ("none", "mean", "sum")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    grad_loss: Tensor | None = None,
    grad_logsumexp: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    output_mask: Sequence[bool] = (True, True, True, True, False),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """``F.cross_entropy`` of ``F.linear``, and autograd's gradients w.r.t. input, linear_weight and linear_bias.

    The gradients of ``logsumexp`` of the logits are added to them. Where all rows are ignored, those of the loss are 0,
    not NaN as PyTorch's. What is not wanted is of shape (0).
    """
    work = working_type(dtype)
    label_smoothing = torch.tensor(label_smoothing).item()  # an attribute has float32's digits
    x, w = (one.to(work).clone().contiguous().requires_grad_() for one in (input, linear_weight))
    given = torch.zeros(w.shape[0]) if linear_bias is None else linear_bias
    bias = given.to(work).clone().contiguous().requires_grad_()
    logits = torch.nn.functional.linear(x, w, bias)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    loss = torch.nn.functional.cross_entropy(
        logits, target.contiguous(), None if weight is None else weight.to(work), reduction=reduction,
        ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip
    logsumexp = logits.logsumexp(1)
    of_sums = torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp.to(work)
    factor = torch.ones_like(loss) if grad_loss is None else grad_loss.to(work).reshape(loss.shape)
    if bool((target == ignore_index).all()):
        gradients = torch.autograd.grad(logsumexp, (x, w, bias), of_sums)
    else:
        gradients = torch.autograd.grad((loss, logsumexp), (x, w, bias), (factor, of_sums))
    outputs = (loss.detach(), *gradients, logsumexp.detach())
    return tuple(
        one.to(dtype) if wanted else torch.zeros(0, dtype=dtype)
        for one, wanted in zip(outputs, output_mask, strict=True)
    )


def arguments(
    rows: int,
    features: int,
    classes: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    weighted: bool = True,
    graded: bool = True,
    summed: bool = False,
    ignored: float = 0.3,
    seed: int = 0,
    **attributes: Any,
) -> Sample:
    """Tensors of a step, of whose rows a share is ignored, though never the first; `summed`: with logsumexp."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator).to(dtype)
    w = (2 * torch.randn(classes, features, generator=generator) / max(features, 1) ** 0.5).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[1:][torch.rand(max(rows - 1, 0), generator=generator) < ignored] = attributes.get("ignore_index", IGNORED)
    b = torch.randn(classes, generator=generator).to(dtype) if bias else None
    class_weight = torch.rand(classes, generator=generator) + 0.5 if weighted else None
    if class_weight is not None and dtype == torch.float64:
        class_weight = class_weight.double()
    shape = (rows,) if attributes.get("reduction") == "none" else ()
    grad = torch.linspace(-1.0, 2.0, rows) if shape else torch.tensor(1.5)
    inputs = [x, w, target, b, class_weight, grad.to(dtype) if graded else None]
    inputs.append(torch.linspace(-0.5, 1.0, rows).to(dtype) if summed else None)
    if summed:
        attributes.setdefault("output_mask", (1, 1, 1, 1, 1))
    return with_terms(inputs, attributes)


def with_terms(inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> Sample:
    """A sample with the largest sum of magnitudes that any result adds up, and what rounding logits makes of it."""
    x, w, target, bias, weight, grad, of_sums = inputs
    assert x is not None and w is not None and target is not None
    if x.shape[0] == 0:
        return Sample(inputs, attributes)
    wide = [x.double().abs(), w.double().abs()]
    weights = torch.ones(len(w)) if weight is None else weight.double()
    kept = target[target != attributes.get("ignore_index", IGNORED)]
    total = float(weights[kept].sum()) if attributes.get("reduction", "mean") == "mean" and len(kept) else 1.0
    # Of a row, the gradient of a logit is a difference of numbers that are no larger than these.
    of_loss = 2 * float(weights.max()) * (1.0 if grad is None else float(grad.abs().max())) / total
    largest = of_loss + (0.0 if of_sums is None else float(of_sums.abs().max())) * torch.ones(len(w)).double()
    size = x.shape[0]
    logits = float((wide[0] @ wide[1].T).max()) + (0.0 if bias is None else float(bias.double().abs().max()))
    of_input = float((largest[None] @ wide[1]).max()) if w.shape[1] else 0.0
    of_weight = float((largest[:, None] * wide[0].sum(0)).max()) if w.shape[1] else 0.0
    of_bias = float(largest.max()) * size
    loss = logits * (size if attributes.get("reduction") == "sum" else 1)
    return Sample(inputs, attributes, max(of_input, of_weight, of_bias, loss) * (1 + logits))


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    reduction = rng.choice(REDUCTIONS)
    sample = arguments(
        rng.randint(1, 6), rng.randint(1, 7), rng.randint(1, 8), dtype, bias=rng.random() < 0.5,
        weighted=rng.random() < 0.5, graded=rng.random() < 0.5, seed=rng.randint(0, 2**30), reduction=reduction,
        label_smoothing=rng.choice((0.0, 0.25)), softcap=rng.choice((0.0, 2.0)), summed=rng.random() < 0.5,
        output_mask=tuple(rng.randint(0, 1) for _ in range(5)),
    )  # fmt: skip
    views = [
        None if tensor is None else scattered(tensor, rng) if index in (0, 2, 5, 6) else repeated(tensor, rng)
        for index, tensor in enumerate(sample.inputs)
    ]
    return with_terms(views, dict(sample.attributes))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments(size, 7, 5, dtype, label_smoothing=0.1)


def _typical(dtype: torch.dtype) -> list[Sample]:
    return [
        arguments(9, 20, 70, dtype, bias=False, weighted=False, graded=False),
        arguments(9, 20, 70, dtype, weighted=False, reduction="none", output_mask=(1, 1, 0, 1, 0)),
        arguments(7, 33, 40, dtype, reduction="sum", softcap=3.0, output_mask=(0, 0, 1, 1, 0)),
        arguments(12, 5, 270, dtype, label_smoothing=0.1, bias=False, output_mask=(1, 1, 1, 0, 0)),
        arguments(6, 8, 30, dtype, label_smoothing=1.0, weighted=False, softcap=2.0, reduction="none", ignore_index=4),
        arguments(5, 4, 3, dtype, output_mask=(1, 0, 0, 0, 0), reduction="none"),
        arguments(9, 12, 70, dtype, label_smoothing=0.1, softcap=2.0, summed=True),
        arguments(5, 7, 33, dtype, graded=False, output_mask=(1, 0, 0, 0, 1), summed=True),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments(3, 5, width, dtype, label_smoothing=0.1),
        arguments(3, width, 6, dtype, softcap=2.0),
        arguments(width, 6, 4, dtype, weighted=False),
    ]


def _valid() -> Sample:
    return arguments(4, 3, 5, torch.float32, ignored=0.0, reduction="none", summed=True)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    f16, f32, f64 = torch.float16, torch.float32, torch.float64
    yield from near.without(0, 1, 2)
    for index in (0, 1, 3, 5, 6):
        yield from near.retyped(index, f16, f64, torch.int64)
    yield from near.retyped(2, torch.int32, f32, torch.bool)
    yield from near.retyped(4, f16, f64, torch.int64)
    yield from near.all_retyped((0, 1, 3, 5, 6), torch.int32)
    yield from near.reshaped(0, (4,), (4, 2), (3, 3), (4, 3, 1), (), (1,) * 9)
    yield from near.reshaped(1, (5,), (5, 4), (0, 3), (5, 3, 1), (6, 3))
    yield from near.reshaped(2, (5,), (4, 1), (), (0,))
    for index in (3, 4):
        yield from near.reshaped(index, (4,), (5, 1), (), (0,), (1,))
    for index in (5, 6):
        yield from near.reshaped(index, (), (1,), (5,), (4, 1))
    yield from near.reshaped(5, (4,), (2,), (1, 1), (0,), reduction="mean")
    for class_ in (-1, 5, 2**40, -(2**63)):
        yield from near.changed(2, torch.tensor([class_, 0, 0, 0]), torch.tensor([0, 0, 0, class_]))
    yield from near.with_attributes("reduction", "max", "", "Mean", "x" * 1000)
    yield from near.with_attributes("label_smoothing", -0.125, 1.5, float("nan"))
    yield from near.with_attributes("softcap", -1.0, float("nan"), float("inf"))
    yield from near.with_attributes(
        "output_mask", (1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 2), (1, 1, 1, 1, 1, 1), (-1, 1, 1, 1, 1)
    )


SAMPLES = Samples(
    oracle=linear_cross_entropy,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    rows=_rows,
    empty=[
        (arguments(0, 4, 3, torch.float32, reduction="sum"), [(), (0, 4), (3, 4), (3,), (0,)]),
        (arguments(0, 4, 3, torch.float32, reduction="none", bias=False), [(0,), (0, 4), (3, 4), (3,), (0,)]),
    ],
)
