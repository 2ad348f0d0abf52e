"""The evaluator of the test by numbers gives what onnx's reference gives."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from gradfuse.passes.proving.evaluation import evaluator_of


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    axis=st.integers(-3, 2),
    opset=st.sampled_from([11, 16, 18]),
    reduction=st.sampled_from([None, "none", "add", "mul", "max", "min"]),
    seed=st.integers(0, 2**31),
)
def test_elements_are_scattered_as_by_the_reference(
    shape: list[int], axis: int, opset: int, reduction: str | None, seed: int
) -> None:
    axis = max(-len(shape), min(axis, len(shape) - 1))
    numbers = np.random.default_rng(seed)
    data = numbers.standard_normal([size + 1 for size in shape])
    updates = numbers.standard_normal(shape)
    updates[numbers.random(shape) < 0.2] = np.nan
    size = data.shape[axis]
    indices = numbers.integers(-size, size, shape)
    given_reduction = "" if reduction is None or opset < 16 else f', reduction = "{reduction}"'
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (double[...] d, int64[...] i, double[...] u) => '
        f"(double[...] y) {{ y = ScatterElements<axis = {axis}{given_reduction}>(d, i, u) }}".replace("[...]", "")
    )
    feeds = {"d": data, "i": indices, "u": updates}
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    (scattered,) = evaluator_of(model).run(None, feeds)
    np.testing.assert_array_equal(scattered, expected, strict=True)


def test_an_index_beyond_the_end_is_an_error() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (double[3] d, int64[1] i, double[1] u) => (double[3] y) '
        "{ y = ScatterElements(d, i, u) }"
    )
    with pytest.raises(IndexError):
        evaluator_of(model).run(None, {"d": np.zeros(3), "i": np.array([3]), "u": np.ones(1)})


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_are_gathered(axis: int) -> None:
    data = np.arange(12.0).reshape(3, 4)
    indices = np.array([[0, -1, 2], [1, -3, 0]])
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (double[A, B] d, int64[C, D] i) => (double[C, D] y) '
        f"{{ y = GatherElements<axis = {axis}>(d, i) }}"
    )
    (got,) = evaluator_of(model).run(None, {"d": data, "i": indices})
    places = [[0, 0, 0], [1, 1, 1]] if axis else [[0, 1, 2], [0, 1, 2]]
    np.testing.assert_array_equal(got, data[(places, indices) if axis else (indices, places)])
    # onnx.reference adds the size to an index until it is in range.
    with pytest.raises(IndexError):
        evaluator_of(model).run(None, {"d": data, "i": np.full((3, 4), -(2**62))})
