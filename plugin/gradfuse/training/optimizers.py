"""Optimizers as part of a training step: as data, and as nodes of the step's graph that make the update.

Tensors are computed in float32, or in float64 if the parameter is float64, and rounded to the parameter's type at the
end. `gradfuse.training.rules` has the arithmetic. This module does not need torch: `gradfuse.export.optimizer` reads
the optimizers of torch.optim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.custom_ops import OPS, functions
from gradfuse.custom_ops.operator import OLDEST_OPSET
from gradfuse.errors import ExportError, GradfuseError, listed
from gradfuse.models.arrays import Arrays
from gradfuse.training.hyperparameters import BETAS, HYPERPARAMETERS, LEARNING_RATE, MAX_GRAD_NORM, name_of
from gradfuse.training.nodes import GraphTensor, Nodes
from gradfuse.training.rules import RULES, FusedUpdate, Rule, Slot, StateType, adam_8bit, decayed
from gradfuse.training.step import (
    AVERAGE,
    GRADIENT_SUFFIX,
    GROWTH_TRACKER,
    MICRO_STEP,
    N_AVERAGED,
    STEP,
    UPDATED_SUFFIX,
)

ACCUMULATED_GRADIENT = "accumulated_grad"
LOSS_SCALE = "loss_scale"
_FUSED_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_DECAY = "weight_decay"


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share an algorithm and its options.

    Attributes:
        parameters: their names.
        options: torch's: `lr`, `weight_decay`, `betas`, ...
        algorithm: a key of `RULES`; or any other name, if all the rules were traced.
        run_time: which of the options are inputs of the step.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, Any]
    algorithm: str
    run_time: tuple[str, ...] = ()

    @property
    def structure(self) -> Mapping[str, Any]:
        """The options, with nonzero placeholders for those that are inputs."""
        return {**self.options, **{name: 1.0 for name in self.run_time if name != BETAS}}


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling as by `torch.amp.GradScaler`, with its names."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int = 0
    """Updates since the scale last changed."""


@dataclasses.dataclass(frozen=True)
class Averaging:
    """Averages of the parameters, as of `torch.optim.swa_utils.AveragedModel`.

    Attributes:
        decay: the weight of the old average in an exponential one; None: a plain mean.
        start: after how many updates of the step averaging begins.
        every: only the last of this many updates is averaged.
    """

    decay: float | None
    start: int
    every: int

    @property
    def counts_steps(self) -> bool:
        """Whether it depends on the number of updates."""
        return self.start > 0 or self.every > 1


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer, or several as one: the options of each parameter, and the state to start from.

    Attributes:
        groups: the parameter groups.
        steps: how many steps were done before, by parameter; none for one that is left out.
        begun: the parameters of which it is known only that a step was done before.
        state: `<parameter>.<state>` -> array, where it is not zeros.
        traced: parameter -> its rule, where that was traced; parameters of one shape share one.
        eight_bit: parameter -> its shape, if its state is kept in 8 bits; the algorithm is Adam.
        max_grad_norm: as for `torch.nn.utils.clip_grad_norm_` over the optimizer's parameters; None: no clipping.
        norm_at_run_time: whether that is an input of the step.
        accumulate: over how many calls the gradients are averaged for one update.
        loss_scaling: how the gradients are scaled; None: they are not.
        averaging: how the parameters are averaged; None: they are not.
        float64: whether scalars, such as Adam's bias correction, are computed in float64, as PyTorch does; else in
            float32, unless a parameter is float64.
    """

    groups: tuple[ParameterGroup, ...]
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    traced: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    eight_bit: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    max_grad_norm: float | None = None
    norm_at_run_time: bool = False
    accumulate: int = 1
    loss_scaling: LossScaling | None = None
    averaging: Averaging | None = None
    float64: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that it updates."""
        return tuple(name for group in self.groups for name in group.parameters)

    def rule(self, parameter: str) -> Rule:
        """Return the update rule of a parameter."""
        return self._rules[parameter]

    @functools.cached_property
    def _rules(self) -> dict[str, Rule]:
        known = {**self.traced, **{name: adam_8bit(shape) for name, shape in self.eight_bit.items()}}
        return {
            name: known[name] if name in known else RULES[group.algorithm]
            for group in self.groups
            for name in group.parameters
        }

    def group(self, parameter: str) -> ParameterGroup:
        """Return the group that a parameter is in."""
        return next(group for group in self.groups if parameter in group.parameters)

    @property
    def counting(self) -> tuple[str, ...]:
        """The names of the parameters whose update depends on the number of steps done."""
        return tuple(
            name for group in self.groups for name in group.parameters if self.rule(name).counts_steps(group.structure)
        )

    @property
    def counts_steps(self) -> bool:
        """Whether the number of updates is part of the state."""
        return bool(self.counting) or (self.averaging is not None and self.averaging.counts_steps)

    @property
    def steps_before(self) -> int:
        """The number of steps done before, as far as updates depend on it."""
        return max((self.steps.get(name, 0) for name in self.counting), default=0)

    def restricted(self, names: Collection[str], who: str) -> Optimizer:
        """Return the optimizer for those of its parameters only.

        Raises:
            ExportError: there are none, or they were updated a different number of times where that is counted; `who`
                is what the message names.
        """
        groups = tuple(
            dataclasses.replace(group, parameters=tuple(name for name in group.parameters if name in names))
            for group in self.groups
        )
        if not any(group.parameters for group in groups):
            raise ExportError(f"{who}: the loss depends on no parameter of the optimizer; expected at least one")
        counting = dataclasses.replace(self, groups=groups).counting
        steps = {name: self.steps.get(name, 0) for name in counting if name not in self.begun}
        told = {name: f"{name!r} {done} times" for name, done in steps.items()}
        # Any number but 0 will do for these.
        done = max(steps.values(), default=0) or 1
        for name in (one for one in counting if one in self.begun):
            steps[name], told[name] = done, f"{name!r} at least once"
        if len(set(steps.values())) > 1:
            ends = " and ".join(told[pick(steps, key=steps.__getitem__)] for pick in (min, max))
            raise ExportError(
                f"{who}: the optimizer has updated {ends}; expected one number of steps, as of a new optimizer"
            )
        return dataclasses.replace(self, groups=groups, steps=steps)

    def alone(self, parameter: str) -> Optimizer:
        """Return the optimizer of one parameter, which updates in every call."""
        one = dataclasses.replace(self.group(parameter), parameters=(parameter,))
        return dataclasses.replace(
            self,
            groups=(one,),
            max_grad_norm=None,
            norm_at_run_time=False,
            accumulate=1,
            loss_scaling=None,
            averaging=None,
        )

    def with_run_time(self, asked: Sequence[str], refusal: Callable[[str], GradfuseError]) -> Optimizer:
        """Return the optimizer with some hyperparameters as inputs of the step.

        Args:
            asked: what `run_time_names` returned.
            refusal: makes the error that is raised where one cannot be an input.
        """
        for name in asked:
            if name == MAX_GRAD_NORM:
                if self.max_grad_norm is None:
                    raise refusal(f"run_time has {name!r}, and max_grad_norm is None; expected the norm to begin with")
            elif not any(name in group.options for group in self.groups):
                have = {option for group in self.groups for option in group.options if option in HYPERPARAMETERS}
                raise refusal(
                    f"run_time has {name!r}, which {self.algorithms} does not have; expected names among "
                    f"{listed(sorted(have)) or 'none'}"
                )
            if name == BETAS and not self.float64:
                raise refusal("run_time has 'betas', whose powers need float64; expected float64=True with it")
        for group in self.groups:
            if "momentum" in asked and group.options.get("dampening"):
                raise refusal("run_time has 'momentum', and dampening is not 0; expected one of the two")
        groups = tuple(
            dataclasses.replace(group, run_time=tuple(name for name in asked if name in group.options))
            for group in self.groups
        )
        return dataclasses.replace(self, groups=groups, norm_at_run_time=MAX_GRAD_NORM in asked)

    @property
    def algorithms(self) -> str:
        """The algorithms, for messages."""
        return " and ".join(dict.fromkeys(group.algorithm for group in self.groups))

    def hyperparameters(self) -> Arrays:
        """Return name -> value of the inputs that no step changes."""
        rates = {
            name_of(LEARNING_RATE, index): np.array(group.options["lr"], dtype=np.float32)
            for index, group in enumerate(self.groups)
        }
        dtype = np.float64 if self.float64 else np.float32
        others = {
            name_of(option, index): np.array(group.options[option], dtype=dtype)
            for index, group in enumerate(self.groups)
            for option in group.run_time
        }
        norm = {MAX_GRAD_NORM: np.array(self.max_grad_norm, dtype=dtype)} if self.norm_at_run_time else {}
        return rates | others | norm

    def state_names(self) -> dict[str, tuple[str, ...]]:
        """Return parameter -> the names of its states."""
        return {
            name: (
                *self.rule(name).states(group.structure),
                *((ACCUMULATED_GRADIENT,) if self.accumulate > 1 else ()),
                *((AVERAGE,) if self.averaging is not None else ()),
            )
            for group in self.groups
            for name in group.parameters
        }

    def initial_state(self, parameters: Arrays) -> Arrays:
        """Return name -> value of the state before the first step, for parameters of the given values."""

        def initial(name: str, state: str) -> npt.NDArray[Any]:
            if f"{name}.{state}" in self.state:
                return np.asarray(self.state[f"{name}.{state}"])
            like = parameters[name]
            own = self.state_type(name, state, StateType(ir.DataType.from_numpy(like.dtype), like.shape))
            # Zeros that are never written take no memory, unlike those of `zeros_like`.
            return np.zeros(own.shape, own.dtype.numpy())

        arrays = {
            f"{name}.{state}": initial(name, state) for name, states in self.state_names().items() for state in states
        }
        return arrays | self.scalars()

    def state_type(self, parameter: str, state: str, like: StateType) -> StateType:
        """Return the type of a parameter's state, of a parameter of the type `like`."""
        if state == AVERAGE:
            # In 16 bits it would lose small changes.
            return dataclasses.replace(like, dtype=_wide_type(like.dtype))
        return self.rule(parameter).state_types.get(state, like)

    def scalars(self) -> Arrays:
        """Return name -> value of the state of shape (): what is counted in int64, and the scale of the loss."""
        counters = {STEP: self.steps_before} if self.counts_steps else {}
        counters |= {N_AVERAGED: 0} if self.averaging is not None else {}
        counters |= {MICRO_STEP: 0} if self.accumulate > 1 else {}
        scaling = self.loss_scaling
        counters |= {GROWTH_TRACKER: scaling.growth_tracker} if scaling is not None else {}
        scale = {LOSS_SCALE: np.array(scaling.scale, dtype=np.float32)} if scaling is not None else {}
        return {name: np.array(value, dtype=np.int64) for name, value in counters.items()} | scale

    def input_names(self) -> list[str]:
        """Return the names of all inputs that the optimizer adds to a model."""
        states = (f"{name}.{state}" for name, states in self.state_names().items() for state in states)
        return [*states, *self.scalars(), *self.hyperparameters()]


