"""Complex numbers in forward passes become real ones, with PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.testing import assert_gradients_close

DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def rotated(h: Tensor) -> Tensor:
    """Rotary embeddings as in Llama's own code."""
    angles = torch.outer(torch.arange(h.shape[0]), 1.0 / torch.arange(1, 5))
    with torch.no_grad():
        turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(h.reshape(-1, 4, 2)) * turns).flatten(1)


def arranged(h: Tensor) -> Tensor:
    """Parts, joins and sums of complex numbers and real ones."""
    z = torch.cat([torch.complex(h, h.cos()), torch.view_as_complex(h.view(-1, 4, 2))], 1)[:, 2:10]
    total = (z.conj().exp() - z * 2.0 + h.unsqueeze(1).squeeze(1)).sum(1, keepdim=True)
    return total.imag + total.real.roll(1, 1) * h


def multiplied(h: Tensor) -> Tensor:
    z = torch.complex(h, h.sin())
    turned = torch.complex(torch.linspace(0.0, 1.0, 64).view(8, 8), torch.eye(8)).to(z.dtype)
    product: Tensor = (torch.einsum("bi,ij->bj", z, turned) ** 3 / (z * z + 4.0)).imag + ((2 + 1j) * h).imag
    return product


def padded_and_squared(h: Tensor) -> Tensor:
    """The padding is real, so that the imaginary part gets zeros; exponents come as floats."""
    z = F.pad(torch.complex(h, h.cos()), (1, 0), value=1.5) ** 2.0
    return (z.real + 2 * z.imag)[:, :8]


def through_a_filter(h: Tensor) -> Tensor:
    """A product of spectra."""
    window = torch.polar(torch.linspace(1.0, 0.2, 5), torch.linspace(0.0, 1.0, 5))
    filtered: Tensor = torch.fft.irfft(torch.fft.rfft(h) * window, n=8)
    return filtered


def written(h: Tensor) -> Tensor:
    """As Fourier neural operators fill the low frequencies."""
    z = torch.fft.rfft(h)
    low = torch.zeros(h.shape[0], 5, dtype=torch.cfloat)
    low[:, :3] = z[:, :3] * (1 - 2j) / h.shape[0]
    low[:, -1] = h[:, 0]
    low = torch.where(h[:, :5] > 0, low, z).masked_fill(h[:, 3:] > 0.5, 0.25)
    result: Tensor = torch.fft.irfft(low, n=8)
    return result


@pytest.mark.parametrize("function", [rotated, arranged, multiplied, padded_and_squared, through_a_filter, written])
@pytest.mark.sampled(every=2)
def test_complex_numbers_export(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Between(function)
    batches = [((torch.randn(items, 6),), (torch.arange(items) % 5,)) for items in (3, 5)]
    step = export_training_step(module, F.cross_entropy, batches[0], dynamic_shapes=DYNAMIC)
    results = run(step, batches[1], kernels=False)
    native, exact = (
        autograd(module, F.cross_entropy, batches[1], dtype, step) for dtype in (torch.float32, torch.float64)
    )
    for name, result in results.items():
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)


def test_rotations_by_constants_are_constants() -> None:
    step = export_training_step(Between(rotated), F.cross_entropy, (torch.randn(3, 6), torch.arange(3)))
    assert not [node for node in step.model.graph.node if node.op_type in ("Cos", "Sin")]
