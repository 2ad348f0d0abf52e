"""Maximum pooling at dynamic sizes gives what PyTorch gives, where the example tells nothing of other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
