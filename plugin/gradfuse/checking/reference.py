"""Runs models in float64: in onnxruntime, and in numpy if onnxruntime has no kernels for that type."""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view

from gradfuse import custom_ops, library
from gradfuse.checking.execution import FLOATS, Session, run_in_place, widened
from gradfuse.checking.random_outputs import RANDOM_OPS, with_subgraphs
from gradfuse.errors import ModelError, one_line
from gradfuse.models import scatters, spilling
from gradfuse.models.arrays import Arrays
from gradfuse.models.inlining import captured_by, graphs_of, inline
from gradfuse.models.spilling import Shelf, Spilled
from gradfuse.models.tensors import copy_model
from gradfuse.runtime import import_onnxruntime, reason, session_options

_Array = npt.NDArray[Any]

_EXACT = frozenset(
    """
    Abs ArgMax ArgMin Cast CastLike Ceil Clip Compress Concat ConstantOfShape DepthToSpace Dropout Expand EyeLike
    Flatten Floor Gather GatherElements GatherND Hardmax Identity Max MaxPool Min Neg Not OneHot Optional Pad Range
    ReduceMax ReduceMin Relu Reshape Round Scatter ScatterElements ScatterND SequenceAt Shape Sign Slice SpaceToDepth
    Split Squeeze ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where
    """.split()
)
"""Operators whose results are values of their inputs, or integers."""
_BY_KERNEL = frozenset({"LinearCrossEntropy", "ScaledDotProductAttention", "ScaledDotProductAttentionBackward"})
"""Operators whose function bodies make large tensors that their kernels avoid."""
_LARGEST_WINDOWS = 2**25
"""How many elements of overlapping windows are laid out at once, at most."""
_LARGE = 2**16
"""Values of more elements are large: such weights are float64 only while a part of the model runs that reads them."""
_VIEWS = frozenset("Cast Flatten Identity Reshape Squeeze Transpose Unsqueeze".split())
_BYTES = (ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8)
_LARGEST_PART = 2**23
"""How many elements of such weights a part of several nodes reads, or returns as outputs of the model, at most."""
_LARGEST_VALUES = 2**25
"""How many elements of other large values such a part reads and makes, at most. Each part takes a session of
onnxruntime."""


class ReferenceSession:
    """A model in which every narrower floating-point type is float64, with functions as their bodies.

    Operators of attention and of heads run on their kernels if there is a compiled library: their bodies make tensors
    of queries times keys, or of rows times classes.

    Nodes for which onnxruntime's CPU provider has no float64 kernel are computed by numpy, and those between them by
    onnxruntime.

    Args:
        model: the model; it is not changed.
        source: what to call it in messages.
        outputs: the values to return, by name; None: the outputs of the model.

    Raises:
        GradfuseError: onnxruntime is not installed.
    """

    def __init__(self, model: ir.Model, source: str, outputs: Sequence[str] | None = None) -> None:
        import_onnxruntime()
        copy = widened(model, ir.DataType.DOUBLE)
        bodies = [function for function in copy.functions.values() if not _by_kernel(function.domain, function.name)]
        if any(_in_numpy(node) for function in bodies for node in function.all_nodes()):
            inline(copy, lambda function: not _by_kernel(function.domain, function.name))
        self._source = source
        self._outputs = [str(value.name) for value in model.graph.outputs] if outputs is None else list(outputs)
        # In their own types, as large ones are converted when they are read.
        self._constants = {
            name: _kept(value.const_value.numpy())
            for name, value in model.graph.initializers.items()
            if value.const_value is not None
        }
        _transpose_in_products(copy.graph, self._outputs)
        _make_views_late(copy.graph)
        self._parts = _parts(copy, self._outputs)
        self._reads: dict[str, list[int]] = {}
        for number, part in enumerate(self._parts):
            for name in part.inputs:
                self._reads.setdefault(name, []).append(number)

    def run(
        self,
        feeds: Mapping[str, _Array],
        take: Callable[[str, _Array], _Array] | None = None,
        tell: Callable[[float], None] | None = None,
    ) -> Arrays:
        """Return every output for the given inputs, by name and in order; floats are float64.

        Args:
            feeds: the inputs.
            take: returns what to keep of an output, given its name: it is called as soon as the output is computed, so
                that no two large ones are in memory at once. It may raise anything.
            tell: is called regularly with the fraction that is done.

        Raises:
            ModelError: there is no kernel for a node, or it fails on the inputs.
        """
        given = self._constants | {name: _kept(array) for name, array in feeds.items()}
        values = _Values(given, self._reads, spilling.current())
        wanted = set(self._outputs)
        results: Arrays = {}

        def found(names: Iterable[str]) -> None:
            for name in names:
                if name in wanted and name in values:
                    array = values[name]
                    results[name] = array if take is None else take(name, array)

        found(given)
        for number, part in enumerate(self._parts):
            if tell is not None:
                tell(number / len(self._parts))
            made = part.run({name: values[name] for name in part.inputs}, self._source)
            values.add(made)
            found(part.outputs)
            for name in part.last_uses:
                del values[name]
            del made
            values.make_room(number)
        return {name: results[name] for name in self._outputs}


