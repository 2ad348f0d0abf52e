"""What LinearCrossEntropy computes by its body, its shapes, and what it refuses."""

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
from operators.linear_cross_entropy import IGNORED, REDUCTIONS, arguments

from gradfuse.errors import ArgumentError

OP = "LinearCrossEntropy"
FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9)),
    reduction=st.sampled_from(REDUCTIONS),
    given_inputs=st.tuples(*[st.booleans()] * 4),
    label_smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    softcap=st.sampled_from((0.0, 3.0)),
    ignore_index=st.sampled_from((IGNORED, 0)),
    mask=st.tuples(*[st.integers(0, 1)] * 5),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=15, deadline=None)
def test_any_size_and_option(
    backend: str,
    sizes: tuple[int, int, int],
    reduction: str,
    given_inputs: tuple[bool, bool, bool, bool],
    label_smoothing: float,
    softcap: float,
    ignore_index: int,
    mask: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    bias, weighted, graded, summed = given_inputs
    sample = arguments(
        *sizes, dtype, bias=bias, weighted=weighted, graded=graded, summed=summed, reduction=reduction, softcap=softcap,
        label_smoothing=label_smoothing, ignore_index=ignore_index, output_mask=mask,
    )  # fmt: skip
    ranks = [output.dim() for output in SAMPLES[OP].expected(sample, torch.float64)]
    outputs = run(OP, backend, *sample.inputs, ranks=ranks, **sample.attributes)
    SAMPLES[OP].assert_close([output.to(dtype) for output in outputs], sample, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_rows_have_no_part_in_it_whatever_they_hold(backend: str, reduction: str) -> None:
    sample = arguments(4, 3, 5, torch.float32, ignored=0.0, reduction=reduction)
    x, weight, target, bias, *rest = sample.inputs
    assert x is not None and target is not None
    target[1:3] = IGNORED
    spoiled = x.clone()
    spoiled[1], spoiled[2, 0] = torch.nan, torch.inf
    ranks = [int(reduction == "none"), 2, 2, 1, 1]
    clean, found = (
        run(OP, backend, one, weight, target, bias, *rest, ranks=ranks, reduction=reduction) for one in (x, spoiled)
    )
    assert all(torch.equal(*pair) for pair in zip(clean, found, strict=True))
    assert not found[1][1:3].any() and found[1][0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_of_no_rows_is_nan_as_pytorchs_and_has_no_gradient(backend: str) -> None:
    x, weight, target, *_ = arguments(3, 2, 4, torch.float32).inputs
    assert target is not None
    loss, *gradients = run(OP, backend, x, weight, torch.full_like(target, IGNORED), ranks=[0, 2, 2, 1, 1])
    assert loss.isnan() and not any(gradient.any() for gradient in gradients)


def test_shapes() -> None:
    x, weight, target = (FLOAT, ("N", "H")), (FLOAT, (7, 4)), (INT64, ("N",))
    whole = [(FLOAT, ()), (FLOAT, ("N", 4)), (FLOAT, (7, 4)), (FLOAT, (7,)), (FLOAT, (0,))]
    assert inferred(OP, x, weight, target) == whole
    assert inferred(OP, x, (FLOAT, (None, 4)), target, (FLOAT, (7,)), reduction="sum") == whole
    assert inferred(OP, x, weight, target, None, None, (FLOAT, (3,)), reduction="none") == [
        (FLOAT, (3,)), (FLOAT, (3, 4)), *whole[2:]
    ]  # fmt: skip
    whole[-1] = FLOAT, ("N",)
    for mask in product((0, 1), repeat=5):
        found = inferred(OP, x, weight, target, output_mask=mask)
        assert found == [one if wanted else (FLOAT, (0,)) for one, wanted in zip(whole, mask, strict=True)]
    assert inferred(OP, x, weight, target, None, None, None, (FLOAT, (3,)))[1] == (FLOAT, (3, 4))


X, W, T = (FLOAT, (6, 4)), (FLOAT, (7, 4)), (INT64, (6,))


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        (((FLOAT, (6,)), W, T), {}, r"input is of shape \(6\); expected shape \(N, H\)"),
        ((X, (FLOAT, (7, 5)), T), {}, "linear_weight is of H 5; expected H 4"),
        ((X, (FLOAT, (0, 4)), T), {}, r"linear_weight is of shape \(0, 4\); expected C > 0"),
        ((X, W, (INT64, (5,))), {}, "target is of N 5; expected N 6"),
        ((X, W, T, (FLOAT, (6,))), {}, "linear_bias is of C 6; expected C 7"),
        ((X, W, T, None, (FLOAT, (6,))), {}, "weight is of C 6; expected C 7"),
        ((X, W, T, None, (DOUBLE, (7,))), {}, r"weight is tensor\(double\); expected tensor\(float\), as input is"),
        ((X, W, T, None, None, (FLOAT, (6,))), {}, r"grad_loss is of shape \(6\); expected shape \(\) or \(1\) for"),
        ((X, W, T, None, None, None, (FLOAT, (5,))), {}, "grad_logsumexp is of N 5; expected N 6"),
        ((X, W, T), {"softcap": -1.0}, "softcap is -1.0; expected 0 or a positive number"),
        ((X, W, T), {"reduction": "max"}, "reduction is 'max'; expected 'mean' or 'sum' or 'none'"),
        ((X, W, T), {"output_mask": (1, 1, 1)}, r"output_mask is \[1, 1, 1\]; expected 5 numbers, 0 or 1"),
    ],
)
def test_refusals(inputs: tuple[Any, ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *inputs, **attributes)
