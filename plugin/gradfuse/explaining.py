"""`explain` lists the backward regions of a model, and what `fuse` would do with each of them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.fusion import is_better, without_functions
from gradfuse.models import reading
from gradfuse.models.memory import collection_paused
from gradfuse.models.tensors import copy_model
from gradfuse.passes.diagnosis import CONTRACTIONS
from gradfuse.passes.matching import names_of
from gradfuse.passes.pipeline import explaining_pipeline
from gradfuse.passes.reading import ort_training
from gradfuse.passes.report import ExporterBug, Fusion, NearMiss, Report, traffic_text

Status = Literal["fuses", "unprofitable", "unmatched", "fused"]

_SHOWN_NODES = 12
_BY = " by the rule {rule}"
_STATUS: dict[Status, str] = {
    "fuses": f"to be fused{_BY}",
    "unprofitable": f"matched{_BY} but left alone",
    "unmatched": "not matched",
    "fused": "fused already",
}


@dataclass(frozen=True)
class Region:
    """A part of the model that computes, or nearly computes, the gradient of one of the operators.

    Attributes:
        op: the operator.
        status: "fuses" if `fuse` takes the match, "unprofitable" if only its policy "all" does, "unmatched" if there is
            no match, "fused" for a node that is the operator already.
        node: the node that ends the region.
        rule: the rule that matches; empty if none does.
        nodes: the nodes that the operator would replace, as far as that is known.
        bytes_saved: the predicted difference in memory traffic of one run, if the match came that far.
        reason: why the region is left alone; empty if it is fused.
    """

    op: str
    status: Status
    node: str
    rule: str = ""
    nodes: tuple[str, ...] = ()
    bytes_saved: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        head = f"{self.op} at {self.node}: {_STATUS[self.status].format(rule=self.rule)}"
        if self.status == "fuses" and self.bytes_saved is not None:
            head += f", {traffic_text(self.bytes_saved)}"
        lines = [head]
        details = [self.reason] if self.reason else []
        if self.nodes:
            more = len(self.nodes) - _SHOWN_NODES
            names = ", ".join(self.nodes[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")
            place = "" if self.status == "unmatched" else "in place of "
            details.append(f"{place}{len(self.nodes)} {'node' if len(self.nodes) == 1 else 'nodes'}: {names}")
        for detail in details:
            lines += textwrap.wrap(detail, 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The regions of a model in the order of its nodes, and the exporter bugs that it carries.

    `str()` is what the command line shows.
    """

    regions: tuple[Region, ...]
    warnings: tuple[ExporterBug, ...]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return asdict(self)

    @property
    def heading(self) -> str:
        """How many regions there are, in one line."""
        if not self.regions:
            return f"no backward region of {', '.join(_operators())} was found"
        counts = Counter(region.status for region in self.regions)
        parts = ", ".join(
            f"{counts[status]} {text.replace(_BY, '')}" for status, text in _STATUS.items() if counts[status]
        )
        noun = "region" if len(self.regions) == 1 else "regions"
        return f"{len(self.regions)} backward {noun}: {parts}"

    def __str__(self) -> str:
        return "\n".join([self.heading, *map(str, self.regions), *map(str, self.warnings)])


def explain(model: Any) -> Explanation:
    """Lists the backward regions of a model, and for each of them what `fuse` would do, or why it would not.

    The argument is not changed.

    Args:
        model: a path, an onnx.ModelProto, an onnx_ir.Model or a torch.onnx.ONNXProgram.

    Raises:
        ModelError: the model cannot be read.
        ArgumentError: `model` is something else.
    """
    with collection_paused():
        original = reading.load(model).ir
        report = _reported(original)
        whole = without_functions(original)
        if whole is not None:
            inlined = _reported(whole)
            # Where as much is fused, what is left says more in one graph.
            as_much = len(inlined.fusions) == len(report.fusions)
            says_more = as_much and len(inlined.near_misses) > len(report.near_misses)
            if is_better(inlined, report, original) or says_more:
                original, report = whole, inlined
        regions = tuple(_regions(_Places(original), report.fusions, report.near_misses))
    return Explanation(regions, tuple(report.warnings))


def _reported(model: ir.Model) -> Report:
    pipeline = explaining_pipeline()
    pipeline(copy_model(model))
    return pipeline.report


def _operators() -> Iterator[str]:
    return (name for name in custom_ops.OPS if name.endswith(("Grad", "Backward")))


