"""Warnings of bugs of exporters and of onnxruntime, on small graphs; tests/plugin/test_explain.py asks the corpus."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import small_models
import torch

import gradfuse
from gradfuse.passes.report import ExporterBug

MEAN = "mean-without-divisor"
LOST = "lost-updates"


def bugs(model: object) -> list[str]:
    return [warning.bug for warning in gradfuse.fuse(model, bodies=False).report.warnings]


def mean_loss(**changes: str) -> onnx.ModelProto:
    """Cross entropy with the loss of a mean and the gradient of a sum, with parts of the text replaced."""
    text = small_models.CROSS_ENTROPY.replace('reduction = "sum"', 'reduction = "mean"')
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return onnx.parser.parse_model(text)


def test_a_mean_whose_gradient_has_no_divisor() -> None:
    report = gradfuse.fuse(mean_loss()).report
    (warning,) = report.warnings
    assert warning.bug == MEAN and warning.node == "loss"
    assert str(warning) in str(report) and str(warning).startswith("warning: loss: ")
    assert report.to_dict()["warnings"] == [{"bug": MEAN, "node": "loss", "text": warning.text}]


def test_the_gradient_of_a_sum_is_right_for_a_sum() -> None:
    assert bugs(small_models.cross_entropy()) == []


def test_a_divisor_by_hand_is_right() -> None:
    batch_of_8 = {"value_float = -1.0": "value_float = -0.125", "[n": "[8"}
    assert bugs(mean_loss(**batch_of_8)) == []


def test_a_mean_over_one_row_is_its_sum() -> None:
    assert bugs(mean_loss(**{"[n": "[1"})) == []
    assert bugs(mean_loss(**{"[n": "[2"})) == [MEAN]


LOSS = 'loss = NegativeLogLikelihoodLoss <reduction = "mean"> (log_prob, target)'


def scaled(factor: float, gradient: float) -> onnx.ModelProto:
    scale = f"{LOSS.replace('loss =', 'plain =', 1)}\n scale = Constant <value_float = {factor}> ()\n"
    return mean_loss(**{LOSS: f"{scale} loss = Mul (plain, scale)", "value_float = -1.0": f"value_float = {-gradient}"})


def test_a_scaled_loss_has_a_scaled_gradient() -> None:
    assert bugs(scaled(0.5, 0.5)) == [MEAN]
    # What the factor is for is not to be seen.
    assert bugs(scaled(0.5, 0.25)) == []


def exported(loss: torch.nn.Module, target: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.onnx.ONNXProgram:
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 5, dtype=dtype)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = loss(self.layer(x), y)
            return result

    program = torch.onnx.export(Step().eval(), (torch.randn(6, 4, dtype=dtype), target), dynamo=True, verbose=False)
    assert program is not None
    return program


def test_what_torch_exports_of_cross_entropy() -> None:
    target = torch.randint(0, 5, (6,))
    probabilities = torch.softmax(torch.randn(6, 5), 1)
    smoothed = exported(torch.nn.CrossEntropyLoss(label_smoothing=0.25), target)
    assert bugs(smoothed) == ["dropped-label-smoothing"]
    assert "0.25" in gradfuse.explain(smoothed).warnings[0].text
    assert bugs(exported(torch.nn.CrossEntropyLoss(), target)) == []
    assert bugs(exported(torch.nn.CrossEntropyLoss(ignore_index=0), target)) == []
    assert bugs(exported(torch.nn.CrossEntropyLoss(), probabilities)) == ["loss-type"]
    assert bugs(exported(torch.nn.CrossEntropyLoss(), target, torch.bfloat16)) == ["loss-type"]


def test_a_graph_that_computes_nothing() -> None:
    joint = "m (float[2,3] x) => (float[2,3] x) {}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {joint}')
    assert bugs(model) == ["empty-graph"]
    del model.graph.output[:]
    assert bugs(model) == ["empty-graph"]
    assert bugs(small_models.forward()) == []


def product(a: str, b: str, **attributes: Any) -> list[ExporterBug]:
    """The warnings of a Gemm of two inputs; onnx refuses such a model from a file, not in memory."""
    inputs = [onnx.helper.make_tensor_value_info(n, 1, [int(d) for d in s.split()]) for n, s in (("a", a), ("b", b))]
    output = onnx.helper.make_tensor_value_info("y", 1, ["m", "n"])
    node = onnx.helper.make_node("Gemm", ["a", "b"], ["y"], "product", **attributes)
    graph = onnx.helper.make_graph([node], "g", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return gradfuse.fuse(model).report.warnings


def test_a_product_that_lacks_a_transposition() -> None:
    (warning,) = product("8 5", "8 3")
    assert (warning.bug, warning.node) == ("contradictory-shapes", "product") and "transposition" in warning.text
    assert product("8 5", "8 3", transA=1) == []
    assert product("8 5", "3 5", transB=1) == []
    (warning,) = product("8 5", "7 3")
    assert warning.bug == "contradictory-shapes" and "transposition" not in warning.text


def test_inputs_of_two_types() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    m (float16[2,3] x, float16[3,4] w, float[4] b) => (float16[2,4] y) { y = Gemm (x, w, b) z = Gemm (x, w, b) }"""
    (warning,) = gradfuse.fuse(onnx.parser.parse_model(text)).report.warnings
    assert warning.bug == "invalid-types" and warning.node == "y" and "at 1 more node" in warning.text
    assert bugs(onnx.parser.parse_model(text.replace("float[4] b", "float16[4] b"))) == []


