"""The decompositions of sorting, searching and segments compute what ATen's operators compute."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
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
    assert TABLE[aten.segment_reduce.default](data, "max", **given) is NotImplemented
    if "lengths" in given:
        assert TABLE[aten.segment_reduce.default](data, "sum", unsafe=True, **given) is NotImplemented
