"""Losses and parts of attention in gradfuse.torch, against those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ctc_samples import Sample, sample, samples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operators.cross_entropy_loss_grad import cross_entropy_loss_grad
from torch import Tensor
from torch.nn import functional as F

import gradfuse.torch
from gradfuse.testing import assert_gradients_close
from gradfuse.torch import CrossEntropyLoss, CTCLoss, cross_entropy, ctc_loss, grouped_bias_add, scaled_masked_softmax

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("none", "mean", "sum")


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def with_gradients(function: Callable[..., Tensor], *args: Any) -> list[Tensor]:
    """The result of a function, and the gradients w.r.t. its float arguments of a sum of the result, with weights."""
    leaves = [value.detach().requires_grad_() if is_float(value) else value for value in args]
    result = function(*leaves)
    weights = torch.linspace(-1.0, 2.0, result.numel(), dtype=torch.float64).reshape(result.shape).to(result.dtype)
    gradients = torch.autograd.grad(result, [leaf for leaf in leaves if is_float(leaf)], weights)
    return [result.detach(), *gradients]


def assert_like_torch(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *args: Any, terms: float = 0) -> None:
    """Values and gradients are no worse than PyTorch's of the same type, against PyTorch in float64.

    In the sums that make up a gradient, `terms` is the magnitude of what is added.
    """
    found = with_gradients(ours, *args)
    native = with_gradients(theirs, *args)
    exact = with_gradients(theirs, *(value.double() if is_float(value) else value for value in args))
    for actual, other, reference in zip(found, native, exact, strict=True):
        assert_gradients_close(actual, other, reference, other.dtype, terms=terms)


@given(inputs=samples(), reduction=st.sampled_from(REDUCTIONS), zero_infinity=st.booleans(), as_tuples=st.booleans())
@settings(max_examples=60)
def test_ctc_loss_is_that_of_torch(inputs: Sample, reduction: str, zero_infinity: bool, as_tuples: bool) -> None:
    log_probs, targets, *lengths = inputs.cast(torch.float32).tensors
    assume(log_probs.numel() and all(lengths[0].tolist()))  # PyTorch refuses the others
    given_lengths: Any = [tuple(length.tolist()) if as_tuples else length for length in lengths]
    options: dict[str, Any] = {"blank": inputs.blank, "reduction": reduction, "zero_infinity": zero_infinity}
    assert_like_torch(
        lambda x: ctc_loss(x, targets, *given_lengths, **options),
        lambda x: F.ctc_loss(x, targets, *given_lengths, **options),
        log_probs,
        terms=2.0,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lengths", [(6, 2), (torch.tensor(6), torch.tensor(2)), ((6,), (2,))], ids=str)
def test_ctc_loss_of_one_sequence(reduction: str, lengths: Any) -> None:
    inputs = sample(6, 4, [6], [2])
    log_probs, targets = inputs.log_probs[:, 0], inputs.targets[0]
    steps, labels = map(torch.as_tensor, lengths)  # PyTorch takes no plain numbers
    ours = ctc_loss(log_probs, targets, lengths[0], lengths[1], reduction=reduction)
    theirs = F.ctc_loss(log_probs, targets, steps, labels, reduction=reduction)
    exact = F.ctc_loss(log_probs.double(), targets, steps, labels, reduction=reduction)
    assert ours.shape == theirs.shape
    assert_gradients_close(ours, theirs, exact, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_log_probabilities_give_a_gradient_as_float32_does(dtype: torch.dtype) -> None:
    """Of long sequences, whose log_alpha is about -400: its rounding to 16 bits would be larger than the gradient."""
    inputs = sample(200, 8, [200, 180], [40, 30]).cast(dtype)
    rest = (inputs.targets, inputs.input_lengths, inputs.target_lengths)
    leaves = [inputs.log_probs.detach().to(wide).requires_grad_() for wide in (dtype, torch.float32)]
    losses = [ctc_loss(leaf, *rest, reduction="sum") for leaf in leaves]
    assert losses[0].dtype == torch.float32
    narrow, wide = (torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, leaves, strict=True))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(narrow, wide.to(dtype))


def test_gradcheck_of_ctc_loss() -> None:
    inputs = sample(5, 3, [5, 4], [2, 1])
    logits = inputs.log_probs.double().requires_grad_()
    for reduction in REDUCTIONS:
        assert torch.autograd.gradcheck(
            lambda x, reduction=reduction: ctc_loss(x.log_softmax(2), *inputs.tensors[1:], reduction=reduction), logits
        )


def test_ctc_loss_module_takes_the_place_of_that_of_torch() -> None:
    inputs = sample(6, 4, [6, 2], [2, 3], blank=3)
    options: dict[str, Any] = {"blank": 3, "reduction": "sum", "zero_infinity": True}
    ours, theirs = CTCLoss(**options), torch.nn.CTCLoss(**options)
    assert isinstance(ours, torch.nn.CTCLoss)
    assert repr(ours) == repr(theirs)
    assert_like_torch(
        lambda x: ours(x, *inputs.tensors[1:]), lambda x: theirs(x, *inputs.tensors[1:]), inputs.log_probs
    )


def test_ctc_loss_refuses_what_it_does_not_know() -> None:
    inputs = sample(6, 4, [6], [2])
    with pytest.raises(
        gradfuse.ArgumentError, match=r"^ctc_loss: reduction is 'average'; expected 'none' or 'mean' or"
    ):
        ctc_loss(*inputs.tensors, reduction="average")
    with pytest.raises(gradfuse.ArgumentError, match=r"^aclnn::ctc_loss: target_lengths\[0\] is 3; expected"):
        ctc_loss(inputs.log_probs, inputs.targets, 6, 3)
    for lengths in ([5.5], torch.tensor([5.0]), [True]):
        with pytest.raises(gradfuse.ArgumentError, match=r"^ctc_loss: input_lengths is \w+; expected integers$"):
            ctc_loss(inputs.log_probs, inputs.targets, lengths, [2])  # type: ignore[arg-type]


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    weighted=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "reduction": st.sampled_from(REDUCTIONS),
            "ignore_index": st.sampled_from((-100, 0)),
            "label_smoothing": st.sampled_from((0.0, 0.1, 1.0)),
        }
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_cross_entropy_is_that_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, weighted: bool, options: dict[str, Any], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator).to(dtype)
    target = torch.randint(shape[1], shape[:1], generator=generator)
    weight = (torch.rand(shape[1], generator=generator) + 0.5).to(dtype) if weighted else None
    assert_like_torch(
        lambda x: cross_entropy(x, target, None if weight is None else weight.to(x), **options),
        lambda x: F.cross_entropy(x, target, None if weight is None else weight.to(x), **options),
        logits,
        terms=2.0,
    )


@pytest.mark.parametrize(
    "input, target",
    [
        (torch.randn(2, 3, 4), torch.tensor([[0, 1, 2, 0], [1, 1, 1, 1]])),
        (torch.randn(3), torch.tensor(1)),
        (torch.randn(2, 3), torch.full((2, 3), 1 / 3)),
        (torch.randn(2, 3), torch.tensor([0, 2], dtype=torch.uint8)),
    ],
)
def test_cross_entropy_leaves_to_torch_what_the_operator_does_not_take(input: Tensor, target: Tensor) -> None:
    found, expected = (with_gradients(lambda x, f=f: f(x, target), input) for f in (cross_entropy, F.cross_entropy))
    assert all(map(torch.equal, found, expected))


def test_cross_entropy_module_takes_the_place_of_that_of_torch() -> None:
    options: dict[str, Any] = {"weight": torch.tensor([1.0, 2.0, 3.0]), "reduction": "sum", "label_smoothing": 0.1}
    ours, theirs = CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    logits, target = torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 2])
    found, native = (with_gradients(lambda x, loss=loss: loss(x, target), logits) for loss in (ours, theirs))
    exact = with_gradients(lambda x: theirs.double()(x, target), logits.double())
    for actual, other, reference in zip(found, native, exact, strict=True):
        assert_gradients_close(actual, other, reference, torch.float32, terms=6.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_of_16_bits_is_the_operator_s_of_the_log_softmax_that_is_saved(
    dtype: torch.dtype, reduction: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, 50, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(50, (6,), generator=generator)
    weight = torch.rand(50, generator=generator).to(dtype)
    loss = cross_entropy(logits, target, weight, reduction=reduction)
    assert torch.equal(loss, F.cross_entropy(logits, target, weight, reduction=reduction))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    native, exact = (
        cross_entropy_loss_grad(
            torch.ones_like(loss), logits.detach().log_softmax(1), target, weight, reduction=reduction, dtype=type_
        )
        for type_ in (dtype, torch.float64)
    )
    assert_gradients_close(gradient, native, exact, dtype)


def plain_softmax(input: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = scale * input
    return (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1)


MASKS = [None, (2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (4, 5), (5,)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_scaled_masked_softmax_is_that_of_torch(dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = None if shape is None else torch.rand(shape, generator=generator) < 0.4
    if mask is not None:
        mask[..., 0] = False  # the result for a row without any score is NaN
    input = torch.randn(2, 3, 4, 5, generator=generator).to(dtype)
    assert_like_torch(scaled_masked_softmax, plain_softmax, input, mask, 0.3, terms=1.0)
    assert_like_torch(
        scaled_masked_softmax, plain_softmax, input.transpose(1, 2).contiguous().transpose(1, 2), mask, 0.3, terms=1.0
    )


def test_scaled_masked_softmax_of_rows_without_scores() -> None:
    input = torch.zeros(1, 1, 2, 3, requires_grad=True)
    result = scaled_masked_softmax(input, torch.tensor([[True], [False]]))
    assert bool(result[..., 0, :].isnan().all())
    (gradient,) = torch.autograd.grad(result[..., 1, 0].sum(), input)
    assert not gradient[..., 0, :].any()
    assert bool(gradient[..., 1, :].any())


def plain_bias_add(input: Tensor, bias: Tensor, offs: Tensor | None) -> Tensor:
    if offs is None:
        return input + bias[:, None]
    sizes = offs.diff(prepend=offs.new_zeros(1))
    return input + bias.repeat_interleave(sizes, 0)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    columns=st.integers(0, 4),
    dtype=st.sampled_from((*FLOATS, torch.float64)),
    index_type=st.sampled_from((torch.int32, torch.int64)),
)
@settings(max_examples=40)
def test_grouped_bias_add_is_that_of_torch(
    sizes: list[int], columns: int, dtype: torch.dtype, index_type: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    offs = torch.tensor(sizes).cumsum(0).to(index_type)
    input = torch.randn(sum(sizes), columns, generator=generator).to(dtype)
    bias = torch.randn(len(sizes), columns, generator=generator).to(dtype)
    assert_like_torch(grouped_bias_add, plain_bias_add, input, bias, offs, terms=2.0 * max(sizes))
    blocks = torch.randn(len(sizes), 3, columns, generator=generator).to(dtype)
    assert_like_torch(grouped_bias_add, plain_bias_add, blocks, bias, None, terms=6.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: scaled_masked_softmax(torch.zeros(2, 3)),
            r"scaled_masked_softmax: input is of shape \(2, 3\); expect",
        ),
        (
            lambda: grouped_bias_add(torch.zeros(4, 2), torch.zeros(3, 2), torch.tensor([1, 4])),
            r"grouped_bias_add: shape of input and bias is \(4, 2\) and \(3, 2\); expected \(R, H\)",
        ),
        (lambda: grouped_bias_add(torch.zeros(4, 2), torch.zeros(4, 2)), r"grouped_bias_add: .*; expected \(G, C, H\)"),
        (
            lambda: grouped_bias_add(torch.zeros(1, 2), torch.zeros(2049, 2), torch.ones(2049).long()),
            "grouped_bias_add: offs is of 2049 groups; expected at most 2048",
        ),
    ],
)
def test_wrong_shapes_are_refused_before_the_backward_pass(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(gradfuse.ArgumentError, match=f"^{message}"):
        call()


def test_smoothing_that_is_no_share_is_what_torch_makes_of_it() -> None:
    logits, labels = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="label_smoothing must be between"):
        cross_entropy(logits, labels, label_smoothing=1.5)
    expected = F.cross_entropy(logits, labels, label_smoothing=-0.5)
    assert torch.equal(cross_entropy(logits, labels, label_smoothing=-0.5), expected)


def test_ends_of_groups_are_integers() -> None:
    with pytest.raises(gradfuse.ArgumentError, match=r"^grouped_bias_add: offs is float32; expected int32 or int64$"):
        grouped_bias_add(torch.zeros(4, 2), torch.zeros(2, 2), torch.tensor([1.0, 4.0]))


def test_groups_that_miss_rows_are_refused() -> None:
    bias = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises(IndexError):
        grouped_bias_add(torch.zeros(4, 2), bias, torch.tensor([1, 3]))
    with pytest.raises(gradfuse.ArgumentError, match=r"group_idx\[1\] is 5; expected 4"):
        grouped_bias_add(torch.zeros(4, 2), bias, torch.tensor([1, 5])).sum().backward()  # type: ignore[no-untyped-call]


def model(scores: Tensor, bias: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """A loss that goes through all functions: scores (T, N, C) and a bias (N, C)."""
    steps, items, _ = scores.shape
    mask = torch.arange(steps)[:, None] < torch.arange(steps)
    attention = scaled_masked_softmax(torch.einsum("tnc,snc->nts", scores, scores)[None], mask, 0.5)[0]
    mixed = grouped_bias_add(attention @ scores.transpose(0, 1), bias)
    rows = grouped_bias_add(mixed.reshape(items * steps, -1), bias, (torch.arange(items) + 1) * steps)
    log_probs = rows.reshape(items, steps, -1).transpose(0, 1).log_softmax(2)
    loss = ctc_loss(log_probs, labels, torch.full((items,), steps), lengths)
    return loss + cross_entropy(mixed[:, 0], labels[:, 0], label_smoothing=0.1)


def batch(steps: int, items: int, classes: int) -> tuple[Tensor, ...]:
    inputs = sample(steps, classes, [steps] * items, [1, 2] * (items // 2))
    return inputs.log_probs, inputs.log_probs[0], inputs.targets, inputs.target_lengths


def test_training_step_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in [(6, 4, 5), (8, 6, 7)]:
        found, expected = with_gradients(compiled, *batch(*size)), with_gradients(model, *batch(*size))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_step_under_autocast(dtype: torch.dtype) -> None:
    """The types are PyTorch's: a loss in float32, and each gradient in the type of what it belongs to."""
    scores, bias, *rest = batch(6, 4, 5)
    leaves = [scores.to(dtype).requires_grad_(), bias.requires_grad_()]
    with torch.autocast("cpu", dtype):
        assert scaled_masked_softmax(leaves[0][None]).dtype == torch.softmax(leaves[0], -1).dtype
        loss = model(*leaves, *rest)
    assert loss.dtype == torch.float32
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        assert gradient.dtype == leaf.dtype
        assert bool(gradient.isfinite().all() and gradient.any())


def gradient_of_scores(scores: Tensor, *rest: Tensor) -> Tensor:
    leaf = scores.detach().requires_grad_()
    return torch.autograd.grad(model(leaf, *rest), leaf)[0]


def test_gradients_of_a_batch_by_vmap() -> None:
    scores, bias, *rest = batch(6, 4, 5)
    several = torch.stack([scores, scores.flip(0)]).requires_grad_()
    losses = torch.vmap(lambda x: model(x, bias, *rest))(several)
    for element, found in zip(several, torch.autograd.grad(losses.sum(), several)[0], strict=True):
        exact = gradient_of_scores(element.double(), bias.double(), *rest)
        assert_gradients_close(found, gradient_of_scores(element, bias, *rest), exact, torch.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: scaled_masked_softmax(x[None]),
        lambda x: cross_entropy(x[0], torch.arange(4)),
        lambda x: model(x, *batch(6, 4, 5)[1:]),
    ],
)
def test_a_second_derivative_is_an_error(function: Callable[[Tensor], Tensor]) -> None:
    scores = batch(6, 4, 5)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(function(scores).square().sum(), scores, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"derivative for aclnn::.* is not implemented"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]
