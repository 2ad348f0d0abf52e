"""Large arrays by sums: what differs between two arrays differs between their sums, and by as much."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from gradfuse.checking.condensing import LARGEST, SUMS, condensed

SIZE = 3 * LARGEST + 5


def numbers(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def largest_difference(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(np.abs(condensed(one) - condensed(other)).max())


def test_small_arrays_and_whole_numbers_stay_as_they_are() -> None:
    for array in (np.ones(LARGEST, np.float32), np.ones(SIZE, np.int32), np.ones(SIZE, np.bool_), np.ones(())):
        assert condensed(array) is array
    assert condensed(numbers()).shape == (SUMS,)


@pytest.mark.parametrize("place", [0, 1, SUMS - 1, SUMS, LARGEST, SIZE - 1])
def test_an_error_of_one_element_is_seen_at_its_size(place: int) -> None:
    array = numbers()
    wrong = array.copy()
    wrong[place] += 0.25
    error = float(wrong[place]) - float(array[place])
    assert largest_difference(array, wrong) == pytest.approx(abs(error), abs=1e-12)


def test_errors_of_many_elements_do_not_cancel() -> None:
    array = numbers()
    for wrong in (
        array * np.float32(1.01),
        array + np.float32(0.01),
        array[::-1],
        np.roll(array, 1),
        np.roll(array, SUMS),
        np.where(np.arange(SIZE) < SIZE - SUMS, array, 0),
        np.sort(array),
    ):
        assert largest_difference(array, np.asarray(wrong, np.float32)) > 0.01


def test_a_matrix_and_its_transpose_differ() -> None:
    matrix = numbers()[: LARGEST * 2].reshape(1024, 512)
    assert largest_difference(matrix, np.ascontiguousarray(matrix.T).reshape(1024, 512)) > 1
    # Strides are not what counts.
    assert largest_difference(matrix, np.asfortranarray(matrix)) == 0


def test_what_is_not_finite_stays_so() -> None:
    array = numbers()
    for value in (np.nan, np.inf, -np.inf):
        wrong = array.copy()
        wrong[SUMS + 7] = value
        sums = condensed(wrong)
        assert not np.isfinite(sums[7]) and np.isfinite(np.delete(sums, 7)).all()


def test_rounding_adds_up_to_the_root_of_its_number_only() -> None:
    array = numbers()
    exact = array.astype(np.float64) * (1 + np.random.default_rng(1).uniform(-1, 1, SIZE) * 2.0**-24)
    each = SIZE / SUMS
    assert np.abs(condensed(array) - condensed(exact)).max() < 8 * each**0.5 * 2.0**-24


def test_it_takes_little_memory() -> None:
    array = np.ones(64 * LARGEST, np.float32)
    tracemalloc.start()
    try:
        condensed(array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 2
