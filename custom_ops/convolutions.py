"""What the operators on convolutions share: attributes, sizes, and the text of their function bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnx import TensorProto

from gradfuse.custom_ops.operator import Attribute, Call, Dim, Variant
from gradfuse.custom_ops.spatial import check_numbers, numbers_of, paddings, per_axis, spatial_of

ATTRIBUTES = (
    Attribute("stride", (1,), "The distance of neighbouring windows."),
    Attribute("padding", (0,), "Zeros beside the input; also those at all beginnings, then those at all ends."),
    Attribute("dilation", (1,), "The distance of neighbouring elements of a window."),
    Attribute("transposed", 0, "1: of a transposed convolution.", flag=True),
    Attribute("output_padding", (0,), "With transposed: what its result was larger by."),
    Attribute("groups", 1, "Groups of channels."),
)
ROUNDS = Attribute("factors_in_bfloat16", 0, "1: what is multiplied is rounded to bfloat16; not of float64.", flag=True)
LISTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
"""The attributes with a number for each spatial dimension, and the least that each number may be."""


def check_attributes(call: Call, spatial: int | None, dtype: int) -> None:
    """Raise ArgumentError for attributes that no convolution has."""
    call.flag("transposed")
    call.flag(ROUNDS.name)
    if call.attributes[ROUNDS.name] and dtype == TensorProto.DOUBLE:
        raise call.error(ROUNDS.name, 1, "0 for float64")
    check_numbers(call, spatial, LISTS)
    if call.attributes["transposed"] == 0 and any(numbers_of(call.attributes["output_padding"])):
        raise call.error("output_padding", list(numbers_of(call.attributes["output_padding"])), "0 without transposed")
    groups = call.attributes["groups"]
    assert isinstance(groups, int)
    if groups < 1:
        raise call.error("groups", groups, "1 or more")


def of_group(call: Call, name: str, dim: Dim, groups: int) -> Dim:
    """The channels of a group."""
    if not isinstance(dim, int):
        return None
    if dim % groups:
        raise call.error("groups", groups, f"a divisor of the {dim} channels of {name}")
    return dim // groups


def output_size(call: Call, spatial: int, axis: int, size: Dim, taps: Dim) -> Dim:
    """The size of the result along a spatial dimension, as far as it is known; negative where none fits."""
    if not isinstance(size, int) or not isinstance(taps, int):
        return None
    stride, dilation, extra = (
        per_axis(numbers_of(call.attributes[name]), spatial)[axis] for name in ("stride", "dilation", "output_padding")
    )
    begin, end = paddings(numbers_of(call.attributes["padding"]), spatial)
    padding, reach = begin[axis] + end[axis], dilation * (taps - 1) + 1
    if call.attributes["transposed"]:
        return (size - 1) * stride - padding + reach + extra
    return (size + padding - reach) // stride + 1


def choices(call: Call) -> Iterable[str]:
    """What a function body depends on."""
    spatial = spatial_of(call, LISTS)
    if spatial is None:
        raise call.error("input", "of unknown rank", "a tensor of known rank")
    begin, end = paddings(numbers_of(call.attributes["padding"]), spatial)
    lists = {name: per_axis(numbers_of(call.attributes[name]), spatial) for name in ("stride", "dilation")}
    for name, numbers in {**lists, "padding": [*begin, *end]}.items():
        yield "_".join([name, *map(str, numbers)])
    yield f"groups_{call.attributes['groups']}"
    if call.attributes[ROUNDS.name]:
        yield "rounded"
    if call.attributes["transposed"]:
        yield "transposed"


def _pads(numbers: Sequence[int]) -> str:
    """A constant that onnxruntime before 1.24 takes for pads: it loses the shape of `value_ints` in a function."""
    return f"Constant<value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}>()"


class ConvolutionText:
    """Text of function bodies, for `spatial` dimensions with their strides and so on as numbers.

    A convolution has a small side (N, M, ...), which has an element for each place of a window, and a large side
    (N, C, ...), over which windows go: its output and its input, or of a transposed one its input and its output. The
    text names them `small` and `large`, the weight `kernel`, and a result `convolved`.
    """

    def __init__(self, variant: Variant) -> None:
        named = {word.split("_")[0]: [int(n) for n in word.split("_")[1:]] for word in variant.choices if "_" in word}
        self.chosen = variant.choices
        self.stride, self.dilation, (self.groups,) = named["stride"], named["dilation"], named["groups"]
        self.spatial = len(self.stride)
        self.begin, self.end = named["padding"][: self.spatial], named["padding"][self.spatial :]
        self.transposed, self.wide = "transposed" in variant.choices, variant.wide
        self.rounds = "rounded" in variant.choices
        self.extra = named.get("extra", [0] * self.spatial)
        self.axes = range(self.spatial)

    def factor(self, name: str, source: str) -> str:
        """Name a factor, in the type that is computed in."""
        rounded = f"rounded_{name} = Cast<to={TensorProto.BFLOAT16}>({source})\n" if self.rounds else ""
        return f"{rounded}{name} = Cast<to=$real>({f'rounded_{name}' if rounded else source})"

    def sizes(self) -> str:
        """Name sizes of small, large and kernel."""
        return f"""
            group_count = Constant<value_ints=[{self.groups}]>()
            batch = Shape<start=0, end=1>(small)
            small_channels = Shape<start=0, end=1>(kernel)
            small_of_group = Div(small_channels, group_count)
            large_of_group = Shape<start=1, end=2>(kernel)
            places = Shape<start=2, end={self.spatial + 2}>(small)
            taps = Shape<start=2, end={self.spatial + 2}>(kernel)
            zero = Constant<value_int=0>()
            one = Constant<value_int=1>()
        """

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

    def perm(self, *axes: int) -> str:
        return f"perm=[{', '.join(map(str, axes))}]"

    def windows(self) -> str:
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
        perm = self.perm(1, 0, *(2 * axis + 4 for axis in self.axes), 2, *(2 * axis + 3 for axis in self.axes))
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

    def to_small_by_windows(self) -> str:
        """The convolution of the large side."""
        perm = self.perm(1, 0, self.spatial + 2, *(axis + 2 for axis in self.axes))
        return f"""
            kernel_shape = Concat<axis=0>(group_count, small_of_group, columns)
            kernel_in_groups = Reshape<allowzero=1>(kernel, kernel_shape)
            kernel_columns = Transpose<perm=[0, 2, 1]>(kernel_in_groups)
            sums = MatMul(windows, kernel_columns)
            sums_shape = Concat<axis=0>(group_count, batch, places, small_of_group)
            sums_by_place = Reshape<allowzero=1>(sums, sums_shape)
            sums_by_item = Transpose<{perm}>(sums_by_place)
            side_shape = Shape(small)
            convolved = Reshape<allowzero=1>(sums_by_item, side_shape)
        """

    def attributes(self, **lists: Sequence[int]) -> str:
        """The attributes of a convolution, each with a number for each spatial dimension, or two."""
        texts = (f"{name}=[{', '.join(map(str, numbers))}]" for name, numbers in lists.items())
        return ", ".join([f"group={self.groups}", *texts])

    def to_small(self) -> str:
        """The convolution of the large side."""
        options = self.attributes(strides=self.stride, dilations=self.dilation, pads=[*self.begin, *self.end])
        axes = ", ".join(str(axis + 2) for axis in self.axes)
        return f"""
            all_windows = Conv<{options}>(large, kernel)
            first_place = Constant<value_ints=[{", ".join("0" for _ in self.axes)}]>()
            place_axes = Constant<value_ints=[{axes}]>()
            convolved = Slice(all_windows, first_place, places, place_axes)
        """

    def to_large(self) -> str:
        """The transposed convolution of the small side, cut to the large side or filled up with zeros."""
        options = self.attributes(strides=self.stride, dilations=self.dilation)
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
            convolved = Pad(cut, fills)
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
        group_perm = self.perm(0, 2, 1, *(axis + 3 for axis in self.axes))
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
            uncut = Conv<{self.attributes(dilations=self.dilation)}>(small_padded, kernel_around)
        """

    def to_large_by_windows(self) -> str:
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
        perm = self.perm(1, 0, *(2 * axis + 4 for axis in self.axes), 2, *(2 * axis + 3 for axis in self.axes))
        kernel_perm = self.perm(0, 1, *(axis + 3 for axis in self.axes), 2)
        back = self.perm(1, 0, self.spatial + 2, *(axis + 2 for axis in self.axes))
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
            convolved = Reshape<allowzero=1>(large_by_item, large_shape)
        """
