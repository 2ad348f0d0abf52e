"""What ApplyAdamW8bit computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from onnx import TensorProto
from operators.apply_adam_w8bit import SAMPLES, sample_of, state_of

from gradfuse.errors import ArgumentError

FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE
UINT8, INT64 = TensorProto.UINT8, TensorProto.INT64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(), (1,), (256,), (257,), (2,) * 8, (0, 3), (3, 0)])
def test_any_shape(backend: str, shape: tuple[int, ...]) -> None:
    sample = sample_of(state_of(shape, torch.float32, torch.Generator().manual_seed(0)), 2, 0.5)
    outputs = run("ApplyAdamW8bit", backend, *sample.inputs, ranks=[len(shape)] * 3 + [1] * 2)
    SAMPLES.assert_close(outputs, sample, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_zeros_of_tiny_numbers_and_of_what_is_not_finite(backend: str) -> None:
    parameter, gradient = torch.ones(6, 256), torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    gradient[0], gradient[1], gradient[2] = 0.0, gradient[1] * 2.0**-120, gradient[2] * 2.0**-70
    gradient[4, 7], gradient[5, 9] = torch.nan, torch.inf
    codes, scales = torch.zeros(6, 256, dtype=torch.uint8), torch.zeros(6)
    sample = sample_of([parameter, gradient, codes, codes, scales, scales], 0)
    outputs = run("ApplyAdamW8bit", backend, *sample.inputs, ranks=[2] * 3 + [1] * 2)
    SAMPLES.assert_close(outputs, sample, torch.float32)
    assert outputs[0].isfinite().sum(1).tolist() == [256] * 4 + [255] * 2
    for scale in outputs[3:]:
        assert scale.isnan().tolist() == [False] * 4 + [True] * 2


def test_shapes() -> None:
    scalars = ((FLOAT, ()), (INT64, ()))
    pair, codes, scales = [(FLOAT, (30, 20))] * 2, [(UINT8, (30, 20))] * 2, [(FLOAT, (3,))] * 2
    whole = [(FLOAT, (30, 20)), *codes, *scales]
    assert inferred("ApplyAdamW8bit", *pair, *codes, *scales, *scalars) == whole
    named = [(FLOAT, (None,))] * 2
    assert inferred("ApplyAdamW8bit", *pair, *codes, *named, *scalars, (FLOAT, ())) == whole
    unknown = [(HALF, ("N", 20))] * 2, [(UINT8, (None, 20))] * 2
    found = inferred("ApplyAdamW8bit", *unknown[0], *unknown[1], *scales, *scalars)
    assert found == [(HALF, ("N", 20)), (UINT8, ("N", 20)), (UINT8, ("N", 20)), *scales]


@pytest.mark.parametrize(
    "change, message",
    [
        ({1: (FLOAT, (3,))}, r"gradient is of shape \(3\); expected shape \(30, 20\), as parameter"),
        ({2: (FLOAT, (30, 20))}, r"exp_avg is tensor\(float\); expected one of tensor\(uint8\)"),
        ({3: (UINT8, (30, 2))}, "exp_avg_sq is of dimension 1 2; expected dimension 1 20"),
        ({4: (FLOAT, (2,))}, r"exp_avg_scale is of shape \(2\); expected shape \(3\), one for 256 elements"),
        ({5: (FLOAT, ())}, r"exp_avg_sq_scale is of shape \(\); expected shape \(blocks\)"),
        ({5: (HALF, (3,))}, r"exp_avg_sq_scale is tensor\(float16\); expected one of tensor\(float\)"),
        ({7: (FLOAT, ())}, r"step is tensor\(float\); expected one of tensor\(int64\)"),
        (dict.fromkeys(range(2), (DOUBLE, (30, 20))), r"parameter is tensor\(double\); expected one of"),
    ],
)
def test_refusals(change: dict[int, Any], message: str) -> None:
    inputs = [(FLOAT, (30, 20))] * 2 + [(UINT8, (30, 20))] * 2 + [(FLOAT, (3,))] * 2 + [(FLOAT, ()), (INT64, ())]
    with pytest.raises(ArgumentError, match=rf"^ApplyAdamW8bit \(node 'node'\): {message}"):
        inferred("ApplyAdamW8bit", *[change.get(index, given) for index, given in enumerate(inputs)])
