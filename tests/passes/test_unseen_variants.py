"""Gradients as further producers would write them are recognised, look-alikes are not; both compute what they did."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from producers import run
from variants import FEEDS, GRAPHS, OTHERS, REPEATED, Build, Feeds, built

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close


def _check_same(model: onnx.ModelProto, fused: onnx.ModelProto, feeds: Feeds = FEEDS) -> None:
    onnx.checker.check_model(fused, full_check=True)
    wanted, got = run(model, feeds), run(fused, feeds)
    for name, value in wanted.items():
        terms = 8 * max(1.0, float(np.abs(value).max()))
        assert_gradients_close(got[name], value, value.astype(np.float64), np.float32, terms=terms)


@pytest.mark.parametrize(("operator", "name", "build"), GRAPHS, ids=[f"{o}: {n}" for o, n, _ in GRAPHS])
def test_is_recognised(operator: str, name: str, build: Build) -> None:
    model = built(build)
    result = fuse(model, policy="all")
    assert operator in {f.op for f in result.report.fusions}, result.report
    _check_same(model, result.model)


@pytest.mark.parametrize("name", OTHERS)
def test_is_something_else(name: str) -> None:
    operator, build = OTHERS[name]
    model = built(build)
    result = fuse(model, policy="all")
    assert operator not in {f.op for f in result.report.fusions}, result.report
    assert not any(m.bug for m in result.report.near_misses), result.report
    _check_same(model, result.model)


# Counts that do not add up to the rows, are negative, or are more than all rows; and steps beyond the last group.
COUNTS = {
    "too few": [1, 2, 1],
    "too many": [3, 3, 9],
    "negative": [4, -2, 5],
    "from the end": [-3, 2, 1],
    "out of range": [-20, 40, 3],
    "none": [0, 0, 0],
}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", REPEATED)
def test_rows_go_where_they_went_whatever_the_counts_are(name: str, counts: str) -> None:
    model = built(REPEATED[name])
    feeds = FEEDS | {"counts": np.asarray(COUNTS[counts]), "steps": np.asarray([*COUNTS[counts], 0, 1, -1, 1])}
    fused = fuse(model, policy="all").model
    try:
        run(model, feeds)
    except Exception as refused:  # onnxruntime's errors have no type of their own.
        with pytest.raises(type(refused), match="out of data bounds"):
            run(fused, feeds)
    else:
        _check_same(model, fused, feeds)
