"""What MatmulNBits computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, run
from onnx import TensorProto
from operators import SAMPLES
from operators.matmul_n_bits import arguments

from gradfuse.errors import ArgumentError

OP = "MatmulNBits"
FLOAT, UINT8 = TensorProto.FLOAT, TensorProto.UINT8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points, bias", [(False, True), (True, False)])
def test_columns_that_fill_no_block(backend: str, bits: int, zero_points: bool, bias: bool) -> None:
    sample = arguments((2, 3), 7, 37, torch.float32, bits=bits, zero_points=zero_points, bias=bias)
    outputs = run(OP, backend, *sample.inputs, ranks=[3], **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, torch.float32)


def test_shapes() -> None:
    weight, scales = (UINT8, (6, 2, 16)), (FLOAT, (12,))
    assert inferred(OP, (FLOAT, ("N", "T", 60)), weight, scales) == [(FLOAT, ("N", "T", 6))]


def test_refusals() -> None:
    input, weight, scales = (FLOAT, (2, 60)), (UINT8, (6, 2, 16)), (FLOAT, (12,))
    with pytest.raises(ArgumentError, match=r"input is of last dimension 32; expected last dimension 33 to 64"):
        inferred(OP, (FLOAT, (2, 32)), weight, scales)
    with pytest.raises(ArgumentError, match=r"bits is 3; expected 2, 4 or 8"):
        inferred(OP, input, weight, scales, bits=3)
    with pytest.raises(ArgumentError, match=r"bias is of out 5; expected out 6"):
        inferred(OP, input, weight, scales, None, (FLOAT, (5,)))
