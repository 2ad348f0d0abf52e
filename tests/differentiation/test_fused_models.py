"""Models that onnxruntime's transformers optimizer has fused train as the models that it was given."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper

from gradfuse import TrainingSession, build_training_step

WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS = 16, 2, 20, 6, 2


class Encoder:
    """A small BERT, in the nodes that an exporter writes."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def model(self) -> onnx.ModelProto:
        self._constant("by_head", np.array([0, 0, HEADS, WIDTH // HEADS]))
        self._constant("joined", np.array([0, 0, WIDTH]))
        self._constant("positions", np.arange(LENGTH)[None])
        for axis in (1, 2):
            self._constant(f"axis_{axis}", np.array([axis]))
        self._constant("first", np.array(0))
        numbers = {"one": 1.0, "half": 0.5, "root": 2**0.5, "scale": (WIDTH // HEADS) ** 0.5, "masked": -10000.0}
        for name, number in numbers.items():
            self._constant(name, np.array(number, np.float32))
        mask = self._node(
            "Cast", [self._node("Unsqueeze", [self._node("Unsqueeze", ["mask", "axis_1"]), "axis_2"])], to=1
        )
        mask = self._node("Mul", [self._node("Sub", ["one", mask]), "masked"])
        words = self._node("Gather", [self._parameter("words", VOCABULARY, WIDTH), "ids"])
        places = self._node("Gather", [self._parameter("places", 8, WIDTH), "positions"])
        x = self._normalized(self._node("Add", [words, places]), "norm")
        for layer in range(LAYERS):
            x = self._layer(x, mask, f"layer.{layer}")
        first = self._node("Gather", [x, "first"], axis=1)
        head = [self._parameter("head.weight", WIDTH, 3), self._parameter("head.bias", 3)]
        self.nodes.append(helper.make_node("Gemm", [first, *head], ["logits"], name="head"))
        return helper.make_model(
            helper.make_graph(
                self.nodes,
                "encoder",
                [helper.make_tensor_value_info(n, onnx.TensorProto.INT64, ["batch", LENGTH]) for n in ("ids", "mask")],
                [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 3])],
                self.initializers,
            ),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )

    def _layer(self, x: str, mask: str, name: str) -> str:
        heads = {}
        for part in "qkv":
            rows = self._node("Reshape", [self._linear(x, f"{name}.{part}", WIDTH, WIDTH), "by_head"])
            heads[part] = self._node("Transpose", [rows], perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3])
        scores = self._node("Div", [self._node("MatMul", [heads["q"], heads["k"]]), "scale"])
        weights = self._node("Softmax", [self._node("Add", [scores, mask])], axis=-1)
        rows = self._node("Transpose", [self._node("MatMul", [weights, heads["v"]])], perm=[0, 2, 1, 3])
        attended = self._linear(self._node("Reshape", [rows, "joined"]), f"{name}.out", WIDTH, WIDTH)
        x = self._normalized(self._node("Add", [attended, x]), f"{name}.norm1")
        wide = self._linear(x, f"{name}.wide", WIDTH, 2 * WIDTH)
        gate = self._node("Add", [self._node("Erf", [self._node("Div", [wide, "root"])]), "one"])
        gelu = self._node("Mul", [self._node("Mul", [wide, gate]), "half"])
        narrow = self._linear(gelu, f"{name}.narrow", 2 * WIDTH, WIDTH)
        return self._normalized(self._node("Add", [narrow, x]), f"{name}.norm2")

    def _linear(self, x: str, name: str, rows: int, columns: int) -> str:
        product = self._node("MatMul", [x, self._parameter(f"{name}.weight", rows, columns)])
        return self._node("Add", [self._parameter(f"{name}.bias", columns), product])

    def _normalized(self, x: str, name: str) -> str:
        given = [x, self._parameter(f"{name}.weight", WIDTH), self._parameter(f"{name}.bias", WIDTH)]
        return self._node("LayerNormalization", given, axis=-1, epsilon=1e-12)

    def _node(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def _parameter(self, name: str, *shape: int) -> str:
        return self._constant(name, (0.3 * self._rng.standard_normal(shape)).astype(np.float32))

    def _constant(self, name: str, array: npt.NDArray[Any]) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name


@pytest.mark.usefixtures("inference_in_process")
def test_a_fused_encoder_has_the_gradients_of_the_plain_one(tmp_path: Path) -> None:
    plain = Encoder().model()
    onnx.save(plain, tmp_path / "plain.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.transformers import optimizer

        fused = optimizer.optimize_model(
            str(tmp_path / "plain.onnx"), model_type="bert", num_heads=HEADS, hidden_size=WIDTH, opt_level=0
        )
    fused.save_model_to_file(str(tmp_path / "fused.onnx"))
    kinds = [node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node]
    counts = [kinds.count(kind) for kind in ("Attention", "SkipLayerNormalization", "BiasGelu")]
    assert counts == [LAYERS, 2 * LAYERS, LAYERS]

    rng = np.random.default_rng(1)
    mask = np.ones((3, LENGTH), np.int64)
    mask[1, 4:] = 0
    batch = (rng.integers(0, VOCABULARY, (3, LENGTH)), mask)
    losses, gradients = [], []
    for model in (plain, tmp_path / "fused.onnx"):
        session = TrainingSession(build_training_step(model, "cross_entropy"))
        losses.append(session.step(batch, np.array([0, 2, 1])))
        gradients.append(dict(session.gradients))
    expected, found = gradients
    assert abs(losses[0] - losses[1]) <= 1e-5
    for layer in range(LAYERS):
        # The optimizer packs these into one weight and one bias.
        for kind in ("weight", "bias"):
            parts = [expected.pop(f"layer.{layer}.{part}.{kind}") for part in "qkv"]
            expected[f"Attention_{layer}_qkv_{kind}"] = np.concatenate(parts, -1)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert np.abs(gradient - expected[name]).max() <= 1e-5 * max(1.0, np.abs(expected[name]).max()), name
