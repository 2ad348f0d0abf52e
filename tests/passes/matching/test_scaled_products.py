"""Factors that onnxruntime's optimizer makes attributes of products."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.printer
import pytest
from producers import run

from gradfuse import explain, fuse
from gradfuse.testing import assert_gradients_close

LOSS = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
g (float[6,4] x, float[5,4] w, float[6,5] t) => (float[5,4] dw, float loss) {
    y = com.microsoft.FusedMatMul<transB = 1>(x, w)  d = Sub(y, t)  dd = Mul(d, d)  loss = ReduceMean<keepdims = 0>(dd)
    PRODUCT
}"""
PRODUCTS = {
    "FusedMatMul": "dw = com.microsoft.FusedMatMul<alpha = 0.06666667, transA = 1>(d, x)",
    "Gemm": "dw = Gemm<alpha = 0.06666667, transA = 1>(d, x)",
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_squared_error_may_be_scaled_by_the_product(name: str) -> None:
    model = onnx.parser.parse_model(LOSS.replace("PRODUCT", PRODUCTS[name]))
    result = fuse(model, policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["MseLossBackward"], result.report
    numbers = np.random.default_rng(0)
    feeds = {k: numbers.standard_normal(s).astype(np.float32) for k, s in (("x", (6, 4)), ("w", (5, 4)), ("t", (6, 5)))}
    x, w, t = (feeds[key].astype(np.float64) for key in "xwt")
    exact = 2 / 30 * (x @ w.T - t).T @ x
    plain, got = run(model, feeds)["dw"], run(result.model, feeds)["dw"]
    assert_gradients_close(got, plain, exact, np.float32, terms=4 * float(np.abs(exact).max()))


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_not_fused_stays_as_it_was(name: str) -> None:
    model = onnx.parser.parse_model(LOSS.replace("PRODUCT", PRODUCTS[name]))
    before = onnx.printer.to_text(model.graph)
    assert onnx.printer.to_text(fuse(model, only=["GeluBackward"]).model.graph) == before
    # The product scales at no cost, so a pass over memory does not pay.
    assert onnx.printer.to_text(fuse(model).model.graph) == before
    assert [region.status for region in explain(model).regions] == ["unprofitable"]
