"""If, Loop and Scan: their gradients are others of them, whose bodies compute what they need of the forward ones again.

The gradient of a loop goes through its iterations in reverse order. The forward loop saves what each iteration began
with, in outputs that are added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from gradfuse.differentiation.dependence import Repeated, active_inputs, may_be_float, repeated
from gradfuse.differentiation.rules import error_of
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ModelError
from gradfuse.models.inlining import graphs_of
from gradfuse.models.tensors import rename

Walk = Callable[[ir.Graph, Tape, Mapping[ir.Value, Tensor], Collection[ir.Value]], dict[ir.Value, Tensor]]

_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial"}
    | {f"Random{kind}{like}" for kind in ("Normal", "Uniform") for like in ("", "Like")}
)


def draws_within(node: ir.Node) -> dict[ir.Node, ModelError]:
    """Return why an If, Loop or Scan has no gradient: for each node within that draws numbers, as the gradient computes
    the body again and would draw others.
    """
    drawing = (inner for body in graphs_of(node) for inner in body.all_nodes() if inner.op_type in _RANDOM)
    why = f"draws numbers within {node.op_type}; expected them from outside"
    return {inner: error_of(inner, why) for inner in drawing}


def of_branches(
    node: ir.Node,
    tape: Tape,
    dy: Sequence[Tensor | None],
    needed: Collection[int],
    captured: Sequence[ir.Value],
    walk: Walk,
) -> list[tuple[ir.Value, Tensor]]:
    """Return the gradients of what the branches of an If read from outside, zeros where the taken one does not.

    Args:
        node: the If.
        tape: where its gradient is written.
        dy: the gradients of its outputs.
        needed: empty, as its only input is the condition.
        captured: the values whose gradients are asked for.
        walk: writes the gradients of a graph: `reverse.gradients`.

    Raises:
        ModelError: a node of a branch has no rule.
    """
    prefix = f"{tape.prefix}If_{len(tape.nodes)}"
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = node.attributes[name].as_graph().clone(allow_outer_scope_values=True)
        _rename(body, f"{prefix}/{name}/")
        inner = Tape(f"{prefix}/{name}/gradient/", tape.opset)
        found = walk(body, inner, _seeds(inner, zip(body.outputs, dy, strict=True)), captured)
        results = [found[value] if value in found else inner.of(value).zeros() for value in captured]
        _end(body, inner, [(result, value) for result, value in zip(results, captured, strict=True)])
        branches[name] = body
    outputs = [_typed(ir.Value(name=f"{prefix}.{k}"), value) for k, value in enumerate(captured)]
    tape.nodes.append(ir.node("If", node.inputs, branches, name=prefix, outputs=outputs))
    return [(value, tape.of(output)) for value, output in zip(captured, outputs, strict=True)]


def of_turns(
    node: ir.Node,
    tape: Tape,
    dy: Sequence[Tensor | None],
    needed: Collection[int],
    captured: Sequence[ir.Value],
    walk: Walk,
) -> list[tuple[ir.Value, Tensor]]:
    """Return the gradients of the inputs of a Loop or a Scan, and of what its body reads from outside.

    Args:
        node: the Loop or the Scan, which gets outputs: what it saves for each iteration.
        tape: where its gradient is written.
        dy: the gradients of its outputs.
        needed: the indices of the inputs whose gradients are asked for.
        captured: the values outside whose gradients are asked for.
        walk: writes the gradients of a graph: `reverse.gradients`.

    Raises:
        ModelError: a node of the body has no rule.
    """
    loop = repeated(node)
    assert loop is not None
    inputs = {value for k in needed if (value := node.inputs[k]) is not None}
    active = active_inputs(loop, {*inputs, *captured}, {})
    back = _Back(loop, tape, [value in active for value in loop.body.inputs], dy)
    back.write(captured, walk)
    return (back.as_scan if node.op_type == "Scan" else back.as_loop)(needed)


class _Back:
    """The body of a loop's gradient, for one iteration.

    Attributes:
        body: the nodes of the forward body and those of its gradient; its inputs and outputs are not set yet.
        before: the gradients of carried values and the sums for captured ones ahead of the iteration.
        after: these behind it, each with a value of its type and shape.
        starts: what the state begins with.
        results: what the state ends as the gradient of, None where nobody asks.
        slices: inputs of the forward body whose slices of a Scan's input have a gradient -> these.
        of_slices: k -> the gradient of the body's k-th sliced output.
    """

    def __init__(self, loop: Repeated, tape: Tape, active: Sequence[bool], dy: Sequence[Tensor | None]) -> None:
        self.loop, self.tape, self.active, self.dy = loop, tape, active, dy
        self.prefix = f"{tape.prefix}{loop.node.op_type}_{len(tape.nodes)}"
        self.body = loop.body.clone(allow_outer_scope_values=True)
        _rename(self.body, f"{self.prefix}/")
        for value in loop.body.inputs:
            if not isinstance(value.type, ir.TensorType):
                raise error_of(loop.node, f"{value.name!r}, which it carries along, is no tensor; expected tensors")
        self.inner = Tape(f"{self.prefix}/gradient/", tape.opset)
        self.before: list[ir.Value] = []
        self.after: list[tuple[Tensor, ir.Value]] = []
        self.starts: list[Tensor] = []
        self.results: list[tuple[ir.Value, int | None]] = []
        self.slices: dict[int, Tensor] = {}
        self.of_slices: dict[int, ir.Value] = {}

    def write(self, captured: Sequence[ir.Value], walk: Walk) -> None:
        """Differentiate the body."""
        loop, body, inner = self.loop, self.body, self.inner
        carried = [
            k
            for k in range(loop.carried)
            if self.active[loop.first + k] and may_be_float(loop.body.inputs[loop.first + k])
        ]
        sliced = range(loop.first + loop.carried, len(body.inputs))
        ends: list[tuple[ir.Value, Tensor | None]] = []
        before = {}
        for k in carried:
            output = body.outputs[loop.ahead + k]
            before[k] = _typed(ir.Value(name=f"{inner.prefix}of_{k}"), output)
            ends.append((output, inner.of(before[k])))
        for j in range(loop.carried, len(loop.node.outputs)):
            gradient = self.dy[j]
            if gradient is not None:
                output = body.outputs[loop.ahead + j]
                self.of_slices[j] = _typed(ir.Value(name=f"{inner.prefix}of_{j}"), output)
                ends.append((output, inner.of(self.of_slices[j])))
        wrt = [body.inputs[loop.first + k] for k in carried]
        wrt += [body.inputs[k] for k in sliced if self.active[k]]
        found = walk(body, inner, _seeds(inner, ends), [*wrt, *captured])

        for k in carried:
            value, final, gradient = body.inputs[loop.first + k], loop.node.outputs[k], self.dy[k]
            final.name = final.name or f"{self.prefix}.last_{k}"
            self._carry(before[k], found[value] if value in found else inner.of(value).zeros(), value)
            self.starts.append(gradient or self.tape.of(final).zeros())
            self.results.append((loop.node.inputs[loop.first + k] or final, loop.first + k))
        for k, value in enumerate(captured):
            if value in found:
                total = _typed(ir.Value(name=f"{inner.prefix}total_{k}"), value)
                self._carry(total, inner.of(total) + found[value], value)
                self.starts.append(self.tape.of(value).zeros())
                self.results.append((value, None))
        for k in sliced:
            value = body.inputs[k]
            if self.active[k] and may_be_float(value):
                self.slices[k] = found[value] if value in found else inner.of(value).zeros()
        _end(body, inner, [*self.after, *((result, body.inputs[k]) for k, result in self.slices.items())])
        _prune(body)

    def _carry(self, before: ir.Value, after: Tensor, like: ir.Value) -> None:
        self.before.append(before)
        self.after.append((after, like))

    def as_scan(self, needed: Collection[int]) -> list[tuple[ir.Value, Tensor]]:
        """Write the gradient of a Scan: one that goes the other way."""
        loop, body, node = self.loop, self.body, self.loop.node
        count = len(body.inputs) - loop.carried
        axes, directions = (_ints(node, f"scan_input_{name}", count) for name in ("axes", "directions"))
        sliced = len(node.outputs) - loop.carried
        out_axes, out_directions = (_ints(node, f"scan_output_{name}", sliced) for name in ("axes", "directions"))
        # Sequences with the inputs of the body that are their slices, their axes and directions.
        given: list[tuple[ir.Value, ir.Value, int, int]] = []
        for k in range(loop.carried):
            if _is_read(body.inputs[k]):
                given.append(
                    (_added_slices(loop, loop.body.inputs[k], f"{self.prefix}.saved_{k}"), body.inputs[k], 0, 1)
                )
        for k in range(count):
            source, value = node.inputs[loop.carried + k], body.inputs[loop.carried + k]
            assert source is not None
            if _is_read(value):
                given.append((source, value, axes[k], 1 - directions[k]))
        for j, value in self.of_slices.items():
            gradient = self.dy[j]
            assert gradient is not None
            if _is_read(value):
                at = j - loop.carried
                given.append((gradient.value, value, out_axes[at], 1 - out_directions[at]))
        if not given:
            # One gives the number of iterations, though none reads it.
            source = node.inputs[loop.carried]
            assert source is not None
            given.append((source, body.inputs[loop.carried], axes[0], 1 - directions[0]))
        body.inputs[:] = [*self.before, *(value for _, value, _, _ in given)]
        sequences = [node.inputs[k] for k in self.slices]
        outputs = [_typed(ir.Value(name=f"{self.prefix}.{k}"), value) for k, (value, _) in enumerate(self.results)]
        outputs += [
            _typed(ir.Value(name=f"{self.prefix}.{len(self.results) + k}"), value)
            for k, value in enumerate(sequences)
            if value is not None
        ]
        numbers = {
            "scan_input_axes": [axis for _, _, axis, _ in given],
            "scan_input_directions": [direction for _, _, _, direction in given],
            "scan_output_axes": [axes[k - loop.carried] for k in self.slices],
            "scan_output_directions": [1 - directions[k - loop.carried] for k in self.slices],
        }
        attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(given)}
        attributes |= {name: ir.AttrInt64s(name, ints) for name, ints in numbers.items() if ints}
        starts = [start.value for start in self.starts]
        self._append("Scan", [*starts, *(source for source, _, _, _ in given)], attributes, outputs)
        found = self._found(needed, outputs)
        for sequence, output in zip(sequences, outputs[len(self.results) :], strict=True):
            assert sequence is not None
            found.append((sequence, self.tape.of(output)))
        return found

    def as_loop(self, needed: Collection[int]) -> list[tuple[ir.Value, Tensor]]:
        """Write the gradient of a Loop: one of as many iterations, each of which takes what the forward one saved."""
        loop, body, tape = self.loop, self.body, self.tape
        turns = tape.of(_added_slices(loop, loop.body.inputs[0], f"{self.prefix}.turns"))
        count = turns.size(0).squeeze(0)
        turn = ir.Value(name=f"{self.prefix}/turn", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        going = ir.Value(name=f"{self.prefix}/going", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        ahead = Tape(f"{self.prefix}/saved/", tape.opset)
        at = ahead.of(count.value) - ahead.constant(1) - ahead.of(turn)
        taken: list[tuple[ir.Value, Tensor]] = [(body.inputs[0], at)]
        if _is_read(body.inputs[1]):
            taken.append((body.inputs[1], _true(ahead)))
        read = [k for k in range(loop.carried) if _is_read(body.inputs[loop.first + k])]
        changing = [k for k in read if not _same_shape(loop.body.inputs[2 + k], loop.body.outputs[1 + k])]
        sequences = _sequences(loop, changing, f"{self.prefix}.again", tape) if changing else []
        for k, sequence in zip(changing, sequences, strict=True):
            value = body.inputs[2 + k]
            taken.append((value, ahead.op("SequenceAt", ahead.of(sequence), at, dtype=value.dtype)))
        for k in read:
            if k not in changing:
                slices = ahead.of(_added_slices(loop, loop.body.inputs[2 + k], f"{self.prefix}.saved_{k}"))
                taken.append((body.inputs[2 + k], slices.op("Gather", at, axis=0)))
        for j, gradient_now in self.of_slices.items():
            gradient = self.dy[j]
            assert gradient is not None
            taken.append((gradient_now, ahead.op("Gather", ahead.of(gradient.value), at, axis=0)))
        for forward_value, now in taken:
            ir.convenience.replace_all_uses_with(forward_value, now.value)
        nodes = list(body)
        body.remove(nodes)
        still = ir.node("Identity", [going], name=f"{self.prefix}/still")
        _typed(still.outputs[0], going).name = f"{self.prefix}/still"
        body.extend([*ahead.nodes, *nodes, still])
        body.inputs[:] = [turn, going, *self.before]
        body.outputs.insert(0, still.outputs[0])
        outputs = [_typed(ir.Value(name=f"{self.prefix}.{k}"), value) for k, (value, _) in enumerate(self.results)]
        starts = [start.value for start in self.starts]
        self._append("Loop", [count.value, None, *starts], {"body": body}, outputs)
        return self._found(needed, outputs)

    def _append(
        self, op_type: str, inputs: list[ir.Value | None], attributes: dict[str, Any], outputs: list[ir.Value]
    ) -> None:
        self.tape.nodes.append(ir.node(op_type, inputs, attributes, name=self.prefix, outputs=outputs))

    def _found(self, needed: Collection[int], outputs: Iterable[ir.Value]) -> list[tuple[ir.Value, Tensor]]:
        return [
            (value, self.tape.of(output))
            for (value, index), output in zip(self.results, outputs, strict=False)
            if index is None or index in needed
        ]


def _end(body: ir.Graph, tape: Tape, results: Iterable[tuple[Tensor, ir.Value]]) -> None:
    """Append what a tape has to a body, and make results its outputs, of the types and shapes of other values.

    A result is copied only if the body does not compute it, or has it as an output already. onnxruntime 1.31 takes
    copies away, and does not run a body where the sum of a product and something reads what was copied.
    """
    computed = {value for node in (*body, *tape.nodes) for value in node.outputs}
    outputs: list[ir.Value] = []
    for result, like in results:
        value = result.value
        if value not in computed or value in outputs:
            value = result.op("Identity").value
        outputs.append(_typed(value, like))
    body.outputs[:] = outputs
    body.extend(tape.nodes)


def _true(tape: Tape) -> Tensor:
    """The condition of every iteration that took place."""
    return tape.op("Constant", dtype=ir.DataType.BOOL, value=ir.tensor(True))


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = zip(one.shape, other.shape, strict=True)
    return all(a == b and (isinstance(a, int) or a.value is not None) for a, b in pairs)


def _added_slices(loop: Repeated, value: ir.Value, name: str) -> ir.Value:
    """Add an input of a loop's body to its sliced outputs, and return the tensor of all slices."""
    node, body = loop.node, loop.body
    kept = ir.node("Identity", [value], name=f"{name}/Identity")
    _typed(kept.outputs[0], value).name = f"{name}/slice"
    body.append(kept)
    body.outputs.append(kept.outputs[0])
    for attribute in ("scan_output_axes", "scan_output_directions"):
        if attribute in node.attributes:
            node.attributes[attribute] = ir.AttrInt64s(attribute, [*node.attributes[attribute].as_ints(), 0])
    node.resize_outputs(len(node.outputs) + 1)
    added = node.outputs[-1]
    added.name, added.type = name, value.type
    if value.shape is not None:
        added.shape = ir.Shape([None, *value.shape])
    return added


