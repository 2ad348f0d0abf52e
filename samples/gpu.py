"""Train a step that gradfuse fused on an NVIDIA GPU, in plain onnxruntime: no onnxruntime-gpu is needed.

First export one, for example with `python samples/digits.py --save models`, then run

    python samples/gpu.py models/digits_rowattention_fused.onnx

It needs a build of gradfuse with CUDA kernels (docs/cuda.md), and onnxruntime 1.24 or newer. The sample

1. registers gradfuse's execution provider, and chooses a GPU,
2. creates a session and prints which nodes run where: the fused ones on the GPU, all others on the CPU,
3. trains on the handwritten digits that scikit-learn ships, and compares the first gradients with the CPU kernels'.

The exit status is 2 if there is no GPU to run on, and 1 if the gradients differ.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnxruntime
from sklearn.datasets import load_digits

import gradfuse

Arrays = dict[str, npt.NDArray[Any]]


def gpus(library: str) -> list[Any]:
    """The devices of gradfuse's execution provider; if there are none, onnxruntime warns why."""
    onnxruntime.register_execution_provider_library(gradfuse.get_ep_name(), library)
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == gradfuse.get_ep_name()]


def session_on(device: Any, model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # onnxruntime warns of every node that stays on the CPU
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # The operators come with the device: gradfuse.register is for sessions without one.
    options.add_provider_for_devices([device], {})
    # Or onnxruntime would go on without a provider that fails.
    return onnxruntime.InferenceSession(model, options, enable_fallback=0)


def print_places(session: onnxruntime.InferenceSession) -> None:
    places: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for part in session.get_provider_graph_assignment_info():
        places[part.ep_name].update(node.op_type for node in part.get_nodes())
    for provider, operators in sorted(places.items()):
        names = ", ".join(f"{count} {name}" for name, count in operators.most_common(6))
        print(f"{provider}: {operators.total()} nodes: {names}{', ...' if len(operators) > 6 else ''}")


def run(session: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@click.command(context_settings={"show_default": True})
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.option("--steps", default=200, type=click.IntRange(1), help="Steps of training.")
@click.option("--batch-size", default=64, type=click.IntRange(2), help="Digits in a step.")
@click.option("--rate", default=0.05, help="Learning rate.")
@click.option(
    "--library",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="Another build of gradfuse's library than the installed one.",
)
def main(model: pathlib.Path, steps: int, batch_size: int, rate: float, library: str | None) -> None:
    """Train the step in the file MODEL with its fused nodes on a GPU."""
    devices = gpus(library or gradfuse.get_library_path())
    if not devices:
        print("There is no GPU to run on: see onnxruntime's warning above.", file=sys.stderr)
        sys.exit(2)
    print(f"onnxruntime {onnxruntime.__version__} on {devices[0].ep_metadata['device_name']}")
    step = gradfuse.TrainingStep.load(model)
    content = step.model.SerializeToString()
    session = session_on(devices[0], content)
    print_places(session)

    data = load_digits()
    images, labels = (data.images[:, None] / 16).astype(np.float32), data.target.astype(np.int64)
    generator = np.random.default_rng(0)
    weights = {name: array.copy() for name, array in step.parameters.items()}

    def batch() -> Arrays:
        rows = generator.integers(0, len(labels), batch_size)
        return {step.input_names[0]: images[rows], step.target_names[0]: labels[rows]}

    options = onnxruntime.SessionOptions()
    gradfuse.register(options)
    on_cpu = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    feeds = weights | batch()
    ours, theirs = run(session, feeds), run(on_cpu, feeds)
    difference = max(float(np.abs(ours[f"{name}.grad"] - theirs[f"{name}.grad"]).max()) for name in weights)
    largest = max(float(np.abs(theirs[f"{name}.grad"]).max()) for name in weights)
    print(f"largest difference of a gradient from the CPU's: {difference:.1e} (largest gradient: {largest:.1e})")

    losses = []
    for _ in range(steps):
        results = run(session, weights | batch())
        losses.append(float(results["loss"]))
        for name, weight in weights.items():
            weight -= rate * results[f"{name}.grad"]
    print(f"{steps} steps: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    sys.exit(0 if difference <= 1e-4 * largest else 1)


if __name__ == "__main__":
    main()
