"""The pass of a fused operator: it tries every value of a graph, and replaces those that the operator computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.models.conversion import raise_opset
from gradfuse.passes.algebra import TooComplex
from gradfuse.passes.matching import bodies
from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.context import Context, ContextPass
from gradfuse.passes.matching.cost import Cost, cost_of
from gradfuse.passes.matching.graphs import TOLERANCE, VIEWS, names_of
from gradfuse.passes.matching.outer_factor import multiplied, outer_factor, without_outer_factor
from gradfuse.passes.matching.rewrite import Mismatch, Rewrite, anchor_of, apply, behind_roots, superfluous
from gradfuse.passes.matching.site import Site
from gradfuse.passes.progress import counted
from gradfuse.passes.proving import Refuted, Unproved, prove
from gradfuse.passes.reading import Form, Opaque
from gradfuse.passes.reading.nodes import Unreadable
from gradfuse.passes.report import Fusion, NearMiss

Policy = Literal["profitable", "all"]

BUG = "a bug in this rule, please report it: for the same numbers"
"""How a refuted match is reported: "the original is" follows."""


class FusePass(ContextPass):
    """Replaces every subgraph that computes one fused operator.

    A subclass has the rules: it proposes the rewrite of a value, and the algebra decides. A proposal is taken only if
    the operator's definition, written in the forms of the values that it was bound to, is the form of the value.

    Args:
        policy: "profitable" leaves alone what would move more bytes or not be faster; "all" takes every legal match.

    After a call, `fusions` and `near_misses` say what was done.
    """

    operator: ClassVar[str]
    order: ClassVar[int] = 0
    """Operators of a lower number go first: those that take in others' work, and last those whose form tells little."""
    refuses_no_class: ClassVar[bool] = False
    """Whether the op refuses an index that is no class. Rules then take for granted that it is one."""
    linear: ClassVar[bool] = True
    """Whether the op on a factor times its input is the factor times the op, so that a factor may stay outside."""
    looks_at_views: ClassVar[bool] = False
    """Whether a value may have something of the op where a view gives it: what is in front of it has no form."""
    by_numbers: ClassVar[bool] = False
    """Whether the rules go by nodes alone, and leave it to the proof with numbers whether these compute the same."""
    training_operators: ClassVar[Collection[str]] = ()
    """Operators of onnxruntime-training that are the backward pass of which the op is part."""

    def __init__(self, policy: Policy = "profitable") -> None:
        super().__init__()
        self.policy = policy
        self.fusions: list[Fusion] = []
        self.near_misses: list[NearMiss] = []

    # What the rules of an operator define

    @abstractmethod
    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        """The rewrite of a value; None if it does not resemble the op.

        Raises:
            Mismatch: it resembles the op, but cannot be replaced.
        """

    def possible(self, site: Site, form: Form) -> bool:
        """Whether a value of this form may have something of the op: what the form alone tells."""
        return True

    def refusal(self, site: Site, rewrite: Rewrite) -> str | None:
        """Why the op may not stand for the nodes between its operands and the root; None if it may."""
        return None

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Regions near the op that no rule proposes, when all that can be fused is; `explain` names them."""
        yield from ()

    def first_bound(self, builder: Builder, candidates: Iterable[Callable[[], Rewrite]]) -> Rewrite | None:
        """The first candidate that can be bound; if none can, Mismatch with the reason of the last."""
        miss: Mismatch | None = None
        for candidate in candidates:
            try:
                return candidate()
            except Mismatch as reason:
                miss = reason
                builder.discard()
        if miss is not None:
            raise miss
        return None

    # The way through a model

    def run(self, context: Context) -> bool:
        self.fusions, self.near_misses = [], []
        for site in context.sites():
            dead: dict[ir.Node, None] = {}
            # From the end, so that the whole of a backward subgraph comes before its parts.
            for node in counted(list(reversed(site.graph)), self.operator, context.progress):
                is_view = node.op_type in VIEWS and node.domain == "" and not self.looks_at_views
                if node in dead or is_view or node.domain == custom_ops.DOMAIN:
                    continue
                for root in node.outputs:
                    dead.update(dict.fromkeys(self._replaced(context, site, root)))
            site.graph.remove(dead, safe=True)
        context.report.fusions += self.fusions
        context.report.near_misses += self.near_misses
        if self.fusions:
            context.model.graph.opset_imports.setdefault(custom_ops.DOMAIN, custom_ops.VERSION)
        return bool(self.fusions)

    def _replaced(self, context: Context, site: Site, root: ir.Value) -> Sequence[ir.Node]:
        """Replaces the root if it can; the nodes that this makes superfluous."""
        if root.dtype not in TOLERANCE or root not in site.position or site.forms.get(root) is None:
            return ()
        builder = Builder(site, root)
        match: _Match | None = None
        rule, bug = "", False
        try:
            match = self._matched(site, builder, root)
            if match is not None and self._takes(site, match):
                anchor = anchor_of(site, match.rewrite, match.dead)
                for part in () if match.rewrite.by_body else match.rewrite.parts():
                    prove(site, part, TOLERANCE[ir.DataType.FLOAT if part.elementwise else root.dtype])
                self.fusions.append(match.fusion())
                # Up to the version of any body, versions differ in no operator that a rule reads or writes.
                raise_opset(context.model, custom_ops.OPS[self.operator].oldest_opset)
                builder.commit(anchor)
                context.drop(apply(site, match.rewrite, match.dead, anchor))
                return match.dead
            builder.discard()
            return ()
        except Unproved as error:
            reason = f"it could not be checked with numbers: {error}"
        except Refuted as difference:
            bug = not self.by_numbers
            claim = BUG if bug else "it has the operator's form, and other numbers: for the same numbers"
            reason = f"{claim} the original is {difference}"
        except _Unprofitable as costs:
            reason, rule = f"not profitable: {costs}", costs.rule
        except Mismatch as miss:
            reason = str(miss)
        except (Opaque, TooComplex) as error:
            reason = f"its form outgrew the analysis ({error})"
        except Unreadable as unknown:
            reason = f"the rank of {str(unknown)!r} is unknown"
        builder.discard()
        node = root.producer()
        assert node is not None
        (name,) = names_of([node])
        nodes, saved = ((), None) if match is None else (names_of(match.dead), match.bytes_saved)
        self.near_misses.append(NearMiss(name, self.operator, reason, bug, rule, nodes, saved))
        return ()

    def _matched(self, site: Site, builder: Builder, root: ir.Value) -> _Match | None:
        rewrite = self._proposed(site, builder, root)
        if rewrite is None:
            return None
        dead = superfluous(site, rewrite)
        return _Match(rewrite, dead, cost_of(site, dead), cost_of(site, rewrite.nodes))

    def _proposed(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        """A rewrite of the root, or of what is left of it without an outer factor."""
        body = bodies.find(site, builder, root, self.operator)
        if body is not None:
            return body
        form = site.forms.form(root)
        if not site.answer(self.operator, form.groups, [form.poly], lambda: self._is_possible(site, form)):
            return None
        split = without_outer_factor(site, root) if self.linear else None
        if split is None:
            return self.propose(site, builder, root)
        inner, outer = split
        rewrite = self.propose(site, builder, inner)
        if rewrite is None:
            return None
        return multiplied(builder, rewrite, outer, refuses_no_class=self.refuses_no_class)

    def _is_possible(self, site: Site, form: Form) -> bool:
        outer = outer_factor(site.algebra, form) if self.linear else None
        return self.possible(site, form if outer is None else outer.inner)

    def _takes(self, site: Site, match: _Match) -> bool:
        """Whether to put a match in; Mismatch if it is left alone for a reason that is worth a near miss."""
        if match.rewrite.root.dtype == ir.DataType.DOUBLE:
            raise Mismatch("its type is float64; only float32, float16 and bfloat16 are fused")
        if not match.dead:
            raise Mismatch("another output of its node is in use")
        if (refusal := self.refusal(site, match.rewrite)) is not None:
            raise Mismatch(refusal)
        if all(n.domain == "" and n.op_type in VIEWS | {"Cast"} for n in behind_roots(match.rewrite, match.dead)):
            return False  # The arithmetic lives on for another consumer, which is a root of its own.
        if self.policy == "profitable" and not match.after.pays(match.before):
            raise _Unprofitable(match)
        return True


@dataclass(frozen=True)
class _Match:
    """A rewrite, the nodes that it makes superfluous, and the costs of those and of its own."""

    rewrite: Rewrite
    dead: list[ir.Node]
    before: Cost
    after: Cost

    @property
    def bytes_saved(self) -> int:
        return self.before.bytes - self.after.bytes

    def fusion(self) -> Fusion:
        return Fusion(
            self.rewrite.operator,
            str(self.rewrite.fused[0].name),
            self.rewrite.rule,
            names_of(self.dead),
            self.before.bytes,
            self.after.bytes,
            self.before.equivalent / max(self.after.equivalent, 1),
        )


class _Unprofitable(Exception):
    """A match that is right, and would not pay."""

    def __init__(self, match: _Match) -> None:
        super().__init__(match.after.against(match.before))
        self.rule = match.rewrite.rule
