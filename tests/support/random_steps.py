"""Random training steps of ordinary size whose functions have kinks: each seed is a network, a loss, a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor], torch.optim.Optimizer | None]


class _Function(nn.Module):
    """An elementwise function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _top_half(x: Tensor) -> Tensor:
    """Keep the larger half of the features of each item, or of each place."""
    values, places = x.topk(x.shape[1] // 2, dim=1)
    return torch.zeros_like(x).scatter(1, places, values)


KINKS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "hardtanh": lambda: nn.Hardtanh(-0.7, 0.9),
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "abs": lambda: _Function(torch.abs),
    "clamp": lambda: _Function(lambda x: x.clamp(-0.5, 0.8)),
    "minimum": lambda: _Function(lambda x: torch.minimum(x, x * 0.25 + 0.3)),
    "topk": lambda: _Function(_top_half),
    "sort": lambda: _Function(lambda x: x.sort(1).values),
}


def _mlp(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width = draw.choice([32, 64, 128, 200])
    layers: list[nn.Module] = []
    size = 24
    for _ in range(draw.randint(2, 5)):
        layers.append(nn.Linear(size, width))
        if draw.random() < 0.5:
            layers.append(draw.choice([nn.BatchNorm1d, nn.LayerNorm])(width))
        layers.append(KINKS[draw.choice(list(KINKS))]())
        if draw.random() < 0.4:
            layers.append(nn.Dropout(draw.choice([0.1, 0.3, 0.5])))
        size = width
    return nn.Sequential(*layers, nn.Linear(size, 10)), (24,)


def _cnn(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    kinks = [name for name in KINKS if name != "sort"]
    layers: list[nn.Module] = []
    channels = 3
    for depth in range(draw.randint(1, 3)):
        width = draw.choice([8, 12, 16])
        layers.append(nn.Conv2d(channels, width, 3, padding=1, stride=draw.choice([1, 1, 2]), bias=draw.random() < 0.7))
        if draw.random() < 0.6:
            layers.append(nn.BatchNorm2d(width))
        layers.append(KINKS[draw.choice(kinks)]())
        if depth < 2:
            layers.append(draw.choice([nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Identity()]))
        if draw.random() < 0.3:
            layers.append(draw.choice([nn.Dropout(0.2), nn.Dropout2d(0.2)]))
        channels = width
    pool = draw.choice([nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(2)])
    features = channels * (4 if isinstance(pool, nn.AdaptiveMaxPool2d) else 1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(features, 10)), (3, 24, 24)


def random_step(seed: int) -> Step:
    """Return a module in training mode, its loss, a batch of 8 to 64 items, and perhaps an optimizer."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module, item = (_mlp if draw.random() < 0.5 else _cnn)(draw)
    count = draw.choice([8, 16, 32, 64])
    inputs = torch.randn(count, *item)
    losses: list[tuple[Callable[..., Tensor], Tensor]] = [
        (F.cross_entropy, torch.randint(0, 10, (count,))),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.randint(0, 10, (count,))),
        (F.mse_loss, torch.randn(count, 10)),
        (F.l1_loss, torch.randn(count, 10)),
        (F.smooth_l1_loss, torch.randn(count, 10)),
    ]
    loss, targets = draw.choice(losses)
    makers: list[Callable[[Any], torch.optim.Optimizer] | None] = [
        None,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    ]
    make = draw.choice(makers)
    return module, loss, (inputs, targets), None if make is None else make(module.parameters())
