"""What TrainingSession saves: steps with tensors bound to the session, beside steps that pass numpy arrays.

Multilayer perceptrons of several sizes, exported with AdamW, take the same steps in both ways, in turns. The naive way
is `InferenceSession.run`, whose outputs are the inputs of the next call. The batch is small, so that the update, and
what is copied with it, is a large part of the step.

    python benchmarks/training_session.py [--threads N] [--out FILE.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn

import gradfuse
from gradfuse.training.step import UPDATED_SUFFIX

WIDTHS = {64: 2000, 512: 300, 2048: 40}
"""Width of the layers -> timed steps."""
BATCH, CLASSES, WARM_UP = 16, 10, 5


@dataclass
class Row:
    width: int
    state_mib: float
    naive_ms: float
    bound_ms: float
    ratio: tuple[float, float, float]
    """Naive time by bound time: lower quartile, median and upper quartile of the rounds."""


class Naive:
    """The same step with numpy arrays."""

    def __init__(self, step: gradfuse.TrainingStep, options: Any) -> None:
        self.session = onnxruntime.InferenceSession(
            step.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.feeds = step.initial_values

    def step(self, x: Any, y: Any) -> float:
        results = dict(zip(self.outputs, self.session.run(None, {**self.feeds, "input": x, "target": y}), strict=True))
        for name, array in results.items():
            if name.endswith(UPDATED_SUFFIX):
                self.feeds[name.removesuffix(UPDATED_SUFFIX)] = array
        return float(results["loss"])


def session_options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Idle threads of one session must not take the cores from the other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    gradfuse.register(options)
    return options


def measure(width: int, steps: int, threads: int) -> Row:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )
    x, y = torch.randn(BATCH, width), torch.randint(0, CLASSES, (BATCH,))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    step = gradfuse.export_training_step(module, F.cross_entropy, (x, y), optimizer, evaluation=False)
    bound = gradfuse.TrainingSession(step, session_options=session_options(threads))
    naive = Naive(step, session_options(threads))
    batch = x.numpy(), y.numpy()
    for _ in range(WARM_UP):
        if bound.step(*batch) != naive.step(*batch):
            raise SystemExit(f"width {width}: the two ways give different losses")
    times: tuple[list[float], list[float]] = [], []
    for turn in range(steps):
        # Whichever comes second finds the caches as the first left them.
        for index in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (naive, bound)[index].step(*batch)
            times[index].append(1e3 * (time.perf_counter() - start))
    ratios = np.array(times[0]) / np.array(times[1])
    low, middle, high = (float(np.quantile(ratios, q)) for q in (0.25, 0.5, 0.75))
    state = sum(array.nbytes for array in (*step.parameters.values(), *step.optimizer_state.values()))
    return Row(width, state / 2**20, statistics.median(times[0]), statistics.median(times[1]), (low, middle, high))


def table(rows: list[Row], threads: int) -> str:
    lines = [
        f"onnxruntime {onnxruntime.__version__}, {threads} threads of {platform.machine()} with {os.cpu_count()} CPUs; "
        f"batches of {BATCH}, AdamW; medians, and the quartiles of the ratio of each round.",
        "",
        "| width | parameters and state | numpy arrays | TrainingSession | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, middle, high = row.ratio
        lines.append(
            f"| {row.width} | {row.state_mib:.3g} MiB | {row.naive_ms:.3g} ms | {row.bound_ms:.3g} ms "
            f"| **{middle:.2f}** ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of each session")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table here too")
    arguments = parser.parse_args()
    text = table([measure(width, steps, arguments.threads) for width, steps in WIDTHS.items()], arguments.threads)
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
