"""Train two digit classifiers in stock onnxruntime from training steps that PyTorch exported and gradfuse fused.

Run it with `make demo`, or `python samples/digits.py --help`. The data are the 1797 handwritten digits (8 x 8 pixels)
that scikit-learn ships, so nothing is downloaded. For each model the sample

1. exports loss and gradients from PyTorch as one ONNX model,
2. fuses it and checks the fused model against the plain one,
3. compares the gradients of both with PyTorch's,
4. exports the whole step, with Adam in it, and trains with that in a `gradfuse.TrainingSession`,
5. times a step of both.

The exit status is 1 if a model stays below the wanted test accuracy.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import gradfuse

Arrays = dict[str, npt.NDArray[Any]]


class Cnn(nn.Module):
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


class RowAttention(nn.Module):
    """The eight rows of an image as tokens; each attends to the rows at most `reach` away, in four heads."""

    def __init__(self, width: int = 64, heads: int = 4, reach: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(8 * width, 10)
        row = torch.arange(8)
        self.register_buffer("far", ((row[:, None] - row[None, :]).abs() > reach).expand(1, 1, 8, 8).clone())

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image.squeeze(1)) + self.position
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(self.get_buffer("far"), float("-inf")).softmax(-1)
        x = x + self.mix((weights @ v).transpose(1, 2).flatten(2))
        logits: Tensor = self.head((x + self.feed(x)).flatten(1))
        return logits


@dataclasses.dataclass(frozen=True)
class Digits:
    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Four fifths for training, one fifth for the test, with each digit's share alike; pixels in [0, 1]."""
        data = load_digits()
        images = (data.images[:, None] / 16).astype(np.float32)
        labels = data.target.astype(np.int64)
        parts = train_test_split(images, labels, test_size=0.2, random_state=seed, stratify=labels)
        return cls(parts[0], parts[2], parts[1], parts[3])


def session_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    # Idle threads of one session must not take the cores from the other while the two are timed alternately.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    gradfuse.register(options)
    return options


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )


def run(step: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    names = [output.name for output in step.get_outputs()]
    return dict(zip(names, step.run(names, feeds), strict=True))


def torch_gradients(module: nn.Module, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> Arrays:
    names, parameters = zip(*module.named_parameters(), strict=True)
    loss = F.cross_entropy(module(torch.from_numpy(images)), torch.from_numpy(labels))
    gradients = torch.autograd.grad(loss, parameters)
    return {f"{name}.grad": gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}


def largest_difference(one: Arrays, other: Arrays) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one if name.endswith(".grad"))


def train(trainer: gradfuse.TrainingSession, data: Digits, progress: Progress, **options: Any) -> float:
    """Train for some epochs; return the mean loss of the last."""
    epochs, batch_size, generator = options["epochs"], options["batch_size"], np.random.default_rng(options["seed"])
    task = progress.add_task("training", total=epochs, loss="")
    mean_loss = float("nan")
    for _ in range(epochs):
        order = generator.permutation(len(data.train_labels))
        batches = np.split(order, range(batch_size, len(order), batch_size))
        mean_loss = statistics.fmean(trainer.step(data.train_images[rows], data.train_labels[rows]) for rows in batches)
        progress.update(task, advance=1, loss=f"loss {mean_loss:.4f}")
    return mean_loss


def median_times(
    steps: tuple[onnxruntime.InferenceSession, onnxruntime.InferenceSession], feeds: Arrays, rounds: int
) -> list[float]:
    """Median milliseconds of a step of two sessions, run alternately, so that both see the same machine."""
    for _ in range(min(rounds, 10)):
        for step in steps:
            step.run(None, feeds)
    times: tuple[list[float], list[float]] = [], []
    for turn in range(rounds):
        # Whichever comes second finds the caches as the first left them.
        for index in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            steps[index].run(None, feeds)
            times[index].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def new_table(console: Console, title: str, first: str) -> Table:
    style = box.SIMPLE_HEAD if console.is_terminal else box.ASCII2
    return Table(first, title=title, title_justify="left", box=style)


def operator_table(console: Console, report: Any) -> Table:
    table = new_table(console, "nodes before and after fusion", "operator")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name in sorted({*report.before, *report.after}):
        before, after = report.before.get(name, 0), report.after.get(name, 0)
        if before != after:
            table.add_row(name, str(before), str(after))
    table.add_section()
    table.add_row("all", str(sum(report.before.values())), str(sum(report.after.values())))
    return table


def demonstrate(
    name: str, module: nn.Module, data: Digits, folder: pathlib.Path, console: Console, **options: Any
) -> bool:
    """Do the five steps for one module; return whether it reached the wanted accuracy."""
    console.print(f"[bold]{name}[/]\n")
    size = options["batch_size"]
    images, labels = data.train_images[:size], data.train_labels[:size]
    batch, shapes = (torch.from_numpy(images), torch.from_numpy(labels)), ({0: "batch"}, {0: "batch"})
    start = time.perf_counter()
    step = gradfuse.export_training_step(module, F.cross_entropy, batch, dynamic_shapes=shapes, fuse=False)
    exported = time.perf_counter()
    fused = gradfuse.fuse(step.model)
    console.print(
        f"exported {sum(array.size for array in step.parameters.values())} parameters in {exported - start:.1f} s, "
        f"fused in {time.perf_counter() - exported:.1f} s"
    )
    for fusion in fused.report.fusions:
        console.print(f"  {fusion.op} replaces {len(fusion.replaced)} nodes", highlight=False)
    console.print(operator_table(console, fused.report))
    stem = folder / f"digits_{type(module).__name__.lower()}"
    plain_file, fused_file = f"{stem}_plain.onnx", f"{stem}_fused.onnx"
    step.save(plain_file)
    dataclasses.replace(step, model=fused.model).save(fused_file)
    # The saved files hold the parameters, so that only the batch is random.
    check = gradfuse.check(plain_file, fused_file)
    verdict = "the same outputs" if check.ok else "[red]OTHER OUTPUTS[/]"
    console.print(f"fused and plain file on {check.runs} random batches: {verdict}")
    plain_session, fused_session = session(step.model), session(fused.model)
    feeds = step.parameters | {"image": images, "target": labels}
    plain_results, fused_results = run(plain_session, feeds), run(fused_session, feeds)
    reference = torch_gradients(module, images, labels)
    largest = max(float(np.abs(gradient).max()) for gradient in reference.values())
    table = new_table(console, f"largest difference of a gradient (largest gradient: {largest:.2e})", "compared")
    table.add_column("difference", justify="right")
    table.add_row("plain and torch", f"{largest_difference(reference, plain_results):.1e}")
    table.add_row("fused and torch", f"{largest_difference(reference, fused_results):.1e}")
    table.add_row("fused and plain", f"{largest_difference(plain_results, fused_results):.1e}")
    console.print(table)

    optimizer = torch.optim.Adam(module.parameters(), lr=options["rate"])
    whole = gradfuse.export_training_step(module, F.cross_entropy, batch, optimizer, dynamic_shapes=shapes)
    whole.save(f"{stem}_adam.onnx")
    trainer = gradfuse.TrainingSession(whole, session_options=session_options())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[loss]}"), console=console, disable=not console.is_terminal
    ) as progress:
        start = time.perf_counter()
        loss = train(trainer, data, progress, **options)
        taken = time.perf_counter() - start
    reached = float((trainer.evaluate(data.test_images).argmax(1) == data.test_labels).mean())
    console.print(
        f"trained {options['epochs']} epochs in {taken:.1f} s, loss {loss:.4f}, "
        f"test accuracy [bold]{reached:.2%}[/] of {len(data.test_labels)} digits"
    )
    plain_time, fused_time = median_times((plain_session, fused_session), feeds, options["rounds"])
    console.print(
        f"one step of {size} digits, median of {options['rounds']}: plain {plain_time:.3f} ms, "
        f"fused {fused_time:.3f} ms ({plain_time / fused_time:.2f} x)\n"
    )
    if reached < options["accuracy"]:
        console.print(f"[red]{name}: test accuracy is {reached:.2%}; expected at least {options['accuracy']:.0%}[/]")
    return check.ok and reached >= options["accuracy"]


@click.command(context_settings={"show_default": True})
@click.option("--model", default="both", type=click.Choice(["cnn", "attention", "both"]), help="Which to train.")
@click.option("--epochs", default=30, type=click.IntRange(1), help="Passes over the training digits.")
@click.option("--batch-size", default=64, type=click.IntRange(2, 1437), help="Digits in a step.")
@click.option("--rate", default=2e-3, help="Learning rate of Adam.")
@click.option("--seed", default=0, help="Seed of split, parameters and order of the digits.")
@click.option("--rounds", default=200, type=click.IntRange(1), help="Timed steps of each model.")
@click.option("--accuracy", default=0.97, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    help="Folder for the ONNX models.",
    show_default=False,
)
def main(**options: Any) -> None:
    """Export, fuse, check and train two digit classifiers; exit 1 below the wanted accuracy."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    data = Digits.load(options["seed"])
    console.print(
        f"gradfuse {gradfuse.__version__}, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}; "
        f"{len(data.train_labels)} digits to train on, {len(data.test_labels)} to test",
        highlight=False,
    )
    torch.manual_seed(options["seed"])
    models: dict[str, tuple[str, nn.Module]] = {
        "cnn": ("convolutions", Cnn()),
        "attention": ("masked attention over rows", RowAttention()),
    }
    chosen = [models[key] for key in models if options["model"] in (key, "both")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options["save"] or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        reached = [demonstrate(name, module, data, folder, console, **options) for name, module in chosen]
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
