"""What is said of the integers of a graph, their bounds, order and repetition, holds for every input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from graphs import GraphBuilder
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from gradfuse.passes.reading import Forms, Order

Build = Callable[[GraphBuilder], str]
ROWS = 6


def _x(g: GraphBuilder, name: str = "x") -> str:
    return g.input(name, TensorProto.INT64, [ROWS])


def _flags(g: GraphBuilder) -> str:
    return g.op("Cast", g.op("Less", _x(g), g.constant(0, np.int64)), to=TensorProto.INT64)


def _sum(g: GraphBuilder, x: str, **attributes: int) -> str:
    return g.op("CumSum", x, g.constant(0, np.int64), **attributes)


def _range(g: GraphBuilder, start: int = 0, stop: int = ROWS, step: int = 1) -> str:
    return g.op("Range", *(g.constant(k, np.int64) for k in (start, stop, step)))


def _marks(g: GraphBuilder, starts: str, count: int) -> str:
    blank, ones = (g.constant(a, np.int64) for a in (np.zeros(ROWS), np.ones(count)))
    return g.op("ScatterElements", blank, starts, ones, reduction="add")


def _in_range(g: GraphBuilder) -> str:
    return g.op("Mod", g.op("Abs", _x(g)), g.constant(ROWS, np.int64))


def _picked(g: GraphBuilder) -> str:
    """Marks at the indices that are in range, the first of which is 0."""
    zero = g.constant(0, np.int64)
    x = g.op("ScatterElements", _x(g), g.ints(0), g.ints(0))
    inside = g.op("And", g.op("GreaterOrEqual", x, zero), g.op("Less", x, g.constant(ROWS, np.int64)))
    kept = g.op("Squeeze", g.op("NonZero", inside), g.ints(0))
    ones = g.op("Gather", g.constant(np.ones(ROWS), np.int64), kept)
    blank = g.constant(np.zeros(ROWS), np.int64)
    return g.op("ScatterElements", blank, g.op("Gather", x, kept), ones, reduction="add")


def _where(g: GraphBuilder, x: str) -> str:
    """The index, or where it is negative one from the end on."""
    below = g.op("Less", x, g.constant(0, np.int64))
    return g.op("Where", below, g.op("Add", x, g.constant(ROWS, np.int64)), x)


def _sorted(g: GraphBuilder, x: str, **attributes: int) -> str:
    return g.op("TopK", x, g.ints(ROWS), outputs=2, **attributes)


def _minus(g: GraphBuilder, x: str, k: int = 1) -> str:
    return g.op("Sub", x, g.constant(k, np.int64))


IN_ORDER: dict[str, tuple[Build, float, float]] = {
    "running sum of flags": (lambda g: _sum(g, _flags(g)), 0, ROWS),
    "running sum before each": (lambda g: _sum(g, _flags(g), exclusive=1), 0, ROWS),
    "marks": (lambda g: _sum(g, _marks(g, _in_range(g), ROWS)), 0, ROWS),
    "marks, the first at 0": (lambda g: _where(g, _minus(g, _sum(g, _picked(g)))), 0, ROWS - 1),
    "as a column and back": (
        lambda g: g.op("Reshape", g.op("Unsqueeze", _sum(g, _flags(g)), g.ints(1)), g.ints(-1)),
        0,
        ROWS,
    ),
    "range": (_range, 0, np.inf),
    "blocks": (lambda g: g.op("Div", _range(g), g.constant(2, np.int64)), 0, np.inf),
    "at most": (lambda g: g.op("Min", _sum(g, g.op("Abs", _x(g))), g.constant(3, np.int64)), 0, 3),
    "from a sorted table": (
        lambda g: g.op("Gather", g.ints(0, 0, 1, 3, 3, 7, 9), _sum(g, _flags(g), exclusive=0)),
        0,
        9,
    ),
    "sum of two": (lambda g: g.op("Add", _sum(g, _flags(g)), _range(g)), 0, np.inf),
    "sorted": (lambda g: _sorted(g, g.op("Abs", _x(g)), largest=0), 0, np.inf),
    "large": (lambda g: _sum(g, g.op("Max", _x(g), g.constant(0, np.int64))), 0, np.inf),
}

IN_NO_ORDER: dict[str, Build] = {
    "anything": lambda g: g.op("Abs", _x(g)),
    "running sum of anything": lambda g: _sum(g, _x(g)),
    "running sum from the end": lambda g: _sum(g, _flags(g), reverse=1),
    "wrapped": lambda g: _where(g, _minus(g, _sum(g, _flags(g)))),
    "falling table": lambda g: g.op("Gather", g.ints(9, 8, 7, 6, 5, 4, 3), _sum(g, _flags(g))),
    "table from the end": lambda g: g.op("Gather", g.ints(1, 2, 3, 4, 5, 6, 7), _minus(g, _sum(g, _flags(g)))),
    "difference": lambda g: g.op("Sub", _range(g), _sum(g, g.op("Abs", _x(g)))),
    "negative multiple": lambda g: g.op("Mul", _sum(g, _flags(g)), g.constant(-1, np.int64)),
    "as conditions and back": lambda g: g.op(
        "Cast", g.op("Cast", _minus(g, _sum(g, _flags(g))), to=TensorProto.BOOL), to=TensorProto.INT64
    ),
    "sorted from the largest on": lambda g: _sorted(g, _x(g)),
    "the smallest, unsorted": lambda g: _sorted(g, _x(g), largest=0, sorted=0),
    "along a dimension of size 1": lambda g: g.op(
        "Squeeze", g.op("CumSum", g.op("Unsqueeze", _flags(g), g.ints(1)), g.constant(1, np.int64)), g.ints(1)
    ),
}


def _checked(build: Build) -> tuple[Order, ir.Value]:
    """The facts of a graph, after each was compared with what its nodes compute."""
    g = GraphBuilder()
    result = build(g)
    g.output(g.op("Identity", result), TensorProto.INT64)
    model = g.model()
    graph = ir.from_proto(model).graph
    order = Order(Forms(graph))
    values = {str(v.name): v for node in graph for v in node.outputs if v.dtype == ir.DataType.INT64}
    for name in values:
        model.graph.output.add(name=name)
    del model.graph.output[0]
    evaluator = ReferenceEvaluator(model)
    rng = np.random.default_rng(0)
    for scale in (1, 2, ROWS, 100):
        feeds = {"x": rng.integers(-scale, scale, ROWS, endpoint=True)}
        for (name, value), array in zip(values.items(), evaluator.run(None, feeds), strict=True):
            if array.size:
                assert order.least(value) <= array.min(), name
                assert order.most(value) >= array.max(), name
                assert order.first(value) in (None, array.flat[0]), name
            assert not order.rises(value) or (np.diff(array.ravel()) >= 0).all(), name
    return order, values[result]


@pytest.mark.parametrize("name", IN_ORDER)
def test_is_known_to_be_in_order(name: str) -> None:
    build, least, most = IN_ORDER[name]
    order, value = _checked(build)
    assert (order.rises(value), order.least(value), order.most(value)) == (True, least, most)


@pytest.mark.parametrize("name", IN_NO_ORDER)
def test_is_in_no_order(name: str) -> None:
    order, value = _checked(IN_NO_ORDER[name])
    assert not order.rises(value)


def _column(g: GraphBuilder, x: str) -> str:
    return g.op("Unsqueeze", x, g.ints(-1))


def _tuples(g: GraphBuilder, *columns: str) -> str:
    return g.op("Concat", *(_column(g, x) for x in columns), axis=-1)


def _permutation(g: GraphBuilder) -> str:
    return f"{_sorted(g, _x(g))}_1"


def _positions(g: GraphBuilder, x: str) -> str:
    """Where the integers of a line are positive."""
    return g.op("Squeeze", g.op("NonZero", g.op("Greater", x, g.constant(0, np.int64))), g.ints(0))


def _grid(g: GraphBuilder, across: str) -> str:
    down = g.op("Expand", _column(g, _range(g)), g.ints(ROWS, ROWS))
    return _tuples(g, down, g.op("Expand", across, g.ints(ROWS, ROWS)))


def _square(g: GraphBuilder) -> str:
    """Positive and negative numbers in two dimensions."""
    return g.op("Sub", _column(g, _x(g)), _range(g))


APART: dict[str, Build] = {
    "range": lambda g: _column(g, _range(g)),
    "every second": lambda g: _column(g, _range(g, 1, ROWS, 2)),
    "range, counted from the end where negative": lambda g: _column(g, _where(g, _range(g))),
    "listed": lambda g: _column(g, g.ints(3, 1, 2)),
    "listed pairs": lambda g: g.constant([[0, 1], [1, 1], [1, 0]], np.int64),
    "one": lambda g: _column(g, g.op("Slice", _x(g), g.ints(2), g.ints(3))),
    "permutation": lambda g: _column(g, _permutation(g)),
    "permutation, counted from the end where negative": lambda g: _column(g, _where(g, _permutation(g))),
    "positions": lambda g: _column(g, _positions(g, _x(g))),
    "positions in two dimensions": lambda g: g.op("Transpose", g.op("NonZero", _square(g)), perm=[1, 0]),
    "places of positions": lambda g: _column(g, g.op("Gather", _permutation(g), _positions(g, _x(g, "z")))),
    "a pair of range and anything": lambda g: _tuples(g, _range(g), _x(g)),
    "a pair of anything and permutation": lambda g: _tuples(g, _x(g, "z"), _permutation(g)),
    "grid": lambda g: _grid(g, _range(g)),
}

NOT_APART: dict[str, Build] = {
    "anything": lambda g: _column(g, _x(g)),
    "range around zero": lambda g: _column(g, _range(g, -ROWS, ROWS)),
    "blocks": lambda g: _column(g, g.op("Div", _range(g), g.constant(2, np.int64))),
    "range, twice": lambda g: _column(g, g.op("Expand", _range(g), g.ints(2, ROWS))),
    "range, twice by a condition": lambda g: _column(
        g, g.op("Where", g.constant(np.ones((2, 1)), bool), _range(g), g.constant(0, np.int64))
    ),
    "listed twice": lambda g: _column(g, g.ints(3, 1, 3)),
    "listed from either end": lambda g: _column(g, g.ints(5, 1, -1)),
    "listed pairs, twice": lambda g: g.constant([[0, 1], [1, 1], [0, 1]], np.int64),
    "permutations": lambda g: _column(g, f"{g.op('TopK', _square(g), g.ints(2), outputs=2, axis=0)}_1"),
    "what is sorted": lambda g: _column(g, _sorted(g, _x(g))),
    "rows of positions": lambda g: _column(g, g.op("Gather", g.op("NonZero", _square(g)), g.constant(0, np.int64))),
    "anything at positions": lambda g: _column(g, g.op("Gather", _x(g), _positions(g, _x(g, "z")))),
    "a pair of anything": lambda g: _tuples(g, _x(g), _x(g, "z")),
    "grid of anything": lambda g: _grid(g, _x(g)),
    "pairs of one range": lambda g: _grid(g, _column(g, _range(g))),
}


@pytest.mark.parametrize("name", [*APART, *NOT_APART])
def test_whether_index_tuples_name_one_element_twice(name: str) -> None:
    g = GraphBuilder()
    g.output(g.op("Identity", {**APART, **NOT_APART}[name](g)), TensorProto.INT64)
    model = g.model()
    graph = ir.from_proto(model).graph
    order = Order(Forms(graph))
    assert order.names_apart(graph.outputs[0]) == (name in APART)
    evaluator = ReferenceEvaluator(model)
    rng = np.random.default_rng(0)
    repeats = False
    for _ in range(20):
        feeds = {str(v.name): rng.integers(-ROWS, ROWS, ROWS) for v in graph.inputs}
        (result,) = map(np.asarray, evaluator.run(None, feeds))
        places = result.reshape(-1, result.shape[-1]) % ROWS
        repeats |= len(np.unique(places, axis=0)) < len(places)
    assert repeats == (name in NOT_APART)


def test_positions_in_two_dimensions_pick_an_element_often() -> None:
    g = GraphBuilder()
    positions = g.op("Reshape", g.op("NonZero", g.op("Unsqueeze", _x(g, "z"), g.ints(0))), g.ints(-1))
    blank = g.constant(np.zeros(ROWS), np.int64)
    marks = g.op("ScatterElements", blank, positions, g.op("Gather", _flags(g), positions), reduction="add")
    g.output(_sum(g, marks), TensorProto.INT64)
    model = g.model()
    graph = ir.from_proto(model).graph
    (sums,) = ReferenceEvaluator(model).run(None, {"x": np.full(ROWS, -1), "z": np.ones(ROWS, np.int64)})
    assert Order(Forms(graph)).most(graph.outputs[0]) >= np.asarray(sums).max() > ROWS


def test_a_long_way_to_an_integer_is_no_fact() -> None:
    g = GraphBuilder()
    x = _sum(g, _flags(g))
    for _ in range(3_000):
        x = g.op("Identity", x)
    g.output(x, TensorProto.INT64)
    graph = ir.from_proto(g.model()).graph
    order = Order(Forms(graph))
    (value,) = graph.outputs
    assert (order.rises(value), order.least(value), order.first(value)) == (False, -np.inf, None)