class _Values:
    """The values of a run by name, as float64.

    Those that are read last are on a shelf if there is no room for all.

    Args:
        given: inputs and constants, which stay in memory.
        reads: the numbers of the parts that read a value, in order.
        shelf: where values may go; None: nowhere.
    """

    def __init__(self, given: Mapping[str, _Array], reads: Mapping[str, Sequence[int]], shelf: Shelf | None) -> None:
        self._arrays = dict(given)
        self._reads, self._shelf = reads, shelf
        self._sizes: dict[str, int] = {}
        self._spilled: dict[str, Spilled] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._spilled

    def __getitem__(self, name: str) -> _Array:
        if name not in self._arrays:
            # It stays in memory until the room is needed, and in the file as well.
            self._arrays[name] = self._spilled[name].read()
        return _as_float64(self._arrays[name])

    def __delitem__(self, name: str) -> None:
        self._arrays.pop(name, None)
        self._spilled.pop(name, None)
        self._sizes.pop(name, None)

    def add(self, made: Arrays) -> None:
        self._arrays |= made
        if self._shelf is not None:
            self._sizes |= {name: array.nbytes for name, array in made.items() if array.nbytes >= spilling.SMALLEST}

    def make_room(self, done: int) -> None:
        """Spill the values that are read last while there are too many, after a part has run."""
        if self._shelf is None:
            return

        def next_read(name: str) -> int:
            reads = self._reads.get(name, ())
            later = bisect.bisect_right(reads, done)
            return reads[later] if later < len(reads) else sys.maxsize

        inside = {name: size for name, size in self._sizes.items() if name in self._arrays}
        total = sum(inside.values())
        for name in sorted(inside, key=next_read, reverse=True):
            if self._shelf.room is None or total <= self._shelf.room:
                return
            if name not in self._spilled:
                spilled = self._shelf.spill(np.asarray(self._arrays[name], order="C"))
                if spilled is None:
                    return
                self._spilled[name] = spilled
            del self._arrays[name]
            total -= inside[name]


def moved(model: ir.Model, size: float) -> ir.Model:
    """Return a copy in which inputs, weights and results of arithmetic are moved, differently in each run.

    Each element is changed by a random relative amount of at most `size`. Integers stay as they are: arithmetic on them
    does not round. Results of nodes that select or rearrange values stay too, and so does everything inside subgraphs
    and functions.
    """
    copy = copy_model(model)
    graph = copy.graph
    seeds = itertools.count()
    first = graph[0] if len(graph) else None
    for value in (*graph.inputs, *(one for one in graph.initializers.values() if one not in graph.inputs)):
        if value.dtype in FLOATS and first is not None:
            graph.insert_before(first, _moving(value, size, next(seeds)))
    for node in list(graph):
        if node.op_type in _EXACT and node.domain == "":
            continue
        for value in node.outputs:
            if value.dtype in FLOATS and value.name:
                graph.insert_after(node, _moving(value, size, next(seeds)))
    return copy


_ROUNDS = frozenset(("Ceil", "Floor", "Mod", "Round"))
"""Operators that decide as comparisons do, with results of their operands' type."""


