"""BatchNormBackward: the gradients of batch normalization in training mode (``aten::native_batch_norm_backward``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.operator import (
    ALL_FLOAT_TYPES,
    Attribute,
    Call,
    Input,
    Operator,
    Output,
    Shape,
    Tensor,
    TorchOp,
    Variant,
)

if TYPE_CHECKING:
    import torch

MAX_RANK = 8
_WHOLE = ("input", "grad_output", "relu_output")
_OF_CHANNELS = ("weight", "save_mean", "save_invstd")


def _whole_shape(call: Call) -> Shape:
    """The shape of input, from all tensors that have it."""
    known = {name: call.inputs[name].shape for name in _WHOLE if name in call.inputs}
    for name, shape in known.items():
        if shape is not None and not 2 <= len(shape) <= MAX_RANK:
            raise call.error(name, f"of rank {len(shape)}", f"rank 2 to {MAX_RANK}: (N, C, ...)")
    return call.merged(known)


def _infer(call: Call) -> list[Tensor]:
    call.output_mask(OPERATOR)
    whole = _whole_shape(call)
    channels = whole[1] if whole is not None else None
    for name in _OF_CHANNELS:
        (found,) = call.shape(name, "C")
        channels = call.same(name, "C", channels, found)
    if whole is not None:
        whole = (whole[0], channels, *whole[2:])
    return call.masked(OPERATOR, (whole, (channels,), (channels,)))


def _choices(call: Call) -> Iterable[str]:
    yield from call.wanted_outputs(OPERATOR)
    dtype = OPERATOR.dtype(call)
    if dtype == TensorProto.DOUBLE:
        yield "double"
    # onnxruntime copies what it casts to its own type at the end.
    if OPERATOR.dtype(call, "A") in (TensorProto.FLOAT, TensorProto.DOUBLE):
        yield "same"


PLANES = """
    zero_axis = Constant<value_ints=[0]>()
    one_axis = Constant<value_ints=[1]>()
    around_channels = Constant<value_ints=[0, 2]>()
    real_input = Cast<to=$real>(input)
    whole_shape = Shape(input)
    items_and_channels = Shape<start=0, end=2>(input)
    items = Shape<start=0, end=1>(input)
    channels = Shape<start=1, end=2>(input)
    planes = Mul(items, channels)
    planes_or_one = Max(planes, one_axis)
    elements = Size(real_input)
    plane_size = Div(elements, planes_or_one)
    planes_shape = Concat<axis=0>(items_and_channels, plane_size)
    count = Mul(items, plane_size)
    real_count = Cast<to=$real>(count)
    x = Reshape<allowzero=1>(real_input, planes_shape)