def _sequences(loop: Repeated, indices: Sequence[int], prefix: str, tape: Tape) -> list[ir.Value]:
    """Write the loop once more, with sequences of what some carried values are before each iteration, and return
    these.

    Values that change their shape have no slices of one tensor.
    """
    body = loop.body.clone(allow_outer_scope_values=True)
    _rename(body, f"{prefix}/")
    starts: list[ir.Value] = []
    sequences: list[ir.Value] = []
    before: list[ir.Value] = []
    after: list[ir.Value] = []
    for k in indices:
        value, name = body.inputs[loop.first + k], f"{prefix}/{k}"
        assert value.dtype is not None
        kind = ir.SequenceType(ir.TensorType(value.dtype))
        empty = ir.node("SequenceEmpty", [], {"dtype": int(value.dtype)}, name=f"{name}/SequenceEmpty")
        before.append(ir.Value(name=f"{name}/before", type=kind))
        insert = ir.node("SequenceInsert", [before[-1], value], name=f"{name}/SequenceInsert")
        for node, end in ((empty, "empty"), (insert, "after")):
            node.outputs[0].name, node.outputs[0].type = f"{name}/{end}", kind
        tape.nodes.append(empty)
        body.append(insert)
        starts.append(empty.outputs[0])
        after.append(insert.outputs[0])
        sequences.append(ir.Value(name=name, type=kind))
    del body.outputs[loop.ahead + loop.carried :]
    body.inputs.extend(before)
    body.outputs.extend(after)
    _prune(body)
    carried = [ir.Value(name=f"{prefix}/carried_{k}", type=loop.node.outputs[k].type) for k in range(loop.carried)]
    given = [*loop.node.inputs, *[None] * (2 - len(loop.node.inputs))]
    again = ir.node("Loop", [*given, *starts], {"body": body}, name=prefix, outputs=[*carried, *sequences])
    tape.nodes.append(again)
    return sequences


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _prune(body: ir.Graph) -> None:
    """Remove the nodes of a body that nothing of it depends on."""
    for node in reversed(list(body)):
        if not any(_is_read(value) for value in node.outputs):
            body.remove(node, safe=True)


