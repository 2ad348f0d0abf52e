"""The kernel of MatmulNBits: sizes around its tiles, threads, messages."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES
from operators.matmul_n_bits import arguments

pytestmark = pytest.mark.usefixtures("device")

OP = "MatmulNBits"


@given(
    rows=st.sampled_from((1, 5, 6, 7, 257)),
    out_features=st.sampled_from((1, 16, 63, 65, 130)),
    in_features=st.sampled_from((1, 3, 63, 65, 127, 129, 200)),
    bits=st.sampled_from((2, 4, 8)),
    block_size=st.sampled_from((16, 32, 128)),
    zero_points=st.booleans(),
    bias=st.booleans(),
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
    bias: bool,
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
        bias=bias,
        seed=seed,
    )
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


@pytest.mark.parametrize("out_features", [2100, 4200])
@pytest.mark.parametrize("block_size", [32, 128])
def test_panels_that_a_thread_takes_together(out_features: int, block_size: int) -> None:
    dtype = torch.float32
    sample = arguments((7,), out_features, 130, dtype, bits=4, block_size=block_size, zero_points=True)
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


def test_messages() -> None:
    input, weight, scales = torch.ones(2, 60), torch.zeros(3, 2, 16, dtype=torch.uint8), torch.ones(3, 2)
    wanted = "input is float32(2,65); expected last dimension 33 to 64, as weight has columns"
    assert_refused(OP, wanted, [torch.ones(2, 65), weight, scales], {})
    assert_refused(OP, "bits is 3; expected 2, 4 or 8", [input, weight, scales], {"bits": 3})
    wanted = "bias is float32(2); expected float32(3), as weight has rows"
    assert_refused(OP, wanted, [input, weight, scales, None, torch.ones(2)], {})