def with_own_decisions(model: ir.Model, feeds: Arrays, wide: Collection[str], source: str) -> ir.Model | None:
    """Return a copy in which what depends on integers alone is rounded and compared in the model's own types.

    A copy in float64 has constants that were rounded to a narrower type, which decide whether floor(log(8) / log(2)) is
    2 or 3.

    Args:
        model: the model.
        feeds: its inputs.
        wide: the names of floating point inputs and initializers.
        source: what to call it in messages.

    Returns:
        None if nothing is decided this way.

    Raises:
        GradfuseError: onnxruntime cannot run the model.
    """
    known = {value for value in (*model.graph.inputs, *model.graph.initializers.values()) if value.name not in wide}
    found: list[str] = []
    for node in model.graph:
        # Shapes are whole numbers, whatever has them.
        sized = node.op_type in ("Shape", "Size") and not node.domain
        unknown = any(value is not None and value not in known for value in node.inputs)
        if (unknown and not sized) or captured_by(node):
            continue
        known.update(node.outputs)
        if not sized and any(value is not None and value.dtype in FLOATS for value in node.inputs):
            found += [
                str(value.name)
                for value in node.outputs
                if value.name and (value.dtype not in FLOATS or (node.op_type in _ROUNDS and not node.domain))
            ]
    if not found:
        return None
    observed = copy_model(model)
    values = {str(value.name): value for node in observed.graph for value in node.outputs}
    observed.graph.outputs[:] = [values[name] for name in found]
    decided = Session(observed, source).run(feeds)
    copy = copy_model(model)
    values = {str(value.name): value for node in copy.graph for value in node.outputs}
    for name, array in decided.items():
        tensor = ir.tensor(array, name=f"{name}/decided")
        constant = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
        )
        copy.graph.register_initializer(constant)
        ir.convenience.replace_all_uses_with(values[name], constant)
    return copy


def _moving(value: ir.Value, size: float, seed: int) -> list[ir.Node]:
    """Return nodes that move a value, and let them come between it and those that use it."""
    is_output = value.is_graph_output()
    attributes = {"low": -size, "high": size, "seed": float(seed)}
    amount = ir.node("RandomUniformLike", [value], attributes=attributes)
    change = ir.node("Mul", [value, amount.outputs[0]])
    changed = ir.node("Add", [value, change.outputs[0]])
    floor = ir.node("Floor", [value])
    whole = ir.node("Equal", [value, floor.outputs[0]])
    result = ir.node("Where", [whole.outputs[0], value, changed.outputs[0]])
    nodes = [amount, change, changed, floor, whole, result]
    result.outputs[0].type, result.outputs[0].shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, result.outputs[0], replace_graph_outputs=True)
    for node in nodes[:-1]:
        for index, operand in enumerate(node.inputs):
            if operand is result.outputs[0]:
                node.replace_input_with(index, value)
    result.replace_input_with(1, value)
    if is_output:
        result.outputs[0].name, value.name = value.name, f"{value.name}/unmoved"
    return nodes


