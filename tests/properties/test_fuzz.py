"""Graphs that are almost backward passes: fused or not, they compute what they did, for all sizes and inputs."""

from __future__ import annotations

import pytest
from fuzzing import Sweep

GRAPHS = 300
SLOW_GRAPHS = 20_000
PARTS, SLOW_PARTS = 3, 200
LEAST_FUSED = 0.4
"""The share of graphs that must be fused: those that never match test nothing."""

# The checker has inferred the shapes of each graph in this process before.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("inference_in_process")]


def _check(seeds: range) -> None:
    sweep = Sweep().run(seeds)
    print(sweep)
    assert not sweep.failures, "\n".join([*sweep.failures, str(sweep), "python tests/support/fuzzing.py SEED --text"])
    counts = sweep.counts
    assert counts["graphs"] > 0.8 * len(seeds), sweep
    assert counts["fused"] > LEAST_FUSED * counts["graphs"], sweep
    assert counts["runs"] > 3 * counts["fused"], sweep


@pytest.mark.parametrize("part", range(PARTS))
def test_graphs_compute_what_they_did(part: int) -> None:
    _check(range(part * GRAPHS // PARTS, (part + 1) * GRAPHS // PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_many_graphs_compute_what_they_did(part: int) -> None:
    size = SLOW_GRAPHS // SLOW_PARTS
    _check(range(1_000_000 + part * size, 1_000_000 + (part + 1) * size))
