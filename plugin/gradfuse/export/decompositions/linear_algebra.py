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
        # Up to PyTorch 2.13.
        **({aten.cholesky.default: cholesky_factor} if hasattr(aten, "cholesky") else {}),
        aten.cholesky_solve.default: cholesky_solve,
        aten.cholesky_inverse.default: cholesky_inverse,
        aten.triangular_solve.default: triangular_solve,
        aten.linalg_lu_factor_ex.default: lu_factor,
        aten.linalg_lu.default: lu,
        aten.linalg_lu_solve.default: lu_solve,
        aten.lu_unpack.default: lu_unpack,
        aten.linalg_qr.default: qr,
        aten.linalg_householder_product.default: householder_product,
        aten.ormqr.default: reflections_applied,
        aten.linalg_matrix_exp.default: matrix_exponential,
        aten.linalg_inv_ex.default: inverse,
        aten.linalg_inv.default: inverse_alone,
        aten.linalg_solve.default: solution_alone,
        aten.linalg_tensorinv.default: tensor_inverse,
        aten._linalg_solve_ex.default: solve,
        aten._linalg_det.default: determinant,
        aten._linalg_slogdet.default: log_determinant,
    }


def cholesky(self: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """aten::linalg_cholesky_ex: of a matrix that is taken to be symmetric, of which one triangle is read.

    Each triangle gets half of the gradient.
    """
    if _is_empty(self):
        return self.clone(), _no_errors(self)
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


def cholesky_factor(self: Tensor, upper: bool = False) -> Tensor:
    """aten::cholesky."""
    found = cholesky(self, upper=upper)
    return found if found is NotImplemented else found[0]


def solve_triangular(self: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """aten::linalg_solve_triangular: A X = B, or X A = B, row by row."""
    if 0 in B.shape:
        return B.new_zeros([*_shape(self, B), *B.shape[-2:]])
    if 0 in B.shape[-2:]:
        return B.new_zeros([*_shape(self, B), *B.shape[-2:]])
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
    if 0 in self.shape:
        return self.new_zeros([*_shape(self, input2), *self.shape[-2:]])
    if not _is_small(input2):
        return NotImplemented  # type: ignore[no-any-return]
    lower = input2.transpose(-1, -2) if upper else input2
    return solve_triangular(lower.transpose(-1, -2), solve_triangular(lower, self, upper=False), upper=True)


def cholesky_inverse(self: Tensor, upper: bool = False) -> Tensor:
    """aten::cholesky_inverse: the inverse of the matrix that a factor is of."""
    one = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
    return cholesky_solve(one.expand(self.shape), self, upper)


def triangular_solve(
    self: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """aten::triangular_solve: A X = B, or with the transposed A, for the B that comes first; and A."""
    matrix = A.transpose(-1, -2) if transpose else A
    solution = solve_triangular(matrix, self, upper=upper != transpose, unitriangular=unitriangular)
    return NotImplemented if solution is NotImplemented else (solution, A.clone())


def lu_factor(A: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """aten::linalg_lu_factor_ex: both factors in one matrix, and with which row each was exchanged, from 1."""
    if _is_empty(A):
        return A.clone(), A.new_zeros([*A.shape[:-2], 0], dtype=torch.int32), _no_errors(A)
    if not all(isinstance(size, int) and 0 < size <= _LARGEST for size in A.shape[-2:]) or A.is_complex():
        return NotImplemented  # type: ignore[no-any-return]
    rows, columns = A.shape[-2:]
    places = torch.arange(rows, device=A.device)
    table, pivots = A, []
    for k in range(min(rows, columns)):
        if pivot:
            largest = table[..., k:, k].abs().argmax(-1, keepdim=True) + k
            table = _exchanged(table, k, largest)
        else:
            largest = torch.full_like(table[..., :1, k], k, dtype=torch.int64)
        pivots.append(largest + 1)
        below = (places > k).unsqueeze(-1)
        factors = torch.where(below, table[..., k : k + 1] / table[..., k : k + 1, k : k + 1], 0.0)
        rest = table[..., k + 1 :] - factors * table[..., k : k + 1, k + 1 :]
        column = torch.where(below, factors, table[..., k : k + 1])
        table = torch.cat([table[..., :k], column, rest], -1)
    return table, torch.cat(pivots, -1).to(torch.int32), _no_errors(A)


def lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """aten::linalg_lu: a permutation, which is empty without pivots, and the two factors."""
    found = lu_factor(A, pivot=pivot)
    if found is NotImplemented:
        return NotImplemented  # type: ignore[no-any-return]
    return lu_unpack(found[0], found[1], unpack_pivots=pivot)


def lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::lu_unpack: the permutation, the lower and the upper factor; those that are not wanted are empty."""
    rows, columns = LU_data.shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int) or not 0 < max(rows, columns) <= _LARGEST:
        return NotImplemented  # type: ignore[no-any-return]
    least = min(rows, columns)
    nothing = LU_data.new_zeros((0,))
    permutation, lower, upper = nothing, nothing, nothing
    if unpack_pivots:
        one = torch.eye(rows, dtype=LU_data.dtype, device=LU_data.device)
        permuted = one.expand([*LU_pivots.shape[:-1], rows, rows])
        for k in range(LU_pivots.shape[-1]):
            permuted = _exchanged(permuted, k, LU_pivots[..., k : k + 1].to(torch.int64) - 1)
        permutation = permuted.transpose(-1, -2)
    if unpack_data:
        one = torch.eye(rows, least, dtype=LU_data.dtype, device=LU_data.device)
        lower, upper = LU_data[..., :least].tril(-1) + one, LU_data[..., :least, :].triu()
    return permutation, lower, upper


def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """aten::linalg_lu_solve: A X = B, or X A = B, or with the transposed A, for the factors of A."""
    if not _is_small(LU):
        return NotImplemented  # type: ignore[no-any-return]
    if not left:
        solution = lu_solve(LU, pivots, B.transpose(-1, -2), adjoint=not adjoint)
        return solution.transpose(-1, -2)
    permutation, _, _ = lu_unpack(LU, pivots, unpack_data=False)
    if adjoint:
        inner = solve_triangular(LU.transpose(-1, -2), B, upper=False)
        return permutation @ solve_triangular(LU.transpose(-1, -2), inner, upper=True, unitriangular=True)
    inner = solve_triangular(LU, permutation.transpose(-1, -2) @ B, upper=False, unitriangular=True)
    return solve_triangular(LU, inner, upper=True)


def _exchanged(table: Tensor, k: int, other: Tensor) -> Tensor:
    """Return matrices, (*, M, N), in which row k and another one, (*, 1), have changed places."""
    places = torch.arange(table.shape[-2], device=table.device)
    order = torch.where(places == k, other, torch.where(places == other, k, places))
    return table.gather(-2, order.unsqueeze(-1).expand(table.shape))


def qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """aten::linalg_qr by Householder's reflections: the diagonal of R has the signs that LAPACK gives it.

    With X = Q^T dA R^-1 and S the skew matrix that has X below its diagonal, dR is (X - S) R, and dQ R is dA - Q dR. As
    in PyTorch there is a gradient unless Q has columns that are no combinations of those of A.
    """
    if not all(isinstance(size, int) and 0 < size <= _LARGEST for size in A.shape[-2:]) or A.is_complex():
        return NotImplemented  # type: ignore[no-any-return]
    rows, columns = A.shape[-2:]
    least = min(rows, columns)
    fixed = standins.STOP_GRADIENT(A)
    count = rows if mode == "complete" else least
    q, r = by_reflections(fixed, count)
    if mode == "r":
        return A.new_zeros((0,)), r
    if count > columns:
        return q, r
    change = A - fixed
    square, first = r[..., :count], change[..., :count]
    # What solves by R^-1 from the right.
    x = q.transpose(-1, -2) @ solve_triangular(square, first, upper=True, left=False)
    skew = x.tril(-1) - x.tril(-1).transpose(-1, -2)
    of_r = (x - skew) @ square
    of_q = solve_triangular(square, first - q @ of_r, upper=True, left=False)
    if columns > count:
        more = of_q.transpose(-1, -2) @ fixed[..., count:] + q.transpose(-1, -2) @ change[..., count:]
        of_r = torch.cat([of_r, more], -1)
    return q + of_q, r + of_r


def by_reflections(A: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first columns of Q, and as many rows of R."""
    table, reflections = A, []
    for k in range(min(A.shape[-1], A.shape[-2] - 1)):
        head, tail = table[..., k : k + 1, k : k + 1], table[..., k + 1 :, k : k + 1]
        squares = tail.square().sum(-2, keepdim=True)
        # Nothing is reflected where the column is that of R already.
        done = squares == 0
        norm = torch.where(done, 1.0, squares + head.square()).sqrt()
        beta = torch.where(head >= 0, -norm, norm)
        divisor = torch.where(done, 1.0, head - beta)
        vector = torch.cat([torch.zeros_like(table[..., :k, :1]), torch.ones_like(head), tail / divisor], -2)
        factor = torch.where(done, 0.0, (beta - head) / beta)
        reflections.append((vector, factor))
        table = table - factor * vector * (vector.transpose(-1, -2) @ table)
    return _reflected(A, reflections, count), table[..., :count, :].triu()


def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """aten::linalg_householder_product: the first columns of the product of reflections, (*, M, N) and (*, K)."""
    if _is_empty(input):
        return input.clone()
    if not all(isinstance(size, int) and 0 < size <= _LARGEST for size in input.shape[-2:]) or input.is_complex():
        return NotImplemented  # type: ignore[no-any-return]
    return _reflected(input, _reflections(input, tau), input.shape[-1])


def reflections_applied(
    self: Tensor, input2: Tensor, input3: Tensor, left: bool = True, transpose: bool = False
) -> Tensor:
    """aten::ormqr: Q C, C Q or those with the transposed Q, for the product Q of reflections and the C of `input3`."""
    if not all(isinstance(size, int) and 0 < size <= _LARGEST for size in self.shape[-2:]) or self.is_complex():
        return NotImplemented  # type: ignore[no-any-return]
    reflections = _reflections(self, input2)
    result = input3 if left else input3.transpose(-1, -2)
    # The last reflection is the first that a product with columns applies.
    for vector, factor in reversed(reflections) if left != transpose else reflections:
        result = result - factor * vector * (vector.transpose(-1, -2) @ result)
    return result if left else result.transpose(-1, -2)


def _reflections(input: Tensor, tau: Tensor) -> list[tuple[Tensor, Tensor]]:
    reflections = []
    for k in range(tau.shape[-1]):
        head = torch.ones_like(input[..., :1, :1])
        vector = torch.cat([torch.zeros_like(input[..., :k, :1]), head, input[..., k + 1 :, k : k + 1]], -2)
        reflections.append((vector, tau[..., k : k + 1].unsqueeze(-1)))
    return reflections


def _reflected(like: Tensor, reflections: list[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """Return the first columns of a product of reflections 1 - factor vector vector^T."""
    product = torch.eye(like.shape[-2], count, dtype=like.dtype, device=like.device)
    product = product.expand([*like.shape[:-1], count])
    for vector, factor in reversed(reflections):
        product = product - factor * vector * (vector.transpose(-1, -2) @ product)
    return product


_TERMS, _SQUARINGS = 14, 10


def matrix_exponential(self: Tensor) -> Tensor:
    """aten::linalg_matrix_exp in float64: the series for a 1024th of the matrix, squared ten times."""
    if not isinstance(self.shape[-1], int) or self.is_complex():
        return NotImplemented  # type: ignore[no-any-return]
    x = self.double() / 2.0**_SQUARINGS
    one = torch.eye(self.shape[-1], dtype=x.dtype, device=self.device)
    # Without the one, which would take the digits of the rest, until the end.
    result = x
    for k in range(_TERMS, 1, -1):
        result = x + x @ result / k
    for _ in range(_SQUARINGS):
        result = 2.0 * result + result @ result
    return (result + one).to(self.dtype)


def inverse(A: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """aten::linalg_inv_ex."""
    if _is_empty(A):
        return A.clone(), _no_errors(A)
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return _eliminated(A, one.expand(A.shape))[0], _no_errors(A)


def inverse_alone(A: Tensor) -> Tensor:
    """aten::linalg_inv, without a check for singular matrices, which PyTorch's own run has passed."""
    return inverse(A)[0] if _is_small(A) or _is_empty(A) else NotImplemented


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


def tensor_inverse(self: Tensor, ind: int = 2) -> Tensor:
    """aten::linalg_tensorinv, whose first axes are the rows of a matrix, and the others its columns."""
    rows, columns = self.shape[:ind], self.shape[ind:]
    result = inverse_alone(self.flatten(ind).flatten(0, ind - 1))
    return NotImplemented if result is NotImplemented else result.view([*columns, *rows])


def solution_alone(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """aten::linalg_solve, likewise."""
    result: Tensor = torch.linalg.solve_ex(A, B, left=left)[0]
    return result


def determinant(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_linalg_det."""
    if _is_empty(A):
        return A.new_ones(A.shape[:-2]), A, _pivots(A)
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    _, pivots, sign = _eliminated(A, A[..., :0])
    result = sign
    for pivot in pivots:
        result = result * pivot
    return result, A, _pivots(A)


def log_determinant(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::_linalg_slogdet: the sign and the logarithm of the determinant."""
    if _is_empty(A):
        return A.new_ones(A.shape[:-2]), A.new_zeros(A.shape[:-2]), A, _pivots(A)
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    _, pivots, sign = _eliminated(A, A[..., :0])
    stacked = torch.stack(pivots, -1)
    for pivot in pivots:
        sign = sign * pivot.sign()
    # onnxruntime 1.31 loses the gradient of a sum over one element.
    total = stacked.abs().log().sum(-1) if len(pivots) > 1 else pivots[0].abs().log()
    return sign, total, A, _pivots(A)


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
        table = _exchanged(table, k, largest)
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


def _is_empty(matrix: Tensor) -> bool:
    return 0 in matrix.shape


def _is_small(matrix: Tensor) -> bool:
    size = matrix.shape[-1]
    return isinstance(size, int) and 0 < size <= _LARGEST and not matrix.is_complex()


def _pivots(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(matrix.shape[:-1], dtype=torch.int32)


def _no_errors(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(matrix.shape[:-2], dtype=torch.int32)
