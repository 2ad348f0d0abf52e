"""What MatmulNBitsBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, run
from onnx import TensorProto
from operators import SAMPLES
from operators.matmul_n_bits_backward import arguments

from gradfuse.errors import ArgumentError

OP = "MatmulNBitsBackward"
FLOAT, UINT8 = TensorProto.FLOAT, TensorProto.UINT8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points", [False, True])
def test_columns_that_fill_no_block(backend: str, bits: int, zero_points: bool) -> None:
    sample = arguments((2, 3), 7, 37, torch.float32, bits=bits, zero_points=zero_points)
    outputs = run(OP, backend, *sample.inputs, ranks=[3], **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, torch.float32)


def test_shapes() -> None:
    weight, scales = (UINT8, (6, 2, 16)), (FLOAT, (12,))
    assert inferred(OP, (FLOAT, ("N", "T", 6)), weight, scales, in_features=60) == [(FLOAT, ("N", "T", 60))]


def test_refusals() -> None:
    grad, weight, scales = (FLOAT, (2, 6)), (UINT8, (6, 2, 16)), (FLOAT, (12,))
    with pytest.raises(ArgumentError, match=r"in_features is 32; expected 33 to 64"):
        inferred(OP, grad, weight, scales, in_features=32)
    with pytest.raises(ArgumentError, match=r"bits is 3; expected 2, 4 or 8"):
        inferred(OP, grad, weight, scales, in_features=60, bits=3)
    with pytest.raises(ArgumentError, match=r"scales is of 11 elements; expected 12, as weight has blocks"):
        inferred(OP, grad, weight, (FLOAT, (11,)), in_features=60)
    with pytest.raises(ArgumentError, match=r"weight is of 24 columns a block; expected a power of two from 16 on"):
        inferred(OP, grad, (UINT8, (6, 2, 12)), scales, in_features=40)