class _Sessions:
    """Opens onnxruntime sessions, one for all parts that compute the same, as most layers of a network do.

    Args:
        model: the model whose nodes they run.
    """

    def __init__(self, model: ir.Model) -> None:
        # In several threads, updates of a ScatterND may be lost; 0 leaves their number to onnxruntime.
        self._threads = 1 if scatters.reduces_by_scatter_nd(model) else 0
        self._functions = [ir.serde.serialize_function(one) for one in model.functions.values()]
        self._called = {(domain, name) for domain, name, _ in model.functions}
        groups = (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values()))
        # Each node that draws has a generator of its own.
        self._is_shared = not any(_draws(node) for group in groups for node in group)
        self._base = onnx.ModelProto(ir_version=model.ir_version)
        self._base.opset_import.extend(
            onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()
        )
        self._open: dict[bytes, Any] = {}

    def session(self, nodes: Sequence[ir.Node], inputs: Mapping[str, _Array], outputs: Sequence[str]) -> Any:
        """Return a session of nodes that takes inputs of such types and shapes, and gives the outputs, by position.

        What it takes and gives has names of its own.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self._base)
        graph = proto.graph
        graph.name = "part"
        graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
        for name, array in inputs.items():
            dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, dtype, array.shape))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        if any((inner.domain, inner.op_type) in self._called for node in nodes for inner in with_subgraphs(node)):
            proto.functions.extend(self._functions)
        is_shared = self._is_shared and not any(map(graphs_of, nodes))
        if is_shared:
            _number_names(graph)
        content = proto.SerializeToString(deterministic=True)
        session = self._open.get(content)
        if session is None:
            session = self._opened(content, any(_by_kernel(node.domain, node.op_type) for node in nodes))
            if is_shared:
                self._open[content] = session
        return session

    def _opened(self, content: bytes, by_kernel: bool) -> Any:
        onnxruntime = import_onnxruntime()
        # An arena would keep the memory of its largest results, and there is one session per kind of layer.
        options = session_options(arena=False)
        if by_kernel:
            library.register(options)
        options.intra_op_num_threads = self._threads
        # Threads that spin while they wait would take time from those that work.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # The graph runs as it is written, and sessions of long graphs open several times faster.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _draws(node: ir.Node) -> bool:
    return node.op_type in RANDOM_OPS or "Dropout" in node.op_type


def _number_names(graph: onnx.GraphProto) -> None:
    """Give the values of a graph without subgraphs the names of their positions, and drop those of nodes."""
    numbers = {"": ""}

    def numbered(names: Sequence[str]) -> list[str]:
        return [numbers.setdefault(name, str(len(numbers))) for name in names]

    for value in graph.input:
        (value.name,) = numbered([value.name])
    for node in graph.node:
        node.input[:], node.output[:] = numbered(node.input), numbered(node.output)
        node.name = node.doc_string = ""
        del node.metadata_props[:]
    for value in graph.output:
        (value.name,) = numbered([value.name])


class _Part:
    """Nodes that run one after the other: by onnxruntime, or one node by numpy."""

    def __init__(self, nodes: list[ir.Node], sessions: _Sessions) -> None:
        self._sessions = sessions
        self._nodes = nodes
        made = {value.name for node in nodes for value in node.outputs}
        self.inputs = list(dict.fromkeys(name for node in nodes for name in _reads(node) if name not in made))
        self.made = [str(value.name) for node in nodes for value in node.outputs if value.name]
        self.outputs: list[str] = []
        self.last_uses: list[str] = []
        self._session: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def run(self, inputs: Arrays, source: str) -> Arrays:
        compute = _function_of(self._nodes)
        if compute is not None:
            (node,) = self._nodes
            arguments = [None if value is None else inputs[str(value.name)] for value in node.inputs]
            try:
                results = compute(node, *arguments)
            except MemoryError:
                raise
            except Exception as error:
                # numpy says in many ways that shapes do not fit, as of a window that is larger than its input.
                what = f"{node.op_type} (node {node.name!r}): does not run on these inputs: {one_line(error)}"
                raise ModelError(f"{source}: {what}") from error
            return {
                str(value.name): result
                for value, result in zip(
                    node.outputs, results if isinstance(results, tuple) else (results,), strict=False
                )
            }
        try:
            shapes = {name: array.shape for name, array in inputs.items()}
            if self._session is None or self._shapes != shapes:
                self._session = self._sessions.session(self._nodes, inputs, self.outputs)
                self._shapes = shapes
            names = [value.name for value in self._session.get_inputs()]
            feeds = dict(zip(names, inputs.values(), strict=True))
            return dict(zip(self.outputs, run_in_place(self._session, None, feeds), strict=True))
        except MemoryError:
            raise
        except Exception as error:
            # onnxruntime's exception classes share no public base.
            raise ModelError(f"{source}: onnxruntime cannot run the model in float64: {reason(error)}") from error


def _parts(model: ir.Model, outputs: Sequence[str]) -> list[_Part]:
    sessions = _Sessions(model)
    parts = [_Part(nodes, sessions) for nodes in _runs(model, outputs)]
    wanted: set[str] = set(outputs)
    needed: set[str] = set()
    for part in reversed(parts):
        part.outputs = [name for name in part.made if name in needed or name in wanted]
        if part.outputs:
            part.last_uses = [name for name in (*part.inputs, *part.outputs) if name not in needed]
            needed |= {*part.inputs}
    return [part for part in parts if part.outputs]


def _runs(model: ir.Model, outputs: Sequence[str]) -> Iterator[list[ir.Node]]:
    """Yield parts of nodes that run together, without too many large values in one run.

    All that a run reads, and all that it makes for others, is in memory at once. Each node for numpy is a part of its
    own.
    """
    given = {str(value.name): _elements(value) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    sizes = dict(given)
    for node in model.graph:
        sizes |= _sizes_of(node, sizes)
    returned = {name: sizes.get(name, 0) for name in outputs}
    outside = given | returned
    nodes: list[ir.Node] = []
    large: dict[str, int] = {}
    for node in model.graph:
        names = (*_reads(node), *(str(value.name) for value in node.outputs))
        more = {name: sizes[name] for name in names if sizes.get(name, 0) > _LARGE}
        alone = _in_numpy(node) or _by_kernel(node.domain, node.op_type)
        together = large | more
        weights = sum(size for name, size in together.items() if name in outside)
        if nodes and (alone or weights > _LARGEST_PART or sum(together.values()) - weights > _LARGEST_VALUES):
            yield nodes
            nodes, large = [], {}
        nodes.append(node)
        large |= more
        if alone:
            yield nodes
            nodes, large = [], {}
    if nodes:
        yield nodes


def _transpose_in_products(graph: ir.Graph, returned: Collection[str]) -> None:
    """Let Gemm read the matrices that nodes transpose for it: it packs them anyway, and no copy is made."""
    for node in list(graph):
        if node.op_type != "Gemm" or node.domain:
            continue
        for index, attribute in enumerate(("transA", "transB")):
            matrix = node.inputs[index]
            maker = None if matrix is None else matrix.producer()
            if maker is None or maker.graph is not graph or maker.op_type != "Transpose" or maker.domain:
                continue
            (made,) = maker.outputs
            if tuple(maker.attributes.get_ints("perm", (1, 0))) != (1, 0):
                continue
            node.replace_input_with(index, maker.inputs[0])
            node.attributes.add(ir.AttrInt64(attribute, 1 - node.attributes.get_int(attribute, 0)))
            if not made.uses() and not made.is_graph_output() and made.name not in returned:
                graph.remove(maker, safe=True)


def _make_views_late(graph: ir.Graph) -> None:
    """Recompute cheap values wherever they are used: otherwise they stay in memory in between.

    These are reshaped large weights, which are in memory anyway, and float64 values made from one byte per element. A
    cast to the type that a value already has, as bodies have them in float64, is the value itself.
    """
    given = {*graph.inputs, *graph.initializers.values()}
    for node in list(graph):
        source = node.inputs[0] if node.op_type in _VIEWS and not node.domain else None
        if source is None:
            continue
        is_same = node.op_type == "Cast" and node.attributes.get_int("to", 0) == source.dtype
        if is_same and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            graph.remove(node, safe=True)
            continue
        if _elements(node.outputs[0]) <= _LARGE:
            continue
        if source not in given and not (node.op_type == "Cast" and source.dtype in _BYTES):
            continue
        (made,) = node.outputs
        users = [user for user in dict.fromkeys(user for user, _ in made.uses()) if user.graph is graph]
        for number, user in enumerate(users):
            again = ir.node(node.op_type, node.inputs, attributes=dict(node.attributes))
            again.outputs[0].name = f"{made.name}/{number}"
            again.outputs[0].type, again.outputs[0].shape = made.type, made.shape
            for index, value in enumerate(user.inputs):
                if value is made:
                    user.replace_input_with(index, again.outputs[0])
            graph.insert_before(user, again)
        if not made.uses() and not made.is_graph_output():
            graph.remove(node, safe=True)


def _elements(value: ir.Value) -> int:
    """Return how many elements a value has; 0 where its shape does not say."""
    shape = value.shape
    return math.prod(shape.numpy()) if shape is not None and shape.is_static() else 0


def _sizes_of(node: ir.Node, known: Mapping[str, int]) -> dict[str, int]:
    """Return how many elements each output of a node has.

    Those of bodies have no shapes: they are taken to be as large as the largest input, unless they are sums or sizes.
    """
    is_small = node.op_type in ("Shape", "Size") or node.op_type.startswith("Reduce")
    like = 0 if is_small else max((known.get(name, 0) for name in _reads(node)), default=0)
    return {str(value.name): like if value.shape is None else _elements(value) for value in node.outputs}


def _reads(node: ir.Node) -> Iterator[str]:
    """Yield the names of the values from outside that a node and its subgraphs read."""
    yield from (str(value.name) for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs: Sequence[ir.Graph] = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = attribute.as_graphs()
        else:
            continue
        for graph in graphs:
            own = {value.name for value in (*graph.inputs, *graph.initializers.values())}
            own |= {value.name for inner in graph for value in inner.outputs}
            yield from (name for inner in graph for name in _reads(inner) if name not in own)
            yield from (str(value.name) for value in graph.outputs if value.name not in own)


def _kept(array: _Array) -> _Array:
    """Return what is kept of an array that parts of the model read."""
    return array if array.size > _LARGE else _as_float64(array)


def _as_float64(array: _Array) -> _Array:
    is_float = array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
    return array.astype(np.float64, copy=False) if is_float else array


def _in_numpy(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _NUMPY


def _function_of(nodes: Sequence[ir.Node]) -> Callable[..., _Array | tuple[_Array, ...]] | None:
    """Return what computes a part in numpy; None for onnxruntime."""
    if _in_numpy(nodes[0]):
        return _NUMPY[nodes[0].op_type]
    return _NUMPY_ALONE.get(nodes[0].op_type) if len(nodes) == 1 and nodes[0].domain == "" else None


def _by_kernel(domain: str, name: str) -> bool:
    return domain == custom_ops.DOMAIN and name in _BY_KERNEL and library.find_library() is not None


def _ints(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    attribute = node.attributes.get(name)
    return list(default) if attribute is None else [int(one) for one in attribute.as_ints()]


def _pads(node: ir.Node, sizes: Sequence[int], extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return what is added before and after each spatial axis, of windows of such extents."""
    rank = len(sizes)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for size, extent, stride in zip(sizes, extents, strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            pads.append((total // 2, total - total // 2) if auto == "SAME_UPPER" else (total - total // 2, total // 2))
        return pads
    given = _ints(node, "pads", [0] * 2 * rank)
    return list(zip(given[:rank], given[rank:], strict=True))


def _at(*index: Any) -> Any:
    """Return an index of some axes, of a rank that only a run knows."""
    return index


def _windows(x: _Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> _Array:
    """Return a view (N, C, *out, *kernel) of x (N, C, *spatial), which is padded already."""
    rank = len(kernel)
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    windows = sliding_window_view(x, extents, tuple(range(2, 2 + rank)))
    every = [slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations))]
    return np.asarray(windows[_at(*every)])


def _conv(node: ir.Node, x: _Array, weight: _Array, bias: _Array | None = None) -> _Array:
    rank, group = x.ndim - 2, node.attributes.get_int("group", 1)
    kernel = weight.shape[2:]
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    padded = _padded(x, _pads(node, x.shape[2:], extents, strides))
    by_torch = _of_torch(f"conv{rank}d")
    if by_torch is not None:
        return by_torch(padded, weight, bias, strides, 0, dilations, group)
    windows = _windows(padded, kernel, strides, dilations)
    count, spatial = x.shape[0], windows.shape[2 : 2 + rank]
    width = weight[0].size
    result = np.empty((count, weight.shape[0], *spatial))
    channels, maps = x.shape[1] // group, weight.shape[0] // group
    if math.prod(spatial) < math.prod(kernel):
        # As in the gradient of a weight: few large windows, each taken as a whole.
        for g, place in itertools.product(range(group), itertools.product(*map(range, spatial))):
            outputs = slice(g * maps, (g + 1) * maps)
            window = windows[_at(slice(None), slice(g * channels, (g + 1) * channels), *place)]
            result[_at(slice(None), outputs, *place)] = (
                window.reshape(count, width) @ weight[outputs].reshape(maps, width).T
            )
        return result if bias is None else result + bias.reshape(-1, *[1] * rank)
    # Channels stand beside the kernel, so that windows and weights are rows of matrices.
    order = (0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank))
    rows = max(1, _LARGEST_WINDOWS // max(1, width * math.prod(spatial)))
    for g, first in itertools.product(range(group), range(0, count, rows)):
        part = windows[first : first + rows, g * channels : (g + 1) * channels].transpose(order)
        outputs = slice(g * maps, (g + 1) * maps)
        product = part.reshape(-1, width) @ weight[outputs].reshape(maps, width).T
        result[first : first + rows, outputs] = np.moveaxis(product.reshape(-1, *spatial, maps), -1, 1)
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


def _padded(x: _Array, pads: list[tuple[int, int]]) -> _Array:
    return np.pad(x, [(0, 0), (0, 0), *pads]) if any(map(any, pads)) else x


def _of_torch(name: str) -> Callable[..., _Array] | None:
    """Return a function of PyTorch for arrays, if PyTorch is loaded anyway: it is many times faster than numpy."""
    torch = sys.modules.get("torch")
    function = getattr(torch and torch.nn.functional, name, None) or getattr(torch, name, None)
    if torch is None or function is None:
        return None

    def given(one: Any) -> Any:
        if not isinstance(one, np.ndarray):
            return one
        # Without a copy, if PyTorch accepts the memory.
        return torch.from_numpy(one if one.flags.writeable and min(one.strides, default=0) >= 0 else one.copy())

    def compute(*arguments: Any) -> _Array:
        with torch.no_grad():
            return np.asarray(function(*map(given, arguments)).numpy())

    return compute


def _conv_transpose(node: ir.Node, x: _Array, weight: _Array, bias: _Array | None = None) -> _Array:
    rank, group = x.ndim - 2, node.attributes.get_int("group", 1)
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in node.attributes:
        raise ModelError("ConvTranspose with auto_pad or output_shape is not computed in float64")
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    more = _ints(node, "output_padding", [0] * rank)
    pads = _pads(node, x.shape[2:], [1] * rank, strides)
    kernel = weight.shape[2:]
    sizes = [
        (n - 1) * s + d * (k - 1) + 1 + m
        for n, s, d, k, m in zip(x.shape[2:], strides, dilations, kernel, more, strict=True)
    ]
    cut = tuple(slice(before, size - after) for (before, after), size in zip(pads, sizes, strict=True))
    full = _transposed(x, weight, group, strides, dilations, sizes)
    result = np.asarray(full[_at(slice(None), slice(None), *cut)])
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


def _transposed(
    x: _Array, weight: _Array, group: int, strides: list[int], dilations: list[int], sizes: list[int]
) -> _Array:
    """Return a ConvTranspose of such sizes, before cropping."""
    rank, kernel = x.ndim - 2, weight.shape[2:]
    by_torch = _of_torch(f"conv_transpose{rank}d")
    if by_torch is not None:
        full = by_torch(x, weight, None, strides, 0, 0, group, dilations)
        return _padded(full, [(0, size - made) for size, made in zip(sizes, full.shape[2:], strict=True)])
    channels, maps = x.shape[1] // group, weight.shape[1]
    full = np.zeros((x.shape[0], group * maps, *sizes))
    for g, tap in itertools.product(range(group), itertools.product(*map(range, kernel))):
        at = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilations, x.shape[2:], strides, strict=True)
        )
        of_group = slice(g * channels, (g + 1) * channels)
        product = np.tensordot(x[:, of_group], weight[_at(of_group, slice(None), *tap)], (1, 0))
        full[_at(slice(None), slice(g * maps, (g + 1) * maps), *at)] += np.moveaxis(product, -1, 1)
    return full


