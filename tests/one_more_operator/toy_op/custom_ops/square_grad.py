"""SquareGrad: the gradient of the square of each element w.r.t. it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

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
    show,
)

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    grad, x = (call.inputs[name].shape for name in ("grad", "x"))
    shape = x if grad is None else grad
    if grad is not None and x is not None:
        if len(grad) != len(x):
            raise call.error("x", f"of shape {show(x)}", f"shape {show(grad)}, as grad")
        shape = tuple(call.same("x", f"dimension {axis}", *dims) for axis, dims in enumerate(zip(grad, x, strict=True)))
    return [Tensor(OPERATOR.dtype(call), shape)]


def _choices(call: Call) -> Iterable[str]:
    return []


def _body(variant: Variant) -> str:
    return """
        value = Cast<to=$real>(x)
        output_grad = Cast<to=$real>(grad)
        factor_value = Constant<value_float: float = @factor>()
        scaled = Mul(factor_value, value)
        product = Mul(scaled, output_grad)
        grad_x = CastLike(product, x)
    """


def _torch_outputs(grad: torch.Tensor, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return (x.new_empty(x.shape),)


OPERATOR = Operator(
    name="SquareGrad",
    stem="square_grad",
    doc="Gradient of the squares of all elements w.r.t. them: factor x grad.",
    summary="the square of each element",
    counterpart="autograd of `torch.square`",
    inputs=(
        Input("grad", "T", "Gradient of the squares."),
        Input("x", "T", "What was squared, the shape of grad."),
    ),
    outputs=(Output("grad_x", "Gradient w.r.t. x, the shape of x."),),
    attributes=(Attribute("factor", 2.0, "What the product of both is multiplied by."),),
    constraints={"T": FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
