"""Measures whole training steps on the CPU, with the optimizer's update: `make bench-step`.

    python benchmarks/step.py [--only NAME] [--optimizer NAME] [--no-compile] [--profile] [--out FOLDER]

Each model is exported from PyTorch with its optimizer for each size of batch, plain and fused, and run in stock
onnxruntime by `gradfuse.TrainingSession`; beside them PyTorch runs the same module eagerly and by torch.compile, with
the fused optimizer. All start from the same parameters, and the losses of their first steps are compared. Then they
take turns, and times are medians. A CTC loss has no plain form in ONNX but gradfuse's function bodies; they are the
plain side there. Memory is by how much a process of its own grows at most, from before the session or module is made.

Writes FOLDER/step.json and step.md; a choice of models is printed, and written only where --out says so. With --profile
it prints instead the milliseconds of each kind of node, plain and fused, by onnxruntime's profiler, and those of each
operator in PyTorch. Of loops those in onnxruntime are most of all the profiler's own.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from ops import environment
from step_models import MODELS, OPTIMIZERS, Model, Tensors
from torch import Tensor, nn

import gradfuse

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("fused", "plain", "torch", "torch.compile")
ROUNDS, FEWEST, PATIENCE = 40, 7, 15.0
"""Rounds of a model, the fewest of them, and seconds after which there are no more than those."""
REST = 25e-3
"""Seconds after which threads of a variant that wait for more work no longer do so by spinning."""
SHORTEST = 50e-3
"""Seconds that are measured at once: shorter steps are repeated, as in training, where threads do not go to sleep."""

Call = Callable[[], float]
Arrays = tuple[np.ndarray[Any, Any], ...]
Batch = tuple[Tensors, Tensors]


@dataclasses.dataclass
class Row:
    """One model with one size of batch; times are medians in milliseconds."""

    model: str
    batch: int
    optimizer: str
    operators: dict[str, int]
    """How many nodes of each fused operator there are."""
    times: dict[str, float]
    speedup: list[float]
    """Of fused over plain, round by round: lower quartile, median, upper quartile."""
    memory: dict[str, float]
    """MiB by which a process grows that trains by a variant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="one model; may be repeated")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="which one; adamw if not given")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes a minute")
    parser.add_argument("--profile", action="store_true", help="print times of nodes by their operator")
    parser.add_argument("--out", type=Path, help="where results go; for all models benchmarks/results if not given")
    options = parser.parse_args()
    out = options.out or (None if options.only or options.no_compile else ROOT / "benchmarks" / "results")
    rows = []
    for name, model in MODELS.items():
        for size in model.sizes if options.only is None or name in options.only else ():
            if options.profile:
                print(f"{model.title}, batch {size}\n\n{profiled(model, size, options.optimizer)}")
                continue
            rows.append(measure(name, model, size, options.optimizer, compiled=not options.no_compile))
            shown = ", ".join(f"{variant} {ms:.3g} ms" for variant, ms in rows[-1].times.items())
            grown = ", ".join(f"{variant} {mib:.0f} MiB" for variant, mib in rows[-1].memory.items())
            print(f"{name} {size}: {shown}; fused over plain {rows[-1].speedup[1]:.2f}; {grown}", flush=True)
    if options.profile:
        return
    print(page(rows))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        document = {**environment(), "rows": [dataclasses.asdict(row) for row in rows]}
        (out / "step.json").write_text(json.dumps(document, indent=1) + "\n")
        (out / "step.md").write_text(page(rows, document))
        print(out / "step.md")


