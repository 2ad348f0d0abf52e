"""The kernel of ApplyAdamW: large tensors, many updates, in place in C, NaN and infinities, messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_ext.single_node import CPU, FLOATS, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators.apply_adam_w import OPTIONS, SAMPLES, sample_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device")

OP = "ApplyAdamW"


def tensors_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [tensor.to(dtype) for tensor in torch.randn(4, *shape, generator=generator)]
    return [*tensors[:3], tensors[3].abs() + 0.5]


@given(
    size=st.integers(1, 200),
    step=st.integers(0, 10**6),
    scale=st.none() | st.floats(-4, 4, width=32),
    beta1=st.integers(0, 999).map(lambda number: number / 1000),
    beta2=st.sampled_from((0.0, 0.5, 0.9, 0.999, 0.99999)),
    weight_decay=st.sampled_from((0.0, 0.125, 0.5)),
    decoupled=st.integers(0, 1),
    dtype=st.sampled_from(FLOATS),
)
@settings(max_examples=80, deadline=None)
def test_agrees_with_torch_optim(
    size: int,
    step: int,
    scale: float | None,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decoupled: int,
    dtype: torch.dtype,
) -> None:
    attributes: dict[str, Any] = {
        "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "decoupled_weight_decay": decoupled,
        "epsilon": 0.5,  # the roots of squares near 0 have no correct digits
    }  # fmt: skip
    sample = sample_of(tensors_of((size,), dtype, step), step, scale, attributes)
    SAMPLES.assert_close(run(OP, *sample.inputs, **attributes), sample, dtype)


@pytest.mark.parametrize("dtype, options", each_once(FLOATS, OPTIONS))
def test_large_and_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, options: tuple[int, float | None, dict[str, Any]]
) -> None:
    sample = sample_of(tensors_of((300, 517), dtype), *options)
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES.assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


def test_first_update_goes_by_the_learning_rate_whatever_the_gradient() -> None:
    gradient = torch.tensor([1e-3, -1.0, 1e6, 0.0])
    zero, one = torch.zeros(4), torch.ones(4)
    inputs = [one, gradient, zero, zero, torch.tensor(0.25), torch.tensor(0)]
    parameter, mean, square = run(OP, *inputs, weight_decay=0.0)
    torch.testing.assert_close(parameter, torch.tensor([0.75, 1.25, 0.75, 1.0]))
    torch.testing.assert_close(mean, gradient * 0.1)
    torch.testing.assert_close(square, gradient**2 * 0.001)


def test_nan_and_infinity_are_as_torchs() -> None:
    parameter = torch.tensor([1.0, torch.nan, torch.inf, 1.0, 1.0, 1.0, 1.0])
    gradient = torch.tensor([torch.nan, 1.0, 1.0, torch.inf, 1.0, 1.0, 0.0])
    mean = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf, 0.0, 0.0])
    square = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, torch.inf, -1.0])
    for attributes in ({}, {"weight_decay": 0.0}, {"decoupled_weight_decay": 0}, {"beta1": 0.25}):
        inputs = [parameter, gradient, mean, square, torch.tensor(0.5), torch.tensor(1)]
        outputs = run(OP, *inputs, **attributes)
        expected = SAMPLES.oracle(*inputs, **attributes, dtype=torch.float32)
        for output, exact in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, exact, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """The square of 2^-11 is no float16; that of 300 neither."""
    gradient = torch.tensor([2.0**-11, 300.0]).to(dtype)
    zero = torch.zeros(2, dtype=dtype)
    inputs = [zero, gradient, zero, zero, torch.tensor(1.0), torch.tensor(0)]
    parameter, _, square = run(OP, *inputs, weight_decay=0.0)
    assert torch.equal(square, (gradient.double() ** 2 * 0.001).to(dtype))
    torch.testing.assert_close(parameter, torch.tensor([-1.0, -1.0]).to(dtype))


@pytest.mark.parametrize("beta2", [0.999, 0.9999, 0.9999999])
def test_betas_have_seven_decimals_although_attributes_are_float32(beta2: float) -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    _, _, square = run(OP, one, one, zero, zero, torch.tensor(0.5), torch.tensor(0), beta2=beta2)
    assert square.item() == torch.tensor(1 - beta2).item()


IN_PLACE = """
import torch
from cpp_ext import capi
from operators.apply_adam_w import sample_of
for dtype in (torch.float32, torch.bfloat16):
    for offsets in ((0, 0, 0), (1, 1, 1), (3, 1, 0), (0, 0, 5)):
        torch.manual_seed(0)
        size = 40_003
        tensors = [torch.randn(size).to(dtype), torch.randn(size).to(dtype), torch.randn(size).to(dtype)]
        tensors.append(torch.rand(size).to(dtype))
        sample = sample_of(tensors, 3, 0.5, {"weight_decay": 0.25})
        expected = [torch.empty(size, dtype=dtype) for _ in range(3)]
        capi.run("ApplyAdamW", sample.inputs, expected, **sample.attributes)
        outputs = [torch.full((size + 20,), 7, dtype=dtype)[o : o + size] for o in offsets]
        capi.run("ApplyAdamW", sample.inputs, outputs, **sample.attributes)
        capi.run("ApplyAdamW", sample.inputs, [tensors[0], tensors[2], tensors[3]], **sample.attributes)
        for exact, moved, index in zip(expected, outputs, (0, 2, 3)):
            assert torch.equal(exact, moved) and torch.equal(exact, tensors[index])
