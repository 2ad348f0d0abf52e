"""`to_stock`: the artifacts of onnxruntime-training as a training step for stock onnxruntime.

The steps of the conversion:

1. Remove the accumulation of gradients between calls from the training model.
2. Replace the operators of the training build by standard ones, and fuse the model.
3. Add the optimizer's update, with values from the checkpoint.
4. Cut the loss off the eval model, which gives the evaluation model.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from gradfuse.errors import ArgumentError, ModelError
from gradfuse.models import reading
from gradfuse.models.arrays import Arrays
from gradfuse.models.scatters import replace_scatter_nd
from gradfuse.models.tensors import data_files, with_tensors_in_memory
from gradfuse.ort_training import operators
from gradfuse.ort_training.operators import DOMAIN
from gradfuse.passes import shapes
from gradfuse.training import optimizers
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS, UPDATED_SUFFIX, TrainingStep

if TYPE_CHECKING:
    from gradfuse.ort_training.checkpoint import Checkpoint

_BUFFER_SUFFIX = "_grad.accumulation.buffer"
_ACCUMULATOR = "InPlaceAccumulatorV2"
_LOSS_NODE = re.compile(r"onnx::\w+::\d+")
"""How onnxblock names the nodes of the losses that it adds, and the gradient builder the nodes of their gradients."""

_LEARNING_RATE = 0.001
"""That of an optimizer of onnxruntime-training before anybody sets another."""

_STATES = {"momentum0": "exp_avg", "momentum1": "exp_avg_sq"}


def to_stock(
    artifacts_dir: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    fuse: bool = True,
) -> TrainingStep:
    """Turn what `onnxruntime.training.artifacts.generate_artifacts` wrote into a training step.

    The step runs in stock onnxruntime, continues from the checkpoint, and computes the losses and updates that
    onnxruntime-training 1.19.2 would have, except for rounding. One step does what `module(...)`, `optimizer.step()`
    and `module.lazy_reset_grad()` did: gradients are not accumulated. onnxruntime-training is not needed.

    Args:
        artifacts_dir: the folder with `training_model.onnx` and `checkpoint`, and, if they were written,
            `optimizer_model.onnx` and `eval_model.onnx`. All may have a common prefix. Without the optimizer's model
            the step ends at the gradients; without the eval model `TrainingStep.evaluation_model` is None.
        checkpoint: the checkpoint file to begin at, such as one that training wrote; None: the folder's own.
        fuse: whether to fuse the step, as `gradfuse.fuse` does, with AdamW's and SGD's updates as operators.

    Returns:
        The step. Inputs that only the loss reads are its targets, the others its inputs. The outputs of its evaluation
        model are the additional outputs of the eval model, or, if it has none, those that the loss was added to.

    Raises:
        ArgumentError: a path is none.
        ModelError: a file is missing or cannot be read, the checkpoint or the eval model is of another model, or an
            operator of onnxruntime-training has no replacement; it is named. The text is one line.
    """
    from gradfuse.fusion import fuse as fuse_model
    from gradfuse.ort_training import checkpoint as checkpoints

    for name, path in (("artifacts_dir", artifacts_dir), ("checkpoint", checkpoint)):
        if not isinstance(path, str | os.PathLike) and not (name == "checkpoint" and path is None):
            raise ArgumentError(f"to_stock: {name} is {type(path).__name__}; expected a path")
    files = _Files.of(artifacts_dir, checkpoint)
    saved = checkpoints.load(files.checkpoint)
    values = saved.trainable | saved.frozen
    model = _load(files.training)
    graph = model.graph

    gradients = _without_accumulation(graph, files.training)
    buffers = _running_statistics(graph, files.training)
    _require_fitting(graph, gradients, buffers, files, saved)
    parameters = {name: saved.trainable[name] for name in gradients}
    constants = {name: array for name, array in saved.frozen.items() if name not in buffers}
    batch = {str(value.name): _is_target(value) for value in graph.inputs if value.name not in values}
    targets = tuple(name for name, is_target in batch.items() if is_target)
    optimizer = None if files.optimizer is None else _optimizer(files.optimizer, saved, parameters)

    _embed(graph, constants)
    _set_interface(graph, [*parameters, *buffers, *batch], gradients, buffers, files.training, optimizer)
    operators.replace(graph, files.training)
    _tidy(model)
    report = None
    if fuse:
        result = fuse_model(model)
        model, report = result.model, result.report
    _add_in_order(model)
    if optimizer is not None:
        optimizers.append(model, optimizer, batch, fuse=fuse)
    evaluation_model = None
    if files.eval is not None:
        evaluation_model = _evaluation_model(files.eval, constants, {*values, *targets})
        _require_same_inputs(evaluation_model.graph, graph, files)
    return TrainingStep(
        model=ir.to_proto(model),
        parameters=parameters,
        buffers={name: values[name] for name in buffers},
        input_names=tuple(name for name in batch if name not in targets),
        target_names=targets,
        report=report,
        optimizer_state={} if optimizer is None else optimizer.initial_state(parameters),
        hyperparameters={} if optimizer is None else optimizer.hyperparameters(),
        constants=constants,
        state_dict_names={name: name for name in values},
        evaluation_model=None if evaluation_model is None else ir.to_proto(evaluation_model),
    )


def files_of(artifacts_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the files that `to_stock` reads.

    Raises:
        ModelError: the training model or a file that it needs is missing or cannot be read.
    """
    from gradfuse.ort_training import checkpoint as checkpoints

    found = _Files.of(artifacts_dir, checkpoint)
    models = [path for path in (found.training, found.optimizer, found.eval) if path is not None]
    data = [file for path in models for file in data_files(reading.load(path).ir)]
    return [*models, *data, found.checkpoint, found.checkpoint + checkpoints.EXTERNAL]


