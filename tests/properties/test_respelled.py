"""What fuse finds, it finds however single nodes are written, and among views that change nothing."""

from __future__ import annotations

import pytest
from respelling import GRAPHS, lost

CASES, LONG_CASES = 12, 300
MOST_LOST = 0.05
"""The share of graphs that several changes at once may hide: updates whose sums are written in other orders."""

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.mark.parametrize("operator", GRAPHS)
def test_graphs_whose_nodes_are_written_otherwise(operator: str) -> None:
    assert not [found for seed in range(CASES) if (found := lost(operator, seed))]


@pytest.mark.long
@pytest.mark.parametrize("operator", GRAPHS)
def test_many_graphs_whose_nodes_are_written_otherwise(operator: str) -> None:
    missing = [found for seed in range(CASES, LONG_CASES) if (found := lost(operator, seed))]
    assert len(missing) <= MOST_LOST * LONG_CASES, missing
