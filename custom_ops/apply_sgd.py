"""ApplySgd: the update of a parameter and its momentum by SGD, as torch.optim's."""

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
)
from gradfuse.custom_ops.updates import common_shape

if TYPE_CHECKING:
    import torch

_TENSORS = ("parameter", "gradient", "momentum_buffer")
_SCALARS = ("learning_rate", "gradient_scale")


def _infer(call: Call) -> list[Tensor]:
    call.flag("nesterov")
    for name in ("momentum", "weight_decay"):
        value = call.attributes[name]
        assert isinstance(value, (int, float))
        if not value >= 0:
            raise call.error(name, value, "0 or more")
    if "momentum_buffer" not in call.inputs:
        for name in ("momentum", "nesterov"):
            if call.attributes[name]:
                raise call.error(name, call.attributes[name], "0, as momentum_buffer is absent")
    for name in _SCALARS:
        call.shape(name)
    dtype, shape = OPERATOR.dtype(call), common_shape(call, _TENSORS)
    return [Tensor(dtype, shape), Tensor(dtype, shape if "momentum_buffer" in call.inputs else (0,))]


def _choices(call: Call) -> Iterable[str]:
    if call.attributes["weight_decay"]:
        yield "decayed"
    if call.attributes["nesterov"]:
        yield "nesterov"


_MOMENTUM = """
    factor = Constant<value_float: float = @momentum>()
    wide_buffer = Cast<to=$real>(momentum_buffer)
    kept = Mul(wide_buffer, factor)
    buffer = Add(kept, whole_gradient)
    new_momentum_buffer = CastLike(buffer, parameter)
"""
_NESTEROV = """
    ahead = Mul(buffer, factor)
    direction = Add(whole_gradient, ahead)
"""
_NO_MOMENTUM = """
    direction = Identity(whole_gradient)
    no_elements = Constant<value_ints=[0]>()
    nothing = ConstantOfShape(no_elements)
    new_momentum_buffer = CastLike(nothing, parameter)
"""
_DECAYED = """
    decay = Constant<value_float: float = @weight_decay>()
    penalty = Mul(wide_parameter, decay)
    whole_gradient = Add(scaled_gradient, penalty)
"""


def _body(variant: Variant) -> str:
    momentum = _NO_MOMENTUM
    if "momentum_buffer" in variant.inputs:
        momentum = _MOMENTUM + (_NESTEROV if "nesterov" in variant.choices else "direction = Identity(buffer)")
    scaled = "Mul(wide_gradient, gradient_scale)" if "gradient_scale" in variant.inputs else "Identity(wide_gradient)"
    return f"""
        wide_parameter = Cast<to=$real>(parameter)
        wide_gradient = Cast<to=$real>(gradient)
        scaled_gradient = {scaled}
        {_DECAYED if "decayed" in variant.choices else "whole_gradient = Identity(scaled_gradient)"}
        {momentum}
        way = Mul(direction, learning_rate)
        moved = Sub(wide_parameter, way)
        new_parameter = CastLike(moved, parameter)
    """


def _torch_outputs(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    learning_rate: torch.Tensor,
    momentum_buffer: torch.Tensor | None = None,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    shape = (0,) if momentum_buffer is None else parameter.shape
    return parameter.new_empty(parameter.shape), parameter.new_empty(shape)


OPERATOR = Operator(
    name="ApplySgd",
    stem="apply_sgd",
    doc=(
        "One update of a parameter and its momentum by stochastic gradient descent, as torch.optim.SGD's for one "
        "tensor without dampening. With g = gradient_scale gradient + weight_decay parameter and lr the learning rate: "
        "new_momentum_buffer = momentum momentum_buffer + g, and new_parameter = parameter - lr d, where d is "
        "new_momentum_buffer, with nesterov g + momentum new_momentum_buffer, and without momentum_buffer g. "
        "A momentum_buffer of zeros is that before the first update."
    ),
    summary="(the update of `torch.optim.SGD`, in one pass)",
    counterpart="`torch.optim.SGD`",
    inputs=(
        Input("parameter", "T", "What is updated, of any shape of rank 0 to 8."),
        Input("gradient", "T", "Gradient w.r.t. parameter, of its shape."),
        Input("learning_rate", "F", "Learning rate, ()."),
        Input(
            "momentum_buffer",
            "T",
            "Sum of the gradients, of parameter's shape. Absent: there is no momentum.",
            optional=True,
        ),
        Input(
            "gradient_scale",
            "F",
            "What gradient is multiplied by first, (): a clipping factor, 1 over the scale of the loss. Absent: 1.",
            optional=True,
        ),
    ),
    outputs=(
        Output("new_parameter", "Updated parameter, of its shape.", in_place="parameter"),
        Output(
            "new_momentum_buffer",
            "Updated momentum, of parameter's shape; of shape (0) without momentum_buffer.",
            in_place="momentum_buffer",
        ),
    ),
    attributes=(
        Attribute("momentum", 0.0, "Weight of momentum_buffer, 0 or more."),
        Attribute("weight_decay", 0.0, "What of parameter is added to the gradient, 0 or more."),
        Attribute("nesterov", 0, "1: Nesterov's momentum.", flag=True),
    ),
    constraints={"T": FLOAT_TYPES, "F": ("tensor(float)",)},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=(
        {},
        {"weight_decay": 0.25},
        {"momentum": 0.5, "nesterov": 1},
        {"momentum": 0.5, "nesterov": 1, "weight_decay": 0.25},
    ),
)
