"""Convolution: a convolution, plain or transposed (``aten::convolution``), and a ReLU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.convolutions import (
    ATTRIBUTES,
    LISTS,
    ROUNDS,
    ConvolutionText,
    check_attributes,
    choices,
    of_group,
    output_size,
)
from gradfuse.custom_ops.operator import (
    ALL_FLOAT_TYPES,
    PAIRS,
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
from gradfuse.custom_ops.spatial import numbers_of, paddings, per_axis, spatial_of

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    spatial = spatial_of(call, LISTS)
    dtype = OPERATOR.dtype(call)
    check_attributes(call, spatial, dtype)
    call.flag("relu")
    if spatial is None:
        return [Tensor(OPERATOR.dtype(call, "A"), None)]
    places = [f"D{axis}" for axis in range(spatial)]
    transposed, groups = call.attributes["transposed"], call.attributes["groups"]
    assert isinstance(groups, int)
    input = list(call.shape("input", "N", "C", *places))
    ends = ("C", "M / groups") if transposed else ("M", "C / groups")
    weight = list(call.shape("weight", *ends, *places))
    channels = of_group(call, "input", input[1], groups)
    if transposed:
        call.same("weight", "dimension 0", input[1], weight[0])
    else:
        call.same("weight", "dimension 1", channels, weight[1])
    outputs: Dim = weight[0]
    if transposed:
        outputs = weight[1] * groups if isinstance(weight[1], int) else None
    elif isinstance(outputs, int) and outputs % groups:
        raise call.error("groups", groups, f"a divisor of the {outputs} channels of weight")
    if "bias" in call.inputs:
        (found,) = call.shape("bias", "M")
        outputs = call.same("bias", "M", outputs, found)
    sizes = [output_size(call, spatial, axis, input[axis + 2], weight[axis + 2]) for axis in range(spatial)]
    for axis, size in enumerate(sizes):
        if isinstance(size, int) and size < 1:
            raise call.error("input", f"of dimension {axis + 2} {input[axis + 2]}", "room for the kernel")
    return [Tensor(OPERATOR.dtype(call, "A"), (input[0], outputs, *sizes))]


def _choices(call: Call) -> Iterable[str]:
    yield from choices(call)
    if any(numbers_of(call.attributes["output_padding"])):
        spatial = spatial_of(call, LISTS)
        assert spatial is not None
        yield "_".join(["extra", *map(str, per_axis(numbers_of(call.attributes["output_padding"]), spatial))])
    if call.attributes["relu"]:
        yield "relu"
    dtype = OPERATOR.dtype(call)
    if dtype == TensorProto.DOUBLE:
        yield "double"
    if OPERATOR.dtype(call, "A") == TensorProto.FLOAT:
        yield "same"


class _Text(ConvolutionText):
    def text(self, *, biased: bool) -> str:
        """All of the body."""
        side = "small" if self.transposed else "large"
        parts = [self.factor(side, "input"), self.factor("kernel", "weight")]
        if biased:
            parts.append("bias_real = Cast<to=$real>(bias)")
        if self.wide or self.transposed:
            parts += [self._other_side(), self.sizes()]
        if self.wide:
            # onnxruntime has no convolutions in float64.
            parts += [self.to_large_by_windows()] if self.transposed else [self.windows(), self.to_small_by_windows()]
        elif self.transposed:
            parts.append(self.to_large())
        else:
            options = self.attributes(strides=self.stride, dilations=self.dilation, pads=[*self.begin, *self.end])
            parts.append(f"convolved = Conv<{options}>(large, kernel{', bias_real' if biased else ''})")
        added = biased and (self.wide or self.transposed)
        if added:
            axes = ", ".join(map(str, [0, *(axis + 2 for axis in self.axes)]))
            parts.append(f"""
                bias_axes = Constant<value_ints=[{axes}]>()
                bias_planes = Unsqueeze(bias_real, bias_axes)
            """)
        parts.append("summed = Add(convolved, bias_planes)" if added else "summed = Identity(convolved)")
        parts.append(f"activated = {'Relu' if 'relu' in self.chosen else 'Identity'}(summed)")
        parts.append(f"output = {'Identity(activated)' if 'same' in self.chosen else 'CastLike(activated, input)'}")
        return "\n".join(parts)

    def _other_side(self) -> str:
        """Name the side that is computed: zeros, of which nothing but the shape is read."""
        numbers = {
            "stride_of_axes": self.stride,
            "dilation_of_axes": self.dilation,
            "beside": [b + e for b, e in zip(self.begin, self.end, strict=True)],
            "extra": self.extra,
            "axis_ones": [1] * self.spatial,
            "group_numbers": [self.groups],
        }
        text = "".join(
            f"{name} = Constant<value_ints=[{', '.join(map(str, found))}]>()\n" for name, found in numbers.items()
        )
        known, other = ("small", "large") if self.transposed else ("large", "small")
        end = self.spatial + 2
        text += f"""
            known_batch = Shape<start=0, end=1>({known})
            known_places = Shape<start=2, end={end}>({known})
            kernel_places = Shape<start=2, end={end}>(kernel)
            steps_of_kernel = Sub(kernel_places, axis_ones)
            span = Mul(steps_of_kernel, dilation_of_axes)
        """
        if self.transposed:
            text += """
                steps = Sub(known_places, axis_ones)
                strides = Mul(steps, stride_of_axes)
                reached = Add(strides, span)
                cut_off = Sub(reached, beside)
                with_extra = Add(cut_off, extra)
                other_places = Add(with_extra, axis_ones)
                kernel_channels = Shape<start=1, end=2>(kernel)
                other_channels = Mul(kernel_channels, group_numbers)
            """
        else:
            text += """
                padded_places = Add(known_places, beside)
                room = Sub(padded_places, span)
                last_begin = Sub(room, axis_ones)
                steps = Div(last_begin, stride_of_axes)
                other_places = Add(steps, axis_ones)
                other_channels = Shape<start=0, end=1>(kernel)
            """
        return f"""{text}
            other_shape = Concat<axis=0>(known_batch, other_channels, other_places)
            {other} = ConstantOfShape(other_shape)
        """


def _body(variant: Variant) -> str:
    return _Text(variant).text(biased="bias" in variant.inputs)


def _torch_outputs(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    spatial = input.dim() - 2
    lengths = {len(one) for one in (stride, dilation, output_padding)} | {len(padding)}
    if spatial < 1 or weight.dim() != input.dim() or not lengths <= {1, spatial, 2 * spatial}:
        return (input.new_empty(0),)
    begin, end = paddings(padding, spatial)
    sizes = []
    for axis in range(spatial):
        step, apart, extra = (per_axis(one, 2 * spatial)[axis] for one in (stride, dilation, output_padding))
        size, reach = input.shape[axis + 2], apart * (weight.shape[axis + 2] - 1) + 1
        if transposed:
            sizes.append((size - 1) * step - begin[axis] - end[axis] + reach + extra)
        else:
            sizes.append((size + begin[axis] + end[axis] - reach) // max(step, 1) + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    # Sizes may be symbols, which are not compared.
    known = [max(size, 0) if isinstance(size, int) else size for size in (channels, *sizes)]
    return (input.new_empty((input.shape[0], *known)),)


OPERATOR = Operator(
    name="Convolution",
    stem="convolution",
    doc=(
        "A convolution over 1 to 3 spatial dimensions, or a transposed one, as PyTorch's convolution; with relu at "
        "least 0. Attributes with a number for each spatial dimension may have one number for all. Nothing is "
        "multiplied with padding: an infinity beside it gives no NaN. " + PAIRS
    ),
    summary="(a convolution itself, plain or transposed, and a ReLU)",
    counterpart="`aten::convolution`, `relu`",
    inputs=(
        Input("input", "A", "What is convolved, (N, C, ...)."),
        Input("weight", "T", "The kernel, (M, C / groups, ...); with transposed (C, M / groups, ...)."),
        Input("bias", "T", "What is added to each channel, (M). Absent: all zeros.", optional=True),
    ),
    outputs=(Output("output", "The result, (N, M, ...).", type="A"),),
    attributes=(*ATTRIBUTES, Attribute("relu", 0, "1: the result is at least 0.", flag=True), ROUNDS),
    constraints={"T": ALL_FLOAT_TYPES, "A": ALL_FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
