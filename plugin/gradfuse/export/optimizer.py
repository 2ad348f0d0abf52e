"""Reads an optimizer of PyTorch, with the state that it has. This module imports torch."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from gradfuse import _torch_private as private
from gradfuse.errors import type_name
from gradfuse.export import explaining, traced_optimizer
from gradfuse.export.reporting import WHO, refusal
from gradfuse.models.arrays import to_numpy
from gradfuse.optimizers import Average, GradScaler, averaging, loss_scaling
from gradfuse.torch.optimizers import Adam8bit, AdamW8bit
from gradfuse.training.optimizers import Optimizer, ParameterGroup

_ALGORITHMS = {
    torch.optim.SGD: "SGD",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "Adam",
    torch.optim.RMSprop: "RMSprop",
    torch.optim.Adagrad: "Adagrad",
    torch.optim.Adadelta: "Adadelta",
    torch.optim.Adamax: "Adamax",
    Adam8bit: "Adam",
    AdamW8bit: "Adam",
}
"""Those that have a rule; the steps of others are traced."""


def every(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that `export_training_step` is given: none, one, or several in order."""
    if isinstance(optimizer, (list, tuple)):
        if not optimizer:
            raise refusal("optimizer is empty; expected optimizers, or None, for a step that ends at the gradients")
        return tuple(optimizer)
    return () if optimizer is None else (optimizer,)


def described(
    optimizers: Sequence[Any],
    names: Mapping[int, str],
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    grad_scaler: torch.amp.GradScaler | GradScaler | None = None,
    average: Average | None = None,
    float64: bool = True,
    run_time: Sequence[str] = (),
) -> Optimizer:
    """Describe optimizers of one step, with the state that they have.

    The steps of those that have no rule, such as subclasses, are traced.

    Args:
        optimizers: the optimizers. Parameters of them that require no gradient are left alone, as PyTorch does.
        names: `id` of each trainable parameter -> its name.
        max_grad_norm: see `Optimizer`.
        accumulate: see `Optimizer`.
        grad_scaler: how the loss is scaled, and the state to begin at; None, or one that is not enabled: it is not.
        average: how the parameters are averaged; None: they are not.
        float64: see `Optimizer`.
        run_time: the names of hyperparameters that are inputs of the step.

    Raises:
        ExportError: one is no optimizer or has hooks, an option or its step cannot be part of a graph, or a parameter
            is not among the names or in two of them.
    """
    if max_grad_norm not in (None, math.inf) and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise refusal(f"max_grad_norm is {max_grad_norm!r}; expected a positive number or None")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise refusal(f"accumulate is {accumulate!r}; expected a positive integer")
    parts = [_described(one, names, float64, run_time) for one in optimizers]
    owner: dict[str, int] = {}
    for number, part in enumerate(parts):
        for name in part.parameters:
            if owner.setdefault(name, number) != number:
                raise refusal(
                    f"optimizer has {name!r} in two places, {owner[name]} and {number}; expected each parameter in one"
                )
    whole = Optimizer(
        groups=tuple(group for part in parts for group in part.groups),
        steps={name: done for part in parts for name, done in part.steps.items()},
        begun=frozenset(name for part in parts for name in part.begun),
        state={name: array for part in parts for name, array in part.state.items()},
        traced={name: rule for part in parts for name, rule in part.traced.items()},
        eight_bit={name: shape for part in parts for name, shape in part.eight_bit.items()},
        max_grad_norm=max_grad_norm,
        accumulate=accumulate,
        loss_scaling=loss_scaling(grad_scaler, refusal),
        averaging=averaging(average, refusal),
        float64=float64,
    )
    return whole.with_run_time(run_time, refusal)


def require_others_left_alone(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], updated: Collection[str]
) -> None:
    """Refuse optimizers that change parameters without a gradient: `traced_optimizer.require_others_left_alone`."""
    for optimizer in optimizers:
        if type(optimizer) not in _ALGORITHMS:
            traced_optimizer.require_others_left_alone(optimizer, names, updated)


