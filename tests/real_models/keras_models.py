"""Writes models of Keras, tiny and with random weights, as ONNX files by tf2onnx, with gradients of TensorFlow.

    python keras_models.py NAME MODEL.onnx ARRAYS.npz

It runs where TensorFlow and tf2onnx are installed, and needs nothing of gradfuse.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from keras import layers

CLASSES = 5


def images() -> Any:
    inputs = keras.Input((12, 12, 3))
    h = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(inputs)
    h = layers.BatchNormalization()(h)
    h = layers.DepthwiseConv2D(3, padding="same")(h)
    h = layers.MaxPooling2D(2)(h)
    h = layers.add([h, layers.Conv2D(6, 1, activation="swish")(h)])
    h = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(h)
    h = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(h))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="tanh")(h)))


def recurrent(layer: Callable[..., Any]) -> Any:
    inputs = keras.Input((7,), dtype="int32")
    h = layers.Embedding(20, 6)(inputs)
    h = layer(5, return_sequences=True)(h)
    return keras.Model(inputs, layers.Dense(CLASSES)(layer(4)(h)))


def attention() -> Any:
    inputs = keras.Input((7,), dtype="int32")
    h = layers.Embedding(20, 8)(inputs)
    attended = layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(layers.add([h, attended]))
    h = layers.add([h, layers.Dense(8)(layers.Dense(16, activation="relu")(h))])
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))


NETWORKS: dict[str, Callable[[], Any]] = {
    "images": images,
    "lstm": lambda: recurrent(layers.LSTM),
    "gru": lambda: recurrent(layers.GRU),
    "attention": attention,
}


def gradients(name: str, weights: list[Any], x: Any, targets: Any, dtype: str) -> tuple[float, list[Any]]:
    """Return the loss and its gradients by TensorFlow, None for weights without one."""
    keras.config.set_dtype_policy(dtype)
    model = NETWORKS[name]()
    model.set_weights(weights)
    with tf.GradientTape() as tape:
        logits = model(x.astype(dtype) if x.dtype.kind == "f" else x, training=False)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
    found = tape.gradient(loss, model.weights)
    dense = [None if one is None else tf.convert_to_tensor(one).numpy() for one in found]
    return float(loss), dense


def placed(array: Any, initializers: dict[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """Return the initializer that holds a weight, and how its axes are permuted there."""
    for order in itertools.permutations(range(array.ndim)):
        turned = array.transpose(order)
        for name, other in initializers.items():
            if other.size == turned.size and other.size > 1 and (other.reshape(-1) == turned.reshape(-1)).all():
                return name, order
    return None


def main(name: str, path: str, arrays: str) -> None:
    keras.utils.set_random_seed(0)
    model = NETWORKS[name]()
    rng = np.random.default_rng(0)
    # Different in every element, so that each is found in the file.
    model.set_weights([np.float32(rng.uniform(0.1, 1, w.shape) * rng.choice([-1, 1])) for w in model.get_weights()])
    shape = (6, *model.inputs[0].shape[1:])
    words = model.inputs[0].dtype == "int32"
    x = rng.integers(0, 20, shape).astype(np.int32) if words else rng.standard_normal(shape).astype(np.float32)
    targets = np.arange(6) % CLASSES
    signature = tf.TensorSpec((None, *shape[1:]), tf.int32 if words else tf.float32, name="x")
    call = tf.function(lambda x: model(x, training=False))
    proto, _ = tf2onnx.convert.from_function(call, input_signature=[signature], opset=17, output_path=path)
    initializers = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    weights = model.get_weights()
    results: dict[str, Any] = {"x": x, "targets": targets}
    for dtype in ("float32", "float64"):
        loss, found = gradients(name, weights, x, targets, dtype)
        results[f"{dtype}/loss"] = np.array(loss)
        for weight, gradient in zip(weights, found, strict=True):
            place = placed(weight, initializers)
            if place is not None and gradient is not None:
                turned = gradient.transpose(place[1])
                results[f"{dtype}/{place[0]}"] = turned.reshape(initializers[place[0]].shape)
    np.savez(arrays, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
