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
from gradfuse.differentiation import straight_through as pairs
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
)
from gradfuse.differentiation.fused_attention import LEFT
from gradfuse.differentiation.indexing import mark_embeddings
from gradfuse.differentiation.parameters import Choice, choose, separate, warn
from gradfuse.differentiation.parameters import tie as tie_tensors
from gradfuse.differentiation.rules import FLOATS, FUSES
from gradfuse.differentiation.seeded_draws import in_new_opset, seed_draws, turn_off_dropout
from gradfuse.differentiation.self_check import check_forward, check_gradients
from gradfuse.differentiation.stored import Store
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.dynamic_batch.freeing import with_dynamic_batch
from gradfuse.errors import ArgumentError, listed, type_name
from gradfuse.models import reading
from gradfuse.models.arrays import Arrays
from gradfuse.models.conversion import raise_opset
from gradfuse.models.inlining import values_of
from gradfuse.models.memory import collection_paused
from gradfuse.models.propagation import Facts, Sizes, size_of
from gradfuse.models.scalars import real, whole
from gradfuse.models.tensors import array_of, copy_model, rename, to_mapped_proto
from gradfuse.optimizers import averaging, described, loss_scaling
from gradfuse.passes.recompute import parse_budget
from gradfuse.training import batch_checks, names, narrow_types, optimizers
from gradfuse.training.budget import within_budget
from gradfuse.training.rules import StateType
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS, UPDATED_SUFFIX, TrainingStep

if TYPE_CHECKING:
    from gradfuse.models.reading import ModelLike
    from gradfuse.optimizers import Average, OptimizerOptions

