"""The kernel of ApplySgd: large tensors, in place in C, NaN and infinities, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_ext.single_node import FLOATS, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import each_once
from operators.apply_sgd import OPTIONS, SAMPLES, sample_of
from torch import Tensor

from cpp_ext import capi

pytestmark = pytest.mark.usefixtures("device")

OP = "ApplySgd"


def tensors_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [*torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)]


@given(
    size=st.integers(1, 200),
    scale=st.none() | st.floats(-4, 4, width=32),
    momentum=st.none() | st.sampled_from((0.0, 0.5, 0.9, 0.99)),
    weight_decay=st.sampled_from((0.0, 0.125, 0.5)),
    nesterov=st.integers(0, 1),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_agrees_with_torch_optim(
    size: int,
    scale: float | None,
    momentum: float | None,
    weight_decay: float,
    nesterov: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    attributes: dict[str, Any] = {"weight_decay": weight_decay}
    if momentum is not None:
        attributes |= {"momentum": momentum, "nesterov": nesterov if momentum else 0}
    sample = sample_of(tensors_of((size,), dtype, seed), scale, attributes)
    SAMPLES.assert_close(run(OP, *sample.inputs, **attributes), sample, dtype)


@pytest.mark.parametrize("dtype, options", each_once(FLOATS, OPTIONS))
def test_large_and_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, options: tuple[float | None, dict[str, Any]]
) -> None:
    sample = sample_of(tensors_of((300, 517), dtype), *options)
    outputs = run(OP, *sample.inputs, **sample.attributes)
    SAMPLES.assert_close(outputs, sample, dtype)
    for one, two in zip(outputs, run(OP, *sample.inputs, threads=2, **sample.attributes), strict=True):
        assert_same_bits(one, two)


def test_nan_and_infinity_are_as_torchs() -> None:
    parameter = torch.tensor([1.0, torch.nan, torch.inf, 1.0, 1.0])
    gradient = torch.tensor([torch.nan, 1.0, 1.0, torch.inf, 1.0])
    buffer = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])
    tried: list[dict[str, Any]] = [{"momentum": 0.5}, {"momentum": 0.5, "weight_decay": 0.25}]
    for attributes in (*tried, {"momentum": 0.5, "nesterov": 1}):
        inputs = [parameter, gradient, torch.tensor(0.5), buffer]
        expected = SAMPLES.oracle(*inputs, **attributes, dtype=torch.float32)
        for output, exact in zip(run(OP, *inputs, **attributes), expected, strict=True):
            torch.testing.assert_close(output, exact, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("offsets", ((0, 0), (1, 1), (3, 0)))
def test_outputs_may_lie_anywhere_and_on_the_inputs(dtype: torch.dtype, offsets: tuple[int, int]) -> None:
    size = 40_003
    tensors = tensors_of((size,), dtype)
    sample = sample_of(tensors, 0.5, {"momentum": 0.5, "weight_decay": 0.25})
    expected = [torch.empty(size, dtype=dtype) for _ in range(2)]
    capi.run(OP, sample.inputs, expected, **sample.attributes)
    outputs = [torch.full((size + 20,), 7, dtype=dtype)[o : o + size] for o in offsets]
    capi.run(OP, sample.inputs, outputs, **sample.attributes)
    capi.run(OP, sample.inputs, [tensors[0], tensors[2]], **sample.attributes)
    for exact, moved, index in zip(expected, outputs, (0, 2), strict=True):
        assert torch.equal(exact, moved) and torch.equal(exact, tensors[index])


@pytest.mark.parametrize(
    "index, value, message",
    [
        (1, torch.zeros(3), "gradient is float32(3); expected float32(2), as parameter"),
        (3, torch.zeros(2, 1), "momentum_buffer is float32(2,1); expected float32(2), as parameter"),
        (2, torch.zeros(1), "learning_rate is float32(1); expected float32()"),
        (4, torch.zeros(2), "gradient_scale is float32(2); expected float32()"),
    ],
)
def test_bad_inputs(index: int, value: Tensor, message: str) -> None:
    inputs = [torch.ones(2), torch.ones(2), torch.tensor(0.5), torch.ones(2), torch.tensor(1.0)]
    inputs[index] = value
    assert_refused(OP, message, inputs, {})


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"momentum": -0.5}, "momentum is -0.5; expected 0 or more"),
        ({"weight_decay": -0.25}, "weight_decay is -0.25; expected 0 or more"),
        ({"nesterov": 2}, "nesterov is 2; expected 0 or 1"),
        ({"momentum": 0.5}, "momentum is 0.5; expected 0, as momentum_buffer is absent"),
        ({"nesterov": 1}, "nesterov is 1; expected 0, as momentum_buffer is absent"),
    ],
)
def test_bad_attributes(attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, [torch.ones(2), torch.ones(2), torch.tensor(0.5)], attributes)
