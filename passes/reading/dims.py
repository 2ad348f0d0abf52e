"""Symbolic dimensions of a graph: what they are called, and which of them are proved to be equal.

A dimension that the graph does not know may be 1 at run time, and is then repeated beside a larger one. So two symbols
that meet in an elementwise operation stay two symbols. They are one where an operation fails for different sizes, and
where an operation gives its result the size of its operand.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from gradfuse.passes.algebra import ZERO, Algebra, Poly, TooComplex, number
from gradfuse.passes.reading.layouts import Group, Layouts, dims_in, groups_of_sizes
from gradfuse.passes.reading.nodes import Unreadable

Size = int | str | None
"""A static size, the name of a symbol, or nothing that is known."""

SAME_SHAPE = {
    *("Abs", "Cast", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
    *(
        "Identity",
        "IsInf",
        "IsNaN",
        "LeakyRelu",
        "Log",
        "LogSoftmax",
        "Mish",
        "Neg",
        "Not",
        "Reciprocal",
        "Relu",
        "Round",
        "Selu",
    ),
    *("Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu", "Dropout"),
    *("LayerNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "CumSum", "Trilu"),
}
"""Operators whose first output has the shape of their first input."""
ELEMENTWISE = {
    *("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod"),
    *("Mul", "Or", "Pow", "PRelu", "Sub", "Sum", "Where", "Xor"),
}
"""Operators whose output has the shape that their inputs broadcast to."""
LOSSES = {"SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal", "NegativeLogLikelihoodLoss"}
"""Operators whose second input has a label for each row of scores in the first; Internal is com.microsoft's."""


