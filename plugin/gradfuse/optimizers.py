"""Optimizers for `gradfuse.build_training_step`, with the names and options of torch.optim, without torch."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from gradfuse.errors import ArgumentError, GradfuseError, listed
from gradfuse.models.scalars import take_numbers
from gradfuse.training.optimizers import Averaging, LossScaling, Optimizer, ParameterGroup
from gradfuse.training.rules import StateType, shapes_in_8bit

__all__ = [
    "EMA",
    "SGD",
    "SWA",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Adamax",
    "Average",
    "GradScaler",
    "OptimizerOptions",
    "RMSprop",
]


_REST = "*"
"""The pattern of all parameters that no other pattern matches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options that all optimizers have.

    Attributes:
        lr: the learning rate, which is an input of the step.
        weight_decay: as in torch.optim.
        maximize: whether to maximize the loss.

    Raises:
        ArgumentError: an option is out of range.
    """

    lr: float
    weight_decay: float = 0.0
    maximize: bool = False

    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        take_numbers(self)
        for name in ("lr", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "a number from 0 on")

    def described(self, parameters: Mapping[str, StateType]) -> Optimizer:
        """Return the optimizer of some parameters, by their types, at the beginning of training."""
        return Optimizer((ParameterGroup(tuple(parameters), self._options(), self.algorithm),))

    def _options(self) -> Mapping[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _require_betas(self) -> None:
        betas: tuple[float, float] = vars(self)["betas"]
        self._require("betas", all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")

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
        self._require_betas()
        self._require("eps", self.eps >= 0, "a number from 0 on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """torch.optim.AdamW."""

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State8bit(Adam):
    """An Adam whose state takes two bytes per parameter, as in `bitsandbytes.optim`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("amsgrad", not self.amsgrad, "False, as no third state is kept in 8 bits")

    def described(self, parameters: Mapping[str, StateType]) -> Optimizer:
        """Return the optimizer of some parameters, by their types, at the beginning of training."""
        return dataclasses.replace(super().described(parameters), eight_bit=shapes_in_8bit(parameters))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam8bit(_State8bit):
    """`Adam` with state in 8 bits: see `AdamW8bit`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW8bit(_State8bit, AdamW):
    """`AdamW` with state in 8 bits, like `bitsandbytes.optim.AdamW8bit` and torchao's: 2.03 bytes per parameter, not 8.

    Each block of 256 elements has a scale for each moving average; docs/operators.md#applyadamw8bit has the codes.
    Parameters of fewer than 4,096 elements, and those of float64, have state of their own type.

    Raises:
        ArgumentError: an option is out of range, or `amsgrad` is True.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(OptimizerOptions):
    """torch.optim.RMSprop."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    algorithm: ClassVar[str] = "RMSprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "eps", "momentum"):
            self._require(name, getattr(self, name) >= 0, "a number from 0 on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerOptions):
    """torch.optim.Adagrad, with an `initial_accumulator_value` of 0."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10

    algorithm: ClassVar[str] = "Adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr_decay", "eps"):
            self._require(name, getattr(self, name) >= 0, "a number from 0 on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adadelta(OptimizerOptions):
    """torch.optim.Adadelta."""

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    algorithm: ClassVar[str] = "Adadelta"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("rho", 0 <= self.rho <= 1, "a number from 0 to 1")
        self._require("eps", self.eps >= 0, "a number from 0 on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adamax(OptimizerOptions):
    """torch.optim.Adamax."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    algorithm: ClassVar[str] = "Adamax"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_betas()
        self._require("eps", self.eps >= 0, "a number from 0 on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average:
    """Averages of the parameters that a step trains: `torch.optim.swa_utils.AveragedModel`.

    Attributes:
        start: after how many updates of the step averaging begins; those that the optimizer did before do not count.
        every: only the last of this many updates is averaged.

    Raises:
        ArgumentError: an option is out of range.
    """

    start: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        take_numbers(self)
        for name, least in (("start", 0), ("every", 1)):
            value = getattr(self, name)
            if value < least:
                raise ArgumentError(
                    f"{type(self).__name__}: {name} is {value!r}; expected a whole number from {least} on"
                )

    def described(self) -> Averaging:
        """Return the averaging as data."""
        return Averaging(None, self.start, self.every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SWA(Average):
    """Stochastic weight averaging: the plain mean, as by `torch.optim.swa_utils.get_swa_avg_fn`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMA(Average):
    """Exponential moving average: average * decay + parameter * (1 - decay), as by `get_ema_avg_fn` there."""

    decay: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ArgumentError(f"EMA: decay is {self.decay!r}; expected a number from 0 to below 1")

    def described(self) -> Averaging:
        """Return the averaging as data."""
        return Averaging(self.decay, self.start, self.every)


def described(
    optimizer: OptimizerOptions | Mapping[str, OptimizerOptions],
    parameters: Mapping[str, StateType],
    names: Mapping[str, str],
    refusal: Callable[[str], GradfuseError],
) -> Optimizer:
    """Return the optimizer of some parameters at the beginning of training; several of them as one.

    Args:
        optimizer: the optimizer, or name or pattern -> that of the parameters that it matches; "*" is all others.
        parameters: what the step calls them -> their types.
        names: what the step calls them -> their names.
        refusal: makes the error that is raised where patterns do not divide the parameters.
    """
    if isinstance(optimizer, OptimizerOptions):
        return optimizer.described(parameters)
    found: dict[str, str] = {}
    for pattern in optimizer:
        if pattern == _REST:
            continue
        matched = [one for one in parameters if names[one] == pattern or fnmatch.fnmatchcase(names[one], pattern)]
        if not matched:
            every = listed(names[one] for one in parameters)
            raise refusal(f"optimizer has {pattern!r}, which matches no parameter; expected some of {every}")
        for one in matched:
            if one in found:
                raise refusal(
                    f"optimizer has {names[one]!r} in two places, {found[one]!r} and {pattern!r}; expected each "
                    "parameter in one"
                )
            found[one] = pattern
    left = [one for one in parameters if one not in found]
    if left and _REST not in optimizer:
        raise refusal(f"optimizer leaves out {listed(names[one] for one in left)}; expected '*' for all others")
    found |= dict.fromkeys(left, _REST)
    parts = [
        options.described({one: own for one, own in parameters.items() if found[one] == pattern})
        for pattern, options in optimizer.items()
    ]
    groups = tuple(group for part in parts for group in part.groups)
    return Optimizer(groups, eight_bit={name: shape for part in parts for name, shape in part.eight_bit.items()})


def averaging(average: Any, refusal: Callable[[str], GradfuseError]) -> Averaging | None:
    """Return how parameters are averaged, or None.

    Args:
        average: an object of `EMA` or `SWA`, or None.
        refusal: makes the error that is raised where it is something else.
    """
    if average is None:
        return None
    if type(average) not in (EMA, SWA):
        raise refusal(f"average is {type(average).__name__}; expected gradfuse.optimizers.EMA or SWA")
    described: Averaging = average.described()
    return described


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
        take_numbers(self)
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
    """Return the loss scaling of a `GradScaler` or `torch.amp.GradScaler`, or None if there is none that is enabled.

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
