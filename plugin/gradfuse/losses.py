"""Losses for `gradfuse.build_training_step`, with the names and options of torch.nn.

A loss is appended to an output of a model, in standard operators. Each class says which inputs it adds (`targets`) and
what it computes (`forward`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.errors import ArgumentError, one_line, type_name
from gradfuse.models.scalars import take_numbers

if TYPE_CHECKING:
    from gradfuse.differentiation.tensors import Tensor

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "Loss",
    "MSELoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "named",
]

_MEAN = "mean"


@dataclasses.dataclass(frozen=True)
class Target:
    """An input that a loss adds to the model.

    Attributes:
        name: its name, which a model's own inputs must not have.
        dtype: its element type; None: that of the output.
        shape: gives its shape, from that of the output.
    """

    name: str
    dtype: ir.DataType | None
    shape: Callable[[Sequence[int | str | None]], Sequence[int | str | None]]


@dataclasses.dataclass(frozen=True)
class Loss(abc.ABC):
    """Base of all losses, with `reduction`, "mean" or "sum", as in torch.nn.

    Raises:
        ArgumentError: an option has no such value.
    """

    reduction: str = _MEAN

    least_rank: ClassVar[int] = 0
    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum")

    @property
    def takes(self) -> str:
        """What the output must be: "logits", "log-probabilities" or "probabilities"; empty: any numbers."""
        return ""

    def __post_init__(self) -> None:
        take_numbers(self)
        given: object = self.reduction
        if not isinstance(given, str) or given not in self.reductions:
            # In torch.nn, the first argument of some losses is a tensor of weights.
            named = repr(given) if isinstance(given, str) else type_name(given)
            wanted = " or ".join(map(repr, self.reductions))
            raise ArgumentError(f"{type(self).__name__}: reduction is {named}; expected {wanted}")

    @property
    def targets(self) -> tuple[Target, ...]:
        """The inputs that it adds: one tensor like the output, for most."""
        return (Target("target", None, lambda shape: shape),)

    def sizes(self, rank: int) -> Mapping[int, int]:
        """Axis of an output of this rank -> the size that the options of the loss fix, such as that of class weights.

        Raises:
            ArgumentError: the options fit no output of this rank.
        """
        return {}

    @abc.abstractmethod
    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        """Append the loss to a graph.

        Args:
            output: the value to compute the loss of.
            targets: the inputs of `targets`.
            rank: the output's rank.

        Returns:
            A scalar.
        """

    def _reduced(self, elements: Tensor) -> Tensor:
        return elements.op("ReduceMean" if self.reduction == _MEAN else "ReduceSum", keepdims=0)


def _classes(shape: Sequence[int | str | None]) -> Sequence[int | str | None]:
    return [shape[0], *shape[2:]]


def _numbers_shape(loss: Loss, name: str) -> tuple[int, ...]:
    """Return the shape of weights."""
    given = getattr(loss, name)
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):
        array = np.array("")
    except RuntimeError as error:
        # Of torch.
        raise ArgumentError(f"{type(loss).__name__}: {name} is {type_name(given)}: {one_line(error)}") from error
    if array.dtype.kind not in "fiu":
        raise ArgumentError(f"{type(loss).__name__}: {name} is {given!r}; expected numbers")
    return array.shape


def _class_sizes(loss: CrossEntropyLoss | NLLLoss) -> Mapping[int, int]:
    if loss.weight is None:
        return {}
    shape = _numbers_shape(loss, "weight")
    if len(shape) != 1:
        raise ArgumentError(f"{type(loss).__name__}: weight has shape {list(shape)}; expected one number per class")
    return {1: shape[0]}


@dataclasses.dataclass(frozen=True)
class CrossEntropyLoss(Loss):
    """Cross entropy of logits (N, C, ...) and classes, int64 (N, ...): torch.nn.CrossEntropyLoss.

    Attributes:
        weight: C numbers, the weights of the classes; None: all 1.
        ignore_index: rows with this target do not count.
        label_smoothing: how much of the target is spread evenly over all classes, from 0 to 1.
        from_logits: False: the output is probabilities, as of a model that ends in a softmax.
        soft_targets: True: the targets are probabilities of the classes, of the output's shape and type, such as
            one-hot rows or the results of a teacher. As in torch, the mean is over rows, whatever their weights.
    """

    weight: npt.ArrayLike | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    from_logits: bool = True
    soft_targets: bool = False

    least_rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing <= 1:
            raise ArgumentError(
                f"CrossEntropyLoss: label_smoothing is {self.label_smoothing!r}; expected a number from 0 to 1"
            )
        if self.soft_targets and self.ignore_index >= 0:
            raise ArgumentError(
                f"CrossEntropyLoss: ignore_index is {self.ignore_index} with soft_targets, which are no classes; "
                "expected one or the other"
            )

    @property
    def targets(self) -> tuple[Target, ...]:
        return super().targets if self.soft_targets else (Target("target", ir.DataType.INT64, _classes),)

    @property
    def takes(self) -> str:
        return "logits" if self.from_logits else "probabilities"

    def sizes(self, rank: int) -> Mapping[int, int]:
        return _class_sizes(self)

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        if not self.from_logits:
            # The logarithms of probabilities are logits of them.
            output = _before(output, "Softmax", axis=1, rank=rank) or _log(output)
        if self.soft_targets:
            return self._of_shares(output, targets[0], rank)
        if not self.label_smoothing:
            weight = None if self.weight is None else output.tape.constant(self.weight, output.dtype)
            return output.op(
                "SoftmaxCrossEntropyLoss", targets[0], weight, ignore_index=self.ignore_index, reduction=self.reduction
            )
        tape, target = output.tape, targets[0]
        counted = target.equals(tape.constant(self.ignore_index)).op("Not")
        label = counted.where(target, tape.constant(0)).unsqueeze(1)
        log_probs = output.op("LogSoftmax", axis=1)
        rows = counted.cast(output.dtype)
        spread = log_probs
        if self.weight is not None:
            column = np.asarray(self.weight, np.float64).reshape(-1, *[1] * (rank - 2))
            weights = tape.constant(column, output.dtype)
            rows = rows * weights.reshape([-1]).op("Gather", label.squeeze(1), axis=0)
            spread = log_probs * weights
        picked = log_probs.op("GatherElements", label, axis=1).squeeze(1)
        total = (picked * rows).sum(None, keepdims=False) * (1 - self.label_smoothing)
        evenly = spread.sum([1], keepdims=False)
        classes = output.size(1).squeeze(0).cast(output.dtype)
        smoothed = evenly.masked(counted).sum(None, keepdims=False) * self.label_smoothing / classes
        loss = -(total + smoothed)
        return loss / rows.sum(None, keepdims=False) if self.reduction == _MEAN else loss

    def _of_shares(self, output: Tensor, target: Tensor, rank: int) -> Tensor:
        log_probs = output.op("LogSoftmax", axis=1)
        if self.label_smoothing:
            classes = output.size(1).squeeze(0).cast(output.dtype)
            target = target * (1 - self.label_smoothing) + self.label_smoothing / classes
        if self.weight is not None:
            column = np.asarray(self.weight, np.float64).reshape(-1, *[1] * (rank - 2))
            target = target * output.tape.constant(column, output.dtype)
        return -self._reduced((log_probs * target).sum([1], keepdims=False))


@dataclasses.dataclass(frozen=True)
class NLLLoss(Loss):
    """Negative log-likelihood of log-probabilities (N, C, ...) and classes, int64 (N, ...): torch.nn.NLLLoss.

    Attributes:
        weight: C numbers, the weights of the classes; None: all 1.
        ignore_index: rows with this target do not count.
    """

    weight: npt.ArrayLike | None = None
    ignore_index: int = -100

    least_rank: ClassVar[int] = 2

    @property
    def takes(self) -> str:
        return "log-probabilities"

    @property
    def targets(self) -> tuple[Target, ...]:
        return (Target("target", ir.DataType.INT64, _classes),)

    def sizes(self, rank: int) -> Mapping[int, int]:
        return _class_sizes(self)

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        weight = None if self.weight is None else output.tape.constant(self.weight, output.dtype)
        return output.op(
            "NegativeLogLikelihoodLoss", targets[0], weight, ignore_index=self.ignore_index, reduction=self.reduction
        )


@dataclasses.dataclass(frozen=True)
class MSELoss(Loss):
    """Squared differences of the output and a target of its shape: torch.nn.MSELoss."""

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        difference = output - targets[0]
        return self._reduced(difference * difference)


@dataclasses.dataclass(frozen=True)
class L1Loss(Loss):
    """Absolute differences of the output and a target of its shape: torch.nn.L1Loss."""

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        return self._reduced((output - targets[0]).op("Abs"))


@dataclasses.dataclass(frozen=True)
class HuberLoss(Loss):
    """d^2 / 2 for differences d up to `delta`, delta (|d| - delta / 2) beyond: torch.nn.HuberLoss."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.delta > 0 and math.isfinite(self.delta)):
            raise ArgumentError(f"HuberLoss: delta is {self.delta!r}; expected a positive number")

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        size = (output - targets[0]).op("Abs")
        inner = size.op("Min", self.delta)
        return self._reduced(inner * (size - inner * 0.5))