def run_time_names(names: Any, refusal: Callable[[str], GradfuseError]) -> tuple[str, ...]:
    """Return the hyperparameters that become inputs beside the learning rate, without duplicates.

    Args:
        names: torch's names of options, and `max_grad_norm`.
        refusal: makes the error that is raised where one is unknown.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise refusal(f"run_time is {names!r}; expected a list of names, such as ['weight_decay']")
    known = [name for name in HYPERPARAMETERS if name != LEARNING_RATE]
    asked = list(names)
    for name in asked:
        if name not in known:
            always = ", which always is one" if name in ("lr", LEARNING_RATE) else ""
            raise refusal(f"run_time has {name!r}{always}; expected names among {listed(known, most=len(known))}")
    return tuple(dict.fromkeys(asked))


def append(model: ir.Model, optimizer: Optimizer, batch: Collection[str], *, fuse: bool) -> None:
    """Put the update into a model that has parameters as inputs and their gradients as outputs.

    The gradients stop being outputs; the state and the learning rates become inputs ahead of the batch, and all that
    changes gets an output `<input>.updated`, in the order of the inputs.

    Args:
        model: has an input `<parameter>` and an output `<parameter>.grad` for each parameter of the optimizer; and an
            input `loss_scale` if the gradients are scaled: they are multiplied by it and divided by `accumulate`.
        optimizer: what to put in.
        batch: the names of the inputs that are the batch.
        fuse: whether to update each parameter with one operator of the domain `aclnn`, if there is one. Its function
            body is attached.
    """
    graph = model.graph
    # Older opsets have no bodies.
    fuse = fuse and graph.opset_imports.get("", 0) >= OLDEST_OPSET
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    gradients = {name: outputs[name + GRADIENT_SUFFIX] for name in optimizer.parameters}
    # Outputs that the user requested, such as gradients of the batch, stay.
    dropped = {name + GRADIENT_SUFFIX for name in inputs if name not in batch}
    added = _new_inputs(optimizer, inputs)
    inputs = {name: value for name, value in inputs.items() if name not in batch} | added
    inputs |= {str(value.name): value for value in graph.inputs if value.name in batch}
    graph.inputs[:] = list(inputs.values())

    nodes = Nodes("optimizer")
    fused = _fused(optimizer, inputs, gradients) if fuse else {}
    results = _conditional(nodes, optimizer, inputs, gradients, fused)
    graph.extend(nodes.tape.nodes)
    for name, value in results.items():
        value.name = name + UPDATED_SUFFIX
        outputs[str(value.name)] = value
    graph.outputs[:] = [
        *(value for name, value in outputs.items() if name not in dropped and not name.endswith(UPDATED_SUFFIX)),
        *(outputs[name + UPDATED_SUFFIX] for name in inputs if name + UPDATED_SUFFIX in outputs),
    ]
    if fused:
        functions.attach(model)


def _fused(
    optimizer: Optimizer, inputs: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]
) -> dict[str, FusedUpdate]:
    """Return parameter -> the operator that updates it, for parameters that have one."""
    found = {}
    for group in optimizer.groups:
        for name in group.parameters:
            types = {inputs[name].dtype, gradients[name].dtype}
            options = dict(group.options)
            if group.run_time:
                # Nodes before the operator apply a decay that is an input; they would round to 16 bits there.
                if group.run_time != (_DECAY,) or types != {ir.DataType.FLOAT}:
                    continue
                options[_DECAY] = 0.0
            update = optimizer.rule(name).fused(options)
            if update is not None and len(types) == 1 and types <= _FUSED_TYPES:
                found[name] = update
    return found


def _new_inputs(optimizer: Optimizer, inputs: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    added = {}
    for name, states in optimizer.state_names().items():
        for state in states:
            like = inputs[name]
            assert like.dtype is not None and like.shape is not None
            own = optimizer.state_type(name, state, StateType(like.dtype, like.shape.numpy()))
            added[f"{name}.{state}"] = ir.Value(
                name=f"{name}.{state}", type=ir.TensorType(own.dtype), shape=ir.Shape(own.shape)
            )
    for name, array in {**optimizer.scalars(), **optimizer.hyperparameters()}.items():
        # The scale of the loss is an input already.
        dtype = ir.DataType.from_numpy(array.dtype)
        fresh = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
        added[name] = inputs.get(name, fresh)
    return added


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """The gradients of an update.

    Attributes:
        unscaled: what nodes read, by parameter; those that an operator updates may be absent.
        scaled: the same for all parameters, times the scale of the loss.
        factor: what is the reciprocal of that scale; None: 1.
    """

    unscaled: Mapping[str, GraphTensor]
    scaled: Mapping[str, GraphTensor]
    factor: GraphTensor | None

    def within(self, nodes: Nodes) -> _Gradients:
        """Return the same with arithmetic that appends to other nodes."""
        unscaled, scaled = (
            {name: nodes.of(tensor.value) for name, tensor in tensors.items()}
            for tensors in (self.unscaled, self.scaled)
        )
        return _Gradients(unscaled, scaled, None if self.factor is None else nodes.of(self.factor.value))

    def for_operator(self, name: str) -> tuple[GraphTensor, GraphTensor | None]:
        """Return what an operator reads, in the parameter's own type, and the factor that it still needs."""
        scaled, unscaled = self.scaled[name], self.unscaled.get(name)
        if unscaled is not None and unscaled.dtype == scaled.dtype:
            return unscaled, None
        return scaled, self.factor


