"""Inlines functions of a model, in time linear in the size of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir


def inline(model: ir.Model, chosen: Callable[[ir.Function], bool]) -> None:
    """Inline functions: in the graph, subgraphs and other functions.

    Functions that were called are removed from the model. Values of the bodies and nodes get names that
    nothing else has; the results of a call keep theirs.

    Args:
        model: the model, which is changed; none of its functions calls itself.
        chosen: which functions to inline.

    Raises:
        ValueError: a function has another opset than the model, takes a graph as an attribute, or is called with more
            inputs or outputs than it has. The model is then unusable.
    """
    functions = {key: function for key, function in model.functions.items() if chosen(function)}
    gone: set[ir.OperatorIdentifier] = set()
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for holder in holders:
        if isinstance(holder, ir.Function) and holder.identifier() in gone:
            continue
        names = Names(holder)
        graphs = [holder.graph if isinstance(holder, ir.Function) else holder]
        while graphs:
            graph = graphs.pop()
            # The nodes of a body stand behind its call, so that calls among them are met as well.
            for node in graph:
                function = functions.get(node.op_identifier())
                if function is None:
                    graphs += graphs_of(node)
                    continue
                gone.add(node.op_identifier())
                _import(model, holder, function)
                _put_in(graph, node, function, names)
    for key in gone:
        del model.functions[key]


class Names:
    """How often each name of values and of nodes is in graphs and all graphs within them."""

    def __init__(self, *holders: ir.Graph | ir.Function) -> None:
        self._taken: dict[str, Counter[str]] = {"value": Counter(), "node": Counter()}
        self._last: dict[tuple[str, str], int] = {}
        for holder in holders:
            for graph in (holder, *holder.subgraphs()):
                own = graph.initializers if isinstance(graph, ir.Graph) else ()
                values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
                names = {*own, *(value.name for value in values if value.name)}
                self._taken["value"].update(names)
                self._taken["node"].update(node.name for node in graph if node.name)

    def kept(self, kind: str, name: str, inside: Names) -> str:
        """The name of something that comes out of some graphs: its own, unless it is outside of them too."""
        return name if self._taken[kind][name] <= inside._taken[kind][name] else self.fresh(kind, name)

    def fresh(self, kind: str, name: str) -> str:
        """A name that nothing of this kind has: the name itself, or with a number behind it."""
        taken, candidate, number = self._taken[kind], name, self._last.get((kind, name), 1)
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        self._last[kind, name] = number
        taken[candidate] += 1
        return candidate


def put_branch(graph: ir.Graph, node: ir.Node, branch: ir.Graph, names: Names) -> None:
    """Replace an If by the branch that it always takes; its results keep the If's names.

    Args:
        graph: the graph of the If.
        node: the If.
        branch: one of its graphs; its initializers become constants.
        names: the names that are taken, with those of both branches.
    """
    inside = Names(*graphs_of(node))
    for value in list(branch.initializers.values()):
        tensor = value.const_value
        assert tensor is not None
        constant = ir.node("Constant", [], {"value": ir.AttrTensor("value", tensor)}, name=f"{value.name}/Constant")
        if len(branch):
            branch.insert_before(branch[0], constant)
        else:
            branch.append(constant)
        value.replace_all_uses_with(constant.outputs[0], replace_graph_outputs=True)
        constant.outputs[0].name = value.name
        constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
        del branch.initializers[str(value.name)]
    for one in branch.all_nodes():
        one.name = names.kept("node", one.name, inside) if one.name else names.fresh("node", "node")
        for value in one.outputs:
            value.name = names.kept("value", value.name, inside) if value.name else value.name
    results = _results(branch, len(node.outputs), names)
    branch.outputs.clear()
    nodes = list(branch)
    branch.remove(nodes)
    for old, new in zip(node.outputs, results, strict=True):
        old.name = old.name or new.name
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, results)


def graphs_of(node: ir.Node) -> list[ir.Graph]:
    """The branches or the body of a node."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield all values of a graph and of those within it."""
    for part in (graph, *graph.subgraphs()):
        yield from part.inputs
        yield from part.initializers.values()
        for node in part:
            yield from node.outputs


