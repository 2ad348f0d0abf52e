"""Sums of three terms and more, written so that two of them are a value of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import onnx_ir as ir

from gradfuse.passes.matching.site import Site

_MOST_TERMS = 6


class Regrouped:
    """A sum of terms, of which two are added ahead of the others.

    Attributes:
        pair: the sum of the two.
    """

    def __init__(self, site: Site, root: ir.Node, inputs: list[ir.Value], pair: tuple[ir.Value, ir.Value]) -> None:
        self._site = site
        self._root = root
        self._given = [value for value in root.inputs if value is not None]
        like = root.outputs[0]
        self._sum = ir.node("Add", pair, name=site.names.fresh("Add"))
        (self.pair,) = self._sum.outputs
        self.pair.name, self.pair.type, self.pair.shape = str(self._sum.name), like.type, like.shape
        site.graph.insert_before(root, self._sum)
        site.forms.read(self._sum, root)
        site.enter(self.pair, site.position[like])
        self._set([*inputs, self.pair])

    def undo(self) -> None:
        """Write the sum as it was."""
        self._set(self._given)
        self._site.leave(self.pair)
        for k in range(2):
            self._sum.replace_input_with(k, None)
        self._site.graph.remove(self._sum)

    def _set(self, inputs: list[ir.Value]) -> None:
        self._root.resize_inputs(len(inputs))
        for k, value in enumerate(inputs):
            self._root.replace_input_with(k, value)


def regrouped(site: Site, root: ir.Value, is_pair: Callable[[ir.Value, ir.Value], bool]) -> Iterator[Regrouped]:
    """Yield a sum in each way to add two of its terms ahead; after each, `undo` must be called, or the search end.

    A sum is a node with three operands or more, or one of two that reads a sum which nothing else reads.

    Args:
        site: the graph.
        root: the sum.
        is_pair: which two terms to try.
    """
    node = root.producer()
    if node is None or node.domain or node.op_type not in ("Add", "Sum") or None in node.inputs:
        return
    terms = [value for value in node.inputs if value is not None]
    if len(terms) == 2:
        for k, own in enumerate(terms):
            inner = own.producer()
            if inner is None or inner.domain or inner.op_type != "Add" or inner.graph is not node.graph:
                continue
            if own.is_graph_output() or len(own.uses()) > 1:
                continue
            given = [value for value in inner.inputs if value is not None]
            for other, first in itertools.permutations(given, 2) if len(given) == 2 else ():
                if is_pair(first, terms[1 - k]):
                    yield Regrouped(site, node, [other], (first, terms[1 - k]))
    elif len(terms) <= _MOST_TERMS:
        for pair in itertools.combinations(range(len(terms)), 2):
            first, second = (terms[k] for k in pair)
            if is_pair(first, second):
                yield Regrouped(site, node, [v for k, v in enumerate(terms) if k not in pair], (first, second))