def _conditional(
    nodes: Nodes,
    optimizer: Optimizer,
    inputs: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    fused: Mapping[str, FusedUpdate],
) -> dict[str, ir.Value]:
    """Return the new values of parameters and state: changed if enough gradients were added up, and all are finite."""
    values = {name: nodes.of(value) for name, value in gradients.items()}
    results: dict[str, ir.Value] = {}
    due: GraphTensor | None = None
    if optimizer.accumulate > 1:
        micro_step = nodes.of(inputs[MICRO_STEP])
        due = micro_step.equals(optimizer.accumulate - 1)
        results[MICRO_STEP] = due.where(nodes.constant(0, micro_step.dtype), micro_step + 1).value
        for name, gradient in values.items():
            key = f"{name}.{ACCUMULATED_GRADIENT}"
            # The scaled loss is divided before its gradients are taken.
            part = gradient if optimizer.loss_scaling is not None else gradient / optimizer.accumulate
            values[name] = nodes.of(inputs[key]) + part
            results[key] = due.where(nodes.constant(0, gradient.dtype), values[name]).value
    condition = due
    found = _Gradients(values, values, None)
    if optimizer.loss_scaling is not None:
        scale = nodes.of(inputs[LOSS_SCALE])
        finite = _finite(nodes, values)
        tracker = nodes.of(inputs[GROWTH_TRACKER])
        new_scale, new_tracker = _rescaled(optimizer.loss_scaling, scale, tracker, finite)
        if due is not None:
            new_scale, new_tracker = due.where(new_scale, scale), due.where(new_tracker, tracker)
        results |= {LOSS_SCALE: new_scale.value, GROWTH_TRACKER: new_tracker.value}
        # As torch.amp.GradScaler, which multiplies by the reciprocal.
        wide = ir.DataType.DOUBLE if optimizer.float64 else ir.DataType.FLOAT
        factor = (1 / scale.cast(wide)).cast(ir.DataType.FLOAT)
        # The norm is that of all unscaled gradients; operators apply it as part of their one factor.
        needed = [name for name in values if optimizer.max_grad_norm is not None or name not in fused]
        widened = {name: _widened(values[name]) for name in needed}
        unscaled = {name: gradient * factor.cast(gradient.dtype) for name, gradient in widened.items()}
        found = _Gradients(unscaled, values, factor)
        condition = finite if due is None else due.op("And", finite)
    if condition is None:
        return _updated(nodes, optimizer, inputs, found, fused)

    update, keep = Nodes("optimizer/update"), Nodes("optimizer/keep")
    updated = _updated(update, optimizer, inputs, found.within(update), fused)
    kept = {name: keep.of(inputs[name]).op("Identity").value for name in updated}
    branches = {
        branch: ir.Graph([], list(outputs.values()), nodes=inner.tape.nodes, name=branch)
        for branch, inner, outputs in (("then_branch", update, updated), ("else_branch", keep, kept))
    }
    outputs = {
        name: ir.Value(name=f"optimizer/{name}", type=value.type, shape=value.shape) for name, value in updated.items()
    }
    nodes.tape.op_multi_out("If", [condition.value], branches, outputs=list(outputs.values()), name="optimizer/If")
    return outputs | results


