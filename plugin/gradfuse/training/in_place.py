"""Updates in place: which inputs of a step onnxruntime may write over, and a graph in which that is right.

onnxruntime accepts one tensor as both input and output of a run, and checks nothing. That is right if every node that
reads the input has run before its update. Neither the order of nodes nor the dependencies in the exported graph
guarantee it: onnxruntime's optimizer may let nodes read a parameter instead of a value that was computed from it. So
the operators that update get a learning rate that depends on all other results of the step: then every relevant reader
of a parameter is one of their ancestors, in every equivalent graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN, OPS
from gradfuse.training import tied_gradients
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
_NEEDS_ELEMENTS = frozenset(
    """
    Abs Add AveragePool BatchNormalization Cast Clip Conv ConvTranspose Cos Div Elu Erf Exp Expand Flatten Gather
    GatherElements Gelu Gemm GlobalAveragePool Identity LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool
    Min Mul Neg Pad Pow Reciprocal ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare Relu Reshape
    ScatterElements ScatterND Sigmoid Sin Slice Softmax Softplus Split Sqrt Squeeze Sub Sum Tanh Tile Transpose
    Unsqueeze Where
    """.split()
)
"""Operators whose results no optimizer knows without all of the tensors that they read."""
_SELECTS = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split"})
_OF_SHAPES = ("Shape", "Size")
_LARGE = 2**24
"""From this many bytes of parameters and optimizer state on, a model is large."""
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


@dataclasses.dataclass(frozen=True)
class Ordered:
    """A step's model in which updates run behind all that reads what they overwrite.

    Attributes:
        model: the model.
        in_place: the inputs that may be written over by their updates; there are none if no operator of ours updates
            anything.
        begun: the name of an output that a run writes before the first of these updates; None: there are none.
    """

    model: ir.Model
    in_place: frozenset[str]
    begun: str | None = None


def with_ordered_updates(proto: onnx.ModelProto, own_names: Mapping[str, str] | None = None) -> Ordered:
    """Return a copy of a step's model in which updates may be in place.

    In large models, each update waits for its own gradient and for those that depend on the readers of what it
    overwrites, and few gradients are in memory at once. In others all updates run last.

    Args:
        proto: the model.
        own_names: the step's names of its outputs.
    """
    named = own_names or {}
    model = ir.from_proto(proto)
    graph = model.graph
    updates = [update for node in graph if (update := _update(node, named)) is not None]
    updates, later = _separable(graph, updates)
    if not updates:
        return Ordered(model, frozenset())
    tied_gradients.add_in_place(model)
    behind = [*(update.node for update in updates), *later]
    own = set(behind)
    others = [value for value in graph.outputs if value.producer() not in own]
    needed = [value for value in (*_read_besides(updates, later), *others) if value.producer() is not None]
    needed = list(dict.fromkeys(needed))
    loss = next((value for value in graph.outputs if value.name == named.get(LOSS, LOSS)), None)
    if loss is None:
        # An update alone.
        stages = {len(needed): updates}
    else:
        _loss_first(graph, loss)
        size = sum(_bytes(value) for update in updates for value in update.overwritten)
        needed, stages = _stages(graph, updates, behind, needed, loss, early=size >= _LARGE)
    for node in behind:
        graph.remove(node)
    first = gate = _input(updates[0].node, _ORDERED_BY)
    done, begun = 0, ""
    last: list[ir.Node] = []
    for number in sorted(stages):
        # The first one's name does not depend on what a pass over the step has changed.
        name = f"{first.name}/late_{number}" if begun else f"{first.name}/late"
        gate = _appended_barrier(graph, gate, needed[done:number], name)
        done, begun = number, begun or name
        late = {first: gate}
        for update in stages[number]:
            rate = _input(update.node, _ORDERED_BY)
            if rate not in late:
                late[rate] = _appended_barrier(graph, rate, [gate], f"{rate.name}/late_{number}")
            update.node.replace_input_with(_index(update.node, _ORDERED_BY), late[rate])
            last.insert(0, update.node)
    graph.extend(_with_readers(last, later))
    graph.outputs.append(next(value for node in graph for value in node.outputs if value.name == begun))
    return Ordered(model, frozenset(str(value.name) for update in updates for value in update.overwritten), begun)


def _stages(
    graph: ir.Graph,
    updates: Sequence[_Update],
    behind: Collection[ir.Node],
    needed: Sequence[ir.Value],
    loss: ir.Value,
    *,
    early: bool,
) -> tuple[list[ir.Value], dict[int, list[_Update]]]:
    """Return the needed values in the order in which a run should compute them, and updates by how many they wait for.

    An update waits for what it reads itself, and behind each node that reads what it overwrites, or a possible view of
    that, for a value that depends on the node. Checks of the batch are behind the loss, which all updates wait for.

    Args:
        graph: the step.
        updates: the updates.
        behind: these, and the nodes that read their results.
        needed: the values that updates read, or that other outputs are.
        loss: one of them.
        early: False: all updates wait for all values.
    """
    updating = set(behind)
    nodes = [node for node in graph if node not in updating]
    ranks = _ranks(nodes, needed)
    ordered = sorted(needed, key=lambda value: (value is not loss, *ranks[value]))
    if not early:
        return ordered, {len(ordered): list(updates)}
    numbers = {value: number for number, value in enumerate(ordered, 1)}
    first = _first_dependents(nodes, numbers)
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in nodes:
        for value in read_by(node):
            readers.setdefault(value, []).append(node)
    varying = _varying(graph)
    stages: dict[int, list[_Update]] = {}
    for update in updates:
        waits = [numbers[value] for value in update.others if value in numbers]
        reading = _readers(update.overwritten, readers, varying)
        waits += [first.get(node, len(ordered)) if _runs_at_once(node) else len(ordered) for node in reading]
        stages.setdefault(max([1, *waits]), []).append(update)
    return ordered, stages


def _ranks(nodes: Sequence[ir.Node], needed: Collection[ir.Value]) -> dict[ir.Value, tuple[int, int]]:
    """Return by what to sort the needed values: where the backward pass has come to when they can be computed.

    What several of them depend on is computed where it stands in the graph, and what only one depends on with it.
    """
    behind: dict[ir.Node, set[ir.Value]] = {}
    found = set(needed)
    users: dict[ir.Value, list[ir.Node]] = {}
    for node in reversed(nodes):
        values = [value for value in node.outputs if value in found]
        dependents = {*values}.union(*(behind[user] for value in node.outputs for user in users.get(value, ())))
        # More than two tell no more than two.
        behind[node] = set(list(dependents)[:2])
        for value in read_by(node):
            users.setdefault(value, []).append(node)
    # What depends on numbers of training alone, such as the count of steps, can be computed at any time.
    timed = {value for value in _outside(nodes) if value.shape is None or value.shape.rank()}
    place: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        read = read_by(node)
        if timed.isdisjoint(read):
            continue
        timed.update(node.outputs)
        before = max((place.get(value, 0) for value in read), default=0)
        place |= dict.fromkeys(node.outputs, index if len(behind[node]) > 1 else before)
    own = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    return {value: (place.get(value, 0), own[value]) for value in needed}


def _outside(nodes: Iterable[ir.Node]) -> set[ir.Value]:
    return {value for node in nodes for value in read_by(node) if value.producer() is None}


def _first_dependents(nodes: Sequence[ir.Node], numbers: Mapping[ir.Value, int]) -> dict[ir.Node, int]:
    """Return for each node the least number of a value that depends on it, whatever onnxruntime makes of the graph.

    A path counts if each node on it has to have the elements that it reads; the results of others, such as the size of
    a tensor, may be known without.
    """
    first: dict[ir.Node, int] = {}
    of_value: dict[ir.Value, int] = dict(numbers)
    cut = {value for node in nodes if node.op_type in _SELECTS for value in node.inputs}
    for node in reversed(nodes):
        reached = [of_value[value] for value in node.outputs if value in of_value]
        if not reached:
            continue
        first[node] = min(reached)
        # onnxruntime reads a part of a Concat at its source.
        is_whole = node.op_type == "Concat" and cut.isdisjoint(node.outputs)
        if node.domain or node.op_type in _NEEDS_ELEMENTS or is_whole:
            for value in _floats_of(node) if _runs_at_once(node) else ():
                of_value[value] = min(of_value.get(value, first[node]), first[node])
    return first


def _floats_of(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and value.dtype in _FLOATS]


def _runs_at_once(node: ir.Node) -> bool:
    """Whether a node is surely one in onnxruntime: function bodies and branches may become nodes of the graph."""
    if node.domain:
        # It has kernels of ours for float32; what has none is a function.
        return node.domain == DOMAIN and all(value.dtype == ir.DataType.FLOAT for value in _floats_of(node))
    if any(True for attribute in node.attributes.values() for _ in _graphs(attribute)):
        return False
    return len(node.outputs) == 1 or node.op_type in _NEEDS_ELEMENTS


def _readers(
    overwritten: Iterable[ir.Value], readers: Mapping[ir.Value, Sequence[ir.Node]], varying: Collection[ir.Value]
) -> set[ir.Node]:
    """Return the nodes that read some values, or what may be a view of them, in any equivalent graph."""
    found: set[ir.Node] = set()
    rest = list(overwritten)
    while rest:
        for node in readers.get(rest.pop(), ()):
            if node in found or (not node.domain and node.op_type in _OF_SHAPES):
                continue
            found.add(node)
            if not _computes(node, varying):
                rest += [value for value in node.outputs if value.dtype is None or value.dtype in _FLOATS]
    return found


def _computes(node: ir.Node, varying: Collection[ir.Value]) -> bool:
    """Whether the results of a node are never the memory of what it reads."""
    if node.domain:
        return node.domain == DOMAIN
    combines = node.op_type in _COMBINES and all(operand in varying for operand in node.inputs)
    return node.op_type in _COMPUTES or combines


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


def _with_readers(nodes: Sequence[ir.Node], later: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Yield nodes, and behind them those that read their results.

    Of nodes whose results nothing reads onnxruntime runs the last in the graph first, with all that it depends on.
    """
    places = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    behind: list[list[ir.Node]] = [[node] for node in nodes]
    for node in later:
        place = max(places[value] for value in read_by(node) if value in places)
        behind[place].append(node)
        places |= dict.fromkeys(node.outputs, place)
    return (node for group in behind for node in group)


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


