"""What depends on what in a differentiable way, through branches and bodies of loops as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from gradfuse.differentiation.rules import FLOATS, entry_of
from gradfuse.models.inlining import captured_by, graphs_of

Lost = dict[ir.Value, ir.Node]
"""Values that depend on something through a node that refuses to be differentiated, with that node."""


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A Loop or a Scan, and where values that it carries along stand.

    The k-th of these is input `first + k` of the node and of the body, output `ahead + k` of the body, and output k of
    the node. What the body has behind them are slices: of inputs of a Scan, and of outputs.

    Attributes:
        node: the node.
        body: its body.
        first: how many inputs are ahead of the carried values.
        ahead: how many outputs of the body are.
        carried: how many carried values there are.
    """

    node: ir.Node
    body: ir.Graph
    first: int
    ahead: int
    carried: int

    def starts(self) -> list[tuple[ir.Value, ir.Value | None]]:
        """Return the inputs of the body with what they begin with, or with values that have the types of slices."""
        pairs = list(zip(self.body.inputs, self.node.inputs, strict=False))[self.first :]
        axes = self.node.attributes.get("scan_input_axes")
        for k in range(self.carried, len(pairs)):
            inner, outer = pairs[k]
            assert outer is not None
            shape = None
            if outer.shape is not None:
                dims = list(outer.shape)
                del dims[0 if axes is None else axes.as_ints()[k - self.carried]]
                shape = ir.Shape(dims)
            pairs[k] = inner, ir.Value(type=outer.type, shape=shape)
        return pairs


def repeated(node: ir.Node) -> Repeated | None:
    """Return the parts of a Loop or a Scan; None of another node."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Loop", "Scan"):
        return None
    body = node.attributes["body"].as_graph()
    if node.op_type == "Loop":
        return Repeated(node, body, 2, 1, len(body.inputs) - 2)
    return Repeated(node, body, 0, 0, len(body.inputs) - node.attributes["num_scan_inputs"].as_int())


def is_branches(node: ir.Node) -> bool:
    """Whether a node is an If."""
    return node.op_type == "If" and node.domain in ("", "ai.onnx")


def depending(
    nodes: Sequence[ir.Node], wrt: Collection[ir.Value], lost: Mapping[ir.Value, ir.Node] | None = None
) -> tuple[set[ir.Value], Lost]:
    """Return what depends on some of `wrt` in a differentiable way, with these themselves, and what is lost.

    Args:
        nodes: the nodes of a graph.
        wrt: values that they depend on.
        lost: values that are lost ahead of them.
    """
    active = set(wrt)
    gone: Lost = dict(lost or {})
    for node in nodes:
        sources = [value for value in (*node.inputs, *captured_by(node)) if value is not None]
        depends = any(value in active for value in sources)
        refusing = next((gone[value] for value in sources if value in gone), None)
        if (not depends and refusing is None) or is_constant(node):
            continue
        if is_branches(node) or repeated(node) is not None:
            inner_active, inner_gone = _through(node, sources, active, gone)
            active |= inner_active
            gone |= inner_gone
            continue
        entry = entry_of(node)
        if depends and ((entry is not None and entry.refused) or rounds(node)):
            refusing = node
        if refusing is not None:
            gone |= dict.fromkeys(node.outputs, refusing)
        if depends:
            active.update(value for value in node.outputs if may_be_float(value))
    return active, gone


def active_inputs(loop: Repeated, active: Collection[ir.Value], lost: Mapping[ir.Value, ir.Node]) -> set[ir.Value]:
    """Return the inputs of a loop's body that depend on what is active around it, in any iteration."""
    return set(loop.body.inputs) & _turns(loop, active, lost)[0]


def within(node: ir.Node, active: Collection[ir.Value]) -> list[tuple[ir.Graph, set[ir.Value]]]:
    """Return the branches of an If, or the body of a Loop or a Scan, with what depends on active values in each."""
    loop = repeated(node)
    if loop is not None:
        return [(loop.body, _turns(loop, active, {})[0])]
    return [(branch, depending(list(branch), active)[0]) for branch in graphs_of(node)]


def _through(
    node: ir.Node, sources: Sequence[ir.Value], active: Collection[ir.Value], lost: Lost
) -> tuple[set[ir.Value], Lost]:
    """Return the outputs of an If, a Loop or a Scan that depend on what is active, and those that are lost."""
    around = {value for value in sources if value in active}
    gone = {value: lost[value] for value in sources if value in lost}
    loop = repeated(node)
    if loop is not None:
        found = [(loop.body.outputs[loop.ahead :], *_turns(loop, around, gone))]
    else:
        found = [(branch.outputs, *depending(list(branch), around, gone)) for branch in graphs_of(node)]
    outer_active: set[ir.Value] = set()
    outer_lost: Lost = {}
    for outputs, inner_active, inner_lost in found:
        for outer, inner in zip(node.outputs, outputs, strict=False):
            if inner in inner_active and may_be_float(outer):
                outer_active.add(outer)
            if inner in inner_lost:
                outer_lost[outer] = inner_lost[inner]
    return outer_active, outer_lost


def _turns(
    loop: Repeated, active: Collection[ir.Value], lost: Mapping[ir.Value, ir.Node]
) -> tuple[set[ir.Value], Lost]:
    """Return what depends on active values within a body, and what is lost, once its outputs have become its inputs."""
    node, body = loop.node, loop.body
    pairs = list(zip(body.inputs, node.inputs, strict=False))
    outside = [*captured_by(node), *(value for value in node.inputs if value is not None)]
    start = {value for value in outside if value in active}
    start |= {inner for inner, outer in pairs if outer is not None and outer in active}
    gone = {value: lost[value] for value in outside if value in lost}
    gone |= {inner: lost[outer] for inner, outer in pairs if outer is not None and outer in lost}
    nodes = list(body)
    while True:
        inner_active, inner_lost = depending(nodes, start, gone)
        ends = [(body.inputs[loop.first + k], body.outputs[loop.ahead + k]) for k in range(loop.carried)]
        more = {first for first, last in ends if last in inner_active and first not in start}
        more_lost = {first: inner_lost[last] for first, last in ends if last in inner_lost and first not in gone}
        if not more and not more_lost:
            return inner_active, inner_lost
        start |= more
        gone |= more_lost


def is_constant(node: ir.Node) -> bool:
    """Whether the derivative of a node is 0 wherever it has one, or its outputs are no floats."""
    entry = entry_of(node)
    return entry is not None and entry.rule is None and not entry.refused


def may_be_float(value: ir.Value) -> bool:
    """Whether a value has a type that carries gradients, or an unknown one."""
    return value.dtype is None or value.dtype in FLOATS


def rounds(node: ir.Node) -> bool:
    """Whether a node casts to a float type that gradients cannot have, such as those of 8 bits."""
    dtype = node.outputs[0].dtype
    return (
        node.op_type in ("Cast", "CastLike") and dtype not in FLOATS and dtype is not None and dtype.is_floating_point()
    )
