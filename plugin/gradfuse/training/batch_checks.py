"""What must hold of a batch: ranges of labels and indices, and conditions on sizes, checked within a model.

PyTorch raises where onnxruntime takes -1 for the last class, and code that asks for a size may compute something else
at another one. A check within a model consists of nodes that count what is wrong, and gather an element that does not
exist if there is anything: in every runtime, the step fails before it changes anything. The nodes that compute indices
are copied for this, so that the originals may be rewritten. Ranges of whole inputs are checked before a step as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from gradfuse import runtime
from gradfuse.custom_ops import DOMAIN
from gradfuse.models.propagation import Facts, Sizes, size_of
from gradfuse.training.nodes import GraphTensor, Nodes
from gradfuse.training.step import LOSS, IndexRange

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity"}
"""Operators whose results have each element of their operand once."""
_STURDY = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast
    CastLike Ceil Celu Clip Compress Concat Constant ConstantOfShape Cos Cosh CumSum Div Elu Equal Erf Exp
    Expand Flatten Floor Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual HardSigmoid HardSwish
    Identity IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Max Min Mul Neg NonZero
    Not OneHot Or PRelu Pad Pow Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round ScatterElements ScatterND
    Selu Shape Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum Tan Tanh
    ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor
    """.split()
)
"""Operators of which onnxruntime gives what PyTorch gives of empty tensors, or an error."""
_OF_BATCHES = frozenset("AveragePool BatchNormalization Conv GlobalAveragePool GlobalMaxPool MaxPool".split())
"""Those of which it does so where the batch, the first axis, is empty."""
_MATRIX = 2
_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
_MOST_NODES = 64
_MOST_BYTES = 4096
_CHECKED = {"CrossEntropyLossGrad": 2}
"""Operators that themselves fail if an index is out of range -> which input that is."""


@dataclasses.dataclass(frozen=True)
class SizeOf:
    """The size of an axis of a value of the step, by the value's name; it is read when the step runs."""

    name: str
    axis: int


@dataclasses.dataclass(frozen=True)
class Term:
    """An operator and its operands, with Python's types: truth values, int64, and float64 beside float64.

    It is one of ONNX; or a division of Python, `FloorDiv` or `TrueDiv`; or `Real` or `Int`, which converts.
    """

    op_type: str
    operands: tuple[Term | SizeOf | float, ...]


@dataclasses.dataclass(frozen=True)
class SizeCheck:
    """A condition on the sizes of a batch, and what an error says of it."""

    condition: Term
    text: str


@dataclasses.dataclass(frozen=True)
class Index:
    """A value of a graph whose elements must lie from 0 to below `size`, or be `ignored`."""

    value: ir.Value
    size: int | ir.Value | SizeOf
    ignored: int | None


@dataclasses.dataclass(frozen=True)
class Check:
    """An index as it is computed from the inputs of a batch.

    Attributes:
        index: of values that nothing else computes.
        inputs: the inputs that it is computed from, by name.
        nodes: what computes it, in order.
        of: the input whose elements it has; None if it is something else.
    """

    index: Index
    inputs: Mapping[str, ir.Value]
    nodes: tuple[ir.Node, ...]
    of: str | None


def checks_of(indices: Iterable[Index], batch: Mapping[ir.Value, str]) -> list[Check]:
    """Return checks of the indices that are computed from the batch alone.

    Args:
        indices: values of a graph.
        batch: the inputs of the graph that are the batch's, with their names.
    """
    found = []
    for index in indices:
        check = _copied(index, batch)
        axis = _axis_of(index.size) if check is None and isinstance(index.size, ir.Value) else None
        if axis is not None:
            # It depends on parameters, but is known when the step runs.
            check = _copied(dataclasses.replace(index, size=axis), batch)
        found.append(check)
    return [check for check in found if check is not None]


