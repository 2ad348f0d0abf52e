"""Ways to rewrite a graph: the same results by other operators, and views that change nothing.

`respelled` does so to some nodes of a model, puts pieces of it into functions, and changes its opset.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
Change = tuple[str, int]
"""A rule, and which of the nodes that it has a way for."""

OPSETS = (16, 17, 18, 19, 20, 21, 22, 23)
"""Those that a graph is converted to; bodies of some operators need 16."""
_LONGEST_PIECE = 6
"""How many nodes a function has at most."""


class _Facts:
    """What is known about the values of a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self.types: dict[str, int] = {}
        self.shapes: dict[str, list[int | None]] = {}
        self.constants: dict[str, Array] = {}
        self.made_by = {name: node for node in model.graph.node for name in node.output if name}
        self.opset = next(entry.version for entry in model.opset_import if not entry.domain)
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            given = value.type.tensor_type
            self.types[value.name] = given.elem_type
            if given.HasField("shape"):
                self.shapes[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in given.shape.dim]
        for tensor in model.graph.initializer:
            self.types[tensor.name], self.shapes[tensor.name] = tensor.data_type, list(tensor.dims)
            self.constants[tensor.name] = numpy_helper.to_array(tensor)
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)


class _Writer:
    """A node of a graph, and its replacement."""

    def __init__(self, facts: _Facts, node: onnx.NodeProto, rng: random.Random, prefix: str) -> None:
        self.facts, self.node, self.rng, self.prefix = facts, node, rng, prefix
        self.types, self.shapes = facts.types, facts.shapes
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    @property
    def out(self) -> str:
        return str(self.node.output[0])

    @property
    def is_float(self) -> bool:
        return self.types.get(self.out) in _FLOATS

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        name = out or f"{self.prefix}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def ints(self, *values: int) -> str:
        return self.array(np.asarray(values, np.int64))

    def number(self, value: float) -> str:
        return self.like(self.out, value)

    def like(self, name: str, value: Any) -> str:
        """A constant of the type of a value."""
        return self.array(np.asarray(value, helper.tensor_dtype_to_np_dtype(self.types[name])))

    def array(self, array: Array, *, as_node: bool | None = None) -> str:
        name = f"{self.prefix}_constant_{len(self.nodes)}_{len(self.initializers)}"
        tensor = numpy_helper.from_array(array, name)
        if self.rng.random() < 0.5 if as_node is None else not as_node:
            self.initializers.append(tensor)
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def constant(self, name: str) -> Array | None:
        return self.facts.constants.get(name)

    def made_by(self, name: str) -> onnx.NodeProto | None:
        return self.facts.made_by.get(name)

    def made_of(self, name: str, kind: str) -> str | None:
        """The first input of the node that makes a value, if it is of a kind."""
        made = self.made_by(name)
        return None if made is None or made.op_type != kind or made.domain else str(made.input[0])

    def sizes(self, name: str) -> list[int] | None:
        """The shape of a value, if it is all known."""
        shape = self.shapes.get(name)
        return None if shape is None or any(n is None for n in shape) else [n for n in shape if n is not None]

    def rank(self, name: str) -> int | None:
        return None if name not in self.shapes else len(self.shapes[name])

    def attribute(self, name: str, default: Any) -> Any:
        found = next((a for a in self.node.attribute if a.name == name), None)
        return default if found is None else helper.get_attribute_value(found)

    def axes(self) -> list[int] | None:
        """The axes of a reduction, from 0 on; None where they are not known."""
        shape = self.shapes.get(self.node.input[0])
        given = self.attribute("axes", None)
        if len(self.node.input) > 1:
            array = self.constant(self.node.input[1])
            given = None if array is None else [int(axis) for axis in array]
        if shape is not None and not given and not self.attribute("noop_with_empty_axes", 0):
            # With an input that is no constant the axes are some that are not known.
            return list(range(len(shape))) if given is not None or len(self.node.input) < 2 else None
        return None if shape is None or given is None else [axis % len(shape) for axis in given]

    def keeps(self) -> int:
        return int(self.attribute("keepdims", 1))

    def reduced(
        self, kind: str, axes: Sequence[int], keepdims: int, x: str | None = None, out: str | None = None
    ) -> str:
        """A reduction, of the input of the node if it is not of another value."""
        x = x or self.node.input[0]
        if kind == "ReduceSum" or self.facts.opset >= 18:
            return self.op(kind, x, self.ints(*axes), keepdims=keepdims, out=out)
        return self.op(kind, x, axes=axes, keepdims=keepdims, out=out)


