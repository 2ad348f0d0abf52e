"""Helpers for tests of gradients."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradfuse.errors import ArgumentError

_Float64s = npt.NDArray[np.float64]
_finfo: Any = ml_dtypes.finfo

ROUNDINGS = 4
"""How many roundings to the result's and to the arithmetic's type are granted beyond the native op's error."""


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype that a numpy, ml_dtypes or torch dtype, or its name, stands for."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name if name != str(dtype) else dtype)


def _as_numpy(array: Any) -> tuple[_Float64s, np.dtype[Any]]:
    """Return an array or torch tensor as float64, and the dtype that it had."""
    if hasattr(array, "detach"):
        tensor = array.detach().cpu()
        return np.asarray(tensor.double().numpy()), _numpy_dtype(tensor.dtype)
    values = np.asarray(array)
    return values.astype(np.float64), values.dtype


def peer_error(values: _Float64s, reference: _Float64s) -> _Float64s:
    """Return, for each element, the largest error of `values` among its peers: the elements of at most twice its size.

    A plain maximum would let the rounding of one large element excuse any error, a wrong sign included, of small ones.
    Elements below the median error are of one size, as all that is left of them is rounding.
    Both arrays have one shape, the result's; errors that are not finite do not count.
    """
    with np.errstate(invalid="ignore"):
        error = np.abs(values - reference).ravel()
    error = np.where(np.isfinite(error), error, 0.0)
    size = np.maximum(np.abs(reference).ravel(), np.median(error) if error.size else 0.0)
    order = np.argsort(size, kind="stable")
    largest_so_far = np.maximum.accumulate(error[order])
    last = np.searchsorted(size[order], 2.0 * size, side="right") - 1
    return np.asarray(largest_so_far[last]).reshape(reference.shape)


def assert_gradients_close(
    actual: Any, native: Any, reference_f64: Any, dtype: Any, *, terms: npt.ArrayLike | None = None
) -> None:
    """Assert that a gradient is as close to the exact one as the native op's, except for a few roundings.

    With r the reference, n the native result, eps the machine epsilon of `dtype` and eps_a that of the arithmetic
    (float32 for the 16-bit types, else `dtype`), each element must satisfy

        |actual - r| <= error_n + 4 (eps |r| + eps_a max(max|r|, terms)) + 4 tiny

    where error_n is the native op's `peer_error`, and tiny is the smallest subnormal number of `dtype`. NaN and
    infinities must be where the reference has them; a value that is too large for `dtype` may be an infinity of the
    same sign. The signs of zeros are not compared.

    Args:
        actual: the gradient to judge, any shape; a numpy array (ml_dtypes included) or a torch tensor.
        native: what the native op (PyTorch) gives for the same inputs in the same dtype; same shape.
        reference_f64: the same computed in float64 from the same inputs; same shape.
        dtype: the element type that the gradient must have: a numpy or torch dtype or its name.
        terms: where sums cancel, the magnitude of what is added up, in any shape that broadcasts to the gradient's.

    Raises:
        AssertionError: wrong dtype or shape, or an element out of bounds: one line that names the worst.
        ArgumentError: native or reference do not fit each other.
    """
    wanted = _numpy_dtype(dtype)
    got, got_dtype = _as_numpy(actual)
    other, native_dtype = _as_numpy(native)
    exact, exact_dtype = _as_numpy(reference_f64)
    if exact_dtype != np.float64:
        raise ArgumentError(f"assert_gradients_close: reference_f64 is {exact_dtype}; expected float64")
    if native_dtype != wanted:
        raise ArgumentError(f"assert_gradients_close: native is {native_dtype}; expected {wanted}")
    if other.shape != exact.shape:
        raise ArgumentError(f"assert_gradients_close: native has shape {other.shape}; expected {exact.shape}")
    if got_dtype != wanted:
        raise AssertionError(f"gradient has dtype {got_dtype}; expected {wanted}")
    if got.shape != exact.shape:
        raise AssertionError(f"gradient has shape {got.shape}; expected {exact.shape}")
    if exact.size == 0:
        return

    limits = _finfo(wanted)
    eps = float(limits.eps)
    eps_arithmetic = min(eps, float(np.finfo(np.float32).eps))
    finite = np.isfinite(exact)
    known = np.where(finite, exact, 0.0)
    error_native = peer_error(np.where(finite, other, 0.0), known)
    magnitude = np.maximum(np.abs(known).max(), 0.0 if terms is None else np.asarray(terms, dtype=np.float64))
    roundings = ROUNDINGS * (eps * np.abs(known) + eps_arithmetic * magnitude + float(limits.smallest_subnormal))
    bound = error_native + roundings

    with np.errstate(invalid="ignore"):
        error = np.where(got == exact, 0.0, np.abs(got - exact))
    overflows = np.isinf(got) & (np.sign(got) == np.sign(exact)) & (np.abs(known) + bound > float(limits.max))
    error = np.where(overflows | (np.isnan(got) & np.isnan(exact)), 0.0, error)
    # What is left of NaN here is one-sided: a NaN or an infinity that the reference lacks, or lacks of that sign.
    error = np.where(np.isnan(error), np.inf, error)
    wrong = error > bound
    if not wrong.any():
        return
    excess = np.where(wrong, error / np.maximum(bound, np.finfo(np.float64).tiny), 0.0)
    at = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), exact.shape))
    raise AssertionError(
        f"gradient differs at {list(at)} of {wanted}{list(exact.shape)}: got {got[at]:.9g}, reference {exact[at]:.9g}, "
        f"native {other[at]:.9g}; error {_shown(error[at])} > bound {bound[at]:.3g} "
        f"(native's error {error_native[at]:.3g} + roundings {np.broadcast_to(roundings, exact.shape)[at]:.3g}); "
        f"{int(wrong.sum())} of {exact.size} elements are out of bounds"
    )


def _shown(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.3g}"
