"""A rewrite: what a rule proposes, the check that the operator computes the same, and putting it into the graph."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from gradfuse.passes.algebra import Poly
from gradfuse.passes.matching.graphs import TOLERANCE, graphs_in, names_of, nodes_in
from gradfuse.passes.matching.site import Site

OTHERWISE = "it has the gradient's form, but the operator on the same values would compute something else"
"""Why a rewrite that was proposed is not one, where nothing more is known."""


class Mismatch(Exception):
    """The value has something of an op's form, but cannot be replaced; the text says why."""


@dataclass
class Rewrite:
    """Nodes that are ready to be put in; `output` is what takes the place of the root, in its shape."""

    operator: str
    rule: str
    root: ir.Value
    nodes: list[ir.Node]
    fused: list[ir.Node]
    output: ir.Value
    frontier: tuple[ir.Value, ...] = ()
    """The values that the match takes as given. If empty: every value that the root's form does not express."""
    ends: Mapping[ir.Value, Poly] = field(default_factory=dict)
    """Those of them that are ends of groups, with the number of rows."""
    others: tuple[tuple[ir.Value, ir.Value], ...] = ()
    """Further values that the same fused nodes compute, each with what takes its place."""
    counts: frozenset[ir.Value] = frozenset()
    """Those of the frontier that count something: whole numbers from 0 on, of any type."""
    positive: frozenset[ir.Value] = frozenset()
    """Those of the frontier that are above 0."""
    independent: bool = False
    """Whether the original is operator for operator what the fused nodes compute of the frontier, which may be any
    numbers, whatever computes them: its test needs few."""
    elementwise: bool = False
    """Whether all that is computed is elementwise, in float32, on tensors of the root's shape and on single numbers."""
    runs: frozenset[ir.Node] = frozenset()
    """Nodes that no form expresses, and that the test by numbers runs all the same."""
    linear: bool = False
    """Whether results are linear in each value of the frontier, or go by its order: its test needs few numbers."""
    skips: bool = False
    """Whether the operator skips what the original multiplies by 0: a NaN or an infinity there reaches nothing."""
    within: float = math.inf
    """How large the numbers of the frontier may be: beside larger ones a finite number may not do for -inf."""
    table: Mapping[int, int] = field(default_factory=dict)
    """With `linear`: smaller sizes for static ones, in which the nodes are valid too; if empty, there are none."""
    by_body: bool = False
    """Whether the nodes to go are the operator's own body, which is what the test would run for the fused node."""

    @property
    def replaced(self) -> tuple[tuple[ir.Value, ir.Value], ...]:
        """The values that are replaced, the root first, each with what takes its place."""
        return ((self.root, self.output), *self.others)

    def parts(self) -> Iterator[Rewrite]:
        """The same rewrite for each of the values that it replaces alone."""
        for root, output in self.replaced:
            yield replace(self, root=root, output=output, others=())


def require_same(site: Site, root: ir.Value, expected: Poly, known: Poly | None = None) -> None:
    """Checks that the root computes the op's definition, written in the values that the op was bound to.

    Args:
        site: the graph of the root.
        root: the value to replace.
        expected: the definition.
        known: what the root computes; its form if None.

    Raises:
        Mismatch: it computes something else.
    """
    assert root.dtype is not None
    own, algebra = site.forms.form(root).poly if known is None else known, site.algebra
    same = own.close_to(expected, 8 * TOLERANCE[root.dtype])
    # Small terms beside large ones of the same kind may be all that a condition leaves.
    for condition in algebra.indicators(expected) if same else ():
        for case in (True, False):
            left = algebra.given(own, condition, case)
            same = same and left.close_to(algebra.given(expected, condition, case), 8 * TOLERANCE[root.dtype])
    if not same:
        raise Mismatch(OTHERWISE)


def bypassed(site: Site, rewrite: Rewrite) -> Iterator[ir.Node]:
    """The nodes between the values that the rewrite reads and the root."""
    given = {v for node in rewrite.nodes for v in node.inputs}
    todo, seen = [rewrite.root], {rewrite.root}
    while todo:
        node = todo.pop().producer()
        if node is None or node.graph is not site.graph:
            continue
        yield node
        for value in node.inputs:
            if value is not None and value not in given and value not in seen:
                seen.add(value)
                todo.append(value)


def superfluous(site: Site, rewrite: Rewrite) -> list[ir.Node]:
    """The nodes that nothing needs once the rewrite computes the root; none if its node has other outputs in use."""
    needed = {v for node in rewrite.nodes for v in node.inputs if v is not None}
    roots = [root for root, _ in rewrite.replaced]
    producers = [producer for root in roots if (producer := root.producer()) is not None]
    read = site.unread_behind(needed)

    def goes(reader: ir.Node) -> bool:
        """Whether a reader goes with what it reads."""
        return reader in site.unread and reader not in read

    others = [v for node in producers for v in node.outputs if v not in roots]
    if any(v.is_graph_output() or not all(goes(use.node) for use in v.uses()) for v in others):
        return []
    if len(producers) < len(roots) or any(root in needed for root in roots):
        return []
    dead: dict[ir.Node, None] = dict.fromkeys(producers)
    dead.update(dict.fromkeys(node for value in others for node in _unread_behind(site, value, dead)))
    # With a node go all nodes of its branches and loop bodies.
    todo = [inner for node in dead for inner in (node, *nodes_in(node))]
    gone = set(todo)
    while todo:
        for value in todo.pop().inputs:
            node = None if value is None else value.producer()
            # Values of outer graphs stay.
            if node is None or node in gone or node.graph is not site.graph:
                continue
            if all(
                not v.is_graph_output()
                and v not in needed
                and all(use.node in gone or goes(use.node) for use in v.uses())
                for v in node.outputs
            ):
                leaving = [node, *(one for v in node.outputs for one in _unread_behind(site, v, gone))]
                dead.update(dict.fromkeys(leaving))
                inside = [inner for one in leaving for inner in nodes_in(one)]
                todo += [*leaving, *inside]
                gone.update(leaving, inside)
    return list(dead)


