"""Gradient graphs of layers, and updates of optimizers, as jax2onnx writes them, with JAX's results in float64.

    python tests/corpus/jax_layers.py FOLDER

Writes FOLDER/CASE.onnx and FOLDER/CASE.npz in the form of tests/corpus. It runs where jax2onnx and optax are installed,
and needs nothing of gradfuse. jax2onnx cannot write the gradients of convolutions and pooling, so no case has these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from jax import lax, nn
from jax2onnx import to_onnx

WIDTH = 4
NUMBERS = np.random.default_rng(0)
Step = Callable[..., Any]


def _numbers(*sizes: int) -> Any:
    return NUMBERS.standard_normal(sizes)


def _centred(x: Any, scale: Any, shift: Any, axes: Any) -> Any:
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(axes, keepdims=True) + 1e-5) * scale + shift


def _by_variance(x: Any, scale: Any, shift: Any, axes: Any) -> Any:
    return (x - jnp.mean(x, axes, keepdims=True)) / jnp.sqrt(jnp.var(x, axes, keepdims=True) + 1e-5) * scale + shift


def _by_squares(x: Any, scale: Any, shift: Any, axes: Any) -> Any:
    """As Flax does by default: a variance that rounding makes negative is cut at 0."""
    mean = x.mean(axes, keepdims=True)
    variance = jnp.maximum(0.0, (x * x).mean(axes, keepdims=True) - mean * mean)
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * scale) + shift


def _by_root_mean_square(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _gradients(layer: Step, trained: int) -> Step:
    """The gradients of a weighted sum with respect to the inputs after the weights."""

    def loss(weights: Any, *inputs: Any) -> Any:
        return jnp.sum(jnp.tanh(layer(*inputs)) * weights)

    gradients: Step = jax.grad(loss, argnums=tuple(range(1, trained + 1)))
    return gradients


def _updates(rule: optax.GradientTransformation, parameter: Any) -> tuple[Step, list[Any]]:
    """An update with the rule's state as inputs, and such inputs."""
    leaves, tree = jax.tree.flatten(rule.init(jnp.asarray(parameter)))

    def step(value: Any, gradient: Any, *state: Any) -> Any:
        change, after = rule.update(gradient, jax.tree.unflatten(tree, list(state)), value)
        return (optax.apply_updates(value, change), *jax.tree.leaves(after))

    return step, [parameter, _numbers(*parameter.shape), *map(np.asarray, leaves)]


def _momentum(parameter: Any, gradient: Any, velocity: Any) -> Any:
    """Keras's: the rate is in the velocity."""
    velocity = 0.9 * velocity - 0.1 * gradient
    return parameter + velocity, velocity


def _cases() -> Iterator[tuple[str, Step, list[Any]]]:
    scale, shift = _numbers(WIDTH), _numbers(WIDTH)
    rows, images = (6, WIDTH), (2, 3, 3, WIDTH)
    for end, layer in (("", _centred), ("_variance", _by_variance), ("_squares", _by_squares)):
        for name, sizes, axes in (
            ("layer_norm", rows, -1),
            ("batch_norm", rows, 0),
            ("batch_norm_images", images, (0, 1, 2)),
        ):
            along = jax.tree_util.Partial(layer, axes=axes)
            yield f"{name}{end}", _gradients(along, 3), [_numbers(*sizes), _numbers(*sizes), scale, shift]
    yield "rms_norm", _gradients(_by_root_mean_square, 2), [_numbers(*rows), _numbers(*rows), scale]
    for name, unit in (("gelu", nn.gelu), ("relu", nn.relu)):
        yield name, _gradients(lambda x, f=unit: f(x), 1), [_numbers(*rows), _numbers(*rows)]
    table, index = _numbers(7, WIDTH), np.asarray([[1, -2, 2], [0, 6, -7]], np.int32)
    for name, looked_up in (("embedding", lambda t, i: t[i]), ("embedding_take", lambda t, i: jnp.take(t, i, axis=0))):
        yield name, _gradients(looked_up, 1), [_numbers(2, 3, WIDTH), table, index]
    one_hot = _gradients(lambda t, i: nn.one_hot(i, 7, dtype=t.dtype) @ t, 1)
    yield "embedding_one_hot", one_hot, [_numbers(2, 3, WIDTH), table, index % 7]
    yield "squared_error", jax.grad(lambda x, t: jnp.mean((x - t) ** 2)), [_numbers(*rows), _numbers(*rows)]
    target = np.asarray([1, 0, 4, 2, 2, 3], np.int32)

    def cross_entropy(z: Any, t: Any) -> Any:
        return (nn.logsumexp(z, axis=-1) - (z * nn.one_hot(t, 5, dtype=z.dtype)).sum(-1)).mean()

    yield "logsumexp", jax.grad(cross_entropy), [_numbers(6, 5), target]
    columns = jax.grad(lambda x, weights: (nn.softmax(x, axis=0) * weights).sum())
    yield "softmax_columns", columns, [_numbers(*rows), _numbers(*rows)]
    for name, rule in (
        ("adam", optax.adam(1e-2)),
        ("adamw", optax.adamw(1e-2)),
        ("sgd", optax.sgd(1e-2, momentum=0.9)),
        ("sgd_nesterov", optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    ):
        yield name, *_updates(rule, _numbers(4, 3))
    yield "momentum", _momentum, [_numbers(4, 3) for _ in range(3)]


def produce(name: str, step: Step, arrays: list[Any], folder: Path) -> None:
    single = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in arrays]
    model = to_onnx(step, inputs=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in single], model_name=name)
    del model.graph.value_info[:], model.functions[:]
    for entry in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del entry.metadata_props[:]
    for node in model.graph.node:
        node.ClearField("doc_string")
    onnx.save(model, folder / f"{name}.onnx")
    with jax.enable_x64(True):
        exact = jax.tree.leaves(
            step(*(jnp.asarray(a.astype(np.float64) if a.dtype.kind == "f" else a) for a in single))
        )
    stored = {f"in.{value.name}": a for value, a in zip(model.graph.input, single, strict=True)}
    stored |= {f"out.{value.name}": np.asarray(a) for value, a in zip(model.graph.output, exact, strict=True)}
    np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **stored)


def main(folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    for case in _cases():
        produce(*case, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
