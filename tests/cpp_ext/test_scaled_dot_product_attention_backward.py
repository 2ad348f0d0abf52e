"""The kernel of ScaledDotProductAttentionBackward: the borders of its blocks and tasks, threads, memory, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES, Sample, attention
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "ScaledDotProductAttentionBackward"
FORWARD = "ScaledDotProductAttention"
BORDERS = st.sampled_from((1, 2, 15, 17, 95, 96, 97, 191, 193, 250))
"""Of blocks of rows and of keys, and of vectors."""


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@pytest.mark.parametrize("device", [CPU], indirect=True)
@given(
    heads=st.sampled_from(((1, 1, 1), (2, 1, 3), (1, 2, 2), (1, 1, 20))),
    rows=BORDERS,
    keys=BORDERS,
    widths=st.sampled_from(((1, 1), (8, 5), (17, 64), (64, 33), (257, 16))),
    mask=st.sampled_from(("", "shown", "added")),
    axes=st.lists(st.booleans(), min_size=2, max_size=4),
    causal=st.integers(0, 2),
    dropped=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16)),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_pytorch(
    heads: tuple[int, int, int],
    rows: int,
    keys: int,
    widths: tuple[int, int],
    mask: str,
    axes: list[bool],
    causal: int,
    dropped: bool,
    dtype: torch.dtype,
) -> None:
    batch, groups, shared = heads
    whole = (batch, groups * shared, rows, keys)[4 - len(axes) :]
    shape = [size if full else 1 for size, full in zip(whole, axes, strict=True)]
    sizes = (batch, groups * shared, groups, rows, keys, *widths)
    options = {"dropout_threshold": attention.THRESHOLD} if dropped else {}
    check(attention.backward_arguments(sizes, dtype, mask=mask, mask_shape=shape, causal=causal, **options), dtype)


@pytest.mark.parametrize("causal, mask", [(0, ""), (1, ""), (2, "shown"), (0, "added")])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 20, 30, 8, 9), (2, 1, 1, 30, 20, 8, 8)], ids=str)
def test_both_passes_give_the_gradients_of_pytorch(sizes: tuple[int, ...], causal: int, mask: str) -> None:
    """By autograd through PyTorch's own operator."""
    sample = attention.arguments(sizes, torch.float32, mask=mask, mask_shape=(1, sizes[4]), causal=causal)
    output, logsumexp = run(FORWARD, *sample.inputs, causal=causal)
    grad = torch.randn(output.shape)
    tensors = [grad, *sample.inputs[:3], output, logsumexp, *sample.inputs[3:]]
    found = run(OP, *tensors, causal=causal)
    terms = attention.terms(tensors, sample.attributes, grads=True)
    native, exact = (attention.by_autograd(sample, grad, dtype) for dtype in (torch.float32, torch.float64))
    for triple in zip([output, *found], native, exact, strict=True):
        assert_gradients_close(*triple, torch.float32, terms=terms)


SIZES = [
    (1, 1, 1, 300, 1000, 32, 32),
    (1, 20, 2, 250, 200, 8, 8),
    (1, 3, 1, 450, 500, 16, 16),
    (1, 1, 1, 3000, 90, 8, 8),
]


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("causal", (0, 2))
def test_the_same_bits_for_any_number_of_threads(sizes: tuple[int, ...], causal: int, dtype: torch.dtype) -> None:
    """Also where tasks share a head of keys or of queries."""
    sample = attention.backward_arguments(sizes, dtype, causal=causal)
    one, two, three = (check(sample, dtype, threads) for threads in (1, 2, 3))
    for first, second, third in zip(one, two, three, strict=True):
        assert_same_bits(first, second)
        assert_same_bits(first, third)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_rows_that_see_nothing_have_no_gradient_and_give_none(dtype: torch.dtype) -> None:
    hidden = torch.ones(130, 100, dtype=torch.bool)
    hidden[70] = False
    tensors = list(attention.arguments((1, 2, 2, 130, 100, 5, 6), dtype).inputs)
    for mask, causal, dead in ((hidden, 0, [70]), (None, 2, list(range(30)))):
        output, logsumexp = run(FORWARD, *tensors, mask, causal=causal)
        grad = torch.zeros_like(output)
        grad[:, :, dead] = 1
        for found in run(OP, grad, *tensors, output, logsumexp, mask, causal=causal):
            assert not found.any()


@pytest.mark.parametrize("hidden", (torch.finfo(torch.float32).min, -3e7))
def test_rows_of_which_everything_is_hidden_by_a_large_number(hidden: float) -> None:
    """As in padded batches: their probabilities add up to 1, though logsumexp has no digits left for their number."""
    mask = torch.zeros(120, 250).masked_fill(torch.rand(120, 250) < 0.5, hidden)
    mask[[3, 100]] = hidden
    sample = attention.arguments((1, 2, 2, 120, 250, 8, 8), torch.float32)
    output, logsumexp = run(FORWARD, *sample.inputs, mask)
    grad = torch.randn(output.shape)
    tensors = [grad, *sample.inputs, output, logsumexp, mask]
    check(Sample(tensors, {}, attention.terms(tensors, {}, grads=True)), torch.float32)
    whole = Sample([*sample.inputs, torch.where(mask == hidden, torch.finfo(torch.float32).min, 0.0)])
    found = run(OP, *tensors)
    native, exact = (attention.by_autograd(whole, grad, dtype) for dtype in (torch.float32, torch.float64))
    # Rows that see some keys are the same whatever hides the others; of the others -3e7 leaves two scores apart.
    rows = slice(None) if hidden < -1e8 else [row for row in range(120) if row not in (3, 100)]
    assert_gradients_close(
        found[0][:, :, rows], native[1][:, :, rows], exact[1][:, :, rows], torch.float32,
        terms=attention.terms(tensors, {}, grads=True),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU], indirect=True)
def test_memory_does_not_grow_with_rows_times_keys() -> None:
    """The scores of one head alone would be 256 MiB."""
    sample = attention.arguments((1, 1, 1, 8192, 8192, 16, 16), torch.float32, causal=1, measured=False)
    output, logsumexp = run(FORWARD, *sample.inputs, causal=1)
    arguments = [torch.randn_like(output), *sample.inputs, output, logsumexp]
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run(OP, *arguments, causal=1)
    assert _resident("VmHWM") - before < 64 << 10


def _resident(name: str) -> int:
    """A size of this process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


Q, K, V = torch.zeros(2, 4, 3, 6), torch.zeros(2, 2, 5, 6), torch.zeros(2, 2, 5, 7)
Y, R = torch.zeros(2, 4, 3, 7), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ((Y[..., :6], Q, K, V, Y, R), "grad_output is float32(2,4,3,6); expected float32(2,4,3,7), B, H and L of query "
         "and Ev of value"),
        ((Y, Q, K, V, Y[:1], R), "output is float32(1,4,3,7); expected float32(2,4,3,7), B, H and L of query and Ev of "
         "value"),
        ((Y, Q, K, V, Y, R[..., None]), "logsumexp is float32(2,4,3,1); expected float32(2,4,3), B, H and L of query"),
        ((Y, Q, K, V[:, :1], Y, R), "value is float32(2,1,5,7); expected 4 dimensions (B,G,S,Ev), with B, G and S of "
         "key float32(2,2,5,6)"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor, ...], message: str) -> None:
    assert_refused(OP, message, inputs, {})
