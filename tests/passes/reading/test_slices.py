"""Tables and masks that are cut to the length of a sequence, which nobody knows before the model runs."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import GraphBuilder
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from producers import run

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

LONGEST = 9


def _length(g: GraphBuilder, x: str, axis: int) -> str:
    return g.op("Slice", g.op("Shape", x), g.ints(axis), g.ints(axis + 1))


@pytest.mark.parametrize("length", [1, 4, LONGEST, LONGEST + 1])
def test_causal_mask_is_cut_from_a_buffer(length: int) -> None:
    g = GraphBuilder()
    shape = ("B", "T", "T")
    scores, upstream = g.input("scores", TensorProto.FLOAT, shape), g.input("upstream", TensorProto.FLOAT, shape)
    y = g.op("Softmax", scores)
    d = g.op("Mul", y, g.op("Sub", upstream, g.sum(g.op("Mul", upstream, y), -1)))
    end = _length(g, scores, 1)
    kept = g.constant(np.tril(np.ones((LONGEST, LONGEST), bool)), np.bool_)
    kept = g.op("Slice", kept, g.ints(0, 0), g.op("Concat", end, end, axis=0))
    g.output(g.op("Identity", g.op("Where", kept, d, g.constant(0.0))))
    model = g.model()
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["ScaledMaskedSoftmaxBackward"], result.report
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(2, length, length)).astype(np.float32) for name in ("scores", "upstream")}
    if length > LONGEST:
        # The buffer is too short, and none of its parts is repeated.
        for either in (model, result.model):
            with pytest.raises((Fail, InvalidArgument, RuntimeException)):
                run(either, feeds)
        return
    (wanted,), (got,) = run(model, feeds).values(), run(result.model, feeds).values()
    assert_gradients_close(got, wanted, wanted.astype(np.float64), np.float32, terms=4)


@pytest.mark.parametrize("length", [1, 4, LONGEST, LONGEST + 3])
def test_a_table_may_end_before_the_sequence_does(length: int) -> None:
    g = GraphBuilder()
    table, tokens = g.input("table", TensorProto.FLOAT, (LONGEST, 5)), g.input("tokens", TensorProto.FLOAT, ("T", 5))
    centre = g.input("centre", TensorProto.FLOAT, (5,))
    end = _length(g, tokens, 0)
    d = g.op("Sub", g.op("Slice", table, g.ints(0), end, g.ints(0)), centre)
    count = g.op("Mul", g.op("Cast", end, to=TensorProto.FLOAT), g.constant(5.0))
    g.output(g.op("Identity", g.op("Div", g.op("Mul", d, g.constant(2.0)), count)))
    model = g.model()
    fused = fuse(model, policy="all")
    assert not any(miss.bug for miss in fused.report.near_misses)
    rng = np.random.default_rng(0)
    shapes = {"table": (LONGEST, 5), "tokens": (length, 5), "centre": (5,)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    (wanted,), (got,) = run(model, feeds).values(), run(fused.model, feeds).values()
    assert_gradients_close(got, wanted, wanted.astype(np.float64), np.float32, terms=4)