@dataclasses.dataclass(frozen=True)
class SmoothL1Loss(Loss):
    """d^2 / (2 beta) for differences d up to `beta`, |d| - beta / 2 beyond: torch.nn.SmoothL1Loss."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.beta >= 0 and math.isfinite(self.beta)):
            raise ArgumentError(f"SmoothL1Loss: beta is {self.beta!r}; expected a number from 0 on")

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        if not self.beta:
            return L1Loss(self.reduction).forward(output, targets, rank)
        return HuberLoss(self.reduction, self.beta).forward(output, targets, rank) / self.beta


@dataclasses.dataclass(frozen=True)
class SoftMarginLoss(Loss):
    """log(1 + exp(-y x)) of numbers x and targets y, -1 or 1: torch.nn.SoftMarginLoss."""

    @property
    def takes(self) -> str:
        return "logits"

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        return self._reduced((-(output * targets[0])).softplus())


@dataclasses.dataclass(frozen=True)
class KLDivLoss(Loss):
    """y (log y - x) of log-probabilities x and probabilities y of their shape: torch.nn.KLDivLoss.

    Attributes:
        reduction: "batchmean" besides: the sum, divided by the size of the first axis, which is the divergence.
        log_target: whether the targets are the logarithms of probabilities.
    """

    log_target: bool = False

    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "batchmean")

    @property
    def takes(self) -> str:
        return "log-probabilities"

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        target = targets[0]
        if self.log_target:
            elements = target.exp() * (target - output)
        else:
            # That of 0 counts as 0.
            elements = target * (_log(target) - output)
        if self.reduction != "batchmean":
            return self._reduced(elements)
        return elements.sum(None, keepdims=False) / output.size(0).squeeze(0).cast(output.dtype)


@dataclasses.dataclass(frozen=True)
class PoissonNLLLoss(Loss):
    """exp(x) - y x of the logarithm x of an expected count, and counts y: torch.nn.PoissonNLLLoss without `full`.

    Attributes:
        log_input: False: the output is the expected count itself, of which it is x - y log(x + eps).
        eps: what keeps its logarithm finite.
    """

    log_input: bool = True
    eps: float = 1e-8

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        if self.log_input:
            return self._reduced(output.exp() - targets[0] * output)
        return self._reduced(output - targets[0] * (output + self.eps).op("Log"))


@dataclasses.dataclass(frozen=True)
class BCEWithLogitsLoss(Loss):
    """Binary cross entropy of logits and probabilities of their shape: torch.nn.BCEWithLogitsLoss.

    Attributes:
        pos_weight: weights of positive targets, of a shape that broadcasts to the output's; None: 1.
    """

    pos_weight: npt.ArrayLike | None = None

    @property
    def takes(self) -> str:
        return "logits"

    def sizes(self, rank: int) -> Mapping[int, int]:
        shape = () if self.pos_weight is None else _numbers_shape(self, "pos_weight")
        if len(shape) > rank:
            raise ArgumentError(
                f"BCEWithLogitsLoss: pos_weight has shape {list(shape)}; expected at most {rank} dimensions"
            )
        return {axis: size for axis, size in enumerate(shape, rank - len(shape)) if size != 1}

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        target = targets[0]
        # -log sigmoid(x) = softplus(-x), and -log (1 - sigmoid(x)) = softplus(-x) + x.
        negative_log = (-output).softplus()
        if self.pos_weight is None:
            return self._reduced((1 - target) * output + negative_log)
        weight = target * (output.tape.constant(self.pos_weight, output.dtype) - 1) + 1
        return self._reduced((1 - target) * output + negative_log * weight)


@dataclasses.dataclass(frozen=True)
class BCELoss(Loss):
    """Binary cross entropy of probabilities, as of a model that ends in a sigmoid: torch.nn.BCELoss."""

    @property
    def takes(self) -> str:
        return "probabilities"

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        logits = _before(output, "Sigmoid")
        if logits is not None:
            return BCEWithLogitsLoss(self.reduction).forward(logits, targets, rank)
        target = targets[0]
        return self._reduced(-(target * _log(output) + (1 - target) * _log(1 - output)))


@dataclasses.dataclass(frozen=True)
class CTCLoss(Loss):
    """Connectionist temporal classification of log-probabilities (T, N, C): torch.nn.CTCLoss.

    The targets are `target`, int64 (N, S), padded, and `input_lengths` and `target_lengths`, int64 (N).

    Attributes:
        blank: the class of the blank label.
        zero_infinity: whether items without any alignment count as 0, with a gradient of 0.
    """

    blank: int = 0
    zero_infinity: bool = False

    least_rank: ClassVar[int] = 3

    @property
    def takes(self) -> str:
        return "log-probabilities"

    @property
    def targets(self) -> tuple[Target, ...]:
        def lengths(shape: Sequence[int | str | None]) -> Sequence[int | str | None]:
            return [shape[1]]

        return (
            Target("target", ir.DataType.INT64, lambda shape: [shape[1], "target_length"]),
            Target("input_lengths", ir.DataType.INT64, lengths),
            Target("target_lengths", ir.DataType.INT64, lengths),
        )

    def forward(self, output: Tensor, targets: Sequence[Tensor], rank: int) -> Tensor:
        losses, _ = output.tape.parts(
            "CtcLoss",
            2,
            output,
            *targets,
            domain="aclnn",
            blank=self.blank,
            zero_infinity=int(self.zero_infinity),
        )
        if self.zero_infinity:
            losses = losses.op("IsInf").where(output.tape.constant(0.0, losses.dtype), losses)
        if self.reduction != _MEAN:
            return self._reduced(losses)
        lengths = targets[2].op("Max", output.tape.constant(1)).cast(losses.dtype)
        return self._reduced(losses / lengths)


def _before(output: Tensor, op_type: str, *, axis: int | None = None, rank: int = 0) -> Tensor | None:
    """Return what an operator that a model ends in takes; None where the model ends otherwise."""
    node = output.value.producer()
    while node is not None and node.op_type == "Identity" and not node.domain and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != op_type or node.domain or node.inputs[0] is None:
        return None
    found = node.attributes.get("axis")
    if axis is not None and (-1 if found is None else found.as_int()) % rank != axis:
        return None
    return output.tape.of(node.inputs[0])


def _log(output: Tensor) -> Tensor:
    """Return the logarithm of probabilities; that of 0 counts as -100, as in torch.nn.BCELoss, and has no gradient."""
    tiny = float(np.finfo(output.dtype.numpy()).tiny) if output.dtype != ir.DataType.BFLOAT16 else 1e-38
    zero = output.tape.constant(0.0, output.dtype)
    return output.op("Greater", zero).where(output.op("Max", tiny).op("Log"), -100.0)


_NAMED: Mapping[str, Callable[[], Loss]] = {
    "cross_entropy": CrossEntropyLoss,
    "mse": MSELoss,
    "l1": L1Loss,
    "huber": HuberLoss,
    "bce_with_logits": BCEWithLogitsLoss,
    "bce": BCELoss,
    "binary_crossentropy": BCELoss,
    "sparse_categorical_crossentropy": functools.partial(CrossEntropyLoss, from_logits=False),
    "nll": NLLLoss,
    "ctc": CTCLoss,
    "categorical_crossentropy": functools.partial(CrossEntropyLoss, from_logits=False, soft_targets=True),
    "kl_div": functools.partial(KLDivLoss, "batchmean"),
    "poisson_nll": PoissonNLLLoss,
    "smooth_l1": SmoothL1Loss,
    "soft_margin": SoftMarginLoss,
}


def named(name: str) -> Loss:
    """Return the loss of a name with its defaults, such as "cross_entropy" or "mse".

    Raises:
        ArgumentError: there is none.
    """
    if name not in _NAMED:
        raise ArgumentError(f"loss is {name!r}; expected one of {', '.join(_NAMED)}")
    return _NAMED[name]()
