"""Train data-parallel: gradients by onnxruntime, summed by torch.distributed, updates by torch.optim.

Run it with

    torchrun --standalone --nproc-per-node 2 samples/data_parallel.py

on several machines with torchrun's options for these, or in one process with `python samples/data_parallel.py`. The
data are the 1797 handwritten digits (8 x 8 pixels) that scikit-learn ships. For each batch every rank

1. takes its share, and runs the exported step (loss and gradients, no optimizer) in onnxruntime, which reads the
   parameters of the torch module and writes the gradients where torch has them: nothing is copied,
2. sums the gradients of all ranks with `torch.distributed.all_reduce`, as one flat tensor for each type,
3. makes the same update as all others with `torch.optim`.

So the losses and parameters are those of one process with the whole batch, whatever the number of ranks. On the CPU the
ranks communicate by gloo. With `--device cuda` they use NCCL, each rank on the GPU of its number; this needs
onnxruntime-gpu and is not yet tried. Buffers that a step changes (batch normalisation's) would have to be averaged
likewise, or taken from one rank. The module here has none, and neither frozen nor tied parameters.

The exit status is 1 below the wanted accuracy.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Iterator

import click
import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import gradfuse

Ints = npt.NDArray[np.int64]


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


class GradientStep:
    """Runs an exported step on the parameters of a torch module in place; gradients are in their `.grad`.

    Args:
        model: the serialized model of a `gradfuse.TrainingStep` without optimizer.
        module: the module that was exported, on its device.
    """

    def __init__(self, model: bytes, module: nn.Module) -> None:
        options = onnxruntime.SessionOptions()
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


def batches(chosen: Ints, batch_size: int, seed: int) -> Iterator[Ints]:
    """The rows of each step of an epoch, whole batches only."""
    order = np.random.default_rng(seed).permutation(chosen)
    yield from np.split(order[: len(order) // batch_size * batch_size], len(order) // batch_size)


def exported(module: nn.Module, images: Tensor, labels: Tensor) -> bytes:
    """The serialized step, exported by the first rank and sent to all."""
    content = [b""]
    if dist.get_rank() == 0:
        shapes = ({0: "batch"}, {0: "batch"})
        step = gradfuse.export_training_step(module, F.cross_entropy, (images, labels), dynamic_shapes=shapes)
        content = [step.model.SerializeToString()]
    dist.broadcast_object_list(content)
    return content[0]


@click.command(context_settings={"show_default": True})
@click.option("--epochs", default=20, type=click.IntRange(1), help="Passes over the training digits.")
@click.option("--batch-size", default=64, type=click.IntRange(2), help="Digits in a step, of all ranks together.")
@click.option("--rate", default=0.05, help="Learning rate of SGD with momentum.")
@click.option("--seed", default=0, help="Seed of split, parameters and order of the digits.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Where each rank computes.")
@click.option("--accuracy", default=0.96, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="File for parameters and losses, as torch.save writes it.",
    show_default=False,
)
def main(
    epochs: int, batch_size: int, rate: float, seed: int, device: str, accuracy: float, save: pathlib.Path | None
) -> None:
    """Train a digit classifier on as many ranks as torchrun started; exit 1 below the wanted accuracy."""
    # Without torchrun this is the only rank.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if batch_size % world:
        raise click.BadParameter(f"{batch_size} digits do not make equal shares for {world} ranks")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")

    if device == "cuda":
        torch.cuda.set_device(place)
    images, labels, chosen, left_out = digits(seed)
    torch.manual_seed(seed)  # the same parameters on every rank
    module = Classifier()
    model = exported(module, images[chosen[:batch_size]], labels[chosen[:batch_size]])
    step = GradientStep(model, module.to(place))
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)

    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, quiet=rank != 0)
    start, losses = time.perf_counter(), []
    for epoch in track(range(epochs), "training", console=console, disable=rank != 0 or not console.is_terminal):
        for whole in batches(chosen, batch_size, seed + epoch):
            rows = whole[rank::world]
            loss = step(image=images[rows].to(place), target=labels[rows].to(place))
            # The loss is a mean over the batch, and the shares are equal.
            for tensor in (loss, *step.buckets):
                dist.all_reduce(tensor)
                tensor /= world
            optimizer.step()
            losses.append(loss.item())
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
    dist.destroy_process_group()
    if right < accuracy:
        console.print(f"test accuracy is {right:.2%}; expected at least {accuracy:.0%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
