"""The gradient of an embedding's weight, by scatters, one-hots and tables: found, and as PyTorch's; others are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from graphs import GraphBuilder
from onnx import TensorProto
from producers import run
from variants import C, N, summed_by_table

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

WEIGHTS, WIDTH = 5, 3
F32, I64 = TensorProto.FLOAT, TensorProto.INT64
RNG = np.random.default_rng(0)
FEEDS = {
    "dy": RNG.standard_normal((2, 4, WIDTH)).astype(np.float32),
    "index": np.asarray([[3, 0, 3, 1], [4, 4, 3, 0]]),
}


def _rows(g: GraphBuilder) -> tuple[str, str]:
    return g.op("Reshape", "dy", g.ints(8, WIDTH)), g.op("Reshape", "index", g.ints(8))


def _blank(g: GraphBuilder) -> str:
    return g.constant(np.zeros((WEIGHTS, WIDTH)))


def _column(g: GraphBuilder, index: str) -> str:
    return g.op("Unsqueeze", index, g.ints(-1))


def _one_hot_of(g: GraphBuilder, index: str) -> str:
    return g.op("OneHot", index, g.constant(WEIGHTS, np.int64), g.constant([0.0, 1.0]))


def _one_hot(g: GraphBuilder) -> str:
    return _one_hot_of(g, _rows(g)[1])


def _spread(g: GraphBuilder) -> str:
    return g.op("Expand", _column(g, _rows(g)[1]), g.ints(8, WIDTH))


def _from_start(g: GraphBuilder) -> str:
    """The index, or where it counts from the end, what it counts to."""
    from_end = g.op("Less", "index", g.constant(0, np.int64))
    return g.op("Where", from_end, g.op("Add", "index", g.constant(WEIGHTS, np.int64)), "index")


WRITTEN: dict[str, Callable[[GraphBuilder], str]] = {
    "ScatterND": lambda g: g.op("ScatterND", _blank(g), _column(g, "index"), "dy", reduction="add"),
    "ScatterND of rows": lambda g: g.op(
        "ScatterND", _blank(g), _column(g, _rows(g)[1]), _rows(g)[0], reduction="add"
    ),
    "ScatterElements": lambda g: g.op(
        "ScatterElements", _blank(g), _spread(g), _rows(g)[0], axis=0, reduction="add"
    ),
    "one-hot, transposed": lambda g: g.op("MatMul", g.op("Transpose", _one_hot(g), perm=[1, 0]), _rows(g)[0]),
    "one-hot, Einsum": lambda g: g.op("Einsum", _one_hot(g), _rows(g)[0], equation="rv,rc->vc"),
    "one-hot, Einsum, turned": lambda g: g.op(
        "Transpose", g.op("Einsum", _rows(g)[0], _one_hot(g), equation="rc,rv->cv"), perm=[1, 0]
    ),
    "one-hot of each item": lambda g: g.op(
        "ReduceSum",
        g.op("MatMul", g.op("Transpose", _one_hot_of(g, "index"), perm=[0, 2, 1]), "dy"),
        *(g.ints(0),),
        keepdims=0,
    ),
    "an index from the start": lambda g: g.op(
        "ScatterND", _blank(g), _column(g, _from_start(g)), "dy", reduction="add"
    ),
    "one-hot, Gemm": lambda g: g.op("Gemm", _one_hot(g), _rows(g)[0], transA=1),
    "rows that are masked": lambda g: g.op(
        "ScatterND",
        _blank(g),
        _column(g, "index"),
        g.op("Where", g.op("Less", _column(g, "index"), g.constant(0, np.int64)), g.constant(0.0), "dy"),
        reduction="add",
    ),
}  # fmt: skip
OTHERS: dict[str, Callable[[GraphBuilder], str]] = {
    "onto rows that are there": lambda g: g.op(
        "ScatterND", g.constant(np.ones((WEIGHTS, WIDTH))), _column(g, "index"), "dy", reduction="add"
    ),
    "the largest": lambda g: g.op("ScatterND", _blank(g), _column(g, "index"), "dy", reduction="max"),
    "an index for each element": lambda g: g.op(
        "ScatterElements",
        _blank(g),
        g.op("Mod", g.op("Add", _spread(g), g.ints(0, 1, 0)), g.constant(WEIGHTS, np.int64)),
        _rows(g)[0],
        axis=0,
        reduction="add",
    ),
    "rows in another order": lambda g: g.op(
        "ScatterND",
        _blank(g),
        _column(g, g.op("Transpose", "index", perm=[1, 0])),
        g.op("Reshape", "dy", g.ints(4, 2, WIDTH)),
        reduction="add",
    ),
    "a one-hot of twice the index": lambda g: g.op(
        "Gemm",
        g.op("OneHot", g.op("Add", *[_rows(g)[1]] * 2), g.constant(2 * WEIGHTS, np.int64), g.constant([0.0, 2.0])),
        _rows(g)[0],
        transA=1,
    ),
}


def _model(write: Callable[[GraphBuilder], str]) -> onnx.ModelProto:
    g = GraphBuilder()
    g.input("dy", F32, [2, 4, WIDTH])
    g.input("index", I64, [2, 4])
    g.output(g.op("Identity", write(g)))
    return g.model()


def _by_pytorch(feeds: dict[str, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    weight = torch.zeros(WEIGHTS, WIDTH, dtype=dtype, requires_grad=True)
    looked_up = torch.nn.functional.embedding(torch.tensor(feeds["index"]), weight)
    looked_up.backward(torch.tensor(feeds["dy"], dtype=dtype))  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad.numpy()


@pytest.mark.parametrize("name", WRITTEN)
def test_gradient_of_an_embedding_is_fused(name: str) -> None:
    result = fuse(_model(WRITTEN[name]), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    (got,) = run(result.model, FEEDS).values()
    assert_gradients_close(got, _by_pytorch(FEEDS, torch.float32), _by_pytorch(FEEDS, torch.float64), np.float32)


@pytest.mark.parametrize("spread", [True, False])
def test_the_gradient_of_a_table_of_positions_is_fused(spread: bool) -> None:
    """The positions of each row of the batch: nodes repeat them."""

    def write(g: GraphBuilder) -> str:
        positions = g.op("Expand", g.constant(np.arange(4)[None], np.int64), g.ints(2, 4))
        if not spread:
            return g.op("ScatterND", _blank(g), _column(g, positions), "dy", reduction="add")
        column = g.op("Expand", g.op("Reshape", positions, g.ints(8, 1)), g.ints(8, WIDTH))
        return g.op("ScatterElements", _blank(g), column, _rows(g)[0], axis=0, reduction="add")

    result = fuse(_model(write), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    (got,) = run(result.model, FEEDS).values()
    of_positions = {**FEEDS, "index": np.tile(np.arange(4), (2, 1))}
    native, exact = (_by_pytorch(of_positions, dtype) for dtype in (torch.float32, torch.float64))
    assert_gradients_close(got, native, exact, np.float32)


def _of_scaled_rows(g: GraphBuilder) -> str:
    scaled = g.op("Mul", _rows(g)[0], g.constant(2.0))
    return g.op("Gemm", _one_hot(g), scaled, transA=1)


def test_rows_of_several_dimensions_that_are_scaled_as_a_matrix_are_fused() -> None:
    result = fuse(_model(_of_scaled_rows), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    (got,) = run(result.model, FEEDS).values()
    twice = FEEDS | {"dy": 2 * FEEDS["dy"]}
    assert_gradients_close(got, _by_pytorch(twice, torch.float32), _by_pytorch(twice, torch.float64), np.float32)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_at_indices_are_left_alone_or_right(name: str) -> None:
    model = _model(OTHERS[name])
    result = fuse(model, policy="all")
    assert not any(miss.bug for miss in result.report.near_misses), result.report
    if name in ("onto rows that are there", "the largest", "an index for each element"):
        assert not result.report.fusions
    for one, other in zip(run(model, FEEDS).values(), run(result.model, FEEDS).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_sums_by_a_table_are_fused() -> None:
    g = GraphBuilder()
    ids, rows = g.input("ids", I64, [N]), g.input("rows", F32, [N, 1])
    g.output(g.op("Identity", summed_by_table(g, ids, rows)))
    model = g.model()
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    feeds = {"ids": np.asarray([7, 2, 7, 0, 2, N * C - 1]), "rows": RNG.standard_normal((N, 1)).astype(np.float32)}
    exact = np.zeros((N * C, 1))
    np.add.at(exact, feeds["ids"], feeds["rows"].astype(np.float64))
    (plain,), (got,) = run(model, feeds).values(), run(result.model, feeds).values()
    assert_gradients_close(got, plain, exact, np.float32)


def test_model_that_is_older_than_the_body_gets_its_opset() -> None:
    text = """
        <ir_version: 8, opset_import: ["": 13]>
        g (float[6,4] dy, int64[6] index) => (float[5,4] d) {
          depth = Constant<value_int = 5>()  pair = Constant<value_floats = [0.0, 1.0]>()
          hot = OneHot<axis = 0>(index, depth, pair)  d = MatMul(hot, dy)
        }
    """
    model = onnx.parser.parse_model(text)
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    assert {entry.domain: entry.version for entry in result.model.opset_import}[""] == 16
    onnx.checker.check_model(result.model, full_check=True)
    numbers = np.random.default_rng(0)
    feeds = {"dy": numbers.standard_normal((6, 4)).astype(np.float32), "index": np.asarray([0, 3, 1, 3, 4, 3])}
    exact = np.zeros((5, 4))
    np.add.at(exact, feeds["index"], feeds["dy"].astype(np.float64))
    (plain,), (got,) = run(model, feeds).values(), run(result.model, feeds).values()
    assert_gradients_close(got, plain, exact, np.float32)
    unchanged = fuse(model, only=["GeluBackward"]).model
    assert {entry.domain: entry.version for entry in unchanged.opset_import}[""] == 13


def test_embedding_of_a_large_vocabulary_is_fused_and_an_index_below_0_is_an_error() -> None:
    """ONNX's own operator counts it from the end. That is no gradient of a look-up."""
    text = """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[N,768] dy, int64[N] index) => (float[50257,768] d)
          <int64[2] shape = {50257, 768}, int64[1] last = {-1}> {
          blank = ConstantOfShape(shape)
          column = Unsqueeze(index, last)
          sums = ScatterND<reduction = "add">(blank, column, dy)
          d = Identity(sums)
        }
    """
    result = fuse(onnx.parser.parse_model(text), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    dy = np.ones((2, 768), np.float32)
    (got,) = run(result.model, {"dy": dy, "index": np.asarray([50256, 0])}).values()
    assert got[[0, 50256]].sum() == got.sum() == 2 * 768
    with pytest.raises(Exception, match=r"indices|out of|ScatterElements"):
        run(result.model, {"dy": dy, "index": np.asarray([-1, 0])})


def test_an_index_that_counts_from_the_end_where_the_graph_takes_it() -> None:
    """The operator gets what the graph makes of it."""
    result = fuse(_model(WRITTEN["an index from the start"]), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["EmbeddingDenseBackward"], result.report
    feeds = FEEDS | {"index": FEEDS["index"] - WEIGHTS * (FEEDS["index"] % 2)}
    (got,) = run(result.model, feeds).values()
    assert_gradients_close(got, _by_pytorch(FEEDS, torch.float32), _by_pytorch(FEEDS, torch.float64), np.float32)


def test_an_index_moved_by_another_number_is_not_one_from_the_start() -> None:
    def moved(g: GraphBuilder) -> str:
        from_end = g.op("Less", "index", g.constant(0, np.int64))
        index = g.op("Where", from_end, g.op("Add", "index", g.constant(WEIGHTS - 1, np.int64)), "index")
        return g.op("ScatterND", _blank(g), _column(g, index), "dy", reduction="add")

    assert not fuse(_model(moved), policy="all").report.fusions


def test_an_einsum_of_one_operand() -> None:
    """It is a view or a sum, and no product."""
    result = fuse(_model(lambda g: g.op("Einsum", "dy", equation="abc->bc")), policy="all")
    assert "EmbeddingDenseBackward" not in {fusion.op for fusion in result.report.fusions}
