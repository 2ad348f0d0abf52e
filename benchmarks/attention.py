"""Measures both passes of attention, beside PyTorch, torch.compile and onnxruntime: `make bench-attention`.

    python benchmarks/attention.py [--only PATTERN] [--threads 1,2] [--rounds N] [--short] [--out FOLDER]

One step is the output of attention and the gradients of queries, keys and values for a gradient of the output. Ours
are ScaledDotProductAttention and its backward pass in onnxruntime; PyTorch's are F.scaled_dot_product_attention, which
is a flash kernel where the case allows it, and autograd; torch.compile has the same function. The usual way in
onnxruntime is MatMul, Softmax and MatMul, and for the gradients four MatMul and ScaledMaskedSoftmaxBackward; it has no
dropout here, which would only add to it. All run alternately in one process, with threads that wait without spinning;
times are medians, and ratios medians of the ratios of each round. Memory is how much a process of its own grows in a
step, beyond inputs and results.

Writes FOLDER/attention.md; a choice of cases, and --short, which takes a minute, only print.

Predicted before the first run, of ours over PyTorch's time: 0.8 to 0.95 where both run a flash kernel, as both are
bound by seven products of the speed of a matrix product, and ours packs a key for four times as many rows; 0.6 to 0.7
for causal masks, whose blocks of 96 leave out more than blocks of 256 by 512; 0.7 for masks of truth values, which
PyTorch copies into floats; 0.3 with dropout, for which PyTorch has no flash kernel, and 0.5 for shared heads, where it
copies keys. Of today's way in onnxruntime: 0.8 at 128 tokens, where all fits the caches, 0.5 at 2,048 and less beyond,
with a hundredth of the memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when PyTorch is loaded: its threads would go on spinning while the next variant runs, and take a core from it.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import onnx.helper
import onnx.parser
import torch
from ops import InSession, environment
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
REST = 0.002
"""Seconds between two variants, after which no thread of the first still has work."""
VARIANTS = ("gradfuse", "PyTorch", "torch.compile", "onnxruntime")
LARGEST_SCORES = 1 << 29
"""Bytes of a tensor of all scores up to which today's way is measured: it holds four of them."""
GRADIENTS = ("grad_query", "grad_key", "grad_value")


@dataclass(frozen=True)
class Case:
    """Attention of `heads` of queries on `groups` of keys, as many keys as queries."""

    length: int
    heads: int
    width: int
    batch: int = 1
    groups: int = 0
    causal: bool = False
    mask: str = ""
    dropout: bool = False

    @property
    def key_heads(self) -> int:
        return self.groups or self.heads

    @property
    def name(self) -> str:
        heads = f"{self.heads} heads on {self.groups}" if self.groups else f"{self.heads} heads"
        options = [("causal", self.causal), (f"{self.mask} mask", self.mask), ("dropout", self.dropout)]
        told = "".join(f", {name}" for name, there in options if there)
        return f"{self.batch} x {self.length:,}, {heads} of {self.width}{told}"

    @property
    def has_plain(self) -> bool:
        return 4 * self.batch * self.heads * self.length**2 <= LARGEST_SCORES


CASES = (
    Case(128, 4, 64, batch=4),
    Case(128, 4, 64, batch=4, causal=True),
    Case(512, 12, 64),
    Case(512, 12, 64, causal=True),
    Case(512, 32, 32, mask="boolean"),
    Case(2048, 12, 64),
    Case(2048, 12, 64, causal=True),
    Case(2048, 12, 64, mask="boolean"),
    Case(2048, 12, 64, mask="float"),
    Case(2048, 12, 64, causal=True, dropout=True),
    Case(2048, 32, 64, groups=8, causal=True),
    Case(2048, 8, 128, causal=True),
    Case(4096, 8, 64, causal=True),
    Case(8192, 4, 128, causal=True),
    Case(8192, 4, 64),
)
SHORT = (CASES[1], CASES[3], CASES[5], CASES[6])


@dataclass
class Row:
    case: Case
    threads: int
    times: dict[str, list[float]]
    growth: dict[str, float]


def inputs_of(case: Case) -> dict[str, Tensor]:
    """Queries, keys, values, the gradient of the output, and the mask by what it adds or shows."""
    torch.manual_seed(0)
    shape, key_shape = ((case.batch, h, case.length, case.width) for h in (case.heads, case.key_heads))
    tensors = {
        name: torch.randn(shape if name in ("query", "grad") else key_shape)
        for name in ("query", "key", "value", "grad")
    }
    whole = (case.batch, 1, case.length, case.length)
    if case.mask:
        shown = torch.rand(whole) < 0.8
        tensors["mask"] = shown if case.mask == "boolean" else torch.randn(whole).masked_fill(~shown, -torch.inf)
    if case.dropout:
        tensors["seed"] = torch.tensor(5)
    return tensors


def outputs_of(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    like = dict(zip(("output", *GRADIENTS), ("query", "query", "key", "value"), strict=True))
    # Written, as memory that nobody has written to is not there yet.
    return {name: torch.full_like(inputs[source], torch.nan) for name, source in like.items()}


def fused_model(case: Case, inputs: dict[str, Tensor]) -> onnx.ModelProto:
    optional = ["mask" if case.mask else "", "seed" if case.dropout else ""]
    attributes: dict[str, Any] = {"causal": int(case.causal)}
    if case.dropout:
        attributes["dropout_threshold"] = round(0.1 * 2**31)
    tensors = ["query", "key", "value"]
    nodes = [
        onnx.helper.make_node(
            "ScaledDotProductAttention", [*tensors, *optional], ["output", "logsumexp"], domain="aclnn", **attributes
        ),
        onnx.helper.make_node(
            "ScaledDotProductAttentionBackward", ["grad", *tensors, "output", "logsumexp", *optional], list(GRADIENTS),
            domain="aclnn", **attributes,
        ),
    ]  # fmt: skip
    types = {torch.float32: 1, torch.bool: 9, torch.int64: 7}
    declared = [onnx.helper.make_tensor_value_info(k, types[t.dtype], t.shape) for k, t in inputs.items()]
    made = [onnx.helper.make_tensor_value_info(k, 1, t.shape) for k, t in outputs_of(case, inputs).items()]
    graph = onnx.helper.make_graph(nodes, "attention", declared, made)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("aclnn", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def plain_model(case: Case, inputs: dict[str, Tensor]) -> onnx.ModelProto:
    """What an exporter writes, with the gradient of the softmax fused; shared heads of keys are repeated."""
    shape, key_shape = (",".join(map(str, inputs[name].shape)) for name in ("query", "key"))
    lines, masks, hidden = [], [], ""
    if case.causal:
        masks.append(f"bool[{case.length},{case.length}] seen")
        lines += ["masked = Where(seen, scores, never)", "hides = Not(seen)"]
    elif case.mask == "boolean":
        masks.append(f"bool[{case.batch},1,{case.length},{case.length}] mask")
        lines += ["masked = Where(mask, scores, never)", "hides = Not(mask)"]
    elif case.mask:
        masks.append(f"float[{case.batch},1,{case.length},{case.length}] mask")
        lines.append("masked = Add(scores, mask)")
    else:
        lines.append("masked = Identity(scores)")
    if case.causal:
        lines += ["two = Constant<value_ints=[0, 1]>()", "hidden = Unsqueeze(hides, two)"]
        hidden = ", hidden"
    elif case.mask == "boolean":
        lines.append("hidden = Identity(hides)")
        hidden = ", hidden"
    shared = case.heads // case.key_heads
    parts = f"{case.batch}, {case.key_heads}, {shared}, {case.length}, {case.width}"
    repeat = f"""
        parts = Constant<value_ints=[{parts}]>()
        third = Constant<value_ints=[2]>()
        whole = Constant<value_ints=[{", ".join(map(str, inputs["query"].shape))}]>()
    """
    for name in ("key", "value"):
        repeat += f"""
            {name}_column = Unsqueeze({name}, third)
            {name}_parts = Expand({name}_column, parts)
            {name}s = Reshape({name}_parts, whole)
        """
    unite = "split = Identity(parts)\n" + "".join(
        f"""
            {name}_split = Reshape({name}_heads, split)
            {name} = ReduceSum<keepdims=0>({name}_split, third)
        """
        for name in ("grad_key", "grad_value")
    )
    if shared == 1:
        repeat = "keys = Identity(key)\n values = Identity(value)\n"
        unite = "".join(f"{name} = Identity({name}_heads)\n" for name in ("grad_key", "grad_value"))
    declared = [
        f"float[{shape if name in ('query', 'grad') else key_shape}] {name}"
        for name in ("query", "key", "value", "grad")
    ]
    made = [f"float[{shape}] output", f"float[{shape}] grad_query"]
    made += [f"float[{key_shape}] {name}" for name in ("grad_key", "grad_value")]
    body = "\n".join(lines)
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20, "aclnn": 1]>
        main ({", ".join([*declared, *masks])}) => ({", ".join(made)}) {{
        {repeat}
        keys_turned = Transpose<perm=[0, 1, 3, 2]>(keys)
        products = MatMul(query, keys_turned)
        scale = Constant<value=float {{{case.width**-0.5}}}>()
        never = Constant<value_float=-inf>()
        scores = Mul(products, scale)
        {body}
        p = Softmax<axis=-1>(masked)
        output = MatMul(p, values)
        p_turned = Transpose<perm=[0, 1, 3, 2]>(p)
        grad_value_heads = MatMul(p_turned, grad)
        values_turned = Transpose<perm=[0, 1, 3, 2]>(values)
        through = MatMul(grad, values_turned)
        of_scores = aclnn.ScaledMaskedSoftmaxBackward<scale={case.width**-0.5}, fix_triu_mask=0>(through, p{hidden})
        grad_query = MatMul(of_scores, keys)
        of_scores_turned = Transpose<perm=[0, 1, 3, 2]>(of_scores)
        grad_key_heads = MatMul(of_scores_turned, query)
        {unite} }}""")


def call_of(
    variant: str, case: Case, inputs: dict[str, Tensor], threads: int, outputs: dict[str, Tensor] | None = None
) -> Callable[[], Any]:
    """A step; PyTorch's gives its results, the others write theirs into `outputs`."""
    if variant in ("PyTorch", "torch.compile"):
        torch.set_num_threads(threads)
        leaves = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=inputs.get("mask"), is_causal=case.causal,
                dropout_p=0.1 if case.dropout else 0.0, enable_gqa=bool(case.groups),
            )  # fmt: skip

        called: Callable[..., Tensor] = attention
        if variant == "torch.compile":
            # What was compiled for another number of threads may not stay.
            torch.compiler.reset()
            called = torch.compile(attention)

        def step() -> tuple[Tensor, ...]:
            output = called(*leaves)
            return output, *torch.autograd.grad(output, leaves, inputs["grad"])

        return step
    given = dict(inputs)
    if variant == "onnxruntime":
        given.pop("seed", None)
        if case.causal:
            given["seen"] = torch.ones(case.length, case.length, dtype=torch.bool).tril()
    model = (fused_model if variant == "gradfuse" else plain_model)(case, inputs)
    return InSession(model, threads, library=True).bound(given, outputs or outputs_of(case, inputs))


def agree(case: Case, variants: Sequence[str], threads: int) -> None:
    """Raise AssertionError if results are further apart than float32 rounding explains."""
    inputs = inputs_of(case)
    found: dict[str, Sequence[Tensor]] = {}
    for name in variants:
        outputs = outputs_of(case, inputs)
        results = call_of(name, case, inputs, threads, outputs)()
        found[name] = [one.detach() for one in results] if results else list(outputs.values())
    # Each drops what it draws itself.
    for name in () if case.dropout else variants[1:]:
        for one, other in zip(found[name], found[variants[0]], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def in_turns(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """The milliseconds of each one, round by round."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for place, one in enumerate(calls):
            start = time.perf_counter()
            one()
            if turn:
                found[place].append(1e3 * (time.perf_counter() - start))
            time.sleep(REST)
    return found


def growth_of(variant: str, case: Case, threads: int) -> float:
    """MiB by which a process of its own grows in a step, beyond inputs and results."""
    program = [sys.executable, __file__, "--growth", f"{variant}:{CASES.index(case)}", "--threads", str(threads)]
    return float(subprocess.run(program, capture_output=True, text=True, check=True).stdout)


def print_growth(variant: str, case: Case, threads: int) -> None:
    step = call_of(variant, case, inputs_of(case), threads)
    if variant == "torch.compile":
        step()  # What compiling takes is no part of a step.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    results = step()
    kept = sum(4 * one.numel() for one in results) / 2**20 if isinstance(results, tuple) else 0.0
    print(_resident("VmHWM") - before - kept)


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure(case: Case, threads: int, rounds: int) -> Row:
    variants = [name for name in VARIANTS if name != "onnxruntime" or case.has_plain]
    agree(case, variants, threads)
    inputs = inputs_of(case)
    times = in_turns([call_of(name, case, inputs, threads) for name in variants], rounds)
    growth = {name: growth_of(name, case, threads) for name in variants}
    return Row(case, threads, dict(zip(variants, times, strict=True)), growth)


def cells(row: Row) -> list[str]:
    found = [row.case.name, str(row.threads), f"{statistics.median(row.times['gradfuse']):.3g}"]
    for name in VARIANTS[1:]:
        if name not in row.times:
            found += ["-", "-"]
            continue
        ratios = [ours / theirs for ours, theirs in zip(row.times["gradfuse"], row.times[name], strict=True)]
        found += [f"{statistics.median(row.times[name]):.3g}", f"{statistics.median(ratios):.2f}"]
    return found + [f"{row.growth[name]:.0f}" if name in row.growth else "-" for name in VARIANTS]


def page(rows: list[Row]) -> str:
    about = environment()
    lines = [
        "# Attention, forward and backward",
        "",
        f"{about['cpu']}, {about['cores']} cores; gradfuse {about['gradfuse']}, onnxruntime {about['onnxruntime']}, "
        f"PyTorch {about['torch']}. float32; milliseconds of both passes, ours over the others', and MiB that a "
        "process grows by in a step.",
        "",
        "| batch x length, heads | threads | gradfuse | PyTorch | ratio | torch.compile | ratio | MatMul, Softmax | "
        "ratio | MiB | PyTorch | torch.compile | MatMul, Softmax |",
        f"|---|{'---:|' * 12}",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name it matches")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--short", action="store_true", help="a few cases on two threads, to steer by")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--growth", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.growth:
        variant, _, index = options.growth.partition(":")
        print_growth(variant, CASES[int(index)], int(options.threads))
        return
    rows = []
    for case in SHORT if options.short else CASES:
        if not fnmatch.fnmatch(case.name, f"*{options.only}*"):
            continue
        for threads in [2] if options.short else map(int, options.threads.split(",")):
            rows.append(measure(case, threads, 5 if options.short else options.rounds))
            print(page(rows).splitlines()[-1], flush=True)
    whole = options.only == "*" and not options.short
    out = options.out or (ROOT / "benchmarks" / "results" if whole else None)
    if out is not None:
        (out / "attention.md").write_text(page(rows))


if __name__ == "__main__":
    main()
