"""Measures the operators on the CPU, beside other implementations: `make bench`.

    python benchmarks/ops.py [--full] [--out FOLDER] [--only PATTERN] [--threads 1,2] [--no-compile]

Variants of a work run alternately in one process, with threads that wait without spinning, and times are medians. Each
is first compared with float64; wrong ones are marked. Tensors that would fit the last cache, but not the second
level's, come in several copies. The roof is the time of a copy of as many bytes as the operator must read and write at
least, with the same number of threads, by ordinary or by streaming stores, whichever is faster; beside it stands
traffic of the operator's own shape (`traffic.cc`), as a sum reads and hardly writes.

The C API has one pool of threads in a process, of as many as there are cores: it is measured where those are asked for.

Writes ops.json, ops.md and ops.svg to FOLDER, for all rows build/benchmarks if not given; a choice of rows is printed,
and written only where --out says so. The documentation links benchmarks/results/ops.md, a copy of the table.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# Read when PyTorch is loaded: its threads would go on spinning while the next variant runs, and take a core from it.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import onnxruntime as ort
import torch
from regions import session
from torch import Tensor
from works import Inputs, Work, fused_model, plain_model, works

import gradfuse
from cpp_ext import capi
from gradfuse.custom_ops import OPS
from gradfuse.testing import assert_gradients_close

ROOT = Path(__file__).resolve().parents[1]
CORES = len(os.sched_getaffinity(0))
os.environ["GRADFUSE_NUM_THREADS"] = str(CORES)
ROUNDS = {"S": 200, "M": 15, "L": 7, "D": 7}
PATIENCE = 4.0
"""Seconds that a variant may take in all, beyond three rounds."""
SHORTEST = 2e-4
"""Seconds that are measured at once: shorter calls are repeated."""
VARIANTS = ("gradfuse", "C API", "torch", "torch, new output", "torch.compile", "onnxruntime")
"""In the order of the table. "onnxruntime" runs standard operators without gradfuse."""

Call = Callable[[], object]


@dataclass
class Time:
    """Of a variant, in milliseconds."""

    median: float
    low: float
    high: float
    rounds: int
    wrong: str = ""
    """How it differs from float64, if it does."""


@dataclass
class Row:
    """One work with a number of threads."""

    operator: str
    size: str
    case: str
    dtype: str
    threads: int
    bytes: int
    copy_ms: float
    """The roof: the time of a copy of this many bytes."""
    traffic_ms: float
    """Of as many bytes in the operator's proportion of reading and writing."""
    times: dict[str, Time] = field(default_factory=dict)

    def times_the_roof(self, variant: str) -> float:
        return self.times[variant].median / self.copy_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also size L, more types and data, 1 and 2 threads")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="works, as in 'CrossEntropy*/M/*'")
    parser.add_argument("--threads", help="numbers of threads, by commas; S: 1, others: 2 if not given")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes seconds a work")
    parser.add_argument("--out", type=Path, help="where results go; for all rows build/benchmarks if not given")
    options = parser.parse_args()
    chooses = options.only != "*" or options.threads is not None or options.no_compile
    out = options.out or (None if chooses else ROOT / "build" / "benchmarks")
    every = options.full or options.only != "*"
    chosen = [w for w in works(full=every) if fnmatch.fnmatch(w.name, options.only)]
    if not chosen:
        parser.error(
            f"--only is {options.only!r}, which matches no work; expected one as in 'CrossEntropyLossGrad/M/float32'"
        )

    traffic = Traffic()
    rows = []
    print(f"{'':44} thr  roof ms " + " ".join(f"{name:>18}" for name in VARIANTS))
    for work in chosen:
        for threads in _threads(options, work):
            rows.append(measure(work, threads, traffic, compiled=not options.no_compile))
            print(_line(rows[-1]), flush=True)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    document = {**environment(), "rows": [asdict(row) for row in rows]}
    (out / "ops.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "ops.md").write_text(page(document, rows))
    plot(rows, out / "ops.svg")
    print(out / "ops.md")


def _threads(options: argparse.Namespace, work: Work) -> list[int]:
    if options.threads:
        return [int(n) for n in options.threads.split(",")]
    if options.full and work.size != "L":
        return sorted({1, min(2, CORES)})
    return [1 if work.size == "S" else min(2, CORES)]


def _line(row: Row) -> str:
    cells = (f"{row.times_the_roof(v):>17.2f}x" if v in row.times else f"{'-':>18}" for v in VARIANTS)
    name = "/".join(filter(None, (row.operator, row.size, row.case, row.dtype)))
    wrong = "".join(f"\n    {v} is wrong: {t.wrong}" for v, t in row.times.items() if t.wrong)
    return f"{name:44} {row.threads:3} {row.copy_ms:8.3f} " + " ".join(cells) + wrong


# The roof


class Traffic:
    """`traffic.cc`, compiled for this machine."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "traffic.so"
            source = Path(__file__).with_name("traffic.cc")
            compiler = os.environ.get("CXX", "c++")
            options = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-Wno-psabi", "-shared", "-fPIC"]
            subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
            self._run = ctypes.CDLL(str(library)).gradfuse_traffic
        self._run.restype = ctypes.c_uint64

    def calls(
        self, inputs: int, writes: bool, size: int, threads: int, copies: int, streaming: bool
    ) -> tuple[list[Call], int]:
        """What moves about `size` bytes through each of several sets of tensors, and how many it moves."""
        tensors = inputs + writes
        each = max(64, size // tensors // 64 * 64)

        def run(own: list[np.ndarray[Any, np.dtype[np.uint8]]]) -> object:
            pointers = (ctypes.c_void_p * inputs)(*(b.ctypes.data for b in own[:inputs]))
            out = ctypes.c_void_p(own[-1].ctypes.data if writes else None)
            return self._run(pointers, inputs, out, ctypes.c_int64(each), threads, int(streaming))

        sets = [[_aligned(each) for _ in range(tensors)] for _ in range(copies)]
        return [partial(run, own) for own in sets], each * tensors


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    whole = torch.ones(size + 64, dtype=torch.uint8).numpy()
    start = -whole.ctypes.data % 64
    return whole[start : start + size]


# The variants


class InSession:
    """An onnxruntime session on tensors of PyTorch's, without copies."""

    def __init__(self, model: Any, threads: int, *, library: bool) -> None:
        self._session = session(model, threads, library=library)

    def bound(self, inputs: Inputs, outputs: dict[str, Tensor]) -> Call:
        binding = self._session.io_binding()
        for value in self._session.get_inputs():
            binding.bind_ortvalue_input(value.name, _ort_value(inputs[value.name.removesuffix("_in")]))
        for value in self._session.get_outputs():
            binding.bind_ortvalue_output(value.name, _ort_value(outputs[value.name]))
        return lambda: self._session.run_with_iobinding(binding)


def _ort_value(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.uint16).numpy(), 16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.numpy())


