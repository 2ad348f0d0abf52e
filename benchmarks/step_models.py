"""The training steps that `step.py` measures, at the sizes that are trained."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]
Batches = Callable[[int], tuple[Tensors, Tensors]]
"""Number of examples -> inputs and targets."""


class DigitsCnn(nn.Module):
    """Two convolutions on 8 x 8 images, as in samples/digits.py."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(512, 10)

    def forward(self, image: Tensor) -> Tensor:
        features = F.relu(self.second(F.relu(self.first(image))))
        return self.head(F.max_pool2d(features, 2).flatten(1))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation beside a shortcut."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + self.shortcut(x))


def resnet20() -> nn.Module:
    """ResNet-20 for images of 32 x 32, as of He et al. 2015 but for shortcuts with a 1 x 1 convolution."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for channels, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [Residual(channels, outputs, stride), Residual(outputs, outputs, 1), Residual(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.second_norm(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """4 layers of width 256 and a vocabulary of 32,000."""

    vocabulary, width, length = 32000, 256, 128

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, self.width)
        self.positions = nn.Parameter(torch.randn(self.length, self.width) * 0.02)
        self.blocks = nn.ModuleList(Block(self.width, 4) for _ in range(4))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)
        self.register_buffer("future", torch.ones(self.length, self.length, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


class Speech(nn.Module):
    """Log-probabilities (T, N, C) of 400 frames: two convolutions, a GRU that reads both ways, 1,024 classes."""

    frames, classes = 400, 1024

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(80, 128, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(128, 128, 3, padding=1), nn.ReLU()
        )
        self.gru = nn.GRU(128, 128, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, self.classes)

    def forward(self, frames: Tensor) -> Tensor:
        states, _ = self.gru(self.convolutions(frames.transpose(1, 2)).transpose(1, 2))
        return self.head(states).log_softmax(-1).transpose(0, 1)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """8 experts, each token to its best one: tokens are sorted by expert, and each expert has a bias."""

    experts, width, inner = 8, 256, 512

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(self.width, self.experts)
        self.up = nn.Parameter(torch.randn(self.experts, self.width, self.inner) / 16)
        self.up_bias = nn.Parameter(torch.zeros(self.experts, self.inner))
        self.head = nn.Linear(self.inner, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        chance, expert = self.router(tokens).softmax(-1).max(-1)
        expert, order = expert.sort(stable=True)
        # All experts on all tokens, of which each keeps its own: exporters have no product of ragged groups.
        every = torch.matmul(tokens[order], self.up)
        own = every.gather(0, expert[None, :, None].expand(1, -1, self.inner))[0]
        mixed = F.gelu(own + self.up_bias[expert]) * chance[order, None]
        return self.head(torch.zeros_like(mixed).index_copy(0, order, mixed))  # type: ignore[no-any-return]


class Separable(nn.Module):
    """A depthwise 3 x 3 convolution and a 1 x 1 convolution, each with batch normalisation, as in MobileNet."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, outputs, 1, bias=False)
        self.pointwise_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.depthwise_norm(self.depthwise(x)))
        return F.relu6(self.pointwise_norm(self.pointwise(x)))


def mobilenet() -> nn.Module:
    """The first half of a MobileNet of Howard et al. 2017, for 10 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    sizes = ((32, 64, 1), (64, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1))
    layers += [Separable(*size) for size in sizes]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10))


def resnet18() -> nn.Module:
    """ResNet-18 for 10 classes, of He et al. 2015."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1), Residual(64, 64, 1), Residual(64, 64, 1)]
    for channels in (64, 128, 256):
        layers += [Residual(channels, 2 * channels, 2), Residual(2 * channels, 2 * channels, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))


def twice(channels: int, outputs: int) -> nn.Module:
    """Two 3 x 3 convolutions, each with batch normalisation and ReLU."""
    layers: list[nn.Module] = []
    for width in (channels, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of Ronneberger et al. 2015 with three levels of 16, 32 and 64 channels, from images to images."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.down2, self.bottom = twice(3, 16), twice(16, 32), twice(32, 64)
        self.up2, self.up = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.join2, self.join = twice(64, 32), twice(32, 16)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.down(image)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.join2(torch.cat([second, self.up2(self.bottom(F.max_pool2d(second, 2)))], 1))
        return self.head(self.join(torch.cat([first, self.up(x)], 1)))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """4 layers of width 192 on the 65 tokens of images of 64 x 64, in patches of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 192))
        self.positions = nn.Parameter(torch.randn(65, 192) * 0.02)
        layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.layers(x)[:, 0])  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Two recurrent layers of width 128 over 64 steps of 64 numbers, and a class for the last state."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = kind(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.layers(series)
        return self.head(states[:, -1])  # type: ignore[no-any-return]


def ctc_loss(log_probs: Tensor, labels: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels, input_lengths, target_lengths)


def digits(count: int) -> tuple[Tensors, Tensors]:
    return (torch.rand(count, 1, 8, 8),), (torch.randint(0, 10, (count,)),)


def text(count: int) -> tuple[Tensors, Tensors]:
    ids = torch.randint(0, Gpt.vocabulary, (count, Gpt.length))
    return (ids,), (ids.roll(-1, 1).flatten(),)


def speech(count: int) -> tuple[Tensors, Tensors]:
    labels = torch.randint(1, Speech.classes, (count, 30))
    lengths = torch.full((count,), Speech.frames // 2), torch.randint(20, 31, (count,))
    return (torch.randn(count, Speech.frames, 80),), (labels, *lengths)


def tokens(count: int) -> tuple[Tensors, Tensors]:
    return (torch.randn(count, Experts.width),), (torch.randint(0, 10, (count,)),)


def pictures(size: int) -> Batches:
    """Images of some size, and one of 10 classes each."""
    return lambda count: ((torch.randn(count, 3, size, size),), (torch.randint(0, 10, (count,)),))


def denoised(count: int) -> tuple[Tensors, Tensors]:
    return (torch.randn(count, 3, 64, 64),), (torch.randn(count, 3, 64, 64),)


def features(count: int) -> tuple[Tensors, Tensors]:
    return (torch.randn(count, 256),), (torch.randn(count, 1),)


def series(count: int) -> tuple[Tensors, Tensors]:
    return (torch.randn(count, 64, 64),), (torch.randint(0, 10, (count,)),)


@dataclasses.dataclass(frozen=True)
class Model:
    """A step to measure: how its module, loss and batches are made, and the sizes of batches."""

    title: str
    module: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Batches
    sizes: tuple[int, ...]


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
}
"""As users make them. PyTorch updates fastest with fused=True; exported steps do not depend on it."""

MODELS = {
    "digits": Model("CNN on 8 x 8 digits", DigitsCnn, F.cross_entropy, digits, (8, 64)),
    "mlp": Model("MLP 256-1024-1024-1 with MSE", mlp, F.mse_loss, features, (256,)),
    "resnet20": Model("ResNet-20 on 32 x 32 images", resnet20, F.cross_entropy, pictures(32), (32,)),
    "resnet18": Model("ResNet-18 on 112 x 112 images", resnet18, F.cross_entropy, pictures(112), (8,)),
    "mobilenet": Model("depthwise net on 96 x 96 images", mobilenet, F.cross_entropy, pictures(96), (16,)),
    "unet": Model("U-Net on 64 x 64 images with MSE", UNet, F.mse_loss, denoised, (8,)),
    "vit": Model("ViT, 4 layers of 192, 64 x 64 images", ViT, F.cross_entropy, pictures(64), (8,)),
    "lstm": Model(
        "2 LSTM layers of 128, 64 steps", functools.partial(Recurrent, nn.LSTM), F.cross_entropy, series, (16,)
    ),
    "gru": Model("2 GRU layers of 128, 64 steps", functools.partial(Recurrent, nn.GRU), F.cross_entropy, series, (16,)),
    "gpt": Model("GPT, 4 layers of 256, vocabulary 32,000, 128 tokens", Gpt, F.cross_entropy, text, (1, 4)),
    "ctc": Model("convolutions and GRU with CTC, 400 frames", Speech, ctc_loss, speech, (1, 16)),
    "moe": Model("8 experts with biases of groups", Experts, F.cross_entropy, tokens, (512,)),
}
