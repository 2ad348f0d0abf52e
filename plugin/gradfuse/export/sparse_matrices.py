"""Products with sparse matrices while a step is traced: rows that are gathered, multiplied, and added up by index.

A graph has no sparse tensors. It holds the places and values of a matrix's elements as dense vectors: as constants, if
the module keeps the matrix; or as the step computes them, if it makes the matrix. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import explaining
from gradfuse.export.leaves import is_sparse_matrix
from gradfuse.export.reporting import refusal

_EXPECTED = "expected products of a sparse and a dense matrix, or sums by index_add or scatter_add"


class SparseMatrix:
    """A sparse matrix in a traced program.

    Attributes:
        rows: the row of each element, (E).
        columns: the column of each element, (E).
        elements: their values, (E); those at one place add up.
        shape: how many rows and columns the matrix has.
    """

    is_sparse = True
    layout = torch.sparse_coo
    ndim = 2

    def __init__(self, rows: Tensor, columns: Tensor, elements: Tensor, shape: tuple[Any, ...]) -> None:
        self.rows, self.columns, self.elements, self.shape = rows, columns, elements, shape

    @classmethod
    def of(cls, matrix: Tensor) -> SparseMatrix:
        """Return a matrix whose elements are constants."""
        with private.untraced():
            listed = matrix.detach().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
            rows, columns = (one.clone() for one in listed.indices())
            return cls(rows, columns, listed.values().clone(), tuple(listed.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    @property
    def device(self) -> torch.device:
        return self.elements.device

    @property
    def T(self) -> SparseMatrix:
        return self.t()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def t(self) -> SparseMatrix:
        return SparseMatrix(self.columns, self.rows, self.elements, self.shape[::-1])

    def transpose(self, dim0: int, dim1: int) -> SparseMatrix:
        return self if dim0 % self.ndim == dim1 % self.ndim else self.t()

    def coalesce(self) -> SparseMatrix:
        return self

    def mm(self, dense: Any) -> Tensor:
        return product(self, dense)

    matmul = mv = __matmul__ = mm

    def __rmatmul__(self, dense: Any) -> Tensor:
        return product(dense, self)

    def to_dense(self) -> Tensor:
        rows, columns = self.shape
        flat = self.elements.new_zeros((rows * columns,)).index_add(
            0, self.rows * columns + self.columns, self.elements
        )
        return flat.view(rows, columns)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(name)

    def __mul__(self, other: Any) -> Any:
        raise _refused("*")

    __rmul__ = __add__ = __radd__ = __sub__ = __truediv__ = __pow__ = __neg__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refused(getattr(func, "__name__", str(func)))


def _refused(name: str) -> Exception:
    return refusal(f"the step uses {name} of a sparse matrix{_where()}; {_EXPECTED}")


def _where() -> str:
    place = explaining.current_place()
    return "" if place is None else f", in {place}"


def product(first: Any, second: Any) -> Tensor:
    """Return the product of two matrices of which one is sparse, or of a matrix and a vector.

    Raises:
        ExportError: both are sparse.
        RuntimeError: their sizes do not fit.
    """
    if isinstance(first, SparseMatrix) and isinstance(second, SparseMatrix):
        raise refusal(f"the step multiplies two sparse matrices{_where()}; {_EXPECTED}")
    if isinstance(second, SparseMatrix):
        transposed: Tensor = product(second.t(), first.t()).t()
        return transposed
    if second.shape[0] != first.shape[1]:
        raise RuntimeError(f"a matrix with {first.shape[1]} columns times one with {second.shape[0]} rows")
    if second.dim() == 1:
        return product(first, second.unsqueeze(1)).squeeze(1)
    parts: Tensor = second.index_select(0, first.columns) * first.elements.unsqueeze(1)
    return parts.new_zeros((first.shape[0], second.shape[1])).index_add(0, first.rows, parts)


def _of_its_own(tensor: Tensor) -> Tensor:
    """Return a dense tensor that is no part of a sparse one."""
    return tensor.clone() if tensor.layout == torch.strided else tensor


def _added(bias: Tensor, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    total: Tensor = beta * bias + alpha * product(first, second)
    return total


def _made(indices: Tensor, values: Tensor, size: Any = None, **settings: Any) -> SparseMatrix:
    """Return a matrix that is made of tensors of the step: (2, E) places and (E) values."""
    if size is None or len(size) != indices.shape[0] or len(size) != SparseMatrix.ndim or values.dim() != 1:
        raise refusal(
            f"the step makes a sparse tensor by torch.sparse_coo_tensor{_where()}; expected a matrix of numbers, with "
            "its size as an argument"
        )
    dtype = settings.get("dtype")
    # A negative index, which PyTorch refuses, is out of range for onnxruntime too.
    rows, columns = (torch.where(one < 0, count, one) for one, count in zip(indices.unbind(0), size, strict=True))
    return SparseMatrix(rows, columns, values if dtype is None else values.to(dtype), tuple(size))


_PRODUCTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            torch.sparse.mm, torch.mm, torch.matmul, torch.mv, torch.spmm, torch.smm, torch.dsmm,
            Tensor.mm, Tensor.matmul, Tensor.mv, Tensor.__matmul__,
        ),
        product,
    ),
    Tensor.__rmatmul__: lambda second, first: product(first, second),
    **dict.fromkeys((torch.sparse.addmm, torch.addmm, Tensor.addmm), _added),
}  # fmt: skip


class SparseProducts:
    """Calls functions of torch on sparse matrices while a step is traced."""

    def __init__(self) -> None:
        # With the matrix itself, so that no other gets its id.
        self._matrices: dict[int, tuple[Tensor, SparseMatrix]] = {}

    def takes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function is for `called`, with these arguments."""
        return func is torch.sparse_coo_tensor or any(
            isinstance(one, SparseMatrix) or (isinstance(one, Tensor) and one.layout != torch.strided)
            for one in (*args, *kwargs.values())
        )

    def called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function of torch gives.

        Raises:
            ExportError: it is no product.
        """
        if not any(isinstance(one, SparseMatrix) or private.is_traced(one) for one in (*args, *kwargs.values())):
            # Of constants alone, such as a matrix that is transposed.
            with private.untraced():
                return private.map_tensors(_of_its_own, func(*args, **kwargs))
        if func is torch.sparse_coo_tensor:
            return _made(*args, **kwargs)
        known = _PRODUCTS.get(func)
        if known is None:
            raise _refused(getattr(func, "__name__", str(func)))
        return known(*map(self._matrix, args), **{name: self._matrix(one) for name, one in kwargs.items()})

    def _matrix(self, given: Any) -> Any:
        if not is_sparse_matrix(given):
            return given
        if id(given) not in self._matrices:
            self._matrices[id(given)] = given, SparseMatrix.of(given)
        return self._matrices[id(given)][1]
