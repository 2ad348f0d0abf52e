"""What ScaledDotProductAttentionBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES, attention

from gradfuse.errors import ArgumentError
from gradfuse.testing import assert_gradients_close

OP = "ScaledDotProductAttentionBackward"
FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    sizes=st.tuples(*[st.integers(0, 3)] * 3, *[st.integers(0, 6)] * 2, *[st.integers(1, 5)] * 2),
    mask=st.sampled_from(("", "shown", "added")),
    causal=st.integers(0, 2),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
@settings(max_examples=25, deadline=None)
def test_any_sizes_and_masks(backend: str, sizes: tuple[int, ...], mask: str, causal: int, dtype: torch.dtype) -> None:
    batch, groups, shared, rows, keys, width, value_width = sizes
    heads = groups * shared
    shapes = (batch, heads, groups if heads else 0, rows, keys, width, value_width)
    sample = attention.backward_arguments(shapes, dtype, mask=mask, causal=causal)
    native = SAMPLES[OP].expected(sample, dtype)
    outputs = run(OP, backend, *sample.inputs, ranks=[4] * 3, **sample.attributes)
    SAMPLES[OP].assert_close([one.to(other.dtype) for one, other in zip(outputs, native, strict=True)], sample, dtype)


@pytest.mark.parametrize("causal, mask", [(0, ""), (1, ""), (0, "shown"), (2, "added")])
def test_both_passes_give_the_gradients_of_pytorch(causal: int, mask: str) -> None:
    """By autograd through PyTorch's own operator, with heads that share keys."""
    sample = attention.arguments(
        (2, 4, 2, 7, 6, 8, 8), torch.float32, mask=mask, mask_shape=(2, 1, 7, 6), causal=causal
    )
    grad = torch.randn(2, 4, 7, 8)
    forward = run("ScaledDotProductAttention", "onnxruntime", *sample.inputs, ranks=[4, 3], causal=causal)
    tensors = [grad, *sample.inputs[:3], *forward, *sample.inputs[3:]]
    found = run(OP, "onnxruntime", *tensors, ranks=[4] * 3, causal=causal)
    terms = attention.terms(tensors, sample.attributes, grads=True)
    native, exact = (attention.by_autograd(sample, grad, dtype) for dtype in (torch.float32, torch.float64))
    for triple in zip([forward[0], *found], native, exact, strict=True):
        assert_gradients_close(*triple, torch.float32, terms=terms)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_rows_the_gradients_of_keys_and_values_are_0(backend: str) -> None:
    """onnxruntime leaves what it happens to find in memory where a product has no factors."""
    sample = attention.backward_arguments((2, 4, 2, 0, 30, 8, 9), torch.float32)
    for _ in range(3):
        _, grad_key, grad_value = run(OP, backend, *sample.inputs, ranks=[4] * 3)
        assert not grad_key.any() and not grad_value.any()


def test_shapes() -> None:
    query, key, value = (FLOAT, ("B", 6, "L", 8)), (FLOAT, ("B", 2, "S", 8)), (FLOAT, ("B", 2, "S", 5))
    output, rows = (FLOAT, ("B", 6, "L", 5)), (FLOAT, ("B", 6, "L"))
    assert inferred(OP, output, query, key, value, output, rows) == [query, key, value]
    halves = [(HALF, shape) for _, shape in (output, query, key, value, output)]
    assert inferred(OP, *halves, rows) == [(HALF, shape) for _, shape in (query, key, value)]


QUERY, KEY, VALUE, OUTPUT, ROWS = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 7), (2, 4, 3, 7), (2, 4, 3)


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((2, 4, 3, 6), QUERY, KEY, VALUE, OUTPUT, ROWS), "grad_output is of Ev 6; expected Ev 7"),
        ((OUTPUT, QUERY, KEY, VALUE, (2, 4, 5, 7), ROWS), "output is of L 5; expected L 3"),
        ((OUTPUT, QUERY, KEY, VALUE, OUTPUT, (2, 4)), r"logsumexp is of shape \(2, 4\); expected shape \(B, H, L\)"),
        ((OUTPUT, QUERY, KEY, VALUE, OUTPUT, (2, 2, 3)), "logsumexp is of H 2; expected H 4"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes))


@pytest.mark.parametrize("dtype, other", [(HALF, DOUBLE), (DOUBLE, FLOAT)])
def test_logsumexp_is_of_the_type_of_the_computation(dtype: int, other: int) -> None:
    given_shapes = [(dtype, shape) for shape in (OUTPUT, QUERY, KEY, VALUE, OUTPUT)]
    with pytest.raises(ArgumentError, match=r"logsumexp is tensor\(\w+\); expected tensor\(\w+\), as query is tensor"):
        inferred(OP, *given_shapes, (other, ROWS))
