"""The kernel of ApplyAdamW8bit: its body's bits, float64, many updates, in place in C, what is not finite, messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import run as run_body
from cpp_ext.single_node import FLOATS, assert_refused, assert_same_bits, run
from long_tests import each_once
from operators.apply_adam_w import OPTIONS
from operators.apply_adam_w8bit import BLOCK, SAMPLES, sample_of, state_of, updated
from torch import Tensor

from cpp_ext import capi

pytestmark = pytest.mark.usefixtures("device")

OP = "ApplyAdamW8bit"
RANKS = [1] * 5


def seeded(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return state_of((size,), dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype, options", each_once(FLOATS, OPTIONS))
def test_the_body_has_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, options: tuple[int, float | None, dict[str, Any]]
) -> None:
    sample = sample_of(seeded(150_001, dtype), *options)
    outputs = run(OP, *sample.inputs, **sample.attributes)
    body = run_body(OP, "onnxruntime", *sample.inputs, ranks=RANKS, **sample.attributes)
    again = run(OP, *sample.inputs, threads=2, **sample.attributes)
    for output, other, one in zip(outputs, body, again, strict=True):
        assert_same_bits(output, one)
        assert torch.equal(output, other.to(output.dtype))


@pytest.mark.parametrize("size", [1, 7, 8, 255, 256, 257, 511, 512, 769])
def test_ends_of_blocks(size: int) -> None:
    for seed, options in enumerate(OPTIONS):
        sample = sample_of(seeded(size, seed=seed), *options)
        SAMPLES.assert_close(run(OP, *sample.inputs, **sample.attributes), sample, torch.float32)


def test_codes_are_the_nearest_ones_in_float64() -> None:
    sample = sample_of(seeded(100_000), 5, 0.5)
    _, *codes, _, _ = run(OP, *sample.inputs)
    _, *exact, _, _ = updated(np.float64, *sample.inputs)  # type: ignore[arg-type]
    for ours, nearest in zip(codes, exact, strict=True):
        off = np.abs(ours.numpy() - nearest)
        assert off.max() <= 1 and np.count_nonzero(off) < 10


def test_many_updates_stay_near_those_of_torch() -> None:
    """The parameters after 100 updates, against the way that they have come."""
    generator = torch.Generator().manual_seed(0)
    size, rate = 3000, 0.01
    start = torch.randn(size, generator=generator)
    leaf = start.double().requires_grad_()
    optimizer = torch.optim.AdamW([leaf], lr=rate, weight_decay=0.125)
    state = [torch.zeros(size, dtype=torch.uint8)] * 2 + [torch.zeros(12)] * 2
    ours = start
    sizes = 10 ** torch.rand(size, generator=generator)
    for step in range(100):
        gradient = (torch.randn(size, generator=generator) + 0.5) * sizes
        leaf.grad = gradient.double()
        optimizer.step()
        ours, *state = run(OP, ours, gradient, *state, torch.tensor(rate), torch.tensor(step), weight_decay=0.125)
    way = (leaf.detach() - start).norm()
    assert (ours - leaf.detach()).norm() < 0.03 * way


def test_what_is_small_in_a_block_makes_no_long_step() -> None:
    """An element whose mean square were rounded to 0 would go on by 1 / epsilon."""
    size = BLOCK
    gradient = torch.full((size,), 1e-9)
    gradient[0] = 1.0
    parameter, state = torch.zeros(size), [torch.zeros(size, dtype=torch.uint8)] * 2 + [torch.zeros(1)] * 2
    for step in range(20):
        inputs = [parameter, gradient, *state, torch.tensor(0.125), torch.tensor(step)]
        parameter, *state = run(OP, *inputs, weight_decay=0.0, epsilon=1e-12)
    assert (parameter.abs() <= 20 * 0.125 * 1.001).all()
    assert parameter[0].item() == pytest.approx(-20 * 0.125, rel=0.02)


def test_what_is_not_finite_is_seen_in_its_block_alone() -> None:
    parameter, gradient, *_ = seeded(4 * BLOCK + 5)
    gradient[3], gradient[BLOCK + 9], gradient[-1] = torch.nan, -torch.inf, torch.inf
    codes, scales = torch.zeros(len(parameter), dtype=torch.uint8), torch.zeros(5)
    inputs = [parameter, gradient, codes, codes, scales, scales, torch.tensor(0.5), torch.tensor(0)]
    new, *state = run(OP, *inputs)
    assert new.isfinite().logical_not().nonzero().flatten().tolist() == [3, BLOCK + 9, 4 * BLOCK + 4]
    assert all(scale.isnan().tolist() == [True, True, False, False, True] for scale in state[2:])
    new, *_ = run(OP, new, torch.ones_like(new), *state, torch.tensor(0.5), torch.tensor(1))
    blocks = [new[begin : begin + BLOCK] for begin in range(0, len(new), BLOCK)]
    assert [block.isnan().all().item() for block in blocks] == [True, True, False, False, True]
    assert blocks[2].isfinite().all() and blocks[3].isfinite().all()


@pytest.mark.parametrize("offsets", [(0, 0, 0, 0, 0), (3, 1, 0, 2, 5)])
def test_outputs_may_lie_anywhere_and_on_the_inputs(offsets: tuple[int, ...]) -> None:
    tensors = seeded(4_003, torch.bfloat16)
    sample = sample_of(tensors, 3, 0.5, {"weight_decay": 0.25})
    places = [tensors[index] for index in (0, 2, 3, 4, 5)]
    expected = [torch.empty_like(place) for place in places]
    capi.run(OP, sample.inputs, expected, **sample.attributes)
    rooms = [torch.full((len(place) + 20,), 7, dtype=place.dtype) for place in places]
    outputs = [room[at : at + len(place)] for room, at, place in zip(rooms, offsets, places, strict=True)]
    capi.run(OP, sample.inputs, outputs, **sample.attributes)
    capi.run(OP, sample.inputs, places, **sample.attributes)
    for exact, output, place, room, at in zip(expected, outputs, places, rooms, offsets, strict=True):
        assert torch.equal(exact, output) and torch.equal(exact, place)
        assert (room[:at] == 7).all() and (room[at + len(place) :] == 7).all()


@pytest.mark.parametrize(
    "index, value, message",
    [
        (1, torch.zeros(3), "gradient is float32(3); expected float32(2), as parameter"),
        (2, torch.zeros(3, dtype=torch.uint8), "exp_avg is uint8(3); expected uint8(2)"),
        (3, torch.zeros(2, 1, dtype=torch.uint8), "exp_avg_sq is uint8(2,1); expected uint8(2)"),
        (4, torch.zeros(2), "exp_avg_scale is float32(2); expected float32(1), one for 256 elements"),
        (5, torch.zeros(()), "exp_avg_sq_scale is float32(); expected float32(1), one for 256 elements"),
        (6, torch.zeros(1), "learning_rate is float32(1); expected float32()"),
        (7, torch.zeros(1, dtype=torch.int64), "step is int64(1); expected int64()"),
        (8, torch.zeros(2), "gradient_scale is float32(2); expected float32()"),
    ],
)
def test_bad_inputs(index: int, value: Tensor, message: str) -> None:
    inputs = [*seeded(2), torch.tensor(0.5), torch.tensor(0), torch.tensor(1.0)]
    inputs[index] = value
    assert_refused(OP, message, inputs, {})


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"beta1": 1.0}, "beta1 is 1; expected a number in [0, 1)"),
        ({"epsilon": -1.0}, "epsilon is -1; expected 0 or more"),
        ({"decoupled_weight_decay": 2}, "decoupled_weight_decay is 2; expected 0 or 1"),
    ],
)
def test_bad_attributes(attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, [*seeded(2), torch.tensor(0.5), torch.tensor(0)], attributes)
