"""Wrong training steps: an exported model with one error put in, of the kinds that a wrong translation makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from torch import Tensor, nn

from gradfuse import ExportError
from gradfuse.checking import bounds
from gradfuse.checking.reference import ReferenceSession
from gradfuse.export import verifying
from gradfuse.export.torch_step import TorchStep, undisturbed
from gradfuse.export.verifying import Truth

Arrays = dict[str, npt.NDArray[Any]]

SHARE = 0.01
"""An output is wrong if it is off by this share of its largest element."""
_COMPARISONS = {"Greater": "LessOrEqual", "Less": "GreaterOrEqual", "GreaterOrEqual": "Less", "LessOrEqual": "Greater"}


def truth_of(module: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Truth:
    """Return what `export_training_step` compares a step with."""
    step = TorchStep.of(module, loss, batch, lambda names: None, None)
    with undisturbed(step):
        native = step.run()
        if native.dropouts:
            step = step.with_dropout_seed()
            native = step.run()
        return verifying.truth_of(step, native)


def refusal(truth: Truth, model: onnx.ModelProto) -> str | None:
    """Return what `export_training_step` says of a model if it refuses it."""
    try:
        loaded = ir.from_proto(model)
        truth.compare_in_float64(loaded, "exported")
        truth.compare(loaded, "exported")
    except ExportError as error:
        return str(error)
    return None


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A model with one error, and what the error is."""

    kind: str
    place: str
    model: onnx.ModelProto


def mutants(model: onnx.ModelProto) -> Iterator[Mutant]:
    """Yield a model with each error of each kind, but for those that are none by what the graph alone shows."""
    for output in model.graph.output:
        if output.name.endswith(".grad"):
            yield Mutant("one percent", output.name, _with(model, output.name, _scaled))
    original = ir.from_proto(model)
    for index, node in enumerate(original.graph):
        name = str(node.outputs[0].name)
        if not _floats(node.outputs[0]) and node.op_type not in _COMPARISONS:
            continue
        if node.op_type == "Add":
            for operand in range(2):
                kept = node.inputs[operand]
                if kept is not None and kept.shape == node.outputs[0].shape:
                    yield Mutant("dropped term", f"{name}, {1 - operand}", _with(model, index, _keep_one(operand)))
        elif node.op_type in _COMPARISONS:
            yield Mutant("swapped mask", name, _with(model, index, _swap_comparison))
        elif node.op_type == "Where":
            yield Mutant("swapped mask", name, _with(model, index, _swap_branches))
        elif node.op_type == "Div" and _is_number(node.inputs[1]):
            yield Mutant("wrong divisor", name, _with(model, index, _no_divisor))
        elif node.op_type == "ReduceMean":
            yield Mutant("wrong divisor", name, _with(model, index, _sum_for_mean))


def is_wrong(model: onnx.ModelProto, right: Arrays, truth: Truth) -> bool:
    """Return whether an output is off by a hundredth of its largest element, where that is more than rounding."""
    loaded = ir.from_proto(model)
    results = ReferenceSession(loaded, "mutant").run(truth.feeds(loaded))
    for name, wanted in right.items():
        if wanted.dtype.kind != "f":
            if not np.array_equal(wanted, results[name]):
                return True
            continue
        size = bounds.magnitude(wanted)
        off = verifying.difference(results[name], wanted)
        # What is 0 but for rounding has no hundredth.
        if off >= 0.99 * SHARE * size and size > truth.kernels.largest(name, np.inf):
            return True
    return False


def right_outputs(model: onnx.ModelProto, truth: Truth) -> Arrays:
    loaded = ir.from_proto(model)
    return ReferenceSession(loaded, "exported").run(truth.feeds(loaded))


def _floats(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_number(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and value.shape.is_static() and value.shape.rank() == 0


def _with(model: onnx.ModelProto, where: int | str, change: Callable[[ir.Model, Any], None]) -> onnx.ModelProto:
    copy = ir.from_proto(model)
    change(copy, copy.graph[where] if isinstance(where, int) else where)
    return ir.to_proto(copy)


def _scaled(model: ir.Model, name: str) -> None:
    graph = model.graph
    index = next(i for i, value in enumerate(graph.outputs) if value.name == name)
    value = graph.outputs[index]
    assert value.dtype is not None
    factor = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(1 + SHARE, value.dtype.numpy()))})
    product = ir.node("Mul", [value, factor.outputs[0]])
    graph.extend([factor, product])
    product.outputs[0].type, product.outputs[0].shape = value.type, value.shape
    value.name = f"{name}_right"
    product.outputs[0].name = name
    graph.outputs[index] = product.outputs[0]


def _replace(node: ir.Node, op_type: str, inputs: list[ir.Value | None], **attributes: Any) -> None:
    new = ir.node(op_type, inputs, attributes=attributes)
    old, result = node.outputs[0], new.outputs[0]
    result.type, result.shape = old.type, old.shape
    graph = node.graph
    assert graph is not None
    graph.insert_before(node, new)
    name = old.name
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = name


def _keep_one(operand: int) -> Callable[[ir.Model, ir.Node], None]:
    return lambda model, node: _replace(node, "Identity", [node.inputs[operand]])


def _swap_comparison(model: ir.Model, node: ir.Node) -> None:
    _replace(node, _COMPARISONS[node.op_type], list(node.inputs))


def _swap_branches(model: ir.Model, node: ir.Node) -> None:
    condition, yes, no = node.inputs
    _replace(node, "Where", [condition, no, yes])


def _no_divisor(model: ir.Model, node: ir.Node) -> None:
    _replace(node, "Identity", [node.inputs[0]])


def _sum_for_mean(model: ir.Model, node: ir.Node) -> None:
    _replace(node, "ReduceSum", list(node.inputs), keepdims=node.attributes.get_int("keepdims", 1))
