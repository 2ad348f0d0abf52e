"""ApplyAdamW: the update of a parameter and its state by Adam or AdamW, as torch.optim's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
    Attribute,
    Call,
    Input,
    Operator,
    Output,
    Tensor,
    TorchOp,
    Value,
    Variant,
)
from gradfuse.custom_ops.updates import common_shape

if TYPE_CHECKING:
    import torch

_TENSORS = ("parameter", "gradient", "exp_avg", "exp_avg_sq")
_SCALARS = ("learning_rate", "step", "gradient_scale")
_DECIMALS = 7


def exact_beta(beta: float) -> bool:
    """Whether a beta keeps its value as an attribute of the operator, which has seven decimals."""
    return 0 <= beta < 1 and round(beta * 10**_DECIMALS) / 10**_DECIMALS == beta


def check_scalars(call: Call) -> None:
    """Refuse scalars and attributes that no update by Adam takes."""
    call.flag("decoupled_weight_decay")
    for name in ("beta1", "beta2"):
        if not 0 <= _number(call, name) < 1:
            raise call.error(name, call.attributes[name], "a number in [0, 1)")
    for name in ("epsilon", "weight_decay"):
        if not _number(call, name) >= 0:
            raise call.error(name, call.attributes[name], "0 or more")
    for name in _SCALARS:
        call.shape(name)


def _infer(call: Call) -> list[Tensor]:
    check_scalars(call)
    return [Tensor(OPERATOR.dtype(call), common_shape(call, _TENSORS))] * 3


def decay_choices(call: Call) -> Iterable[str]:
    """How weight decays: what the text of a body depends on."""
    if call.attributes["weight_decay"]:
        yield "decoupled" if call.attributes["decoupled_weight_decay"] else "regularized"


def _choices(call: Call) -> Iterable[str]:
    yield from decay_choices(call)
    # As torch.lerp, which begins at the nearer end.
    if _number(call, "beta1") <= 0.5:
        yield "from_gradient"


def _number(call: Call, name: str) -> float:
    value = call.attributes[name]
    assert isinstance(value, (int, float))
    return float(value)


def _beta(name: str) -> str:
    """Text: a beta and 1 less it in float64, and in float32."""
    return f"""
        {name}_float = Constant<value_float: float = @{name}>()
        {name}_double = Cast<to={TensorProto.DOUBLE}>({name}_float)
        {name}_units = Mul({name}_double, units)
        {name}_rounded = Round({name}_units)
        {name}_exact = Div({name}_rounded, units)
        {name}_real = Cast<to=$real>({name}_exact)
        {name}_rest = Sub(one, {name}_exact)
        {name}_rest_real = Cast<to=$real>({name}_rest)
        {name}_power = Pow({name}_exact, count)
        {name}_correction = Sub(one, {name}_power)
    """


def scalars_text() -> str:
    """Text: what an update multiplies and divides by, in the type that it computes in."""
    return f"""
        one = Constant<value=double {{1.0}}>()
        units = Constant<value=double {{{10**_DECIMALS}.0}}>()
        done = Cast<to={TensorProto.DOUBLE}>(step)
        count = Add(done, one)
        rate = Cast<to={TensorProto.DOUBLE}>(learning_rate)
        {_beta("beta1")}
        {_beta("beta2")}
        weight_decay_real = Constant<value_float: float = @weight_decay>()
        decay = Cast<to={TensorProto.DOUBLE}>(weight_decay_real)
        step_size = Div(rate, beta1_correction)
        step_size_real = Cast<to=$real>(step_size)
        root_correction = Sqrt(beta2_correction)
        root_correction_real = Cast<to=$real>(root_correction)
        smallest = Constant<value_float: float = @epsilon>()
    """


_DECOUPLED = """
    decayed = Mul(rate, decay)
    kept_share = Sub(one, decayed)
    kept_share_real = Cast<to=$real>(kept_share)
    start = Mul(wide_parameter, kept_share_real)
"""
_REGULARIZED = """
    penalty = Mul(wide_parameter, weight_decay_real)
    whole_gradient = Add(scaled_gradient, penalty)
"""


def decay_text(variant: Variant) -> str:
    """Text: where the way begins and what is averaged, of wide_parameter and wide_gradient."""
    return f"""
        scaled_gradient = {
        "Mul(wide_gradient, gradient_scale)" if "gradient_scale" in variant.inputs else "Identity(wide_gradient)"
    }
        {_DECOUPLED if "decoupled" in variant.choices else "start = Identity(wide_parameter)"}
        {_REGULARIZED if "regularized" in variant.choices else "whole_gradient = Identity(scaled_gradient)"}
    """


# Both are torch.lerp from the mean to the gradient.
_FROM_MEAN = """
    part = Mul(change, beta1_rest_real)
    mean = Add(wide_mean, part)
