"""The kernel of ThresholdBackward."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, run

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_gradients_are_torchs_to_the_bit(threshold: float) -> None:
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([inf, -inf, nan, 0.0, -0.0, threshold, 1e-40, -1e-40, 1.0, -1.0])
    grad, x = (one.flatten() for one in torch.meshgrid(special, special, indexing="ij"))
    (out,) = run("ThresholdBackward", grad, x, threshold=threshold)
    wanted = torch.ops.aten.threshold_backward(grad, x, threshold)
    assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))


def test_bad_arguments() -> None:
    message = "self is float32(3); expected float32(2) as grad_output"
    assert_refused("ThresholdBackward", message, [torch.zeros(2), torch.zeros(3)], {})
