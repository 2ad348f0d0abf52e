"""Optimizers for `gradfuse.build_training_step`, with the names and options of torch.optim, without torch."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from gradfuse.errors import ArgumentError, GradfuseError
from gradfuse.training.optimizers import LossScaling, Optimizer, ParameterGroup

__all__ = ["SGD", "Adam", "AdamW", "GradScaler", "OptimizerOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """What all optimizers have.

    Attributes:
        lr: the learning rate, which is an input of the step.
        weight_decay: as in torch.optim.
        maximize: whether the loss is to grow.

    Raises:
        ArgumentError: an option is out of range.
    """

    lr: float
    weight_decay: float = 0.0
    maximize: bool = False

    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "a number from 0 on")

    def described(self, parameters: Iterable[str]) -> Optimizer:
        """Return the optimizer of some parameters, at the beginning of training."""
        return Optimizer(self.algorithm, (ParameterGroup(tuple(parameters), self._options()),))

    def _options(self) -> Mapping[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        value = getattr(self, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not holds or not all(math.isfinite(number) for number in numbers):
            raise ArgumentError(f"{type(self).__name__}: {name} is {value!r}; expected {wanted}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(OptimizerOptions):
    """torch.optim.SGD."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    algorithm: ClassVar[str] = "SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", self.momentum >= 0, "a number from 0 on")
        fits = not self.nesterov or (self.momentum > 0 and self.dampening == 0)
        self._require("nesterov", fits, "False, or a momentum and no dampening")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(OptimizerOptions):
    """torch.optim.Adam."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    decoupled_weight_decay: bool = False

    algorithm: ClassVar[str] = "Adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        self._require("eps", self.eps >= 0, "a number from 0 on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """torch.optim.AdamW."""

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradScaler:
    """torch.amp.GradScaler: the loss is scaled, and an update whose gradients are not finite is skipped.

    Raises:
        ArgumentError: an option is out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("init_scale", self.init_scale > 0, "a positive number"),
            ("growth_factor", self.growth_factor > 1, "a number above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "a number between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "a positive integer"),
        ):
            value = getattr(self, name)
            if not holds or not math.isfinite(value):
                raise ArgumentError(f"GradScaler: {name} is {value!r}; expected {wanted}")

    def described(self) -> LossScaling:
        """Return the scaling at the beginning of training."""
        return LossScaling(self.init_scale, self.growth_factor, self.backoff_factor, self.growth_interval)


def loss_scaling(grad_scaler: Any, refusal: Callable[[str], GradfuseError]) -> LossScaling | None:
    """Return how a `GradScaler` or a `torch.amp.GradScaler` scales; None where it is not enabled, or there is none.

    Args:
        grad_scaler: the scaler, with the state to begin at.
        refusal: makes the error that is raised where it is something else.
    """
    if grad_scaler is None:
        return None
    if isinstance(grad_scaler, GradScaler):
        return grad_scaler.described()
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(grad_scaler, torch.amp.GradScaler):
        raise refusal(
            f"grad_scaler is {type(grad_scaler).__name__}; "
            "expected gradfuse.optimizers.GradScaler or torch.amp.GradScaler"
        )
    state = grad_scaler.state_dict()
    if not state:  # of one that is not enabled
        return None
    return LossScaling(
        *(state[name] for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"))
    )