"""
_FROM_GRADIENT = """
    part = Mul(change, beta1_real)
    mean = Sub(whole_gradient, part)
"""


def _body(variant: Variant) -> str:
    return f"""
        {scalars_text()}
        wide_parameter = Cast<to=$real>(parameter)
        wide_gradient = Cast<to=$real>(gradient)
        wide_mean = Cast<to=$real>(exp_avg)
        wide_square = Cast<to=$real>(exp_avg_sq)
        {decay_text(variant)}
        change = Sub(whole_gradient, wide_mean)
        {_FROM_GRADIENT if "from_gradient" in variant.choices else _FROM_MEAN}
        old_square = Mul(wide_square, beta2_real)
        gradient_share = Mul(whole_gradient, beta2_rest_real)
        new_square = Mul(gradient_share, whole_gradient)
        square = Add(old_square, new_square)
        root = Sqrt(square)
        corrected_root = Div(root, root_correction_real)
        denominator = Add(corrected_root, smallest)
        long_way = Mul(mean, step_size_real)
        way = Div(long_way, denominator)
        moved = Sub(start, way)
        new_parameter = CastLike(moved, parameter)
        new_exp_avg = CastLike(mean, parameter)
        new_exp_avg_sq = CastLike(square, parameter)
    """


def _torch_outputs(parameter: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return tuple(parameter.new_empty(parameter.shape) for _ in range(3))


SCALARS = (
    Input("learning_rate", "F", "Learning rate, ()."),
    Input("step", "S", "Number of updates that were done before, ()."),
    Input(
        "gradient_scale",
        "F",
        "What gradient is multiplied by first, (): a clipping factor, 1 over the scale of the loss. Absent: 1.",
        optional=True,
    ),
)
"""The inputs of all updates by Adam that are scalars."""
ATTRIBUTES = (
    Attribute("beta1", 0.9, "Weight of exp_avg, in [0, 1), to seven decimals."),
    Attribute("beta2", 0.999, "Weight of exp_avg_sq, in [0, 1), to seven decimals."),
    Attribute("epsilon", 1e-8, "Added to the denominator, 0 or more."),
    Attribute("weight_decay", 0.01, "Weight decay, 0 or more."),
    Attribute(
        "decoupled_weight_decay", 1, "1: weight decay as AdamW's; 0: added to the gradient, as Adam's.", flag=True
    ),
)
"""The attributes of all updates by Adam."""
SAMPLES: Sequence[Mapping[str, Value]] = (
    {},
    {"weight_decay": 0.0},
    {"decoupled_weight_decay": 0},
)
"""Attributes that between them have every way in which weight decays."""

OPERATOR = Operator(
    name="ApplyAdamW",
    stem="apply_adam_w",
    doc=(
        "One update of a parameter and its state by AdamW, or by Adam, as torch.optim's for one tensor. "
        "With g = gradient_scale gradient, t = step + 1 and lr the learning rate: decoupled weight decay multiplies "
        "parameter by 1 - lr weight_decay, the other adds weight_decay parameter to g; then "
        "new_exp_avg = exp_avg + (1 - beta1) (g - exp_avg), new_exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2, and "
        "new_parameter = parameter - lr / (1 - beta1^t) new_exp_avg / (sqrt(new_exp_avg_sq / (1 - beta2^t)) + epsilon)."
        " beta1 and beta2 are rounded to seven decimals in float64, as a float attribute 0.999 is 0.99900001; "
        "what depends on the step, the learning rate and the betas alone is computed in float64."
    ),
    summary="(the update of `torch.optim.AdamW` and `Adam`, in one pass)",
    counterpart="`torch.optim.AdamW`, `torch.optim.Adam`",
    inputs=(
        Input("parameter", "T", "What is updated, of any shape of rank 0 to 8."),
        Input("gradient", "T", "Gradient w.r.t. parameter, of its shape."),
        Input("exp_avg", "T", "Mean of the gradients, of parameter's shape; 0 before the first update."),
        Input("exp_avg_sq", "T", "Mean of their squares, of parameter's shape; 0 before the first update."),
        *SCALARS,
    ),
    outputs=(
        Output("new_parameter", "Updated parameter, of its shape.", in_place="parameter"),
        Output("new_exp_avg", "Updated mean of the gradients, of parameter's shape.", in_place="exp_avg"),
        Output("new_exp_avg_sq", "Updated mean of their squares, of parameter's shape.", in_place="exp_avg_sq"),
    ),
    attributes=ATTRIBUTES,
    constraints={"T": FLOAT_TYPES, "F": ("tensor(float)",), "S": ("tensor(int64)",)},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=(
        *SAMPLES,
        {"beta1": 0.5},
        {"beta1": 0.5, "weight_decay": 0.0},
        {"beta1": 0.5, "decoupled_weight_decay": 0},
    ),
)
