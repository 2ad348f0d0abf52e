"""Fused operators of gradfuse in models whose batch becomes dynamic, with and without their bodies."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import gradfuse
from gradfuse import ModelError, make_batch_dynamic
from gradfuse.runtime import session_options

pytestmark = pytest.mark.usefixtures("inference_in_process")


def _model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20, "aclnn": 1]> g {text}')


GRAPHS = {
    "first": """(float[2,3] x) => (float[2,3] y, float[2,3] z) <float[3] c={0.5,-1,2}>
        {y, z, n = aclnn.Pointwise <expression="t = Mul(x0, x1); y0 = Add(t, x0); y1 = Tanh(t)"> (x, c)}""",
    "constant": """(float[2,3] x) => (float[2,3] y, float[2,3] z) <float[2,3] c={0.5,-1,2,0.5,-1,2}>
        {y, z, n = aclnn.Pointwise <expression="t = Mul(x0, x1); y0 = Add(t, x1); y1 = Tanh(t)"> (c, x)}""",
}


@pytest.mark.parametrize("bodies", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_pointwise_of_a_dynamic_batch(name: str, bodies: bool) -> None:
    fixed = gradfuse.fuse(_model(GRAPHS[name])).model if bodies else _model(GRAPHS[name])
    free = make_batch_dynamic(fixed)
    assert [node.op_type for node in free.graph.node if node.domain == "aclnn"] == ["Pointwise"]
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    if not bodies:
        free = gradfuse.fuse(free).model
    session = ort.InferenceSession(free.SerializeToString(), session_options(), providers=["CPUExecutionProvider"])
    y, z = session.run(None, {"x": x})
    wide = x.astype(np.float64)
    t = wide * [0.5, -1.0, 2.0]
    for got, exact in ((y, t + wide), (z, np.tanh(t))):
        assert got.shape == exact.shape
        assert np.abs(got - exact).max() <= 4 * np.finfo(np.float32).eps * np.abs(exact).max()


REFUSED = {
    "rows that differ": (
        """(float[2,3] x) => (float[2,3] y) <float[2,1] c={0.5,-1}>
        {y, z, n = aclnn.Pointwise <expression="y0 = Mul(x0, x1)"> (x, c)}""",
        "takes 2 rows of 'c' that are not equal",
    ),
    "the batch at two axes": (
        """(float[3,3] x) => (float[3,3] y)
        {t = Transpose(x) y, z, n = aclnn.Pointwise <expression="y0 = Mul(x0, x1)"> (x, t)}""",
        "joins the batch of axis 0 with that of axis 1",
    ),
    "a seed of the batch": (
        """(float[1,1] x, int64[1] s) => (float[1,1] y)
        {y, z, n = aclnn.Pointwise <expression="y0 = Where(Kept(), x0, 0)", dropout_threshold=9> (x,,,,,,,, s)}""",
        "takes the batch as input 8, 's'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pointwise_that_mixes_rows_is_refused(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ModelError, match=f"aclnn::Pointwise .* {message}"):
        make_batch_dynamic(_model(text))
