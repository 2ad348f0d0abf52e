"""Factors, inverses and determinants of small matrices, one column after the other.

Their gradients are those of the steps. Matrices may be any number, of a size that does not vary. This module imports
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import standins

aten = torch.ops.aten

_LARGEST = 32
"""A matrix of this size takes some hundreds of nodes."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.linalg_cholesky_ex.default: cholesky,
        aten.linalg_solve_triangular.default: solve_triangular,
        aten.cholesky_solve.default: cholesky_solve,
        aten.linalg_inv_ex.default: inverse,
        aten._linalg_solve_ex.default: solve,
        aten._linalg_det.default: determinant,
        aten._linalg_slogdet.default: log_determinant,
    }


def cholesky(self: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """aten::linalg_cholesky_ex: of a matrix that is taken to be symmetric, of which one triangle is read.

    Each triangle gets half of the gradient.
    """
    if not _is_small(self):
        return NotImplemented  # type: ignore[no-any-return]
    size = self.shape[-1]
    given = self.transpose(-1, -2) if upper else self
    read = given.tril() + given.tril(-1).transpose(-1, -2)
    mean = (self + self.transpose(-1, -2)) / 2.0
    matrix = mean + standins.STOP_GRADIENT(read - mean)
    columns: list[Tensor] = []
    for k in range(size):
        rest = matrix[..., k:, k : k + 1]
        if columns:
            known = torch.cat(columns, -1)[..., k:, :]
            rest = rest - known @ known[..., :1, :].transpose(-1, -2)
        column = rest / rest[..., :1, :].sqrt()
        columns.append(torch.nn.functional.pad(column, (0, 0, k, 0)))
    factor = torch.cat(columns, -1)
    return (factor.transpose(-1, -2) if upper else factor), _no_errors(self)


def solve_triangular(self: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """aten::linalg_solve_triangular: A X = B, or X A = B, row by row."""
    if not _is_small(self):
        return NotImplemented  # type: ignore[no-any-return]
    if not left:
        transposed = solve_triangular(
            self.transpose(-1, -2), B.transpose(-1, -2), upper=not upper, unitriangular=unitriangular
        )
        return transposed.transpose(-1, -2)
    size = self.shape[-1]
    B = B.expand([*_shape(self, B), *B.shape[-2:]])
    rows: dict[int, Tensor] = {}
    for k in reversed(range(size)) if upper else range(size):
        row = B[..., k : k + 1, :]
        if rows:
            known = sorted(rows)
            row = row - self[..., k : k + 1, known[0] : known[-1] + 1] @ torch.cat([rows[one] for one in known], -2)
        rows[k] = row if unitriangular else row / self[..., k : k + 1, k : k + 1]
    return torch.cat([rows[k] for k in range(size)], -2)


def cholesky_solve(self: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
    """aten::cholesky_solve: A X = B for a factor of A."""
    if not _is_small(input2):
        return NotImplemented  # type: ignore[no-any-return]
    lower = input2.transpose(-1, -2) if upper else input2
    return solve_triangular(lower.transpose(-1, -2), solve_triangular(lower, self, upper=False), upper=True)


def inverse(A: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """aten::linalg_inv_ex."""
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return _eliminated(A, one.expand(A.shape))[0], _no_errors(A)


def solve(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::_linalg_solve_ex: A X = B, or X A = B. Its factors are not given, as gradients alone read them."""
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    is_vector = B.dim() == A.dim() - 1
    columns = B.unsqueeze(-1) if is_vector else B
    if left:
        result = _eliminated(A, columns)[0]
    else:
        result = _eliminated(A.transpose(-1, -2), columns.transpose(-1, -2))[0].transpose(-1, -2)
    return (result.squeeze(-1) if is_vector else result), A, _pivots(A), _no_errors(A)


def determinant(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_linalg_det."""
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    _, pivots, sign = _eliminated(A, A[..., :0])
    result = sign
    for pivot in pivots:
        result = result * pivot
    return result, A, _pivots(A)


def log_determinant(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::_linalg_slogdet: the sign and the logarithm of the determinant."""
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    _, pivots, sign = _eliminated(A, A[..., :0])
    stacked = torch.stack(pivots, -1)
    for pivot in pivots:
        sign = sign * pivot.sign()
    return sign, stacked.abs().log().sum(-1), A, _pivots(A)


def _eliminated(matrix: Tensor, columns: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the solution for right sides, the pivots, and the sign of how rows are exchanged, by Gauss and Jordan."""
    size = matrix.shape[-1]
    shape = _shape(matrix, columns)
    table = torch.cat([matrix.expand([*shape, *matrix.shape[-2:]]), columns.expand([*shape, *columns.shape[-2:]])], -1)
    places = torch.arange(size, device=matrix.device)
    sign = torch.ones_like(table[..., 0, 0])
    pivots = []
    for k in range(size):
        largest = table[..., k:, k].abs().argmax(-1, keepdim=True) + k
        order = torch.where(places == k, largest, torch.where(places == largest, k, places))
        table = table.gather(-2, order.unsqueeze(-1).expand(table.shape))
        sign = torch.where(largest.squeeze(-1) == k, sign, -sign)
        pivot = table[..., k : k + 1, k : k + 1]
        pivots.append(pivot[..., 0, 0])
        row = table[..., k : k + 1, :] / pivot
        others = torch.where((places == k).unsqueeze(-1), 0.0, table[..., k : k + 1])
        table = torch.where((places == k).unsqueeze(-1), row, table - others * row)
    return table[..., size:], pivots, sign


def _shape(one: Tensor, other: Tensor) -> tuple[Any, ...]:
    """Return how many matrices two tensors have together."""
    return tuple(torch.broadcast_shapes(one.shape[:-2], other.shape[:-2]))  # type: ignore[no-untyped-call]


def _is_small(matrix: Tensor) -> bool:
    size = matrix.shape[-1]
    return isinstance(size, int) and 0 < size <= _LARGEST and not matrix.is_complex()


def _pivots(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(matrix.shape[:-1], dtype=torch.int32)


def _no_errors(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(matrix.shape[:-2], dtype=torch.int32)
