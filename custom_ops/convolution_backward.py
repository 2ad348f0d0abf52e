"""ConvolutionBackward: the gradients of a convolution, plain or transposed (``aten::convolution_backward``)."""

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
    Input,
    Operator,
    Output,
    Tensor,
    TorchOp,
    Variant,
)
from gradfuse.custom_ops.spatial import numbers_of, spatial_of

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    spatial = spatial_of(call, LISTS)
    check_attributes(call, spatial, OPERATOR.dtype(call))
    call.output_mask(OPERATOR)
    if spatial is None:
        return call.masked(OPERATOR, (None, None, (None,)))
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
    of_group(call, small, channels[small], groups)
    of_small = call.same("weight", "dimension 0", channels[small], weight[0])
    large_of_group = call.same("weight", "dimension 1", of_group(call, large, channels[large], groups), weight[1])
    of_large = channels[large]
    if not isinstance(of_large, int) and isinstance(large_of_group, int):
        of_large = large_of_group * groups
    outputs = of_large if call.attributes["transposed"] else of_small
    inputs = of_small if call.attributes["transposed"] else of_large
    for axis in range(spatial):
        size = output_size(call, spatial, axis, input[axis + 2], weight[axis + 2])
        size = max(size, 0) if isinstance(size, int) and not call.attributes["transposed"] else size
        call.same("grad_output", f"dimension {axis + 2}", size, grad_output[axis + 2])
    return call.masked(OPERATOR, ((batch, inputs, *input[2:]), (of_small, large_of_group, *weight[2:]), (outputs,)))


def _choices(call: Call) -> Iterable[str]:
    yield from choices(call)
    names = ("input", "weight", "bias")
    yield from (name for name, one in zip(names, numbers_of(call.attributes["output_mask"]), strict=True) if one)
    if OPERATOR.dtype(call) == TensorProto.DOUBLE:
        yield "double"


class _Text(ConvolutionText):
    def text(self) -> str:
        """All of the body."""
        small, large = ("input", "grad_output") if self.transposed else ("grad_output", "input")
        parts = [
            self.factor("small", small),
            self.factor("large", large),
            self.factor("kernel", "weight"),
            self.sizes(),
            "nothing_shape = Constant<value_ints=[0]>()\nnothing = ConstantOfShape(nothing_shape)",
        ]
        of_input, of_weight = "input" in self.chosen, "weight" in self.chosen
        if self.wide:
            # onnxruntime has no convolutions in float64.
            if of_weight or (of_input and self.transposed):
                parts.append(self.windows())
            if of_weight:
                parts.append(self._grad_weight_by_windows())
            if of_input:
                parts.append(self.to_small_by_windows() if self.transposed else self.to_large_by_windows())
        else:
            if of_weight:
                parts.append(self._grad_weight())
            if of_input:
                parts.append(self.to_small() if self.transposed else self.to_large())
        if "bias" in self.chosen:
            axes = ", ".join(map(str, [0, *(axis + 2 for axis in self.axes)]))
            parts.append(f"bias_axes = Constant<value_ints=[{axes}]>()")
            parts.append(
                "grad_real = Cast<to=$real>(grad_output)\nbias_sum = ReduceSum<keepdims=0>(grad_real, bias_axes)"
            )
        for name, value in (("input", "convolved"), ("weight", "weight_sum"), ("bias", "bias_sum")):
            result = value if name in self.chosen else "nothing"
            parts.append(f"grad_{name} = CastLike({result}, {'input' if name == 'input' else 'weight'})")
        return "\n".join(parts)

    def _grad_weight_by_windows(self) -> str:
        perm = self.perm(1, 2, 0, *(axis + 3 for axis in self.axes))
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

    def _grad_weight(self) -> str:
        """The convolution of the large side by the small one, with items of the batch in the place of channels."""
        swapped = self.perm(1, 0, *(axis + 2 for axis in self.axes))
        options = self.attributes(strides=self.dilation, dilations=self.stride, pads=[*self.begin, *self.end])
        axes = ", ".join(str(axis + 2) for axis in self.axes)
        turned = f"large_by_channel = Transpose<{swapped}>(large)"
        if self.groups > 1:
            # (N, groups, channels, ...) to (channels, groups N, ...).
            turned = f"""
                large_places = Shape<start=2, end={self.spatial + 2}>(large)
                large_in_groups_shape = Concat<axis=0>(batch, group_count, large_of_group, large_places)
                large_in_groups = Reshape<allowzero=1>(large, large_in_groups_shape)
                large_turned = Transpose<{self.perm(2, 1, 0, *(axis + 3 for axis in self.axes))}>(large_in_groups)
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
    *_: object,
) -> tuple[torch.Tensor, ...]:
    channels = grad_output.shape[1:2] if grad_output.dim() > 1 else (0,)
    results = ((input, input.shape), (weight, weight.shape), (weight, channels))
    return tuple(
        like.new_empty(shape if wanted else (0,)) for (like, shape), wanted in zip(results, output_mask, strict=True)
    )


OPERATOR = Operator(
    name="ConvolutionBackward",
    stem="convolution_backward",
    doc=(
        "Gradients of a convolution over 1 to 3 spatial dimensions, or of a transposed one, w.r.t. its input, weight "
        "and bias, as PyTorch's convolution_backward. Attributes with a number for each spatial dimension may have one "
        "number for all. Nothing is multiplied with padding: an infinity beside it gives no NaN. " + PAIRS
    ),
    summary="a convolution, or a transposed one",
    counterpart="`aten::convolution_backward`",
    inputs=(
        Input("grad_output", "A", "Gradient of the result, (N, M, ...)."),
        Input("input", "A", "Input of the convolution, (N, C, ...)."),
        Input("weight", "T", "Its kernel, (M, C / groups, ...); with transposed (C, M / groups, ...)."),
    ),
    outputs=(
        Output("grad_input", "Gradient w.r.t. input, of its shape; (0) where it is not wanted.", type="A"),
        Output("grad_weight", "Gradient w.r.t. weight, of its shape; (0) where it is not wanted."),
        Output("grad_bias", "Gradient w.r.t. the bias, (M); (0) where it is not wanted."),
    ),
    attributes=(
        *ATTRIBUTES,
        Attribute("output_mask", (1, 1, 1), "Which of grad_input, grad_weight and grad_bias are wanted."),
        ROUNDS,
    ),
    constraints={"T": ALL_FLOAT_TYPES, "A": ALL_FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
