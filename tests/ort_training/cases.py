"""Small models that onnxruntime-training trains, and what PyTorch's gradients make of them in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 4
"""How many steps run before the checkpoint is saved, and how many after."""


def as_float32(number: float) -> float:
    """The nearest number of float32, which artifacts and steps have in the place of a float64."""
    return torch.tensor(number, dtype=torch.float32).item()


LEARNING_RATE = as_float32(0.01)

NUDGES = 3
"""So many runs tell what one rounding of the first parameters does to the last ones."""


class Convolution(nn.Module):
    """Everything that a small classifier of images has, with strides that leave a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, (3, 2), stride=2, dilation=(1, 2), padding=(1, 0), groups=2)
        self.last = nn.Linear(4 * 3 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2, 1)
        x = F.leaky_relu(self.second(x), 0.2)
        return F.linear(x.flatten(1), self.last.weight, self.last.bias)


class Attention(nn.Module):
    """A block of a small language model; the rows of its output are the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.position = nn.Parameter(torch.randn(5, 8) / 4)
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        y = self.norm(x)
        query, key, value = (
            part(y).view(*y.shape[:2], 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * 0.5
        hidden = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        prob = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + (prob @ value).transpose(1, 2).reshape(x.shape)
        x = x + self.narrow(F.gelu(self.wide(x)))
        return F.linear(x, self.head.weight, self.head.bias).flatten(0, 1)


class Operators(nn.Module):
    """Operators whose gradients onnxruntime-training writes in operators of its own, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.cat([self.first(x).tanh(), self.second(x).sigmoid()], 1))
        y = self.scale * (y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-6))
        left, right = (y * torch.sigmoid(1.702 * y)).split([2, 4], 1)
        ratio = left[:, :1] / (1.5 + right.pow(2))
        factor = right.clamp(-0.5, 0.5) / (3 + left[:, 1:])
        return torch.add(F.log_softmax(ratio, 1), left.sum(1, keepdim=True) * factor)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a loss and an optimizer.

    Attributes:
        module: makes the model, seeded.
        batch: makes the input of a step, and the target in the form of the loss, from a generator.
        loss: name of an `artifacts.LossType`.
        optimizer: "AdamW" or "SGD".
        options: of the optimizer's onnxblock.
        adam_mode: 1 is what onnxblock writes, 0 is PyTorch's AdamW.
        max_norm: the gradients are clipped to this norm; None: they are not.
        frozen: parameters without gradient.
        opset: of the exported forward pass.
        rows: the name of the output's first axis.
        additional_outputs: whether the artifacts' models have the module's output besides the loss.
        random: whether the forward pass draws numbers, so that no run can be compared with another.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: str
    optimizer: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adam_mode: int = 1
    max_norm: float | None = None
    frozen: tuple[str, ...] = ()
    opset: int = 17
    rows: str = "batch"
    additional_outputs: bool = False
    random: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.module()

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The batches of all steps; their sizes differ."""
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(2 * STEPS)]


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(int(torch.randint(3, 6, (), generator=generator)), *shape, generator=generator)


def _classes(make: Callable[[torch.Generator], Tensor], count: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = make(generator)
        return x, torch.randint(0, count, x.shape[:1], generator=generator)

    return batch


def _values(width: int, like: Callable[[torch.Generator, int, int], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = _normal(6)(generator)
        return x, like(generator, len(x), width)

    return batch


def _noise(generator: torch.Generator, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=generator)


def _bits(generator: torch.Generator, rows: int, width: int) -> Tensor:
    return torch.randint(0, 2, (rows, width), generator=generator).float()


def _tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 7, (3, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


CASES = {
    "classifier": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
        _classes(_normal(6), 4),
        "CrossEntropyLoss",
        "AdamW",
        {"weight_decay": 0.1, "betas": (0.8, 0.99)},
        max_norm=0.5,
        frozen=("0.bias",),
        additional_outputs=True,
    ),
    "regressor": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        _values(3, _noise),
        "MSELoss",
        "AdamW",
        {"weight_decay": 0.1},
        adam_mode=0,
        opset=16,
    ),
    "binary": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
        _values(2, _bits),
        "BCEWithLogitsLoss",
        "SGD",
        max_norm=0.1,
    ),
    "convolution": Case(Convolution, _classes(_normal(2, 6, 7), 3), "CrossEntropyLoss", "SGD"),
    "attention": Case(
        Attention, _tokens, "CrossEntropyLoss", "AdamW", {"bias_correction": False}, opset=14, rows="tokens"
    ),
    "attention by SGD": Case(Attention, _tokens, "CrossEntropyLoss", "SGD", opset=14, rows="tokens"),
    "operators": Case(Operators, _values(4, _noise), "L1Loss", "SGD", opset=15),
    "dropout": Case(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.4)), _values(4, _noise), "MSELoss", "SGD", random=True
    ),
}
COMPARED = [name for name, case in CASES.items() if not case.random]

_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "CrossEntropyLoss": F.cross_entropy,
    "MSELoss": F.mse_loss,
    "BCEWithLogitsLoss": F.binary_cross_entropy_with_logits,
    "L1Loss": F.l1_loss,
}


def train_in_torch(
    case: Case, dtype: torch.dtype, nudge: np.random.Generator | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with PyTorch's gradients; return the losses, and the trainable parameters after all steps.

    With `nudge`, each trainable parameter starts one rounding higher or lower.
    """
    module = case.make().to(dtype)
    parameters = {name: value for name, value in module.named_parameters() if name not in case.frozen}
    if nudge is not None:
        for value in parameters.values():
            value.data = torch.from_numpy(nudged(value.detach().numpy(), nudge))
    state = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in parameters.items()}
    losses = []
    for count, (x, target) in enumerate(case.batches(), start=1):
        x, target = (t.to(dtype) if t.is_floating_point() else t for t in (x, target))
        loss = _LOSSES[case.loss](module(x), target)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        if case.max_norm is not None:
            norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
            gradients = tuple(g * min(case.max_norm / (norm.item() + 1e-6), 1.0) for g in gradients)
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                if case.optimizer == "SGD":
                    parameter.sub_(LEARNING_RATE * gradient)
                else:
                    _adamw(parameter, gradient, *state[name], count, case.adam_mode, **case.options)
    return losses, {name: value.detach() for name, value in parameters.items()}


def nudged(value: npt.NDArray[Any], generator: np.random.Generator) -> npt.NDArray[Any]:
    """The next number above or below each."""
    directions = generator.choice([-np.inf, np.inf], value.shape).astype(value.dtype)
    return np.asarray(np.nextafter(value, directions))


def _adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: int,
    mode: int,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> None:
    """AdamW as PyTorch has it, or as transformers had: the correction leaves epsilon out, and the decay comes last.

    The betas and the decay are those of float32, as the artifacts have them: 1 - 0.999 is off by 0.005 % there.
    """
    betas = as_float32(betas[0]), as_float32(betas[1])
    weight_decay = as_float32(weight_decay)
    mean.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    corrections = [1 - beta**count if bias_correction else 1.0 for beta in betas]
    decay = 1 - LEARNING_RATE * weight_decay
    if mode == 0:
        parameter.mul_(decay)
        parameter.sub_(LEARNING_RATE * mean / corrections[0] / ((square / corrections[1]).sqrt() + 1e-6))
    else:
        rate = LEARNING_RATE * corrections[1] ** 0.5 / corrections[0]
        parameter.sub_(rate * mean / (square.sqrt() + 1e-6))
        parameter.mul_(decay)
