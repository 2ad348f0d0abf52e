"""Gradients of ONNX models are those of their differences, whichever exporter's habits a model has."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
from fuzzing_graphs import outcome
from sweeping import Outcome, Sweep

LONG_MODELS, LONG_PARTS = 60, 4
SLOW_MODELS, SLOW_PARTS = 20_000, 200
MOST_REFUSED = 0.2
"""The share of models that may be refused in one of the ways: what is not differentiated tests nothing."""

# The checker has inferred the shapes of each model in this process before.
pytestmark = pytest.mark.usefixtures("inference_in_process")


def _check(found: Iterable[Outcome]) -> None:
    sweep = Sweep.of(found)
    print(sweep)
    counts = sweep.counts
    assert not sweep.failures, f"{sweep}\npython tests/support/fuzzing_graphs.py SEED --small"
    assert counts["models"] > 0.8 * (counts["models"] + counts["invalid"]) - 1, sweep
    assert counts["with refusals"] <= MOST_REFUSED * counts["models"] + 2, sweep
    assert counts["derivatives"] > 5 * (counts["models"] - counts["with refusals"]), sweep


def test_models_have_the_gradients_of_differences(model_seeds: range) -> None:
    """In one step of each model at two sizes; the long test builds all of them, at four."""
    _check(map(functools.partial(outcome, brief=True), model_seeds))


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_models_have_the_gradients_of_differences_in_every_way(part: int) -> None:
    _check(map(outcome, range(part * LONG_MODELS // LONG_PARTS, (part + 1) * LONG_MODELS // LONG_PARTS)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_many_models_have_the_gradients_of_differences(part: int) -> None:
    size = SLOW_MODELS // SLOW_PARTS
    _check(map(outcome, range(1_000_000 + part * size, 1_000_000 + (part + 1) * size)))
