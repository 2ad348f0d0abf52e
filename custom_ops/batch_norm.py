"""BatchNorm: batch normalization in training mode (``aten::_native_batch_norm_legit_functional``), and a ReLU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.batch_norm_backward import MAX_RANK, PLANES
from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
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

if TYPE_CHECKING:
    import torch

_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var")


def _infer(call: Call) -> list[Tensor]:
    call.flag("relu")
    momentum, eps = (call.attributes[name] for name in ("momentum", "eps"))
    assert isinstance(momentum, float) and isinstance(eps, float)
    if not 0 <= momentum <= 1:
        raise call.error("momentum", momentum, "0 to 1")
    if not eps >= 0:
        raise call.error("eps", eps, "0 or more")
    whole = call.inputs["input"].shape
    if whole is not None and not 2 <= len(whole) <= MAX_RANK:
        raise call.error("input", f"of rank {len(whole)}", f"rank 2 to {MAX_RANK}: (N, C, ...)")
    channels: Dim = None if whole is None else whole[1]
    for name in _OF_CHANNELS:
        (found,) = call.shape(name, "C")
        channels = call.same(name, "C", channels, found)
    if whole is not None:
        whole = (whole[0], channels, *whole[2:])
    statistics = [(channels,) if name in call.inputs else (0,) for name in ("running_mean", "running_var")]
    shapes = (whole, (channels,), (channels,), *statistics)
    return [Tensor(dtype, shape) for dtype, shape in zip(OPERATOR.types_of_outputs(call), shapes, strict=True)]


def _choices(call: Call) -> Iterable[str]:
    if call.attributes["relu"]:
        yield "relu"
    if OPERATOR.dtype(call, "A") == TensorProto.FLOAT:
        yield "same"


def _updated(name: str, batch: str) -> str:
    return f"""
        old_{name} = Cast<to=$real>({name})
        kept_{name} = Mul(old_{name}, kept)
        batch_{name} = Squeeze({batch}, around_channels)
        added_{name} = Mul(batch_{name}, momentum_real)
        updated_{name} = Add(kept_{name}, added_{name})
        new_{name} = CastLike(updated_{name}, {name})
    """


def _body(variant: Variant) -> str:
    given = variant.inputs
    of_t = next((name for name in _OF_CHANNELS if name in given), "input")
    shifted = """
        bias_real = Cast<to=$real>(bias)
        bias_column = Unsqueeze(bias_real, around_channels)
        normalized = Add(scaled, bias_column)
    """
    weighted = """
        weight_real = Cast<to=$real>(weight)
        weight_column = Unsqueeze(weight_real, around_channels)
        scale = Mul(weight_column, invstd)
    """
    unbiased = """
        one_real = Cast<to=$real>(one_axis)
        others = Sub(real_count, one_real)
        unbiased = Div(square_sum, others)
    """
    text = f"""
        {PLANES}
        sum = ReduceSum<keepdims=1>(x, around_channels)
        mean = Div(sum, real_count)
        distance = Sub(x, mean)
        square = Mul(distance, distance)
        square_sum = ReduceSum<keepdims=1>(square, around_channels)
        variance = Div(square_sum, real_count)
        eps_float = Constant<value_float: float = @eps>()
        eps_real = Cast<to=$real>(eps_float)
        shifted_variance = Add(variance, eps_real)
        deviation = Sqrt(shifted_variance)
        invstd = Reciprocal(deviation)
        {weighted if "weight" in given else "scale = Identity(invstd)"}
        scaled = Mul(distance, scale)
        {shifted if "bias" in given else "normalized = Identity(scaled)"}
        activated = {"Relu" if "relu" in variant.choices else "Identity"}(normalized)
        of_type = {"Identity(activated)" if "same" in variant.choices else "CastLike(activated, input)"}
        output = Reshape<allowzero=1>(of_type, whole_shape)
        mean_vector = Squeeze(mean, around_channels)
        save_mean = CastLike(mean_vector, {of_t})
        invstd_vector = Squeeze(invstd, around_channels)
        save_invstd = CastLike(invstd_vector, {of_t})
        momentum_float = Constant<value_float: float = @momentum>()
        momentum_real = Cast<to=$real>(momentum_float)
        whole_part = Constant<value_float = 1.0>()
        whole_part_real = Cast<to=$real>(whole_part)
        kept = Sub(whole_part_real, momentum_real)
        nothing = ConstantOfShape(zero_axis)
    """
    absent = f"new_{{}} = CastLike(nothing, {of_t})\n"
    text += _updated("running_mean", "mean") if "running_mean" in given else absent.format("running_mean")
    if "running_var" in given:
        return text + unbiased + _updated("running_var", "unbiased")
    return text + absent.format("running_var")


def _torch_outputs(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    channels = input.shape[1:2] if input.dim() > 1 else (0,)
    of_t = next((one for one in (weight, bias, running_mean, running_var) if one is not None), input)
    statistics = ((0,) if one is None else channels for one in (running_mean, running_var))
    vectors = (of_t.new_empty(shape) for shape in (channels, channels, *statistics))
    return (input.new_empty(input.shape), *vectors)


OPERATOR = Operator(
    name="BatchNorm",
    stem="batch_norm",
    doc=(
        "Batch normalization in training mode, over all but the channels, with n elements a channel: save_mean is the "
        "mean of input and save_invstd 1 / sqrt(variance + eps), of the variance that divides by n; output = "
        "weight (input - save_mean) save_invstd + bias, with relu at least 0; the running statistics are updated to "
        "(1 - momentum) old + momentum new, of the variance that divides by n - 1."
    ),
    summary="(batch normalization in training mode itself, and a ReLU)",
    counterpart="`aten::_native_batch_norm_legit_functional`, `relu`",
    inputs=(
        Input("input", "A", "What is normalized, (N, C, ...) of rank 2 to 8. With none of the others T is its type."),
        Input("weight", "T", "Factor of each channel, (C). Absent: all ones.", optional=True),
        Input("bias", "T", "What is added to each channel, (C). Absent: all zeros.", optional=True),
        Input("running_mean", "T", "Running mean, (C).", optional=True),
        Input("running_var", "T", "Running variance, (C).", optional=True),
    ),
    outputs=(
        Output("output", "The result, of the shape of input.", type="A"),
        Output("save_mean", "Mean of the batch, (C)."),
        Output("save_invstd", "1 / sqrt(variance of the batch + eps), (C)."),
        Output("new_running_mean", "Updated running mean, (C); (0) where there is none."),
        Output("new_running_var", "Updated running variance, (C); (0) where there is none."),
    ),
    attributes=(
        Attribute("momentum", 0.1, "Weight of the batch in the running statistics, 0 to 1."),
        Attribute("eps", 1e-5, "Added to the variance, 0 or more."),
        Attribute("relu", 0, "1: the result is at least 0.", flag=True),
    ),
    constraints={"T": FLOAT_TYPES, "A": FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
