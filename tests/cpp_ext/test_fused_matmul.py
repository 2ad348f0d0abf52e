"""The kernel of FusedMatmul: sizes around its tiles, special numbers, threads, messages."""

from __future__ import annotations

import math

import pytest
import torch
from cpp_ext.single_node import assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators import SAMPLES
from operators.fused_matmul import arguments

pytestmark = pytest.mark.usefixtures("device")

OP = "FusedMatmul"
BATCHES = (((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)))


@given(
    rows=st.sampled_from((1, 5, 6, 7, 11, 12, 13, 25)),
    depth=st.sampled_from((1, 2, 3, 7, 8, 9, 33, 255, 257, 513)),
    columns=st.sampled_from((1, 3, 4, 15, 16, 17, 31, 32, 33, 65)),
    batches=st.sampled_from(BATCHES),
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    bias=st.booleans(),
    narrow=st.booleans(),
    dtype=st.sampled_from(SAMPLES[OP].dtypes),
    b_dtype=st.sampled_from(SAMPLES[OP].dtypes),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_any_sizes(
    rows: int,
    depth: int,
    columns: int,
    batches: tuple[tuple[int, ...], tuple[int, ...]],
    trans_a: bool,
    trans_b: bool,
    bias: bool,
    narrow: bool,
    dtype: torch.dtype,
    b_dtype: torch.dtype,
    seed: int,
) -> None:
    sample = arguments(
        *batches,
        (rows, depth, columns),
        dtype,
        trans_a=trans_a,
        trans_b=trans_b,
        bias=bias,
        narrow=narrow,
        b_dtype=b_dtype,
        seed=seed,
    )
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)


@pytest.mark.parametrize(
    "dtype, sizes, transposed",
    each_once(SAMPLES[OP].dtypes, [(700, 300, 800), (1000, 2100, 40), (30, 600, 1500)], [(False, True), (True, False)]),
    ids=str,
)
def test_threads_change_no_bit(dtype: torch.dtype, sizes: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    trans_a, trans_b = transposed
    sample = arguments((), (), sizes, dtype, trans_a=trans_a, trans_b=trans_b, bias=True)
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


@pytest.mark.parametrize("dtype", SAMPLES[OP].dtypes, ids=str)
@pytest.mark.parametrize("transposed", [(False, False), (True, True)])
def test_a_number_that_is_not_finite_reaches_its_row_or_column_alone(
    dtype: torch.dtype, transposed: tuple[bool, bool]
) -> None:
    trans_a, trans_b = transposed
    a, b = torch.ones(14, 9, dtype=dtype), torch.ones(9, 35, dtype=dtype)
    a[3, 8], b[7, 20] = math.inf, math.nan
    (result,) = run(
        OP, a.mT.contiguous() if trans_a else a, b.mT.contiguous() if trans_b else b, trans_a=trans_a, trans_b=trans_b
    )
    expected = torch.full((14, 35), 9.0, dtype=dtype)
    expected[3], expected[:, 20] = math.inf, math.nan
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_sums_without_terms_are_the_bias() -> None:
    a, b, bias = torch.ones(3, 0), torch.ones(0, 5), torch.arange(5.0)
    (result,) = run(OP, a, b, bias)
    torch.testing.assert_close(result, bias.expand(3, 5), rtol=0, atol=0)


def test_messages() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert_refused(OP, "b is float32(4,4); expected 3 rows, as a has columns", [a, torch.ones(4, 4)], {})
    assert_refused(OP, "trans_a is 2; expected 0 or 1", [a, b], {"trans_a": 2})
    assert_refused(OP, "bias is float32(3); expected float32(4), as the product has columns", [a, b, torch.ones(3)], {})
    assert_refused(
        OP,
        "b is float32(3,3,4); expected dimensions before the matrices as in a, float32(2,2,3), or 1",
        [torch.ones(2, 2, 3), torch.ones(3, 3, 4)],
        {},
    )
