"""The predictions that decide whether a fusion pays, against what onnxruntime runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from gradfuse import fuse
from gradfuse.passes.matching import cost

VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Shape"}
SIZES = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.BOOL: 1, TensorProto.INT64: 8}

HEADER = '<ir_version: 10, opset_import: ["": 20]>\n'
SOFTMAX = """
  t = Mul(g, y)  axis = Constant<value_ints=[1]>()  s = ReduceSum(t, axis)  u = Mul(y, s)  d = Sub(t, u)
  r = Where(mask, zero, d)
"""
# A backward pass alone, for what onnxruntime runs, and the same behind its forward pass, for what is predicted.
BACKWARD = {
    "softmax": (
        f"m (T[8,32] g, T[8,32] y, bool[8,32] mask) => (T[8,32] r) {{ {SOFTMAX} }}",
        f"m (T[8,32] g, T[8,32] z, bool[8,32] mask) => (T[8,32] r) {{ y = Softmax<axis=1>(z) {SOFTMAX} }}",
    ),
    "mse": 2 * ("m (T[16,32] x, T[16,32] t) => (T[16,32] r) { d = Sub(x, t)  c = Mul(d, two)  r = Identity(c) }",),
    "mse as a sum": 2 * ("m (T[16,32] x, T[16,32] t) => (T[16,32] r) { d = Sub(x, t)  r = Add(d, d) }",),
}


def parsed(text: str, dtype: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text.replace("T[", f"{dtype}["))
    for name, value in (("zero", 0.0), ("two", 2.0)):
        if f"{name}," in text or f"{name})" in text:
            array = np.asarray(value, np.float16 if dtype == "float16" else np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def bytes_run(model: onnx.ModelProto, path: Path) -> int:
    """What the nodes that onnxruntime runs for a model read and write, by their shapes; views move nothing."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    run = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True)
    size = {t.name: numpy_helper.to_array(t).nbytes for t in run.graph.initializer}
    for value in (*run.graph.input, *run.graph.value_info, *run.graph.output):
        tensor = value.type.tensor_type
        size[value.name] = SIZES[tensor.elem_type] * math.prod(d.dim_value for d in tensor.shape.dim)
    return sum(size[v] for n in run.graph.node if n.op_type not in VIEWS for v in (*n.input, *n.output) if v)


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", BACKWARD)
def test_bytes_before_are_those_of_the_nodes_that_onnxruntime_runs(name: str, dtype: str, tmp_path: Path) -> None:
    part, whole = (parsed(text, dtype) for text in BACKWARD[name])
    (fusion,) = fuse(whole, policy="all").report.fusions
    # But for scalars, which may be folded or cast.
    assert abs(fusion.bytes_before - bytes_run(part, tmp_path / "optimized.onnx")) <= 64


def attention(batch: int | str) -> onnx.ModelProto:
    return parsed(BACKWARD["softmax"][1].replace("[8,", f"[{batch},"), "float")


def test_symbolic_dimensions_count_as_the_assumed_size() -> None:
    (symbolic,) = fuse(attention("n"), policy="all").report.fusions
    (known,) = fuse(attention(cost.ASSUMED_DIM), policy="all").report.fusions
    assert (symbolic.bytes_before, symbolic.bytes_after) == (known.bytes_before, known.bytes_after)
    (twice,) = fuse(attention(2 * cost.ASSUMED_DIM), policy="all").report.fusions
    assert twice.bytes_after == 2 * known.bytes_after


def test_the_report_shows_the_prediction() -> None:
    report = fuse(attention(64)).report
    (fusion,) = report.fusions
    # g, y, mask and the result, each once.
    elements = 64 * 32
    assert fusion.bytes_after == elements * (4 + 4 + 1 + 4)
    assert fusion.bytes_saved == fusion.bytes_before - fusion.bytes_after > 0
    (entry,) = json.loads(json.dumps(report.to_dict()))["fusions"]
    for name in ("bytes_before", "bytes_after", "bytes_saved", "speedup"):
        assert entry[name] == getattr(fusion, name)
    assert f"{fusion.bytes_after / 1024:.4g} KiB" in str(report)
    assert f"{fusion.speedup:.1f} x as fast" in str(report)


def test_no_node_is_added_where_no_byte_is_saved() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        m (float[6,100,50] dy) => (float[6,1,50] r) {
          y = Neg(dy)  axis = Constant<value_ints=[1]>()  r = ReduceSum(y, axis)
        }"""
    )
    every = fuse(model, policy="all").report
    assert [f.op for f in every.fusions] == ["GroupedBiasAddGrad"]
    report = fuse(model).report
    assert not report.fusions
    assert any("not profitable" in m.reason for m in report.near_misses)


def test_zeros_of_a_real_size_do_not_hide_a_match() -> None:
    # A static export scatters into an initializer of zeros, which has the size of the logits.
    rows, classes = 1200, 1000
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        m (float[{rows},{classes}] z, int64[{rows}] target) => (float[{rows},{classes}] r) {{
          l = LogSoftmax<axis=1>(z)  one = Constant<value_ints=[1]>()  i = Unsqueeze(target, one)
          minus = Constant<value_float=-1.0>()  shape = Shape(i)  u = Expand(minus, shape)
          m = ScatterElements<axis=1>(zeros, i, u)  p = Exp(l)  s = ReduceSum(m, one)  ps = Mul(p, s)  r = Sub(m, ps)
        }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((rows, classes), np.float32), "zeros"))
    result = fuse(model)
    assert [f.op for f in result.report.fusions] == ["CrossEntropyLossGrad"]
    assert "zeros" not in {t.name for t in result.model.graph.initializer}
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.eye(rows, classes, dtype=np.float32), "zeros"))
    assert not fuse(model).report.fusions


def scattered_rows(scatter: str, size: int, width: int) -> onnx.ModelProto:
    """Sums of rows over 8 groups by a sorted index."""
    places = "like = Shape(rows)  places = Expand(column, like)" if scatter == "ScatterElements" else ""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        m (float[{size},8] x, float[{size},{width}] y) => (float[8,{width}] r)
        <int64[{size}] group, int64[{size},1] column> {{
          chosen = ArgMax<axis=1, keepdims=0>(x)  count = Shape(chosen)  group, order = TopK<largest=0>(chosen, count)
          last = Constant<value_ints=[-1]>()  column = Unsqueeze(group, last)  rows = Exp(y)  {places}
          shape = Constant<value_ints=[8,{width}]>()  zeros = ConstantOfShape(shape)
          r = {scatter}<reduction="add">(zeros, {"places" if places else "column"}, rows)
        }}"""
    )


@pytest.mark.parametrize("size", [512, 4096])
@pytest.mark.parametrize("scatter", ["ScatterND", "ScatterElements"])
def test_rows_that_a_sorted_index_scatters_are_worth_a_sum_over_groups(scatter: str, size: int) -> None:
    fusions = fuse(scattered_rows(scatter, size, width=256)).report.fusions
    assert [fusion.op for fusion in fusions] == ["GroupedBiasAddGrad"]


def test_to_count_the_rows_of_groups_takes_longer_than_to_add_narrow_ones() -> None:
    only = ["GroupedBiasAddGrad"]
    report = fuse(scattered_rows("ScatterND", 4096, width=16), only=only).report
    assert not report.fusions
    assert any("not profitable: would take as long" in miss.reason for miss in report.near_misses)
    assert fuse(scattered_rows("ScatterElements", 4096, width=16), only=only).report.fusions
