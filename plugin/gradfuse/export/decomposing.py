"""Decomposes the operators of a traced program, each once for all tensors of the same kind.

`ExportedProgram.run_decompositions` traces the whole program again, which takes most of the time of an export. This
module decomposes a small program with one call of each kind, and uses the result for all calls of that kind: most
layers of a network are alike. It imports torch.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from gradfuse import _torch_private as private

aten = torch.ops.aten

Table = Mapping[Any, Callable[..., Any]]

_CHECKS = (
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
"""Operators that torch.onnx.export leaves out."""

STATISTICS = (aten.batch_norm.default, aten.instance_norm.default)
"""Operators that may write into their arguments 3 and 4, which their schemas do not say; argument 5 is whether."""


def decompose(program: ExportedProgram, table: Table) -> ExportedProgram:
    """Return what `program.run_decompositions(table)` gives, without checks of sizes.

    Programs with anything but calls of operators, with sizes that depend on values or conjugates of complex numbers,
    and programs that write into a tensor of which there are views are left to PyTorch.
    """
    try:
        return _decomposed(program, table)
    except _Unlike:
        whole: ExportedProgram = program.run_decompositions(dict(table))
        return whole


def leave_out_checks(program: ExportedProgram) -> None:
    """Remove checks of sizes, and the conditions of which they are: torch.onnx.export translates those."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def written(node: Node) -> list[Any]:
    """Return the arguments that a call writes into."""
    if node.target in STATISTICS:
        return [one for one in node.args[3:5] if one is not None] if node.args[5] else []
    return private.written_arguments(node.target, node.args, node.kwargs) if private.is_operator(node.target) else []


class _Unlike(Exception):
    """A program contains something that cannot be decomposed call by call."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of an operator.

    Attributes:
        node: the call.
        reads: the tensors that it reads, each once.
        writes: those that it writes into.
        sizes: the numbers that it reads.
    """

    node: Node
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    sizes: tuple[Node, ...]

    @classmethod
    def of(cls, node: Node) -> _Call:
        target: Any = node.target
        if not private.is_operator(target) or torch.Tag.inplace_view in target.tags:
            raise _Unlike
        inputs = node.all_input_nodes
        reads, sizes = (tuple(one for one in inputs if _is_size(one) == wanted) for wanted in (False, True))
        writes = written(node)
        if not all(isinstance(one, Node) for one in writes):
            raise _Unlike
        return cls(node, reads, tuple(writes), sizes)

    def kind(self) -> Hashable:
        """Return a key that is equal for calls that are decomposed alike."""
        places = {node: index for index, node in enumerate(self.reads)}

        def constant(one: Any) -> Hashable:
            if isinstance(one, Node):
                return places[one] if one in places else _size_key(one.meta["val"])
            return type(one), repr(one)

        arguments = _frozen((self.node.args, dict(self.node.kwargs)), constant)
        return (
            self.node.target,
            arguments,
            tuple(_kind(node) for node in self.reads),
            tuple(places[node] for node in self.writes),
        )


@dataclasses.dataclass(frozen=True)
class _Results:
    """The results of a call in a graph: by index, or by None for a single one; and what it wrote, by its reads."""

    values: dict[int | None, Any]
    written: dict[int, Any]


def _decomposed(program: ExportedProgram, table: Table) -> ExportedProgram:
    if any(spec.kind.name != "USER_OUTPUT" for spec in program.graph_signature.output_specs):
        raise _Unlike
    members = _members(program)
    calls: dict[Node, Hashable] = {}
    kinds: dict[Hashable, _Call] = {}
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output") or "unbacked_bindings" in node.meta:
            raise _Unlike
        if node.op == "call_function" and not _is_size(node) and node.target not in (operator.getitem, *_CHECKS):
            call = _Call.of(node)
            _require_no_views(call, members)
            calls[node] = call.kind()
            kinds.setdefault(calls[node], call)
    small = _Small(program, list(kinds.values()))
    small.decompose(table)
    pieces = dict(zip(kinds, small.pieces(), strict=True))
    assembly = _Assembly(program, members)
    for node in program.graph.nodes:
        if node in calls:
            assembly.put(_Call.of(node), pieces[calls[node]])
        else:
            assembly.take(node)
    return private.with_graph(program, assembly.graph)


