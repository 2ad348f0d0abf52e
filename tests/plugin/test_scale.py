"""Models of many nodes: what is found, and what it costs, grows with them and no faster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
import small_models
import stacking
from graphs import GraphBuilder

import gradfuse

GPT = "torch_export_fb/gpt_block_ce_dyn"


def fused_ops(report: Any) -> Counter[str]:
    return Counter(fusion.op for fusion in report.fusions)


@pytest.mark.long
@pytest.mark.parametrize("chained", [False, True])
def test_every_copy_of_a_block_is_fused_under_names_of_its_own(chained: bool) -> None:
    blocks = [stacking.block(name) for name in stacking.BLOCKS]
    # In a chain, what a block updates is no parameter of the model.
    skip = ["ApplySgd"] if chained else None
    once: Counter[str] = Counter()
    for block in blocks:
        once += fused_ops(gradfuse.fuse(block, skip=skip).report)
    copies = 3
    model = stacking.stacked(blocks, copies * sum(len(b.graph.node) for b in blocks), chained=chained)
    expected = {op: copies * count for op, count in once.items()}
    result = gradfuse.fuse(model, skip=skip)
    assert fused_ops(result.report) == expected
    names = [node.name for node in result.model.graph.node]
    assert len(set(names)) == len(names)
    onnx.checker.check_model(result.model)


@pytest.mark.parametrize("name", [GPT, "torch_export_fb/attn_mulmask", "torch_export_fb/ce_seg_nchw_ignore255_dyn"])
def test_shapes_that_are_left_out_cost_no_match(name: str) -> None:
    block = stacking.block(name)
    given = gradfuse.fuse(block, policy="all").report
    del block.graph.value_info[:]
    assert fused_ops(gradfuse.fuse(block, policy="all", check=1).report) == fused_ops(given) != Counter()


@pytest.mark.long
@pytest.mark.parametrize("case", ["blocks side by side", "blocks in a row", "transformers in a row"])
def test_twice_the_nodes_are_twice_the_work(case: str) -> None:
    names = (GPT,) if case.startswith("transformers") else stacking.BLOCKS
    blocks = [stacking.block(name) for name in names]
    nodes = sum(len(b.graph.node) for b in blocks)
    nodes *= max(1, 1_800 // nodes)
    first, second = (_calls(stacking.stacked(blocks, n, chained="row" in case)) for n in (nodes, 2 * nodes))
    assert second / first < 2.2


def _sums_of_nothing(length: int) -> onnx.ModelProto:
    """A sum over groups and one over all rows, and behind them sums over a dimension of size 1."""
    g = GraphBuilder()
    for name, axis in (("x", 1), ("y", 0)):
        value = g.sum(g.input(name, onnx.TensorProto.FLOAT, [3, 4, 5]), axis)
        for _ in range(length):
            value = g.sum(value, axis)
        g.output(value)
    return g.model()


def _losses_added_up(length: int) -> onnx.ModelProto:
    """Squared errors with weights for rows, added to a loss one after the other, and their gradients."""
    g = GraphBuilder()
    weight, two, loss = g.input("w", onnx.TensorProto.FLOAT, [3, 1]), g.constant(2.0), g.constant(0.0)
    for k in range(length):
        x, y = (g.input(f"{name}{k}", onnx.TensorProto.FLOAT, [3, 5]) for name in "xy")
        difference = g.op("Sub", x, y)
        square = g.op("Mul", g.op("Mul", difference, difference), weight)
        loss = g.op("Add", loss, g.op("ReduceSum", square, keepdims=0))
        g.output(g.op("Mul", g.op("Mul", difference, weight), two))
    g.output(loss)
    return g.model()


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "op", "found"), [(_sums_of_nothing, "GroupedBiasAddGrad", 1), (_losses_added_up, "MseLossBackward", 10)]
)
def test_twice_the_chain_is_twice_the_work(build: Callable[[int], onnx.ModelProto], op: str, found: int) -> None:
    assert fused_ops(gradfuse.fuse(build(10), policy="all").report) == {op: found}
    first, second = (_calls(build(n), {"producer", "uses"}) for n in (30, 60))
    assert second / first < 2.1


def _calls(model: onnx.ModelProto, names: Collection[str] = ()) -> int:
    """How many functions are called in fusing a model: of Python or C, or those of Python that have certain names."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += frame.f_code.co_name in names and event == "call" if names else event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        gradfuse.fuse(model)
    finally:
        sys.setprofile(None)
    return count


CHAINS = ("Exp", "Neg", "Cast", "Relu", "Add", "Sub", "Mul", "Reshape", "MatMul", "Where")


def chain(op: str, length: int) -> onnx.ModelProto:
    """x, then the operator on its own result again and again."""
    others = {
        "Add": ["y"],
        "Sub": ["y"],
        "Mul": ["y"],
        "Reshape": ["shape"],
        "MatMul": ["w"],
    }
    options: dict[str, Any] = {"to": onnx.TensorProto.FLOAT} if op == "Cast" else {}
    nodes = []
    for k in range(length):
        last = f"v{k - 1}" if k else "x"
        operands = ["c", last, "y"] if op == "Where" else [last, *others.get(op, [])]
        nodes.append(onnx.helper.make_node(op, operands, [f"v{k}"], name=f"n{k}", **options))
    constants = {"shape": np.array([4, 4]), "w": np.eye(4, dtype=np.float32)}
    kinds = {"x": onnx.TensorProto.FLOAT, "y": onnx.TensorProto.FLOAT, "c": onnx.TensorProto.BOOL}
    inputs = [onnx.helper.make_tensor_value_info(name, kind, [4, 4]) for name, kind in kinds.items()]
    output = onnx.helper.make_tensor_value_info(f"v{length - 1}", onnx.TensorProto.FLOAT, [None, None])
    initializers = [onnx.numpy_helper.from_array(a, name) for name, a in constants.items()]
    graph = onnx.helper.make_graph(nodes, "chain", inputs, [output], initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.long
@pytest.mark.parametrize("op", CHAINS)
def test_a_chain_is_as_long_as_it_likes(op: str) -> None:
    model = chain(op, 3 * sys.getrecursionlimit())
    assert sum(gradfuse.fuse(model).report.after.values()) == len(model.graph.node)


@pytest.mark.long
def test_a_chain_of_twenty_thousand_nodes() -> None:
    model = chain("Exp", 20_000)
    assert gradfuse.fuse(model).report.after == {"Exp": 20_000}


def test_a_chain_of_shape_arithmetic() -> None:
    length = 3 * sys.getrecursionlimit()
    nodes = [onnx.helper.make_node("Shape", ["x"], ["s"])]
    nodes += [onnx.helper.make_node("Add", ["s" if k == 0 else f"v{k - 1}", "one"], [f"v{k}"]) for k in range(length)]
    graph = onnx.helper.make_graph(
        nodes,
        "sizes",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])],
        [onnx.helper.make_tensor_value_info(f"v{length - 1}", onnx.TensorProto.INT64, [1])],
        [onnx.numpy_helper.from_array(np.array([1]), "one")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    assert gradfuse.fuse(model).report.after == {"Shape": 1, "Add": length}


def test_a_size_that_is_a_long_expression() -> None:
    model = small_models.cross_entropy()
    for text in ("+".join(["n"] * 5_000), "(" * 5_000 + "n" + ")" * 5_000):
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
        model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = text
        assert fused_ops(gradfuse.fuse(model).report) == {"CrossEntropyLossGrad": 1}


def test_a_backward_pass_within_many_branches() -> None:
    graph = small_models.cross_entropy().graph
    inputs = list(graph.input)
    outputs = list(graph.output)
    del graph.input[:]
    for depth in range(20):
        outer = onnx.GraphProto(name=f"level{depth}")
        names = [f"{value.name}_{depth}" for value in outputs]
        other = onnx.GraphProto(name=f"other{depth}")
        for name, value in zip(names, outputs, strict=True):
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            zeros = onnx.numpy_helper.from_array(np.zeros(shape, np.float32))
            other.node.append(onnx.helper.make_node("Constant", [], [f"{name}_zero"], value=zeros))
            other.output.append(onnx.helper.make_tensor_value_info(f"{name}_zero", onnx.TensorProto.FLOAT, shape))
            outer.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        outer.node.append(onnx.helper.make_node("If", ["c"], names, then_branch=graph, else_branch=other))
        graph = outer
    graph.input.extend([*inputs, onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    result = gradfuse.fuse(model)
    assert fused_ops(result.report) == {"CrossEntropyLossGrad": 1}
    onnx.checker.check_model(result.model)


COMMAND = "import sys; from gradfuse import cli; code = cli.run(sys.argv[1:])"
LIBRARY = """import sys, gradfuse
model = gradfuse.fuse(sys.argv[2]).model
open(sys.argv[3], "wb").write(model.SerializeToString())"""
# getrusage would give the peak of the process that started it, if that was larger.
PEAK = """
print(next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))"""


@pytest.mark.parametrize("code", [COMMAND, LIBRARY], ids=["command", "library"])
def test_eight_gigabytes_of_external_data_are_not_read(code: str, tmp_path: Path) -> None:
    source = stacking.with_external_weights(
        stacking.stacked([stacking.block(GPT)], 200, chained=False), tmp_path, gigabytes=8
    )
    target = tmp_path / "fused.onnx"
    before = (tmp_path / "weights.bin").stat()
    command = [sys.executable, "-c", code + PEAK, "fuse", str(source), str(target)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert peak < 500  # MiB
    assert sorted(os.listdir(tmp_path)) == ["fused.onnx", "model.onnx", "weights.bin"]
    after = (tmp_path / "weights.bin").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns) and after.st_size == 8 << 30
    onnx.checker.check_model(target)
    references = [_references(path) for path in (source, target)]
    assert len(references[0]) == 32 and references[0] == references[1]
    assert "CrossEntropyLossGrad" in {node.op_type for node in onnx.load(target, load_external_data=False).graph.node}


def _references(path: Path) -> dict[str, dict[str, str]]:
    model = onnx.load(path, load_external_data=False)
    return {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data}


def test_progress_is_told_from_the_first_node_to_the_last() -> None:
    told: list[tuple[str, int, int]] = []
    model = stacking.stacked([stacking.block(GPT)], 1_000, chained=False)
    gradfuse.fuse(model, progress=lambda *state: told.append(state))
    parts = dict.fromkeys(part for part, _, _ in told)
    assert next(iter(parts)) == "reading" and "CrossEntropyLossGrad" in parts
    for part in parts:
        done = [state[1] for state in told if state[0] == part]
        totals = {state[2] for state in told if state[0] == part}
        assert done == sorted(done) and done[0] == 0 and {done[-1]} == totals and len(done) > 3
