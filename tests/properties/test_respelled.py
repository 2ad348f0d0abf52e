"""What fuse finds, it finds however nodes are written and among views that change nothing; else explain says why not.

Numbers are compared with those of the graph as it was, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from respelling_samples import KINDS, UNFUSED
from respelling_sweep import outcome
from sweeping import Sweep

CASES, LONG_CASES, SLOW_CASES = 10, 60, 1000
FEW = 3
"""Of operators that no rule looks for."""
MOST_REFUSED = {"ThresholdBackward": 0.3, "BatchNormBackward": 0.3, "ScaledDotProductAttentionBackward": 0.5}
"""The shares of graphs that changes may hide, where that is more than one of ten."""

pytestmark = pytest.mark.usefixtures("inference_in_process")


def check(kind: str, seeds: Iterable[int]) -> None:
    sweep = Sweep.of(outcome(kind, seed) for seed in seeds)
    assert not sweep.failures, str(sweep)
    most = MOST_REFUSED.get(kind, 0.1) if kind not in UNFUSED else 1.0
    assert sweep.counts["refused"] <= most * sweep.counts["made"], str(sweep)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_that_are_written_otherwise(kind: str) -> None:
    check(kind, range(FEW if kind in UNFUSED else CASES))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_graphs_that_are_written_otherwise(kind: str) -> None:
    check(kind, range(CASES, LONG_CASES))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_graphs_that_are_written_otherwise(kind: str) -> None:
    check(kind, range(LONG_CASES, SLOW_CASES))
