"""Special functions are those of PyTorch, and steps of distributions that need them export."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.export import standins
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


def _slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    given = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(function(given).sum(), given)
    return slopes


@pytest.fixture
def gradients_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program, a rule of its own ends gradients."""
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)


def _trigamma(x: Tensor) -> Tensor:
    return special.polygamma(1, x)


LINE = torch.linspace(-24.9, 24.9, 250, dtype=torch.float64)
SHARES = torch.cat(
    [torch.linspace(0.001, 0.999, 99, dtype=torch.float64), 10.0 ** -torch.arange(4.0, 60.0, 5).double()]
)


@pytest.mark.parametrize(
    ("ours", "native", "points"),
    [
        (special.erfc, torch.erfc, LINE),
        (special.erfcx, torch.special.erfcx, LINE[LINE > -9.0]),
        (special.log_ndtr, torch.special.log_ndtr, LINE),
        (special.erfinv, torch.erfinv, 2.0 * SHARES[SHARES > 1e-12] - 1.0),
        (special.ndtri, torch.special.ndtri, SHARES),
        (lambda x: special.bessel(x, 0, scaled=False), torch.i0, LINE),
        (lambda x: special.bessel(x, 0, scaled=True), torch.special.i0e, LINE),
        (lambda x: special.bessel(x, 1, scaled=False), torch.special.i1, LINE),
        (lambda x: special.bessel(x, 1, scaled=True), torch.special.i1e, LINE),
        *(
            (lambda x, n=n: special.polygamma(n, x), lambda x, n=n: torch.polygamma(n, x), LINE[LINE > 0.2])
            for n in (0, 2, 3, 4)
        ),
        # PyTorch's trigamma has ten digits.
        (_trigamma, lambda x: torch.special.zeta(2.0, x), LINE[LINE > 0.2]),
    ],
    ids="erfc erfcx log_ndtr erfinv ndtri i0 i0e i1 i1e digamma 2 3 4 trigamma".split(),
)
def test_values_and_slopes(
    ours: Callable[[Tensor], Tensor], native: Callable[[Tensor], Tensor], points: Tensor, gradients_end: None
) -> None:
    torch.testing.assert_close(ours(points), native(points), rtol=2e-13, atol=0.0)
    # PyTorch's own slopes cancel in the tails.
    slopes = torch.special.zeta(3.0, points) * -2.0 if ours is _trigamma else _slopes(native, points)
    torch.testing.assert_close(_slopes(ours, points), slopes, rtol=1e-9, atol=1e-15)
    narrow = ours(points.float())
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), native(points.float().double()), rtol=1e-7, atol=1e-37)


def test_values_at_the_ends(gradients_end: None) -> None:
    ends = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, torch.inf, torch.nan], dtype=torch.float64)
    for ours, native in (
        (special.erfinv, torch.erfinv),
        (special.ndtri, torch.special.ndtri),
        (special.log_ndtr, torch.special.log_ndtr),
        (special.erfc, torch.erfc),
        (lambda x: special.bessel(x, 0, scaled=True), torch.special.i0e),
    ):
        torch.testing.assert_close(ours(ends), native(ends), equal_nan=True)
    below = torch.tensor([-3.5, -8.25], dtype=torch.float64)
    torch.testing.assert_close(special.polygamma(2, below), torch.polygamma(2, below))
    assert special.polygamma(2, torch.tensor(-40.5)).isnan()


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
