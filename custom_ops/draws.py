"""Random numbers that a seed determines, in standard operators: the same in every runtime, and after a resumption.

Element i of the n-th draw of a step is a hash of (seed, n, i). The seed is a buffer of the step, and each step adds 1
to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

WORD = 2**32
SEED_FACTOR, LAYER_FACTOR = 0x9E3779B1, 0x85EBCA77
# Rounds of multiplication and xor-shift mix all bits; the high bits of the last product decide.
FACTORS = (0x9E3779B1, 0x21F0AAAD, 0x735A2D97)
SHIFTS = (15, 13)

UNIFORM_BITS = 24
"""A number of this many bits is exact in float32 and float64 alike: a step draws the same numbers in both."""


def threshold(p: float) -> int:
    """Return the least of 31 random bits with which a dropout of share `p` keeps an element."""
    return round(p * 2**31)


def _signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


# Number n of a draw is `layer`, and as many more as `before` says where that is not known ahead of time.
# In 32 bits, as int32 where onnxruntime multiplies (products wrap around) and as uint32 where it shifts.
_WORDS_TEXT = f"""
    seed_range = Constant<value_int={2**31}>()
    seed_factor = Constant<value_int={SEED_FACTOR}>()
    layer_factor = Constant<value_int={LAYER_FACTOR}>()
    word_range = Constant<value_int={WORD}>()
    half_range = Constant<value_int={WORD // 2}>()
    first_number = Constant<value_int: int = @layer>()
    layer_number = Add(first_number, before)
    seed_part = Mod(seed, seed_range)
    seed_product = Mul(seed_part, seed_factor)
    layer_product = Mul(layer_number, layer_factor)
    products = Add(seed_product, layer_product)
    shifted_products = Add(products, half_range)
    shifted_key = Mod(shifted_products, word_range)
    signed_key = Sub(shifted_key, half_range)
    key = Cast<to=6>(signed_key)
    size = Size(input)
    count = Cast<to=6>(size)
    first = Constant<value=int32 {{0}}>()
    next = Constant<value=int32 {{1}}>()
    place = Range(first, count, next)
    factor_0 = Constant<value=int32 {{{_signed(FACTORS[0])}}}>()
    factor_1 = Constant<value=int32 {{{_signed(FACTORS[1])}}}>()
    factor_2 = Constant<value=int32 {{{_signed(FACTORS[2])}}}>()
    shift_0 = Constant<value=uint32 {{{SHIFTS[0]}}}>()
    shift_1 = Constant<value=uint32 {{{SHIFTS[1]}}}>()
    product_0 = Mul(place, factor_0)
    bits_0 = Cast<to=12>(product_0)
    high_0 = BitShift<direction="RIGHT">(bits_0, shift_0)
    mixed_0 = BitwiseXor(bits_0, high_0)
    word_0 = Cast<to=6>(mixed_0)
    keyed = Add(word_0, key)
    product_1 = Mul(keyed, factor_1)
    bits_1 = Cast<to=12>(product_1)
    high_1 = BitShift<direction="RIGHT">(bits_1, shift_1)
    mixed_1 = BitwiseXor(bits_1, high_1)
    word_1 = Cast<to=6>(mixed_1)
    product_2 = Mul(word_1, factor_2)
    bits_2 = Cast<to=12>(product_2)
    shape = Shape(input)
"""

KEPT = f"""
    {_WORDS_TEXT}
    shift_2 = Constant<value=uint32 {{1}}>()
    high_2 = BitShift<direction="RIGHT">(bits_2, shift_2)
    drawn = Cast<to=6>(high_2)
    limit = Constant<value_int: int = @threshold>()
    single = Constant<value_int=1>()
    below_limit = Sub(limit, single)
    highest_dropped = Cast<to=6>(below_limit)
    kept_line = Greater(drawn, highest_dropped)
    kept = Reshape<allowzero=1>(kept_line, shape)
"""
"""Nodes that compute `kept`, of the shape of `input`, of `seed` and `before`: which elements a dropout keeps."""

MASK_AFTER = f"""
DropoutMaskAfter <layer: int, threshold: int> (seed, before, input) => (kept) {{
    {KEPT}
}}
"""

UNIFORM_AFTER = f"""
UniformNumbersAfter <layer: int> (seed, before, input) => (numbers) {{
    {_WORDS_TEXT}
    shift_2 = Constant<value=uint32 {{{32 - UNIFORM_BITS}}}>()
    high_2 = BitShift<direction="RIGHT">(bits_2, shift_2)
    drawn = Cast<to=1>(high_2)
    spacing = Constant<value=float {{{2.0**-UNIFORM_BITS!r}}}>()
    numbers_line = Mul(drawn, spacing)
    numbers = Reshape<allowzero=1>(numbers_line, shape)
}}
"""


def _alone(text: str) -> str:
    """Return the same function for draws whose number is `layer` itself."""
    text = text.replace("After <", " <").replace("(seed, before, input)", "(seed, input)")
    text = text.replace("first_number", "layer_number", 1)
    return text.replace("    layer_number = Add(first_number, before)\n", "")


MASK, UNIFORM = _alone(MASK_AFTER), _alone(UNIFORM_AFTER)


def hash_kept(like: str, inputs: Sequence[str], opset: int) -> str:
    """Nodes that compute `hash_kept`, of the shape of `like`: which elements the dropout of an operator keeps.

    The operator has the attributes draw and dropout_threshold and the input seed, and drawn where `inputs` have it. The
    nodes read `zero` and `one`, which are [0] and [1]; all that they compute has names that begin with `hash_`.
    """
    kept = KEPT.replace("@layer", "@draw").replace("@threshold", "@dropout_threshold")
    names = "|".join(re.findall(r"^ *(\w+) = ", kept, re.MULTILINE))
    kept = re.sub(rf"\b({names}|input|before)\b", r"hash_\1", kept)
    if opset < _BITWISE_OPSET:
        for index, shift in enumerate(SHIFTS):
            by_operator = f"hash_mixed_{index} = BitwiseXor(hash_bits_{index}, hash_high_{index})"
            assert by_operator in kept
            kept = kept.replace(by_operator, _mixed(index, shift))
    return f"""
        hash_input = Identity({like})
        hash_before = Identity({"drawn" if "drawn" in inputs else "zero"})
        {kept}
    """


_BITWISE_OPSET = 18


def _mixed(index: int, shift: int) -> str:
    """The exclusive or of 32-bit words and themselves shifted to the right, bit by bit, for older opsets."""
    places = ", ".join(map(str, range(32)))
    powers = ", ".join(str(2**place) for place in range(32))
    return f"""
        places_{index} = Constant<value=uint32[32] {{{places}}}>()
        column_{index} = Unsqueeze(hash_bits_{index}, one)
        places_down_{index} = BitShift<direction="RIGHT">(column_{index}, places_{index})
        two_{index} = Constant<value=uint32 {{2}}>()
        lowest_{index} = Mod(places_down_{index}, two_{index})
        is_set_{index} = Cast<to=9>(lowest_{index})
        from_{index} = Constant<value_ints=[{shift}]>()
        to_{index} = Constant<value_ints=[32]>()
        high_part_{index} = Slice(is_set_{index}, from_{index}, to_{index}, one)
        padding_shape_{index} = Constant<value_ints=[{shift}]>()
        line_shape_{index} = Shape(hash_bits_{index})
        padding_whole_{index} = Concat<axis=0>(line_shape_{index}, padding_shape_{index})
        zeros_{index} = ConstantOfShape(padding_whole_{index})
        padding_{index} = Cast<to=9>(zeros_{index})
        moved_{index} = Concat<axis=1>(high_part_{index}, padding_{index})
        differs_{index} = Xor(is_set_{index}, moved_{index})
        wide_bits_{index} = Cast<to=7>(differs_{index})
        powers_{index} = Constant<value=int64[32] {{{powers}}}>()
        weighted_bits_{index} = Mul(wide_bits_{index}, powers_{index})
        words_{index} = ReduceSum<keepdims=0>(weighted_bits_{index}, one)
        hash_mixed_{index} = Cast<to=12>(words_{index})
    """