@dataclasses.dataclass(frozen=True)
class _Files:
    """The paths of the artifacts; None for those that are not there."""

    training: str
    checkpoint: str
    optimizer: str | None
    eval: str | None

    @classmethod
    def of(cls, artifacts_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None) -> _Files:
        folder = Path(artifacts_dir)
        if not folder.is_dir():
            raise ModelError(f"{folder}: is no folder; expected the one that generate_artifacts wrote to")
        found = sorted(folder.glob("*training_model.onnx"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise ModelError(f"{folder}: the training models are {names}; expected one <prefix>training_model.onnx")
        prefix = found[0].name.removesuffix("training_model.onnx")

        def optional(name: str) -> str | None:
            path = folder / (prefix + name)
            # Whatever is there is read, if only to report that it is no file.
            return str(path) if os.path.lexists(path) else None

        return cls(
            str(found[0]),
            os.fspath(folder / f"{prefix}checkpoint" if checkpoint is None else checkpoint),
            optional("optimizer_model.onnx"),
            optional("eval_model.onnx"),
        )


def _load(path: str) -> ir.Model:
    """Read a model, with the opset and the types of values that the replacements need."""
    model = with_tensors_in_memory(reading.load(path).ir)
    # From 15 to 17 operators were only added, or got types and attributes that change nothing where they are not used.
    model.opset_imports[""] = max(model.opset_imports[""], operators.REPLACEMENT_OPSET)
    nodes = list(model.graph.all_nodes())
    for node in nodes:
        training = node.attributes.get("training_mode")
        if node.op_type == "BatchNormalization" and (training is None or not training.as_int()):
            # It had more in training mode, which generate_artifacts forgets in the eval model.
            node.resize_outputs(1)
    # What was an output before generate_artifacts added the loss, among others, has lost its type.
    _infer(model, (value for node in nodes for value in node.outputs))
    return model


def _infer(model: ir.Model, values: Iterable[ir.Value | None]) -> None:
    """Give types and shapes to those of the values that lack them."""
    untyped = [value for value in values if value is not None and (value.dtype is None or value.shape is None)]
    if untyped:
        shapes.infer(model, untyped)


def _add_in_order(model: ir.Model) -> None:
    """Replace each ScatterND of which onnxruntime's threads may lose updates: see `gradfuse.models.scatters`."""
    _infer(model, (value for node in model.graph.all_nodes() if node.op_type == "ScatterND" for value in node.inputs))
    replace_scatter_nd(model)


def _require_fitting(
    graph: ir.Graph, gradients: Collection[str], buffers: Collection[str], files: _Files, saved: Checkpoint
) -> None:
    """Refuse a checkpoint of another model."""
    where = f"{files.checkpoint}: does not fit {files.training}"
    values = saved.trainable | saved.frozen
    inputs = {str(value.name): value for value in graph.inputs}
    for name in {**dict.fromkeys(gradients), **saved.trainable}:
        if name not in gradients or name not in saved.trainable or name not in inputs:
            raise ModelError(f"{where}: only one has the parameter {name!r}")
    for name in buffers:
        if name not in values:
            raise ModelError(f"{where}: only one has the parameter {name!r}")
    for name, value in inputs.items():
        array = values.get(name)
        if array is None:
            continue
        if value.dtype is None or value.shape is None:
            raise ModelError(f"{files.training}: the input {name!r} has no type or no shape; expected both")
        if value.shape != array.shape:
            raise ModelError(f"{where}: {name!r} has shape {array.shape}; expected {value.shape}")
        if value.dtype != ir.DataType.from_numpy(array.dtype):
            raise ModelError(f"{where}: {name!r} is {ir.DataType.from_numpy(array.dtype)}; expected {value.dtype}")


def _require_same_inputs(evaluation: ir.Graph, training: ir.Graph, files: _Files) -> None:
    """Refuse an eval model of another model."""
    known = {str(value.name): value for value in training.inputs}
    where = f"{files.eval}: does not fit {files.training}"
    for value in evaluation.inputs:
        other = known.get(str(value.name))
        if other is None:
            raise ModelError(f"{where}: only one has the input {value.name!r}")
        if value.dtype != other.dtype:
            raise ModelError(f"{where}: {value.name!r} is {value.dtype}; expected {other.dtype}")
        if value.shape is None or other.shape is None:
            continue
        sizes = zip(value.shape, other.shape, strict=False)
        if len(value.shape) != len(other.shape) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes
        ):
            raise ModelError(f"{where}: {value.name!r} has shape {value.shape}; expected {other.shape}")


def _optimizer(path: str, saved: Checkpoint, parameters: Arrays) -> optimizers.Optimizer:
    """Describe the optimizer of an optimizer model, from the checkpoint's state on."""
    max_grad_norm = None
    algorithms = []
    options: dict[str, Any] = {"maximize": False, "weight_decay": 0.0}
    for node in reading.load(path).ir.graph:
        match node.op_type:
            case "InplaceClipGradNorm":
                max_grad_norm = _number(node, "max_norm", path)
            case "SGDOptimizerV2":
                algorithms.append("SGD")
                options |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
            case "AdamWOptimizer":
                options["betas"] = tuple(_number(node, name, path, below=1.0) for name in ("alpha", "beta"))
                options["eps"], options["weight_decay"] = (
                    _number(node, name, path) for name in ("epsilon", "weight_decay")
                )
                match [_number(node, name, path) for name in ("adam_mode", "correct_bias")]:
                    case [0, 1]:
                        algorithms.append("Adam")
                        options |= {"decoupled_weight_decay": True, "amsgrad": False}
                    case [1, (0 | 1) as correct_bias]:
                        algorithms.append("TransformersAdamW")
                        options["correct_bias"] = bool(correct_bias)
                    case modes:
                        raise ModelError(
                            f"{path}: AdamWOptimizer has adam_mode and correct_bias {modes}; "
                            "expected 0 and 1, or 1 and either"
                        )
            case _:
                raise ModelError(f"{path}: has the operator {node.op_type}; expected onnxblock's AdamW or SGD")
    if len(algorithms) != 1:
        found = " and ".join(algorithms) or "no optimizer that is known"
        raise ModelError(f"{path}: has {found}; expected one AdamW or SGD of onnxblock")
    options["lr"] = _LEARNING_RATE if saved.learning_rate is None else saved.learning_rate
    group = optimizers.ParameterGroup(tuple(parameters), options, algorithms[0])
    steps = dict.fromkeys(parameters, saved.steps)
    optimizer = optimizers.Optimizer(groups=(group,), steps=steps, max_grad_norm=max_grad_norm)
    return dataclasses.replace(optimizer, state=_state(saved, optimizer, parameters, path))


def _number(node: ir.Node, name: str, path: str, below: float = math.inf) -> float:
    """Return an attribute that is a finite number from 0 on."""
    attribute = node.attributes.get(name)
    value = None if attribute is None else attribute.value
    if not isinstance(value, int | float) or not 0 <= value < below:
        limit = "" if below == math.inf else f", and below {below:g}"
        raise ModelError(f"{path}: {node.op_type} has {name} {value}; expected a finite number from 0 on{limit}")
    return value


def _state(saved: Checkpoint, optimizer: optimizers.Optimizer, parameters: Arrays, path: str) -> Arrays:
    """Return the checkpoint's state of an optimizer under torch's names: that of all parameters, or of none."""
    state: Arrays = {}
    where = "the checkpoint's state of the optimizer"
    for parameter, states in saved.momentums.items():
        for name, array in states.items():
            known = parameters.get(parameter)
            if known is None:
                raise ModelError(f"{path}: {where} has the parameter {parameter!r}; expected those of the model")
            if array.shape != known.shape or array.dtype != known.dtype:
                got, wanted = (f"{value.dtype} of shape {value.shape}" for value in (array, known))
                raise ModelError(f"{path}: {where} has {name} of {parameter!r} as {got}; expected {wanted}")
            if name in _STATES:
                state[f"{parameter}.{_STATES[name]}"] = array
    wanted_names = [f"{name}.{kind}" for name, kinds in optimizer.state_names().items() for kind in kinds]
    missing = [name for name in wanted_names if name not in state]
    if state and missing:
        raise ModelError(f"{path}: {where} lacks {missing[0]!r}; expected that of all parameters")
    return state


def _without_accumulation(graph: ir.Graph, path: str) -> dict[str, ir.Value]:
    """Take the nodes out that add gradients to buffers; return parameter -> gradient."""
    gradients: dict[str, ir.Value] = {}
    for node in [node for node in graph if (node.domain, node.op_type) == (DOMAIN, _ACCUMULATOR)]:
        match [value for value in node.inputs if value is not None], node.outputs:
            case [buffer, gradient, reset], [output, *rest] if (
                all(value.is_graph_input() and value in graph.inputs for value in (buffer, reset))
                and gradient.producer() is not None
                and gradient not in gradients.values()
                and len(buffer.uses()) == 1
                and graph.outputs.count(output) == 1
                and not any(value.uses() for value in node.outputs)
                and not any(value.is_graph_output() for value in rest)
            ):
                gradients[str(buffer.name).removesuffix(_BUFFER_SUFFIX)] = gradient
            case _:
                wanted = "a buffer, a gradient and a signal that nothing else has, and to give an output of the model"
                raise ModelError(f"{path}: {_ACCUMULATOR} ({node.name}) takes or gives other values; expected {wanted}")
        graph.outputs.remove(node.outputs[0])
        graph.remove(node, safe=True)
        graph.inputs.remove(buffer)
        if not reset.uses():
            graph.inputs.remove(reset)
    if not gradients or not graph.outputs:
        what = "outputs beside them" if gradients else "gradient accumulators"
        raise ModelError(f"{path}: has no {what}; expected a model that generate_artifacts wrote")
    return gradients


def _running_statistics(graph: ir.Graph, path: str) -> dict[str, ir.Value]:
    """Return the running means and variances, which the training build writes in place -> what they become."""
    found = {}
    for node in graph:
        if (node.domain, node.op_type) != (DOMAIN, "BatchNormInternal"):
            continue
        if len(node.inputs) != 5 or len(node.outputs) != 5:
            counts = f"{len(node.inputs)} inputs and {len(node.outputs)} outputs"
            raise ModelError(f"{path}: BatchNormInternal ({node.name}) has {counts}; expected 5 and 5")
        for old, new in zip(node.inputs[3:], node.outputs[1:3], strict=True):
            # Those that were not declared as frozen parameters are constants, and stay what they are.
            if old is not None and old.is_graph_input():
                found[str(old.name)] = new
    return found


def _is_target(value: ir.Value) -> bool:
    readers = [node.name or "" for node, _ in value.uses()]
    return bool(readers) and all(_LOSS_NODE.match(name) for name in readers)


def _embed(graph: ir.Graph, constants: Arrays) -> None:
    """Make inputs constants."""
    for value in list(graph.inputs):
        if value.name in constants:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(constants[value.name], name=value.name)
            graph.register_initializer(value)


def _set_interface(
    graph: ir.Graph,
    inputs: Sequence[str],
    gradients: Mapping[str, ir.Value],
    buffers: Mapping[str, ir.Value],
    path: str,
    optimizer: optimizers.Optimizer | None,
) -> None:
    """Order the inputs, and make loss, new statistics and gradients the outputs, named as in any training step."""
    by_name = {str(value.name): value for value in graph.inputs}
    outputs = {LOSS: graph.outputs[0]}
    outputs |= {name + UPDATED_SUFFIX: value for name, value in buffers.items()}
    for name, value in gradients.items():
        value.type, value.shape = by_name[name].type, by_name[name].shape
        outputs[name + GRADIENT_SUFFIX] = value
    added = [] if optimizer is None else optimizer.input_names()
    clash = next((name for name in (*inputs, *graph.initializers) if name in (*outputs, *added)), None)
    if clash is not None:
        raise ModelError(f"{path}: has a value {clash!r}, the name that another one of a training step has")
    graph.inputs[:] = [by_name[name] for name in inputs]
    graph.outputs[:] = list(outputs.values())
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in outputs or value.name in added:
                value.name = f"{value.name}_inner"
    for name, value in outputs.items():
        value.name = name


def _tidy(model: ir.Model) -> None:
    """Remove what nothing needs any more."""
    RemoveUnusedNodesPass()(model)
    used = {node.domain for node in model.graph.all_nodes()} | {""}
    for domain in [domain for domain in model.opset_imports if domain not in used]:
        del model.opset_imports[domain]
    model.metadata_props.clear()


def _evaluation_model(path: str, constants: Arrays, optional: Collection[str]) -> ir.Model:
    """Cut the loss off an eval model: what is left takes parameters and inputs, and gives the module's outputs.

    Of the inputs that nothing reads any more, the optional ones go.
    """
    model = _load(path)
    graph = model.graph
    operators.replace(graph, path)
    _embed(graph, constants)
    results = graph.outputs[1:] or _inputs_of_loss(graph)
    if results:
        graph.outputs[:] = results
    _tidy(model)
    _add_in_order(model)
    for value in list(graph.inputs):
        if value.name in optional and not value.uses() and value not in graph.outputs:
            graph.inputs.remove(value)
    return model


def _inputs_of_loss(graph: ir.Graph) -> list[ir.Value]:
    """Return what nodes of the model itself give to those of the loss."""
    found: dict[ir.Value, None] = {}
    for node in graph:
        if _LOSS_NODE.match(node.name or ""):
            for value in node.inputs:
                producer = None if value is None else value.producer()
                if value is not None and producer is not None and not _LOSS_NODE.match(producer.name or ""):
                    found[value] = None
    return list(found)
