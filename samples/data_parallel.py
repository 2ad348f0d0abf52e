"""Train data-parallel: gradients by onnxruntime, summed by torch.distributed, updates by torch.optim.

Run it with

    torchrun --standalone --nproc-per-node 2 samples/data_parallel.py

on several machines as docs/distributed.md shows, or in one process with `python samples/data_parallel.py`. The data are
the 1797 handwritten digits (8 x 8 pixels) that scikit-learn ships. For each batch every rank

1. takes its share, which may be larger or smaller than others' or nothing at all (`--shares`), in as many pieces as
   `--accumulate` says, and runs the exported step (loss and gradients, no optimizer) in onnxruntime, which reads the
   parameters of the torch module and writes the gradients where torch has them: nothing is copied,
2. sums the gradients of all pieces of all ranks, each weighed by its digits, with `torch.distributed.all_reduce`, as
   one flat tensor for each type,
3. makes the same update as all others with `torch.optim`.

So the losses and parameters are those of one process with the whole batch, whatever the number of ranks. On the CPU the
ranks communicate by gloo. With `--device cuda` they use NCCL, each rank on the GPU of its number; this needs
onnxruntime-gpu and is not yet tried. Buffers that a step changes (batch normalisation's) would have to be averaged
likewise, or taken from one rank. The module here has none, and neither frozen nor tied parameters.

The first rank writes a checkpoint from time to time. Where a rank is lost, the others end, with exit status 3, as soon
as their connections to it are closed, or after `--timeout` seconds where they stay open. Ctrl-C ends all ranks after
the same step. The same command goes on from the checkpoint; so does torchrun by itself with `--max-restarts`.

The exit status is 1 below the wanted accuracy.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnxruntime
import running
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import gradfuse

Ints = npt.NDArray[np.int64]

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


class Lost(Exception):
    """Another rank does not answer any more."""


@contextlib.contextmanager
def noticing_loss() -> Iterator[None]:
    """Turn errors of communication, which gloo and NCCL have no common class for, into `Lost`."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(" ".join(str(error).split())) from error


