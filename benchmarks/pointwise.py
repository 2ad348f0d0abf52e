"""Measures what one operator for all elementwise work between matrix products could gain in training steps, at most.

    python benchmarks/pointwise.py [--only NAME] [--out FILE]

Each step is exported with AdamW and fused, and run by `gradfuse.TrainingSession` under onnxruntime's profiler. In the
graph that onnxruntime makes of it, elementwise nodes whose results have as many elements as those of a neighbour form
regions, and a reduction of a region's result ends it. A node counts as the least of its times, since other processes
only add to them. One pass over a region would read what the region does not compute, and write what others read. The
ceiling takes that its time falls as its bytes do, and that computing costs nothing. What an interpreter could reach is
less. Nothing is computed again.

Prints a table in Markdown, and writes it where --out says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from step import as_arrays
from step_models import MODELS, OPTIMIZERS, Model, Tensors
from torch import Tensor, nn

import gradfuse

ELEMENTWISE = frozenset(
    "Abs Add And BiasGelu BitShift BitwiseXor Cast Clip Div Elu Equal Erf Exp FastGelu Gelu GeluBackward Greater "
    "GreaterOrEqual HardSigmoid IsNaN LeakyRelu Less LessOrEqual Log Max Min Mul Neg Not Or Pow QuickGelu Reciprocal "
    "Relu Sigmoid Sign Softplus Sqrt Sub Sum Tanh ThresholdBackward Where Xor".split()
)
"""Operators that give each element of the result from one of each operand: ONNX's, onnxruntime's and gradfuse's."""
REDUCTIONS = frozenset(("ReduceSum", "ReduceMean", "ReduceMax"))
STEPS = 10


