"""The decompositions of factors, inverses and determinants compute what PyTorch computes, as do their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from export.decompositions.test_products import assert_same
from torch import Tensor

from gradfuse.export import standins
from gradfuse.export.decompositions import linear_algebra

SIZES = (1, 2, 5)


def _matrices(size: int) -> Tensor:
    torch.manual_seed(size)
    matrices = torch.randn(3, size, size)
    # Rows must be exchanged.
    matrices[0, 0, 0] = 0.0
    if size == 1:
        matrices += 2.0
    return matrices


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_cholesky_factors(size: int, upper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a program, a rule of its own ends the gradient there.
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)
    a = _matrices(size)
    symmetric = a @ a.mT + torch.eye(size)
    # PyTorch reads one triangle.
    uneven = symmetric + torch.randn(3, size, size).tril(-1) * 0.01
    for matrix in (symmetric, uneven):
        assert_same(
            lambda a: linear_algebra.cholesky(a, upper=upper)[0],
            lambda a: torch.linalg.cholesky(a, upper=upper),
            matrix,
        )


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_systems(size: int, upper: bool, left: bool, unit: bool) -> None:
    matrix = _matrices(size) + 3.0 * torch.eye(size)
    settings: dict[str, Any] = {"upper": upper, "left": left, "unitriangular": unit}
    for shape in ((3, 2), (1, 2), (2,)):
        right = torch.randn(*shape[:-1], *((size, 2) if left else (2, size)))
        assert_same(
            lambda a, b: linear_algebra.solve_triangular(a, b, **settings),
            lambda a, b: torch.linalg.solve_triangular(a.triu() if upper else a.tril(), b, **settings),
            matrix,
            right,
        )


@pytest.mark.parametrize("size", SIZES)
def test_inverses_and_systems(size: int) -> None:
    matrix, right = _matrices(size), torch.randn(3, size, 2)
    assert_same(lambda a: linear_algebra.inverse(a)[0], torch.linalg.inv, matrix)
    assert_same(lambda a, b: linear_algebra.solve(a, b)[0], torch.linalg.solve, matrix, right)
    assert_same(
        lambda a, b: linear_algebra.solve(a, b, left=False)[0],
        lambda a, b: torch.linalg.solve(a, b, left=False),
        matrix,
        right.mT,
    )
    assert_same(lambda a, b: linear_algebra.solve(a, b)[0], torch.linalg.solve, matrix, right[..., 0])


@pytest.mark.parametrize("size", SIZES)
def test_determinants(size: int) -> None:
    matrix = _matrices(size)
    assert_same(lambda a: linear_algebra.determinant(a)[0], torch.linalg.det, matrix)
    assert_same(lambda a: linear_algebra.log_determinant(a)[1], lambda a: torch.linalg.slogdet(a)[1], matrix)
    assert torch.equal(linear_algebra.log_determinant(matrix)[0], torch.linalg.slogdet(matrix)[0])


@pytest.mark.parametrize("upper", [False, True])
def test_systems_with_a_factor(upper: bool) -> None:
    a = _matrices(4)
    factor = torch.linalg.cholesky(a @ a.mT + torch.eye(4), upper=upper)
    assert_same(
        lambda b, f: linear_algebra.cholesky_solve(b, f, upper),
        lambda b, f: torch.cholesky_solve(b, f.triu() if upper else f.tril(), upper),
        torch.randn(3, 4, 2),
        factor,
    )


@pytest.mark.parametrize("function", [linear_algebra.inverse, linear_algebra.determinant, linear_algebra.cholesky])
def test_large_matrices_are_left_alone(function: Callable[..., Any]) -> None:
    assert function(torch.eye(33)) is NotImplemented
