"""MatmulNBitsBackward: the gradient of a product with a weight of few bits, with respect to what it multiplies."""

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

BITS = (2, 4, 8)
SMALLEST_BLOCK = 16
"""Blocks have a power of two of columns, from this on."""


def _count(call: Call, name: str) -> int | None:
    """How many elements an input has, where its shape is known."""
    shape = call.inputs[name].shape if name in call.inputs else None
    if shape is None:
        return None
    count = 1
    for dim in shape:
        if not isinstance(dim, int):
            return None
        count *= dim
    return count


def _infer(call: Call) -> list[Tensor]:
    columns, bits = call.attributes["in_features"], call.attributes["bits"]
    assert isinstance(columns, int) and isinstance(bits, int)
    if bits not in BITS:
        raise call.error("bits", bits, "2, 4 or 8")
    grad, weight = call.inputs["grad_output"].shape, call.inputs["weight"].shape
    if grad is not None and not 1 <= len(grad) <= 8:
        raise call.error("grad_output", f"of rank {len(grad)}", "rank 1 to 8")
    if weight is not None:
        if len(weight) != 3:
            raise call.error("weight", f"of shape {show(weight)}", "rows, blocks and the bytes of a block")
        rows, blocks, size = weight
        if grad is not None:
            call.same("grad_output", "last dimension", rows, grad[-1])
        if isinstance(size, int):
            block = size * 8 // bits
            if block < SMALLEST_BLOCK or block & (block - 1):
                raise call.error("weight", f"of {block} columns a block", "a power of two from 16 on")
            if isinstance(blocks, int) and not (blocks - 1) * block < columns <= blocks * block:
                raise call.error("in_features", columns, f"{(blocks - 1) * block + 1} to {blocks * block}")
        if isinstance(rows, int) and isinstance(blocks, int):
            wanted = {"scales": rows * blocks, "zero_points": rows * -(-blocks * bits // 8)}
            for name, count in wanted.items():
                found = _count(call, name)
                if found is not None and found != count:
                    raise call.error(name, f"of {found} elements", f"{count}, as weight has blocks")
    if columns < 1:
        raise call.error("in_features", columns, "1 or more")
    return [Tensor(OPERATOR.dtype(call), None if grad is None else (*grad[:-1], columns))]


def _choices(call: Call) -> Iterable[str]:
    yield f"bits{call.attributes['bits']}"


def _unpacked(source: str, result: str, bits: int) -> str:
    """Take rows of bytes apart; the lowest bits of a byte are its first number."""
    lines, parts = [], []
    for index in range(8 // bits):
        part, above = f"{result}_{index}", 8 - bits * (index + 1)
        kept = source
        if above:
            kept = f"{part}_kept"
            lines.append(f'{kept} = BitShift<direction="LEFT">({source}, late_{above})')
        lines.append(f'{part}_low = BitShift<direction="RIGHT">({kept}, late_{8 - bits})')
        lines.append(f"{part} = Unsqueeze({part}_low, second)")
        parts.append(part)
    lines.append(f"{result}_parts = Concat<axis=2>({', '.join(parts)})")
    lines.append(f"{result} = Flatten<axis=1>({result}_parts)")
    return "\n".join(lines)


def _body(variant: Variant) -> str:
    (bits,) = (int(choice.removeprefix("bits")) for choice in variant.choices)
    shifts = sorted({8 - bits, *(8 - bits * (index + 1) for index in range(8 // bits))})
    # The numbers of bits are there when the gradient is, and so is the weight in floats: onnxruntime would otherwise
    # compute it when it loads the model, or ahead of all else in a run, and hold the weights of all layers at once.
    late = "\n".join(
        f"shift_{count} = Constant<value = uint8 {{{count}}}>()\n"
        f"late_{count} = Where(is_negative, shift_{count}, shift_{count})"
        for count in shifts
    )
    zeros = f"""
        middle = Constant<value = float {{{2.0 ** (bits - 1)}}}>()
        zeros = Cast<to=$real>(middle)
    """
    if "zero_points" in variant.inputs:
        zeros = f"""
        packed_shape = Concat<axis=0>(rows, all)
        packed_zeros = Reshape(zero_points, packed_shape)
        {_unpacked("packed_zeros", "wide_zeros", bits)}
        used_zeros = Slice(wide_zeros, first, blocks, one)
        real_zeros = Cast<to=$real>(used_zeros)
        zeros = Reshape(real_zeros, by_block_column)
        """
    return f"""
        grad = Cast<to=$real>(grad_output)
        zero = Constant<value_float=0.0>()
        zero_real = Cast<to=$real>(zero)
        sum = ReduceSum<keepdims=0>(grad)
        is_negative = Less(sum, zero_real)
        all = Constant<value_ints=[-1]>()
        first = Constant<value_ints=[0]>()
        one = Constant<value_ints=[1]>()
        second = Constant<value_ints=[2]>()
        number = Constant<value_int: int = @in_features>()
        columns = Reshape(number, one)
        rows = Shape<start=0, end=1>(weight)
        blocks = Shape<start=1, end=2>(weight)
        {late}
        bytes = Flatten<axis=1>(weight)
        {_unpacked("bytes", "numbers", bits)}
        all_columns = Shape<start=1, end=2>(numbers)
        size = Div(all_columns, blocks)
        number_of_blocks = Mul(rows, blocks)
        by_block_shape = Concat<axis=0>(number_of_blocks, size)
        by_block = Reshape(numbers, by_block_shape)
        real_numbers = Cast<to=$real>(by_block)
        by_block_column = Concat<axis=0>(number_of_blocks, one)
        real_scales = Cast<to=$real>(scales)
        factors = Reshape(real_scales, by_block_column)
        {zeros}
        differences = Sub(real_numbers, zeros)
        dequantized = Mul(differences, factors)
        whole_shape = Concat<axis=0>(rows, all_columns)
        whole = Reshape(dequantized, whole_shape)
        matrix = Slice(whole, first, columns, one)
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
        "rows are blocks of numbers of few bits, (number - zero point) scale. The lowest bits of a byte are its first "
        "number. Kernels never hold the weight in floats as a whole."
    ),
    summary="a product with a weight in 2, 4 or 8 bits, with respect to what is multiplied",
    counterpart="`aten::mm` with the dequantised weight",
    inputs=(
        Input("grad_output", "T", "Gradient of the product, (*, out)."),
        Input("weight", "B", "Numbers of `bits` bits, (out, blocks, bytes of a block)."),
        Input("scales", "T", "The scale of each block, out blocks elements in the order of the weight."),
        Input(
            "zero_points",
            "B",
            "The zero point of each block, packed as the weight, each row from a new byte on. Absent: 2^(bits - 1).",
            optional=True,
        ),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. what was multiplied, (*, in_features)."),),
    attributes=(
        Attribute("in_features", 0, "Columns of the weight: what the last block has beyond them does not count."),
        Attribute("bits", 4, "Bits of a number: 2, 4 or 8."),
    ),
    constraints={"T": FLOAT_TYPES, "B": ("tensor(uint8)",)},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=({"in_features": 16, "bits": 2}, {"in_features": 16, "bits": 4}, {"in_features": 16, "bits": 8}),
    spreads_nan=True,
)