def behind_roots(rewrite: Rewrite, dead: Collection[ir.Node]) -> set[ir.Node]:
    """Those of superfluous nodes that the roots are computed of; the others read what goes, and nothing reads them."""
    rest, found, todo = set(dead), set[ir.Node](), [root for root, _ in rewrite.replaced]
    while todo:
        node = todo.pop().producer()
        if node is not None and node in rest:
            rest.remove(node)
            found.add(node)
            todo += [v for one in (node, *nodes_in(node)) for v in one.inputs if v is not None]
    return found


def _unread_behind(site: Site, value: ir.Value, gone: Collection[ir.Node]) -> list[ir.Node]:
    """What nothing reads that is computed of a value."""
    found, todo = dict[ir.Node, None](), [value]
    while todo:
        for use in todo.pop().uses():
            if use.node not in gone and use.node not in found:
                found[use.node] = None
                todo += use.node.outputs
    return list(found)


def anchor_of(site: Site, rewrite: Rewrite, dead: Collection[ir.Node]) -> ir.Node:
    """The node that the new nodes go before: the root's, or an earlier one that reads another value that they replace.

    Args:
        site: the graph.
        rewrite: what is to be put in.
        dead: the nodes that it makes superfluous.

    Raises:
        Mismatch: something that the new nodes read is computed after that.
    """
    anchor = rewrite.root.producer()
    assert anchor is not None
    if not rewrite.others:
        return anchor
    readers = {use.node for value, _ in rewrite.others for use in value.uses()} - set(dead)
    if any(node.graph is not site.graph for node in readers):
        # What a branch or a loop body reads, its node reads.
        readers = {node for node in site.graph if not readers.isdisjoint((node, *nodes_in(node)))}
    anchor = min((anchor, *readers), key=site.forms.order)
    for node in rewrite.nodes:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is None or producer in rewrite.nodes or producer.graph is not site.graph:
                continue
            if not site.forms.order(producer) < site.forms.order(anchor):
                raise Mismatch("what it reads is computed after something that reads its results")
    return anchor


def apply(site: Site, rewrite: Rewrite, dead: Sequence[ir.Node], anchor: ir.Node) -> list[ir.Graph]:
    """Puts the nodes of a rewrite before the anchor, and cuts off those that it makes superfluous.

    The latter stay in the graph, without inputs, until the caller removes them: removing many at once is faster.

    Returns:
        The branches and loop bodies that went with them.
    """
    replaced = names_of(dead)
    site.graph.insert_before(anchor, rewrite.nodes)
    site.forms.place(rewrite.nodes, anchor)
    site.unread -= site.unread_behind(v for node in rewrite.nodes for v in node.inputs if v is not None)
    for node in rewrite.nodes:
        node.metadata_props["gradfuse.rule"] = rewrite.rule
    for node in rewrite.fused:
        node.metadata_props["gradfuse.replaced"] = ", ".join(replaced)
    positions = [_handed_over(site, root, output) for root, output in rewrite.replaced]
    _cut_off(site, dead)
    for (_, output), position in zip(rewrite.replaced, positions, strict=True):
        site.enter(output, position)
    return [graph for node in dead for graph in graphs_in(node)]


def _handed_over(site: Site, root: ir.Value, output: ir.Value) -> int:
    """Gives the name, the type and the readers of a value to what takes its place; the position of the value."""
    name = root.name
    root.name = site.names.fresh(f"{name}_plain")
    output.name = name
    output.shape, output.type = root.shape, root.type
    output.doc_string = root.doc_string
    output.metadata_props.update(root.metadata_props)
    output.meta.update(root.meta)  # Quantization annotations are there.
    ir.convenience.replace_all_uses_with(root, output, replace_graph_outputs=root.is_graph_output())
    site.forms.set(output, site.forms.form(root))
    return site.position[root]


def _cut_off(site: Site, dead: Sequence[ir.Node]) -> None:
    gone = [*dead, *(inner for node in dead for inner in nodes_in(node))]
    read = {v for node in gone for v in node.inputs if v is not None}
    for node in gone:
        for k in range(len(node.inputs)):
            node.replace_input_with(k, None)
    for value in read:
        unused = not value.uses() and not value.is_graph_output() and not value.is_graph_input()
        if unused and site.graph.initializers.get(str(value.name)) is value:
            del site.graph.initializers[str(value.name)]
            site.leave(value)
    for node in dead:
        for value in node.outputs:
            site.leave(value)
