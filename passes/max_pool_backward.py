"""MaxPoolBackward: the gradient of maximum pooling.

Maximum pooling has no canonical form, so this rule matches nodes and their attributes. The numerical test runs them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import onnx_ir as ir

from gradfuse.custom_ops.max_pool_backward import places
from gradfuse.custom_ops.spatial import MOST_SPATIAL
from gradfuse.passes.algebra import UNIT, ZERO, number
from gradfuse.passes.matching import Builder, Context, FusePass, Mismatch, Rewrite, Site, names_of
from gradfuse.passes.proving.shrinking import KEPT_SIZE
from gradfuse.passes.reading import Form, Opaque, attribute
from gradfuse.passes.report import NearMiss

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_REPEATS = {"Resize", "Upsample", "Expand", "Tile", "Concat", "Gather"}
_BY_COMPARISON = (
    "the gradient of a window goes to every element that equals its maximum, and the operator's to the first of them"
)
_SCATTERS = {"ScatterElements", "ScatterND"}
_IMAGE = "image"
_STEPS = 4  # views one after the other
_INDICES = 1
_FEWEST = 3  # dimensions of what is pooled
_WITH_AXES = 4  # inputs of a Slice without steps
_FEW = 3  # windows, items and channels of a test by numbers


class FuseMaxPoolBackwardPass(FusePass):
    """Finds a gradient g that is added up, on zeros in the shape of x, at the indices that a MaxPool of x gives.

    Where windows do not overlap, it may also be put there, as MaxUnpool does.

    Or a gradient that is put where the ArgMax of a window is, by a one-hot or by a scatter, if windows of x beside each
    other are dimensions of their own.

    x, g and the indices may be viewed in one dimension for it, or in two: one for the planes, each with indices of its
    own. Indices that count columns first stay. MaxPoolGrad of onnxruntime-training is the same in one node.
    """

    operator = "MaxPoolBackward"
    training_operators = ("MaxPoolGrad",)
    linear = False
    looks_at_views = True

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        found = _scatter(site, root)
        if found is not None:
            return _bound(site, builder, root, found)
        picked = _picked(site, root)
        return None if picked is None else _bound_by_argmax(site, builder, root, picked)

    def run(self, context: Context) -> bool:
        changed = super().run(context)
        for site in context.sites() if changed else ():
            for node in site.graph:
                indices = node.outputs[_INDICES] if node.op_type == "MaxPool" and len(node.outputs) > 1 else None
                if indices is not None and not (node.domain or indices.uses() or indices.is_graph_output()):
                    site.leave(indices)
                    node.resize_outputs(1)
        return changed

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Gradients that go to what equals the maximum of its window."""
        for node in site.graph:
            if node.op_type == "Equal" and not node.domain and _compares_maxima(site, node):
                yield NearMiss(names_of([node])[0], self.operator, _BY_COMPARISON)

    def refusal(self, site: Site, rewrite: Rewrite) -> str | None:
        """If the indices are computed anyway, they cost the forward pass more than the gradient saves."""
        node = next((n for n in rewrite.runs if n.op_type in {*_SCATTERS, "MaxUnpool", "MaxPoolGrad"}), None)
        if node is None:
            return None
        positions = node.inputs[1]
        assert positions is not None
        views = _places(site, positions).values
        readers = {use.node for value in views for use in value.uses()} - {value.producer() for value in views}
        is_read = any(value.is_graph_output() for value in views)
        if is_read or any(reader.op_type != node.op_type for reader in readers - site.unread):
            return "something else reads the indices of the maxima"
        return None