def rank_of(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def symbol(value: ir.Value, axis: int) -> str | None:
    """The name of a dimension that is a lone symbol, or that the model has no name for."""
    dim = None if value.shape is None else value.shape[axis]
    if not isinstance(dim, ir.SymbolicDim):
        return None
    if dim.value is None:
        return nameless(value, axis)
    return str(dim.value) if str(dim.value).isidentifier() else None


def nameless(value: ir.Value, axis: int) -> str:
    return f"?{value.name}.{axis}"


def live(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes, in order, that an output of the graph depends on: no other is run."""
    needed: set[ir.Node] = set()
    todo = [node for v in graph.outputs if (node := v.producer()) is not None]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        inner = [n for a in node.attributes.values() for g in _graphs(a) for n in g.all_nodes()]
        for value in (v for n in (node, *inner) for v in n.inputs if v is not None):
            if (above := value.producer()) is not None and above.graph is graph:
                todo.append(above)
        outputs = [v for a in node.attributes.values() for g in _graphs(a) for v in g.outputs]
        todo += [above for v in outputs if (above := v.producer()) is not None and above.graph is graph]
    return (node for node in graph if node in needed)


def _graphs(attr: ir.Attr) -> Iterable[ir.Graph]:
    if attr.is_ref() or attr.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return ()
    return (attr.value,) if isinstance(attr.value, ir.Graph) else attr.value


class Sizes:
    """The dimensions of values, by the symbols of those that they come from.

    Args:
        resolve: the name that symbols proved equal to a given one go by.
    """

    def __init__(self, resolve: Callable[[str], str]) -> None:
        self._resolve = resolve
        self._known: dict[ir.Value, list[Size] | None] = {}

    def of(self, value: ir.Value) -> list[Size] | None:
        """The sizes of a value's dimensions; None where its rank is unknown."""
        if value not in self._known:
            self._known[value] = self._stated(value)
        known = self._known[value]
        return None if known is None else [self._resolve(d) if isinstance(d, str) else d for d in known]

    def _stated(self, value: ir.Value) -> list[Size] | None:
        """What the model says of a value that nothing is derived for."""
        if value.shape is None:
            return None
        return [d if isinstance(d, int) else symbol(value, axis) for axis, d in enumerate(value.shape)]

    def read(self, node: ir.Node) -> Iterator[set[str]]:
        """Derives the sizes of a node's outputs, and gives the sets of symbols that are equal wherever it can run."""
        if node.domain and node.op_type not in LOSSES:
            return
        for value, derived in zip(node.outputs, self._derived(node), strict=False):
            if derived is not None:
                self._known[value] = derived
        for sizes in self._equal(node):
            names = {d for d in sizes if isinstance(d, str)}
            if len(names) > 1:
                yield names

    def _inputs(self, node: ir.Node) -> list[list[Size] | None]:
        return [None if v is None else self.of(v) for v in node.inputs]

    def _derived(self, node: ir.Node) -> list[list[Size] | None]:
        inputs = self._inputs(node)
        first = inputs[0] if inputs else None
        op = node.op_type
        if op in SAME_SHAPE or op in ("ScatterElements", "ScatterND"):
            return [first, first] if op == "Dropout" else [first]
        if op in ELEMENTWISE:
            return [self._broadcast(inputs)]
        if op == "Transpose" and first is not None:
            perm = node.attributes.get("perm")
            order = range(len(first))[::-1] if perm is None else perm.as_ints()
            return [[first[axis] for axis in order] if sorted(order) == list(range(len(first))) else None]
        if op == "GatherElements" and len(inputs) > 1:
            return [inputs[1]]
        if op == "MatMul" and len(inputs) == 2:
            a, b = inputs
            if a is not None and b is not None and len(a) > 1 and len(b) > 1:
                batch = self._broadcast([a[:-2], b[:-2]])
                return [None if batch is None else [*batch, a[-2], b[-1]]]
        return []

    def _broadcast(self, operands: Sequence[list[Size] | None]) -> list[Size] | None:
        shapes = [s for s in operands if s is not None]
        if len(shapes) < len(operands):
            return None
        rank = max(map(len, shapes), default=0)
        columns = [[s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0] for axis in range(rank)]
        return [self._common(column) for column in columns]

    def _common(self, sizes: Sequence[Size]) -> Size:
        """The size that dimensions give together, None where that depends on which of them are 1."""
        static = [d for d in sizes if isinstance(d, int) and d != 1]
        others = {d for d in sizes if not isinstance(d, int)}
        if static or not others:
            return static[0] if static else 1
        return next(iter(others)) if len(others) == 1 else None

    def _equal(self, node: ir.Node) -> list[list[Size]]:
        """The dimensions that the operation requires to be equal."""
        inputs = self._inputs(node)
        shapes = [s for s in inputs if s is not None]
        match node.op_type:
            case "MatMul" if len(shapes) == 2 and all(shapes):
                return [[shapes[0][-1], shapes[1][-1] if len(shapes[1]) == 1 else shapes[1][-2]]]
            case "Gemm" if len(shapes) >= 2 and all(len(s) == 2 for s in shapes[:2]):
                turned = [bool(a.as_int()) if (a := node.attributes.get(n)) else False for n in ("transA", "transB")]
                return [[shapes[0][0 if turned[0] else 1], shapes[1][1 if turned[1] else 0]]]
            case "Concat" if len(shapes) == len(node.inputs) and len({len(s) for s in shapes}) == 1:
                rank = len(shapes[0])
                apart = node.attributes["axis"].as_int() % rank if "axis" in node.attributes and rank else None
                return [[s[axis] for s in shapes] for axis in range(rank) if axis != apart]
            case "ScatterElements" if len(inputs) > 2:
                return _paired(inputs[1], inputs[2])
            case "GatherND" if len(shapes) == len(inputs) == 2 and "batch_dims" in node.attributes:
                count = node.attributes["batch_dims"].as_int()
                return _paired(shapes[0][:count], shapes[1][:count])
            case "ScatterND" if len(shapes) == len(inputs) == 3 and shapes[1]:
                data, index, updates = shapes
                depth = index[-1] if isinstance(index[-1], int) else len(data)
                return _paired([*index[:-1], *data[depth:]], updates)
            case loss if loss in LOSSES and len(inputs) > 1 and inputs[0]:
                return _paired([*inputs[0][:1], *inputs[0][2:]], inputs[1])
        return []


def _paired(a: list[Size] | None, b: list[Size] | None) -> list[list[Size]]:
    if a is None or b is None or len(a) != len(b):
        return []
    return [[x, y] for x, y in zip(a, b, strict=True)]


class Dims:
    """The dimensions of the values of one graph as polynomials, equal ones by one name."""

    def __init__(self, layouts: Layouts, graph: ir.Graph, invented: Collection[str]) -> None:
        """`invented`: names of dimensions that say nothing but that the inference of shapes had no better one."""
        self._layouts = layouts
        self._invented = invented
        self._merged: dict[str, str] = {}
        self._known: dict[str, Poly] = {}  # by the text of a dimension
        self._resolved: dict[str, Poly] = {}  # what a dimension was found to be, by its name
        self._within: frozenset[str] = frozenset()  # names in these sizes, or in what they replaced
        self._required: dict[tuple[ir.Value, int], Poly] = {}
        self._taken: set[str] = set()  # names that stand for themselves
        self._merge_names(graph)

    @property
    def _algebra(self) -> Algebra:
        return self._layouts.algebra

    def groups(self, value: ir.Value) -> tuple[Group, ...]:
        """One variable per dimension of the shape that the model states for a value."""
        if value.shape is None:
            raise Unreadable(value.name)
        return groups_of_sizes(
            self._required.get((value, k)) or self._size(d, nameless(value, k)) for k, d in enumerate(value.shape)
        )

    def resolve(self, value: ir.Value, groups: Sequence[Group]) -> None:
        """Note what the dimensions of a value are by its form, where the model calls them by words of their own."""
        for axis, group in enumerate(groups):
            name = symbol(value, axis)
            if name is None or (name := self._name(name)) in self._taken or name in self._resolved:
                continue
            size = self._layouts.extent(group)
            if size != self._algebra.dim(name):
                self.learn({name: size})

    def require(self, value: ir.Value, axis: int, size: Poly) -> bool:
        """Note that a dimension of an input has this size, as an operation demands; False for one of static size."""
        name = symbol(value, axis)
        if name is None:
            return False
        name = self._name(name)
        names = dims_in(self._algebra, [size])
        if name.startswith("?") or self._resolved.keys() & names or name in names | self._within:
            # No name, or one for a number and its multiple: exporters call rows "batch", too.
            self._required[value, axis] = size
        else:
            self.learn({name: size})
        return True

    def learn(self, found: Mapping[str, Poly]) -> None:
        """Note what dimensions are, by their names."""
        self._resolved |= found
        self._within |= dims_in(self._algebra, found.values())
        self._known.clear()
        if not self._within.isdisjoint(found):
            self._resolved = {name: self._resolved_in(size) for name, size in self._resolved.items()}
            self._within = dims_in(self._algebra, self._resolved.values())

    def _resolved_in(self, size: Poly) -> Poly:
        """A size with what dimensions are in the place of their names."""
        algebra, result = self._algebra, ZERO
        for monomial, c in size.terms.items():
            own = ((algebra.atoms[a], e) for a, e in monomial)
            sizes = ((self._resolved.get(str(atom.args[0]), algebra.of(atom)), e) for atom, e in own)
            result = result + algebra.product(algebra.power(one, e) for one, e in sizes).scaled(c)
        return result

    def _merge_names(self, graph: ir.Graph) -> None:
        """Give symbols that are proved to be equal one name, before any form is made.

        They are where an operation would fail otherwise, and where it gives its result the size of its operand.
        Operands of an elementwise operation prove nothing: where one of them has size 1 it is repeated.
        """
        inputs = [(v, axis) for v in graph.inputs for axis in range(rank_of(v))]
        taken = {name for v, axis in inputs if (name := symbol(v, axis)) is not None}
        sizes = Sizes(self._name)
        for node in live(graph):
            for names in sizes.read(node):
                self._merge(names)
            for value in node.outputs:
                # What an exporter calls a dimension here is another word for it, unless it is the word for an input's.
                for axis, size in enumerate(sizes.of(value) or ()):
                    word = symbol(value, axis) if axis < rank_of(value) else None
                    if isinstance(size, str) and word is not None and word not in taken:
                        self._merge({size, word})
        self._taken = {self._name(name) for name in taken}

    def _merge(self, names: Collection[str]) -> None:
        # Names of the model's own come before invented ones and those of nameless dimensions.
        first, *others = sorted({self._name(n) for n in names}, key=lambda n: (n[0] == "?", n in self._invented, n))
        for other in others:
            self._merged[other] = first

    def _name(self, name: str) -> str:
        while name in self._merged:
            name = self._merged[name]
        return name

    def _size(self, dim: int | ir.SymbolicDim, fallback: str) -> Poly:
        if isinstance(dim, int):
            return number(dim)
        return self._size_of_text(fallback if dim.value is None else str(dim.value))

    def _size_of_text(self, text: str) -> Poly:
        known = self._known.get(text)
        if known is None:
            try:
                known = self._size_of_tree(ast.parse(text.strip(), mode="eval").body)
            except (SyntaxError, ValueError, ArithmeticError, TooComplex, RecursionError, MemoryError):
                # The last two are what Python makes of an expression that is nested too deeply.
                known = self._size_of_name(text)
            self._known[text] = known
        return known

    def _size_of_name(self, name: str) -> Poly:
        name = self._name(name)
        if name in self._resolved:
            return self._resolved[name]
        self._taken.add(name)
        return self._algebra.dim(name)

    def _size_of_tree(self, tree: ast.expr) -> Poly:
        match tree:
            case ast.Constant(value=int(n)):
                return number(n)
            case ast.Name(id=name):
                return self._size_of_name(name)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._size_of_tree(left), self._size_of_tree(right)
                if isinstance(op, ast.Add):
                    return a + b
                if isinstance(op, ast.Sub):
                    return a - b
                if isinstance(op, ast.Mult):
                    return self._algebra.mul(a, b)
        raise ValueError
