"""Where the batch of a model is in each value, and what must change to make it dynamic.

Every rule guarantees that each row of a node's results is what the node computes from that row alone. A node that mixes
rows, or that has no rule, is refused by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.dynamic_batch.layouts import Layout, Multiple, Product
from gradfuse.models.inlining import captured_by, graphs_of
from gradfuse.models.propagation import Facts, Size, Sizes

_MOST_RUNS = 256
"""How often, at most, the graph is analysed if a view leaves open which of several axes of 1 is the batch."""


class Refused(Exception):
    """A node fixes the batch, or mixes its rows."""

    def __init__(self, node: ir.Node, what: str) -> None:
        super().__init__(what)
        self.node, self.what = node, what


@dataclasses.dataclass(frozen=True)
class Old:
    """An element of a shape that does not change."""

    index: int


def kept(element: Any, index: int) -> int | Old:
    """Return an element of a shape as it is."""
    return int(element) if isinstance(element, (int, np.integer)) else Old(index)


@dataclasses.dataclass(frozen=True)
class NewShape:
    """An input of a node that becomes another shape.

    Attributes:
        elements: its elements.
    """

    elements: tuple[int | Multiple | Old, ...]


@dataclasses.dataclass(frozen=True)
class Repeated:
    """An input of a node that does not depend on the batch, and is repeated for each row.

    Attributes:
        layout: where the batch will be.
        sizes: the sizes of the input as it is.
        broadcasts: whether the node itself repeats what has one row.
    """

    layout: Layout
    sizes: tuple[Size, ...]
    broadcasts: bool


Edit: TypeAlias = "NewShape | Repeated"
Counts: TypeAlias = "npt.NDArray[np.object_]"


@dataclasses.dataclass
class Followed:
    """What is known about the batch in a graph.

    Attributes:
        graph: the graph of the model.
        facts: types, sizes and small values of the model with the batch that it was exported with.
        batch: that batch.
        layouts: value -> where the batch is; values that do not depend on it are not there.
        counts: value -> its elements, where some are multiples of the batch.
        statistics: values that are made of the whole batch.
        edits: (node, input) -> how it is rewritten.
        attributes: (node, name) -> the integers of an attribute that is set.
        choices: the alternative taken at each open choice, in the order in which the nodes are met.
        ways: how many alternatives there were.
    """

    graph: ir.Graph
    facts: Facts
    batch: int
    layouts: dict[ir.Value, Layout]
    counts: dict[ir.Value, Counts] = dataclasses.field(default_factory=dict)
    statistics: set[ir.Value] = dataclasses.field(default_factory=set)
    edits: dict[tuple[ir.Node, int], Edit] = dataclasses.field(default_factory=dict)
    attributes: dict[tuple[ir.Node, str], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    choices: list[int] = dataclasses.field(default_factory=list)
    ways: list[int] = dataclasses.field(default_factory=list)

    def depends(self, value: ir.Value | None) -> bool:
        return value is not None and (value in self.layouts or value in self.counts or value in self.statistics)

    def follow(self, nodes: Iterable[ir.Node]) -> None:
        """Follow the batch through nodes.

        Raises:
            Refused: one of them fixes it, or mixes rows.
        """
        for node in nodes:
            sources = [*node.inputs, *captured_by(node)]
            call, operator = Call(self, node), (node.domain, node.op_type)
            if not any(self.depends(value) for value in sources):
                if operator in DRAWS:
                    DRAWS[operator](call)
                for graph in graphs_of(node):
                    self.follow(graph)
                continue
            if node.outputs[0] in self.statistics:
                continue
            found = RULES.get(operator)
            if not call.batched() and not graphs_of(node) and operator in SIZED:
                # A shape of the batch that something else becomes is for the rule of what it becomes.
                found = found if node.op_type == "Reshape" and call.value(0) not in self.counts else SIZED[operator]
            if found is None:
                call.refuse("there is no rule for the operator")
            found(call)


def followed(model: ir.Model, facts: Facts, batch: int, inputs: Mapping[ir.Value, int]) -> Followed:
    """Follow the batch through a model.

    Args:
        model: the model, without functions.
        facts: what is known of it, with the batch that it was exported with.
        batch: that batch.
        inputs: input -> the axis of the batch.

    Raises:
        Refused: a node fixes the batch, or mixes rows.
    """
    first: Refused | None = None
    choices: list[int] = []
    for _ in range(_MOST_RUNS):
        run = Followed(model.graph, facts, batch, {value: Layout(axis) for value, axis in inputs.items()})
        run.choices.extend(choices)
        try:
            run.follow(model.graph)
            return run
        except Refused as refused:
            first = first or refused
        choices = run.choices[: len(run.ways)]
        while choices and choices[-1] + 1 >= run.ways[len(choices) - 1]:
            choices.pop()
        if not choices:
            break
        choices[-1] += 1
    assert first is not None
    raise first


Rule: TypeAlias = "Callable[[Call], None]"
RULES: dict[tuple[str, str], Rule] = {}
"""(domain, operator) -> where the batch is in what a node gives that takes some of it."""
SIZED: dict[tuple[str, str], Rule] = {}
"""The same for nodes that take sizes alone."""
DRAWS: dict[tuple[str, str], Rule] = {}
"""The same of operators that draw numbers, for nodes that take nothing of the batch."""


def rule(*op_types: str, domain: str = "", table: dict[tuple[str, str], Rule] = RULES) -> Callable[[Rule], Rule]:
    """Put a function in a table of rules."""

    def put(function: Rule) -> Rule:
        table.update({(domain, op_type): function for op_type in op_types})
        return function

    return put


class Call:
    """A node that depends on the batch, with what is known about its inputs."""

    def __init__(self, known: Followed, node: ir.Node) -> None:
        self.known, self.node = known, node

    def value(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def has(self, index: int) -> bool:
        return self.value(index) is not None

    def layout(self, index: int) -> Layout | None:
        """Return where the batch is in an input; None where the input does not depend on it."""
        value = self.value(index)
        return None if value is None else self.known.layouts.get(value)

    def batched(self) -> list[int]:
        """Return the inputs that the batch is in."""
        return [index for index in range(len(self.node.inputs)) if self.layout(index) is not None]

    def sizes(self, index: int = 0) -> Sizes:
        """Return the sizes of an input with the batch as it was."""
        return self._sizes(self.value(index))

    def rank(self, index: int = 0) -> int:
        return len(self.sizes(index))

    def result_sizes(self, output: int = 0) -> Sizes:
        """Return the sizes of an output with the batch as it was."""
        return self._sizes(self.node.outputs[output])

    def _sizes(self, value: ir.Value | None) -> Sizes:
        sizes = None if value is None else self.known.facts.shapes.get(value)
        if value is None or sizes is None:
            self.refuse(f"the rank of {'an input' if value is None else repr(value.name)} is not known")
        return sizes

    def elements(self, index: int) -> list[Any] | None:
        """Return the elements of an input: numbers, names of sizes, None where one is not known, and multiples of the
        batch; None where nothing is known."""
        value = self.value(index)
        if value is None:
            return None
        found = self.known.counts.get(value)
        if found is None:
            found = self.known.facts.elements.get(value)
        return None if found is None else [*found.ravel()]

    def constant(self, index: int) -> npt.NDArray[Any] | None:
        """Return an input that is a constant of the graph."""
        value = self.value(index)
        if value is None or value in self.known.counts:
            return None
        array = self.known.facts.constant(value)
        if array is None:
            with contextlib.suppress(ValueError):
                tensor = ir.convenience.get_const_tensor(value)
                array = None if tensor is None or value.is_graph_input() else tensor.numpy()
        return array

    def ints(self, index: int, name: str) -> list[int] | None:
        """Return the integers that an attribute or an input says; None where neither does."""
        given = self.attribute(name)
        if given is not None:
            return [int(number) for number in given]
        if not self.has(index):
            return None
        array = self.constant(index)
        if array is None:
            self.refuse(f"its {name} are no constants")
        return [int(number) for number in array.flat]

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.node.attributes.get(name)
        if found is None or found.value is None:
            return default
        return list(found.value) if isinstance(found.value, (tuple, list)) else found.value

    def axis(self, default: int | None = 0, name: str = "axis", rank: int | None = None) -> int:
        """Return the axis that an attribute says, from the front."""
        rank = self.rank() if rank is None else rank
        return int(self.attribute(name, default)) % max(rank, 1)

    def require_fixed(self, *allowed: int) -> None:
        """Refuse a node that takes something of the batch in other inputs than these."""
        for index, value in enumerate(self.node.inputs):
            if index not in allowed and self.known.depends(value):
                self.refuse(f"takes the batch as input {index}, {value.name!r}" if value is not None else "")
        for index in allowed:
            if self.value(index) in self.known.counts:
                self.refuse("computes with the size of the batch")

    def give(self, layout: Layout, *outputs: int) -> None:
        """Note where the batch is in outputs; in all of them, unless some are named."""
        for index in outputs or range(len(self.node.outputs)):
            if index < len(self.node.outputs):
                self.known.layouts[self.node.outputs[index]] = layout

    def give_counts(self, elements: Counts, output: int = 0) -> None:
        """Note which elements of an output are multiples of the batch, if some are."""
        if any(isinstance(element, Multiple) for element in elements.flat):
            self.known.counts[self.node.outputs[output]] = elements

    def give_statistics(self, *outputs: int) -> None:
        """Note outputs that are made of the whole batch: nothing may be computed of them."""
        for index in outputs:
            value = self.node.outputs[index] if index < len(self.node.outputs) else None
            if value is None:
                continue
            if self.node.graph is not self.known.graph:
                self.refuse("mixes the rows of the batch")
            passed = [value]
            for one in passed:  # The list grows.
                for node, _ in one.uses():
                    if node.op_type != "Identity" or node.graph is not self.known.graph:
                        self.refuse("mixes the rows of the batch, and something is computed of that")
                    passed += node.outputs
            self.known.statistics.update(passed)

    def joined(self, indices: Sequence[int], rank: int, *, last: int = 0, broadcasts: bool = True) -> Layout:
        """Return where the batch is in what inputs are broadcast to; those without it are repeated where they must.

        Args:
            indices: the inputs.
            rank: the rank of what they are broadcast to.
            last: how many axes at the end are not broadcast.
            broadcasts: whether the node itself broadcasts them.
        """
        found: Layout | None = None
        for index in indices:
            layout = self.layout(index)
            if layout is None:
                continue
            moved = layout.at(layout.axis + rank - self.rank(index))
            if found is not None and found != moved:
                self.refuse(f"joins the batch of axis {found.axis} with that of axis {moved.axis}")
            found = moved
        if found is None:
            self.refuse("computes with the size of the batch")
        for index in indices:
            if self.has(index) and self.layout(index) is None:
                at = found.axis - rank + self.rank(index)
                if 0 <= at < self.rank(index) - last:
                    self.repeat(index, found.at(at), broadcasts=broadcasts)
                elif not broadcasts:
                    self.refuse("its inputs have several ranks")
        return found

    def repeat(self, index: int, layout: Layout, *, broadcasts: bool) -> None:
        """Have an input without the batch repeated for each row.

        Args:
            index: the input.
            layout: where the batch will be in it.
            broadcasts: whether the node itself repeats what has the size 1.
        """
        value, sizes = self.value(index), self.sizes(index)
        if value is None or value in self.known.counts:
            self.refuse("computes with the size of the batch")
        size = sizes[layout.axis]
        if size == 1 and broadcasts:
            return
        if Product.of([size]) != layout.size(self.known.batch):
            self.refuse(f"broadcasts the batch to {size} of {value.name!r}")
        if not layout.plain and not all(isinstance(one, int) for one in sizes):
            self.refuse(f"repeats {value.name!r} for each row, and not all its sizes are known")
        if self.known.batch > 1 and not self._has_equal_rows(value, layout):
            self.refuse(f"takes {self.known.batch} rows of {value.name!r} that are not equal")
        self.known.edits[self.node, index] = Repeated(layout, tuple(sizes), broadcasts)

    def _has_equal_rows(self, value: ir.Value, layout: Layout) -> bool:
        """Whether a value that does not depend on the batch has equal rows, however its weights are trained."""
        tensor = None
        with contextlib.suppress(ValueError):
            tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
        if tensor is not None:
            if layout.per_row.names:
                return False
            array = np.moveaxis(tensor.numpy(), layout.axis, 0)
            rows = array.reshape(layout.before.number, self.known.batch, layout.after.number, -1)
            return bool((rows == rows[:, :1]).all())
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type == "ConstantOfShape":
            return True
        sizes, axis = self._sizes(value), layout.axis
        if not layout.plain:
            return False

        def of_operand(operand: ir.Value | None, at: int) -> bool:
            if operand is None or at < 0:
                return True
            return self._sizes(operand)[at] == 1 or self._has_equal_rows(operand, Layout(at))

        operands = node.inputs
        if node.op_type in ("Expand", "Tile"):
            x = operands[0]
            at = axis - len(sizes) + len(self._sizes(x))
            return at < 0 or self._sizes(x)[at] == 1 or (node.op_type == "Expand" and of_operand(x, at))
        if node.op_type in DETERMINISTIC:
            return all(
                of_operand(one, axis - len(sizes) + len(self._sizes(one))) for one in operands if one is not None
            )
        if node.op_type == "Gather":
            at = axis - int(Call(self.known, node).axis())
            return 0 <= at < len(self._sizes(operands[1])) and of_operand(operands[1], at)
        if node.op_type in ("Flatten", "Reshape"):
            # Rows that are first stay whole where they are still first.
            first = self._sizes(operands[0])[:1]
            return axis == 0 and first == [self.known.batch] == sizes[:1] and of_operand(operands[0], 0)
        if node.op_type == "Transpose":
            perm = Call(self.known, node).attribute("perm", list(range(len(sizes)))[::-1])
            return of_operand(operands[0], perm[axis])
        if node.op_type == "Unsqueeze":
            axes = Call(self.known, node).ints(1, "axes") or []
            added = {one % len(sizes) for one in axes}
            return axis not in added and of_operand(operands[0], axis - sum(one < axis for one in added))
        return False

    def choose(self, ways: int) -> int:
        """Return which of several ways is gone."""
        known = self.known
        at = len(known.ways)
        known.ways.append(ways)
        if at == len(known.choices):
            known.choices.append(0)
        return known.choices[at]

    def shape(self, index: int, elements: Sequence[int | Multiple | Old]) -> None:
        """Have an input become another shape."""
        if any(isinstance(element, Multiple) and element.factor.names for element in elements):
            self.refuse("needs a multiple of the batch by a size that is not known")
        self.known.edits[self.node, index] = NewShape(tuple(elements))

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for a node that fixes the batch."""
        raise Refused(self.node, what)


DETERMINISTIC: set[str] = set()
"""Operators that compute each element of what they give of those at its place alone."""
