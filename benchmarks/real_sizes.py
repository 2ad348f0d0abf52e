"""Memory and time of training steps of models of 1 to 500 million parameters: a part of `make bench-scale`.

    python benchmarks/real_sizes.py [--only MODEL] [--ways export,torch] [--json FILE] [--plot FILE] [--page FILE]

GPTs of growing size, and models that people train, with random weights, of real_size_models.py. Each is exported with
AdamW, loaded and trained by `gradfuse.TrainingSession`, and trained by PyTorch, eagerly and by torch.compile: each way
in a process of its own. Memory is the peak of the resident sizes of that process and its children, imports and all.
Seconds are those after the imports, until the step is ready, or the first step done; those of processor time are of the
whole process, as the time of exports and of torch.compile grows with whatever else the machine does.

Models that people train go through 20 steps, whose losses are compared: where there is dropout, with those of PyTorch
under the numbers that the step draws.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

from real_size_models import MODELS

Row = dict[str, Any]

STEPS, STEPS_OF_A_TRAINING = 3, 20
RATE = 1e-4
WAYS = {
    "torch": "training by PyTorch",
    "compile": "training by torch.compile",
    "export": "export_training_step",
    "quick": "export_training_step with verify='quick'",
    "session": "training by TrainingSession",
    "drawn": "training by PyTorch with the session's dropout",
}
_PACKAGES = {"onnxruntime": "onnxruntime", "PyTorch": "torch"}
MARKS = "<!-- real sizes -->\n", "<!-- end of real sizes -->"
PART_MARKS = "<!-- parts of exports -->\n", "<!-- end of parts of exports -->"
TRAINING_MARKS = "<!-- trained at real sizes -->\n", "<!-- end of trained at real sizes -->"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", help="models whose names have this in them; may be repeated")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"which of {', '.join(WAYS)}, by commas")
    parser.add_argument(
        "--json", type=Path, help="write what was measured; models that were not stay as they are there"
    )
    parser.add_argument("--plot", type=Path, help="draw memory and time over the parameters")
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--models-page", type=Path, help="put the table of trainings into this page, likewise")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_one(*options.one)))
        return
    ways = options.ways.split(",")
    rows: dict[str, Row] = {}
    if options.json and options.json.exists():
        rows = {row["model"]: row for row in json.loads(options.json.read_text())["rows"]}
    for name, model in MODELS.items():
        if options.only and not any(text.lower() in name.lower() for text in options.only):
            continue
        row = rows.setdefault(name, {"model": name, "batch": model.batch, "axis": model.axis, "ways": {}})
        with tempfile.TemporaryDirectory() as folder:
            for way in ways:
                if way == "drawn" and not (model.trained and row["ways"].get("export", {}).get("draws")):
                    continue
                found = _measured(name, way, folder)
                if found is not None:
                    row["parameters"] = found.pop("parameters", row.get("parameters"))
                    row["ways"][way], row["on"] = found, _machine()
                    print(f"{name:45} {WAYS[way]:30} {_text(found)}", flush=True)
    kept = [rows[name] for name in MODELS if rows.get(name, {}).get("ways")]
    document: Row = {"rows": kept}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(document, options.plot)
    for page, marks, text in (
        (options.page, MARKS, table(document)),
        (options.page, PART_MARKS, part_table(document)),
        (options.models_page, TRAINING_MARKS, training_table(document)),
    ):
        if page:
            before, begin, rest = page.read_text().partition(marks[0])
            _, end, after = rest.partition(marks[1])
            page.write_text(f"{before}{begin}{text}{end}{after}")


def _one(name: str, way: str, folder: str) -> Row:
    """Do it in this process, and return the seconds that it took, and further results."""
    import torch

    import gradfuse
    from gradfuse.export.dropout import SeededDropout
    from gradfuse.training.step import DROPOUT_SEED

    path = os.path.join(folder, "step.onnx")
    torch.manual_seed(0)
    module, loss, inputs, targets = MODELS[name].make()
    count = sum(parameter.numel() for parameter in module.parameters())
    steps = STEPS_OF_A_TRAINING if MODELS[name].trained else STEPS
    losses, seconds = [], []
    if way == "session":
        del module, loss
        # Modules are in cycles.
        gc.collect()
        begin = time.perf_counter()
        session = gradfuse.TrainingSession(path)
        ready = time.perf_counter() - begin
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(session.step(tuple(one.numpy() for one in inputs), targets.numpy()))
            seconds.append(time.perf_counter() - begin)
        return {"seconds": ready, "step": median(seconds[1:]), "losses": losses, "parameters": count}
    begin = time.perf_counter()
    if way in ("export", "quick"):
        parts: list[tuple[str, float]] = []

        def note(part: str, done: int, total: int) -> None:
            # Without the share of it that is done.
            name = part.partition(", ")[0]
            if not parts or parts[-1][0] != name:
                parts.append((name, time.perf_counter()))

        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        verify: Literal["full", "quick"] = "quick" if way == "quick" else "full"
        step = gradfuse.export_training_step(module, loss, (inputs, targets), optimizer, verify=verify, progress=note)
        row: Row = {"seconds": time.perf_counter() - begin, "parameters": count}
        row["parts"] = {part: round(until - since, 1) for (part, since), (_, until) in itertools.pairwise(parts)}
        if way == "quick":
            return row
        step.save(path)
        row["draws"] = DROPOUT_SEED in step.buffers
        row["file_mib"] = round(sum(file.stat().st_size for file in Path(folder).glob("step.onnx*")) / 2**20)
        return row
    called: Any = torch.compile(module) if way == "compile" else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
    seed = int(gradfuse.TrainingStep.load(path).buffers[DROPOUT_SEED]) if way == "drawn" else 0
    first = 0.0
    for index in range(STEPS if way == "compile" else steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        with SeededDropout(torch.tensor(seed + index)) if way == "drawn" else contextlib.nullcontext():
            found = loss(called(*inputs), targets)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(found.item())
        seconds.append(time.perf_counter() - start)
        first = first or time.perf_counter() - begin
    return {"seconds": first, "step": median(seconds[1:]), "losses": losses, "parameters": count}


def _measured(name: str, way: str, folder: str) -> Row | None:
    """Run one way in a process of its own; None where there is no step to train."""
    if way in ("session", "drawn") and not Path(folder, "step.onnx").exists():
        return None
    command = [sys.executable, __file__, "--one", name, way, folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        with _watched(process.pid) as peaks:
            assert process.stdout is not None
            answer = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = code = os.waitstatus_to_exitcode(status)
    seen: Row = {"peak_mib": round(peaks[0] / 2**20), "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)}
    if code:
        return {"failed": f"exit status {code}", **seen}
    row = json.loads(answer.splitlines()[-1])
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()} | seen


@contextlib.contextmanager
def _watched(root: int) -> Iterator[list[int]]:
    """Note the largest sum of the resident sizes of a process and its descendants."""
    peaks, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peaks[0] = max(peaks[0], sum(map(_resident, _tree(root))))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def _tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    found = [root]
    for process in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                found += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    return found


def _resident(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def table(document: Row) -> str:
    """What was measured, as a table in Markdown for each machine, with its versions."""
    return _tables(document["rows"], _header(), _cells)


def _tables(rows: Sequence[Row], header: Sequence[str], cells_of: Callable[[Row], list[str] | None]) -> str:
    """Tables of rows that were measured on one machine each, without those that have no cells."""
    tables = []
    for machine in dict.fromkeys(row["on"] for row in rows):
        found = [cells for row in rows if row["on"] == machine and (cells := cells_of(row)) is not None]
        if found:
            lines = [f"{machine}:", "", *header, *(f"| {' | '.join(cells)} |" for cells in found)]
            tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _header() -> list[str]:
    return [
        "| model, batch | parameters | PyTorch: memory | export: memory | of PyTorch's | first step in torch.compile, "
        "of that CPU | export, of that CPU | session: memory | step: PyTorch | step: torch.compile | step: session |",
        f"|---|{'---:|' * 10}",
    ]


def _cells(row: Row) -> list[str]:
    ways: dict[str, Row] = row["ways"]
    trained, made = (ways.get(way, {}).get("peak_mib") for way in ("torch", "export"))
    return [
        f"{row['model']}, {row['batch']}",
        f"{row['parameters'] / 1e6:,.1f} M",
        _cell(ways, "torch", "peak_mib", "{:,} MiB"),
        _cell(ways, "export", "peak_mib", "{:,} MiB"),
        f"{made / trained:.2f} x" if trained and made else "-",
        f"{_cell(ways, 'compile', 'seconds', '{:.0f} s')}, {_cell(ways, 'compile', 'cpu_seconds', '{:.0f} s')}",
        f"{_cell(ways, 'export', 'seconds', '{:.0f} s')}, {_cell(ways, 'export', 'cpu_seconds', '{:.0f} s')}",
        _cell(ways, "session", "peak_mib", "{:,} MiB"),
        *(_cell(ways, way, "step", "{:.2f} s") for way in ("torch", "compile", "session")),
    ]


_PARTS = {
    "PyTorch's runs": ("running the step in PyTorch",),
    "tracing, translating, fusing": ("tracing", "translating", "fusing", "adding the optimizer"),
    "the evaluation model": ("exporting the evaluation model",),
    "comparisons": (
        *("comparing the exported model with PyTorch", "comparing the model with PyTorch"),
        *("comparing the fused model with PyTorch", "comparing the update with PyTorch"),
    ),
    "PyTorch in float64": ("running the step in float64",),
    "the model in float64": ("running the model in float64",),
}


def part_table(document: Row) -> str:
    """The seconds of the parts of exports, as tables in Markdown likewise."""
    header = [
        f'| model | {" | ".join(_PARTS)} | all | with `verify="quick"` | first step in torch.compile |',
        f"|---|{'---:|' * (len(_PARTS) + 3)}",
    ]
    return _tables(document["rows"], header, _cells_of_parts)


def _cells_of_parts(row: Row) -> list[str] | None:
    ways: dict[str, Row] = row["ways"]
    parts = ways.get("export", {}).get("parts")
    if parts is None:
        return None
    return [
        str(row["model"]),
        *(f"{sum(parts.get(part, 0.0) for part in group):.1f}" for group in _PARTS.values()),
        _cell(ways, "export", "seconds", "{:.1f}"),
        _cell(ways, "quick", "seconds", "{:.1f}"),
        _cell(ways, "compile", "seconds", "{:.1f}"),
    ]


def training_table(document: Row) -> str:
    """The losses of models that people train, as tables in Markdown likewise."""
    header = [
        "| model, batch | parameters | memory: PyTorch | export | session | file | export: CPU time | step: PyTorch "
        f"| session | loss: first | after {STEPS_OF_A_TRAINING} in PyTorch | in the session | largest difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return _tables(document["rows"], header, _cells_of_training)


def _cells_of_training(row: Row) -> list[str] | None:
    ways: dict[str, Row] = row["ways"]
    ours = ways.get("session", {}).get("losses", [])
    theirs = ways.get("drawn", ways.get("torch", {})).get("losses", [])
    if len(ours) != STEPS_OF_A_TRAINING or len(theirs) != STEPS_OF_A_TRAINING:
        return None
    return [
        f"{row['model']}, {row['batch']}",
        f"{row['parameters'] / 1e6:,.1f} M",
        *(_cell(ways, way, "peak_mib", "{:,} MiB") for way in ("torch", "export", "session")),
        _cell(ways, "export", "file_mib", "{:,} MiB"),
        _cell(ways, "export", "cpu_seconds", "{:.0f} s"),
        *(_cell(ways, way, "step", "{:.2f} s") for way in ("torch", "session")),
        f"{theirs[0]:.4f}",
        f"{theirs[-1]:.4f}",
        f"{ours[-1]:.4f}",
        f"{max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)):.0e}",
    ]


def _cell(ways: dict[str, Row], way: str, key: str, form: str) -> str:
    value = ways.get(way, {}).get(key)
    return "-" if value is None else form.format(value)


def plot(document: Row, path: Path) -> None:
    """Draw memory and time of the GPTs over their parameters."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradfuse", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    for way, label in WAYS.items():
        rows = [row for row in document["rows"] if row["axis"] and "seconds" in row["ways"].get(way, {})]
        counts = [row["parameters"] / 1e6 for row in rows]
        for axis, key in zip(axes, ("peak_mib", "seconds"), strict=True):
            axis.plot(counts, [row["ways"][way][key] for row in rows], marker="o", markersize=4, label=label)
    for axis, title in zip(axes, ("peak memory (MiB)", "time until ready, or of the first step (s)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="parameters (millions)", title=title)
        axis.grid(True, which="both", linewidth=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def _machine() -> str:
    """The processor, and the versions of onnxruntime and PyTorch."""
    versions = ", ".join(f"{name} {metadata.version(package)}" for name, package in _PACKAGES.items())
    with open("/proc/cpuinfo") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores ({name}), {versions}"


def _text(found: Row) -> str:
    if "failed" in found:
        return f"{found['failed']}, {found['peak_mib']:,} MiB"
    parts = "; ".join(f"{part} {seconds}" for part, seconds in found.get("parts", {}).items() if seconds >= 1)
    step = f", step {found['step'] * 1e3:,.0f} ms" if "step" in found else ""
    return f"{found['seconds']:.1f} s{step}, {found['cpu_seconds']} s of CPU, {found['peak_mib']:,} MiB  {parts}"


if __name__ == "__main__":
    main()
