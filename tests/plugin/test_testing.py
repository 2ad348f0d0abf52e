"""assert_gradients_close: what it lets pass, and everything that it must not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradfuse import ArgumentError
from gradfuse.testing import assert_gradients_close, peer_error

Float64s = npt.NDArray[np.float64]

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def rounded(reference: Float64s, dtype: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        return reference.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def reference(shape: tuple[int, ...] = (3, 4), scale: float = 1.0) -> Float64s:
    return np.random.default_rng(0).standard_normal(shape) * scale


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_correct_rounding_passes(dtype: str, data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    exact = data.draw(arrays.arrays(np.float64, shape, elements=st.floats(-1e4, 1e4)))
    assert_gradients_close(rounded(exact, dtype), rounded(exact, dtype), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (64,)])
@pytest.mark.parametrize(
    "wrong",
    [lambda r: -r, lambda r: 2 * r, lambda r: r * 1.1, lambda r: 0 * r, lambda r: r + np.abs(r).max()],
    ids=["sign", "factor", "ten percent", "zero", "offset"],
)
def test_wrong_gradient_fails(dtype: str, scale: float, shape: tuple[int, ...], wrong: Any) -> None:
    exact = np.asarray(reference(shape, scale))
    with pytest.raises(AssertionError, match="gradient differs at"):
        assert_gradients_close(rounded(np.asarray(wrong(exact)), dtype), rounded(exact, dtype), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_a_large_element_does_not_excuse_a_small_one(dtype: str) -> None:
    exact = np.array([1000.0 / 3, 1.0 / 3, 0.001 / 3, -0.001 / 7])
    wrong = rounded(exact, dtype)
    wrong[2] = -wrong[2]
    with pytest.raises(AssertionError, match=r"at \[2\]"):
        assert_gradients_close(wrong, rounded(exact, dtype), exact, dtype)


def test_error_of_the_native_op_is_granted() -> None:
    exact = reference()
    native = rounded(exact * (1 + 1e-4), "float32")
    assert_gradients_close(rounded(exact * (1 + 0.9e-4), "float32"), native, exact, "float32")
    with pytest.raises(AssertionError):
        assert_gradients_close(rounded(exact * (1 + 3e-4), "float32"), native, exact, "float32")


def test_terms_grant_the_rounding_of_sums_that_cancel() -> None:
    exact = np.zeros(3)
    actual = np.full(3, 1e-5, dtype=np.float32)
    native = np.zeros(3, dtype=np.float32)
    assert_gradients_close(actual, native, exact, "float32", terms=100.0)
    with pytest.raises(AssertionError):
        assert_gradients_close(actual, native, exact, "float32", terms=1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_must_be_in_place(value: float) -> None:
    exact = reference()
    exact[1, 2] = value
    good = rounded(exact, "float32")
    assert_gradients_close(good, good, exact, "float32")
    for wrong in (0.0, np.nan if np.isinf(value) else np.inf, -value):
        bad = good.copy()
        bad[1, 2] = wrong
        if np.isnan(wrong) and np.isnan(value):
            continue
        with pytest.raises(AssertionError, match=r"at \[1, 2\]"):
            assert_gradients_close(bad, good, exact, "float32")
    moved = good.copy()
    moved[0, 0] = value
    with pytest.raises(AssertionError, match=r"at \[0, 0\]"):
        assert_gradients_close(moved, good, exact, "float32")


def test_native_that_is_not_finite_excuses_nothing() -> None:
    exact = reference()
    native = rounded(exact, "float32")
    native[0, 0] = np.nan
    assert_gradients_close(rounded(exact, "float32"), native, exact, "float32")
    with pytest.raises(AssertionError):
        assert_gradients_close(-rounded(exact, "float32"), native, exact, "float32")


def test_overflow_is_an_infinity_of_the_same_sign() -> None:
    exact = np.array([1e6, -1e6])
    good = rounded(exact, "float16")
    assert_gradients_close(good, good, exact, "float16")
    with pytest.raises(AssertionError):
        assert_gradients_close(-good, good, exact, "float16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_takes_torch_tensors(dtype: torch.dtype) -> None:
    exact = torch.from_numpy(reference()).requires_grad_()
    assert_gradients_close(exact.to(dtype), exact.to(dtype), exact, dtype)
    with pytest.raises(AssertionError):
        assert_gradients_close(-exact.to(dtype), exact.to(dtype), exact, dtype)


def test_zeros_of_either_sign_are_equal() -> None:
    zeros = np.zeros(3, dtype=np.float32)
    assert_gradients_close(-zeros, zeros, np.zeros(3), np.float32)


def test_wrong_dtype_and_shape_fail() -> None:
    exact = reference()
    good = rounded(exact, "float32")
    with pytest.raises(AssertionError, match="dtype float64; expected float32"):
        assert_gradients_close(exact, good, exact, "float32")
    with pytest.raises(AssertionError, match=r"shape \(4, 3\); expected \(3, 4\)"):
        assert_gradients_close(good.T, good, exact, "float32")


def test_unfit_references_are_argument_errors() -> None:
    good = rounded(reference(), "float32")
    with pytest.raises(ArgumentError, match="reference_f64 is float32; expected float64"):
        assert_gradients_close(good, good, good, "float32")
    with pytest.raises(ArgumentError, match="native is float64; expected float32"):
        assert_gradients_close(good, reference(), reference(), "float32")
    with pytest.raises(ArgumentError, match="native has shape"):
        assert_gradients_close(good, good[:2], reference(), "float32")


def test_failure_is_one_line_that_names_the_worst() -> None:
    exact = reference()
    wrong = rounded(exact, "float32")
    wrong[2, 1] += 1.0
    with pytest.raises(AssertionError) as failure:
        assert_gradients_close(wrong, rounded(exact, "float32"), exact, "float32")
    text = str(failure.value)
    assert "\n" not in text
    assert "at [2, 1] of float32[3, 4]" in text and "1 of 12 elements" in text


def test_peers_below_the_median_error_share_it() -> None:
    exact = np.array([0.0, 2.0**-60, 2.0**-60, 1.0])
    assert peer_error(exact + np.array([0.5, 0.25, 0.25, 0.75]), exact).tolist() == [0.5, 0.5, 0.5, 0.75]
