"""Fourier transforms of all sizes have the digits of their type, in onnxruntime too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.testing import assert_gradients_close


class Transformed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.signal = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self) -> Tensor:
        result = self.function(self.signal)
        return torch.view_as_real(result) if result.is_complex() else result


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (torch.fft.rfft, (31,)),
        (torch.fft.fft, (2, 47)),
        (torch.fft.fft2, (8, 13)),
        (lambda x: torch.fft.irfft(x, 29), (15,)),
        (torch.fft.rfft, (32,)),
    ],
    ids=["prime", "of items", "one prime", "back", "power of 2"],
)
def test_transforms_of_any_size(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    module = Transformed(function, *shape)
    weights = torch.randn(module().shape, generator=torch.Generator().manual_seed(1))
    batch: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), (weights,))

    def loss(output: Tensor, weights: Tensor) -> Tensor:
        return (output * weights).sum()

    step = export_training_step(module, loss, batch)
    results = run(step, batch, kernels=True)
    native, exact = (autograd(module, loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    # The gradient is a sum of all weights.
    terms = float(weights.abs().sum())
    for name, result in results.items():
        assert_gradients_close(result, native[name], exact[name], "float32", terms=terms * (name == "loss") + terms / 8)