def _finite(nodes: Nodes, gradients: Mapping[str, GraphTensor]) -> GraphTensor:
    """Return whether all gradients are finite: only then are all of them 0 when multiplied by 0."""
    zeros = [_widened(gradient) * 0 for gradient in gradients.values()]
    sums = [nodes.op("ReduceSum", [one.value], one.dtype, (), {"keepdims": 0}) for one in zeros]
    dtype = _widest(sums)
    total = sums[0].cast(dtype)
    for term in sums[1:]:
        total = total + term.cast(dtype)
    return total.equals(0)


def _rescaled(
    scaling: LossScaling, scale: GraphTensor, tracker: GraphTensor, finite: GraphTensor
) -> tuple[GraphTensor, GraphTensor]:
    """Return the new scale and growth tracker, by the rule of `torch._amp_update_scale_`."""
    zero = tracker.nodes.constant(0, tracker.dtype)
    counted = tracker + 1
    grows = counted.equals(scaling.growth_interval)
    larger = scale * scaling.growth_factor
    # It grows no further than float32 does.
    larger = (larger * 0).equals(0).where(larger, scale)
    new_scale = finite.where(grows.where(larger, scale), scale * scaling.backoff_factor)
    return new_scale, finite.where(grows.where(zero, counted), zero)


def _updated(
    nodes: Nodes,
    optimizer: Optimizer,
    inputs: Mapping[str, ir.Value],
    gradients: _Gradients,
    fused: Mapping[str, FusedUpdate],
) -> dict[str, ir.Value]:
    """Return the new values of parameters, state and number of steps."""
    computed = {name: _widened(gradient) for name, gradient in gradients.unscaled.items()}
    clipping = None
    if optimizer.max_grad_norm is not None:
        norm = nodes.of(inputs[MAX_GRAD_NORM]) if optimizer.norm_at_run_time else optimizer.max_grad_norm
        clipping = _clipping_factor(nodes, computed.values(), norm)
    step = nodes.of(inputs[STEP]) if optimizer.counts_steps else None
    results = {} if step is None else {STEP: (step + 1).value}
    by_nodes = [name for name in optimizer.parameters if name not in fused]
    is_wide = optimizer.float64 or _widest(computed.values()) == ir.DataType.DOUBLE
    scalar = ir.DataType.DOUBLE if is_wide else ir.DataType.FLOAT
    count = step.cast(scalar) if step is not None and by_nodes else None
    for index, group in enumerate(optimizer.groups):
        learning_rate = nodes.of(inputs[name_of(LEARNING_RATE, index)])
        of_nodes = bool(set(by_nodes) & set(group.parameters)) or bool(group.run_time)
        rate = learning_rate.cast(scalar) if of_nodes else learning_rate
        options = _options(nodes, group, index, inputs, scalar)
        for name in group.parameters:
            rule = optimizer.rule(name)
            kept = Slot(
                nodes.of(inputs[name]),
                gradients.scaled[name],
                {state: nodes.of(inputs[f"{name}.{state}"]) for state in rule.states(group.structure)},
            )
            if name in fused:
                gradient, factor = gradients.for_operator(name)
                slot = dataclasses.replace(kept, gradient=gradient)
                factors = [one.cast(ir.DataType.FLOAT) for one in (factor, clipping) if one is not None]
                if group.options["maximize"]:
                    factors.append(nodes.constant(-1.0, ir.DataType.FLOAT))
                if _DECAY in group.run_time:
                    if not options.get("decoupled_weight_decay"):
                        # Terms that are added to the gradient are not scaled with it.
                        slot, factors = dataclasses.replace(slot, gradient=functools.reduce(mul, factors, gradient)), []
                    start, gradient = decayed(options, rate, slot)
                    slot = dataclasses.replace(slot, parameter=start, gradient=gradient)
                parameter, new_state = _by_operator(fused[name], learning_rate, step, slot, factors)
            else:
                gradient = computed[name]
                if clipping is not None:
                    gradient = gradient * clipping.cast(gradient.dtype)
                gradient = -gradient if group.options["maximize"] else gradient
                parameter, new_state = rule.update(options, rate, count, _wide(kept, gradient, rule))
            results[name] = parameter.cast(kept.parameter.dtype).value
            results |= {
                f"{name}.{state}": tensor.cast(kept.state[state].dtype).value for state, tensor in new_state.items()
            }
    if optimizer.averaging is not None:
        results |= _averaged(nodes, optimizer, optimizer.averaging, inputs, results, scalar)
    return results


