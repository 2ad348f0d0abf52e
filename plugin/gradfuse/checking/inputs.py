"""Random inputs that a model accepts: class indices in range, masks that do not mask everything, ends of groups.

An ONNX model does not tell which integers an input may hold. Their ranges follow from what the graph does with them:
it indexes a dimension, takes them for classes, or compares them with row numbers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN, OPS, Operator
from gradfuse.custom_ops.operator import Classes, Ends
from gradfuse.errors import ModelError
from gradfuse.models import validation
from gradfuse.models.tensors import copy_model

_Array = npt.NDArray[Any]

# The most that all inputs of a model may take together, and the most that any value may take.
_MOST_INPUT_BYTES = 2**32
_MOST_VALUE_BYTES = 2**34
# An expression of dimensions, as exporters write them. Anything else that a dimension is called is a name.
_EXPRESSION = re.compile(r"(?!.*\*\*)(?!.*[0-9]{7})[\w.+\-*/(), ]{1,200}", re.ASCII)
_NO_NUMBERS = (None, ir.DataType.STRING, ir.DataType.UNDEFINED)
# What is larger is data, which neither shapes nor ranges depend on.
_LARGEST_CONSTANT_BYTES = 2**16
_DEFAULT_LIMIT = 4
_GROWTH, _LARGEST_GROWTH = 4, 16
_SHARE_IGNORED = 0.15

# Their first output holds values of their first input (or of every input) and no others but constants.
_KEEPS_FIRST = frozenset(
    {"Cast", "Clip", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice"}
    | {"Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
_KEEPS_ALL = frozenset({"Concat", "Max", "Min"})
_COMPARES = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_TAKES_CLASSES = {
    ("", "NegativeLogLikelihoodLoss"): (1, 0),
    ("", "SoftmaxCrossEntropyLoss"): (1, 0),
    ("com.microsoft", "SoftmaxCrossEntropyLossInternal"): (1, 0),
    ("com.microsoft", "SoftmaxCrossEntropyLossInternalGrad"): (2, 1),
    ("com.microsoft", "SoftmaxCrossEntropyLossGrad"): (2, 1),
}
"""(domain, op) -> (input that holds class indices, input whose dimension 1 counts the classes).

:class:`gradfuse.custom_ops.operator.Input` says what the integers of our own operators are.
"""


@dataclasses.dataclass
class _Use:
    """What the consumers of an input tell about its integers."""

    limits: list[int] = dataclasses.field(default_factory=list)
    """Each value is at least 0 and below every one of these."""
    ignored: set[int] = dataclasses.field(default_factory=set)
    """Values that the graph singles out."""
    forbidden: set[int] = dataclasses.field(default_factory=set)
    unguarded: bool = False
    """Some consumer indexes with the values as they are, so that ignored ones out of range would be an error."""
    ends: int | None = None
    """Ends of groups: they do not decrease, and the last is this."""
    least: int = 0
    positive: bool = False
    counts: bool = False
    """A float that counts something, such as the steps of an optimizer."""


Analyses = dict[tuple[tuple[int, ...], ...], tuple[ir.Graph, dict[str, _Use]]]
"""What is known about a model's use of its inputs, by their shapes."""


def random_inputs(
    model: ir.Model,
    rng: np.random.Generator,
    *,
    attempt: int = 0,
    sizes: Mapping[str, int] | None = None,
    known: Analyses | None = None,
) -> dict[str, _Array]:
    """Return a random value for every input of a model that no initializer fills.

    Dimensions of one name get one size, from 2 up; floats are standard normal (positive where the graph takes their
    logarithm or root, whole numbers where they count the steps of an optimizer); every row of a mask holds both values;
    integers are in the range that their consumers take.

    Args:
        model: any model; it is not changed.
        rng: the source of randomness; equal states give equal inputs.
        attempt: how often the model failed to run on such inputs. Every second time all symbolic dimensions have the
            same size, because exporters may give one dimension two names; and sizes grow, because windows may exceed
            small ones.
        sizes: the sizes of dimensions that are known, by name.
        known: a cache of what earlier calls for the same model found; it is extended.

    Raises:
        ModelError: an input is not a tensor of numbers, its rank is unknown, or it is too large to be run.
    """
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    shapes = _sizes(inputs, rng, attempt, sizes or {})
    _require_runnable(inputs, shapes)
    known = {} if known is None else known
    key = tuple(shapes.values())
    if key not in known:
        graph = _analysed(model, shapes).graph
        _require_moderate(graph)
        by_name = {value.name: value for value in graph.inputs}
        known[key] = graph, {name: _use_of(by_name[name], shapes[name]) for name in shapes if name in by_name}
    graph, uses = known[key]
    feeds: dict[str, _Array] = {}
    for value in inputs:
        name = str(value.name)
        assert value.dtype is not None
        feeds[name] = _random(value.dtype, shapes[name], uses.get(name, _Use()), rng)
    _fill_lengths(graph, feeds, rng)
    return feeds


