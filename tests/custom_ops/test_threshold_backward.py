"""The definition of ThresholdBackward."""

from __future__ import annotations

import pytest
from backends import inferred
from onnx import TensorProto

from gradfuse.errors import ArgumentError

FLOAT = TensorProto.FLOAT


def test_shapes() -> None:
    assert inferred("ThresholdBackward", (FLOAT, ("N", 3)), (FLOAT, (2, None))) == [(FLOAT, (2, 3))]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"self is of shape \(3\); expected shape \(2, 3\), as grad_output"):
        inferred("ThresholdBackward", (FLOAT, (2, 3)), (FLOAT, (3,)))
    with pytest.raises(ArgumentError, match="self is of rank 9; expected at most rank 8"):
        inferred("ThresholdBackward", (FLOAT, (2, 3)), (FLOAT, (1,) * 9))
