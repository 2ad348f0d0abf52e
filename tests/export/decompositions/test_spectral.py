"""Singular values, eigenvalues and pseudoinverses are PyTorch's, as are their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from export.decompositions.test_products import assert_same
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.export import standins
from gradfuse.export.decompositions import spectral
from gradfuse.testing import assert_gradients_close

SHAPES = [(1, 1), (4, 4), (5, 3), (3, 6), (12, 12), (30, 2)]


@pytest.fixture(autouse=True)
def _gradients_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program, a rule of its own ends gradients."""
    monkeypatch.setattr(standins, "STOP_GRADIENT", Tensor.detach)


def _matrices(*shape: int) -> Tensor:
    torch.manual_seed(shape[0])
    return torch.randn(2, *shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("full", [False, True])
def test_singular_values_and_vectors(shape: tuple[int, int], full: bool) -> None:
    matrix = _matrices(*shape)
    assert_same(lambda a: spectral.svd(a, full)[1], lambda a: torch.linalg.svd(a, full_matrices=full)[1], matrix)
    u, s, vh = spectral.svd(matrix, full)
    least = min(shape)
    torch.testing.assert_close(u[..., :least] * s.unsqueeze(-2) @ vh[..., :least, :], matrix)
    torch.testing.assert_close(u.mT @ u, torch.eye(u.shape[-1], dtype=u.dtype).expand(2, -1, -1))
    # Vectors have either sign.
    assert_same(lambda a: spectral.svd(a)[0] ** 2, lambda a: torch.linalg.svd(a, full_matrices=False)[0] ** 2, matrix)
    assert_same(lambda a: spectral.svd(a)[2] ** 2, lambda a: torch.linalg.svd(a, full_matrices=False)[2] ** 2, matrix)


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigenvalues_and_eigenvectors(size: int, triangle: str) -> None:
    matrix = _matrices(size, size)
    matrix = (matrix + matrix.mT) / 2.0
    # The other triangle is not read.
    uneven = matrix + (matrix.triu(1) if triangle == "L" else matrix.tril(-1))
    assert_same(lambda a: spectral.eigh(a, triangle)[0], lambda a: torch.linalg.eigh(a, UPLO=triangle)[0], uneven)
    assert_same(
        lambda a: spectral.eigh(a, triangle)[1] ** 2, lambda a: torch.linalg.eigh(a, UPLO=triangle)[1] ** 2, uneven
    )


def test_eigenvalues_of_either_sign_and_of_zeros() -> None:
    matrix = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(spectral.eigh(matrix)[0], torch.tensor([-1.0, 1.0], dtype=torch.float64))
    assert torch.equal(spectral.eigh(torch.zeros(3, 3))[0], torch.zeros(3))
    assert torch.equal(spectral.svd(torch.zeros(4, 3))[1], torch.zeros(3))


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 3), (3, 6)])
@pytest.mark.parametrize("rank", [1, None])
def test_pseudoinverses(shape: tuple[int, int], rank: int | None) -> None:
    matrix = _matrices(*shape)
    if rank is None:
        assert_same(spectral.pseudoinverse, torch.linalg.pinv, matrix)
        return
    column, row = matrix[..., :1], matrix[..., :1, :]
    assert_same(lambda c, r: spectral.pseudoinverse(c @ r), lambda c, r: torch.linalg.pinv(c @ r), column, row)


@pytest.mark.parametrize("tolerances", [{"atol": 1.5}, {"rtol": 0.5}, {"atol": 0.1, "rtol": 0.5}])
def test_tolerances_of_pseudoinverses(tolerances: dict[str, float]) -> None:
    given: dict[str, Any] = {name: torch.tensor(one, dtype=torch.float64) for name, one in tolerances.items()}
    matrix = _matrices(4, 4)
    torch.testing.assert_close(spectral.pseudoinverse(matrix, **given), torch.linalg.pinv(matrix, **given))


class _Values(nn.Module):
    def __init__(self, matrix: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.matrix)


@pytest.mark.parametrize(
    ("matrix", "function"),
    [
        (torch.arange(1.0, 13.0).reshape(4, 3).sin(), torch.linalg.svdvals),
        (torch.arange(1.0, 31.0).reshape(2, 3, 5).sin(), lambda a: torch.linalg.svd(a, full_matrices=False)[2].abs()),
        (torch.arange(1.0, 26.0).reshape(5, 5).sin(), lambda a: torch.linalg.eigh(a + a.mT)[1].abs()),
        (torch.arange(1.0, 145.0).square().reshape(12, 12).sin(), lambda a: torch.linalg.eigvalsh(a + a.mT)),
        (torch.tensor([[2.0]]), torch.linalg.pinv),
        # Of rank 1, and with eigenvalues of one size and either sign.
        (torch.tensor([[1.0], [2.0], [3.0]]), lambda a: torch.linalg.pinv(a @ a.mT)),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.linalg.eigvalsh),
    ],
)
@pytest.mark.sampled(every=3)
def test_steps_rotate_by_a_loop(
    matrix: Tensor, function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    module = _Values(matrix, function)

    def loss(values: Tensor, weights: Tensor) -> Tensor:
        return (values * weights).sum()

    weights = torch.rand(function(matrix).shape, generator=torch.Generator().manual_seed(0))
    batch: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), (weights,))
    step = export_training_step(module, loss, batch)
    assert len(step.model.graph.node) < 120
    results = run(step, batch, kernels=True)
    native, exact = (autograd(module, loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in results.items():
        assert_gradients_close(result, native[name], exact[name], "float32")
