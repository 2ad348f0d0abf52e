"""Pointwise: chains of elementwise nodes, in one pass over memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops.attention import THRESHOLD_END
from gradfuse.custom_ops.pointwise import OPERATOR
from gradfuse.custom_ops.pointwise_expressions import INPUTS, MOST_OPERATORS, OUTPUTS, ExpressionError, parse
from gradfuse.passes.algebra import UNIT, ZERO, Poly
from gradfuse.passes.matching import Builder, Context, ContextPass, Mismatch, Policy, Rewrite, Site, names_of
from gradfuse.passes.matching.cost import cost_of
from gradfuse.passes.matching.fuse_pass import BUG
from gradfuse.passes.matching.graphs import TOLERANCE, graphs_in
from gradfuse.passes.matching.rewrite import anchor_of, apply, superfluous
from gradfuse.passes.progress import counted
from gradfuse.passes.proving import Refuted, Unproved, prove
from gradfuse.passes.reading.draws import Draw, draw_of
from gradfuse.passes.report import Fusion, NearMiss

LEAST_SAVED = 2**20
"""What a chain must save, in bytes of traffic: some 60 microseconds. A body for less than that is a loss."""

_RULE = "elementwise"
_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_UNARY = {"Abs", "Neg", "Reciprocal", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Relu"}
_COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
_BINARY = {"Add", "Sub", "Mul", "Div", *_COMPARISONS, "And", "Or"}
_LISTS = {"Sum": "Add", "Max": "Max", "Min": "Min"}
"""Operators with any number of operands, and those of two that make them up."""
_MOST_DIMENSIONS = 8  # that kernels know
_READERS = 24  # of a result that are looked at
_MASK = 8  # tensors of float32 that move while a mask is computed node by node, and more
_MOST_MOVED = 4 * MOST_OPERATORS + _MASK * (len(INPUTS) + len(OUTPUTS))  # tensors that the nodes of a chain move
_AROUND = 64  # nodes between the operands of a chain and its results that are looked at


class FusePointwisePass(ContextPass):
    """Puts one node in the place of elementwise nodes that read one another's results.

    A chain has a shape: each result has it, and what is read broadcasts to it. It grows from each node, the last
    first, by what its nodes read, by what reads their results, and by what reads the same tensors, as long as nothing
    outside comes in between. What it needs of earlier results is computed again where that reads no further tensor.
    Masks of a dropout that a seed decides are drawn wherever they are needed, and never stored.

    A chain computes what its nodes do, one operator each. The test by numbers runs the two side by side, but not where
    there is a mask: a graph may hold the places of its elements as constants, which cannot be made smaller.

    Args:
        policy: "profitable" takes chains that save :data:`LEAST_SAVED` bytes; "all" takes all that save any.
        sizes: symbolic dimension -> the size it counts as, in the place of
            :data:`gradfuse.passes.matching.cost.ASSUMED_DIM`.

    After a call, `fusions` says what was done.
    """

    def __init__(self, policy: Policy = "profitable", sizes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.sizes = dict(sizes or {})
        self.fusions: list[Fusion] = []

    def run(self, context: Context) -> bool:
        self.fusions = []
        oldest = custom_ops.OPS[OPERATOR.name].oldest_opset
        for site in context.sites():
            if not site.is_main or context.model.graph.opset_imports.get("", 1) < oldest:
                continue
            chains, dead = _Chains(site), dict[ir.Node, None]()
            for root in counted(list(reversed(site.graph)), OPERATOR.name, context.progress):
                if root in dead or not chains.takes(root) or not self._may_pay_around(site, root):
                    continue
                for most, siblings in ((len(OUTPUTS), True), (len(OUTPUTS), False), (1, False)):
                    chain = chains.around(root, most, siblings=siblings)
                    if chain is None or not self._may_pay(site, chain):
                        break
                    gone = self._replaced(context, chains, chain)
                    dead.update(dict.fromkeys(gone))
                    if gone:
                        break
            site.graph.remove(dead, safe=True)
        context.report.fusions += self.fusions
        if self.fusions:
            context.model.graph.opset_imports.setdefault(custom_ops.DOMAIN, custom_ops.VERSION)
        return bool(self.fusions)

    def _may_pay_around(self, site: Site, root: ir.Node) -> bool:
        """Whether a chain with a node could save enough if it were as long as any, and moved nothing."""
        if self.policy == "all":
            return True
        # All results have the root's shape and type. In 16 bits a node may be computed between two casts.
        wide = 1 if root.outputs[0].dtype == ir.DataType.FLOAT else 5
        return cost_of(site, [root], self.sizes).bytes * wide * _MOST_MOVED >= LEAST_SAVED

    def _may_pay(self, site: Site, chain: _Chain) -> bool:
        """Whether a chain, the largest of those around a node, could save enough if it moved nothing."""
        if self.policy == "all" or chain.draw is not None:
            return True
        return cost_of(site, chain.nodes, self.sizes).bytes >= LEAST_SAVED

    def _replaced(self, context: Context, chains: _Chains, chain: _Chain) -> list[ir.Node]:
        """Puts a chain in if it pays; the nodes that this makes superfluous."""
        site = chains.site
        builder = Builder(site, chain.outputs[-1])
        try:
            rewrite = _rewrite(builder, chains, chain)
            dead = superfluous(site, rewrite)
            before, after = (cost_of(site, nodes, self.sizes) for nodes in (dead, rewrite.nodes))
            saved = before.bytes - after.bytes
            if chain.draw is not None and saved > 0:
                # Where all that reads a mask draws it, nothing computes it.
                saved += _MASK * cost_of(site, rewrite.nodes[:1], self.sizes).bytes // len(chain.operands)
            if len(chain.nodes) < 2 or saved < (LEAST_SAVED if self.policy == "profitable" else 1):
                raise Mismatch("it would not pay")
            anchor = anchor_of(site, rewrite, dead)
            for part in rewrite.parts() if chain.draw is None else ():
                prove(site, part, TOLERANCE[ir.DataType.FLOAT])
        except (Mismatch, ExpressionError, Unproved, Refuted) as reason:
            builder.discard()
            if isinstance(reason, Refuted):
                (node,) = names_of([chain.nodes[-1]])
                context.report.near_misses.append(
                    NearMiss(node, OPERATOR.name, f"{BUG} the original is {reason}", bug=True)
                )
            return []
        name, ratio = str(rewrite.fused[0].name), before.equivalent / max(after.equivalent, 1)
        self.fusions.append(Fusion(rewrite.operator, name, _RULE, names_of(dead), before.bytes, after.bytes, ratio))
        builder.commit(anchor)
        context.drop(apply(site, rewrite, dead, anchor))
        return dead


@dataclass(frozen=True)
class _Chain:
    """Nodes that one node can stand for.

    Attributes:
        nodes: in order.
        inside: those whose results nobody else computes: of the others there are copies.
        operands: the tensors that they read; the first has the shape of the results.
        outputs: the results that others read, in order.
        draw: the dropout whose mask they read.
    """

    nodes: Sequence[ir.Node]
    inside: Collection[ir.Node]
    operands: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    draw: Draw | None


class _Chains:
    """The chains in a graph."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._draws: dict[ir.Value, Draw | None] = {}

    def takes(self, node: ir.Node) -> bool:
        """Whether a node makes numbers that may be the results of a chain."""
        out = node.outputs[0]
        if node.graph is not self.site.graph or len(node.outputs) != 1 or node in self.site.unread:
            return False
        if out.dtype not in _TYPES:
            return False
        if not self.site.knows(out) or len(self.site.extents(out)) > _MOST_DIMENSIONS:
            return False
        return _operators(self, node) > 0 and self._conditions(node) is not None

    def around(self, root: ir.Node, most: int, *, siblings: bool) -> _Chain | None:
        """The chain that grows from a node, with at most so many outputs; None where there is none.

        Args:
            root: the node.
            most: how many outputs there may be.
            siblings: whether nodes join that read the same tensors.
        """
        members = {root: None}
        chain = self._chain(members, (), most)
        if chain is None:
            return None
        todo = _neighbours(root)
        while todo:
            node = todo.pop()
            if node not in members and self._fits(node, root):
                larger = self._chain({**members, node: None}, (), most)
                if larger is not None and self._is_closed(larger):
                    members[node], chain = None, larger
                    todo += _neighbours(node)
            if not todo and siblings:
                whole = [value for value in chain.operands if self._sizes(value) == self._sizes(root.outputs[0])]
                todo = [one for value in whole for one in _readers(value) if one not in members]
                siblings = False
        return self._with_copies(chain, members, most)

    def _with_copies(self, chain: _Chain, members: Collection[ir.Node], most: int) -> _Chain:
        """The chain that computes operands again of its other operands."""
        copies: dict[ir.Node, None] = {}
        todo = list(chain.operands)
        while todo:
            node = todo.pop().producer()
            if node is None or node in copies or not self._fits(node, chain.nodes[-1]):
                continue
            other = self._chain(members, {**copies, node: None}, most)
            if other is not None and len(other.operands) < len(chain.operands) and self._is_closed(other):
                copies[node], chain = None, other
                todo = list(chain.operands)
        return chain

    def _fits(self, node: ir.Node, root: ir.Node) -> bool:
        """Whether a node makes a result of the shape and the type of the root's."""
        out, wanted = node.outputs[0], root.outputs[0]
        return self.takes(node) and out.dtype == wanted.dtype and self._sizes(out) == self._sizes(wanted)

    def _sizes(self, value: ir.Value) -> list[Poly]:
        return self.site.extents(value)

    def _chain(self, members: Collection[ir.Node], copies: Iterable[ir.Node], most: int) -> _Chain | None:
        """The chain of some nodes and, beside them, copies of others; None where one node cannot stand for it."""
        nodes: dict[ir.Node, None] = {}
        for node in (*members, *copies):
            nodes |= dict.fromkeys((node, *(self._conditions(node) or ())))
        ordered = sorted(nodes, key=self.site.forms.order)
        inside = set(members)
        for node in reversed(ordered):
            if node not in inside and not self._is_read_outside(node, inside):
                inside.add(node)
        outputs = [node.outputs[0] for node in ordered if node in inside and self._is_read_outside(node, inside)]
        some = next(iter(members)).outputs[0]
        whole, made = self._sizes(some), {node.outputs[0] for node in ordered}
        draws: dict[Draw, None] = {}
        operands: dict[ir.Value, None] = {}
        for value in (value for node in ordered for value in node.inputs):
            if value is None or value in made or self.number(value) is not None:
                continue
            draw = self._draw(value)
            if draw is not None and self.site.knows(value) and self._sizes(value) == whole:
                draws[draw] = None
            elif draw is None and value.dtype == some.dtype and self._spreads(value, whole):
                operands[value] = None
            else:
                return None
        first = next((value for value in operands if self._sizes(value) == whole), None)
        if first is None or len(operands) > len(INPUTS) or len(draws) > 1 or not 0 < len(outputs) <= most:
            return None
        if sum(_operators(self, node) for node in ordered) + len(draws) > MOST_OPERATORS:
            return None
        rest = [value for value in operands if value is not first]
        return _Chain(ordered, inside, [first, *rest], outputs, next(iter(draws), None))

    def _is_closed(self, chain: _Chain) -> bool:
        """Whether nothing outside a chain lies between its results and its operands, as far as is looked."""
        order = self.site.forms.order
        begin = min(map(order, chain.inside))
        todo, seen = [value.producer() for value in chain.operands], set[ir.Node]()
        while todo:
            node = todo.pop()
            if node is None or node in seen or node.graph is not self.site.graph or order(node) < begin:
                continue
            seen.add(node)
            if node in chain.inside or len(seen) > _AROUND or graphs_in(node):
                return False
            todo += [value.producer() for value in node.inputs if value is not None]
        return True

    def _is_read_outside(self, node: ir.Node, inside: Collection[ir.Node]) -> bool:
        """Whether the result of a node goes to other nodes than these, or out of the graph."""
        value, unread = node.outputs[0], self.site.unread
        return value.is_graph_output() or any(use.node not in inside and use.node not in unread for use in value.uses())

    def _conditions(self, node: ir.Node) -> tuple[ir.Node, ...] | None:
        """The nodes that compute the truth values which a node reads, but for masks of dropouts; None if others do.

        With those that make numbers of such masks, which would be larger than what they are drawn by.
        """
        found: dict[ir.Node, None] = {}
        todo = [node]
        while todo:
            for value in todo.pop().inputs:
                made = None if value is None else value.producer()
                if value is None or self._draw(value) is not None:
                    continue
                if value.dtype != ir.DataType.BOOL:
                    if (
                        made is not None
                        and made.op_type == "Cast"
                        and not made.domain
                        and self._is_mask(made.inputs[0])
                    ):
                        found[made] = None
                elif made is None or made.graph is not self.site.graph or not _is_condition(made):
                    return None
                elif made not in found:
                    found[made] = None
                    todo.append(made)
        return tuple(found)

    def _is_mask(self, value: ir.Value | None) -> bool:
        return value is not None and self._draw(value) is not None

    def _draw(self, value: ir.Value) -> Draw | None:
        """The dropout that a value is the mask of."""
        if value not in self._draws:
            draw = draw_of(self.site.forms, value)
            # A dropout of all elements needs no numbers.
            self._draws[value] = None if draw is None or draw.threshold >= THRESHOLD_END else draw
        return self._draws[value]

    def _spreads(self, value: ir.Value, whole: Sequence[Poly]) -> bool:
        """Whether a value broadcasts to a shape."""
        if not self.site.knows(value):
            return False
        sizes = self._sizes(value)
        pairs = zip(reversed(sizes), reversed(whole), strict=False)
        return len(sizes) <= len(whole) and all(
            own in (UNIT, other) or own in self.site.algebra.parts(other) for own, other in pairs
        )

    def number(self, value: ir.Value) -> float | None:
        """The finite number that a value always is."""
        array = self.site.forms.constant(value) if value.dtype in _TYPES else None
        found = float(array.item()) if array is not None and array.size == 1 else math.nan
        return found if math.isfinite(found) else None


