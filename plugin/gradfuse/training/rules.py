"""The algorithms of torch.optim as nodes of an ONNX graph.

`RULES` has one entry per algorithm. Its update follows the arithmetic of `torch.optim`'s single-tensor implementations,
one node per operation. What PyTorch has as Python floats, such as the bias correction of Adam, is float64 in the graph
too. Options are numbers, or scalars of the graph where they are inputs of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from gradfuse.custom_ops.apply_adam_w import exact_beta
from gradfuse.custom_ops.apply_adam_w8bit import (
    BLOCK,
    MEAN_UNITS,
    MEAN_ZERO,
    ROOT_UNITS,
    SMALLEST_SCALE,
    block_count,
)
from gradfuse.training.nodes import GraphTensor


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter in an update; all tensors have the type of the computation."""

    parameter: GraphTensor
    gradient: GraphTensor
    state: Mapping[str, GraphTensor]


@dataclasses.dataclass(frozen=True)
class FusedUpdate:
    """An operator of ours that updates a parameter in one pass.

    Its inputs are `parameter`, `gradient`, the states by their names, `learning_rate` (float32), and, if it has them,
    `step`, the steps done before (int64), and `gradient_scale`, a factor for the gradient (float32, optional). Its
    outputs are the new parameter and the new states.
    """

    op_type: str
    attributes: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class StateType:
    """What a state that is not like its parameter is."""

    dtype: ir.DataType
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """An algorithm: which state it keeps, and its update."""

    states: Callable[[Mapping[str, Any]], tuple[str, ...]]
    """options -> the names of each parameter's state; options that are inputs count as nonzero."""
    counts_steps: Callable[[Mapping[str, Any]], bool]
    """options, likewise -> whether the update depends on the number of steps done."""
    update: Callable[
        [Mapping[str, Any], GraphTensor, GraphTensor | None, Slot], tuple[GraphTensor, dict[str, GraphTensor]]
    ]
    """(options, learning rate, steps done before (both float64 or both float32), slot) -> new parameter, new state."""
    fused: Callable[[Mapping[str, Any]], FusedUpdate | None] = lambda options: None
    """options -> the operator that makes the whole update; None: there is none for them."""
    state_types: Mapping[str, StateType] = dataclasses.field(default_factory=dict)
    """State -> the type in which the update gets it; no entry for a state like the parameter."""


def _sgd(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
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
        buffer, direction = _with_momentum(slot.state["momentum_buffer"], fresh, options["momentum"])
        new_state["momentum_buffer"] = buffer
        gradient = gradient + buffer * options["momentum"] if options["nesterov"] else direction
    return parameter - gradient * rate.cast(dtype), new_state


def _with_momentum(
    before: GraphTensor, change: GraphTensor, momentum: GraphTensor | float
) -> tuple[GraphTensor, GraphTensor]:
    """Return the new buffer and the parameter's step; while a run-time momentum is 0, the buffer does not change."""
    if not isinstance(momentum, GraphTensor):
        buffer = before * momentum + change
        return buffer, buffer
    rests = momentum.equals(0)
    zero, one = (momentum.nodes.constant(number, momentum.dtype) for number in (0.0, 1.0))
    buffer = before * rests.where(one, momentum) + change * rests.where(zero, one)
    return buffer, rests.where(change, buffer)


def _fused_sgd(options: Mapping[str, Any]) -> FusedUpdate | None:
    if options["momentum"] and options["dampening"]:
        return None
    attributes = {
        "momentum": float(options["momentum"]),
        "weight_decay": float(options["weight_decay"]),
        "nesterov": int(options["nesterov"]),
    }
    return FusedUpdate("ApplySgd", attributes)


def _adam(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    parameter, gradient = decayed(options, rate, slot)
    (beta1, beta2), dtype = options["betas"], parameter.dtype
    assert step is not None
    count = _count(step)
    mean = _lerp(slot.state["exp_avg"], gradient, 1 - beta1)
    square = slot.state["exp_avg_sq"] * beta2 + gradient * (1 - beta2) * gradient
    new_state = {"exp_avg": mean, "exp_avg_sq": square}
    if options["amsgrad"]:
        square = new_state["max_exp_avg_sq"] = slot.state["max_exp_avg_sq"].maximum(square)
    step_size = rate / _one_minus_power(beta1, count)
    denominator = square.sqrt() / _one_minus_power(beta2, count).sqrt().cast(dtype) + options["eps"]
    return parameter - mean * step_size.cast(dtype) / denominator, new_state


def _lerp(start: GraphTensor, end: GraphTensor, weight: GraphTensor | float) -> GraphTensor:
    """Return torch.lerp's result, computed from the nearer end as there."""
    change = end - start
    if isinstance(weight, GraphTensor):
        near = weight.less(0.5)
        return near.where(start, end) + change * near.where(weight, weight - 1)
    return start + change * weight if weight < 0.5 else end - change * (1 - weight)


def decayed(options: Mapping[str, Any], rate: GraphTensor, slot: Slot) -> tuple[GraphTensor, GraphTensor]:
    """Return parameter and gradient with the decay of weights."""
    parameter, gradient = slot.parameter, slot.gradient
    if options["weight_decay"] and options.get("decoupled_weight_decay"):
        return parameter * (1 - rate * options["weight_decay"]).cast(parameter.dtype), gradient
    if options["weight_decay"]:
        gradient = gradient + parameter * options["weight_decay"]
    return parameter, gradient


def _rmsprop(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    parameter, gradient = decayed(options, rate, slot)
    alpha, rate = options["alpha"], rate.cast(parameter.dtype)
    square = slot.state["square_avg"] * alpha + gradient * (1 - alpha) * gradient
    new_state, centered = {"square_avg": square}, square
    if options["centered"]:
        mean = new_state["grad_avg"] = _lerp(slot.state["grad_avg"], gradient, 1 - alpha)
        centered = square - mean * mean
    denominator = centered.sqrt() + options["eps"]
    if options["momentum"]:
        buffer, direction = _with_momentum(slot.state["momentum_buffer"], gradient / denominator, options["momentum"])
        new_state["momentum_buffer"] = buffer
        return parameter - direction * rate, new_state
    return parameter - gradient * rate / denominator, new_state


def _adagrad(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    parameter, gradient = decayed(options, rate, slot)
    if options["lr_decay"]:
        assert step is not None
        rate = rate / (step * options["lr_decay"] + 1)
    total = slot.state["sum"] + gradient * gradient
    return parameter - gradient * rate.cast(parameter.dtype) / (total.sqrt() + options["eps"]), {"sum": total}


def _adadelta(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    parameter, gradient = decayed(options, rate, slot)
    rho, eps = options["rho"], options["eps"]
    square = slot.state["square_avg"] * rho + gradient * (1 - rho) * gradient
    change = (slot.state["acc_delta"] + eps).sqrt() / (square + eps).sqrt() * gradient
    changes = slot.state["acc_delta"] * rho + change * (1 - rho) * change
    return parameter - change * rate.cast(parameter.dtype), {"square_avg": square, "acc_delta": changes}


def _adamax(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    assert step is not None
    beta1, beta2 = options["betas"]
    parameter, gradient = decayed(options, rate, slot)
    mean = _lerp(slot.state["exp_avg"], gradient, 1 - beta1)
    largest = (slot.state["exp_inf"] * beta2).maximum(gradient.op("Abs") + options["eps"])
    step_size = rate / _one_minus_power(beta1, _count(step))
    return parameter - mean * step_size.cast(parameter.dtype) / largest, {"exp_avg": mean, "exp_inf": largest}


def _count(step: GraphTensor) -> GraphTensor:
    """Return the number of steps, including this one."""
    return step + 1 if step.dtype == ir.DataType.DOUBLE else step.nodes.shared("count", lambda: step + 1)


def _one_minus_power(beta: GraphTensor | float, count: GraphTensor) -> GraphTensor:
    """Return 1 - beta**count to a few roundings, also in float32, where subtracting beta**count would cancel.

    With x = count log(beta), that is 1 - e**x. For small x, x / (e**x - 1) is a series with Bernoulli numbers.
    """
    if count.dtype == ir.DataType.DOUBLE:
        return 1 - beta**count
    nodes = count.nodes
    # At run time betas are float64.
    assert not isinstance(beta, GraphTensor)
    if not beta:
        return nodes.constant(1.0, count.dtype)

    def computed() -> GraphTensor:
        x = count * math.log(beta)
        y = x * x
        series = ((y * (1 / 30240) - 1 / 720) * y + 1 / 12) * y - x * 0.5 + 1
        return x.less(-0.5).where(1 - x.exp(), -x / series)

    return nodes.shared(f"1 - {beta}**count", computed)


def _fused_adam(options: Mapping[str, Any]) -> FusedUpdate | None:
    beta1, beta2 = options["betas"]
    if options["amsgrad"] or not (exact_beta(beta1) and exact_beta(beta2)):
        return None
    attributes = {
        "beta1": float(beta1),
        "beta2": float(beta2),
        "epsilon": float(options["eps"]),
        "weight_decay": float(options["weight_decay"]),
        "decoupled_weight_decay": int(options["decoupled_weight_decay"]),
    }
    return FusedUpdate("ApplyAdamW", attributes)


SMALLEST_8BIT = 4096
"""The fewest elements of a parameter whose state is kept in 8 bits, as in bitsandbytes."""
_8BIT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def shapes_in_8bit(parameters: Mapping[str, StateType]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters whose state an 8-bit optimizer keeps in 8 bits."""
    kept = {name: own for name, own in parameters.items() if own.dtype in _8BIT_TYPES}
    return {name: own.shape for name, own in kept.items() if math.prod(own.shape) >= SMALLEST_8BIT}


@functools.cache
def adam_8bit(shape: tuple[int, ...]) -> Rule:
    """Return the rule of Adam for a parameter of some shape, with the state of `ApplyAdamW8bit`."""
    codes = StateType(ir.DataType.UINT8, shape)
    scales = StateType(ir.DataType.FLOAT, (block_count(math.prod(shape)),))
    types = {"exp_avg": codes, "exp_avg_sq": codes, "exp_avg_scale": scales, "exp_avg_sq_scale": scales}
    return Rule(
        states=lambda options: tuple(types),
        counts_steps=lambda options: True,
        update=_adam_8bit,
        fused=_fused_adam_8bit,
        state_types=types,
    )


def _fused_adam_8bit(options: Mapping[str, Any]) -> FusedUpdate | None:
    wide = _fused_adam(options)
    return None if wide is None else dataclasses.replace(wide, op_type="ApplyAdamW8bit")


def _adam_8bit(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    shape, dtype = tuple(slot.parameter.shape.numpy()), slot.parameter.dtype
    count = block_count(math.prod(shape))
    mean_unit = slot.state["exp_avg_scale"].reshape((count, 1)).cast(dtype) / MEAN_UNITS
    root_unit = slot.state["exp_avg_sq_scale"].reshape((count, 1)).cast(dtype) / ROOT_UNITS
    signed = _in_blocks(slot.state["exp_avg"].cast(dtype), MEAN_ZERO) - MEAN_ZERO
    positive = _in_blocks(slot.state["exp_avg_sq"].cast(dtype), -1) + 1
    mean, root = signed * signed.op("Abs") * mean_unit, positive * positive * root_unit
    wide = {"exp_avg": _out_of_blocks(mean, shape), "exp_avg_sq": _out_of_blocks(root * root, shape)}
    parameter, new = _adam(options, rate, step, dataclasses.replace(slot, state=wide))
    mean, root = _in_blocks(new["exp_avg"], 0), _in_blocks(new["exp_avg_sq"].sqrt(), 0)
    # For each block 0, or NaN if anything is not finite.
    axis = mean.nodes.integers([1])
    nothing = mean.nodes.op("ReduceSum", [(mean * 0 + root * 0).value, axis], dtype, (count, 1))
    mean_scale, mean_roots = _quantized(mean.op("Abs"), MEAN_UNITS, nothing)
    root_scale, root_roots = _quantized(root, ROOT_UNITS, nothing)
    # NaN has no sign.
    signs = mean_roots.op("Greater", 0, dtype=ir.DataType.BOOL).where(mean.op("Sign"), 0)
    mean_codes, root_codes = mean_roots * signs + MEAN_ZERO, root_roots.op("Max", 1) - 1
    return parameter, {
        "exp_avg": _out_of_blocks(mean_codes, shape),
        "exp_avg_sq": _out_of_blocks(root_codes, shape),
        "exp_avg_scale": mean_scale.reshape((count,)),
        "exp_avg_sq_scale": root_scale.reshape((count,)),
    }


def _quantized(sizes: GraphTensor, units: float, nothing: GraphTensor) -> tuple[GraphTensor, GraphTensor]:
    """Return the scale of each block of non-negative numbers, and the rounded roots of their ratios to it, in units."""
    count = nothing.shape.numpy()[0]
    # ReduceMax has its axes as an attribute or an input, by opset.
    pool = {"kernel_shape": [BLOCK], "strides": [BLOCK]}
    batch = sizes.reshape((1, count, BLOCK))
    largest = sizes.nodes.op("MaxPool", [batch.value], sizes.dtype, (1, count, 1), pool).reshape((count, 1))
    scale = largest + nothing
    counts = scale.op("GreaterOrEqual", SMALLEST_SCALE, dtype=ir.DataType.BOOL)
    shares = counts.where(sizes * (units / scale), 0)
    return scale, shares.sqrt().op("Round")


def _in_blocks(tensor: GraphTensor, fill: float) -> GraphTensor:
    """Return all elements, and some more of a value, as (blocks, BLOCK)."""
    count = math.prod(tensor.shape.numpy())
    blocks = block_count(count)
    flat = tensor.reshape((count,))
    if missing := blocks * BLOCK - count:
        rest = tensor.nodes.filled((missing,), fill, tensor.dtype)
        flat = tensor.nodes.op("Concat", [flat.value, rest.value], tensor.dtype, (blocks * BLOCK,), {"axis": 0})
    return flat.reshape((blocks, BLOCK))


def _out_of_blocks(tensor: GraphTensor, shape: tuple[int, ...]) -> GraphTensor:
    """Return the elements of a parameter's shape that blocks begin with."""
    count, nodes = math.prod(shape), tensor.nodes
    flat = tensor.reshape((math.prod(tensor.shape.numpy()),))
    ends = [nodes.integers([number]) for number in (0, count)]
    return nodes.op("Slice", [flat.value, *ends], tensor.dtype, (count,)).reshape(shape)


def _transformers_adamw(
    options: Mapping[str, Any], rate: GraphTensor, step: GraphTensor | None, slot: Slot
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    """The former AdamW of transformers, as in onnxruntime-training: epsilon without bias correction, decay last."""
    beta1, beta2 = options["betas"]
    gradient, dtype = slot.gradient, slot.parameter.dtype
    mean = slot.state["exp_avg"] * beta1 + gradient * (1 - beta1)
    square = slot.state["exp_avg_sq"] * beta2 + gradient * (1 - beta2) * gradient
    step_size = rate
    if options["correct_bias"]:
        assert step is not None
        count = _count(step)
        step_size = rate * _one_minus_power(beta2, count).sqrt() / _one_minus_power(beta1, count)
    parameter = slot.parameter - mean * step_size.cast(dtype) / (square.sqrt() + options["eps"])
    if options["weight_decay"]:
        parameter = parameter - parameter * (rate * options["weight_decay"]).cast(dtype)
    return parameter, {"exp_avg": mean, "exp_avg_sq": square}


RULES: Mapping[str, Rule] = {
    "SGD": Rule(
        lambda options: ("momentum_buffer",) if options["momentum"] else (),
        lambda options: bool(options["momentum"] and options["dampening"]),
        _sgd,
        _fused_sgd,
    ),
    "Adam": Rule(
        lambda options: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ())),
        lambda options: True,
        _adam,
        _fused_adam,
    ),
    "RMSprop": Rule(
        lambda options: (
            "square_avg",
            *(("grad_avg",) if options["centered"] else ()),
            *(("momentum_buffer",) if options["momentum"] else ()),
        ),
        lambda options: False,
        _rmsprop,
    ),
    "Adagrad": Rule(lambda options: ("sum",), lambda options: bool(options["lr_decay"]), _adagrad),
    "Adadelta": Rule(lambda options: ("square_avg", "acc_delta"), lambda options: False, _adadelta),
    "Adamax": Rule(lambda options: ("exp_avg", "exp_inf"), lambda options: True, _adamax),
    "TransformersAdamW": Rule(
        lambda options: ("exp_avg", "exp_avg_sq"),
        lambda options: True,
        _transformers_adamw,
    ),
}
"""By the name of the algorithm; AdamW is Adam with the option `decoupled_weight_decay`."""
