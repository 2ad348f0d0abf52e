"""The kernel of MatmulNBitsBackward: sizes around its tiles, threads, messages."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES
from operators.matmul_n_bits_backward import arguments

pytestmark = pytest.mark.usefixtures("device")

OP = "MatmulNBitsBackward"


@given(
    rows=st.sampled_from((1, 5, 6, 7, 257)),
    out_features=st.sampled_from((1, 3, 127, 129)),
    in_features=st.sampled_from((1, 16, 63, 65, 128, 200)),
    bits=st.sampled_from((2, 4, 8)),
    block_size=st.sampled_from((16, 32, 128)),
    zero_points=st.booleans(),
    dtype=st.sampled_from(SAMPLES[OP].dtypes),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_any_sizes(
    rows: int,
    out_features: int,
    in_features: int,
    bits: int,
    block_size: int,
    zero_points: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    sample = arguments(
        (rows,),
        out_features,
        in_features,
        dtype,
        bits=bits,
        block_size=block_size,
        zero_points=zero_points,
        seed=seed,
    )
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


@pytest.mark.parametrize("in_features", [2100, 4200])
@pytest.mark.parametrize("block_size", [32, 128])
def test_panels_that_a_thread_takes_together(in_features: int, block_size: int) -> None:
    dtype = torch.float32
    sample = arguments((7,), 130, in_features, dtype, bits=4, block_size=block_size, zero_points=True)
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


def test_messages() -> None:
    grad, weight, scales = torch.ones(2, 3), torch.zeros(3, 2, 16, dtype=torch.uint8), torch.ones(3, 2)
    inputs = [grad, weight, scales]
    assert_refused(OP, "in_features is 65; expected 33 to 64", inputs, {"in_features": 65})
    assert_refused(OP, "bits is 3; expected 2, 4 or 8", inputs, {"in_features": 60, "bits": 3})
    assert_refused(
        OP,
        "scales is float32(5); expected 6 elements, one a block of weight",
        [grad, weight, torch.ones(5)],
        {"in_features": 60},
    )