Rule = Callable[[_Writer], str | None]
"""Rewrites a node; None if the rule has no way."""


def _turned_comparison(w: _Writer) -> str:
    other = {"Less": "Greater", "Greater": "Less", "LessOrEqual": "GreaterOrEqual", "GreaterOrEqual": "LessOrEqual"}
    return w.op(other[w.node.op_type], *w.node.input[::-1], out=w.out)


def _turned_branches(w: _Writer) -> str:
    condition, taken, other = w.node.input
    return w.op("Where", w.op("Not", condition), other, taken, out=w.out)


def _square(w: _Writer) -> str | None:
    exponent = w.constant(w.node.input[1])
    if exponent is None or exponent.size != 1 or exponent.item() != 2:
        return None
    return w.op("Mul", w.node.input[0], w.node.input[0], out=w.out)


def _mean_as_sum(w: _Writer) -> str | None:
    axes, sizes = w.axes(), w.shapes.get(w.node.input[0])
    if axes is None or sizes is None or not all(sizes[axis] for axis in axes):
        return None
    count = int(np.prod([sizes[axis] or 0 for axis in axes]))
    total = w.reduced("ReduceSum", axes, w.keeps())
    by_product = w.rng.random() < 0.5
    return w.op("Mul" if by_product else "Div", total, w.number(1 / count if by_product else count), out=w.out)


def _dimensions_apart(w: _Writer) -> str | None:
    axes = w.axes()
    if axes is None:
        return None
    total = w.reduced(w.node.op_type, axes, 1 - w.keeps())
    return w.op("Unsqueeze" if w.keeps() else "Squeeze", total, w.ints(*axes), out=w.out)


def _distributed(w: _Writer) -> str | None:
    for factor, other in (w.node.input, w.node.input[::-1]):
        made = w.made_by(factor)
        if made is not None and made.op_type in ("Add", "Sub"):
            return w.op(made.op_type, *(w.op("Mul", term, other) for term in made.input), out=w.out)
    return None


def _reassociated(w: _Writer) -> str | None:
    for first, last in (w.node.input, w.node.input[::-1]):
        made = w.made_by(first)
        if made is not None and made.op_type == w.node.op_type:
            return w.op(made.op_type, made.input[0], w.op(made.op_type, made.input[1], last), out=w.out)
    return None


def _added_in_turn(w: _Writer) -> str | None:
    total, *rest = w.node.input
    for k, term in enumerate(rest):
        total = w.op("Add", total, term, out=w.out if k == len(rest) - 1 else None)
    return total if rest else None


def _square_as_power(w: _Writer) -> str | None:
    x, y = w.node.input
    return w.op("Pow", x, w.number(2), out=w.out) if x == y else None


def _added_squares(w: _Writer) -> str | None:
    made, axes = w.made_by(w.node.input[0]), w.axes()
    if made is None or axes is None or made.op_type != "Mul" or made.input[0] != made.input[1]:
        return None
    return w.reduced("ReduceSumSquare", axes, w.keeps(), made.input[0], out=w.out)


def _squares_added(w: _Writer) -> str | None:
    axes, (x, *_) = w.axes(), w.node.input
    return None if axes is None else w.reduced("ReduceSum", axes, w.keeps(), w.op("Mul", x, x), out=w.out)


