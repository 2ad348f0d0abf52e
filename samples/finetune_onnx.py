"""Fine-tune an ONNX file without PyTorch: derive gradients from the graph, and train in stock onnxruntime.

The file is a classifier of handwritten digits that scikit-learn has trained, as a converter would write it: MatMul, Add
and Relu, logits and the most likely class. The digits it meets now are written with the colours swapped, and it reads
few of them. `gradfuse.build_training_step` adds cross entropy, gradients and AdamW to the file, and some epochs on the
new digits teach them. The trained weights go back into the file, whose inputs and outputs stay the same.

The exit status is 1 if the accuracy after the training is below the wanted one.
"""

from __future__ import annotations

import pathlib
import sys

import click
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import gradfuse

CLASSES = 10
Array = npt.NDArray[np.float32]


def classifier(images: Array, labels: npt.NDArray[np.int64], seed: int) -> onnx.ModelProto:
    """Train a classifier with scikit-learn, and return it as an ONNX model: images (N, 64) to logits and labels."""
    trained = MLPClassifier((64,), max_iter=40, random_state=seed, early_stopping=True).fit(images, labels)
    nodes, initializers, value = [], [], "images"
    for layer, (weight, bias) in enumerate(zip(trained.coefs_, trained.intercepts_, strict=True)):
        last = layer == len(trained.coefs_) - 1
        names = f"layer{layer}.weight", f"layer{layer}.bias"
        for name, array in zip(names, (weight, bias), strict=True):
            initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        nodes.append(helper.make_node("MatMul", [value, names[0]], [f"product{layer}"]))
        nodes.append(helper.make_node("Add", [f"product{layer}", names[1]], ["logits" if last else f"sum{layer}"]))
        if not last:
            value = f"hidden{layer}"
            nodes.append(helper.make_node("Relu", [f"sum{layer}"], [value]))
    nodes.append(helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0))
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES]),
        helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]),
    ]
    images_info = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", images.shape[1]])
    graph = helper.make_graph(nodes, "digits", [images_info], outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def accuracy(path: pathlib.Path, images: Array, labels: npt.NDArray[np.int64]) -> float:
    """Return the share of images whose label the file gives."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (predicted,) = session.run(["label"], {"images": images})
    return float((predicted == labels).mean())


def with_weights(model: onnx.ModelProto, weights: dict[str, Array]) -> onnx.ModelProto:
    """Return the model with other values for its initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return result


@click.command(context_settings={"show_default": True})
@click.option("--folder", default="build/samples", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.option("--epochs", default=15, type=click.IntRange(1), help="Passes over the new digits.")
@click.option("--batch-size", default=32, type=click.IntRange(1), help="Digits in a step.")
@click.option("--rate", default=2e-3, help="Learning rate of AdamW.")
@click.option("--frozen", multiple=True, help="Initializers that stay as they are, such as 'layer0.*'.")
@click.option("--wanted", default=0.93, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option("--seed", default=0, help="Seed of split and order.")
def main(
    folder: pathlib.Path, epochs: int, batch_size: int, rate: float, frozen: tuple[str, ...], wanted: float, seed: int
) -> None:
    """Fine-tune a classifier that is an ONNX file; exit 1 below the wanted accuracy."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    digits, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    images, labels = (digits.data / 16).astype(np.float32)[order], digits.target.astype(np.int64)[order]
    cut = len(labels) * 4 // 5
    model = classifier(images[:cut], labels[:cut], seed)
    before, after = folder / "digits_classifier.onnx", folder / "digits_finetuned.onnx"
    onnx.save(model, before)
    swapped = 1 - images
    console.print(f"the file reads {accuracy(before, images[cut:], labels[cut:]):.2%} of the digits it was trained for")
    console.print(f"of those with swapped colours it reads {accuracy(before, swapped[cut:], labels[cut:]):.2%}")

    step = gradfuse.build_training_step(
        before, "cross_entropy", frozen=frozen or None, optimizer=gradfuse.optimizers.AdamW(lr=rate)
    )
    console.print(f"training {', '.join(step.parameters)}")
    session = gradfuse.TrainingSession(step)
    losses: list[float] = []
    for _ in track(range(epochs), "training", console=console, disable=not console.is_terminal):
        batches = np.split(rng.permutation(cut), range(batch_size, cut, batch_size))
        losses = [session.step(swapped[rows], labels[rows]) for rows in batches]
    onnx.save(with_weights(model, session.state_dict()), after)
    reached = accuracy(after, swapped[cut:], labels[cut:])
    console.print(f"after {epochs} epochs, loss {np.mean(losses):.4f}, {after} reads {reached:.2%}")
    if reached < wanted:
        console.print(f"test accuracy is {reached:.2%}; expected at least {wanted:.0%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
