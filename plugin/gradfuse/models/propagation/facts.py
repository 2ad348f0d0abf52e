"""What is known of the values of a model, and the rules by which it follows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt
import onnx_ir as ir

from gradfuse.models.propagation.elements import MOST_ELEMENTS, Elements, objects
from gradfuse.models.propagation.sizes import Product, Size, Sizes, Unknown, declared, product, size_of

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
        quotients: one of these names, or one that values other than inputs have -> two products of sizes, as
            `sizes.product` gives them: it is their quotient.
    """

    def __init__(self, model: ir.Model, asked: Asked | None = None) -> None:
        self.dtypes: dict[ir.Value, ir.DataType] = {}
        self.shapes: dict[ir.Value, Sizes] = {}
        self.elements: dict[ir.Value, Elements] = {}
        self.invented: set[str] = set()
        self.quotients: dict[str, tuple[Product, Product]] = {}
        of_inputs = (d for value in model.graph.inputs for d in value.shape or () if isinstance(d, ir.SymbolicDim))
        self._free = {name for dim in of_inputs if isinstance(name := size_of(dim), str)}
        self._asked: Asked = asked or {}
        graphs = list(model.graphs())
        values = [v for graph in graphs for v in (*graph.inputs, *(o for node in graph for o in node.outputs))]
        dims = (d for v in values if v.shape is not None for d in v.shape if isinstance(d, ir.SymbolicDim))
        self._taken = {d.value for d in dims if d.value is not None}
        self._taken |= {s for _, sizes in self._asked.values() for s in sizes or () if isinstance(s, str)}
        self._read(model.graph)

    def names(self) -> set[str]:
        """Return all names of sizes: those that the model declares, and those that it does not have."""
        return self._taken | self.invented

    def contradicts(self, size: Size, declared: Size) -> bool:
        """Whether what a model declares of a size that follows is wrong, other than at some sizes of its inputs."""
        quotient = None if not isinstance(size, str) else self.quotients.get(size)
        return quotient is not None and self._is_other(quotient, declared)

    def _is_other(self, quotient: tuple[Product, Product], declared: Size) -> bool:
        whole, part = quotient
        if declared is None or not self._free.issuperset((*whole[1], *part[1])):
            return False
        if isinstance(declared, str):
            # Another name may be that of the quotient.
            return declared in whole[1] and (part[0], sorted([*part[1], declared])) != whole
        return (part[0] * declared, part[1]) != whole

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
            except Exception:  # Unknown, or whatever a malformed node leads to: its execution tells what is wrong.
                found = []
            for index, value in enumerate(node.outputs):
                dtype, sizes, elements = found[index] if index < len(found) else (None, None, None)
                self._note(value, dtype, sizes, node.op_type not in AMBIGUOUS, self._quotient(node, sizes))
                if elements is not None and elements.size <= MOST_ELEMENTS:
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
        if followed and tensor.size <= MOST_ELEMENTS and not value.is_graph_input():
            with contextlib.suppress(ValueError, TypeError, OSError):  # Of a malformed tensor.
                self.elements[value] = objects(tensor.numpy())

    def _quotient(self, node: ir.Node, sizes: Sizes | None) -> tuple[Product, Product] | None:
        """Return what the size is that is unknown, if a node only divides its input into other axes."""
        if node.op_type not in _DIVIDING or node.domain not in ("", "ai.onnx") or sizes is None:
            return None
        x = node.inputs[0]
        whole = product(self.shapes[x]) if x is not None and x in self.shapes else None
        part = product(size for size in sizes if size is not None)
        return (whole, part) if whole is not None and part is not None and sizes.count(None) == 1 else None

    def _note(
        self,
        value: ir.Value,
        dtype: ir.DataType | None,
        sizes: Sizes | None,
        joins: bool = True,
        quotient: tuple[Product, Product] | None = None,
    ) -> None:
        """Note what a rule says of a value; where it says nothing, what the model does, or others do.

        A size that the rule does not know, but the quotient of two products, is what the model declares unless that
        contradicts it.
        """
        asked = self._asked.get(value, (None, None))
        given = asked[1] if value.shape is None else declared(value.shape)
        of_rule = sizes
        if sizes is None:
            sizes = given
        elif given is not None and len(given) == len(sizes) and joins:
            known = zip(sizes, given, strict=True)
            sizes = [b if a is None and not (quotient and self._is_other(quotient, b)) else a for a, b in known]
        if sizes is not None:
            self.shapes[value] = [self._invent() if size is None else size for size in sizes]
            if quotient is not None:
                unknown = (name for name, given in zip(self.shapes[value], of_rule or (), strict=True) if given is None)
                self.quotients |= {n: quotient for n in unknown if isinstance(n, str) and n not in self._free}
        dtype = dtype or value.dtype or asked[0]
        if dtype is not None:
            self.dtypes[value] = dtype

    def _invent(self) -> str:
        name = f"size_{len(self.invented)}"
        while name in self._taken:
            name += "_"
        self.invented.add(name)
        return name


_DIVIDING = frozenset({"Flatten", "Reshape"})
"""Operators whose output has the elements of the first input, in other axes."""
AMBIGUOUS = frozenset({"Einsum", "PRelu"})
"""Operators whose outputs onnx, and so exporters, give the sizes of one operand."""

Result: TypeAlias = "tuple[ir.DataType | None, Sizes | None, Elements | None]"


def _graphs(node: ir.Node) -> Iterable[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def results(facts: Facts, node: ir.Node) -> list[Result]:
    """Return what is known of a node's outputs.

    Raises:
        Unknown: there is no rule for the operator, or the rule does not know.
    """
    rule = (RULES if node.domain in ("", "ai.onnx") else RULES_OF_DOMAIN.get(node.domain, {})).get(node.op_type)
    if rule is None:
        raise Unknown
    return rule(Operands(facts, node))


class Operands:
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


def length_of(operands: Operands, index: int) -> int:
    """The known length of a vector of sizes."""
    elements = operands.elements(index)
    length = elements.size if elements is not None else operands.sizes(index)[0]
    if not isinstance(length, int):
        raise Unknown
    return length


Rule: TypeAlias = Callable[[Operands], "list[Result]"]
RULES: dict[str, Rule] = {}
"""Operator of the default domain -> what follows for its outputs."""


RULES_OF_DOMAIN: dict[str, dict[str, Rule]] = {}
"""The same for the operators of other domains."""


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    def put(rule: Rule) -> Rule:
        (RULES_OF_DOMAIN.setdefault(domain, {}) if domain else RULES).update(dict.fromkeys(op_types, rule))
        return rule

    return put