def _compares_maxima(site: Site, node: ir.Node) -> bool:
    """Whether a node compares what is pooled with the maxima of its windows, which are repeated for it."""
    for value, other in itertools.permutations(node.inputs):
        if value is None or other is None:
            continue
        repeated = _viewed(site, other)[-1]
        while (made := repeated.producer()) is not None and made.op_type in _REPEATS and not made.domain:
            source = made.inputs[0]
            if source is None or not site.knows(source):
                break
            repeated = _viewed(site, source)[-1]
        x = None if made is None or made.domain or not made.inputs else made.inputs[0]
        if made is None or x is None or made.op_type not in ("MaxPool", "ReduceMax") or not site.knows(x):
            continue
        whole = _viewed(site, x)[-1]
        if _viewed(site, value)[-1] is not whole or not site.knows(whole) or len(site.extents(whole)) < _FEWEST:
            continue
        # Windows may be dimensions of their own: one for each of the image.
        windows = len(site.extents(x)) - len(site.extents(whole))
        # Peaks are what equals the maximum of a window around it.
        if (made.op_type == "MaxPool" and repeated is not _viewed(site, other)[-1]) or windows == len(
            site.extents(whole)
        ) - 2:
            return True
    return False


@dataclass(frozen=True)
class _Scatter:
    """The sum of a gradient at the maxima of windows.

    Attributes:
        pool: the node that finds them.
        node: the node that adds the gradient up.
        gradient: of the shape of the maxima, or flat.
        by_plane: whether each plane has indices of its own.
        others: further nodes without a form that the indices are made of.
    """

    pool: ir.Node
    node: ir.Node
    gradient: ir.Value
    by_plane: bool = False
    others: tuple[ir.Node, ...] = ()


