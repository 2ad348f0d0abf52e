"""The walk backward through a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from gradfuse.differentiation.control_flow import draws_within, of_branches, of_turns
from gradfuse.differentiation.dependence import depending, is_branches, is_constant, repeated
from gradfuse.differentiation.rules import Call, Entry, Gradient, entry_of, error_of
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ModelError, listed
from gradfuse.models.inlining import captured_by


def gradients(
    graph: ir.Graph, tape: Tape, seeds: Mapping[ir.Value, Tensor], wrt: Collection[ir.Value]
) -> dict[ir.Value, Tensor]:
    """Write the vector-Jacobian product of a graph.

    Args:
        graph: the graph; nodes of it may get outputs that they left out.
        tape: where the nodes are written.
        seeds: the gradients of some of its values, from which the walk begins.
        wrt: the values whose gradients are asked for.

    Returns:
        The gradient of each value of `wrt` that the seeds' values depend on.

    Raises:
        ModelError: an operator in between has no rule, or its rule does not take this use of it.
    """
    nodes = list(graph)
    active, lost = depending(nodes, wrt)
    found: dict[ir.Value, list[Tensor]] = {value: [seed] for value, seed in seeds.items()}
    for node, entry, needed, captured in _way_back(nodes, seeds, active, lost):
        if not any(value in found for value in node.outputs):
            continue
        dy = [tape.total(found[value]) if value in found else None for value in node.outputs]
        for value, total in zip(node.outputs, dy, strict=True):
            if total is not None:
                found[value] = [total]
        if entry is None:
            of_node = of_branches if is_branches(node) else of_turns
            for value, gradient in of_node(node, tape, dy, needed, captured, gradients):
                found.setdefault(value, []).append(gradient)
            continue
        for index, gradient in _of_inputs(node, entry, tape, dy, needed).items():
            source = node.inputs[index]
            assert source is not None
            found.setdefault(source, []).append(gradient)
    # Whoever takes the tape's nodes now has those of all results.
    return {value: tape.of(tape.total(found[value]).value) for value in wrt if value in found}


def _way_back(
    nodes: Sequence[ir.Node],
    seeds: Collection[ir.Value],
    active: Collection[ir.Value],
    lost: Mapping[ir.Value, ir.Node],
) -> list[tuple[ir.Node, Entry | None, frozenset[int], list[ir.Value]]]:
    """Return the nodes that gradients may go through, from the last one on.

    With each are its rule, which If, Loop and Scan have none of, the indices of the inputs that need gradients, and
    the values from outside that its subgraphs read and that need them.

    Raises:
        ModelError: nodes have no rule, all of which it names. This is known before any rule looks at a node that
            another one feeds.
    """
    way = []
    reached = set(seeds)
    refused: dict[ir.Node, ModelError] = {}
    for node in reversed(nodes):
        if reached.isdisjoint(node.outputs):
            continue
        captured = [value for value in captured_by(node) if value in active or value in lost]
        inward = is_branches(node) or repeated(node) is not None
        ends = [value for value in node.outputs if value in reached] if inward else []
        for value in (*node.inputs, *captured, *ends):
            if value is not None and value in lost and lost[value] not in refused:
                refused[lost[value]] = _no_derivative(lost[value], active)
        needed = frozenset(k for k, value in enumerate(node.inputs) if value in active)
        if (not needed and not captured) or is_constant(node):
            continue
        reached.update(captured, (value for k in needed if (value := node.inputs[k]) is not None))
        if inward:
            refused |= draws_within(node)
        try:
            way.append((node, None if inward else _entry(node, needed, captured, active), needed, captured))
        except ModelError as error:
            refused.setdefault(node, error)
    if refused:
        first, *others = refused.values()
        names = [str(error).partition(": ")[0] for error in others]
        raise first if not others else ModelError(f"{first}. Without a gradient too: {listed(names, quoted=False)}")
    return way


def _no_derivative(node: ir.Node, active: Collection[ir.Value]) -> ModelError:
    entry = entry_of(node)
    why = entry.refused if entry is not None and entry.refused else f"gradients have no type {node.outputs[0].dtype}"
    return error_of(node, f"{why}; {_dependent(node.inputs, active)}")


def _dependent(values: Iterable[ir.Value | None], active: Collection[ir.Value]) -> str:
    name = next((value.name for value in values if value is not None and value in active), None)
    return f"the gradient of {name!r} depends on it"


def _entry(node: ir.Node, needed: frozenset[int], captured: Sequence[ir.Value], active: Collection[ir.Value]) -> Entry:
    """Return the rule of a node, which must have one."""
    entry = entry_of(node)
    if entry is not None and entry.refused:
        raise _no_derivative(node, active)
    if entry is not None and not captured:
        return entry
    domain = f" of domain {node.domain!r}" if node.domain else ""
    values = [*(node.inputs[k] for k in sorted(needed)), *captured]
    raise error_of(node, f"no gradient rule for this operator{domain}; {_dependent(values, active)}")


def _of_inputs(
    node: ir.Node, entry: Entry, tape: Tape, dy: Sequence[Tensor | None], needed: frozenset[int]
) -> dict[int, Tensor]:
    assert entry.rule is not None
    call = Call(node, tape, dy, needed)
    written: dict[int, Tensor] = {}
    answered = set(entry.fixed)
    for index, gradient in enumerate(entry.rule(call)):
        if index not in needed or gradient is None:
            continue
        answered.add(index)
        tensor = _written(gradient)
        if tensor is None:
            continue
        if entry.broadcasts:
            to = call.x[index]
            assert to is not None
            tensor = call.summed_to(tensor, to, call.y[0])
        written[index] = tensor
    for index in sorted(needed - answered):
        value = node.inputs[index]
        assert value is not None
        raise call.error(f"no gradient rule for its input {index}; the gradient of {value.name!r} depends on it")
    return written


def _written(gradient: Gradient) -> Tensor | None:
    return gradient() if callable(gradient) else gradient
