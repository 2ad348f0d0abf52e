"""The kernel of SquareGrad."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, run

pytestmark = pytest.mark.usefixtures("device")


def test_example() -> None:
    (out,) = run("SquareGrad", torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 2.0, 3.0]))
    assert out.tolist() == [2.0, -4.0, 3.0]


def test_bad_arguments() -> None:
    message = "x is float32(3); expected float32(2) as grad"
    assert_refused("SquareGrad", message, [torch.zeros(2), torch.zeros(3)], {})
