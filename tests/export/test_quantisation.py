"""Modules of torch.ao.quantization: steps have PyTorch's gradients of fake quantisation, with scales that stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao import quantization

ao: Any = quantization

IN, OUT, ROWS = 6, 4, 5


def _separate() -> tuple[Any, Any]:
    rows = ao.MovingAveragePerChannelMinMaxObserver
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    return (
        ao.FakeQuantize(ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
        ao.FakeQuantize(rows, quant_min=-127, quant_max=127, **symmetric),
    )


def _fused() -> tuple[Any, Any]:
    config = ao.get_default_qat_qconfig("x86")
    return config.activation(), config.weight()


class _Linear(nn.Module):
    def __init__(self, made: Callable[[], tuple[Any, Any]]) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)
        self.of_input, self.of_weight = made()

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(self.of_input(x), self.of_weight(self.linear.weight), self.linear.bias)


def _prepared(made: Callable[[], tuple[Any, Any]]) -> _Linear:
    torch.manual_seed(0)
    module = _Linear(made)
    module(torch.randn(ROWS, IN))
    module.apply(ao.disable_observer)
    return module


@pytest.mark.parametrize("made", [_separate, _fused])
def test_gradients_are_those_of_pytorch(made: Callable[[], tuple[Any, Any]]) -> None:
    module = _prepared(made)
    forward = ao.FusedMovingAvgObsFakeQuantize.forward
    with torch.no_grad():
        module.linear.weight[0, 0] = 3  # Cut off.
    # Three times what was observed.
    x, y = 3 * torch.randn(ROWS, IN), torch.randn(ROWS, OUT)
    session = TrainingSession(export_training_step(module, nn.MSELoss(), (x, y)))
    assert ao.FusedMovingAvgObsFakeQuantize.forward is forward
    loss = session.step(x.numpy(), y.numpy())

    native_loss = nn.functional.mse_loss(module(x), y)
    native = torch.autograd.grad(native_loss, (module.linear.weight, module.linear.bias))
    weight = module.linear.weight.detach().requires_grad_()
    quantised = module.of_weight(weight)
    (passes,) = torch.autograd.grad(quantised.sum(), weight)
    wide = [one.detach().double().requires_grad_() for one in (quantised, module.linear.bias)]
    result = nn.functional.mse_loss(module.of_input(x).double() @ wide[0].T + wide[1], y.double())
    by_weight, by_bias = torch.autograd.grad(result, wide)
    assert 0 < int((passes == 0).sum()) < passes.numel()
    assert_gradients_close(np.float32(loss), native_loss.detach(), result.detach(), np.float32)
    pairs = {"linear.weight": (native[0], by_weight * passes), "linear.bias": (native[1], by_bias)}
    assert set(session.gradients) == set(pairs)
    for name, (of_torch, exact) in pairs.items():
        terms = np.abs(exact.numpy()).max() * 10
        assert_gradients_close(session.gradients[name], of_torch, exact, np.float32, terms=terms)


@pytest.mark.parametrize(("made", "name"), [(_separate, "FakeQuantize"), (_fused, "FusedMovingAvgObsFakeQuantize")])
def test_observers_that_are_on_are_refused(made: Callable[[], tuple[Any, Any]], name: str) -> None:
    module = _prepared(made)
    module.of_weight.apply(ao.enable_observer)
    batch = torch.randn(ROWS, IN), torch.randn(ROWS, OUT)
    with pytest.raises(ExportError, match=rf"the part 'of_weight' \({name}\) observes .*disable_observer\)$"):
        export_training_step(module, nn.MSELoss(), batch)
