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
from habits import READERS, in_another_order, read_by, twice, with_constant_nodes, with_identities, with_unread_twins
from matched import graphs, known
from producers import run

from gradfuse import FuseResult, explain, fuse
from gradfuse.testing import assert_gradients_close

Feeds = dict[str, np.ndarray[Any, Any]]
Habit = Callable[[onnx.ModelProto, int], onnx.ModelProto]
RNG = np.random.default_rng(0)
UNREAD = """g (float[6,5] z, int64[6] t) => (float[6,5] y)
<int64[1] last = {1}, float share = {0.125}>
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


def _assert_same(fused: onnx.ModelProto, model: onnx.ModelProto, feeds: Feeds) -> None:
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


def test_what_one_operator_reads_is_not_taken_away_by_another() -> None:
    text = UNREAD.replace("6,5", "1200,500").replace("[6]", "[1200]").replace("value_int=5", "value_int=500")
    text = text.replace("y)", "y, float[1200,500] far)", 1)
    text = text.replace("    unread =", "    m = Mul(less, share)\n    n = Tanh(m)\n    far = Mul(n, e)\n    unread =")
    model = parsed(text)
    result = fuse(model, pointwise=True)
    assert set(_ops(result)) == {"CrossEntropyLossGrad", "Pointwise"}
    feeds: Feeds = {"z": RNG.normal(size=(1200, 500)).astype(np.float32), "t": RNG.integers(0, 500, 1200)}
    _assert_same(result.model, model, feeds)


def _ops(result: FuseResult) -> Counter[str]:
    return Counter(one.op for one in result.report.fusions)


MATCHED = [
    pytest.param(path, id=name)
    for name, path in graphs().items()
    if path.stat().st_size < 100_000 and known()[name]["all"]
]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("path", MATCHED)
def test_it_does_not_matter_which_of_two_equal_values_is_read(path: Path, readers: str) -> None:
    model = twice(onnx.load(path), readers)
    fused, plain = (fuse(one, policy="all", bodies=False) for one in (model, onnx.load(path)))
    assert _ops(fused) == _ops(plain)
    # What nothing reads any more is not left.
    assert _unread(fused.model) <= _unread(model) | _unread(plain.model)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("written", [with_identities, with_constant_nodes, in_another_order, with_unread_twins])
@pytest.mark.parametrize("path", MATCHED)
def test_it_does_not_matter_how_constants_and_copies_are_written(path: Path, written: Habit) -> None:
    model = onnx.load(path)
    found, wanted = (fuse(one, policy="all", bodies=False) for one in (written(model, len(path.name)), model))
    assert not _ops(wanted) - _ops(found)


def _unread(model: onnx.ModelProto) -> set[str]:
    """The names of nodes whose results nothing reads."""
    read = {name for node in model.graph.node for name in read_by(node)} | {value.name for value in model.graph.output}
    return {node.name for node in model.graph.node if read.isdisjoint(node.output)}


ERROR = """g (float[4,6] x, float[4,6] goal, float[4,6] other) => (float[4,6] y, float[4,6] far, float[4,6] square)
{
    a = Sub(x, goal)
    b = Sub(x, goal)
    k = Constant<value_float=0.08333333>()
    d = Mul(a, k)
    y = Tanh(d)
    far = Mul(b, other)
    u = Exp(other)
    v = Exp(other)
    square = Mul(u, v)
}"""


def _nodes(model: onnx.ModelProto) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(node.op_type, tuple(node.input), tuple(node.output)) for node in model.graph.node]


def test_what_is_not_fused_stays_as_it_was() -> None:
    model = parsed(ERROR)
    unchanged = fuse(model, only=["GeluBackward"])
    assert not unchanged.report.fusions and _nodes(unchanged.model) == _nodes(model)
    fused = fuse(model, policy="all")
    assert [one.op for one in fused.report.fusions] == ["MseLossBackward"]
    left = _nodes(fused.model)
    assert left[-3:] == _nodes(model)[-3:]
    assert set(left) >= {("Sub", ("x", "goal"), ("b",)), ("Mul", ("b", "other"), ("far",))}
    assert [op for op, *_ in left].count("Sub") == 1
    assert [r.op for r in explain(model).regions] == ["MseLossBackward"]


DRAWN = """g (float[4,6] x, float[4,6] goal) => (float[4,6] y)
{
    a = RandomNormalLike(x)
    b = RandomNormalLike(x)
    p = Add(x, a)
    q = Add(goal, b)
    d = Sub(p, q)
    k = Constant<value_float=0.08333333>()
    y = Mul(d, k)
}"""


def test_two_draws_are_two_values() -> None:
    """Were they one, they would cancel, and leave the gradient of a mean squared error."""
    assert not fuse(parsed(DRAWN), policy="all").report.fusions


TIED = """g (float[4,6] x, float[4,6] goal) => (float[4,6] y, float[4,6] far)
<float[6] first = {1, 2, 3, 4, 5, 6}, float[6] second = {1, 2, 3, 4, 5, 6}>
{
    a = Mul(x, first)
    b = Mul(x, second)
    d = Sub(b, goal)
    k = Constant<value_float=0.08333333>()
    y = Mul(d, k)
    far = Tanh(a)
}"""


def test_equal_parameters_are_two_values() -> None:
    """They may be trained from the fused model on."""
    fused = fuse(parsed(TIED), policy="all")
    assert [one.op for one in fused.report.fusions] == ["MseLossBackward"]
    assert {name for node in fused.model.graph.node for name in node.input} >= {"first", "second"}


LEFT_OUT = """g (float[3,2,4] x, float[1,5,4] w, float[1,5,5] r, float[1,2,5] u, float[1,2,5] goal)
=> (float[1,2,5] y, float[3,1,2,5] far, float[1,2,5] end)
{
    unread, last = RNN<hidden_size=5>(x, w, r)
    all, again = RNN<hidden_size=5>(x, w, r)
    p = Add(u, last)
    q = Add(goal, last)
    d = Sub(p, q)
    k = Constant<value_float=0.06666667>()
    y = Mul(d, k)
    far = Tanh(all)
    end = Tanh(again)
}"""


def test_a_node_does_not_stand_for_one_with_other_outputs() -> None:
    model = parsed(LEFT_OUT)
    model.graph.node[0].output[0] = ""
    del model.graph.value_info[:]
    sizes = {"x": (3, 2, 4), "w": (1, 5, 4), "r": (1, 5, 5), "u": (1, 2, 5), "goal": (1, 2, 5)}
    feeds = {name: RNG.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    result = fuse(model, policy="all")
    assert [one.op for one in result.report.fusions] == ["MseLossBackward"]
    _assert_same(result.model, model, feeds)


def test_an_identity_may_say_what_its_source_does_not() -> None:
    declared = """g (float[4,6] x, float[4,6] goal) => (float[4,6] y) <float[4,6] same, float[4,6] d>
    {
        unknown = local.Operator(x)
        same = Identity(unknown)
        d = Sub(same, goal)
        k = Constant<value_float=0.08333333>()
        y = Mul(d, k)
    }"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20, "local": 1]>\n{declared}')
    assert list(_ops(fuse(model, policy="all", bodies=False))) == ["MseLossBackward"]


CONV_GRAD = """g (float[2,2,4,4] x, float[3,2,1,1] w, float[2,3,4,4] dy, float[2,2] r)
=> (float[3,2,1,1] dw, float[2,2] kept)
{
    dx, dw = com.microsoft.ConvGrad<kernel_shape=[1, 1]>(dy, x, w)
    unread = Tanh(dx)
    a, b = com.microsoft.ConvGrad<kernel_shape=[1, 1]>(dy, w, x)
    kept = Tanh(r)
}"""


def test_what_nothing_reads_is_read_by_no_operator_and_keeps_none_away() -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>\n{CONV_GRAD}')
    result = fuse(model, policy="all", bodies=False)
    assert list(_ops(result)) == ["ConvolutionBackward"], result.report