def _options(
    nodes: Nodes, group: ParameterGroup, index: int, inputs: Mapping[str, ir.Value], scalar: ir.DataType
) -> dict[str, Any]:
    """Return the options of a group, those that are inputs as scalars of a type."""
    options = dict(group.options)
    for name in group.run_time:
        tensor = nodes.of(inputs[name_of(name, index)]).cast(scalar)
        options[name] = tuple(tensor.element(place) for place in (0, 1)) if name == BETAS else tensor
    return options


def _averaged(
    nodes: Nodes,
    optimizer: Optimizer,
    averaging: Averaging,
    inputs: Mapping[str, ir.Value],
    results: Mapping[str, ir.Value],
    scalar: ir.DataType,
) -> dict[str, ir.Value]:
    """Return the new averages of the parameters, and how many are in them, from the new values of all else.

    By the rule of `torch.optim.swa_utils.AveragedModel`, the first ones are the parameters themselves.
    """
    averaged = nodes.of(inputs[N_AVERAGED])
    one = nodes.constant(1.0, scalar)
    later = one / (averaged + 1).cast(scalar) if averaging.decay is None else one - averaging.decay
    weight = averaged.equals(0).where(one, later)
    due: GraphTensor | None = None
    if averaging.counts_steps:
        # Of what was done before, some optimizers know the number and others do not.
        counted = nodes.of(results[STEP]) - (optimizer.steps_before + averaging.start)
        due = counted.op("Greater", 0, dtype=ir.DataType.BOOL).op("And", counted.op("Mod", averaging.every).equals(0))
    new = {N_AVERAGED: averaged + 1}
    for name in optimizer.parameters:
        average = nodes.of(inputs[f"{name}.{AVERAGE}"])
        change = nodes.of(results[name]).cast(average.dtype) - average
        share = weight.cast(average.dtype)
        # As torch.lerp, which begins at the nearer end.
        near, far = average + change * share, nodes.of(results[name]).cast(average.dtype) - change * (1 - share)
        new[f"{name}.{AVERAGE}"] = share.less(0.5).where(near, far)
    if due is not None:
        new = {name: due.where(tensor, nodes.of(inputs[name])) for name, tensor in new.items()}
    return {name: tensor.value for name, tensor in new.items()}


