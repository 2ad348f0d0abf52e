"""Shapes that an exporter left out are inferred whatever else the process holds."""

from __future__ import annotations

import gc
import os

import numpy as np
import onnx.compose
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from gradfuse.models import inference, reading
from gradfuse.passes import shapes

TEXT = '<ir_version: 10, opset_import: ["": 20]> m (float[n,3] x) => (float[n,3] z) { y = Exp (x) z = Neg (y) }'


def test_sessions_that_nobody_uses_any_more_do_not_hinder_the_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork of this process they would wait for their threads, which it does not have, when they are collected."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    session = ort.InferenceSession(onnx.parser.parse_model(TEXT).SerializeToString(), options)
    cycle: list[object] = [session]
    cycle.append(cycle)
    thresholds = gc.get_threshold()

    def fork() -> int:
        raise AssertionError("the process is forked")

    monkeypatch.setattr(os, "fork", fork, raising=False)
    gc.set_threshold(10**9)
    try:
        del session, cycle
        inference._workers.stop()
        model = ir.from_proto(onnx.parser.parse_model(TEXT))
        value = model.graph.node(0).outputs[0]
        gc.set_threshold(1)
        shapes.infer(model, [value])
    finally:
        gc.set_threshold(*thresholds)
    assert value.dtype == ir.DataType.FLOAT and value.shape == ir.Shape(["n", 3])
    assert gc.isenabled()


def test_only_the_values_that_are_asked_for_change() -> None:
    model = ir.from_proto(onnx.parser.parse_model(TEXT.replace("float[n,3] z)", "float[a,b] z)")))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    y, z = (node.outputs[0] for node in model.graph)
    shapes.infer(model, [y])
    assert y.shape == ir.Shape(["n", 3]) and z.shape == ir.Shape(["a", "b"])
    y.shape = y.type = None
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_operators_of_onnxruntime_and_large_initializers_are_understood_and_stay() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
        m (float[n,300] x) => (y) <float[300,4] w> { p = com.microsoft.FusedMatMul(x, w) y = com.microsoft.Gelu(p) }""")
    )
    weights = model.graph.node(0).inputs[1]
    assert weights is not None and weights.name is not None
    weights.const_value = ir.tensor([[0.5] * 4] * 300, name=weights.name)
    model.graph.register_initializer(weights)
    nodes = [(node.domain, node.op_type, tuple(node.inputs)) for node in model.graph]
    values = [node.outputs[0] for node in model.graph]
    shapes.infer(model, values)
    assert [value.shape for value in values] == [ir.Shape(["n", 4])] * 2
    assert [(node.domain, node.op_type, tuple(node.inputs)) for node in model.graph] == nodes
    assert list(model.graph.initializers.values()) == [weights] and len(model.graph.inputs) == 1


@pytest.mark.parametrize("stored, columns", [(ir.DataType.UINT8, 16), (ir.DataType.UINT4, 32)])
def test_quantised_weights_are_understood(stored: ir.DataType, columns: int) -> None:
    """Bytes have two numbers each, and those of MatMulNBits are told by its attributes."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    m (int64[n,7] i) => (z) {
        x = com.microsoft.GatherBlockQuantized<block_size = 16>(e, i, se)
        y = com.microsoft.MatMulNBits<K = 32, N = 6, block_size = 16>(x, w, sw)
        z = Neg(y)
    }""")
    tensors = {
        "e": ((50, columns), stored),
        "se": ((50, 2), ir.DataType.FLOAT16),
        "w": ((6, 2, 8), ir.DataType.UINT8),
        "sw": ((6, 2), ir.DataType.FLOAT16),
    }
    for name, (shape, dtype) in tensors.items():
        tensor = ir.Tensor(np.zeros(shape, dtype.numpy()), dtype=dtype, name=name)
        proto.graph.initializer.append(ir.to_proto(tensor))
    model = ir.from_proto(proto)
    values = [node.outputs[0] for node in model.graph]
    shapes.infer(model, values)
    assert [value.shape for value in values] == [ir.Shape(["n", 7, 32]), *[ir.Shape(["n", 7, 6])] * 2]
    assert {value.dtype for value in values} == {ir.DataType.FLOAT16}


def test_own_operators_say_their_shapes_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(_: onnx.ModelProto) -> None:
        raise AssertionError("onnx is asked")

    monkeypatch.setattr(inference, "infer", infer)
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "aclnn": 1]>
        m (float16[n,7,300] g, float16[n,7,300] x, float[300] w, float[n,7,1] r) => (e, s) {
            d = aclnn.GeluBackward<approximate = "tanh">(g, x)
            a = Cast<to = 1>(d) b = Cast<to = 1>(x)
            e, s = aclnn.LayerNormBackward<output_mask = [1, 1, 0]>(a, b, w, , r)
        }""")
    )
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    shapes.infer(model, list(values.values()))
    assert values["d"].shape == values["e"].shape == ir.Shape(["n", 7, 300])
    assert values["s"].shape == ir.Shape([300])
    assert values["d"].dtype == ir.DataType.FLOAT16 and values["s"].dtype == ir.DataType.FLOAT


def _require_one_size_a_name(proto: onnx.ModelProto) -> None:
    model = reading.load(proto).ir
    values = [value for node in model.graph for value in node.outputs]
    shapes.infer(model, values)
    assert all(value.shape is not None and isinstance(value.shape[2], ir.SymbolicDim) for value in values)
    names = [str(value.name) for value in values]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names[:-1])
    (x,) = (value.name for value in proto.graph.input)
    session = ort.InferenceSession(proto.SerializeToString())
    sizes: dict[object, int] = {}
    for value, array in zip(values, session.run(names, {x: np.ones((1, 1, 9), np.float32)}), strict=True):
        assert value.shape is not None
        assert sizes.setdefault(value.shape[2], array.shape[2]) == array.shape[2], value


def test_what_onnx_calls_a_size_is_the_name_of_no_other_one() -> None:
    """onnx and torch's older exporter write such names into files, and onnx gives them again to what it asks about."""
    _require_one_size_a_name(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        m (float[1,1,T] x) => (float[1,1,U] z) <float[1,1,3] w = {1, 2, 3}, float[1,1,unk__0] p, float[unk__1,1,Q] q>
        { p = Neg (x)  q = Conv (p, w)  r = Conv <pads = [3, 3]> (q, w)  z = Abs (r) }""")
    )


def test_names_of_onnx_in_models_that_have_been_merged_stand_for_two_sizes() -> None:
    parts = []
    for name in "ab":
        part = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 17]>
            {name} (float[1,1,T] x) => (z) <float[1,1,3] w = {{1, 2, 3}}> {{ q = Conv (x, w)  z = Neg (q) }}""")
        parts.append(onnx.compose.add_prefix(onnx.shape_inference.infer_shapes(part), name))
    merged = onnx.compose.merge_models(parts[0], parts[1], [("az", "bx")])
    declared = [info.type.tensor_type.shape.dim[2].dim_param for info in merged.graph.value_info]
    assert declared.count("unk__0") == len(declared)
    _require_one_size_a_name(merged)
