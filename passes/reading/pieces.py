"""Readers of operators that cut pieces out of tensors, or put them together."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, ZERO, Poly, number
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import INTEGERS, Opaque, attribute, given
from gradfuse.passes.reading.registry import reads

_END = 10**9  # what slices to the end of a dimension have at least, as tf2onnx writes


def sliced(forms: KnownForms, x: Form, axis: int, start: Poly, step: int, size: Poly) -> Form:
    """size elements from `start` on along an axis of one variable."""
    if len(x.groups[axis]) != 1:
        raise Opaque("a slice of a composed dimension")
    v = x.variables(axis)[0]
    index = start if size.constant == 1 else forms.algebra.var(v).scaled(step) + start
    names = {v: index}
    groups = tuple((() if size.constant == 1 else (size,)) if a == axis else g for a, g in enumerate(x.groups))
    if size.constant == 1:
        names |= {w: forms.algebra.var(w - 1) for w in range(v + 1, len(x.sizes))}
    return Form(groups, forms.algebra.substitute(x.poly, names))


def _slice_of_symbol(forms: KnownForms, size: Poly, start: int, end: int, step: int) -> tuple[Poly, Poly]:
    """Where a slice of a dimension that is not known begins, and how many elements it has."""
    if step < 1 or start < -1:
        raise Opaque("a slice from the end of a symbolic dimension")
    first = number(start) if start >= 0 else size - UNIT
    if step == 1 and start >= 0 and (end == _END or end < 0):
        rest = size - number(start) + number(0 if end == _END else end)
        # All but one element are as many where there is one.
        if start - (0 if end == _END else end) <= 1:
            return first, rest
    return first, forms.algebra.slice_size(size, start, end, step)


def _known_integers(forms: KnownForms, value: ir.Value) -> list[int]:
    """The elements of a constant, or of what the shapes of tensors say, where these are numbers."""
    found = [size.integer for size in _known_sizes(forms, value)]
    numbers = [n for n in found if n is not None]
    if len(numbers) < len(found):
        raise Opaque("a slice that is not constant")
    return numbers


def _known_sizes(forms: KnownForms, value: ir.Value) -> list[Poly]:
    array = forms.constant(value)
    found = forms.vector(value) if array is None else [number(int(n)) for n in array.ravel()]
    if found is None:
        raise Opaque("a slice that is not constant")
    return found


@reads("Slice", uses_output_shape=True)
def _slice(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    rank = len(x.groups)
    starts, ends = _known_integers(forms, given(node.inputs, 1)), _known_sizes(forms, given(node.inputs, 2))
    axes, steps = (None if v is None else _known_integers(forms, v) for v in (*node.inputs[3:], None, None)[:2])
    axes = list(range(len(starts))) if axes is None else [axis % rank for axis in axes]
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, limit, step in zip(axes, starts, ends, steps, strict=True):
        size = forms.extent(x.groups[axis])
        if limit.integer is None:
            if start != 0 or step != 1 or (limit != size and (size.integer or 0) < 2):
                raise Opaque("a slice that is not constant")
            if limit != size:
                count = forms.extent(forms.groups_of(forms.output(node))[axis])
                x = sliced(forms, x, axis, ZERO, 1, count)
                forms.layouts.cut(count, limit)
            continue
        end = min(limit.integer, _END)
        if start == 0 and step == 1 and end == _END:
            continue
        total = size.integer
        if total is None:
            first, count = _slice_of_symbol(forms, size, start, end, step)
            # One that the exporter knows to be there is not repeated.
            stated = forms.output(node).shape
            x = sliced(forms, x, axis, first, step, UNIT if stated is not None and stated[axis] == 1 else count)
            continue
        span = range(total)[start:end:step]
        if span == range(total):
            continue
        if not len(span):
            raise Opaque("an empty slice")
        x = sliced(forms, x, axis, number(span[0]), span.step, number(len(span)))
    return x


@reads("Split")
def _split(forms: KnownForms, node: ir.Node) -> list[Form | None]:
    x = forms.operand(node, 0)
    axis = attribute(node, "axis", 0) % len(x.groups)
    total = forms.extent(x.groups[axis]).integer
    if total is None:
        raise Opaque("a split of a symbolic dimension")
    array = forms.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    count = len(node.outputs)
    if array is not None:
        sizes = [int(n) for n in array.ravel()]
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        raise Opaque("a split that is not constant")
    else:
        part = -(-total // count)
        sizes = [min(part, total - k * part) for k in range(count)]
    result: list[Form | None] = []
    start = 0
    for size in sizes:
        result.append(
            x if size == total else sliced(forms, x, axis, number(start), 1, number(size)) if size > 0 else None
        )
        start += size
    return result


def _window(forms: KnownForms, x: Form, axis: int, start: Poly, size: Poly, total: Poly) -> Form:
    """x at positions start, start + 1, ... of a dimension of `total` elements, 0 elsewhere."""
    algebra = forms.algebra
    if len(x.groups[axis]) > 1:
        raise Opaque("a padded dimension is composed")
    first = sum(len(g) for g in x.groups[:axis])
    if not x.groups[axis]:
        shifted = {w: algebra.var(w + 1) for w in range(first, len(x.sizes))}
        inside = algebra.equal_zero(algebra.var(first) - start)
    else:
        v = algebra.var(first)
        shifted = {first: v - start}
        above = UNIT if not start else UNIT - algebra.less_than_zero(v - start)
        below = UNIT if start + size == total else algebra.less_than_zero(v - start - size)
        inside = algebra.mul(above, below)
    groups = tuple((total,) if a == axis else g for a, g in enumerate(x.groups))
    return Form(groups, algebra.mul(inside, algebra.substitute(x.poly, shifted)))


def windowed(forms: KnownForms, x: Form, axis: int, start: Poly, total: Poly) -> Form:
    """x as the elements from `start` on of a dimension of `total` elements, which are 0 elsewhere."""
    size = forms.extent(x.groups[axis])
    return x if size == total else _window(forms, x, axis, start, size, total)


@reads("Concat")
def _concat(forms: KnownForms, node: ir.Node) -> Form:
    parts = forms.operands(node)
    form = concatenated(forms, parts, attribute(node, "axis", 0) % len(parts[0].groups))
    if given(node.inputs, 0).dtype in INTEGERS and _are_blank(parts[-1]) and any(p.sizes for p in parts[:-1]):
        # Labels that are padded are one value, as those that Pad gives; in pieces, a condition would choose between.
        return forms.named(("padded", form), forms.one_variable_each(form), node.outputs[0])
    return form


def _are_blank(part: Form) -> bool:
    """Whether what ends a tensor is one number below 0 that is no class, and no part of a shape."""
    value = part.poly.constant
    return value is not None and value < (-1 if len(part.groups) == 1 else 0)


def concatenated(forms: KnownForms, parts: Sequence[Form], axis: int) -> Form:
    """The forms one after the other along an axis."""
    sizes = [forms.extent(p.groups[axis]) for p in parts]
    live = [k for k, s in enumerate(sizes) if s.constant != 0]
    if len(live) == 1:
        return parts[live[0]]
    for k in live[1:]:
        for a, (first, other) in enumerate(zip(parts[live[0]].groups, parts[k].groups, strict=True)):
            if a != axis:
                forms.layouts.demand(forms.extent(first), forms.extent(other))
    total = sum(sizes[1:], sizes[0])
    placed, start = [], ZERO
    for part, size in zip(parts, sizes, strict=True):
        placed.append(_window(forms, part, axis, start, size, total))
        start = start + size
    groups, polys = forms.broadcast(placed)
    return Form(groups, sum(polys[1:], polys[0]))


@reads("Pad")
def _pad(forms: KnownForms, node: ir.Node) -> Form:
    x = forms.operand(node, 0)
    pads = forms.constant(given(node.inputs, 1))
    axes = forms.vector(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    rank = len(x.groups)
    order = list(range(rank)) if len(node.inputs) < 4 or node.inputs[3] is None else _axes_in_order(axes, rank)
    if pads is None or attribute(node, "mode", "constant") != "constant" or pads.size != 2 * len(order):
        raise Opaque("a pad that is not constant")
    if len(node.inputs) > 2 and node.inputs[2] is not None and forms.form(node.inputs[2]).poly.constant != 0:
        raise Opaque("a pad that is not zero")
    for k, axis in enumerate(order):
        before, after = int(pads[k]), int(pads[k + len(order)])
        if before or after:
            if before < 0 or after < 0:
                raise Opaque("a negative pad")
            size = forms.extent(x.groups[axis])
            x = _window(forms, x, axis, number(before), size, size + number(before + after))
    return x


def _axes_in_order(axes: Sequence[Poly] | None, rank: int) -> list[int]:
    """Axes that other inputs refer to one by one."""
    found = [None if a.integer is None else a.integer % rank for a in axes or [ZERO, ZERO]]
    if None in found or len(set(found)) < len(found):
        raise Opaque("axes are not constant")
    return [a for a in found if a is not None]