def _average_pool(node: ir.Node, x: _Array) -> _Array:
    rank = x.ndim - 2
    kernel = _ints(node, "kernel_shape", [])
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = _pads(node, x.shape[2:], extents, strides)
    counted = np.pad(np.ones((1, 1, *x.shape[2:])), [(0, 0), (0, 0), *pads])
    if node.attributes.get_int("count_include_pad", 0):
        counted[...] = 1
    padded = np.pad(x, [(0, 0), (0, 0), *pads])
    if node.attributes.get_int("ceil_mode", 0):
        # The last window may extend past the end if it begins before it.
        more = []
        for axis, (extent, stride) in enumerate(zip(extents, strides, strict=True)):
            size = padded.shape[2 + axis]
            rest = (size - extent) % stride
            begins = size - extent - rest + stride < size - pads[axis][1]
            more.append((0, stride - rest if rest and begins else 0))
        padded, counted = (np.pad(one, [(0, 0), (0, 0), *more]) for one in (padded, counted))
    over = tuple(range(2 + rank, 2 + 2 * rank))
    total = _windows(padded, kernel, strides, dilations).sum(over)
    return np.asarray(total / _windows(counted, kernel, strides, dilations).sum(over))


def _spatial(x: _Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _instance_normalization(node: ir.Node, x: _Array, scale: _Array, bias: _Array) -> _Array:
    centred = x - x.mean(_spatial(x), keepdims=True)
    variance = (centred**2).mean(_spatial(x), keepdims=True)
    shape = (-1, *[1] * (x.ndim - 2))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    return np.asarray(centred / np.sqrt(variance + epsilon) * scale.reshape(shape) + bias.reshape(shape))


def _layer_normalization(
    node: ir.Node, x: _Array, scale: _Array, bias: _Array | None = None
) -> tuple[_Array, _Array, _Array]:
    axes = tuple(range(node.attributes.get_int("axis", -1) % x.ndim, x.ndim))
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + node.attributes.get_float("epsilon", 1e-5))
    result = (x - mean) * inverse * scale
    return result if bias is None else result + bias, mean, inverse


