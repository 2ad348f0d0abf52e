"""Gradients in graphs that compute something twice, or for nothing, and that are written with other habits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import parsed
from habits import READERS, in_another_order, twice, with_constant_nodes, with_identities
from matched import graphs
from producers import run

from gradfuse import GradfuseError, explain, fuse
from gradfuse.testing import assert_gradients_close

Habit = Callable[[onnx.ModelProto, int], onnx.ModelProto]
RNG = np.random.default_rng(0)
UNREAD = """g (float[6,5] z, int64[6] t) => (float[6,5] y)
<int64[1] last = {1}, int64[2] table = {6, 5}, float share = {0.125}>
{
    most = ReduceMax(z, last)
    less = Sub(z, most)
    e = Exp(less)
    sum = ReduceSum(e, last)
    log = Log(sum)
    log_p = Sub(less, log)
    unread = Neg(log_p)
    p = Div(e, sum)
    depth = Constant<value_int=5>()
    pair = Constant<value_floats=[0.0, 1.0]>()
    hot = OneHot(t, depth, pair)
    weighted = Mul(hot, share)
    rows = ReduceSum(weighted, last)
    whole = Mul(p, rows)
    d = Sub(whole, weighted)
    y = Tanh(d)
}"""


def _assert_same(fused: onnx.ModelProto, model: onnx.ModelProto, feeds: dict[str, np.ndarray[Any, Any]]) -> None:
    wanted, got = run(model, feeds), run(fused, feeds)
    for name, value in wanted.items():
        assert_gradients_close(got[name], value, value.astype(np.float64), np.float32, terms=4)


@pytest.mark.parametrize("end", ["", "unread"])
def test_what_nothing_reads_may_be_what_the_operator_reads(end: str) -> None:
    """The logarithms of the probabilities, which the operator takes, are read by nothing in the graph as it is."""
    model = parsed(UNREAD if end else UNREAD.replace("    unread = Neg(log_p)\n", ""))
    result = fuse(model, policy="all")
    assert [one.op for one in result.report.fusions] == ["CrossEntropyLossGrad"]
    feeds = {"z": RNG.normal(size=(6, 5)).astype(np.float32), "t": np.asarray([0, 4, 2, 1, 3, 3])}
    _assert_same(result.model, model, feeds)


def _ops(model: onnx.ModelProto | Path) -> Counter[str]:
    return Counter(one.op for one in fuse(model, policy="all", bodies=False).report.fusions)


SMALL = [pytest.param(path, id=name) for name, path in graphs().items() if path.stat().st_size < 100_000]


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("path", SMALL)
def test_it_does_not_matter_which_of_two_equal_values_is_read(path: Path, readers: str) -> None:
    try:
        wanted = _ops(path)
    except GradfuseError:
        return
    assert _ops(twice(onnx.load(path), readers)) == wanted


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("written", [with_identities, with_constant_nodes, in_another_order])
@pytest.mark.parametrize("path", SMALL)
def test_it_does_not_matter_how_constants_and_copies_are_written(path: Path, written: Habit) -> None:
    try:
        wanted = _ops(path)
    except GradfuseError:
        return
    found = _ops(written(onnx.load(path), len(path.name)))
    assert not wanted - found


ERROR = """g (float[4,6] x, float[4,6] goal, float[4,6] other) => (float[4,6] y, float[4,6] far)
{
    a = Sub(x, goal)
    b = Sub(x, goal)
    k = Constant<value_float=0.08333333>()
    d = Mul(a, k)
    y = Tanh(d)
    far = Mul(b, other)
}"""


def _nodes(model: onnx.ModelProto) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(node.op_type, tuple(node.input), tuple(node.output)) for node in model.graph.node]


def test_what_is_not_fused_stays_as_it_was() -> None:
    model = parsed(ERROR)
    unchanged = fuse(model, only=["GeluBackward"])
    assert not unchanged.report.fusions and _nodes(unchanged.model) == _nodes(model)
    fused = fuse(model, policy="all")
    assert [one.op for one in fused.report.fusions] == ["MseLossBackward"]
    assert set(_nodes(fused.model)) >= {("Sub", ("x", "goal"), ("b",)), ("Mul", ("b", "other"), ("far",))}
    assert [r.op for r in explain(model).regions] == ["MseLossBackward"]


DRAWN = """g (float[4,6] x) => (float[4,6] y)
{
    a = RandomNormalLike(x)
    b = RandomNormalLike(x)
    d = Sub(a, b)
    k = Constant<value_float=0.08333333>()
    y = Mul(d, k)
}"""


def test_two_draws_are_two_values() -> None:
    model = parsed(DRAWN)
    fused = fuse(model, policy="all").model
    assert [n.op_type for n in fused.graph.node].count("RandomNormalLike") == 2
    x = np.zeros((4, 6), np.float32)
    assert np.abs(run(fused, {"x": x})["y"]).max() > 0


TIED = """g (float[4,6] x, float[4,6] dy) => (float[4,6] y)
<float[6] first = {1, 2, 3, 4, 5, 6}, float[6] second = {1, 2, 3, 4, 5, 6}>
{
    a = Mul(x, first)
    b = Mul(x, second)
    c = Sub(a, dy)
    d = Mul(b, c)
    y = Tanh(d)
}"""


def test_equal_parameters_are_two_values() -> None:
    model = parsed(TIED)
    fused = fuse(model, policy="all").model
    assert {name for node in fused.graph.node for name in node.input} >= {"first", "second"}
