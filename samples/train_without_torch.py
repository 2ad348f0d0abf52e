"""Train a saved step where PyTorch is not installed: with numpy, onnxruntime and gradfuse.

Where PyTorch is installed, write a step and data into a folder:

    python samples/train_without_torch.py export folder

The step holds the module, the loss and AdamW; the data are the 1797 handwritten digits (8 x 8 pixels) that scikit-learn
ships. Then, anywhere else with `pip install "gradfuse[train]"`,

    python samples/train_without_torch.py train folder

trains for some epochs, and writes `folder/checkpoint.safetensors` after each. Run it again, and it resumes there, with
the same numbers as without the break: parameters, state of the optimizer and learning rate are in the checkpoint, and
the order of the digits depends on the epoch's number only. torch reads the trained parameters from the same file,
under the names of the module.

The exit status is 1 if the accuracy is below the wanted one.
"""

from __future__ import annotations

import pathlib
import sys
import time

import click
import numpy as np
from rich.console import Console
from rich.progress import track

import gradfuse

STEP, DATA, CHECKPOINT = "step.onnx", "digits.npz", "checkpoint.safetensors"


@click.group()
def main() -> None:
    """Export a training step with PyTorch, and train it without."""


@main.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.option("--rate", default=2e-3, help="Learning rate of AdamW.")
@click.option("--seed", default=0, help="Seed of split and parameters.")
def export(folder: pathlib.Path, rate: float, seed: int) -> None:
    """Write a step and the digits into FOLDER; this needs PyTorch and scikit-learn."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    batch = torch.randn(2, 64), torch.randint(0, 10, (2,))
    step = gradfuse.export_training_step(
        module,
        nn.CrossEntropyLoss(label_smoothing=0.05),
        batch,
        torch.optim.AdamW(module.parameters(), lr=rate),
        dynamic_shapes=({0: "batch"}, {0: "batch"}),
    )
    folder.mkdir(parents=True, exist_ok=True)
    step.save(folder / STEP)
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = (digits.data / 16).astype(np.float32)[order], digits.target.astype(np.int64)[order]
    cut = len(labels) * 4 // 5
    np.savez(
        folder / DATA, images=images[:cut], labels=labels[:cut], test_images=images[cut:], test_labels=labels[cut:]
    )
    click.echo(f"{folder / STEP} and {folder / DATA} are written")


@main.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path))
@click.option("--epochs", default=20, type=click.IntRange(1), help="Passes over the data.")
@click.option("--batch-size", default=32, type=click.IntRange(1), help="Digits in a step.")
@click.option("--accuracy", default=0.95, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
def train(folder: pathlib.Path, epochs: int, batch_size: int, accuracy: float) -> None:
    """Train the step in FOLDER for some more epochs; exit 1 below the wanted accuracy."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    with np.load(folder / DATA) as data:
        images, labels = data["images"], data["labels"]
        test_images, test_labels = data["test_images"], data["test_labels"]
    session = gradfuse.TrainingSession(folder / STEP)
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists():
        session.load(checkpoint)
    steps_per_epoch = -(-len(labels) // batch_size)
    # The optimizer counts its steps.
    done = int(session.ort_values["step"].numpy()) // steps_per_epoch
    if done:
        console.print(f"going on after {done} epochs")

    start, losses = time.perf_counter(), [float("nan")]
    for epoch in track(range(done, done + epochs), "training", console=console, disable=not console.is_terminal):
        order = np.random.default_rng(epoch).permutation(len(labels))
        losses = []
        for rows in np.split(order, range(batch_size, len(order), batch_size)):
            losses.append(session.step(images[rows], labels[rows]))
        session.save(checkpoint)
    reached = float((session.evaluate(test_images).argmax(1) == test_labels).mean())
    console.print(
        f"trained epochs {done + 1} to {done + epochs} in {time.perf_counter() - start:.1f} s, "
        f"loss {np.mean(losses):.6f}, test accuracy {reached:.2%} of {len(test_labels)} digits"
    )
    if reached < accuracy:
        console.print(f"test accuracy is {reached:.2%}; expected at least {accuracy:.0%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
