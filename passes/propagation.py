"""Types, sizes and small values that follow from a graph: shape inference that folds constants as it goes.

onnx's own inference does not evaluate what exporters compute of sizes, such as remainders and comparisons, and takes
the first of two symbols that are broadcast. This one follows sizes through such arithmetic, whole or in part: a vector
may be (2, T, unknown). What it has no rule for stays unknown, and is asked of onnx (shapes.py).

A size is a number, the name of a dimension, or None. The elements of a value that is followed are the same, or
booleans or floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Size: TypeAlias = "int | str | None"
Sizes: TypeAlias = "list[Size]"
Elements: TypeAlias = "npt.NDArray[np.object_]"

_MOST_ELEMENTS = 64
"""Sizes have no more elements; what has more is data."""
_FREE = frozenset({"", "?", "-1", "*", "None", "none"})
"""What exporters call dimensions of which they know nothing: two of them need not be equal."""
_WHOLE = 2**31 - 1
"""An end of a slice that is no smaller means all of it."""
_INT64, _BOOL = ir.DataType.INT64, ir.DataType.BOOL


class Unknown(Exception):
    """A rule does not know what a node gives."""


Asked: TypeAlias = "Mapping[ir.Value, tuple[ir.DataType | None, Sizes | None]]"
"""What is known from elsewhere of values that there is no rule for."""


class Facts:
    """What is known of the values of a model.

    Args:
        model: the model, which stays as it is.
        asked: what others say of values that there are no rules for.

    Attributes:
        dtypes: value -> its element type.
        shapes: value -> its sizes; those of unknown rank are left out. A size that nothing is known of has a name that
            nothing else has.
        elements: value -> its elements, where some of them are known.
        invented: the names that the model does not have.
    """

    def __init__(self, model: ir.Model, asked: Asked | None = None) -> None:
        self.dtypes: dict[ir.Value, ir.DataType] = {}
        self.shapes: dict[ir.Value, Sizes] = {}
        self.elements: dict[ir.Value, Elements] = {}
        self.invented: set[str] = set()
        self._asked: Asked = asked or {}
        graphs = list(model.graphs())
        values = [v for graph in graphs for v in (*graph.inputs, *(o for node in graph for o in node.outputs))]
        self._taken = {d.value for v in values if v.shape is not None for d in v.shape if isinstance(d, ir.SymbolicDim)}
        self._taken |= {s for _, sizes in self._asked.values() for s in sizes or () if isinstance(s, str)}
        self._read(model.graph)

    def constant(self, value: ir.Value | None) -> npt.NDArray[Any] | None:
        """Return the elements of a value in its type, where all of them are known."""
        if value is None:
            return None
        elements, dtype = self.elements.get(value), self.dtypes.get(value)
        if elements is None or dtype is None or any(e is None or isinstance(e, str) for e in elements.flat):
            return None
        return elements.astype(dtype.numpy())

    def _read(self, graph: ir.Graph) -> None:
        """Find out what follows in a graph, and in those within it, from what is known around it."""
        for value in graph.inputs:
            self._note(value, None, None)
        for value in graph.initializers.values():
            self._initialize(value)
        for node in graph:
            for branch in _graphs(node):
                self._read(branch)
            try:
                found = results(self, node)
            except Unknown:
                found = []
            for index, value in enumerate(node.outputs):
                dtype, sizes, elements = found[index] if index < len(found) else (None, None, None)
                self._note(value, dtype, sizes, node.op_type not in AMBIGUOUS)
                if elements is not None and elements.size <= _MOST_ELEMENTS:
                    self.elements[value] = elements

    def _initialize(self, value: ir.Value) -> None:
        tensor = value.const_value
        if tensor is None:
            self._note(value, None, None)
            return
        self._note(value, tensor.dtype, list(tensor.shape.numpy()))
        # Floats of a rank may train, and sizes are integers.
        followed = tensor.dtype != ir.DataType.STRING and (
            not tensor.dtype.is_floating_point() or not len(tensor.shape)
        )
        if followed and tensor.size <= _MOST_ELEMENTS and not value.is_graph_input():
            self.elements[value] = _objects(tensor.numpy())

    def _note(self, value: ir.Value, dtype: ir.DataType | None, sizes: Sizes | None, joins: bool = True) -> None:
        """Note what a rule says of a value; where it says nothing, what the model does, or others do."""
        asked = self._asked.get(value, (None, None))
        given = asked[1] if value.shape is None else _declared(value.shape)
        if sizes is None:
            sizes = given
        elif given is not None and len(given) == len(sizes) and joins:
            sizes = [b if a is None else a for a, b in zip(sizes, given, strict=True)]
        if sizes is not None:
            self.shapes[value] = [self._invent() if size is None else size for size in sizes]
        dtype = dtype or value.dtype or asked[0]
        if dtype is not None:
            self.dtypes[value] = dtype

    def _invent(self) -> str:
        name = f"size_{len(self.invented)}"
        while name in self._taken:
            name += "_"
        self.invented.add(name)
        return name


AMBIGUOUS = frozenset({"Einsum", "PRelu"})
"""Operators whose outputs onnx, and so exporters, give the sizes of one operand."""

_Result: TypeAlias = "tuple[ir.DataType | None, Sizes | None, Elements | None]"


def _declared(shape: ir.Shape) -> Sizes:
    """Return the sizes of a declared shape: what is no name and no size is free."""
    return [size_of(dim) for dim in shape]


def size_of(dim: object) -> Size:
    """Return what a dimension of a model says of its size."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    name = getattr(dim, "value", None)
    return name if isinstance(name, str) and name not in _FREE else None


