"""Sorting, searching and segments: ATen operators that group rows, written in operators that torch.onnx knows.

Positions among the ends of groups are counted by comparison with every end. That takes rows times groups comparisons,
and shows `gradfuse.fuse` that the index of the rows never decreases. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.sort.stable: sort_stable,
        aten.argsort.stable: argsort_stable,
        aten.searchsorted.Tensor: searchsorted,
        aten.bucketize.Tensor: bucketize,
        aten.repeat_interleave.Tensor: repeat_interleave,
        aten.segment_reduce.default: segment_reduce,
        aten._segment_reduce_backward.default: segment_reduce_backward,
        aten.cummax.default: cummax,
        aten.cummin.default: cummin,
        aten.kthvalue.default: kthvalue,
        aten.median.dim: median_of_axis,
        aten.nanmedian.dim: nanmedian_of_axis,
        aten.median.default: median,
        aten.nanmedian.default: nanmedian,
        aten.mode.default: mode,
        aten.scatter_reduce.two: scatter_reduce,
        aten.index_reduce.default: index_reduce,
        aten.put.default: put,
        aten.take.default: take,
        aten.diagonal_scatter.default: diagonal_scatter,
    }


def sort_stable(self: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """aten::sort.stable: ONNX's TopK, as which aten::sort is translated, gives equal elements in their order."""
    return torch.sort(self, dim, descending)


