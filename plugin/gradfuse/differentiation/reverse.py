"""The walk backward through a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from gradfuse.differentiation.rules import FLOATS, Call, Gradient, entry_of
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ModelError


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
    active = _depending(nodes, wrt)
    found: dict[ir.Value, list[Tensor]] = {value: [seed] for value, seed in seeds.items()}
    for node in reversed(nodes):
        if not any(value in found for value in node.outputs):
            continue
        needed = frozenset(k for k, value in enumerate(node.inputs) if value in active)
        if not needed:
            continue
        dy = [tape.total(found[value]) if value in found else None for value in node.outputs]
        for value, total in zip(node.outputs, dy, strict=True):
            if total is not None:
                found[value] = [total]
        for index, gradient in _of_inputs(node, tape, dy, needed).items():
            source = node.inputs[index]
            assert source is not None
            found.setdefault(source, []).append(gradient)
    return {value: tape.total(found[value]) for value in wrt if value in found}


def _depending(nodes: Sequence[ir.Node], wrt: Collection[ir.Value]) -> set[ir.Value]:
    """Return the values that depend on some of `wrt` in a differentiable way, and these themselves."""
    active = set(wrt)
    for node in nodes:
        if any(value in active for value in node.inputs if value is not None):
            entry = entry_of(node)
            if entry is None or entry.rule is not None:
                active.update(value for value in node.outputs if value.dtype is None or value.dtype in FLOATS)
    return active


def _of_inputs(node: ir.Node, tape: Tape, dy: Sequence[Tensor | None], needed: frozenset[int]) -> dict[int, Tensor]:
    entry = entry_of(node)
    if entry is None:
        first = node.inputs[min(needed)]
        assert first is not None
        domain = f" of domain {node.domain!r}" if node.domain else ""
        raise ModelError(
            f"{node.op_type} (node {node.name!r}): no gradient rule for this operator{domain}; "
            f"the gradient of {first.name!r} depends on it"
        )
    assert entry.rule is not None
    call = Call(node, tape, dy, needed)
    written: dict[int, Tensor] = {}
    for index, gradient in enumerate(entry.rule(call)):
        if index not in needed:
            continue
        tensor = _written(gradient)
        if tensor is None:
            continue
        if entry.broadcasts:
            to = call.x[index]
            assert to is not None
            tensor = call.summed_to(tensor, to, call.y[0])
        written[index] = tensor
    return written


def _written(gradient: Gradient) -> Tensor | None:
    return gradient() if callable(gradient) else gradient
