"""What fuse matches in graphs that were made or found elsewhere never falls: tests/corpus/matched.json keeps it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from matched import POLICIES, graphs, known, matched

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.mark.parametrize("path", [pytest.param(path, id=name) for name, path in graphs().items()])
def test_no_fusion_is_lost(path: Path, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    wanted, found = known().get(name, {}), matched(path)
    for policy in POLICIES:
        before, now = Counter(wanted.get(policy, {})), Counter(found[policy])
        assert not before - now, f"{name}: with policy {policy!r} fuse no longer matches {dict(before - now)}"
        assert not now - before, f"{name}: fuse also matches {dict(now - before)}; make matched writes that down"


def test_every_graph_in_the_list_is_there() -> None:
    assert known().keys() == graphs().keys()
