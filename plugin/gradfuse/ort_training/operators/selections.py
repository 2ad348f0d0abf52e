"""Gradients of selections, in which `shape` is the shape of what was selected from; concatenation and splitting."""

from __future__ import annotations

from collections.abc import Sequence

from gradfuse.ort_training.operators.building import Operators, Unsupported, Value, rank


def gather_grad(op: Operators, shape: Value, indices: Value, dy: Value, axis: int = 0) -> Value:
    before, width = axis % (rank(dy) - rank(indices) + 1), rank(indices)
    size = rank(dy) - width + 1
    others = [i for i in range(size) if i != before]
    # What is gathered from comes first, for scatters work on the first axes.
    selected = list(range(before, before + width))
    first = op.Transpose(dy, perm=[*selected, *(i for i in range(rank(dy)) if i not in selected)])
    blank = op.zeros(op.Gather(shape, op.ints([before, *others])), dy)
    dx = op.ScatterND(blank, op.Unsqueeze(indices, op.ints([-1])), first, reduction="add")
    return op.Transpose(dx, perm=[i + 1 if i < before else 0 if i == before else i for i in range(size)])


def gather_elements_grad(op: Operators, dy: Value, shape: Value, indices: Value, axis: int = 0) -> Value:
    return op.ScatterElements(op.zeros(shape, dy), indices, dy, axis=axis, reduction="add")


def gather_nd_grad(op: Operators, shape: Value, indices: Value, dy: Value, batch_dims: int = 0) -> Value:
    if batch_dims:
        raise Unsupported(f"batch_dims is {batch_dims}")
    return op.ScatterND(op.zeros(shape, dy), indices, dy, reduction="add")


def slice_grad(
    op: Operators,
    dy: Value,
    shape: Value,
    starts: Value,
    ends: Value,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value:
    """dy at the places that the same slice of all places takes, zero elsewhere."""
    count = op.ReduceProd(shape, keepdims=0)
    places = op.Reshape(op.Range(op.integer(0), count, op.integer(1)), shape)
    taken = op.Slice(places, starts, ends, axes, steps)
    blank = op.zeros(op.Reshape(count, op.ints([1])), dy)
    return op.Reshape(op.ScatterElements(blank, op.flat(taken), op.flat(dy), axis=0), shape)


def concat_training(op: Operators, *parts: Value, axis: int) -> Sequence[Value]:
    """Returns the concatenation, and the length of each part."""
    sizes = [op.Gather(op.Shape(part), op.ints([axis])) for part in parts]
    return op.Concat(*parts, axis=axis), op.Concat(*sizes, axis=0)


def split_training(op: Operators, x: Value, split: Value, axis: int = 0) -> Sequence[Value]:
    return op.several("Split", op.outputs, x, split, axis=axis)
