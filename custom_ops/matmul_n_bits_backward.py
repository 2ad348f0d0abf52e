"""MatmulNBitsBackward: the gradient of a product with a weight of few bits, with respect to what it multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfuse.custom_ops import packed_weight
from gradfuse.custom_ops.operator import FLOAT_TYPES, Attribute, Call, Input, Operator, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    columns = call.attributes["in_features"]
    assert isinstance(columns, int)
    grad = call.inputs["grad_output"].shape
    if grad is not None and not 1 <= len(grad) <= 8:
        raise call.error("grad_output", f"of rank {len(grad)}", "rank 1 to 8")
    rows = packed_weight.check(call, "in_features", columns)
    if grad is not None:
        call.same("grad_output", "last dimension", rows, grad[-1])
    if columns < 1:
        raise call.error("in_features", columns, "1 or more")
    return [Tensor(OPERATOR.dtype(call), None if grad is None else (*grad[:-1], columns))]


def _body(variant: Variant) -> str:
    return f"""
        grad = Cast<to=$real>(grad_output)
        number = Constant<value_int: int = @in_features>()
        length = Constant<value_ints=[1]>()
        columns = Reshape(number, length)
        {packed_weight.matrix(variant, "grad")}
        product = MatMul(grad, matrix)
        grad_input = CastLike(product, grad_output)
    """


def _torch_outputs(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: object,
    in_features: int,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    return (grad_output.new_empty((*grad_output.shape[:-1], max(in_features, 0))),)


OPERATOR = Operator(
    name="MatmulNBitsBackward",
    stem="matmul_n_bits_backward",
    doc=(
        "Gradient of com.microsoft.MatMulNBits with respect to its first input: grad_output times the weight, whose "
        f"{packed_weight.LAYOUT}. The lowest bits of a byte are its first number. Kernels never hold the weight in "
        "floats as a whole."
    ),
    summary="a product with a weight in 2, 4 or 8 bits, with respect to what is multiplied",
    counterpart="`aten::mm` with the dequantised weight",
    inputs=(Input("grad_output", "T", "Gradient of the product, (*, out)."), *packed_weight.WEIGHT),
    outputs=(Output("grad_input", "Gradient w.r.t. what was multiplied, (*, in_features)."),),
    attributes=(
        Attribute("in_features", 0, "Columns of the weight: what the last block has beyond them does not count."),
        packed_weight.BITS_OF_NUMBER,
    ),
    constraints={"T": FLOAT_TYPES, "B": ("tensor(uint8)",)},
    infer=_infer,
    choices=packed_weight.choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=tuple({"in_features": 16, "bits": bits} for bits in packed_weight.BITS),
    spreads_nan=True,
)