def _ints(node: ir.Node, name: str, count: int) -> list[int]:
    """Return the numbers of an attribute, which are zeros where it is left out."""
    return list(node.attributes[name].as_ints()) if name in node.attributes else [0] * count


def _seeds(tape: Tape, ends: Iterable[tuple[ir.Value, Tensor | None]]) -> dict[ir.Value, Tensor]:
    """Return the gradients of a graph's outputs; a value that is several of them gets the sum."""
    seeds: dict[ir.Value, Tensor] = {}
    for output, gradient in ends:
        if gradient is not None:
            seed = tape.of(gradient.value)
            seeds[output] = seeds[output] + seed if output in seeds else seed
    return seeds


def _typed(value: ir.Value, like: ir.Value) -> ir.Value:
    value.type, value.shape = like.type, like.shape
    return value


def _rename(body: ir.Graph, prefix: str) -> None:
    """Put a prefix ahead of all names in a graph and those within it."""
    graphs = [body]
    while graphs:
        graph = graphs.pop()
        initializers = list(graph.initializers.values())
        graph.initializers.clear()
        for value in {*graph.inputs, *initializers}:
            rename(value, f"{prefix}{value.name}")
        for value in initializers:
            graph.register_initializer(value)
        for node in graph:
            node.name = f"{prefix}{node.name}" if node.name else node.name
            for value in node.outputs:
                value.name = f"{prefix}{value.name}" if value.name else value.name
            graphs += graphs_of(node)