def ranges_of(checks: Iterable[Check]) -> dict[str, tuple[IndexRange, ...]]:
    """Return the ranges of whole inputs, by name."""
    found: dict[str, dict[IndexRange, None]] = {}
    for check in checks:
        if check.of is not None and isinstance(check.index.size, int):
            found.setdefault(check.of, {})[IndexRange(check.index.size, check.index.ignored)] = None
    return {name: tuple(ranges) for name, ranges in found.items()}


def filled_dimensions(model: ir.Model, *, kernels: bool = False) -> set[str | None]:
    """Return the names of dimensions of inputs that may not be 0, as kernels of onnxruntime are not made for that.

    It never returns from some convolutions of nothing, products of several matrices end the process or give what was in
    memory, as any products do before version 1.20, and a division by a size of 0 ends it, too. So only operators of
    which nothing like that is known may get empty tensors.

    Args:
        model: a model.
        kernels: whether the library runs its fused operators, which take empty tensors.

    Returns:
        The names; None for a dimension without one.
    """
    dims = {size_of(dim) for value in model.graph.inputs for dim in value.shape or ()}
    labels = {dim for dim in dims if not isinstance(dim, int)}
    bodies = {(function.domain, function.name): function for function in model.functions.values()}
    facts, found, sums_nothing = Facts(model), set[str | None](), runtime.is_at_least(1, 20)
    for node in model.graph.all_nodes():
        body = bodies.get((node.domain, node.op_type))
        values = (value for value in (*node.inputs, *node.outputs) if value is not None)
        shapes: list[Sizes | None] = [facts.shapes.get(value) for value in values]
        if kernels and node.domain == DOMAIN:
            is_sturdy = True
        elif body is not None:
            is_sturdy = all(inner.op_type in _STURDY and inner.domain in ("", DOMAIN) for inner in body)
        elif node.op_type in ("Div", "Mod"):
            dtype = facts.dtypes.get(node.outputs[0])
            is_sturdy = dtype is not None and dtype.is_floating_point()
            shapes = shapes if is_sturdy else [None]
        elif node.op_type in _OF_BATCHES and not node.domain:
            is_sturdy, shapes = False, [shape and shape[1:] for shape in shapes]
        elif node.op_type == "MatMul" and not node.domain and len(shapes[1] or ()) == _MATRIX:
            # Several matrices by one, which onnxruntime may transpose as well, are sums over the rows of that one.
            is_sturdy = sums_nothing and len(shapes[0] or ()) == _MATRIX
            shapes = [(shapes[1] or [])[:1]]
        elif node.op_type == "Gemm" and not node.domain:
            is_sturdy = sums_nothing
            summed = 0 if node.attributes.get_int("transA", 0) else 1
            shapes = [shapes[0] and shapes[0][summed : summed + 1]]
        else:
            is_sturdy = not node.domain and node.op_type in _STURDY
        if is_sturdy:
            continue
        sizes = {str(size) for shape in shapes for size in shape or ()}
        if None in shapes or not facts.invented.isdisjoint(sizes):
            return labels
        names = {name for size in sizes for name in (size, *re.findall(r"\w+", size))}
        found |= labels & names
    return found


