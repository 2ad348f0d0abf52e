"""Measures the CUDA kernels: `make gpu-bench`.

    gpu_bench.py [--simt] [--only OP] [--repeats N] [--output FILE]

Times are medians over CUDA events; data that would fit into the GPU's cache comes in several copies, used alternately.
The roof is a copy of as many bytes as the op must at least move, measured beside it. With a PyTorch that has CUDA its
own operators run on the same shapes, eager and compiled. Results go to benchmarks/results/. With --simt everything runs
on the host machine of the tests, at tiny sizes: to test this program, not to measure anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpp_ext" / "tests" / "device"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpp_ext" / "tools"))

import device_library
from case import Case
from cases import cases
from device import Buffer, Call, Device, DeviceError, Operand, Values

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
WIDTHS = {**SIZES, "float64": 8}
CACHE = 256 << 20  # bytes; more than any GPU's


@dataclass
class Row:
    """One measurement."""

    op: str
    size: str
    dtype: str
    bytes: int
    milliseconds: float
    copy_milliseconds: float
    peers: dict[str, float] = field(default_factory=dict)  # milliseconds

    @property
    def share(self) -> float:
        """Of the bandwidth of a copy."""
        return self.copy_milliseconds / self.milliseconds


@dataclass(frozen=True)
class Work:
    """An op on one shape: what makes its operands anew, the bytes it must move, and what PyTorch does instead."""

    op: str
    size: str
    dtype: str
    bytes: int
    prepare: Callable[[], Call]
    peer: Callable[[Any, str], Callable[[], Any]] | None  # of torch and a device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simt", action="store_true", help="on the SIMT machine of the tests")
    parser.add_argument("--only", metavar="OP", help="one op only")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--output", type=Path, help="instead of benchmarks/results/<name of the GPU>.json")
    options = parser.parse_args()
    try:
        device = Device(device_library.build("simt" if options.simt else "cuda"))
    except (device_library.BuildError, DeviceError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    torch = _torch(needs_cuda=not options.simt)
    print(f"{device.name}; PyTorch {torch.__version__ if torch else 'with CUDA is not there'}")
    print(f"{'op':28} {'size':28} {'dtype':9} {'ms':>9} {'GB/s':>7} {'of a copy':>9}  peers, times as long")
    rows = []
    failures = []
    for work in _works(device, tiny=options.simt):
        if options.only not in (None, work.op):
            continue
        try:
            rows.append(_measure(device, work, torch, 2 if options.simt else options.repeats, options.simt))
            print(_line(rows[-1]), flush=True)
        except DeviceError as error:  # too large for this GPU, as a rule
            failures.append(f"{work.op} {work.size} {work.dtype}: {error}")
            print(failures[-1], flush=True)
    name = re.sub(r"\W+", "-", device.name).strip("-").lower()
    output = options.output or ROOT / "benchmarks" / "results" / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    version = None if torch is None else torch.__version__
    found = {"rows": [asdict(row) for row in rows], "failures": failures}
    report = {"device": device.name, "torch": version, **found}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)
    return 0


def _torch(needs_cuda: bool) -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() or not needs_cuda else None


def _line(row: Row) -> str:
    peers = ", ".join(f"{name} {time / row.milliseconds:.2f}" for name, time in row.peers.items())
    rate = row.bytes / row.milliseconds / 1e6
    return (
        f"{row.op:28} {row.size:28} {row.dtype:9} {row.milliseconds:9.4f} {rate:7.0f} {100 * row.share:8.0f}%  {peers}"
    )


def _measure(device: Device, work: Work, torch: Any, repeats: int, simt: bool) -> Row:
    copies = 1 if simt else max(1, min(8, -(-2 * CACHE // work.bytes)))
    calls = [work.prepare() for _ in range(copies)]
    turn = iter(range(10**9))
    source, target = (Buffer(device, work.bytes // 2) for _ in range(2))
    source.fill(1)

    def run() -> None:
        calls[next(turn) % copies].run()

    def copy() -> None:
        device.library.gradfuse_device_copy(*map(_pointer, (target.address, source.address)), _pointer(work.bytes // 2))

    times: dict[str, list[float]] = {"op": [], "copy": []}
    for _ in range(3):  # in turns, so that a change of clocks meets both; the first warms up
        times["op"] = times["op"][-2 * repeats :] + device.milliseconds(run, repeats)
        times["copy"] = times["copy"][-2 * repeats :] + device.milliseconds(copy, repeats)
    medians = {name: statistics.median(values[repeats:]) for name, values in times.items()}
    row = Row(work.op, work.size, work.dtype, work.bytes, max(medians["op"], 1e-6), max(medians["copy"], 1e-6))
    calls.clear()
    if torch is not None and work.peer is not None:
        start = work.peer(torch, "cpu" if simt else "cuda")
        row.peers["torch"] = _time_torch(torch, start, repeats, simt)
        if not simt:
            row.peers["torch.compile"] = _time_torch(torch, torch.compile(start), repeats, simt)
    return row


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _time_torch(torch: Any, start: Callable[[], Any], repeats: int, simt: bool) -> float:
    with torch.no_grad():
        for _ in range(3):
            start()
        if simt:
            return 0.0
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            start()
            event.record()
        torch.cuda.synchronize()
        return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(events)))


def _works(device: Device, *, tiny: bool) -> Iterator[Work]:
    """The sizes that are given here for an op, and for those without one the largest case of its tests."""
    measured = set()
    for work in _chosen_works(device, tiny=tiny):
        measured.add(work.op)
        yield work
    others = device.signatures.keys() - measured
    largest: dict[tuple[str, str], Case] = {}
    for case in cases(large=not tiny) if others else ():
        known = largest.get((case.op, case.dtype))
        if case.op in others and case.fault == 0 and (known is None or _bytes(known) < _bytes(case)):
            largest[case.op, case.dtype] = case
    for case in largest.values():
        yield _of_case(device, case)


def _bytes(case: Case) -> int:
    read = sum(values.bits.nbytes for values in case.inputs if values is not None)
    return read + sum(exact.size * WIDTHS[case.dtype] for exact in case.expected)


def _of_case(device: Device, case: Case) -> Work:
    def prepare() -> Call:
        inputs: list[Operand | None] = []
        for described, values in zip_longest(device.signatures[case.op]["inputs"], case.inputs):
            if values is not None and described["read_by_host"]:
                inputs.append(Operand(values.bits, values.dtype, values.bits.shape))
            else:
                inputs.append(None if values is None else device.upload(values))
        outputs = [device.empty(exact.shape, type_) for exact, type_ in zip(case.expected, case.dtypes(), strict=True)]
        return device.prepare(case.op, [*inputs, *outputs], **case.attributes)

    return Work(case.op, case.name[:28], case.dtype, _bytes(case), prepare, None)


def _chosen_works(device: Device, *, tiny: bool) -> Iterator[Work]:
    for dtype in SIZES:
        for rows, classes in [(9, 33)] if tiny else [(8192, 128256), (8192, 50257), (4096, 151643), (256, 32000)]:
            yield _cross_entropy(device, dtype, rows, classes)
        plain = (64, 33) if tiny else (96 << 10, 1024)
        for shapes in (((), plain, plain), (plain,) * 3, (plain, plain, (1, plain[1])), (plain, plain, (plain[0], 1))):
            yield _mse(device, dtype, shapes)
        for size in (40,) if tiny else (64, 100, 128, 512, 1000, 1024, 2048, 4095, 4096):
            queries = 2 if tiny else (32 << 20) // size // 16
            yield _softmax(device, dtype, (2, 8, queries, size))
        rows, columns = (500, 24) if tiny else (65536, 2048)
        even = np.linspace(0, rows, 129).round().astype(np.int64)[1:]
        for name, ends in (("even", even), ("one group", np.array([rows])), ("mostly empty", _mostly_empty(rows))):
            yield _grouped(device, dtype, rows, columns, name, ends)
        yield _grouped3(device, dtype, (4, 20, 24) if tiny else (128, 512, 2048))
    for steps, items, classes, labels in (
        [(12, 2, 8, 3)] if tiny else [(400, 16, 1024, 60), (800, 32, 4096, 100), (1500, 32, 32, 200)]
    ):
        yield from _ctc(device, steps, items, classes, labels)


def _mostly_empty(rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([*[rows // 3] * 1000, *[rows // 2] * 1047, rows])


def _filled(device: Device, shape: tuple[int, ...], dtype: str, seed: int, *, log_prob: bool = False) -> Operand:
    """Random numbers in device memory: a million of them, over and over, as a host takes long to make more."""
    total = int(np.prod(shape, dtype=np.int64))
    values = np.random.default_rng(seed).standard_normal(min(total, 1 << 20))
    bits = Values.of(-np.abs(3 * values) - 2 if log_prob else values, dtype).bits
    whole = Values(dtype, np.resize(bits, total))
    operand = device.upload(whole)
    return Operand(operand.memory, dtype, shape)


def _random(torch: Any, device: str, shape: tuple[int, ...], dtype: str) -> Any:
    return torch.randn(shape, device=device, dtype=getattr(torch, dtype))


def _cross_entropy(device: Device, dtype: str, rows: int, classes: int) -> Work:
    target = np.random.default_rng(0).integers(0, classes, rows)

    def prepare() -> Call:
        grad = device.upload(Values.of(np.ones(()), dtype))
        log_prob = _filled(device, (rows, classes), dtype, 1, log_prob=True)
        out = device.empty((rows, classes), dtype)
        inputs = [grad, log_prob, device.upload(Values("int64", target)), None, None, None]
        return device.prepare("CrossEntropyLossGrad", [*inputs, out])

    def peer(torch: Any, where: str) -> Callable[[], Any]:
        aten = torch.ops.aten
        log_prob = _random(torch, where, (rows, classes), dtype)
        labels = torch.from_numpy(target).to(where)
        one = torch.ones((), device=where, dtype=log_prob.dtype)
        count = torch.full((), float(rows), device=where, dtype=log_prob.dtype)

        def start() -> Any:
            grad = aten.nll_loss_backward(one, log_prob, labels, None, 1, -100, count)
            return aten._log_softmax_backward_data(grad, log_prob, 1, log_prob.dtype)

        return start

    count = 2 * rows * classes * SIZES[dtype] + 8 * rows
    return Work("CrossEntropyLossGrad", f"({rows}, {classes})", dtype, count, prepare, peer)


def _mse(device: Device, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> Work:
    whole = np.broadcast_shapes(*shapes)

    def prepare() -> Call:
        inputs = [_filled(device, shape, dtype, seed) for seed, shape in enumerate(shapes)]
        return device.prepare("MseLossBackward", [*inputs, device.empty(whole, dtype)])

    def peer(torch: Any, where: str) -> Callable[[], Any]:
        grad, own, target = (_random(torch, where, shape, dtype) for shape in shapes)
        return lambda: torch.ops.aten.mse_loss_backward(grad, own, target.expand(whole), 1)

    elements = sum(int(np.prod(shape, dtype=np.int64)) for shape in (*shapes, whole))
    name = "x".join("1" if not shape else str(shape[0]) + "," + str(shape[1]) for shape in shapes)
    return Work("MseLossBackward", name[:28], dtype, elements * SIZES[dtype], prepare, peer)


def _softmax(device: Device, dtype: str, shape: tuple[int, int, int, int]) -> Work:
    batch, _, queries, size = shape
    mask = np.random.default_rng(0).random((batch, 1, queries, size)) < 0.3

    def prepare() -> Call:
        inputs = [_filled(device, shape, dtype, seed) for seed in range(2)]
        inputs.append(device.upload(Values("bool", mask)))
        return device.prepare("ScaledMaskedSoftmaxBackward", [*inputs, device.empty(shape, dtype)], scale=0.125)

    def peer(torch: Any, where: str) -> Callable[[], Any]:
        grad, y = (_random(torch, where, shape, dtype) for _ in range(2))
        hidden = torch.from_numpy(mask).to(where)
        backward = torch.ops.aten._softmax_backward_data
        return lambda: (0.125 * backward(grad, y, -1, grad.dtype)).masked_fill(hidden, 0.0)

    count = 3 * int(np.prod(shape, dtype=np.int64)) * SIZES[dtype] + mask.size
    return Work("ScaledMaskedSoftmaxBackward", str(shape), dtype, count, prepare, peer)


def _grouped(
    device: Device, dtype: str, rows: int, columns: int, name: str, ends: np.ndarray[Any, np.dtype[np.int64]]
) -> Work:
    def prepare() -> Call:
        inputs = [_filled(device, (rows, columns), dtype, 0), device.upload(Values("int64", ends))]
        return device.prepare("GroupedBiasAddGrad", [*inputs, device.empty((len(ends), columns), dtype)])

    def peer(torch: Any, where: str) -> Callable[[], Any]:
        grad = _random(torch, where, (rows, columns), dtype)
        sizes = torch.from_numpy(np.diff(ends, prepend=0)).to(where)
        group = torch.repeat_interleave(torch.arange(len(ends), device=where), sizes)
        return lambda: grad.new_zeros(len(ends), columns).index_add(0, group, grad)

    count = (rows + len(ends)) * columns * SIZES[dtype]
    return Work("GroupedBiasAddGrad", f"({rows}, {columns}) {name}", dtype, count, prepare, peer)


def _grouped3(device: Device, dtype: str, shape: tuple[int, int, int]) -> Work:
    groups, rows, columns = shape

    def prepare() -> Call:
        inputs = [_filled(device, shape, dtype, 0), None]
        return device.prepare("GroupedBiasAddGrad", [*inputs, device.empty((groups, columns), dtype)])

    def peer(torch: Any, where: str) -> Callable[[], Any]:
        grad = _random(torch, where, shape, dtype)
        return lambda: grad.sum(1)

    return Work("GroupedBiasAddGrad", str(shape), dtype, groups * (rows + 1) * columns * SIZES[dtype], prepare, peer)


def _ctc(device: Device, steps: int, items: int, classes: int, labels: int) -> Iterator[Work]:
    random = np.random.default_rng(0)
    targets = random.integers(1, classes, (items, labels))
    width = 2 * labels + 1
    lengths = [Values("int64", np.full(items, length)) for length in (steps, labels)]

    def log_probs() -> Operand:
        logits = random.standard_normal((steps, items, classes)).astype(np.float32)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return device.upload(Values("float32", logits))

    def forward() -> tuple[Call, list[Operand]]:
        on_host = Operand(lengths[1].bits, "int64", (items,))
        inputs = [log_probs(), device.upload(Values("int64", targets)), device.upload(lengths[0]), on_host]
        outputs = [device.empty((items,), "float32"), device.empty((items, steps, width), "float32")]
        return device.prepare("CtcLoss", [*inputs, *outputs]), [*inputs, *outputs]

    def backward() -> Call:
        call, operands = forward()
        call.run()
        device.call("synchronize")
        grad = device.upload(Values("float32", np.ones(items, np.float32)))
        inputs = [grad, *operands[:3], device.upload(lengths[1]), *operands[4:]]
        return device.prepare("CtcLossBackward", [*inputs, device.empty((steps, items, classes), "float32")])

    def prepared(torch: Any, where: str) -> tuple[Any, ...]:
        lp = torch.randn(steps, items, classes, device=where).log_softmax(2)
        arrays = (targets, *(length.bits for length in lengths))
        return lp, *(torch.from_numpy(array).to(where) for array in arrays)

    def forward_peer(torch: Any, where: str) -> Callable[[], Any]:
        arguments = prepared(torch, where)
        return lambda: torch.ops.aten._ctc_loss(*arguments, 0, False)

    def backward_peer(torch: Any, where: str) -> Callable[[], Any]:
        arguments = prepared(torch, where)
        nll, alpha = torch.ops.aten._ctc_loss(*arguments, 0, False)
        grad = torch.ones_like(nll)
        return lambda: torch.ops.aten._ctc_loss_backward(grad, *arguments, nll, alpha, 0, False)

    size = f"T{steps} N{items} C{classes} L{labels}"
    alpha_bytes = 4 * steps * items * width
    read = 4 * steps * items * min(classes, width)
    yield Work("CtcLoss", size, "float32", read + alpha_bytes, lambda: forward()[0], forward_peer)
    count = 8 * steps * items * classes + alpha_bytes
    yield Work("CtcLossBackward", size, "float32", count, backward, backward_peer)


if __name__ == "__main__":
    sys.exit(main())
