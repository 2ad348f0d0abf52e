"""ThresholdBackward: the gradient of a ReLU or a threshold (``aten::threshold_backward``)."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import TensorProto

from gradfuse.custom_ops.elementwise import common_shape, torch_outputs
from gradfuse.custom_ops.operator import (
    ALL_FLOAT_TYPES,
    Attribute,
    Call,
    Input,
    Operator,
    Output,
    Tensor,
    TorchOp,
    Variant,
)


def _infer(call: Call) -> list[Tensor]:
    return [Tensor(OPERATOR.dtype(call), common_shape(call, "grad_output", "self"))]


def _choices(call: Call) -> Iterable[str]:
    if OPERATOR.dtype(call) == TensorProto.DOUBLE:
        yield "double"


def _body(variant: Variant) -> str:
    return """
        grad = Cast<to=$real>(grad_output)
        x = Cast<to=$real>(self)
        threshold_float = Constant<value_float: float = @threshold>()
        threshold_real = Cast<to=$real>(threshold_float)
        is_cut = LessOrEqual(x, threshold_real)
        zero_float = Constant<value_float=0.0>()
        zero = Cast<to=$real>(zero_float)
        chosen = Where(is_cut, zero, grad)
        grad_input = CastLike(chosen, grad_output)
    """


OPERATOR = Operator(
    name="ThresholdBackward",
    stem="threshold_backward",
    doc=(
        "Gradient of a ReLU, or of a threshold, as PyTorch's threshold_backward: 0 where self is at most the "
        "threshold, and grad_output elsewhere, also where self is NaN."
    ),
    summary="a ReLU or a threshold",
    counterpart="`aten::threshold_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of the result, rank 0 to 8."),
        Input("self", "T", "Input of the ReLU or its result, the shape of grad_output."),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. the input, of its shape."),),
    attributes=(Attribute("threshold", 0.0, "Up to which the gradient is 0."),),
    constraints={"T": ALL_FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=torch_outputs),
    aten=("threshold_backward.default",),
)
