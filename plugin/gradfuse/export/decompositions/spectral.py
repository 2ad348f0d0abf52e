"""Singular values, eigenvalues of symmetric matrices and pseudoinverses of small matrices, by Jacobi's rotations.

Columns are rotated in pairs until all are orthogonal: their lengths are the singular values. What rotations do has no
useful gradient. Instead each result is computed without one, and what a change of the matrix changes in it to first
order is added: the change is 0, and linear in the matrix. All is computed in float64. Singular vectors have either sign,
as PyTorch's have on another machine: a loss that depends on it is refused where it differs from PyTorch's.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import standins
from gradfuse.export.decompositions import linear_algebra

aten = torch.ops.aten

_LARGEST = 12
"""A matrix of so many columns takes some thousands of nodes."""
_FEW = 6
"""So many columns are orthogonal after as many sweeps over all pairs of them, and two after one."""
_SWEEPS = 8
"""How many sweeps more columns have; convergence is quadratic in the end."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten._linalg_svd.default: svd,
        aten._linalg_eigh.default: eigh,
        aten.linalg_pinv.atol_rtol_tensor: pseudoinverse,
        aten.linalg_lstsq.default: least_squares,
    }


def svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_linalg_svd: U, the singular values, of which the largest is first, and the transposed V."""
    if A.numel() == 0 and A.shape[-1] * A.shape[-2] == 0:
        sizes = A.shape[-2:] if full_matrices else (0, 0)
        left, right = (torch.eye(k, size, dtype=A.dtype) for k, size in zip(A.shape[-2:], sizes, strict=True))
        batch = A.shape[:-2]
        return left.expand([*batch, *left.shape]), A.new_zeros([*batch, 0]), right.mT.expand([*batch, *right.mT.shape])
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    if A.shape[-2] < A.shape[-1]:
        left, values, right = svd(A.transpose(-1, -2), full_matrices, compute_uv)
        return right.transpose(-1, -2), values, left.transpose(-1, -2)
    fixed = standins.STOP_GRADIENT(A)
    u, s, v = _rotated(fixed.double())
    change = A.double() - fixed.double()
    by_both = u.transpose(-1, -2) @ change @ v
    values = s + torch.diagonal(by_both, dim1=-2, dim2=-1)
    divisor = torch.where(s == 0.0, 1.0, s).unsqueeze(-2)
    across = s.unsqueeze(-2)
    between = _inverse_of_differences(s.square())
    of_u = (by_both * across + (by_both * across).transpose(-1, -2)) * between
    of_v = (across.transpose(-1, -2) * by_both + (across.transpose(-1, -2) * by_both).transpose(-1, -2)) * between
    outside = (change @ v - u @ by_both) / divisor
    outside_v = (change.transpose(-1, -2) @ u - v @ by_both.transpose(-1, -2)) / divisor
    left, right = u + u @ of_u + outside, v + v @ of_v + outside_v
    if full_matrices and A.shape[-2] > A.shape[-1]:
        whole = linear_algebra.by_reflections(u, A.shape[-2])[0]
        left = torch.cat([left, whole[..., A.shape[-1] :]], -1)
    return left.to(A.dtype), values.to(A.dtype), right.transpose(-1, -2).to(A.dtype)


def eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """aten::_linalg_eigh: the eigenvalues, of which the least is first, and the eigenvectors as columns."""
    if A.shape[-1] == 0:
        return A.sum(-1), A.clone()
    if not _is_small(A):
        return NotImplemented  # type: ignore[no-any-return]
    fixed = standins.STOP_GRADIENT(A)
    given = fixed.double() if UPLO.upper() == "L" else fixed.double().transpose(-1, -2)
    symmetric = given.tril() + given.tril(-1).transpose(-1, -2)
    # No eigenvalue is further below 0 than that.
    shift = symmetric.square().sum((-1, -2), keepdim=True).sqrt()
    one = torch.eye(A.shape[-1], dtype=symmetric.dtype, device=A.device)
    _, s, v = _rotated(symmetric + shift * one)
    values, vectors = (s - shift.squeeze(-1)).flip(-1), v.flip(-1)
    change = A.double() - fixed.double()
    by_both = vectors.transpose(-1, -2) @ ((change + change.transpose(-1, -2)) / 2.0) @ vectors
    found = values + torch.diagonal(by_both, dim1=-2, dim2=-1)
    changed = vectors + vectors @ (by_both * _inverse_of_differences(values))
    return found.to(A.dtype), changed.to(A.dtype)


def pseudoinverse(
    self: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """aten::linalg_pinv: the inverse of what singular values above the tolerance leave of a matrix.

    Golub and Pereyra (1973) have its change: that is right as long as the rank stays.
    """
    if 0 in self.shape[-2:]:
        return self.transpose(-1, -2).clone()
    if not _is_small(self):
        return NotImplemented  # type: ignore[no-any-return]
    fixed = standins.STOP_GRADIENT(self).double()
    tall = fixed if self.shape[-2] >= self.shape[-1] else fixed.transpose(-1, -2)
    u, s, v = _rotated(tall)
    absolute = torch.zeros_like(s[..., 0]) if atol is None else atol.double()
    if rtol is None:
        share = max(self.shape[-2:]) * torch.finfo(self.dtype).eps
        relative = torch.where(absolute > 0.0, 0.0, share) if atol is not None else torch.full_like(s[..., 0], share)
    else:
        relative = rtol.double()
    tolerance = torch.maximum(absolute, relative * s[..., 0]).unsqueeze(-1)
    kept = s > tolerance
    inverse = torch.where(kept, 1.0 / torch.where(kept, s, 1.0), 0.0)
    found = v * inverse.unsqueeze(-2) @ u.transpose(-1, -2)
    if self.shape[-2] < self.shape[-1]:
        found = found.transpose(-1, -2)
    change = self.double() - fixed
    transposed = change.transpose(-1, -2)
    of_found = found.transpose(-1, -2)
    total = -(found @ change @ found)
    if self.shape[-2] != self.shape[-1] or not hermitian:
        total = total + found @ of_found @ (transposed - transposed @ fixed @ found)
        total = total + (transposed - found @ fixed @ transposed) @ of_found @ found
    else:
        total = total + found @ found @ (change - change @ fixed @ found)
        total = total + (change - found @ fixed @ change) @ found @ found
    return (found + total).to(self.dtype)


def least_squares(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::linalg_lstsq: the solution alone; PyTorch gives residuals where they are asked for, which are not."""
    is_vector = b.dim() == self.dim() - 1
    rtol = None if rcond is None else torch.full((), rcond, dtype=torch.float64, device=self.device)
    found = pseudoinverse(self, rtol=rtol)
    if found is NotImplemented:
        return NotImplemented  # type: ignore[no-any-return]
    solution = found @ (b.unsqueeze(-1) if is_vector else b)
    nothing = self.new_zeros((0,))
    return (solution.squeeze(-1) if is_vector else solution), nothing, nothing.to(torch.int64), nothing