_each_erf = np.vectorize(math.erf, otypes=[np.float64])


def _erf(x: _Array) -> _Array:
    return (_of_torch("erf") or _each_erf)(x)


def _gelu(node: ir.Node, x: _Array) -> _Array:
    if node.attributes.get_string("approximate", "none") == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def _exponential_below(alpha: float, gamma: float, scale: float) -> Callable[..., _Array]:
    """gamma x above 0, gamma alpha (exp(x / scale) - 1) below."""

    def compute(node: ir.Node, x: _Array) -> _Array:
        a, g = node.attributes.get_float("alpha", alpha), node.attributes.get_float("gamma", gamma)
        s = a if scale == 0 else scale
        return np.asarray(np.where(x > 0, g * x, g * a * np.expm1(np.minimum(x, 0) / s)))

    return compute


def _hard_sigmoid(node: ir.Node, x: _Array) -> _Array:
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return np.clip(alpha * x + beta, 0, 1)


def _shrink(node: ir.Node, x: _Array) -> _Array:
    lambd, bias = node.attributes.get_float("lambd", 0.5), node.attributes.get_float("bias", 0.0)
    return np.where(np.abs(x) > lambd, x - np.sign(x) * bias, 0.0)


def _elementwise(function: Callable[[_Array], Any]) -> Callable[..., _Array]:
    return lambda node, x: np.asarray(function(x))


