"""What the passes share while they work on a model, and the passes that work in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from copy import copy
from types import TracebackType

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes import shapes
from gradfuse.passes.matching.contractions import Contractions
from gradfuse.passes.matching.duplicates import Duplicates
from gradfuse.passes.matching.graphs import Names
from gradfuse.passes.matching.scaled_products import ScaledProducts
from gradfuse.passes.matching.site import Site
from gradfuse.passes.progress import Progress
from gradfuse.passes.report import Report


class Context:
    """A model at work: a site for each of its graphs, and the report on what is done to them.

    Used in a ``with`` statement. Types and shapes that follow are set on entry; on exit those of the exporter are back,
    but for the inputs of fused nodes.

    Args:
        model: the model, which passes change in place.
        progress: what to tell of the work.
    """

    def __init__(self, model: ir.Model, progress: Progress | None = None) -> None:
        self.model = model
        self.progress = progress
        self.report = Report()
        self._sites: dict[ir.Graph, Site] = {}
        self._inferred: list[tuple[ir.Value, ir.TypeProtocol | None, ir.Shape | None]] = []
        self._products: list[Contractions | ScaledProducts] = []
        self._duplicates: list[Duplicates] = []

    def __enter__(self) -> Context:
        graphs = _graphs(self.model)
        values = [v for g in graphs for n in g for v in n.outputs]
        invented = self._infer(values, _symbols(v for g in graphs for v in g.inputs))
        names = {str(v.name) for v in values}
        names |= {str(v.name) for g in graphs for v in (*g.inputs, *g.initializers.values())}
        names |= {str(n.name) for g in graphs for n in g}
        shared = Names(names)
        self._duplicates = [Duplicates(graph) for graph in graphs]
        self._products = [kind(graph, shared.fresh) for graph in graphs for kind in (Contractions, ScaledProducts)]
        functions = {f.graph for f in self.model.functions.values()}
        for graph, opset in graphs.items():
            self._sites[graph] = Site(
                graph,
                opset,
                shared,
                is_main=graph is self.model.graph,
                is_function=graph in functions,
                progress=self.progress,
                invented=invented,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for duplicates in self._duplicates:
            duplicates.restore()
        # The body of a fused operator is chosen by the types and ranks of its inputs, and ONNX wants those of outputs.
        fused = [n for g in _graphs(self.model) for n in g if n.domain == custom_ops.DOMAIN]
        needed = {value for node in fused for value in node.inputs if value is not None}
        needed.update(self.model.graph.outputs if fused else ())
        for value, type_, shape in self._inferred:
            is_told = type_ is not None and shape is not None and len(shape) == len(value.shape or ())
            if value not in needed or is_told:
                value.type, value.shape = type_, shape
        for products in reversed(self._products):
            products.restore()
        self._sites, self._inferred, self._products, self._duplicates = {}, [], [], []

    def _infer(self, values: list[ir.Value], given: set[str]) -> set[str]:
        """Gives values the types and shapes that follow; the names of dimensions that this invents."""
        self._inferred = [(v, copy(v.type), v.shape) for v in values]
        known = given | _symbols(values)
        shapes.infer(self.model, values)
        return _symbols(values) - known

    def sites(self) -> Iterator[Site]:
        """The sites of the graphs that the model has; those that are dropped meanwhile do not come."""
        for graph, site in list(self._sites.items()):
            if graph in self._sites:
                yield site

    def drop(self, graphs: Iterable[ir.Graph]) -> None:
        """Says that graphs are no longer part of the model."""
        for graph in graphs:
            self._sites.pop(graph, None)


class ContextPass(ir.passes.InPlacePass):
    """A pass that works in a context. As an onnx_ir pass of its own it makes one for each call."""

    @abstractmethod
    def run(self, context: Context) -> bool:
        """Works on the context's model, adds to its report, and says whether the model changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        with Context(model) as context:
            return ir.passes.PassResult(model, self.run(context))


def _graphs(model: ir.Model) -> dict[ir.Graph, int]:
    """The graphs of a model that are rewritten, with the version of the default domain in each."""
    own = model.opset_imports.get("", 1)
    functions = [f for f in model.functions.values() if f.domain != custom_ops.DOMAIN]
    found = {model.graph: own} | {f.graph: f.opset_imports.get("", own) for f in functions}
    return found | {sub: version for graph, version in found.items() for sub in graph.subgraphs()}


def _symbols(values: Iterable[ir.Value]) -> set[str]:
    """The names of symbolic dimensions."""
    dims = (d for v in values if v.shape is not None for d in v.shape)
    return {str(d.value) for d in dims if isinstance(d, ir.SymbolicDim) and d.value is not None}
