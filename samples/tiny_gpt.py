"""Train a tiny GPT, letter by letter, in stock onnxruntime, and let it write.

Run it with `python samples/tiny_gpt.py`. The text is the reference of the Python language that the standard library
ships as `pydoc_data.topics`, so nothing is downloaded. The sample

1. exports the whole training step from PyTorch: loss, gradients (the attention's and the cross entropy's fused),
   clipping and the update of AdamW,
2. trains in onnxruntime with a learning rate that rises and falls,
3. measures the perplexity of text that was left out, before and after, and lets the model continue a text, both by
   `TrainingSession.evaluate`.

Ctrl-C ends it with a checkpoint, from which the same command goes on. The exit status is 1 if the perplexity is above
the wanted one.
"""

from __future__ import annotations

import collections
import math
import pathlib
import pydoc_data.topics
import sys
import time

import click
import numpy as np
import numpy.typing as npt
import running
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import gradfuse

Ints = npt.NDArray[np.int64]

LETTERS = "\n" + "".join(map(chr, range(32, 127)))


def letters_of(text: str) -> Ints:
    """The index of each letter in LETTERS, without letters that are not in it."""
    return np.array([LETTERS.index(letter) for letter in text if letter in LETTERS], dtype=np.int64)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        x = x + self.feed(x)
        return x


class Gpt(nn.Module):
    """Letters (N, T) -> logits of the next letters (N, T, len(LETTERS)); embedding and output share their weight."""

    def __init__(self, width: int, heads: int, blocks: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(LETTERS), bias=False)
        self.head.weight = self.embed.weight
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, letters: Tensor) -> Tensor:
        length = letters.shape[1]
        x = self.embed(letters) + self.positions(torch.arange(length, device=letters.device))
        future = torch.ones(length, length, dtype=torch.bool, device=letters.device).triu(1)
        for block in self.blocks:
            x = block(x, future)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_letter_loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def parameter_groups(module: nn.Module, decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only, as is usual for GPTs."""
    parameters = list(module.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def windows(text: Ints, starts: Ints, context: int) -> tuple[Ints, Ints]:
    """Pieces (N, T) of the text, and the letters that follow."""
    places = starts[:, None] + np.arange(context)
    return text[places], text[places + 1]


def perplexity(session: gradfuse.TrainingSession, text: Ints, context: int, count: int) -> float:
    """The perplexity of each letter of `count` pieces of a text."""
    starts = np.linspace(0, len(text) - context - 1, count, dtype=np.int64)
    letters, following = windows(text, starts, context)
    logits = session.evaluate(letters).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return math.exp(-np.take_along_axis(log_probs, following[..., None], -1).mean())


def write(session: gradfuse.TrainingSession, prompt: str, count: int, context: int, seed: int) -> str:
    """Continue the prompt, drawing each letter from the model's sharpened probabilities."""
    generator, letters = np.random.default_rng(seed), list(letters_of(prompt))
    for _ in range(count):
        logits = session.evaluate(np.array([letters[-context:]]))[0, -1].astype(np.float64) / 0.7
        chances = np.exp(logits - logits.max())
        letters.append(generator.choice(len(LETTERS), p=chances / chances.sum()))
    return "".join(LETTERS[letter] for letter in letters)


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=1000, type=click.IntRange(1), help="Steps of training.")
@click.option("--batch-size", default=16, type=click.IntRange(2), help="Pieces of text in a step.")
@click.option("--context", default=64, type=click.IntRange(2), help="Letters in a piece.")
@click.option("--width", default=64, type=click.IntRange(1), help="Width of the model, a multiple of the heads.")
@click.option("--heads", default=4, type=click.IntRange(1), help="Heads of attention.")
@click.option("--blocks", default=2, type=click.IntRange(1), help="Blocks of the model.")
@click.option("--rate", default=5e-3, help="The largest learning rate of AdamW.")
@click.option("--seed", default=0, help="Seed of everything that is drawn.")
@click.option("--letters", default=200, type=click.IntRange(0), help="Letters to write at the end.")
@click.option("--perplexity", "wanted", default=6.0, type=click.FloatRange(1), help="Wanted perplexity of a letter.")
@click.option(
    "--checkpoint",
    default="build/samples/tiny_gpt.safetensors",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="What Ctrl-C leaves, and where the same command goes on.",
)
def main(
    steps: int,
    batch_size: int,
    context: int,
    width: int,
    heads: int,
    blocks: int,
    rate: float,
    seed: int,
    letters: int,
    wanted: float,
    checkpoint: pathlib.Path,
) -> None:
    """Train a tiny GPT on Python's own documentation; exit 1 above the wanted perplexity."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    text = letters_of("\n\n".join(pydoc_data.topics.topics.values()))
    training, left_out = np.split(text, [len(text) * 9 // 10])
    console.print(f"{len(training)} letters to train on, {len(left_out)} left out")

    torch.manual_seed(seed)
    module = Gpt(width, heads, blocks, context)

    def batch(index: int) -> tuple[Ints, Ints]:
        generator = np.random.default_rng((seed, index))
        return windows(training, generator.integers(0, len(training) - context, batch_size), context)

    start = time.perf_counter()
    example = tuple(map(torch.from_numpy, batch(0)))
    axes = {0: "batch", 1: "length"}
    with console.status("exporting"):
        step = gradfuse.export_training_step(
            module,
            next_letter_loss,
            (example[0], example[1]),
            torch.optim.AdamW(parameter_groups(module, 0.1), lr=rate, betas=(0.9, 0.95)),
            dynamic_shapes=(axes, axes),
            max_grad_norm=1.0,
        )
    size = sum(array.size for array in step.parameters.values())
    console.print(f"exported {size} parameters in {time.perf_counter() - start:.1f} s")
    fused = collections.Counter(fusion.op for fusion in step.report.fusions) if step.report else {}
    for operator, count in sorted(fused.items()):
        console.print(f"  {operator}: {count} fused")

    session = gradfuse.TrainingSession(step)
    before = perplexity(session, left_out, context, 128)
    options = {"steps": steps, "batch": batch_size, "context": context, "rate": rate, "seed": seed}
    options |= {"width": width, "heads": heads, "blocks": blocks}
    run, rising = running.Training(session, steps, console, checkpoint, options), max(1, steps // 10)
    start = time.perf_counter()
    for index in run:
        falling = 0.5 + 0.5 * math.cos(math.pi * index / steps)
        session.learning_rate = rate * min(1.0, (index + 1) / rising) * falling
        run.losses.append(session.step(*batch(index)))
    console.print(f"trained {steps} steps in {time.perf_counter() - start:.1f} s, loss {run.losses[-1]:.4f}")
    console.print(running.plot(run.losses))
    run.forget()
    after = perplexity(session, left_out, context, 128)
    if letters:
        console.print("it writes:")
        for line in write(session, "The statement ", letters, context, seed).splitlines():
            console.print(f"  {line}")
    console.print(f"perplexity of a letter of the text left out: {before:.2f} before training, {after:.2f} after")
    if after > wanted:
        console.print(f"perplexity is {after:.2f}; expected at most {wanted:.2f}")
        sys.exit(1)


if __name__ == "__main__":
    main()
