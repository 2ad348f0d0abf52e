"""The kernel of LayerNormBackward: sizes at which its loops change, threads, what is not finite, unwanted results."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES
from operators.base import Sample
from operators.layer_norm_backward import arguments
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "LayerNormBackward"


def check(sample: Sample, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    outputs = run(OP, *sample.inputs, threads=threads, **sample.attributes)
    SAMPLES[OP].assert_close(outputs, sample, dtype)
    return outputs


@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 70)),
        st.tuples(st.integers(1, 140), st.integers(1, 40)),
        st.tuples(*[st.integers(1, 4)] * 6),
    ),
    axis=st.sampled_from((-1, -2, 0)),
    weighted=st.booleans(),
    centred=st.booleans(),
    mask=st.tuples(*[st.integers(0, 1)] * 3),
    centre=st.sampled_from((0.0, 100.0)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_pytorch(
    shape: tuple[int, ...],
    axis: int,
    weighted: bool,
    centred: bool,
    mask: tuple[int, ...],
    centre: float,
    dtype: torch.dtype,
) -> None:
    sample = arguments(shape, dtype, axis=axis, weighted=weighted, centred=centred, centre=centre, output_mask=mask)
    check(sample, dtype)


LARGE = [(520, 192), (4099, 33), (3, 9001), (1, 70000), (40, 2049), (20000, 3), (1030, 257), (3000, 1)]


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("centred", (False, True))
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.sampled(every=4)
def test_large_and_the_same_bits_for_any_number_of_threads(
    shape: tuple[int, ...], centred: bool, dtype: torch.dtype
) -> None:
    sample = arguments(shape, dtype, centred=centred)
    one, two = (check(sample, dtype, threads) for threads in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert_same_bits(first, second)


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU], indirect=True)
def test_written_around_the_caches() -> None:
    """The whole is larger than what is written into them, and rows are no multiple of a vector."""
    check(arguments((3300, 1171), torch.float32), torch.float32)


@pytest.mark.parametrize("shape", [(2, 3, 70), (40, 20)], ids=str)
def test_a_row_that_is_not_finite_spoils_no_other(shape: tuple[int, ...]) -> None:
    for index, bad in product((0, 1, 3, 4), (torch.nan, torch.inf)):
        sample = arguments(shape, torch.float32)
        inputs = [None if tensor is None else tensor.clone() for tensor in sample.inputs]
        spoiled = inputs[index]
        assert spoiled is not None
        spoiled.view(-1, spoiled.shape[-1])[1, 0] = bad
        found, clean = (run(OP, *given)[0].reshape(-1, shape[-1]) for given in (inputs, sample.inputs))
        kept = torch.tensor([row for row in range(len(found)) if row != 1])
        assert_same_bits(found[kept].contiguous(), clean[kept].contiguous())
        assert not found[1].isfinite().all()


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
def test_a_row_of_one_element_has_no_gradient(dtype: torch.dtype, weighted: bool) -> None:
    """As in PyTorch: what is normalized is 0 for any input, so that a large rstd multiplies no rounding."""
    sample = arguments((37, 1), dtype, weighted=weighted)
    grad_output, x, weight, _, rstd = sample.inputs
    assert x is not None and rstd is not None
    found = run(OP, grad_output, x, weight, x.to(rstd.dtype), torch.full_like(rstd, 1e6))
    assert not found[0].any()


@pytest.mark.parametrize("mask", list(product((0, 1), repeat=3)))
def test_only_what_is_wanted_is_computed(mask: tuple[int, ...]) -> None:
    for shape in ((3, 4, 5), (9, 40)):
        outputs = check(arguments(shape, torch.float32, output_mask=mask), torch.float32)
        assert [output.numel() > 0 for output in outputs] == list(map(bool, mask))


X = torch.zeros(2, 4, 5)
H = torch.zeros(5)
R = torch.zeros(2, 4, 1)


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ((X[..., :4], X, H, R, R), {}, "grad_output is float32(2,4,4); expected float32(2,4,5) as input"),
        ((X, X, H[:1], R, R), {}, "weight is float32(1); expected float32(5) as the normalized axes of input"),
        ((X, X, None, R[:1], R), {}, "mean is float32(1,4,1); expected float32(2,4,1), one a row of input"),
        ((X, X, None, R, X), {}, "rstd is float32(2,4,5); expected float32(2,4,1), one a row of input"),
        ((X, X, None, None, R.double()), {}, "rstd is float64; expected float32, as input is float32"),
        ((X, X, H, R, R), {"axis": 3}, "axis is 3; expected -3 to 2"),
        ((X, X, H, R, R), {"output_mask": (1, 0)}, "output_mask is [1, 0]; expected 3 numbers, 0 or 1"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: tuple[Tensor, ...], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)
