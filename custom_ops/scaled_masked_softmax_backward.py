"""ScaledMaskedSoftmaxBackward: the gradient of softmax(mask(scale * x)) w.r.t. x."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

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

_DIMS = ("B", "H", "S1", "S2")


def _infer(call: Call) -> list[Tensor]:
    triangular = call.attributes["fix_triu_mask"]
    if triangular != 0:
        raise call.error("fix_triu_mask", triangular, "0 (a fixed triangular mask: not supported)")
    grad = call.shape("grad_output", *_DIMS)
    y = call.shape("y", *_DIMS)
    mask = call.shape("mask", *_DIMS)
    dims: list[Dim] = []
    for axis, (g, s, m) in enumerate(zip(grad, y, mask, strict=True)):
        dim = call.same("y", _DIMS[axis], g, s)
        # A mask of size 1 in B or H serves all of them, so only the other sizes tell what the dimension is.
        dims.append(dim if axis < 2 and m == 1 else call.same("mask", _DIMS[axis], dim, m if axis > 1 else _size(m)))
    return [Tensor(OPERATOR.dtype(call), tuple(dims))]


def _size(dim: Dim) -> int | None:
    return dim if isinstance(dim, int) else None


def _choices(call: Call) -> Iterable[str]:
    return []


_MASK_SHAPE = """
    mask_shape = Shape(mask)
    mask_equal = Equal(mask_shape, shape)
    may_be_one = Constant<value_ints=[1, 1, -1, -1]>()
    mask_one = Equal(mask_shape, may_be_one)
    mask_fits = Or(mask_equal, mask_one)
    fits = And(y_fits, mask_fits)
"""


def _body(variant: Variant) -> str:
    masked = "mask" in variant.inputs
    return f"""
        shape = Shape(grad_output)
        y_shape = Shape(y)
        y_fits = Equal(y_shape, shape)
        {_MASK_SHAPE if masked else "fits = Identity(y_fits)"}
        misfits = Not(fits)
        misfit = Cast<to=7>(misfits)
        fault = ReduceMax<keepdims=0>(misfit)
        factor = Constant<value_float: float = @scale>()
        zeroth = Constant<value_ints=[0]>()
        factors = Unsqueeze(factor, zeroth)
        [shapes_differ] checked_factor = Gather(factors, fault)
        grad = Cast<to=$real>(grad_output)
        p = Cast<to=$real>(y)
        weighted = Mul(grad, p)
        last = Constant<value_ints=[-1]>()
        row_sum = ReduceSum<keepdims=1>(weighted, last)
        centred = Sub(grad, row_sum)
        product = Mul(p, centred)
        scaled = Mul(product, checked_factor)
        zero = Constant<value_float=0.0>()
        unmasked = {"Where(mask, zero, scaled)" if masked else "Identity(scaled)"}
        grad_input = CastLike(unmasked, grad_output)
    """


def _torch_outputs(grad_output: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return (grad_output.new_empty(grad_output.shape),)


OPERATOR = Operator(
    name="ScaledMaskedSoftmaxBackward",
    stem="scaled_masked_softmax_backward",
    doc=(
        "Gradient of a scaled and masked softmax over the last dimension: 0 where mask is True, else "
        "scale y (grad_output - r) with r the sum of grad_output y over the last dimension, masked positions included."
    ),
    summary="softmax attention scores, with mask and scale",
    counterpart="`aten::_softmax_backward_data`, `masked_fill`",
    inputs=(
        Input("grad_output", "T", "Gradient of the softmax output, (B, H, S1, S2)."),
        Input("y", "T", "Softmax output, the shape of grad_output."),
        Input("mask", "B", "True where masked: (B or 1, H or 1, S1, S2). Absent: nothing is masked.", optional=True),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. the softmax input before scaling, the shape of grad_output."),),
    attributes=(
        Attribute("scale", 1.0, "Factor that the input was multiplied by."),
        Attribute("fix_triu_mask", 0, "Whether the mask is the fixed triangular one; only 0 is supported.", flag=True),
    ),
    constraints={"T": FLOAT_TYPES, "B": ("tensor(bool)",)},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    spreads_nan=True,
)
