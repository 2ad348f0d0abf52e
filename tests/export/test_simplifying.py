"""What simplifying the translation of a step must keep."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import TrainingSession, export_training_step
from gradfuse.export.simplifying import RULES


class Tokens(nn.Module):
    """Tokens of zeros, as BERT's kind of models begin with, in front of those of the batch."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(2, 4))
        self.norm = nn.LayerNorm(4, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([self.tokens, x]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("eps", (1e-5, 1e-12))
@pytest.mark.parametrize("fuse", (True, False))
def test_the_epsilon_of_a_norm_is_not_taken_for_0(eps: float, fuse: bool) -> None:
    torch.manual_seed(0)
    # The rows of zeros have no variance but the epsilon: without it their gradients are NaN, which is refused.
    export_training_step(Tokens(eps), F.mse_loss, (torch.randn(3, 4), torch.randn(5, 4)), fuse=fuse)


NEARLY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w * 1.000005,
    lambda w: 1.000005 * w,
    lambda w: w / 1.000005,
    lambda w: w + 5e-9,
    lambda w: 5e-9 + w,
    lambda w: w - 5e-9,
    lambda w: w * 1.0 + 0.0,
)


class Nearly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # So small that what is added shows in float32.
        self.weights = nn.ParameterList(torch.tensor([1e-9]) for _ in NEARLY)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([function(w) for function, w in zip(NEARLY, self.weights, strict=True)]) * x


def test_numbers_next_to_0_and_1_are_not_taken_for_them() -> None:
    module, x = Nearly(), torch.tensor([1e9])
    step = export_training_step(module, lambda y: (y * y).sum(), (x, ()))
    session = TrainingSession(step)
    session.step({"x": x.numpy()}, {})
    exact = copy.deepcopy(module).double()
    exact(x.double()).square().sum().backward()
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(session.gradients[name], parameter.grad.numpy(), rtol=1e-6)


def test_each_rule_is_filed_under_the_operator_that_it_replaces() -> None:
    for operator, rules in RULES.items():
        for rule in rules:
            assert [str(node.op) for node in rule._target_pattern.output_nodes] == [operator], rule
