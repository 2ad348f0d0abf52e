"""Measures what one pass over memory for chains of elementwise nodes gains in whole training steps.

    python benchmarks/pointwise.py [--only NAME] [--threads N] [--out FILE]

Each step is exported with AdamW, and compared with itself after the nodes of every `Pointwise` are put back. Both are
run by `gradfuse.TrainingSession` with the library, in turns with PyTorch.

Prints a table in Markdown, and writes it where --out says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import torch
import torch.nn.functional as F
from ops import environment
from step import as_arrays
from step_models import MODELS, OPTIMIZERS, Model, Tensors
from torch import Tensor, nn

import gradfuse
from gradfuse.custom_ops import functions
from gradfuse.models.conversion import inline_functions
from gradfuse.models.tensors import to_mapped_proto

ROUNDS = 20


class Rotary(nn.Module):
    """A block as of Llama: root mean square norms, rotary embeddings and a feed-forward layer with SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, hidden = heads, 8 * width // 3 // 32 * 32
        self.norm, self.second_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (one * cosine + torch.cat(one.chunk(2, -1)[::-1], -1) * sine for one in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """2 layers of width 512 and a vocabulary of 4,000, for 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 512)
        self.blocks = nn.ModuleList(Rotary(512, 8) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(512, eps=1e-5), nn.Linear(512, 4000, bias=False)
        angles = torch.arange(128)[:, None] / 10000 ** (torch.arange(32) / 32)
        self.register_buffer("cosine", torch.cat([angles.cos(), angles.cos()], -1))
        self.register_buffer("sine", torch.cat([-angles.sin(), angles.sin()], -1))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """2 layers of width 512 as of BERT, with dropout of 0.1, and 4,000 classes, for 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1, F.gelu, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(512, 4000)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words))).flatten(0, 1)  # type: ignore[no-any-return]


def words(count: int) -> tuple[Tensors, Tensors]:
    """Random words, and the next ones."""
    drawn = torch.randint(4000, (count, 129), generator=torch.Generator().manual_seed(0))
    return (drawn[:, :-1].contiguous(),), (drawn[:, 1:].flatten(),)


STEPS_OF = {
    "gpt": (MODELS["gpt"], 4),
    "encoder": (Model("encoder with dropout, 2 layers of 512, 128 tokens", Encoder, F.cross_entropy, words, ()), 4),
    "llama": (Model("Llama, 2 layers of 512, 128 tokens", Llama, F.cross_entropy, words, ()), 4),
    "resnet20": (MODELS["resnet20"], 32),
    "resnet18": (MODELS["resnet18"], 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--only", choices=STEPS_OF)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    of = environment()
    versions = f"onnxruntime {of['onnxruntime']}, PyTorch {of['torch']}"
    lines = [f"{of['cpu']}, {options.threads} threads, {versions}.", ""]
    lines += ["| step | batch | chains, of nodes | nodes, ms | chains, ms | gain | PyTorch, ms |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name, (model, size) in STEPS_OF.items():
        if options.only in (None, name):
            lines.append(row(model, size, options.threads))
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def row(model: Model, size: int, threads: int) -> str:
    """The times of a step, as a row of the table."""
    torch.manual_seed(0)
    module, batch = model.module(), model.batch(size)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    step = gradfuse.export_training_step(module, model.loss, batch, optimizer=optimizer, verify="quick")
    assert step.report is not None
    chains = [fusion for fusion in step.report.fusions if fusion.op == "Pointwise"]
    arrays = as_arrays(batch)
    inputs, targets = batch

    def eager() -> None:
        optimizer.zero_grad()
        model.loss(module(*inputs), *targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    ways = [stepper(plain(step), arrays, threads), stepper(step, arrays, threads), eager]
    seconds = timed(ways)
    ratios = [one / other for one, other in zip(seconds[0], seconds[1], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    times = [f"{1e3 * statistics.median(one):.1f}" for one in seconds]
    replaced = sum(len(fusion.replaced) for fusion in chains)
    gain = f"{middle:.3f} ({low:.3f} to {high:.3f})"
    return f"| {model.title} | {size} | {len(chains)} of {replaced} | {times[0]} | {times[1]} | {gain} | {times[2]} |"


def plain(step: gradfuse.TrainingStep) -> gradfuse.TrainingStep:
    """The step with the nodes of its chains in their place."""
    model: ir.Model = ir.from_proto(step.model)
    inline_functions(model, lambda function: function.name == "Pointwise")
    functions.attach(model)
    return dataclasses.replace(step, model=to_mapped_proto(model))


def stepper(step: gradfuse.TrainingStep, arrays: Any, threads: int) -> Callable[[], object]:
    """Runs one step in a session of its own."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait for work would take the time of whoever is next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    gradfuse.register(options)
    session = gradfuse.TrainingSession(step, session_options=options)
    return lambda: session.step(*arrays)


def timed(ways: list[Callable[[], object]]) -> list[list[float]]:
    """Seconds of each way in each round; they take turns."""
    seconds: list[list[float]] = [[] for _ in ways]
    for round_ in range(ROUNDS + 2):
        pairs = list(zip(ways, seconds, strict=True))
        for way, found in pairs if round_ % 2 else pairs[::-1]:
            begin = time.perf_counter()
            way()
            if round_ > 1:
                found.append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    main()
