"""Reductions over axes, and running sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradfuse.differentiation.rules import Call, Gradient, gradient, no_gradient
from gradfuse.differentiation.tensors import Tensor

# The edges of MelWeightMatrix are rounded to bins.
no_gradient("ArgMax", "ArgMin", "Shape", "Size", "NonZero", "ConstantOfShape", "MelWeightMatrix")


class _Reduction:
    """A reduction: its input, its output and the output's gradient with the reduced axes kept as 1."""

    def __init__(self, call: Call) -> None:
        x, dy = call.operands()
        self.call, self.x = call, x
        self.axes = self._axes()
        self.y, self.dy = self._kept(call.y[0]), self._kept(dy)

    def _axes(self) -> list[int] | Tensor | None:
        """The axes: a list, a tensor where they are computed, or None: all."""
        given = self.call.attribute("axes")
        axes = self.call.input(1)
        if axes is not None:
            found = self.call.constant(1)
            if found is None:
                return axes
            given = [int(axis) for axis in found]
        if given:
            rank = self.call.rank(self.x)
            # Reducing a number along its axis 0 leaves it.
            return sorted(axis % rank for axis in given) if rank else []
        return [] if self.call.attribute("noop_with_empty_axes", 0) else None

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.call.attribute("keepdims", 1) or self.axes == []:
            return tensor
        if self.axes is None:
            return tensor  # of shape (), which broadcasts
        if isinstance(self.axes, list):
            return tensor.unsqueeze(*self.axes)
        return tensor.op("Unsqueeze", self.axes)

    def expanded(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.x.shape())

    def count(self) -> Tensor:
        """The number of elements that go into one result, in the input's type."""
        return (self.x.op("Size").cast(self.x.dtype)) / self.y.op("Size").cast(self.x.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        return self.reduced("ReduceSum", tensor)

    def reduced(self, op_type: str, tensor: Tensor) -> Tensor:
        """Another reduction over the same axes, which are kept as 1."""
        if self.axes == []:
            return tensor
        if isinstance(self.axes, Tensor):
            noop = self.call.attribute("noop_with_empty_axes", 0)
            return tensor.op(op_type, self.axes, keepdims=1, noop_with_empty_axes=noop)
        if self.axes is None:
            return tensor.op(op_type, keepdims=1)
        if op_type != "ReduceSum" and tensor.tape.opset < 18:
            return tensor.op(op_type, axes=self.axes, keepdims=1)
        return tensor.op(op_type, tensor.tape.ints(*self.axes), keepdims=1)


@gradient("ReduceSum")
def reduce_sum(call: Call) -> Iterator[Gradient]:
    r = _Reduction(call)
    yield r.expanded(r.dy)


@gradient("ReduceMean")
def reduce_mean(call: Call) -> Iterator[Gradient]:
    r = _Reduction(call)
    dims = call.dims(r.x)
    sizes = None if not isinstance(r.axes, list) and r.axes is not None else r.axes
    reduced = [dims[axis] for axis in (range(len(dims)) if sizes is None else sizes)]
    if isinstance(r.axes, Tensor) or not all(isinstance(size, int) for size in reduced):
        yield r.expanded(r.dy / r.count())
    else:
        yield r.expanded(r.dy * (1 / max(int(np.prod([int(size or 0) for size in reduced])), 1)))


@gradient("ReduceMax", "ReduceMin")
def reduce_extreme(call: Call) -> Iterator[Gradient]:
    """Elements that are equal share the gradient, as in torch.amax."""
    r = _Reduction(call)
    hits = r.x.equals(r.y).cast(r.x.dtype)
    yield r.dy / r.sum(hits) * hits


@gradient("ReduceProd")
def reduce_prod(call: Call) -> Iterator[Gradient]:
    """The product of the others: by division where no element is 0, else to the one zero of its result only."""
    r = _Reduction(call)
    zero = r.x.equals(0)
    others = zero.where(r.x.ones(), r.x)
    reduced = r.reduced("ReduceProd", others)
    zeros = r.sum(zero.cast(r.x.dtype))
    plain = reduced / others
    yield r.dy * zeros.equals(0).where(plain, reduced.masked(zero.op("And", zeros.equals(1))))


@gradient("ReduceL1")
def reduce_l1(call: Call) -> Iterator[Gradient]:
    r = _Reduction(call)
    yield r.dy * r.x.sign()


@gradient("ReduceL2")
def reduce_l2(call: Call) -> Iterator[Gradient]:
    """0 at 0, as in torch.norm."""
    r = _Reduction(call)
    yield (r.dy * r.x / r.y).masked(r.y > 0)


@gradient("ReduceLogSum")
def reduce_log_sum(call: Call) -> Iterator[Gradient]:
    r = _Reduction(call)
    yield r.expanded(r.dy / r.y.exp())


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(call: Call) -> Iterator[Gradient]:
    r = _Reduction(call)
    yield r.dy * (r.x - r.y).exp()


@gradient("ReduceSumSquare")
def reduce_sum_square(call: Call) -> Iterator[Gradient]:
    r = _Reduction(call)
    yield r.dy * r.x * 2


@gradient("CumSum")
def cum_sum(call: Call) -> Iterator[Gradient]:
    dy, axis = call.dy[0], call.x[1]
    assert dy is not None
    reverse = 1 - call.attribute("reverse", 0)
    yield dy.op("CumSum", axis, exclusive=call.attribute("exclusive", 0), reverse=reverse)


@gradient("Det", limits="time grows with the fifth power of the size")
def det(call: Call) -> Iterator[Gradient]:
    """The cofactors, which singular matrices have as well: determinants with one row replaced by a unit vector."""
    x, dy = call.operands()
    tape = call.tape
    places = tape.op("Range", tape.constant(0), x.size(-1).squeeze(0), tape.constant(1))
    units = places.unsqueeze(0).equals(places.unsqueeze(1))
    # (row, column, n, n)
    replaced, by = units.unsqueeze(1, 3), units.unsqueeze(0, 2).cast(x.dtype)
    cofactors = replaced.where(by, x.unsqueeze(-3, -4)).op("Det")
    yield dy.unsqueeze(-1, -2) * cofactors