class GradientStep:
    """Runs an exported step on the parameters of a torch module in place; gradients are in their `.grad`.

    Args:
        model: the serialized model of a `gradfuse.TrainingStep` without optimizer.
        module: the module that was exported, on its device.
    """

    def __init__(self, model: bytes, module: nn.Module) -> None:
        options = onnxruntime.SessionOptions()
        # The ranks of a machine share its cores.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options.intra_op_num_threads = max(1, len(os.sched_getaffinity(0)) // ranks_here)
        gradfuse.register(options)
        self._device = next(module.parameters()).device
        provider = "CUDAExecutionProvider" if self._device.type == "cuda" else "CPUExecutionProvider"
        index = {"device_id": self._device.index} if self._device.type == "cuda" else {}
        self._session = onnxruntime.InferenceSession(model, options, providers=[(provider, index)])
        self._binding = self._session.io_binding()

        by_type: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters():
            by_type.setdefault(parameter.dtype, []).append((name, parameter))
        self.buckets = []
        for dtype, members in by_type.items():
            bucket = torch.zeros(sum(parameter.numel() for _, parameter in members), dtype=dtype, device=self._device)
            self.buckets.append(bucket)
            start = 0
            for name, parameter in members:
                gradient = bucket[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
                parameter.grad = gradient
                self._bind("input", name, parameter)
                self._bind("output", f"{name}.grad", gradient)
        self._loss = torch.zeros((), device=self._device)
        self._bind("output", "loss", self._loss)

    def __call__(self, **batch: Tensor) -> Tensor:
        """Return the loss of a batch, shape (), after which the gradients are those of the batch."""
        for name, tensor in batch.items():
            self._bind("input", name, tensor.contiguous())
        if self._device.type == "cuda":
            # onnxruntime computes on a stream of its own; at the end of a run it waits for it by itself.
            torch.cuda.current_stream().synchronize()
        self._session.run_with_iobinding(self._binding)
        return self._loss

    def _bind(self, kind: str, name: str, tensor: Tensor) -> None:
        bind = self._binding.bind_input if kind == "input" else self._binding.bind_output
        dtype = torch.empty((), dtype=tensor.dtype).numpy().dtype
        bind(name, self._device.type, self._device.index or 0, dtype, tuple(tensor.shape), tensor.data_ptr())


def digits(seed: int) -> tuple[Tensor, Tensor, Ints, Ints]:
    """Images (N, 1, 8, 8), labels (N), and which of them are to train on and which to test."""
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


class Reducer:
    """Turns the gradients of pieces of a batch into those of the whole batch, on all ranks.

    Args:
        step: computes loss and gradients of a piece, as means over its rows.
        timeout: after how many seconds a rank that does not answer is lost.
    """

    def __init__(self, step: GradientStep, timeout: float) -> None:
        self._step = step
        self._sums = [torch.zeros_like(bucket) for bucket in step.buckets]
        # Rows, the sum of their losses, and the ranks that are asked to stop.
        self._totals = torch.zeros(3, dtype=torch.float64, device=step.buckets[0].device)
        # The default group has more patience, as all wait for the first rank to export.
        self._timeout = datetime.timedelta(seconds=timeout)

    def __call__(self, pieces: Sequence[tuple[Tensor, Tensor]], stop: bool) -> tuple[float, bool]:
        """Put the gradients of the batch where the step has those of a piece.

        Args:
            pieces: the images and labels of this rank. A loss that ignores labels or weighs classes would have to be
                weighed by these, not by its rows.
            stop: whether this rank is asked to stop.

        Returns:
            The loss of the whole batch, and whether all ranks are to stop.
        """
        for tensor in (self._totals, *self._sums):
            tensor.zero_()
        self._totals[2] = float(stop)
        for image, target in pieces:
            count = len(target)
            # The mean of nothing is NaN: who has no rows adds nothing.
            if count:
                loss = self._step(image=image, target=target)
                self._totals[:2] += torch.stack([torch.full_like(loss, count), count * loss])
                for total, bucket in zip(self._sums, self._step.buckets, strict=True):
                    total.add_(bucket, alpha=count)
        with noticing_loss():
            for tensor in (self._totals, *self._sums):
                dist.all_reduce(tensor, async_op=True).wait(self._timeout)
        rows, losses, stops = self._totals.tolist()
        for total, bucket in zip(self._sums, self._step.buckets, strict=True):
            torch.div(total, rows, out=bucket)
        return losses / rows, stops > 0


class Checkpoint:
    """A file of everything that training goes on from; the first rank has it."""

    def __init__(self, path: pathlib.Path, options: dict[str, Any]) -> None:
        self._path, self._options = path, options

    def read(self) -> dict[str, Any] | None:
        """What was written last, if anything was."""
        if not self._path.exists():
            return None
        content: dict[str, Any] = torch.load(self._path, weights_only=True)
        if content.pop("options") != self._options:
            raise click.ClickException(
                f"{self._path} is of a run with other options; delete the file, or choose another"
            )
        return content

    def write(self, **content: Any) -> None:
        """Write the file whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        with open(new, "wb") as file:
            torch.save(content | {"options": self._options}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def from_first_rank(
    module: nn.Module, images: Tensor, labels: Tensor, checkpoint: Checkpoint
) -> tuple[bytes, dict[str, Any] | None]:
    """The serialized step and the checkpoint; the first rank exports and reads them, and all get them."""
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            kept = checkpoint.read()
            shapes = ({0: "batch"}, {0: "batch"})
            step = gradfuse.export_training_step(module, F.cross_entropy, (images, labels), dynamic_shapes=shapes)
            content = [(step.model.SerializeToString(), kept)]
        except click.ClickException as error:
            content = [error]
    with noticing_loss():
        dist.broadcast_object_list(content)
    if isinstance(content[0], click.ClickException):
        raise content[0]
    found: tuple[bytes, dict[str, Any] | None] = content[0]
    return found


def train(
    module: nn.Module,
    data: tuple[Tensor, Tensor, Ints],
    checkpoint: Checkpoint,
    console: Console,
    shares: Sequence[int],
    **options: Any,
) -> list[float] | None:
    """Train on all ranks; return the loss of each step, or None if a signal has ended it before."""
    rank, place = dist.get_rank(), next(module.parameters()).device
    images, labels, chosen = data
    size = options["batch_size"]
    model, kept = from_first_rank(module, images[chosen[:size]], labels[chosen[:size]], checkpoint)
    optimizer = torch.optim.SGD(module.parameters(), lr=options["rate"], momentum=0.9)
    losses: list[float] = []
    if kept is not None:
        module.load_state_dict(kept["module"])
        optimizer.load_state_dict(kept["optimizer"])
        losses = kept["losses"]
        console.print(f"going on after {len(losses)} steps")
    reduce = Reducer(GradientStep(model, module), options["timeout"])
    # From here on all go in step, so that who does not answer in time is lost.
    with noticing_loss():
        dist.barrier()

    def save() -> None:
        if rank == 0:
            checkpoint.write(module=module.state_dict(), optimizer=optimizer.state_dict(), losses=losses)

    per_epoch = -(-len(chosen) // size)
    count, stop = options["epochs"] * per_epoch, False
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loss_column = TextColumn("{task.fields[loss]}")
    bar = Progress(*columns, loss_column, console=console, transient=True, disable=not console.is_terminal or rank != 0)
    with bar, running.stopping() as signals:
        task = bar.add_task("training", total=count, completed=len(losses), loss="")
        while len(losses) < count and not stop:
            epoch, step = divmod(len(losses), per_epoch)
            rows = share_of(batches(chosen, size, options["seed"] + epoch)[step], shares, rank)
            pieces = [(images[r].to(place), labels[r].to(place)) for r in np.array_split(rows, options["accumulate"])]
            loss, stop = reduce(pieces, bool(signals))
            optimizer.step()
            losses.append(loss)
            bar.update(task, advance=1, loss=f"loss {loss:.4f}")
            if stop or len(losses) % options["checkpoint_every"] == 0:
                save()
    return None if stop else losses


@click.command(context_settings={"show_default": True})
@click.option("--epochs", default=20, type=click.IntRange(1), help="Passes over the training digits.")
@click.option("--batch-size", default=64, type=click.IntRange(2), help="Digits in a step, of all ranks together.")
@click.option("--rate", default=0.05, help="Learning rate of SGD with momentum.")
@click.option("--seed", default=0, help="Seed of split, parameters and order of the digits.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Where each rank computes.")
@click.option("--accuracy", default=0.96, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option("--shares", help="Share of each rank in a batch, such as 3,1; by default all have the same.")
@click.option("--accumulate", default=1, type=click.IntRange(1), help="Pieces in which a rank computes its share.")
@click.option("--timeout", default=60.0, type=click.FloatRange(1), help="Seconds until a silent rank is lost.")
@click.option(
    "--checkpoint",
    default="build/samples/data_parallel.pt",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Where the first rank saves the state, and finds it again.",
)
@click.option("--checkpoint-every", default=50, type=click.IntRange(1), help="Steps between two checkpoints.")
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="File for parameters and losses, as torch.save writes it.",
    show_default=False,
)
def main(
    device: str,
    accuracy: float,
    shares: str | None,
    checkpoint: pathlib.Path,
    save: pathlib.Path | None,
    **options: Any,
) -> None:
    """Train a digit classifier on as many ranks as torchrun started; exit 1 below the wanted accuracy."""
    # Without torchrun this is the only rank.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    try:
        with noticing_loss():
            store, rank, world = next(rendezvous("env://"))
            # Where torchrun starts the ranks again, the store still has the addresses of those before.
            store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except Lost as error:
        raise click.ClickException(f"the ranks do not reach each other, see docs/distributed.md: {error}") from error
    parts = _checked_shares(shares, world)
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    seed = options["seed"]
    images, labels, chosen, left_out = digits(seed)
    torch.manual_seed(seed)  # the same parameters on every rank
    module = Classifier().to(place)
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, quiet=rank != 0)
    decisive = {name: options[name] for name in ("epochs", "batch_size", "rate", "seed")}
    file = Checkpoint(checkpoint, decisive)
    start = time.perf_counter()
    try:
        losses = train(module, (images, labels, chosen), file, console, parts, **options)
    except Lost as error:
        print(f"rank {rank} ends: another rank is lost or silent ({error})", file=sys.stderr, flush=True)
        # Connections that are broken must not be waited for.
        os._exit(LOST)
    if losses is None:
        console.print(f"stopped; {checkpoint} is written, run the same command again to go on")
        dist.destroy_process_group()
        sys.exit(running.INTERRUPTED)
    seconds = time.perf_counter() - start

    module.cpu()
    with torch.no_grad():
        right = (module(images[left_out]).argmax(1) == labels[left_out]).float().mean().item()
    if save is not None and rank == 0:
        torch.save({"losses": losses, "parameters": module.state_dict()}, save)
    console.print(
        f"{world} rank{'s' if world > 1 else ''} over {dist.get_backend()}: {len(losses)} steps in {seconds:.1f} s, "
        f"loss {losses[-1]:.4f}, test accuracy {right:.2%}"
    )
    console.print(running.plot(losses))
    if rank == 0:
        file.remove()
    dist.destroy_process_group()
    if right < accuracy:
        console.print(f"test accuracy is {right:.2%}; expected at least {accuracy:.0%}")
        sys.exit(1)


def _checked_shares(shares: str | None, world: int) -> list[int]:
    parts = shares.split(",") if shares else ["1"] * world
    if len(parts) != world or not all(part.isdecimal() for part in parts) or not any(map(int, parts)):
        raise click.BadParameter(f"--shares is {shares}; expected {world} whole numbers, one a rank, not all 0")
    return [int(part) for part in parts]


if __name__ == "__main__":
    main()
