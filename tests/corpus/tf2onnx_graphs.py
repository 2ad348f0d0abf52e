"""Gradient graphs of TensorFlow as tf2onnx writes them, with TensorFlow's gradients in float64.

    .venv-models/tensorflow/bin/python tests/corpus/tf2onnx_graphs.py FOLDER

Writes FOLDER/CASE.onnx and FOLDER/CASE.npz in the form of tests/corpus. It runs where TensorFlow and tf2onnx are
installed, and needs nothing of gradfuse. tf2onnx cannot write the gradients of tanh, roots, ReLU and pooling, so no
case has these.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf
import tf2onnx

ROWS, CLASSES, WIDTH = 6, 5, 4
NUMBERS = np.random.default_rng(0)
TARGET = np.asarray([1, 0, 4, 2, 2, 3])
WEIGHTS = np.linspace(0.5, 2, CLASSES)


def _numbers(*sizes: int) -> Any:
    return NUMBERS.standard_normal(sizes)


def _row_and_class(z: Any, y: Any) -> Any:
    return tf.stack([tf.range(tf.shape(z)[0], dtype=y.dtype), y], 1)


def _picked(z: Any, y: Any) -> Any:
    return tf.gather(tf.nn.log_softmax(z), y, batch_dims=1)


def _in_sequences(z: Any, y: Any) -> Any:
    sequences = tf.nn.log_softmax(tf.reshape(z, [2, -1, CLASSES]))
    return -tf.reduce_mean(tf.gather(sequences, tf.reshape(y, [2, -1]), batch_dims=2))


def _by_one_index(z: Any, y: Any) -> Any:
    place = tf.range(tf.shape(z)[0], dtype=y.dtype) * CLASSES + y
    return -tf.reduce_mean(tf.gather(tf.reshape(tf.nn.log_softmax(z), [-1]), place))


def _ignored(z: Any, y: Any) -> Any:
    counted = tf.cast(y != 0, z.dtype)
    return -tf.reduce_sum(_picked(z, y) * counted) / tf.reduce_sum(counted)


def _normalised(x: Any, axes: list[int], scale: Any, shift: Any) -> Any:
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(centred * centred, axes, keepdims=True)
    return centred * (variance + 1e-5) ** -0.5 * scale + shift


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "batch_gather": lambda z, y: -tf.reduce_mean(_picked(z, y)),
    "batch_gather_sum": lambda z, y: -tf.reduce_sum(_picked(z, y)),
    "batch_gather_column": lambda z, y: -tf.reduce_mean(tf.gather(tf.nn.log_softmax(z), y[:, None], batch_dims=1)),
    "weighted": lambda z, y: -tf.reduce_mean(_picked(z, y) * tf.gather(tf.constant(WEIGHTS, z.dtype), y)),
    "ignored": _ignored,
    "sequences": _in_sequences,
    "one_index": _by_one_index,
    "logits": lambda z, y: tf.reduce_mean(tf.reduce_logsumexp(z, -1) - tf.gather(z, y, batch_dims=1)),
    "gather_nd": lambda z, y: -tf.reduce_mean(tf.gather_nd(tf.nn.log_softmax(z), _row_and_class(z, y))),
    "gather_nd_batch": lambda z, y: -tf.reduce_mean(tf.gather_nd(tf.nn.log_softmax(z), y[:, None], batch_dims=1)),
    "take_along_axis": lambda z, y: (
        -tf.reduce_mean(tf.experimental.numpy.take_along_axis(tf.nn.log_softmax(z), y[:, None], 1))
    ),
    "one_hot": lambda z, y: (
        -tf.reduce_mean(tf.reduce_sum(tf.one_hot(y, CLASSES, dtype=z.dtype) * tf.nn.log_softmax(z), -1))
    ),
    "scattered_one_hot": lambda z, y: (
        -tf.reduce_mean(
            tf.reduce_sum(
                tf.tensor_scatter_nd_update(tf.zeros_like(z), _row_and_class(z, y), tf.ones_like(z[:, 0]))
                * tf.nn.log_softmax(z),
                -1,
            )
        )
    ),
    "boolean_mask": lambda z, y: (
        -tf.reduce_mean(tf.boolean_mask(tf.nn.log_softmax(z), tf.one_hot(y, CLASSES, on_value=True, off_value=False)))
    ),
}
"""Losses of scores and targets. Where the number of rows is not known, tf2onnx leaves nodes of TensorFlow in some."""
DYNAMIC = {
    *("batch_gather", "batch_gather_sum", "batch_gather_column", "sequences", "one_index", "gather_nd"),
    *("gather_nd_batch", "boolean_mask"),
}
INT32 = {"batch_gather", "one_index", "gather_nd_batch", "ignored"}

Step = Callable[..., Any]


def _gradients(loss: Step, trained: int) -> Step:
    """The loss, and its gradients with respect to the last inputs."""

    def step(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs[-trained:])
            value = loss(*inputs)
        return value, *map(tf.convert_to_tensor, tape.gradient(value, inputs[-trained:]))

    return step


def _layers() -> dict[str, tuple[Step, list[Any]]]:
    g, x, w = _numbers(ROWS, WIDTH), _numbers(ROWS, WIDTH), _numbers(WIDTH, WIDTH)
    scale, shift = _numbers(WIDTH), _numbers(WIDTH)
    images, of_images = _numbers(2, 3, 3, WIDTH), _numbers(2, 3, 3, WIDTH)
    found: dict[str, tuple[Step, list[Any], int]] = {
        "layer_norm": (lambda g, x, w, a, b: tf.reduce_sum(_normalised(x @ w, [1], a, b) ** 2 * g), [g, x], 3),
        "batch_norm": (lambda g, x, w, a, b: tf.reduce_sum(_normalised(x @ w, [0], a, b) ** 2 * g), [g, x], 3),
        "batch_norm_images": (
            lambda g, x, w, a, b: tf.reduce_sum(_normalised(x @ w, [0, 1, 2], a, b) ** 2 * g),
            [of_images, images],
            3,
        ),
        "maximum": (lambda g, x, w: tf.reduce_sum(tf.maximum(x @ w, 0.0) * g), [g, x], 1),
        "attention": (lambda g, x, w: tf.reduce_sum((tf.nn.softmax(x @ w @ tf.transpose(x)) @ x) * g), [g, x], 1),
        "squared_error": (lambda g, x, w: tf.reduce_mean((x @ w - g) ** 2), [g, x], 1),
        "embedding": (
            lambda g, i, w: tf.reduce_sum(tf.gather(w, i) ** 2 * g),
            [_numbers(2, 3, WIDTH), np.asarray([[3, 0, 3], [1, 2, 3]])],
            1,
        ),
    }
    return {n: (_gradients(f, t), [*arrays, *[w, scale, shift][:t]]) for n, (f, arrays, t) in found.items()}


def _adam(parameter: Any, gradient: Any, average: Any, square: Any, count: Any) -> Any:
    count = count + 1
    average = average + (gradient - average) * 0.1
    square = square + (gradient * gradient - square) * 0.001
    rate = 0.01 * tf.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return parameter - rate * average / (tf.sqrt(square) + 1e-7), average, square, count


def _momentum(parameter: Any, gradient: Any, velocity: Any) -> Any:
    """Keras's: the rate is in the velocity."""
    velocity = 0.9 * velocity - 0.1 * gradient
    return parameter + velocity, velocity


