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


@pytest.mark.parametrize("upper", [False, True])
def test_inverses_from_factors(upper: bool) -> None:
    factor = _matrices(4) + 3.0 * torch.eye(4)
    assert_same(
        lambda a: linear_algebra.cholesky_inverse(a, upper),
        lambda a: torch.cholesky_inverse(a.triu() if upper else a.tril(), upper),
        factor,
    )


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_systems_of_the_old_name(upper: bool, transpose: bool, unit: bool) -> None:
    assert_same(
        lambda b, a: linear_algebra.triangular_solve(b, a, upper, transpose, unit)[0],
        lambda b, a: torch.triangular_solve(b, a, upper, transpose, unit)[0],
        torch.randn(3, 4, 2),
        _matrices(4) + 3.0 * torch.eye(4),
    )


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 3), (3, 5)])
@pytest.mark.parametrize("pivot", [True, False])
def test_factors_by_elimination(shape: tuple[int, int], pivot: bool) -> None:
    matrices = _matrices(5)[:, : shape[0], : shape[1]].clone()
    matrices[0, -1, 0] = 1.0
    if not pivot:
        # PyTorch eliminates without exchanges on GPUs alone.
        permutation, lower, upper = linear_algebra.lu(matrices, pivot=False)
        assert permutation.numel() == 0
        matrices = matrices[1:]
        torch.testing.assert_close(lower[1:] @ upper[1:], matrices, rtol=1e-4, atol=1e-4)
        return
    for native, ours in zip(torch.linalg.lu_factor(matrices), linear_algebra.lu_factor(matrices), strict=False):
        torch.testing.assert_close(ours, native)
    assert_same(lambda a: linear_algebra.lu_factor(a)[0], lambda a: torch.linalg.lu_factor(a)[0], matrices)
    for part in range(3):
        if part:
            assert_same(lambda a, k=part: linear_algebra.lu(a)[k], lambda a, k=part: torch.linalg.lu(a)[k], matrices)
        else:
            assert torch.equal(linear_algebra.lu(matrices)[0], torch.linalg.lu(matrices)[0])


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
def test_systems_with_factors(left: bool, adjoint: bool) -> None:
    factors, pivots = torch.linalg.lu_factor(_matrices(4))
    assert_same(
        lambda f, b: linear_algebra.lu_solve(f, pivots, b, left=left, adjoint=adjoint),
        lambda f, b: torch.linalg.lu_solve(f, pivots, b, left=left, adjoint=adjoint),
        factors,
        torch.randn(3, 4, 2) if left else torch.randn(3, 2, 4),
    )


@pytest.mark.parametrize(
    ("shape", "mode"),
    [((4, 4), "reduced"), ((5, 3), "reduced"), ((3, 5), "reduced"), ((4, 4), "complete"), ((1, 1), "reduced")],
)
def test_factors_by_reflections(shape: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)
    matrices = _matrices(5)[:, : shape[0], : shape[1]].clone()
    matrices[1] = matrices[1].triu()
    matrices[0, 0, 0] = float(shape == (1, 1))
    for part in range(2):
        assert_same(
            lambda a, k=part: linear_algebra.qr(a, mode)[k], lambda a, k=part: torch.linalg.qr(a, mode)[k], matrices
        )


def test_factors_by_reflections_that_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)
    matrices = _matrices(5)[:, :, :3]
    for mode in ("r", "complete"):
        for ours, native in zip(linear_algebra.qr(matrices, mode), torch.linalg.qr(matrices, mode), strict=True):
            torch.testing.assert_close(ours, native)


def test_products_of_reflections() -> None:
    assert_same(
        linear_algebra.householder_product, torch.linalg.householder_product, _matrices(5)[:, :, :3], torch.rand(3, 2)
    )


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0])
def test_exponentials_of_matrices(size: float) -> None:
    matrix = _matrices(4) * size
    jacobian: Any = torch.autograd.functional.jacobian
    ours, native = (
        jacobian(function, matrix[:1].double() / max(size, 1.0))
        for function in (linear_algebra.matrix_exponential, torch.linalg.matrix_exp)
    )
    torch.testing.assert_close(ours, native, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        linear_algebra.matrix_exponential(matrix.double()),
        torch.linalg.matrix_exp(matrix.double()),
        rtol=1e-8,
        atol=1e-12,
    )


def test_what_checks_no_errors() -> None:
    matrix = _matrices(4)
    assert_same(linear_algebra.inverse_alone, torch.linalg.inv, matrix)
    assert_same(linear_algebra.solution_alone, torch.linalg.solve, matrix, torch.randn(3, 4, 2))
    tensor = torch.randn(4, 3, 6, 2)
    assert_same(lambda a: linear_algebra.tensor_inverse(a, 2), lambda a: torch.linalg.tensorinv(a, ind=2), tensor)
