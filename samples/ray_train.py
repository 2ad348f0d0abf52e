"""Train on the workers of Ray Train: each computes gradients of its share in onnxruntime, and gloo averages them.

Run it with `python samples/ray_train.py`, after `pip install "ray[train]"`. It starts Ray on this machine; with
`--address auto` it uses an existing cluster. Ray starts the workers and their process group, hands each its options,
and keeps checkpoints. The data are the 1797 handwritten digits that scikit-learn ships.

Then a `TrainingSession` in this process repeats the training on the whole batches. The exit status is 1
if the losses differ by more than rounding, or below the wanted accuracy.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Nothing is sent anywhere.

import click
import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn

import gradfuse
from gradfuse.distributed import DataParallelSession

TESTED = 360
"""How many digits are left out of training."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (N, 64) and labels (N), in random order."""
    data, order = load_digits(), np.random.default_rng(0).permutation(1797)
    return torch.from_numpy((data.data[order] / 16).astype(np.float32)), torch.from_numpy(data.target[order])


def training_step(pixels: torch.Tensor, labels: torch.Tensor) -> gradfuse.TrainingStep:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    shapes = ({0: "batch"}, {0: "batch"})
    return gradfuse.export_training_step(
        module, nn.CrossEntropyLoss(), (pixels[:8], labels[:8]), optimizer, dynamic_shapes=shapes
    )


def batches(count: int, size: int) -> list[np.ndarray[Any, Any]]:
    """The rows of each step."""
    return [np.random.default_rng(seed).integers(TESTED, 1797, size) for seed in range(count)]


def work(options: dict[str, int]) -> None:
    """A worker's training; Ray has made the process group."""
    context, (pixels, labels) = ray.train.get_context(), digits()
    rank, world = context.get_world_rank(), context.get_world_size()
    session = DataParallelSession(training_step(pixels, labels) if rank == 0 else None)
    losses = []
    for rows in batches(options["steps"], options["batch"]):
        share = np.array_split(rows, world)[rank]
        losses.append(session.step(pixels[share], labels[share]))
    right = session.evaluate(pixels[:TESTED]).argmax(1) == labels[:TESTED].numpy()
    with tempfile.TemporaryDirectory() as folder:
        session.save(pathlib.Path(folder) / "trained.safetensors")
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"losses": losses, "accuracy": float(right.mean())}, checkpoint=checkpoint)


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=2, type=click.IntRange(1), help="Processes that train.")
@click.option("--steps", default=200, type=click.IntRange(1), help="Steps of training.")
@click.option("--batch", default=64, type=click.IntRange(1), help="Digits in a step, of all workers together.")
@click.option("--accuracy", default=0.95, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option("--address", help="The cluster to use; by default one is started here.", show_default=False)
def main(workers: int, steps: int, batch: int, accuracy: float, address: str | None) -> None:
    """Train a digit classifier on Ray's workers; exit 1 below the wanted accuracy."""
    here = {} if address else {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(address=address, logging_level="error", log_to_driver=False, **here)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            work,
            train_loop_config={"steps": steps, "batch": batch},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(storage_path=folder, name="digits"),
        )
        result = trainer.fit()
        with result.checkpoint.as_directory() as kept:
            pixels, labels = digits()
            step = training_step(pixels, labels)
            trained = gradfuse.TrainingSession(step)
            trained.load(pathlib.Path(kept) / "trained.safetensors")
    ray.shutdown()
    losses, right = result.metrics["losses"], result.metrics["accuracy"]
    print(f"{workers} workers of Ray {ray.__version__}: {steps} steps, loss {losses[-1]:.4f}, accuracy {right:.2%}")
    one = gradfuse.TrainingSession(step)
    alone = [one.step(pixels[rows], labels[rows]) for rows in batches(steps, batch)]
    apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
    print(f"one process with the whole batches: loss {alone[-1]:.4f}; losses differ by {apart:.1e} at most")
    if trained.step_count != steps or apart > 1e-4 or right < accuracy:
        sys.exit(1)


if __name__ == "__main__":
    main()
