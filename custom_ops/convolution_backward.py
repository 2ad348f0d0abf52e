"""ConvolutionBackward: the gradients of a convolution, plain or transposed (``aten::convolution_backward``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.operator import (
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
from gradfuse.custom_ops.spatial import numbers_of, paddings, per_axis

if TYPE_CHECKING:
    import torch

MOST_SPATIAL = 3
_MOST = 2**31 - 1
_LISTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
"""The attributes with a number for each spatial dimension, and the least that each number may be."""


def _spatial(call: Call) -> int | None:
    """The number of spatial dimensions, as far as inputs and attributes tell."""
    ranks = {name: len(tensor.shape) for name, tensor in call.inputs.items() if tensor.shape is not None}
    for name, rank in ranks.items():
        if not 3 <= rank <= MOST_SPATIAL + 2:
            raise call.error(name, f"of rank {rank}", "rank 3 to 5: (N, C, ...)")
        first = next(iter(ranks))
        if rank != ranks[first]:
            raise call.error(name, f"of rank {rank}", f"rank {ranks[first]}, as {first}")
    if ranks:
        return next(iter(ranks.values())) - 2
    lengths = {len(numbers_of(call.attributes[name])) for name in ("stride", "dilation", "output_padding")} - {1}
    return lengths.pop() if len(lengths) == 1 else None


def _check_attributes(call: Call, spatial: int | None) -> None:
    call.flag("transposed")
    for name, least in _LISTS.items():
        numbers = numbers_of(call.attributes[name])
        if spatial is not None:
            lengths = sorted({1, spatial, *([2 * spatial] if name == "padding" else [])})
            if len(numbers) not in lengths:
                raise call.error(name, list(numbers), f"{' or '.join(map(str, lengths))} numbers")
        if not numbers or not all(least <= number <= _MOST for number in numbers):
            raise call.error(name, list(numbers), f"numbers from {least} to {_MOST}")
    mask = numbers_of(call.attributes["output_mask"])
    if len(mask) != 3 or not all(one in (0, 1) for one in mask):
        raise call.error("output_mask", list(mask), "3 numbers, 0 or 1")
    if call.attributes["transposed"] == 0 and any(numbers_of(call.attributes["output_padding"])):
        raise call.error("output_padding", list(numbers_of(call.attributes["output_padding"])), "0 without transposed")
    groups = call.attributes["groups"]
    assert isinstance(groups, int)
    if groups < 1:
        raise call.error("groups", groups, "1 or more")


def _divided(call: Call, name: str, dim: Dim, groups: int) -> Dim:
    """The channels of a group."""
    if not isinstance(dim, int):
        return None
    if dim % groups:
        raise call.error("groups", groups, f"a divisor of the {dim} channels of {name}")
    return dim // groups


def _infer(call: Call) -> list[Tensor]:
    spatial = _spatial(call)
    _check_attributes(call, spatial)
    dtype = OPERATOR.dtype(call)
    mask = numbers_of(call.attributes["output_mask"])
    if spatial is None:
        shapes: list[tuple[Dim, ...] | None] = [None, None, (None,)]
        return [Tensor(dtype, shape if wanted else (0,)) for shape, wanted in zip(shapes, mask, strict=True)]
    places = [f"D{axis}" for axis in range(spatial)]
    grad_output, input, weight = (
        list(call.shape(name, *dims, *places))
        for name, dims in (("grad_output", "NM"), ("input", "NC"), ("weight", ("M", "C / groups")))
    )
    groups = call.attributes["groups"]
    assert isinstance(groups, int)
    batch = call.same("grad_output", "N", input[0], grad_output[0])
    small, large = ("input", "grad_output") if call.attributes["transposed"] else ("grad_output", "input")
    channels = {"input": input[1], "grad_output": grad_output[1]}
    _divided(call, small, channels[small], groups)
    of_small = call.same("weight", "dimension 0", channels[small], weight[0])
    of_group = call.same("weight", "dimension 1", _divided(call, large, channels[large], groups), weight[1])
    of_large = channels[large]
    if not isinstance(of_large, int) and isinstance(of_group, int):
        of_large = of_group * groups
    outputs = of_large if call.attributes["transposed"] else of_small
    inputs = of_small if call.attributes["transposed"] else of_large
    for axis in range(spatial):
        size = _output_size(call, spatial, axis, input[axis + 2], weight[axis + 2])
        call.same("grad_output", f"dimension {axis + 2}", size, grad_output[axis + 2])
    found: list[tuple[Dim, ...]] = [
        (batch, inputs, *input[2:]),
        (of_small, of_group, *weight[2:]),
        (outputs,),
    ]
    return [Tensor(dtype, shape if wanted else (0,)) for shape, wanted in zip(found, mask, strict=True)]


def _output_size(call: Call, spatial: int, axis: int, size: Dim, taps: Dim) -> Dim:
    """The size of grad_output along a spatial dimension, as far as it is known."""
    if not isinstance(size, int) or not isinstance(taps, int):
        return None
    stride, dilation, extra = (
        per_axis(numbers_of(call.attributes[name]), spatial)[axis] for name in ("stride", "dilation", "output_padding")
    )
    begin, end = paddings(numbers_of(call.attributes["padding"]), spatial)
    padding, reach = begin[axis] + end[axis], dilation * (taps - 1) + 1
    if call.attributes["transposed"]:
        return (size - 1) * stride - padding + reach + extra
    room = size + padding - reach
    return 0 if room < 0 else room // stride + 1


def _choices(call: Call) -> Iterable[str]:
    spatial = _spatial(call)
    if spatial is None:
        raise call.error("input", "of unknown rank", "a tensor of known rank")
    begin, end = paddings(numbers_of(call.attributes["padding"]), spatial)
    lists = {name: per_axis(numbers_of(call.attributes[name]), spatial) for name in ("stride", "dilation")}
    for name, numbers in {**lists, "padding": [*begin, *end]}.items():
        yield "_".join([name, *map(str, numbers)])
    yield f"groups_{call.attributes['groups']}"
    if call.attributes["transposed"]:
        yield "transposed"
    names = ("input", "weight", "bias")
    yield from (name for name, one in zip(names, numbers_of(call.attributes["output_mask"]), strict=True) if one)
    if OPERATOR.dtype(call) == TensorProto.DOUBLE:
        yield "double"


def _pads(numbers: Sequence[int]) -> str:
    """A constant that onnxruntime before 1.24 takes for pads: it loses the shape of `value_ints` in a function."""
    return f"Constant<value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}>()"


class _Text:
    """The text of a function body, for `spatial` dimensions with their strides and so on as numbers."""

    def __init__(self, variant: Variant) -> None:
        named = {word.split("_")[0]: [int(n) for n in word.split("_")[1:]] for word in variant.choices if "_" in word}
        self.wanted = variant.choices
        self.stride, self.dilation, (self.groups,) = named["stride"], named["dilation"], named["groups"]
        self.spatial = len(self.stride)
        self.begin, self.end = named["padding"][: self.spatial], named["padding"][self.spatial :]
        self.transposed, self.wide = "transposed" in variant.choices, variant.wide
        self.axes = range(self.spatial)

    def text(self) -> str:
        """All of the body."""
        small, large = ("input", "grad_output") if self.transposed else ("grad_output", "input")
        parts = [
            f"small = Cast<to=$real>({small})\nlarge = Cast<to=$real>({large})\nkernel = Cast<to=$real>(weight)",
            f"group_count = Constant<value_ints=[{self.groups}]>()",
            "batch = Shape<start=0, end=1>(small)",
            "small_channels = Shape<start=0, end=1>(kernel)",
            "small_of_group = Div(small_channels, group_count)",
            "large_of_group = Shape<start=1, end=2>(kernel)",
            f"places = Shape<start=2, end={self.spatial + 2}>(small)",
            f"taps = Shape<start=2, end={self.spatial + 2}>(kernel)",
            "zero = Constant<value_int=0>()\none = Constant<value_int=1>()",
            "nothing_shape = Constant<value_ints=[0]>()\nnothing = ConstantOfShape(nothing_shape)",
        ]
        of_input, of_weight = "input" in self.wanted, "weight" in self.wanted
        if self.wide:
            # onnxruntime has no convolutions in float64.
            if of_weight or (of_input and self.transposed):
                parts.append(self._windows())
            if of_weight:
                parts.append(self._grad_weight_by_windows())
            if of_input:
                parts.append(self._grad_small_by_windows() if self.transposed else self._grad_large_by_windows())
        else:
            if of_weight:
                parts.append(self._grad_weight())
            if of_input:
                parts.append(self._grad_small() if self.transposed else self._grad_large())
        if "bias" in self.wanted:
            axes = ", ".join(map(str, [0, *(axis + 2 for axis in self.axes)]))
            parts.append(f"bias_axes = Constant<value_ints=[{axes}]>()")
            parts.append(f"bias_sum = ReduceSum<keepdims=0>({'large' if self.transposed else 'small'}, bias_axes)")
        for name, value in (("input", "input_sum"), ("weight", "weight_sum"), ("bias", "bias_sum")):
            result = value if name in self.wanted else "nothing"
            parts.append(f"grad_{name} = CastLike({result}, grad_output)")
        return "\n".join(parts)

    def _range(self, name: str, sizes: str, axis: int, step: int, *, column: bool) -> str:
        """Name 0, step, 2 step, ..., as many as a dimension of a shape says, as a row or a column."""
        shape = "[-1, 1]" if column else "[1, -1]"
        return f"""
            {name}_at = Constant<value_int={axis}>()
            {name}_size = Gather({sizes}, {name}_at)
            {name}_numbers = Range(zero, {name}_size, one)
            {name}_step = Constant<value_int={step}>()
            {name}_line = Mul({name}_numbers, {name}_step)
            {name}_shape = Constant<value_ints={shape}>()
            {name} = Reshape({name}_line, {name}_shape)
        """

    def _perm(self, *axes: int) -> str:
        return f"perm=[{', '.join(map(str, axes))}]"

    def _windows(self) -> str:
        """Name `windows` (groups, N places, channels of a group x taps): all elements that windows meet."""
        pads = [0, 0, *self.begin, 0, 0, *self.end]
        text = f"""
            pads = {_pads(pads)}
            met_0 = Pad(large, pads)
        """
        for axis in self.axes:
            text += self._range(f"place_{axis}", "places", axis, self.stride[axis], column=False)
            text += self._range(f"tap_{axis}", "taps", axis, self.dilation[axis], column=True)
            text += f"""
                meets_{axis} = Add(tap_{axis}, place_{axis})
                met_{axis + 1} = Gather<axis={2 * axis + 2}>(met_{axis}, meets_{axis})
            """
        # (N, groups, channels, taps and places in turns) to (groups, N, places, channels, taps).
        sizes = ", ".join(f"tap_count_{axis}, place_count_{axis}" for axis in self.axes)
        for axis in self.axes:
            text += f"tap_count_{axis} = Shape<start={axis + 2}, end={axis + 3}>(kernel)\n"
            text += f"place_count_{axis} = Shape<start={axis + 2}, end={axis + 3}>(small)\n"
        perm = self._perm(1, 0, *(2 * axis + 4 for axis in self.axes), 2, *(2 * axis + 3 for axis in self.axes))
        return f"""{text}
            met_shape = Concat<axis=0>(batch, group_count, large_of_group, {sizes})
            met_in_groups = Reshape<allowzero=1>(met_{self.spatial}, met_shape)
            met_by_place = Transpose<{perm}>(met_in_groups)
            place_count = ReduceProd<keepdims=1>(places)
            tap_count = ReduceProd<keepdims=1>(taps)
            rows = Mul(batch, place_count)
            columns = Mul(large_of_group, tap_count)
            windows_shape = Concat<axis=0>(group_count, rows, columns)
            windows = Reshape<allowzero=1>(met_by_place, windows_shape)
        """

    def _grad_weight_by_windows(self) -> str:
        perm = self._perm(1, 2, 0, *(axis + 3 for axis in self.axes))
        return f"""
            small_shape = Concat<axis=0>(batch, group_count, small_of_group, places)
            small_in_groups = Reshape<allowzero=1>(small, small_shape)
            small_by_group = Transpose<{perm}>(small_in_groups)
            lines_shape = Concat<axis=0>(group_count, small_of_group, rows)
            lines = Reshape<allowzero=1>(small_by_group, lines_shape)
            weight_products = MatMul(lines, windows)
            weight_shape = Shape(kernel)
            weight_sum = Reshape<allowzero=1>(weight_products, weight_shape)
        """

    def _grad_small_by_windows(self) -> str:
        """The convolution of the large side."""
        perm = self._perm(1, 0, self.spatial + 2, *(axis + 2 for axis in self.axes))
        return f"""
            kernel_shape = Concat<axis=0>(group_count, small_of_group, columns)
            kernel_in_groups = Reshape<allowzero=1>(kernel, kernel_shape)
            kernel_columns = Transpose<perm=[0, 2, 1]>(kernel_in_groups)
            sums = MatMul(windows, kernel_columns)
            sums_shape = Concat<axis=0>(group_count, batch, places, small_of_group)
            sums_by_place = Reshape<allowzero=1>(sums, sums_shape)
            sums_by_item = Transpose<{perm}>(sums_by_place)
            input_shape = Shape(small)
            input_sum = Reshape<allowzero=1>(sums_by_item, input_shape)
        """

    def _attributes(self, **lists: Sequence[int]) -> str:
        """The attributes of a convolution, each with a number for each spatial dimension, or two."""
        texts = (f"{name}=[{', '.join(map(str, numbers))}]" for name, numbers in lists.items())
        return ", ".join([f"group={self.groups}", *texts])

    def _grad_weight(self) -> str:
        """The convolution of the large side by the small one, with items of the batch in the place of channels."""
        swapped = self._perm(1, 0, *(axis + 2 for axis in self.axes))
        options = self._attributes(strides=self.dilation, dilations=self.stride, pads=[*self.begin, *self.end])
        axes = ", ".join(str(axis + 2) for axis in self.axes)
        turned = f"large_by_channel = Transpose<{swapped}>(large)"
        if self.groups > 1:
            # (N, groups, channels, ...) to (channels, groups N, ...).
            turned = f"""
                large_places = Shape<start=2, end={self.spatial + 2}>(large)
                large_in_groups_shape = Concat<axis=0>(batch, group_count, large_of_group, large_places)
                large_in_groups = Reshape<allowzero=1>(large, large_in_groups_shape)
                large_turned = Transpose<{self._perm(2, 1, 0, *(axis + 3 for axis in self.axes))}>(large_in_groups)
                items = Mul(group_count, batch)
                large_by_channel_shape = Concat<axis=0>(large_of_group, items, large_places)
                large_by_channel = Reshape<allowzero=1>(large_turned, large_by_channel_shape)
            """
        return f"""
            {turned}
            small_by_channel = Transpose<{swapped}>(small)
            products = Conv<{options}>(large_by_channel, small_by_channel)
            first_tap = Constant<value_ints=[{", ".join("0" for _ in self.axes)}]>()
            tap_axes = Constant<value_ints=[{axes}]>()
            products_of_taps = Slice(products, first_tap, taps, tap_axes)
            weight_sum = Transpose<{swapped}>(products_of_taps)
        """

    def _grad_small(self) -> str:
        """The convolution of the large side."""
        options = self._attributes(strides=self.stride, dilations=self.dilation, pads=[*self.begin, *self.end])
        axes = ", ".join(str(axis + 2) for axis in self.axes)
        return f"""
            all_windows = Conv<{options}>(large, kernel)
            first_place = Constant<value_ints=[{", ".join("0" for _ in self.axes)}]>()
            place_axes = Constant<value_ints=[{axes}]>()
            input_sum = Slice(all_windows, first_place, places, place_axes)
        """

    def _grad_large(self) -> str:
        """The transposed convolution of the small side, cut to the large side or filled up with zeros."""
        options = self._attributes(strides=self.stride, dilations=self.dilation)
        uncut = f"uncut = ConvTranspose<{options}>(small, kernel)" if self.groups == 1 else self._spread()
        begin = ", ".join(map(str, (0, 0, *self.begin)))
        return f"""
            {uncut}
            cut_begin = Constant<value_ints=[{begin}]>()
            large_shape = Shape(large)
            cut_end = Add(cut_begin, large_shape)
            cut = Slice(uncut, cut_begin, cut_end)
            cut_shape = Shape(cut)
            missing = Sub(large_shape, cut_shape)
            none_missing = Sub(missing, missing)
            fills = Concat<axis=0>(none_missing, missing)
            input_sum = Pad(cut, fills)
        """

    def _spread(self) -> str:
        """Name `uncut` the transposed convolution in groups, which onnx.reference has none of.

        It is the convolution of the small side, with zeros between its elements, by the kernel turned around.
        """
        numbers = {"strides_of_axes": self.stride, "dilations_of_axes": self.dilation}
        text = "".join(
            f"{name} = Constant<value_ints=[{', '.join(map(str, found))}]>()\n" for name, found in numbers.items()
        )
        source = "small"
        if max(self.stride) > 1:
            source = "small_apart"
            apart = [2 * axis + 3 for axis in self.axes]
            behind = [0] * (2 * self.spatial + 2)
            for axis, stride in zip(apart, self.stride, strict=True):
                behind[axis] = stride - 1
            zeros = [*[0] * len(behind), *behind]
            text += f"""
                apart_axes = Constant<value_ints=[{", ".join(map(str, apart))}]>()
                small_with_axes = Unsqueeze(small, apart_axes)
                zeros_between = {_pads(zeros)}
                small_with_zeros = Pad(small_with_axes, zeros_between)
                small_channels_and_items = Shape<start=0, end=2>(small)
                apart_places = Mul(places, strides_of_axes)
                apart_shape = Concat<axis=0>(small_channels_and_items, apart_places)
                small_apart = Reshape<allowzero=1>(small_with_zeros, apart_shape)
            """
        spatial_axes = ", ".join(str(axis + 2) for axis in self.axes)
        backward = ", ".join("-1" for _ in self.axes)
        lowest = ", ".join(str(-(2**62)) for _ in self.axes)
        group_perm = self._perm(0, 2, 1, *(axis + 3 for axis in self.axes))
        return f"""
            {text}
            kernel_in_groups_shape = Concat<axis=0>(group_count, small_of_group, large_of_group, taps)
            kernel_in_groups = Reshape<allowzero=1>(kernel, kernel_in_groups_shape)
            kernel_turned = Transpose<{group_perm}>(kernel_in_groups)
            large_channels = Mul(group_count, large_of_group)
            kernel_by_large_shape = Concat<axis=0>(large_channels, small_of_group, taps)
            kernel_by_large = Reshape<allowzero=1>(kernel_turned, kernel_by_large_shape)
            backward = Constant<value_ints=[{backward}]>()
            turn_to = Constant<value_ints=[{lowest}]>()
            turn_axes = Constant<value_ints=[{spatial_axes}]>()
            kernel_around = Slice(kernel_by_large, backward, turn_to, turn_axes, backward)
            one_tap = Constant<value_ints=[1]>()
            taps_beside = Sub(taps, one_tap)
            reach = Mul(taps_beside, dilations_of_axes)
            no_channels = Constant<value_ints=[0, 0]>()
            around = Concat<axis=0>(no_channels, reach, no_channels, reach)
            small_padded = Pad({source}, around)
            uncut = Conv<{self._attributes(dilations=self.dilation)}>(small_padded, kernel_around)
        """

    def _grad_large_by_windows(self) -> str:
        """The same as a product with all windows that meet an element."""
        pads = [0] * (self.spatial + 4) + [1] * self.spatial
        text = f"""
            one_more = {_pads(pads)}
            from_0 = Pad(small, one_more)
        """
        for axis in self.axes:
            size = f"large_size_{axis}"
            text += f"{size}s = Shape<start={axis + 2}, end={axis + 3}>(large)\n"
            text += f"large_count_{axis} = Identity({size}s)\n"
            text += f"window_count_{axis} = Shape<start={axis + 2}, end={axis + 3}>(small)\n"
            text += f"kernel_count_{axis} = Shape<start={axis + 2}, end={axis + 3}>(kernel)\n"
            text += self._range(f"element_{axis}", f"{size}s", 0, 1, column=False)
            text += self._range(f"reach_{axis}", "taps", axis, self.dilation[axis], column=True)
            # An element is met where its distance to the window's beginning is a multiple of the stride. What is met
            # by no window takes the zero behind the last one.
            text += f"""
                padding_{axis} = Constant<value_int={self.begin[axis]}>()
                stride_{axis} = Constant<value_int={self.stride[axis]}>()
                padded_{axis} = Add(element_{axis}, padding_{axis})
                distance_{axis} = Sub(padded_{axis}, reach_{axis})
                window_{axis} = Div(distance_{axis}, stride_{axis})
                window_begin_{axis} = Mul(window_{axis}, stride_{axis})
                is_begin_{axis} = Equal(window_begin_{axis}, distance_{axis})
                before_{axis} = Less(distance_{axis}, zero)
                not_before_{axis} = Not(before_{axis})
                inside_{axis} = Less(window_{axis}, window_count_{axis})
                in_range_{axis} = And(not_before_{axis}, inside_{axis})
                is_met_{axis} = And(is_begin_{axis}, in_range_{axis})
                from_where_{axis} = Where(is_met_{axis}, window_{axis}, window_count_{axis})
                from_{axis + 1} = Gather<axis={2 * axis + 2}>(from_{axis}, from_where_{axis})
            """
        sizes = ", ".join(f"kernel_count_{axis}, large_count_{axis}" for axis in self.axes)
        perm = self._perm(1, 0, *(2 * axis + 4 for axis in self.axes), 2, *(2 * axis + 3 for axis in self.axes))
        kernel_perm = self._perm(0, 1, *(axis + 3 for axis in self.axes), 2)
        back = self._perm(1, 0, self.spatial + 2, *(axis + 2 for axis in self.axes))
        return f"""{text}
            from_shape = Concat<axis=0>(batch, group_count, small_of_group, {sizes})
            from_in_groups = Reshape<allowzero=1>(from_{self.spatial}, from_shape)
            from_by_element = Transpose<{perm}>(from_in_groups)
            large_places = Shape<start=2, end={self.spatial + 2}>(large)
            element_count = ReduceProd<keepdims=1>(large_places)
            kernel_count = ReduceProd<keepdims=1>(taps)
            element_rows = Mul(batch, element_count)
            element_columns = Mul(small_of_group, kernel_count)
            element_shape = Concat<axis=0>(group_count, element_rows, element_columns)
            elements = Reshape<allowzero=1>(from_by_element, element_shape)
            kernel_shape = Concat<axis=0>(group_count, small_of_group, large_of_group, taps)
            kernel_in_groups = Reshape<allowzero=1>(kernel, kernel_shape)
            kernel_last = Transpose<{kernel_perm}>(kernel_in_groups)
            kernel_matrix_shape = Concat<axis=0>(group_count, element_columns, large_of_group)
            kernel_matrix = Reshape<allowzero=1>(kernel_last, kernel_matrix_shape)
            large_sums = MatMul(elements, kernel_matrix)
            large_sums_shape = Concat<axis=0>(group_count, batch, large_places, large_of_group)
            large_by_place = Reshape<allowzero=1>(large_sums, large_sums_shape)
            large_by_item = Transpose<{back}>(large_by_place)
            large_shape = Shape(large)
            input_sum = Reshape<allowzero=1>(large_by_item, large_shape)
        """


def _body(variant: Variant) -> str:
    return _Text(variant).text()


def _torch_outputs(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    channels = grad_output.shape[1:2] if grad_output.dim() > 1 else (0,)
    shapes = (input.shape, weight.shape, channels)
    return tuple(input.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask, strict=True))


OPERATOR = Operator(
    name="ConvolutionBackward",
    stem="convolution_backward",
    doc=(
        "Gradients of a convolution over 1 to 3 spatial dimensions, or of a transposed one, w.r.t. its input, weight "
        "and bias, as PyTorch's convolution_backward. Attributes with a number for each spatial dimension may have one "
        "number for all. Nothing is multiplied with padding: an infinity beside it gives no NaN."
    ),
    summary="a convolution, or a transposed one",
    counterpart="`aten::convolution_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of the result, (N, M, ...)."),
        Input("input", "T", "Input of the convolution, (N, C, ...)."),
        Input("weight", "T", "Its kernel, (M, C / groups, ...); with transposed (C, M / groups, ...)."),
    ),
    outputs=(
        Output("grad_input", "Gradient w.r.t. input, of its shape; (0) where it is not wanted."),
        Output("grad_weight", "Gradient w.r.t. weight, of its shape; (0) where it is not wanted."),
        Output("grad_bias", "Gradient w.r.t. the bias, (M); (0) where it is not wanted."),
    ),
    attributes=(
        Attribute("stride", (1,), "The distance of neighbouring windows."),
        Attribute("padding", (0,), "Zeros beside the input; also those at all beginnings, then those at all ends."),
        Attribute("dilation", (1,), "The distance of neighbouring elements of a window."),
        Attribute("transposed", 0, "1: of a transposed convolution."),
        Attribute("output_padding", (0,), "With transposed: what its result was larger by."),
        Attribute("groups", 1, "Groups of channels."),
        Attribute("output_mask", (1, 1, 1), "Which of grad_input, grad_weight and grad_bias are wanted."),
    ),
    constraints={"T": ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(
        schema=(
            "(Tensor grad_output, Tensor input, Tensor weight, int[] stride=[1], int[] padding=[0], int[] dilation=[1],"
            " bool transposed=False, int[] output_padding=[0], int groups=1, bool[3] output_mask=[True, True, True])"
            " -> (Tensor, Tensor, Tensor)"
        ),
        outputs=_torch_outputs,
    ),
)