class Rotary(nn.Module):
    """A block as of Llama: root mean square norms, rotary embeddings and a feed-forward layer with SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, hidden = heads, 8 * width // 3 // 32 * 32
        self.norm, self.second_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (one * cosine + torch.cat(one.chunk(2, -1)[::-1], -1) * sine for one in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """2 layers of width 512 and a vocabulary of 4,000, for 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 512)
        self.blocks = nn.ModuleList(Rotary(512, 8) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(512, eps=1e-5), nn.Linear(512, 4000, bias=False)
        angles = torch.arange(128)[:, None] / 10000 ** (torch.arange(32) / 32)
        self.register_buffer("cosine", torch.cat([angles.cos(), angles.cos()], -1))
        self.register_buffer("sine", torch.cat([-angles.sin(), angles.sin()], -1))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """2 layers of width 512 as of BERT, with dropout of 0.1, and 4,000 classes, for 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1, F.gelu, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(512, 4000)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words))).flatten(0, 1)  # type: ignore[no-any-return]


def words(count: int) -> tuple[Tensors, Tensors]:
    """Random words, and the next ones."""
    drawn = torch.randint(4000, (count, 129), generator=torch.Generator().manual_seed(0))
    return (drawn[:, :-1].contiguous(),), (drawn[:, 1:].flatten(),)


STEPS_OF = {
    "gpt": (MODELS["gpt"], 4),
    "encoder": (Model("encoder with dropout, 2 layers of 512, 128 tokens", Encoder, F.cross_entropy, words, ()), 4),
    "llama": (Model("Llama, 2 layers of 512, 128 tokens", Llama, F.cross_entropy, words, ()), 4),
    "resnet20": (MODELS["resnet20"], 32),
    "resnet18": (MODELS["resnet18"], 8),
}


@dataclasses.dataclass
class Node:
    """A node that ran: milliseconds, bytes of its inputs and outputs by name, and the elements of its first output."""

    operator: str
    milliseconds: float
    reads: dict[str, int]
    writes: dict[str, int]
    elements: int


@dataclasses.dataclass(frozen=True)
class Region:
    """Nodes that one pass over memory could compute, their time and bytes, and what the pass would move."""

    operators: tuple[str, ...]
    milliseconds: float
    before: int
    after: int

    @property
    def saved(self) -> float:
        """Milliseconds less, at most."""
        return self.milliseconds * max(0.0, 1 - self.after / self.before)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--only", choices=STEPS_OF)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| step | batch | ms | elementwise | in regions of two and more | could be saved | by which regions most |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---|"]
    for name, (model, size) in STEPS_OF.items():
        if options.only in (None, name):
            lines.append(row(model, size))
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def row(model: Model, size: int) -> str:
    """The shares of a step, as a row of the table."""
    torch.manual_seed(0)
    module, batch = model.module(), model.batch(size)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    step = gradfuse.export_training_step(module, model.loss, batch, optimizer=optimizer, verify="quick")
    nodes, outputs = run(step, as_arrays(batch))
    total = math.fsum(node.milliseconds for node in nodes)
    found = regions(nodes, outputs)
    shares = [
        math.fsum(node.milliseconds for node in nodes if node.operator in ELEMENTWISE),
        math.fsum(region.milliseconds for region in found),
        math.fsum(region.saved for region in found),
    ]
    alike: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for region in found:
        alike[region.operators] += region.saved
    best = sorted(alike.items(), key=lambda pair: -pair[1])[:3]
    described = "; ".join(f"{spelled(key)} ({100 * saved / total:.1f} %)" for key, saved in best)
    return (
        f"| {model.title} | {size} | {total:.0f} | "
        + " | ".join(f"{100 * s / total:.1f} %" for s in shares)
        + f" | {described} |"
    )


def spelled(operators: Sequence[str]) -> str:
    """Operators as a cell of the table: how many of them, and the first few."""
    few = " + ".join(operators[:6])
    return few if len(operators) <= 6 else f"{few} and {len(operators) - 6} more"


def run(step: gradfuse.TrainingStep, arrays: Any) -> tuple[list[Node], set[str]]:
    """The nodes of the graph that onnxruntime makes of a step, in its order, and the names of the graph's outputs."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/step"
        options.optimized_model_filepath = f"{folder}/step.onnx"
        options.log_severity_level = 3  # An optimized model is for this machine alone, says a warning.
        gradfuse.register(options)
        session = gradfuse.TrainingSession(step, session_options=options)
        for _ in range(STEPS):
            session.step(*arrays)
        del session  # It writes the profile.
        graph = onnx.load(f"{folder}/step.onnx", load_external_data=False).graph
        (profile,) = Path(folder).glob("*.json")
        events = json.loads(profile.read_text())
    times: dict[str, float] = {}
    arguments: dict[str, Mapping[str, Any]] = {}
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if event.get("cat") == "Node" and name != event["name"]:
            times[name] = min(event["dur"] / 1e3, times.get(name, math.inf))
            arguments[name] = event["args"]
    nodes = []
    for node in graph.node:
        if node.name not in times:
            continue
        reads, writes = (arguments[node.name][f"{side}_type_shape"] for side in ("input", "output"))
        present = [[name for name in names if name] for names in (node.input, node.output)]
        sizes = [
            dict(zip(names, map(num_bytes, side), strict=False))
            for names, side in zip(present, (reads, writes), strict=True)
        ]
        elements = math.prod(next(iter(writes[0].values()))) if writes else 0
        nodes.append(Node(node.op_type, times[node.name], sizes[0], sizes[1], elements))
    return nodes, {output.name for output in graph.output}


BYTES = {"bool": 1, "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "uint64": 8, "double": 8}


def num_bytes(tensor: Mapping[str, Sequence[int]]) -> int:
    """Bytes of a tensor as the profile writes it: its type with its shape."""
    ((dtype, shape),) = tensor.items()
    return BYTES.get(dtype, 4) * math.prod(shape)


def regions(nodes: Sequence[Node], outputs: set[str]) -> list[Region]:
    """Connected sets of two or more elementwise nodes of the same number of elements, with reductions at their ends.

    Each can be one node: no way leaves it and comes in again. For that, nodes join those before them only where no way
    to them has more edges that join nothing.
    """
    producer = {name: index for index, node in enumerate(nodes) for name in node.writes}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    depth = [0] * len(nodes)
    region = list(range(len(nodes)))
    for index, node in enumerate(nodes):
        above = [producer[name] for name in node.reads if name in producer]
        depth[index] = max((depth[one] + (not joins(nodes[one], node)) for one in above), default=0)
        for name in node.reads:
            readers[name].append(index)
        for one in above:
            if joins(nodes[one], node) and depth[one] == depth[index]:
                old, new = region[index], region[one]
                region = [new if each == old else each for each in region]
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(region):
        members[number].append(index)
    return [joined(nodes, group, readers, outputs) for group in members.values() if len(group) > 1]


def joins(first: Node, second: Node) -> bool:
    """Whether the second of two nodes, which reads the first, can be in one pass with it."""
    if first.operator not in ELEMENTWISE or first.elements <= 1:
        return False
    return second.operator in REDUCTIONS or (second.operator in ELEMENTWISE and second.elements == first.elements)


def joined(
    nodes: Sequence[Node], group: Sequence[int], readers: Mapping[str, Sequence[int]], outputs: set[str]
) -> Region:
    """What a set of nodes moves, and what one pass over it would."""
    inside = set(group)
    made = {name: size for index in group for name, size in nodes[index].writes.items()}
    read = {name: size for index in group for name, size in nodes[index].reads.items() if name not in made}
    kept = [size for name, size in made.items() if name in outputs or not inside.issuperset(readers.get(name, ()))]
    before = sum(sum(nodes[index].reads.values()) + sum(nodes[index].writes.values()) for index in group)
    milliseconds = math.fsum(nodes[index].milliseconds for index in group)
    return Region(tuple(nodes[index].operator for index in group), milliseconds, before, sum(read.values()) + sum(kept))


if __name__ == "__main__":
    main()