def _wide(slot: Slot, gradient: GraphTensor, rule: Rule) -> Slot:
    """Return a slot with a gradient, in whose type everything is but states that have types of their own."""
    dtype = gradient.dtype
    state = {name: value if name in rule.state_types else value.cast(dtype) for name, value in slot.state.items()}
    return Slot(slot.parameter.cast(dtype), gradient, state)


def _by_operator(
    update: FusedUpdate, rate: GraphTensor, step: GraphTensor | None, slot: Slot, factors: Sequence[GraphTensor]
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    """Return new parameter and new state, of the gradient times some numbers."""
    nodes, kept = slot.parameter.nodes, slot.parameter.value
    given = {"parameter": slot.parameter, "gradient": slot.gradient, "learning_rate": rate, **slot.state}
    if step is not None:
        given["step"] = step
    if factors:
        given["gradient_scale"] = functools.reduce(mul, factors)
    ours = OPS[update.op_type]
    values = [given[i.name].value if i.name in given else None for i in ours.inputs]
    while values[-1] is None:
        values.pop()
    parameter, *state = nodes.ours(update.op_type, values, kept, update.attributes, len(ours.outputs))
    for tensor, before in zip(state, slot.state.values(), strict=False):
        tensor.value.type, tensor.value.shape = before.value.type, before.value.shape
    for unused in state[len(slot.state) :]:
        unused.value.shape = ir.Shape([0])
    return parameter, dict(zip(slot.state, state, strict=False))


def _widened(tensor: GraphTensor) -> GraphTensor:
    """Return a tensor in the type of the computation."""
    return tensor.cast(_wide_type(tensor.dtype))


def _wide_type(dtype: ir.DataType) -> ir.DataType:
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _clipping_factor(nodes: Nodes, gradients: Collection[GraphTensor], max_norm: GraphTensor | float) -> GraphTensor:
    """Return what `torch.nn.utils.clip_grad_norm_` multiplies gradients by, with the 2-norm."""
    dtype = _widest(gradients)
    axis = nodes.op("Constant", [], ir.DataType.INT64, (1,), {"value_ints": [0]}).value
    norms = [
        nodes.op("Unsqueeze", [gradient.norm().cast(dtype).value, axis], dtype, (1,)).value for gradient in gradients
    ]
    total = nodes.op("Concat", norms, dtype, (len(norms),), {"axis": 0}).norm()
    most = max_norm.cast(dtype) if isinstance(max_norm, GraphTensor) else nodes.constant(max_norm, dtype)
    return (most / (total + 1e-6)).op("Min", 1.0)


def _widest(tensors: Iterable[GraphTensor]) -> ir.DataType:
    dtypes = {tensor.dtype for tensor in tensors}
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT
