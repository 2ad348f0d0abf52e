"""The optimizers of torch.optim as nodes of an ONNX graph.

`RULES` has one entry an algorithm: which state it keeps, and its update, written with the arithmetic of
`torch.optim.sgd._single_tensor_sgd` and `torch.optim.adam._single_tensor_adam`, one node for each of its operations.
Tensors are computed in float32, or in float64 where the parameter is that, and rounded to the parameter's type at the
end; numbers that PyTorch has as Python floats, such as the bias correction of Adam, are float64 in the graph too.

A description of an optimizer, `Optimizer`, needs no torch; only `from_torch` reads torch's objects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradfuse.errors import ExportError
from gradfuse.models.arrays import Arrays
from gradfuse.training.step import GRADIENT_SUFFIX, LEARNING_RATE, STEP, UPDATED_SUFFIX

if TYPE_CHECKING:
    import torch

MICRO_STEP = "micro_step"
ACCUMULATED_GRADIENT = "accumulated_grad"
LOSS_SCALE = "loss_scale"
GROWTH_TRACKER = "growth_tracker"


class _Nodes:
    """Collects the nodes of a graph, with names and types for their values."""

    def __init__(self, prefix: str) -> None:
        self.tape = ir.tape.Tape()
        self._prefix = prefix
        self._constants: dict[tuple[float, ir.DataType], _Tensor] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType,
        shape: Any,
        attributes: Mapping[str, Any] | None = None,
    ) -> _Tensor:
        name = f"{self._prefix}/{op_type}_{len(self.tape.nodes)}"
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        return _Tensor(self, self.tape.op(op_type, inputs, attributes, name=name, output=output))

    def constant(self, number: float, dtype: ir.DataType) -> _Tensor:
        if (number, dtype) not in self._constants:
            tensor = ir.tensor(np.array(number, dtype=dtype.numpy()), dtype=dtype)
            self._constants[number, dtype] = self.op("Constant", [], dtype, (), {"value": tensor})
        return self._constants[number, dtype]

    def of(self, value: ir.Value) -> _Tensor:
        return _Tensor(self, value)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tensor:
    """A value of a graph with the arithmetic of Python; a number beside it is a constant of its type."""

    nodes: _Nodes
    value: ir.Value

    @property
    def dtype(self) -> ir.DataType:
        assert self.value.dtype is not None
        return self.value.dtype

    @property
    def shape(self) -> ir.Shape:
        assert self.value.shape is not None
        return self.value.shape

    def op(self, op_type: str, *others: _Tensor | float, dtype: ir.DataType | None = None) -> _Tensor:
        """Append an elementwise operator; all operands have one shape, or none."""
        operands = [self, *(o if isinstance(o, _Tensor) else self.nodes.constant(o, self.dtype) for o in others)]
        shape = max((operand.shape for operand in operands), key=len)
        return self.nodes.op(op_type, [operand.value for operand in operands], dtype or self.dtype, shape)

    def __add__(self, other: _Tensor | float) -> _Tensor:
        return self.op("Add", other)

    def __sub__(self, other: _Tensor | float) -> _Tensor:
        return self.op("Sub", other)

    def __mul__(self, other: _Tensor | float) -> _Tensor:
        return self.op("Mul", other)

    def __truediv__(self, other: _Tensor | float) -> _Tensor:
        return self.op("Div", other)

    def __neg__(self) -> _Tensor:
        return self.op("Neg")

    def __rtruediv__(self, other: float) -> _Tensor:
        return self.nodes.constant(other, self.dtype) / self

    def __rsub__(self, other: float) -> _Tensor:
        return self.nodes.constant(other, self.dtype) - self

    def __rpow__(self, other: float) -> _Tensor:
        return self.nodes.constant(other, self.dtype).op("Pow", self)

    def sqrt(self) -> _Tensor:
        return self.op("Sqrt")

    def maximum(self, other: _Tensor) -> _Tensor:
        return self.op("Max", other)

    def equals(self, number: float) -> _Tensor:
        return self.op("Equal", number, dtype=ir.DataType.BOOL)

    def where(self, chosen: _Tensor, other: _Tensor | float) -> _Tensor:
        """Return `chosen` where this truth value, of shape (), holds, else the other."""
        otherwise = other if isinstance(other, _Tensor) else self.nodes.constant(other, chosen.dtype)
        inputs = [self.value, chosen.value, otherwise.value]
        return self.nodes.op("Where", inputs, chosen.dtype, max((chosen.shape, otherwise.shape), key=len))

    def cast(self, dtype: ir.DataType) -> _Tensor:
        if dtype == self.dtype:
            return self
        return self.nodes.op("Cast", [self.value], dtype, self.shape, {"to": dtype})

    def norm(self) -> _Tensor:
        """Return the 2-norm of all elements, of shape ()."""
        return self.nodes.op("ReduceL2", [self.value], self.dtype, (), {"keepdims": 0})


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One parameter in an update, all in the type that is computed in."""

    parameter: _Tensor
    gradient: _Tensor
    state: Mapping[str, _Tensor]


@dataclasses.dataclass(frozen=True)
class _Rule:
    states: Callable[[Mapping[str, Any]], tuple[str, ...]]
    """The names of what is kept for each parameter with the given options."""
    counts_steps: Callable[[Mapping[str, Any]], bool]
    update: Callable[[Mapping[str, Any], _Tensor, _Tensor | None, _Slot], tuple[_Tensor, dict[str, _Tensor]]]
    """(options, learning rate, steps done before (both float64), slot) -> new parameter, new state."""


def _sgd(
    options: Mapping[str, Any], rate: _Tensor, step: _Tensor | None, slot: _Slot
) -> tuple[_Tensor, dict[str, _Tensor]]:
    parameter, gradient, dtype = slot.parameter, slot.gradient, slot.parameter.dtype
    new_state = {}
    if options["weight_decay"]:
        gradient = gradient + parameter * options["weight_decay"]
    if options["momentum"]:
        fresh = gradient
        if options["dampening"]:
            # In the first step the buffer is the gradient itself, without dampening.
            assert step is not None
            one = step.nodes.constant(1.0, step.dtype)
            fresh = gradient * step.equals(0).where(one, 1 - options["dampening"]).cast(dtype)
        buffer = slot.state["momentum_buffer"] * options["momentum"] + fresh
        new_state["momentum_buffer"] = buffer
        gradient = gradient + buffer * options["momentum"] if options["nesterov"] else buffer
    return parameter - gradient * rate.cast(dtype), new_state


def _adam(
    options: Mapping[str, Any], rate: _Tensor, step: _Tensor | None, slot: _Slot
) -> tuple[_Tensor, dict[str, _Tensor]]:
    parameter, gradient, dtype = slot.parameter, slot.gradient, slot.parameter.dtype
    beta1, beta2 = options["betas"]
    assert step is not None
    count = step + 1
    if options["weight_decay"]:
        if options["decoupled_weight_decay"]:
            parameter = parameter * (1 - rate * options["weight_decay"]).cast(dtype)
        else:
            gradient = gradient + parameter * options["weight_decay"]
    mean, square = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    # As torch.lerp, which begins at the nearer end.
    weight = 1 - beta1
    change = gradient - mean
    mean = mean + change * weight if weight < 0.5 else gradient - change * (1 - weight)
    square = square * beta2 + gradient * (1 - beta2) * gradient
    new_state = {"exp_avg": mean, "exp_avg_sq": square}
    if options["amsgrad"]:
        square = new_state["max_exp_avg_sq"] = slot.state["max_exp_avg_sq"].maximum(square)
    step_size = rate / (1 - beta1**count)
    denominator = square.sqrt() / (1 - beta2**count).sqrt().cast(dtype) + options["eps"]
    return parameter - mean * step_size.cast(dtype) / denominator, new_state


def _transformers_adamw(
    options: Mapping[str, Any], rate: _Tensor, step: _Tensor | None, slot: _Slot
) -> tuple[_Tensor, dict[str, _Tensor]]:
    """The AdamW that transformers had, and onnxruntime-training has: epsilon without bias correction, decay last."""
    beta1, beta2 = options["betas"]
    gradient, dtype = slot.gradient, slot.parameter.dtype
    mean = slot.state["exp_avg"] * beta1 + gradient * (1 - beta1)
    square = slot.state["exp_avg_sq"] * beta2 + gradient * (1 - beta2) * gradient
    step_size = rate
    if options["correct_bias"]:
        assert step is not None
        count = step + 1
        step_size = rate * (1 - beta2**count).sqrt() / (1 - beta1**count)
    parameter = slot.parameter - mean * step_size.cast(dtype) / (square.sqrt() + options["eps"])
    if options["weight_decay"]:
        parameter = parameter - parameter * (rate * options["weight_decay"]).cast(dtype)
    return parameter, {"exp_avg": mean, "exp_avg_sq": square}


RULES: Mapping[str, _Rule] = {
    "SGD": _Rule(
        lambda options: ("momentum_buffer",) if options["momentum"] else (),
        lambda options: bool(options["momentum"] and options["dampening"]),
        _sgd,
    ),
    "Adam": _Rule(
        lambda options: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ())),
        lambda options: True,
        _adam,
    ),
    "TransformersAdamW": _Rule(
        lambda options: ("exp_avg", "exp_avg_sq"),
        lambda options: True,
        _transformers_adamw,
    ),
}
"""By the name of the algorithm; AdamW is Adam with the option `decoupled_weight_decay`."""


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters, by name, that share torch's options: `lr`, `weight_decay`, `betas`, ..."""

    parameters: tuple[str, ...]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling as by `torch.amp.GradScaler`, whose words these are."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int = 0
    """Updates since the scale has changed."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer: which algorithm, with which options for which parameters, and from which state on.

    Attributes:
        algorithm: a key of `RULES`.
        groups: the parameter groups.
        steps: how many steps were done before, by parameter; none for one that is left out.
        state: `<parameter>.<state>` -> array, where it is not zeros.
        max_grad_norm: as for `torch.nn.utils.clip_grad_norm_` over the optimizer's parameters; None: no clipping.
        accumulate: of how many calls the gradients are averaged for one update.
        loss_scaling: how the gradients are scaled; None: they are not.
    """

    algorithm: str
    groups: tuple[ParameterGroup, ...]
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_grad_norm: float | None = None
    accumulate: int = 1
    loss_scaling: LossScaling | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that it updates."""
        return tuple(name for group in self.groups for name in group.parameters)

    @property
    def rule(self) -> _Rule:
        return RULES[self.algorithm]

    @property
    def counts_steps(self) -> bool:
        return any(self.rule.counts_steps(group.options) for group in self.groups)

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
        counting = (group for group in groups if self.rule.counts_steps(group.options))
        steps = {name: self.steps.get(name, 0) for group in counting for name in group.parameters}
        if len(set(steps.values())) > 1:
            ends = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
            told = " and ".join(f"{name!r} {steps[name]} times" for name in ends)
            raise ExportError(f"{who}: the optimizer has updated {told}; expected one number of steps")
        return dataclasses.replace(self, groups=groups, steps=steps)

    def hyperparameters(self) -> Arrays:
        """Return name -> value of the inputs that no step changes."""
        return {
            learning_rate_name(index): np.array(group.options["lr"], dtype=np.float32)
            for index, group in enumerate(self.groups)
        }

    def state_names(self) -> dict[str, tuple[str, ...]]:
        """Return parameter -> the names of its states."""
        return {
            name: (
                *self.rule.states(group.options),
                *((ACCUMULATED_GRADIENT,) if self.accumulate > 1 else ()),
            )
            for group in self.groups
            for name in group.parameters
        }

    def initial_state(self, parameters: Arrays) -> Arrays:
        """Return name -> value of the state before the first step, for parameters of the given values."""
        arrays = {
            f"{name}.{state}": np.asarray(self.state.get(f"{name}.{state}", np.zeros_like(parameters[name])))
            for name, states in self.state_names().items()
            for state in states
        }
        return arrays | self.scalars()

    def scalars(self) -> Arrays:
        """Return name -> value of the state of shape (): what is counted in int64, and the scale of the loss."""
        counters = {STEP: max(self.steps.values(), default=0)} if self.counts_steps else {}
        counters |= {MICRO_STEP: 0} if self.accumulate > 1 else {}
        scaling = self.loss_scaling
        counters |= {GROWTH_TRACKER: scaling.growth_tracker} if scaling is not None else {}
        scale = {LOSS_SCALE: np.array(scaling.scale, dtype=np.float32)} if scaling is not None else {}
        return {name: np.array(value, dtype=np.int64) for name, value in counters.items()} | scale

    def input_names(self) -> list[str]:
        """Return the names of all inputs that the optimizer adds to a model."""
        states = (f"{name}.{state}" for name, states in self.state_names().items() for state in states)
        return [*states, *self.scalars(), *self.hyperparameters()]


def learning_rate_name(group: int) -> str:
    """Return the name of the input that holds the learning rate of a parameter group."""
    return LEARNING_RATE if group == 0 else f"{LEARNING_RATE}.{group}"


def append(model: ir.Model, optimizer: Optimizer, batch: Collection[str]) -> None:
    """Put the update into a model that has parameters as inputs and their gradients as outputs.

    The gradients stop being outputs; the state and the learning rates become inputs ahead of the batch, and all that
    changes gets an output `<input>.updated`, in the order of the inputs.

    Args:
        model: has an input `<parameter>` and an output `<parameter>.grad` for each parameter of the optimizer; and an
            input `loss_scale` if the gradients are scaled: they are multiplied by it and divided by `accumulate`.
        optimizer: what to put in.
        batch: the names of the inputs that are the batch.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    gradients = {name: outputs[name + GRADIENT_SUFFIX] for name in optimizer.parameters}
    added = _new_inputs(optimizer, inputs)
    inputs = {name: value for name, value in inputs.items() if name not in batch} | added
    inputs |= {str(value.name): value for value in graph.inputs if value.name in batch}
    graph.inputs[:] = list(inputs.values())

    nodes = _Nodes("optimizer")
    results = _conditional(nodes, optimizer, inputs, gradients)
    graph.extend(nodes.tape.nodes)
    for name, value in results.items():
        value.name = name + UPDATED_SUFFIX
        outputs[str(value.name)] = value
    graph.outputs[:] = [
        *(value for name, value in outputs.items() if not name.endswith((GRADIENT_SUFFIX, UPDATED_SUFFIX))),
        *(outputs[name + UPDATED_SUFFIX] for name in inputs if name + UPDATED_SUFFIX in outputs),
    ]


def _new_inputs(optimizer: Optimizer, inputs: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    added = {}
    for name, states in optimizer.state_names().items():
        for state in states:
            like = inputs[name]
            assert like.dtype is not None and like.shape is not None
            added[f"{name}.{state}"] = ir.Value(
                name=f"{name}.{state}", type=ir.TensorType(like.dtype), shape=ir.Shape(like.shape)
            )
    for name, array in {**optimizer.scalars(), **optimizer.hyperparameters()}.items():
        # The scale of the loss is an input already.
        fresh = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(()))
        added[name] = inputs.get(name, fresh)
    return added


def _conditional(
    nodes: _Nodes, optimizer: Optimizer, inputs: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]
) -> dict[str, ir.Value]:
    """Return the new values of parameters and state: changed if enough gradients were added up, and all are finite."""
    values = {name: nodes.of(value) for name, value in gradients.items()}
    results: dict[str, ir.Value] = {}
    due: _Tensor | None = None
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
    if optimizer.loss_scaling is not None:
        scale = nodes.of(inputs[LOSS_SCALE])
        finite = _finite(nodes, values)
        tracker = nodes.of(inputs[GROWTH_TRACKER])
        new_scale, new_tracker = _rescaled(optimizer.loss_scaling, scale, tracker, finite)
        if due is not None:
            new_scale, new_tracker = due.where(new_scale, scale), due.where(new_tracker, tracker)
        results |= {LOSS_SCALE: new_scale.value, GROWTH_TRACKER: new_tracker.value}
        # As torch.amp.GradScaler, which multiplies by the reciprocal.
        factor = (1 / scale.cast(ir.DataType.DOUBLE)).cast(ir.DataType.FLOAT)
        values = {name: _widened(gradient) for name, gradient in values.items()}
        values = {name: gradient * factor.cast(gradient.dtype) for name, gradient in values.items()}
        condition = finite if due is None else due.op("And", finite)
    if condition is None:
        return _updated(nodes, optimizer, inputs, values)

    update, keep = _Nodes("optimizer/update"), _Nodes("optimizer/keep")
    updated = _updated(update, optimizer, inputs, {name: update.of(value.value) for name, value in values.items()})
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


def _finite(nodes: _Nodes, gradients: Mapping[str, _Tensor]) -> _Tensor:
    """Return whether no element of any gradient is infinite or NaN: all of them times 0 are 0 then."""
    zeros = [_widened(gradient) * 0 for gradient in gradients.values()]
    sums = [nodes.op("ReduceSum", [one.value], one.dtype, (), {"keepdims": 0}) for one in zeros]
    dtype = _widest(sums)
    total = sums[0].cast(dtype)
    for term in sums[1:]:
        total = total + term.cast(dtype)
    return total.equals(0)


def _rescaled(scaling: LossScaling, scale: _Tensor, tracker: _Tensor, finite: _Tensor) -> tuple[_Tensor, _Tensor]:
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
    nodes: _Nodes, optimizer: Optimizer, inputs: Mapping[str, ir.Value], gradients: Mapping[str, _Tensor]
) -> dict[str, ir.Value]:
    """Return the new values of parameters, state and number of steps."""
    computed = {name: _widened(gradient) for name, gradient in gradients.items()}
    if optimizer.max_grad_norm is not None:
        computed = _clipped(nodes, computed, optimizer.max_grad_norm)
    step = nodes.of(inputs[STEP]) if optimizer.counts_steps else None
    count = None if step is None else step.cast(ir.DataType.DOUBLE)
    results = {} if step is None else {STEP: (step + 1).value}
    for index, group in enumerate(optimizer.groups):
        rate = nodes.of(inputs[learning_rate_name(index)]).cast(ir.DataType.DOUBLE)
        states = optimizer.rule.states(group.options)
        for name in group.parameters:
            gradient = -computed[name] if group.options["maximize"] else computed[name]
            dtype, kept_in = gradient.dtype, nodes.of(inputs[name]).dtype
            slot = _Slot(
                nodes.of(inputs[name]).cast(dtype),
                gradient,
                {state: nodes.of(inputs[f"{name}.{state}"]).cast(dtype) for state in states},
            )
            parameter, new_state = optimizer.rule.update(group.options, rate, count, slot)
            results[name] = parameter.cast(kept_in).value
            results |= {f"{name}.{state}": tensor.cast(kept_in).value for state, tensor in new_state.items()}
    return results


def _widened(tensor: _Tensor) -> _Tensor:
    """Return a tensor in the type that is computed in."""
    return tensor.cast(ir.DataType.DOUBLE if tensor.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT)


