"""Measures training steps in bfloat16 beside float32, and beside PyTorch under autocast: `make bench-narrow`.

    python benchmarks/narrow.py [--only MODEL] [--page FILE]

The models of `step.py`, measured in turns as there. Memory is by how many MiB a process grows at most. The table goes
into the page between its marks, or is printed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ops import environment
from step import Call, as_arrays, in_torch, in_turns, memory_of_step
from step_models import MODELS, OPTIMIZERS, Model

import gradfuse
from gradfuse.environment import info

BEGIN, END = "<!-- make bench-narrow -->\n", "<!-- end narrow -->\n"
SIZES = {"gpt": 4, "vit": 16, "mlp": 256, "resnet18": 8, "unet": 8}
"""The models, and the items of a batch."""
FARTHEST = 0.02
"""How far losses of the first steps may be from PyTorch's in float32, of their size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SIZES, action="append", help="one model; may be repeated")
    parser.add_argument("--page", type=Path, help="the page that the table goes into")
    options = parser.parse_args()
    lines = [
        "| step | batch | float32 | bfloat16 | ratio | PyTorch, float32 | PyTorch, autocast | memory: float32 "
        "| bfloat16 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in options.only or SIZES:
        lines.append(row(name, MODELS[name], SIZES[name]))
        print(lines[-1], flush=True)
    machine = environment()
    heading = (
        f"{machine['cpu']}, {machine['cores']} cores, {info()['library']['simd']}; "
        f"onnxruntime {machine['onnxruntime']}, PyTorch {machine['torch']}; milliseconds and MiB:\n\n"
    )
    table = heading + "\n".join(lines)
    if options.page is None:
        print(table)
        return
    before, begin, rest = options.page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{options.page} has no place for the table, from {BEGIN!r} to {END!r}")
    options.page.write_text(f"{before}{begin}\n{table}\n\n{end}{after}", encoding="utf-8")


def row(name: str, model: Model, size: int) -> str:
    """Measure a model's steps; return the line of the table."""
    torch.manual_seed(0)
    module, batch = model.module(), model.batch(size)
    arrays = as_arrays(batch)
    calls: dict[str, Call] = {}
    memory = {}
    for kind, autocast in (("float32", None), ("bfloat16", torch.bfloat16)):
        optimizer = OPTIMIZERS["adamw"](module.parameters())
        options: dict[str, Any] = {} if autocast is None else {"autocast": autocast}
        step = gradfuse.export_training_step(module, model.loss, batch, optimizer=optimizer, **options)
        memory[kind] = memory_of_step(step, arrays)
        calls[kind] = partial(gradfuse.TrainingSession(step).step, *arrays)
    for kind, narrow in (("torch", False), ("autocast", True)):
        calls[kind] = in_torch(model, copy.deepcopy(module), "adamw", batch, compiled=False, narrow=narrow)
    losses = {kind: [float(call()) for _ in range(3)] for kind, call in calls.items()}
    for kind, found in losses.items():
        if not np.allclose(found, losses["torch"], rtol=FARTHEST):
            sys.exit(f"{name}: the losses of {kind} are {found}; expected {losses['torch']}")
    seconds = in_turns(calls)
    times = {kind: 1e3 * statistics.median(found) for kind, found in seconds.items()}
    pairs = zip(seconds["bfloat16"], seconds["float32"], strict=True)
    ratio = statistics.median(narrow / wide for narrow, wide in pairs)
    cells = [model.title, str(size), f"{times['float32']:.3g}", f"{times['bfloat16']:.3g}", f"{ratio:.2f}"]
    cells += [f"{times[kind]:.3g}" for kind in ("torch", "autocast")]
    cells += [f"{memory[kind]:.0f}" for kind in ("float32", "bfloat16")]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
