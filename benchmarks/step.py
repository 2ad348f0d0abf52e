"""Measures whole training steps on the CPU, loss and all gradients: `make bench-step`.

    python benchmarks/step.py [--only NAME] [--no-compile] [--profile] [--out FOLDER]

Each model is exported from PyTorch for each size of batch, plain and fused, and run in stock onnxruntime by
`gradfuse.TrainingSession`; beside them PyTorch runs the same module eagerly and by torch.compile. All start from the
same parameters, and their losses and gradients are compared first. Then they take turns, and times are medians. A CTC
loss has no plain form in ONNX but gradfuse's function bodies; they are the plain side there.

Writes FOLDER/step.json and step.md; a choice of models is printed, and written only where --out says so. With --profile
it prints instead what onnxruntime's profiler says of plain and fused: the milliseconds of each kind of node. Of loops
those are most of all the profiler's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from ops import environment
from step_models import MODELS, Model, Tensors
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
    operators: dict[str, int]
    """How many nodes of each fused operator there are."""
    times: dict[str, float]
    speedup: list[float]
    """Of fused over plain, round by round: lower quartile, median, upper quartile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one model")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes a minute")
    parser.add_argument("--profile", action="store_true", help="print times of nodes by their operator")
    parser.add_argument("--out", type=Path, help="where results go; for all models benchmarks/results if not given")
    options = parser.parse_args()
    out = options.out or (None if options.only or options.no_compile else ROOT / "benchmarks" / "results")
    rows = []
    for name, model in MODELS.items():
        for size in model.sizes if options.only in (None, name) else ():
            if options.profile:
                print(f"{model.title}, batch {size}\n\n{profiled(model, size)}")
                continue
            rows.append(measure(name, model, size, compiled=not options.no_compile))
            shown = ", ".join(f"{variant} {ms:.3g} ms" for variant, ms in rows[-1].times.items())
            print(f"{name} {size}: {shown}; fused over plain {rows[-1].speedup[1]:.2f}", flush=True)
    if options.profile:
        return
    print(page(rows))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        document = {**environment(), "rows": [dataclasses.asdict(row) for row in rows]}
        (out / "step.json").write_text(json.dumps(document, indent=1) + "\n")
        (out / "step.md").write_text(page(rows, document))
        print(out / "step.md")


def measure(name: str, model: Model, size: int, *, compiled: bool) -> Row:
    module, batch, fused, plain = exported(model, size)
    sessions = {"fused": gradfuse.TrainingSession(fused), "plain": gradfuse.TrainingSession(plain)}
    arrays = as_arrays(batch)
    calls: dict[str, Call] = {key: partial(session.step, *arrays) for key, session in sessions.items()}

    def compute(inputs: Tensors, targets: Tensors) -> Tensor:
        return model.loss(module(*inputs), *targets)

    calls["torch"] = in_torch(module, partial(compute, *batch))
    if compiled:
        torch.compiler.reset()
        calls["torch.compile"] = in_torch(module, partial(torch.compile(compute, dynamic=False), *batch))

    losses = {key: call() for key, call in calls.items()}
    gradients = {key: session.gradients if key in sessions else {} for key, session in sessions.items()} | {
        "torch": {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    }
    require_same(name, losses, gradients)
    rounds = in_turns(calls)
    times = {key: 1e3 * statistics.median(seconds) for key, seconds in rounds.items()}
    ratios = [p / f for p, f in zip(rounds["plain"], rounds["fused"], strict=True)]
    report = fused.report
    assert report is not None
    domain = "aclnn::"
    operators = {op.removeprefix(domain): n for op, n in report.after.items() if op.startswith(domain)}
    return Row(name, size, operators, times, statistics.quantiles(ratios, n=4))


def exported(model: Model, size: int) -> tuple[nn.Module, Batch, gradfuse.TrainingStep, gradfuse.TrainingStep]:
    """The module, a batch, and the step fused and plain."""
    torch.manual_seed(0)
    module, batch = model.module(), model.batch(size)
    fused = gradfuse.export_training_step(module, model.loss, batch)
    plain = gradfuse.export_training_step(module, model.loss, batch, fuse=False)
    return module, batch, fused, dataclasses.replace(plain, model=gradfuse.expand(plain.model))


def as_arrays(batch: Batch) -> tuple[Arrays, Arrays]:
    inputs, targets = batch
    return tuple(x.numpy() for x in inputs), tuple(x.numpy() for x in targets)


def in_torch(module: nn.Module, compute: Callable[[], Tensor]) -> Call:
    """Loss and gradients by PyTorch."""

    def call() -> float:
        module.zero_grad(set_to_none=True)
        value = compute()
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    return call


def require_same(name: str, losses: Mapping[str, float], gradients: Mapping[str, Mapping[str, Any]]) -> None:
    """Stop if a variant computes something else: beyond what roundings of float32 make of a step."""
    for key, value in losses.items():
        if not np.isclose(value, losses["torch"], rtol=1e-4):
            sys.exit(f"{name}: the loss of {key} is {value}; expected {losses['torch']}")
    for key, own in gradients.items():
        for parameter, wanted in gradients["torch"].items():
            error = np.linalg.norm(own[parameter] - wanted) / (np.linalg.norm(wanted) + 1e-12)
            if error > 1e-3:
                sys.exit(f"{name}: the gradient of {parameter} by {key} differs by {error:.2g} of its norm")


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


def profiled(model: Model, size: int) -> str:
    """A table of the milliseconds that nodes take in a step, by operator, those first that differ most."""
    _, batch, fused, plain = exported(model, size)
    sides = [node_times(step, as_arrays(batch)) for step in (plain, fused)]
    names = sorted({*sides[0], *sides[1]}, key=lambda name: -abs(sides[0][name] - sides[1][name]))
    totals = [sum(side.values()) for side in sides]
    lines = ["| operator | plain, ms | fused, ms |", "|---|---:|---:|"]
    lines += [f"| {name} | {sides[0][name]:.2f} | {sides[1][name]:.2f} |" for name in names]
    return "\n".join([*lines, f"| all | {totals[0]:.1f} | {totals[1]:.1f} |"]) + "\n"


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
            f"{document['onnxruntime']}, PyTorch {document['torch']}. Loss and all gradients, in milliseconds; gain is "
            "plain over fused, its median and quartiles. onnxruntime is stock, with gradfuse's library for the fused.",
            "",
        ]
    lines += [
        "| model | batch | onnxruntime | fused | gain | PyTorch | torch.compile | fused operators |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = [f"{row.times[key]:.3g}" if key in row.times else "-" for key in ("plain", "fused")]
        cells += [f"{row.speedup[1]:.2f} ({row.speedup[0]:.2f} to {row.speedup[2]:.2f})"]
        cells += [f"{row.times[key]:.3g}" if key in row.times else "-" for key in ("torch", "torch.compile")]
        used = ", ".join(f"{count} {operator}" for operator, count in row.operators.items())
        lines.append(f"| {MODELS[row.model].title} | {row.batch} | {' | '.join(cells)} | {used} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
