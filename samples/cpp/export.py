"""Write what `train.cc` reads into a folder: a training step with its evaluation model, and the digits.

    python samples/cpp/export.py folder

The step trains the convolutional classifier of `samples/digits.py` with Adam. Its values are the defaults of its
inputs, so that one file is all it takes.
"""

from __future__ import annotations

import pathlib
import sys

import click
import torch
import torch.nn.functional as F

import gradfuse

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from digits import Cnn, Digits

BATCH_SIZE = 64


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.option("--rate", default=2e-3, help="Learning rate of Adam.")
@click.option("--seed", default=0, help="Seed of split and parameters.")
def main(folder: pathlib.Path, rate: float, seed: int) -> None:
    """Export the digit classifier's training step for C++."""
    data = Digits.load(seed)
    torch.manual_seed(seed)
    module = Cnn()
    batch = torch.from_numpy(data.train_images[:BATCH_SIZE]), torch.from_numpy(data.train_labels[:BATCH_SIZE])
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    step = gradfuse.export_training_step(
        module, F.cross_entropy, batch, optimizer, dynamic_shapes=({0: "batch"}, {0: "batch"})
    )
    folder.mkdir(parents=True, exist_ok=True)
    step.save(folder / "step.onnx")
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        getattr(data, name).tofile(folder / f"{name}.bin")
    click.echo(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {folder}")


if __name__ == "__main__":
    main()
