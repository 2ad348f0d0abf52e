"""Measures the head of a model, a linear layer and cross entropy with their gradients: `make bench-head`.

    python benchmarks/head.py [--quick] [--threads N] [--rounds N] [--out FOLDER]
    python benchmarks/head.py memory VARIANT ROWS FEATURES CLASSES

LinearCrossEntropy is compared with the nodes that a step has without it (`MatMul`, `LogSoftmax`, CrossEntropyLossGrad
and two `MatMul`), PyTorch's `F.cross_entropy(F.linear(...))`, the same by torch.compile, and its chunked
`F.linear_cross_entropy`. All take turns in one process; times are medians of ratios. Memory is by how much a process of
its own grows in a call, beyond inputs, loss and gradients. Writes FOLDER/head.md; with --quick a few sizes are printed.

The prediction: above 32 MiB of logits, the operator moves the weight and its gradient once for each 32 MiB, or makes
four products where others make three. It saves about eight passes over the logits, which take as long as a product of
256 features. So it is level with the nodes at 1,024 features, ahead at 256, and ahead of both where the nodes' three
tensors of logits do not fit; and it grows by less than 200 MiB for any number of classes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Read when PyTorch is loaded: its threads would go on spinning while the next variant runs, and take a core from it.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import onnx
import torch
from ops import Call, InSession, environment
from step_memory import resident
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
REST = 0.002
"""Seconds between two variants, after which no thread of the first still has work."""

SIZES = [(1024, 1024, classes) for classes in (8_192, 32_000, 65_536, 128_256, 152_000, 256_000)]
"""Rows, features and classes."""
SIZES += [(128, 256, 32_000), (512, 256, 32_000), (128, 256, 128_256), (512, 256, 128_256)]
QUICK = [(512, 256, 4_096), (128, 256, 32_000), (512, 256, 32_000), (1024, 1024, 8_192)]

_OPERATOR = """
    loss, grad_input, grad_weight, grad_bias, logsumexp =
        aclnn.LinearCrossEntropy<output_mask = [1, 1, 1, 0, 0]>(input, weight, target)
"""
_NODES = """
    one = Constant<value_float = 1.0>()
    last = Constant<value_ints = [1]>()
    turned = Transpose<perm = [1, 0]>(weight)
    logits = MatMul(input, turned)
    log_prob = LogSoftmax<axis = 1>(logits)
    column = Unsqueeze(target, last)
    picked = GatherElements<axis = 1>(log_prob, column)
    mean = ReduceMean<keepdims = 0>(picked)
    loss = Neg(mean)
    grad = aclnn.CrossEntropyLossGrad(one, log_prob, target)
    grad_input = MatMul(grad, weight)
    turned_grad = Transpose<perm = [1, 0]>(grad)
    grad_weight = MatMul(turned_grad, input)
"""


class Head:
    """The tensors of a head, and what computes its loss and gradients."""

    def __init__(self, rows: int, features: int, classes: int, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.threads = threads
        self.input = torch.randn(rows, features, requires_grad=True)
        self.weight = (torch.randn(classes, features) / features**0.5).requires_grad_()
        self.target = torch.randint(0, classes, (rows,))

    def call(self, variant: str) -> Call:
        if variant in ("operator", "nodes"):
            return self._in_session(_OPERATOR if variant == "operator" else _NODES)
        options = torch.nn.LinearCrossEntropyOptions() if variant == "chunked" else None

        def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return torch.nn.functional.linear_cross_entropy(x, weight, target, options=options)

        taken: Callable[..., Tensor] = torch.compile(loss) if variant == "compile" else loss
        leaves = (self.input, self.weight)
        gradients = [torch.zeros_like(leaf) for leaf in leaves]

        def run() -> None:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient.zero_()
            taken(*leaves, self.target).backward()  # type: ignore[no-untyped-call]

        return run

    def _in_session(self, text: str) -> Call:
        (rows, features), classes = self.input.shape, len(self.weight)
        x, weight = f"float[{rows}, {features}]", f"float[{classes}, {features}]"
        model = onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 17, "aclnn": 1]>'
            f"head ({x} input, {weight} weight, int64[{rows}] target)"
            f"=> (float loss, {x} grad_input, {weight} grad_weight) {{ {text} }}"
        )
        given = {"input": self.input.detach(), "weight": self.weight.detach(), "target": self.target}
        outputs = {"loss": torch.zeros(())}
        outputs |= {f"grad_{name}": torch.zeros_like(given[name]) for name in ("input", "weight")}
        return InSession(model, self.threads, library=True).bound(given, outputs)


VARIANTS = ("operator", "nodes", "eager", "compile", "chunked")


def in_turns(head: Head, rounds: int) -> dict[str, float]:
    """The median of each variant's milliseconds, and below the name of each but the first of the operator's share."""
    calls = {variant: head.call(variant) for variant in VARIANTS}
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(rounds + 1):
        for variant, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                found[variant].append(1e3 * (time.perf_counter() - start))
            time.sleep(REST)
    medians = {variant: statistics.median(times) for variant, times in found.items()}
    for variant in VARIANTS[1:]:
        ratios = [ours / theirs for ours, theirs in zip(found["operator"], found[variant], strict=True)]
        medians[f"{variant} ratio"] = statistics.median(ratios)
    return medians


def memory(variant: str, size: tuple[int, ...], threads: int) -> float:
    """MiB that a process of its own grows by."""
    command = [sys.executable, __file__, "memory", variant, *map(str, size), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def grown(variant: str, size: tuple[int, int, int], threads: int) -> float:
    # Of a call in a small size come code and threads.
    Head(4, 8, 16, threads).call(variant)()
    call = Head(*size, threads).call(variant)
    start = resident("VmRSS")
    call()
    return resident("VmHWM") - start


def line(size: tuple[int, int, int], threads: int, rounds: int) -> str:
    times = in_turns(Head(*size, threads), rounds)
    cells = [" x ".join(f"{one:,}" for one in size), f"{size[0] * size[2] / 2**18:.0f}"]
    for variant in VARIANTS:
        ratio = f" ({times[f'{variant} ratio']:.2f})" if f"{variant} ratio" in times else ""
        cells += [f"{times[variant]:.4g}{ratio}", f"{memory(variant, size, threads):.0f}"]
    return f"| {' | '.join(cells)} |"


def page(lines: list[str]) -> str:
    about = environment()
    names = {"nodes": "nodes", "eager": "PyTorch", "compile": "torch.compile", "chunked": "chunked"}
    columns = ["rows x features x classes", "logits, MiB", "operator, ms", "MiB"]
    for name in names.values():
        columns += [f"{name}, ms (ratio)", "MiB"]
    return "\n".join(
        [
            "# A linear layer and cross entropy, with their gradients",
            "",
            f"{about['cpu']}, {about['cores']} cores; gradfuse {about['gradfuse']}, onnxruntime "
            f"{about['onnxruntime']}, PyTorch {about['torch']}. float32. Of each: milliseconds, the operator's time "
            "over it, and by how many MiB a process grows beyond inputs and gradients.",
            "",
            f"| {' | '.join(columns)} |",
            f"|{'---|' * len(columns)}",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="memory VARIANT ROWS FEATURES CLASSES", help="one variant's memory")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.what:
        _, variant, *numbers = options.what
        rows, features, classes = map(int, numbers)
        print(grown(variant, (rows, features, classes), options.threads))
        return
    lines = []
    for size in QUICK if options.quick else SIZES:
        lines.append(line(size, options.threads, options.rounds))
        print(lines[-1], flush=True)
    if not options.quick:
        (options.out / "head.md").write_text(page(lines))


if __name__ == "__main__":
    main()
