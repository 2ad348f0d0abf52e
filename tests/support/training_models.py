"""Small models of the kinds that are trained, each with its loss, its batches and its dynamic axes.

Sizes are the smallest at which every part of a model still does something.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import TrainingStep, library
from gradfuse.export.dropout import SeededDropout
from gradfuse.training.step import DROPOUT_SEED

Tensors = tuple[Tensor, ...]
Batch = tuple[Tensors, Tensors]
Arrays = dict[str, npt.NDArray[Any]]

VOCABULARY = 11
CLASSES = 5
PADDING = 0


class Residual(nn.Module):
    """A basic block: two convolutions, batch normalisation, and a projected shortcut where the size changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 6, 2))
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.average(self.blocks(self.pool(self.stem(image)))).flatten(1))  # type: ignore[no-any-return]


class ConvNext(nn.Module):
    """Depthwise convolution, layer normalisation, GELU, a grouped normalisation and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.groups = nn.GroupNorm(2, 8)
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + self.narrow(F.gelu(self.wide(inner))).permute(0, 3, 1, 2)
        return self.head(self.pool(F.silu(self.groups(x))).mean((2, 3)))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions and PyTorch's own encoder layer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.block = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(image.shape[0], -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.block(tokens))[:, 0])  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A block with causal and padding mask, the output projection tied to the embedding."""

    def __init__(self, explicit: bool) -> None:
        super().__init__()
        self.explicit = explicit
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=PADDING)
        self.positions = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.second_norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
        self.last_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.positions(torch.arange(length, device=ids.device))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        masked = future | (ids == PADDING)[:, None, None, :]
        if self.explicit:
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            mixed = scores.masked_fill(masked, torch.finfo(scores.dtype).min).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~masked)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.feed(self.second_norm(x))
        return self.head(self.last_norm(x))  # type: ignore[no-any-return]


class T5(nn.Module):
    """Attention with a bias by bucketed distance, root mean square normalisation and a gated GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.RMSNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.bias = nn.Embedding(8, 2)
        self.feed_norm = nn.RMSNorm(8)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = [layer(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        place = torch.arange(ids.shape[1], device=ids.device)
        distance = place[None, :] - place[:, None]
        near = distance.abs()
        far = 2 + (torch.log(near.clamp(min=1).float() / 2) / math.log(4) * 2).long().clamp(min=0, max=1)
        bucket = 4 * (distance > 0).long() + torch.where(near < 2, near, far)
        bias = self.bias(bucket).permute(2, 0, 1)[None]
        bias = bias + (1.0 - attention_mask[:, None, None, :]) * torch.finfo(bias.dtype).min
        scores = heads[0] @ heads[1].transpose(-1, -2) + bias
        mixed = F.softmax(scores.float(), -1).type_as(scores) @ heads[2]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = self.feed_norm(x)
        return self.head(x + self.down(F.gelu(self.gate(inner), approximate="tanh") * self.up(inner)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Log-probabilities (T, N, C) of a recurrent layer that reads both ways."""

    def __init__(self, layer: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.layer = layer(3, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        states, _ = self.layer(frames)
        return self.head(states).log_softmax(-1).transpose(0, 1)  # type: ignore[no-any-return]


class Convolutional(nn.Module):
    """Log-probabilities (T, N, C) of strided convolutions over time, as of a small wav2letter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.head = nn.Conv1d(8, CLASSES, 1)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(frames.transpose(1, 2))))
        return self.head(F.silu(self.second(x))).permute(2, 0, 1).log_softmax(-1)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A layer of experts, each token to its best one: tokens are sorted by expert, and each expert has a bias.

    `grouping` says how the bias is laid over the sorted rows.
    """

    def __init__(self, grouping: str) -> None:
        super().__init__()
        self.grouping = grouping
        self.embed = nn.Linear(6, 8)
        self.router = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 8) * 0.3)
        self.bias = nn.Parameter(torch.randn(4, 8) * 0.3)
        self.head = nn.Linear(8, CLASSES)

    def rows(self, expert: Tensor) -> Tensor:
        """The bias of each row, whose experts are given in order."""
        count = expert.shape[0]
        if self.grouping == "sorted index":
            return self.bias[expert]
        if self.grouping == "index_select":
            return self.bias.index_select(0, expert)
        sizes = F.one_hot(expert, 4).sum(0)
        if self.grouping == "repeat_interleave":
            return torch.repeat_interleave(self.bias, sizes, dim=0, output_size=count)
        ends = sizes.cumsum(0)
        place = torch.arange(count, device=expert.device)
        if self.grouping == "bucketize":
            return self.bias[torch.bucketize(place, ends, right=True)]
        if self.grouping == "searchsorted":
            return self.bias[torch.searchsorted(ends, place, right=True)]
        return self.bias[(place[:, None] >= ends).sum(1)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.embed(tokens))
        chance, expert = self.router(x).softmax(-1).max(-1)
        expert, order = expert.sort(stable=True)
        grouped = x[order]
        mixed = torch.bmm(grouped[:, None], self.weight[expert])[:, 0] + self.rows(expert)
        back = torch.zeros_like(x).index_add(0, order, mixed)
        return self.head(x + chance[:, None] * back)  # type: ignore[no-any-return]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=PADDING)


def ctc_loss(log_probs: Tensor, labels: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels, input_lengths, target_lengths, zero_infinity=True)


def images(count: int, length: int) -> Batch:
    return (torch.randn(count, 3, 17, 17),), (torch.randint(0, CLASSES, (count,)),)


def patches(count: int, length: int) -> Batch:
    return (torch.randn(count, 3, 8, 8),), (torch.randint(0, CLASSES, (count,)),)


