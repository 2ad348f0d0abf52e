"""A training step in two: the gradients of a batch, and the optimizer's update.

`optimizers.append` appends the update to gradients that keep their names, and adds up those of several calls with nodes
whose operands are inputs of the step: there a step is cut. These additions are left out, because the caller makes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping

import onnx
import onnx_ir as ir

from gradfuse.errors import ModelError
from gradfuse.models.arrays import Arrays
from gradfuse.training.in_place import read_by
from gradfuse.training.names import aside
from gradfuse.training.optimizers import ACCUMULATED_GRADIENT
from gradfuse.training.step import GRADIENT_SUFFIX, MICRO_STEP, UPDATED_SUFFIX, TrainingStep


@dataclasses.dataclass(frozen=True)
class Halves:
    """A step in two.

    Attributes:
        step: the whole step, whose model has inputs and outputs alone, without those that add up gradients.
        gradients: the model that computes the loss, outputs, changed buffers and gradients.
        update: the model that takes gradients, and gives parameters and state; None of a step without an optimizer.
        given: parameter -> the output of `gradients` that is its gradient, or its part of an average over calls.
        taken: parameter -> the input of `update` that is its gradient, or the sum of these parts.
        accumulate: how many calls make one update.
        accumulators: the state of the step that adds up and counts these calls, as it is before the first of them.
    """

    step: TrainingStep
    gradients: ir.Model
    update: ir.Model | None
    given: Mapping[str, str]
    taken: Mapping[str, str]
    accumulate: int
    accumulators: Arrays


def split(step: TrainingStep, who: str) -> Halves:
    """Return a step in two.

    Args:
        step: a step, with or without an optimizer.
        who: what messages begin with.

    Raises:
        ModelError: a gradient is not found in the model, or the update reads more than gradients and state.
    """
    outputs = [value.name for value in step.model.graph.output]
    updated = {name for name in (*step.parameters, *step.optimizer_state) if _updated(step, name) in outputs}
    trained = [name for name in step.parameters if name in updated]
    gradients = ir.from_proto(step.model)
    if not trained:
        given = {name: step.own_name(name + GRADIENT_SUFFIX) for name in step.parameters}
        if not given or not set(given.values()) <= set(outputs):
            raise ModelError(f"{who}: the step neither updates parameters nor gives gradients; expected one of them")
        return Halves(_interface(step, ()), gradients, None, given, {}, 1, {})

    micro_step = step.own_name(MICRO_STEP)
    accumulators = {
        name: value
        for name, value in step.optimizer_state.items()
        if name == micro_step or name in {f"{one}.{ACCUMULATED_GRADIENT}" for one in trained}
    }
    update = ir.from_proto(step.model)
    cut = _added_up if accumulators else _by_name
    parts = {name: cut(gradients.graph, name, who)[0] for name in trained}
    totals = {name: cut(update.graph, name, who)[1] for name in trained}
    accumulate = _take_every_call(update.graph, micro_step, who) if accumulators else 1

    dropped = {_updated(step, name) for name in updated}
    gradients.graph.outputs[:] = [value for value in gradients.graph.outputs if value.name not in dropped]
    given = {name: _as_output(gradients.graph, value) for name, value in parts.items()}
    _reduce(gradients)
    taken = {name: _as_input(update.graph, value) for name, value in totals.items()}
    kept = {_updated(step, name) for name in updated if name not in accumulators}
    update.graph.outputs[:] = [value for value in update.graph.outputs if value.name in kept]
    _reduce(update)
    known = {*step.parameters, *step.optimizer_state, *step.hyperparameters, *taken.values()} - set(accumulators)
    for value in update.graph.inputs:
        if value.name not in known:
            what = f"the update reads {value.name!r}, which is neither a gradient nor state"
            raise ModelError(f"{who}: {what}; expected a step with gradfuse's own update")
    return Halves(_interface(step, accumulators), gradients, update, given, taken, accumulate, accumulators)


def fingerprint(step: TrainingStep) -> str:
    """Return a fingerprint, of nodes, constants and names, that is equal for steps that compute the same."""
    digest = hashlib.sha256()
    graph = step.model.graph
    for value in (*graph.input, *graph.output):
        digest.update(_without_notes(value).SerializeToString(deterministic=True))
    for node in graph.node:
        digest.update(_without_notes(node).SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
        digest.update(ir.from_proto(tensor).tobytes())
    for names in (step.parameters, step.buffers, step.optimizer_state, step.hyperparameters):
        digest.update(repr(list(names)).encode())
    return digest.hexdigest()


def _updated(step: TrainingStep, name: str) -> str:
    return step.own_name(name + UPDATED_SUFFIX)


def _interface(step: TrainingStep, accumulators: Collection[str]) -> TrainingStep:
    """Return a step whose model has no nodes, without some of its state."""
    graph, left_out = step.model.graph, {*accumulators, *(_updated(step, name) for name in accumulators)}
    model = onnx.ModelProto()
    model.graph.input.extend(value for value in graph.input if value.name not in left_out)
    model.graph.output.extend(value for value in graph.output if value.name not in left_out)
    state = {name: value for name, value in step.optimizer_state.items() if name not in accumulators}
    return dataclasses.replace(step, model=model, optimizer_state=state)


def _by_name(graph: ir.Graph, parameter: str, who: str) -> tuple[ir.Value, ir.Value]:
    """Return the gradient of a parameter, twice: it is both sides of the cut."""
    # What belongs to a tensor that stood aside keeps the name that it had then.
    names = {name + GRADIENT_SUFFIX for name in (parameter, aside(parameter))}
    # A hook may make it a constant.
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        if value.name in names:
            return value, value
    raise _not_found(parameter, who)


def _added_up(graph: ir.Graph, parameter: str, who: str) -> tuple[ir.Value, ir.Value]:
    """Return a parameter's part of an average over calls, and the sum of those of earlier calls and this one."""
    accumulated = next((value for value in graph.inputs if value.name == f"{parameter}.{ACCUMULATED_GRADIENT}"), None)
    for node in () if accumulated is None else accumulated.consumers():
        if node.op_type == "Add" and not node.domain:
            (part,) = (value for value in node.inputs if value is not accumulated)
            if part is not None:
                return part, node.outputs[0]
    raise _not_found(parameter, who)


