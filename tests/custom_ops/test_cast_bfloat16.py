"""The definition of CastBfloat16."""

from __future__ import annotations

import pytest
from backends import inferred
from onnx import TensorProto

from gradfuse.errors import ArgumentError

FLOAT, BFLOAT16 = TensorProto.FLOAT, TensorProto.BFLOAT16


@pytest.mark.parametrize(("dtype", "other"), [(FLOAT, BFLOAT16), (BFLOAT16, FLOAT)])
def test_the_result_has_the_other_type(dtype: int, other: int) -> None:
    assert inferred("CastBfloat16", (dtype, ("N", 3)), to=other) == [(other, ("N", 3))]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="self is of rank 9; expected at most rank 8"):
        inferred("CastBfloat16", (FLOAT, (1,) * 9))
    with pytest.raises(ArgumentError, match=r"to is 1; expected 16, as self is tensor\(float\)"):
        inferred("CastBfloat16", (FLOAT, (2, 3)), to=FLOAT)
    with pytest.raises(ArgumentError, match=r"self is tensor\(float16\); expected one of tensor\(float\), tensor\(b"):
        inferred("CastBfloat16", (TensorProto.FLOAT16, (2, 3)))
