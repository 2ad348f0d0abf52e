"""Files as skl2onnx writes them: operators of ONNX's domain for scikit-learn around a network, and maps as outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

import gradfuse
from gradfuse import ModelError, TrainingSession, build_training_step
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

RNG = np.random.default_rng(0)
TENSORS = {
    "coefficient": RNG.standard_normal((4, 8)).astype(np.float32),
    "intercept": RNG.standard_normal((1, 8)).astype(np.float32),
    "coefficient1": RNG.standard_normal((8, 3)).astype(np.float32),
    "intercept1": RNG.standard_normal((1, 3)).astype(np.float32),
}
OFFSET, SCALE = [0.5, -1.0, 0.0, 2.0], [2.0, 0.5, 1.0, 0.25]


def classifier(rows: int | None = None) -> onnx.ModelProto:
    """A StandardScaler and an MLPClassifier, with the label and, by ZipMap, the probabilities of each row as a map."""
    ml = "ai.onnx.ml"
    nodes = [
        helper.make_node("Scaler", ["X"], ["scaled"], domain=ml, offset=OFFSET, scale=SCALE),
        helper.make_node("MatMul", ["scaled", "coefficient"], ["a"]),
        helper.make_node("Add", ["a", "intercept"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "coefficient1"], ["d"]),
        helper.make_node("Add", ["d", "intercept1"], ["e"]),
        helper.make_node("Softmax", ["e"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=0),
        helper.make_node("ZipMap", ["probabilities"], ["maps"], domain=ml, classlabels_int64s=[0, 1, 2]),
    ]
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [rows, 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [rows]),
            helper.make_value_info("maps", helper.make_sequence_type_proto(maps)),
        ],
        [numpy_helper.from_array(array, name) for name, array in TENSORS.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ml, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("dynamic_batch", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_pipeline_trains(saved: bool, dynamic_batch: bool, tmp_path: Path) -> None:
    model, path = classifier(1 if dynamic_batch else None), tmp_path / "model.onnx"
    onnx.save(model, path)
    loss = {"probabilities": "sparse_categorical_crossentropy"}
    step = build_training_step(path if saved else model, loss, check=not dynamic_batch, dynamic_batch=dynamic_batch)
    session = TrainingSession(step)
    x, labels = RNG.standard_normal((6, 4)).astype(np.float32), RNG.integers(0, 3, 6)
    value = np.float32(session.step(x, {"probabilities": labels}))
    results = []
    for dtype in (torch.float32, torch.float64):
        weights = {name: torch.tensor(array, dtype=dtype, requires_grad=True) for name, array in TENSORS.items()}
        scaled = (torch.tensor(x, dtype=dtype) - torch.tensor(OFFSET, dtype=dtype)) * torch.tensor(SCALE, dtype=dtype)
        hidden = F.relu(scaled @ weights["coefficient"] + weights["intercept"])
        logits = hidden @ weights["coefficient1"] + weights["intercept1"]
        of = F.cross_entropy(logits, torch.tensor(labels))
        gradients = torch.autograd.grad(of, list(weights.values()))
        results.append((of.detach(), dict(zip(weights, gradients, strict=True)), logits.detach().softmax(1)))
    assert_gradients_close(value, results[0][0], results[1][0], np.float32, terms=20)
    for name, gradient in session.gradients.items():
        assert_gradients_close(gradient, results[0][1][name], results[1][1][name], np.float32, terms=20)
    label, probabilities = session.evaluate(x)
    assert_gradients_close(probabilities, results[0][2], results[1][2], np.float32, terms=20)
    assert np.array_equal(label, results[1][2].argmax(1))


def test_where_maps_cannot_stay_one_line_says_so() -> None:
    with pytest.raises(
        ModelError, match=r"output 'maps' is of maps; expected tensors, as skl2onnx gives with options="
    ):
        gradfuse.fuse(classifier())
