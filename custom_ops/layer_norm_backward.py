"""LayerNormBackward: the gradients of layer and RMS normalization (``aten::native_layer_norm_backward``)."""

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
    type_string,
)

if TYPE_CHECKING:
    import torch

MAX_RANK = 8
_WHOLE = ("input", "grad_output")
_STATISTICS = ("mean", "rstd")


def _first(call: Call, rank: int) -> int:
    """The first of the normalized axes."""
    axis = call.attributes["axis"]
    assert isinstance(axis, int)
    if not -rank <= axis < rank:
        raise call.error("axis", axis, f"{-rank} to {rank - 1}, as input is of rank {rank}")
    return axis % rank


def _infer(call: Call) -> list[Tensor]:
    call.output_mask(OPERATOR)
    dtype = OPERATOR.dtype(call)
    for name in _STATISTICS:
        found = call.inputs[name].dtype if name in call.inputs else TensorProto.UNDEFINED
        if TensorProto.UNDEFINED not in (found, dtype) and (found == TensorProto.DOUBLE) != (
            dtype == TensorProto.DOUBLE
        ):
            wanted = TensorProto.DOUBLE if dtype == TensorProto.DOUBLE else TensorProto.FLOAT
            raise call.error(name, type_string(found), f"{type_string(wanted)}, as input is {type_string(dtype)}")
    shapes = {name: tensor.shape for name, tensor in call.inputs.items()}
    for name in _WHOLE:
        shape = shapes[name]
        if shape is not None and not 1 <= len(shape) <= MAX_RANK:
            raise call.error(name, f"of rank {len(shape)}", f"rank 1 to {MAX_RANK}")
    whole = call.merged({name: shapes[name] for name in _WHOLE}, "as input")
    inner = shapes.get("weight")
    if whole is not None:
        first = _first(call, len(whole))
        rows: Shape = (*whole[:first], *(1 for _ in whole[first:]))
        for name in _STATISTICS:
            call.merged({"input": rows, name: shapes.get(name)}, "one a row of input")
        inner = call.merged({"input": whole[first:], "weight": inner}, "as the normalized axes of input")
        assert inner is not None
        whole = (*whole[:first], *inner)
    return call.masked(OPERATOR, (whole, inner, inner))


def _choices(call: Call) -> Iterable[str]:
    yield from call.wanted_outputs(OPERATOR)
    dtype = OPERATOR.dtype(call)
    if dtype == TensorProto.DOUBLE:
        yield "double"
    # onnxruntime copies what it casts to its own type at the end.
    if dtype in (TensorProto.FLOAT, TensorProto.DOUBLE):
        yield "same"