print("as dense")
"""


@pytest.mark.parametrize("device", [CPU], indirect=True)
@pytest.mark.parametrize("stream_bytes", ["0", str(2**62)])
def test_outputs_may_lie_anywhere_and_on_the_inputs(stream_bytes: str) -> None:
    """Streaming stores, which need alignment, too."""
    tests = Path(__file__).resolve().parents[1]
    folders = os.pathsep.join(map(str, (tests, tests / "support")))
    environment = {**os.environ, "GRADFUSE_STREAM_BYTES": stream_bytes, "PYTHONPATH": folders}
    command = [sys.executable, "-c", IN_PLACE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == "as dense\n", result.stderr


@pytest.mark.parametrize(
    "index, value, message",
    [
        (1, torch.zeros(3), "gradient is float32(3); expected float32(2), as parameter"),
        (3, torch.zeros(2, 1), "exp_avg_sq is float32(2,1); expected float32(2), as parameter"),
        (4, torch.zeros(1), "learning_rate is float32(1); expected float32()"),
        (5, torch.zeros(1, dtype=torch.int64), "step is int64(1); expected int64()"),
        (6, torch.zeros(2), "gradient_scale is float32(2); expected float32()"),
    ],
)
def test_bad_inputs(index: int, value: Tensor, message: str) -> None:
    inputs = [torch.ones(2)] * 4 + [torch.tensor(0.5), torch.tensor(0), torch.tensor(1.0)]
    inputs[index] = value
    assert_refused(OP, message, inputs, {})


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"beta1": 1.0}, "beta1 is 1; expected a number in [0, 1)"),
        ({"beta2": -0.5}, "beta2 is -0.5; expected a number in [0, 1)"),
        ({"epsilon": -1.0}, "epsilon is -1; expected 0 or more"),
        ({"weight_decay": -0.25}, "weight_decay is -0.25; expected 0 or more"),
        ({"decoupled_weight_decay": 2}, "decoupled_weight_decay is 2; expected 0 or 1"),
    ],
)
def test_bad_attributes(attributes: dict[str, Any], message: str) -> None:
    inputs = [torch.ones(2)] * 4 + [torch.tensor(0.5), torch.tensor(0)]
    assert_refused(OP, message, inputs, attributes)
