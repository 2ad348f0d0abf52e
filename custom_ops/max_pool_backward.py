"""MaxPoolBackward: the gradient of maximum pooling, from its input alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.operator import (
    ALL_FLOAT_TYPES,
    Attribute,
    Call,
    Dim,
    Input,
    Operator,
    Output,
    Tensor,
    TorchOp,
    Variant,
)
from gradfuse.custom_ops.spatial import check_numbers, numbers_of, paddings, per_axis, spatial_of

if TYPE_CHECKING:
    import torch

_LISTS = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
"""The attributes with a number for each spatial dimension, and the least that each number may be."""


def places(size: int, kernel_size: int, stride: int, padding: tuple[int, int], dilation: int, ceil_mode: bool) -> int:
    """How many windows there are along a dimension: none begins behind the input, as in PyTorch."""
    room = size + sum(padding) - dilation * (kernel_size - 1) - 1
    if not ceil_mode:
        return 0 if room < 0 else room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding[0] else count


def _check_attributes(call: Call, spatial: int | None) -> None:
    call.flag("ceil_mode")
    check_numbers(call, spatial, _LISTS)
    for axis in range(spatial or 0):
        begin, end = paddings(numbers_of(call.attributes["padding"]), spatial or 0)
        kernel, dilation = (
            per_axis(numbers_of(call.attributes[name]), spatial or 0)[axis] for name in ("kernel_size", "dilation")
        )
        if max(begin[axis], end[axis]) > dilation * (kernel - 1):
            raise call.error("padding", list(numbers_of(call.attributes["padding"])), "less than a window reaches")


def _infer(call: Call) -> list[Tensor]:
    spatial = spatial_of(call, _LISTS)
    _check_attributes(call, spatial)
    dtype = OPERATOR.dtype(call)
    if spatial is None:
        return [Tensor(dtype)]
    names = [f"D{axis}" for axis in range(spatial)]
    grad_output, input = (list(call.shape(name, "N", "C", *names)) for name in ("grad_output", "input"))
    leading = [call.same("grad_output", dim, input[axis], grad_output[axis]) for axis, dim in enumerate("NC")]
    for axis in range(spatial):
        count = _places(call, spatial, axis, input[axis + 2])
        call.same("grad_output", f"dimension {axis + 2}", count, grad_output[axis + 2])
    return [Tensor(dtype, (*leading, *input[2:]))]


def _places(call: Call, spatial: int, axis: int, size: Dim) -> Dim:
    """The size of grad_output along a spatial dimension, as far as it is known."""
    if not isinstance(size, int):
        return None
    kernel, stride, dilation = (
        per_axis(numbers_of(call.attributes[name]), spatial)[axis] for name in ("kernel_size", "stride", "dilation")
    )
    begin, end = paddings(numbers_of(call.attributes["padding"]), spatial)
    count = places(size, kernel, stride, (begin[axis], end[axis]), dilation, bool(call.attributes["ceil_mode"]))
    if size < 1 or count < 1:
        raise call.error("input", f"of dimension {axis + 2} {size}", "a dimension that a window fits into")
    return count


def _choices(call: Call) -> Iterable[str]:
    spatial = spatial_of(call, _LISTS)
    if spatial is None:
        raise call.error("input", "of unknown rank", "a tensor of known rank")
    begin, _ = paddings(numbers_of(call.attributes["padding"]), spatial)
    lists = {name: per_axis(numbers_of(call.attributes[name]), spatial) for name in ("stride", "dilation")}
    kernel = per_axis(numbers_of(call.attributes["kernel_size"]), spatial)
    for name, numbers in {**lists, "kernel": kernel, "padding": begin}.items():
        yield "_".join([name, *map(str, numbers)])
    if OPERATOR.dtype(call) == TensorProto.DOUBLE:
        yield "double"


def _body(variant: Variant) -> str:
    named = {word.split("_")[0]: [int(n) for n in word.split("_")[1:]] for word in variant.choices if "_" in word}
    kernel, stride, dilation, begin = (named[name] for name in ("kernel", "stride", "dilation", "padding"))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    # MaxPool's versions differ in where they see the maximum of a window with NaN, or with nothing but infinities, and
    # in how many windows ceil_mode gives. So it gets finite numbers, in float64, with as much behind the image as
    # grad_output tells. A NaN is the larger the later it is; padding is below all numbers. onnx.reference counts some
    # indices from the plane's beginning.
    return f"""
        image_wide = Cast<to=11>(input)
        grad_wide = Cast<to=$real>(grad_output)
        leading = Shape<start=0, end=2>(input)
        sizes = Shape<start=2>(input)
        windows = Shape<start=2>(grad_output)
        planes = ReduceProd<keepdims=1>(leading)
        one = Constant<value_ints=[1]>()
        image_shape = Concat<axis=0>(planes, one, sizes)
        image = Reshape<allowzero=1>(image_wide, image_shape)
        least = Constant<value=double {{-1.7e308}}>()
        most = Constant<value=double {{1.7e308}}>()
        below = Constant<value=double {{-1.75e308}}>()
        step = Constant<value=double {{1e296}}>()
        not_below = Max(image, least)
        finite = Min(not_below, most)
        nan = IsNaN(image)
        size = ReduceProd<keepdims=0>(sizes)
        zero = Constant<value_int=0>()
        unit = Constant<value_int=1>()
        positions = Range(zero, size, unit)
        positions_wide = Cast<to=11>(positions)
        ordinals = Mul(positions_wide, step)
        first_above = Add(most, step)
        above = Add(first_above, ordinals)
        above_image = Reshape<allowzero=1>(above, sizes)
        keys = Where(nan, above_image, finite)
        strides = Constant<value_ints={stride}>()
        reach = Constant<value_ints={reach}>()
        begin = Constant<value_ints={begin}>()
        steps = Sub(windows, one)
        last = Mul(steps, strides)
        covered = Add(last, reach)
        behind_begin = Sub(covered, begin)
        missing = Sub(behind_begin, sizes)
        no_place = Sub(begin, begin)
        end = Max(missing, no_place)
        none = Constant<value_ints=[0, 0]>()
        pads = Concat<axis=0>(none, begin, none, end)
        with_padding = Pad(keys, pads, below)
        axes = Constant<value_ints={list(range(2, 2 + len(kernel)))}>()
        padded = Slice(with_padding, no_place, covered, axes)
        maxima, found = MaxPool<kernel_shape={kernel}, strides={stride}, dilations={dilation}>(padded)
        padded_sizes = Shape<start=2>(padded)
        padded_size = ReduceProd<keepdims=1>(padded_sizes)
        window_count = ReduceProd<keepdims=1>(windows)
        rows_shape = Concat<axis=0>(planes, window_count)
        found_rows = Reshape<allowzero=1>(found, rows_shape)
        of_plane = Mod(found_rows, padded_size)
        grad_rows = Reshape<allowzero=1>(grad_wide, rows_shape)
        zero_float = Constant<value_float=0.0>()
        zero_real = Cast<to=$real>(zero_float)
        sum_shape = Concat<axis=0>(planes, padded_size)
        nothing = Expand(zero_real, sum_shape)
        sums = ScatterElements<axis=1, reduction="add">(nothing, of_plane, grad_rows)
        padded_shape = Shape(padded)
        padded_sums = Reshape<allowzero=1>(sums, padded_shape)
        uncovered = Neg(missing)
        rest = Max(uncovered, no_place)
        rest_pads = Concat<axis=0>(none, no_place, none, rest)
        all_sums = Pad(padded_sums, rest_pads, zero_real)
        image_end = Add(begin, sizes)
        of_image = Slice(all_sums, begin, image_end, axes)
        shape = Shape(input)
        result = Reshape<allowzero=1>(of_image, shape)
        grad_input = CastLike(result, grad_output)
    """


def _torch_outputs(grad_output: torch.Tensor, input: torch.Tensor, *_: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return (input.new_empty(input.shape),)


OPERATOR = Operator(
    name="MaxPoolBackward",
    stem="max_pool_backward",
    doc=(
        "Gradient of maximum pooling over 1 to 3 spatial dimensions w.r.t. its input, as PyTorch's "
        "max_pool2d_with_indices_backward, without indices: the maxima are found again. Of equal maxima of a window "
        "the first gets its gradient, of NaN the last, which is larger than all numbers. Attributes with a number for "
        "each spatial dimension may have one number for all. A window wholly in the padding has no gradient."
    ),
    summary="maximum pooling, without its indices",
    counterpart="`aten::max_pool2d_with_indices_backward`, and 3d",
    inputs=(
        Input("grad_output", "T", "Gradient of the maxima, (N, C, ...)."),
        Input("input", "T", "Input of the pooling, (N, C, ...)."),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. input, of its shape."),),
    attributes=(
        Attribute("kernel_size", (1,), "The elements of a window."),
        Attribute("stride", (1,), "The distance of neighbouring windows."),
        Attribute("padding", (0,), "Places beside the input; also those at all beginnings, then those at all ends."),
        Attribute("dilation", (1,), "The distance of neighbouring elements of a window."),
        Attribute(
            "ceil_mode", 0, "1: the last window may reach beyond the padding, if it begins before the end.", flag=True
        ),
    ),
    constraints={"T": ALL_FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    oldest_opset=16,
    samples=({},),
)