def measure(name: str, model: Model, size: int, optimizer: str, *, compiled: bool) -> Row:
    module, batch, fused, plain = exported(model, size, optimizer)
    steps = {"fused": fused, "plain": plain}
    arrays = as_arrays(batch)
    memory = {key: memory_of_step(step, arrays) for key, step in steps.items()}
    memory["torch"] = memory_of("torch", name, str(size), optimizer)
    calls: dict[str, Call] = {key: partial(gradfuse.TrainingSession(step).step, *arrays) for key, step in steps.items()}
    calls["torch"] = in_torch(model, copy.deepcopy(module), optimizer, batch, compiled=False)
    if compiled:
        torch.compiler.reset()
        calls["torch.compile"] = in_torch(model, copy.deepcopy(module), optimizer, batch, compiled=True)
    require_same(name, {key: [call() for _ in range(3)] for key, call in calls.items()})
    rounds = in_turns(calls)
    times = {key: 1e3 * statistics.median(seconds) for key, seconds in rounds.items()}
    ratios = [p / f for p, f in zip(rounds["plain"], rounds["fused"], strict=True)]
    operators = Counter(node.op_type for node in fused.model.graph.node if node.domain == "aclnn")
    return Row(name, size, optimizer, dict(operators), times, statistics.quantiles(ratios, n=4), memory)


def exported(
    model: Model, size: int, optimizer: str
) -> tuple[nn.Module, Batch, gradfuse.TrainingStep, gradfuse.TrainingStep]:
    """The module, a batch, and the step fused and plain."""
    torch.manual_seed(0)
    module, batch = model.module(), model.batch(size)
    fused, plain = (
        gradfuse.export_training_step(
            module, model.loss, batch, optimizer=OPTIMIZERS[optimizer](module.parameters()), fuse=fuse
        )
        for fuse in (True, False)
    )
    return module, batch, fused, dataclasses.replace(plain, model=gradfuse.expand(plain.model))


def as_arrays(batch: Batch) -> tuple[Arrays, Arrays]:
    inputs, targets = batch
    return tuple(x.numpy() for x in inputs), tuple(x.numpy() for x in targets)


def memory_of_step(step: gradfuse.TrainingStep, arrays: tuple[Arrays, Arrays]) -> float:
    """MiB by which a process grows that trains a step."""
    with tempfile.TemporaryDirectory() as folder:
        step.save(f"{folder}/step.onnx")
        parts: dict[str, Any] = {f"{part}_{k}": array for part, own in enumerate(arrays) for k, array in enumerate(own)}
        np.savez(f"{folder}/batch.npz", **parts)
        return memory_of("step", f"{folder}/step.onnx", f"{folder}/batch.npz")


