"""What FusedMatmul computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, run
from onnx import TensorProto
from operators import SAMPLES
from operators.fused_matmul import arguments

from gradfuse.errors import ArgumentError

OP = "FusedMatmul"
FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("a_batch, b_batch", [((), (2,)), ((2, 1), (3,)), ((4, 2, 1, 2), (2, 3, 1))])
@pytest.mark.parametrize("transposed", [(False, True), (True, False)])
def test_axes_before_the_matrices_are_broadcast(
    backend: str, a_batch: tuple[int, ...], b_batch: tuple[int, ...], transposed: tuple[bool, bool]
) -> None:
    trans_a, trans_b = transposed
    sample = arguments(a_batch, b_batch, (3, 4, 5), torch.float32, trans_a=trans_a, trans_b=trans_b, bias=True)
    ranks = [max(len(a_batch), len(b_batch)) + 2]
    outputs = run(OP, backend, *sample.inputs, ranks=ranks, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, torch.float32)


def test_shapes() -> None:
    assert inferred(OP, (FLOAT, ("N", 3, "K")), (FLOAT, ("K", 5))) == [(FLOAT, ("N", 3, 5))]
    assert inferred(OP, (FLOAT, ("K", "M")), (FLOAT, (7, "K")), trans_a=1, trans_b=1) == [(FLOAT, ("M", 7))]
    assert inferred(OP, (FLOAT, (1, 2, 3, 4)), (FLOAT, (6, 1, 4, 5))) == [(FLOAT, (6, 2, 3, 5))]
    assert inferred(OP, (FLOAT, ("N", 2, 3)), (FLOAT, (8, 3, 5))) == [(FLOAT, (8, 2, 5))]
    assert inferred(OP, (FLOAT, ("N", 2, 3)), (FLOAT, ("P", 3, 5))) == [(FLOAT, (None, 2, 5))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("b_dtype", [torch.float32, torch.bfloat16])
def test_factors_are_rounded_before_they_are_multiplied(backend: str, b_dtype: torch.dtype) -> None:
    one, between = torch.ones(2, 2), torch.full((2, 2), 1 + 2.0**-10)
    for narrow, expected in ((0, 2 + 2.0**-9), (1, 2.0)):
        (result,) = run(OP, backend, between, one.to(b_dtype), ranks=[2], factors_in_bfloat16=narrow)
        assert result.dtype == torch.float32 and (result == expected).all()


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"b is of dimension -2 5; expected dimension -2 4"):
        inferred(OP, (FLOAT, (3, 4)), (FLOAT, (5, 6)))
    with pytest.raises(ArgumentError, match=r"b is of dimension -3 7; expected 2 or 1"):
        inferred(OP, (FLOAT, (2, 3, 4)), (FLOAT, (7, 4, 6)))
    with pytest.raises(ArgumentError, match=r"a is of rank 1; expected rank 2 to 8"):
        inferred(OP, (FLOAT, (4,)), (FLOAT, (4, 6)))
    with pytest.raises(ArgumentError, match=r"bias is of size 5; expected size 6"):
        inferred(OP, (FLOAT, (3, 4)), (FLOAT, (4, 6)), (FLOAT, (5,)))
    with pytest.raises(ArgumentError, match=r"trans_b is 2; expected 0 or 1"):
        inferred(OP, (FLOAT, (3, 4)), (FLOAT, (4, 6)), trans_b=2)
