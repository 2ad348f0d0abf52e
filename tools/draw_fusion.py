"""Draw a backward pass before and after fusing: the picture of README.md.

Usage: python tools/draw_fusion.py docs/fusion.svg

Exports README.md's training step without fusing it, fuses it, and draws the nodes that the fused one replaces.
Constants are left out. The colours are readable on white and on black.
"""

from __future__ import annotations

import argparse
import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import onnx
import torch

import gradfuse

_HEIGHT = 24
_LETTER = 7.5
_STEP = 40
_GAP = 16
_MARGIN = 14
_CAPTION = 40
_BETWEEN = 70
_SWEEPS = 24
_INPUTS = {
    "log_softmax": "log-probabilities",
    "target": "classes",
    "unsqueeze": "classes in a column",
    "ne": "rows that count",
    "to_copy": "their number",
    "gather": "picked",
    "where_1": "losses",
}
_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, monospace; text-anchor: middle; dominant-baseline: central }
.title { font: 600 15px system-ui, sans-serif; fill: #7d8590 }
.value { font: 12px system-ui, sans-serif; fill: #7d8590 }
.node rect { fill: #dbe7f5; stroke: #4a7ebb }
.node text { fill: #10243e }
.fused rect { fill: #2f7d4f; stroke: #2f7d4f }
.fused text { fill: #ffffff; font-weight: 600 }
path { fill: none; stroke: #7d8590; stroke-width: 1.3; marker-end: url(#tip) }
.to { stroke-width: 2.5 }
#tip path { fill: #7d8590; stroke: none; marker-end: none }
"""


Points: TypeAlias = Mapping[str, tuple[float, float]]
Bends: TypeAlias = Mapping[tuple[str, str], Sequence[str]]


@dataclass
class Graph:
    """Nodes by name in topological order: their labels, kinds ("node", "fused" or "value") and edges."""

    labels: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, label: str, kind: str, reads: Iterable[str] = ()) -> None:
        self.labels[name], self.kinds[name] = label, kind
        self.edges += [(other, name) for other in dict.fromkeys(reads)]


def step_model() -> onnx.ModelProto:
    """README.md's training step, not fused."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    batch = (torch.randn(32, 20), torch.randint(0, 5, (32,)))
    shapes = ({0: "batch"}, {0: "batch"})
    step = gradfuse.export_training_step(
        module, torch.nn.CrossEntropyLoss(), batch, dynamic_shapes=shapes, fuse=False, evaluation=False
    )
    return step.model


def subgraph(model: onnx.ModelProto, names: Iterable[str]) -> Graph:
    """The nodes of these names, their inputs without constants, and their outputs."""
    chosen = set(names)
    nodes = [node for node in model.graph.node if node.name in chosen]
    known = {value.name for value in model.graph.initializer}
    known |= {node.output[0] for node in model.graph.node if all(name in known for name in node.input)}
    producer = {output: node.name for node in nodes for output in node.output}
    graph = Graph()
    for value in dict.fromkeys(name for node in nodes for name in node.input if name):
        if value not in producer and value not in known:
            graph.add(_key(value), _INPUTS.get(value.strip("_"), value), "value")
    for node in nodes:
        reads = [producer.get(name, _key(name)) for name in node.input]
        kind = "fused" if node.domain else "node"
        graph.add(node.name, node.op_type, kind, [name for name in reads if name in graph.labels])
    read = {first for first, _ in graph.edges}
    for node in nodes:
        if node.name not in read:
            graph.add(_key(node.output[0]), "gradient of the logits", "value", [node.name])
    return graph


def _key(value: str) -> str:
    """What a value is called in a graph: nodes may have the names of values."""
    return f"value {value}"


def picture(before: Graph, after: Graph) -> str:
    """The SVG of both, side by side."""
    placed = [layout(graph) for graph in (before, after)]
    sizes = [_size(graph, points) for graph, (points, _) in zip((before, after), placed, strict=True)]
    height = max(size[1] for size in sizes)
    parts = []
    left = 0.0
    for graph, (points, bends), (width, lowest) in zip((before, after), placed, sizes, strict=True):
        count = sum(kind != "value" for kind in graph.kinds.values())
        title = f"{'before' if graph is before else 'after'}: {count} node{'s' if count > 1 else ''}"
        parts.append(f'<text class="title" x="{left + width / 2:g}" y="{_CAPTION / 2:g}">{title}</text>')
        parts.append(f'<g transform="translate({left:g} {_CAPTION + (height - lowest) / 2:g})">')
        parts += [_edge(points, bends, edge) for edge in graph.edges]
        parts += [_node(name, graph, points[name]) for name in graph.labels]
        parts.append("</g>")
        left += width
        if graph is before:
            middle = _CAPTION + height / 2
            parts.append(f'<path class="to" d="M{left:g} {middle:g}h{_BETWEEN - _MARGIN}"/>')
            left += _BETWEEN
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left:g} {height + _CAPTION:g}" role="img">'
    about = "<title>The backward pass of cross entropy in a training step, before and after fusing</title>"
    tips = f'<defs>{tip}<path d="M0 0L8 4L0 8z"/></marker></defs>'
    return "\n".join([head, about, f"<style>{_STYLE}</style>", tips, *parts, "</svg>", ""])


def _size(graph: Graph, points: Points) -> tuple[float, float]:
    right = max(points[name][0] + _half(graph, name) for name in points)
    return right + _MARGIN, max(y for _, y in points.values()) + _HEIGHT / 2 + _MARGIN


def layout(graph: Graph) -> tuple[Points, Bends]:
    """Place the nodes, and bends where edges pass layers, by Sugiyama's method: few crossings, short edges."""
    level = _levels(graph)
    layers: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in graph.labels:
        layers[level[name]].append(name)
    links: list[tuple[str, str]] = []
    bends: dict[tuple[str, str], list[str]] = {}
    for first, second in graph.edges:
        passed = [f"{first} {second} {i}" for i in range(level[first] + 1, level[second])]
        bends[first, second] = passed
        for i, name in enumerate(passed, level[first] + 1):
            layers[i].append(name)
        chain = [first, *passed, second]
        links += itertools.pairwise(chain)
    above: dict[str, list[str]] = {name: [] for layer in layers for name in layer}
    below: dict[str, list[str]] = {name: [] for layer in layers for name in layer}
    for first, second in links:
        above[second].append(first)
        below[first].append(second)
    x = {name: 100.0 * i for layer in layers for i, name in enumerate(layer)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wanted: dict[str, float] = {}
            for name in layer:
                near = above[name] if down else below[name]
                if sweep >= _SWEEPS // 2:
                    near = above[name] + below[name]
                wanted[name] = _mean([x[other] for other in near] or [x[name]])
            layer.sort(key=wanted.__getitem__)
            _spread(layer, wanted, x, graph)
    left = min(x[name] - _half(graph, name) for layer in layers for name in layer) - _MARGIN
    points = {name: (x[name] - left, i * _STEP + _HEIGHT / 2) for i, layer in enumerate(layers) for name in layer}
    return points, bends


def _levels(graph: Graph) -> dict[str, int]:
    """Give each node a layer: below all that it reads, and as near to its first reader as that allows."""
    level: dict[str, int] = {}
    for name in graph.labels:
        level[name] = max((level[first] + 1 for first, second in graph.edges if second == name), default=0)
    for name in reversed(graph.labels):
        readers = [level[second] for first, second in graph.edges if first == name]
        if readers:
            level[name] = min(readers) - 1
    return level


def _spread(layer: Sequence[str], wanted: Mapping[str, float], x: dict[str, float], graph: Graph) -> None:
    """Place the nodes of a layer near where they are wanted, without overlaps."""
    end = float("-inf")
    for name in layer:
        x[name] = max(wanted[name], end + _half(graph, name))
        end = x[name] + _half(graph, name) + _GAP
    moved = _mean([x[name] - wanted[name] for name in layer])
    for name in layer:
        x[name] -= moved


def _width(graph: Graph, name: str) -> float:
    return _LETTER * len(graph.labels[name]) + 18


def _half(graph: Graph, name: str) -> float:
    """Half of a node's width; a bend has none."""
    return _width(graph, name) / 2 if name in graph.labels else 0


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _edge(points: Points, bends: Bends, edge: tuple[str, str]) -> str:
    (x, y), *inner, (to_x, to_y) = (points[name] for name in (edge[0], *bends[edge], edge[1]))
    course = f"M{x:.1f} {y + _HEIGHT / 2:.1f}"
    y += _HEIGHT / 2
    for next_x, next_y in [*inner, (to_x, to_y - _HEIGHT / 2 - 1)]:
        middle = (y + next_y) / 2
        course += f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
        x, y = next_x, next_y
    return f'<path d="{course}"/>'


def _node(name: str, graph: Graph, point: tuple[float, float]) -> str:
    label, kind = html.escape(graph.labels[name]), graph.kinds[name]
    text = f'<text x="{point[0]:.1f}" y="{point[1]:.1f}"'
    if kind == "value":
        return f'{text} class="value">{label}</text>'
    width = _width(graph, name)
    corner = f'x="{point[0] - width / 2:.1f}" y="{point[1] - _HEIGHT / 2:.1f}"'
    box = f'<rect {corner} width="{width:g}" height="{_HEIGHT}" rx="5"/>'
    return f'<g class="{kind}">{box}{text}>{label}</text></g>'


def draw(model: onnx.ModelProto) -> str:
    """The SVG of the first fusion of a model: the nodes that it replaces, and what is there instead."""
    result = gradfuse.fuse(model)
    fusion = result.report.fusions[0]
    return picture(subgraph(model, fusion.replaced), subgraph(result.model, [fusion.node]))


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw a backward pass before and after fusing.")
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    arguments = parser.parse_args()
    arguments.out.write_text(draw(step_model()), encoding="utf-8")


if __name__ == "__main__":
    main()
