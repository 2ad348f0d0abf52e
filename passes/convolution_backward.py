"""ConvolutionBackward: the gradients of a convolution w.r.t. its weight, its input and its bias.

A convolution has no canonical form, so this rule matches nodes and their attributes. The numerical test runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops.spatial import MOST_SPATIAL
from gradfuse.passes.algebra import UNIT, ZERO, Poly
from gradfuse.passes.matching import (
    Builder,
    FusePass,
    Mismatch,
    Rewrite,
    Site,
    is_node_of_training,
    names_of,
    wanted_outputs,
)
from gradfuse.passes.proving.shrinking import KEPT_SIZE
from gradfuse.passes.reading import attribute
from gradfuse.passes.report import NearMiss

_OF_PIXELS = (
    "a product of matrices over all pixels, as the gradient of a weight of 1 x 1 or of one tap is: the rule reads it "
    "where it is a Conv"
)
_UNFOLDED = (
    "a product with the windows of an image, which an index unfolds, as the gradient of a weight is: the rule reads it "
    "where it is a Conv"
)
_BY_IMAGE = (
    "a convolution with a group for each image and channel, whose results are added up, as the gradient of a weight "
    "is: the rule reads it where batch and channels are swapped"
)
_PRODUCTS = {"MatMul", "Gemm", "Einsum"}
_ARRANGING = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity"}
_READERS = 32  # of a value that are looked at
_FEW = 3  # places, items and channels of a test by numbers
_STEPS = 6  # cuts and paddings one after the other


class FuseConvolutionBackwardPass(FusePass):
    """Finds a convolution of a whole image x by a gradient g, with batch and channels of both swapped, so that

    1. its result, swapped again and cropped to the taps, is the gradient of the weight: its stride is the dilation of
       the convolution, its dilation the stride;
    2. a Conv, or a ConvTranspose the other way, of a weight w of that shape reads x or g with these attributes.

    Or a ConvGrad of onnxruntime-training, as it is.

    With the gradient of the weight go, where they are there, that of the input, a ConvTranspose of g by w that is cut
    or padded to the shape of x, and that of the bias, the sum of g over all but the channels.
    """

    operator = "ConvolutionBackward"
    linear = False
    looks_at_views = True

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Gradients of convolutions' weights that are products of matrices, or have a group for each image."""
        for node in site.graph:
            reason = None if node.domain or node in site.unread else _as_products(site, node)
            if reason is not None:
                yield NearMiss(names_of([node])[0], self.operator, reason)

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        if is_node_of_training(root.producer(), "ConvGrad"):
            return _of_conv_grad(site, builder, root)
        if not 3 <= len(site.extents(root)) <= MOST_SPATIAL + 2:
            return None
        found = _products(site, root)
        return None if found is None else _bound(site, builder, root, found)


def _as_products(site: Site, node: ir.Node) -> str | None:
    """What a gradient of a weight is written as, where no rule reads it; None for other nodes."""
    if node.op_type == "Conv" and node.inputs[0] is not None and node.inputs[1] is not None:
        left, right = (site.extents(v) if v is not None and site.knows(v) else [] for v in node.inputs[:2])
        groups = attribute(node, "group", 1)
        by_image = groups > 1 and left[:1] == [UNIT] and right[:2] == [UNIT.scaled(groups), UNIT]
        return _BY_IMAGE if by_image and node.inputs[1].producer() is not None else None
    if node.op_type not in _PRODUCTS or len(node.inputs) < 2:
        return None
    sides = [None if value is None else _pixels(site, value) for value in node.inputs[:2]]
    first, second = sides
    is_matrix = site.knows(node.outputs[0]) and len(site.extents(node.outputs[0])) == 2
    if is_matrix and first is not None and second is not None and first[:1] + first[2:] == second[:1] + second[2:]:
        return _OF_PIXELS
    if any(value is not None and _is_seen_by_points(site, value) for value in node.inputs[:2]):
        return _OF_PIXELS
    others = [_unfolded(site, value) for value in node.inputs[:2] if value is not None]
    unfolded = [one for one in others if one is not None]
    readers = {one for value in unfolded for one in _readers_behind_views(value) if one.op_type in _PRODUCTS}
    # The first of them is the forward pass.
    is_last = len(readers) > 1 and node is max(readers, key=lambda one: site.position.get(one.outputs[0], -1))
    return _UNFOLDED if len(unfolded) == 1 and is_last else None


