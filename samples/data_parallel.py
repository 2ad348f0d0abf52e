"""Train data-parallel: ranks compute gradients of their shares in onnxruntime, and all make one update.

Run it with

    torchrun --standalone --nproc-per-node 2 samples/data_parallel.py

on several machines as docs/distributed.md shows, or in one process with `python samples/data_parallel.py`. The data are
the 1797 handwritten digits (8 x 8 pixels) that scikit-learn ships. Losses and parameters are those of one process that
has the whole batch, whatever the number of ranks and their shares.

The first rank writes a checkpoint from time to time. If a rank is lost, the others end with exit status 3, and Ctrl-C
at one rank ends all after the same step. The same command continues from the checkpoint; torchrun does so automatically
with `--max-restarts`. The exit status is 1 below the wanted accuracy.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence

import click
import numpy as np
import numpy.typing as npt
import running
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import gradfuse
from gradfuse.distributed import DataParallelSession, LostRankError

Ints = npt.NDArray[np.int64]

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""What torchrun sets, for a rank without it."""
LOST = 3
"""The exit status of a rank that has lost another."""


class Classifier(nn.Module):
    """Two convolutions, pooling and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(512, 10)

    def forward(self, image: Tensor) -> Tensor:
        features = F.relu(self.second(F.relu(self.first(image))))
        logits: Tensor = self.head(F.max_pool2d(features, 2).flatten(1))
        return logits


def digits(seed: int) -> tuple[Tensor, Tensor, Ints, Ints]:
    """Images (N, 1, 8, 8), labels (N), and which of them are for training and which for testing."""
    data = load_digits()
    images = torch.from_numpy((data.images[:, None] / 16).astype(np.float32))
    labels = torch.from_numpy(data.target.astype(np.int64))
    chosen, left_out = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    return images, labels, chosen, left_out


def batches(chosen: Ints, batch_size: int, seed: int) -> list[Ints]:
    """The rows of each step of an epoch; the last batch may be smaller."""
    order = np.random.default_rng(seed).permutation(chosen)
    return np.split(order, range(batch_size, len(order), batch_size))


def share_of(rows: Ints, shares: Sequence[int], rank: int) -> Ints:
    """The rows of one rank, in proportion to its share."""
    ends = np.rint(len(rows) * np.cumsum([0, *shares]) / sum(shares)).astype(int)
    return rows[ends[rank] : ends[rank + 1]]


def step_of(images: Tensor, labels: Tensor, seed: int, rate: float, accumulate: int) -> gradfuse.TrainingStep:
    torch.manual_seed(seed)
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    shapes = ({0: "batch"}, {0: "batch"})
    return gradfuse.export_training_step(
        module, F.cross_entropy, (images, labels), optimizer, accumulate=accumulate, dynamic_shapes=shapes
    )


@click.command(context_settings={"show_default": True})
@click.option("--epochs", default=20, type=click.IntRange(1), help="Passes over the training digits.")
@click.option("--batch-size", default=64, type=click.IntRange(2), help="Digits in a call, of all ranks together.")
@click.option("--rate", default=0.05, help="Learning rate of SGD with momentum.")
@click.option("--seed", default=0, help="Seed of split, parameters and order of the digits.")
@click.option("--accuracy", default=0.96, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option("--shares", help="Share of each rank in a batch, such as 3,1; by default all have the same.")
@click.option("--accumulate", default=1, type=click.IntRange(1), help="Batches whose gradients make one update.")
@click.option("--timeout", default=60.0, type=click.FloatRange(1), help="Seconds until a silent rank is lost.")
@click.option("--checkpoint", default="build/samples/data_parallel.safetensors", help="Where to go on from.")
@click.option("--checkpoint-every", default=50, type=click.IntRange(1), help="Updates between two checkpoints.")
@click.option("--save", help="File for the parameters; the losses are in it.", show_default=False)
def main(
    epochs: int,
    batch_size: int,
    rate: float,
    seed: int,
    accuracy: float,
    shares: str | None,
    accumulate: int,
    timeout: float,
    checkpoint: str,
    checkpoint_every: int,
    save: str | None,
) -> None:
    """Train a digit classifier on as many ranks as torchrun started; exit 1 below the wanted accuracy."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    store, rank, world = next(rendezvous("env://"))
    # Where torchrun starts the ranks again, the store still has the addresses of those before.
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parts = [int(part) for part in shares.split(",")] if shares else [1] * world
    if len(parts) != world:
        raise click.BadParameter(f"--shares is {shares}; expected {world} whole numbers, one a rank")

    def tell(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    images, labels, chosen, left_out = digits(seed)
    path = pathlib.Path(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    losses: list[float] = []
    try:
        rows = chosen[:batch_size]
        step = step_of(images[rows], labels[rows], seed, rate, accumulate) if rank == 0 else None
        session = DataParallelSession(step, timeout=timeout)
        if session.any_rank(rank == 0 and path.exists()):
            losses = session.load(path)["losses"]
            tell(f"going on after {len(losses)} steps")
        per_epoch = -(-len(chosen) // batch_size)
        count, stop = epochs * per_epoch // accumulate * accumulate, False
        with running.stopping() as signals:
            while len(losses) < count and not stop:
                epoch, index = divmod(len(losses), per_epoch)
                rows = share_of(batches(chosen, batch_size, seed + epoch)[index], parts, rank)
                losses.append(session.step(images[rows], labels[rows]))
                if len(losses) % accumulate == 0:
                    stop = session.any_rank(bool(signals))
                    if stop or len(losses) % (checkpoint_every * accumulate) == 0:
                        session.save(path, extra={"losses": losses})
    except LostRankError as error:
        print(f"rank {rank} ends: {error}", file=sys.stderr, flush=True)
        # Connections that are broken must not be waited for.
        os._exit(LOST)
    if rank == 0 and not stop:
        path.unlink(missing_ok=True)
    right = float((session.evaluate(images[left_out]).argmax(1) == labels[left_out].numpy()).mean())
    if save is not None and not stop:
        session.save(save, extra={"losses": losses})
    dist.destroy_process_group()
    if stop:
        tell(f"stopped; {path} is written, run the same command again to go on")
        sys.exit(running.INTERRUPTED)
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    tell(f"{ranks} over gloo: {len(losses)} steps, loss {losses[-1]:.4f}, test accuracy {right:.2%}")
    tell(running.plot(losses))
    if right < accuracy:
        sys.exit(1)


if __name__ == "__main__":
    main()