def _rotated(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, the singular values and V of matrices, (*, M, N) with M >= N, of which the largest values are first.

    In each round half of the columns are paired with the others, and all but the first move on by one place.
    """
    rows, columns = matrix.shape[-2:]
    one = torch.eye(columns, dtype=matrix.dtype, device=matrix.device).expand([*matrix.shape[:-2], columns, columns])
    table = torch.cat([matrix, one], -2)
    if columns % 2:
        table = torch.nn.functional.pad(table, (0, 1))
    half = table.shape[-1] // 2
    sweeps = columns - 1 if columns <= 2 else _FEW if columns <= _FEW else _SWEEPS
    for _ in range(sweeps * (2 * half - 1)):
        left, right = table[..., :half], table[..., half:].flip(-1)
        a, b = left[..., :rows, :], right[..., :rows, :]
        first, second, product = a.square().sum(-2), b.square().sum(-2), (a * b).sum(-2)
        # Columns that are orthogonal but for rounding stay.
        needed = product.square() > first * second * torch.finfo(matrix.dtype).eps ** 2
        zeta = (second - first) / (2.0 * torch.where(needed, product, 1.0))
        tangent = torch.where(zeta >= 0.0, 1.0, -1.0) / (zeta.abs() + (1.0 + zeta.square()).sqrt())
        tangent = torch.where(needed, tangent, 0.0)
        cosine = 1.0 / (1.0 + tangent.square()).sqrt()
        cosine, sine = cosine.unsqueeze(-2), (cosine * tangent).unsqueeze(-2)
        left, right = cosine * left - sine * right, sine * left + cosine * right
        circle = torch.cat([left[..., 1:], right.flip(-1)], -1)
        table = torch.cat([left[..., :1], circle[..., -1:], circle[..., :-1]], -1)
    lengths = table[..., :rows, :].square().sum(-2).sqrt()
    # The column of zeros that was added has no part in V.
    real = table[..., rows:, :].square().sum(-2) > 0.5
    order = torch.where(real, lengths, -1.0).sort(dim=-1, descending=True)[1][..., :columns]
    s = lengths.gather(-1, order)
    chosen = table.gather(-1, order.unsqueeze(-2).expand([*table.shape[:-1], columns]))
    u = chosen[..., :rows, :] / torch.where(s == 0.0, 1.0, s).unsqueeze(-2)
    return u, s, chosen[..., rows:, :]


def _inverse_of_differences(values: Tensor) -> Tensor:
    """Return 1 / (value j - value i) for i and j, 0 where they are equal."""
    difference = values.unsqueeze(-2) - values.unsqueeze(-1)
    apart = difference != 0.0
    return torch.where(apart, 1.0 / torch.where(apart, difference, 1.0), 0.0)


def _is_small(matrix: Tensor) -> bool:
    sizes = matrix.shape[-2:]
    static = all(isinstance(size, int) and size > 0 for size in sizes)
    return static and min(sizes) <= _LARGEST and not matrix.is_complex()
