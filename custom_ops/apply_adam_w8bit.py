"""ApplyAdamW8bit: the update of a parameter by Adam or AdamW, whose state is kept in 8 bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops import apply_adam_w as adam
from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
    Call,
    Dim,
    Input,
    Operator,
    Output,
    Tensor,
    TorchOp,
    Variant,
    show,
)
from gradfuse.custom_ops.updates import common_shape

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""The elements that share a scale."""
MEAN_ZERO = 128
"""The code of 0 in exp_avg."""
MEAN_UNITS = 127.0**2
"""The largest code of exp_avg beyond that of 0, squared."""
ROOT_UNITS = 256.0**2
"""The largest code of exp_avg_sq plus 1, squared."""
SMALLEST_SCALE = 2.0**-100
"""Scales below it are taken for 0 where codes are made."""

_CODES = ("exp_avg", "exp_avg_sq")
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


def block_count(elements: int) -> int:
    """How many blocks a parameter of some elements has."""
    return -(-elements // BLOCK)


def _infer(call: Call) -> list[Tensor]:
    adam.check_scalars(call)
    shape = common_shape(call, ("parameter", "gradient", *_CODES))
    blocks: Dim = None
    if shape is not None and all(isinstance(dim, int) for dim in shape):
        blocks = block_count(math.prod(dim for dim in shape if isinstance(dim, int)))
    for name in _SCALES:
        (found,) = call.shape(name, "blocks")
        if isinstance(found, int) and isinstance(blocks, int) and found != blocks:
            raise call.error(name, f"of shape {show((found,))}", f"shape {show((blocks,))}, one for {BLOCK} elements")
        blocks = found if blocks is None else blocks
    whole = [Tensor(dtype, shape) for dtype in (OPERATOR.dtype(call), TensorProto.UINT8, TensorProto.UINT8)]
    return [*whole, *[Tensor(TensorProto.FLOAT, (blocks,))] * 2]


def _blocks(name: str, result: str, fill: float) -> str:
    """Text: an input in the type that is computed in, filled up, (blocks, BLOCK)."""
    return f"""
        {name}_flat = Reshape<allowzero=1>({name}, all)
        {name}_real = Cast<to=$real>({name}_flat)
        {name}_fill = Constant<value_float={float(fill)}>()
        {name}_padded = Pad({name}_real, padding, {name}_fill)
        {result} = Reshape<allowzero=1>({name}_padded, by_block)
    """


def _joined(values: str, result: str) -> str:
    """Text: the elements of blocks, in the shape of the parameter."""
    return f"""
        {values}_flat = Reshape<allowzero=1>({values}, all)
        {values}_there = Slice({values}_flat, none, elements)
        {result} = Reshape<allowzero=1>({values}_there, shape)
    """


def _quantized(name: str, sizes: str, units: str, variant: Variant) -> str:
    """Text: the new scale of each block of numbers from 0 on, and the roots of their shares of it, rounded."""
    largest = f"ReduceMax({sizes}, last)" if variant.opset >= 18 else f"ReduceMax<axes=[1]>({sizes})"
    return f"""
        {name}_largest = {largest}
        {name}_scales = Add({name}_largest, nothing)
        {name}_counts = GreaterOrEqual({name}_scales, smallest_scale)
        {name}_factors = Div({units}, {name}_scales)
        {name}_products = Mul({sizes}, {name}_factors)
        {name}_shares = Where({name}_counts, {name}_products, nil)
        {name}_roots = Sqrt({name}_shares)
        {name}_rounded = Round({name}_roots)
        new_{name}_scale = Reshape<allowzero=1>({name}_scales, blocks)
    """


def _body(variant: Variant) -> str:
    return f"""
        {adam.scalars_text()}
        nil = Constant<value_float=0.0>()
        unit = Constant<value_float=1.0>()
        mean_units = Constant<value_float={MEAN_UNITS}>()
        root_units = Constant<value_float={ROOT_UNITS}>()
        code_of_zero = Constant<value_float={float(MEAN_ZERO)}>()
        smallest_scale = Constant<value_float={SMALLEST_SCALE!r}>()
        all = Constant<value_ints=[-1]>()
        none = Constant<value_ints=[0]>()
        last = Constant<value_ints=[1]>()
        size = Constant<value_ints=[{BLOCK}]>()
        shape = Shape(parameter)
        elements_number = Size(exp_avg)
        elements = Reshape(elements_number, last)
        blocks = Shape(exp_avg_scale)
        in_blocks = Mul(blocks, size)
        missing = Sub(in_blocks, elements)
        padding = Concat<axis=0>(none, missing)
        by_block = Concat<axis=0>(blocks, size)
        by_scale = Concat<axis=0>(blocks, last)
        {_blocks("parameter", "wide_parameter", 0)}
        {_blocks("gradient", "wide_gradient", 0)}
        {_blocks("exp_avg", "mean_codes", MEAN_ZERO)}
        {_blocks("exp_avg_sq", "root_codes", -1)}
        {adam.decay_text(variant)}
        mean_scales = Reshape<allowzero=1>(exp_avg_scale, by_scale)
        mean_unit = Div(mean_scales, mean_units)
        signed_code = Sub(mean_codes, code_of_zero)
        unsigned_code = Abs(signed_code)
        signed_square = Mul(signed_code, unsigned_code)
        old_mean = Mul(signed_square, mean_unit)
        root_scales = Reshape<allowzero=1>(exp_avg_sq_scale, by_scale)
        root_unit = Div(root_scales, root_units)
        root_code = Add(root_codes, unit)
        root_square = Mul(root_code, root_code)
        old_root = Mul(root_square, root_unit)
        kept_mean = Mul(old_mean, beta1_real)
        mean_share = Mul(whole_gradient, beta1_rest_real)
        mean = Add(kept_mean, mean_share)
        old_square = Mul(old_root, old_root)
        kept_square = Mul(old_square, beta2_real)
        gradient_share = Mul(whole_gradient, beta2_rest_real)
        new_square = Mul(gradient_share, whole_gradient)
        square = Add(kept_square, new_square)
        root = Sqrt(square)
        root_reciprocal = Div(one, root_correction)
        root_factor = Cast<to=$real>(root_reciprocal)
        corrected_root = Mul(root, root_factor)
        denominator = Add(corrected_root, smallest)
        long_way = Mul(mean, step_size_real)
        way = Div(long_way, denominator)
        moved = Sub(start, way)
        {_joined("moved", "whole_parameter")}
        new_parameter = CastLike(whole_parameter, parameter)
        zero_mean = Mul(mean, nil)
        zero_root = Mul(root, nil)
        zeros = Add(zero_mean, zero_root)
        nothing = ReduceSum(zeros, last)
        mean_size = Abs(mean)
        {_quantized("exp_avg", "mean_size", "mean_units", variant)}
        {_quantized("exp_avg_sq", "root", "root_units", variant)}
        mean_sign = Sign(mean)
        signed_root = Mul(exp_avg_rounded, mean_sign)
        finite_root = Where(exp_avg_counts, signed_root, nil)
        new_mean_codes = Add(finite_root, code_of_zero)
        {_joined("new_mean_codes", "whole_mean_codes")}
        new_exp_avg = Cast<to={TensorProto.UINT8}>(whole_mean_codes)
        largest_code = Max(exp_avg_sq_rounded, unit)
        new_root_codes = Sub(largest_code, unit)
        {_joined("new_root_codes", "whole_root_codes")}
        new_exp_avg_sq = Cast<to={TensorProto.UINT8}>(whole_root_codes)
    """


def _torch_outputs(
    parameter: torch.Tensor,
    gradient: object,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    states = (parameter, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
    return tuple(tensor.new_empty(tensor.shape) for tensor in states)


OPERATOR = Operator(
    name="ApplyAdamW8bit",
    stem="apply_adam_w8bit",
    doc=(
        "One update of a parameter by AdamW, or by Adam, with state of two bytes a parameter. Blocks of 256 elements, "
        "in row-major order, have a scale for each state. A code c of exp_avg stands for "
        "(c - 128) |c - 128| exp_avg_scale / 127^2, one of exp_avg_sq for the square of "
        "(c + 1)^2 exp_avg_sq_scale / 256^2, which is never 0. The update is that of ApplyAdamW, with what the codes "
        "stand for. The new scales are a block's largest |exp_avg| and root of exp_avg_sq, and the new codes are the "
        "nearest (ties to even, in the roots that codes are proportional to). Where a number of a block's new state is "
        "not finite, both scales are NaN, and so is the block after the next update. Every operation is one of float32 "
        "that is rounded by itself: results are the same bits everywhere."
    ),
    summary="(the update of `AdamW`, with state in 8 bits, in one pass)",
    counterpart="`bitsandbytes.optim.AdamW8bit`, with other codes",
    inputs=(
        Input("parameter", "T", "What is updated, of any shape of rank 0 to 8."),
        Input("gradient", "T", "Gradient w.r.t. parameter, of its shape."),
        Input("exp_avg", "B", "Codes of the mean of the gradients, of parameter's shape."),
        Input("exp_avg_sq", "B", "Codes of the mean of their squares, of parameter's shape."),
        Input("exp_avg_scale", "F", "Scale of each block of exp_avg, (blocks); 0 before the first update."),
        Input("exp_avg_sq_scale", "F", "Scale of each block of exp_avg_sq, (blocks); 0 before the first update."),
        *adam.SCALARS,
    ),
    outputs=(
        Output("new_parameter", "Updated parameter, of its shape.", in_place="parameter"),
        Output("new_exp_avg", "Codes of the updated mean of the gradients.", "exp_avg", "B"),
        Output("new_exp_avg_sq", "Codes of the updated mean of their squares.", "exp_avg_sq", "B"),
        Output("new_exp_avg_scale", "Scale of each block of new_exp_avg, (blocks).", "exp_avg_scale", "F"),
        Output("new_exp_avg_sq_scale", "Scale of each block of new_exp_avg_sq, (blocks).", "exp_avg_sq_scale", "F"),
    ),
    attributes=adam.ATTRIBUTES,
    constraints={"T": FLOAT_TYPES, "B": ("tensor(uint8)",), "F": ("tensor(float)",), "S": ("tensor(int64)",)},
    infer=_infer,
    choices=adam.decay_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=adam.SAMPLES,
)
