"""From a traced program to an ONNX model with the inputs, outputs and names of a training step.

This module imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor
from torch.export import ExportedProgram

from gradfuse import _torch_private as private
from gradfuse import fusion
from gradfuse.custom_ops import functions
from gradfuse.differentiation.differentiate import free_prefix, infer
from gradfuse.differentiation.fused_attention import fuse_attention
from gradfuse.errors import ExportError, ModelError, one_line
from gradfuse.export import (
    dropout,
    explaining,
    gradients,
    indices,
    own_gradients,
    recurrences,
    standins,
    watching,
)
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.reporting import quiet, refusal
from gradfuse.export.simplifying import simplify
from gradfuse.export.torch_step import Outcome, TorchStep
from gradfuse.export.translation import always_chosen, grid_sampler_3d, onnx_translation_table, reshape
from gradfuse.models import reading
from gradfuse.models.arrays import to_numpy
from gradfuse.models.memory import collection_paused
from gradfuse.models.reductions import count_axes_from_the_first
from gradfuse.models.scatters import reduces_by_scatter_nd, replace_scatter_nd
from gradfuse.models.tensors import copy_model
from gradfuse.passes.report import Report
from gradfuse.training import narrow_types, optimizers
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS, UPDATED_SUFFIX

OPSET = 20
"""Default-domain opset of exported steps: the newest that onnxruntime 1.18 runs in full."""


def translations() -> dict[Any, Callable[..., Any]]:
    """Return what this package translates itself, by overload, for `custom_translation_table`."""
    return always_chosen(
        {
            **onnx_translation_table(),
            **recurrences.translations(),
            **dropout.translations(),
            **standins.translations(),
            **watching.translations(),
            torch.ops.aten.grid_sampler_3d.default: grid_sampler_3d,
            torch.ops.aten.reshape.default: reshape,
            **own_gradients.translations(),
            **indices.translations(),
        }
    )


@collection_paused()
def translate(program: ExportedProgram, step: TorchStep | None) -> ir.Model:
    """Translate a program of a step; or of something else, if that is None.

    Raises:
        ExportError: an operator has no ONNX translation, or torch.onnx.export fails.
    """
    try:
        with (
            quiet(),
            private.translations_read_once(),
            private.decomposed_once(),
            private.promoted_by_known_types(),
            private.numbers_remembered(),
        ):
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translations(),
                optimize=False,
                verbose=False,
                external_data=False,
            )
    except Exception as error:
        # torch.onnx has no common base class for what it raises.
        raise _untranslated(step, program, error) from error
    if exported is None:
        raise refusal("torch.onnx.export gives no model")
    model: ir.Model = exported.model
    _take_exact_numbers(model)
    count_axes_from_the_first(model)
    return model


def _take_exact_numbers(model: ir.Model) -> None:
    """Let numbers of Python, and what follows from them and sizes, be in float64 where they meet float64.

    torch.onnx.export computes them in float32, and casts the result.
    """
    for graph in model.graphs():
        for node in graph:
            if node.domain or node.op_type not in ("Cast", "CastLike"):
                continue
            like = node.inputs[1] if node.op_type == "CastLike" else None
            kind = node.attributes.get_int("to", 0) if like is None else like.dtype
            made: list[ir.Node] = []
            exact = _in_float64(node.inputs[0], made) if kind == ir.DataType.DOUBLE else None
            if exact is not None and made:
                for one in made:
                    graph.insert_before(node, one)
                ir.convenience.replace_all_uses_with(node.outputs[0], exact, replace_graph_outputs=True)
                graph.remove(node, safe=True)


def _in_float64(value: ir.Value | None, made: list[ir.Node]) -> ir.Value | None:
    """Return a number of Python in float64, as new nodes compute it; None if it is something else."""
    if value is None:
        return None
    number, node = value.meta.get(private.NUMBER), value.producer()
    attributes: dict[str, Any] = {}
    operands: list[ir.Value | None] = []
    if number is not None:
        op_type, attributes = "Constant", {"value": ir.tensor(np.array(number), dtype=ir.DataType.DOUBLE)}
    elif node is None or node.domain:
        return None
    elif node.op_type == "Cast" and (given := node.inputs[0]) is not None:
        if node.attributes.get_int("to") != ir.DataType.FLOAT:
            return None
        whole = ir.convenience.get_const_tensor(given)
        if whole is not None and whole.dtype == ir.DataType.INT64 and not whole.shape.rank():
            op_type, attributes = "Constant", {"value": ir.tensor(whole.numpy().astype(np.float64))}
        elif given.dtype == ir.DataType.INT64 and given.shape is not None and not given.shape.rank():
            op_type, operands, attributes = "Cast", [given], {"to": ir.DataType.DOUBLE}
        else:
            return _in_float64(given, made)
    elif node.op_type in ("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg"):
        op_type, operands = node.op_type, [_in_float64(one, made) for one in node.inputs]
    else:
        return None
    if None in operands:
        return None
    made.append(ir.node(op_type, operands, attributes))
    (result,) = made[-1].outputs
    result.type, result.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape(())
    return result


@collection_paused()
def completed(
    model: ir.Model,
    step: TorchStep,
    order: Sequence[str],
    free: Collection[str],
    trained: int = 0,
    *,
    fuse: bool = False,
    probe: Callable[[int], float] | None = None,
) -> ir.Model:
    """Return a translated model with gradients and without placeholder operators, simplified.

    Args:
        model: takes the tensors `order` of the step first.
        step: the step.
        order: the names of the tensors.
        free: those that become inputs; the others, frozen parameters and unchanged buffers, become initializers.
        trained: by how many of the first inputs gradients of the first result are taken, as further outputs; those by
            the batch's `step.differentiated` follow.
        fuse: whether operators of gradfuse may stand in it.
        probe: as for `own_gradients.change_gradients`.

    Raises:
        ExportError: an operator has no gradient rule.
    """
    constants = {name for name in order if name not in free}
    for value in every_value(model.graph) if constants else ():
        if value.name in constants:
            # Of the translation's own, which may become an initializer.
            value.name = f"{value.name}_inner"
    for name, value in zip(order, list(model.graph.inputs), strict=False):
        if name in constants:
            model.graph.inputs.remove(value)
            value.name = name
            value.const_value = ir.tensor(to_numpy(step.state[name]), name=name)
            model.graph.register_initializer(value)
    # Only now: before, the parameters would have been taken for constants.
    names = [*(name for name in order if name in free), *step.batch]
    sizes = _sizes(model, step, names)
    if trained:
        simplify(model)
        try:
            wrt = [*range(trained), *(names.index(name) for name in step.differentiated)]
            model = gradients.append(model, wrt, fuse=fuse, sizes=sizes)
        except ModelError as error:
            raise refusal(one_line(error)) from error
        own_gradients.change_gradients(model.graph, len(wrt), probe)
    elif fuse:
        simplify(model)
        fuse_attention(model.graph, free_prefix(model.graph, "attention/"), model.opset_imports[""], (), sizes)
    own_gradients.resolve(model)
    standins.put_bodies_in(model)
    simplify(model)
    narrow_types.compute_wider(model, narrow=step.is_narrow)
    functions.attach(model)
    return model


def _sizes(model: ir.Model, step: TorchStep, names: Sequence[str]) -> dict[str, int]:
    """Return the sizes that named dimensions of a model's inputs, tensors of the step and the batch, have there."""
    return {
        dim.value: size
        for name, value in zip(names, model.graph.inputs, strict=False)
        if name in step.batch and value.shape is not None
        for dim, size in zip(value.shape, step.batch[name].shape, strict=False)
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }


def arrange_step(model: ir.Model, step: TorchStep, native: Outcome, shapes: DynamicShapes) -> None:
    """Order and name inputs, outputs and dynamic dimensions as `TrainingStep` documents them, and drop notes.

    Parameters that the loss does not depend on get gradients of zeros.

    Args:
        model: the translation of `tracing.forward_program`, with gradients.
        step: the step.
        native: what PyTorch's own run of it gave.
        shapes: its dynamic dimensions.
    """
    graph = model.graph
    changed, used = native.changed, tuple(native.gradients)
    free = {*step.trainable, *changed, *step.frozen_inputs}
    others = [name for name in step.state if name not in used and name in free]
    scale = (optimizers.LOSS_SCALE,) if step.scales_loss else ()
    inputs = dict(zip((*used, *others, *step.batch, *scale), graph.inputs, strict=True))
    results = (
        *(f"scaled_{LOSS}" for _ in scale),
        LOSS,
        *(name + UPDATED_SUFFIX for name in changed),
        *native.outputs,
        *(name + GRADIENT_SUFFIX for name in (*used, *step.differentiated)),
    )
    produced = dict(zip(results, graph.outputs, strict=True))
    for name in step.trainable:
        if name not in used:
            produced[name + GRADIENT_SUFFIX] = _zeros_like(graph, inputs[name])
    graph.inputs[:] = [inputs[name] for name in (*step.trainable, *changed, *step.frozen_inputs, *scale, *step.batch)]
    wanted = (
        LOSS,
        *native.outputs,
        *(name + GRADIENT_SUFFIX for name in (*step.trainable, *step.differentiated)),
        *(name + UPDATED_SUFFIX for name in changed),
    )
    graph.outputs.clear()
    for name in wanted:
        produced[name] = add_output(graph, produced[name])
    _name(model, step, inputs | {name: produced[name] for name in wanted}, shapes)