def _cases() -> dict[str, tuple[Step, list[Any], bool]]:
    rows, w = _numbers(ROWS, WIDTH), _numbers(WIDTH, CLASSES)
    cases: dict[str, tuple[Step, list[Any], bool]] = {}
    for name, loss in LOSSES.items():
        target = TARGET.astype(np.int32 if name in INT32 else np.int64)
        step = _gradients(lambda x, y, w, loss=loss: loss(x @ w, y), 1)
        for dynamic in (False, True)[: 1 + (name in DYNAMIC)]:
            cases[f"{name}{'_dyn' if dynamic else ''}"] = step, [rows, target, w], dynamic
    cases |= {name: (*case, False) for name, case in _layers().items()}
    state = [_numbers(3, 4), _numbers(3, 4), _numbers(3, 4) / 4, np.abs(_numbers(3, 4)), np.asarray(3.0)]
    cases["adam"] = _adam, state, False
    cases["momentum"] = _momentum, state[:3], False
    return cases


def produce(name: str, step: Step, arrays: list[Any], dynamic: bool, folder: Path) -> None:
    single = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in arrays]
    signature = [
        tf.TensorSpec([None if dynamic and a.shape[:1] == (ROWS,) else n for n in a.shape], tf.as_dtype(a.dtype))
        for a in single
    ]
    # The exporter numbers its names from one model to the next.
    tf2onnx.utils.INTERNAL_NAME = 1
    function = tf.function(step, input_signature=signature)
    model, _ = tf2onnx.convert.from_function(
        function, input_signature=signature, opset=18, output_path=str(folder / f"{name}.onnx")
    )
    exact = step(*(tf.constant(a.astype(np.float64) if a.dtype.kind == "f" else a) for a in single))
    stored = {f"in.{value.name}": a for value, a in zip(model.graph.input, single, strict=True)}
    stored |= {f"out.{value.name}": a.numpy() for value, a in zip(model.graph.output, exact, strict=True)}
    np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **stored)


def main(folder: str) -> None:
    logging.disable()
    Path(folder).mkdir(exist_ok=True)
    for name, case in _cases().items():
        produce(name, *case, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
