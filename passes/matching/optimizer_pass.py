"""The pass of an operator that updates one parameter: onnxruntime-training has optimizers that update sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes.algebra import UNIT, Poly
from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.context import Context
from gradfuse.passes.matching.cost import cost_of
from gradfuse.passes.matching.fuse_pass import FusePass
from gradfuse.passes.matching.graphs import is_node_of_training, names_of
from gradfuse.passes.matching.rewrite import Mismatch
from gradfuse.passes.matching.site import Site
from gradfuse.passes.reading import attribute
from gradfuse.passes.report import Fusion, NearMiss

_RULE = "optimizer-of-sequences"
_GIVEN = (
    "it updates sequences of tensors, inputs whose number a model does not say, and Optimizer of onnxruntime-training "
    "loads no model without it; gradfuse.to_stock makes a step of the artifacts, with an update for each parameter"
)
_NO_GAIN = "not profitable: it is one node that is fused, too"


class OptimizerPass(FusePass):
    """Besides single updates, takes an optimizer of onnxruntime-training over sequences that the graph lists.

    Its SequenceConstruct nodes have the tensors: each parameter gets a node of the operator. What SequenceAt takes at
    a constant position is the new tensor itself; other readers get the new tensors as a sequence. Only the policy
    "all" does so: the optimizer is as fast, where there is one.
    """

    optimizer: ClassVar[str]
    """The optimizer of onnxruntime-training."""
    sequences: ClassVar[Sequence[int]]
    """Which inputs of it are the sequences: parameters and gradients first, then the states."""
    signal: ClassVar[int]
    """Which of its inputs says whether to update anything."""
    flagged: ClassVar[int]
    """Which of its inputs has the shape of its first output, which says whether anything was updated."""

    @abstractmethod
    def _require(self, node: ir.Node) -> None:
        """Raises Mismatch where the operator is another update than an optimizer's."""

    @abstractmethod
    def _numbers(self, site: Site, builder: Builder, node: ir.Node) -> list[ir.Value]:
        """The inputs of the operator that are the same for all parameters."""

    @abstractmethod
    def _updated(self, site: Site, builder: Builder, node: ir.Node, inputs: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        """The new parameter and states, by a node of the operator with these inputs."""

    def run(self, context: Context) -> bool:
        changed = super().run(context)
        count = len(self.fusions)
        misses: list[NearMiss] = []
        for site in context.sites():
            for node in [node for node in site.graph if is_node_of_training(node, self.optimizer)]:
                try:
                    self._replace(site, node)
                except Mismatch as reason:
                    (name,) = names_of([node])
                    matched = str(reason) == _NO_GAIN
                    text = str(reason) if matched else f"{self.optimizer} of onnxruntime-training: {reason}"
                    misses.append(
                        NearMiss(name, self.operator, text, match=_RULE if matched else "", nodes=names_of([node]))
                    )
        self.near_misses += misses
        context.report.near_misses += misses
        context.report.fusions += self.fusions[count:]
        if len(self.fusions) > count:
            context.model.graph.opset_imports.setdefault(custom_ops.DOMAIN, custom_ops.VERSION)
        return changed or len(self.fusions) > count

    def _replace(self, site: Site, node: ir.Node) -> None:
        parameters, made = self._parameters(site, node)
        if self.policy != "all":
            raise Mismatch(_NO_GAIN)
        builder = Builder(site, parameters[0][0])
        signal = node.inputs[self.signal] if len(node.inputs) > self.signal else None
        condition = None if signal is None else single(site, builder, signal, "update signal")
        numbers = self._numbers(site, builder, node)
        fused: list[ir.Node] = []
        new: list[list[ir.Value]] = [[] for _ in node.outputs[1:]]
        for tensors in parameters:
            results = self._updated(site, builder, node, [*tensors, *numbers])
            producer = results[0].producer()
            assert producer is not None
            fused.append(producer)
            # Of the gradients there is no new one.
            for own, old, result in zip(new, (tensors[0], *tensors[2:]), results, strict=False):
                chosen = result
                if condition is not None:
                    chosen = builder.op("Where", [condition, result, old], old.dtype, site.extents(old))
                own.append(chosen)
        flag = self._flag(site, builder, node, condition)
        dead = [*_handed_over(site, builder, node, new, flag), node]
        dead += [one for one in dict.fromkeys(made) if all(use.node is node for use in one.outputs[0].uses())]
        positions = dict.fromkeys(one.inputs[1] for one in dead if one.op_type == "SequenceAt")
        constants = [_constant_of(value, dead) for value in positions]
        dead += [one for one in constants if one is not None]
        for one in fused:
            one.metadata_props["gradfuse.rule"] = _RULE
            one.metadata_props["gradfuse.replaced"] = ", ".join(names_of(dead))
            moved = cost_of(site, [one]).bytes
            self.fusions.append(Fusion(self.operator, str(one.name), _RULE, names_of(dead), moved, moved, 1.0))
        site.graph.insert_before(node, builder.nodes)
        builder.commit(node)
        site.forms.place(builder.nodes, node)
        for value in (value for one in dead for value in one.outputs):
            site.leave(value)
        site.graph.remove(dead, safe=True)

    def _parameters(self, site: Site, node: ir.Node) -> tuple[list[list[ir.Value]], list[ir.Node]]:
        """The tensors of each parameter, and the nodes that list them.

        Raises:
            Mismatch: the node is another update, or its tensors are not listed; with all reasons.
        """
        reasons: dict[str, None] = {}
        made: list[ir.Node] = []
        try:
            self._require(node)
        except Mismatch as reason:
            reasons[str(reason)] = None
        for k, place in enumerate(self.sequences):
            try:
                made.append(_construct(site, node, place, is_updated=k != 1))
            except Mismatch as reason:
                reasons[str(reason)] = None
        if reasons:
            raise Mismatch("; and ".join(reasons))
        return _parameters(site, made), made

    def _flag(self, site: Site, builder: Builder, node: ir.Node, condition: ir.Value | None) -> ir.Value | None:
        """What takes the place of the first output; None where nothing reads it."""
        if not (node.outputs[0].uses() or node.outputs[0].is_graph_output()):
            return None
        shaped = node.inputs[self.flagged]
        assert shaped is not None
        sizes = site.extents(shaped)
        if condition is None:
            condition = builder.constant(np.ones((), bool), ir.DataType.BOOL)
        return builder.op("Expand", [condition, builder.shape(sizes)], ir.DataType.BOOL, sizes)


def _construct(site: Site, node: ir.Node, place: int, *, is_updated: bool) -> ir.Node:
    """The node that lists the tensors of a sequence.

    Raises:
        Mismatch: there is none, or something else sees what is updated in place.
    """
    value = node.inputs[place] if len(node.inputs) > place else None
    if value is None:
        raise Mismatch(f"it has no input {place}")
    made = value.producer()
    if made is None or made.graph is not site.graph:
        raise Mismatch(_GIVEN)
    if made.op_type != "SequenceConstruct" or made.domain:
        raise Mismatch(f"{made.op_type} makes one of its sequences, and only SequenceConstruct lists their tensors")
    if is_updated and (len(value.uses()) > 1 or value.is_graph_output()):
        raise Mismatch(f"something else reads the sequence {str(value.name)!r}, which it updates in place")
    return made


def _parameters(site: Site, made: Sequence[ir.Node]) -> list[list[ir.Value]]:
    """For each parameter its tensors in the sequences.

    Raises:
        Mismatch: they do not fit each other.
    """
    if len({len(node.inputs) for node in made}) > 1:
        raise Mismatch("its sequences have " + " and ".join(str(len(node.inputs)) for node in made) + " tensors")
    found = [
        [value for value in tensors if value is not None] for tensors in zip(*(n.inputs for n in made), strict=True)
    ]
    for tensors in found:
        if not all(site.knows(value) for value in tensors):
            raise Mismatch(f"the shape of {str(tensors[0].name)!r}, or of what belongs to it, is unknown")
        if any(value.dtype != ir.DataType.FLOAT for value in tensors):
            raise Mismatch("not all of its tensors are float32")
        if any(site.extents(value) != site.extents(tensors[0]) for value in tensors):
            raise Mismatch(f"{str(tensors[0].name)!r} and what belongs to it have several shapes")
    return found


def single(site: Site, builder: Builder, value: ir.Value | None, what: str) -> ir.Value:
    """A value of one element without dimensions.

    Raises:
        Mismatch: it has more elements, as far as is known.
    """
    if value is None or not site.knows(value) or any(size != UNIT for size in site.extents(value)):
        raise Mismatch(f"its {what} is not known to be a single number")
    none: list[Poly] = []
    return builder.reshape(value, none)


def number(node: ir.Node, name: str, default: float) -> float:
    """A float attribute with the digits that its number in float32 was made of."""
    return float(f"{attribute(node, name, default):.7g}")


def _handed_over(
    site: Site, builder: Builder, node: ir.Node, new: Sequence[Sequence[ir.Value]], flag: ir.Value | None
) -> list[ir.Node]:
    """Gives the readers of an optimizer what takes the place of its outputs; the readers that go with it."""
    gone = []
    if flag is not None:
        _replace(site, node.outputs[0], flag)
    for sequence, tensors in zip(node.outputs[1:], new, strict=True):
        handed: set[ir.Value] = set()
        for use in list(sequence.uses()):
            position = _position(site, use.node)
            if position is None or not -len(tensors) <= position < len(tensors):
                continue
            tensor, taken = tensors[position], use.node.outputs[0]
            # A value has one name.
            if taken.is_graph_output() and (tensor in handed or tensor.is_graph_output()):
                continue
            handed.add(tensor)
            _replace(site, taken, tensor)
            gone.append(use.node)
        if any(use.node not in gone for use in sequence.uses()) or sequence.is_graph_output():
            whole = builder.op("SequenceConstruct", tensors, None)
            whole.type = sequence.type or ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
            _replace(site, sequence, whole)
    return gone


def _position(site: Site, node: ir.Node) -> int | None:
    """The constant position of a SequenceAt; None for other nodes."""
    if node.op_type != "SequenceAt" or node.domain or node.graph is not site.graph:
        return None
    array = site.forms.constant(node.inputs[1])
    return None if array is None else int(array.item())


def _constant_of(value: ir.Value | None, nodes: Sequence[ir.Node]) -> ir.Node | None:
    """The node of a constant that no others read; None for other values."""
    made = None if value is None else value.producer()
    if value is None or made is None or made.op_type != "Constant" or value.is_graph_output():
        return None
    return made if all(use.node in nodes for use in value.uses()) else None


def _replace(site: Site, old: ir.Value, new: ir.Value) -> None:
    form = site.forms.get(old) if old in site.position else None
    if old.is_graph_output():
        name = old.name
        old.name = site.names.fresh(f"{name}_plain")
        new.name = name
        new.shape, new.type = old.shape or new.shape, old.type or new.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=old.is_graph_output())
    if form is not None:
        site.forms.set(new, form)
        site.enter(new, site.position[old])
