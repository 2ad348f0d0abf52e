"""The decompositions of sorting, searching and segments compute what ATen's operators compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from export.decompositions.test_products import assert_same
from torch import Tensor

from gradfuse.export.decompositions import index

aten = torch.ops.aten
TABLE = index.table()
ENDS = torch.tensor([0, 2, 2, 5, 9])


def _assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("out_int32, right", list(itertools.product((False, True), repeat=2)))
def test_positions_among_boundaries(out_int32: bool, right: bool) -> None:
    values = torch.arange(-1, 12).view(1, -1)
    settings: dict[str, Any] = {"out_int32": out_int32, "right": right}
    _assert_same(TABLE[aten.bucketize.Tensor](values, ENDS, **settings), torch.bucketize(values, ENDS, **settings))
    _assert_same(
        TABLE[aten.searchsorted.Tensor](ENDS, values, **settings), torch.searchsorted(ENDS, values, **settings)
    )


@pytest.mark.parametrize("right", [False, True])
def test_a_nan_is_after_all_boundaries(right: bool) -> None:
    values, ends = torch.tensor([2.0, torch.nan, 9.0, torch.inf]), ENDS.float()
    _assert_same(TABLE[aten.bucketize.Tensor](values, ends, right=right), torch.bucketize(values, ends, right=right))


def test_positions_in_a_sequence_for_each_row() -> None:
    torch.manual_seed(0)
    table, values = torch.randint(0, 9, (2, 3, 7)), torch.randint(-1, 10, (2, 3, 4))
    sorter = table.argsort(-1)
    for named in ({"sorter": sorter}, {"sorter": sorter, "side": "right"}):
        _assert_same(
            TABLE[aten.searchsorted.Tensor](table, values, **named), torch.searchsorted(table, values, **named)
        )


def test_equal_elements_are_sorted_in_their_order() -> None:
    values = torch.tensor([[2, 0, 2, 1, 0, 2]])
    for descending in (False, True):
        for one, other in zip(
            TABLE[aten.sort.stable](values, stable=True, descending=descending),
            torch.sort(values, stable=True, descending=descending),
            strict=True,
        ):
            _assert_same(one, other)


def test_repeated_indices() -> None:
    repeats = torch.tensor([2, 0, 3, 1])
    _assert_same(TABLE[aten.repeat_interleave.Tensor](repeats, output_size=6), torch.repeat_interleave(repeats))
    assert TABLE[aten.repeat_interleave.Tensor](repeats) is NotImplemented


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": torch.tensor([2, 0, 3, 1])},
        {"offsets": torch.tensor([0, 2, 2, 5, 6])},
        {"offsets": torch.tensor([1, 2, 2, 3, 5])},
    ],
)
def test_sums_of_segments(given: dict[str, Any]) -> None:
    data = torch.arange(12.0).view(6, 2)
    sums = torch.segment_reduce(data, "sum", **given)
    _assert_same(TABLE[aten.segment_reduce.default](data, "sum", **given), sums)
    grad = torch.arange(8.0).view(4, 2)
    _assert_same(
        TABLE[aten._segment_reduce_backward.default](grad, sums, data, "sum", **given),
        aten._segment_reduce_backward(grad, sums, data, "sum", **given),
    )
    assert TABLE[aten.segment_reduce.default](data, "sum", axis=1, **given) is NotImplemented
    if "lengths" in given:
        assert TABLE[aten.segment_reduce.default](data, "sum", unsafe=True, **given) is NotImplemented


def _gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    gradient = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, leaf, gradient)[0]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_medians_along_an_axis(length: int, dim: int, keepdim: bool) -> None:
    torch.manual_seed(0)
    x = torch.randperm(length * length).view(length, length).double()
    missing = x.clone()
    missing[0, 0] = torch.nan
    pairs: list[tuple[Any, Any]] = [
        (lambda x: index.median_of_axis(x, dim, keepdim)[0], lambda x: x.median(dim, keepdim)[0]),
        (lambda x: index.nanmedian_of_axis(x, dim, keepdim)[0], lambda x: x.nanmedian(dim, keepdim)[0]),
        (lambda x: index.kthvalue(x, length, dim, keepdim)[0], lambda x: x.kthvalue(length, dim, keepdim)[0]),
    ]
    for ours, native in pairs[:2]:
        for given in (x, missing):
            for actual, expected in zip(_gradients(ours, given), _gradients(native, given), strict=True):
                assert torch.equal(actual.nan_to_num(-7.0), expected.nan_to_num(-7.0))
    for actual, expected in zip(*(_gradients(one, x) for one in pairs[2]), strict=True):
        assert torch.equal(actual, expected)
    _assert_same(index.median_of_axis(x, dim, keepdim)[1], x.median(dim, keepdim)[1])
    whole = x.long()
    _assert_same(index.median_of_axis(whole, dim, keepdim)[0], whole.median(dim, keepdim)[0])


def test_equal_elements_share_the_gradient_of_the_median_of_all() -> None:
    for values in ([3.0, 1.0, 3.0, 3.0, 9.0, 0.0], [2.0, 1.0], [5.0], [1.0, torch.inf, torch.inf]):
        x = torch.tensor(values, dtype=torch.float64)
        for ours, native in ((index.median, torch.median), (index.nanmedian, torch.nanmedian)):
            for actual, expected in zip(_gradients(ours, x), _gradients(native, x), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_reductions_by_index(reduce: str, include_self: bool) -> None:
    torch.manual_seed(0)
    # Index 4 has no elements.
    places = torch.tensor([0, 2, 2, 5, 0, 2, 1, 3]).unsqueeze(1).expand(-1, 3)
    x, src = torch.randn(6, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    if include_self and reduce != "mean":
        assert index.scatter_reduce(x, 0, places, src, reduce) is NotImplemented
        return

    def ours(src: Tensor) -> Tensor:
        return index.scatter_reduce(x * src[0], 0, places, src, reduce, include_self=include_self)

    def native(src: Tensor) -> Tensor:
        return (x * src[0]).scatter_reduce(0, places, src, reduce, include_self=include_self)

    for actual, expected in zip(_gradients(ours, src), _gradients(native, src), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def test_reductions_of_whole_numbers_by_index() -> None:
    x, src, places = torch.tensor([5, -3, 7]), torch.tensor([1, 2, -9]), torch.tensor([0, 0, 2])
    for reduce in ("sum", "prod", "amax", "amin"):
        _assert_same(
            index.scatter_reduce(x, 0, places, src, reduce, include_self=False),
            x.scatter_reduce(0, places, src, reduce, include_self=False),
        )


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_most_frequent_elements(dim: int, keepdim: bool) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 3, (4, 5, 6)).float()
    for ours, native in zip(index.mode(x, dim, keepdim), torch.mode(x, dim, keepdim), strict=True):
        _assert_same(ours, native)
    assert_same(lambda x: index.mode(x, dim, keepdim)[0], lambda x: torch.mode(x, dim, keepdim)[0], x)
    assert index.mode(torch.tensor(3.0))[0] == 3.0


@pytest.mark.parametrize("reduce", ["mean", "prod", "amin", "amax"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_reductions_of_rows_by_their_index(reduce: str, include_self: bool, dim: int) -> None:
    torch.manual_seed(0)
    place = torch.tensor([2, 0, 2, 2])
    x, source = torch.randn(4, 4), torch.randn(4, 4)

    def native(x: Tensor, source: Tensor) -> Tensor:
        return x.index_reduce(dim, place, source, reduce, include_self=include_self)

    assert_same(
        lambda x, source: index.index_reduce(x, dim, place, source, reduce, include_self=include_self),
        native,
        x,
        source,
    )


def test_a_number_reduced_by_an_index() -> None:
    assert_same(
        lambda x, y: index.index_reduce(x, 0, torch.tensor(0), y, "prod"),
        lambda x, y: x.index_reduce(0, torch.tensor(0), y, "prod"),
        torch.tensor(3.0),
        torch.tensor(2.0),
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_elements_put_at_places(accumulate: bool) -> None:
    places = torch.tensor([[0, -1], [4, 2]])
    assert_same(
        lambda x, y: index.put(x, places, y, accumulate),
        lambda x, y: x.put(places, y, accumulate),
        torch.randn(2, 3),
        torch.randn(2, 2),
    )


@pytest.mark.parametrize("places", [[[0, -1], [4, 4]], 3, [0]])
def test_elements_taken_at_places(places: Any) -> None:
    at = torch.tensor(places)
    assert_same(lambda x: index.take(x, at), lambda x: x.take(at), torch.randn(2, 3))


@pytest.mark.parametrize("offset", [-2, -1, 0, 2])
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (-1, 1)])
def test_replaced_diagonals(offset: int, dims: tuple[int, int]) -> None:
    x = torch.randn(4, 5, 3)
    assert_same(
        lambda x, y: index.diagonal_scatter(x, y, offset, *dims),
        lambda x, y: torch.diagonal_scatter(x, y, offset, *dims),
        x,
        torch.randn(torch.diagonal(x, offset, *dims).shape),
    )


def test_a_diagonal_without_elements() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(index.diagonal_scatter(x, torch.randn(0), 3), x)


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("initial", [None, 0.25])
@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_reductions_of_segments(reduce: str, initial: float | None, by: str) -> None:
    torch.manual_seed(0)
    parts = {"lengths": torch.tensor([3, 0, 2, 1]), "offsets": torch.tensor([0, 3, 3, 5, 6])}
    settings: dict[str, Any] = {by: parts[by], "initial": initial}
    for data in (torch.randn(6), torch.randn(6, 2)):
        ours, native = (
            (lambda x, f=f: f(x, reduce, **settings).nan_to_num(posinf=0.0, neginf=0.0))
            for f in (index.segment_reduce, torch.segment_reduce)
        )
        assert_same(ours, native, data)
        torch.testing.assert_close(
            index.segment_reduce(data, reduce, **settings),
            torch.segment_reduce(data, reduce, **settings),
            equal_nan=True,
        )
