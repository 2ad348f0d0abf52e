"""Measures Convolution and ConvolutionBackward layer by layer, beside PyTorch: `make bench-convolutions`.

    python benchmarks/convolutions.py [--only PATTERN] [--threads 1,2] [--rounds N] [--out FOLDER]

The output and the gradients of input and of weight are computed apart, the output also by onnxruntime's Conv, of a
weight that is no constant. All run alternately in one process, with threads that wait without spinning, and times are
medians. Writes FOLDER/convolutions.md; a choice of layers is only printed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Read when PyTorch is loaded: its threads would go on spinning while the next variant runs, and take a core from it.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import onnx.helper
import torch
from ops import Call, InSession, environment
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
REST = 0.002
"""Seconds between two variants, after which no thread of the first still has work."""
MASKS = {"input": [True, False, False], "weight": [False, True, False]}


@dataclass(frozen=True)
class Layer:
    """A convolution of (batch, channels, size, size) by (filters, channels / groups, kernel, kernel)."""

    model: str
    batch: int
    channels: int
    filters: int
    size: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def name(self) -> str:
        depthwise = " depthwise" if self.groups > 1 else ""
        stride = f" stride {self.stride}" if self.stride > 1 else ""
        return (
            f"{self.model}: {self.batch} x {self.channels} to {self.filters}, {self.size} x {self.size}, "
            f"{self.kernel} x {self.kernel}{stride}{depthwise}"
        )


LAYERS = (
    Layer("ResNet-20", 32, 3, 16, 32),
    Layer("ResNet-20", 32, 16, 16, 32),
    Layer("ResNet-20", 32, 16, 32, 32, stride=2),
    Layer("ResNet-20", 32, 32, 32, 16),
    Layer("ResNet-20", 32, 32, 64, 16, stride=2),
    Layer("ResNet-20", 32, 64, 64, 8),
    Layer("ResNet-18", 8, 3, 64, 112, kernel=7, stride=2),
    Layer("ResNet-18", 8, 64, 64, 28),
    Layer("ResNet-18", 8, 64, 128, 28, stride=2),
    Layer("ResNet-18", 8, 64, 128, 28, kernel=1, stride=2),
    Layer("ResNet-18", 8, 128, 128, 14),
    Layer("ResNet-18", 8, 128, 256, 14, stride=2),
    Layer("ResNet-18", 8, 256, 256, 7),
    Layer("ResNet-18", 8, 256, 512, 7, stride=2),
    Layer("ResNet-18", 8, 512, 512, 4),
    Layer("ResNet", 8, 3, 64, 224, kernel=7, stride=2),
    Layer("ResNet", 8, 64, 64, 56),
    Layer("ResNet", 8, 128, 256, 28, stride=2),
    Layer("ResNet", 8, 256, 256, 14),
    Layer("MobileNetV2", 16, 64, 24, 48, kernel=1),
    Layer("MobileNetV2", 16, 96, 24, 24, kernel=1),
    Layer("MobileNetV2", 16, 24, 144, 24, kernel=1),
    Layer("MobileNetV2", 16, 384, 64, 7, kernel=1),
    Layer("MobileNetV2", 16, 960, 160, 4, kernel=1),
    Layer("MobileNetV2", 16, 64, 64, 48, groups=64),
    Layer("MobileNetV2", 16, 96, 96, 24, groups=96),
    Layer("MobileNetV2", 16, 64, 64, 48, stride=2, groups=64),
    Layer("MobileNetV2", 16, 384, 384, 7, groups=384),
)


@dataclass
class Row:
    layer: Layer
    threads: int
    times: dict[str, list[float]]
    """By what is computed: milliseconds of gradfuse, of PyTorch and, of the output, of onnxruntime."""


def operator_call(name: str, layer: Layer, inputs: dict[str, Tensor], output: Tensor, threads: int) -> Call:
    """What runs `Convolution`, `Conv`, or `ConvolutionBackward` for the gradient of the "input" or "weight"."""
    attributes: dict[str, Any] = {"stride": [layer.stride] * 2, "padding": [layer.padding] * 2, "groups": layer.groups}
    outputs = ["output"]
    if name == "Conv":
        attributes = {"strides": [layer.stride] * 2, "pads": [layer.padding] * 4, "group": layer.groups}
    elif name in MASKS:
        attributes["output_mask"] = [int(one) for one in MASKS[name]]
        outputs = ["output" if one else f"none {k}" for k, one in enumerate(MASKS[name])]
    kind, domain = ("ConvolutionBackward" if name in MASKS else name), ("" if name == "Conv" else "aclnn")
    node = onnx.helper.make_node(kind, list(inputs), outputs, domain=domain, **attributes)
    declared = [
        onnx.helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, tensor.shape)
        for key, tensor in (*inputs.items(), ("output", output))
    ]
    graph = onnx.helper.make_graph([node], "layer", declared[:-1], declared[-1:])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("aclnn", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return InSession(model, threads, library=True).bound(inputs, {"output": output})


def in_turns(calls: Sequence[Call], rounds: int) -> list[float]:
    """The median of each one's milliseconds."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 2):
        for place, one in enumerate(calls):
            one()
            start = time.perf_counter()
            one()
            if turn >= 2:
                found[place].append(1e3 * (time.perf_counter() - start))
            time.sleep(REST)
    return [statistics.median(times) for times in found]


