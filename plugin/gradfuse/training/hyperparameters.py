"""Hyperparameters that are inputs of a step: their names, and their valid values.

This module needs neither onnx nor onnxruntime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gradfuse.errors import ArgumentError

LEARNING_RATE = "learning_rate"
MAX_GRAD_NORM = "max_grad_norm"
BETAS = "betas"

_Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """The valid values of a hyperparameter.

    Attributes:
        holds: array -> whether each of its elements is valid, as in torch.optim.
        wanted: what they are, for messages.
        shape: that of one value.
    """

    holds: Callable[[_Array], Any]
    wanted: str
    shape: tuple[int, ...] = ()


_FROM_0_ON = Hyperparameter(lambda array: np.isfinite(array) & (array >= 0), "finite numbers from 0 on")
HYPERPARAMETERS: Mapping[str, Hyperparameter] = {
    LEARNING_RATE: _FROM_0_ON,
    "weight_decay": _FROM_0_ON,
    BETAS: Hyperparameter(lambda array: (array >= 0) & (array < 1), "numbers from 0 to below 1", (2,)),
    "eps": _FROM_0_ON,
    "momentum": _FROM_0_ON,
    "alpha": _FROM_0_ON,
    "rho": Hyperparameter(lambda array: (array >= 0) & (array <= 1), "numbers from 0 to 1"),
    MAX_GRAD_NORM: Hyperparameter(lambda array: array > 0, "positive numbers, or inf for no clipping"),
}
"""All that may be inputs, by torch's names of options; the learning rate always is one."""


def name_of(hyperparameter: str, group: int) -> str:
    """Return the name of the input that holds a hyperparameter of a parameter group."""
    return hyperparameter if group == 0 else f"{hyperparameter}.{group}"


def hyperparameter_of(name: str) -> str:
    """Return the hyperparameter that an input of such a name holds."""
    return name.partition(".")[0]


def require_values(hyperparameter: str, array: _Array, what: str) -> None:
    """Refuse values that a hyperparameter cannot have; `what` begins the message.

    Raises:
        ArgumentError: one is out of range, or NaN.
    """
    known = HYPERPARAMETERS[hyperparameter]
    if not known.holds(array).all():
        raise ArgumentError(f"{what}; expected {known.wanted}")