def _inverse_root(w: _Writer) -> str | None:
    root = w.made_of(w.node.input[-1], "Sqrt")
    if root is None:
        return None
    power = w.op("Pow", root, w.like(root, -0.5), out=w.out if w.node.op_type == "Reciprocal" else None)
    return power if w.node.op_type == "Reciprocal" else w.op("Mul", w.node.input[0], power, out=w.out)


def _quotient_as_power(w: _Writer) -> str:
    x, divisor = w.node.input
    return w.op("Mul", x, w.op("Pow", divisor, w.like(divisor, -1)), out=w.out)


def _root_of_inverse(w: _Writer) -> str | None:
    exponent, x = w.constant(w.node.input[1]), w.node.input[0]
    if exponent is None or exponent.size != 1 or abs(exponent.item()) != 0.5:
        return None
    root = w.op("Sqrt", x, out=w.out if exponent.item() > 0 else None)
    return root if exponent.item() > 0 else w.op("Reciprocal", root, out=w.out)


def _product_as_gemm(w: _Writer) -> str | None:
    x, y = w.node.input
    if w.rank(x) != 2 or w.rank(y) != 2:
        return None
    turned = w.rng.choice(("", "A", "B"))
    if turned:
        x, y = (w.op("Transpose", v, perm=[1, 0]) if side == turned else v for v, side in ((x, "A"), (y, "B")))
        return w.op("Gemm", x, y, out=w.out, **{f"trans{turned}": 1})
    return w.op("Gemm", x, y, out=w.out)


def _gemm_as_product(w: _Writer) -> str | None:
    x, y, *more = w.node.input
    x, y = (
        w.op("Transpose", v, perm=[1, 0]) if w.attribute(f"trans{side}", 0) else v for v, side in ((x, "A"), (y, "B"))
    )
    alpha, beta = (w.attribute(name, 1.0) for name in ("alpha", "beta"))
    plain = alpha == 1 and not more
    product = w.op("MatMul", x, y, out=w.out if plain else None)
    if alpha != 1:
        product = w.op("Mul", product, w.number(alpha), out=None if more else w.out)
    if more:
        product = w.op("Add", product, more[0] if beta == 1 else w.op("Mul", more[0], w.number(beta)), out=w.out)
    return product


def _product_by_einsum(w: _Writer) -> str | None:
    ranks = [w.rank(name) for name in w.node.input]
    if ranks[0] is None or ranks[0] != ranks[1] or ranks[0] < 2:
        return None
    batch = "abcd"[: ranks[0] - 2] if w.rng.random() < 0.5 else "..." if ranks[0] > 2 else ""
    return w.op("Einsum", *w.node.input, equation=f"{batch}ij,{batch}jk->{batch}ik", out=w.out)


def _turned_product(w: _Writer) -> str | None:
    x, y = w.node.input
    if w.rank(x) != 2 or w.rank(y) != 2:
        return None
    product = w.op("MatMul", w.op("Transpose", y, perm=[1, 0]), w.op("Transpose", x, perm=[1, 0]))
    return w.op("Transpose", product, perm=[1, 0], out=w.out)


def _sum_by_product(w: _Writer) -> str | None:
    axes, x = w.axes(), w.node.input[0]
    rank = w.rank(x)
    size = None if axes is None or rank is None or len(axes) != 1 else w.shapes[x][axes[0]]
    if axes is None or rank is None or not size:
        return None
    if axes == [rank - 1] and rank > 1:
        ones = w.like(x, np.ones((size, 1) if w.keeps() else size))
        return w.op("MatMul", x, ones, out=w.out)
    if axes == [0] and rank == 2:
        return w.op("MatMul", w.like(x, np.ones((1, size) if w.keeps() else size)), x, out=w.out)
    return None


