"""How far apart the outputs of two models may be: the bound of each element, in terms of rounding.

`gradfuse.check` states the rule. The export of training steps compares with PyTorch by the same constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradfuse.testing import peer_error

NOISE_FACTOR = 16
"""A difference may be this many times what rounding does to the first model's own result."""
ROUNDINGS = 4
"""How many roundings to the output's type, and to the type of the arithmetic, are allowed in addition."""

MOVED_RUNS = 16
"""The most runs in which results of arithmetic are moved by several roundings."""
MOVED_SHARE = 4
"""A difference may be this many times the change of a result in such a run."""

ROUNDINGS_OF_KERNELS, ROUNDINGS_OF_NARROW_KERNELS = 64, 4
"""How far apart kernels come that add up in another order; in 16 bits less, as sums are made in float32."""

ROUNDINGS_OF_CONSTANTS, SMALL_ROUNDING, SMALL_RUNS = 64, 2.0**-10, 3
"""In float64 nothing rounds but a model's constants. These are the roundings granted for them, the part of a rounding
by which runs are moved to see what it does (too small to decide anything near a kink), and the number of such runs."""

OTHER_NUMBERS, OTHER_SIZE = 2, 1e-3
"""If the rounding of a constant decides after all, it does not on numbers a thousandth larger or smaller. This many
sets of them are tried."""

TRUSTED_ROUNDINGS = 2**14
"""Beyond this many roundings the float64 copy of a model computes something else, and cannot judge."""

_Array = npt.NDArray[Any]
_finfo: Any = ml_dtypes.finfo


def spacing(dtype: Any) -> float:
    """Return the distance from 1 to the next number of a floating point type."""
    return float(_finfo(dtype).eps)


def worst(
    expected: _Array,
    actual: _Array,
    exact: _Array | None,
    nudged: list[_Array],
    own_eps: float,
    changes: Iterator[_Array],
) -> tuple[float, float]:
    """Return the error and the bound of the element whose error is largest in units of its bound.

    Args:
        expected: an output of the first model.
        actual: the same output of the second model.
        exact: the same of the first model in float64; None where there is none.
        nudged: outputs of the first model when inputs and weights are moved by one rounding.
        own_eps: the spacing of the model's own type where it runs in a wider one, else 0.
        changes: what moving the arithmetic by several roundings changes; taken as far as it is needed.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf, 0.0
    if expected.size == 0:
        return 0.0, 0.0
    if expected.dtype.kind in "biuOUS":
        different = _undecided(np.asarray(actual != expected), changes)
        if expected.dtype.kind in "OUS" or not different.any():
            return float(different.any()), 0.0
        off = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        return float(off[different].max()), 0.0
    if expected.dtype.kind == "c":
        moves = list(changes)
        parts = [
            worst(
                part(expected),
                part(actual),
                None if exact is None else part(exact),
                [part(n) for n in nudged],
                own_eps,
                iter([part(change) for change in moves]),
            )
            for part in (np.real, np.imag)
        ]
        return max(parts, key=lambda part: ratio(*part))
    limits = _finfo(expected.dtype)
    eps = max(float(limits.eps), own_eps)
    own, got = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(own)
    same = (got == own) | (np.isnan(got) & np.isnan(own))
    reference = np.where(finite, own, 0.0)
    if exact is not None and exact.shape == own.shape:
        known = np.where(finite & np.isfinite(exact), exact, reference)
        if np.abs(known - reference).max() <= TRUSTED_ROUNDINGS * eps * np.abs(reference).max():
            reference = known
    noise = peer_error(np.where(finite, own, 0.0), reference)
    for other in nudged:
        if other.shape == own.shape:
            with np.errstate(invalid="ignore"):
                change = reference + np.where(finite, other.astype(np.float64) - own, 0.0)
            noise = np.maximum(noise, peer_error(change, reference))
    bound = NOISE_FACTOR * noise + _roundings(reference, eps) + ROUNDINGS * float(limits.smallest_subnormal)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(got - reference), np.where(same, 0.0, np.inf))
    return _judged(error, bound, reference, changes)


def worst_in_float64(exact: _Array, actual: _Array, eps: float, changes: Iterator[_Array]) -> tuple[float, float]:
    """Return the same for outputs of two models in float64.

    Args:
        exact: an output of the first model.
        actual: the same output of the second model.
        eps: the spacing at 1 of the type that the constants of the models are in.
        changes: what moving the arithmetic by a small part of a rounding changes.
    """
    if actual.shape != exact.shape or exact.size == 0 or exact.dtype.kind not in "biuf":
        return 0.0, 0.0
    if exact.dtype.kind in "biu":
        return float(_undecided(np.asarray(actual != exact), changes).any()), 0.0
    finite = np.isfinite(exact)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    reference = np.where(finite, exact, 0.0)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(actual - reference), np.where(same, 0.0, np.inf))
    error = np.where(np.isnan(error), np.inf, error)
    bound = _roundings(reference, eps) + float(np.finfo(np.float32).tiny)
    if (error > bound).any():
        small = [peer_error(_plus(reference, change), reference) for change in itertools.islice(changes, SMALL_RUNS)]
        if small:
            bound = bound + ROUNDINGS_OF_CONSTANTS / SMALL_ROUNDING * np.median(small, axis=0)
    at = int((error / bound).argmax())
    return float(error.ravel()[at]), float(bound.ravel()[at])


def ratio(error: float, bound: float) -> float:
    """Return an error in units of its bound."""
    return error / bound if bound else (math.inf if error else 0.0)


def magnitude(array: _Array) -> float:
    """Return the largest absolute value among the finite elements."""
    if array.size and array.dtype.kind == "f":
        largest = float(max(array.max(), -array.min()))
        if math.isfinite(largest):
            return largest
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def is_float(array: _Array) -> bool:
    """Tell whether the elements are real floating point numbers."""
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16


def _plus(reference: _Array, change: _Array) -> _Array:
    return np.asarray(reference + np.where(np.isfinite(change), change, 0.0))


def _roundings(reference: _Array, eps: float) -> _Array:
    largest = np.abs(reference).max()
    return np.asarray(ROUNDINGS * (eps * np.abs(reference) + min(eps, float(np.finfo(np.float32).eps)) * largest))


def _undecided(different: _Array, changes: Iterator[_Array]) -> _Array:
    """Return the differences of integers, without those of elements that moving the arithmetic changes."""
    if different.any():
        for changed in changes:
            different = different & ~changed
            if not different.any():
                break
    return different


def _judged(error: _Array, bound: _Array, reference: _Array, changes: Iterator[_Array]) -> tuple[float, float]:
    """Return error and bound of the worst element; each bound grows by what moving may do there, if that is needed."""
    error = np.where(np.isnan(error), np.inf, error)
    granted = np.zeros(reference.shape)
    while (error > bound + granted).any():
        change = next(changes, None)
        if change is None:
            break
        granted = np.maximum(granted, MOVED_SHARE * peer_error(_plus(reference, change), reference))
    bound = bound + granted
    at = int((error / bound).argmax())
    return float(error.ravel()[at]), float(bound.ravel()[at])
