"""Sums of three terms and more, written so that two of them are a value of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from gradfuse.passes.matching.site import Site

_MOST_TERMS = 6


class Regrouped:
    """A sum of terms, of which two are added ahead of the others.

    Attributes:
        pair: the sum of the two.
    """

    def __init__(
        self,
        site: Site,
        root: ir.Node,
        inputs: list[ir.Value],
        pair: tuple[ir.Value, ir.Value],
        unread: ir.Node | None = None,
    ) -> None:
        self._site = site
        self._given = {node: _operands(node) for node in (root, unread) if node is not None}
        self._unread = unread
        like = root.outputs[0]
        self._sum = ir.node("Add", pair, name=site.names.fresh("Add"))
        (self.pair,) = self._sum.outputs
        self.pair.name, self.pair.type, self.pair.shape = str(self._sum.name), like.type, like.shape
        site.graph.insert_before(root, self._sum)
        site.forms.read(self._sum, root)
        site.enter(self.pair, site.position[like])
        _set_operands(root, [*inputs, self.pair])
        if unread is not None:
            _set_operands(unread, [None] * len(unread.inputs))

    def kept(self) -> list[ir.Node]:
        """Leave the sum as it is now; the nodes to be removed, which have no operands and no readers."""
        if self._unread is None:
            return []
        self._site.leave(self._unread.outputs[0])
        return [self._unread]

    def undo(self) -> None:
        """Write the sum as it was."""
        for node, operands in self._given.items():
            _set_operands(node, operands)
        self._site.leave(self.pair)
        _set_operands(self._sum, [None, None])
        self._site.graph.remove(self._sum)


def _operands(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _set_operands(node: ir.Node, values: Sequence[ir.Value | None]) -> None:
    node.resize_inputs(len(values))
    for k, value in enumerate(values):
        node.replace_input_with(k, value)


def regrouped(site: Site, root: ir.Value, is_pair: Callable[[ir.Value, ir.Value], bool]) -> Iterator[Regrouped]:
    """Yield a sum in each way to add two of its terms ahead; after each, `undo` must be called, or `kept` at the end.

    A sum is a node with three operands or more, or one of two that reads a sum which nothing else reads.

    Args:
        site: the graph.
        root: the sum.
        is_pair: which two terms to try.
    """
    node = root.producer()
    if node is None or node.domain or node.op_type not in ("Add", "Sum") or None in node.inputs:
        return
    terms = _operands(node)
    if len(terms) == 2:
        for k, own in enumerate(terms):
            inner = own.producer()
            if inner is None or inner.domain or inner.op_type != "Add" or inner.graph is not node.graph:
                continue
            if own.is_graph_output() or len(own.uses()) > 1:
                continue
            given = _operands(inner)
            for other, first in itertools.permutations(given, 2) if len(given) == 2 else ():
                if is_pair(first, terms[1 - k]):
                    yield Regrouped(site, node, [other], (first, terms[1 - k]), unread=inner)
    elif len(terms) <= _MOST_TERMS:
        for pair in itertools.combinations(range(len(terms)), 2):
            first, second = (terms[k] for k in pair)
            if is_pair(first, second):
                yield Regrouped(site, node, [v for k, v in enumerate(terms) if k not in pair], (first, second))