def arrange_evaluation(
    model: ir.Model, step: TorchStep, names: Sequence[str], results: Collection[str], shapes: DynamicShapes
) -> None:
    """Name inputs, outputs and dynamic dimensions of an evaluation model, and drop inputs that nothing reads.

    Args:
        model: takes tensors of the step and the batch's inputs, and maybe others that it does not use.
        step: the step.
        names: the names of its inputs.
        results: the names of the outputs.
        shapes: the dynamic dimensions.
    """
    graph = model.graph
    given = dict(zip(names, graph.inputs, strict=True))
    inputs = {name: given[name] for name in (*step.state, *step.input_names) if name in given}
    outputs = list(graph.outputs)
    graph.outputs.clear()
    produced = {name: add_output(graph, value) for name, value in zip(results, outputs, strict=True)}
    graph.inputs[:] = [value for name, value in inputs.items() if value.uses() or name in step.input_names]
    _name(model, step, inputs | produced, shapes)


def plain(exported: onnx.ModelProto) -> ir.Model:
    """Return the model in standard operators alone, which adds up in a fixed order."""
    model: ir.Model = ir.from_proto(fusion.expand(exported))
    simplify(model)
    infer(model)
    replace_scatter_nd(model)
    return model


def fused(exported: onnx.ModelProto, batch: Mapping[str, Tensor]) -> tuple[ir.Model, Report]:
    """Return the fused model, which adds up in a fixed order, and the report; what pays is decided for a batch."""
    model: ir.Model = ir.from_proto(exported)
    sizes = {
        dim.value: batch[value.name].shape[axis]
        for value in model.graph.inputs
        if value.name is not None and value.name in batch and value.shape is not None
        for axis, dim in enumerate(value.shape)
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }
    with collection_paused():
        loaded, report = fusion.fuse_loaded(reading.owned(model), pointwise=True, sizes=sizes)
    model = loaded.ir
    replace_scatter_nd(model)
    if not reduces_by_scatter_nd(model):
        # What the exporter wrote so that onnxruntime may lose updates is written in another way now.
        kept = [warning for warning in report.warnings if warning.bug != "lost-updates"]
        report = dataclasses.replace(report, warnings=kept)
    return model, report


def with_optimizer(
    model: ir.Model, step: TorchStep, described: optimizers.Optimizer, *, fuse: bool
) -> tuple[ir.Model, ir.Model]:
    """Return the model of a step with the optimizer's update in the place of the gradients, and the update alone.

    That is a model of the gradients, as `<parameter>.grad`, and of what the optimizer reads besides.
    """
    update = copy_model(model)
    wanted = {name + GRADIENT_SUFFIX for name in described.parameters}
    gradients = [value for value in update.graph.outputs if value.name in wanted]
    optimizers.append(update, described, step.batch, fuse=fuse)
    complete = copy_model(update)
    passes.RemoveUnusedNodesPass()(complete)
    for value in gradients:
        given = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name = f"{value.name}_computed"
        ir.convenience.replace_all_uses_with(value, given, replace_graph_outputs=True)
        update.graph.inputs.append(given)
    return complete, restricted(update, [name + UPDATED_SUFFIX for name in described.parameters])


def restricted(model: ir.Model, outputs: Collection[str]) -> ir.Model:
    """Return a copy of a model with some of its outputs, and with what they need alone."""
    copy = copy_model(model)
    graph = copy.graph
    graph.outputs[:] = [value for value in graph.outputs if value.name in outputs]
    passes.RemoveUnusedNodesPass()(copy)
    graph.inputs[:] = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    return copy