def _graphs(node: ir.Node) -> Iterable[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def results(facts: Facts, node: ir.Node) -> list[_Result]:
    """Return what is known of a node's outputs.

    Raises:
        Unknown: there is no rule for the operator, or the rule does not know.
    """
    operands = _Operands(facts, node)
    if node.domain == "com.microsoft" and node.op_type in LIKE_INPUT:
        like = LIKE_INPUT[node.op_type]
        return [(operands.dtype(like), [*operands.sizes(like)], None)]
    rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None:
        raise Unknown
    return rule(operands)


class _Operands:
    """A node with what is known of its inputs."""

    def __init__(self, facts: Facts, node: ir.Node) -> None:
        self.facts, self.node = facts, node

    def value(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def dtype(self, index: int = 0) -> ir.DataType | None:
        value = self.value(index)
        return None if value is None else self.facts.dtypes.get(value)

    def sizes(self, index: int = 0) -> Sizes:
        value = self.value(index)
        if value is None or value not in self.facts.shapes:
            raise Unknown
        return self.facts.shapes[value]

    def elements(self, index: int) -> Elements | None:
        value = self.value(index)
        return None if value is None else self.facts.elements.get(value)

    def all_elements(self) -> list[Elements] | None:
        found = [self.elements(k) for k in range(len(self.node.inputs))]
        return None if any(one is None for one in found) else [one for one in found if one is not None]

    def ints(self, index: int) -> list[int]:
        """The elements of an input that are all known."""
        array = self.facts.constant(self.value(index))
        if array is None:
            raise Unknown
        return [int(n) for n in array.flat]

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.node.attributes.get(name)
        if found is None:
            return default
        if found.is_ref():
            raise Unknown
        return list(found.value) if isinstance(found.value, (tuple, list)) else found.value

    def axes(self, index: int = 1) -> list[int] | None:
        """The axes that an attribute or an input says; None where neither does."""
        axes = self.attribute("axes")
        if axes is not None:
            return [int(axis) for axis in axes]
        return None if self.value(index) is None else self.ints(index)


LIKE_INPUT = {
    **dict.fromkeys(("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasSoftmax", "Scale", "ScaledSum"), 0),
    **dict.fromkeys(("ReluGrad", "LeakyReluGrad", "SigmoidGrad", "TanhGrad"), 0),
    **dict.fromkeys(("GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX"), 0),
    **dict.fromkeys(("SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13", "DropoutGrad"), 0),
    **dict.fromkeys(("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad", "DivGrad"), 1),
}
"""Operators of onnxruntime whose first output has the type and shape of one of their inputs -> which."""

_Rule: TypeAlias = Callable[[_Operands], "list[_Result]"]
RULES: dict[str, _Rule] = {}
"""Operator of the default domain -> what follows for its outputs."""


def _rule(*op_types: str) -> Callable[[_Rule], _Rule]:
    def put(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return put


# Elements


def _objects(array: npt.ArrayLike) -> Elements:
    given = np.asarray(array)
    found = np.empty(given.shape, object)
    for index in np.ndindex(given.shape):
        element = given[index]
        found[index] = element.item() if given.dtype.kind in "biu" else element
    return found


def _elementwise(function: Callable[..., Any], *operands: Elements | None) -> Elements | None:
    if any(operand is None for operand in operands):
        return None
    try:
        return np.asarray(np.frompyfunc(function, len(operands), 1)(*operands), object)
    except (ValueError, TypeError, ArithmeticError):
        return None


def _numeric(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of two numbers that is unknown of others."""
    return lambda a, b: None if a is None or b is None or isinstance(a, str) or isinstance(b, str) else function(a, b)


def _added(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return a if b == 0 else b if a == 0 else None
    return None if a is None or b is None else a + b


def _subtracted(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return 0 if a == b else a if b == 0 else None
    return None if a is None or b is None else a - b


def _multiplied(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return 0 if a == 0 or b == 0 else a if b == 1 else b if a == 1 else None
    return None if a is None or b is None else a * b


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, str):
        return a if b == 1 else None
    if a is None or b is None or isinstance(b, str) or b == 0:
        return None
    if isinstance(a, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return a / b


def _remainder(a: Any, b: Any) -> Any:
    return a % b if isinstance(a, int) and isinstance(b, int) and b != 0 else None


def _equal(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        other = b if isinstance(a, str) else a
        # A size is never negative.
        return True if a == b else False if isinstance(other, int) and other < 0 else None
    return None if a is None or b is None else bool(a == b)


def _less(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        if a == b or (isinstance(b, int) and b <= 0):
            return False
        return True if isinstance(a, int) and a < 0 else None
    return None if a is None or b is None else bool(a < b)


def _extreme(a: Any, b: Any, *, largest: bool) -> Any:
    if a == b:
        return a
    smaller = _less(a, b)
    return None if smaller is None else b if smaller == largest else a


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    if condition is None:
        return a if a == b and a is not None else None
    return a if condition else b


def _negated(a: Any) -> Any:
    return None if a is None else not a


def _both(a: Any, b: Any) -> Any:
    return False if a is False or b is False else None if a is None or b is None else bool(a and b)


def _either(a: Any, b: Any) -> Any:
    return True if a is True or b is True else None if a is None or b is None else bool(a or b)


_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Equal": _equal,
    "Less": _less,
    "Greater": lambda a, b: _less(b, a),
    "GreaterOrEqual": lambda a, b: _negated(_less(a, b)),
    "LessOrEqual": lambda a, b: _negated(_less(b, a)),
    "And": _both,
    "Or": _either,
    "Xor": _numeric(lambda a, b: bool(a) != bool(b)),
}
_COMPUTED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": _added,
    "Sub": _subtracted,
    "Mul": _multiplied,
    "Div": _divided,
    "Mod": _remainder,
    "Max": lambda a, b: _extreme(a, b, largest=True),
    "Min": lambda a, b: _extreme(a, b, largest=False),
    "Sum": _added,
}
_OF_ONE: Mapping[str, Callable[[Any], Any]] = {
    "Identity": lambda a: a,
    "Neg": lambda a: None if a is None or isinstance(a, str) else -a,
    "Abs": lambda a: a if a is None or isinstance(a, str) else abs(a),
    "Not": _negated,
    "Floor": lambda a: None if a is None else type(a)(np.floor(a)),
    "Ceil": lambda a: None if a is None else type(a)(np.ceil(a)),
    "Sqrt": lambda a: None if a is None else np.sqrt(a),
}


# Sizes


def broadcast(*shapes: Sequence[Size]) -> Sizes:
    """Return the sizes that shapes are broadcast to, None where it is not known which of two sizes is 1."""
    found: Sizes = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, size in enumerate(shape, len(found) - len(shape)):
            before = found[axis]
            if before == 1 or (isinstance(size, int) and size != 1):
                found[axis] = size
            elif size != 1 and not isinstance(before, int) and size != before:
                found[axis] = None
    return found


def _product(sizes: Iterable[Size]) -> tuple[int, list[str]] | None:
    """Return a product as a number and the names it is multiplied by; None where a factor is unknown."""
    number, names = 1, []
    for size in sizes:
        if size is None:
            return None
        if isinstance(size, int):
            number *= size
        else:
            names.append(size)
    return number, sorted(names)


def _size(sizes: Iterable[Size]) -> Size:
    """A product of sizes as one size, where it is a number or a name."""
    found = _product(sizes)
    if found is None:
        return None
    number, names = found
    return number if number == 0 or not names else names[0] if number == 1 and len(names) == 1 else None


def _quotient(whole: Sequence[Size], part: Sequence[Size]) -> Size:
    """What a product of sizes is divided by another."""
    left, others = [*whole], []
    for size in part:
        if size in left and size is not None:
            left.remove(size)
        else:
            others.append(size)
    above, below = _product(left), _product(others)
    if above is None or below is None or not below[0]:
        return None
    names = [*above[1]]
    for name in below[1]:
        if name not in names:
            return None
        names.remove(name)
    number, rest = divmod(above[0], below[0])
    if rest:
        return None
    return number if not names else names[0] if number == 1 and len(names) == 1 else None


def _as_sizes(elements: Elements | None) -> Sizes:
    """The sizes that a vector holds."""
    if elements is None or elements.ndim != 1:
        raise Unknown
    return [None if isinstance(e, (int, np.integer)) and e < 0 else e for e in elements]


def _length(operands: _Operands, index: int) -> int:
    """The known length of a vector of sizes."""
    elements = operands.elements(index)
    length = elements.size if elements is not None else operands.sizes(index)[0]
    if not isinstance(length, int):
        raise Unknown
    return length


def _normal(axis: int, rank: int) -> int:
    if not -rank <= axis < max(rank, 1):
        raise Unknown
    return axis % max(rank, 1)


# Operators


@_rule(
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Clip", "Cos", "Cosh"),
    *("CumSum", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "LRN"),
    *("LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization", "Mish", "Neg", "Not"),
    *("Reciprocal", "Relu", "ReverseSequence", "Round", "Scatter", "ScatterElements", "ScatterND", "Selu", "Shrink"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu"),
    *("Trilu", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "Swish"),
)
def _like_first(operands: _Operands) -> list[_Result]:
    function = _OF_ONE.get(operands.node.op_type)
    elements = None if function is None else _elementwise(function, operands.elements(0))
    return [(operands.dtype(), [*operands.sizes()], elements)]


@_rule("IsNaN", "IsInf")
def _tests(operands: _Operands) -> list[_Result]:
    return [(_BOOL, [*operands.sizes()], None)]


@_rule("Dropout")
def _dropout(operands: _Operands) -> list[_Result]:
    return [(operands.dtype(), [*operands.sizes()], None), (_BOOL, [*operands.sizes()], None)]


@_rule("BatchNormalization")
def _batch_normalization(operands: _Operands) -> list[_Result]:
    found: list[_Result] = [(operands.dtype(), [*operands.sizes()], None)]
    return found + [(operands.dtype(3), [*operands.sizes(3)], None) for _ in operands.node.outputs[1:3]]


@_rule("LayerNormalization")
def _layer_normalization(operands: _Operands) -> list[_Result]:
    sizes = operands.sizes()
    axis = _normal(operands.attribute("axis", -1), len(sizes))
    kept = [*sizes[:axis], *[1] * (len(sizes) - axis)]
    stash = ir.DataType(operands.attribute("stash_type", 1))
    return [(operands.dtype(), [*sizes], None), (stash, kept, None), (stash, [*kept], None)]


@_rule("Cast")
def _cast(operands: _Operands) -> list[_Result]:
    dtype = ir.DataType(operands.attribute("to"))
    return [(dtype, [*operands.sizes()], _elementwise(_caster(dtype), operands.elements(0)))]


@_rule("CastLike")
def _cast_like(operands: _Operands) -> list[_Result]:
    dtype = operands.dtype(1)
    elements = None if dtype is None else _elementwise(_caster(dtype), operands.elements(0))
    return [(dtype, [*operands.sizes()], elements)]


def _caster(dtype: ir.DataType) -> Callable[[Any], Any]:
    def cast(element: Any) -> Any:
        if element is None or isinstance(element, str):
            return element if dtype in (_INT64, ir.DataType.INT32) else None
        if dtype == _BOOL:
            return bool(element)
        if dtype in (_INT64, ir.DataType.INT32):
            return int(element)
        return dtype.numpy().type(element) if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else None

    return cast


@_rule(*_COMPUTED, "Pow", "Mean", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "PRelu")
def _arithmetic(operands: _Operands) -> list[_Result]:
    count = len(operands.node.inputs)
    sizes = broadcast(*(operands.sizes(k) for k in range(count)))
    function, given = _COMPUTED.get(operands.node.op_type), operands.all_elements()
    elements = None
    if function is not None and given and not operands.attribute("fmod", 0):
        elements = given[0]
        for other in given[1:]:
            elements = None if elements is None else _elementwise(function, elements, other)
    return [(operands.dtype(), sizes, elements)]


@_rule(*_COMPARED)
def _comparison(operands: _Operands) -> list[_Result]:
    sizes = broadcast(operands.sizes(0), operands.sizes(1))
    function = _COMPARED[operands.node.op_type]
    return [(_BOOL, sizes, _elementwise(function, operands.elements(0), operands.elements(1)))]


@_rule("Where")
def _where(operands: _Operands) -> list[_Result]:
    sizes = broadcast(*(operands.sizes(k) for k in range(3)))
    elements = _elementwise(_chosen, *(operands.elements(k) for k in range(3)))
    return [(operands.dtype(1), sizes, elements)]


@_rule("Constant")
def _constant(operands: _Operands) -> list[_Result]:
    array: npt.NDArray[Any] | None = None
    for name, attribute in operands.node.attributes.items():
        if attribute.is_ref():
            raise Unknown
        if name == "value":
            tensor = attribute.as_tensor()
            if tensor.size > _MOST_ELEMENTS or tensor.dtype == ir.DataType.STRING:
                return [(tensor.dtype, list(tensor.shape.numpy()), None)]
            return [(tensor.dtype, list(tensor.shape.numpy()), _objects(tensor.numpy()))]
        if name in ("value_int", "value_ints"):
            array = np.asarray(attribute.value, np.int64)
        elif name in ("value_float", "value_floats"):
            array = np.asarray(attribute.value, np.float32)
    if array is None:
        raise Unknown
    return [(ir.DataType.from_numpy(array.dtype), list(array.shape), _objects(array))]


@_rule("ConstantOfShape")
def _constant_of_shape(operands: _Operands) -> list[_Result]:
    given = operands.node.attributes.get("value")
    number = np.zeros((), np.float32) if given is None else given.as_tensor().numpy().reshape(())
    dtype = ir.DataType.FLOAT if given is None else given.as_tensor().dtype
    elements = operands.elements(0)
    sizes: Sizes = _as_sizes(elements) if elements is not None else [None] * _length(operands, 0)
    known = [size for size in sizes if isinstance(size, int)]
    filled = None
    if len(known) == len(sizes) and math.prod(known) <= _MOST_ELEMENTS:
        filled = _objects(np.full(known, number))
    return [(dtype, sizes, filled)]


@_rule("Shape")
def _shape(operands: _Operands) -> list[_Result]:
    sizes = operands.sizes()
    part = sizes[slice(operands.attribute("start", 0), operands.attribute("end"))]
    elements = np.empty(len(part), object)
    elements[:] = part
    return [(_INT64, [len(part)], elements)]


@_rule("Size")
def _size_of(operands: _Operands) -> list[_Result]:
    elements = np.empty((), object)
    elements[()] = _size(operands.sizes())
    return [(_INT64, [], elements)]


@_rule("Range")
def _range(operands: _Operands) -> list[_Result]:
    try:
        numbers = [operands.facts.constant(operands.value(k)) for k in range(3)]
        if any(number is None or number.dtype.kind not in "iu" for number in numbers):
            raise Unknown
        array = np.arange(*(int(n.reshape(())) for n in numbers if n is not None), dtype=np.int64)
    except (Unknown, ZeroDivisionError):
        first, last, step = (operands.elements(k) for k in range(3))
        # From 0 on in ones there are as many as the end says.
        ends = all(e is not None and e.size == 1 for e in (first, last, step))
        counts = ends and first is not None and step is not None and first.flat[0] == 0 and step.flat[0] == 1
        name = last.flat[0] if counts and last is not None else None
        return [(operands.dtype(), [name if isinstance(name, str) else None], None)]
    return [(operands.dtype(), [array.size], _objects(array) if array.size <= _MOST_ELEMENTS else None)]


@_rule("Reshape")
def _reshape(operands: _Operands) -> list[_Result]:
    elements = operands.elements(1)
    if elements is None:
        return [(operands.dtype(), [None] * _length(operands, 1), None)]
    whole: Sizes | None = None
    value = operands.value(0)
    if value is not None:
        whole = operands.facts.shapes.get(value)
    keeps = not operands.attribute("allowzero", 0)
    sizes: list[Any] = []
    for axis, size in enumerate(elements.ravel()):
        if keeps and size == 0 and not isinstance(size, str):
            size = whole[axis] if whole is not None and axis < len(whole) else None
        sizes.append(size)
    missing = [axis for axis, size in enumerate(sizes) if isinstance(size, (int, np.integer)) and size < 0]
    unknown = [axis for axis, size in enumerate(sizes) if size is None]
    for axis in missing:
        others = sizes[:axis] + sizes[axis + 1 :]
        sizes[axis] = None if whole is None or unknown else _quotient(whole, others)
    if not missing and len(unknown) == 1 and whole is not None:
        axis = unknown[0]
        sizes[axis] = _quotient(whole, sizes[:axis] + sizes[axis + 1 :])
    return [(operands.dtype(), sizes, _moved(operands, sizes))]


def _moved(operands: _Operands, sizes: Sequence[Any]) -> Elements | None:
    """The elements of the first input in another shape."""
    elements = operands.elements(0)
    known = [size for size in sizes if isinstance(size, int)]
    if elements is None or len(known) < len(sizes) or math.prod(known) != elements.size:
        return None
    return elements.reshape(known)


@_rule("Flatten")
def _flatten(operands: _Operands) -> list[_Result]:
    sizes, axis = operands.sizes(), operands.attribute("axis", 1)
    axis = axis + len(sizes) if axis < 0 else axis
    return [(operands.dtype(), [_size(sizes[:axis]), _size(sizes[axis:])], None)]


@_rule("Unsqueeze")
def _unsqueeze(operands: _Operands) -> list[_Result]:
    sizes, axes = [*operands.sizes()], operands.axes()
    if axes is None:
        raise Unknown
    rank = len(sizes) + len(axes)
    for axis in sorted(_normal(axis, rank) for axis in axes):
        sizes.insert(axis, 1)
    return [(operands.dtype(), sizes, _moved(operands, sizes))]


@_rule("Squeeze")
def _squeeze(operands: _Operands) -> list[_Result]:
    sizes, axes = operands.sizes(), operands.axes()
    if axes is None:
        if any(not isinstance(size, int) for size in sizes):
            raise Unknown
        axes = [axis for axis, size in enumerate(sizes) if size == 1]
    gone = {_normal(axis, len(sizes)) for axis in axes}
    kept = [size for axis, size in enumerate(sizes) if axis not in gone]
    return [(operands.dtype(), kept, _moved(operands, kept))]


@_rule("Transpose")
def _transpose(operands: _Operands) -> list[_Result]:
    sizes = operands.sizes()
    perm = operands.attribute("perm", list(range(len(sizes) - 1, -1, -1)))
    if sorted(perm) != list(range(len(sizes))):
        raise Unknown
    elements = operands.elements(0)
    return [(operands.dtype(), [sizes[axis] for axis in perm], None if elements is None else elements.transpose(perm))]


@_rule("Expand")
def _expand(operands: _Operands) -> list[_Result]:
    elements = operands.elements(1)
    wanted = _as_sizes(elements) if elements is not None else [None] * _length(operands, 1)
    sizes = broadcast(operands.sizes(), wanted)
    known = [size for size in sizes if isinstance(size, int)]
    given = operands.elements(0)
    if given is None or len(known) < len(sizes) or math.prod(known) > _MOST_ELEMENTS:
        return [(operands.dtype(), sizes, None)]
    return [(operands.dtype(), sizes, np.broadcast_to(given, known))]


@_rule("Tile")
def _tile(operands: _Operands) -> list[_Result]:
    elements, sizes = operands.elements(1), operands.sizes()
    if elements is None or elements.size != len(sizes):
        return [(operands.dtype(), [None] * len(sizes), None)]
    return [(operands.dtype(), [_multiplied(a, b) for a, b in zip(sizes, elements, strict=True)], None)]


@_rule("Concat")
def _concat(operands: _Operands) -> list[_Result]:
    shapes = [operands.sizes(k) for k in range(len(operands.node.inputs))]
    axis = _normal(operands.attribute("axis"), len(shapes[0]))
    sizes = [*shapes[0]]
    for shape in shapes[1:]:
        if len(shape) != len(sizes):
            raise Unknown
        for k, size in enumerate(shape):
            if k == axis:
                sizes[k] = _added(sizes[k], size)
            elif not isinstance(sizes[k], int) and size is not None:
                # They are equal: a number says most.
                sizes[k] = size if isinstance(size, int) or sizes[k] is None else sizes[k]
    given = operands.all_elements()
    if given is None and len(sizes) == 1:
        given = [_padded(operands, k, shape) for k, shape in enumerate(shapes)]
        given = None if any(one is None for one in given) else given
    return [(operands.dtype(), sizes, None if given is None else np.concatenate(given, axis))]


def _padded(operands: _Operands, index: int, shape: Sizes) -> Any:
    """The elements of a short vector, unknown ones where nothing is known of it."""
    elements = operands.elements(index)
    length = shape[0]
    if elements is None and isinstance(length, int) and length <= _MOST_ELEMENTS:
        elements = np.full(length, None, object)
    return elements


@_rule("Split")
def _split(operands: _Operands) -> list[_Result]:
    sizes, count = operands.sizes(), len(operands.node.outputs)
    axis = _normal(operands.attribute("axis", 0), len(sizes))
    given, whole = operands.attribute("split"), sizes[axis]
    parts: Sizes
    if given is None and operands.value(1) is not None:
        elements = operands.elements(1)
        parts = [None] * count if elements is None else _as_sizes(elements)
    elif given is not None:
        parts = [*given]
    elif isinstance(whole, int):
        each = -(-whole // count)
        parts = [*[each] * (count - 1), whole - each * (count - 1)]
    else:
        parts = [None] * count
    if len(parts) != count:
        raise Unknown
    results: list[_Result] = []
    elements, begin = operands.elements(0), 0
    for part in parts:
        piece = None
        if elements is not None and isinstance(part, int) and isinstance(begin, int):
            piece = elements.take(range(begin, begin + part), axis)
        begin = _added(begin, part)
        results.append((operands.dtype(), [*sizes[:axis], part, *sizes[axis + 1 :]], piece))
    return results


@_rule("Slice")
def _slice(operands: _Operands) -> list[_Result]:
    sizes, rank = [*operands.sizes()], len(operands.sizes())
    named = operands.attribute("starts")
    if named is not None:
        starts: list[Any] = [*named]
        ends: list[Any] = [*operands.attribute("ends")]
        axes = operands.attribute("axes", list(range(len(starts))))
        steps: list[Any] = [1] * len(starts)
    else:
        given = [operands.elements(k) for k in (1, 2)]
        count = _length(operands, 1)
        starts, ends = ([None] * count if one is None else [*one.ravel()] for one in given)
        axes = list(range(count)) if operands.value(3) is None else operands.ints(3)
        steps_given = operands.elements(4)
        steps = [1] * count if operands.value(4) is None else [None] * count
        steps = steps if steps_given is None else [*steps_given.ravel()]
    cuts = [slice(None)] * rank
    exact = True
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = _normal(axis, rank)
        whole = sizes[axis]
        numbers = all(isinstance(n, (int, np.integer)) for n in (start, end, step))
        if isinstance(whole, int) and numbers and step:
            first, last = int(start), int(end)
            if step < 0 and last < -whole:
                cut = slice(first, None, int(step))
            else:
                cut = slice(first, last, int(step))
            cuts[axis] = cut
            sizes[axis] = len(range(whole)[cut])
        elif start == 0 and step == 1 and (end == whole or (isinstance(end, (int, np.integer)) and end >= _WHOLE)):
            exact = exact and whole is not None
            sizes[axis] = whole
        else:
            sizes[axis], exact = None, False
    elements = operands.elements(0)
    return [(operands.dtype(), sizes, elements[tuple(cuts)] if elements is not None and exact else None)]


@_rule("Gather")
def _gather(operands: _Operands) -> list[_Result]:
    sizes, indices = operands.sizes(0), operands.sizes(1)
    axis = _normal(operands.attribute("axis", 0), len(sizes))
    elements, places = operands.elements(0), operands.facts.constant(operands.value(1))
    taken = None
    if elements is not None and places is not None and elements.shape[axis]:
        inside = (places >= -elements.shape[axis]) & (places < elements.shape[axis])
        taken = np.asarray(elements.take(places, axis), object) if inside.all() else None
        if taken is not None and taken.ndim == 0:
            taken = taken.reshape(())
    return [(operands.dtype(), [*sizes[:axis], *indices, *sizes[axis + 1 :]], taken)]


@_rule("GatherElements")
def _gather_elements(operands: _Operands) -> list[_Result]:
    return [(operands.dtype(), [*operands.sizes(1)], None)]


@_rule("GatherND")
def _gather_nd(operands: _Operands) -> list[_Result]:
    sizes, indices = operands.sizes(0), operands.sizes(1)
    last = indices[-1] if indices else None
    if not isinstance(last, int):
        raise Unknown
    return [(operands.dtype(), [*indices[:-1], *sizes[operands.attribute("batch_dims", 0) + last :]], None)]


@_rule("MatMul")
def _matmul(operands: _Operands) -> list[_Result]:
    a, b = operands.sizes(0), operands.sizes(1)
    if not a or not b:
        raise Unknown
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else []
    return [(operands.dtype(), [*broadcast(a[:-2], b[:-2]), *rows, *columns], None)]


@_rule("Gemm")
def _gemm(operands: _Operands) -> list[_Result]:
    a, b = operands.sizes(0), operands.sizes(1)
    if len(a) != 2 or len(b) != 2:
        raise Unknown
    rows = a[1 if operands.attribute("transA", 0) else 0]
    columns = b[0 if operands.attribute("transB", 0) else 1]
    return [(operands.dtype(), [rows, columns], None)]


@_rule("Einsum")
def _einsum(operands: _Operands) -> list[_Result]:
    left, arrow, output = operands.attribute("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        output = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    shapes = [letter_sizes(term, operands.sizes(k)) for k, term in enumerate(terms)]
    batch = broadcast(*(batch for batch, _ in shapes))
    found: Sizes = []
    for letter in output.replace("...", "."):
        if letter == ".":
            found += batch
        else:
            found += broadcast(*([sizes[letter]] for _, sizes in shapes if letter in sizes))
    return [(operands.dtype(), found, None)]


def letter_sizes(term: str, sizes: Sequence[Size]) -> tuple[Sizes, dict[str, Size]]:
    """Return the sizes that `...` stands for in a term of an Einsum, and those of its letters.

    Raises:
        Unknown: the term has another number of letters.
    """
    letters = term.replace("...", "")
    ahead = len(term.partition("...")[0]) if "..." in term else len(letters)
    count = len(sizes) - len(letters)
    if count < 0 or (count and "..." not in term):
        raise Unknown
    own = [*sizes[:ahead], *sizes[ahead + count :]]
    return [*sizes[ahead : ahead + count]], dict(zip(letters, own, strict=True))


@_rule(*(f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")))
@_rule("ReduceSumSquare")
def _reduce(operands: _Operands) -> list[_Result]:
    keeps = operands.attribute("keepdims", 1)
    value = operands.value(0)
    sizes = None if value is None else operands.facts.shapes.get(value)
    if operands.attribute("axes") is None and operands.value(1) is not None and operands.elements(1) is None:
        if not keeps or sizes is None:
            raise Unknown
        return [(operands.dtype(), [None] * len(sizes), None)]
    axes = operands.axes()
    if not axes:
        if operands.attribute("noop_with_empty_axes", 0):
            return [(operands.dtype(), [*operands.sizes()], None)]
        if not keeps:
            return [(operands.dtype(), [], _reduced(operands))]
        axes = list(range(len(operands.sizes())))
    sizes = operands.sizes()
    gone = {_normal(axis, len(sizes)) for axis in axes}
    kept = [1 if axis in gone else size for axis, size in enumerate(sizes) if keeps or axis not in gone]
    return [(operands.dtype(), kept, _reduced(operands, kept) if len(gone) == len(sizes) else None)]


def _reduced(operands: _Operands, sizes: Sequence[Size] = ()) -> Elements | None:
    """The product, sum or extreme of all elements of the first input."""
    kind = {"Prod": "Mul", "Sum": "Add", "Max": "Max", "Min": "Min"}.get(operands.node.op_type[len("Reduce") :])
    elements = operands.elements(0)
    if kind is None or elements is None or not elements.size:
        return None
    first, *rest = elements.flat
    for other in rest:
        first = _COMPUTED[kind](first, other)
    found = np.empty((), object)
    found[()] = first
    return found.reshape([1] * len(sizes))


@_rule("ArgMax", "ArgMin")
def _arg_extreme(operands: _Operands) -> list[_Result]:
    sizes, keeps = operands.sizes(), operands.attribute("keepdims", 1)
    axis = _normal(operands.attribute("axis", 0), len(sizes))
    return [(_INT64, [*sizes[:axis], *([1] if keeps else []), *sizes[axis + 1 :]], None)]


@_rule("TopK")
def _top_k(operands: _Operands) -> list[_Result]:
    sizes = operands.sizes()
    axis = _normal(operands.attribute("axis", -1), len(sizes))
    count = operands.attribute("k")
    if count is None:
        elements = operands.elements(1)
        count = None if elements is None or elements.size != 1 else elements.flat[0]
    kept = [*sizes[:axis], count, *sizes[axis + 1 :]]
    return [(operands.dtype(), kept, None), (_INT64, [*kept], None)]


@_rule("NonZero")
def _non_zero(operands: _Operands) -> list[_Result]:
    constant = operands.facts.constant(operands.value(0))
    if constant is not None and constant.ndim:
        places = np.stack(np.nonzero(constant)).astype(np.int64)
        return [(_INT64, list(places.shape), _objects(places))]
    return [(_INT64, [max(len(operands.sizes()), 1), None], None)]


@_rule("OneHot")
def _one_hot(operands: _Operands) -> list[_Result]:
    sizes, depth = operands.sizes(), operands.elements(1)
    axis = operands.attribute("axis", -1)
    axis = axis + len(sizes) + 1 if axis < 0 else axis
    count: Any = None if depth is None or depth.size != 1 else depth.flat[0]
    return [(operands.dtype(2), [*sizes[:axis], count, *sizes[axis:]], None)]


@_rule("Pad")
def _pad(operands: _Operands) -> list[_Result]:
    sizes, given = operands.sizes(), operands.attribute("pads")
    if given is None:
        elements = operands.elements(1)
        given = None if elements is None else [*elements.ravel()]
    axes = list(range(len(sizes)))
    if operands.value(3) is not None:
        axes = [_normal(axis, len(sizes)) for axis in operands.ints(3)]
    if given is None or len(given) != 2 * len(axes):
        return [(operands.dtype(), [None] * len(sizes), None)]
    found = [*sizes]
    for k, axis in enumerate(axes):
        found[axis] = _added(found[axis], _added(given[k], given[k + len(axes)]))
    return [(operands.dtype(), found, None)]


@_rule("If")
def _if(operands: _Operands) -> list[_Result]:
    """What both branches agree on, or the one that is known to be taken."""
    branches = [operands.node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    condition = operands.facts.constant(operands.value(0))
    if condition is not None:
        branches = branches[:1] if condition.reshape(()) else branches[1:]
    facts, found = operands.facts, []
    for outputs in zip(*(branch.outputs for branch in branches), strict=True):
        shapes = [facts.shapes.get(value) for value in outputs]
        known = [shape for shape in shapes if shape is not None]
        sizes: Sizes | None = None
        if len(known) == len(shapes) and len({len(shape) for shape in known}) == 1:
            sizes = [dims[0] if len(set(dims)) == 1 else None for dims in zip(*known, strict=True)]
        elements = facts.elements.get(outputs[0]) if len(branches) == 1 else None
        found.append((facts.dtypes.get(outputs[0]), sizes, elements))
    return found
