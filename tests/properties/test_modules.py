"""Steps of modules that people could have written train as PyTorch does, for all sizes, or are refused in one line."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from fuzzing_modules import outcome, outcomes
from sweeping import Outcome, Sweep

LONG_MODULES, LONG_PARTS = 36, 4
SLOW_MODULES, SLOW_PARTS = 20_000, 400
DYNAMIC_EVERY = 4
"""Of how many exports of several modules one has dynamic axes, which take twice the time."""
MOST_REFUSED = 0.3
"""The share of modules that may be refused: those that are not exported test nothing."""


def _check(found: Iterable[Outcome]) -> None:
    sweep = Sweep.of(found)
    print(sweep)
    counts = sweep.counts
    assert not sweep.failures, f"{sweep}\npython tests/support/fuzzing_modules.py SEED --small"
    assert counts["modules"] > 0.8 * (counts["modules"] + counts["invalid"]), sweep
    assert counts["refused"] <= MOST_REFUSED * counts["modules"] + 2, sweep
    assert counts["steps"] > 3 * (counts["modules"] - counts["refused"]), sweep


def test_modules_train_as_in_pytorch(module_seeds: range) -> None:
    """Modules of one piece or two, ten exported as one while none is refused.

    Each has its own parameters and its own loss, and its gradients are compared as if it were alone. Those of the long
    test have up to five pieces, are exported one by one, and more of them have dynamic axes.
    """
    is_static = module_seeds.start // 10 % DYNAMIC_EVERY > 0
    _check(outcomes(module_seeds, 2 if is_static else 1, static=is_static))


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_larger_modules_train_as_in_pytorch(part: int) -> None:
    _check(map(outcome, range(part * LONG_MODULES // LONG_PARTS, (part + 1) * LONG_MODULES // LONG_PARTS)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_many_modules_train_as_in_pytorch(part: int) -> None:
    size = SLOW_MODULES // SLOW_PARTS
    _check(map(outcome, range(1_000_000 + part * size, 1_000_000 + (part + 1) * size)))
