"""Small models, written as ONNX text, for tests of what happens to models as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser

CROSS_ENTROPY = """
<ir_version: 10, opset_import: ["" : 20]>
training_step (float[n, 4] x, int64[n] target, float[4, 5] w) => (float loss, float[4, 5] w_grad)
{
    logits = MatMul (x, w)
    log_prob = LogSoftmax <axis = 1> (logits)
    loss = NegativeLogLikelihoodLoss <reduction = "sum"> (log_prob, target)
    one = Constant <value = int64[1] {1}> ()
    minus_one = Constant <value_float = -1.0> ()
    index = Unsqueeze (target, one)
    index_shape = Shape (index)
    minus_ones = Expand (minus_one, index_shape)
    shape = Shape (log_prob)
    zeros = ConstantOfShape (shape)
    scattered = ScatterElements <axis = 1> (zeros, index, minus_ones)
    prob = Exp (log_prob)
    total = ReduceSum <keepdims = 1> (scattered, one)
    share = Mul (prob, total)
    logits_grad = Sub (scattered, share)
    x_t = Transpose <perm = [1, 0]> (x)
    w_grad = MatMul (x_t, logits_grad)
}
"""
"""A linear classifier with cross entropy, and the backward pass that PyTorch's exporter writes for it."""

ATTENTION = """
<ir_version: 10, opset_import: ["" : 20]>
attention_step (float[b, 3, s, s] scores, bool[b, 1, s, s] mask, float[b, 3, s, s] grad)
    => (float[b, 3, s, s] prob, float[b, 3, s, s] scores_grad)
{
    axis = Constant <value = int64[1] {-1}> ()
    zero = Constant <value_float = 0.0> ()
    low = Constant <value_float = -1e30> ()
    scale = Constant <value_float = 0.5> ()
    scaled = Mul (scores, scale)
    masked = Where (mask, low, scaled)
    prob = Softmax <axis = -1> (masked)
    weighted = Mul (grad, prob)
    total = ReduceSum <keepdims = 1> (weighted, axis)
    share = Mul (prob, total)
    masked_grad = Sub (weighted, share)
    scaled_grad = Where (mask, zero, masked_grad)
    scores_grad = Mul (scaled_grad, scale)
}
"""
"""A scaled masked softmax, and its backward pass for a gradient that is given."""

FORWARD = """
<ir_version: 10, opset_import: ["" : 20]>
inference (float[n, 4] x) => (float[n, m] y)
<float[1] b = {0.5}>
{
    product = MatMul (x, w)
    sum = Add (product, b)
    y = Relu (sum)
}
"""
"""A layer without a backward pass; `forward` adds its weights."""


def cross_entropy() -> onnx.ModelProto:
    """Return a model with a cross entropy backward to fuse."""
    return onnx.parser.parse_model(CROSS_ENTROPY)


def attention() -> onnx.ModelProto:
    """Return a model with a scaled masked softmax backward to fuse."""
    return onnx.parser.parse_model(ATTENTION)


def forward(width: int = 5) -> onnx.ModelProto:
    """Return a model without a backward pass, from 4 features to `width`."""
    model = onnx.parser.parse_model(FORWARD)
    weights = np.linspace(-1.0, 1.0, 4 * width, dtype=np.float32).reshape(4, width)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return model


def save_with_external_data(model: onnx.ModelProto, path: Path, location: str = "weights.bin") -> Path:
    """Save a model with every initializer in a file beside it, and return its path."""
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def same_graph(first: onnx.ModelProto, second: onnx.ModelProto) -> bool:
    """Tell whether two models have the same operators and initializers in order."""
    return [n.op_type for n in first.graph.node] == [n.op_type for n in second.graph.node] and all(
        np.array_equal(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b))
        for a, b in zip(first.graph.initializer, second.graph.initializer, strict=True)
    )