def _described(optimizer: Any, names: Mapping[int, str], float64: bool, run_time: Sequence[str]) -> Optimizer:
    """Describe one optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refusal(
            f"optimizer is {type_name(optimizer)}; expected a torch.optim.Optimizer, a list of some, or None, for "
            "a step that ends at the gradients"
        )
    # A subclass may compute anything.
    algorithm = _ALGORITHMS.get(type(optimizer))
    if private.has_step_of_its_own(optimizer):
        raise refusal("optimizer.step is replaced in the object; expected the step of its class, or a subclass")
    for hook in private.step_hooks(optimizer):
        raise refusal(
            f"optimizer has the hook {explaining.of_callable(hook)} on its step; expected none: take it away by "
            "remove() of its handle. To change a gradient before the update, use register_hook of its parameter, or "
            "max_grad_norm"
        )
    groups: list[ParameterGroup] = []
    eight_bit: dict[str, tuple[int, ...]] = {}
    shown = type(optimizer).__name__ if algorithm is None else algorithm
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        if options.get("differentiable"):
            raise refusal(f"differentiable is True in parameter group {index}; expected False")
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        for parameter in trained:
            if id(parameter) not in names:
                raise refusal(
                    f"parameter group {index} of the optimizer has a tensor of shape {tuple(parameter.shape)} "
                    "that is no trainable parameter of the module or the loss; expected theirs alone"
                )
        if isinstance(optimizer, AdamW8bit):
            kept = (parameter for parameter in trained if optimizer.keeps_8bit(parameter))
            eight_bit |= {names[id(parameter)]: tuple(parameter.shape) for parameter in kept}
        cycled = options.keys() & {"betas", "momentum"}
        if options.keys() >= {"base_momentum", "max_momentum"} and not cycled <= {*run_time}:
            warnings.warn(
                f"{WHO}: a scheduler cycles the momentum of parameter group {index}, of which the step keeps the "
                f"present value; expected cycle_momentum=False, or {' and '.join(sorted(cycled))} in run_time",
                stacklevel=2,
            )
        if algorithm is None:
            # The step that is traced has all else.
            inputs = {name: options[name] for name in run_time if name in options}
            options = {"lr": options.get("lr"), "maximize": False, **inputs}
        groups.append(ParameterGroup(tuple(names[id(parameter)] for parameter in trained), options, shown))
    description = Optimizer(groups=tuple(groups), eight_bit={} if algorithm is None else eight_bit, float64=float64)
    if algorithm is None:
        if not float64:
            raise refusal(
                f"float64 is False with {type(optimizer).__name__}, whose step is traced as PyTorch computes it; "
                f"expected True, or torch.optim.{', '.join(sorted(one.__name__ for one in _ALGORITHMS))}"
            )
        traced = traced_optimizer.traced(optimizer, names, run_time)
        return dataclasses.replace(
            description, traced=traced.rules, state=traced.state, steps=traced.steps, begun=traced.begun
        )
    return _with_state(description, optimizer, names)


def _with_state(description: Optimizer, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Optimizer:
    """Return the description with the state and the numbers of steps that the optimizer has."""
    known = description.state_names()
    state: dict[str, Any] = {}
    steps: dict[str, int] = {}
    begun = set()
    for parameter, entries in optimizer.state.items():
        if not parameter.requires_grad:
            continue
        name = names[id(parameter)]
        state |= {f"{name}.{key}": to_numpy(entries[key]) for key in known[name] if entries.get(key) is not None}
        if entries.get("step") is not None:
            steps[name] = int(entries["step"])
        elif entries.get("momentum_buffer") is not None:
            # SGD counts no steps.
            begun.add(name)
    return dataclasses.replace(description, state=state, steps=steps, begun=frozenset(begun))


def _plain(value: Any) -> Any:
    """Return an option's value without tensors."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(one) for one in value)
    if not hasattr(value, "item"):
        return value
    return value.item() if math.prod(value.shape) == 1 else tuple(value.tolist())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
