"""What `fuse` does to a model.

1. A context opens (matching/context.py). Types and shapes that the exporter left out are inferred (shapes.py), and
   nodes that compute the same are one for the time being (matching/duplicates.py). Each graph of the model becomes a
   site (matching/site.py), where every value has a canonical form (reading/, algebra/): equal computations have equal
   forms, however an exporter wrote them.
2. For each operator, a pass goes through the graphs from their ends (`<stem>.py`, matching/fuse_pass.py). For a value
   with something of the operator's form

   - the operator's rules propose a rewrite, and the algebra checks that it computes the same;
   - the cost model says whether it pays (matching/cost.py);
   - original and rewrite are run side by side on numbers that would tell them apart (proving/);
   - the new nodes replace the old ones (matching/rewrite.py).

   Each success becomes a `Fusion` in the context's report; whatever came close becomes a `NearMiss`, with the reason.
3. What is left is searched for known bugs of exporters (diagnosis/exporter_bugs.py). `explain` also wants the backward
   regions that no rule proposed (diagnosis/unmatched.py).
4. The context closes: merged nodes whose results are still read are there again, the inferred types and shapes are
   dropped, and the report comes out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops import functions
from gradfuse.custom_ops.pointwise import OPERATOR as POINTWISE
from gradfuse.errors import ArgumentError
from gradfuse.passes.diagnosis import FindExporterBugsPass, FindUnmatchedPass
from gradfuse.passes.matching import Context, ContextPass, FusePass, Policy
from gradfuse.passes.pointwise import FusePointwisePass
from gradfuse.passes.progress import Progress
from gradfuse.passes.report import Report

_POINTWISE = POINTWISE.name


class Pipeline(ir.passes.PassManager):
    """Passes that share one context for each call.

    Attributes:
        report: what the last call did.
    """

    def __init__(self, steps: Iterable[ContextPass], progress: Progress | None = None) -> None:
        self._steps = tuple(steps)
        super().__init__(self._steps)
        self._progress = progress
        self.report = Report()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = _count(model)
        with Context(model, self._progress) as context:
            modified = [step.run(context) for step in self._steps]
        context.report.before, context.report.after = before, _count(model)
        self.report = context.report
        return ir.passes.PassResult(model, any(modified))


def default_pipeline(
    policy: Policy = "profitable",
    only: Collection[str] | None = None,
    skip: Collection[str] | None = None,
    progress: Progress | None = None,
    *,
    pointwise: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Pipeline:
    """The passes that `gradfuse.fuse` runs, in order.

    Args:
        policy: "profitable" leaves alone what would move more bytes or not be faster; "all" takes every legal match.
        only: names of the operators to fuse; all that have rules if None.
        skip: names of operators to leave alone.
        progress: called regularly with what is being done, how many nodes are done, and how many there are.
        pointwise: whether to fuse chains of elementwise nodes, too, when all else is fused.
        sizes: symbolic dimension -> the size that chains count it as; see `FusePointwisePass`.

    Raises:
        ArgumentError: an unknown policy or operator.
    """
    if policy not in ("profitable", "all"):
        raise ArgumentError(f"fuse: policy is {policy!r}; expected 'profitable' or 'all'")
    passes = _passes()
    known = (*passes, _POINTWISE)
    for argument, names in (("only", only), ("skip", skip)):
        for name in names or ():
            if name not in known:
                raise ArgumentError(f"fuse: {argument} is {name!r}; expected one of {', '.join(known)}")
    if only:
        pointwise = _POINTWISE in only
    steps: list[ContextPass] = [
        step(policy) for op, step in passes.items() if (not only or op in only) and op not in (skip or ())
    ]
    if pointwise and _POINTWISE not in (skip or ()):
        steps.append(FusePointwisePass(policy, sizes))
    return Pipeline([*steps, FindExporterBugsPass()], progress)


def explaining_pipeline() -> Pipeline:
    """The passes that `gradfuse.explain` runs: those of `fuse`, and the search for regions that no rule proposes."""
    fusing = [step() for step in _passes().values()]
    return Pipeline([*fusing, FindExporterBugsPass(), FindUnmatchedPass(fusing)])


def _passes() -> dict[str, type[FusePass]]:
    """The pass of each operator that has one, from the module of its stem, in their order."""
    found: dict[str, type[FusePass]] = {}
    for name, operator in custom_ops.OPS.items():
        module = f"{__package__}.{operator.stem}"
        if name != _POINTWISE and importlib.util.find_spec(module) is not None:
            found[name] = getattr(importlib.import_module(module), f"Fuse{name}Pass")
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def _count(model: ir.Model) -> dict[str, int]:
    """How many nodes of each operator a model has, the most frequent first."""
    own: list[ir.Graph | ir.Function] = [model.graph]
    own += [f for f in model.functions.values() if f.domain != custom_ops.DOMAIN]
    counts = Counter((n.domain, n.op_type) for graph in own for n in functions.every_node(graph))
    return {f"{domain}::{op_type}" if domain else op_type: count for (domain, op_type), count in counts.most_common()}