def append(
    model: ir.Model,
    checks: Iterable[Check],
    prefix: str,
    size_checks: Iterable[SizeCheck] = (),
) -> None:
    """Make a step's model fail if an index is out of range, unless an operator in it already does.

    Args:
        model: a step, with the inputs that the checks are of.
        checks: they become part of the model.
        prefix: what no name in the graph begins with.
        size_checks: where one of these does not hold, it fails as well.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    loss = next(value for value in graph.outputs if value.name == LOSS)
    nodes = Nodes(f"{prefix}/sizes")
    result = _where_sizes_fit(graph, nodes, nodes.of(loss), size_checks)
    producer = loss.producer()
    if producer is not None:
        # Not at the end: onnxruntime chooses by their places what it runs first, and a gradient tells more of a label.
        graph.insert_after(producer, nodes.tape.nodes)
    nodes = Nodes(prefix)
    for number, check in enumerate(check for check in checks if not _is_checked(graph, check)):
        given = {value: inputs[name] for name, value in check.inputs.items()}
        for position, output in enumerate(output for node in check.nodes for output in node.outputs):
            output.name = f"{prefix}/{number}/{position}"
        for node in check.nodes:
            for place, value in enumerate(node.inputs):
                if value in given:
                    node.replace_input_with(place, given[value])
            graph.append(node)
        index = given.get(check.index.value, check.index.value)
        size = check.index.size
        if isinstance(size, SizeOf):
            known = _size(graph, nodes, size)
            if known is None:
                # Only an operator that checks by itself reads all of it.
                continue
            size = known
        count = _out_of_range(graph, nodes, index, size, check.index.ignored)
        names, limit = " and ".join(sorted(check.inputs)), check.index.size
        wanted = f", expected 0 to {limit - 1}" if isinstance(limit, int) else ""
        result = _unless(graph, nodes, result, count, f"{names} out of range{wanted}")
    if result.value is loss:
        return
    graph.extend(nodes.tape.nodes)
    place = list(graph.outputs).index(loss)
    loss.name = f"{prefix}/{LOSS}"
    result.value.name = LOSS
    graph.outputs[place] = result.value


def append_to_evaluation(model: ir.Model, size_checks: Iterable[SizeCheck], prefix: str) -> None:
    """Make an evaluation model fail where a condition on the sizes of its inputs does not hold.

    Args:
        model: the model; each of its outputs comes to depend on the checks.
        size_checks: those of other tensors are left out.
        prefix: what no name in the graph begins with.
    """
    graph, nodes, size_checks = model.graph, Nodes(prefix), list(size_checks)
    for place, output in enumerate(list(graph.outputs)):
        name, dtype = str(output.name), output.dtype
        assert dtype is not None and output.shape is not None
        # By its shape, as another copy of the output would take memory.
        shape = nodes.op("Shape", [output], ir.DataType.INT64, (len(output.shape),))
        checked = _where_sizes_fit(graph, nodes, shape, size_checks)
        if checked is shape:
            return
        output.name = f"{prefix}/{place}/{name}"
        result = nodes.op("Reshape", [output, checked.value], dtype, output.shape, {"allowzero": 1}).value
        result.name = name
        graph.outputs[place] = result
    graph.extend(nodes.tape.nodes)


def _where_sizes_fit(
    graph: ir.Graph, nodes: Nodes, result: GraphTensor, size_checks: Iterable[SizeCheck]
) -> GraphTensor:
    """Return a result, by nodes that fail where a condition on sizes does not hold."""
    found: dict[Term | SizeOf | float, GraphTensor | None] = {}
    for one in dict.fromkeys(size_checks):
        holds = _term(graph, nodes, one.condition, found)
        if holds is not None:
            result = _unless(graph, nodes, result, holds.op("Not").cast(ir.DataType.INT64), one.text)
    return result


def _term(
    graph: ir.Graph,
    nodes: Nodes,
    term: Term | SizeOf | float,
    found: dict[Term | SizeOf | float, GraphTensor | None],
) -> GraphTensor | None:
    """Return what a term is in a graph; None: one of its tensors is not there."""
    if isinstance(term, (int, float)):
        return nodes.of(_constant(graph, nodes, term, (), _INT if isinstance(term, int) else _REAL))
    if term not in found:
        if isinstance(term, SizeOf):
            value = _size(graph, nodes, term)
            found[term] = None if value is None else nodes.of(value)
        else:
            operands = [_term(graph, nodes, one, found) for one in term.operands]
            given = [one for one in operands if one is not None]
            found[term] = _applied(nodes, term.op_type, given) if len(given) == len(operands) else None
    return found[term]


_INT, _REAL, _TRUTH = ir.DataType.INT64, ir.DataType.DOUBLE, ir.DataType.BOOL
_OF_TRUTH = {"And", "Or", "Not"}
_RELATIONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
_OF_REALS = {**{name: name for name in ("Floor", "Ceil", "Round", "Sqrt", "Pow")}, "TrueDiv": "Div"}


def _applied(nodes: Nodes, op_type: str, operands: Sequence[GraphTensor]) -> GraphTensor:
    """Return what an operator of a term gives."""
    if op_type in ("Real", "Int"):
        return operands[0].cast(_REAL if op_type == "Real" else _INT)
    if op_type in _OF_REALS or _REAL in {one.dtype for one in operands}:
        operands = [one.cast(_REAL) for one in operands]
    values, dtype = [one.value for one in operands], operands[0].dtype
    if op_type == "Mod":
        return _remainder(nodes, *operands)
    if op_type == "FloorDiv":
        # Div of integers rounds to 0.
        quotient = (operands[0] - _remainder(nodes, *operands)) / operands[1]
        return quotient if dtype == _INT else quotient.op("Round")
    if op_type in _OF_TRUTH | _RELATIONS:
        dtype = _TRUTH
    return nodes.op(_OF_REALS.get(op_type, op_type), values, dtype, ())


def _remainder(nodes: Nodes, dividend: GraphTensor, divisor: GraphTensor) -> GraphTensor:
    """Return Python's remainder, whose sign is that of the divisor."""
    values, dtype = [dividend.value, divisor.value], dividend.dtype
    if dtype == _INT:
        return nodes.op("Mod", values, dtype, ())
    rest = nodes.op("Mod", values, dtype, (), {"fmod": 1})
    is_of_other_sign = nodes.op("Less", [(rest * divisor).value, nodes.constant(0.0, dtype).value], _TRUTH, ())
    return nodes.op("Where", [is_of_other_sign.value, (rest + divisor).value, rest.value], dtype, ())