class _Small:
    """A program of independent calls.

    Args:
        program: the program that the calls are from.
        calls: the calls.
    """

    def __init__(self, program: ExportedProgram, calls: Sequence[_Call]) -> None:
        graph = Graph()
        self._calls = calls
        self._sizes: dict[Hashable, Node] = {}
        for call in calls:
            for size in call.sizes:
                self._place_sizes(graph, size)
        self._symbols = len(graph.nodes)
        self._places = [[self._place(graph, node) for node in call.reads] for call in calls]
        self._results = [self._copy(graph, call, places) for call, places in zip(calls, self._places, strict=True)]
        self._outputs = list(
            dict.fromkeys(one for each in self._results for one in (*each.values.values(), *each.written.values()))
        )
        graph.output(tuple(self._outputs))
        self._program = private.program_of(graph, program)

    def decompose(self, table: Table) -> None:
        self._program = self._program.run_decompositions(dict(table))
        signature = self._program.graph_signature
        if any(spec.kind.name != "USER_OUTPUT" for spec in signature.output_specs):
            raise _Unlike
        if any(spec.kind.name != "USER_INPUT" for spec in signature.input_specs):
            # A decomposition has made a constant.
            raise _Unlike

    def pieces(self) -> list[_Piece]:
        """Return the decomposition of each call."""
        nodes = list(self._program.graph.nodes)
        order = {node: index for index, node in enumerate(nodes)}
        places = iter([node for node in nodes if node.op == "placeholder"][self._symbols :])
        new_places = [[next(places) for _ in each] for each in self._places]
        (outputs,) = nodes[-1].args
        new = dict(zip(self._outputs, outputs, strict=True))
        pieces = []
        for call, each, results in zip(self._calls, new_places, self._results, strict=True):
            written = [place for place, node in zip(each, call.reads, strict=True) if node in call.writes]
            values = {index: new[one] for index, one in results.values.items()}
            changed = {index: new[one] for index, one in results.written.items()}
            needed = _needed([*values.values(), *changed.values()])
            body = sorted((node for node in needed if node.op != "placeholder"), key=order.__getitem__)
            pieces.append(_Piece(each, written, body, _Results(values, changed)))
        return pieces

    @staticmethod
    def _place(graph: Graph, node: Node) -> Node:
        place = graph.placeholder(f"p{len(graph.nodes)}")
        value = node.meta["val"]
        if isinstance(value, (int, float, torch.SymFloat, torch.SymBool)):
            raise _Unlike
        place.meta = {"val": value if _requires_grad(node) or not isinstance(value, Tensor) else value.detach()}
        return place

    def _place_sizes(self, graph: Graph, node: Node) -> None:
        """Add placeholders for what a size is computed from."""
        inputs = node.all_input_nodes
        if inputs and all(map(_is_size, inputs)):
            for one in inputs:
                self._place_sizes(graph, one)
        elif _size_key(node.meta["val"]) not in self._sizes:
            self._sizes[_size_key(node.meta["val"])] = self._place(graph, node)

    def _size(self, graph: Graph, node: Node) -> Node:
        key = _size_key(node.meta["val"])
        if key not in self._sizes:
            self._sizes[key] = graph.node_copy(node, lambda one: self._size(graph, one))
        return self._sizes[key]

    def _copy(self, graph: Graph, call: _Call, places: Sequence[Node]) -> _Results:
        new: dict[Node, Node] = dict(zip(call.reads, places, strict=True))
        written = {}
        for index, node in enumerate(call.reads):
            if node in call.writes:
                copy = graph.call_function(aten.clone.default, (new[node],))
                copy.meta = dict(call.node.meta) | {"val": node.meta["val"]}
                new[node] = written[index] = copy
        new |= {node: self._size(graph, node) for node in call.sizes}
        result = graph.node_copy(call.node, new.__getitem__)
        value = call.node.meta.get("val")
        if isinstance(value, Tensor):
            return _Results({None: result}, written)
        if not isinstance(value, (tuple, list)):
            raise _Unlike
        values: dict[int | None, Any] = {}
        for index, one in enumerate(value):
            if isinstance(one, Tensor):
                item = graph.call_function(operator.getitem, (result, index))
                item.meta = dict(call.node.meta) | {"val": one}
                values[index] = item
            elif one is not None:
                raise _Unlike
        return _Results(values, written)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The decomposition of a call.

    Attributes:
        places: the placeholders for what the call reads.
        copied: those of them that the call writes into copies of.
        body: the nodes, in order.
        results: its results, among the nodes and placeholders.
    """

    places: list[Node]
    copied: list[Node]
    body: list[Node]
    results: _Results


class _Assembly:
    """The graph that is made of a program and the pieces of its calls.

    Args:
        program: the program.
        members: storage -> the nodes of the program whose tensors are in it.
    """

    def __init__(self, program: ExportedProgram, members: Mapping[int, Sequence[Node]]) -> None:
        self.graph = Graph()
        self._members = members
        self._new: dict[Node, Any] = {}
        self._items: dict[Node, dict[int | None, Any]] = {}
        self._sizes: dict[Any, Node] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self._new[node] = self.graph.node_copy(node)
        for place in list(self.graph.nodes):
            self._add_sizes(place)

    def take(self, node: Node) -> None:
        """Put a node of the program that is no call of an operator."""
        if node.op == "output":
            self.graph.node_copy(node, self._of)
            self.graph.eliminate_dead_code()
        elif node.target is operator.getitem:
            whole, index = cast(tuple[Node, int], node.args)
            # A backward pass gives None for gradients that are not wanted.
            self._new[node] = self._items[whole].get(index)
        elif node.op != "placeholder" and node.target not in _CHECKS:
            self._new[node] = self._size(node, self._of)

    def put(self, call: _Call, piece: _Piece) -> None:
        """Put what a call is decomposed into."""
        local = {place: self._of(node) for place, node in zip(piece.places, call.reads, strict=True)}

        def find(node: Node) -> Any:
            return local[node] if node in local else self._size(node, find)

        for node in piece.body:
            source: Any = node.args[0] if node.args else None
            if node.target is aten.clone.default and source in piece.copied:
                local[node] = local[source]
                continue
            local[node] = self.graph.node_copy(node, find)
            local[node].meta = call.node.meta | {
                key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta
            }
        self._items[call.node] = {index: find(node) for index, node in piece.results.values.items()}
        if None in self._items[call.node]:
            self._new[call.node] = self._items[call.node][None]
        for index, node in piece.results.written.items():
            for member in self._members[private.storage(call.reads[index].meta["val"])]:
                if member in self._new:
                    self._new[member] = local[node]

    def _of(self, node: Node) -> Any:
        if node not in self._new:
            raise _Unlike
        return self._new[node]

    def _add_sizes(self, place: Node) -> None:
        value = place.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(_size_key(value), place)
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt) and _size_key(size) not in self._sizes:
                node = self.graph.call_function(aten.sym_size.int, (place, axis))
                node.meta = {"val": size}
                self._sizes[_size_key(size)] = node

    def _size(self, node: Node, find: Callable[[Node], Any]) -> Any:
        """Return the node that computes a size; there is one for each."""
        if not _is_size(node):
            raise _Unlike
        key = _size_key(node.meta["val"])
        if key not in self._sizes:
            if node.op == "placeholder":
                raise _Unlike
            self._sizes[key] = self.graph.node_copy(node, find)
        return self._sizes[key]


def _members(program: ExportedProgram) -> dict[int, list[Node]]:
    """Return the nodes of a program with a tensor, by its storage."""
    members: dict[int, list[Node]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.op != "output":
            if private.is_wrapped(value):
                # Within vmap, operators mean something else.
                raise _Unlike
            members.setdefault(private.storage(value), []).append(node)
    return members


def _require_no_views(call: _Call, members: Mapping[int, Sequence[Node]]) -> None:
    """Require that what a call writes into is a whole tensor, which nothing else is a part of."""
    for node in call.writes:
        first, *others = members[private.storage(node.meta["val"])]
        if first.op == "placeholder":
            raise _Unlike
        for other in others:
            if not any(one in members[private.storage(node.meta["val"])] for one in written(other)):
                raise _Unlike


def _kind(node: Node) -> Hashable:
    """Return what decides how a call that reads a node is decomposed."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_conj() or value.is_neg():
        raise _Unlike
    shape, stride = (tuple(_size_key(one) for one in each) for each in (value.shape, value.stride()))
    place = _size_key(value.storage_offset())
    return value.dtype, value.device, shape, stride, place, _requires_grad(node)


def _requires_grad(node: Node) -> bool:
    # Decompositions are run without gradients, in which parameters alone require them.
    value = node.meta["val"]
    return node.op == "placeholder" and isinstance(value, Tensor) and value.requires_grad


def _size_key(size: Any) -> Hashable:
    return type(size), private.expression(size)


def _is_size(node: Node) -> bool:
    """Tell whether a node computes a number from sizes."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _frozen(tree: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """Return nested arguments as tuples of what a function makes of their leaves."""
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(one, leaf) for one in tree)
    if isinstance(tree, dict):
        return tuple((key, _frozen(one, leaf)) for key, one in tree.items())
    return leaf(tree)


def _needed(nodes: Sequence[Node]) -> set[Node]:
    """Return nodes and all that they are computed from, but for sizes."""
    needed: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed and not _is_size(node):
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed
