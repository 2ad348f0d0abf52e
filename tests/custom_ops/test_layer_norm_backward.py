"""What LayerNormBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES
from operators.layer_norm_backward import arguments

from gradfuse.errors import ArgumentError

OP = "LayerNormBackward"
FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    axis=st.integers(-6, 5),
    weighted=st.booleans(),
    centred=st.booleans(),
    mask=st.tuples(*[st.integers(0, 1)] * 3),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=10, deadline=None)
def test_any_shape_and_any_inputs(
    backend: str, shape: list[int], axis: int, weighted: bool, centred: bool, mask: tuple[int, ...], dtype: torch.dtype
) -> None:
    axis = (axis + len(shape)) % (2 * len(shape)) - len(shape)
    sample = arguments(shape, dtype, axis=axis, weighted=weighted, centred=centred, output_mask=mask)
    ranks = [output.dim() for output in SAMPLES[OP].expected(sample, torch.float64)]
    outputs = run(OP, backend, *sample.inputs, ranks=ranks, **sample.attributes)
    SAMPLES[OP].assert_close([output.to(dtype) for output in outputs], sample, dtype)


def test_shapes() -> None:
    whole, inner, rows = (FLOAT, ("N", 4, "H")), (FLOAT, ("H",)), (FLOAT, ("N", 4, 1))
    expected = [whole, inner, inner]
    assert inferred(OP, whole, whole, inner, rows, rows) == expected
    assert inferred(OP, (FLOAT, ("N", None, "H")), whole, None, None, rows) == expected
    assert inferred(OP, (FLOAT, (None,) * 3), (FLOAT, ("N", 4, None)), inner, rows, rows) == expected
    two = (FLOAT, (4, "H"))
    assert inferred(OP, whole, whole, two, None, (FLOAT, ("N", 1, 1)), axis=1) == [whole, two, two]
    assert inferred(OP, whole, whole, whole, None, (FLOAT, (1, 1, 1)), axis=-3) == [whole, whole, whole]
    half = (HALF, (3, 8))
    assert inferred(OP, half, half, None, None, (FLOAT, (3, 1))) == [half, (HALF, (8,)), (HALF, (8,))]
    for mask in product((0, 1), repeat=3):
        found = inferred(OP, whole, whole, inner, rows, rows, output_mask=mask)
        assert found == [one if wanted else (FLOAT, (0,)) for one, wanted in zip(expected, mask, strict=True)]


WHOLE, H, ROWS = (3, 4, 5), (5,), (3, 4, 1)


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        (((3, 4), WHOLE, H, ROWS, ROWS), {}, r"grad_output is of shape \(3, 4\); expected shape \(3, 4, 5\), as input"),
        (((3, 4, 6), WHOLE, H, ROWS, ROWS), {}, "grad_output is of dimension 2 6; expected dimension 2 5"),
        (((), (), (), (), ()), {}, "input is of rank 0; expected rank 1 to 8"),
        ((WHOLE, WHOLE, (4,), ROWS, ROWS), {}, "weight is of dimension 0 4; expected dimension 0 5"),
        ((WHOLE, WHOLE, (1, 5), ROWS, ROWS), {}, r"weight is of shape \(1, 5\); expected shape \(5\), as the normal"),
        ((WHOLE, WHOLE, H, (3, 1, 1), ROWS), {}, "mean is of dimension 1 1; expected dimension 1 4"),
        ((WHOLE, WHOLE, H, ROWS, WHOLE), {}, "rstd is of dimension 2 5; expected dimension 2 1"),
        ((WHOLE, WHOLE, H, ROWS, (3, 4)), {}, r"rstd is of shape \(3, 4\); expected shape \(3, 4, 1\), one a row"),
        ((WHOLE, WHOLE, H, ROWS, ROWS), {"axis": 3}, "axis is 3; expected -3 to 2, as input is of rank 3"),
        ((WHOLE, WHOLE, H, ROWS, ROWS), {"output_mask": (1, 1)}, r"output_mask is \[1, 1\]; expected 3 numbers, 0 or"),
        ((WHOLE, WHOLE, H, ROWS, ROWS), {"output_mask": (1, 2, 1)}, r"output_mask is \[1, 2, 1\]; expected 3 numbers"),
    ],
)  # fmt: skip
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)


@pytest.mark.parametrize(
    "dtype, statistics, wanted", [(DOUBLE, FLOAT, "double"), (FLOAT, DOUBLE, "float"), (HALF, DOUBLE, "float")]
)
def test_statistics_are_of_the_type_of_the_computation(dtype: int, statistics: int, wanted: str) -> None:
    with pytest.raises(ArgumentError, match=rf"rstd is tensor\(\w+\); expected tensor\({wanted}\), as input is tensor"):
        inferred(OP, (dtype, WHOLE), (dtype, WHOLE), None, None, (statistics, ROWS))