def _unless(graph: ir.Graph, nodes: Nodes, result: GraphTensor, count: GraphTensor, text: str) -> GraphTensor:
    """Return a result, by a node that fails where a count is not 0, and has a name that says so."""
    # Of several, as an arithmetic operation would need kernels for the type of the loss.
    first = _constant(graph, nodes, 0, (1,), ir.DataType.INT64)
    row = nodes.op("Unsqueeze", [result.value, first], result.dtype, (1, *result.shape))
    result = nodes.op("Gather", [row.value, count.value], result.dtype, result.shape)
    node = result.value.producer()
    assert node is not None
    # onnxruntime refuses two nodes of one name.
    taken = {one.name for one in nodes.tape.nodes}
    numbered = itertools.chain([text], (f"{text} ({number})" for number in itertools.count(2)))
    node.name = next(one for one in numbered if one not in taken)
    return result


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    return itertools.chain(graph.inputs, (output for node in graph for output in node.outputs))


def _constant(graph: ir.Graph, nodes: Nodes, number: float, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    # As initializers, they are no nodes.
    name = f"{nodes.prefix}/{dtype.name.lower()}_{number}{'_'.join(map(str, ('', *shape)))}"
    if name not in graph.initializers:
        tensor = ir.tensor(np.full(shape, number, dtype.numpy()), dtype=dtype, name=name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def _size(graph: ir.Graph, nodes: Nodes, size: SizeOf) -> ir.Value | None:
    """Return a size that the step knows when it runs; None: the value is not there."""
    of = next((value for value in _values(graph) if value.name == size.name), None)
    if of is None:
        return None
    shape = nodes.op("Shape", [of], ir.DataType.INT64, (1,), {"start": size.axis, "end": size.axis + 1})
    return nodes.op("Squeeze", [shape.value], ir.DataType.INT64, ()).value


def _out_of_range(
    graph: ir.Graph, nodes: Nodes, index: ir.Value, size: int | ir.Value, ignored: int | None
) -> GraphTensor:
    """Return how many elements of an index are out of range."""
    elements, type_ = nodes.of(index), index.dtype
    assert type_ is not None
    zero = _constant(graph, nodes, 0, (), type_)
    if ignored is not None:
        hit = nodes.op(
            "Equal", [elements.value, _constant(graph, nodes, ignored, (), type_)], ir.DataType.BOOL, elements.shape
        )
        elements = nodes.op("Where", [hit.value, zero, elements.value], type_, elements.shape)
    if isinstance(size, ir.Value):
        last = (nodes.of(size).cast(type_) - 1).value
    else:
        last = _constant(graph, nodes, size - 1, (), type_)
    nearest = nodes.op("Clip", [elements.value, zero, last], type_, elements.shape)
    wrong = elements.op("Equal", nearest, dtype=ir.DataType.BOOL).op("Not").cast(ir.DataType.INT64)
    return nodes.op("ReduceSum", [wrong.value], ir.DataType.INT64, (), {"keepdims": 0})


def _is_checked(graph: ir.Graph, check: Check) -> bool:
    """Whether an operator in the graph checks a whole input for the same."""
    for node in graph:
        if node.domain != DOMAIN or node.op_type not in _CHECKED or check.of is None:
            continue
        read = _viewed(node.inputs[_CHECKED[node.op_type]])
        if read is not None and read.name == check.of and read.is_graph_input():
            return node.attributes.get_int("ignore_index", -100) == check.index.ignored
    return False


def _viewed(value: ir.Value | None) -> ir.Value | None:
    """Return the value that this is a view of, with each element once."""
    while value is not None and (node := value.producer()) is not None and not node.domain:
        if node.op_type not in _VIEWS and not (node.op_type == "Cast" and value.dtype in _INTEGERS):
            break
        value = node.inputs[0]
    return value


def _copied(index: Index, batch: Mapping[ir.Value, str]) -> Check | None:
    """Return a check of an index; None if it does not depend on the batch alone, or needs many nodes."""
    size = index.size if isinstance(index.size, ir.Value) else None
    inputs: dict[str, ir.Value] = {}
    copies: dict[ir.Value, ir.Value] = {}
    nodes: list[ir.Node] = []
    wanted = [index.value] if size is None else [index.value, size]
    todo = list(wanted)
    while todo:
        value = todo[-1]
        node = value.producer()
        if value in copies:
            todo.pop()
        elif value in batch:
            name = batch[value]
            copies[value] = inputs[name] = ir.Value(name=name, type=value.type, shape=value.shape)
        elif value.const_value is not None and value.const_value.nbytes <= _MOST_BYTES:
            nodes.append(ir.node("Constant", [], {"value": ir.tensor(value.const_value.numpy())}))
            copies[value] = _like(nodes[-1].outputs[0], value)
        elif node is None or node.domain or len(nodes) >= _MOST_NODES or _has_graph(node):
            return None
        elif missing := [one for one in node.inputs if one is not None and one not in copies]:
            todo += missing
        else:
            given = [None if one is None else copies[one] for one in node.inputs]
            nodes.append(ir.node(node.op_type, given, dict(node.attributes), num_outputs=len(node.outputs)))
            copies |= {old: _like(new, old) for old, new in zip(node.outputs, nodes[-1].outputs, strict=True)}
    value = copies[index.value]
    if not inputs or value.dtype not in _INTEGERS or any(copies[one].shape is None for one in wanted):
        return None
    source = _viewed(index.value)
    of = None if source is None else batch.get(source)
    copied = Index(value, index.size if size is None else copies[size], index.ignored)
    return Check(copied, inputs, tuple(nodes), of)


def _axis_of(size: ir.Value) -> SizeOf | None:
    """Return the value and axis whose size this value is; None: it is computed otherwise."""
    node = size.producer()
    if node is not None and node.op_type == "Squeeze" and not node.domain:
        shape = node.inputs[0]
        node = shape.producer() if shape is not None else None
    if node is None or node.op_type != "Shape" or node.domain:
        return None
    (of,) = node.inputs
    start, end = (node.attributes.get_int(name, None) for name in ("start", "end"))
    if of is None or start is None or end != start + 1:
        return None
    return SizeOf(str(of.name), start)


def _like(value: ir.Value, other: ir.Value) -> ir.Value:
    value.type, value.shape = other.type, other.shape
    return value


def _has_graph(node: ir.Node) -> bool:
    return any(
        not attribute.is_ref() and attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for attribute in node.attributes.values()
    )
