"""GeluBackward: the gradient of the Gaussian error linear unit (``aten::gelu_backward``)."""

from __future__ import annotations

from collections.abc import Iterable

from gradfuse.custom_ops.elementwise import common_shape, torch_outputs
from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
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
    approximate = call.attributes["approximate"]
    if approximate not in ("none", "tanh"):
        raise call.error("approximate", f"'{approximate}'", "'none' or 'tanh'")
    return [Tensor(OPERATOR.dtype(call), common_shape(call, "grad_output", "self"))]


def _choices(call: Call) -> Iterable[str]:
    if call.attributes["approximate"] == "tanh":
        yield "tanh"


def _body(variant: Variant) -> str:
    numbers = """
        grad = Cast<to=$real>(grad_output)
        x = Cast<to=$real>(self)
        one = Constant<value_float=1.0>()
        half = Constant<value_float=0.5>()
        square = Mul(x, x)
    """
    if "tanh" in variant.choices:
        slope = """
            scale = Constant<value_float=0.7978845608028654>()
            cubic = Constant<value_float=0.044715>()
            thrice_cubic = Constant<value_float=0.134145>()
            bent = Mul(square, cubic)
            stretched = Add(bent, one)
            scaled = Mul(x, scale)
            inner = Mul(scaled, stretched)
            tanh = Tanh(inner)
            raised = Add(tanh, one)
            share = Mul(raised, half)
            tanh_square = Mul(tanh, tanh)
            tanh_slope = Sub(one, tanh_square)
            bend = Mul(square, thrice_cubic)
            steeper = Add(bend, one)
            inner_slope = Mul(scaled, steeper)
            half_slope = Mul(tanh_slope, half)
            moved = Mul(half_slope, inner_slope)
        """
    else:
        slope = """
            root_half = Constant<value_float=0.7071067811865476>()
            minus_half = Constant<value_float=-0.5>()
            density_scale = Constant<value_float=0.3989422804014327>()
            scaled = Mul(x, root_half)
            error = Erf(scaled)
            raised = Add(error, one)
            share = Mul(raised, half)
            exponent = Mul(square, minus_half)
            bell = Exp(exponent)
            density = Mul(bell, density_scale)
            moved = Mul(x, density)
        """
    return f"""
        {numbers}
        {slope}
        slope = Add(share, moved)
        product = Mul(grad, slope)
        grad_input = CastLike(product, grad_output)
    """


OPERATOR = Operator(
    name="GeluBackward",
    stem="gelu_backward",
    doc=(
        "Gradient of the Gaussian error linear unit w.r.t. its input x = self, as PyTorch's gelu_backward: grad_output "
        "(P(x) + x p(x)) with the normal distribution P and its density p. With approximate = tanh, of "
        "0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."
    ),
    summary="the Gaussian error linear unit (GELU)",
    counterpart="`aten::gelu_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of the result, rank 0 to 8."),
        Input("self", "T", "Input of the unit, the shape of grad_output."),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. self, of its shape."),),
    attributes=(Attribute("approximate", "none", "none, or tanh for the approximation by it."),),
    constraints={"T": FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=torch_outputs),
    aten=("gelu_backward.default",),
)
