"""Measures from which size on it pays to write results around the caches: `make bench-streaming`.

    python benchmarks/streaming.py [--out FILE]

CrossEntropyLossGrad runs in onnxruntime on tensors of several sizes, with ordinary and with streaming stores, and then
PyTorch reads and writes its result, as the next operator of a training step does. Either the same tensors come again
and again, as those of a small model do, or three sets of them in turn. All variants take turns, and times are medians.

Prints the rows of a table in Markdown as they come, and writes the table to FILE.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from pathlib import Path

import torch
from ops import InSession, environment
from works import cross_entropy, fused_model

import gradfuse

CLASSES, SETS, ROUNDS, THREADS = 8192, 3, 40, 2
NEVER = 2**62


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the table goes")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    lines = [
        "# Stores into and around the caches",
        "",
        f"{environment()['cpu']}, {THREADS} threads. Milliseconds of CrossEntropyLossGrad and of what reads "
        "and writes its result, by `benchmarks/streaming.py`.",
        "",
        "| MiB moved | type | same tensors, ordinary stores | streaming | three sets in turn, ordinary | streaming |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for mebibytes, dtype in itertools.product((4, 16, 24, 32, 64, 128), ("float32", "bfloat16")):
        times = measure(mebibytes << 20, dtype)
        cells = " | ".join(f"{op:.2f} + {reader:.2f}" for op, reader in times)
        lines.append(f"| {mebibytes} | {dtype} | {cells} |")
        print(lines[-1], flush=True)
    page = "\n".join(lines) + "\n"
    if options.out is not None:
        options.out.write_text(page)


def measure(size: int, dtype: str) -> list[tuple[float, float]]:
    """Milliseconds of the operator and its reader: same tensors, ordinary and streaming; three sets cyclically,
    likewise."""
    width = 4 if dtype == "float32" else 2
    work = cross_entropy("", "", dtype, (size // (2 * width * CLASSES), CLASSES))
    inputs = [work.inputs() for _ in range(SETS)]
    outputs = [{"out": torch.empty(work.output, dtype=given["log_prob"].dtype)} for given in inputs]
    fused = InSession(fused_model(work, inputs[0]), THREADS, library=True)
    calls = [fused.bound(given, out) for given, out in zip(inputs, outputs, strict=True)]
    results = [out["out"].view(torch.int32 if width == 4 else torch.int16) for out in outputs]
    set_threshold = ctypes.CDLL(gradfuse.get_library_path()).gradfuse_stream_bytes
    variants = list(itertools.product((False, True), (NEVER, 0)))
    seconds: dict[tuple[bool, int], list[tuple[float, float]]] = {variant: [] for variant in variants}
    for k in range(ROUNDS + 1):
        for changes, threshold in variants:
            set_threshold(ctypes.c_int64(threshold))
            index = k % SETS if changes else 0
            start = time.perf_counter()
            calls[index]()
            middle = time.perf_counter()
            torch.bitwise_xor(results[index], 1, out=results[index])
            if k > 0:
                seconds[changes, threshold].append((middle - start, time.perf_counter() - middle))
    return [
        (1e3 * statistics.median(op for op, _ in pairs), 1e3 * statistics.median(reader for _, reader in pairs))
        for pairs in seconds.values()
    ]


if __name__ == "__main__":
    main()