class _Places:
    """The nodes of the model as it was given, by the names that reports have for them."""

    def __init__(self, model: ir.Model) -> None:
        self.nodes: dict[str, ir.Node] = {}
        self.order: dict[str, int] = {}
        for node in model.graph.all_nodes():
            self._add(node)
        for function in model.functions.values():
            if function.domain != custom_ops.DOMAIN:
                for node in function.all_nodes():
                    self._add(node)
        self._ahead: dict[tuple[str, bool], frozenset[ir.Node]] = {}

    def _add(self, node: ir.Node) -> None:
        for name in names_of([node]):
            self.nodes.setdefault(name, node)
            self.order.setdefault(name, len(self.order))

    def _cone(self, name: str, within_layer: bool) -> frozenset[ir.Node]:
        """The node and those ahead of it; within a layer, only up to the next products, where a region ends."""
        key = (name, within_layer)
        if key not in self._ahead:
            todo = [self.nodes[name]] if name in self.nodes else []
            found = set(todo)
            while todo:
                for value in todo.pop().inputs:
                    node = None if value is None else value.producer()
                    if node is None or node in found or (within_layer and node.op_type in CONTRACTIONS):
                        continue
                    found.add(node)
                    todo.append(node)
            self._ahead[key] = frozenset(found)
        return self._ahead[key]

    def ahead(self, first: str, second: str, within_layer: bool = True) -> bool:
        """Whether the first node is part of what the second computes."""
        return first in self.nodes and self.nodes[first] in self._cone(second, within_layer)


def _regions(places: _Places, fusions: Iterable[Fusion], misses: Iterable[NearMiss]) -> list[Region]:
    regions = [
        Region(node.op_type, "fused", name)
        for name, node in places.nodes.items()
        if node.domain == custom_ops.DOMAIN and node.op_type in custom_ops.OPS
    ]
    for fusion in fusions:
        nodes = tuple(n for n in fusion.replaced if n in places.nodes)
        root = nodes[0] if nodes else fusion.node
        regions.append(Region(fusion.op, "fuses", root, fusion.rule, nodes, fusion.bytes_saved))
    for miss in _distinct(places, list(misses)):
        if not any(_covers(places, region, miss) for region in regions):
            status: Status = "unprofitable" if miss.match else "unmatched"
            reason = f"{miss.reason}; {_by_policy_all(places, miss)}" if miss.match else miss.reason
            regions.append(Region(miss.rule, status, miss.node, miss.match, miss.nodes, miss.bytes_saved, reason))
    return sorted(regions, key=lambda r: places.order.get(r.node, len(places.order)))


def _by_policy_all(places: _Places, miss: NearMiss) -> str:
    nodes = (places.nodes[name] for name in miss.nodes if name in places.nodes)
    foreign = sorted({n.op_type for n in nodes if n.domain == ort_training.DOMAIN})
    text = 'the policy "all" takes it'
    return f"{text}, and stock onnxruntime has no {' or '.join(foreign)}" if foreign else text


def _covers(places: _Places, region: Region, miss: NearMiss) -> bool:
    """Whether a near miss is about a region that is listed already."""
    if region.op == miss.rule:
        # It is a part of the region, or a sum of the region and more.
        return (
            region.node == miss.node
            or places.ahead(miss.node, region.node)
            or any(places.ahead(node, miss.node) for node in (region.node, *region.nodes))
        )
    if region.op == "CtcLossBackward" and region.status == "unmatched":
        return miss.rule == "CrossEntropyLossGrad" and places.ahead(region.nodes[0], miss.node, within_layer=False)
    return not miss.match and miss.node in region.nodes


def _distinct(places: _Places, misses: list[NearMiss]) -> list[NearMiss]:
    """One near miss per region: the one whose match came furthest, then the one with the most nodes."""
    kept: list[NearMiss] = []
    for miss in sorted(misses, key=lambda m: _rank(places, m), reverse=True):
        node = places.nodes.get(miss.node)
        if miss.rule == "MseLossBackward" and node is not None and node.op_type == "Sub":
            continue  # The difference itself, the other way round.
        same = (k for k in kept if k.rule == miss.rule)
        if not any(places.ahead(miss.node, k.node) or places.ahead(k.node, miss.node) for k in same):
            kept.append(miss)
    return kept


def _rank(places: _Places, miss: NearMiss) -> tuple[bool, bool, int, int]:
    first = miss.rule == "CtcLossBackward"  # It covers the near misses of others.
    return first, bool(miss.match), len(miss.nodes), places.order.get(miss.node, len(places.order))