SCATTER = """<ir_version: 10, opset_import: ["": 20]>
m (float[v,64] data, int64[n,1] indices, float[n,64] updates) => (float[v,64] sums)
{ sums = ScatterND <reduction = "add"> (data, indices, updates) }"""
SERIAL = 209_999 // 64


def scatter(**changes: str) -> onnx.ModelProto:
    text = SCATTER
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return onnx.parser.parse_model(text)


def test_updates_that_onnxruntime_may_lose() -> None:
    (warning,) = gradfuse.fuse(scatter()).report.warnings
    assert (warning.bug, warning.node) == (LOST, "sums") and "ScatterElements" in warning.text
    assert gradfuse.explain(scatter()).warnings == (warning,)
    assert bugs(scatter(**{'"add"': '"max"'})) == [LOST]
    assert bugs(scatter(**{"[n,": f"[{SERIAL + 1},"})) == [LOST]


def test_updates_that_onnxruntime_does_not_lose() -> None:
    assert bugs(scatter(**{'"add"': '"none"'})) == []
    assert bugs(scatter(**{"[n,": f"[{SERIAL},"})) == []
    # A kernel that it has not, and one of a single thread.
    assert bugs(scatter(**{"float[": "float16["})) == []
    assert bugs(scatter(**{"ScatterND": "ScatterElements <axis = 0,", "<reduction": "reduction", "n,1": "n,64"})) == []
    picked = {"int64[n,1] indices": "bool[v] mask", "{ sums": "{ at = NonZero (mask) indices = Transpose (at) sums"}
    assert bugs(scatter(**picked)) == []


@pytest.mark.parametrize("reduction", ["add", "mul", "max"])
def test_so_few_updates_have_one_thread(reduction: str) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    model = scatter(**{'"add"': f'"{reduction}"'}).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    data = rng.integers(-9, 9, (3, 64)).astype(np.float32)
    indices = rng.integers(0, 3, (SERIAL, 1))
    updates = rng.choice([-1.0, 1.0], (SERIAL, 64)).astype(np.float32)
    expected = data.copy()
    {"add": np.add, "mul": np.multiply, "max": np.maximum}[reduction].at(expected, indices[:, 0], updates)
    for _ in range(5):
        (sums,) = session.run(None, {"data": data, "indices": indices, "updates": updates})
        assert np.array_equal(sums, expected)
