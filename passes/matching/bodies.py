"""Finds the function bodies of fused operators, as `gradfuse.expand` and inliners leave them in a graph.

Bodies are written for accuracy, with steps that the algebra does not read (blocks of rows, tests of their input). So
they are compared node by node with the operator's own body, from its output to its inputs; names do not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops import functions
from gradfuse.custom_ops.operator import OLDEST_OPSET, Tensor, Value
from gradfuse.errors import ArgumentError
from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.rewrite import Rewrite
from gradfuse.passes.matching.site import Site
from gradfuse.passes.reading import Forms


def find(site: Site, builder: Builder, root: ir.Value, operator: str) -> Rewrite | None:
    """The operator's node for a value that its whole body computes; None for other values."""
    node = _source(root).producer()
    variants = () if node is None else _bodies(operator, max(site.opset, OLDEST_OPSET)).get(node.op_type, ())
    for body, attributes in variants:
        match = _Match(site.forms)
        if not match.holds(body.outputs[0], root):
            continue
        inputs = [match.values[name] for name in body.inputs]
        chosen = {name: match.attributes.get(name, value) for name, value in attributes.items()}
        results = [root, *(match.counterpart(output) for output in body.outputs[1:])]
        sizes = [None if value is None else site.extents(value) for value in results]
        fused, *further = builder.fused_whole(operator, inputs, sizes, **chosen)
        made = fused.producer()
        assert made is not None
        try:
            described = functions.described(custom_ops.OPS[operator], made)
            custom_ops.OPS[operator].infer(described)
        except ArgumentError:
            builder.discard()
            continue
        others = tuple((old, new) for old, new in zip(results[1:], further, strict=True) if old is not None)
        return replace(builder.rewrite("function-body", [fused], fused), others=others, by_body=True)
    return None


@lru_cache
def _bodies(name: str, opset: int) -> Mapping[str, Sequence[tuple[ir.Function, Mapping[str, Value]]]]:
    """The variants of an operator's body, by the operation that gives its output.

    Each comes with the attributes that choose it, and the defaults of the others.
    """
    operator = custom_ops.OPS[name]
    defaults = {a.name: a.default for a in operator.attributes}
    found: dict[object, tuple[ir.Function, Mapping[str, Value]]] = {}
    for present in itertools.product(*((False, True) if i.optional else (True,) for i in operator.inputs)):
        for attributes in operator.samples:
            try:
                call = operator.call("", [Tensor() if there else None for there in present], attributes)
                variant = operator.variant(call, opset)
            except ArgumentError:
                continue  # inputs that are not supported
            if variant not in found:
                body = ir.serde.deserialize_function(operator.function(variant))
                found[variant] = body, {**defaults, **attributes}
    by_last: dict[str, list[tuple[ir.Function, Mapping[str, Value]]]] = {}
    for body, chosen in found.values():
        last = _source(body.outputs[0]).producer()
        assert last is not None
        by_last.setdefault(last.op_type, []).append((body, chosen))
    return by_last


def _source(value: ir.Value) -> ir.Value:
    """What a value is behind `Identity`: a context takes out those of a graph."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and not node.domain:
        if node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


class _Match:
    """One body compared with a graph: the values that its inputs are there, and the attributes found in constants."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self.values: dict[ir.Value, ir.Value] = {}
        self.attributes: dict[str, Value] = {}
        self._todo: list[tuple[ir.Value | None, ir.Value | None]] = []

    def holds(self, output: ir.Value, root: ir.Value) -> bool:
        """Whether the nodes behind the root are those behind the output of the body."""
        self._todo = [(output, root)]
        while self._todo:
            own, other = self._todo.pop()
            if own is None or other is None:
                if own is not other:
                    return False
                continue
            own, other = _source(own), _source(other)
            if own not in self.values:
                self.values[own] = other
                if not self._is_made_alike(own, other):
                    return False
            elif self.values[own] is not other and not self._is_made_alike(own, other):
                return False
        return True

    def counterpart(self, output: ir.Value) -> ir.Value | None:
        """The value of the graph that is another output of the body; None where nothing computes it."""
        output = _source(output)
        if output in self.values:
            return self.values[output]
        node = output.producer()
        known = [v for v in (() if node is None else node.inputs) if v is not None and v in self.values]
        for candidate in [out for v in known[:1] for use in self.values[v].uses() for out in use.node.outputs]:
            trial = _Match(self._forms)
            trial.values, trial.attributes = dict(self.values), dict(self.attributes)
            if trial.holds(output, candidate):
                return candidate
        return None

    def _is_made_alike(self, own: ir.Value, other: ir.Value) -> bool:
        """Whether two values are made by the same operation; its operands are added to what is left to compare."""
        node, twin = own.producer(), other.producer()
        if node is None:
            return self.values[own] is other  # an input
        if node.op_type == "Constant":
            return self._is_same_constant(node, own, other)
        if twin is None or (node.op_type, node.domain) != (twin.op_type, twin.domain):
            return False
        if own.index() != other.index() or len(node.inputs) != len(twin.inputs):
            return False
        if node.attributes.keys() != twin.attributes.keys():
            return False
        self._todo.extend(zip(node.inputs, twin.inputs, strict=True))
        return all(self._is_same_attribute(a, twin.attributes[name]) for name, a in node.attributes.items())

    def _is_same_attribute(self, own: ir.Attr, other: ir.Attr) -> bool:
        if own.is_ref():
            name = own.ref_attr_name
            assert name is not None
            return own.type == other.type and bool(self.attributes.setdefault(name, other.value) == other.value)
        if own.type != ir.AttributeType.GRAPH or other.type != ir.AttributeType.GRAPH:
            return bool(own.type == other.type and own.value == other.value)
        graph, twin = own.as_graph(), other.as_graph()
        if len(graph.inputs) != len(twin.inputs) or len(graph.outputs) != len(twin.outputs):
            return False
        self.values.update(zip(graph.inputs, twin.inputs, strict=True))
        self._todo.extend(zip(graph.outputs, twin.outputs, strict=True))
        return True

    def _is_same_constant(self, node: ir.Node, own: ir.Value, other: ir.Value) -> bool:
        array = self._forms.constant(other)
        if array is None:
            return False
        ((_, given),) = node.attributes.items()
        if not given.is_ref():
            wanted = np.asarray(ir.convenience.get_const_tensor(own))
            return wanted.dtype == array.dtype and np.array_equal(wanted, array)
        name = given.ref_attr_name
        assert name is not None
        kind = {ir.AttributeType.INT: np.int64, ir.AttributeType.FLOAT: np.float32}[given.type]
        if array.dtype != kind or array.shape != ():
            return False
        return bool(self.attributes.setdefault(name, array.item()) == array.item())
