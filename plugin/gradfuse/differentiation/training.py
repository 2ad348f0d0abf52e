"""`gradfuse.build_training_step`: a training step from any ONNX model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from gradfuse import fusion, losses
from gradfuse.custom_ops import functions
from gradfuse.differentiation import loss_models
from gradfuse.differentiation.batch_statistics import (
    leave_training_mode,
    nodes_in_inference_mode,
    separate_statistics,
    use_batch_statistics,
)
from gradfuse.differentiation.differentiate import (
    append_gradients,
    completed,
    expand_on_the_way,
    free_prefix,
    infer,
    inlined,
    named_output,
    values_of,
)
from gradfuse.differentiation.fused_attention import LEFT
from gradfuse.differentiation.indexing import mark_embeddings
from gradfuse.differentiation.parameters import choose, separate, warn
from gradfuse.differentiation.parameters import tie as tie_tensors
from gradfuse.differentiation.rules import FLOATS, FUSES
from gradfuse.differentiation.seeded_draws import in_new_opset, seed_draws, turn_off_dropout
from gradfuse.differentiation.self_check import check_forward, check_gradients
from gradfuse.differentiation.stored import Store
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ArgumentError, listed
from gradfuse.models import reading
from gradfuse.models.arrays import Arrays
from gradfuse.models.conversion import raise_opset
from gradfuse.models.memory import collection_paused
from gradfuse.models.tensors import array_of, copy_model, to_mapped_proto
from gradfuse.optimizers import loss_scaling
from gradfuse.training import index_checks, names, optimizers
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS, UPDATED_SUFFIX, TrainingStep

if TYPE_CHECKING:
    from gradfuse.models.reading import ModelLike
    from gradfuse.optimizers import OptimizerOptions

_WHO = "build_training_step"
_PASSING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that pass on what they take."""


def build_training_step(
    model: ModelLike,
    loss: str | losses.Loss | ModelLike | Any | None,
    *,
    trainable: Iterable[str] | None = None,
    frozen: Iterable[str] | None = None,
    tie: Mapping[str, str] | None = None,
    optimizer: OptimizerOptions | None = None,
    train_batch_norm: bool = False,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    grad_scaler: Any = None,
    fuse: bool = True,
    check: bool | Mapping[str, Any] = False,
    float64: bool = True,
) -> TrainingStep:
    """Make a training step from a forward model in ONNX, without PyTorch.

    The parameters are the weights that the model stores and the loss depends on: in initializers, and in Constant nodes
    under the names of their outputs. Single numbers, masks and tables are none unless `trainable` names them, and
    running statistics of BatchNormalization never are: docs/onnx-training.md has the rule. A tensor filled with one
    number that several layers read, as exporters merge equal ones, is divided among them.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        loss: what is minimised: "cross_entropy", "mse", "l1", "huber", "bce_with_logits", "nll", "ctc" or an object of
            `gradfuse.losses`, of the model's only float output, or its first; of probabilities "bce" and
            "sparse_categorical_crossentropy". Or an ONNX model or onnxscript function (outputs, targets) -> scalar,
            whose first inputs are outputs of their names, or the first float output, and whose others become targets of
            their names; its initializers are constants. None: the model's own scalar output.
        trainable: names of stored tensors to train, or patterns as of `fnmatch`; None: all parameters. A pattern takes
            parameters, and where it matches none of them whatever else it matches.
        frozen: names or patterns of tensors that stay as they are.
        tie: name of a stored tensor -> that of another one of its values, or of those transposed: they train as one,
            which has the second name.
        optimizer: an object of `gradfuse.optimizers`; None: the step ends at the gradients.
        train_batch_norm: whether BatchNormalization takes the statistics of the batch and updates the running ones,
            which are then buffers of the step; else only nodes in training mode do, and the others take the model's,
            which stay as they are. Scale and bias train either way.
        max_grad_norm: as for `torch.nn.utils.clip_grad_norm_` over all parameters; None: no clipping.
        accumulate: of how many calls the gradients are averaged for one update.
        grad_scaler: the loss is scaled as with this `gradfuse.optimizers.GradScaler` or `torch.amp.GradScaler`, and an
            update whose gradients are not finite is skipped. None, or one that is not enabled: the loss is not scaled.
        fuse: whether the step is fused, as by `gradfuse.fuse`.
        check: whether derivatives of the loss along random directions are compared with its differences, in float64
            where that is possible, on a random batch; or the batch to do so on: input or target -> array.
        float64: whether the update computes its scalars, such as Adam's bias correction, in float64, as PyTorch does.
            False, with `fuse=False`: in float32, a few roundings apart, for runtimes without float64, such as WebGPU.

    Returns:
        The step. Its inputs are those of the model, its targets those that the loss adds. The parameters have the names
        of the initializers; a step's own input or output of such a name gets another, which `own_name` tells. Its
        evaluation model is the model itself.

    Raises:
        ArgumentError: the loss does not fit the output, a name that the step needs is taken, a pattern matches nothing
            or running statistics, or an option is out of range.
        ModelError: the model cannot be read, or a node in between has no gradient rule; the text is one line.
        CheckError: a gradient is not that of the differences.

    Warns:
        UserWarning: several layers read a vector that trains, as after an exporter has merged equal initializers; one
            weight has the values of another one; what may be a parameter stays as it is; the model ends in a softmax or
            the like, and the loss takes logits; or the loss leaves out outputs.
    """
    criterion = losses.named(loss) if isinstance(loss, str) and not loss_models.is_model(loss) else loss
    if not (criterion is None or isinstance(criterion, losses.Loss) or loss_models.is_model(criterion)):
        raise ArgumentError(
            f"{_WHO}: loss is {type(loss).__name__}; expected a name, an object of gradfuse.losses, a model, "
            "an onnxscript function or None"
        )
    _require_options(optimizer, max_grad_norm, accumulate, grad_scaler)
    if not isinstance(check, (bool, Mapping)):
        raise ArgumentError(f"{_WHO}: check is {check!r}; expected True, False or a batch: input or target -> array")
    if not float64 and fuse:
        raise ArgumentError(
            f"{_WHO}: float64 is False; expected fuse=False with it, as bodies of fused operators are in float64"
        )
    scaling = loss_scaling(grad_scaler, lambda text: ArgumentError(f"{_WHO}: {text}"))
    options = _Options(optimizer, max_grad_norm, accumulate, scaling, float64)
    with collection_paused():
        # What has been read is held by nobody here, so that it is gone at the end.
        return _built(
            *_read(model, check is not False), criterion, trainable, frozen, tie, options, train_batch_norm, fuse, check
        )


