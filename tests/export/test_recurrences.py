"""Recurrent layers whose steps are one operator are PyTorch's layers, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from gradfuse import recurrences

SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "batch first, both ways": {"batch_first": True, "bidirectional": True},
    "two layers without biases": {"num_layers": 2, "bias": False},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
}


def _results(layer: nn.GRU | nn.LSTM, x: Tensor) -> tuple[Tensor, ...]:
    """Outputs, last states and the gradients of a function of all of them."""
    states, last = layer(x)
    outputs = (states, *(last if isinstance(last, tuple) else (last,)))
    loss = sum((one * torch.arange(one.numel()).to(one).cos().view(one.shape)).sum() for one in outputs)
    return (*outputs, *torch.autograd.grad(loss, (x, *layer.parameters())))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_layers_by_steps(kind: type[nn.GRU] | type[nn.LSTM], name: str) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, dtype=torch.float64, **SETTINGS[name])
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    expected = _results(layer, x)
    with recurrences.scanned():
        actual = _results(layer, x)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        # Some hundred roundings behind each other.
        assert ((one - other).abs() <= 1e3 * torch.finfo(torch.float64).eps * other.abs().max()).all()


def test_what_is_no_plain_layer_stays_as_it_is() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    layer, projecting = nn.GRU(3, 4), nn.LSTM(3, 4, proj_size=2)
    sequence = pack_padded_sequence(x, torch.tensor([5, 3]))
    expected = layer(sequence)[0].data, projecting(x)[0]
    with recurrences.scanned():
        assert torch.equal(layer(sequence)[0].data, expected[0])
        assert torch.equal(projecting(x)[0], expected[1])
