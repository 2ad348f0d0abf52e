"""Time and memory of `gradfuse fuse` by the size of the model.

    python benchmarks/scale.py [--nodes 1000,10000] [--json FILE] [--plot FILE] [--page FILE]

Models are stacked from training graphs of tests/corpus, with unique names. Each is fused by the
command line in a process of its own, from the start of Python to the written file; memory is the peak resident size of
that process and its children. Times are the best of --runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import stacking

Row = dict[str, Any]

GPT = "torch_export_fb/gpt_block_ce_dyn"
KINDS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "training graphs side by side": lambda n: _stacked(stacking.BLOCKS, n, chained=False),
    "training steps in a row": lambda n: _stacked(stacking.BLOCKS, n, chained=True),
    "transformer steps in a row": lambda n: _stacked([GPT], n, chained=True),
    "transformer steps, shapes left out": lambda n: _stacked([GPT], n, chained=True, shapes=False),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", default="1000,3000,10000,30000,100000", help="sizes, by commas")
    parser.add_argument("--gigabytes", type=int, default=8, help="external data of one more model; 0 for none")
    parser.add_argument("--runs", type=int, default=1, help="runs of each size, of which the fastest counts")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--plot", type=Path, help="draw the curves")
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    options = parser.parse_args(arguments)

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, build in KINDS.items():
            for nodes in map(int, options.nodes.split(",")):
                source = folder / "model.onnx"
                onnx.save(build(nodes), source)
                rows.append({"kind": kind, **_best(source, options.runs)})
                _print(rows[-1])
        if options.gigabytes:
            model = _stacked([GPT], 1_000, chained=True)
            source = stacking.with_external_weights(model, folder, options.gigabytes)
            size = os.path.getsize(folder / "weights.bin")
            rows.append({"kind": "external data", "external_bytes": size, **_best(source, options.runs)})
            _print(rows[-1])
    document = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(document, options.plot)
    if options.page:
        before, begin, rest = options.page.read_text().partition("<!-- measured -->\n")
        _, end, after = rest.partition("<!-- end -->")
        options.page.write_text(f"{before}{begin}{table(document)}{end}{after}")


def _stacked(names: Sequence[str], nodes: int, *, chained: bool, shapes: bool = True) -> onnx.ModelProto:
    return stacking.stacked([stacking.block(n) for n in names], nodes, chained=chained, shapes=shapes)


_CHILD = """
import json, resource, sys
from gradfuse import cli
code = cli.run(sys.argv[1:])
# Bytes read, where maps of files do not count: they show in the memory. The peak that getrusage gives for this process
# would be the one of its parent, if that was larger when it started this one.
read = next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("rchar"))
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
peak = max(peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.stderr.write(json.dumps([read, peak]))
sys.exit(code)
"""


def _best(source: Path, runs: int) -> Row:
    return min((_measured(source) for _ in range(runs)), key=lambda row: float(row["seconds"]))


def _measured(source: Path) -> Row:
    """One run of the command line on a model, and what its output holds."""
    target, report = source.with_name("fused.onnx"), source.with_name("report.json")
    command = [sys.executable, "-c", _CHILD, "fuse", str(source), str(target), "--report", str(report)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"gradfuse fuse failed: {errors}")
    read, peak = json.loads(errors.splitlines()[-1])
    found = json.loads(report.read_text())
    fused = onnx.load(target, load_external_data=False)
    onnx.checker.check_model(str(target))
    return {
        "nodes": sum(found["before"].values()),
        "nodes_after": sum(found["after"].values()),
        "fused": len(found["fusions"]),
        "fused_nodes_in_file": sum(node.domain == "aclnn" for node in fused.graph.node),
        "left_alone": len(found["near_misses"]),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(peak / 1024),
        "model_mib": round(source.stat().st_size / 2**20, 1),
        "read_mib": round(read / 2**20),
    }


def _print(row: Row) -> None:
    print(
        f"{row['kind']:36} {row['nodes']:7} nodes  {row['fused']:5} fused  {row['seconds']:7.2f} s  "
        f"{row['cpu_seconds']:7.2f} s of CPU  "
        f"{row['peak_mib']:6} MiB  read {row['read_mib']} MiB",
        flush=True,
    )


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown")


def table(document: Row) -> str:
    """What was measured, as a table in Markdown."""
    lines = [
        f"{document['cores']} cores ({document['cpu']}), Python {document['python']}:",
        "",
        "| model | nodes | matches fused | time | of that, CPU | peak memory | read |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in document["rows"]:
        kind = row["kind"]
        if "external_bytes" in row:
            kind = f"{kind}, {row['external_bytes'] / 2**30:.0f} GiB"
        lines.append(
            f"| {kind} | {row['nodes']:,} | {row['fused']:,} | {row['seconds']:.1f} s | {row['cpu_seconds']:.1f} s | "
            f"{row['peak_mib']:,} MiB | {row['read_mib']} MiB |"
        )
    return "\n".join(lines) + "\n"


def plot(document: Row, path: Path) -> None:
    """Draw time and memory over the number of nodes, on logarithmic axes beside a line of slope one."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradfuse", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    for kind in KINDS:
        rows = [row for row in document["rows"] if row["kind"] == kind]
        nodes = [row["nodes"] for row in rows]
        for axis, what in zip(axes, ("seconds", "peak_mib"), strict=True):
            axis.plot(nodes, [row[what] for row in rows], marker="o", markersize=4, label=kind)
    for axis, title in zip(axes, ("time of the whole process (s)", "peak memory (MiB)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="nodes", title=title)
        axis.grid(True, which="both", linewidth=0.3)
    ends = [min(row["nodes"] for row in document["rows"]), max(row["nodes"] for row in document["rows"])]
    top = max(row["seconds"] for row in document["rows"])
    axes[0].plot(ends, [top * n / ends[1] for n in ends], "k:", linewidth=1, label="proportional to nodes")
    axes[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