def _softplus(x: _Array) -> _Array:
    return np.asarray(np.logaddexp(x, 0.0))


_NUMPY: dict[str, Callable[..., _Array | tuple[_Array, ...]]] = {
    "AveragePool": _average_pool,
    "Celu": _exponential_below(1.0, 1.0, 0),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Elu": _exponential_below(1.0, 1.0, 1),
    "Gelu": _gelu,
    "GlobalAveragePool": _elementwise(lambda x: x.mean(_spatial(x), keepdims=True)),
    "GlobalMaxPool": _elementwise(lambda x: x.max(_spatial(x), keepdims=True)),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _elementwise(lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "InstanceNormalization": _instance_normalization,
    # onnxruntime's gives its statistics in float32.
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": lambda node, x: np.where(x < 0, node.attributes.get_float("alpha", 0.01) * x, x),
    "Mish": _elementwise(lambda x: x * np.tanh(_softplus(x))),
    "PRelu": lambda node, x, slope: np.where(x < 0, slope * x, x),
    "Selu": _exponential_below(1.67326319217681884765625, 1.05070102214813232421875, 1),
    "Shrink": _shrink,
    "Softplus": _elementwise(_softplus),
    "Softsign": _elementwise(lambda x: x / (1 + np.abs(x))),
    "ThresholdedRelu": lambda node, x: np.where(x > node.attributes.get_float("alpha", 1.0), x, 0.0),
    "Acos": _elementwise(np.arccos),
    "Acosh": _elementwise(np.arccosh),
    "Asin": _elementwise(np.arcsin),
    "Asinh": _elementwise(np.arcsinh),
    "Atan": _elementwise(np.arctan),
    "Atanh": _elementwise(np.arctanh),
    "Cosh": _elementwise(np.cosh),
    "Erf": _elementwise(_erf),
    "Sinh": _elementwise(np.sinh),
    "Tan": _elementwise(np.tan),
}
"""What onnxruntime's CPU provider computes in float32 only."""

_NUMPY_ALONE: dict[str, Callable[..., _Array]] = {
    # onnxruntime's makes two more tensors of the result's size.
    "Where": lambda node, condition, x, y: np.asarray(np.where(condition, x, y)),
}
"""What numpy computes as well, in less memory, where a node is a part of its own."""
