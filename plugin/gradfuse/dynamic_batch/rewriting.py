"""What has fixed the batch, written for a batch of any size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.dynamic_batch.analysis import Followed, NewShape, Old, Repeated
from gradfuse.dynamic_batch.layouts import Multiple


class Rewriter:
    """Writes the changes to a model.

    Args:
        model: the model.
        known: what was found out about it.
        source: an input of the model that the size of the batch is read from, and its axis.
    """

    def __init__(self, model: ir.Model, known: Followed, source: tuple[ir.Value, int]) -> None:
        self._known, self._source, self._graph = known, source, model.graph
        graphs = list(model.graphs())
        values = (v for g in graphs for v in (*g.inputs, *g.initializers.values(), *(o for n in g for o in n.outputs)))
        self._names = {str(value.name) for value in values}
        self._batches: dict[int, ir.Value] = {}

    def write(self) -> None:
        """Make all changes."""
        for (node, index), edit in self._known.edits.items():
            new = self._shape(node, index, edit) if isinstance(edit, NewShape) else self._repeated(node, index, edit)
            if new is not None:
                node.replace_input_with(index, new)
        for (node, name), axes in self._known.attributes.items():
            node.resize_inputs(2)
            node.replace_input_with(1, self._constant(node, axes, f"{node.outputs[0].name}/{name}"))

    def _shape(self, node: ir.Node, index: int, edit: NewShape) -> ir.Value | None:
        old, name = node.inputs[index], f"{node.outputs[0].name}/shape"
        assert old is not None
        if all(isinstance(element, Old) for element in edit.elements):
            return None
        parts: list[ir.Value] = []
        for kind, group in itertools.groupby(edit.elements, type):
            elements = list(group)
            if kind is Old:
                places = self._constant(node, [e.index for e in elements if isinstance(e, Old)], f"{name}/places")
                parts.append(self._op(node, "Gather", [old, places], f"{name}/kept"))
            elif kind is Multiple:
                parts += [self._multiple(element) for element in elements if isinstance(element, Multiple)]
            else:
                parts.append(self._constant(node, [e for e in elements if isinstance(e, int)], name))
        return parts[0] if len(parts) == 1 else self._op(node, "Concat", parts, name, axis=0)

    def _repeated(self, node: ir.Node, index: int, edit: Repeated) -> ir.Value | None:
        value, layout = node.inputs[index], edit.layout
        assert value is not None
        rank, axis, name = len(edit.sizes), layout.axis, f"{value.name}/rows"
        if not layout.plain:
            # The batch gets an axis of its own, between what is outside and what is inside of it.
            ahead, behind = list(edit.sizes[:axis]), list(edit.sizes[axis + 1 :])
            before, after = layout.before.number, layout.after.number
            shape = self._constant(node, [*ahead, before, self._known.batch, after, *behind], f"{name}/split")
            value = self._op(node, "Reshape", [value, shape], f"{name}/apart")
            value = self._one_row(node, value, axis + 1, name)
            value = self._expanded(node, value, rank + 2, axis + 1, name)
            sizes = [*ahead, -1, *behind]
            return self._op(node, "Reshape", [value, self._constant(node, sizes, f"{name}/shape")], name)
        if self._known.batch > 1:
            value = self._one_row(node, value, axis, name)
        return value if edit.broadcasts else self._expanded(node, value, rank, axis, name)

    def _one_row(self, node: ir.Node, value: ir.Value, axis: int, name: str) -> ir.Value:
        """The first of equal rows; of a tensor that nothing else reads, the tensor itself gets one row."""
        if self._known.batch == 1:
            return value
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        if value.is_initializer() and alone and value.const_value is not None:
            array = value.const_value.numpy().take([0], axis)
            value.const_value = ir.tensor(array, dtype=value.const_value.dtype, name=value.name)
            value.shape = ir.Shape(array.shape)
            return value
        numbers = [self._constant(node, [number], f"{name}/{what}") for what, number in (("0", 0), ("1", 1))]
        place = self._constant(node, [axis], f"{name}/axis")
        return self._op(node, "Slice", [value, *numbers, place], f"{name}/first")

    def _expanded(self, node: ir.Node, value: ir.Value, rank: int, axis: int, name: str) -> ir.Value:
        elements = [Multiple() if k == axis else 1 for k in range(rank)]
        parts: list[ir.Value] = []
        for kind, group in itertools.groupby(elements, type):
            ones = list(group)
            parts.append(self._multiple(Multiple()) if kind is Multiple else self._constant(node, ones, f"{name}/ones"))
        shape = parts[0] if len(parts) == 1 else self._op(node, "Concat", parts, f"{name}/sizes", axis=0)
        return self._op(node, "Expand", [value, shape], name)

    def _multiple(self, multiple: Multiple) -> ir.Value:
        """A multiple of the batch as a vector of one element, at the beginning of the graph."""
        factor = multiple.factor.number
        assert not multiple.factor.names
        if factor not in self._batches:
            value, axis = self._source
            first = next(iter(self._graph))
            if factor == 1:
                found = self._op(first, "Shape", [value], "batch", start=axis, end=axis + 1)
            else:
                one = self._multiple(Multiple())
                producer = one.producer()
                assert producer is not None
                found = ir.Value(name=self._free(f"batch_{factor}"), type=ir.TensorType(ir.DataType.INT64))
                number = ir.node("Constant", [], {"value_ints": [factor]}, name=self._free(f"batch_{factor}/factor"))
                number.outputs[0].name = number.name
                node = ir.node("Mul", [one, number.outputs[0]], name=found.name, outputs=[found])
                self._graph.insert_after(producer, [number, node])
            found.shape = ir.Shape([1])
            self._batches[factor] = found
        return self._batches[factor]

    def _constant(self, before: ir.Node, numbers: Sequence[Any], name: str) -> ir.Value:
        return self._op(before, "Constant", [], name, value=ir.tensor(np.array(numbers, np.int64)))

    def _op(self, before: ir.Node, op_type: str, inputs: Sequence[ir.Value], name: str, **attributes: Any) -> ir.Value:
        """Put a node ahead of another one."""
        name = self._free(name)
        dtype = inputs[0].dtype if inputs and op_type != "Shape" else ir.DataType.INT64
        output = ir.Value(name=name, type=None if dtype is None else ir.TensorType(dtype))
        node = ir.node(op_type, list(inputs), attributes, name=name, outputs=[output])
        assert before.graph is not None
        before.graph.insert_before(before, node)
        return output

    def _free(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        found = next(one for one in itertools.chain([name], numbered) if one not in self._names)
        self._names.add(found)
        return found


def note_shapes(model: ir.Model, known: Followed, name: str) -> None:
    """Give the values of a model the shapes that they have with a free batch."""
    graphs = list(model.graphs())
    for value in {v for g in graphs for v in (*g.inputs, *g.outputs, *(o for n in g for o in n.outputs))}:
        layout = known.layouts.get(value)
        if layout is None:
            continue
        sizes: list[Any] | None = None if value.shape is None else list(value.shape)
        if sizes is None and value.is_graph_output():
            sizes = [None if one in known.facts.invented else one for one in known.facts.shapes[value]]
        squeezed = value.producer()
        if sizes is not None and squeezed is not None and (squeezed, "axes") in known.attributes:
            sizes = _of_squeeze(known, squeezed)
        if sizes is not None and layout.axis < len(sizes):
            sizes[layout.axis] = name if layout.plain else None
            value.shape = ir.Shape(sizes)


def _of_squeeze(known: Followed, node: ir.Node) -> list[Any]:
    """The sizes of what a Squeeze gives that keeps the batch."""
    source = node.inputs[0]
    assert source is not None
    gone = known.attributes[node, "axes"]
    return [size for axis, size in enumerate(known.facts.shapes[source]) if axis not in gone]