def by_c_api(work: Work, inputs: Inputs, outputs: dict[str, Tensor]) -> Call:
    """Both phases of the C API without a stream, on tensors that it has been told of before."""
    operator = work.operator.split()[0]
    described = OPS[operator].inputs
    library = capi.library()
    arguments: list[Any] = []
    for parameter, tensor in zip(described, inputs.values(), strict=False):
        if capi.is_array(parameter):
            arguments.append(capi.create_int_array(tensor.tolist()))
        else:
            arguments.append(capi.create_tensor(tensor))
    arguments += [None] * (len(described) - len(arguments))
    for name, (kind, default) in capi.attributes_of(operator).items():
        value = work.attributes.get(name, default)
        if isinstance(value, tuple):
            arguments.append(capi.create_int_array(value))
        else:
            arguments.append(kind(value.encode() if isinstance(value, str) else value))
    arguments += [capi.create_tensor(tensor) for tensor in outputs.values()]
    plan, execute = getattr(library, f"aclnn{operator}GetWorkspaceSize"), getattr(library, f"aclnn{operator}")
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    arguments += [ctypes.byref(size), ctypes.byref(executor)]

    def call() -> None:
        capi.expect_success(plan(*arguments))
        capi.expect_success(execute(None, size, executor, None))

    capi.expect_success(plan(*arguments))
    assert size.value == 0, "contiguous tensors need no workspace"
    capi.expect_success(execute(None, size, executor, None))
    return call


