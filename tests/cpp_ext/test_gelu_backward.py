"""The kernel of GeluBackward."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, run
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

APPROXIMATIONS = ["none", "tanh"]


def native(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    out: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return out


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_slopes_are_right_everywhere(approximate: str) -> None:
    """From where they are 0, past the least one, to where they are 1."""
    x = torch.cat([torch.linspace(-16, 16, 40_001), torch.tensor([-0.0, 1e-30, -1e-30, 3e38, -3e38])])
    grad = torch.ones_like(x)
    (out,) = run("GeluBackward", grad, x, approximate=approximate)
    exact = native(grad.double(), x.double(), approximate)
    assert_gradients_close(out, native(grad, x, approximate), exact, torch.float32)


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_far_below_zero_slopes_keep_their_digits(approximate: str) -> None:
    """The formulas of PyTorch cancel there."""
    x = torch.linspace(-8, -2, 1001)
    (out,) = run("GeluBackward", torch.ones_like(x), x, approximate=approximate)
    wide = x.double()
    if approximate == "none":
        density = (-0.5 * wide.square()).exp() / (2 * torch.pi) ** 0.5
        exact = 0.5 * torch.special.erfc(-wide / 2**0.5) + wide * density
    else:
        scaled = (2 / torch.pi) ** 0.5 * wide
        share = torch.sigmoid(2 * scaled * (1 + 0.044715 * wide.square()))
        exact = share + 2 * share * (1 - share) * scaled * (1 + 3 * 0.044715 * wide.square())
    # x^2 / 2 is rounded before it is an exponent.
    assert ((out.double() - exact).abs() <= 2e-5 * exact.abs()).all()


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_what_is_not_finite_stays_so(approximate: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, 1.0, 1.0, -40.0])
    grad = torch.tensor([1.0, 1.0, 1.0, nan, inf, 1.0])
    (out,) = run("GeluBackward", grad, x, approximate=approximate)
    assert out.isnan().tolist() == native(grad, x, approximate).isnan().tolist()
    assert out[4] == inf and abs(out[5]) < 1e-35


def test_bad_arguments() -> None:
    message = "self is float32(3); expected float32(2) as grad_output"
    assert_refused("GeluBackward", message, [torch.zeros(2), torch.zeros(3)], {})
    message = "approximate is 'erf'; expected 'none' or 'tanh'"
    assert_refused("GeluBackward", message, [torch.zeros(2), torch.zeros(2)], {"approximate": "erf"})
