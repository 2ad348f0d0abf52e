"""Write what the page and `train_node.mjs` read: a training step, its values, and the digits.

    python samples/web/export.py

The step trains the convolutional classifier of `samples/digits.py` with Adam. Its inputs have no default values, as
onnxruntime-web takes none: their values are in `step.safetensors`.
"""

from __future__ import annotations

import pathlib
import sys

import click
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

import gradfuse

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from digits import Cnn, Digits  # noqa: E402

BATCH_SIZE = 64


@click.command(context_settings={"show_default": True})
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=pathlib.Path), default=HERE / "model", help="Where to write."
)
@click.option("--rate", default=2e-3, help="Learning rate of Adam.")
@click.option("--seed", default=0, help="Seed of split and parameters.")
def main(folder: pathlib.Path, rate: float, seed: int) -> None:
    """Export the digit classifier's training step for JavaScript."""
    data = Digits.load(seed)
    torch.manual_seed(seed)
    module = Cnn()
    batch = torch.from_numpy(data.train_images[:BATCH_SIZE]), torch.from_numpy(data.train_labels[:BATCH_SIZE])
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    # There are no kernels of gradfuse in JavaScript, and on their function bodies fused operators gain nothing. WebGPU
    # has no float64.
    shapes = ({0: "batch"}, {0: "batch"})
    step = gradfuse.export_training_step(
        module, F.cross_entropy, batch, optimizer, dynamic_shapes=shapes, fuse=False, float64=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    step.save(folder / "step.onnx", defaults=False)
    arrays = {name: getattr(data, name) for name in ("train_images", "train_labels", "test_images", "test_labels")}
    save_file(arrays, folder / "digits.safetensors")
    click.echo(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {folder}")


if __name__ == "__main__":
    main()