def _is_seen_by_points(site: Site, value: ir.Value) -> bool:
    """Whether a value is the turned matrices of pixels of an image that a convolution with a kernel of 1 reads."""
    node = site.first(value).producer()
    turned = node is not None and not node.domain and node.op_type == "Transpose" and node.inputs[0] is not None
    if node is None or not turned or not site.knows(value):
        return False
    perm = list(attribute(node, "perm", ()))
    if perm[-2:] != [len(perm) - 1, len(perm) - 2] or perm[:-2] != list(range(len(perm) - 2)):
        return False
    image = node.inputs[0]
    while image is not None and not any(True for _ in _readers(site, image, {"Conv"})):
        above = image.producer()
        image = _read(above, "Reshape")
    for reader, index in _readers(site, image, {"Conv"}) if image is not None else ():
        weight = reader.inputs[1]
        if index == 0 and weight is not None and site.knows(weight) and attribute(reader, "group", 1) == 1:
            return all(size == UNIT for size in site.extents(weight)[2:])
    return False


def _pixels(site: Site, value: ir.Value) -> list[Poly] | None:
    """The sizes of the image whose channels were moved to one end, so that pixels are rows or columns."""
    for _ in range(_STEPS):
        node = site.first(value).producer()
        if node is None or node.domain or node.op_type not in _ARRANGING or node.inputs[0] is None:
            return None
        source = node.inputs[0]
        perm = list(attribute(node, "perm", ()))
        moved = [[0, *range(2, len(perm)), 1], [1, 0, *range(2, len(perm))]]
        if node.op_type == "Transpose" and len(perm) > 3 and perm in moved:
            return site.extents(source) if site.knows(source) else None
        value = source
    return None


def _unfolded(site: Site, value: ir.Value) -> ir.Value | None:
    """What a constant index picks of pixels in one dimension, more than once: the windows of an image."""
    for _ in range(_STEPS):
        node = site.first(value).producer()
        if node is None or node.domain or not node.inputs or node.inputs[0] is None:
            return None
        if node.op_type == "Gather":
            index = site.forms.constant(node.inputs[1])
            return node.outputs[0] if index is not None and index.ndim > 1 and _repeats(index) else None
        if node.op_type not in _ARRANGING:
            return None
        value = node.inputs[0]
    return None


def _repeats(index: np.ndarray[Any, Any]) -> bool:
    return np.unique(index).size < index.size


def _readers_behind_views(value: ir.Value) -> Iterator[ir.Node]:
    todo = [value]
    for one in todo:
        for use in itertools.islice(one.uses(), _READERS):
            if use.node.op_type in _ARRANGING and not use.node.domain:
                todo.append(use.node.outputs[0])
            else:
                yield use.node


