"""The backward passes of pooling and padding compute what ATen's compute, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from export.decompositions.test_products import assert_same
from torch import Tensor

from gradfuse.export.decompositions import pooling

aten = torch.ops.aten
SIZES = (6, 9, 8)
TABLE = pooling.table()


def _assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    # Sums of at most some hundred products, each rounded once.
    assert ((actual - expected).abs() <= 1e3 * torch.finfo(expected.dtype).eps * expected.abs().max()).all()


def _images(axes: int, batch: tuple[int, ...] = (2, 3)) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*batch, *SIZES[3 - axes :], dtype=torch.float64)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("include_pad", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("kernel, stride, padding", [([2], [], 0), ([3, 2, 3], [2, 1, 2], 1), ([3], [3], 1)])
def test_avg_pool_backward(
    axes: int,
    kernel: list[int],
    stride: list[int],
    padding: int,
    ceil_mode: bool,
    include_pad: bool,
    divisor: int | None,
) -> None:
    images = _images(axes)
    settings = (kernel[:axes], stride[:axes], [padding], ceil_mode, include_pad, divisor)
    backward = getattr(aten, f"avg_pool{axes}d_backward").default
    grad_output = torch.randn_like(getattr(aten, f"avg_pool{axes}d")(images, *settings))
    _assert_equal(TABLE[backward](grad_output, images, *settings), backward(grad_output, images, *settings))


@pytest.mark.parametrize("batch", [(2, 3), (3,)])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 2), (5, 7, 6), (7, 11, 2)])
def test_adaptive_avg_pool(size: tuple[int, ...], batch: tuple[int, ...]) -> None:
    for axes in (2, 3):
        images, out = _images(axes, batch), size[3 - axes :]
        grad_output = torch.randn(*batch, *out, dtype=torch.float64)
        backward = getattr(aten, f"_adaptive_avg_pool{axes}d_backward").default
        _assert_equal(TABLE[backward](grad_output, images), backward(grad_output, images))
    _assert_equal(TABLE[aten._adaptive_avg_pool3d.default](images, size), aten._adaptive_avg_pool3d(images, size))


MAXIMA: dict[str, tuple[int, Callable[[Tensor], tuple[Tensor, Tensor]], Any, tuple[Any, ...]]] = {
    "max_pool3d": (
        3,
        lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True),
        aten.max_pool3d_with_indices_backward.default,
        ([3], [2], [1], [1], False),
    ),
    "adaptive_max_pool2d": (
        2,
        lambda x: aten.adaptive_max_pool2d(x, [2, 5]),
        aten.adaptive_max_pool2d_backward.default,
        (),
    ),
    "adaptive_max_pool3d": (
        3,
        lambda x: aten.adaptive_max_pool3d(x, [2, 5, 3]),
        aten.adaptive_max_pool3d_backward.default,
        (),
    ),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_max_pool_backward(name: str) -> None:
    axes, forward, backward, settings = MAXIMA[name]
    images = _images(axes)
    output, indices = forward(images)
    grad_output = torch.randn_like(output)
    _assert_equal(
        TABLE[backward](grad_output, images, *settings, indices), backward(grad_output, images, *settings, indices)
    )


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 5, 3), (6, 9, 8), (7, 11, 2)])
def test_adaptive_max_pool(size: tuple[int, ...]) -> None:
    for axes in (2, 3):
        # With equal maxima, of which the first counts.
        images, out = (4 * _images(axes)).round(), size[3 - axes :]
        forward = getattr(aten, f"adaptive_max_pool{axes}d").default
        for one, other in zip(TABLE[forward](images, out), forward(images, out), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("padding", [(1, 2), (0, 3, 2, 0), (1, 0, 2, 3, 0, 1)])
def test_replication_pad_backward(padding: tuple[int, ...]) -> None:
    axes = len(padding) // 2
    images = _images(axes)
    grad_output = torch.randn_like(F.pad(images, padding, mode="replicate"))
    backward = getattr(aten, f"replication_pad{axes}d_backward").default
    _assert_equal(TABLE[backward](grad_output, images, padding), backward(grad_output, images, padding))


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        (2, ((3,), (), (0,), True, True, 2)),
        (2, ((3, 3), (2, 2), (1, 1), True, False, 5)),
        (2, ((6, 6), (3, 3), (2, 3), True, True, 2)),
        (3, ((2, 3, 2), (2, 2, 1), (1, 1, 0), False, True, -3)),
    ],
)
def test_means_with_a_divisor_of_their_own(axes: int, settings: tuple[Any, ...]) -> None:
    native = getattr(torch.ops.aten, f"avg_pool{axes}d")
    assert_same(
        lambda x: pooling.avg_pool(axes, x, *settings), lambda x: native(x, *settings), torch.randn(2, 9, 9, 10)
    )


def test_other_means_are_left_alone() -> None:
    assert pooling.avg_pool(2, torch.ones(1, 4, 4), (2, 2)) is NotImplemented


@pytest.mark.parametrize(
    ("shape", "kernel", "sizes"),
    [((2, 3, 7, 9), (2, 3), (3, 4)), ((3, 7, 9), (2, 2), (1, 4)), ((2, 2, 6, 7, 8), (2, 3, 2), (3, 2, 1))],
)
def test_maxima_at_random_distances(shape: tuple[int, ...], kernel: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    pool: Any = F.fractional_max_pool2d if len(kernel) == 2 else F.fractional_max_pool3d
    items = shape[0] if len(shape) == len(kernel) + 2 else 1
    draws = torch.rand(items, shape[-len(kernel) - 1], len(kernel), dtype=torch.float64)
    x = torch.randn(shape)
    assert_same(
        lambda x: pooling.fractional_max_pool(x, kernel, sizes, draws)[0],
        lambda x: pool(x, kernel, sizes, _random_samples=draws),
        x,
    )
    assert torch.equal(
        pooling.fractional_max_pool(x, kernel, sizes, draws.float())[1],
        pool(x, kernel, sizes, return_indices=True, _random_samples=draws.float())[1],
    )