def _sizes(
    inputs: list[ir.Value], rng: np.random.Generator, attempt: int, given: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    names: set[str] = set()
    for value in inputs:
        if value.dtype in _NO_NUMBERS or not isinstance(value.type, ir.TensorType):
            raise ModelError(f"input {value.name!r} has type {value.type}; expected a tensor of numbers")
        if value.shape is None:
            raise ModelError(f"input {value.name!r} has no shape; expected a known rank")
        for dim in value.shape:
            names |= _symbols(dim)
    factor = min(_GROWTH ** (attempt // 2), _LARGEST_GROWTH)
    # Different sizes for different names, so that no two dimensions are mistaken for each other unnoticed.
    choices = factor * rng.permutation(np.arange(2, 2 + max(5, len(names))))
    bindings = {name: int(size) for name, size in zip(sorted(names), choices, strict=False)}
    unnamed = factor * int(rng.integers(2, 6))
    if attempt % 2 == 1:
        bindings = dict.fromkeys(bindings, unnamed)
    bindings |= given
    shapes = {}
    for value in inputs:
        assert value.shape is not None
        dims = [_evaluated(dim, bindings) for dim in value.shape]
        shapes[str(value.name)] = tuple(max(dim, 0) if isinstance(dim, int) else unnamed for dim in dims)
    return shapes


def _symbols(dim: int | ir.SymbolicDim) -> frozenset[str]:
    """The names that the size of a dimension depends on: those in an expression, or what it is called."""
    if isinstance(dim, int) or not dim.value:
        return frozenset()
    if _EXPRESSION.fullmatch(dim.value):
        try:
            return dim.free_symbols()
        except (ValueError, ArithmeticError, RecursionError):
            pass
    return frozenset([dim.value])


def _evaluated(dim: int | ir.SymbolicDim, bindings: Mapping[str, int]) -> int | ir.SymbolicDim:
    """The size of a dimension for the sizes of what it depends on; a symbol where those do not tell."""
    if isinstance(dim, int):
        return dim
    if not dim.value:
        return ir.SymbolicDim(None)
    if dim.value in bindings:
        return bindings[dim.value]
    if not _symbols(dim) <= bindings.keys():
        return dim
    try:
        return dim.evaluate(bindings)
    except (ValueError, ArithmeticError, TypeError):
        return ir.SymbolicDim(None)


def _require_runnable(inputs: list[ir.Value], shapes: Mapping[str, tuple[int, ...]]) -> None:
    total = 0
    for value in inputs:
        shape = shapes[str(value.name)]
        assert value.dtype is not None
        # numpy multiplies all but zeros.
        size = math.ceil(math.prod(n for n in shape if n) * value.dtype.itemsize)
        total += size if all(shape) else 0
        if max(total, size) > _MOST_INPUT_BYTES:
            raise ModelError(
                f"input {value.name!r} has shape {_short(shape)}; "
                f"expected inputs of at most {_MOST_INPUT_BYTES} bytes together, for a run on random ones"
            )
        if len(shape) > validation.HIGHEST_RANK:
            most = validation.HIGHEST_RANK
            raise ModelError(f"input {value.name!r} has {len(shape)} dimensions; expected at most {most}")


def _require_moderate(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.shape is None or value.dtype in _NO_NUMBERS:
                continue
            assert value.dtype is not None
            if value.shape.is_static() and value.dtype.itemsize * math.prod(value.shape.numpy()) > _MOST_VALUE_BYTES:
                raise ModelError(
                    f"{node.op_type} (node {node.name or value.name!r}): {value.name!r} has shape "
                    f"{_short(value.shape.numpy())}; expected at most {_MOST_VALUE_BYTES} bytes, to be run"
                )


def _short(shape: tuple[int, ...]) -> str:
    return str(shape) if len(shape) <= validation.HIGHEST_RANK else f"of {len(shape)} dimensions"


def _analysed(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return a copy for analysis: sizes put in and propagated, functions but ours inlined, large tensors left out."""
    copy = copy_model(model)
    bindings = {
        dim.value: size
        for value in copy.graph.inputs
        if (name := str(value.name)) in shapes and value.shape is not None
        for dim, size in zip(value.shape, shapes[name], strict=True)
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }
    for node in copy.graph.all_nodes():
        for output in node.outputs:
            if output.shape is not None:
                output.shape = ir.Shape([_evaluated(dim, bindings) for dim in output.shape])
    for value in copy.graph.inputs:
        if (name := str(value.name)) in shapes:
            value.shape = ir.Shape(shapes[name])
    for output in copy.graph.outputs:
        output.shape = None
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > _LARGEST_CONSTANT_BYTES:
            value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
            value.const_value = None
            del copy.graph.initializers[name]
            if value not in copy.graph.inputs:
                copy.graph.inputs.append(value)
    proto = ir.to_proto(copy)
    try:
        ours = [(f.domain, f.name) for f in proto.functions if f.domain == DOMAIN]
        proto = onnx.inliner.inline_selected_functions(proto, ours, exclude=True)
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:
        # Without inferred shapes fewer ranges are known; running the model will tell whether it is valid.
        return copy
    return ir.from_proto(proto)


def _use_of(value: ir.Value, shape: tuple[int, ...]) -> _Use:
    use = _Use()
    for consumer, index, guarded in _consumers(value):
        _note(use, consumer, index, guarded, shape)
        # A count goes up before it is used.
        if (consumer.op_type, consumer.domain) == ("Add", "") and _constant(consumer.inputs[1 - index]) is not None:
            next_uses = list(_consumers(consumer.outputs[0]))
            use.counts |= any(_is_exponent(node, k) or _makes_integer(node) for node, k, _ in next_uses)
    use.counts &= math.prod(shape) == 1
    return use


def _is_exponent(node: ir.Node, index: int) -> bool:
    """Whether an input of a node is the exponent of a constant, as of the decay of a running mean."""
    return (node.op_type, node.domain, index) == ("Pow", "", 1) and _constant(node.inputs[0]) is not None


def _makes_integer(node: ir.Node) -> bool:
    return (node.op_type, node.domain) == ("Cast", "") and ir.DataType(node.attributes.get_int("to", 0)).is_integer()


def _consumers(value: ir.Value) -> Iterator[tuple[ir.Node, int, bool]]:
    """Yield every node that takes the values of `value`, as they are or rearranged: the node, which input, and whether
    a Where has put other values in the place of some."""
    pending = [(value, False)]
    seen: set[tuple[ir.Value, bool]] = set()
    while pending:
        value, guarded = pending.pop()
        if (value, guarded) in seen:
            continue
        seen.add((value, guarded))
        for node, index in value.uses():
            yield node, index, guarded
            if node.domain != "" or not node.outputs:
                continue
            if (node.op_type in _KEEPS_FIRST and index == 0) or node.op_type in _KEEPS_ALL:
                pending.append((node.outputs[0], guarded))
            elif node.op_type == "Where" and index > 0:
                pending.append((node.outputs[0], True))


def _note(use: _Use, node: ir.Node, index: int, guarded: bool, shape: tuple[int, ...]) -> None:
    kind = (node.domain, node.op_type)
    limit = _indexed_size(node, index)
    if kind in _TAKES_CLASSES and index == _TAKES_CLASSES[kind][0]:
        limit = _dim(node.inputs[_TAKES_CLASSES[kind][1]], 1)
        ignored = node.attributes.get_int("ignore_index", None)
        if ignored is not None:
            use.ignored.add(ignored)
    elif limit is not None and not guarded:
        use.unguarded = True
    if limit is not None:
        use.limits.append(limit)
    operator = _operator(node)
    if operator is not None:
        _note_ours(use, node, operator, index)
    elif kind == ("", "Equal"):
        _note_equal(use, _constant(node.inputs[1 - index]))
    elif node.domain == "" and node.op_type in _COMPARES:
        _note_compare(use, node.inputs[1 - index], shape)
    elif kind in {("", "Sqrt"), ("", "Log")}:
        use.positive = True
    elif kind == ("", "Div") and index == 1:
        use.least = 1
    elif _is_exponent(node, index):
        use.counts = True


def _operator(node: ir.Node) -> Operator | None:
    return OPS.get(node.op_type) if node.domain == DOMAIN else None


def _named_inputs(node: ir.Node, operator: Operator) -> dict[str, ir.Value | None]:
    return {i.name: value for i, value in zip(operator.inputs, node.inputs, strict=False)}


def _note_ours(use: _Use, node: ir.Node, operator: Operator, index: int) -> None:
    """What one of our operators says about the integers of an input."""
    inputs = _named_inputs(node, operator)
    match operator.inputs[index].holds if index < len(operator.inputs) else None:
        case Classes() as classes:
            limit = _dim(inputs.get(classes.tensor), classes.axis)
            if classes.number:
                limit = node.attributes.get_int(classes.number, None)
            if limit is not None:
                use.limits.append(limit)
            ignored = node.attributes.get_int(classes.ignored, None)
            if ignored is not None:
                use.ignored.add(ignored)
            if classes.never:
                (default,) = (a.default for a in operator.attributes if a.name == classes.never)
                assert isinstance(default, int)
                use.forbidden.add(node.attributes.get_int(classes.never, default))
        case Ends() as ends:
            use.ends = _dim(inputs.get(ends.tensor), ends.axis)


def _note_equal(use: _Use, other: _Array | None) -> None:
    if other is None or other.dtype.kind not in "iu" or other.size == 0:
        return
    if other.size == 1:
        use.ignored.add(int(other.ravel()[0]))
    else:
        # Compared with every class: the one-hot form.
        use.limits.append(int(other.max()) + 1)


def _note_compare(use: _Use, other: ir.Value | None, shape: tuple[int, ...]) -> None:
    """Comparisons with the numbers of rows bound ends of groups, and lengths."""
    constant = _constant(other)
    if constant is not None:
        if constant.size > 1 and constant.dtype.kind in "iu":
            rows = int(constant.max()) + 1
        else:
            return
    elif other is not None and other.shape is not None and other.shape.is_static():
        rows = int(np.prod(other.shape.numpy(), dtype=np.int64))
    else:
        return
    if rows > 1 and len(shape) == 1:
        use.ends = rows


def _indexed_size(node: ir.Node, index: int) -> int | None:
    """Return the size of the dimension that input `index` of a node indexes; None where it is no index."""
    if node.domain != "":
        return None
    data = node.inputs[0] if node.inputs else None
    if node.op_type in {"Gather", "GatherElements", "ScatterElements"} and index == 1:
        return _dim(data, node.attributes.get_int("axis", 0))
    if node.op_type in {"GatherND", "ScatterND"} and index == 1:
        indices = node.inputs[1]
        batch_dims = node.attributes.get_int("batch_dims", 0)
        count = _dim(indices, -1) or 1
        sizes = [_dim(data, batch_dims + k) for k in range(count)]
        return min((size for size in sizes if size is not None), default=None)
    if node.op_type == "OneHot" and index == 0:
        depth = _constant(node.inputs[1])
        return int(depth.ravel()[0]) if depth is not None and depth.size == 1 else None
    return None


def _dim(value: ir.Value | None, axis: int) -> int | None:
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def _constant(value: ir.Value | None) -> _Array | None:
    try:
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
    except ValueError:
        return None  # A Constant with other attributes than one of its own; whether it is valid, its execution tells.
    return None if tensor is None else tensor.numpy()


def _random(dtype: ir.DataType, shape: tuple[int, ...], use: _Use, rng: np.random.Generator) -> _Array:
    if dtype == ir.DataType.BOOL:
        return _mask(shape, rng)
    numpy_dtype = dtype.numpy()
    if dtype.is_floating_point():
        if use.counts:
            return np.asarray(rng.integers(1, _DEFAULT_LIMIT, shape)).astype(numpy_dtype)
        values = rng.standard_normal(shape)
        return np.asarray(np.abs(values) + 0.25 if use.positive else values).astype(numpy_dtype)
    if not dtype.is_integer():
        return np.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(numpy_dtype)
    if use.ends is not None and len(shape) == 1 and shape[0] > 0 and not use.limits:
        ends = np.sort(rng.integers(0, use.ends + 1, shape))
        ends[-1] = use.ends
        return ends.astype(numpy_dtype)
    limit = max(min(use.limits, default=_DEFAULT_LIMIT), use.least + 1)
    allowed = np.array([k for k in range(use.least, limit) if k not in use.forbidden] or [use.least])
    integers = np.asarray(rng.choice(allowed, shape))
    ignored = [k for k in sorted(use.ignored) if not (use.unguarded and not 0 <= k < limit)]
    if ignored and dtype.is_signed():
        chosen = np.asarray(rng.random(shape) < _SHARE_IGNORED)
        # A mean over nothing would be 0 / 0.
        chosen.flat[:1] &= not chosen.all()
        integers = np.where(chosen, rng.choice(ignored, shape), integers)
    return integers.astype(numpy_dtype)


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> _Array:
    """Return random booleans, with both values in every row that has room: a softmax over nothing would be NaN."""
    values = np.asarray(rng.random(shape) < 0.5)
    if len(shape) > 1 and shape[-1] > 1:
        count = values.sum(axis=-1, keepdims=True)
        at = rng.integers(0, shape[-1], (*shape[:-1], 1))
        flipped = np.take_along_axis(values, at, -1) ^ ((count == 0) | (count == shape[-1]))
        np.put_along_axis(values, at, flipped, -1)
    return values


def _fill_lengths(graph: ir.Graph, feeds: dict[str, _Array], rng: np.random.Generator) -> None:
    """Choose lengths of labels and steps that are aligned, as in CTC losses, so that an alignment exists."""
    for node in graph.all_nodes():
        operator = _operator(node)
        if operator is None or operator.alignment is None:
            continue
        alignment, inputs = operator.alignment, _named_inputs(node, operator)
        steps, targets = _dim(inputs.get(alignment.scores), 0), inputs.get(alignment.labels)
        if steps is None or targets is None or targets.shape is None:
            continue
        input_lengths, target_lengths = (_origin(inputs.get(name)) for name in (alignment.steps, alignment.lengths))
        shortest = (steps + 1) // 2
        if input_lengths in feeds:
            feed = feeds[input_lengths]
            feeds[input_lengths] = rng.integers(shortest, steps + 1, feed.shape).astype(feed.dtype)
        if target_lengths in feeds:
            feed = feeds[target_lengths]
            if len(targets.shape) == 1 and feed.size:
                joined = _dim(targets, 0) or 0
                cuts = np.sort(rng.integers(0, joined + 1, feed.size - 1))
                lengths = np.diff(np.concatenate([[0], cuts, [joined]]))
            else:
                # L labels need L steps, and one more between each two equal ones.
                longest = min(_dim(targets, 1) or 0, (shortest + 1) // 2)
                lengths = rng.integers(0, longest + 1, feed.shape)
            feeds[target_lengths] = lengths.reshape(feed.shape).astype(feed.dtype)


def _origin(value: ir.Value | None) -> str:
    """Return the name of the value that `value` only rearranges."""
    while value is not None and (node := value.producer()) is not None and node.op_type in _KEEPS_FIRST:
        value = node.inputs[0]
    return "" if value is None else str(value.name)
