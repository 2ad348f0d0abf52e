"""Rules of operators that change shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradfuse.dynamic_batch.analysis import Call, Old, kept, rule
from gradfuse.dynamic_batch.layouts import ONE, Layout, Multiple, Product

_WHOLE = 2**31 - 1
"""An end of a slice that is no smaller means all of it."""


def _places(call: Call, layout: Layout) -> list[Layout]:
    """Where the batch can be in another shape of the same numbers: by itself first."""
    facts, batch = call.known.facts, call.known.batch
    sizes, target = call.sizes(), call.result_sizes()
    before = Product.of(sizes[: layout.axis]) * layout.before
    after = layout.after * Product.of(sizes[layout.axis + 1 :])
    found = []
    for axis, size in enumerate(target):
        left, right = before.over(Product.of(target[:axis])), after.over(Product.of(target[axis + 1 :]))
        if left is None or right is None:
            continue
        place = Layout(axis, left, right)
        if Product.of([size]) == place.size(batch) or size in facts.invented:
            found.append(place)
    return sorted(found, key=lambda place: not place.plain)


@rule("Reshape")
def _reshape(call: Call) -> None:
    layout, elements = call.layout(0), call.elements(1)
    target = call.result_sizes()
    if elements is None or len(elements) != len(target):
        call.refuse("its shape is not known")
    if layout is None:
        if call.value(0) in call.known.counts:
            call.refuse("computes with the size of the batch")
        # The input has the same size for all batches, and so has what it becomes.
        call.shape(1, [_as_it_was(call, k, e, k) for k, e in enumerate(elements)])
        return
    places = _places(call, layout)
    if not places:
        call.refuse(f"its shape {_shown(target)} leaves no axis to the batch")
    if any(size == 0 for size in target):
        call.refuse("it has no elements")
    copies = not call.attribute("allowzero", 0)

    def follows(place: Layout) -> bool:
        """Whether the node gives this for all batches, as it is."""
        for k, element in enumerate(elements):
            batched = isinstance(element, Multiple) or (element == 0 and copies and k == layout.axis)
            if batched != (k == place.axis) and not (k == place.axis and element == -1):
                return False
            if isinstance(element, Multiple) and element.factor != place.per_row:
                return False
        return elements[place.axis] != 0 or layout.per_row == place.per_row

    sizes = call.sizes()

    def keeps(place: Layout) -> int:
        """How many of the two sides of the batch have the sizes that they had."""
        ahead = target[: place.axis] == sizes[: layout.axis]
        return ahead + (target[place.axis + 1 :] == sizes[layout.axis + 1 :])

    places.sort(key=lambda place: (not place.plain, not follows(place), -keeps(place)))
    ways = [place for place in places if place.plain == places[0].plain]
    place = ways[call.choose(len(ways))]
    call.give(place)
    if not follows(place):
        new = [_as_it_was(call, k, e, layout.axis) for k, e in enumerate(elements)]
        if -1 not in new[: place.axis] + new[place.axis + 1 :]:
            new[place.axis] = -1
        elif place.axis == layout.axis and place.per_row == layout.per_row and copies:
            new[place.axis] = 0
        else:
            new[place.axis] = Multiple(place.per_row)
        call.shape(1, new)


def _as_it_was(call: Call, axis: int, element: Any, batch_axis: int) -> int | Multiple | Old:
    """An element of a shape that does not depend on the batch."""
    size = call.result_sizes()[axis]
    if (
        isinstance(element, Multiple)
        or (element == -1 and isinstance(size, int))
        or (element == 0 == axis - batch_axis)
    ):
        if not isinstance(size, int):
            call.refuse(f"its shape {_shown(call.result_sizes())} leaves no axis to the batch")
        return size
    return int(element) if isinstance(element, (int, np.integer)) else Old(axis)


def _shown(sizes: list[Any]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


@rule("Flatten")
def _flatten(call: Call) -> None:
    layout = call.layout(0)
    assert layout is not None
    axis = call.attribute("axis", 1)
    first = layout.axis < (axis + call.rank() if axis < 0 else axis)
    found = [place for place in _places(call, layout) if place.axis == (0 if first else 1)]
    if not found:
        call.refuse("it leaves no axis to the batch")
    call.give(found[0])


@rule("Unsqueeze")
def _unsqueeze(call: Call) -> None:
    layout, axes = call.layout(0), call.ints(1, "axes") or []
    assert layout is not None
    rank = call.rank() + len(axes)
    added = {axis % rank for axis in axes}
    kept = [axis for axis in range(rank) if axis not in added]
    call.give(layout.at(kept[layout.axis]))


@rule("Squeeze")
def _squeeze(call: Call) -> None:
    layout, axes, sizes = call.layout(0), call.ints(1, "axes"), call.sizes()
    assert layout is not None
    if axes is None:
        if not all(isinstance(size, int) for size in sizes):
            call.refuse("its axes are not known")
        gone = {axis for axis, size in enumerate(sizes) if size == 1 and axis != layout.axis}
        if sizes[layout.axis] == 1 and call.node.outputs[0].uses():
            call.refuse("takes the axis of the batch away")
        # Without them a batch of one row would lose its axis.
        call.known.attributes[call.node, "axes"] = tuple(sorted(gone))
    else:
        gone = {axis % len(sizes) for axis in axes}
        if layout.axis in gone:
            call.refuse("takes the axis of the batch away")
    call.give(layout.at(layout.axis - sum(axis < layout.axis for axis in gone)))


@rule("Transpose")
def _transpose(call: Call) -> None:
    layout = call.layout(0)
    assert layout is not None
    perm = call.attribute("perm", list(range(call.rank()))[::-1])
    call.give(layout.at(perm.index(layout.axis)))


@rule("Expand")
def _expand(call: Call) -> None:
    layout, elements, rank = call.layout(0), call.elements(1), len(call.result_sizes())
    if elements is None or call.value(0) in call.known.counts:
        call.refuse("its shape is not known")
    ahead = rank - len(elements)
    batched = [ahead + k for k, element in enumerate(elements) if isinstance(element, Multiple)]
    if layout is None:
        made = _made_by(call, batched, [element for element in elements if isinstance(element, Multiple)])
        axis = made.axis - rank + call.rank()
        if axis >= 0:
            call.repeat(0, made.at(axis), broadcasts=True)
        call.give(made)
        return
    axis = layout.axis + rank - call.rank()
    if any(other != axis for other in batched):
        call.refuse("expands another axis to the batch")
    call.give(layout.at(axis))
    if axis < ahead:
        return
    element = elements[axis - ahead]
    if isinstance(element, Multiple):
        if element.factor != layout.per_row:
            call.refuse("expands the batch")
    elif element != 1:
        if element is None or Product.of([element]) != layout.size(call.known.batch):
            call.refuse(f"expands the batch to {element}")
        # 1 keeps what there is.
        call.shape(1, [1 if k == axis - ahead else kept(e, k) for k, e in enumerate(elements)])


def _made_by(call: Call, axes: list[int], elements: list[Multiple]) -> Layout:
    """Where the batch is in what is repeated that often along an axis: all rows are equal."""
    if len(axes) != 1:
        call.refuse("repeats several axes by the batch")
    return Layout(axes[0], ONE, elements[0].factor)


@rule("ConstantOfShape")
def _constant_of_shape(call: Call) -> None:
    elements = call.elements(0) or []
    axes = [axis for axis, element in enumerate(elements) if isinstance(element, Multiple)]
    call.give(_made_by(call, axes, [element for element in elements if isinstance(element, Multiple)]))


@rule("Tile")
def _tile(call: Call) -> None:
    layout, elements = call.layout(0), call.elements(1)
    if elements is None or call.value(0) in call.known.counts:
        call.refuse("its repeats are not known")
    batched = [axis for axis, element in enumerate(elements) if isinstance(element, Multiple)]
    if layout is None:
        found = _made_by(call, batched, [element for element in elements if isinstance(element, Multiple)])
        call.give(Layout(found.axis, ONE, found.after * Product.of([call.sizes()[found.axis]])))
        return
    times = elements[layout.axis]
    if batched or not isinstance(times, (int, np.integer)) or times < 1:
        call.refuse("repeats the batch")
    call.give(Layout(layout.axis, layout.before * Product(int(times)), layout.after))


@rule("Slice")
def _slice(call: Call) -> None:
    layout, rank = call.layout(0), call.rank()
    starts, ends = call.elements(1), call.elements(2)
    if layout is None:
        call.refuse("cuts at the size of the batch")
    count = len(starts or ends or ())
    axes = call.ints(3, "axes") or list(range(count or rank))
    steps = call.elements(4) or [1] * len(axes)
    for k, axis in enumerate(axes):
        if axis % rank != layout.axis:
            if any(part is not None and isinstance(part[k], Multiple) for part in (starts, ends)):
                call.refuse("cuts at the size of the batch")
            continue
        start, end = (None if part is None else part[k] for part in (starts, ends))
        if start != 0 or steps[k] != 1 or end is None:
            call.refuse("cuts the batch")
        if isinstance(end, Multiple):
            whole = end.factor == layout.per_row
        else:
            size = layout.size(call.known.batch)
            whole = isinstance(end, int) and end >= (_WHOLE if size.names else size.number)
            if whole and end < _WHOLE and ends is not None:
                call.shape(2, [2**63 - 1 if m == k else kept(e, m) for m, e in enumerate(ends)])
        if not whole:
            call.refuse("cuts the batch")
    call.give(layout)


@rule("Concat")
def _concat(call: Call) -> None:
    rank = len(call.result_sizes())
    layout = call.joined(range(len(call.node.inputs)), rank, broadcasts=False)
    if layout.axis == call.axis(None, rank=rank):
        call.refuse("joins along the batch")
    call.give(layout)


@rule("Split")
def _split(call: Call) -> None:
    layout = call.layout(0)
    call.require_fixed(0)
    if layout is None or layout.axis == call.axis():
        call.refuse("splits the batch")
    call.give(layout)


@rule("Pad")
def _pad(call: Call) -> None:
    layout = call.layout(0)
    call.require_fixed(0)
    assert layout is not None
    axes = call.ints(3, "axes") if call.has(3) else list(range(call.rank()))
    pads = call.elements(1)
    axes = [axis % call.rank() for axis in axes or []]
    if layout.axis in axes:
        at = axes.index(layout.axis)
        if pads is None or pads[at] != 0 or pads[at + len(axes)] != 0:
            call.refuse("pads the batch")
    call.give(layout)


@rule("Gather")
def _gather(call: Call) -> None:
    data, indices = call.layout(0), call.layout(1)
    axis = call.axis()
    call.require_fixed(0, 1)
    if data is not None and indices is not None:
        call.refuse("takes rows of the batch at indices of the batch")
    if indices is not None:
        call.give(indices.at(axis + indices.axis))
        return
    assert data is not None
    if data.axis == axis:
        call.refuse("takes rows of the batch")
    call.give(data.at(data.axis if data.axis < axis else data.axis - 1 + call.rank(1)))


@rule("GatherElements")
def _gather_elements(call: Call) -> None:
    layout = call.joined([0, 1], call.rank(), broadcasts=False)
    if layout.axis == call.axis():
        call.refuse("takes rows of the batch")
    call.give(layout)


@rule("ScatterElements")
def _scatter_elements(call: Call) -> None:
    layout = call.joined([0, 1, 2], call.rank(), broadcasts=False)
    if layout.axis == call.axis():
        call.refuse("writes rows of the batch")
    call.give(layout)


def _depth(call: Call, index: int) -> int:
    """How many axes each of the indices of an input says."""
    size = call.sizes(index)[-1]
    if not isinstance(size, int):
        call.refuse("its indices are not known")
    return size


@rule("GatherND")
def _gather_nd(call: Call) -> None:
    data, indices = call.layout(0), call.layout(1)
    dims, depth, rank = call.attribute("batch_dims", 0), _depth(call, 1), call.rank(1)
    call.require_fixed(0, 1)
    layout = data or indices
    assert layout is not None
    if layout.axis < dims:
        for index, one in enumerate((data, indices)):
            if one is None:
                call.repeat(index, layout, broadcasts=False)
            elif one != layout:
                call.refuse("joins the batches of several axes")
        call.give(layout)
        return
    if data is None and indices is not None and indices.axis < rank - 1:
        call.give(indices)
    elif data is not None and indices is None and data.axis >= dims + depth:
        call.give(data.at(rank - 1 + data.axis - dims - depth))
    else:
        call.refuse("takes rows of the batch")


@rule("ScatterND")
def _scatter_nd(call: Call) -> None:
    data, indices, updates = (call.layout(k) for k in range(3))
    depth, rank = _depth(call, 1), call.rank(1)
    call.require_fixed(0, 1, 2)
    ahead = rank - 1 - depth
    layout = data or (None if updates is None else updates.at(updates.axis - ahead))
    if indices is not None or layout is None or layout.axis < depth:
        call.refuse("writes rows of the batch")
    if data is None:
        call.repeat(0, layout, broadcasts=False)
    if updates is None:
        call.repeat(2, layout.at(layout.axis + ahead), broadcasts=False)
    elif updates != layout.at(layout.axis + ahead):
        call.refuse("joins the batches of several axes")
    call.give(layout)
