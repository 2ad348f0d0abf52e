"""Gamma functions are those of PyTorch, and steps of distributions that need them export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.export.decompositions import special
from gradfuse.testing import assert_gradients_close

POINTS = torch.cat(
    [
        torch.linspace(-6.3, 30.0, 500, dtype=torch.float64),
        torch.tensor([1e-30, 1e-6, 0.5, 1.0, 1.4616321, 2.0, 9.999, 10.0, 10.001, 1e3, 1e8, 1e30], dtype=torch.float64),
    ]
)
EDGES = torch.tensor([0.0, -1.0, -2.0, torch.inf, torch.nan], dtype=torch.float64)


@pytest.mark.parametrize("name", ["lgamma", "digamma"])
def test_gamma_functions_have_the_digits_of_their_type(name: str) -> None:
    function, native = getattr(special, name), getattr(torch, name)
    # Near their zeros and poles, x itself is known to one rounding only.
    moved = (native(POINTS * (1 + 1e-15)) - native(POINTS)).abs()
    bound = 1e-14 * native(POINTS).abs() + 4 * moved + 1e-14
    assert ((function(POINTS) - native(POINTS)).abs() <= bound).all()
    narrow = POINTS[POINTS > 1e-20].float()
    exact = native(narrow.double())
    assert function(narrow).dtype == torch.float32
    assert ((function(narrow).double() - exact).abs() <= 1e-7 * exact.abs() + 1e-14).all()


@pytest.mark.parametrize("name", ["lgamma", "digamma"])
def test_gamma_functions_at_their_poles(name: str) -> None:
    torch.testing.assert_close(getattr(special, name)(EDGES), getattr(torch, name)(EDGES), equal_nan=True)
    whole = torch.arange(1, 5)
    torch.testing.assert_close(getattr(special, name)(whole), getattr(torch, name)(whole))


class StudentT(nn.Module):
    """Predicts the degrees of freedom, the place and the width of a distribution, as forecasters do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def _negative_log_likelihood(parameters: Tensor, target: Tensor) -> Tensor:
    df, loc, scale = parameters.unbind(-1)
    student = torch.distributions.StudentT(2.0 + F.softplus(df), loc, F.softplus(scale))
    counts = torch.distributions.NegativeBinomial(F.softplus(df), logits=loc)
    likelihood: Tensor = student.log_prob(target) + counts.log_prob(target.abs().round())  # type: ignore[no-untyped-call]
    return -likelihood.mean()


def test_the_likelihoods_of_distributions_train() -> None:
    torch.manual_seed(0)
    module = StudentT()

    def batch(items: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (torch.randn(items, 4),), (3.0 * torch.randn(items),)

    shapes = ({0: "batch"},), ({0: "batch"},)
    step = export_training_step(module, _negative_log_likelihood, batch(3), dynamic_shapes=shapes)
    other = batch(7)
    results = run(step, other, kernels=False)
    native, exact = (
        autograd(module, _negative_log_likelihood, other, dtype, step) for dtype in (torch.float32, torch.float64)
    )
    for name, result in results.items():
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)
