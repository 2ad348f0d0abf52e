"""The kernel of ScaledDotProductAttention: borders of its blocks, threads, masks, dropout, NaN, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES, Sample, attention
from torch import Tensor

from gradfuse.export import dropout
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "ScaledDotProductAttention"
BORDERS = st.sampled_from((1, 2, 15, 17, 95, 96, 97, 191, 193, 250))
"""Of blocks of rows and of keys, and of vectors."""


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@pytest.mark.parametrize("device", [CPU], indirect=True)
@given(
    heads=st.sampled_from(((1, 1, 1), (2, 1, 3), (1, 2, 2))),
    rows=BORDERS,
    keys=BORDERS,
    widths=st.sampled_from(((1, 1), (8, 5), (17, 64), (64, 33), (257, 16))),
    mask=st.sampled_from(("", "shown", "added")),
    axes=st.lists(st.booleans(), min_size=2, max_size=4),
    causal=st.integers(0, 2),
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
    dtype: torch.dtype,
) -> None:
    batch, groups, shared = heads
    whole = (batch, groups * shared, rows, keys)[4 - len(axes) :]
    shape = [size if full else 1 for size, full in zip(whole, axes, strict=True)]
    sizes = (batch, groups * shared, groups, rows, keys, *widths)
    check(attention.arguments(sizes, dtype, mask=mask, mask_shape=shape, causal=causal), dtype)


@pytest.mark.parametrize("causal, mask", [(0, ""), (1, ""), (2, "shown"), (0, "added")])
def test_agrees_with_scaled_dot_product_attention_of_pytorch(causal: int, mask: str) -> None:
    """The oracle of the other tests is a formula: this one is PyTorch's own."""
    sample = attention.arguments((1, 4, 2, 20, 30, 8, 9), torch.float32, mask=mask, mask_shape=(1, 30), causal=causal)
    grad = torch.zeros(1, 4, 20, 9)
    native, exact = (attention.by_autograd(sample, grad, dtype)[0] for dtype in (torch.float32, torch.float64))
    assert_gradients_close(run(OP, *sample.inputs, causal=causal)[0], native, exact, torch.float32)


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1000, 300, 32, 32), (1, 6, 2, 450, 500, 16, 16)], ids=str)
@pytest.mark.parametrize("causal", (0, 2))
def test_the_same_bits_for_any_number_of_threads(sizes: tuple[int, ...], causal: int, dtype: torch.dtype) -> None:
    sample = attention.arguments(sizes, dtype, causal=causal, dropout_threshold=attention.THRESHOLD)
    one, two, three = (check(sample, dtype, threads) for threads in (1, 2, 3))
    for first, second, third in zip(one, two, three, strict=True):
        assert_same_bits(first, second)
        assert_same_bits(first, third)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_the_dropout_is_that_of_exported_steps(dtype: torch.dtype) -> None:
    """With values of one column for each key, the output is what each probability becomes."""
    keys = 40
    query, key, _ = attention.arguments((2, 2, 1, 5, keys, 3, 2), dtype).inputs
    eye = torch.eye(keys, dtype=dtype).expand(2, 1, keys, keys)
    threshold = round(0.3 * 2**31)
    for number, drawn in ((3, None), (5, torch.tensor(2))):
        inputs = (query, key, eye, None, torch.tensor(-7), drawn)
        dropped, _ = run(OP, *inputs, dropout_threshold=threshold, draw=3)
        assert torch.equal(dropped != 0, dropout.mask(-7, number, dropped, 0.3))
        check(Sample(inputs, {"dropout_threshold": threshold, "draw": 3}), dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_rows_that_see_nothing_are_0(dtype: torch.dtype) -> None:
    query, key, value = attention.arguments((1, 2, 2, 130, 100, 5, 6), dtype).inputs
    hidden = torch.ones(130, 100, dtype=torch.bool)
    hidden[70] = False
    added = torch.zeros(130, 100, dtype=dtype).masked_fill(~hidden, -torch.inf)
    unseen = list(range(30))
    for inputs, attributes, dead in (
        ([hidden], {}, [70]),
        ([added], {}, [70]),
        ([hidden], {"causal": 2}, [*unseen, 70]),
        ([], {"causal": 2}, unseen),
    ):
        output, logsumexp = run(OP, query, key, value, *inputs, **attributes)
        assert [row for row in range(130) if not output[:, :, row].any()] == dead
        assert not logsumexp[:, :, dead].any()


def test_what_is_not_finite_reaches_the_rows_that_see_it() -> None:
    query, key, value = (
        one for one in attention.arguments((1, 1, 1, 120, 110, 8, 8), torch.float32).inputs if one is not None
    )
    shown = torch.rand(120, 110) < 0.5
    for bad in (torch.nan, torch.inf):
        spoiled = key.clone()
        spoiled[0, 0, 100, 3] = bad
        clean, _ = run(OP, query, key, value, shown)
        found, logsumexp = run(OP, query, spoiled, value, shown)
        sees = shown[:, 100]
        expected = attention.forward(query, spoiled, value, shown, dtype=torch.float32)
        assert torch.equal(found.isnan(), expected[0].isnan())
        assert torch.equal(logsumexp.isfinite(), expected[1].isfinite())
        assert_same_bits(found[0, 0, ~sees], clean[0, 0, ~sees])


def test_scores_far_from_0() -> None:
    """Each row is relative to its largest score: none overflows, and masks that are large and finite hide."""
    query, key, value = (
        one for one in attention.arguments((1, 2, 2, 100, 120, 8, 8), torch.float32).inputs if one is not None
    )
    check(Sample([query * 300, key, value], terms=1e3), torch.float32)
    least = torch.finfo(torch.float32).min
    mask = torch.zeros(100, 120).masked_fill(torch.rand(100, 120) < 0.5, least)
    mask[7] = least
    found, _ = run(OP, query, key, value, mask)
    torch.testing.assert_close(found[:, :, 7], value.mean(2))


Q, K, V = torch.zeros(2, 4, 3, 6), torch.zeros(2, 2, 5, 6), torch.zeros(2, 2, 5, 7)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((Q[0], K, V), {}, "query is float32(4,3,6); expected 4 dimensions (B,H,L,E)"),
        ((Q, K[..., :5], V), {}, "key is float32(2,2,5,5); expected 4 dimensions (B,G,S,E), with B and E of query "
         "float32(2,4,3,6)"),
        ((Q, K, V[:, :1]), {}, "value is float32(2,1,5,7); expected 4 dimensions (B,G,S,Ev), with B, G and S of key "
         "float32(2,2,5,6)"),
        ((Q[:, :3], K, V), {}, "query is of H 3; expected a multiple of key's G 2"),
        ((Q, K, V, torch.zeros(3, 4)), {}, "attn_mask is float32(3,4); expected the last 2 to 4 dimensions of "
         "float32(2,4,3,5), each in full or 1"),
        ((Q, K, V, None, torch.zeros(2, dtype=torch.int64)), {}, "seed is int64(2); expected int64() or int64(1)"),
        ((Q, K, V), {"causal": 3}, "causal is 3; expected 0, 1 or 2"),
        ((Q, K, V), {"dropout_threshold": 2**31}, "dropout_threshold is 2147483648; expected 0 to 2147483647"),
        ((Q, K, V), {"dropout_threshold": 7}, "seed is absent; expected a tensor, as dropout_threshold is 7"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor | None, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
