"""Singular values, eigenvalues of symmetric matrices and pseudoinverses, by Jacobi's rotations.

Columns are rotated in pairs until all are orthogonal: their lengths are the singular values. What rotations do has no
useful gradient. Instead each result is computed without one, and what a change of the matrix changes in it to first
order is added: the change is 0, and linear in the matrix. All is computed in float64. Singular vectors have either
sign, as PyTorch's have on another machine: a loss that depends on it is refused where it differs from PyTorch's.

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


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten._linalg_svd.default: svd,
        aten._linalg_eigh.default: eigh,
        aten.linalg_pinv.atol_rtol_tensor: pseudoinverse,
    }


def svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_linalg_svd: U, the singular values, of which the largest is first, and the transposed V."""
    if 0 in A.shape:
        batch, (rows, columns) = A.shape[:-2], A.shape[-2:]
        least = min(rows, columns)
        left = torch.eye(rows, rows if full_matrices else least, dtype=A.dtype, device=A.device)
        right = torch.eye(columns if full_matrices else least, columns, dtype=A.dtype, device=A.device)
        return left.expand([*batch, *left.shape]), A.new_zeros([*batch, least]), right.expand([*batch, *right.shape])
    if not _is_real(A):
        return NotImplemented  # type: ignore[no-any-return]
    if A.shape[-2] < A.shape[-1]:
        left, values, right = svd(A.transpose(-1, -2), full_matrices, compute_uv)
        return right.transpose(-1, -2), values, left.transpose(-1, -2)
    fixed = standins.STOP_GRADIENT(A)
    u, s, v = standins.ROTATED(fixed.double())
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
    if 0 in A.shape:
        return A.new_zeros(A.shape[:-1]), A.clone()
    if not _is_real(A):
        return NotImplemented  # type: ignore[no-any-return]
    fixed = standins.STOP_GRADIENT(A)
    given = fixed.double() if UPLO.upper() == "L" else fixed.double().transpose(-1, -2)
    symmetric = given.tril() + given.tril(-1).transpose(-1, -2)
    # No eigenvalue is further below 0 than that.
    shift = symmetric.square().sum((-1, -2), keepdim=True).sqrt()
    one = torch.eye(A.shape[-1], dtype=symmetric.dtype, device=A.device)
    _, s, v = standins.ROTATED(symmetric + shift * one)
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
    if 0 in self.shape:
        return self.transpose(-1, -2).clone()
    if not _is_real(self):
        return NotImplemented  # type: ignore[no-any-return]
    fixed = standins.STOP_GRADIENT(self).double()
    tall = fixed if self.shape[-2] >= self.shape[-1] else fixed.transpose(-1, -2)
    u, s, v = standins.ROTATED(tall)
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
    total = total + found @ of_found @ (transposed - transposed @ fixed @ found)
    total = total + (transposed - found @ fixed @ transposed) @ of_found @ found
    result: Tensor = (found + total).to(self.dtype)
    return result


def _inverse_of_differences(values: Tensor) -> Tensor:
    """Return 1 / (value j - value i) for i and j, 0 where they are equal."""
    difference = values.unsqueeze(-2) - values.unsqueeze(-1)
    apart = difference != 0.0
    return torch.where(apart, 1.0 / torch.where(apart, difference, 1.0), 0.0)


def _is_real(matrix: Tensor) -> bool:
    return all(isinstance(size, int) and size > 0 for size in matrix.shape[-2:]) and not matrix.is_complex()
