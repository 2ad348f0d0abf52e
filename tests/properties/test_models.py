"""Gradients of ONNX models are those of their differences, whichever exporter's habits a model has."""

from __future__ import annotations

import pytest
from fuzzing_graphs import Sweep

MODELS = 60
SLOW_MODELS = 20_000
PARTS, SLOW_PARTS = 4, 200
MOST_REFUSED = 0.2
"""The share of models that may be refused in one of the ways: what is not differentiated tests nothing."""

# The checker has inferred the shapes of each model in this process before.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("inference_in_process")]


def _check(seeds: range) -> None:
    sweep = Sweep().run(seeds)
    print(sweep, *sweep.refusals.items(), sep="\n")
    assert not sweep.failures, "\n".join(
        [*sweep.failures, str(sweep), "python tests/support/fuzzing_graphs.py SEED --small"]
    )
    counts = sweep.counts
    assert counts["models"] > 0.8 * len(seeds), sweep
    assert counts["with refusals"] <= MOST_REFUSED * counts["models"] + 2, sweep
    assert counts["derivatives"] > 10 * (counts["models"] - counts["with refusals"]), sweep


@pytest.mark.parametrize("part", range(PARTS))
def test_models_have_the_gradients_of_differences(part: int) -> None:
    _check(range(part * MODELS // PARTS, (part + 1) * MODELS // PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_many_models_have_the_gradients_of_differences(part: int) -> None:
    size = SLOW_MODELS // SLOW_PARTS
    _check(range(1_000_000 + part * size, 1_000_000 + (part + 1) * size))
