"""Train a mixture of experts, whose bias gradients gradfuse fuses, in stock onnxruntime.

Run it with `python samples/moe.py`. The data are the 1797 handwritten digits (8 x 8 pixels) that scikit-learn ships.
The layer sends each token to its best expert. Tokens are sorted by expert, so those of one expert are a group of rows,
and each group gets the bias of its expert. The gradient of that bias, a sum over each group, is the operator
GroupedBiasAddGrad. The sample

1. exports the training step with AdamW in it, and prints what was fused,
2. trains in onnxruntime, with a second loss that keeps the experts evenly loaded,
3. prints the accuracy, and how many tokens each expert gets.

The exit status is 1 below the wanted accuracy, or if the gradient of the grouped bias is not fused.
"""

from __future__ import annotations

import sys
import time

import click
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import gradfuse


class Experts(nn.Module):
    """Rows (R, width), each through one of several linear layers: the one that a router prefers (Switch).

    Returns the rows (R, width), the router's probabilities (R, experts), and each row's expert (R).
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.weight = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(count, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        chance, chosen = chances.max(-1)
        order = chosen.argsort(stable=True)
        ends = F.one_hot(chosen, chances.shape[1]).sum(0).cumsum(0)
        expert = torch.bucketize(torch.arange(x.shape[0], device=x.device), ends, right=True)
        grouped = torch.bmm(x[order].unsqueeze(1), self.weight[expert]).squeeze(1) + self.bias[expert]
        back = torch.zeros_like(x).index_add(0, order, F.gelu(grouped))
        return chance.unsqueeze(1) * back, chances, chosen


class Classifier(nn.Module):
    """The four quarters of an image as tokens, through experts: logits (N, 10), probabilities and experts of all
    tokens."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.position = nn.Parameter(0.02 * torch.randn(4, width))
        self.norm = nn.LayerNorm(width)
        self.experts = Experts(width, experts)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quarters = image.view(-1, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(-1, 4, 16)
        tokens = self.embed(quarters) + self.position
        mixed, chances, chosen = self.experts(self.norm(tokens).flatten(0, 1))
        return self.head((tokens + mixed.view_as(tokens)).flatten(1)), chances, chosen


def balanced_loss(output: tuple[Tensor, Tensor, Tensor], label: Tensor) -> Tensor:
    """Cross entropy, and the balance loss of Switch Transformers (Fedus et al. 2021, equation 4) times 0.1."""
    logits, chances, chosen = output
    experts = chances.shape[1]
    share = F.one_hot(chosen, experts).to(chances.dtype).mean(0)
    return F.cross_entropy(logits, label) + 0.1 * experts * (share * chances.mean(0)).sum()


@click.command(context_settings={"show_default": True})
@click.option("--epochs", default=20, type=click.IntRange(1), help="Passes over the training digits.")
@click.option("--batch-size", default=64, type=click.IntRange(2, 1437), help="Digits in a step.")
@click.option("--width", default=64, type=click.IntRange(1), help="Width of the tokens.")
@click.option("--experts", default=8, type=click.IntRange(2), help="Number of experts.")
@click.option("--rate", default=3e-3, help="Learning rate of AdamW.")
@click.option("--seed", default=0, help="Seed of split, parameters and order of the digits.")
@click.option("--accuracy", default=0.95, type=click.FloatRange(0, 1), help="Wanted test accuracy.")
def main(epochs: int, batch_size: int, width: int, experts: int, rate: float, seed: int, accuracy: float) -> None:
    """Train a mixture of experts on digits; exit 1 below the wanted accuracy."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    data = load_digits()
    images, labels = (data.images / 16).astype(np.float32), data.target.astype(np.int64)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=labels
    )

    torch.manual_seed(seed)
    module = Classifier(width, experts)
    start = time.perf_counter()
    with console.status("exporting"):
        step = gradfuse.export_training_step(
            module,
            balanced_loss,
            (torch.from_numpy(images[:batch_size]), torch.from_numpy(labels[:batch_size])),
            torch.optim.AdamW(module.parameters(), lr=rate),
            dynamic_shapes=({0: "batch"}, {0: "batch"}),
        )
    console.print(f"exported in {time.perf_counter() - start:.1f} s")
    console.print(str(step.report))

    session = gradfuse.TrainingSession(step)
    generator = np.random.default_rng(seed)
    start, losses = time.perf_counter(), [float("nan")]
    for _ in track(range(epochs), "training", console=console, disable=not console.is_terminal):
        order = generator.permutation(len(labels))
        batches = [order[index : index + batch_size] for index in range(0, len(order), batch_size)]
        losses = [session.step(images[rows], labels[rows]) for rows in batches]
    console.print(f"trained {epochs} epochs in {time.perf_counter() - start:.1f} s, loss {np.mean(losses):.4f}")

    logits, _, chosen = session.evaluate(test_images)
    reached = float((logits.argmax(1) == test_labels).mean())
    counts = np.bincount(chosen, minlength=experts)
    console.print(f"tokens of each expert, of {counts.sum()}: {', '.join(map(str, counts))}")
    console.print(f"test accuracy {reached:.2%} of {len(test_labels)} digits")
    if not any(node.op_type == "GroupedBiasAddGrad" for node in step.model.graph.node):
        console.print("the gradient of the grouped bias is not fused")
        sys.exit(1)
    if reached < accuracy:
        console.print(f"test accuracy is {reached:.2%}; expected at least {accuracy:.0%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
