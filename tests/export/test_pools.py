"""Maximum pooling at dynamic sizes gives what PyTorch gives, where the example tells nothing of other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.export import pools
from gradfuse.testing import assert_gradients_close

POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("axes", [1, 2])
def test_windows_and_ties_are_those_of_pytorch(axes: int) -> None:
    torch.manual_seed(0)
    for kernel, stride, dilation, ceil in itertools.product((1, 2, 3), (1, 2, 3, 5), (1, 2, 3), (False, True)):
        for padding, more in itertools.product(range(kernel // 2 + 1), range(5)):
            width = dilation * (kernel - 1) + 1
            # Few numbers, so that there are ties.
            x = torch.randint(0, 3, (2, *(width + more + axis for axis in range(axes)))).float().requires_grad_()
            wanted = POOLS[axes](x, kernel, stride, padding, dilation, ceil)
            got = pools.pool(axes, x, kernel, stride, padding, dilation, ceil)
            assert torch.equal(got, wanted), (kernel, stride, dilation, ceil, padding, more)
            gradient = torch.randn_like(wanted)
            wanted, got = (torch.autograd.grad(value, x, gradient)[0] for value in (wanted, got))
            assert torch.equal(got, wanted), (kernel, stride, dilation, ceil, padding, more)


class Pooling(nn.Module):
    """The sum over all windows, whose number is a size of the graph."""

    def __init__(self, axes: int, settings: Sequence[Any]) -> None:
        super().__init__()
        self.layer = CONVOLUTIONS[axes](2, 3, 1)
        self.axes, self.settings = axes, settings

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = POOLS[self.axes](self.layer(x), *self.settings)
        return pooled.flatten(2).sum(2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "axes, settings",
    [
        (1, (3, 2)),
        (1, (2, 3, 1, 1, True)),
        (2, ((1, 2), (2, 3), (0, 1), (3, 1), True)),
        (2, (3, 2, 1, 1, True)),
        (3, ((1, 2, 2), (3, 2, 1), 0, 1, True)),
    ],
)
@pytest.mark.sampled(every=3)
def test_steps_pool_at_other_sizes(axes: int, settings: Sequence[Any], fused: bool) -> None:
    torch.manual_seed(0)
    module = Pooling(axes, settings)

    def batch(items: int, *sizes: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (torch.randn(items, 2, *sizes[:axes]),), (torch.randn(items, 3),)

    shapes = ({0: "items", **{2 + axis: f"size{axis}" for axis in range(axes)}},), ({0: "items"},)
    step = export_training_step(module, F.mse_loss, batch(2, 7, 9, 8), dynamic_shapes=shapes, fuse=fused)
    for sizes in ((8, 8, 9), (9, 10, 7), (10, 7, 6), (11, 12, 5)):
        other = batch(3, *sizes)
        native, exact = (autograd(module, F.mse_loss, other, dtype, step) for dtype in (torch.float32, torch.float64))
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        for name, result in run(step, other, kernels=fused).items():
            assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


def _whole_axes(x: Tensor) -> Tensor:
    """As TextCNN and GeM pool."""
    rows = x.flatten(2)
    found = [
        F.max_pool1d(rows, rows.size(2)).sum(),
        F.avg_pool2d(x.clamp(min=1e-6).pow(3), (x.size(-2), x.size(-1))).pow(1 / 3).sum(),
        F.max_pool2d(x, (x.size(2), 3), stride=2, padding=(0, 1)).square().sum(),
        F.avg_pool2d(x, (3, x.size(3)), stride=(2, 1), padding=(1, 0)).square().sum(),
    ]
    return x * torch.stack(found).sum()


def _ties(x: Tensor) -> Tensor:
    """Of equal numbers the first one has the gradient."""
    steps = x + ((x * 2).round() / 2 - x).detach()
    across = F.max_pool2d(steps, (2, x.size(3)), stride=(2, 1)) + F.max_pool2d(steps, (x.size(2), 1), stride=1).mean()
    return x * (F.max_pool2d(steps, x.size()[2:]) + across.square().sum())


@pytest.mark.parametrize("function", [_whole_axes, _ties])
def test_windows_as_long_as_an_axis(function: Callable[[Tensor], Tensor]) -> None:
    class Pooled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x))

    torch.manual_seed(0)
    module, axes = Pooled(3, 2, 1), {0: "batch", 2: "height", 3: "width"}
    batch = torch.randn(2, 3, 6, 7), torch.randn(2, 2, 6, 7)
    step = export_training_step(module, F.mse_loss, batch, dynamic_shapes=(axes, axes), verify="quick")
    for height, width in ((4, 9), (11, 5)):
        batch = torch.randn(3, 3, height, width), torch.randn(3, 2, height, width)
        assert_like_torch(step, module, F.mse_loss, batch)