@dataclass(frozen=True)
class _Window:
    """How a window goes over an image: attributes of the operator."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: int


def _scatter(site: Site, root: ir.Value) -> _Scatter | None:
    readers = [use.node for use in root.uses()]
    if not site.knows(root) or (readers and all(one.op_type in _VIEWS and not one.domain for one in readers)):
        return None  # It was tried as its view.
    node = _viewed(site, root, casts=True)[-1].producer()
    if node is None or node.domain or node.graph is not site.graph:
        return None
    if node.op_type == "MaxPoolGrad":
        return _of_training(site, node)
    if node.op_type == "MaxUnpool":
        return _unpooled(site, node)
    if node.op_type not in _SCATTERS:
        return None
    data, positions, updates = node.inputs[:3]
    if data is None or positions is None or updates is None:
        return None
    places = _places(site, positions)
    pool = _pool(site, places.values[-1])
    if pool is None:
        return None
    maxima, x = pool.outputs[0], pool.inputs[0]
    if x is None or not all(map(site.knows, (maxima, x, data, positions, updates))) or not _is_zero(site, data):
        return None
    if not _FEWEST <= len(site.extents(x)) <= MOST_SPATIAL + 2 or not _adds(site, node, pool):
        return None
    dims = [site.extents(value) for value in (data, positions, updates)]
    if node.op_type == "ScatterND":
        # Each index is a row of one number.
        *before, width = dims[1] or [ZERO]
        if width != UNIT or before != dims[2] or places.by_plane or len(dims[0]) != 1:
            return None
    elif places.by_plane:
        elements, windows = (
            [site.algebra.product(part) for part in (sizes[:2], sizes[2:])] for sizes in map(site.extents, (x, maxima))
        )
        if attribute(node, "axis", 0) not in (1, -1) or dims != [elements, windows, windows]:
            return None
    elif any(len(sizes) != 1 for sizes in dims):
        return None
    whole = (
        value
        for value in _viewed(site, updates, casts=True)
        if site.extents(value) == site.extents(maxima) and value.dtype == root.dtype
    )
    return _Scatter(pool, node, next(whole, updates), places.by_plane, places.others)


@dataclass(frozen=True)
class _Picked:
    """A gradient of windows that are dimensions of their own, each put where an ArgMax of the window is."""

    argmax: ir.Node
    gradient: ir.Value
    x: ir.Value
    kernel: tuple[int, ...]


def _picked(site: Site, root: ir.Value) -> _Picked | None:
    readers = [use.node for use in root.uses()]
    if not site.knows(root) or not _FEWEST <= len(site.extents(root)) <= MOST_SPATIAL + 2:
        return None
    if readers and all(one.op_type in _VIEWS and not one.domain for one in readers):
        return None  # It was tried as its view.
    node = _arranged(site, root)[-1].producer()
    if node is None or node.domain or node.graph is not site.graph:
        return None
    operands = [value for value in node.inputs if value is not None]
    if node.op_type == "ScatterElements" and _is_zero(site, operands[0]):
        operands = operands[1:]
    elif node.op_type == "Where" and _is_zero(site, operands[2]):
        operands = operands[:2]
    elif node.op_type != "Mul":
        return None
    for hot, values in itertools.permutations(operands, 2):
        argmax = _argmax(site, hot)
        if argmax is None or argmax.inputs[0] is None or attribute(argmax, "select_last_index", 0):
            continue
        whole = site.extents(root)
        inputs = (v for v in _arranged(site, argmax.inputs[0]) if v.dtype == root.dtype and site.extents(v) == whole)
        x = next(inputs, None)
        for gradient in _arranged(site, values) if x is not None else ():
            kernel = _kernel(site, gradient, root)
            if x is not None and kernel is not None and _are_windows(site, argmax, x, kernel):
                return _Picked(argmax, gradient, x, kernel)
    return None


def _arranged(site: Site, value: ir.Value) -> list[ir.Value]:
    """A value and what it is a view of, in another order of dimensions perhaps, the nearest first."""
    found = [site.first(value)]
    while (node := found[-1].producer()) is not None and not node.domain and node.op_type in {*_VIEWS, "Transpose"}:
        if node.inputs[0] is None or not site.knows(node.inputs[0]):
            break
        found.append(site.first(node.inputs[0]))
    return found


def _argmax(site: Site, places: ir.Value) -> ir.Node | None:
    """The ArgMax whose one-hot, or whose result in another shape, a value is."""
    value: ir.Value | None = places
    for _ in range(2 * _STEPS):
        node = None if value is None else site.first(value).producer()
        if node is None or node.domain or node.graph is not site.graph or not node.inputs:
            return None
        if node.op_type == "ArgMax":
            return node
        if node.op_type == "Equal":
            value = next((v for v in node.inputs if v is not None and site.forms.constant(v) is None), None)
        elif node.op_type in {*_VIEWS, "OneHot", "Cast"}:
            value = node.inputs[0]
        else:
            return None
    return None


def _kernel(site: Site, gradient: ir.Value, root: ir.Value) -> tuple[int, ...] | None:
    """How many elements along each dimension one of the gradient stands for."""
    own, whole = site.extents(gradient), site.extents(root)
    if len(own) != len(whole) or own[:2] != whole[:2] or gradient.dtype != root.dtype:
        return None
    found = [site.forms.layouts.quotient(size, count) for size, count in zip(whole[2:], own[2:], strict=True)]
    numbers = [None if size is None else size.integer for size in found]
    kernel = tuple(n for n in numbers if n is not None)
    return kernel if len(kernel) == len(numbers) and math.prod(kernel) > 1 else None


def _are_windows(site: Site, argmax: ir.Node, x: ir.Value, kernel: tuple[int, ...]) -> bool:
    """Whether an ArgMax goes over windows of an image that lie beside each other, row by row."""
    algebra, extents = site.algebra, site.extents(x)
    try:
        windows = _windows(site, argmax, x)
    except Opaque:
        return False
    if attribute(argmax, "axis", 0) % len(windows.groups) != len(windows.groups) - 1:
        return False
    counts = [site.forms.layouts.quotient(size, number(k)) for size, k in zip(extents[2:], kernel, strict=True)]
    if None in counts:
        return False
    sizes = [*extents[:2], *(count for count in counts if count is not None), *map(number, kernel)]
    varying = iter(range(len(sizes)))
    at = [algebra.var(next(varying)) if size != UNIT else ZERO for size in sizes]
    within = at[len(extents) :]
    indices = [*at[:2], *(place.scaled(k) + w for place, k, w in zip(at[2:], kernel, within, strict=False))]
    picked = [index for index, size in zip(indices, extents, strict=True) if size != UNIT]
    return list(windows.sizes) == [s for s in sizes if s != UNIT] and windows.poly == algebra.tensor(_IMAGE, picked)


def _windows(site: Site, argmax: ir.Node, x: ir.Value) -> Form:
    """What an ArgMax goes over, by the elements of the image that it is a view of.

    The operand of a maximum has a name of its own in forms.
    """
    assert argmax.inputs[0] is not None
    chain = _arranged(site, argmax.inputs[0])
    groups = tuple((size,) if size != UNIT else () for size in site.extents(x))
    count = sum(map(len, groups))
    form = Form(groups, site.algebra.tensor(_IMAGE, map(site.algebra.var, range(count))))
    for value in reversed(chain[: chain.index(x)]):
        node = value.producer()
        assert node is not None
        if node.op_type == "Transpose":
            rank = len(form.groups)
            form = site.forms.moved(form, list(attribute(node, "perm", range(rank - 1, -1, -1))))
        else:
            form = site.forms.regrouped(form, site.extents(value))
    return form


def _bound_by_argmax(site: Site, builder: Builder, root: ir.Value, found: _Picked) -> Rewrite:
    kernel = found.kernel
    window = _Window(kernel, kernel, (0,) * 2 * len(kernel), (1,) * len(kernel), 0)
    operator, inputs = FuseMaxPoolBackwardPass.operator, [found.gradient, found.x]
    (output,) = builder.fused_whole(operator, inputs, [site.extents(root)], **asdict(window))
    rewrite = builder.rewrite("max-pool-by-argmax", [output], output)
    return replace(rewrite, frontier=(found.x, found.gradient), runs=frozenset([found.argmax]), linear=True)


def _adds(site: Site, node: ir.Node, pool: ir.Node) -> bool:
    """Whether a scatter adds up, or has nothing to, as no element is in two windows."""
    reduction = attribute(node, "reduction", "none")
    return reduction == "add" or (reduction == "none" and _are_apart(site, pool))


def _are_apart(site: Site, pool: ir.Node) -> bool:
    """Whether windows do not overlap."""
    window = _window(pool, len(site.extents(pool.outputs[0])) - 2)
    sizes = zip(window.stride, window.dilation, window.kernel_size, strict=True)
    return all(stride > dilation * (size - 1) for stride, dilation, size in sizes)


def _unpooled(site: Site, node: ir.Node) -> _Scatter | None:
    """A MaxUnpool, which puts each element where its maximum was."""
    gradient, positions = node.inputs[:2]
    pool = None if positions is None else _pool(site, _viewed(site, positions)[-1])
    if gradient is None or pool is None or pool.inputs[0] is None:
        return None
    maxima, x = pool.outputs[0], pool.inputs[0]
    if not all(map(site.knows, (gradient, maxima, x))) or site.extents(gradient) != site.extents(maxima):
        return None
    if site.extents(node.outputs[0]) != site.extents(x):
        return None
    if not _are_apart(site, pool):
        raise Mismatch("its windows overlap, and what several windows put into one place is not added up")
    return _Scatter(pool, node, gradient)


@dataclass(frozen=True)
class _Places:
    """The values that lead from positions down to the indices of a pooling.

    Attributes:
        by_plane: whether they count from the start of each plane.
        others: what says where that is, and has no form: a pooling of single elements, or a remainder.
    """

    values: tuple[ir.Value, ...]
    by_plane: bool = False
    others: tuple[ir.Node, ...] = ()


def _places(site: Site, positions: ir.Value) -> _Places:
    found = _viewed(site, positions)
    node = found[-1].producer()
    if node is None or node.domain or node.op_type not in ("Sub", "Mod") or node.graph is not site.graph:
        return _Places(tuple(found))
    indices, start = node.inputs
    whole = [] if indices is None else _viewed(site, indices)
    pool = _pool(site, whole[-1]) if whole else None
    x = None if pool is None else pool.inputs[0]
    if x is None or start is None or not site.knows(x):
        return _Places(tuple(found))
    values = (*found, *whole)
    if node.op_type == "Mod":
        form = site.forms.get(start)
        is_plane = form is not None and form.poly == site.algebra.product(site.extents(x)[2:])
        return _Places(values, by_plane=True, others=(node,)) if is_plane else _Places(tuple(found))
    singles = _counting_planes(site, start, x)
    return _Places(tuple(found)) if singles is None else _Places(values, by_plane=True, others=(singles,))


def _counting_planes(site: Site, start: ir.Value, x: ir.Value) -> ir.Node | None:
    """The pooling of single elements of x whose first index in each plane a value is."""
    cut = start.producer()
    if cut is None or cut.domain or cut.op_type != "Slice" or cut.inputs[0] is None or len(cut.inputs) != _WITH_AXES:
        return None
    singles = _pool(site, site.first(cut.inputs[0]))
    begins, ends, axes = (None if v is None else site.forms.constant(v) for v in cut.inputs[1:])
    if singles is None or singles.inputs[0] is None or site.first(singles.inputs[0]) is not site.first(x):
        return None
    if begins is None or ends is None or axes is None or any(begins) or any(end != 1 for end in ends):
        return None
    rank = len(site.extents(x))
    none, ones = (0,) * 2 * (rank - 2), (1,) * (rank - 2)
    is_single = replace(_window(singles, rank - 2), dilation=ones) == _Window(ones, ones, none, ones, 0)
    return singles if is_single and [int(axis) % rank for axis in axes] == list(range(2, rank)) else None


def _pool(site: Site, indices: ir.Value) -> ir.Node | None:
    """The node that gives the indices of maxima."""
    node = indices.producer()
    if node is None or node.domain or node.op_type != "MaxPool" or node.graph is not site.graph:
        return None
    return node if len(node.outputs) > _INDICES and indices is node.outputs[_INDICES] else None


def _of_training(site: Site, node: ir.Node) -> _Scatter | None:
    """An operator of onnxruntime-training, which has the attributes of the pooling."""
    gradient, indices = node.inputs[:2]
    pool = None if indices is None else _pool(site, indices)
    if gradient is None or pool is None:
        return None
    spatial = len(site.extents(pool.outputs[0])) - 2 if site.knows(pool.outputs[0]) else 0
    if not spatial or not site.knows(gradient) or site.extents(gradient) != site.extents(pool.outputs[0]):
        raise Mismatch("shapes of what it reads are unknown")
    if _window(node, spatial) != _window(pool, spatial):
        raise Mismatch("its window is another one than that of the pooling")
    return _Scatter(pool, node, gradient)


def _viewed(site: Site, value: ir.Value, *, casts: bool = False) -> list[ir.Value]:
    """A value and what it is a view of, the nearest first: all have the same elements in the same order.

    With `casts` in other types, too: PyTorch adds halves up in float32.
    """
    views = _VIEWS | {"Cast"} if casts else _VIEWS
    found = [value]
    for _ in range(_STEPS):
        if (same := site.first(found[-1])) is not found[-1]:
            found.append(same)
        node = found[-1].producer()
        if node is None or node.domain or node.op_type not in views or node.graph is not site.graph:
            break
        source = node.inputs[0]
        if source is None or not site.knows(source):
            break
        found.append(source)
    return found


def _is_zero(site: Site, value: ir.Value) -> bool:
    form = site.forms.get(value)
    return form is not None and not form.poly


def _bound(site: Site, builder: Builder, root: ir.Value, found: _Scatter) -> Rewrite:
    pool, gradient = found.pool, found.gradient
    x = pool.inputs[0]
    assert x is not None
    if any(value.dtype != root.dtype for value in (x, gradient)):
        raise Mismatch("it is computed of tensors of several types")
    if attribute(pool, "storage_order", 0):
        raise Mismatch("its indices count columns first")
    maxima = pool.outputs[0]
    window = _window(pool, len(site.extents(x)) - 2)
    _require_begins_inside(site, x, maxima, window)
    whole = gradient
    if site.extents(gradient) != site.extents(maxima):
        whole = builder.reshape(gradient, site.extents(maxima))
    outputs = builder.fused_whole(FuseMaxPoolBackwardPass.operator, [whole, x], [site.extents(x)], **asdict(window))
    return replace(
        builder.rewrite("max-pool-backward", [outputs[0]], builder.reshape(outputs[0], site.extents(root))),
        frontier=(x, gradient),
        runs=frozenset([pool, found.node, *found.others]),
        linear=True,
        table=_smaller(site, x, maxima, window, by_plane=found.by_plane, root=root),
    )


def _window(pool: ir.Node, spatial: int) -> _Window:
    """The window of a pooling.

    Raises:
        Mismatch: the operator has none like those of the node.
    """
    automatic = attribute(pool, "auto_pad", "NOTSET")
    if automatic not in ("NOTSET", "VALID"):
        raise Mismatch(f"its pooling has auto_pad {automatic}")
    none, ones = (0,) * 2 * spatial, (1,) * spatial
    kernel = tuple(attribute(pool, "kernel_shape", ones))
    padding = none if automatic == "VALID" else tuple(attribute(pool, "pads", none))
    dilation = tuple(attribute(pool, "dilations", ones))
    if any(max(padding[axis::spatial]) > d * (k - 1) for axis, (k, d) in enumerate(zip(kernel, dilation, strict=True))):
        raise Mismatch("its pads are wider than a window reaches")
    stride, ceil_mode = tuple(attribute(pool, "strides", ones)), int(attribute(pool, "ceil_mode", 0))
    return _Window(kernel, stride, padding, dilation, ceil_mode)


def _require_begins_inside(site: Site, x: ir.Value, maxima: ir.Value, window: _Window) -> None:
    """Refuse ceil_mode if a window may begin past the image: versions of onnxruntime differ in whether it does."""
    if not window.ceil_mode:
        return
    spatial = len(window.kernel_size)
    for axis, (size, count) in enumerate(zip(site.extents(x)[2:], site.extents(maxima)[2:], strict=True)):
        if size.integer is None or count.integer is None:
            raise Mismatch("it has ceil_mode, and sizes that are not known")
        pads = window.padding[axis], window.padding[axis + spatial]
        of_axis = window.kernel_size[axis], window.stride[axis], pads, window.dilation[axis]
        if places(size.integer, *of_axis, True) != count.integer:
            raise Mismatch("with ceil_mode, a window begins behind the image")


def _smaller(
    site: Site, x: ir.Value, maxima: ir.Value, window: _Window, *, by_plane: bool, root: ir.Value
) -> dict[int, int]:
    """Smaller sizes for which the pooling is still valid, by the original ones; empty if there are none."""
    (batch, channels, *image), (_, _, *windows) = ([n.integer for n in site.extents(v)] for v in (x, maxima))
    table: dict[int, int] = {}
    for axis, (size, count) in enumerate(zip(image, windows, strict=True)):
        if size is None or count is None:
            continue
        fewer = count if count <= KEPT_SIZE else _FEW
        less = size - (count - fewer) * window.stride[axis]
        if (
            less <= window.dilation[axis] * (window.kernel_size[axis] - 1)
            or table.get(count, fewer) != fewer
            or table.get(size, less) != less
        ):
            fewer, less = count, size
        if table.setdefault(count, fewer) != fewer or table.setdefault(size, less) != less:
            return {}
    for size in (batch, channels):
        if size is not None:
            table.setdefault(size, size if size <= KEPT_SIZE else _FEW)
    products = (
        [[batch, channels], image, windows] if by_plane else [[batch, channels, *image], [batch, channels, *windows]]
    )
    if site.extents(root) != site.extents(x):
        products += [[channels, *image], [batch, channels, *image]]
    for sizes in products:
        # A flat tensor has their product, beside symbols.
        known = [size for size in sizes if size is not None]
        whole, less = math.prod(known), math.prod(table.get(size, size) for size in known)
        if table.setdefault(whole, less) != less:
            return {}
    return {n: small for n, small in table.items() if n != small}
