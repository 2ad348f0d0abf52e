"""Gradient graphs of onnxruntime-training, made by tests/ort_training/gradient_graphs.py: fused, and still right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from gradient_graphs import NAMES, arrays, in_standard_operators, load
from producers import run

from gradfuse import explain, fuse
from gradfuse.testing import assert_gradients_close


def _gpt(layers: int = 1) -> dict[str, int]:
    of_each = {"ScaledMaskedSoftmaxBackward": layers, "GeluBackward": layers, "LayerNormBackward": layers + 1}
    return {"CrossEntropyLossGrad": 1, "EmbeddingDenseBackward": 1, **of_each}


EXPECTED: dict[str, dict[str, int]] = {
    "gpt_rows_of_another_name": _gpt(layers=2),
    "gpt_rows_of_the_same_name": _gpt(),
    "gpt_ignored": _gpt(),
    "gpt_internal": _gpt(),
    "clip": {"CrossEntropyLossGrad": 2},
    "clip_internal": {"CrossEntropyLossGrad": 2},
    "clip_fixed": {"CrossEntropyLossGrad": 2},
    "embedding": {"EmbeddingDenseBackward": 1},
    "layer_norm": {"LayerNormBackward": 1},
    "layer_norm_plain": {"LayerNormBackward": 1},
    "batch_norm": {"BatchNormBackward": 1, "ConvolutionBackward": 1},
    "batch_norm_rows": {"BatchNormBackward": 1},
    "convolution": {"ConvolutionBackward": 2},
    "convolution_depthwise": {"ConvolutionBackward": 2},
    "gelu": {"GeluBackward": 1},
    "gelu_tanh": {"GeluBackward": 1},
    "max_pool": {"ConvolutionBackward": 1, "MaxPoolBackward": 1},
    "max_pool_overlapping": {"ConvolutionBackward": 1, "MaxPoolBackward": 1},
    "relu": {},
    "squared_error": {"MseLossBackward": 1},
    "squared_error_weighted": {"MseLossBackward": 1},
}


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("name", NAMES)
def test_graph_is_fused_and_has_the_gradients_of_pytorch(name: str) -> None:
    result = fuse(load(name), policy="all")
    found = Counter(fusion.op for fusion in result.report.fusions)
    del found["GroupedBiasAddGrad"]
    assert found == EXPECTED.get(name, {"CrossEntropyLossGrad": 1}), result.report
    assert not any(miss.bug for miss in result.report.near_misses)
    got = run(in_standard_operators(result.model), arrays(name, "in"))
    exact = arrays(name, "out")
    largest = max(float(np.abs(array).max()) for array in exact.values())
    assert exact.keys() <= got.keys()
    for key, array in exact.items():
        assert_gradients_close(got[key], array.astype(np.float32), array, np.float32, terms=4 * max(1.0, largest))


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("name", ["max_pool", "max_pool_overlapping", "batch_norm", "gpt_internal"])
def test_shapes_need_not_be_declared(name: str) -> None:
    model = load(name)
    for value in (value for node in model.graph for value in node.outputs):
        if not value.is_graph_output():
            value.shape = value.type = None
    found = Counter(fusion.op for fusion in fuse(model, policy="all", bodies=False).report.fusions)
    del found["GroupedBiasAddGrad"]
    assert found == EXPECTED[name]


@pytest.mark.usefixtures("inference_in_process")
def test_deviations_of_rms_normalization_are_known() -> None:
    text = """
        <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[B,8] x, float[8] w, float[B,8] dy) => (float dx, float[8] dw) {
          y, inverse = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001, stash_type = 1>(x, w)
          dx, dw = com.microsoft.SimplifiedLayerNormalizationGrad<axis = -1>(dy, x, w, inverse)
        }
    """
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert [fusion.op for fusion in fuse(model, policy="all").report.fusions] == ["LayerNormBackward"]


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("batch", ["3", "B"])
@pytest.mark.parametrize("classes", [4, 5])
def test_tokens_that_were_not_reshaped_to_rows_have_their_classes_last(batch: str, classes: int) -> None:
    """The gradient builder drops the reshape of tokens. Where labels fit axis 1 as well, the classes are there."""
    text = f"""
        <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[{batch},4,7] x, float[7,{classes}] w, int64[{batch},4] labels) => (float[{batch},4,{classes}] d) {{
          scores = MatMul(x, w)
          loss, log_prob = SoftmaxCrossEntropyLoss<reduction = "mean">(scores, labels)
          one = Constant<value_float = 1.0>()
          d = com.microsoft.SoftmaxCrossEntropyLossGrad<reduction = "mean">(one, log_prob, labels)
        }}
    """
    result = fuse(onnx.parser.parse_model(text), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["CrossEntropyLossGrad"], result.report
    axis = 1 if classes == 4 else 2
    (loss,) = (node for node in result.model.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    # onnxruntime takes no labels like these.
    log_prob = onnx.helper.make_node("LogSoftmax", loss.input[:1], loss.output[1:], axis=axis)
    result.model.graph.node.insert(list(result.model.graph.node).index(loss), log_prob)
    result.model.graph.node.remove(loss)
    numbers = np.random.default_rng(0)
    feeds = {"x": numbers.standard_normal((3, 4, 7)), "w": numbers.standard_normal((7, classes))}
    labels = numbers.integers(0, 4, (3, 4))
    got = run(result.model, {k: v.astype(np.float32) for k, v in feeds.items()} | {"labels": labels})["d"]
    gradients = []
    for dtype in (torch.float64, torch.float32):
        scores = (torch.tensor(feeds["x"]).float() @ torch.tensor(feeds["w"]).float()).to(dtype).requires_grad_()
        loss_of_scores = torch.nn.functional.cross_entropy(scores.movedim(axis, 1), torch.tensor(labels))
        (gradient,) = torch.autograd.grad(loss_of_scores, scores)
        gradients.append(gradient.numpy())
    assert_gradients_close(got, gradients[1], gradients[0], np.float32)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({}, "it updates sequences of tensors"),
        ({"adam_mode": 1}, "its epsilon stays out of the correction, and its weights decay last"),
        ({"correct_bias": 0}, "it does not correct the bias of its averages"),
    ],
)
def test_explain_says_why_the_update_of_artifacts_stays(attributes: dict[str, int], reason: str) -> None:
    sequence = onnx.helper.make_tensor_sequence_value_info
    tensors = ("params", "gradients", "first", "second")
    names = ["learning_rate", "step", *tensors]
    results = ["done", "new_params", "new_first", "new_second"]
    node = onnx.helper.make_node("AdamWOptimizer", names, results, domain="com.microsoft")
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    tensor = onnx.helper.make_tensor_value_info
    inputs = [tensor("learning_rate", 1, [1]), tensor("step", 7, [1]), *(sequence(n, 1, None) for n in tensors)]
    graph = onnx.helper.make_graph([node], "update", inputs, [tensor("done", 9, [1])])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    (region,) = explain(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)).regions
    assert region.op == "ApplyAdamW" and reason in region.reason
    assert "loads no model without it" in region.reason