def argsort_stable(self: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Tensor:
    """aten::argsort.stable, which only programs without a backward pass have."""
    return torch.sort(self, dim, descending)[1]


def cummax(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """aten::cummax: each element is compared with all before it; of equal ones, the last counts."""
    return _running(self, dim, torch.Tensor.amax, torch.ge)


def cummin(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """aten::cummin, likewise."""
    return _running(self, dim, torch.Tensor.amin, torch.le)


def _running(
    self: Tensor, dim: int, extreme: Callable[..., Tensor], reaches: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    if self.dim() == 0:
        return self.clone(), torch.zeros_like(self, dtype=torch.long)
    x = self.movedim(dim, -1)
    places = torch.arange(x.shape[-1], device=self.device)
    before = places.unsqueeze(0) <= places.unsqueeze(1)
    # An element stands for those after it, which do not matter.
    compared = torch.where(before, x.unsqueeze(-2), x.unsqueeze(-1))
    found = extreme(compared, -1)
    index = torch.where(before & reaches(compared, found.unsqueeze(-1)), places, 0).amax(-1)
    index = index.movedim(-1, dim)
    return self.gather(dim, index), index


def kthvalue(self: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """aten::kthvalue: of equal elements, which is found is as little defined as in PyTorch."""
    if self.dim() == 0:
        return self.clone(), torch.zeros_like(self, dtype=torch.long)
    values, places = (one.narrow(dim, k - 1, 1) for one in torch.sort(self, dim))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def median_of_axis(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """aten::median.dim: the lower one of two in the middle; NaN, and where it is, if there is one."""
    if self.dim() == 0:
        return kthvalue(self, 1)
    value, place = kthvalue(self, (self.shape[dim] + 1) // 2, dim, True)
    if self.is_floating_point():
        nan = self.isnan()
        place = torch.where(nan.any(dim, keepdim=True), nan.to(torch.int64).argmax(dim, keepdim=True), place)
        value = self.gather(dim, place)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def nanmedian_of_axis(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """aten::nanmedian.dim: the median of what is no NaN."""
    if self.dim() == 0 or not self.is_floating_point():
        return median_of_axis(self, dim, keepdim)
    # A NaN is after all others.
    places = torch.sort(torch.where(self.isnan(), torch.inf, self), dim)[1]
    count = self.isnan().logical_not().sum(dim, keepdim=True)
    place = places.gather(dim, ((count - 1) // 2).clamp(min=0))
    value = self.gather(dim, place)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def median(self: Tensor) -> Tensor:
    """aten::median: of all elements. Equal ones share its gradient."""
    flat = self.flatten()
    return _of_equal(flat, median_of_axis(flat, 0)[0])


def nanmedian(self: Tensor) -> Tensor:
    """aten::nanmedian: of all elements that are no NaN."""
    flat = self.flatten()
    return _of_equal(flat, nanmedian_of_axis(flat, 0)[0])


def _of_equal(flat: Tensor, value: Tensor) -> Tensor:
    """Return a value of a vector as the mean of all elements that are equal to it."""
    if not flat.is_floating_point():
        return value
    equal = (flat == value) | (flat.isnan() & value.isnan())
    return torch.where(equal, flat, 0.0).sum() / equal.sum()


def mode(self: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """aten::mode: the most frequent element, of several the least, and where it is for the last time."""
    if self.dim() == 0:
        return kthvalue(self, 1)
    x = self.movedim(dim, -1)
    equal = x.unsqueeze(-1) == x.unsqueeze(-2)
    # How often, and how many are less.
    count = equal.sum(-1)
    less = (x.unsqueeze(-1) > x.unsqueeze(-2)).sum(-1)
    most = count == count.amax(-1, keepdim=True)
    first = torch.where(most, less, x.shape[-1])
    places = torch.arange(x.shape[-1], device=self.device)
    place = torch.where(first == first.amin(-1, keepdim=True), places, 0).amax(-1, keepdim=True).movedim(-1, dim)
    value = self.gather(dim, place)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def index_reduce(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """aten::index_reduce: `scatter_reduce` of whole rows; `index` is (K) or a number, `source` has K rows."""
    if self.dim() == 0:
        rows = index_reduce(
            self.unsqueeze(0), 0, index.reshape(1), source.reshape(1), reduce, include_self=include_self
        )
        return rows.squeeze(0)
    column = [1] * self.dim()
    column[dim] = -1
    places = index.reshape(column).expand(source.shape)
    name = {"mean": "mean", "prod": "prod", "amin": "amin", "amax": "amax"}[reduce]
    found = scatter_reduce(self, dim, places, source, name, include_self=include_self)
    if found is NotImplemented:
        return self.scatter_reduce(dim, places, source, name, include_self=include_self)
    return found


def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """aten::put: elements of `source` at places among all elements of `self`, or added to what is there."""
    flat, places = self.flatten(), index.flatten()
    places = torch.where(places < 0, places + self.numel(), places)
    values = source.flatten()
    changed = flat.scatter_add(0, places, values) if accumulate else flat.scatter(0, places, values)
    return changed.view(self.shape)


def take(self: Tensor, index: Tensor) -> Tensor:
    """aten::take: elements at places among all elements."""
    places = index.flatten()
    places = torch.where(places < 0, places + self.numel(), places)
    return self.flatten().index_select(0, places).view(index.shape)


def diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """aten::diagonal_scatter: the tensor with a diagonal of its dimensions `dim1` and `dim2` replaced."""
    matrices = self.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(size, device=self.device) for size in matrices.shape[-2:])
    length = src.shape[-1]
    if isinstance(length, int) and length == 0:
        return self.clone()
    # Element k of a diagonal is in row k, or in column k where it begins below the first row.
    places = (rows if offset >= 0 else columns).clamp(max=length - 1)
    along = src.index_select(-1, places).unsqueeze(-1 if offset >= 0 else -2)
    on_diagonal = columns - rows.unsqueeze(-1) == offset
    return torch.where(on_diagonal, along, matrices).movedim((-2, -1), (dim1, dim2))


def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """aten::scatter_reduce: means, and what leaves out the elements of `self` that others take the place of.

    ONNX has sums, products, minima and maxima with `self`.
    """
    if reduce == "mean" and not self.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    if include_self and reduce != "mean":
        return NotImplemented  # type: ignore[no-any-return]
    neutral = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}[reduce]
    if reduce in ("amax", "amin") and not self.is_floating_point():
        limits = torch.iinfo(self.dtype)
        neutral = limits.min if reduce == "amax" else limits.max
    ones = torch.ones_like(src, dtype=torch.int64)
    count = torch.zeros_like(self, dtype=torch.int64).scatter_add(dim, index, ones)
    kept = self if include_self else torch.where(count > 0, torch.full_like(self, neutral), self)
    if reduce != "mean":
        return kept.scatter_reduce(dim, index, src, reduce)
    total = kept.scatter_add(dim, index, src)
    return total / (count + 1 if include_self else count.clamp(min=1))


def searchsorted(
    sorted_sequence: Tensor,
    self: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """aten::searchsorted: how many elements of each sequence are before each value.

    `sorted_sequence` is (C) or (*, C), `self` any shape or (*, K); with `right` (or `side` "right") equal elements are
    before a value. `sorter` is what sorts the sequences.
    """
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    if sorted_sequence.dim() > 1:
        sorted_sequence = sorted_sequence.unsqueeze(-2)
    values = self.unsqueeze(-1)
    after_equal = right or side == "right"
    if torch.is_floating_point(self):
        # A NaN is after all others.
        before = (sorted_sequence > values if after_equal else sorted_sequence >= values).logical_not()
    else:
        before = values >= sorted_sequence if after_equal else values > sorted_sequence
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def bucketize(self: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """aten::bucketize: `searchsorted` with its first two arguments exchanged, and (C) boundaries."""
    return searchsorted(boundaries, self, out_int32=out_int32, right=right)


def repeat_interleave(repeats: Tensor, *, output_size: Any = None) -> Tensor:
    """aten::repeat_interleave.Tensor: each index as often as `repeats`, (G), says, `output_size` in all."""
    if output_size is None:
        return NotImplemented  # type: ignore[no-any-return]
    return _index_of_rows(repeats.cumsum(0), output_size).to(repeats.dtype)


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """aten::segment_reduce: rows of data, (R, *), reduced by (G) lengths or (G + 1) offsets.

    Lengths have the sum R; with `unsafe` they need not, which is not decomposed. Rows before the first offset, or from
    the last one on, are of no segment. `initial` takes part in each segment, but is not counted by means.
    """
    given = lengths if lengths is not None else offsets
    if given is None or given.dim() != 1 or axis != 0 or (lengths is not None and unsafe):
        return NotImplemented  # type: ignore[no-any-return]
    ends = given.cumsum(0) if lengths is not None else given
    index = _index_of_rows(ends, data.shape[0])
    segments = given.shape[0] if lengths is not None else given.shape[0] + 1
    inner = slice(None) if lengths is not None else slice(1, -1)
    neutral = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -torch.inf, "min": torch.inf}[reduce]
    begin = data.new_full((segments, *data.shape[1:]), neutral if initial is None else initial)
    if reduce in ("sum", "mean"):
        total = begin.index_add(0, index, data)[inner]
    else:
        places = index.view([-1] + [1] * (data.dim() - 1)).expand(data.shape)
        name = {"prod": "prod", "max": "amax", "min": "amin"}[reduce]
        total = begin.scatter_reduce(0, places, data, name)[inner]
    if reduce != "mean":
        return total
    count = (lengths if lengths is not None else given.diff()).view([-1] + [1] * (data.dim() - 1))
    nothing = total if initial is not None else torch.full_like(total, torch.nan)
    return torch.where(count > 0, total / count.clamp(min=1), nothing)


def segment_reduce_backward(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Tensor:
    """aten::_segment_reduce_backward with reduce "sum": for each row the gradient of its segment."""
    ends = _ends(reduce, lengths, offsets, axis, initial)
    if ends is None:
        return NotImplemented  # type: ignore[no-any-return]
    if lengths is None:
        none = grad.new_zeros((1, *grad.shape[1:]))
        grad = torch.cat([none, grad, none])
    return grad[_index_of_rows(ends, data.shape[0])]


def _ends(
    reduce: str, lengths: Tensor | None, offsets: Tensor | None, axis: int, initial: float | None
) -> Tensor | None:
    """The ends of the segments, after the beginning of the first one if by offsets; None for what is not decomposed."""
    given = lengths if lengths is not None else offsets
    if given is None or given.dim() != 1 or reduce != "sum" or axis != 0 or initial:
        return None
    return given.cumsum(0) if lengths is not None else given


def _index_of_rows(ends: Tensor, rows: Any) -> Tensor:
    return bucketize(torch.arange(rows, device=ends.device), ends, right=True)
