"""Compares the kernels of a wheel with those that this machine's own compiler built, one operator after the other.

    python benchmarks/wheel_against_gcc.py WHEEL [--rounds N] [--only OP]

Prints the wheel's time divided by the other's: above 1 the wheel is slower. Calls of both take turns, so that whatever
else the machine does meets both; a ratio is the median of those of all rounds. One thread, float32, in onnxruntime,
with the largest call of an operator that `cpp_ext/tests/device/cases` has below five million numbers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort

import gradfuse
from gradfuse.custom_ops import OPS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpp_ext" / "tests" / "device"))
from case import Case
from cases import cases
from installed.one_node import feeds_of, model_of

MOST_NUMBERS = 5_000_000
SHORTEST = 2e-3
"""Seconds that a round takes of each library at least: of calls that are shorter it has several."""


def size(case: Case) -> int:
    return sum(values.bits.size for values in case.inputs if values is not None) + sum(e.size for e in case.expected)


def largest(op: str) -> Case:
    """The largest call of an operator that is measured."""
    found = (case for case in cases(large=True, only=op) if case.dtype == "float32" and case.fault == 0)
    return max((case for case in found if size(case) <= MOST_NUMBERS), key=size)


def caller(case: Case, library: str) -> Callable[[], Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(library)
    session = ort.InferenceSession(model_of(case, body=False), options, providers=["CPUExecutionProvider"])
    feeds = feeds_of(case)
    return lambda: session.run(None, feeds)


def seconds(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def ratios(case: Case, libraries: tuple[str, str], rounds: int) -> tuple[float, list[float]]:
    """The other library's median time, and of each round the wheel's time divided by the other's."""
    wheel, other = (caller(case, library) for library in libraries)
    for call in (wheel, other):
        call()
    calls = max(1, round(SHORTEST / max(seconds(other, 3), 1e-7)))
    times = []
    for turn in range(rounds):
        if turn % 2:
            a = seconds(wheel, calls)
            b = seconds(other, calls)
        else:
            b = seconds(other, calls)
            a = seconds(wheel, calls)
        times.append((a, b))
    return statistics.median(b for _, b in times), [a / b for a, b in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--only", choices=OPS, metavar="OP")
    options = parser.parse_args()
    ort.set_default_logger_severity(4)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(options.wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/libgradfuse.so"))
            wheel = archive.extract(name, folder)
        print(f"{'operator':30} {'this build':>12} {'wheel / this':>12}  middle half of the rounds", flush=True)
        medians = []
        for op in [options.only] if options.only else OPS:
            median, found = ratios(largest(op), (wheel, gradfuse.get_library_path()), options.rounds)
            low, middle, high = statistics.quantiles(found, n=4)
            medians.append(middle)
            print(f"{op:30} {median * 1e3:9.3f} ms {middle:12.2f}  {low:.2f} to {high:.2f}", flush=True)
        print(f"{'geometric mean':30} {'':12} {statistics.geometric_mean(medians):12.2f}")


if __name__ == "__main__":
    main()
