"""Updates in place: which inputs of a step onnxruntime may write over, and a graph in which that is right.

onnxruntime accepts one tensor as both input and output of a run, and checks nothing. That is right if every node that
reads the input has run before its update. Neither the order of nodes nor the dependencies in the exported graph
guarantee it: onnxruntime's optimizer may let nodes read a parameter instead of a value that was computed from it. So
the operators that update get a learning rate that depends on all other results of the step: then every relevant reader
of a parameter is one of their ancestors, in every equivalent graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN, OPS
from gradfuse.training.step import LOSS, UPDATED_SUFFIX

BARRIER = "OptimizationBarrier"
"""An operator of gradfuse's library that returns its first input, a float32 scalar, after all inputs are computed."""

_ORDERED_BY = "learning_rate"
"""The input that puts the operators that update behind the barrier."""
_COMPUTES = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "ScatterElements", "ScatterND"),
        *("Gather", "LayerNormalization", "LogSoftmax", "Softmax"),
    }
)
"""Operators whose results are never the memory of an input; of others onnxruntime might make a view."""
_COMBINES = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that onnxruntime removes only if an operand is a constant, such as 1 or 0."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


@dataclasses.dataclass(frozen=True)
class _Update:
    """A node that updates inputs of the graph."""

    node: ir.Node
    overwritten: frozenset[ir.Value]
    """What it reads and may write over."""

    @property
    def others(self) -> Iterator[ir.Value]:
        """What it only reads."""
        return (value for value in self.node.inputs if value is not None and value not in self.overwritten)


def with_updates_last(
    proto: onnx.ModelProto, own_names: Mapping[str, str] | None = None
) -> tuple[ir.Model, frozenset[str]]:
    """Return a copy of a step's model in which updates run last, and which inputs they may be written over.

    There are none if no operator of ours updates anything. `own_names` are those of the step.
    """
    named = own_names or {}
    model = ir.from_proto(proto)
    graph = model.graph
    updates = [update for node in graph if (update := _update(node, named)) is not None]
    updates, later = _separable(graph, updates)
    if not updates:
        return model, frozenset()
    chosen = {update.node for update in updates}
    needed = [value for value in _read_besides(updates, later) if value.producer() is not None]
    needed += [value for value in graph.outputs if value.producer() not in chosen.union(later)]
    _loss_first(graph, named.get(LOSS, LOSS))
    for rate in dict.fromkeys(_input(update.node, _ORDERED_BY) for update in updates):
        barrier = _barrier(rate, needed, "late")
        for update in updates:
            if _input(update.node, _ORDERED_BY) is rate:
                update.node.replace_input_with(_index(update.node, _ORDERED_BY), barrier.outputs[0])
        graph.append(barrier)
    for node in (*(update.node for update in updates), *later):
        graph.remove(node)
        graph.append(node)
    return model, frozenset(str(value.name) for update in updates for value in update.overwritten)


def _separable(graph: ir.Graph, updates: Sequence[_Update]) -> tuple[list[_Update], list[ir.Node]]:
    """Return the updates that can run after all nodes except those that read their results, and these nodes.

    Nothing that runs after them may read what they overwrite, or a possible view of it.
    """
    varying = _varying(graph)
    while True:
        later = _behind(graph, {update.node for update in updates})
        behind = set(later)
        shared = _may_share(_read_besides(updates, later), varying)
        kept = [update for update in updates if update.node not in behind and not update.overwritten & shared]
        if len(kept) == len(updates):
            return kept, later
        updates = kept


def _behind(graph: ir.Graph, nodes: Collection[ir.Node]) -> list[ir.Node]:
    """Return the nodes that read what some nodes compute, in order."""
    values = {output for node in nodes for output in node.outputs}
    found = []
    for node in graph:
        if not values.isdisjoint(read_by(node)):
            found.append(node)
            values.update(node.outputs)
    return found


def _read_besides(updates: Iterable[_Update], later: Iterable[ir.Node]) -> list[ir.Value]:
    """Return what updates read but do not overwrite, and what later nodes read of neither."""
    updates, later = list(updates), list(later)
    within = {output for node in (*(update.node for update in updates), *later) for output in node.outputs}
    read = [value for update in updates for value in update.others]
    read += [value for node in later for value in read_by(node) if value not in within]
    return list(dict.fromkeys(read))