def texts(count: int, length: int) -> Batch:
    ids = torch.randint(1, VOCABULARY, (count, length))
    ids[0, -2:] = PADDING
    return (ids,), (ids,)


def masked_texts(count: int, length: int) -> Batch:
    (ids,), targets = texts(count, length)
    return (ids, (ids != PADDING).float()), targets


def speech(stride: int) -> Callable[[int, int], Batch]:
    def batch(count: int, length: int) -> Batch:
        labels = torch.randint(1, CLASSES, (count, 3))
        steps = torch.full((count,), (length - 1) // stride + 1)
        steps[-1] -= 1
        return (torch.randn(count, length, 3),), (labels, steps, torch.tensor([3, 1, 2, 3, 2, 1])[:count])

    return batch


def tokens(count: int, length: int) -> Batch:
    return (torch.randn(count * length, 6),), (torch.randint(0, CLASSES, (count * length,)),)


@dataclasses.dataclass(frozen=True)
class Model:
    """A training step to export.

    Attributes:
        module: builds the module.
        loss: as `export_training_step` takes it.
        batch: makes a batch from a number of items and a length.
        dynamic: the names of the dynamic axes, by the tensors of the batch, inputs before targets.
        fused: the fused operators that the step is to have.
    """

    module: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int, int], Batch]
    dynamic: tuple[dict[int, str], ...]
    fused: tuple[str, ...] = ("CrossEntropyLossGrad",)

    @property
    def dynamic_shapes(self) -> Any:
        """The axes as `export_training_step` takes them."""
        inputs = len(self.batch(2, 4)[0])
        return self.dynamic[:inputs], self.dynamic[inputs:]


ITEMS = ({0: "batch"}, {0: "batch"})
TEXT = {0: "batch", 1: "length"}
CTC = ({0: "batch", 1: "labels"}, {0: "batch"}, {0: "batch"})
SPEECH = ({0: "batch", 1: "length"}, *CTC)
CTC_OPERATORS = ("CtcLoss", "CtcLossBackward")
GRU_OPERATORS = (*CTC_OPERATORS, "GruRecurrence", "GruRecurrenceBackward")
LSTM_OPERATORS = (*CTC_OPERATORS, "LstmRecurrence", "LstmRecurrenceBackward")
GROUPED = ("CrossEntropyLossGrad", "GroupedBiasAddGrad")
NORMALIZED = ("CrossEntropyLossGrad", "BatchNorm", "BatchNormBackward")
SOFTMAX = ("CrossEntropyLossGrad", "ScaledMaskedSoftmaxBackward")


def _experts(grouping: str, fused: tuple[str, ...] = ("CrossEntropyLossGrad",)) -> Model:
    return Model(lambda: Experts(grouping), F.cross_entropy, tokens, ITEMS, fused)


MODELS = {
    "ResNet": Model(ResNet, nn.CrossEntropyLoss(label_smoothing=0.1), images, ITEMS, NORMALIZED),
    "ConvNeXt": Model(ConvNext, F.cross_entropy, images, ITEMS),
    "ViT": Model(VisionTransformer, F.cross_entropy, patches, ITEMS),
    "GPT": Model(lambda: Gpt(True), next_token_loss, texts, (TEXT, TEXT), SOFTMAX),
    "GPT, scaled_dot_product_attention": Model(lambda: Gpt(False), next_token_loss, texts, (TEXT, TEXT)),
    "T5": Model(T5, next_token_loss, masked_texts, (TEXT, TEXT, TEXT)),
    "GRU with CTC": Model(lambda: Recurrent(nn.GRU), ctc_loss, speech(1), SPEECH, GRU_OPERATORS),
    "LSTM with CTC": Model(lambda: Recurrent(nn.LSTM), ctc_loss, speech(1), SPEECH, LSTM_OPERATORS),
    "convolutions with CTC": Model(Convolutional, ctc_loss, speech(2), SPEECH, CTC_OPERATORS),
    "experts, ends compared": _experts("compared ends", GROUPED),
    "experts, bucketize": _experts("bucketize", GROUPED),
    "experts, searchsorted": _experts("searchsorted", GROUPED),
    "experts, repeat_interleave": _experts("repeat_interleave", GROUPED),
    # To count the ends does not pay at this size.
    "experts, sorted index": _experts("sorted index"),
    "experts, index_select": _experts("index_select"),
}


def run(step: TrainingStep, batch: Batch, *, kernels: bool) -> Arrays:
    """Run a step in onnxruntime at its own parameters, with the library or without."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if kernels:
        library.register(options)
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    tensors = dict(zip(step.input_names + step.target_names, batch[0] + batch[1], strict=True))
    feeds = step.parameters | step.buffers | {name: tensor.numpy() for name, tensor in tensors.items()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def autograd(
    module: nn.Module, loss: Callable[..., Tensor], batch: Batch, dtype: torch.dtype, step: TrainingStep
) -> Arrays:
    """What PyTorch gives in a type, by the names of a step's outputs, with the step's seed for dropout."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module = copy.deepcopy(module).to(dtype)
    inputs, targets = (tuple(map(cast, part)) for part in batch)
    seed = step.buffers.get(DROPOUT_SEED)
    with SeededDropout(None if seed is None else torch.from_numpy(seed)):
        value = loss(module(*inputs), *targets)
    value.backward()  # type: ignore[no-untyped-call]
    results = {"loss": value.detach()}
    results |= {f"{name}.grad": one.grad for name, one in module.named_parameters() if one.grad is not None}
    results |= {f"{name}.updated": buffer for name, buffer in module.named_buffers()}
    if seed is not None:
        results[f"{DROPOUT_SEED}.updated"] = torch.from_numpy(seed) + 1
    return {name: result.numpy(force=True) for name, result in results.items()}