def _body(variant: Variant) -> str:
    centred = "mean" in variant.inputs
    wanted = variant.choices
    text = f"""
        zero_axis = Constant<value_ints=[0]>()
        one_axis = Constant<value_ints=[1]>()
        inner_shape = Shape<start: int = @axis>(input)
        size = ReduceProd<keepdims=1>(inner_shape)
        row_count = Size(rstd)
        rows = Reshape(row_count, one_axis)
        matrix_shape = Concat<axis=0>(rows, size)
        column_shape = Concat<axis=0>(rows, one_axis)
        real_input = Cast<to=$real>(input)
        real_grad = Cast<to=$real>(grad_output)
        x = Reshape<allowzero=1>(real_input, matrix_shape)
        grad = Reshape<allowzero=1>(real_grad, matrix_shape)
        inverse = Reshape<allowzero=1>(rstd, column_shape)
        {"middle = Reshape<allowzero=1>(mean, column_shape)" if centred else ""}
        distance = {"Sub(x, middle)" if centred else "Identity(x)"}
        normalized = Mul(distance, inverse)
        nothing = ConstantOfShape(zero_axis)
        no_elements = CastLike(nothing, input)
    """
    if "grad_input" in wanted:
        weighted = """
            real_weight = Cast<to=$real>(weight)
            weight_row = Reshape<allowzero=1>(real_weight, size)
            through = Mul(grad, weight_row)
        """
        without_mean = """
            through_sum = ReduceSum<keepdims=1>(through, one_axis)
            through_mean = Div(through_sum, real_count)
            without_mean = Sub(through, through_mean)
        """
        text += f"""
            {weighted if "weight" in variant.inputs else "through = Identity(grad)"}
            real_count = Cast<to=$real>(size)
            {without_mean if centred else "without_mean = Identity(through)"}
            product = Mul(through, normalized)
            product_sum = ReduceSum<keepdims=1>(product, one_axis)
            product_mean = Div(product_sum, real_count)
            of_deviation = Mul(normalized, product_mean)
            rest = Sub(without_mean, of_deviation)
            scaled = Mul(rest, inverse)
            grad_of_type = {"Identity(scaled)" if "same" in wanted else "CastLike(scaled, input)"}
            whole_shape = Shape(input)
            grad_input = Reshape<allowzero=1>(grad_of_type, whole_shape)
        """
    else:
        text += "grad_input = Identity(no_elements)\n"
    if "grad_weight" in wanted:
        text += "weighted = Mul(grad, normalized)\n"
    for name, terms in (("grad_weight", "weighted"), ("grad_bias", "grad")):
        if name not in wanted:
            text += f"{name} = Identity(no_elements)\n"
            continue
        text += f"""
            {name}_sum = ReduceSum<keepdims=0>({terms}, zero_axis)
            {name}_of_type = CastLike({name}_sum, input)
            {name} = Reshape<allowzero=1>({name}_of_type, inner_shape)
        """
    return text


def _torch_outputs(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    axis: int = -1,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[torch.Tensor, ...]:
    inner = input.shape[axis:] if -input.dim() <= axis < input.dim() else (0,)
    shapes = (input.shape, inner, inner)
    return tuple(input.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask, strict=True))


OPERATOR = Operator(
    name="LayerNormBackward",
    stem="layer_norm_backward",
    doc=(
        "Gradients of layer normalization w.r.t. its input, weight and bias, and without mean those of RMS "
        "normalization. With y = (input - mean) rstd, g = weight grad_output, and means over the axes from axis on: "
        "grad_input = rstd (g - mean of g - y (mean of g y)), grad_weight = sum of grad_output y, and grad_bias = sum "
        "of grad_output over the other axes. Without mean, y = input rstd, and the mean of g is left out."
    ),
    summary="layer normalization, and RMS normalization",
    counterpart="`aten::native_layer_norm_backward`, `aten::_fused_rms_norm_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of the result, of rank 1 to 8."),
        Input("input", "T", "Input of the normalization, the shape of grad_output."),
        Input("weight", "T", "Its weight, of the shape of the axes from axis on. Absent: all ones.", optional=True),
        Input(
            "mean",
            "S",
            "Mean over the axes from axis on, which are kept as 1. Absent: 0, as in RMS normalization.",
            optional=True,
        ),
        Input(
            "rstd",
            "S",
            "1 / sqrt(variance + epsilon), of the shape of mean; without mean, 1 / sqrt(mean square + epsilon).",
        ),
    ),
    outputs=(
        Output("grad_input", "Gradient w.r.t. input, of its shape; (0) where it is not wanted."),
        Output("grad_weight", "Gradient w.r.t. weight, of its shape; (0) where it is not wanted."),
        Output("grad_bias", "Gradient w.r.t. the bias, of weight's shape; (0) where it is not wanted."),
    ),
    attributes=(
        Attribute("axis", -1, "The first of the axes that are normalized; negative: counted from the end."),
        Attribute("output_mask", (1, 1, 1), "Which of grad_input, grad_weight and grad_bias are wanted."),
    ),
    constraints={
        "T": ALL_FLOAT_TYPES,
        "S": ("tensor(float)", "tensor(double)"),
    },
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