_WHO = "build_training_step"
_PASSING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that pass their input on."""
_OF_SAME_SHAPE = frozenset({"Cast", "HardSigmoid", "Identity", "LogSoftmax", "Relu", "Sigmoid", "Softmax", "Tanh"})
"""Operators whose result has the shape of their input."""


def build_training_step(
    model: ModelLike,
    loss: str | losses.Loss | ModelLike | Mapping[str, Any] | Sequence[Any] | Any | None,
    *,
    trainable: Iterable[str] | None = None,
    frozen: Iterable[str] | None = None,
    tie: Mapping[str, str] | None = None,
    optimizer: OptimizerOptions | Mapping[str, OptimizerOptions] | None = None,
    train_batch_norm: bool = False,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    grad_scaler: Any = None,
    average: Average | None = None,
    run_time: Iterable[str] = (),
    frozen_inputs: bool = False,
    fuse: bool = True,
    check: bool | Mapping[str, Any] = False,
    float64: bool = True,
    loss_weights: Mapping[str, float] | None = None,
    outputs: Iterable[str] = (),
    input_gradients: Iterable[str] = (),
    train_inputs: Mapping[str, Any] | None = None,
    straight_through: bool = False,
    dynamic_batch: bool | Mapping[str, int | None] = False,
    memory_budget: int | float | str | None = None,
    memory_sizes: Mapping[str, int] | None = None,
) -> TrainingStep:
    """Make a training step from a forward model in ONNX, without PyTorch.

    The parameters are the weights that the model stores and the loss depends on: in initializers, and in Constant nodes
    under the names of their outputs. Single numbers, masks and tables are not parameters unless `trainable` names them,
    and running statistics of BatchNormalization never are: docs/onnx-training.md has the rule. Exporters merge equal
    tensors: one that is filled with one number and read by several layers is divided among them.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        loss: what is minimised: "cross_entropy", "mse", "l1", "huber", "bce_with_logits", "nll", "ctc" or an object of
            `gradfuse.losses`, applied to the model's first float output; for probabilities "bce" and
            "sparse_categorical_crossentropy". Or an ONNX model or onnxscript function (outputs, targets) -> scalar: its
            first inputs are outputs of the same names, or the first float output; the others become targets under their
            names; its initializers are constants. None: the model's own scalar output. A dictionary output -> name or
            object, or a list of these in the order of the float outputs: the sum of several. Their targets are
            `<output>.target`, which `TrainingSession.step` takes as {output: target}; each loss is an output
            `<output>.loss` of the step.
        trainable: names of stored tensors to train, or patterns as of `fnmatch`; None: all parameters. A pattern
            selects parameters, or, if it matches none, any other tensors that it matches; those of them train that the
            loss depends on.
        frozen: names or patterns of tensors that stay as they are.
        tie: name of a stored tensor -> that of another with the same values, possibly transposed: they train as one,
            under the second name.
        optimizer: an object of `gradfuse.optimizers`; or a dictionary from names or patterns of parameters to one each,
            where "*" means all others: each is a parameter group of the step. None: the step ends at the gradients.
        train_batch_norm: whether every BatchNormalization uses the statistics of the batch and updates the running
            ones, which are then buffers of the step. Otherwise only nodes in training mode do; the others use the
            model's statistics, which do not change. Scale and bias train either way.
        max_grad_norm: as for `torch.nn.utils.clip_grad_norm_` over all parameters; None: no clipping.
        accumulate: over how many calls the gradients are averaged for one update.
        grad_scaler: the loss is scaled as with this `gradfuse.optimizers.GradScaler` or `torch.amp.GradScaler`, and an
            update whose gradients are not finite is skipped. None, or one that is not enabled: the loss is not scaled.
        average: `gradfuse.optimizers.EMA` or `SWA`: the parameters are averaged over the updates, for
            `TrainingSession.evaluate(averaged=True)` and the like. None: they are not.
        run_time: which hyperparameters are inputs beside the learning rate, so that sessions may change them between
            updates: "weight_decay", "betas", "eps", "momentum", "alpha" (of RMSprop), "rho" (of Adadelta), by
            parameter group; and "max_grad_norm". All but the last, and the weight decay of SGD, Adam and AdamW, replace
            the operators that update in one pass by plain nodes.
        frozen_inputs: whether weights that do not train, and running statistics of BatchNormalization, are inputs too,
            so that `TrainingSession.load_state_dict` and `load` can replace them; otherwise they are constants.
        fuse: whether to fuse the step, as `gradfuse.fuse` does.
        check: whether to compare derivatives of the loss along random directions with finite differences, in float64 if
            possible, on a random batch; or the batch to use: input or target -> array.
        float64: whether the update computes its scalars, such as Adam's bias correction, in float64, as PyTorch does.
            False, with `fuse=False`: in float32, a few roundings apart, for runtimes without float64, such as WebGPU.
        loss_weights: output -> the weight of its loss in the sum of several; 1 by default.
        outputs: names of values of the model that the step returns beside its loss, as `TrainingSession.outputs`.
        input_gradients: names of float inputs of the model whose gradients the step returns, as `<input>.grad`.
        train_inputs: input of the model -> its initial array: it trains as a parameter, beside those of `trainable`,
            which may then be [].
        straight_through: whether gradients pass pairs of QuantizeLinear and DequantizeLinear as in quantisation-aware
            training: unchanged, and 0 where a number saturates, as in torch.fake_quantize_per_tensor_affine. Their
            scales and zero points stay as they are. Not with `check`, as these are not derivatives.
        dynamic_batch: whether to make a fixed batch dynamic first, as by `gradfuse.make_batch_dynamic`; or input -> the
            axis of the batch, 0 by default, or None.
        memory_budget: the most memory that a run may take beside parameters, state and batch: bytes, a text such as
            "512MiB", or a fraction, up to 1.0, of what it would take. The step recomputes activations, and is run in
            onnxruntime to compare the bits; see `gradfuse.passes.RecomputePass`. None: keep all activations.
        memory_sizes: symbolic dimension -> its size, which a budget in bytes needs.

    Returns:
        The step. Its inputs are those of the model, its targets those that the loss adds. The parameters have the names
        of the initializers; if a step's own input or output has such a name, it gets another, which `own_name` returns.
        Its evaluation model is the model itself.

    Raises:
        ArgumentError: the loss does not fit the output, a name that the step needs is in use, a pattern matches nothing
            or running statistics, or an option is out of range.
        ModelError: the model cannot be read, a node in between has no gradient rule, or with `dynamic_batch` one fixes
            the batch; the text is one line.
        CheckError: a gradient does not agree with the finite differences.

    Warns:
        UserWarning: several layers read a trainable vector, as after an exporter has merged equal initializers; one
            weight has the values of another; a tensor that may be a parameter stays constant; the model ends in a
            softmax or the like, but the loss takes logits; or the loss ignores outputs.
    """
    criterion = _criterion(loss, loss_weights)
    if not (criterion is None or isinstance(criterion, losses.Loss | _Sum) or loss_models.is_model(criterion)):
        raise ArgumentError(
            f"{_WHO}: loss is {type_name(loss)}; expected a name, an object of gradfuse.losses, a model, "
            "an onnxscript function, a dictionary or list of losses, or None"
        )
    run_time = optimizers.run_time_names(run_time, lambda text: ArgumentError(f"{_WHO}: {text}"))
    _require_options(optimizer, max_grad_norm, accumulate, grad_scaler, average, run_time)
    max_grad_norm, accumulate = real(max_grad_norm), whole(accumulate) or 1
    if not isinstance(check, (bool, Mapping)):
        raise ArgumentError(f"{_WHO}: check is {check!r}; expected True, False or a batch: input or target -> array")
    if straight_through and check is not False:
        raise ArgumentError(f"{_WHO}: straight_through is True; expected check=False, as it gives no derivatives")
    if not float64 and fuse:
        raise ArgumentError(
            f"{_WHO}: float64 is False; expected fuse=False with it, as bodies of fused operators are in float64"
        )

    def refusal(text: str) -> ArgumentError:
        return ArgumentError(f"{_WHO}: {text}")

    scaling, averages = loss_scaling(grad_scaler, refusal), averaging(average, refusal)
    options = _Options(optimizer, max_grad_norm, accumulate, scaling, averages, float64, run_time)
    asked = _Asked(_listed("outputs", outputs), _listed("input_gradients", input_gradients), dict(train_inputs or {}))
    if asked.gradients and options.loss_scaling is not None:
        raise refusal("input_gradients are given with grad_scaler, which scales them; expected one of the two")
    if memory_sizes and memory_budget is None:
        raise refusal("memory_sizes are given without memory_budget; expected both or neither")
    if memory_budget is not None:
        memory_budget = parse_budget(memory_budget, _WHO)
    with collection_paused():
        # What has been read is held by nobody here, so that it is gone at the end.
        step = _built(
            *_read(model, check is not False, dynamic_batch),
            criterion,
            asked,
            trainable,
            frozen,
            tie,
            options,
            train_batch_norm,
            frozen_inputs,
            fuse,
            check,
            straight_through,
        )
    return step if memory_budget is None else within_budget(step, memory_budget, memory_sizes, _WHO)


def _read(
    model: ModelLike, checked: bool, dynamic_batch: bool | Mapping[str, int | None]
) -> tuple[ir.Model, ir.Model | None]:
    """Return a model without functions, to work on; and as it is given, if it is to be checked."""
    loaded = reading.load(model, tensors_only=True)
    if dynamic_batch is not False:
        loaded = with_dynamic_batch(loaded, _WHO, dynamic_batch)
    given = (loaded.older or copy_model(loaded.ir)) if checked else None
    return inlined(loaded), given


@dataclasses.dataclass(frozen=True)
class _Options:
    """How parameters are updated."""

    optimizer: OptimizerOptions | Mapping[str, OptimizerOptions] | None
    max_grad_norm: float | None
    accumulate: int
    loss_scaling: optimizers.LossScaling | None
    averaging: optimizers.Averaging | None
    float64: bool
    run_time: tuple[str, ...]

    def described(self, parameters: Mapping[str, StateType], names: Mapping[str, str]) -> optimizers.Optimizer | None:
        """Return the optimizer of some parameters, by their types and their names for the user; None: there is none."""
        if self.optimizer is None:
            return None

        def refusal(text: str) -> ArgumentError:
            return ArgumentError(f"{_WHO}: {text}")

        return dataclasses.replace(
            described(self.optimizer, parameters, names, refusal),
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
            loss_scaling=self.loss_scaling,
            averaging=self.averaging,
            float64=self.float64,
        ).with_run_time(self.run_time, refusal)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum of losses.

    Attributes:
        parts: the losses by output; None: of the float outputs in their order.
        weights: what some of them are multiplied by, by output.
    """

    parts: Mapping[str, losses.Loss] | Sequence[losses.Loss]
    weights: Mapping[str, float]

    def by_output(self, floats: Sequence[ir.Value]) -> dict[ir.Value, losses.Loss]:
        """Return the loss of each output."""
        named = {str(value.name): value for value in floats}
        if not isinstance(self.parts, Mapping):
            if len(self.parts) > len(floats):
                raise ArgumentError(
                    f"{_WHO}: loss has {len(self.parts)} losses, and the model {len(floats)} float outputs, "
                    f"{listed(named)}; expected no more losses"
                )
            return dict(zip(floats, self.parts, strict=False))
        unknown = [name for name in (*self.parts, *self.weights) if name not in named]
        if unknown:
            raise ArgumentError(f"{_WHO}: loss has {unknown[0]!r}; expected float outputs among {listed(named)}")
        return {named[name]: one for name, one in self.parts.items()}


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Further outputs and parameters that the caller requests.

    Attributes:
        outputs: the names of values that become outputs.
        gradients: the names of inputs whose gradients do.
        trained: the names of inputs that become parameters, and their first values.
    """

    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    trained: Mapping[str, Any]

    def with_trained(self, graph: ir.Graph) -> None:
        """Give the inputs that become parameters their first values, as initializers."""
        inputs = {str(value.name): value for value in graph.inputs}
        unknown = [name for name in self.trained if name not in inputs]
        if unknown:
            raise ArgumentError(f"{_WHO}: train_inputs has {listed(unknown)}; expected inputs among {listed(inputs)}")
        for name, given in self.trained.items():
            value = inputs[name]
            if value.dtype not in FLOATS or value.shape is None:
                raise ArgumentError(
                    f"{_WHO}: train_inputs has {name!r}, which is {value.dtype}; expected a float input"
                )
            array = np.asarray(given)
            fits = len(array.shape) == len(value.shape) and all(
                not isinstance(dim, int) or dim == size for dim, size in zip(value.shape, array.shape, strict=False)
            )
            if array.dtype != value.dtype.numpy() or not fits:
                raise ArgumentError(
                    f"{_WHO}: train_inputs of {name!r} is {array.dtype} of shape {list(array.shape)}; "
                    f"expected {value.dtype} of shape {value.shape}"
                )
            graph.inputs.remove(value)
            value.shape = ir.Shape(array.shape)
            value.const_value = ir.tensor(np.array(array), name=name)
            graph.register_initializer(value)

    def made_outputs(self, graph: ir.Graph) -> dict[str, int]:
        """Make values outputs of a graph, so that they stay; return at which places they are."""
        places: dict[str, int] = {}
        values = {str(value.name): value for node in graph for value in node.outputs}
        unknown = [name for name in self.outputs if name not in values]
        if unknown:
            raise ArgumentError(f"{_WHO}: outputs has {listed(unknown)}; expected values that the model computes")
        for name in self.outputs:
            if name == LOSS or name.endswith((GRADIENT_SUFFIX, UPDATED_SUFFIX)):
                raise ArgumentError(f"{_WHO}: outputs has {name!r}, a name that the step has; expected another one")
            if values[name] not in graph.outputs:
                graph.outputs.append(values[name])
            places[name] = list(graph.outputs).index(values[name])
        return places


def _listed(argument: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(n, str) for n in (*names,)):
        raise ArgumentError(f"{_WHO}: {argument} is {names!r}; expected a list of names")
    return tuple(dict.fromkeys(names))


def _criterion(loss: Any, weights: Mapping[str, float] | None) -> Any:
    """Return a loss, with those of names made; of several their sum."""
    if isinstance(loss, str) and not loss_models.is_model(loss):
        loss = losses.named(loss)
    if not isinstance(loss, (Mapping, list, tuple)):
        if weights:
            raise ArgumentError(f"{_WHO}: loss_weights is given with one loss; expected a dictionary of losses")
        return loss
    parts = dict(loss) if isinstance(loss, Mapping) else dict(enumerate(loss))
    made: dict[Any, losses.Loss] = {}
    for key, one in parts.items():
        made[key] = losses.named(one) if isinstance(one, str) and not loss_models.is_model(one) else one
        if not isinstance(made[key], losses.Loss):
            raise ArgumentError(
                f"{_WHO}: loss has {type(one).__name__} for {key!r}; expected a name or an object of gradfuse.losses"
            )
    if not made:
        raise ArgumentError(f"{_WHO}: loss is empty; expected at least one loss")
    for name, weight in (weights or {}).items():
        if (number := real(weight)) is None or not np.isfinite(number):
            raise ArgumentError(f"{_WHO}: loss_weights of {name!r} is {weight!r}; expected a finite number")
        if isinstance(loss, Mapping) and name not in loss:
            raise ArgumentError(f"{_WHO}: loss_weights has {name!r}; expected outputs among {listed(loss)}")
    return _Sum(made if isinstance(loss, Mapping) else tuple(made.values()), dict(weights or {}))


def _built(
    work: ir.Model,
    given: ir.Model | None,
    criterion: Any,
    asked_for: _Asked,
    trainable: Iterable[str] | None,
    frozen: Iterable[str] | None,
    tie: Mapping[str, str] | None,
    options: _Options,
    train_batch_norm: bool,
    frozen_inputs: bool,
    fuse: bool,
    check: bool | Mapping[str, Any],
    straight_through: bool,
) -> TrainingStep:
    # Of IR version 3 they are inputs as well.
    work.graph.inputs[:] = [value for value in work.graph.inputs if value.name not in work.graph.initializers]
    work.ir_version = max(work.ir_version, 4)
    for value in work.graph.inputs:
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            kind = type(value.type).__name__.removesuffix("Type").lower()
            raise ArgumentError(f"{_WHO}: input {value.name!r} is a {kind}; expected tensors")
    store = Store(work)
    separate(store)
    if tie:
        tie_tensors(store, tie)
    if isinstance(trainable, Iterable) and not isinstance(trainable, str):
        trainable = list(trainable)
    choice = _choice(store, trainable, frozen, asked_for, frozen_inputs)
    if straight_through:
        choice = _without_scales(choice, pairs.scales(work), trainable)
    asked_for.with_trained(work.graph)
    if given is not None:
        asked_for.with_trained(given.graph)
    ends = len(work.graph.outputs)
    places = asked_for.made_outputs(work.graph)
    own = [*work.graph.initializers, *(str(value.name) for value in work.graph.inputs)]
    aside = names.set_aside(own, options.run_time)
    for value in list(work.graph.initializers.values()):
        rename(value, aside.get(str(value.name), str(value.name)))
    work = in_new_opset(completed(work))
    if given is not None:
        check_forward(given, work, check if isinstance(check, Mapping) else None)
    graph = work.graph
    for value in graph.inputs:
        rename(value, aside.get(str(value.name), str(value.name)))
    if isinstance(check, Mapping):
        check = {aside.get(name, name): array for name, array in check.items()}
    by_batch = leave_training_mode(graph)
    if train_batch_norm:
        by_batch = nodes_in_inference_mode(graph)
    separate_statistics(Store(work), by_batch)
    initializers, asked = dict(graph.initializers), [aside.get(name, name) for name in choice.names]
    batch = [str(value.name) for value in graph.inputs]
    held = _held(graph, [aside.get(name, name) for name in choice.weights], by_batch)
    wanted = _differentiated(graph, {aside.get(name, name) for name in asked_for.gradients}, asked_for)
    evaluation = copy_model(work)
    del evaluation.graph.outputs[ends:]
    turn_off_dropout(evaluation.graph)
    for node in graph:
        node.meta[FUSES] = fuse
    expand_on_the_way(work, [*(initializers[name] for name in asked), *wanted])
    if straight_through and not pairs.join_pairs(work):
        raise ArgumentError(f"{_WHO}: straight_through is True; expected pairs that quantise with one scale")
    expand_on_the_way(work, [initializers[name] for name in asked])

    seeds = seed_draws(work, Tape(free_prefix(graph, "draws/"), work.opset_imports[""]))
    tape = Tape(free_prefix(graph), work.opset_imports[""])
    updated = use_batch_statistics(graph, by_batch, tape, fuse=fuse) | seeds
    tape = Tape(free_prefix(graph), work.opset_imports[""])
    derived = _derived_sizes(work, list(graph.outputs)[:ends])
    found_loss = _loss(work, tape, criterion, list(graph.outputs)[:ends])
    result, targets = found_loss.result, found_loss.targets
    graph.extend(tape.nodes)
    infer(work)
    of_batch = {value: str(value.name) for value in graph.inputs if value.name in {*batch, *targets}}
    checks = batch_checks.checks_of(_labels(graph, found_loss), of_batch)
    if criterion is not None and not isinstance(criterion, losses.Loss | _Sum):
        loss_models.require_scalar(result, graph.outputs)
    extra = {name: list(graph.outputs)[place] for name, place in places.items()}
    extra |= {name: part for name, part in found_loss.parts.items() if name not in extra}
    if fuse:
        mark_embeddings(graph)
    scale = None
    if options.loss_scaling is not None:
        scale = ir.Value(name=optimizers.LOSS_SCALE, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    found = append_gradients(
        work,
        result,
        [*(initializers[name] for name in asked), *wanted],
        fuse=fuse,
        scale=None if scale is None else (scale, 1 / options.accumulate),
        kept=[result, *(after.value for after in updated.values()), *extra.values()],
    )
    if straight_through:
        pairs.part_pairs(work)
    named = [[aside.get(name, name) for name in names] for names in (choice.named or {}).values()]
    parameters = _with_gradients(asked, initializers, found, named)
    reached = {*parameters, *(str(value.name) for value in wanted if value in found)}
    missing = [name for name in (*asked_for.trained, *asked_for.gradients) if aside.get(name, name) not in reached]
    if missing:
        inputs = "input" if len(missing) == 1 else "inputs"
        raise ArgumentError(
            f"{_WHO}: the loss does not depend on the {inputs} {listed(missing)}; expected that it does"
        )
    warn(store, choice, {name for name in choice.names if aside.get(name, name) in parameters})
    shown = {other: name for name, other in aside.items()}
    types = {name: _type_of(initializers[name]) for name in parameters}
    description = options.described(types, {name: shown.get(name, name) for name in parameters})
    reserved = [] if description is None else description.input_names()
    if not extra.keys().isdisjoint(reserved):
        name = next(name for name in extra if name in reserved)
        raise ArgumentError(f"{_WHO}: outputs has {name!r}, a name that the step has; expected another one")
    _free_names(graph, result, parameters, updated, description, [str(value.name) for value in wanted])

    changed = {*parameters, *updated}
    first = [value for name, value in graph.initializers.items() if name in changed]
    values = _taken_out(graph, parameters)
    buffers = _taken_out(graph, updated)
    others = [value for value in graph.inputs if value.name not in held]
    graph.inputs[:] = [*first, *(initializers[name] for name in held), *([] if scale is None else [scale]), *others]
    graph.outputs.clear()
    kept = _kept_outputs(graph, extra, result)
    graph.outputs[:] = [_loss_output(graph, result), *kept]
    for name, after in updated.items():
        like = next(value for value in first if value.name == name)
        graph.outputs.append(named_output(graph, after, name + UPDATED_SUFFIX, like))
    for name in parameters:
        like = initializers[name]
        graph.outputs.append(named_output(graph, found[like], name + GRADIENT_SUFFIX, like))
    for value in wanted:
        graph.outputs.append(named_output(graph, found[value], f"{value.name}{GRADIENT_SUFFIX}", value))
    size_checks, read = _size_checks(found_loss, (value for value in graph.inputs if value.name in batch), derived)
    read = [value for value in read if value not in graph.outputs and value.producer() is not None]
    graph.outputs.extend(read)
    RemoveUnusedNodesPass()(work)
    if any(node.domain == "aclnn" for node in graph):
        functions.attach(work)
    report = None
    if fuse:
        loaded, report = fusion.fuse_loaded(reading.owned(work), pointwise=True)
        report.near_misses[:0] = work.meta.get(LEFT, ())
        work = loaded.ir
    if read:
        del work.graph.outputs[-len(read) :]
    if check is not False:
        scaled = {} if scale is None else {optimizers.LOSS_SCALE: np.array(options.accumulate, np.float32)}
        check_gradients(work, evaluation, values, {**buffers, **held, **scaled}, None if check is True else check)
    if description is not None:
        optimizers.append(work, description, {*batch, *targets}, fuse=fuse)
    for part in (work, evaluation):
        if narrow_types.has_bfloat16(part):
            narrow_types.widen_bfloat16(part, fuse=fuse)
            if fuse:
                narrow_types.cast_by_vectors(part)
    batch_checks.append(work, checks, free_prefix(work.graph, "checks/")[:-1], size_checks=size_checks)
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
        state_dict_names={name: name for name in (*values, *buffers, *held)},
        evaluation_model=_evaluation(evaluation, [*parameters, *(name for name in buffers if name not in seeds)]),
        index_ranges=batch_checks.ranges_of(checks),
        output_names=(*extra, *(f"{value.name}{GRADIENT_SUFFIX}" for value in wanted)),
        nesting={} if found_loss.nesting is None else {"targets": found_loss.nesting},
        frozen=held,
    )
    return names.finished(step, aside)


def _require_options(
    optimizer: Any,
    max_grad_norm: float | None,
    accumulate: int,
    grad_scaler: Any,
    average: Any,
    run_time: Collection[str],
) -> None:
    from gradfuse.optimizers import OptimizerOptions

    parts = list(optimizer.values()) if isinstance(optimizer, Mapping) and optimizer else [optimizer]
    for pattern in optimizer if isinstance(optimizer, Mapping) else ():
        if not isinstance(pattern, str):
            raise ArgumentError(f"{_WHO}: optimizer has {pattern!r}; expected names or patterns of parameters")
    for part in parts:
        if optimizer is not None and not isinstance(part, OptimizerOptions):
            raise ArgumentError(
                f"{_WHO}: optimizer is {type_name(part)}; expected one of gradfuse.optimizers, such as AdamW(), or a "
                "dictionary of some"
            )
    if max_grad_norm is not None and not (real(max_grad_norm) or 0) > 0:
        raise ArgumentError(f"{_WHO}: max_grad_norm is {max_grad_norm!r}; expected a positive number or None")
    if (whole(accumulate) or 0) < 1:
        raise ArgumentError(f"{_WHO}: accumulate is {accumulate!r}; expected a positive integer")
    given = {
        "max_grad_norm": max_grad_norm is not None,
        "accumulate": accumulate > 1,
        "grad_scaler": grad_scaler is not None,
        "average": average is not None,
        "run_time": bool(run_time),
    }
    if optimizer is None and any(given.values()):
        name = next(name for name, is_given in given.items() if is_given)
        raise ArgumentError(f"{_WHO}: {name} is given without an optimizer; expected both or neither")


def _choice(store: Store, trainable: Any, frozen: Any, asked: _Asked, weights: bool) -> Choice:
    """Return the parameters, with the inputs that become some."""
    only = asked.trained and isinstance(trainable, list) and not trainable
    choice = choose(store, None if only else trainable, None if only else frozen, weights=weights)
    if only:
        others = [*choice.names, *choice.weights] if weights else []
        choice = Choice([], [], [], {}, {}, [], named=None, weights=others)
    return dataclasses.replace(choice, names=[*choice.names, *asked.trained])


def _without_scales(choice: Choice, scales: Collection[str], trainable: Any) -> Choice:
    """Return the parameters without the scales of pairs, which are constants of the step."""
    names = [name for name in choice.names if name not in scales]
    asked = [name for name in choice.names if name in scales and name in (trainable or ())]
    if asked or (choice.named is not None and not names):
        name = asked[0] if asked else next(iter(choice.names))
        raise ArgumentError(
            f"{_WHO}: trainable has {name!r}, the scale of a pair that quantises, which straight_through leaves as it "
            "is; expected other tensors"
        )
    return dataclasses.replace(choice, names=names, weights=[name for name in choice.weights if name not in scales])


def _differentiated(graph: ir.Graph, wanted: Collection[str], asked: _Asked) -> list[ir.Value]:
    """Return the inputs whose gradients are outputs."""
    found = [value for value in graph.inputs if value.name in wanted]
    if len(found) < len(wanted):
        inputs = [str(value.name) for value in graph.inputs]
        unknown = [name for name in asked.gradients if name not in inputs]
        raise ArgumentError(f"{_WHO}: input_gradients has {listed(unknown)}; expected inputs among {listed(inputs)}")
    for value in found:
        if value.dtype not in FLOATS:
            raise ArgumentError(f"{_WHO}: input_gradients has {value.name!r}, which is {value.dtype}; expected a float")
    return found


def _kept_outputs(graph: ir.Graph, extra: Mapping[str, ir.Value], loss: ir.Value) -> list[ir.Value]:
    """Return values under names of their own, as outputs of the step."""
    every = {str(value.name) for value in values_of(graph)}
    results: list[ir.Value] = []
    for name, value in extra.items():
        value = _without_bfloat16(graph, value)
        if value is loss or value in results or value.producer() is None:
            node = ir.node("Identity", [value], name=f"{name}.identity")
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            value = node.outputs[0]
        for other in values_of(graph):
            if other.name == name and other is not value:
                rename(other, names.free(f"{name}_inner", every))
                every.add(other.name)
        value.name = name
        results.append(value)
    return results


@dataclasses.dataclass(frozen=True)
class _Found:
    """A loss that was appended to a model.

    Attributes:
        result: its value.
        targets: the names of the inputs that it has added.
        parts: the losses that it is the sum of, by name; empty if it is a single one.
        of: what it is taken of, the loss that is taken, and the name of the first target.
        nesting: that of the targets as arguments; None: each is one itself.
        sizes: which sizes must be equal for it.
    """

    result: ir.Value
    targets: list[str] = dataclasses.field(default_factory=list)
    parts: Mapping[str, ir.Value] = dataclasses.field(default_factory=dict)
    of: Sequence[tuple[ir.Value, losses.Loss, str]] = ()
    nesting: Any = None
    sizes: Sequence[loss_models.SameSize] = ()


def _loss(work: ir.Model, tape: Tape, criterion: Any, ends: Sequence[ir.Value]) -> _Found:
    """Append the loss to outputs of the model, its `ends`."""
    graph = work.graph
    floats = [value for value in ends if value.dtype in FLOATS]
    if not floats:
        raise ArgumentError(f"{_WHO}: the model has no float output; expected one for the loss")
    if criterion is None:
        scalars = [value for value in floats if value.shape is not None and all(dim == 1 for dim in value.shape)]
        if len(scalars) != 1:
            raise ArgumentError(f"{_WHO}: loss is None and {len(scalars)} outputs are scalars; expected one, or a loss")
        return _Found(scalars[0])
    if isinstance(criterion, _Sum):
        return _sum(graph, tape, criterion, floats)
    output = floats[0]
    if output.shape is None:
        raise ArgumentError(f"{_WHO}: the rank of the output {output.name!r} is unknown; expected a model with shapes")
    if not isinstance(criterion, losses.Loss):
        return _loss_of_model(work, tape, output, criterion, ends)
    sizes: list[loss_models.SameSize] = []
    result, targets = _loss_of_output(graph, tape, output, criterion, "", sizes)
    return _Found(result, targets, of=[(output, criterion, targets[0])], sizes=sizes)


def _sum(graph: ir.Graph, tape: Tape, criterion: _Sum, floats: Sequence[ir.Value]) -> _Found:
    """Append several losses and their sum to outputs."""
    total: Tensor | None = None
    parts: dict[str, ir.Value] = {}
    of: list[tuple[ir.Value, losses.Loss, str]] = []
    targets: list[str] = []
    arguments: list[Any] = []
    sizes: list[loss_models.SameSize] = []
    by_output = criterion.by_output(floats)
    dtypes = {output.dtype for output in by_output}
    wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT
    taken = {str(value.name) for value in values_of(graph)}
    for output, one in by_output.items():
        result, added = _loss_of_output(graph, tape, output, one, f"{output.name}.", sizes)
        of.append((output, one, added[0]))
        targets += added
        arguments.append([str(output.name), added[0] if len(added) == 1 else added])
        parts[names.free(f"{output.name}.{LOSS}", taken)] = result
        term = tape.of(result) if len(dtypes) == 1 else tape.of(result).cast(wide)
        weight = criterion.weights.get(str(output.name), 1.0)
        term = term if weight == 1 else term * float(weight)
        total = term if total is None else total + term
    assert total is not None
    total.value.shape = ir.Shape([])
    result = total.value
    if result in parts.values():
        # One loss alone.
        result = total.op("Identity").value
        result.shape = ir.Shape([])
    return _Found(result, targets, parts, of, {"arguments": arguments, "keywords": False}, sizes)


def _loss_of_output(
    graph: ir.Graph,
    tape: Tape,
    output: ir.Value,
    criterion: losses.Loss,
    prefix: str,
    sizes: list[loss_models.SameSize],
) -> tuple[ir.Value, list[str]]:
    """Append a loss to an output; return it and the names of the inputs that it has added, with a prefix.

    What sizes must be equal for it is added to `sizes`.
    """
    if output.shape is None:
        raise ArgumentError(f"{_WHO}: the rank of the output {output.name!r} is unknown; expected a model with shapes")
    name = type(criterion).__name__
    dims = [dim if isinstance(dim, int) else dim.value for dim in output.shape]
    if len(dims) < criterion.least_rank:
        raise ArgumentError(
            f"{_WHO}: the output {output.name!r} has shape {output.shape}; "
            f"{name} expected at least {criterion.least_rank} dimensions"
        )
    for axis, size in criterion.sizes(len(dims)).items():
        if isinstance(dims[axis], int) and dims[axis] != size:
            raise ArgumentError(
                f"{_WHO}: the output {output.name!r} has shape {output.shape}, and {name} {size} weights along axis "
                f"{axis}; expected {dims[axis]}"
            )
        sizes.append(loss_models.SameSize(output, axis, size))
    _warn_of_activation(output, criterion, 7 if prefix else 6)
    values = {str(value.name) for value in values_of(graph)}
    free = {target.name: names.free(prefix + target.name, values) for target in criterion.targets}
    added: list[Tensor] = []
    for target in criterion.targets:
        dtype = target.dtype or output.dtype
        assert dtype is not None
        value = ir.Value(name=free[target.name], type=ir.TensorType(dtype), shape=ir.Shape(target.shape(dims)))
        graph.inputs.append(value)
        added.append(tape.of(value))
        # Of axes in the place of sizes, the shape tells which axis of the output each of the target's has.
        for axis, of in enumerate(target.shape(range(len(dims)))):
            if isinstance(of, int):
                sizes.append(loss_models.SameSize(output, of, value, axis))
    result = criterion.forward(tape.of(output), added, len(dims)).value
    result.shape = ir.Shape([])
    return result, list(free.values())


def _labels(graph: ir.Graph, loss: _Found) -> list[batch_checks.Index]:
    """Return the labels that losses in a graph take."""
    found = []
    for node in graph:
        if node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and not node.domain:
            scores, labels = node.inputs[:2]
            assert scores is not None and labels is not None
            ignored = node.attributes.get_int("ignore_index") if "ignore_index" in node.attributes else None
            found.append((scores, labels, ignored))
    for output, criterion, name in loss.of:
        if isinstance(criterion, losses.CrossEntropyLoss) and criterion.label_smoothing:
            (label,) = (value for value in graph.inputs if value.name == name)
            found.append((output, label, criterion.ignore_index))
    return [batch_checks.Index(labels, _classes(scores), ignored) for scores, labels, ignored in found]


def _classes(scores: ir.Value) -> int | batch_checks.SizeOf:
    size = None if scores.shape is None else scores.shape[1]
    return size if isinstance(size, int) else batch_checks.SizeOf(str(scores.name), 1)


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


def _warn_of_activation(output: ir.Value, criterion: losses.Loss, stacklevel: int) -> None:
    """Warn the caller of a loss of logits after a softmax or the like, which trains, but worse."""
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
        stacklevel=stacklevel,
    )


def _loss_of_model(work: ir.Model, tape: Tape, output: ir.Value, loss: Any, ends: Sequence[ir.Value]) -> _Found:
    graph = work.graph
    # The first one that is a float is what a loss without its name takes.
    outputs = dict.fromkeys([output, *ends])
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
    return _Found(found.result, targets, sizes=found.sizes)


def _derived_sizes(work: ir.Model, values: Iterable[ir.Value]) -> dict[ir.Value, Sizes]:
    """Return the sizes of values that follow from the inputs, whatever else the model declares."""
    declared = {value: value.shape for node in work.graph.all_nodes() for value in node.outputs}
    for value in declared:
        value.shape = None
    shapes = Facts(work).shapes
    for value, shape in declared.items():
        value.shape = shape
    return {value: shapes[value] for value in values if value in shapes}


def _size_checks(
    loss: _Found, batch: Iterable[ir.Value], derived: Mapping[ir.Value, Sizes]
) -> tuple[list[batch_checks.SizeCheck], list[ir.Value]]:
    """Return checks of sizes that must be equal for a loss, and the values that they read and fusing may remove.

    A session compares sizes of one name with those of the batch, which is enough where the output's follows from them.
    Without a check, others would be broadcast.
    """
    named = {dim.value for value in batch for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)} - {None}
    checks: list[batch_checks.SizeCheck] = []
    read: dict[ir.Value, None] = {}
    # LinearCrossEntropy, which checks the labels itself, computes no logits.
    swallowed = {output for output, criterion, _ in loss.of if _may_join_head(criterion)}
    for one in loss.sizes:
        of, other = one.output, one.other
        assert of.shape is not None
        dim = of.shape[one.axis]
        follows = of in derived and len(derived[of]) == len(of.shape) and derived[of][one.axis] == size_of(dim)
        if follows and (isinstance(dim, int) or (isinstance(other, ir.Value) and dim.value in named)):
            continue
        shown = str(of.name)
        while (node := of.producer()) is not None and node.op_type in _OF_SAME_SHAPE and not node.domain:
            assert node.inputs[0] is not None
            of = node.inputs[0]
        operand = other if isinstance(other, int) else batch_checks.SizeOf(str(other.name), one.other_axis)
        text = (
            f"{shown} of another size than the weights along axis {one.axis}, expected {other}"
            if isinstance(other, int)
            else f"{other.name} and {shown} of different sizes along axis {one.axis}, expected equal ones"
        )
        size = batch_checks.SizeOf(str(of.name), one.axis)
        checks.append(batch_checks.SizeCheck(batch_checks.Term("Equal", (operand, size)), text))
        if one.output not in swallowed:
            read[of] = None
    return checks, list(read)


def _may_join_head(criterion: losses.Loss) -> bool:
    if not isinstance(criterion, losses.CrossEntropyLoss):
        return False
    return criterion.from_logits and not criterion.soft_targets and not criterion.label_smoothing


def _require_free_targets(graph: ir.Graph, targets: Iterable[str], who: str) -> None:
    values = {value.name for value in values_of(graph)}
    taken = [name for name in targets if name in values]
    if taken:
        raise ArgumentError(f"{_WHO}: the model has a value {listed(taken)} already; expected that name for {who}")


def _with_gradients(
    asked: Sequence[str],
    initializers: Mapping[str, ir.Value],
    found: Mapping[ir.Value, Tensor],
    named: Iterable[Sequence[str]],
) -> list[str]:
    """Return the parameters that have a gradient; of what each name or pattern of the caller selects, one must."""
    parameters = [name for name in asked if initializers[name] in found]
    missing = [name for selected in named if not {*selected} & {*parameters} for name in selected]
    if missing:
        raise ArgumentError(f"{_WHO}: the loss does not depend on {listed(missing)}; expected what it depends on")
    if not parameters:
        raise ArgumentError(f"{_WHO}: the loss depends on no float initializer; expected at least one")
    return parameters


def _type_of(value: ir.Value) -> StateType:
    assert value.dtype is not None and value.shape is not None
    return StateType(value.dtype, value.shape.numpy())


def _free_names(
    graph: ir.Graph,
    loss: ir.Value,
    parameters: Iterable[str],
    updated: Iterable[str],
    description: optimizers.Optimizer | None,
    differentiated: Iterable[str],
) -> None:
    """Take names that the step gives to something else from what nodes compute; refuse them of anything else."""
    changed = [*updated] if description is None else [*updated, *parameters]
    wanted = {LOSS, *(name + UPDATED_SUFFIX for name in changed), *(name + GRADIENT_SUFFIX for name in parameters)}
    wanted |= {name + GRADIENT_SUFFIX for name in differentiated}
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


def _held(graph: ir.Graph, names: Iterable[str], by_batch: Iterable[ir.Node]) -> Arrays:
    """Make weights that do not train inputs of a graph, but for statistics that nodes update; return their values."""
    updated = {value for node in by_batch for value in node.inputs[3:5]}
    chosen = [name for name in names if graph.initializers[name] not in updated]
    graph.inputs.extend(graph.initializers[name] for name in chosen)
    return _taken_out(graph, chosen)


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
    value = _without_bfloat16(graph, value)
    if value.shape is None or len(value.shape):
        node = ir.node("Reshape", [value, _empty(graph)], name="loss/Reshape")
        node.outputs[0].type = value.type
        graph.append(node)
        value = node.outputs[0]
        value.shape = ir.Shape([])
    value.name = LOSS
    return value


def _without_bfloat16(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return an output in float32 if it is bfloat16, which numpy does not have."""
    if value.dtype != ir.DataType.BFLOAT16:
        return value
    node = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT}, name=f"{value.name}.cast")
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
    graph.append(node)
    return node.outputs[0]


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
