"""Sums by an index do not depend on onnxruntime's threads, as they do in its ScatterND."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import gradfuse
from gradfuse.models.scatters import replace_scatter_nd

CASES = {
    "rows": ("4,3", "7,1", "7,3", "add"),
    "symbolic": ("4,H", "R,1", "R,H", "add"),
    "vector": ("4", "7,1", "7", "add"),
    "index of two dimensions": ("4,5,3", "7,2,1", "7,2,5,3", "add"),
    "two axes": ("4,5,3", "7,2,2", "7,2,3", "add"),
    "all axes": ("4,5", "7,2", "7", "mul"),
    "largest": ("4,5,3", "7,2", "7,3", "max"),
    "no indices": ("4,3", "0,1", "0,3", "add"),
    "few rows": ("28,3", "7,1", "7,3", "add"),
    "few rows, index of two dimensions": ("28,5,3", "3,2,1", "3,2,5,3", "mul"),
    "few rows of no columns": ("28,0", "7,1", "7,0", "add"),
    "few numbers": ("28", "7,1", "7", "max"),
}


def run(model: onnx.ModelProto, feeds: dict[str, Any], threads: int) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("case", CASES)
def test_a_scatter_is_the_same_in_other_operators(case: str) -> None:
    *shapes, reduction = CASES[case]
    signature = "float[{}] data, int64[{}] indices, float[{}] updates".format(*shapes)
    node = f'out = ScatterND <reduction = "{reduction}"> (data, indices, updates)'
    text = f'<ir_version: 9, opset_import: ["": 18]> g ({signature}) => (float[{shapes[0]}] out) {{ {node} }}'
    model = onnx.parser.parse_model(text)
    data, indices, updates = (tuple({"H": 3, "R": 7}.get(n) or int(n) for n in shape.split(",")) for shape in shapes)
    generator = np.random.default_rng(0)
    most = np.array(data[: indices[-1]])
    feeds: dict[str, Any] = {
        "data": generator.integers(0, 9, data).astype(np.float32),
        "indices": generator.integers(-most, most, indices),
        "updates": generator.integers(0, 9, updates).astype(np.float32),
    }
    changed = ir.from_proto(model)
    replace_scatter_nd(changed)
    other = ir.to_proto(changed)
    onnx.checker.check_model(other, full_check=True)
    assert all(node.op_type != "ScatterND" for node in other.graph.node)
    np.testing.assert_array_equal(run(other, feeds, 2), run(model, feeds, 1), strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_added_in_float32(dtype: str) -> None:
    names = "data, indices, updates"
    casts = "".join(
        f"{name}16 = Cast <to = {10 if dtype == 'float16' else 16}> ({name}) " for name in ("data", "updates")
    )
    scatter = 'sums = ScatterND <reduction = "add"> (data16, indices, updates16) out = Cast <to = 1> (sums)'
    values = f"{dtype}[2,3] data16, {dtype}[2048,3] updates16, {dtype}[2,3] sums"
    signature = "float[2,3] data, int64[2048,1] indices, float[2048,3] updates"
    text = f"""<ir_version: 9, opset_import: ["": 18]>
        g ({signature}) => (float[2,3] out) <{values}> {{ {casts} {scatter} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    replace_scatter_nd(model)
    ones = np.ones((2048, 3), np.float32)
    arrays = [np.zeros((2, 3), np.float32), np.arange(2048)[:, None] % 2, ones]
    feeds = dict(zip(names.split(", "), arrays, strict=True))
    np.testing.assert_array_equal(run(ir.to_proto(model), feeds, 2), np.full((2, 3), 1024, np.float32))


def test_gradients_of_an_embedding_are_the_same_in_every_run() -> None:
    """With threads that meet in one row, as here, ScatterND would lose addends in most runs."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2, 2048)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids)  # type: ignore[no-any-return]

    ids, target = torch.arange(512) % 2, torch.arange(512)
    step = gradfuse.export_training_step(Embedded(), nn.CrossEntropyLoss(), (ids, target))
    assert step.report is not None and not step.report.warnings
    feeds = {**step.parameters, "ids": ids.numpy(), "target": target.numpy()}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    first, *others = (session.run(["embed.weight.grad"], feeds)[0] for _ in range(10))
    for other in others:
        np.testing.assert_array_equal(other, first)
