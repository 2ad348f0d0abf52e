"""Training steps within memory budgets: predicted and measured memory, and time beside the step without a budget.

    python benchmarks/memory_budget.py [--page docs/training.md] [--only MODEL,...]

Each step is exported with SGD, saved, and given less and less memory by `RecomputePass`. What a process grows by in its
runs is measured by step_memory.py in a process of its own. Without onnxruntime's arena every larger value is memory of
its own from the system, which is what is predicted; a TrainingSession holds more for the next values. Steps with and
without a budget are timed alternately. The page gets a table, and memory_budget.svg beside it the curves of time over
memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from step_models import MODELS, OPTIMIZERS, Gpt, Model
from torch import nn

import gradfuse
from gradfuse.errors import ArgumentError
from gradfuse.training.budget import within_budget
from gradfuse.training.step import TrainingStep

SHARES = (0.8, 0.65, 0.5, 0.4)
BATCHES = {"gpt": 16, "vit": 64, "resnet18": 64, "unet": 64}
"""Batches at which activations take several times what the gradients of parameters take."""
LABELS = {"gpt": "GPT", "vit": "ViT", "resnet18": "ResNet-18", "unet": "U-Net"}
START, END = "<!-- make bench-memory -->\n", "<!-- end -->\n"
MIB = 2**20
MMAP = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc's setting by which every larger piece of memory is the system's."""


class Letters(Gpt):
    """The GPT with a vocabulary of letters, so that the logits are not most of the memory."""

    vocabulary = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="the page to write the table to")
    parser.add_argument("--only", default=",".join(BATCHES), help="models, separated by commas")
    options = parser.parse_args()
    lines = [
        "| step | budget | predicted MiB | values alone MiB | session MiB | time, predicted | time |",
        "|---|---|---|---|---|---|---|",
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for name in options.only.split(","):
        curves[name] = []
        for line in rows(name, curves[name]):
            print(line, flush=True)
            lines.append(line)
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        _, _, after = rest.partition(END)
        options.page.write_text(f"{before}{START}\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")
        plot(curves, options.page.with_name("memory_budget.svg"))


def rows(name: str, curve: list[tuple[float, float]]) -> Iterator[str]:
    """Yield the lines of a step's table, and append what it measures to a curve: memory and time, as shares."""
    model, count = MODELS[name], BATCHES[name]
    title = f"{model.title}, batch of {count}"
    if name == "gpt":
        title = f"GPT, 4 layers of 256, vocabulary {Letters.vocabulary}, 128 tokens, batch of {count}"
    step, inputs, targets = exported(model, Letters if name == "gpt" else model.module, count)
    batch = dict(zip((*step.input_names, *step.target_names), (*inputs, *targets), strict=True))
    session = gradfuse.TrainingSession(step)
    with tempfile.TemporaryDirectory() as folder:
        arrays = str(Path(folder) / "batch.npz")
        np.savez(arrays, **{f"0_{i}": a for i, a in enumerate(inputs)}, **{f"1_{i}": a for i, a in enumerate(targets)})  # type: ignore[arg-type]
        plain = within_budget(step, 1.0, None, name, batch)
        assert plain.recomputation is not None
        before, grown = plain.recomputation.before / MIB, growths(plain, folder, arrays)
        yield f"| {title} | - | {before:.0f} | {grown[0]:.0f} | {grown[1]:.0f} | 1.00 | 1.00 |"
        curve.append((1.0, 1.0))
        for share in SHARES:
            try:
                less = within_budget(step, share, None, name, batch)
            except ArgumentError as error:
                least = int(str(error).rpartition("(")[2].partition(")")[0]) / MIB
                yield f"| | {share:.0%} | refused: {least:.0f} at least | - | - | - | - |"
                continue
            assert less.recomputation is not None
            after, now = less.recomputation.after / MIB, growths(less, folder, arrays)
            predicted = 1 + less.recomputation.extra_time
            ratio = slower(session, gradfuse.TrainingSession(less), inputs, targets)
            yield f"| | {share:.0%} | {after:.0f} | {now[0]:.0f} | {now[1]:.0f} | {predicted:.2f} | {ratio:.2f} |"
            curve.append((now[0] / grown[0], ratio))


def exported(
    model: Model, make: type[nn.Module] | object, count: int
) -> tuple[TrainingStep, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    torch.manual_seed(0)
    inputs, targets = model.batch(count)
    if make is Letters:
        inputs, targets = (inputs[0] % Letters.vocabulary,), (targets[0] % Letters.vocabulary,)
    module = make()  # type: ignore[operator]
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    step = gradfuse.export_training_step(module, model.loss, (inputs, targets), optimizer, verify="quick")
    return step, tuple(t.numpy() for t in inputs), tuple(t.numpy() for t in targets)


def growths(step: TrainingStep, folder: str, arrays: str) -> tuple[float, float]:
    """MiB that a process grows by in runs of a step: where each value is memory of its own, and in a session."""
    file = str(Path(folder) / "step.onnx")
    step.save(file, force=True)
    command = [sys.executable, str(Path(__file__).with_name("step_memory.py")), "run", file, arrays]
    exact, usual = (
        subprocess.run([*command, *more], check=True, capture_output=True, env={**os.environ, **setting}).stdout
        for more, setting in ((["--no-arena"], MMAP), ([], {}))
    )
    return float(exact), float(usual)


def slower(
    plain: gradfuse.TrainingSession,
    less: gradfuse.TrainingSession,
    inputs: tuple[np.ndarray, ...],
    targets: tuple[np.ndarray, ...],
) -> float:
    """The median ratio of the times of the two, run alternately."""
    ratios = []
    for _ in range(9):
        times = []
        for session in (plain, less):
            start = time.perf_counter()
            session.step(inputs, targets)
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios[1:])


def plot(curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw the time of steps over their memory, both as shares of those without a budget."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradfuse", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=LABELS[name])
    axis.set(xlabel="memory of a run (1 = without a budget)", ylabel="time of a step")
    axis.grid(True, linewidth=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