def _barrier(value: ir.Value, needed: Iterable[ir.Value], suffix: str) -> ir.Node:
    """Return a node that gives a float32 scalar once the values that are needed are computed."""
    barrier = ir.node(BARRIER, [value, *dict.fromkeys(needed)], domain=DOMAIN)
    (late,) = barrier.outputs
    late.name, late.type, late.shape = f"{value.name}/{suffix}", value.type, value.shape
    return barrier


def _loss_first(graph: ir.Graph, name: str) -> None:
    """Make the gradients of cross entropies wait for the loss.

    Both read the log-probabilities, which may be the largest tensor of a step. onnxruntime would run the loss last, and
    keep them until then; their gradient reuses their memory if nothing reads them later.
    """
    loss = next((value for value in graph.outputs if value.name == name), None)
    if loss is None:
        # An update alone.
        return
    ahead = _ancestors(loss)
    late: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type != "CrossEntropyLossGrad" or node in ahead:
            continue
        grad_loss = node.inputs[0]
        if grad_loss is None or grad_loss.dtype != ir.DataType.FLOAT or grad_loss.shape != ir.Shape([]):
            continue
        if grad_loss not in late:
            barrier = _barrier(grad_loss, [loss], f"behind_{LOSS}")
            graph.append(barrier)
            late[grad_loss] = barrier.outputs[0]
        node.replace_input_with(0, late[grad_loss])
    if late:
        graph.sort()


def _ancestors(value: ir.Value) -> set[ir.Node]:
    """Return the nodes of the graph that a value is computed by."""
    found: set[ir.Node] = set()
    rest = [value.producer()]
    while rest:
        node = rest.pop()
        if node is not None and node not in found:
            found.add(node)
            rest += [read.producer() for read in read_by(node)]
    return found


def _update(node: ir.Node, named: Mapping[str, str]) -> _Update | None:
    """Return the update that a node is, if results of it are outputs of the graph for inputs that it updates."""
    operator = OPS.get(node.op_type) if node.domain == DOMAIN else None
    if operator is None or not any(output.in_place for output in operator.outputs):
        return None
    overwritten = []
    for output, described in zip(node.outputs, operator.outputs, strict=False):
        if not described.in_place or not _has(node, described.in_place):
            continue
        source = _input(node, described.in_place)
        updated = f"{source.name}{UPDATED_SUFFIX}"
        is_of_input = source.is_graph_input() and output.is_graph_output()
        if is_of_input and output.name == named.get(updated, updated):
            overwritten.append(source)
    return _Update(node, frozenset(overwritten)) if overwritten else None


def _index(node: ir.Node, name: str) -> int:
    return [described.name for described in OPS[node.op_type].inputs].index(name)


def _has(node: ir.Node, name: str) -> bool:
    index = _index(node, name)
    return index < len(node.inputs) and node.inputs[index] is not None


def _input(node: ir.Node, name: str) -> ir.Value:
    """Return a required input of an operator of ours."""
    value = node.inputs[_index(node, name)]
    assert value is not None
    return value


def _varying(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on elements of inputs: what depends on shapes alone may become a constant."""
    found = set(graph.inputs)
    for node in graph:
        if node.op_type not in ("Shape", "Size") and not found.isdisjoint(read_by(node)):
            found.update(node.outputs)
    return found


def _may_share(values: Iterable[ir.Value], varying: Collection[ir.Value]) -> set[ir.Value]:
    """Return the inputs of the graph whose memory some values may share when the graph runs."""
    found: set[ir.Value] = set()
    seen: set[ir.Value] = set()
    rest = list(values)
    while rest:
        value = rest.pop()
        if value in seen or (value.dtype is not None and value.dtype not in _FLOATS):
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            found.add(value)
        elif node.domain == DOMAIN or (node.domain == "" and node.op_type in _COMPUTES):
            continue
        elif node.domain == "" and node.op_type in _COMBINES and all(operand in varying for operand in node.inputs):
            continue
        else:
            rest += read_by(node)
    return found


def read_by(node: ir.Node) -> Collection[ir.Value]:
    """Return all values that a node reads, in its subgraphs too."""
    inner = [graph for attribute in node.attributes.values() for graph in _graphs(attribute)]
    nodes = [node, *(one for graph in inner for one in graph.all_nodes())]
    read = {value for one in nodes for value in one.inputs if value is not None}
    return read.union(*(graph.outputs for graph in inner))


def _graphs(attribute: ir.Attr) -> Iterable[ir.Graph]:
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else ()
