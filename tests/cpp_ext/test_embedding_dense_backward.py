"""The kernel of EmbeddingDenseBackward: rows that are looked up often or never, wide rows, threads, messages."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES, Sample
from operators.embedding_dense_backward import embedding_dense_backward

pytestmark = pytest.mark.usefixtures("device")

OP = "EmbeddingDenseBackward"


def check(sample: Sample, dtype: torch.dtype) -> None:
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


@given(
    rows=st.integers(0, 300),
    weights=st.sampled_from((1, 2, 40, 1000)),
    columns=st.sampled_from((1, 7, 64, 511, 513)),
    padding=st.sampled_from((-1, 0, 1)),
    scales=st.integers(0, 1),
    dtype=st.sampled_from(SAMPLES[OP].dtypes),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_any_sizes(
    rows: int, weights: int, columns: int, padding: int, scales: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(rows, columns, generator=generator).to(dtype)
    # Some rows are looked up much more often than others.
    indices = (torch.rand(rows, generator=generator) ** 4 * weights).long().clamp(max=weights - 1)
    attributes = {"num_weights": weights, "padding_idx": padding, "scale_grad_by_freq": scales}
    terms = embedding_dense_backward(grad.abs(), indices, num_weights=weights, padding_idx=padding)
    check(Sample([grad, indices], attributes, terms), dtype)


@pytest.mark.parametrize("dtype", SAMPLES[OP].dtypes, ids=str)
def test_large(dtype: torch.dtype) -> None:
    """Results that are written around the caches."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(600, 257, generator=generator).to(dtype)
    indices = torch.randint(0, 20_000, (600,), generator=generator)
    terms = embedding_dense_backward(grad.abs(), indices, num_weights=20_000)
    check(Sample([grad, indices], {"num_weights": 20_000}, terms), dtype)


def test_messages() -> None:
    grad, indices = torch.ones(2, 3), torch.tensor([1, 4])
    wanted = "a row in [0, 4) or padding_idx -1"
    assert_refused(OP, f"indices[1] is 4; expected {wanted}", [grad, indices], {"num_weights": 4})
    wanted = "int64(2), one index a row of grad_output"
    assert_refused(OP, f"indices is int64(3); expected {wanted}", [grad, torch.zeros(3).long()], {"num_weights": 4})
    assert_refused(OP, "num_weights is -2; expected 0 to 2147483647", [grad, indices], {"num_weights": -2})
