"""The evaluation model is that of the module in evaluation mode, also where that is not traced for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ExportError, TrainingSession, export_training_step

CLASSES = 4
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A function of a layer's output, ahead of another layer."""

    def __init__(self, function: Forward, **parts: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, CLASSES)
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))  # type: ignore[no-any-return]


class Doubling(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else input * 2


def frozen(dropout: nn.Module) -> nn.Module:
    return dropout.eval()


def written_by_the_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mul_(2), labels)


def with_a_condition_on_the_size(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output * (2 if output.shape[0] > 3 else 3), labels)


def with_dropout(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.2), labels)


ALIKE: dict[str, Net] = {
    "nothing asks": Net(lambda net, x: x.relu()),
    "dropout": Net(lambda net, x: net.drop(net.drop(x.relu()) + 1), drop=nn.Dropout(0.3)),
    "dropout of nothing": Net(lambda net, x: net.drop(x), drop=nn.Dropout(0.0)),
    "dropout in evaluation mode": Net(lambda net, x: net.drop(x), drop=frozen(nn.Dropout(0.3))),
    "detached": Net(lambda net, x: x + x.detach().mean()),
}
"""Those that need not be traced once more."""

OTHER: dict[str, Net] = {
    "a size in training": Net(lambda net, x: x * 2 if net.training and x.shape[0] > 2 else x),
    "functional dropout": Net(lambda net, x: F.dropout(x, 0.3, net.training)),
    "another dropout": Net(lambda net, x: net.drop(x), drop=Doubling(0.3)),
    "alpha dropout": Net(lambda net, x: net.drop(x), drop=nn.AlphaDropout(0.3)),
    "written by dropout": Net(lambda net, x: net.drop(x + 1) + x, drop=nn.Dropout(0.3, inplace=True)),
    "statistics of the batch": Net(lambda net, x: F.batch_norm(x, None, None, training=True)),
    "batch normalization": Net(lambda net, x: net.norm(x), norm=nn.BatchNorm1d(5)),
    "the mode of autograd": Net(lambda net, x: x * 2 if torch.is_grad_enabled() else x),
    "what requires gradients": Net(lambda net, x: x * 2 if x.requires_grad else x),
    "a leaf": Net(lambda net, x: x * 2 if x.grad_fn is None else x),
    "written in place": Net(lambda net, x: x.relu_() + x),
    "constants": Net(lambda net, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])),
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "written": written_by_the_loss,
    "a condition": with_a_condition_on_the_size,
    "dropout": with_dropout,
}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What PyTorch traces."""
    traced: list[nn.Module] = []
    original = torch.export.export

    def export(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        traced.append(module)
        return original(module, *arguments, **options)

    monkeypatch.setattr(torch.export, "export", export)
    return traced


class WithParts(nn.Module):
    """Returns an input, what a dropout makes of it, and a result, which is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.drop = nn.Linear(3, CLASSES), nn.Linear(3, 2), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        dropped = self.drop(x)
        result = self.drop(self.layer(dropped))
        return result, x, dropped, self.other(x), result


def check(net: nn.Module, loss: Callable[..., Tensor], *, sizes: tuple[int, ...] = (5, 2, 7)) -> None:
    """Export a step, and compare its evaluation model with the module in evaluation mode at some sizes."""
    torch.manual_seed(0)
    batch = torch.randn(5, 3), torch.randint(0, CLASSES, (5,))
    modes = [module.training for module in net.modules()]
    step = export_training_step(net, loss, batch, evaluation=True, dynamic_shapes=({0: "batch"}, {0: "batch"}))
    assert [module.training for module in net.modules()] == modes
    assert step.evaluation_model is not None
    session = onnxruntime.InferenceSession(step.evaluation_model.SerializeToString())
    values = step.parameters | step.buffers
    net.eval()
    for size in sizes:
        x = torch.randn(size, 3)
        feeds = {one.name: values[one.name] for one in session.get_inputs() if one.name in values}
        (result,) = session.run(None, feeds | {"x": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(result, net(x).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.sampled(every=2)
def test_a_module_that_asks_in_dropouts_alone_is_traced_once(name: str, traces: list[nn.Module]) -> None:
    check(ALIKE[name], F.cross_entropy)
    assert len(traces) == 1


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.sampled(every=4)
def test_a_module_that_may_do_something_else_is_traced_again(name: str, traces: list[nn.Module]) -> None:
    check(OTHER[name], F.cross_entropy)
    assert len(traces) == 2


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sampled(every=2)
def test_what_the_loss_does_is_no_part_of_the_module(name: str, traces: list[nn.Module]) -> None:
    check(Net(lambda net, x: net.drop(x.relu()), drop=nn.Dropout(0.1)), LOSSES[name])
    assert len(traces) == 2


def test_every_tensor_of_a_module_is_that_of_evaluation_mode(traces: list[nn.Module]) -> None:
    torch.manual_seed(0)
    net, labels = WithParts(), torch.arange(4)

    def loss(output: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        return F.cross_entropy(output[0], labels) + output[2].square().mean()

    step = export_training_step(net, loss, (torch.randn(4, 3), labels), evaluation=True)
    assert len(traces) == 1
    assert step.evaluation_model is not None
    session = onnxruntime.InferenceSession(step.evaluation_model.SerializeToString())
    x = torch.randn(4, 3)
    values = {name: tensor.detach().numpy() for name, tensor in net.named_parameters()}
    # The layer that the loss does not depend on is an input too; the targets and the seed of the dropouts are not.
    assert {one.name for one in session.get_inputs()} == {*values, "x"}
    results = session.run(None, values | {"x": x.numpy()})
    with torch.no_grad():
        expected = net.eval()(x)
    for result, tensor in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, tensor.numpy(), rtol=0, atol=8 * float(np.finfo(np.float32).eps))


class Drawing(nn.Module):
    """Draws in both modes, as an autoencoder with a random code does, after and before dropouts."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(3, 4), nn.Linear(2, 3), nn.Dropout(0.5)
        self.asks = asks

    def forward(self, x: Tensor) -> Any:
        mean, deviation = self.first(self.drop(x)).chunk(2, 1)
        if self.asks and self.training:
            mean = mean + 0.0
        code = mean + torch.randn_like(mean) * deviation.exp()
        return self.last(self.drop(code) + torch.rand_like(code)), mean


def first_of(output: Any, target: Tensor) -> Tensor:
    return (output[0] - target).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("asks", [False, True])
def test_draws_in_evaluation_mode_are_decided_by_the_seed(asks: bool, traces: list[nn.Module]) -> None:
    """That PyTorch draws the same is compared when the step is exported."""
    torch.manual_seed(0)
    module, x = Drawing(asks), torch.randn(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = TrainingSession(export_training_step(module, first_of, (x, x), optimizer, evaluation=True))
    assert len(traces) == 1 + asks
    session.learning_rate = 0.0
    results = [session.evaluate(x) for _ in range(2)]
    session.step(x, x)
    results.append(session.evaluate(x))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert (results[1][0] != results[2][0]).all()
    np.testing.assert_array_equal(results[1][1], results[2][1])


class InEvaluation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.0 if self.training else torch.randn(3))


def test_an_evaluation_model_that_cannot_be_made_is_left_out() -> None:
    module, x = InEvaluation(3, 3), torch.randn(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="the evaluation model is left out: the module draws random numbers in eval"):
        step = export_training_step(module, nn.MSELoss(), (x, x), optimizer)
    assert step.evaluation_model is None
    with pytest.raises(ExportError, match="draws random numbers in eval mode, but none in training"):
        export_training_step(module, nn.MSELoss(), (x, x), optimizer, evaluation=True)