def _clipped(nodes: _Nodes, gradients: Mapping[str, _Tensor], max_norm: float) -> dict[str, _Tensor]:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does with the 2-norm."""
    dtype = _widest(gradients.values())
    axis = nodes.op("Constant", [], ir.DataType.INT64, (1,), {"value_ints": [0]}).value
    norms = [
        nodes.op("Unsqueeze", [gradient.norm().cast(dtype).value, axis], dtype, (1,)).value
        for gradient in gradients.values()
    ]
    total = nodes.op("Concat", norms, dtype, (len(norms),), {"axis": 0}).norm()
    factor = (nodes.constant(max_norm, dtype) / (total + 1e-6)).op("Min", 1.0)
    return {name: gradient * factor.cast(gradient.dtype) for name, gradient in gradients.items()}


def _widest(tensors: Iterable[_Tensor]) -> ir.DataType:
    dtypes = {tensor.dtype for tensor in tensors}
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT


def from_torch(
    optimizer: Any,
    names: Mapping[int, str],
    who: str,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Optimizer:
    """Describe a `torch.optim.SGD`, `Adam` or `AdamW`, with the state that it has.

    Args:
        optimizer: the optimizer.
        names: `id` of each trainable parameter -> its name.
        who: what to name in messages.
        max_grad_norm: see `Optimizer`.
        accumulate: see `Optimizer`.
        grad_scaler: how the loss is scaled, and the state to begin at; None, or one that is not enabled: it is not.

    Raises:
        ExportError: another optimizer or one with hooks, an option that no graph can have, or a parameter that is not
            among the names.
    """
    import torch

    algorithms = {torch.optim.SGD: "SGD", torch.optim.Adam: "Adam", torch.optim.AdamW: "Adam"}
    # A subclass may compute anything.
    algorithm = algorithms.get(type(optimizer))
    if algorithm is None:
        raise ExportError(
            f"{who}: optimizer is {type(optimizer).__name__}; expected torch.optim.SGD, Adam or AdamW, no subclass"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ExportError(f"{who}: optimizer has a hook on its step; expected none")
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise ExportError(f"{who}: max_grad_norm is {max_grad_norm!r}; expected a positive number or None")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ExportError(f"{who}: accumulate is {accumulate!r}; expected a positive integer")
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        if options.get("differentiable"):
            raise ExportError(f"{who}: differentiable is True in parameter group {index}; expected False")
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ExportError(
                    f"{who}: parameter group {index} of the optimizer has a tensor of shape {tuple(parameter.shape)} "
                    "that is no trainable parameter of the module or the loss"
                )
        groups.append(ParameterGroup(tuple(names[id(parameter)] for parameter in group["params"]), options))
    scaling = _loss_scaling(grad_scaler, who)
    described = Optimizer(algorithm, tuple(groups), {}, {}, max_grad_norm, accumulate, scaling)
    state, steps = _torch_state(optimizer, names, described)
    return dataclasses.replace(described, state=state, steps=steps)


def _loss_scaling(grad_scaler: Any, who: str) -> LossScaling | None:
    import torch

    if grad_scaler is None:
        return None
    if not isinstance(grad_scaler, torch.amp.GradScaler):
        raise ExportError(f"{who}: grad_scaler is {type(grad_scaler).__name__}; expected torch.amp.GradScaler")
    if not grad_scaler.is_enabled():
        return None
    return LossScaling(
        grad_scaler.get_scale(),
        grad_scaler.get_growth_factor(),
        grad_scaler.get_backoff_factor(),
        grad_scaler.get_growth_interval(),
        int(grad_scaler.state_dict()["_growth_tracker"]),
    )


def _torch_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], described: Optimizer
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return `<parameter>.<state>` -> array, and parameter -> number of steps."""
    from gradfuse.models.arrays import to_numpy

    known = described.state_names()
    state: dict[str, Any] = {}
    steps: dict[str, int] = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        state |= {f"{name}.{key}": to_numpy(entries[key]) for key in known[name] if entries.get(key) is not None}
        if entries.get("step") is not None:
            steps[name] = int(entries["step"])
        elif entries.get("momentum_buffer") is not None:
            # SGD counts no steps; all that matters is that the first one is done.
            steps[name] = 1
    return state, steps


def _plain(value: Any) -> Any:
    """Return an option's value without tensors."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(one) for one in value)
    return value.item() if hasattr(value, "item") else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