def measure(layer: Layer, threads: int, rounds: int) -> Row:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    small = (layer.size + 2 * layer.padding - layer.kernel) // layer.stride + 1
    grad_output = torch.randn(layer.batch, layer.filters, small, small)
    x = torch.randn(layer.batch, layer.channels, layer.size, layer.size)
    weight = torch.randn(layer.filters, layer.channels // layer.groups, layer.kernel, layer.kernel)
    lists = [layer.stride] * 2, [layer.padding] * 2, [1, 1], False, [0, 0], layer.groups
    of_output = [
        operator_call(name, layer, {"input": x, "weight": weight}, torch.empty_like(grad_output), threads)
        for name in ("Convolution", "Conv")
    ]
    ours, theirs = of_output[0], partial(torch.ops.aten.convolution, x, weight, None, *lists)
    row = Row(layer, threads, {"output": in_turns([ours, theirs, of_output[1]], rounds)})
    inputs = {"grad_output": grad_output, "input": x, "weight": weight}
    for which, mask in MASKS.items():
        result = torch.empty_like(x if which == "input" else weight)
        call = operator_call(which, layer, inputs, result, threads)
        by_torch = partial(torch.ops.aten.convolution_backward, *inputs.values(), None, *lists, mask)
        row.times[which] = in_turns([call, by_torch], rounds)
    return row


def page(rows: list[Row]) -> str:
    about = environment()
    lines = [
        "# Convolution, ConvolutionBackward and PyTorch, layer by layer",
        "",
        f"{about['cpu']}, {about['cores']} cores; gradfuse {about['gradfuse']}, onnxruntime {about['onnxruntime']}, "
        f"PyTorch {about['torch']}. float32; milliseconds of the output, which onnxruntime's `Conv` also computes, of "
        "a weight that is no constant, and of each gradient by itself; and ours over PyTorch's.",
        "",
        "| layer | threads | output | PyTorch | ratio | `Conv` | input | PyTorch | ratio | weight | PyTorch | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row.layer.name, str(row.threads)]
        for ours, theirs, *others in row.times.values():
            cells += [f"{ours:.3g}", f"{theirs:.3g}", f"{ours / theirs:.2f}", *(f"{one:.3g}" for one in others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="layers whose name it matches")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for layer in LAYERS:
        if not fnmatch.fnmatch(layer.name, f"*{options.only}*"):
            continue
        for threads in map(int, options.threads.split(",")):
            rows.append(measure(layer, threads, options.rounds))
            print(page(rows).splitlines()[-1], flush=True)
    out = options.out or (ROOT / "benchmarks" / "results" if options.only == "*" else None)
    if out is not None:
        (out / "convolutions.md").write_text(page(rows))


if __name__ == "__main__":
    main()
