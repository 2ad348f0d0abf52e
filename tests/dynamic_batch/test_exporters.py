"""Modules that both exporters of torch.onnx write for a fixed batch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from rows import assert_rows_agree
from torch import nn

from gradfuse import make_batch_dynamic

pytestmark = [pytest.mark.usefixtures("inference_in_process"), pytest.mark.long]


class _Convolutions(nn.Module):
    """As ResNet: flattened by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.norm, self.pool, self.head = nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d((2, 2)), nn.Linear(32, 5)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.pool(x + self.second(x)).view(x.shape[0], -1))


class _Squeezed(_Convolutions):
    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.flatten(self.pool(x), 1)).squeeze()


class _Patches(nn.Module):
    """As ViT: a token, positions, and attention over heads; as many heads as rows in a batch of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv, self.out = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.positions, self.token = nn.Parameter(torch.randn(1, 6, 12)), nn.Parameter(torch.randn(1, 1, 12))

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions[:, :5]
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(rows, length, 3, 4, 3).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))
        return x[:, 0], x


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 5, 2, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x)[0][:, -1])


class _Encoder(nn.Module):
    """torch's own layers, whose attention joins rows and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x)[0] + self.layer(x)


class _Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, 1, 1)

    def forward(self, x: Any) -> Any:
        y = nn.functional.interpolate(self.first(x), size=(9, 7), mode="bilinear")
        y = nn.functional.interpolate(y, scale_factor=2)
        return torch.cat([y, torch.zeros(x.shape[0], 1, *y.shape[2:])], 1)


class _Words(nn.Module):
    """As BERT: words, positions, a mask of the words, and the first one pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.q, self.k, self.v, self.pool = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("ids", torch.arange(16)[None])

    def forward(self, words: Any, mask: Any) -> Any:
        rows, length = words.shape
        ids: Any = self.ids
        x = self.words(words) + self.positions(ids[:, :length].expand(rows, length))

        def heads(y: Any) -> Any:
            return y.view(rows, length, 2, 4).transpose(1, 2)

        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -1e4
        scores = heads(self.q(x)) @ heads(self.k(x)).transpose(-1, -2) / 2 + bias
        y = (scores.softmax(-1) @ heads(self.v(x))).transpose(1, 2).contiguous().view(rows, length, 8)
        return torch.tanh(self.pool(y[:, 0]))


class _Shuffled(nn.Module):
    def forward(self, x: Any) -> Any:
        rows, channels, height, width = x.shape
        return x.view(rows, 2, channels // 2, height, width).transpose(1, 2).reshape(rows, channels, height, width)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "convolutions": (_Convolutions, lambda n: (torch.randn(n, 3, 8, 8),)),
    "squeezed": (_Squeezed, lambda n: (torch.randn(n, 3, 8, 8),)),
    "patches": (_Patches, lambda n: (torch.randn(n, 3, 8, 8),)),
    "LSTM": (lambda: _Recurrent(nn.LSTM), lambda n: (torch.randn(n, 7, 6),)),
    "GRU": (lambda: _Recurrent(nn.GRU), lambda n: (torch.randn(n, 7, 6),)),
    "encoder": (_Encoder, lambda n: (torch.randn(n, 7, 8),)),
    "upsampled": (_Upsampled, lambda n: (torch.randn(n, 3, 5, 5),)),
    "words": (_Words, lambda n: (torch.randint(0, 11, (n, 6)), torch.ones(n, 6, dtype=torch.int64))),
    "shuffled": (_Shuffled, lambda n: (torch.randn(n, 4, 5, 5),)),
}


def _exported(name: str, batch: int, dynamo: bool) -> onnx.ModelProto:
    torch.manual_seed(0)
    module, inputs = MODULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(module().eval(), inputs(batch), dynamo=True, verbose=False)
            assert program is not None
            return program.model_proto
        file: Any = io.BytesIO()
        torch.onnx.export(module().eval(), inputs(batch), file, dynamo=False)
        return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", MODULES)
def test_rows_of_an_exported_module(name: str, batch: int, dynamo: bool) -> None:
    fixed = _exported(name, batch, dynamo)
    free = make_batch_dynamic(fixed)
    onnx.checker.check_model(free, full_check=True)
    compared = assert_rows_agree(fixed, free, roundings=512)
    assert compared == {value.name for value in fixed.graph.output}