def _operators(chains: _Chains, node: ir.Node) -> int:
    """How many operators of an expression a node is; 0 where it cannot be part of one."""
    count = len(node.inputs)
    if any(value is None for value in node.inputs):
        return 0
    if node.domain:
        return 2 if node.domain == custom_ops.DOMAIN and node.op_type == "ThresholdBackward" else 0
    if node.op_type == "Pow":
        exponent = node.inputs[1]
        return 1 if exponent is not None and chains.number(exponent) == 2 else 0
    if node.op_type == "Cast":
        return 1 if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.BOOL else 0
    if node.op_type in _LISTS:
        return count - 1
    return 1 if node.op_type in _UNARY or node.op_type in _BINARY or node.op_type in ("Where", "Not") else 0


def _is_condition(node: ir.Node) -> bool:
    return not node.domain and node.op_type in _COMPARISONS | {"Not", "And", "Or"}


def _neighbours(node: ir.Node) -> list[ir.Node]:
    """What reads the result of a node, and after that what computes its operands."""
    readers = [reader for value in node.outputs for reader in _readers(value)]
    return [*readers, *(made for value in node.inputs if value is not None and (made := value.producer()) is not None)]


def _readers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in itertools.islice(value.uses(), _READERS)]


def _rewrite(builder: Builder, chains: _Chains, chain: _Chain) -> Rewrite:
    """One node in the place of a chain."""
    draw = chain.draw
    numbers = {"dropout_threshold": draw.threshold, "draw": draw.layer} if draw is not None else {}
    # An absent input at the end is none.
    seeds = [] if draw is None else [draw.seed] if draw.before is None else [draw.seed, draw.before]
    absent = [None] * (len(INPUTS) - len(chain.operands)) if seeds else []
    whole = chains.site.extents(chain.outputs[0])
    results = builder.fused_whole(
        OPERATOR.name,
        [*chain.operands, *absent, *seeds],
        [whole if k < len(chain.outputs) else [ZERO] for k in range(len(OUTPUTS))],
        expression=_expression(chains, chain),
        **numbers,
    )
    pairs = list(zip(chain.outputs, results, strict=False))
    made = builder.rewrite(_RULE, results[:1], pairs[-1][1])
    others, nodes = tuple(pairs[:-1]), frozenset(chain.nodes)
    return replace(made, others=others, frontier=tuple(chain.operands), independent=True, runs=nodes)


def _expression(chains: _Chains, chain: _Chain) -> str:
    """What the nodes of a chain compute.

    Raises:
        ExpressionError: it is too much for one expression.
    """
    texts = {value: f"x{k}" for k, value in enumerate(chain.operands)}
    names = {value: f"y{k}" for k, value in enumerate(chain.outputs)}
    reads = Counter(value for node in chain.nodes for value in node.inputs)
    statements: list[str] = []
    for node in chain.nodes:
        out, parts = node.outputs[0], []
        for value in node.inputs:
            assert value is not None
            number = chains.number(value)
            # What is neither a number, an operand nor a result is the mask.
            parts.append(texts.get(value, "Kept()") if number is None else str(np.float32(number)))
        texts[out] = _term(node.op_type, parts)
        if out in names or reads[out] > 1:
            name = names.get(out, f"t{len(statements)}")
            statements.append(f"{name} = {texts[out]}")
            texts[out] = name
    return parse("; ".join(statements)).text()


def _term(op_type: str, parts: Sequence[str]) -> str:
    if op_type == "ThresholdBackward":
        return f"Where(LessOrEqual({parts[1]}, 0.0), 0.0, {parts[0]})"
    if op_type == "Pow":
        return f"Mul({parts[0]}, {parts[0]})"
    if op_type == "Cast":
        return f"Where({parts[0]}, 1.0, 0.0)"
    if op_type not in _LISTS:
        return f"{op_type}({', '.join(parts)})"
    return functools.reduce(lambda one, other: f"{_LISTS[op_type]}({one}, {other})", parts)
