"""Function bodies in models: what lets a fused model run where the library is not registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING

from gradfuse.custom_ops import OPS
from gradfuse.custom_ops.operator import DOMAIN, VERSION, Call, Dim, Operator, Tensor, Value, Variant
from gradfuse.errors import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

_FUNCTION_IR_VERSION = 8
_OVERLOAD_IR_VERSION = 10
# What onnxruntime writes into models that it makes, such as training artifacts, for the domain of a registered library.
_ONNXRUNTIME_VERSION = 1000


def attach(model: ir.Model) -> None:
    """Give a model the function body of every aclnn operator it uses: in its graph, subgraphs and functions.

    There is one body per operator and :class:`Variant`. The variant that most nodes of an operator need has no
    overload; the others have one, which needs IR version 10, so the model is raised to it in that case only. Runtimes
    that ignore overloads (onnxruntime before 1.27, onnx.reference) would take the last body of a name for all of its
    nodes, so the last is then one that no node names and that cannot run: they refuse the model instead. Absent
    inputs at the end of a node are dropped, as the body does not have them, and attributes left to their defaults are
    written out, as neither kernels nor onnx.reference are given a function's defaults. Attaching again changes nothing.

    Raises:
        ArgumentError: a node has inputs or attributes which its operator does not accept.
        ModelError: the model's default opset is older than the bodies need, or its aclnn opset is not 1.
    """
    import onnx_ir as ir

    nodes = [(node, OPS[node.op_type]) for node in aclnn_nodes(model)]
    strip(model)
    if not nodes:
        return
    opset = _prepare_opsets(model, max(operator.oldest_opset for _, operator in nodes))
    variants: dict[str, Counter[Variant]] = {}
    needed: list[tuple[ir.Node, Operator, Variant]] = []
    for node, operator in nodes:
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
        call = described(operator, node)
        for name, value in call.attributes.items():
            if name not in node.attributes:
                node.attributes.add(ir.convenience.convert_attribute(name, value))
        variant = operator.variant(call, opset)
        needed.append((node, operator, variant))
        variants.setdefault(operator.name, Counter())[variant] += 1

    overloads = {
        (name, variant): _overload(variant) if rank else ""
        for name, counts in variants.items()
        for rank, (variant, _) in enumerate(counts.most_common())
    }
    for node, operator, variant in needed:
        node.overload = overloads[operator.name, variant]
    # onnx.reference knows in a function only those that stand before it.
    others = dict(model.functions)
    model.functions.clear()
    for (name, variant), overload in overloads.items():
        proto = OPS[name].function(variant)
        proto.overload = overload
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
    for name, counts in variants.items():
        if len(counts) > 1:
            function = ir.serde.deserialize_function(OPS[name].refusal(opset))
            model.functions[function.identifier()] = function
    model.functions.update(others)
    model.ir_version = max(model.ir_version, _OVERLOAD_IR_VERSION if any(overloads.values()) else _FUNCTION_IR_VERSION)


def strip(model: ir.Model) -> None:
    """Remove the function bodies of aclnn operators from a model, and the overloads that named them."""
    for identifier in [key for key in model.functions if key[0] == DOMAIN and key[1] in OPS]:
        del model.functions[identifier]
    for node in aclnn_nodes(model):
        node.overload = ""


def aclnn_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of aclnn operators of a model: in its graph, subgraphs and functions."""
    for graph in _graphs(model):
        for node in every_node(graph):
            if node.domain == DOMAIN and node.op_type in OPS:
                yield node


def every_node(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Yield the nodes of a graph, each followed by those of the graphs within it."""
    import onnx_ir as ir

    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                yield from every_node(attribute.as_graph())
            elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                for inner in attribute.as_graphs():
                    yield from every_node(inner)


def _graphs(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    """The main graph and the model's own functions; bodies that are attached hold no node of ours."""
    yield model.graph
    yield from (function for function in model.functions.values() if function.domain != DOMAIN)


def _prepare_opsets(model: ir.Model, oldest: int) -> int:
    """Import the domain wherever a node of it is, and return the version of the default domain for the bodies."""
    for graph in _graphs(model):
        if any(node.domain == DOMAIN for node in every_node(graph)):
            found = graph.opset_imports.get(DOMAIN, VERSION)
            if found not in (VERSION, _ONNXRUNTIME_VERSION):
                raise ModelError(f"model: opset of domain {DOMAIN} is {found}; expected {VERSION}")
            graph.opset_imports[DOMAIN] = VERSION
    model.graph.opset_imports[DOMAIN] = VERSION
    opset = model.graph.opset_imports.setdefault("", oldest)
    if opset < oldest:
        raise ModelError(f"model: default opset is {opset}; expected {oldest} or newer")
    return opset


def described(operator: Operator, node: ir.Node, known: Callable[[ir.Value], Tensor] | None = None) -> Call:
    """Describe a node of an operator by what is known of its inputs; None: what the model declares.

    Raises:
        ArgumentError: an attribute refers to one of a function, or an input or attribute is not the operator's.
    """
    known = known or _declared
    attributes: dict[str, Value] = {}
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            call = Call(operator.name, node.name or "", {}, {})
            raise call.error(name, f"a reference to attribute {attribute.ref_attr_name!r} of a function", "a value")
        attributes[name] = attribute.value
    return operator.call(node.name or "", [None if v is None else known(v) for v in node.inputs], attributes)


def _declared(value: ir.Value) -> Tensor:
    import onnx_ir as ir

    dims: tuple[Dim, ...] | None = None
    if value.shape is not None:
        dims = tuple(dim.value if isinstance(dim, ir.SymbolicDim) else int(dim) for dim in value.shape)
    return Tensor(0 if value.dtype is None else int(value.dtype), dims)


def _overload(variant: Variant) -> str:
    """A name for a variant: the same for the same variant, whatever else the model holds."""
    return "_".join([*(_label(choice) for choice in sorted(variant.choices)), "of", *variant.inputs])


def _label(choice: str) -> str:
    """A choice in the name of a variant: itself, or the first digits of its hash where it is longer than a word."""
    return choice if choice.isidentifier() else sha256(choice.encode()).hexdigest()[:16]
