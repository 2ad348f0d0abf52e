"""The definition of GeluBackward."""

from __future__ import annotations

import pytest
from backends import inferred
from onnx import TensorProto

from gradfuse.errors import ArgumentError

FLOAT = TensorProto.FLOAT


def test_shapes() -> None:
    assert inferred("GeluBackward", (FLOAT, ("N", 3)), (FLOAT, (2, None))) == [(FLOAT, (2, 3))]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"self is of shape \(3\); expected shape \(2, 3\), as grad_output"):
        inferred("GeluBackward", (FLOAT, (2, 3)), (FLOAT, (3,)))
    with pytest.raises(ArgumentError, match="self is of dimension 1 4; expected dimension 1 3"):
        inferred("GeluBackward", (FLOAT, (2, 3)), (FLOAT, (2, 4)))
    with pytest.raises(ArgumentError, match="approximate is 'sigmoid'; expected 'none' or 'tanh'"):
        inferred("GeluBackward", (FLOAT, (2, 3)), (FLOAT, (2, 3)), approximate="sigmoid")
