"""BatchNormalization of a forward model as it is in training: by the batch's mean and variance."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from gradfuse.differentiation.rules import error_of
from gradfuse.differentiation.tensors import Tape, Tensor

_MEAN, _VARIANCE = 3, 4


def running_statistics(graph: ir.Graph) -> set[str]:
    """Return the names of the initializers that are nothing but running means and variances."""
    found: set[str] = set()
    for name, value in graph.initializers.items():
        uses = list(value.uses())
        if uses and all(node.op_type == "BatchNormalization" and index in (_MEAN, _VARIANCE) for node, index in uses):
            found.add(name)
    return found


def separate_statistics(graph: ir.Graph) -> None:
    """Give each node in inference mode running statistics of its own.

    Exporters merge initializers that are equal, as those of layers that were not trained yet are.

    Raises:
        ModelError: statistics are no initializers, or a node is in a subgraph.
    """
    taken = set(graph.initializers)
    seen: set[ir.Value] = set()
    for node in _nodes(graph):
        for index in (_MEAN, _VARIANCE):
            value = node.inputs[index]
            if value is None or value.const_value is None or value.name not in graph.initializers:
                raise error_of(node, f"its input {index} is no initializer; expected one with train_batch_norm=True")
            if value in seen or len({user for user, _ in value.uses()}) < len(list(value.uses())):
                name = _fresh(f"{node.outputs[0].name}.running_{'mean' if index == _MEAN else 'var'}", taken)
                copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
                graph.register_initializer(copy)
                node.replace_input_with(index, copy)
                value = copy
            seen.add(value)


def use_batch_statistics(graph: ir.Graph, tape: Tape) -> dict[str, Tensor]:
    """Put the nodes in training mode.

    Returns:
        The name of each running statistic, and its new value, which is that of torch: the running variance is updated
        by the unbiased one, where ONNX takes the other.
    """
    updated: dict[str, Tensor] = {}
    for node in list(_nodes(graph)):
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        node.resize_outputs(3)
        found = node.attributes.get("momentum")
        momentum = 0.9 if found is None else found.as_float()
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        for index, (old, new) in enumerate(zip(node.inputs[_MEAN:], node.outputs[1:], strict=True)):
            assert old is not None and old.name is not None
            new.name = f"{y.name}.new_{'var' if index else 'mean'}"
            new.type, new.shape = old.type, old.shape
            after = tape.of(new)
            if index:
                dtype = after.dtype
                channels = tape.of(old).op("Size").cast(dtype)
                count = tape.of(x).op("Size").cast(dtype) / channels
                kept = tape.of(old) * momentum
                after = kept + (after - kept) * (count / (count - 1).op("Max", 1.0))
            updated[old.name] = after
    return updated


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph.all_nodes():
        mode = node.attributes.get("training_mode")
        if node.op_type != "BatchNormalization" or node.domain or (mode is not None and mode.as_int()):
            continue
        if node.graph is not graph:
            raise error_of(node, "is in a subgraph; expected none with train_batch_norm=True")
        yield node


def _fresh(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate
