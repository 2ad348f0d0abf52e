"""How long exports take: `make bench-export` puts the table into docs/export.md.

    python benchmarks/export_seconds.py [--page FILE]

A GPT of 2 and of 12 layers, with dynamic batch and length and AdamW. Beside the export of its training step, in
processes of their own: torch.onnx.export of its forward pass, and the first step of the module in torch.compile.
The seconds are those after `import torch, gradfuse`: what an optimizer and an export import besides counts.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from step_models import Block
from torch import Tensor, nn

import gradfuse

LAYERS = (2, 12)
VOCABULARY, WIDTH, LONGEST = 256, 64, 64
BEGIN, END = "<!-- seconds -->\n", "<!-- end of seconds -->"


class Gpt(nn.Module):
    """Blocks of attention and feed-forward layers, as in `step_models`, for texts of any length."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x, places[None, :] > places[:, None])
        return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.flatten())


def exported(module: Gpt, ids: Tensor, labels: Tensor) -> str:
    """Export the training step, and return the seconds of its parts."""
    begun = [("importing", time.perf_counter())]
    texts = {0: "batch", 1: "length"}
    gradfuse.export_training_step(
        module,
        loss,
        (ids, labels),
        torch.optim.AdamW(module.parameters()),
        dynamic_shapes=(texts, texts),
        # A long part tells its share as well.
        progress=lambda part, done, parts: begun.append((part.partition(", ")[0], time.perf_counter())),
    )
    spent: defaultdict[str, float] = defaultdict(float)
    for (part, since), (_, until) in itertools.pairwise(begun):
        spent[part] += until - since
    return "; ".join(f"{part} {seconds:.1f}" for part, seconds in spent.items() if seconds >= 0.05)


def translated(module: Gpt, ids: Tensor, labels: Tensor) -> str:
    """Export the forward pass alone by torch.onnx.export."""
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=LONGEST)}
    torch.onnx.export(module, (ids,), dynamo=True, dynamic_shapes=(dims,), verbose=False)
    return ""


def compiled(module: Gpt, ids: Tensor, labels: Tensor) -> str:
    """Run a step of the module in torch.compile, which compiles it."""
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    loss(torch.compile(module)(ids), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return ""


WAYS: dict[str, Callable[[Gpt, Tensor, Tensor], str]] = {
    "export_training_step": exported,
    "torch.onnx.export, forward pass alone": translated,
    "first step in torch.compile": compiled,
}


def measured(layers: int, way: str) -> str:
    """Return the seconds that one way takes in this process, and what it says."""
    torch.manual_seed(0)
    module, (ids, labels) = Gpt(layers), torch.randint(0, VOCABULARY, (2, 3, 8))
    begin = time.perf_counter()
    parts = WAYS[way](module, ids, labels)
    return f"{time.perf_counter() - begin:.1f} | {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measured(int(options.one[0]), options.one[1]))
        return
    # As pip compiles what it installs. Two folders are links, which are not followed.
    package = Path(gradfuse.__file__).parent
    for folder in (package, package / "custom_ops", package / "passes"):
        compileall.compile_dir(folder, quiet=1)
    table = "| layers | way | seconds | of these |\n|---:|---|---:|---|\n"
    print(table, end="")
    for layers in LAYERS:
        for way in WAYS:
            command = [sys.executable, __file__, "--one", str(layers), way]
            # What torch.compile kept of an earlier run would be all of its second.
            uncached = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            result = subprocess.run(command, env=uncached, check=False, capture_output=True, text=True)
            if result.returncode != 0:
                sys.exit(result.stderr)
            line = f"| {layers} | {way} | {result.stdout.strip().splitlines()[-1].strip()} |\n"
            print(line, end="", flush=True)
            table += line
    if options.page:
        before, begin, rest = options.page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        options.page.write_text(f"{before}{begin}{table}{end}{after}")


if __name__ == "__main__":
    main()