"""
"""Text: `input` (N, C, ...) as `x` (N, C, elements), in the type of the computation."""


def _column(name: str) -> str:
    """Text: a vector (C) as <name>_column (1, C, 1), in the type of the computation."""
    return f"""
        {name}_real = Cast<to=$real>({name})
        {name}_column = Unsqueeze({name}_real, around_channels)
    """


def _body(variant: Variant) -> str:
    gated = """
        relu_planes = Reshape<allowzero=1>(relu_output, planes_shape)
        relu_real = Cast<to=$real>(relu_planes)
        zero_float = Constant<value_float=0.0>()
        none = Cast<to=$real>(zero_float)
        is_cut = LessOrEqual(relu_real, none)
        grad = Where(is_cut, none, whole_grad)
    """
    weighted = f"""
        {_column("weight")}
        scale = Mul(weight_column, save_invstd_column)
    """
    wanted = variant.choices
    text = f"""
        {PLANES}
        {_column("save_mean")}
        {_column("save_invstd")}
        grad_planes = Reshape<allowzero=1>(grad_output, planes_shape)
        whole_grad = Cast<to=$real>(grad_planes)
        {gated if "relu_output" in variant.inputs else "grad = Identity(whole_grad)"}
        grad_sum = ReduceSum<keepdims=1>(grad, around_channels)
        distance = Sub(x, save_mean_column)
        product = Mul(grad, distance)
        product_sum = ReduceSum<keepdims=1>(product, around_channels)
        nothing = ConstantOfShape(zero_axis)
        no_elements = CastLike(nothing, save_mean)
    """
    if "grad_input" in wanted:
        text += f"""
            {weighted if "weight" in variant.inputs else "scale = Identity(save_invstd_column)"}
            mean_grad = Div(grad_sum, real_count)
            mean_product = Div(product_sum, real_count)
            normalized_product = Mul(mean_product, save_invstd_column)
            slope = Mul(normalized_product, save_invstd_column)
            of_variance = Mul(distance, slope)
            without_variance = Sub(grad, of_variance)
            centred = Sub(without_variance, mean_grad)
            scaled = Mul(centred, scale)
            grad_of_type = {"Identity(scaled)" if "same" in wanted else "CastLike(scaled, input)"}
            grad_input = Reshape<allowzero=1>(grad_of_type, whole_shape)
        """
    else:
        text += "grad_input = CastLike(nothing, input)\n"
    if "grad_weight" in wanted:
        text += """
            weight_sum = Mul(product_sum, save_invstd_column)
            weight_sums = Squeeze(weight_sum, around_channels)
            grad_weight = CastLike(weight_sums, save_mean)
        """
    else:
        text += "grad_weight = Identity(no_elements)\n"
    if "grad_bias" in wanted:
        text += """
            bias_sums = Squeeze(grad_sum, around_channels)
            grad_bias = CastLike(bias_sums, save_mean)
        """
    else:
        text += "grad_bias = Identity(no_elements)\n"
    return text


def _torch_outputs(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    save_mean: torch.Tensor,
    save_invstd: torch.Tensor,
    relu_output: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    channels = input.shape[1:2] if input.dim() > 1 else (0,)
    results = ((input, input.shape), (save_mean, channels), (save_mean, channels))
    return tuple(
        like.new_empty(shape if wanted else (0,)) for (like, shape), wanted in zip(results, output_mask, strict=True)
    )


OPERATOR = Operator(
    name="BatchNormBackward",
    stem="batch_norm_backward",
    doc=(
        "Gradients of batch normalization in training mode w.r.t. its input, weight and bias. With g = grad_output, or "
        "0 where relu_output is at most 0, sums over all but the channels, n elements a channel, and "
        "d = input - save_mean: grad_bias = sum of g, grad_weight = save_invstd (sum of g d), and "
        "grad_input = weight save_invstd (g - grad_bias / n - d save_invstd grad_weight / n)."
    ),
    summary="batch normalization in training mode, and a ReLU behind it",
    counterpart="`aten::native_batch_norm_backward`, `threshold_backward`",
    inputs=(
        Input("grad_output", "A", "Gradient of the result, or with relu_output of that, (N, C, ...) of rank 2 to 8."),
        Input("input", "A", "Input of the normalization, the shape of grad_output."),
        Input("weight", "T", "Its weight, (C). Absent: all ones.", optional=True),
        Input("save_mean", "T", "Mean of the batch, (C)."),
        Input("save_invstd", "T", "1 / sqrt(variance of the batch + eps), (C)."),
        Input(
            "relu_output",
            "A",
            "What a ReLU made of the result, the shape of grad_output. Absent: there was none.",
            optional=True,
        ),
    ),
    outputs=(
        Output("grad_input", "Gradient w.r.t. input, of its shape; (0) where it is not wanted.", type="A"),
        Output("grad_weight", "Gradient w.r.t. weight, (C); (0) where it is not wanted."),
        Output("grad_bias", "Gradient w.r.t. the bias, (C); (0) where it is not wanted."),
    ),
    attributes=(Attribute("output_mask", (1, 1, 1), "Which of grad_input, grad_weight and grad_bias are wanted."),),
    constraints={"T": ALL_FLOAT_TYPES, "A": ALL_FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
