"""MatmulNBits: a product with a weight of few bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfuse.custom_ops import packed_weight
from gradfuse.custom_ops.operator import FLOAT_TYPES, Call, Input, Operator, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    shape = call.inputs["input"].shape
    if shape is not None and not 1 <= len(shape) <= 8:
        raise call.error("input", f"of rank {len(shape)}", "rank 1 to 8")
    rows = packed_weight.check(call, "input", None if shape is None else shape[-1], "last dimension")
    rows = call.same("bias", "out", rows, *call.shape("bias", "out"))
    return [Tensor(OPERATOR.dtype(call), None if shape is None else (*shape[:-1], rows))]


def _body(variant: Variant) -> str:
    result = "product"
    bias = ""
    if "bias" in variant.inputs:
        result = "moved"
        bias = """
            real_bias = Cast<to=$real>(bias)
            moved = Add(product, real_bias)
        """
    return f"""
        real_input = Cast<to=$real>(input)
        columns = Shape<start=-1>(input)
        {packed_weight.matrix(variant, "real_input")}
        turned = Transpose<perm=[1, 0]>(matrix)
        product = MatMul(real_input, turned)
        {bias}
        output = CastLike({result}, input)
    """


def _torch_outputs(input: torch.Tensor, weight: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return (input.new_empty((*input.shape[:-1], weight.shape[0])),)


OPERATOR = Operator(
    name="MatmulNBits",
    stem="matmul_n_bits",
    doc=(
        "com.microsoft.MatMulNBits with the weight as it is stored: input times the transposed weight, whose "
        f"{packed_weight.LAYOUT}, plus bias. The lowest bits of a byte are its first number; what the last block of a "
        "row has beyond the columns of input does not count. onnxruntime's kernel packs a copy of the weight for each "
        "session; these read the stored one, as MatmulNBitsBackward does, and never hold it in floats as a whole."
    ),
    summary="a product with a weight in 2, 4 or 8 bits",
    counterpart="`aten::linear` with the dequantised weight",
    inputs=(
        Input("input", "T", "What is multiplied, (*, in)."),
        *packed_weight.WEIGHT,
        Input("bias", "T", "What is added, (out). Absent: 0.", optional=True),
    ),
    outputs=(Output("output", "The product, (*, out)."),),
    attributes=(packed_weight.BITS_OF_NUMBER,),
    constraints={"T": FLOAT_TYPES, "B": ("tensor(uint8)",)},
    infer=_infer,
    choices=packed_weight.choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=tuple({"bits": bits} for bits in packed_weight.BITS),
    spreads_nan=True,
)
