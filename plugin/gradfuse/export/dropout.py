"""Dropout with the same masks in an exported step and in PyTorch: a seed determines them.

Element i of the n-th dropout of a step is kept if a hash of (seed, n, i) is at least p of its range. The seed is a
buffer of the step, and each step adds 1 to it. ONNX's random operators would give other numbers in every runtime, and
training could not be resumed. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import _torch_private as private
from gradfuse.export.translation import function_caller

_WORD = 2**32
_SEED_FACTOR, _LAYER_FACTOR = 0x9E3779B1, 0x85EBCA77
# Rounds of multiplication and xor-shift mix all bits; the high bits of the last product decide.
_FACTORS = (0x9E3779B1, 0x21F0AAAD, 0x735A2D97)
_SHIFTS = (15, 13)

DROPOUTS = (torch.ops.aten.native_dropout.default, torch.ops.aten.bernoulli.p)
"""The operators of a traced program that draw such masks."""

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
# Decompositions are made without a seed, which they cannot know; `connect` adds it.
_library.define("dropout_mask(Tensor input, float p, Tensor? seed=None, int layer=0) -> Tensor")
torch.library.register_fake(
    "gradfuse::dropout_mask", lambda input, *_: torch.empty_like(input, dtype=torch.bool), lib=_library
)


class SeededDropout(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draw the masks of every dropout that runs under it on the CPU as an exported step does.

    Args:
        seed: int64, a scalar; None is 0.

    Attributes:
        count: how many dropouts there were.
    """

    def __init__(self, seed: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = 0 if seed is None else int(seed)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # All of PyTorch's dropouts draw their noise by this operator when they are not traced.
        if func is torch.ops.aten.bernoulli_.float:
            # PyTorch omits an argument that is the default.
            noise, share = args if len(args) > 1 else (*args, 0.5)
            noise.copy_(mask(self.seed, self.count, noise, 1 - share))
            self.count += 1
            return noise
        return func(*args, **(kwargs or {}))


def mask(seed: int, layer: int, input: Tensor, p: float) -> Tensor:
    """Return which elements of `input` the `layer`-th dropout of a step keeps: booleans in its shape."""
    key = ((seed % 2**31) * _SEED_FACTOR + layer * _LAYER_FACTOR) % _WORD
    word = torch.arange(input.numel(), device=input.device) * _FACTORS[0] % _WORD
    word = (word ^ (word >> _SHIFTS[0])) + key
    word = word * _FACTORS[1] % _WORD
    word = (word ^ (word >> _SHIFTS[1])) * _FACTORS[2] % _WORD
    return ((word >> 1) >= _threshold(p)).view(input.shape)


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        torch.ops.aten.native_dropout.default: native_dropout,
        torch.ops.aten.bernoulli.p: bernoulli,
    }


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """aten::native_dropout with the mask of `gradfuse::dropout_mask`, for `run_decompositions`."""
    if not train:
        return input, torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        # Nothing is kept, and PyTorch draws no number either.
        return input * 0.0, torch.zeros_like(input, dtype=torch.bool)
    kept: Tensor = torch.ops.gradfuse.dropout_mask(input, p)
    return kept * input * (1.0 / (1.0 - p)), kept


def bernoulli(self: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """aten::bernoulli.p, with which PyTorch drops in place and by channels: 1 where a mask of 1 - p keeps."""
    kept: Tensor = torch.ops.gradfuse.dropout_mask(self, 1 - p)
    return kept.to(self.dtype)


def _threshold(p: float) -> int:
    return round(p * 2**31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


# In 32 bits, as int32 where onnxruntime multiplies (products wrap around) and as uint32 where it shifts.
MASK = f"""
DropoutMask <layer: int, threshold: int> (seed, input) => (kept) {{
    seed_range = Constant<value_int={2**31}>()
    seed_factor = Constant<value_int={_SEED_FACTOR}>()
    layer_factor = Constant<value_int={_LAYER_FACTOR}>()
    word_range = Constant<value_int={_WORD}>()
    half_range = Constant<value_int={_WORD // 2}>()
    layer_number = Constant<value_int: int = @layer>()
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
    factor_0 = Constant<value=int32 {{{_signed(_FACTORS[0])}}}>()
    factor_1 = Constant<value=int32 {{{_signed(_FACTORS[1])}}}>()
    factor_2 = Constant<value=int32 {{{_signed(_FACTORS[2])}}}>()
    shift_0 = Constant<value=uint32 {{{_SHIFTS[0]}}}>()
    shift_1 = Constant<value=uint32 {{{_SHIFTS[1]}}}>()
    shift_2 = Constant<value=uint32 {{1}}>()
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
    high_2 = BitShift<direction="RIGHT">(bits_2, shift_2)
    drawn = Cast<to=7>(high_2)
    limit = Constant<value_int: int = @threshold>()
    kept_line = GreaterOrEqual(drawn, limit)
    shape = Shape(input)
    kept = Reshape<allowzero=1>(kept_line, shape)
}}
"""


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the function that emits the node of `gradfuse::dropout_mask`, for `custom_translation_table`."""
    call = function_caller(MASK)

    def dropout_mask(input: Any, p: float, seed: Any, layer: int = 0) -> Any:
        return call(seed, input, layer=layer, threshold=_threshold(p))

    return {torch.ops.gradfuse.dropout_mask.default: dropout_mask}


def masks(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the masks of a program, in the order of the forward pass."""
    return [node for node in graph.nodes if node.target is torch.ops.gradfuse.dropout_mask.default]


def connect(program: torch.export.ExportedProgram, seed: int) -> None:
    """Give every mask of a program its number, and the seed: the `seed`-th tensor that the program is called with.

    Constants of the traced code are placeholders as well, ahead of those.
    """
    name = program.graph_signature.user_inputs[seed]
    placeholder = next(node for node in program.graph.nodes if node.op == "placeholder" and node.name == name)
    for layer, node in enumerate(masks(program.graph)):
        node.args = (*node.args[:2], placeholder, layer)
