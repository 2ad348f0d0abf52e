"""What a run of the pipeline did, as data; `str()` is the table that the command line shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fusion:
    """One fused node. `replaced` names the nodes that it made superfluous.

    The rest is a prediction for one run in stock onnxruntime (docs/cost-model.md), with
    `ASSUMED_DIM` of gradfuse.passes.matching for each symbolic dimension: `bytes_before` and `bytes_after` are the
    memory traffic of the replaced nodes and of what stands in their place, `speedup` is the ratio of their times.
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
        """The predicted difference in memory traffic; negative where the fused node moves more."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class NearMiss:
    """A node whose value has the form of a fused op, and the reason why it was left alone.

    `bug` says that a rule took it, and that a run with numbers refuted the rule. `match` names the rule whose match is
    right, and was left alone for its cost only. `nodes` are those that the op would have replaced and `bytes_saved` the
    traffic saved by that, where the match came that far.
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
    """A known bug of the exporter that the graph carries, or of onnxruntime that it meets: its name, the node that
    shows it, and what to do about it."""

    bug: str
    node: str
    text: str

    def __str__(self) -> str:
        return f"warning: {self.node}: {self.text} [{self.bug}]"


@dataclass
class Report:
    """The fusions and near misses of a model, how many nodes of each operator it had `before` and has `after`, and the
    exporter bugs that it carries as `warnings`."""

    fusions: list[Fusion] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    warnings: list[ExporterBug] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        plain = asdict(self)
        for fusion, entry in zip(self.fusions, plain["fusions"], strict=True):
            entry["bytes_saved"] = fusion.bytes_saved
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
        lines += [f"  left alone: {m.node} ({m.rule}): {m.reason}" for m in self.near_misses]
        return lines

    def _count(self, op: str) -> tuple[int, int]:
        return self.before.get(op, 0), self.after.get(op, 0)


def _predicted(fusion: Fusion) -> str:
    moved = f"{_bytes(fusion.bytes_before)} -> {_bytes(fusion.bytes_after)}"
    return f"predicted traffic {moved}, {fusion.speedup:.1f} x as fast"


def _bytes(n: int) -> str:
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def traffic_text(n: int) -> str:
    return f"{_bytes(abs(n))} {'less' if n >= 0 else 'more'} traffic"
