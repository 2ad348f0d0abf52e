"""Optimizers, to be used as those of torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from gradfuse.custom_ops.apply_adam_w import exact_beta
from gradfuse.custom_ops.apply_adam_w8bit import (
    BLOCK,
    MEAN_UNITS,
    MEAN_ZERO,
    ROOT_UNITS,
    SMALLEST_SCALE,
    block_count,
)
from gradfuse.errors import ArgumentError
from gradfuse.training.rules import SMALLEST_8BIT

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_STATES = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with state in 8 bits: `torch.optim.AdamW` with 2.03 bytes of state per parameter, not 8.

    Each block of 256 elements has a scale for each moving average; docs/operators.md#applyadamw8bit has the codes.
    Parameters of fewer than 4,096 elements, and those of float64, have state of their own type. On the CPU one operator
    updates a parameter, elsewhere PyTorch's operators do. `export_training_step` accepts it like those of torch.optim.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.

    Raises:
        ArgumentError: an option is out of range; or, by a step, a gradient is sparse.
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "amsgrad": False, "decoupled_weight_decay": self._decoupled})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Raises:
            ArgumentError: an option is out of range.
        """
        options = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= float(options[name]) < math.inf:
                self._refuse(name, options[name], "a number from 0 on")
        if not all(0 <= beta < 1 for beta in options["betas"]):
            self._refuse("betas", options["betas"], "two numbers from 0 to below 1")
        super().add_param_group(param_group)

    def keeps_8bit(self, parameter: Tensor) -> bool:
        """Return whether the state of a parameter is kept in 8 bits."""
        if self.state.get(parameter):
            return "exp_avg_scale" in self.state[parameter]
        return parameter.dtype in _TYPES and parameter.numel() >= SMALLEST_8BIT

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; codes and scales keep their types, which `torch.optim.Optimizer` makes the parameter's."""
        super().load_state_dict(dict(state_dict))
        ids = [one for group in state_dict["param_groups"] for one in group["params"]]
        parameters = [one for group in self.param_groups for one in group["params"]]
        for one, parameter in zip(ids, parameters, strict=True):
            given = state_dict["state"].get(one, {})
            if "exp_avg_scale" in given:
                copies = {name: given[name].to(parameter.device, copy=True) for name in _STATES}
                self.state[parameter].update(copies)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; returns what `closure` does, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        if gradient.is_sparse:
            self._refuse("gradient", "sparse", "a dense tensor")
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(parameter))
        update = _update_8bit if "exp_avg_scale" in state else _update_wide
        update(group, parameter, -gradient if group["maximize"] else gradient, state)

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        first = {"step": torch.zeros(())}
        if not self.keeps_8bit(parameter):
            return first | {name: torch.zeros_like(parameter) for name in _STATES[:2]}
        blocks, device = block_count(parameter.numel()), parameter.device
        codes = {name: torch.zeros(parameter.shape, dtype=torch.uint8, device=device) for name in _STATES[:2]}
        return first | codes | {name: torch.zeros(blocks, device=device) for name in _STATES[2:]}

    def _refuse(self, name: str, got: Any, wanted: str) -> None:
        raise ArgumentError(f"{type(self).__name__}: {name} is {got}; expected {wanted}")


class Adam8bit(AdamW8bit):
    """Adam with state in 8 bits: `torch.optim.Adam`, otherwise like :class:`AdamW8bit`."""

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)


def _update_wide(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
    _adam(group, parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"])


def _adam(
    group: dict[str, Any], parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor
) -> None:
    """Update all by torch.optim, in place."""
    update = adamw if group["decoupled_weight_decay"] else adam
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    options = {"lr": rate, "weight_decay": group["weight_decay"], "eps": group["eps"]}
    update(
        [parameter],
        [gradient],
        [mean],
        [square],
        [],
        [step],
        foreach=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        maximize=False,
        **options,
    )


def _update_8bit(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
    has_operator = parameter.device.type == "cpu" and parameter.dtype in _TYPES
    # Which has seven decimals of them.
    if has_operator and all(map(exact_beta, group["betas"])):
        updated = torch.ops.aclnn.apply_adam_w8bit(
            parameter,
            gradient,
            *(state[name] for name in _STATES),
            torch.tensor(float(group["lr"])),
            state["step"].long(),
            None,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )
        _copy(updated, [parameter, *(state[name] for name in _STATES)])
        state["step"] += 1
        return
    real = torch.promote_types(parameter.dtype, torch.float32)
    mean_unit, root_unit = state["exp_avg_scale"].to(real) / MEAN_UNITS, state["exp_avg_sq_scale"].to(real) / ROOT_UNITS
    signed, positive = state["exp_avg"].to(real) - MEAN_ZERO, state["exp_avg_sq"].to(real) + 1
    mean = _elements(_in_blocks(signed * signed.abs()) * mean_unit[:, None], parameter)
    square = _elements(_in_blocks(positive * positive) * root_unit[:, None], parameter).square()
    wide = parameter.to(real, copy=True)
    _adam(group, wide, gradient.to(real), mean, square, state["step"])
    mean, root = _in_blocks(mean), _in_blocks(square.sqrt())
    unknown = ~(mean.isfinite() & root.isfinite()).all(1)
    mean_scale, mean_roots = _quantized(mean, MEAN_UNITS, unknown)
    root_scale, root_roots = _quantized(root, ROOT_UNITS, unknown)
    codes = [torch.where(mean < 0, -mean_roots, mean_roots) + MEAN_ZERO, root_roots.clamp_min(1) - 1]
    updated = [wide, *(_elements(one, parameter) for one in codes), mean_scale, root_scale]
    _copy(updated, [parameter, *(state[name] for name in _STATES)])


def _quantized(values: Tensor, units: float, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each block, NaN for an unknown one, and the roots of the elements' shares of it, rounded."""
    scale = values.abs().amax(1).masked_fill(unknown, math.nan)
    counts = (scale >= SMALLEST_SCALE)[:, None]
    shares = torch.where(counts, values.abs() * (units / scale)[:, None], 0)
    return scale, shares.sqrt().round()


def _in_blocks(tensor: Tensor) -> Tensor:
    """All elements, and zeros, (blocks, BLOCK)."""
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)


def _elements(blocks: Tensor, parameter: Tensor) -> Tensor:
    return blocks.flatten()[: parameter.numel()].view(parameter.shape)


def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for value, tensor in zip(values, into, strict=True):
        tensor.copy_(value)