def _appended_barrier(graph: ir.Graph, value: ir.Value, needed: Iterable[ir.Value], name: str) -> ir.Value:
    """Return what is a float32 scalar once the values that are needed are computed."""
    barrier = ir.node(BARRIER, [value, *dict.fromkeys(needed)], domain=DOMAIN)
    (late,) = barrier.outputs
    late.name, late.type, late.shape = name, value.type, value.shape
    graph.append(barrier)
    return late


def _loss_first(graph: ir.Graph, loss: ir.Value) -> None:
    """Make the gradients of cross entropies wait for the loss.

    Both read the log-probabilities, which may be the largest tensor of a step. onnxruntime would run the loss last, and
    keep them until then; their gradient reuses their memory if nothing reads them later.
    """
    ahead = ancestors(loss)
    late: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type != "CrossEntropyLossGrad" or node in ahead:
            continue
        grad_loss = node.inputs[0]
        if grad_loss is None or grad_loss.dtype != ir.DataType.FLOAT or grad_loss.shape != ir.Shape([]):
            continue
        if grad_loss not in late:
            late[grad_loss] = _appended_barrier(graph, grad_loss, [loss], f"{grad_loss.name}/behind_{LOSS}")
        node.replace_input_with(0, late[grad_loss])
    if late:
        graph.sort()


def ancestors(value: ir.Value) -> set[ir.Node]:
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
    if operator is None or not operator.updates:
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
        if node.op_type not in _OF_SHAPES and not found.isdisjoint(read_by(node)):
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
        elif not _computes(node, varying):
            rest += read_by(node)
    return found


def read_by(node: ir.Node) -> Collection[ir.Value]:
    """Return all values that a node reads, in its subgraphs too."""
    inner = [graph for attribute in node.attributes.values() for graph in _graphs(attribute)]
    nodes = [node, *(one for graph in inner for one in graph.all_nodes())]
    read = {value for one in nodes for value in one.inputs if value is not None}
    return read.union(*(graph.outputs for graph in inner))


def _bytes(value: ir.Value) -> int:
    """Return how much memory an input that is updated takes, as far as its sizes are known."""
    sizes = () if value.shape is None else value.shape
    width = 0 if value.dtype is None else value.dtype.itemsize
    return math.ceil(math.prod(size for size in sizes if isinstance(size, int)) * width)


def _graphs(attribute: ir.Attr) -> Iterable[ir.Graph]:
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else ()
