"""Chains of elementwise nodes become one operator, and keep their numbers."""

from __future__ import annotations

import elementwise_graphs
import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gradfuse
from gradfuse import fuse
from gradfuse.passes.report import Fusion

Array = npt.NDArray[np.float32]
ROWS, COLUMNS = 512, 1024  # a tensor of 2 MiB

SWIGLU = f"""<ir_version: 10, opset_import: ["": 20]>
swiglu (float[N, {COLUMNS}] gate, float[N, {COLUMNS}] up)
    => (float[N, {COLUMNS}] y, float[N, {COLUMNS}] dgate, float[N, {COLUMNS}] dup) {{
    one = Constant<value_float = 1.0>()
    share = Sigmoid(gate)  silu = Mul(gate, share)  y = Mul(silu, up)
    mixed = MatMul(y, eye)  grad = MatMul(mixed, eye)
    dup = Mul(grad, silu)
    dsilu = Mul(grad, up)
    first = Mul(dsilu, share)
    rest = Sub(one, share)  slope = Mul(share, rest)  scaled = Mul(dsilu, gate)  second = Mul(scaled, slope)
    dgate = Add(first, second)
}}"""


def parsed(text: str, **initializers: Array) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in initializers.items())
    return model


def swiglu() -> onnx.ModelProto:
    return parsed(SWIGLU, eye=np.eye(COLUMNS, dtype=np.float32))


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Pointwise"]


def expressions(model: onnx.ModelProto) -> list[str]:
    found = [{a.name: a for a in node.attribute} for node in nodes(model)]
    return [attributes["expression"].s.decode() for attributes in found]


def session(model: onnx.ModelProto, *, kernels: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    # As the nodes are, without what onnxruntime would make of them.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if kernels:
        gradfuse.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kernels", [False, True])
def test_swiglu_is_two_nodes_and_stores_neither_sigmoid_nor_product(kernels: bool) -> None:
    result = fuse(swiglu(), pointwise=True)
    assert [len(node.input) for node in nodes(result.model)] == [2, 3]
    assert {node.op_type for node in result.model.graph.node} == {"Pointwise", "MatMul"}
    assert all(isinstance(one, Fusion) and one.bytes_saved >= 2**20 for one in result.report.fusions)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for name in ("gate", "up")}
    found = session(result.model, kernels=kernels).run(None, feeds)
    gate, up = (torch.tensor(array, dtype=torch.float64) for array in feeds.values())
    gate.requires_grad_()
    up.requires_grad_()
    y = F.silu(gate) * up
    (y.square().sum() / 2).backward()
    for array, wanted in zip(found, (y, gate.grad, up.grad), strict=True):
        # Some ten roundings, of terms that are at most a few times as large as the result, or 1.
        assert wanted is not None
        bound = 16 * np.finfo(np.float32).eps * np.maximum(np.abs(wanted.detach().numpy()), 1)
        assert (np.abs(array - wanted.detach().numpy()) <= bound).all()


def test_chains_are_left_alone_unless_asked_for() -> None:
    assert not nodes(fuse(swiglu()).model)
    assert nodes(fuse(swiglu(), only=["Pointwise"]).model)
    assert not nodes(fuse(swiglu(), pointwise=True, skip=["Pointwise"]).model)


def test_small_chains_stay() -> None:
    small = parsed(SWIGLU.replace(str(COLUMNS), "16"), eye=np.eye(16, dtype=np.float32))
    assert not nodes(fuse(small, pointwise=True).model)
    assert len(nodes(fuse(small, pointwise=True, policy="all").model)) == 2


GRAPH = """<ir_version: 10, opset_import: ["": 20]>
chain (float[N, 6] x, float[N, 6] z, float[6] row, float[N, 1] column) => (float[N, 6] y) {
    one = Constant<value_float = 1.0>()
    a = Add(x, row)  b = Mul(a, z)
    y = Sub(b, one)
}"""


def changed(*changes: tuple[str, str]) -> onnx.ModelProto:
    text = GRAPH
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ([], ["y0 = Sub(Mul(Add(x0, x1), x2), 1.0)"]),
        ([("Add(x, row)", "Add(column, x)")], ["y0 = Sub(Mul(Add(x1, x0), x2), 1.0)"]),
        ([("a = Add(x, row)", "a = Sum(x, row, one)")], ["y0 = Sub(Mul(Add(Add(x0, x1), 1.0), x2), 1.0)"]),
        (
            [("b = Mul(a, z)", "c = Less(a, z)  b = Where(c, a, z)")],
            ["t0 = Add(x0, x1); y0 = Sub(Where(Less(t0, x2), t0, x2), 1.0)"],
        ),
        # Its own shape is smaller.
        ([("Add(x, row)", "Add(column, row)")], ["y0 = Sub(Mul(Add(x1, x2), x0), 1.0)"]),
        # What is in between belongs to nobody.
        ([("b = Mul(a, z)", "s = Softmax(a)  b = Mul(s, z)")], ["y0 = Sub(Mul(x0, x1), 1.0)"]),
        # One node alone stays.
        ([("b = Mul(a, z)", "b = Softmax(a)")], []),
        # Integers and float64 stay.
        ([("float[", "double["), ("value_float = 1.0", "value = double {1.0}")], []),
        # The sum is read around the chain: the softmax reads it, and the chain reads the softmax.
        ([("b = Mul(a, z)", "s = Softmax(a)  b = Mul(a, s)")], ["y0 = Sub(Mul(x0, x1), 1.0)"]),
    ],
)
def test_expressions(changes: list[tuple[str, str]], wanted: list[str]) -> None:
    model = changed(*changes)
    fused = fuse(model, only=["Pointwise"], policy="all").model
    assert expressions(fused) == wanted
    rng = np.random.default_rng(1)
    shapes = {"x": (3, 6), "z": (3, 6), "row": (6,), "column": (3, 1)}
    dtype = np.float64 if "double" in str(changes) else np.float32
    feeds = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    np.testing.assert_array_equal(session(fused).run(None, feeds)[0], session(model).run(None, feeds)[0])


def test_results_that_a_branch_reads_stay() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        branching (float[4, 6] x, float[4, 6] z, bool c) => (float[4, 6] y) {
            a = Add(x, z)  b = Mul(a, z)  d = Sub(b, x)
            e = If(c) <then_branch = yes () => (float[4, 6] f) { f = Neg(a) },
                       else_branch = no () => (float[4, 6] g) { g = Identity(d) }>
            y = Add(e, d)
        }"""
    )
    fused = fuse(model, only=["Pointwise"], policy="all").model
    assert len(nodes(fused)) >= 1
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((4, 6)).astype(np.float32) for name in ("x", "z")}
    for condition in (True, False):
        feeds = {**arrays, "c": np.array(condition)}
        np.testing.assert_array_equal(session(fused).run(None, feeds)[0], session(model).run(None, feeds)[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_random_graphs_keep_their_bits(seed: int) -> None:
    """In stock onnxruntime the bodies run the same nodes; kernels round as these do."""
    for approximate in (False, True):
        model = elementwise_graphs.drawn(seed, approximate=approximate)
        try:
            original = session(model)
        except ort.capi.onnxruntime_pybind11_state.Fail:
            continue
        fused = fuse(model, only=["Pointwise"], policy="all").model
        feeds = elementwise_graphs.feeds(model, seed)
        wanted = original.run(None, feeds)
        for kernels in (False,) if approximate else (False, True):
            for array, other in zip(session(fused, kernels=kernels).run(None, feeds), wanted, strict=True):
                np.testing.assert_array_equal(array, other)