def _read(model: ModelLike, checked: bool) -> tuple[ir.Model, ir.Model | None]:
    """Return a model without functions, to work on; and as it is given, if it is to be checked."""
    loaded = reading.load(model)
    given = (loaded.older or copy_model(loaded.ir)) if checked else None
    return inlined(loaded), given


@dataclasses.dataclass(frozen=True)
class _Options:
    """How parameters are updated."""

    optimizer: OptimizerOptions | None
    max_grad_norm: float | None
    accumulate: int
    loss_scaling: optimizers.LossScaling | None
    float64: bool

    def described(self, parameters: Iterable[str]) -> optimizers.Optimizer | None:
        """Return the optimizer of some parameters; None: the step ends at the gradients."""
        if self.optimizer is None:
            return None
        return dataclasses.replace(
            self.optimizer.described(parameters),
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
            loss_scaling=self.loss_scaling,
            float64=self.float64,
        )


def _built(
    work: ir.Model,
    given: ir.Model | None,
    criterion: Any,
    trainable: Iterable[str] | None,
    frozen: Iterable[str] | None,
    tie: Mapping[str, str] | None,
    options: _Options,
    train_batch_norm: bool,
    fuse: bool,
    check: bool | Mapping[str, Any],
) -> TrainingStep:
    # Of IR version 3 they are inputs as well.
    work.graph.inputs[:] = [value for value in work.graph.inputs if value.name not in work.graph.initializers]
    work.ir_version = max(work.ir_version, 4)
    store = Store(work)
    separate(store)
    if tie:
        tie_tensors(store, tie)
    choice = choose(store, trainable, frozen)
    aside = names.set_aside([*work.graph.initializers, *(str(value.name) for value in work.graph.inputs)])
    for value in list(work.graph.initializers.values()):
        value.name = aside.get(str(value.name), value.name)
    work = in_new_opset(completed(work))
    if given is not None:
        check_forward(given, work, check if isinstance(check, Mapping) else None)
    graph = work.graph
    for value in graph.inputs:
        value.name = aside.get(str(value.name), value.name)
    if isinstance(check, Mapping):
        check = {aside.get(name, name): array for name, array in check.items()}
    by_batch = leave_training_mode(graph)
    if train_batch_norm:
        by_batch = nodes_in_inference_mode(graph)
    separate_statistics(Store(work), by_batch)
    initializers, asked = dict(graph.initializers), [aside.get(name, name) for name in choice.names]
    batch = [str(value.name) for value in graph.inputs]
    evaluation = copy_model(work)
    turn_off_dropout(evaluation.graph)
    for node in graph:
        node.meta[FUSES] = fuse
    expand_on_the_way(work, [initializers[name] for name in asked])

    seeds = seed_draws(work, Tape(free_prefix(graph, "draws/"), work.opset_imports[""]))
    tape = Tape(free_prefix(graph), work.opset_imports[""])
    updated = use_batch_statistics(graph, by_batch, tape, fuse=fuse) | seeds
    tape = Tape(free_prefix(graph), work.opset_imports[""])
    result, targets = _loss(work, tape, criterion)
    graph.extend(tape.nodes)
    infer(work)
    of_batch = {value: str(value.name) for value in graph.inputs if value.name in {*batch, *targets}}
    checks = index_checks.checks_of(_labels(graph, criterion, targets), of_batch)
    if criterion is not None and not isinstance(criterion, losses.Loss):
        loss_models.require_scalar(result, graph.outputs)
    if fuse:
        mark_embeddings(graph)
    scale = None
    if options.loss_scaling is not None:
        scale = ir.Value(name=optimizers.LOSS_SCALE, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    found = append_gradients(
        work,
        result,
        [initializers[name] for name in asked],
        fuse=fuse,
        scale=None if scale is None else (scale, 1 / options.accumulate),
        kept=[result, *(after.value for after in updated.values())],
    )
    parameters = _with_gradients(asked, initializers, found, choice.named)
    warn(store, choice, {name for name in choice.names if aside.get(name, name) in parameters})
    description = options.described(parameters)
    _free_names(graph, result, parameters, updated, description)

    changed = {*parameters, *updated}
    first = [value for name, value in graph.initializers.items() if name in changed]
    values = _taken_out(graph, parameters)
    buffers = _taken_out(graph, updated)
    graph.inputs[:] = [*first, *([] if scale is None else [scale]), *graph.inputs]
    graph.outputs[:] = [_loss_output(graph, result)]
    for name, after in updated.items():
        like = next(value for value in first if value.name == name)
        graph.outputs.append(named_output(graph, after, name + UPDATED_SUFFIX, like))
    for name in parameters:
        like = initializers[name]
        graph.outputs.append(named_output(graph, found[like], name + GRADIENT_SUFFIX, like))
    RemoveUnusedNodesPass()(work)
    if any(node.domain == "aclnn" for node in graph):
        functions.attach(work)
    report = None
    if fuse:
        loaded, report = fusion.fuse_loaded(reading.owned(work))
        report.near_misses[:0] = work.meta.get(LEFT, ())
        work = loaded.ir
    if check is not False:
        scaled = {} if scale is None else {optimizers.LOSS_SCALE: np.array(options.accumulate, np.float32)}
        check_gradients(work, evaluation, values, {**buffers, **scaled}, None if check is True else check)
    if description is not None:
        optimizers.append(work, description, {*batch, *targets}, fuse=fuse)
    index_checks.append(work, checks, free_prefix(work.graph, "index_checks/")[:-1])
    step = TrainingStep(
        model=to_mapped_proto(work),
        parameters=values,
        buffers=buffers,
        input_names=tuple(batch),
        target_names=tuple(targets),
        report=report,
        optimizer_state={} if description is None else description.initial_state(values),
        hyperparameters={} if description is None else description.hyperparameters(),
        constants={},
        state_dict_names={name: name for name in (*values, *buffers)},
        evaluation_model=_evaluation(evaluation, [*parameters, *(name for name in buffers if name not in seeds)]),
        index_ranges=index_checks.ranges_of(checks),
    )
    return names.finished(step, aside)


def _require_options(optimizer: Any, max_grad_norm: float | None, accumulate: int, grad_scaler: Any) -> None:
    from gradfuse.optimizers import OptimizerOptions

    if optimizer is not None and not isinstance(optimizer, OptimizerOptions):
        raise ArgumentError(
            f"{_WHO}: optimizer is {type(optimizer).__name__}; expected gradfuse.optimizers.SGD, Adam or AdamW"
        )
    if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        raise ArgumentError(f"{_WHO}: max_grad_norm is {max_grad_norm!r}; expected a positive number or None")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ArgumentError(f"{_WHO}: accumulate is {accumulate!r}; expected a positive integer")
    if optimizer is None and (max_grad_norm is not None or accumulate > 1 or grad_scaler is not None):
        given = {"max_grad_norm": max_grad_norm is not None, "accumulate": accumulate > 1, "grad_scaler": True}
        name = next(name for name, is_given in given.items() if is_given)
        raise ArgumentError(f"{_WHO}: {name} is given without an optimizer; expected both or neither")


def _loss(work: ir.Model, tape: Tape, criterion: Any) -> tuple[ir.Value, list[str]]:
    """Put the loss behind the output; return it and the names of the inputs that it has added."""
    graph = work.graph
    floats = [value for value in graph.outputs if value.dtype in FLOATS]
    if not floats:
        raise ArgumentError(f"{_WHO}: the model has no float output; expected one for the loss")
    if criterion is None:
        scalars = [value for value in floats if value.shape is not None and all(dim == 1 for dim in value.shape)]
        if len(scalars) != 1:
            raise ArgumentError(f"{_WHO}: loss is None and {len(scalars)} outputs are scalars; expected one, or a loss")
        return scalars[0], []
    output = floats[0]
    if output.shape is None:
        raise ArgumentError(f"{_WHO}: the rank of the output {output.name!r} is unknown; expected a model with shapes")
    if not isinstance(criterion, losses.Loss):
        return _loss_of_model(work, tape, output, criterion)
    name = type(criterion).__name__
    dims = [dim if isinstance(dim, int) else dim.value for dim in output.shape]
    if len(dims) < criterion.least_rank:
        raise ArgumentError(
            f"{_WHO}: the output {output.name!r} has shape {output.shape}; "
            f"{name} expected at least {criterion.least_rank} dimensions"
        )
    _warn_of_activation(output, criterion)
    values = {str(value.name) for value in values_of(graph)}
    free = {target.name: names.free(target.name, values) for target in criterion.targets}
    added: list[Tensor] = []
    for target in criterion.targets:
        dtype = target.dtype or output.dtype
        assert dtype is not None
        value = ir.Value(name=free[target.name], type=ir.TensorType(dtype), shape=ir.Shape(target.shape(dims)))
        graph.inputs.append(value)
        added.append(tape.of(value))
    result = criterion.forward(tape.of(output), added, len(dims)).value
    result.shape = ir.Shape([])
    return result, list(free.values())


def _labels(graph: ir.Graph, criterion: Any, targets: Sequence[str]) -> list[index_checks.Index]:
    """Return the labels that losses in a graph take."""
    found = []
    for node in graph:
        if node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and not node.domain:
            scores, labels = node.inputs[:2]
            assert scores is not None and labels is not None
            ignored = node.attributes.get_int("ignore_index") if "ignore_index" in node.attributes else None
            found.append((scores, labels, ignored))
    if isinstance(criterion, losses.CrossEntropyLoss) and criterion.label_smoothing:
        (label,) = (value for value in graph.inputs if value.name == targets[0])
        output = next(value for value in graph.outputs if value.dtype in FLOATS)
        found.append((output, label, criterion.ignore_index))
    return [index_checks.Index(labels, _classes(scores), ignored) for scores, labels, ignored in found]


def _classes(scores: ir.Value) -> int | index_checks.SizeOf:
    size = None if scores.shape is None else scores.shape[1]
    return size if isinstance(size, int) else index_checks.SizeOf(str(scores.name), 1)


_GIVES = {
    "HardSigmoid": "probabilities",
    "LogSoftmax": "log-probabilities",
    "Sigmoid": "probabilities",
    "Softmax": "probabilities",
}
"""What a model gives that ends in an operator."""
_OF_CLASSES = "'sparse_categorical_crossentropy', losses.CrossEntropyLoss(from_logits=False)"
_FITTING = {
    ("CrossEntropyLoss", "probabilities"): _OF_CLASSES,
    ("CrossEntropyLoss", "log-probabilities"): "'nll', losses.NLLLoss()",
    ("BCEWithLogitsLoss", "probabilities"): "'bce', losses.BCELoss()",
    ("NLLLoss", "probabilities"): _OF_CLASSES,
}


def _warn_of_activation(output: ir.Value, criterion: losses.Loss) -> None:
    """Tell the caller of a loss of logits behind a softmax and the like, which trains, but worse."""
    node = output.producer()
    while node is not None and not node.domain and node.op_type in _PASSING and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    gives = "" if node is None or node.domain else _GIVES.get(node.op_type, "")
    if node is None or not gives or not criterion.takes or gives == criterion.takes:
        return
    name = type(criterion).__name__
    fitting = _FITTING.get((name, gives), f"an output that is {criterion.takes}")
    warnings.warn(
        f"{_WHO}: the output {output.name!r} is {gives}, as the model ends in {node.op_type}; {name} takes "
        f"{criterion.takes}. Expected {fitting}, or a model without its {node.op_type}",
        stacklevel=5,
    )


def _loss_of_model(work: ir.Model, tape: Tape, output: ir.Value, loss: Any) -> tuple[ir.Value, list[str]]:
    graph = work.graph
    # The first one that is a float is what a loss without its name takes.
    outputs = dict.fromkeys([output, *graph.outputs])
    found = loss_models.behind(list(outputs), loss, graph, tape.opset)
    if found.opsets[""] > tape.opset:
        raise_opset(work, found.opsets[""])
        tape.opset = found.opsets[""]
    targets = [str(target.name) for target in found.targets]
    _require_free_targets(graph, targets, "the loss")
    left = [str(value.name) for value in outputs if value.dtype in FLOATS and value not in found.outputs]
    if left and len(targets) > 1 and found.outputs == [output]:
        warnings.warn(
            f"{_WHO}: the loss takes the output {output.name!r} alone, and targets {listed(targets)}; outputs "
            f"{listed(left)} are left out. A loss takes several outputs as its first inputs, under their names",
            stacklevel=5,
        )
    graph.inputs.extend(found.targets)
    for value in found.initializers:
        graph.register_initializer(value)
    tape.nodes.extend(found.nodes)
    work.opset_imports.update({domain: v for domain, v in found.opsets.items() if domain not in work.opset_imports})
    return found.result, targets


def _require_free_targets(graph: ir.Graph, targets: Iterable[str], who: str) -> None:
    values = {value.name for value in values_of(graph)}
    taken = [name for name in targets if name in values]
    if taken:
        raise ArgumentError(f"{_WHO}: the model has a value {listed(taken)} already; expected that name for {who}")


def _with_gradients(
    asked: Sequence[str],
    initializers: Mapping[str, ir.Value],
    found: Mapping[ir.Value, Tensor],
    named: bool,
) -> list[str]:
    parameters = [name for name in asked if initializers[name] in found]
    if named and len(parameters) < len(asked):
        missing = listed(name for name in asked if name not in parameters)
        raise ArgumentError(f"{_WHO}: the loss does not depend on {missing}; expected what it depends on")
    if not parameters:
        raise ArgumentError(f"{_WHO}: the loss depends on no float initializer; expected at least one")
    return parameters


def _free_names(
    graph: ir.Graph,
    loss: ir.Value,
    parameters: Iterable[str],
    updated: Iterable[str],
    description: optimizers.Optimizer | None,
) -> None:
    """Take names that the step gives to something else from what nodes compute; refuse them of anything else."""
    changed = [*updated] if description is None else [*updated, *parameters]
    wanted = {LOSS, *(name + UPDATED_SUFFIX for name in changed), *(name + GRADIENT_SUFFIX for name in parameters)}
    if description is not None:
        states = description.input_names()
        wanted |= {*states, *(name + UPDATED_SUFFIX for name in states)}
    every = {str(value.name) for value in values_of(graph)} | wanted
    taken = []
    for value in values_of(graph):
        if value.name not in wanted or value is loss:
            continue
        if value.producer() is None:
            taken.append(str(value.name))
        else:
            value.name = names.free(f"{value.name}_inner", every)
            every.add(value.name)
    if taken:
        raise ArgumentError(f"{_WHO}: the model has a value {listed(taken)}; expected that name to be free")


def _taken_out(graph: ir.Graph, changed: Iterable[str]) -> Arrays:
    """Turn initializers into values without one, and return theirs."""
    found: Arrays = {}
    for name in changed:
        value = graph.initializers.pop(name)
        assert value.const_value is not None
        found[name] = np.array(array_of(value.const_value))
        value.const_value = None
    return found


def _loss_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return the loss under its name, of shape ()."""
    if value.shape is None or len(value.shape):
        node = ir.node("Reshape", [value, _empty(graph)], name="loss/Reshape")
        node.outputs[0].type = value.type
        graph.append(node)
        value = node.outputs[0]
        value.shape = ir.Shape([])
    value.name = LOSS
    return value


def _empty(graph: ir.Graph) -> ir.Value:
    node = ir.node("Constant", [], {"value": ir.tensor(np.zeros(0, np.int64))}, name="loss/Shape")
    graph.append(node)
    return node.outputs[0]


def _evaluation(model: ir.Model, parameters: Collection[str]) -> Any:
    graph = model.graph
    for name in parameters:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    return to_mapped_proto(model)
