"""Recurrent layers whose steps are one operator are PyTorch's layers, forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from training_models import autograd, run

from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.export import recurrences
from gradfuse.testing import assert_gradients_close

SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "batch first, both ways": {"batch_first": True, "bidirectional": True},
    "two layers without biases": {"num_layers": 2, "bias": False},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
}


def _results(layer: nn.GRU | nn.LSTM, x: Tensor, first: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Outputs, last states and the gradients of a function of all of them; without first states these are zeros."""
    states, last = layer(x, (first if len(first) > 1 else first[0]) if first else None)
    outputs = (states, *(last if isinstance(last, tuple) else (last,)))
    loss = sum((one * torch.arange(one.numel()).to(one).cos().view(one.shape)).sum() for one in outputs)
    return (*outputs, *torch.autograd.grad(loss, (x, *first, *layer.parameters())))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.sampled(every=3)
def test_layers_by_steps(kind: type[nn.GRU] | type[nn.LSTM], name: str, given: bool) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, dtype=torch.float64, **SETTINGS[name])
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    shape = (count, 5 if layer.batch_first else 2, 4)
    states = (1 if kind is nn.GRU else 2) if given else 0
    first = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(states))
    expected = _results(layer, x, first)
    with recurrences.scanned():
        actual = _results(layer, x, first)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        # Some hundred roundings behind each other.
        assert ((one - other).abs() <= 1e3 * torch.finfo(torch.float64).eps * other.abs().max()).all()


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(nn.GRU, marks=pytest.mark.slow), nn.LSTM])
def test_a_first_state_that_is_learned_trains_at_any_length(kind: type[nn.GRU] | type[nn.LSTM]) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4)
            self.first, self.cell = (nn.Parameter(torch.randn(1, 1, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            first, cell = (one.expand(-1, x.shape[1], -1).contiguous() for one in (self.first, self.cell))
            states, last = self.layer(x, first if kind is nn.GRU else (first, cell))
            return states.sum(0) * last[-1].reshape(-1, 4)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, dynamic = Learned(), ({0: "length", 1: "batch"}, {0: "batch"})
    step = export_training_step(module, F.mse_loss, (torch.randn(5, 2, 3), torch.randn(2, 4)), dynamic_shapes=dynamic)
    batch = (torch.randn(1, 3, 3),), (torch.randn(3, 4),)
    results = run(step, batch, kernels=False)
    native, exact = (autograd(module, F.mse_loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, wanted in exact.items():
        assert_gradients_close(results[name], native[name], wanted, np.float32)


def test_what_is_no_plain_layer_stays_as_it_is() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    layer, projecting = nn.GRU(3, 4), nn.LSTM(3, 4, proj_size=2)
    sequence = pack_padded_sequence(x, torch.tensor([5, 3]))
    expected = layer(sequence)[0].data, projecting(x)[0]
    with recurrences.scanned():
        assert torch.equal(layer(sequence)[0].data, expected[0])
        assert torch.equal(projecting(x)[0], expected[1])


class Mixed(nn.Module):
    """An LSTM that reads both ways, and a GRU without biases that goes on from its last states."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.LSTM(3, 4, bidirectional=True)
        self.one = nn.GRU(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states, (last, cells) = self.both(x)
        result, _ = self.one(states, last[:1] * cells[1:])
        return result  # type: ignore[no-any-return]


OPERATORS = {
    "GruRecurrence": 1,
    "GruRecurrenceBackward": 1,
    "LstmRecurrence": 2,
    "LstmRecurrenceBackward": 2,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, fuse",
    [(torch.float32, True), (torch.float32, False), (torch.float64, True), (torch.bfloat16, True)],
    ids=["fused", "plain", "float64", "bfloat16"],
)
def test_steps_have_an_operator_for_each_layer_and_direction(dtype: torch.dtype, fuse: bool) -> None:
    """The step is judged by the export itself, by its function bodies too, which differ from layer to layer."""
    torch.manual_seed(0)
    module = Mixed().to(dtype)
    batch = torch.randn(5, 2, 3, dtype=dtype), torch.randn(5, 2, 4, dtype=dtype)
    dynamic = ({0: "length", 1: "batch"},) * 2
    loss = functools.partial(F.mse_loss, reduction="sum")
    step = export_training_step(module, loss, batch, dynamic_shapes=dynamic, fuse=fuse)
    names = [node.op_type for node in step.model.graph.node]
    found = {name: names.count(name) for name in OPERATORS if name in names}
    fused = fuse and dtype != torch.float64
    assert found == (OPERATORS if fused else {})
    assert names.count("Scan") == (0 if fused else 6)
    assert fuse or not step.model.functions


class Layers(nn.Module):
    """Recurrent layers as public code has them, which ask for their weights in one piece of memory."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        self.layers.flatten_parameters()
        return self.layers(x)[0]  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "tanh": lambda: nn.RNN(3, 4, 2, dropout=0.5),
    "relu, both ways": lambda: nn.RNN(3, 4, 3, nonlinearity="relu", dropout=0.5, bidirectional=True, bias=False),
    "projected": lambda: nn.LSTM(3, 4, 2, dropout=0.5, proj_size=2, bidirectional=True),
    "lstm": lambda: nn.LSTM(3, 4, 2, dropout=0.5),
    "gru": lambda: nn.GRU(3, 4, 2, dropout=0.5),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in ("relu, both ways", "projected") else ()) for name in LAYERS],
)
@pytest.mark.sampled(every=3)
def test_dropout_between_layers(name: str) -> None:
    """That PyTorch drops the same is compared when the step is exported; it must differ from step to step."""
    torch.manual_seed(0)
    module, x = Layers(LAYERS[name]()), torch.randn(5, 2, 3)
    y = torch.randn_like(module(x))
    step = export_training_step(module, nn.MSELoss(), (x, y))
    session = TrainingSession(step)
    assert session.step(x, y) != session.step(x, y)
    module.layers.dropout = 0.0
    assert_like_torch(export_training_step(module, nn.MSELoss(), (x, y)), module, nn.MSELoss(), (x, y))


@pytest.mark.parametrize("fails", [True, False])
def test_the_weights_of_layers_are_left_as_they_were(fails: bool) -> None:
    module, x = Layers(nn.LSTM(3, 4, bidirectional=True)), torch.randn(5, 2, 3)

    def loss(y: Tensor) -> Tensor:
        return torch.special.airy_ai(y).sum() if fails else y.square().mean()

    with pytest.raises(ExportError) if fails else contextlib.nullcontext():
        export_training_step(module, loss, (x, None))
    weights = module.layers._flat_weights
    assert [id(weight) for weight in weights] == [id(parameter) for parameter in module.layers.parameters()]
    module(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_under_autocast_have_operands_of_one_type(kind: Callable[[int, int], nn.Module]) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cell = nn.Linear(3, 4), kind(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result = self.cell(self.first(x))
            return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, x, y = Cell(), torch.randn(5, 3), torch.randn(5, 4)
    step = export_training_step(module, nn.MSELoss(), (x, y), autocast=torch.float16, fuse=False)
    with torch.autocast("cpu", torch.float16):
        wanted = nn.MSELoss()(module(x), y)
    wanted.backward()
    session = TrainingSession(step)
    found = session.step(x.numpy(), y.numpy())
    assert found == pytest.approx(wanted.item(), abs=4 * torch.finfo(torch.float16).eps)
    assert session.gradients.keys() == {name for name, _ in module.named_parameters()}