def captured_by(node: ir.Node) -> list[ir.Value]:
    """Return the values outside a node's subgraphs that these read."""
    graphs = graphs_of(node)
    if not graphs:
        return []
    inside: set[ir.Value] = set()
    read: dict[ir.Value, None] = {}
    while graphs:
        graph = graphs.pop()
        inside.update(graph.inputs, graph.initializers.values())
        read |= dict.fromkeys(graph.outputs)
        for inner in graph:
            inside.update(inner.outputs)
            read |= dict.fromkeys(value for value in inner.inputs if value is not None)
            graphs += graphs_of(inner)
    return [value for value in read if value not in inside]


def _import(model: ir.Model, holder: ir.Graph | ir.Function, function: ir.Function) -> None:
    """Import what the body needs, where its calls are."""
    for domain, version in function.opset_imports.items():
        known = model.opset_imports.setdefault(domain, version)
        if known != version:
            raise ValueError(f"{function.name} has version {version} of domain {domain!r}, the model {known}")
        holder.opset_imports.setdefault(domain, version)


def _put_in(graph: ir.Graph, call: ir.Node, function: ir.Function, names: Names) -> None:
    attributes = {**{k: a for k, a in function.attributes.items() if a.value is not None}, **call.attributes}
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in attributes.values()):
        raise ValueError(f"{function.name} takes a graph as an attribute")
    if len(call.inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
        raise ValueError(f"{function.name} is called with more inputs or outputs than it has")
    given = [*call.inputs, *[None] * (len(function.inputs) - len(call.inputs))]
    if any(
        formal in function.outputs and actual is None for formal, actual in zip(function.inputs, given, strict=True)
    ):
        raise ValueError(f"{function.name} gives an input that its call leaves out")
    body = function.graph.clone()
    for node in body.all_nodes():
        _resolve(node, attributes)
        node.metadata_props.update({**call.metadata_props, **node.metadata_props})
        node.name = names.fresh("node", node.name or "node")
        for value in node.outputs:
            value.name = names.fresh("value", value.name or "val")
    for inner in body.subgraphs():
        for value in (*inner.inputs, *inner.initializers.values()):
            value.name = names.fresh("value", value.name or "val")

    results = _results(body, len(call.outputs), names)
    body.outputs.clear()
    for formal, actual in zip(body.inputs, given, strict=True):
        for node, index in list(formal.uses()):
            node.replace_input_with(index, actual)
    nodes = list(body)
    body.remove(nodes)
    for old, new in zip(call.outputs, results, strict=True):
        old.name = old.name or new.name
    ir.convenience.replace_nodes_and_values(graph, call, [call], nodes, call.outputs, results)


def _resolve(node: ir.Node, attributes: Mapping[str, ir.Attr]) -> None:
    """Replace references to attributes by the call's attributes; missing ones are left out."""
    for attribute in list(node.attributes.values()):
        if not attribute.is_ref():
            continue
        del node.attributes[attribute.name]
        given = attributes.get(str(attribute.ref_attr_name))
        if given is None:
            continue
        if given.is_ref():
            node.attributes.add(ir.RefAttr(attribute.name, str(given.ref_attr_name), given.type))
        else:
            node.attributes.add(ir.Attr(attribute.name, given.type, given.value))


def _results(body: ir.Graph, count: int, names: Names) -> list[ir.Value]:
    """The values that a call's outputs become: of nodes, and each of its own, as they take the outputs' names."""
    results: list[ir.Value] = []
    for value in list(body.outputs)[:count]:
        if value.producer() is None or value in results:
            node = ir.node("Identity", [value], name=names.fresh("node", "node"))
            node.outputs[0].name = names.fresh("value", value.name or "val")
            body.append(node)
            value = node.outputs[0]
        results.append(value)
    return results
