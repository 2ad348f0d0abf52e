"""The decompositions of ATen's backward operators compute what the operators compute, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gradfuse import backward_decompositions

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
    actual = backward_decompositions.convolution_backward(*arguments)
    for one, other in zip(actual, aten.convolution_backward(*arguments), strict=True):
        _assert_equal(one, other)


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_convolution_backward_gives_what_is_asked_for(mask: tuple[bool, bool, bool]) -> None:
    images, weight = torch.ones(2, 1, 5, dtype=torch.float64), torch.ones(2, 1, 3, dtype=torch.float64)
    grad_output = torch.ones(2, 2, 3, dtype=torch.float64)
    result = backward_decompositions.convolution_backward(
        grad_output, images, weight, [2], [1], [0], [1], False, [0], 1, mask
    )
    assert tuple(gradient is not None for gradient in result) == mask


@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("include_pad", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    "kernel, stride, padding", [((2, 2), [], 0), ((3, 2), [2, 1], 1), ((3, 3), [3], 1), ((2, 3), [1], 0)]
)
def test_avg_pool2d_backward(
    kernel: tuple[int, int], stride: list[int], padding: int, ceil_mode: bool, include_pad: bool, divisor: int | None
) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    settings = (kernel, stride, [padding], ceil_mode, include_pad, divisor)
    grad_output = torch.randn_like(aten.avg_pool2d(images, *settings))
    _assert_equal(
        backward_decompositions.avg_pool2d_backward(grad_output, images, *settings),
        aten.avg_pool2d_backward(grad_output, images, *settings),
    )


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 7), (9, 8), (11, 2)])
def test_adaptive_avg_pool2d_backward(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    grad_output = torch.randn(2, 3, *size, dtype=torch.float64)
    _assert_equal(
        backward_decompositions.adaptive_avg_pool2d_backward(grad_output, images),
        aten._adaptive_avg_pool2d_backward(grad_output, images),
    )


def test_the_table_serves_every_decomposition() -> None:
    table = backward_decompositions.table()
    assert aten._native_batch_norm_legit_functional.default in table
    for function in (
        backward_decompositions.convolution_backward,
        backward_decompositions.avg_pool2d_backward,
        backward_decompositions.adaptive_avg_pool2d_backward,
    ):
        assert function in table.values()
