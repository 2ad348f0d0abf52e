"""Modules of float64: numbers of Python are exact in their steps, and all operators have kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import TrainingSession, export_training_step

# A power of two, as the learning rate of a step is a float32.
RATE = 0.0625


class Between(nn.Module):
    """Two layers, and what a function does between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))  # type: ignore[no-any-return]


def numbers(h: Tensor) -> Tensor:
    return (h * 0.1 + 1e-5).abs() ** 0.3 / 0.7 + h.clamp(-0.1, 0.3) - F.softplus(h, beta=0.3)


def sizes(h: Tensor) -> Tensor:
    rows = h.shape[0]
    scaled: Tensor = h * (rows * 0.1 + 0.3) / rows**0.5 / (h.var(0) + 0.1)
    return scaled + rows / (rows + 0.7)


def activations(h: Tensor) -> Tensor:
    return F.leaky_relu(h, 0.1) + F.elu(h, 0.7) * F.selu(h) + torch.erf(h) * h.sinh() + (0.1 * h).cosh().tan()


def gelus(h: Tensor) -> Tensor:
    return F.gelu(h) * F.gelu(h, approximate="tanh")


NORMALISED = nn.Sequential(nn.BatchNorm1d(6), nn.LayerNorm(6), nn.GroupNorm(2, 6))


FUNCTIONS = [
    pytest.param(numbers, id="numbers"),
    pytest.param(sizes, id="sizes"),
    pytest.param(NORMALISED, id="normalised"),
    pytest.param(activations, id="activations", marks=pytest.mark.long),
    pytest.param(gelus, id="gelus", marks=pytest.mark.long),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled(every=3)
def test_a_step_of_float64_is_as_precise_as_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Between(function).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    batches = [(torch.randn(rows, 6).double(), torch.randn(rows, 3).double()) for rows in (5, 3, 5)]
    shapes = ({0: "rows"}, {0: "rows"})
    step = export_training_step(
        module, F.mse_loss, batches[0], optimizer, dynamic_shapes=shapes, fuse=False, evaluation=False
    )
    session = TrainingSession(step)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert math.isclose(session.step(x, y), loss.item(), rel_tol=1e-12)
    for name, value in session.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(value), module.state_dict()[name], rtol=1e-12, atol=1e-13)