def add_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Make a value an output of the graph; return it, or a copy if it must keep the name that it has."""
    if value.is_graph_input() or value.is_initializer() or value.is_graph_output():
        # A value has one name, and inputs, initializers and earlier outputs keep theirs.
        copy = ir.node("Identity", [value])
        copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
        graph.append(copy)
        value = copy.outputs[0]
    graph.outputs.append(value)
    return value


def every_value(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield inputs, initializers and the outputs of all nodes."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _untranslated(step: TorchStep | None, program: ExportedProgram, error: BaseException) -> ExportError:
    """Return what stopped torch.onnx.export: the operator without a translation if it was one."""
    # The chain of causes ends at the operator, whose name is what helps.
    text, cause = one_line(error), error.__cause__ or error.__context__
    while cause is not None:
        operator = private.untranslated_operator(cause)
        if operator is not None:
            # torch.onnx.export names the first one alone.
            others = private.operators_without_translation(program, OPSET, translations())
            every = dict.fromkeys((operator, *others))
            if step is None:
                return refusal(f"{', '.join(map(str, every))} has no ONNX translation")
            return refusal("; ".join(explaining.untranslated(step, program, one) for one in every))
        of_size = None
        if step is not None:
            of_size = explaining.from_a_size(step, program, private.untranslated_node(cause))
        if of_size is not None:
            return refusal(of_size)
        text, cause = one_line(cause), cause.__cause__ or cause.__context__
    return refusal(f"torch.onnx.export cannot translate the step: {text}")


def _zeros_like(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Append nodes that make zeros in the static shape and the type of a value."""
    assert value.dtype is not None and value.shape is not None
    # An empty list has no type by itself.
    sizes = ir.AttrInt64s("value_ints", list(value.shape.numpy()))
    shape = ir.node("Constant", [], attributes={"value_ints": sizes})
    zero = ir.tensor(np.zeros(1, dtype=value.dtype.numpy()), dtype=value.dtype)
    zeros = ir.node("ConstantOfShape", [shape.outputs[0]], attributes={"value": zero})
    zeros.outputs[0].type, zeros.outputs[0].shape = ir.TensorType(value.dtype), value.shape
    graph.extend([shape, zeros])
    return zeros.outputs[0]


def _name(model: ir.Model, step: TorchStep, interface: Mapping[str, ir.Value], shapes: DynamicShapes) -> None:
    """Give inputs, outputs, dimensions and the graph their names, and drop the exporter's notes."""
    graph = model.graph
    chosen = {id(value) for value in interface.values()}
    for value in every_value(graph):
        if id(value) not in chosen and value.name in interface:
            value.name = f"{value.name}_inner"
    for name, value in interface.items():
        value.name = name
    _name_dimensions(graph, interface, shapes)
    _drop_notes(model)
    graph.name = type(step.module).__name__


def _name_dimensions(graph: ir.Graph, inputs: Mapping[str, ir.Value], shapes: DynamicShapes) -> None:
    """Replace the tracer's symbols in all shapes by the names that the user gave to the axes of the batch.

    Raises:
        ExportError: an axis that is to vary has one size only in the traced program.
    """
    symbols: dict[str, str] = {}
    for name, axes in shapes.names.items():
        for axis, label in axes.items() if name in inputs else ():
            shape = inputs[name].shape
            dim = shape[axis] if shape is not None else None
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                symbols.setdefault(dim.value, label)
            elif isinstance(dim, int) and (name, axis) not in shapes.automatic:
                raise refusal(
                    f"axis {axis} of {name!r} has size {dim} in all of the traced step, which cannot vary as "
                    "dynamic_shapes says; expected a step for any size, or this axis static"
                )
    if not symbols:
        return
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols))
    for value in every_value(graph):
        if value.shape is None or value.shape.is_static():
            continue
        value.shape = ir.Shape(
            pattern.sub(lambda found: symbols[found[0]], dim.value)
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None
            else dim
            for dim in value.shape
        )


def _drop_notes(model: ir.Model) -> None:
    """Drop what the exporter notes about its source: stack traces hold the paths of the exporting machine."""
    graph = model.graph
    for value in every_value(graph):
        value.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    model.metadata_props.clear()
    graph.metadata_props.clear()
    graph.doc_string = None