def _not_found(parameter: str, who: str) -> ModelError:
    what = f"the gradient of {parameter!r} is not found in the step"
    return ModelError(f"{who}: {what}; expected one as export_training_step or build_training_step makes it")


def _take_every_call(graph: ir.Graph, micro_step: str, who: str) -> int:
    """Make an update in every call, and return how many calls made one before."""
    count = next((value for value in graph.inputs if value.name == micro_step), None)
    for node in () if count is None else count.consumers():
        known = [ir.convenience.get_const_tensor(value) for value in node.inputs if value not in (None, count)]
        if node.op_type == "Equal" and len(known) == 1 and (last := known[0]) is not None:
            due = node.outputs[0]
            branching = [use.node for use in due.uses() if use.node.op_type == "If"]
            for one in branching:
                _inline(graph, one)
            always = ir.Value(name=due.name, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))
            always.const_value = ir.tensor(True, name=due.name)
            due.name = f"{due.name}_found"
            graph.register_initializer(always)
            ir.convenience.replace_all_uses_with(due, always)
            return int(last.numpy()) + 1
    raise ModelError(f"{who}: the step does not count its calls by {micro_step!r}; expected a step of gradfuse's own")


def _inline(graph: ir.Graph, branching: ir.Node) -> None:
    """Replace an If by its first branch."""
    branch = branching.attributes["then_branch"].as_graph()
    results, nodes = list(branch.outputs), list(branch)
    branch.outputs.clear()
    branch.remove(nodes)
    graph.insert_before(branching, nodes)
    for value, result in zip(branching.outputs, results, strict=True):
        name, value.name = value.name, f"{value.name}_chosen"
        result.name = name
        ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    graph.remove(branching, safe=False)


def _as_output(graph: ir.Graph, value: ir.Value) -> str:
    """Make a value an output of the graph, or a copy where it is one already or a constant; return its name."""
    if value.is_graph_output() or value.is_initializer():
        copy = ir.node("Identity", [value])
        copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = f"{value.name}/cut", value.type, value.shape
        graph.append(copy)
        value = copy.outputs[0]
    graph.outputs.append(value)
    return str(value.name)


def _as_input(graph: ir.Graph, value: ir.Value) -> str:
    """Replace a computed value by a new input; return its name."""
    given = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.name = f"{value.name}_computed"
    ir.convenience.replace_all_uses_with(value, given, replace_graph_outputs=True)
    graph.inputs.append(given)
    return str(given.name)


def _reduce(model: ir.Model) -> None:
    """Remove what no output needs: nodes, initializers, and inputs.

    The branches of an If that is removed would still be among the uses of what they read.
    """
    graph = model.graph
    needed: set[ir.Value] = set()
    rest = list(graph.outputs)
    while rest:
        value = rest.pop()
        node = value.producer()
        if value not in needed:
            needed.add(value)
            rest += () if node is None else read_by(node)
    graph.remove([node for node in graph if needed.isdisjoint(node.outputs)])
    graph.inputs[:] = [value for value in graph.inputs if value in needed]
    for name in [name for name, value in graph.initializers.items() if value not in needed]:
        del graph.initializers[name]


def _without_notes(proto: onnx.NodeProto | onnx.ValueInfoProto) -> onnx.NodeProto | onnx.ValueInfoProto:
    """Return a copy without node names, documentation and metadata, which differ between machines."""
    copy = type(proto)()
    copy.CopyFrom(proto)
    _strip(copy)
    return copy


def _strip(proto: onnx.NodeProto | onnx.ValueInfoProto) -> None:
    proto.ClearField("doc_string")
    proto.ClearField("metadata_props")
    if isinstance(proto, onnx.NodeProto):
        proto.ClearField("name")
        for attribute in proto.attribute:
            for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _strip_graph(graph)


def _strip_graph(graph: onnx.GraphProto) -> None:
    protos: Iterable[onnx.NodeProto | onnx.ValueInfoProto] = (
        *graph.node,
        *graph.input,
        *graph.output,
        *graph.value_info,
    )
    for proto in protos:
        _strip(proto)