def _of_conv_grad(site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
    node = root.producer()
    assert node is not None
    places, image, weight = node.inputs[:3]
    wanted = wanted_outputs(node, 3)
    if (
        places is None
        or image is None
        or weight is None
        or root is not next((v for v in wanted if v is not None), None)
    ):
        return None
    if not all(site.knows(value) for value in (places, image, weight)):
        raise Mismatch("shapes of what it reads are unknown")
    window = _window(node, len(site.extents(weight)) - 2)
    if window is None:
        raise Mismatch("it has an automatic padding")
    if len(site.extents(weight)) > MOST_SPATIAL + 2:
        raise Mismatch(f"it has more than {MOST_SPATIAL} spatial dimensions")
    if any(value.dtype != root.dtype for value in (places, image, weight)):
        raise Mismatch("it is computed of tensors of several types")
    return _rewrite(site, builder, wanted, _Products(image, places, window, node), weight, (node,))


@dataclass(frozen=True)
class _Window:
    """How a window goes over an image: the attributes of its convolution."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class _Products:
    """The products of an image with the places of a window: the gradient of a weight.

    Attributes:
        image: (N, C, ...), over which the window goes.
        places: (N, M, ...), with an element for each place of the window.
        window: how it goes.
        node: the convolution that adds them up.
        turned: whether the root has the channels of the image first, as the convolution gives them.
    """

    image: ir.Value
    places: ir.Value
    window: _Window
    node: ir.Node
    turned: bool = False


def _products(site: Site, root: ir.Value) -> _Products | None:
    """What a value, which may be cut and changed about, is the gradient of a weight of."""
    value, changed = root, 0
    for _ in range(_STEPS):
        node = site.first(value).producer()
        if node is None or node.domain or node.graph is not site.graph or not node.inputs or node.inputs[0] is None:
            return None
        if node.op_type == "Conv":
            break
        if _is_swap(node):
            changed += 1
        elif not (node.op_type == "Identity" or _is_cut(site, node)):
            return None
        value = node.inputs[0]
    else:
        return None
    if changed > 1 or (len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    own = _window(node, len(site.extents(root)) - 2)
    left, right = node.inputs[:2]
    assert left is not None and right is not None
    places = _swapped(site, right, root)
    image = None if own is None else _grouped(site, left, own.groups, root)
    if own is None or places is None or image is None:
        return None
    window = replace(own, stride=own.dilation, dilation=own.stride)
    return _Products(image, places, window, node, turned=not changed)


def _window(node: ir.Node, spatial: int) -> _Window | None:
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in node.attributes:
        return None
    valid = attribute(node, "auto_pad", "NOTSET") == "VALID"
    pads = (0,) * 2 * spatial if valid else tuple(attribute(node, "pads", (0,) * 2 * spatial))
    stride = tuple(attribute(node, "strides", (1,) * spatial))
    dilation = tuple(attribute(node, "dilations", (1,) * spatial))
    fits = len(stride) == len(dilation) == spatial and len(pads) == 2 * spatial and min(pads) >= 0
    return _Window(stride, dilation, pads, attribute(node, "group", 1)) if fits else None


def _is_swap(node: ir.Node) -> bool:
    """Whether a node swaps the first two dimensions."""
    perm = list(attribute(node, "perm", ()))
    return node.op_type == "Transpose" and not node.domain and perm == [1, 0, *range(2, len(perm))]


def _is_cut(site: Site, node: ir.Node) -> bool:
    """Whether a node crops the ends of spatial dimensions."""
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    starts, axes = site.forms.constant(node.inputs[1]), site.forms.constant(node.inputs[3])
    steps = site.forms.constant(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
    if starts is None or axes is None or starts.any() or axes.min(initial=2) < 2:
        return False
    return len(node.inputs) < 5 or node.inputs[4] is None or (steps is not None and bool((steps == 1).all()))


def _swapped(site: Site, value: ir.Value, root: ir.Value) -> ir.Value | None:
    """The value of which this one is with batch and channels swapped."""
    node, form = site.first(value).producer(), site.forms.get(value)
    if node is not None and _is_swap(node):
        return node.inputs[0]
    if node is None or node.domain or node.op_type != "Transpose" or form is None or not site.knows(value):
        return None
    # Where channels are last, one transposition does both.
    order = [1, 0, *range(2, len(form.groups))]
    swapped, shape = site.forms.moved(form, order), [site.extents(value)[axis] for axis in order]
    found = site.find(swapped.poly, swapped.sizes, root, dtypes=[value.dtype], shape=shape)
    return found[0] if found is not None and found[1] == 1.0 and site.extents(found[0]) == shape else None


def _grouped(site: Site, value: ir.Value, groups: int, root: ir.Value) -> ir.Value | None:
    """The image (N, G C, ...) of which a value is (C, G N, ...)."""
    if groups == 1:
        return _swapped(site, value, root)
    turned = _read(site.first(value).producer(), "Reshape")
    node = None if turned is None else site.first(turned).producer()
    split = _read(node, "Transpose")
    image = _read(None if split is None else site.first(split).producer(), "Reshape")
    if node is None or turned is None or split is None or image is None or not site.knows(image):
        return None
    rank = len(site.extents(image))
    if list(attribute(node, "perm", ())) != [2, 1, 0, *range(3, rank + 1)] or not site.knows(split):
        return None
    batch, channels, *places = site.extents(image)
    of_group = site.forms.layouts.quotient(channels, UNIT.scaled(groups))
    if of_group is None or site.extents(split) != [batch, UNIT.scaled(groups), of_group, *places]:
        return None
    return image if site.extents(value) == [of_group, batch.scaled(groups), *places] else None


def _read(node: ir.Node | None, kind: str) -> ir.Value | None:
    return None if node is None or node.domain or node.op_type != kind else node.inputs[0]


def _bound(site: Site, builder: Builder, root: ir.Value, found: _Products) -> Rewrite | None:
    image, places = found.image, found.places
    weight = _weight(site, root, found)
    if weight is None and found.turned:
        return None
    if weight is None:
        raise Mismatch("no convolution reads a weight of its shape with these strides, dilations and pads")
    if any(value.dtype != root.dtype for value in (image, places, weight)):
        raise Mismatch("it is computed of tensors of several types")
    grad_input, runs = _grad_input(site, weight, found)
    return _rewrite(site, builder, [grad_input, root, _grad_bias(site, places)], found, weight, (found.node, *runs))


def _rewrite(
    site: Site,
    builder: Builder,
    wanted: Sequence[ir.Value | None],
    found: _Products,
    weight: ir.Value,
    runs: Iterable[ir.Node],
) -> Rewrite:
    """The operator for the requested gradients of input, weight and bias."""
    image, places, window = found.image, found.places, found.window
    channels: Sequence[Sequence[Poly]] = [site.extents(image), site.extents(weight), [site.extents(places)[1]]]
    sizes = [own if value is not None else [ZERO] for own, value in zip(channels, wanted, strict=True)]
    outputs = builder.fused_whole(
        FuseConvolutionBackwardPass.operator,
        [places, image, weight],
        sizes,
        stride=window.stride,
        padding=window.pads,
        dilation=window.dilation,
        transposed=0,
        output_padding=(0,),
        groups=window.groups,
        output_mask=[int(value is not None) for value in wanted],
    )
    new = list(outputs)
    if found.turned:
        extents, swap = site.extents(builder.root), [1, 0, *range(2, len(window.stride) + 2)]
        new[1] = builder.op("Transpose", [outputs[1]], outputs[1].dtype, extents, perm=swap)
    replaced = [(value, output) for value, output in zip(wanted, new, strict=True) if value is not None]
    (output,) = (output for value, output in replaced if value is builder.root)
    return replace(
        builder.rewrite("convolution-backward", [outputs[1] if found.turned else output], output),
        frontier=(image, places, weight),
        others=tuple(pair for pair in replaced if pair[0] is not builder.root),
        runs=frozenset(runs),
        linear=True,
        table=_smaller(site, weight, found),
    )


def _readers(site: Site, value: ir.Value, kinds: set[str]) -> Iterator[tuple[ir.Node, int]]:
    uses = (use for one in site.copies(value) for use in one.uses())
    for use in itertools.islice(uses, _READERS):
        node = use.node
        if node.op_type in kinds and not node.domain and node.graph is site.graph:
            yield node, use.idx


def _weight(site: Site, root: ir.Value, found: _Products) -> ir.Value | None:
    """The weight of the convolution whose gradient this is, of the root's shape."""
    extents = site.extents(root)
    if found.turned:
        extents = [extents[1], extents[0], *extents[2:]]
    for value, kind in ((found.image, "Conv"), (found.places, "ConvTranspose")):
        for node, index in _readers(site, value, {kind}):
            weight = node.inputs[1]
            if index != 0 or weight is None or not site.knows(weight) or node is found.node:
                continue
            if site.extents(weight) == extents and site.is_ahead(weight, root):
                own = _window(node, len(site.extents(root)) - 2)
                same = own is not None and (own.stride, own.dilation, own.groups) == (
                    found.window.stride,
                    found.window.dilation,
                    found.window.groups,
                )
                if same:
                    return weight
    return None


def _grad_input(site: Site, weight: ir.Value, found: _Products) -> tuple[ir.Value | None, list[ir.Node]]:
    """The gradient of the input, and the nodes that make it of a transposed convolution."""
    for node, index in _readers(site, found.places, {"ConvTranspose"}):
        own = _window(node, len(site.extents(weight)) - 2)
        own_weight = node.inputs[1]
        if index != 0 or own_weight not in site.copies(weight) or own is None or len(node.inputs) > 2:
            continue
        if (own.stride, own.dilation, own.groups) != (
            found.window.stride,
            found.window.dilation,
            found.window.groups,
        ):
            continue
        value, runs = node.outputs[0], [node]
        for _ in range(_STEPS):
            if value not in site.position or not site.is_ahead(found.image, value):
                break  # The forward of a transposed convolution, on whose result the image depends.
            readers = [use.node for use in itertools.islice(value.uses(), 2)]
            whole = site.knows(value) and site.extents(value) == site.extents(found.image)
            cuts = len(readers) == 1 and readers[0].op_type in ("Slice", "Pad") and not readers[0].domain
            if whole and not (cuts and site.extents(readers[0].outputs[0]) == site.extents(found.image)):
                return value, runs
            if not cuts or value.is_graph_output() or readers[0].inputs[0] is not value:
                break
            value = readers[0].outputs[0]
            runs.append(readers[0])
    return None, []


def _grad_bias(site: Site, places: ir.Value) -> ir.Value | None:
    """The sum over all but the channels."""
    rank = len(site.extents(places))
    for node, index in _readers(site, places, {"ReduceSum"}):
        axes = site.forms.constant(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes", None)
        if index != 0 or axes is None or attribute(node, "keepdims", 1):
            continue
        if sorted(int(axis) % rank for axis in axes) == [0, *range(2, rank)]:
            return node.outputs[0]
    return None


def _smaller(site: Site, weight: ir.Value, found: _Products) -> dict[int, int]:
    """Smaller sizes for which the convolution is still valid, by the original ones; empty if there are none.

    What is behind the last window stays, and so do kernels and, with groups, channels. Of two sizes that are the same
    number, one may keep the other from being smaller.
    """
    window = found.window
    sizes = [[size.integer for size in site.extents(value)] for value in (found.image, found.places, weight)]
    (batch, channels, *image), (_, outputs, *places), (_, _, *kernel) = sizes
    of_groups = (channels, outputs) if window.groups > 1 else ()
    table = {n: n for n in (*kernel, *of_groups) if n is not None}
    spatial = len(kernel)
    for axis, (size, count, taps) in enumerate(zip(image, places, kernel, strict=True)):
        if size is None or count is None or taps is None:
            continue
        fewer = count if count <= KEPT_SIZE else _FEW
        cut = (count - fewer) * window.stride[axis]
        less = size - cut
        too_small = less < 1 + max(0, window.dilation[axis] * (taps - 1) - sum(window.pads[axis::spatial]))
        if too_small or table.get(count, fewer) != fewer or table.get(size, less) != less:
            fewer, less = count, size
        if table.setdefault(count, fewer) != fewer or table.setdefault(size, less) != less:
            return {}
    for size in (batch, *(() if of_groups else (channels, outputs))):
        if size is not None:
            table.setdefault(size, size if size <= KEPT_SIZE else _FEW)
    if of_groups and batch is not None:
        # Groups go with the batch, as the convolution of the products has it.
        together = table[batch] * window.groups
        if table.setdefault(batch * window.groups, together) != together:
            return {}
    return {n: small for n, small in table.items() if n != small}
