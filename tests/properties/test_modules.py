"""Steps of modules that people could have written train as PyTorch does, for all sizes, or are refused in one line."""

from __future__ import annotations

import pytest
from fuzzing_modules import Sweep

MODULES = 36
SLOW_MODULES = 20_000
PARTS, SLOW_PARTS = 4, 400
MOST_REFUSED = 0.3
"""The share of modules that may be refused: those that are not exported test nothing."""

pytestmark = pytest.mark.long


def _check(seeds: range) -> None:
    sweep = Sweep().run(seeds)
    print(sweep, *sweep.refusals.items(), sep="\n")
    assert not sweep.failures, "\n".join(
        [*sweep.failures, str(sweep), "python tests/support/fuzzing_modules.py SEED --small"]
    )
    counts = sweep.counts
    assert counts["modules"] > 0.8 * len(seeds), sweep
    assert counts["refused"] <= MOST_REFUSED * counts["modules"] + 2, sweep
    assert counts["steps"] > 3 * (counts["modules"] - counts["refused"]), sweep


@pytest.mark.parametrize("part", range(PARTS))
def test_modules_train_as_in_pytorch(part: int) -> None:
    _check(range(part * MODULES // PARTS, (part + 1) * MODULES // PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_many_modules_train_as_in_pytorch(part: int) -> None:
    size = SLOW_MODULES // SLOW_PARTS
    _check(range(1_000_000 + part * size, 1_000_000 + (part + 1) * size))
