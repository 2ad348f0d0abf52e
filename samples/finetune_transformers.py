"""Train a model of Hugging Face transformers in stock onnxruntime, as `transformers.Trainer` would.

A ViT learns the handwritten digits that scikit-learn ships. There is a DataLoader, a schedule of transformers, an
evaluation after each epoch, a bar, and a checkpoint on Ctrl-C from which the same command goes on. At the end the
weights are in a folder for `from_pretrained`. To train a model of yours, replace `model` by its `from_pretrained`.

The exit status is 1 if the accuracy is below the wanted one.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import click
import running
import torch
import transformers
from rich.console import Console
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import gradfuse


def batches(loader: DataLoader[Any], start: int) -> Iterator[Any]:
    """The batches of all epochs from a step on, in an order that follows from the epoch's number."""
    epoch, skipped = divmod(start, len(loader))
    while True:
        loader.generator.manual_seed(epoch)
        yield from itertools.islice(loader, skipped, None)
        epoch, skipped = epoch + 1, 0


@click.command(context_settings={"show_default": True})
@click.option("--epochs", default=8, type=click.IntRange(1), help="Passes over the training digits.")
@click.option("--rate", default=3e-3, help="The largest learning rate of AdamW.")
@click.option("--accuracy", default=0.9, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
@click.option("--folder", default="build/samples/vit", type=click.Path(file_okay=False, path_type=pathlib.Path))
def main(epochs: int, rate: float, accuracy: float, folder: pathlib.Path) -> None:
    """Train a ViT on digits; exit 1 below the wanted accuracy."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    digits, generator = load_digits(), torch.Generator().manual_seed(0)
    pictures = torch.from_numpy(digits.images[:, None]).float() / 16
    parts = random_split(TensorDataset(pictures, torch.from_numpy(digits.target)), [0.8, 0.2], generator)
    training, test = DataLoader(parts[0], 32, shuffle=True, generator=generator), DataLoader(parts[1], 128)

    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    widths = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **widths)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    with console.status("exporting"):
        step = gradfuse.export_training_step(
            model,
            lambda output, labels: torch.nn.functional.cross_entropy(output.logits, labels),
            next(batches(training, 0)),
            optimizer,
            dynamic_shapes=({0: "batch"}, {0: "batch"}),
            max_grad_norm=1.0,
        )
    session = gradfuse.TrainingSession(step)

    count = epochs * len(training)
    (share,) = transformers.get_scheduler("cosine", optimizer, count // 10, count).lr_lambdas
    options = {"epochs": epochs, "rate": rate}
    run = running.Training(session, count, console, folder / "checkpoint.safetensors", options)

    def measured() -> float:
        return sum(int((session.evaluate(x).argmax(1) == y.numpy()).sum()) for x, y in test) / len(parts[1])

    for index, (images, labels) in zip(run, batches(training, session.step_count), strict=False):
        session.learning_rate = rate * share(index)
        run.losses.append(session.step(images, labels))
        if (index + 1) % len(training) == 0:
            epoch = (index + 1) // len(training)
            console.print(f"epoch {epoch}: loss {run.losses[-1]:.4f}, test accuracy {measured():.2%}")
    run.forget()
    console.print(running.plot(run.losses), markup=False)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in session.state_dict().items()})
    model.save_pretrained(folder)
    reached = measured()
    console.print(f"{folder} is written, test accuracy {reached:.2%}")
    if reached < accuracy:
        console.print(f"test accuracy is {reached:.2%}; expected at least {accuracy:.0%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
