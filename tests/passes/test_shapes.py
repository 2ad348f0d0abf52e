"""Shapes that an exporter left out are inferred whatever else the process holds."""

from __future__ import annotations

import gc
import os

import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from gradfuse.passes import shapes

TEXT = '<ir_version: 10, opset_import: ["": 20]> m (float[n,3] x) => (float[n,3] z) { y = Exp (x) z = Neg (y) }'


def test_sessions_that_nobody_uses_any_more_do_not_hinder_the_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    session = ort.InferenceSession(onnx.parser.parse_model(TEXT).SerializeToString(), options)
    cycle: list[object] = [session]
    cycle.append(cycle)
    fork, thresholds = os.fork, gc.get_threshold()

    def fork_and_collect_soon() -> int:
        child = fork()
        if child == 0:
            gc.set_threshold(1)
        return child

    monkeypatch.setattr(os, "fork", fork_and_collect_soon)
    gc.set_threshold(10**9)
    try:
        del session, cycle
        model = ir.from_proto(onnx.parser.parse_model(TEXT))
        value = model.graph.node(0).outputs[0]
        shapes.infer(model, [value])
    finally:
        gc.set_threshold(*thresholds)
    assert value.dtype == ir.DataType.FLOAT and value.shape == ir.Shape(["n", 3])
    assert gc.isenabled()
