"""Gradients of products in training steps: which nodes they are. `build_training_step` compares their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from gradfuse import build_training_step

LINEAR = """<ir_version: 10, opset_import: ["": 18]>
g (float[{dims}, 6] x) => (float l) <float[5, 6] w> {{
    t = Transpose<perm=[1, 0]>(w)
    y = MatMul(x, t)
    s = Mul(y, y)
    l = ReduceSum<keepdims=0>(s)
}}"""
GATHERED = """<ir_version: 10, opset_import: ["": 18]>
g (int64[{indices}] i) => (float l) <float[3, 4, 2] w> {{
    y = GatherElements<axis=1>(w, i)
    s = Mul(y, y)
    l = ReduceSum<keepdims=0>(s)
}}"""


def step_of(text: str, *shape: int) -> Any:
    model = onnx.parser.parse_model(text)
    del model.graph.initializer[:]
    values = np.linspace(-1.5, 1.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
    return build_training_step(model, None, trainable=["w"])


@pytest.mark.parametrize("dims, transposed", [("7", False), ("2, 511", False), ("N", True), ("2, 512", True)])
def test_the_gradient_of_a_linear_layer_is_a_product_as_it_is(dims: str, transposed: bool) -> None:
    """With few rows. With many, or as many as a batch has, onnxruntime is faster with a transposition behind it."""
    step = step_of(LINEAR.format(dims=dims), 5, 6)
    producers = {name: node for node in step.model.graph.node for name in node.output}
    (gradient,) = (node for node in step.model.graph.node if "w.grad" in node.output)
    while gradient.op_type == "Identity":
        gradient = producers[gradient.input[0]]
    assert gradient.op_type == ("Transpose" if transposed else "MatMul")


@pytest.mark.parametrize("indices, reduction", [("3, 1, 2", b"none"), ("3, 2, 2", b"add"), ("3, K, 2", b"add")])
def test_one_index_is_set_and_several_are_added(indices: str, reduction: bytes) -> None:
    step = step_of(GATHERED.format(indices=indices), 3, 4, 2)
    (node,) = (node for node in step.model.graph.node if node.op_type == "ScatterElements")
    assert ([one.s for one in node.attribute if one.name == "reduction"] or [b"none"]) == [reduction]