def _sum_by_einsum(w: _Writer) -> str | None:
    axes, x = w.axes(), w.node.input[0]
    rank = w.rank(x)
    if axes is None or rank is None or w.keeps():
        return None
    letters = "abcdefgh"[:rank]
    kept = "".join(letter for axis, letter in enumerate(letters) if axis not in axes)
    return w.op("Einsum", x, equation=f"{letters}->{kept}", out=w.out)


def _is_zero(array: Array | None) -> bool:
    return array is not None and array.dtype.kind == "f" and not array.any()


def _mask_as_product(w: _Writer) -> str | None:
    condition, taken, other = w.node.input
    if _is_zero(w.constant(taken)):
        condition, taken, other = w.op("Not", condition), other, taken
    if not _is_zero(w.constant(other)) or w.shapes.get(taken) != w.shapes.get(w.out):
        return None
    operands = [taken, w.op("Cast", condition, to=w.types[w.out])]
    return w.op("Mul", *w.rng.sample(operands, 2), out=w.out)


def _product_as_mask(w: _Writer) -> str | None:
    for x, factor in (w.node.input, w.node.input[::-1]):
        mask = w.made_of(factor, "Cast")
        if mask is not None and w.types.get(mask) == TensorProto.BOOL:
            return w.op("Where", mask, x, w.number(0), out=w.out)
    return None


def _negated_comparison(w: _Writer) -> str:
    other = {"Less": "GreaterOrEqual", "Greater": "LessOrEqual", "LessOrEqual": "Greater", "GreaterOrEqual": "Less"}
    return w.op("Not", w.op(other[w.node.op_type], *w.node.input), out=w.out)


def _along(w: _Writer) -> int | None:
    """The one axis of a softmax."""
    rank = w.rank(w.node.input[0])
    return None if rank is None else int(w.attribute("axis", -1)) % rank


def _softmax_apart(w: _Writer) -> str | None:
    axis, (x,) = _along(w), w.node.input
    if axis is None:
        return None
    powers = w.op("Exp", w.op("Sub", x, w.reduced("ReduceMax", [axis], 1)))
    return w.op("Div", powers, w.op("ReduceSum", powers, w.ints(axis), keepdims=1), out=w.out)


def _softmax_by_log(w: _Writer) -> str | None:
    axis = _along(w)
    return None if axis is None else w.op("Exp", w.op("LogSoftmax", w.node.input[0], axis=axis), out=w.out)


def _log_softmax_apart(w: _Writer) -> str | None:
    axis, (x,) = _along(w), w.node.input
    if axis is None:
        return None
    if w.rng.random() < 0.5:
        return w.op("Log", w.op("Softmax", x, axis=axis), out=w.out)
    return w.op("Sub", x, w.reduced("ReduceLogSumExp", [axis], 1), out=w.out)


def _sigmoid_apart(w: _Writer) -> str:
    powers = w.op("Exp", w.op("Neg", w.node.input[0]))
    return w.op("Reciprocal", w.op("Add", w.number(1), powers), out=w.out)


def _view_as_reshape(w: _Writer) -> str | None:
    sizes = w.sizes(w.out)
    return None if sizes is None else w.op("Reshape", w.node.input[0], w.ints(*sizes), out=w.out)


def _expanded_by_arithmetic(w: _Writer) -> str | None:
    sizes = w.sizes(w.out)
    if sizes is None:
        return None
    if w.rng.random() < 0.5:
        return w.op("Mul", w.node.input[0], w.like(w.out, np.ones(sizes)), out=w.out)
    return w.op("Add", w.node.input[0], w.like(w.out, np.zeros(sizes)), out=w.out)


def _expanded_by_tile(w: _Writer) -> str | None:
    before, after = w.sizes(w.node.input[0]), w.sizes(w.out)
    if before is None or after is None or not before or len(before) != len(after):
        return None
    return w.op("Tile", w.node.input[0], w.ints(*(b // a for a, b in zip(before, after, strict=True))), out=w.out)


def _constant_anew(w: _Writer) -> str | None:
    """The node with one of its constants made in another way."""
    known = [(k, w.facts.constants[name]) for k, name in enumerate(w.node.input) if name in w.facts.constants]
    if not known:
        return None
    place, array = w.rng.choice(known)
    ways = ["moved"]
    if array.size and array.ndim and (array == array.flat[0]).all():
        ways += ["filled", "expanded"]
    if array.dtype == np.int64 and array.ndim == 1 and array.size > 1:
        ways.append("joined")
    if array.ndim == 0:
        ways.append("squeezed")
    if array.dtype == np.float32:
        ways.append("cast")
    match w.rng.choice(ways):
        case "filled":
            shape = w.ints(*array.shape)
            value = numpy_helper.from_array(array.flat[:1])
            made = w.op("ConstantOfShape", shape, value=value)
        case "expanded":
            made = w.op("Expand", w.array(array.flat[:1].reshape(())), w.ints(*array.shape))
        case "joined":
            made = w.op("Concat", *(w.array(part) for part in np.split(array, array.size)), axis=0)
        case "squeezed":
            made = w.op("Squeeze", w.array(array.reshape(1)), w.ints(0))
        case "cast":
            made = w.op("Cast", w.array(array.astype(np.float64)), to=TensorProto.FLOAT)
        case _:
            made = w.array(array, as_node=w.made_by(w.node.input[place]) is None)
    node = copy.deepcopy(w.node)
    node.input[place] = made
    w.nodes.append(node)
    return w.out


_OF_FLOATS: list[tuple[str, tuple[str, ...], Rule]] = [
    ("commuted", ("Add", "Mul"), lambda w: w.op(w.node.op_type, *w.node.input[::-1], out=w.out)),
    ("sum of a negative", ("Sub",), lambda w: w.op("Add", w.node.input[0], w.op("Neg", w.node.input[1]), out=w.out)),
    ("negative difference", ("Sub",), lambda w: w.op("Neg", w.op("Sub", *w.node.input[::-1]), out=w.out)),
    ("inverse", ("Div",), lambda w: w.op("Mul", w.node.input[0], w.op("Reciprocal", w.node.input[1]), out=w.out)),
    ("square", ("Pow",), _square),
    ("mean as sum", ("ReduceMean",), _mean_as_sum),
    ("dimensions apart", ("ReduceSum", "ReduceMean"), _dimensions_apart),
    ("negative by product", ("Neg",), lambda w: w.op("Mul", w.node.input[0], w.number(-1), out=w.out)),
    ("negative by difference", ("Neg",), lambda w: w.op("Sub", w.number(0), w.node.input[0], out=w.out)),
    ("root by power", ("Sqrt",), lambda w: w.op("Pow", w.node.input[0], w.number(0.5), out=w.out)),
    ("inverse by quotient", ("Reciprocal",), lambda w: w.op("Div", w.number(1), w.node.input[0], out=w.out)),
    ("long sum", ("Add",), lambda w: w.op("Sum", *w.node.input, out=w.out)),
    ("added in turn", ("Sum",), _added_in_turn),
    ("distributed", ("Mul",), _distributed),
    ("reassociated", ("Add", "Mul"), _reassociated),
    ("square as power", ("Mul",), _square_as_power),
    ("added squares", ("ReduceSum",), _added_squares),
    ("squares added", ("ReduceSumSquare",), _squares_added),
    ("inverse root", ("Reciprocal", "Div"), _inverse_root),
    ("root of an inverse", ("Pow",), _root_of_inverse),
    ("quotient as power", ("Div",), _quotient_as_power),
    ("product as Gemm", ("MatMul",), _product_as_gemm),
    ("Gemm as product", ("Gemm",), _gemm_as_product),
    ("product by Einsum", ("MatMul",), _product_by_einsum),
    ("product turned", ("MatMul",), _turned_product),
    ("sum by product", ("ReduceSum",), _sum_by_product),
    ("sum by Einsum", ("ReduceSum",), _sum_by_einsum),
    ("mask as product", ("Where",), _mask_as_product),
    ("product as mask", ("Mul",), _product_as_mask),
    ("softmax apart", ("Softmax",), _softmax_apart),
    ("softmax by its logarithm", ("Softmax",), _softmax_by_log),
    ("logarithm apart", ("LogSoftmax",), _log_softmax_apart),
    ("sigmoid apart", ("Sigmoid",), _sigmoid_apart),
    ("expanded by arithmetic", ("Expand",), _expanded_by_arithmetic),
]
_OF_ANY: list[tuple[str, tuple[str, ...], Rule]] = [
    ("comparison turned", ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _turned_comparison),
    ("branches turned", ("Where",), _turned_branches),
    ("comparison negated", ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _negated_comparison),
    ("view as Reshape", ("Squeeze", "Unsqueeze", "Flatten"), _view_as_reshape),
    ("expanded by Tile", ("Expand",), _expanded_by_tile),
]


def _turned(w: _Writer, x: str) -> str | None:
    rank = len(w.shapes.get(w.out, ()))
    order = list(range(rank))
    w.rng.shuffle(order)
    if rank < 2:
        return None
    return w.op("Transpose", w.op("Transpose", x, perm=order), perm=[order.index(k) for k in range(rank)], out=w.out)


def _flattened(w: _Writer, x: str) -> str | None:
    sizes = w.shapes.get(w.out)
    if not sizes:
        return None
    whole = w.op("Shape", x) if None in sizes else w.ints(*(size or 0 for size in sizes))
    return w.op("Reshape", w.op("Reshape", x, w.ints(-1)), whole, out=w.out)


def _unsqueezed(w: _Writer, x: str) -> str:
    place = w.ints(w.rng.choice([0, -1]))
    return w.op("Squeeze", w.op("Unsqueeze", x, place), place, out=w.out)


AFTER: dict[str, Callable[[_Writer, str], str | None]] = {
    "identity": lambda w, x: w.op("Identity", x, out=w.out),
    "cast to its type": lambda w, x: w.op("Cast", x, to=w.types[w.out], out=w.out),
    "plus 0": lambda w, x: w.op("Add", x, w.number(0), out=w.out),
    "times 1": lambda w, x: w.op("Mul", w.number(1), x, out=w.out),
    "twice negative": lambda w, x: w.op("Neg", w.op("Neg", x), out=w.out),
    "half of twice": lambda w, x: w.op("Mul", w.op("Add", x, x), w.number(0.5), out=w.out),
    "expanded to its shape": lambda w, x: w.op("Expand", x, w.op("Shape", x), out=w.out),
    "turned": _turned,
    "flattened": _flattened,
    "unsqueezed": _unsqueezed,
}
"""Operators that leave a value as it is."""

RULES: dict[str, tuple[tuple[str, ...], Rule]] = {name: (kinds, rule) for name, kinds, rule in (*_OF_FLOATS, *_OF_ANY)}
_FOR_FLOATS = {name for name, *_ in _OF_FLOATS}


ANEW = "constant anew"
"""A node of any kind with one of its constants made in another way."""
FUNCTION, OPSET = "function", "opset"
"""Some nodes in a function, and all of the model in another opset."""


def _written(writer: _Writer, name: str) -> bool:
    """Whether a rule has a way to write the node."""
    node = writer.node
    if any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute):
        return False
    if name == ANEW:
        return bool(node.output[0]) and not node.domain and _constant_anew(writer) is not None
    if node.domain or len(node.output) != 1:
        return False
    if name in AFTER:
        if node.op_type == "Constant" or not writer.is_float:
            return False
        before = copy.deepcopy(node)
        before.output[0] = f"{writer.prefix}_before"
        writer.nodes.append(before)
        return AFTER[name](writer, before.output[0]) is not None
    kinds, rule = RULES[name]
    return node.op_type in kinds and (writer.is_float or name not in _FOR_FLOATS) and rule(writer) is not None


def _with_function(model: onnx.ModelProto, place: int, rng: random.Random, name: str) -> str | None:
    """Puts nodes that follow each other into a function; what they were."""
    nodes = list(model.graph.node)
    first = place % len(nodes)
    piece = nodes[first : first + rng.randint(1, _LONGEST_PIECE)]
    if any(node.domain or any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute) for node in piece):
        return None
    made = {output for node in piece for output in node.output if output}
    rest = [node for node in nodes if not any(node is one for one in piece)]
    read = {value for node in rest for value in _read(node)} | {output.name for output in model.graph.output}
    inputs = list(dict.fromkeys(v for node in piece for v in node.input if v and v not in made))
    outputs = [v for node in piece for v in node.output if v in made and v in read]
    if not outputs:
        return None
    opset = next(entry for entry in model.opset_import if not entry.domain)
    model.functions.append(helper.make_function("pieces", name, inputs, outputs, piece, [opset]))
    if all(entry.domain != "pieces" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("pieces", 1))
    call = helper.make_node(name, inputs, outputs, domain="pieces")
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:first], call, *nodes[first + len(piece) :]])
    return " ".join(node.op_type for node in piece)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node reads, in its branches too."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _read(inner)
            yield from (output.name for output in graph.output)


def _converted(model: onnx.ModelProto, opset: int) -> onnx.ModelProto | None:
    """The model in another opset; None where onnx has no way to it."""
    if model.functions or any(node.domain for node in model.graph.node):
        return None
    try:
        converted = onnx.version_converter.convert_version(model, opset)
        onnx.checker.check_model(converted)
    except Exception:  # It has several, some of C++.
        return None
    converted.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for(converted.opset_import))
    return converted


def respelled(model: onnx.ModelProto, changes: Sequence[Change], seed: int) -> tuple[onnx.ModelProto, list[str]]:
    """The model with the changes that there was a way for, and those, each with its node."""
    changed, done = copy.deepcopy(model), []
    facts: _Facts | None = None
    for k, (name, place) in enumerate(changes):
        # Not by its number, so that a change is the same without those before it.
        rng = random.Random(f"{seed} {name} {place}")
        if name == OPSET:
            opset = rng.choice(OPSETS)
            converted = _converted(changed, opset)
            if converted is not None:
                changed, facts = converted, None
                done.append(f"opset {opset}")
            continue
        if name == FUNCTION:
            piece = _with_function(changed, place, rng, f"piece_{k}")
            if piece is not None:
                facts = None
                done.append(f"function: {piece}")
            continue
        facts = _Facts(changed) if facts is None else facts
        nodes = list(changed.graph.node)
        for step in range(len(nodes)):
            at = (place + step) % len(nodes)
            writer = _Writer(facts, nodes[at], rng, f"respelled_{k}")
            if _written(writer, name):
                done.append(f"{name}: {nodes[at].op_type} {nodes[at].output[0]}")
                nodes[at : at + 1] = writer.nodes
                del changed.graph.node[:]
                changed.graph.node.extend(nodes)
                changed.graph.initializer.extend(writer.initializers)
                facts = None
                break
    return changed, done


EVERY = (*RULES, *AFTER, ANEW, FUNCTION, OPSET)
"""The names of all changes."""


def changes_of(rng: random.Random) -> list[Change]:
    """Some changes of a graph, that of its opset first."""
    changes = [(rng.choice(EVERY), rng.randrange(1000)) for _ in range(rng.choice([2, 3, 4, 6]))]
    return sorted(changes, key=lambda change: change[0] != OPSET)
