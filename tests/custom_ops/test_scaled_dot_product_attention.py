"""What ScaledDotProductAttention computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from operators import SAMPLES, Sample, attention

from gradfuse.custom_ops import OPS
from gradfuse.custom_ops.operator import Tensor as Described
from gradfuse.errors import ArgumentError
from gradfuse.export import dropout

OP = "ScaledDotProductAttention"
FLOAT, HALF, DOUBLE, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL
INT64 = TensorProto.INT64

SIZES = st.tuples(*[st.integers(0, 3)] * 3, *[st.integers(0, 6)] * 2, *[st.integers(1, 5)] * 2)


def run_body(sample: Sample, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    native = SAMPLES[OP].expected(sample, dtype)
    outputs = run(OP, backend, *sample.inputs, ranks=[one.dim() for one in native], **sample.attributes)
    return [output.to(other.dtype) for output, other in zip(outputs, native, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    sizes=SIZES,
    mask=st.sampled_from(("", "shown", "added")),
    axes=st.lists(st.booleans(), min_size=2, max_size=4),
    causal=st.integers(0, 2),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    scale=st.sampled_from((0.0, 0.25, -1.0)),
)
@example(
    sizes=(1, 1, 1, 1, 0, 1, 1), mask="added", axes=[False, False], causal=0, dtype=torch.float32, scale=0.0
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_sizes_and_masks(
    backend: str,
    sizes: tuple[int, ...],
    mask: str,
    axes: list[bool],
    causal: int,
    dtype: torch.dtype,
    scale: float,
) -> None:
    batch, groups, shared, rows, keys, width, value_width = sizes
    heads = groups * shared
    whole = (batch, heads, rows, keys)[4 - len(axes) :]
    shape = [size if full else 1 for size, full in zip(whole, axes, strict=True)]
    sample = attention.arguments(
        (batch, heads, groups if heads else 0, rows, keys, width, value_width), dtype,
        mask=mask, mask_shape=shape, causal=causal, scale=scale,
    )  # fmt: skip
    SAMPLES[OP].assert_close(run_body(sample, backend, dtype), sample, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drawn", (None, 5))
def test_the_dropout_is_that_of_exported_steps(backend: str, drawn: int | None) -> None:
    """With values of one column for each key, the output is what each probability becomes."""
    share, keys, number = 0.3, 37, 4 + (drawn or 0)
    sample = attention.arguments((2, 2, 1, 5, keys, 3, keys), torch.float32)
    inputs = [*sample.inputs[:2], torch.eye(keys).expand(2, 1, keys, keys), None, torch.tensor(11)]
    if drawn is not None:
        inputs.append(torch.tensor(drawn))
    attributes = {"dropout_threshold": round(share * 2**31), "draw": 4}
    dropped, _ = run_body(Sample(inputs, attributes), backend, torch.float32)
    kept = dropout.mask(11, number, dropped, share)
    assert torch.equal(dropped != 0, kept)
    plain, _ = run_body(Sample(inputs[:3]), backend, torch.float32)
    torch.testing.assert_close(dropped, plain * kept / (1 - share))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_are_0_whatever_hides_the_keys(backend: str) -> None:
    query, key, value = (
        one for one in attention.arguments((1, 2, 2, 4, 3, 5, 6), torch.float32).inputs if one is not None
    )
    hidden = torch.ones(4, 3, dtype=torch.bool)
    hidden[1] = False
    added = torch.zeros(4, 3).masked_fill(~hidden, -torch.inf)
    for inputs, attributes, dead in (
        ((query, key, value, hidden), {}, [1]),
        ((query, key, value, added), {}, [1]),
        ((query, key, value, hidden), {"causal": 2}, [0, 1]),
        ((query, key, value), {"causal": 2}, [0]),
        ((query, key[:, :, :0], value[:, :, :0]), {}, [0, 1, 2, 3]),
    ):
        output, logsumexp = run_body(Sample(inputs, attributes), backend, torch.float32)
        found = [row for row in range(4) if not output[:, :, row].any()]
        assert found == dead
        assert not logsumexp[:, :, dead].any()


def test_shapes() -> None:
    query, key, value = (FLOAT, ("B", 6, "L", 8)), (FLOAT, ("B", 2, "S", 8)), (FLOAT, ("B", 2, "S", 5))
    expected = [(FLOAT, ("B", 6, "L", 5)), (FLOAT, ("B", 6, "L"))]
    assert inferred(OP, query, key, value) == expected
    assert inferred(OP, query, key, value, (BOOL, (1, 1, "L", "S"))) == expected
    assert inferred(OP, query, key, value, (FLOAT, ("L", "S")), causal=2) == expected
    seed = (INT64, ())
    assert inferred(OP, query, key, value, None, seed, (INT64, (1,)), dropout_threshold=5) == expected
    for dtype, computed in ((HALF, FLOAT), (DOUBLE, DOUBLE)):
        found = inferred(OP, *((dtype, shape) for _, shape in (query, key, value)))
        assert [one for one, _ in found] == [dtype, computed]


Q, K, V = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 7)


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        ((Q[1:], K, V), {}, r"query is of shape \(4, 3, 6\); expected shape \(B, H, L, E\)"),
        ((Q, (2, 2, 5, 5), V), {}, "key is of E 5; expected E 6"),
        ((Q, (3, 2, 5, 6), V), {}, "key is of B 3; expected B 2"),
        ((Q, (2, 3, 5, 6), (2, 3, 5, 7)), {}, "query is of H 4; expected a multiple of key's G 3"),
        ((Q, K, (2, 1, 5, 7)), {}, "value is of G 1; expected G 2"),
        ((Q, K, (2, 2, 4, 7)), {}, "value is of S 4; expected S 5"),
        ((Q, K, V, (5,)), {}, "attn_mask is of rank 1; expected rank 2 to 4"),
        ((Q, K, V, (3, 4)), {}, "attn_mask is of S 4; expected S 5 or 1"),
        ((Q, K, V, (2, 2, 3, 5)), {}, "attn_mask is of H 2; expected H 4 or 1"),
        ((Q, K, V), {"causal": 3}, "causal is 3; expected 0, 1 or 2"),
        ((Q, K, V), {"dropout_threshold": 2**31}, "dropout_threshold is 2147483648; expected 0 to 2147483647"),
        ((Q, K, V), {"dropout_threshold": 7}, "seed is absent; expected a tensor, as dropout_threshold is 7"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *((FLOAT, shape) for shape in shapes), **attributes)


def test_types_of_masks_and_seeds() -> None:
    given = ((HALF, Q), (HALF, K), (HALF, V))
    with pytest.raises(
        ArgumentError, match=r"attn_mask is tensor\(float\); expected tensor\(bool\) or tensor\(float16\)"
    ):
        inferred(OP, *given, (FLOAT, (3, 5)))
    with pytest.raises(ArgumentError, match=r"seed is of shape \(2\); expected shape \(\) or \(1\)"):
        inferred(OP, *given, None, (INT64, (2,)))


def test_a_body_needs_the_type_of_the_mask() -> None:
    call = OPS[OP].call("a", [Described(FLOAT, Q), Described(FLOAT, K), Described(FLOAT, V), Described(0, (3, 5))], {})
    with pytest.raises(
        ArgumentError, match="attn_mask is of a type that is not known; expected one that the model decl"
    ):
        OPS[OP].variant(call, 18)
