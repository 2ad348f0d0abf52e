"""What products with a weight of few bits have in common."""

from __future__ import annotations

from collections.abc import Iterable

from gradfuse.custom_ops.operator import Attribute, Call, Dim, Input, Variant, show

BITS = (2, 4, 8)
SMALLEST_BLOCK = 16
"""Blocks have a power of two of columns, from this on."""

LAYOUT = "rows are blocks of numbers of few bits, (number - zero point) scale"
WEIGHT = (
    Input("weight", "B", "Numbers of `bits` bits, (out, blocks, bytes of a block)."),
    Input("scales", "T", "The scale of each block, out blocks elements in the order of the weight."),
    Input(
        "zero_points",
        "B",
        "The zero point of each block, packed as the weight, each row from a new byte on. Absent: 2^(bits - 1).",
        optional=True,
    ),
)
BITS_OF_NUMBER = Attribute("bits", 4, "Bits of a number: 2, 4 or 8.")


def check(call: Call, name: str, columns: Dim, what: str = "") -> Dim:
    """Check a weight, and an argument `name` that is, or has, as many columns; return its rows.

    Args:
        call: the call.
        name: the argument.
        columns: its number of columns.
        what: what it is of the argument, as messages say it.

    Raises:
        ArgumentError: they do not fit.
    """
    bits = call.attributes["bits"]
    assert isinstance(bits, int)
    if bits not in BITS:
        raise call.error("bits", bits, "2, 4 or 8")
    weight = call.inputs["weight"].shape
    if weight is None:
        return None
    if len(weight) != 3:
        raise call.error("weight", f"of shape {show(weight)}", "rows, blocks and the bytes of a block")
    rows, blocks, size = weight
    if isinstance(size, int):
        block = size * 8 // bits
        if block < SMALLEST_BLOCK or block & (block - 1):
            raise call.error("weight", f"of {block} columns a block", "a power of two from 16 on")
        if isinstance(blocks, int) and isinstance(columns, int):
            if not (blocks - 1) * block < columns <= blocks * block:
                found = f"of {what} {columns}" if what else columns
                raise call.error(name, found, f"{what} {(blocks - 1) * block + 1} to {blocks * block}".strip())
    if isinstance(rows, int) and isinstance(blocks, int):
        wanted = {"scales": rows * blocks, "zero_points": rows * -(-blocks * bits // 8)}
        for argument, count in wanted.items():
            there = _count(call, argument)
            if there is not None and there != count:
                raise call.error(argument, f"of {there} elements", f"{count}, as weight has blocks")
    return rows


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


def choices(call: Call) -> Iterable[str]:
    """The bits of a number, which decide how a body takes them apart."""
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


def matrix(variant: Variant, awaited: str) -> str:
    """Lines of a body that compute `matrix`, the weight in the type of the computation, of as many `columns`.

    Args:
        variant: the variant of the operator.
        awaited: a tensor, in the type of the computation, that this waits for. onnxruntime would otherwise compute the
            weight when it loads the model, or ahead of all else in a run, and hold those of all layers at once.
    """
    (bits,) = (int(choice.removeprefix("bits")) for choice in variant.choices)
    shifts = sorted({8 - bits, *(8 - bits * (index + 1) for index in range(8 // bits))})
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
        zero = Constant<value_float=0.0>()
        zero_real = Cast<to=$real>(zero)
        sum = ReduceSum<keepdims=0>({awaited})
        is_negative = Less(sum, zero_real)
        all = Constant<value_ints=[-1]>()
        first = Constant<value_ints=[0]>()
        one = Constant<value_ints=[1]>()
        second = Constant<value_ints=[2]>()
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
    """
