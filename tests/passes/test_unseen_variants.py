"""Gradients as further producers would write them are recognised, look-alikes are not; both compute what they did."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from producers import run
from variants import FEEDS, GRAPHS, OTHERS, Build, built

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close


def _check_same(model: onnx.ModelProto, fused: onnx.ModelProto) -> None:
    onnx.checker.check_model(fused, full_check=True)
    wanted, got = run(model, FEEDS), run(fused, FEEDS)
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