def variants(
    work: Work, threads: int, inputs: Sequence[Inputs], outputs: Sequence[dict[str, Tensor]], compiled: bool
) -> Iterator[tuple[str, list[Call], bool]]:
    """Name, a call for each copy of the tensors, and whether the result is what the call gives, not in `outputs`."""
    copies = list(zip(inputs, outputs, strict=True))
    peers = [work.peer_inputs(given) for given in inputs]
    fused = InSession(fused_model(work, inputs[0]), threads, library=True)
    yield "gradfuse", [fused.bound(given, out) for given, out in copies], False
    if threads == CORES:
        yield "C API", [by_c_api(work, given, out) for given, out in copies], False
    write = work.preallocated
    if write is not None:
        yield "torch", [partial(write, given, out["out"]) for given, out in zip(peers, outputs, strict=True)], False
    yield "torch, new output", [partial(work.fresh, given) for given in peers], True
    if compiled and not work.operator.startswith("Ctc"):
        torch.compiler.reset()
        function = torch.compile(work.fresh, dynamic=False)
        yield "torch.compile", [partial(function, given) for given in peers], True
    if work.plain is not None:
        plain = InSession(plain_model(work, peers[0]), threads, library=False)
        bound = [plain.bound(given, out) for given, out in zip(peers, outputs, strict=True)]
        yield "onnxruntime", bound, False
    elif work.operator.startswith("Ctc"):
        plain = InSession(gradfuse.expand(fused_model(work, inputs[0])), threads, library=False)
        yield "onnxruntime", [plain.bound(given, out) for given, out in copies], False


def measure(work: Work, threads: int, traffic: Traffic, *, compiled: bool) -> Row:
    torch.set_num_threads(threads)
    copies = _copies(work)
    inputs = [work.inputs() for _ in range(copies)]
    shapes = {"out": work.output, **work.more_outputs}
    dtype = next(x.dtype for x in inputs[0].values() if x.is_floating_point())
    outputs = [{name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()} for _ in range(copies)]
    reference = work.reference(inputs[0], work.part)
    native = work.fresh(work.peer_inputs(inputs[0]))[work.part]

    calls: dict[str, list[Call]] = {}
    wrong: dict[str, str] = {}
    with torch.no_grad():
        for name, own, returns in variants(work, threads, inputs, outputs, compiled):
            outputs[0]["out"].fill_(torch.nan)
            result = own[0]()
            got = result if returns else outputs[0]["out"]
            assert isinstance(got, Tensor)
            try:
                assert_gradients_close(got[work.part], native, reference.numpy(), dtype, terms=_terms(work, inputs[0]))
            except AssertionError as difference:
                wrong[name] = str(difference)
            calls[name] = own
        roofs: dict[str, tuple[float, str]] = {}
        for kind, reads, writes in (("copy", 1, True), ("traffic", work.reads, work.writes)):
            for streaming in (False, True):
                name = f"{kind} {streaming}"
                calls[name], moved = traffic.calls(reads, writes, work.bytes, threads, copies, streaming)
                roofs[name] = (work.bytes / moved, kind)
        times = in_turns(calls, ROUNDS[work.size])

    best = {kind: min(times[n].median * f for n, (f, k) in roofs.items() if k == kind) for kind in ("copy", "traffic")}
    row = Row(work.operator, work.size, work.case, work.dtype, threads, work.bytes, best["copy"], best["traffic"])
    for name in VARIANTS:
        if name in times:
            row.times[name] = times[name]
            row.times[name].wrong = wrong.get(name, "")
    return row


def _terms(work: Work, inputs: Inputs) -> float | None:
    """The magnitude of the summands."""
    if work.operator == "CtcLossBackward":
        # Sums of log-probabilities as large as this, rounded at each step, of which differences are taken.
        return 4 * float(inputs["neg_log_likelihood"].max())
    if work.operator.startswith("GroupedBias"):
        grad = inputs["grad_y"]
        return grad.numel() / math.prod(work.output)
    return None


def _copies(work: Work) -> int:
    if work.size == "S":
        return 4  # How small tensors lie to each other makes a difference of a half and more.
    if work.size != "M":
        return 1
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 32 << 20
    return max(1, min(8, -(-2 * cache // work.bytes)))


def in_turns(calls: dict[str, list[Call]], rounds: int) -> dict[str, Time]:
    """Medians over rounds in which every variant has its turn; a slow one leaves early."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    repeats = dict.fromkeys(calls, 1)
    for name, own in calls.items():
        own[0]()  # The first call pays for what is made once.
        start = time.perf_counter()
        own[0]()
        repeats[name] = max(1, int(SHORTEST / max(time.perf_counter() - start, 1e-9)))
    for k in range(rounds):
        for place, (name, own) in enumerate(calls.items()):
            if k >= 3 and spent[name] > PATIENCE:
                continue
            # No variant gets tensors that the previous one has just brought into a cache.
            call = own[(k + place) % len(own)]
            if repeats[name] > 1:
                call()  # So that what fits a cache is there for each, and not for those only who come after another.
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            elapsed = time.perf_counter() - start
            spent[name] += elapsed
            seconds[name].append(elapsed / repeats[name])
    found = {}
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        found[name] = Time(1e3 * statistics.median(values), 1e3 * low, 1e3 * high, len(values))
    return found


# The report


def environment() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    versions = {"torch": torch.__version__, "onnxruntime": ort.__version__, "gradfuse": gradfuse.__version__}
    return {"cpu": cpu, "cores": CORES, "python": platform.python_version(), **versions}


def page(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [
        "# Kernels and their peers on the CPU",
        "",
        f"{document['cpu']}, {document['cores']} cores; gradfuse {document['gradfuse']}, onnxruntime "
        f"{document['onnxruntime']}, PyTorch {document['torch']}. Times the roof, a copy of as many bytes; smaller is "
        "better. *share*: of the speed of bare traffic in the operator's proportion of reading and writing.",
        "",
        "| operator | size | type | threads | roof, ms | share | " + " | ".join(VARIANTS) + " |",
        "|---|---|---|---:|---:|---:|" + "---:|" * len(VARIANTS),
    ]
    for row in rows:
        cells = [_cell(row, variant) for variant in VARIANTS]
        size = f"{row.size}, {row.case}" if row.case else row.size
        share = row.traffic_ms / row.times["gradfuse"].median
        lines.append(
            f"| {row.operator} | {size} | {row.dtype} | {row.threads} | {row.copy_ms:.3g} | {share:.0%} | "
            + " | ".join(cells)
            + " |"
        )
    if any(time.wrong for row in rows for time in row.times.values()):
        lines += ["", "\\* further from float64 than rounding explains."]
    return "\n".join(lines) + "\n"


def _cell(row: Row, variant: str) -> str:
    if variant not in row.times:
        return "-"
    return f"{row.times_the_roof(variant):.2f}{'*' if row.times[variant].wrong else ''}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Times the roof by work, for every variant."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.5))
    names = [" ".join(filter(None, (r.operator, r.size, r.case, r.dtype, f"{r.threads} thr."))) for r in rows]
    for variant, marker in zip(VARIANTS, "oP^vsD", strict=True):
        points = [(r.times_the_roof(variant), k) for k, r in enumerate(rows) if variant in r.times]
        axes.plot([x for x, _ in points], [y for _, y in points], marker, label=variant, markersize=5)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("times the roof (a copy of as many bytes)")
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
