"""What a run of the pipeline did, as data. `str()` gives the table that the command line shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradfuse.custom_ops.operator import DOMAIN


@dataclass(frozen=True)
class Fusion:
    """One fused node.

    The costs are predictions for one run in stock onnxruntime (docs/cost-model.md). Each symbolic dimension is taken to
    be `gradfuse.passes.matching.cost.ASSUMED_DIM`.

    Attributes:
        op: the operator.
        node: the name of the fused node.
        rule: the rule that matched.
        replaced: the nodes that it made redundant.
        bytes_before: the memory traffic of these nodes.
        bytes_after: the memory traffic of the nodes in their place.
        speedup: the ratio of their times.
    """

    op: str
    node: str
    rule: str
    replaced: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    speedup: float

    @property
    def bytes_saved(self) -> int:
        """The predicted difference in memory traffic; negative if the fused node moves more."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class NearMiss:
    """A node whose value has the form of a fused op, but was left alone.

    Attributes:
        node: the name of the node.
        rule: the operator.
        reason: why the node was left alone.
        bug: whether a rule took it, and a run with numbers refuted the rule.
        match: the rule that matched, if only the cost decided against it.
        nodes: the nodes that the op would have replaced, if the match came that far.
        bytes_saved: the traffic that this would have saved, if the match came that far.
    """

    node: str
    rule: str
    reason: str
    bug: bool = False
    match: str = ""
    nodes: tuple[str, ...] = ()
    bytes_saved: int | None = None


@dataclass(frozen=True)
class ExporterBug:
    """A known bug of the exporter that shows in the graph, or of onnxruntime that affects the graph.

    Attributes:
        bug: the name of the bug.
        node: the node that shows it.
        text: what is wrong, and what to do about it.
    """

    bug: str
    node: str
    text: str

    def __str__(self) -> str:
        return f"warning: {self.node}: {self.text} [{self.bug}]"


@dataclass
class Report:
    """What was done to a model.

    Attributes:
        fusions: the fused nodes.
        near_misses: the nodes that came close.
        before: how many nodes of each operator the model had.
        after: how many it has.
        warnings: the exporter bugs that it carries.
    """

    fusions: list[Fusion] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    warnings: list[ExporterBug] = field(default_factory=list)

    @property
    def given(self) -> Mapping[str, int]:
        """How many fused operators of each name the model had, as from the translation of a training step."""
        prefix = f"{DOMAIN}::"
        return {op.removeprefix(prefix): count for op, count in self.before.items() if op.startswith(prefix)}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        plain = asdict(self)
        for fusion, entry in zip(self.fusions, plain["fusions"], strict=True):
            entry["bytes_saved"] = fusion.bytes_saved
        plain["given"] = dict(self.given)
        return plain

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *map(str, self.warnings)])

    def lines(self) -> list[str]:
        """The table, without the warnings."""
        if not self.fusions:
            found = (
                "what was found is left alone"
                if self.near_misses
                else "no backward subgraph of the operators was found"
            )
            lines = [f"nothing to fuse: {found}"]
        else:
            lines = [f"fused {len(self.fusions)}, {sum(self.before.values())} -> {sum(self.after.values())} nodes"]
            ops, nodes = (max(len(getattr(f, part)) for f in self.fusions) for part in ("op", "node"))
            for f in self.fusions:
                effect = f"replaces {len(f.replaced)} nodes, {_predicted(f)}"
                lines.append(f"  {f.op:{ops}}  {f.node:{nodes}}  {effect}  [{f.rule}]")
            names = [
                n for n in sorted(self.before.keys() | self.after.keys()) if self._count(n)[0] != self._count(n)[1]
            ]
            width = max(len(n) for n in names)
            lines += [f"  {'operator':{width}}  before   after"]
            lines += ["  {:{}} {:>7} {:>7}".format(n, width, *self._count(n)) for n in names]
        if self.given:
            named = (op if count == 1 else f"{count} {op}" for op, count in sorted(self.given.items()))
            lines.append(f"  operators that the model came with: {', '.join(named)}")
        unprofitable = Counter(m.rule for m in self.near_misses if m.match)
        # What only the cost decided is nothing to act on: of several, one line an operator.
        shown = (m for m in self.near_misses if not m.match or unprofitable[m.rule] == 1)
        lines += [f"  left alone: {m.node} ({m.rule}): {m.reason}" for m in shown]
        lines += [
            f"  left alone: {count} {rule}: not profitable, as predicted"
            for rule, count in unprofitable.items()
            if count > 1
        ]
        return lines

    def _count(self, op: str) -> tuple[int, int]:
        return self.before.get(op, 0), self.after.get(op, 0)


def _predicted(fusion: Fusion) -> str:
    moved = f"{bytes_text(fusion.bytes_before)} -> {bytes_text(fusion.bytes_after)}"
    return f"predicted traffic {moved}, {fusion.speedup:.1f} x as fast"


def bytes_text(n: int) -> str:
    """Return a number of bytes in readable units."""
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def traffic_text(n: int) -> str:
    return f"{bytes_text(abs(n))} {'less' if n >= 0 else 'more'} traffic"
