"""The decompositions of ATen's backward operators compute what the operators compute, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gradfuse.export.decompositions import backward, index, pooling

aten = torch.ops.aten


def _assert_equal(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        scale = expected.abs().max() if expected.numel() else torch.zeros(())
        # Sums of at most some hundred products, each rounded once.
        assert ((actual - expected).abs() <= 1e3 * torch.finfo(expected.dtype).eps * scale).all()


def _convolutions() -> Iterator[tuple[int, bool, int, int, int, int, int]]:
    for axes in (1, 2, 3):
        steps = (1, 2, 3) if axes < 3 else (2,)
        yield from itertools.product((axes,), (False, True), (1, 2), steps, (0, 2), (1, 2), (1, 3))


@pytest.mark.parametrize("axes, transposed, groups, stride, padding, dilation, taps", list(_convolutions()))
def test_convolution_backward(
    axes: int, transposed: bool, groups: int, stride: int, padding: int, dilation: int, taps: int
) -> None:
    torch.manual_seed(0)
    channels, out_channels = 4, 6
    images = torch.randn(3, channels, *(9, 8, 7)[:axes], dtype=torch.float64)
    of_channels = (channels, out_channels // groups) if transposed else (out_channels, channels // groups)
    weight = torch.randn(*of_channels, *[taps] * axes, dtype=torch.float64)
    more = [min(1, stride - 1, dilation)] * axes if transposed else [0] * axes
    settings = ([stride] * axes, [padding] * axes, [dilation] * axes, transposed, more, groups)
    grad_output = torch.randn_like(aten.convolution(images, weight, None, *settings))
    arguments = (grad_output, images, weight, [out_channels], *settings, [True, True, True])
    actual = backward.convolution_backward(*arguments)
    for one, other in zip(actual, aten.convolution_backward(*arguments), strict=True):
        _assert_equal(one, other)


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_convolution_backward_gives_what_is_asked_for(mask: tuple[bool, bool, bool]) -> None:
    images, weight = torch.ones(2, 1, 5, dtype=torch.float64), torch.ones(2, 1, 3, dtype=torch.float64)
    grad_output = torch.ones(2, 2, 3, dtype=torch.float64)
    result = backward.convolution_backward(grad_output, images, weight, [2], [1], [0], [1], False, [0], 1, mask)
    assert tuple(gradient is not None for gradient in result) == mask


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_backward(dim: int) -> None:
    torch.manual_seed(0)
    v = torch.randn(4, 3, 5, dtype=torch.float64)
    kept = [size if axis == dim else 1 for axis, size in enumerate(v.shape)]
    g = torch.randn(kept, dtype=torch.float64)
    w, norms = aten._weight_norm_interface(v, g, dim)
    grad = torch.randn_like(w)
    actual = backward.weight_norm_backward(grad, v, g, norms.view(kept), dim)
    for one, other in zip(actual, _gradients(aten._weight_norm, grad, v, g, dim), strict=True):
        _assert_equal(one, other)


def _gradients(function: Callable[..., Tensor], grad: Tensor, v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, ...]:
    leaves = v.clone().requires_grad_(), g.clone().requires_grad_()
    return torch.autograd.grad(function(*leaves, dim), leaves, grad)


def test_the_table_serves_every_decomposition() -> None:
    table = backward.table()
    assert aten._native_batch_norm_legit_functional.default in table
    assert backward.convolution_backward in table.values()
    for module in (index, pooling):
        assert set(module.table()) <= set(table)