def memory_of(*arguments: str) -> float:
    command = [sys.executable, str(ROOT / "benchmarks" / "step_memory.py"), *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def in_torch(
    model: Model, module: nn.Module, optimizer: str, batch: Batch, *, compiled: bool, narrow: bool = False
) -> Call:
    """A step by PyTorch, in bfloat16 with `narrow`."""
    updating = OPTIMIZERS[optimizer](module.parameters())
    inputs, targets = batch

    def compute() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            return model.loss(module(*inputs), *targets)

    loss = torch.compile(compute, dynamic=False) if compiled else compute

    def call() -> float:
        updating.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        updating.step()
        return value.item()

    return call


def require_same(name: str, losses: Mapping[str, Sequence[float]]) -> None:
    """Stop if a variant computes something else: beyond what roundings of float32 make of a few steps."""
    for key, values in losses.items():
        if not np.allclose(values, losses["torch"], rtol=1e-3):
            sys.exit(f"{name}: the losses of {key} are {values}; expected {losses['torch']}")


def in_turns(calls: Mapping[str, Call]) -> dict[str, list[float]]:
    """Seconds of a step of each variant, round by round."""
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    repeats = {}
    for key, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[key] = max(1, int(SHORTEST / (time.perf_counter() - start)))
    begin = time.perf_counter()
    for k in range(ROUNDS):
        if k >= FEWEST and time.perf_counter() - begin > PATIENCE:
            break
        # One way and the other, so that nobody always comes after the same.
        for key, call in list(calls.items())[:: 1 if k % 2 else -1]:
            time.sleep(REST)
            for _ in range(-(-repeats[key] // 4)):
                call()  # Brings back to the caches what is its own.
            start = time.perf_counter()
            for _ in range(repeats[key]):
                call()
            seconds[key].append((time.perf_counter() - start) / repeats[key])
    return seconds


def profiled(model: Model, size: int, optimizer: str) -> str:
    """Tables of the milliseconds that nodes take in a step, by operator, those first that differ most."""
    module, batch, fused, plain = exported(model, size, optimizer)
    sides = [node_times(step, as_arrays(batch)) for step in (plain, fused)]
    names = sorted({*sides[0], *sides[1]}, key=lambda name: -abs(sides[0][name] - sides[1][name]))
    totals = [sum(side.values()) for side in sides]
    lines = ["| operator | plain, ms | fused, ms |", "|---|---:|---:|"]
    lines += [f"| {name} | {sides[0][name]:.2f} | {sides[1][name]:.2f} |" for name in names]
    lines += [f"| all | {totals[0]:.1f} | {totals[1]:.1f} |", "", "| in PyTorch | ms |", "|---|---:|"]
    kernels = torch_times(in_torch(model, module, optimizer, batch, compiled=False))
    lines += [f"| {name} | {ms:.2f} |" for name, ms in sorted(kernels.items(), key=lambda pair: -pair[1])]
    return "\n".join([*lines, f"| all | {sum(kernels.values()):.1f} |"]) + "\n"


def torch_times(call: Call) -> dict[str, float]:
    """Milliseconds that each operator of PyTorch takes in a step itself, without those that it calls."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(FEWEST):
            call()
    return {event.key: event.self_cpu_time_total / 1e3 / FEWEST for event in profile.key_averages()}


def node_times(step: gradfuse.TrainingStep, arrays: tuple[Arrays, Arrays]) -> dict[str, float]:
    """Milliseconds by operator, of the medians of each node of the graph; what loops hold counts as the loop."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/step"
        gradfuse.register(options)
        session = gradfuse.TrainingSession(step, session_options=options)
        for _ in range(FEWEST):
            session.step(*arrays)
        del session  # It writes the profile.
        (profile,) = Path(folder).iterdir()
        events = json.loads(profile.read_text())
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    nodes: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    end = 0
    for event in sorted(kernels, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end:  # else it is within a loop, whose time has it
            end = event["ts"] + event["dur"]
            nodes[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e3)
    times: defaultdict[str, float] = defaultdict(float)
    for (operator, _), durations in nodes.items():
        times[operator] += statistics.median(durations)
    return times


def page(rows: list[Row], document: Mapping[str, Any] | None = None) -> str:
    """The table in Markdown."""
    lines = []
    if document is not None:
        lines += [
            "# Whole training steps on the CPU",
            "",
            f"{document['cpu']}, {document['cores']} cores; gradfuse {document['gradfuse']}, onnxruntime "
            f"{document['onnxruntime']}, PyTorch {document['torch']}. Loss, gradients and update, in milliseconds; "
            "gain is plain over fused, its median and quartiles. onnxruntime is stock, with gradfuse's library for the "
            "fused. PyTorch updates with its fused optimizer. Memory is by how many MiB a process grows at most.",
            "",
        ]
    lines += [
        "| model | batch | onnxruntime | fused | gain | PyTorch | torch.compile | memory: onnxruntime | fused "
        "| PyTorch | fused operators |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = [f"{row.times[key]:.3g}" if key in row.times else "-" for key in ("plain", "fused")]
        cells += [f"{row.speedup[1]:.2f} ({row.speedup[0]:.2f} to {row.speedup[2]:.2f})"]
        cells += [f"{row.times[key]:.3g}" if key in row.times else "-" for key in ("torch", "torch.compile")]
        cells += [f"{row.memory[key]:.0f}" for key in ("plain", "fused", "torch")]
        used = ", ".join(f"{count} {operator}" for operator, count in row.operators.items())
        lines.append(f"| {MODELS[row.model].title} | {row.batch} | {' | '.join(cells)} | {used} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
