"""The decompositions of products, distances and bilinear forms compute what ATen's operators compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse.export.decompositions import products


def assert_same(ours: Callable[..., Tensor], native: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Compare values and gradients in float64."""
    given = [one.double().requires_grad_() if one.is_floating_point() else one for one in tensors]
    leaves = [one for one in given if one.requires_grad]
    results = []
    for function in (ours, native):
        value = function(*given)
        gradient = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
        results.append((value, *torch.autograd.grad(value, leaves, gradient)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("zeros", [(), (0,), (3,), (2, 5), (6,)])
def test_running_products(dim: int, zeros: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 7, 7)
    for place in zeros:
        x.select(dim, place)[:] = 0.0
    assert_same(lambda x: products.cumprod(x, dim), lambda x: x.cumprod(dim), x)


def test_running_products_of_whole_numbers_and_of_one() -> None:
    whole = torch.arange(1, 6)
    assert torch.equal(products.cumprod(whole, 0), whole.cumprod(0))
    assert torch.equal(products.cumprod(torch.tensor(3.0), 0), torch.tensor(3.0))
    assert products.cumprod(whole.int(), 0).dtype == torch.int64


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("mode", [None, 1, 2])
@pytest.mark.parametrize("rows", [4, 40])
def test_distances(p: float, mode: int | None, rows: int) -> None:
    torch.manual_seed(0)
    modes = {
        None: "use_mm_for_euclid_dist_if_necessary",
        1: "use_mm_for_euclid_dist",
        2: "donot_use_mm_for_euclid_dist",
    }
    a, b = torch.randn(2, 3, 5), torch.randn(2, rows, 5)
    assert_same(
        lambda a, b: products.cdist(a, b, p, mode), lambda a, b: torch.cdist(a, b, p=p, compute_mode=modes[mode]), a, b
    )


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_the_distance_of_a_row_from_itself_has_no_gradient(p: float) -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert_same(lambda a: products.cdist(a, a.detach(), p, 2), lambda a: torch.cdist(a, a.detach(), p=p), a)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_distances_of_all_pairs(p: float) -> None:
    x = torch.tensor([[1.0, 2.0, -1.0], [1.0, 2.0, -1.0], [0.5, 1.0, 3.0], [2.0, 0.0, -2.0]])
    assert_same(lambda x: products.pdist(x, p), lambda x: F.pdist(x, p), x)
    assert products.pdist(x[:1], p).shape == (0,)


@pytest.mark.parametrize("p", [0.5, 1.5, 3.0, -0.5, -2.0])
@pytest.mark.parametrize("dim", [None, [0], [1, 2]])
def test_norms_by_any_number(p: float, dim: list[int] | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 2)
    x[0, 1] = 0.0
    native = torch.linalg.vector_norm
    for given in (x, torch.zeros(3, 4, 2), x.abs() + 0.1):
        assert_same(lambda x: products.vector_norm(x, p, dim), lambda x: native(x, p, dim), given)
    assert products.vector_norm(x, p, dim, True).shape == native(x, p, dim, True).shape


def test_counts_of_what_differs() -> None:
    a, b = torch.tensor([[1.0, 2.0, -1.0], [0.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, -1.0]])
    assert torch.equal(products.cdist(a, b, 0.0, None), torch.cdist(a, b, p=0.0))
    assert torch.equal(products.pdist(a, 0.0), F.pdist(a, 0.0))


def test_products_over_nothing() -> None:
    none = torch.zeros(2, 0), torch.zeros(0, 3)
    assert_same(lambda a, b: products.of_nothing(torch.ops.aten.mm.default, a, b) + a.sum() + b.sum(), torch.mm, *none)
    bias = torch.randn(3)
    assert_same(
        lambda c: products.added_product(c, *(one.double() for one in none), beta=0.5),
        lambda c: torch.addmm(c, *(one.double() for one in none), beta=0.5),
        bias,
    )
    assert products.added_product(bias, torch.ones(2, 1), torch.ones(1, 3)) is NotImplemented


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_bilinear_forms(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = torch.randn(*shape, 3), torch.randn(*shape, 4), torch.randn(5, 3, 4), torch.randn(5)
    assert_same(products.bilinear, F.bilinear, *tensors)
    assert_same(products.bilinear, F.bilinear, *tensors[:3])


def test_hypotenuses() -> None:
    a, b = torch.tensor([3.0, -1.0, 0.0, 1e-30]), torch.tensor([4.0, 0.0, 2.0, 1e-30])
    assert_same(products.hypot, torch.hypot, a, b)
    large = torch.tensor([3e38, torch.inf, 1.0, torch.nan])
    assert torch.equal(products.hypot(large, -large).isfinite(), torch.hypot(large, -large).isfinite())
    assert products.hypot(torch.tensor(1e30), torch.tensor(1e30)) == torch.hypot(torch.tensor(1e30), torch.tensor(1e30))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margins_of_several_labels(reduction: str) -> None:
    torch.manual_seed(0)
    target = torch.tensor([[3, 0, -1, 1, 2], [-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    number = ("none", "mean", "sum").index(reduction)

    def ours(x: Tensor) -> Tensor:
        return products.multilabel_margin_loss(x, target, number)[0]

    def native(x: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    assert_same(ours, native, torch.randn(3, 5))


def test_the_table_has_each() -> None:
    table: dict[Any, Any] = products.table()
    names = "cumprod _cdist_forward _pdist_forward bilinear mm bmm addmm hypot multilabel_margin_loss_forward".split()
    assert {getattr(torch.ops.aten, name).default for name in names} <= set(table)
