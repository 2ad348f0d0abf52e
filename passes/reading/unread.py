"""Values that no reader expresses: their names and their dimensions."""

from __future__ import annotations

import contextlib

import onnx_ir as ir

from gradfuse.passes.algebra import ZERO, TooComplex
from gradfuse.passes.reading.dims import ELEMENTWISE, SAME_SHAPE
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form, Group, groups_of_sizes
from gradfuse.passes.reading.nodes import DRAWS, Opaque, Unreadable, attribute
from gradfuse.passes.reading.reductions import reduced_axes
from gradfuse.passes.reading.replay import attributes_key

_REDUCTIONS = {"ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceMean", "ReduceSum", "ReduceL2"}
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def opaque(forms: KnownForms, node: ir.Node, output: int) -> Form:
    """An output as a name, which says the operation and its operands: equal computations have equal names."""
    value = node.outputs[output]
    constant = forms.constant(value)
    if constant is not None:
        return forms.constants.form(constant)
    name: object = ("value", value.name)
    if node.op_type not in DRAWS and not any(a.type in _GRAPHS for a in node.attributes.values()):
        with contextlib.suppress(Unreadable):
            operands = tuple([None if v is None else forms.form(v) for v in node.inputs])
            name = (node.domain, node.op_type, attributes_key(node), operands, output)
    return forms.named(name, _groups(forms, node, output), value)


def _groups(forms: KnownForms, node: ir.Node, output: int) -> tuple[Group, ...]:
    """The dimensions of a named value: those that follow from its operands before those that the model states."""
    if not node.domain and (output == 0 or node.op_type == "Dropout"):
        with contextlib.suppress(Opaque, Unreadable, TooComplex, LookupError, TypeError, ValueError):
            groups = _following_groups(forms, node)
            if groups is not None:
                return groups
    return forms.groups_of(node.outputs[output])


def _following_groups(forms: KnownForms, node: ir.Node) -> tuple[Group, ...] | None:
    """The dimensions that an operator gives its output by those of its inputs."""
    if node.op_type in SAME_SHAPE:
        return forms.one_variable_each(forms.operand(node, 0))
    if node.op_type in ELEMENTWISE or node.op_type == "MatMul":
        shapes = [Form(forms.one_variable_each(f), ZERO) for f in forms.operands(node)]
        if node.op_type in ELEMENTWISE:
            return forms.one_variable_each(Form(forms.broadcast(shapes)[0], ZERO))
        if all(len(f.groups) > 1 for f in shapes):
            batch, _ = forms.broadcast([Form(f.groups[:-2], ZERO) for f in shapes])
            return (*batch, shapes[0].groups[-2], shapes[1].groups[-1])
    elif node.op_type == "Gemm":
        a, b = (forms.one_variable_each(forms.operand(node, k)) for k in range(2))
        return (a[1 if attribute(node, "transA", 0) else 0], b[0 if attribute(node, "transB", 0) else 1])
    elif node.op_type in _REDUCTIONS:
        x = Form(forms.one_variable_each(forms.operand(node, 0)), ZERO)
        _, order = reduced_axes(forms, node, x)
        return tuple(() if a is None else x.groups[a] for a in order)
    elif node.op_type == "Reshape":
        target = forms.vector(node.inputs[1])
        if target is not None and not any(s.integer is not None and s.integer < 1 for s in target):
            return groups_of_sizes(target)
    return None
